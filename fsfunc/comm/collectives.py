"""The collectives: the only functions that move data between ranks.

A user calls them in a step, under ``shard`` or ``spmd``. Each is a linear map, as data
(see ``linear_maps``), whose transpose is a row of a table; all of them hold under
autograd and ``torch.func``, nested in any way.

They take bool, integers (except unsigned ones of 16 bits and more), fp16, bf16, fp32,
fp64 and complex numbers, of any shape and strides, and refuse the rest by name.

``of`` and ``to`` are types over the axis (see ``linear_maps``): V varies from rank to
rank, I is one value, R is replicated with a cotangent in parts, P is in parts.

Under ``shard`` the loss is the mean over its axes of the ranks' losses, and every value
varies from rank to rank, V. There a collective may be called anywhere in a loss:
``psum``, ``pmean`` and ``pbroadcast`` return V values that happen to be equal; they may
be added to others, or be the loss, and are differentiated as terms of the sum of the
ranks' losses. Your own ``autograd.Function`` around a collective must return from its
backward what the transpose does: the psum of the cotangents for a psum, their pmean for
a pmean, their psum_scatter for an all_gather. Over other axes, which split the work of
one loss, a psum is one value, I. Over both at once (as over an axis of a folded mesh)
values are each rank's own, V, before and after; psum and pmean are two sums there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

from fsfunc.comm.collective_ops import apply_over
from fsfunc.comm.groups import RankGroup, axis_size, get_group
from fsfunc.comm.linear_maps import AxisType, LinearMap
from fsfunc.comm.mesh import Axis, here, note_axes_read
from fsfunc.comm.typed_maps import check_cut, checked_dim, typed_map

_Tree = TypeVar("_Tree")


def psum(
    x: _Tree, axis: Axis, *, of: AxisType = "V", to: AxisType | None = None
) -> _Tree:
    """Returns the sum of ``x`` over the ranks along ``axis``, on each of them.

    Transpose: V->V a psum; V->I a cast, without communication; P->R a psum (Megatron's
    g after f).

    Args:
        x: tensors, each of one shape and dtype on every rank.
        axis: one name or several.
        of, to: the types before and after: V->V, V->I, P->I or P->R. By default V->V
            over the axes of a ``shard`` around, and V->I over others. I over an axis
            of ``shard`` is one value for all ranks: it enters their own by ``pcast``.

    Returns:
        Tensors like ``x``, bit for bit the same on every rank of the axis. Truth values
        are counted, in int64, as ``torch.sum`` counts them.

    Raises:
        ValueError: another pair of types, or an axis that the mesh does not have.
        NoMesh: outside a transform and outside ``spmd`` (so do all collectives).

    Cost: one all-reduce, 2(n-1)/n of the bytes (over axes of ``shard`` and others at
    once, one for each of the two).

    Source: Patarasuk and Yuan (2009) for the bytes; Shoeybi et al. (2019), sec. 3, for
    f and g.

    >>> import fsfunc as ff, torch
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> ff.spmd(lambda: ff.psum(torch.ones(2), "data").tolist(), mesh)()
    [[2.0, 2.0], [2.0, 2.0]]
    """
    return _sum(x, axis, of, to, power=0)


def pmean(
    x: _Tree, axis: Axis, *, of: AxisType = "V", to: AxisType | None = None
) -> _Tree:
    """Returns the mean of ``x`` over the ranks along ``axis``: ``psum(x) / n``.

    Integers and truth values are summed in int64, and their mean is of torch's default
    dtype.

    Transpose: that of psum, divided by n.

    Args:
        x: tensors, each of one shape and dtype on every rank.
        axis: one name or several.
        of, to: the types before and after, as for psum.

    Raises:
        ValueError: a pair of types that psum does not have.

    Cost: that of psum.

    >>> import fsfunc as ff, torch
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> main = lambda: ff.pmean(torch.tensor(ff.axis_index("data")), "data").item()
    >>> ff.spmd(main, mesh)()
    [0.5, 0.5]
    """
    return _sum(x, axis, of, to, power=-1)


def pmax(x: _Tree, axis: Axis) -> _Tree:
    """Returns the elementwise maximum over the ranks along ``axis``.

    It has no derivative: differentiating it raises.

    Args:
        x: tensors, each of one shape and dtype on every rank.
        axis: one name or several.

    Raises:
        TypeError: complex numbers, which have no order.
        RuntimeError: in a backward pass or a jvp.

    Cost: one all-reduce, 2(n-1)/n of the bytes.

    >>> import fsfunc as ff, torch
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> main = lambda: ff.pmax(torch.tensor(ff.axis_index("data")), "data").item()
    >>> ff.spmd(main, mesh)()
    [1, 1]
    """
    return apply_over(x, axis, lambda leaf, group: LinearMap("pmax", to="I"))


def pmin(x: _Tree, axis: Axis) -> _Tree:
    """Returns the elementwise minimum over the ranks along ``axis``: see :func:`pmax`.

    >>> import fsfunc as ff, torch
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> main = lambda: ff.pmin(torch.tensor(ff.axis_index("data")), "data").item()
    >>> ff.spmd(main, mesh)()
    [0, 0]
    """
    return apply_over(x, axis, lambda leaf, group: LinearMap("pmin", to="I"))


def all_gather(x: _Tree, axis: Axis, *, dim: int = 0, to: AxisType = "V") -> _Tree:
    """Concatenates the ranks' ``x`` along ``dim``, in axis order.

    Transpose: psum_scatter (``to="V"`` or ``"R"``); for ``to="I"`` the rank's slice.

    Args:
        x: tensors of one shape and dtype on every rank, of one dim at least.
        dim: the tensor dim that grows n times.
        to: the result's type over ``axis``: "V", "R" or "I".

    Raises:
        ValueError: ``x`` has no such dim.

    Cost: one all-gather, (n-1) times the bytes of ``x``.

    >>> import fsfunc as ff, torch
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> main = lambda: ff.all_gather(torch.ones(1, 2), "data", dim=1).shape
    >>> ff.spmd(main, mesh)()
    [torch.Size([1, 4]), torch.Size([1, 4])]
    """

    def make_map(leaf: Tensor, group: RankGroup) -> LinearMap:
        return typed_map(group, "all_gather", "V", to, dim=checked_dim(leaf, dim))

    return apply_over(x, axis, make_map)


def psum_scatter(x: _Tree, axis: Axis, *, dim: int = 0, of: AxisType = "V") -> _Tree:
    """Returns this rank's part, along ``dim``, of the sum over the ranks of ``axis``.

    Truth values are counted, in int64.

    Transpose: all_gather (``of="P"``: ``to="R"``).

    Args:
        x: tensors of one shape and dtype on every rank.
        dim: the tensor dim that is cut into n parts.
        of: the type of ``x`` over ``axis``: "V" or "P".

    Raises:
        ValueError: the axis does not divide ``x.shape[dim]``.

    Cost: one reduce-scatter, (n-1)/n of the bytes of ``x``.

    >>> import fsfunc as ff, torch
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> ff.spmd(lambda: ff.psum_scatter(torch.arange(2), "data").tolist(), mesh)()
    [[0], [2]]
    """

    def make_map(leaf: Tensor, group: RankGroup) -> LinearMap:
        cut_dim = check_cut(leaf, dim, group, "psum_scatter")
        return typed_map(group, "psum_scatter", of, "V", dim=cut_dim)

    return apply_over(x, axis, make_map)


def all_to_all(x: _Tree, axis: Axis, *, split_dim: int, concat_dim: int) -> _Tree:
    """Sends part i of ``x`` along ``split_dim`` to rank i, and joins what it receives.

    Transpose: all_to_all with the dims exchanged.

    Args:
        x: tensors of one shape and dtype on every rank.
        split_dim, concat_dim: the tensor dims that shrink and grow n times.

    Raises:
        ValueError: the axis does not divide ``x.shape[split_dim]``.

    Cost: one all-to-all, (n-1)/n of the bytes of ``x``.

    >>> import fsfunc as ff, torch
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> rows = lambda: torch.full((1, 2), ff.axis_index("data"))
    >>> column = lambda: ff.all_to_all(rows(), "data", split_dim=1, concat_dim=0)
    >>> ff.spmd(lambda: column().tolist(), mesh)()
    [[[0], [1]], [[0], [1]]]
    """

    def make_map(leaf: Tensor, group: RankGroup) -> LinearMap:
        cut_dim = check_cut(leaf, split_dim, group, "all_to_all")
        joined_dim = checked_dim(leaf, concat_dim, "concat_dim")
        return typed_map(group, "all_to_all", "V", "V", dim=cut_dim, to_dim=joined_dim)

    return apply_over(x, axis, make_map)


def ppermute(x: _Tree, axis: Axis, pairs: Sequence[tuple[int, int]]) -> _Tree:
    """Sends ``x`` of rank ``s`` to rank ``d`` for each (s, d) in ``pairs``.

    A rank that is no target gets zeros.

    Transpose: ppermute with every pair turned round.

    Args:
        x: tensors of one shape and dtype on every rank.
        pairs: (source, target) indices along the axis, each source and target once.

    Raises:
        ValueError: an index off the axis, or a source or target named twice.

    Cost: the bytes of ``x`` from every source that is not its own target.

    >>> import fsfunc as ff, torch
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> ff.spmd(lambda: ff.ppermute(torch.ones(1), "data", [(0, 1)]).item(), mesh)()
    [0.0, 1.0]
    """
    pairs = tuple((int(s), int(d)) for s, d in pairs)
    n = axis_size(axis)
    # All sources, then all targets. A target named twice would have two values, and the
    # transpose turns the pairs round: so a source may not be named twice either.
    for indices in zip(*pairs, strict=True):
        if len(set(indices)) != len(indices) or not all(0 <= i < n for i in indices):
            raise ValueError(
                f"ppermute over {axis!r} of size {n}: each source and target once, "
                f"each in 0..{n - 1}; got {list(pairs)}"
            )
    # Where some ranks send and some do not, a plan of one rank is not that of another.
    if len({s for s, d in pairs if s != d}) not in (0, n):
        note_axes_read(get_group(axis).axis)

    def make_map(leaf: Tensor, group: RankGroup) -> LinearMap:
        return typed_map(group, "ppermute", "V", "V", pairs=pairs)

    return apply_over(x, axis, make_map)


def pbroadcast(x: _Tree, axis: Axis, *, source: int, to: AxisType = "V") -> _Tree:
    """Returns ``x`` of the rank at index ``source`` along ``axis``, on each of them.

    Transpose: the sum of the cotangents, on the source (``to="V"``); the source's own
    cotangent, without communication (``to="I"``). Other ranks get zeros.

    Args:
        x: tensors of one shape and dtype on every rank.
        source: an index along the axis.
        to: the result's type over ``axis``: "V" or "I".

    Raises:
        ValueError: ``source`` is off the axis.

    Cost: one broadcast, (n-1)/n of the bytes.

    >>> import fsfunc as ff, torch
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> mine = lambda: torch.tensor(ff.axis_index("data"))
    >>> ff.spmd(lambda: ff.pbroadcast(mine(), "data", source=1).item(), mesh)()
    [1, 1]
    """
    n = axis_size(axis)
    if not 0 <= source < n:
        raise ValueError(f"source={source} is off the axis {axis!r} of size {n}")

    def make_map(leaf: Tensor, group: RankGroup) -> LinearMap:
        return typed_map(group, "pbroadcast", "V", to, source=source)

    return apply_over(x, axis, make_map)


def _sum(x: _Tree, axis: Axis, of: AxisType, to: AxisType | None, power: int) -> _Tree:
    group = get_group(axis)
    if not group.loss_is_mean and (
        means := set(here().mean_axes).intersection(group.axis)
    ):
        # Over some of these axes the loss is a mean, over the others one value: two
        # sums, as their transposes differ.
        mean_axes = tuple(name for name in group.axis if name in means)
        others = tuple(name for name in group.axis if name not in means)
        if (of, to) != ("V", None):
            raise ValueError(
                f"a sum {of}->{to} over {mean_axes}, means under shard, and {others} "
                "at once: sum over the ones, then over the others"
            )
        return _sum(_sum(x, mean_axes, of, to, power), others, of, to, power)

    def make_map(leaf: Tensor, group: RankGroup) -> LinearMap:
        default = "V" if group.loss_is_mean else "I"
        return typed_map(group, "psum", of, default if to is None else to, power=power)

    return apply_over(x, axis, make_map)
