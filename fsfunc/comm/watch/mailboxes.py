"""Messages between ranks apart from collectives, through queues in torch's store.

The store is that of the process group: the launcher's under torchrun, rank 0's
otherwise. A rank's mailbox is a queue there, at which a thread of its process waits.
Messages are not trusted: they are short, of one form, and from a rank that exists.
"""

from __future__ import annotations

import itertools
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

GONE = "has ended without a word: its process was killed, or has returned"
SILENT = "does not answer: its process is stopped, or out of reach"
_UNKNOWN = "does not answer: its process was killed or is stopped, or has made no mesh"
_LIMIT = 2.0  # seconds for an answer
_SOON = 0.5  # for that of a rank whose connections are closed
_ENDED = 10**15  # the number of a rank's last message: it answers every question
_LONGEST = 4000  # bytes of a text
_FORM = re.compile(rb"([a-z]{1,9}) (\d{1,7}) (\d{1,15})\n(.{0,%d})" % _LONGEST, re.S)
_FOREVER = timedelta(days=3650)  # torch prints to stderr if a wait times out


def is_final(state: str) -> bool:
    """False of a rank that is silent: it may be busy, and answer later."""
    return not state.startswith("does not answer")


class Message(NamedTuple):
    """Something that a rank says; the number is that of a question, or of a save."""

    kind: str
    rank: int
    number: int
    text: str = ""

    def pack(self) -> bytes:
        text = self.text.encode(errors="replace")[:_LONGEST]
        return b"%s %d %d\n%s" % (self.kind.encode(), self.rank, self.number, text)


def parse(data: bytes, size: int) -> Message | None:
    """The message of one of ``size`` ranks; None where it is none.

    >>> parse(b"is 1 7\\nruns", 2), parse(b"[" * 60_000, 2), parse(b"is 2 7\\n", 2)
    (Message(kind='is', rank=1, number=7, text='runs'), None, None)
    """
    found = _FORM.fullmatch(data)
    if found is None or int(found[2]) >= size:
        return None
    text = found[4].decode(errors="replace")
    shown = "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
    return Message(found[1].decode(), int(found[2]), int(found[3]), shown)


class Board:
    """The latest message of each kind from each rank; threads can wait for more.

    Ranks of one process share one: it has no more to do than to keep what they say.
    """

    def __init__(self) -> None:
        self.said: dict[tuple[str, int], tuple[int, str]] = {}
        self.changed = threading.Condition()
        self.saves = Counter[int]()  # by rank; all make the same ones

    def put(self, message: Message) -> None:
        with self.changed:
            before, _ = self.said.get(message[:2], (0, ""))
            if message.number >= before:
                self.said[message[:2]] = message.number, message.text
                self.changed.notify_all()

    def read(self, kind: str, ranks: Collection[int], number: int) -> dict[int, str]:
        """The texts of ranks for ``number``, or for a later one, by rank."""
        with self.changed:
            found = {r: self.said.get((kind, r), (-1, "")) for r in ranks}
        return {r: text for r, (n, text) in found.items() if n >= number}

    def wait(self, seconds: float, ready: Callable[[], Any]) -> None:
        """Returns once the board is such that ``ready()``, or ``seconds`` later."""
        with self.changed:
            self.changed.wait_for(ready, seconds)

    def tell(self, ranks: Collection[int], message: Message) -> None:
        """Leaves a message for each of ``ranks``, without waiting."""
        self.put(message)

    def missing(self, ranks: Collection[int]) -> dict[int, str]:
        """Those of ``ranks`` that are silent, or have ended; in words."""
        return {}


class Mailbox(Board):
    """The board of one process, and the thread that receives messages.

    Args:
        store: that of the process group.
        answer: returns the answer to a question, by its kind.

    ``lost`` is the reason why nothing is received any more, or "". ``seen`` has the
    states of ranks, as far as this rank's connections show them.

    Raises:
        NotImplementedError: a store without queues: a file, or one of before libuv.
    """

    def __init__(self, store: Any, rank: int, size: int, answer: Callable[[str], str]):
        super().__init__()
        self.store = store  # its server may be in this process: it must stay
        self.rank, self.size, self.answer, self.lost = rank, size, answer, ""
        self.others = {*range(size)} - {rank}
        self.seen: dict[int, str] = {}
        self.questions = itertools.count(1)
        self.name, self.keeper = _place_of(store)
        # A connection each, held from now on: later there may be no file descriptor.
        self.inbox, self.outbox = (
            dist.PrefixStore("fsfunc", store.clone()) for _ in range(2)
        )
        self.lock, self.over = threading.Lock(), False
        # Raises where there are no queues. (queue_len would ask with the GIL held: no
        # thread of this process could go on where the store is stopped.)
        self.inbox.queue_push(str(rank), b"no message")
        self.inbox.set_timeout(_FOREVER)
        self.thread = threading.Thread(target=self._listen, daemon=True, name="fsfunc")
        self.thread.start()

    def tell(self, ranks: Collection[int], message: Message) -> None:
        if self.lost:
            return
        try:
            with self.lock:
                for rank in ranks:
                    self.outbox.queue_push(str(rank), message.pack())
        except RuntimeError as error:
            self._lose(str(error))

    def ask(
        self, ranks: Collection[int], kind: str, text: str = ""
    ) -> tuple[dict[int, str], dict[int, str]]:
        """(What ranks answer in time, what is to be said of the others), by rank."""
        # So is this rank: where it does not hear itself, the store is what is silent.
        asked, number = {*ranks, self.rank}, next(self.questions)
        heard = lambda: self.read("is", asked, number)  # noqa: E731
        left = lambda: set() if self.lost else asked - heard().keys()  # noqa: E731
        self.tell(left(), Message(kind, self.rank, number, text))
        self.wait(_SOON, lambda: not left())
        self.wait(_LIMIT, lambda: left() <= self.seen.keys())
        last, found = self.last_words(asked), heard()
        lost = self.lost or ("" if self.rank in found else f"{self.name} is silent")
        rest = {}
        for r in asked - (found.keys() - self.read("is", asked, _ENDED)):
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
        return self.read("ends", ranks, 0) | self.read("is", ranks, _ENDED)

    def ends(self, why: str) -> None:
        """Says what this rank ends by; it answers as long as it lives."""
        self.tell(self.others, Message("ends", self.rank, 0, why))

    def close(self, why: str) -> None:
        """Sends the error that this rank ended by, or "", and ends the thread.

        If rank 0 has the store, all send it to rank 0, which sends it to all.
        """
        if self.keeper == self.rank:
            self.ask(self.others, "ended", why)
        else:
            told = self.others if why else self.others & {self.keeper}
            self.tell(told, Message("ended", self.rank, 0, why))
        self.over = True
        self.tell([self.rank], Message("over", self.rank, 0))
        self.thread.join(_LIMIT)

    # The thread

    def _listen(self) -> None:
        while not self.over:
            try:
                data = self.inbox.queue_pop(str(self.rank))
            except RuntimeError as error:
                self._lose(str(error))
                return
            if (message := parse(data, self.size)) is not None and not self.over:
                self._receive(message)

    def _receive(self, message: Message) -> None:
        kind, rank, number, text = message
        if kind in ("is", "save", "ends"):
            self.put(message)
            return
        if number:
            answer = Message("is", self.rank, number, self.answer(kind))
            if rank == self.rank:
                self.put(answer)
            else:
                self.tell([rank], answer)
        if kind == "ended":
            self.put(Message("is", rank, _ENDED, text))
            if rank == self.keeper:
                self._lose("its last word")
                self.over = True

    def _lose(self, why: str) -> None:
        with self.changed:
            self.lost = self.lost or f"{self.name} has gone ({why.splitlines()[0]})"
            self.changed.notify_all()


def _place_of(store: Any) -> tuple[str, int | None]:
    """The store in words, and the rank that keeps it, if one does."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    where = f" at {store.host}:{store.port}" if isinstance(store, dist.TCPStore) else ""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return f"the launcher's store{where}", None
    return f"the store{where} that rank 0 keeps", 0
