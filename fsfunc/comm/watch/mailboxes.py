"""Messages of text between ranks, apart from collectives: queues in torch's store.

The watchdog asks other ranks by them where they are, and a checkpoint's save in the
background waits for the others' parts. The store is that of the process group: the
launcher's under torchrun, rank 0's otherwise. A rank's mailbox is a queue there, at
which a thread of its process waits. Messages are not trusted: they are short, of one
form, and from a rank that exists.
"""

from __future__ import annotations

import itertools
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

GONE = "has ended without a word: its process was killed, or has returned"
SILENT = "does not answer: its process is stopped, or out of reach"
_UNKNOWN = "does not answer: its process was killed or is stopped, or has made no mesh"
_LIMIT = 2.0  # seconds for an answer
_SOON = 0.5  # seconds for that of a rank whose connections are closed
_ENDED = 10**15  # the number of a rank's last message: it answers every question
_LONGEST = 4000  # bytes of a text
# kind, rank, number, text
_FORM = re.compile(rb"([a-z]{1,9}) (\d{1,7}) (\d{1,15})\n(.{0,%d})" % _LONGEST, re.S)
_FOREVER = timedelta(days=3650)  # torch prints to stderr if a wait times out


def is_final(state: str) -> bool:
    """Returns whether a state can change no more: a silent rank may only be busy."""
    return not state.startswith("does not answer")


class Message(NamedTuple):
    """A message of a rank; the number is that of a question, or of a save.

    Kinds: "where" asks for a rank's state, and "is" answers; "ends" tells the error
    that the rank's program was left by, and "ended" that the process ends; "save" that
    its part of a checkpoint is written; "over" ends the rank's own thread.
    """

    kind: str
    rank: int
    number: int
    text: str = ""

    def pack(self) -> bytes:
        text = self.text.encode(errors="replace")[:_LONGEST]
        return b"%s %d %d\n%s" % (self.kind.encode(), self.rank, self.number, text)


def parse(data: bytes, size: int) -> Message | None:
    """Parses a message of one of ``size`` ranks; returns None if it is none.

    >>> parse(b"is 1 7\\nruns", 2), parse(b"[" * 60_000, 2), parse(b"is 2 7\\n", 2)
    (Message(kind='is', rank=1, number=7, text='runs'), None, None)
    """
    match = _FORM.fullmatch(data)
    if match is None or int(match[2]) >= size:
        return None
    text = match[4].decode(errors="replace")
    # The text is printed: no control characters, which a terminal would obey.
    printable = "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
    return Message(match[1].decode(), int(match[2]), int(match[3]), printable)


class Board:
    """The latest message of each kind from each rank; threads can wait for more.

    Ranks of one process share one, on which all of them write; between processes each
    has a `Mailbox`.
    """

    def __init__(self) -> None:
        # By kind and rank: the number and the text.
        self.latest: dict[tuple[str, int], tuple[int, str]] = {}
        self.changed = threading.Condition()
        self.saves = Counter[int]()  # by rank; all make the same ones

    def put(self, message: Message) -> None:
        """Stores a message, unless a later one of its kind and rank is there."""
        with self.changed:
            latest_number, _ = self.latest.get(message[:2], (0, ""))
            # Of two with one number the later counts: "ends" always has the number 0.
            if message.number >= latest_number:
                self.latest[message[:2]] = message.number, message.text
                self.changed.notify_all()

    def read(self, kind: str, ranks: Collection[int], number: int) -> dict[int, str]:
        """Returns the texts of ranks for ``number``, or for a later one, by rank."""
        with self.changed:
            by_rank = {r: self.latest.get((kind, r), (-1, "")) for r in ranks}
        return {r: text for r, (n, text) in by_rank.items() if n >= number}

    def wait(self, seconds: float, ready: Callable[[], object]) -> None:
        """Returns once a message makes ``ready()`` true, or ``seconds`` later."""
        with self.changed:
            self.changed.wait_for(ready, seconds)

    def send(self, ranks: Collection[int], message: Message) -> None:
        """Leaves a message for each of ``ranks``, without waiting."""
        self.put(message)

    def missing(self, ranks: Collection[int]) -> dict[int, str]:
        """Returns the states of those of ``ranks`` that are silent, or have ended."""
        return {}


class Mailbox(Board):
    """The board of one process, and the thread that receives messages.

    Args:
        store: that of the process group.
        answer: returns the answer to a question, by its kind.

    ``lost`` is the reason why nothing is received any more, or "". ``known_states`` has
    the states of ranks, as far as this rank's connections show them.

    Raises:
        NotImplementedError: a store without queues: a file, or one of before libuv.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, answer: Callable[[str], str]
    ):
        super().__init__()
        self.store = store  # its server may be in this process, and ends with it
        self.rank, self.size, self.answer, self.lost = rank, size, answer, ""
        self.others = {*range(size)} - {rank}
        self.known_states: dict[int, str] = {}
        self.question_numbers = itertools.count(1)
        self.name, self.keeper = _describe_store(store)
        # A connection each, opened now: later there may be no file descriptor.
        self.inbox, self.outbox = (
            dist.PrefixStore("fsfunc", store.clone())  # type: ignore[attr-defined]
            for _ in range(2)
        )
        self.lock, self.over = threading.Lock(), False
        # Raises where there are no queues. (queue_len would ask with the GIL held: no
        # thread of this process could go on where the store is stopped.)
        self.inbox.queue_push(str(rank), b"no message")
        self.inbox.set_timeout(_FOREVER)
        self.thread = threading.Thread(target=self._listen, daemon=True, name="fsfunc")
        self.thread.start()

    def send(self, ranks: Collection[int], message: Message) -> None:
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
        """Asks ranks a question, and waits for their answers for a short time.

        Returns:
            by rank, the answers; and the states of the ranks that did not answer.
        """
        # This rank is asked, too: if its own answer does not come, the store is silent.
        asked, number = {*ranks, self.rank}, next(self.question_numbers)
        get_answers = lambda: self.read("is", asked, number)  # noqa: E731
        get_waiting = lambda: set() if self.lost else asked - get_answers().keys()  # noqa: E731
        self.send(get_waiting(), Message(kind, self.rank, number, text))
        self.wait(_SOON, lambda: not get_waiting())
        # Ranks whose connections are closed are not waited for any longer.
        self.wait(_LIMIT, lambda: get_waiting() <= self.known_states.keys())
        errors, answers = self.last_words(asked), get_answers()
        lost = self.lost or ("" if self.rank in answers else f"{self.name} is silent")
        states = {}
        # `answers` also has the last messages of ranks, whose number is above those of
        # questions: such a rank has not answered, but ended.
        for r in asked - (answers.keys() - self.read("is", asked, _ENDED)):
            unheard = f"cannot be asked: {lost}" if lost else _UNKNOWN
            # The store is in that rank's process: it has gone, or is silent, with it.
            if lost and r == self.keeper:
                unheard = GONE if self.lost else SILENT
            ended = f"{errors[r] or 'has returned'}, and ended" if r in errors else ""
            states[r] = ended or self.known_states.get(r, unheard)
        return {r: answers[r] for r in asked - states.keys()}, states

    def missing(self, ranks: Collection[int]) -> dict[int, str]:
        _, states = self.ask(ranks, "where")
        return {r: state for r, state in states.items() if r in ranks}

    def last_words(self, ranks: Collection[int]) -> dict[int, str]:
        """Returns the errors of ranks that end, or have ended; "" if all was well."""
        return self.read("ends", ranks, 0) | self.read("is", ranks, _ENDED)

    def ends(self, why: str) -> None:
        """Tells the others the error that this rank ends by; it still answers."""
        self.send(self.others, Message("ends", self.rank, 0, why))

    def close(self, why: str) -> None:
        """Sends the error that this rank ended by, or "", and ends the thread."""
        # Rank 0, if it keeps the store, waits for answers, as the store ends with it.
        # Other ranks tell every rank of an error. That they end well they tell only the
        # rank that keeps the store, if one does.
        if self.keeper == self.rank:
            self.ask(self.others, "ended", why)
        else:
            recipients = self.others if why else self.others & {self.keeper}
            self.send(recipients, Message("ended", self.rank, 0, why))
        self.over = True
        self.send([self.rank], Message("over", self.rank, 0))
        self.thread.join(_LIMIT)

    # The thread

    def _listen(self) -> None:
        while not self.over:
            try:
                data = self.inbox.queue_pop(str(self.rank))
            except RuntimeError as error:  # the store has gone
                self._lose(str(error))
                return
            # `over` may be set since: `close` sends a message to wake this thread.
            if (message := parse(data, self.size)) is not None and not self.over:
                self._receive(message)

    def _receive(self, message: Message) -> None:
        kind, rank, number, text = message
        if kind in ("is", "save", "ends"):
            self.put(message)
            return
        # A question. This rank's own is answered here: that it came through the store
        # shows that the store is not silent.
        if number:
            answer = Message("is", self.rank, number, self.answer(kind))
            if rank == self.rank:
                self.put(answer)
            else:
                self.send([rank], answer)
        if kind == "ended":
            self.put(Message("is", rank, _ENDED, text))
            if rank == self.keeper:  # the store ends with its process
                self._lose("its last word")
                self.over = True

    def _lose(self, why: str) -> None:
        with self.changed:
            self.lost = self.lost or f"{self.name} has gone ({why.splitlines()[0]})"
            self.changed.notify_all()  # `ask` waits for answers that cannot come now


def _describe_store(store: dist.Store) -> tuple[str, int | None]:
    """Returns the store in words, and the rank whose process has it, if one does."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    address = (
        f" at {store.host}:{store.port}" if isinstance(store, dist.TCPStore) else ""
    )
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return f"the launcher's store{address}", None
    return f"the store{address} that rank 0 keeps", 0
