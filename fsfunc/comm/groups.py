"""``RankGroup``: one rank's handle on the ranks along an axis, to send to them.

``get_group("data")`` is that of the rank that runs. Each collective, each gather and
reduction of ``shard`` and each transfer of a pipeline starts here: a group checks the
tensor, records the bytes in open ledgers, and passes it on to the backend's `Link`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.backends.link import Handle, Link
from fsfunc.comm.ledgers import note
from fsfunc.comm.mesh import Axis, Here, here, note_axes_read


@dataclass(frozen=True)
class RankGroup:
    """One rank's handle on the ranks along an axis.

    A backward pass uses the handle that the forward pass made, not the context.

    Args:
        axis: the names of the axis.
        ranks: the ranks along it; ``index``: the position of this one, ``rank``.
        link: its connection to the other ranks.
        loss_is_mean: whether the loss is the mean of these ranks' losses, as under
            ``shard``.
        compared: whether the ranks have compared their programs.
        independent: whether these ranks train copies of their own (``local_sgd``,
            ``gossip``): collectives over them are an error.
        levels: of several axes, the group along each.
        partly_mean: whether the loss is a mean over some of several axes alone.
        names: the mesh's names for several axes, by which ledgers find them too.
    """

    axis: tuple[str, ...]
    ranks: tuple[int, ...]
    index: int
    rank: int
    link: Link
    loss_is_mean: bool = False
    compared: bool = False
    independent: bool = False
    levels: tuple[RankGroup, ...] = field(default=(), compare=False, repr=False)
    partly_mean: bool = field(default=False, repr=False)
    names: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @cached_property  # it is read several times in each collective
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
        name: str = "",
        **kwargs: Any,
    ) -> Handle:
        """Starts a collective on ``x``, along dim 0; returns its handle.

        Until ``wait()`` has returned, ``x`` must not be written. All ranks wait for
        their collectives in the same order, unless these were started with
        ``any_order=True``.

        Args:
            op: a name in `operations.OPERATIONS`.
            out: the result's memory; None: new memory.
            name: that of the buffer in ``x``; ranks whose names differ raise.
            kwargs: ``pairs=`` for ppermute, ``source=`` for pbroadcast, ``sizes=`` for
                an all_to_all of unequal parts (see `LinearMap`); ``any_order=`` and
                ``read_only=`` (see `Link.start`).
        """
        check_sendable(op, x, self)
        # Here, not in `get_group`: such a step may ask for its index along the axis.
        if self.independent:
            raise ValueError(
                f"{op} over {self.name} in a step whose ranks along it train copies of "
                "their own: its loss is that of one rank. Call the collective on what "
                "the step returns, outside of it"
            )
        note(op, x, self, kwargs, name)
        # Asked here, so that a buffer, which is contiguous, costs no call of ours.
        if not x.is_contiguous() or x.is_neg() or x.is_conj():
            x = to_contiguous(x)
        return self.link.start(op, x, self, out=out, name=name, **kwargs)

    def send(self, x: Tensor, to: int, name: str = "") -> Handle:
        """Sends ``x`` to the rank at index ``to``; returns the handle at once.

        The n-th send from one rank to another is matched with the n-th receive there,
        whatever collectives are in flight; shape, dtype and ``name`` must be equal.
        Until the handle is ``done()``, ``x`` must not be written; its ``wait()``
        returns when the receiver has called ``receive``.

        Raises:
            ValueError: ``to`` is no other rank of the group.

        Cost: the bytes of ``x``, noted as one ppermute of the sender's.
        """
        self._check("send to", to)
        note("ppermute", x, self, {"pairs": ((self.index, to),)}, name)
        return self.link.send(to_contiguous(x.detach()), self, to, name)

    def receive(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
        source: int,
        name: str = "",
    ) -> Handle:
        """Receives from the rank at index ``source``; ``wait()`` returns the tensor.

        Its memory is allocated at once. See :meth:`send`.

        Raises:
            ValueError: ``source`` is no other rank of the group.
        """
        self._check("receive from", source)
        like = torch.empty(tuple(shape), dtype=dtype, device=device)
        return self.link.receive(like, self, source, name)

    def _check(self, action: str, other: int) -> None:
        if not 0 <= other < self.size or other == self.index:
            raise ValueError(
                f"rank {self.rank}, index {self.index} along {self.name}, cannot "
                f"{action} index {other}: it is another one of 0 to {self.size - 1}"
            )


def gather_stacked(x: Tensor, group: RankGroup) -> Tensor:
    """Gathers the ranks' ``x``, all of one shape: stacked in rank order, on the CPU.

    Cost: one all-gather.
    """
    if group.size > 1:  # a link takes collectives of two ranks or more
        gathered = group.start("all_gather", x.to(group.link.device)).wait()
    else:
        gathered = x
    return gathered.view(group.size, *x.shape).cpu()


NOT_IN_GRAPHS = "collectives of fsfunc are no operators of a graph"


# A compiler that traces a unit refuses it here, in words, as it can take no collective.
@_torch.outside_graphs(NOT_IN_GRAPHS)
def get_group(axis: Axis, me: Here | None = None) -> RankGroup:
    """Returns the group along ``axis`` of the rank that runs.

    Raises:
        NoMesh: outside a transform and outside ``spmd``.
        ValueError: an axis that the mesh does not have.
    """
    me = here() if me is None else me
    axis = axis if isinstance(axis, str) else tuple(me.mesh.check(axis))
    # A step asks for the same few groups in each call: they are cached with the rank. A
    # name is checked only the first time, when it is not there yet.
    if axis not in me.groups:
        names = me.mesh.check(axis)
        ranks, mean = me.mesh.members(names, me.rank), set(names) <= set(me.mean_axes)
        index = ranks.index(me.rank)
        levels = tuple(get_group(name, me) for name in names) if len(names) > 1 else ()
        partly_mean = not mean and not set(names).isdisjoint(me.mean_axes)
        me.groups[axis] = RankGroup(
            names, ranks, index, me.rank, me.link, mean, me.compared,
            not set(names).isdisjoint(me.independent_axes), levels, partly_mean,
            me.mesh.names,
        )  # fmt: skip
    return me.groups[axis]


def axis_index(axis: Axis) -> int:
    """Returns this rank's index along ``axis``: an int; a batched tensor under vmap.

    Of several names the first varies slowest.

    >>> import fsfunc as ff
    >>> mesh = ff.make_mesh({"data": 2, "pipe": 2}, "simulated")
    >>> ff.spmd(lambda: ff.axis_index(("pipe", "data")), mesh)()
    [0, 2, 1, 3]
    """
    group = get_group(axis)
    note_axes_read(group.axis)
    return group.position


def axis_size(axis: Axis) -> int:
    """Returns the number of ranks along ``axis``: the product over several names.

    >>> import fsfunc as ff
    >>> ff.spmd(lambda: ff.axis_size("data"), ff.make_mesh({"data": 2}, "simulated"))()
    [2, 2]
    """
    return get_group(axis).size


_SENDABLE = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128,
}  # fmt: skip


def check_sendable(op: str, x: Tensor, group: RankGroup) -> None:
    """Raises if no backend can send a tensor of this dtype or layout.

    Raises:
        TypeError: names dtype or layout, and the way out.
    """
    if x.dtype not in _SENDABLE:
        raise TypeError(
            f"{op} over {group.name} of {x.dtype}: no backend sends or sums it. Send "
            "its bytes, x.view(torch.uint8), or sum it in a wider dtype"
        )
    if x.is_meta and group.link.moves_data:
        raise TypeError(f"{op} over {group.name} of a meta tensor: it has no values")
    # By name: to import DTensor takes long, and a user who has one has imported it.
    if type(x).__name__ == "DTensor":
        raise TypeError(
            f"{op} over {group.name} of a DTensor: send x.to_local() or x.full_tensor()"
        )
    if x.layout != torch.strided:
        raise TypeError(
            f"{op} over {group.name} of a tensor with layout {x.layout}: ranks "
            "exchange dense tensors; x.to_dense() is one"
        )


def to_contiguous(x: Tensor) -> Tensor:
    """Returns ``x``, contiguous, and neither lazily conjugated nor negated.

    Backends read memory, where a lazy conjugation or negation is not carried out.
    """
    if x.is_complex() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    return x.contiguous()


def to_strided(x: Tensor) -> Tensor:
    """Returns a gradient as a dense tensor.

    It may be sparse on some ranks and dense on others, and all must send alike.
    """
    return x if x.layout == torch.strided else x.to_dense()
