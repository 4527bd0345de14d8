"""The interface of a backend, and the description of a collective."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fsfunc.comm.attribution import current_label, source_line


class Handle:
    """A collective or a transfer under way; ``wait`` returns this rank's result."""

    def wait(self) -> Tensor:
        raise NotImplementedError

    def done(self) -> bool:
        """True if it is known to be over; does not wait."""
        raise NotImplementedError


class Done(Handle):
    """A collective that is already complete."""

    def __init__(self, result: Tensor):
        self.result = result

    def wait(self) -> Tensor:
        return self.result

    def done(self) -> bool:
        return True


class Link:
    """One rank's connection to the others of its mesh."""

    rank: int = 0
    timeout: float = 1800.0  # seconds that a rank waits for others
    moves: bool = True  # False if nothing is sent, as in a plan
    device: str = "cpu"  # of tensors that a caller makes only to send them
    notes: dict[Any, Any] | None = None  # a dict that ranks of one process share
    board: Any = None  # a `Board` for messages beside the collectives, if there is one
    level: int | None = None  # the functorch level that is the mesh, on a vmap mesh

    def start(
        self,
        op: str,
        x: Tensor,
        where: Any,
        *,
        out: Tensor | None = None,
        what: str = "",
        **how: Any,
    ) -> Handle:
        """Issues ``op`` on contiguous ``x`` along dim 0, over two ranks or more.

        The work's result is ``out`` where that is given: contiguous, of its shape.
        With ``any_order`` in ``how``, other ranks may wait for it in another order;
        with ``spent``, nobody writes ``x`` or the result, not even after the wait.
        ``what`` is the name of a buffer: the same one on every rank.
        """
        raise NotImplementedError

    def send(self, x: Tensor, where: Any, to: int, what: str = "") -> Handle:
        """Sends contiguous ``x`` to the rank at index ``to``; as `RankGroup.send`."""
        raise NotImplementedError

    def receive(self, like: Tensor, where: Any, source: int, what: str = "") -> Handle:
        """Receives into ``like`` what the rank at index ``source`` sends."""
        raise NotImplementedError

    def on(self, mesh: Any) -> Any:
        """This rank's link on another mesh of the same ranks."""
        return self

    def close(self, what: Any, error: BaseException) -> None:
        """Closes the link: all later collectives raise.

        After ``error``, ranks may be at different places, and their next collectives
        would be matched with others.

        Args:
            what: the collective in which it was raised.
        """

    def trim(self) -> None:
        """Lets go of memory that is kept for the next collectives."""

    def apply(self, function: Callable[..., Any], x: Tensor, *rest: Any) -> Any:
        """Calls a collective's Function on ``x``."""
        return function(x, *rest)

    def exchange(self, how: Any, x: Tensor, where: Any) -> Tensor:
        """All ranks' results of a linear map, stacked along dim 0 like the inputs."""
        raise NotImplementedError

    def axis_index(self, where: Any) -> Any:
        """This rank's index along the axis of ``where``."""
        return where.index


Signature = tuple[Any, ...]  # op, how, axis, shape, dtype, whose values


class CollectiveMismatch(RuntimeError):
    """Ranks of one group called different collectives."""


class PeerFailed(RuntimeError):
    """Another rank raised, ended, stopped or is late, and this one waits in vain.

    ``rank`` is the one that the message names as the cause, where one is known.
    """

    rank: int | None = None


def checks() -> bool:
    """True under ``FSFUNC_CHECK=1``: every collective is compared between ranks."""
    return os.environ.get("FSFUNC_CHECK", "0") not in ("", "0")


def signature(
    op: str, how: Mapping[str, Any], axis: tuple[str, ...], x: Tensor, what: str
) -> Signature:
    """The properties of a collective that must be equal on every rank."""
    shape = x.shape[1:] if how.get("sizes") else x.shape  # each has its own rows
    return op, tuple(how.items()), axis, shape, x.dtype, what


@functools.lru_cache(maxsize=1 << 16)
def digest(said: Signature) -> bytes:
    """Eight bytes for a signature, the same ones in every process."""
    op, how, axis, shape, dtype, what = said
    text = repr((op, how, axis, tuple(shape), str(dtype), what))
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


@dataclass(frozen=True)
class CollectiveCall:
    """A collective or a transfer that one rank called, for error messages."""

    said: Signature
    unit: str = ""
    phase: str = ""
    where: str = ""

    @classmethod
    def now(cls, said: Signature) -> CollectiveCall:
        """The call that is being made, with its label and source line."""
        return cls(said, *current_label(), source_line())

    def __str__(self) -> str:
        op, how, axes, shape, dtype, what = self.said
        name = what or self.unit
        phase = f" ({self.phase})" if self.phase else ""
        unit = (f" of {name}" if name else "") + phase
        kind = str(dtype).removeprefix("torch.")
        axis, how = ", ".join(axes), "".join(f" {k}={v}" for k, v in how)
        at = f" at {self.where}" if self.where else ""
        return f'{op} over "{axis}"{how}, {kind}{list(shape)}{unit}{at}'


def table(title: str, said: Mapping[int, Any]) -> str:
    """A line for each rank, below a title."""
    return f"{title}:\n" + "\n".join(f"  rank {r} {call}" for r, call in said.items())
