"""The interface of a backend: a rank's ``Link`` to the others, and its ``Handle``.

A backend is a subclass of :class:`Link`: ``start`` issues a collective, ``send`` and
``receive`` a transfer between two ranks, and each returns a :class:`Handle` at once,
whose ``wait`` returns this rank's result. `groups.RankGroup` calls them, after it has
checked the tensor and noted its bytes. Above it nobody knows which backend runs.

A :class:`CollectiveCall` is the description of a collective for error messages. Its
``signature`` is what must be equal on every rank.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from fsfunc.comm.attribution import current_label, source_line


class Handle:
    """A collective or a transfer under way; ``wait`` returns this rank's result."""

    def wait(self) -> Tensor:
        raise NotImplementedError

    def done(self) -> bool:
        """Returns whether it is known to be over, without waiting."""
        raise NotImplementedError


class Done(Handle):
    """A collective that is already complete."""

    def __init__(self, result: Tensor):
        self.result = result

    def wait(self) -> Tensor:
        return self.result

    def done(self) -> bool:
        return True


class GroupOfRanks(Protocol):
    """A `groups.RankGroup`, as the files that it imports see it."""

    @property
    def axis(self) -> tuple[str, ...]: ...
    @property
    def name(self) -> str: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...
    @functools.cached_property
    def size(self) -> int: ...
    @property
    def index(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def compared(self) -> bool: ...
    @property
    def names(self) -> Mapping[str, tuple[str, ...]]: ...
    @property
    def link(self) -> Link: ...


class Link:
    """One rank's connection to the others of its mesh: the base class of backends."""

    rank: int = 0
    timeout: float = 1800.0  # seconds that a rank waits for others
    moves_data: bool = True  # False if nothing is sent, as in a plan
    device: str = "cpu"  # of tensors that a caller makes only to send them
    # A dict that all ranks of one process share, under keys of its users: what ranks
    # compare, checksums, recordings. None if each rank has a process of its own.
    notes: dict[Any, Any] | None = None
    board: Any = None  # a `mailboxes.Board`, for texts beside the collectives; or None
    # The functorch level that maps the ranks, if one does.
    vmap_level: int | None = None

    def start(
        self,
        op: str,
        x: Tensor,
        group: GroupOfRanks,
        *,
        out: Tensor | None = None,
        name: str = "",
        **kwargs: Any,
    ) -> Handle:
        """Issues a collective along dim 0, over two ranks or more.

        Args:
            op: a name in `operations.OPERATIONS`.
            x: this rank's contiguous input; not to be written before the wait.
            group: the ranks that take part.
            out: the result's memory, contiguous and of its shape; None: new memory.
            name: that of the buffer in ``x``, the same one on every rank.
            kwargs: the arguments of ``op``, such as ``source=``. Beside these,
                ``any_order=True``: other ranks may wait for it in another order;
                ``read_only=True``: nobody writes ``x`` or the result again, not even
                after the wait, so that ranks may share memory instead of copying it.
        """
        raise NotImplementedError

    def send(self, x: Tensor, group: GroupOfRanks, to: int, name: str = "") -> Handle:
        """Sends contiguous ``x`` to the rank at index ``to``; as `RankGroup.send`."""
        raise NotImplementedError

    def receive(
        self, like: Tensor, group: GroupOfRanks, source: int, name: str = ""
    ) -> Handle:
        """Receives into ``like`` what the rank at index ``source`` sends."""
        raise NotImplementedError

    def for_mesh(self, mesh: Any) -> Link:
        """Returns this rank's link on another `mesh.Mesh` of the same ranks."""
        return self

    def close(self, call: CollectiveCall | str, error: BaseException) -> None:
        """Closes the link: all later collectives raise.

        After ``error``, ranks may be at different places, and their next collectives
        would be matched with others.

        Args:
            call: the collective in which it was raised; it is printed.
        """

    def after_others(self) -> None:
        """Lets other ranks of this process run first, each until it has to wait."""

    def trim(self) -> None:
        """Frees memory that is kept for the next collectives."""

    def apply(
        self, function: Callable[..., Tensor], x: Tensor, *args: object
    ) -> Tensor:
        """Calls an ``autograd.Function`` of a collective: ``function(x, *args)``."""
        return function(x, *args)

    def exchange(self, linear_map: Any, x: Tensor, group: GroupOfRanks) -> Tensor:
        """Applies a `LinearMap` to all ranks' inputs at once; only on a vmap mesh.

        Inputs and results are stacked along dim 0, by rank.
        """
        raise NotImplementedError

    def axis_index(self, group: GroupOfRanks) -> Any:
        """Returns this rank's index in ``group``: an int, or a batched tensor."""
        return group.index


# op, its arguments as pairs, axis, shape, dtype, name of the buffer
Signature: TypeAlias = tuple[
    str, tuple[tuple[str, Any], ...], tuple[str, ...], torch.Size, torch.dtype, str
]


class CollectiveMismatch(RuntimeError):
    """Ranks of one group called different collectives."""


class PeerFailed(RuntimeError):
    """Another rank raised, ended, stopped or is late, and this one waits in vain.

    ``rank`` is the one that the message names as the cause, where one is known.
    """

    rank: int | None = None


def checks_every_call() -> bool:
    """Returns whether ``FSFUNC_CHECK=1`` has ranks compare every collective."""
    return os.environ.get("FSFUNC_CHECK", "0") not in ("", "0")


def call_signature(
    op: str, kwargs: Mapping[str, Any], axis: tuple[str, ...], x: Tensor, name: str
) -> Signature:
    """Returns the properties of a collective that must be equal on every rank."""
    # An all_to_all of unequal parts has as many rows on a rank as that one sends.
    shape = x.shape[1:] if kwargs.get("sizes") else x.shape
    return op, tuple(kwargs.items()), axis, shape, x.dtype, name


@functools.lru_cache(maxsize=1 << 16)
def digest(signature: Signature) -> bytes:
    """Returns eight bytes for a signature, the same ones in every process."""
    op, kwargs, axis, shape, dtype, name = signature
    # Not `hash`, which Python salts in each process.
    text = repr((op, kwargs, axis, tuple(shape), str(dtype), name))
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


@dataclass(frozen=True)
class CollectiveCall:
    """A collective or a transfer that one rank called, for error messages.

    Args:
        unit, phase: its label, as `attribution.label` has it.
        line: the user's source line that called it.
    """

    signature: Signature
    unit: str = ""
    phase: str = ""
    line: str = ""

    @classmethod
    def now(cls, signature: Signature) -> CollectiveCall:
        """Describes the call that is being made, with its label and source line."""
        return cls(signature, *current_label(), source_line())

    def __str__(self) -> str:
        op, kwargs, axes, shape, dtype, name = self.signature
        name = name or self.unit
        phase = f" ({self.phase})" if self.phase else ""
        unit = (f" of {name}" if name else "") + phase
        kind = str(dtype).removeprefix("torch.")
        axis, kwargs = ", ".join(axes), "".join(f" {k}={v}" for k, v in kwargs)
        at = f" at {self.line}" if self.line else ""
        return f'{op} over "{axis}"{kwargs}, {kind}{list(shape)}{unit}{at}'


def table(title: str, line_by_rank: Mapping[int, Any]) -> str:
    """Formats a line for each rank, below a title."""
    return f"{title}:\n" + "\n".join(
        f"  rank {rank} {line}" for rank, line in line_by_rank.items()
    )
