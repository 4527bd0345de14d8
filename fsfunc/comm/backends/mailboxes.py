"""What ranks tell one another beside their collectives, through torch's store.

A rank's mailbox is a queue in the store that the processes met in: the launcher's under
torchrun, rank 0's otherwise. A thread of each process waits at its own, and nothing is
sent while nobody has something to say. What comes is parsed as a stranger's: short, of
one form, and from a rank that there is.
"""

from __future__ import annotations

import itertools
import os
import re
import threading
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

__all__ = ["GONE", "SILENT", "Board", "Mailbox", "Word", "Words", "parse"]

GONE = "has ended without a word: its process was killed, or has returned"
SILENT = "does not answer: its process is stopped, or out of reach"
_UNKNOWN = "does not answer: its process was killed or is stopped, or has made no mesh"
_LIMIT = 2.0  # seconds for an answer
_SOON = 0.5  # for that of a rank whose connections tell that it has gone, or stopped
_ENDED = 10**15  # numbers what a rank ended by: its last answer to any question
_LONGEST = 4000  # bytes of a text
_FORM = re.compile(rb"([a-z]{1,9}) (\d{1,7}) (\d{1,15})\n(.{0,%d})" % _LONGEST, re.S)
_FOREVER = timedelta(days=3650)  # of a wait that times out torch tells stderr


class Word(NamedTuple):
    """What a rank says, under a number: of a question, or of a save."""

    kind: str
    rank: int
    number: int
    text: str = ""

    def pack(self) -> bytes:
        text = self.text.encode(errors="replace")[:_LONGEST]
        return b"%s %d %d\n%s" % (self.kind.encode(), self.rank, self.number, text)


def parse(data: bytes, size: int) -> Word | None:
    """The word of one of ``size`` ranks; None where it is none.

    >>> parse(b"is 1 7\\nruns", 2), parse(b"[" * 60_000, 2), parse(b"is 2 7\\n", 2)
    (Word(kind='is', rank=1, number=7, text='runs'), None, None)
    """
    found = _FORM.fullmatch(data)
    if found is None or int(found[2]) >= size:
        return None
    text = found[4].decode(errors="replace")
    shown = "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
    return Word(found[1].decode(), int(found[2]), int(found[3]), shown)


class Board:
    """The latest word of each kind of each rank; threads wait for more."""

    def __init__(self) -> None:
        self.said: dict[tuple[str, int], tuple[int, str]] = {}
        self.changed = threading.Condition()

    def put(self, word: Word) -> None:
        with self.changed:
            before, _ = self.said.get(word[:2], (0, ""))
            if word.number >= before:
                self.said[word[:2]] = word.number, word.text
                self.changed.notify_all()

    def read(self, kind: str, ranks: Collection[int], number: int) -> dict[int, str]:
        """What ranks have said of ``number``, or of a later one, by rank."""
        with self.changed:
            found = {r: self.said.get((kind, r), (-1, "")) for r in ranks}
        return {r: text for r, (n, text) in found.items() if n >= number}

    def wait(self, seconds: float, ready: Callable[[], Any]) -> None:
        """Returns once the board is such that ``ready()``, or ``seconds`` later."""
        with self.changed:
            self.changed.wait_for(ready, seconds)


class Words:
    """One rank's words with the others of its process, who share a board."""

    def __init__(self, rank: int, board: Board):
        self.rank, self.board = rank, board
        self.saves = itertools.count(1)  # all ranks make the same saves

    def tell(self, ranks: Collection[int], word: Word) -> None:
        """Leaves a word with each of ``ranks``; waits for nobody."""
        self.board.put(word)

    def missing(self, ranks: Collection[int]) -> dict[int, str]:
        """Why nothing more is to be heard of some of ``ranks``."""
        return {}


class Mailbox(Words):
    """Those of a process with others, and the thread that reads what they say.

    Args:
        store: that of the process group.
        answer: what to say to a question of that kind.

    ``lost`` says why nothing is heard any more; "" while all is well. ``seen`` has what
    became of some ranks, as far as their connections tell.

    Raises:
        NotImplementedError: a store without queues: a file, or one of before libuv.
    """

    def __init__(self, store: Any, rank: int, size: int, answer: Callable[[str], str]):
        super().__init__(rank, Board())
        self.store = store  # its server may be in this process: it must stay
        self.size, self.answer, self.lost = size, answer, ""
        self.others = {*range(size)} - {rank}
        self.seen: dict[int, str] = {}
        self.questions = itertools.count(1)
        self.name, self.keeper = _place_of(store)
        # A connection each, held from now on: later there may be no file descriptor.
        self.inbox, self.outbox = (
            dist.PrefixStore("fsfunc", store.clone()) for _ in range(2)
        )
        self.lock, self.over = threading.Lock(), False
        self.inbox.queue_len(str(rank))
        self.inbox.set_timeout(_FOREVER)
        self.thread = threading.Thread(target=self._listen, daemon=True, name="fsfunc")
        self.thread.start()

    def tell(self, ranks: Collection[int], word: Word) -> None:
        if self.lost:
            return
        try:
            with self.lock:
                for rank in ranks:
                    self.outbox.queue_push(str(rank), word.pack())
        except RuntimeError as error:
            self._lose(str(error))

    def ask(
        self, ranks: Collection[int], kind: str, text: str = ""
    ) -> tuple[dict[int, str], dict[int, str]]:
        """(What ranks answer in time, what is to be said of the others), by rank."""
        # So is this rank: where it does not hear itself, the store is what is silent.
        asked, number = {*ranks, self.rank}, next(self.questions)
        heard = lambda: self.board.read("is", asked, number)  # noqa: E731
        self.tell(asked - heard().keys(), Word(kind, self.rank, number, text))
        left = lambda: set() if self.lost else asked - heard().keys()  # noqa: E731
        self.board.wait(_SOON, lambda: not left())
        self.board.wait(_LIMIT, lambda: left() <= self.seen.keys())
        last, found = self.last_words(asked), heard()
        lost = self.lost or ("" if self.rank in found else f"{self.name} is silent")
        rest = {}
        for r in asked - (found.keys() - self.board.read("is", asked, _ENDED)):
            unheard = f"cannot be asked: {lost}" if lost else _UNKNOWN
            if lost and r == self.keeper:
                unheard = GONE if self.lost else SILENT
            ended = f"{last[r] or 'has returned'}, and ended" if r in last else ""
            rest[r] = ended or self.seen.get(r, unheard)
        return {r: found[r] for r in asked - rest.keys()}, rest

    def missing(self, ranks: Collection[int]) -> dict[int, str]:
        _, rest = self.ask(ranks, "where")
        return {r: why for r, why in rest.items() if r in ranks}

    def last_words(self, ranks: Collection[int]) -> dict[int, str]:
        """By rank, what those said that end, or have: "" where all was well."""
        found = self.board.read("ends", ranks, 0)
        return found | self.board.read("is", ranks, _ENDED)

    def ends(self, why: str) -> None:
        """Says what this rank ends by; it answers as long as it lives."""
        self.tell(self.others, Word("ends", self.rank, 0, why))

    def close(self, why: str) -> None:
        """Says what this rank ends by, "" if well, and ends the thread.

        All that know it tell rank 0 where it keeps the store, and it tells them.
        """
        if self.keeper == self.rank:
            self.ask(self.others, "ended", why)
        else:
            told = self.others if why else self.others & {self.keeper}
            self.tell(told, Word("ended", self.rank, 0, why))
        self.over = True
        self.tell([self.rank], Word("over", self.rank, 0))
        self.thread.join(_LIMIT)

    # The thread

    def _listen(self) -> None:
        while not self.over:
            try:
                data = self.inbox.queue_pop(str(self.rank))
            except RuntimeError as error:
                self._lose(str(error))
                return
            if (word := parse(data, self.size)) is not None and not self.over:
                self._hear(word)

    def _hear(self, word: Word) -> None:
        kind, rank, number, text = word
        if kind in ("is", "save", "ends"):
            self.board.put(word)
            return
        if number:
            said = Word("is", self.rank, number, self.answer(kind))
            if rank == self.rank:
                self.board.put(said)
            else:
                self.tell([rank], said)
        if kind == "ended":
            self.board.put(Word("is", rank, _ENDED, text))
            if rank == self.keeper:
                self._lose("its last word")
                self.over = True

    def _lose(self, why: str) -> None:
        with self.board.changed:
            self.lost = self.lost or f"{self.name} has gone ({why.splitlines()[0]})"
            self.board.changed.notify_all()


def _place_of(store: Any) -> tuple[str, int | None]:
    """The store in words, and the rank that keeps it, if one does."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    where = f" at {store.host}:{store.port}" if isinstance(store, dist.TCPStore) else ""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return f"the launcher's store{where}", None
    return f"the store{where} that rank 0 keeps", 0
