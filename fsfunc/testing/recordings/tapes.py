"""What a rank receives in a call: the messages, and the link that keeps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fsfunc.comm.attribution import current_label, source_line
from fsfunc.comm.backends.link import Handle
from fsfunc.comm.descriptions import checksums
from fsfunc.comm.groups import RankGroup
from fsfunc.comm.ledgers import is_silent
from fsfunc.testing.recordings.tree_writer import kept_tensor

SENDS = "send"  # the one kind of message that brings nothing


@dataclass(eq=False)
class KeptMessage:
    """A collective, or a transfer, that a rank asked for.

    Args:
        op, axis, how, what: as in ``Link.start``; of a transfer ``how`` has the other
            rank's index.
        shape, dtype: of the tensor that the rank gave, or is to be given.
        unit, phase, line: where it was called.
        sent: a checksum of what the rank gave.
        received: what it got, once that was handed over.
    """

    op: str
    axis: tuple[str, ...]
    how: Any
    what: str
    shape: tuple[int, ...]
    dtype: str
    unit: str = ""
    phase: str = ""
    line: str = ""
    sent: int = 0
    received: Tensor | None = None

    @staticmethod
    def of(
        op: str, x: Tensor, where: Any, what: str, how: Mapping[str, Any]
    ) -> KeptMessage:
        """Describes the message that the user's program asks for now."""
        gives = op != "receive"  # into memory that means nothing yet
        return KeptMessage(
            op,
            tuple(where.axis),
            _plain(sorted(how.items())),
            what,
            tuple(x.shape),
            str(x.dtype).removeprefix("torch."),
            *current_label(),
            source_line(),
            checksums([x])[0] % 2**64 if gives else 0,
        )

    @property
    def asked(self) -> tuple[Any, ...]:
        """The properties that are those of any run of the same program."""
        return self.op, self.axis, self.how, self.what, self.shape, self.dtype

    def as_json(self) -> list[Any]:
        """Returns itself as JSON, without what was received."""
        where = self.unit, self.phase, self.line
        return [*self.asked, *where, self.sent]

    @staticmethod
    def read(said: Sequence[Any]) -> KeptMessage:
        op, axis, how, what, shape, dtype, *rest = said
        return KeptMessage(op, tuple(axis), how, what, tuple(shape), dtype, *rest)

    def __str__(self) -> str:
        who = " ".join(x for x in (self.what or self.unit, self.phase) if x)
        how = "".join(f" {k}={v}" for k, v in self.how)
        axes, at = ", ".join(self.axis), "" if self.line == "?" else f" at {self.line}"
        kind = f"{self.dtype}{list(self.shape)}"
        return f'{self.op} over "{axes}"{how}, {kind}{who and f" of {who}"}{at}'


def _plain(x: Any) -> Any:
    """Tuples as lists, as JSON has them."""
    return [_plain(item) for item in x] if isinstance(x, tuple | list) else x


class MessageTape:
    """The messages of a call, in the order in which the rank asked for them.

    Args:
        most: the bytes to keep; of a call that receives more nothing is.
    """

    def __init__(self, most: int):
        self.most, self.nbytes = most, 0
        self.messages: list[KeptMessage] = []
        self.over = False  # what is asked for later is no part of the call

    def keep(self, message: KeptMessage, y: Tensor) -> None:
        """Keeps what is handed over, in a copy: buffers are used again."""
        self.nbytes += y.numel() * y.element_size()
        if not self.overflows and not self.over:
            message.received = kept_tensor(y)
        elif self.overflows:
            for one in self.messages:
                one.received = None

    def taken(self) -> list[KeptMessage]:
        """Ends the tape, which a graph may hold on, and returns its messages."""
        self.over = True
        messages, self.messages = self.messages, []
        return messages

    @property
    def overflows(self) -> bool:
        return self.nbytes > self.most


class RecordingLink:
    """A link whose messages are kept on a tape.

    But for those that no ledger has: what ranks compare is no part of a step, and is
    not compared again by a rank alone.
    """

    def __init__(self, link: Any, tape: MessageTape):
        self._link, self._tape = link, tape
        self._groups: dict[int, tuple[RankGroup, RankGroup]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def for_mesh(self, mesh: Any) -> Any:
        link = self._link.for_mesh(mesh)
        return self if link is self._link else RecordingLink(link, self._tape)

    def start(
        self, op: str, x: Tensor, where: Any, *, name: str = "", **how: Any
    ) -> Handle:
        about = {
            k: v for k, v in how.items() if k not in ("out", "any_order", "read_only")
        }
        message = self._asks(op, x, where, name, about)
        work = self._link.start(op, x, self._below(where), name=name, **how)
        return work if message is None else _KeptHandle(work, self._tape, message)

    def send(self, x: Tensor, where: Any, to: int, name: str = "") -> Handle:
        self._asks(SENDS, x, where, name, {"to": to})
        return self._link.send(x, self._below(where), to, name)

    def receive(self, like: Tensor, where: Any, source: int, name: str = "") -> Handle:
        message = self._asks("receive", like, where, name, {"source": source})
        work = self._link.receive(like, self._below(where), source, name)
        return work if message is None else _KeptHandle(work, self._tape, message)

    def _asks(
        self, op: str, x: Tensor, where: Any, what: str, how: Mapping[str, Any]
    ) -> KeptMessage | None:
        if is_silent() or self._tape.over:
            return None
        message = KeptMessage.of(op, x, where, what, how)
        self._tape.messages.append(message)
        return message

    def _below(self, where: RankGroup) -> RankGroup:
        """The group as the link beneath knows it."""
        _, below = self._groups.get(id(where), (None, None))
        if below is None:
            below = replace(where, link=self._link)
            self._groups[id(where)] = where, below  # alive, as long as its id is a key
        return below


class _KeptHandle(Handle):
    """A message under way, of which the tape gets a copy when it is handed over."""

    def __init__(self, work: Handle, tape: MessageTape, message: KeptMessage):
        self.work, self.tape = work, tape
        self.message: KeptMessage | None = message

    def wait(self) -> Tensor:
        y = self.work.wait()
        if self.message is not None:
            self.tape.keep(self.message, y)
            self.message = None
        return y

    def done(self) -> bool:
        return self.work.done()
