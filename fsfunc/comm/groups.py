"""``RankGroup``: one rank's handle on the ranks along an axis, to send to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.backends.link import Handle
from fsfunc.comm.ledgers import note
from fsfunc.comm.mesh import Axis, Here, asks, here


@dataclass(frozen=True)
class RankGroup:
    """One rank's handle on the ranks along an axis.

    A backward pass uses the handle that the forward pass made, not the context.

    Args:
        axis: the names of the axis.
        ranks: the ranks along it; ``index``: the position of this one, ``rank``.
        link: its connection to the other ranks.
        mean: whether the loss is the mean of these ranks' losses, as under ``shard``.
        compared: whether the ranks have compared their programs.
        apart: whether collectives over it are an error (``local_sgd``, ``gossip``).
        levels: of several axes, the group along each.
    """

    axis: tuple[str, ...]
    ranks: tuple[int, ...]
    index: int
    rank: int
    link: Any
    mean: bool = False
    compared: bool = False
    apart: bool = False
    levels: tuple[RankGroup, ...] = field(default=(), compare=False, repr=False)

    @cached_property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def name(self) -> str:
        """The axis, for messages."""
        return ", ".join(f'"{name}"' for name in self.axis)

    @property
    def position(self) -> Any:
        """This rank's index along the axis; on a vmap mesh a batched tensor."""
        return self.link.axis_index(self)

    def start(
        self,
        op: str,
        x: Tensor,
        *,
        out: Tensor | None = None,
        what: str = "",
        **kwargs: Any,
    ) -> Handle:
        """Starts a collective on ``x``, along dim 0; returns its handle.

        Until ``wait()`` has returned, ``x`` must not be written. All ranks wait for
        their collectives in the same order, unless these were started with
        ``any_order=True``.

        Args:
            what: the name of the buffer of ``x``; ranks whose names differ raise.
            how: ``pairs=`` for ppermute, ``source=`` for pbroadcast, ``sizes=`` for an
                all_to_all of unequal parts (see `LinearMap`); ``any_order=``.
        """
        check_kind(op, x, self)
        if self.apart:
            raise ValueError(
                f"{op} over {self.name} in a step whose ranks along it train copies of "
                "their own: its loss is that of one rank. Call the collective on what "
                "the step returns, outside of it"
            )
        note(op, x, self, kwargs, what)
        if not x.is_contiguous() or x.is_neg() or x.is_conj():
            x = dense(x)
        return self.link.start(op, x, self, out=out, what=what, **kwargs)

    def send(self, x: Tensor, to: int, what: str = "") -> Handle:
        """Sends ``x`` to the rank at index ``to``; returns the handle at once.

        The n-th send from one rank to another is matched with the n-th receive there,
        whatever collectives are in flight; shape, dtype and ``what`` must be equal.
        Until the handle is ``done()``, ``x`` must not be written; its ``wait()``
        returns when the receiver has called ``receive``.

        Raises:
            ValueError: ``to`` is no other rank of the group.

        Cost: the bytes of ``x``, noted as one ppermute of the sender's.
        """
        self._check("send to", to)
        note("ppermute", x, self, {"pairs": ((self.index, to),)}, what)
        return self.link.send(dense(x.detach()), self, to, what)

    def receive(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: Any,
        source: int,
        what: str = "",
    ) -> Handle:
        """Receives from the rank at index ``source``; ``wait()`` returns the tensor.

        Its memory is allocated at once. See :meth:`send`.

        Raises:
            ValueError: ``source`` is no other rank of the group.
        """
        self._check("receive from", source)
        like = torch.empty(tuple(shape), dtype=dtype, device=device)
        return self.link.receive(like, self, source, what)

    def _check(self, what: str, other: int) -> None:
        if not 0 <= other < self.size or other == self.index:
            raise ValueError(
                f"rank {self.rank}, index {self.index} along {self.name}, cannot "
                f"{what} index {other}: it is another one of 0 to {self.size - 1}"
            )


def gathered(x: Tensor, group: RankGroup) -> Tensor:
    """Each rank's ``x``, all of one shape, in rank order, on the CPU.

    Cost: one all-gather.
    """
    if group.size > 1:
        every = group.start("all_gather", x.to(group.link.device)).wait()
    else:
        every = x
    return every.view(group.size, *x.shape).cpu()


NOT_IN_GRAPHS = "collectives of fsfunc are no operators of a graph"


@_torch.outside_graphs(NOT_IN_GRAPHS)
def get_group(axis: Axis, at: Here | None = None) -> RankGroup:
    """The group along ``axis`` of the rank that runs.

    Raises:
        NoMesh: outside a transform and outside ``spmd``.
        ValueError: an axis that the mesh does not have.
    """
    at = here() if at is None else at
    axis = axis if isinstance(axis, str) else tuple(at.mesh.check(axis))
    if axis not in at.groups:
        names = at.mesh.check(axis)
        ranks, mean = at.mesh.members(names, at.rank), set(names) <= set(at.mean)
        index = ranks.index(at.rank)
        levels = tuple(get_group(name, at) for name in names) if len(names) > 1 else ()
        at.groups[axis] = RankGroup(
            names, ranks, index, at.rank, at.link, mean, at.compared,
            not set(names).isdisjoint(at.apart), levels,
        )  # fmt: skip
    return at.groups[axis]


def axis_index(axis: Axis) -> Any:
    """This rank's index along ``axis``: an int (a batched tensor on a vmap mesh).

    Of several names the first varies slowest.

    >>> import fsfunc as ff
    >>> mesh = ff.make_mesh({"data": 2, "pipe": 2}, "simulated")
    >>> ff.spmd(lambda: ff.axis_index(("pipe", "data")), mesh)()
    [0, 2, 1, 3]
    """
    group = get_group(axis)
    asks(group.axis)
    return group.position


def axis_size(axis: Axis) -> int:
    """The number of ranks along ``axis``: the product over several names.

    >>> import fsfunc as ff
    >>> ff.spmd(lambda: ff.axis_size("data"), ff.make_mesh({"data": 2}, "simulated"))()
    [2, 2]
    """
    return get_group(axis).size


_MOVED = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128,
}  # fmt: skip


def check_kind(op: str, x: Tensor, group: Any) -> None:
    """Raises if no backend can send a tensor of this dtype or layout.

    Raises:
        TypeError: names dtype or layout, and the way out.
    """
    if x.dtype not in _MOVED:
        raise TypeError(
            f"{op} over {group.name} of {x.dtype}: no backend sends or sums it. Send "
            "its bytes, x.view(torch.uint8), or sum it in a wider dtype"
        )
    if x.is_meta and group.link.moves_data:
        raise TypeError(f"{op} over {group.name} of a meta tensor: it has no values")
    if type(x).__name__ == "DTensor":
        raise TypeError(
            f"{op} over {group.name} of a DTensor: send x.to_local() or x.full_tensor()"
        )
    if x.layout != torch.strided:
        raise TypeError(
            f"{op} over {group.name} of a tensor with layout {x.layout}: ranks "
            "exchange dense tensors; x.to_dense() is one"
        )


def dense(x: Tensor) -> Tensor:
    """``x``, contiguous, and neither lazily conjugated nor negated."""
    if x.is_complex() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    return x.contiguous()


def strided(x: Tensor) -> Tensor:
    """A gradient as a dense tensor: it may be sparse on some ranks, not on others."""
    return x if x.layout == torch.strided else x.to_dense()
