"""The messages of a recorded call, and the link that copies them as they arrive.

While a call is recorded, ``RecordingLink`` stands in the place of the rank's link. It
notes on a ``MessageTape`` each collective and transfer that the rank asks for, and
copies what it receives when that is handed over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fsfunc.comm.attribution import current_label, source_line
from fsfunc.comm.backends.link import Handle, Link
from fsfunc.comm.descriptions import checksums
from fsfunc.comm.groups import RankGroup
from fsfunc.comm.ledgers import is_silent
from fsfunc.comm.mesh import Mesh
from fsfunc.testing.recordings.tree_writer import copy_to_cpu

SENDS = "send"  # the one operation that receives nothing


@dataclass(eq=False)
class RecordedMessage:
    """A collective, or a transfer, that a rank asked for.

    Args:
        op, axis: the operation, and the axis of its ranks, as in ``Link.start``.
        options: the other arguments of ``Link.start``; the other rank's index for a
            transfer.
        subject: what the tensor is: the leaf or buffer (``what`` of ``Link.start``).
        shape, dtype: those of the tensor that the rank sends, or will receive.
        unit, phase, line: where in the program it was called.
        sent: a checksum of what the rank sent.
        received: what the rank received, once that was handed over.
    """

    op: str
    axis: tuple[str, ...]
    options: Any
    subject: str
    shape: tuple[int, ...]
    dtype: str
    unit: str = ""
    phase: str = ""
    line: str = ""
    sent: int = 0
    received: Tensor | None = None

    @staticmethod
    def describe(
        op: str, x: Tensor, group: RankGroup, subject: str, options: Mapping[str, Any]
    ) -> RecordedMessage:
        """Describes the message that the user's program asks for now."""
        sends_content = op != "receive"  # its tensor is memory not yet written
        return RecordedMessage(
            op,
            tuple(group.axis),
            _tuples_to_lists(sorted(options.items())),
            subject,
            tuple(x.shape),
            str(x.dtype).removeprefix("torch."),
            *current_label(),
            source_line(),
            checksums([x])[0] % 2**64 if sends_content else 0,
        )

    @property
    def asked(self) -> tuple[Any, ...]:
        """The properties that are equal in any run of the same program."""
        return self.op, self.axis, self.options, self.subject, self.shape, self.dtype

    def as_json(self) -> list[Any]:
        """Returns the message as a JSON row, without what was received."""
        where = self.unit, self.phase, self.line
        return [*self.asked, *where, self.sent]

    @staticmethod
    def read(row: Sequence[Any]) -> RecordedMessage:
        op, axis, options, subject, shape, dtype, *others = row
        return RecordedMessage(
            op, tuple(axis), options, subject, tuple(shape), dtype, *others
        )

    def __str__(self) -> str:
        source = " ".join(x for x in (self.subject or self.unit, self.phase) if x)
        options_text = "".join(f" {k}={v}" for k, v in self.options)
        axes = ", ".join(self.axis)
        where = "" if self.line == "?" else f" at {self.line}"
        kind = f"{self.dtype}{list(self.shape)}"
        of_source = f" of {source}" if source else ""
        return f'{self.op} over "{axes}"{options_text}, {kind}{of_source}{where}'


def _tuples_to_lists(x: Any) -> Any:
    """Replaces tuples by lists, as a trip through JSON does."""
    return [_tuples_to_lists(item) for item in x] if isinstance(x, tuple | list) else x


class MessageTape:
    """The messages of a call, in the order in which the rank asked for them.

    Args:
        max_bytes: the most bytes to save; of a call that receives more, none are.
    """

    max_bytes: int
    nbytes: int
    has_ended: bool

    def __init__(self, max_bytes: int):
        self.max_bytes, self.nbytes = max_bytes, 0
        self.messages: list[RecordedMessage] = []
        self.has_ended = False  # later messages, of a backward say, are not the call's

    def save(self, message: RecordedMessage, received: Tensor) -> None:
        """Saves what a message has brought."""
        # In a copy: the runtime uses its buffers again.
        self.nbytes += received.numel() * received.element_size()
        if not self.overflows and not self.has_ended:
            message.received = copy_to_cpu(received)
        elif self.overflows:
            for earlier in self.messages:
                earlier.received = None

    def finish(self) -> list[RecordedMessage]:
        """Ends the tape; returns its messages."""
        # A graph that outlives the call may refer to the tape: it must not keep the
        # messages alive.
        self.has_ended = True
        messages, self.messages = self.messages, []
        return messages

    @property
    def overflows(self) -> bool:
        return self.nbytes > self.max_bytes


class RecordingLink:
    """A link whose messages are noted on a tape.

    Silent messages, which no ledger counts, are not: by these ranks only compare
    descriptions, and a rank that is replayed alone does not compare.
    """

    def __init__(self, link: Link, tape: MessageTape):
        self._link, self._tape = link, tape
        self._groups: dict[int, tuple[RankGroup, RankGroup]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def for_mesh(self, mesh: Mesh) -> Any:
        link = self._link.for_mesh(mesh)
        return self if link is self._link else RecordingLink(link, self._tape)

    def start(
        self, op: str, x: Tensor, where: RankGroup, *, name: str = "", **options: Any
    ) -> Handle:
        recorded_options = {
            k: v
            for k, v in options.items()
            if k not in ("out", "any_order", "read_only")
        }
        message = self._note_message(op, x, where, name, recorded_options)
        work = self._link.start(op, x, self._inner_group(where), name=name, **options)
        return work if message is None else _RecordedHandle(work, self._tape, message)

    def send(self, x: Tensor, where: RankGroup, to: int, name: str = "") -> Handle:
        self._note_message(SENDS, x, where, name, {"to": to})
        return self._link.send(x, self._inner_group(where), to, name)

    def receive(
        self, like: Tensor, where: RankGroup, source: int, name: str = ""
    ) -> Handle:
        message = self._note_message("receive", like, where, name, {"source": source})
        work = self._link.receive(like, self._inner_group(where), source, name)
        return work if message is None else _RecordedHandle(work, self._tape, message)

    def _note_message(
        self,
        op: str,
        x: Tensor,
        group: RankGroup,
        subject: str,
        options: Mapping[str, Any],
    ) -> RecordedMessage | None:
        if is_silent() or self._tape.has_ended:
            return None
        message = RecordedMessage.describe(op, x, group, subject, options)
        self._tape.messages.append(message)
        return message

    def _inner_group(self, where: RankGroup) -> RankGroup:
        """Returns the group with the link beneath, which expects its own groups."""
        _, inner_group = self._groups.get(id(where), (None, None))
        if inner_group is None:
            inner_group = replace(where, link=self._link)
            self._groups[id(where)] = (
                where,
                inner_group,
            )  # alive, as long as its id is a key
        return inner_group


class _RecordedHandle(Handle):
    """A message under way; the tape saves it when it is handed over."""

    def __init__(self, work: Handle, tape: MessageTape, message: RecordedMessage):
        self.work, self.tape = work, tape
        self.message: RecordedMessage | None = message

    def wait(self) -> Tensor:
        y = self.work.wait()
        if self.message is not None:
            self.tape.save(self.message, y)
            self.message = None
        return y

    def done(self) -> bool:
        return self.work.done()
