"""Checks of what ranks have: replicated values, batches, types.

For tests and for debugging, on any mesh: each is called on all ranks, and raises on all
of them if one is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.comparison import differing_lines
from fsfunc.comm.descriptions import checksums
from fsfunc.comm.groups import RankGroup, gather_stacked, get_group
from fsfunc.comm.launch import local_batch, spmd
from fsfunc.comm.ledgers import silence
from fsfunc.comm.mesh import Axis, Mesh, axis_names, check_mesh, here
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.placements import describe_tensor
from fsfunc.state.layout_rules import LayoutRules
from fsfunc.state.placing import place
from fsfunc.testing.comparing import index_of_element
from fsfunc.testing.step_runs import batch_axes
from fsfunc.tracing.type_check import check
from fsfunc.tree.types import Leaf, PyTree

_SHOWN = 8  # ranks, or leaves, that an error message lists


class OddBatch(ValueError):
    """Raised where some rank's data are not finite, or are empty."""


def check_batch(batch: PyTree, axis: Axis, name: str = "the batch") -> None:
    """Raises on every rank if any rank's leaf is not finite, or is empty.

    A loss is one number for all ranks: if it is NaN, this names the ranks whose rows
    made it so. Any tree can be checked: a batch, gradients, the result of a step.

    Args:
        batch: a tree of tensors, arrays and numbers, with the same leaves on every
            rank. Of sharded leaves each rank checks its own part.
        axis: one name or several; all ranks along it must call this.
        name: the name of the tree, for the message.

    Raises:
        OddBatch: names the ranks, the leaves, and how many elements are NaN or
            infinite.

    Cost: each leaf is read once, and waited for. One gather of 24 bytes a leaf, which
    no ledger counts.

    >>> import fsfunc as ff
    >>> def main():
    ...     x = torch.ones(2, 3)
    ...     x[0, ff.axis_index("data")] /= ff.axis_index("data")
    ...     check_batch({"x": x, "y": x[:1]}, "data")
    >>> ff.spmd(main, ff.make_mesh({"data": 2}, "simulated"))()
    Traceback (most recent call last):
        ...
    fsfunc.testing.rank_checks.OddBatch: the batch is not what a step expects:
      rank 0 'x': 1 of 6 elements infinite
      rank 0 'y': 1 of 3 elements infinite
    on simulated rank 1 of Mesh({'data': 2}, 'simulated')
    """
    ranks = get_group(axis)
    paths, leaves, _ = tree.flatten_with_paths(batch)
    tensors = {
        # As it is: torch.as_tensor moves a tensor to the default device.
        p: (x if isinstance(x, Tensor) else torch.as_tensor(x)).detach()
        for p, x in zip(paths, leaves, strict=True)
        if _has_values(x)
    }
    # No leaf at all counts as an empty one.
    tensors = tensors or {"": torch.zeros(0, device="cpu")}
    local_counts = torch.stack([_count_not_finite(x).cpu() for x in tensors.values()])
    with silence():
        counts_of_ranks = gather_stacked(local_counts, ranks).tolist()
    lines = []
    for rank, counts in zip(ranks.ranks, counts_of_ranks, strict=True):
        for path, (nan_count, infinite_count, size) in zip(
            tensors, counts, strict=True
        ):
            counts_by_kind = {"NaN": nan_count, "infinite": infinite_count}
            problems = [
                f"{count} of {size} elements {kind}"
                for kind, count in counts_by_kind.items()
                if count
            ]
            problems = problems if size else ["empty"]
            if problems:
                lines.append(f"  rank {rank} {path!r}: {', '.join(problems)}")
    if lines:
        omitted = [f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        title = f"{name} is not what a step expects:"
        raise OddBatch("\n".join([title, *lines[:_SHOWN], *omitted]))


def _has_values(x: Leaf) -> bool:
    if isinstance(x, Tensor):
        return not x.is_meta
    kind = getattr(getattr(x, "dtype", None), "kind", "")  # a numpy array's
    return isinstance(x, float) or kind != "" and kind in "biufc"


def _count_not_finite(x: Tensor) -> Tensor:
    """Returns (number of NaN, of infinite elements, of all elements)."""
    size = torch.tensor(x.numel(), device=x.device)
    if not (x.is_floating_point() or x.is_complex()):
        return torch.stack([0 * size, 0 * size, size])
    return torch.stack([x.isnan().sum(), x.isinf().sum(), size])


def check_replicated(value: PyTree, axis: Axis) -> None:
    """Raises, on every rank, unless the ranks along ``axis`` have the same bits.

    Every rank calls it. Sharded leaves are compared, part by part, if they are not cut
    along the axis.

    Args:
        value: a tree of tensors of any dtype; other leaves are compared as they print.
        axis: one name or several.

    Raises:
        AssertionError: names the first leaf and element that differ, and what each rank
            has there.

    Cost: each tensor is read once, and waited for. One gather of 16 bytes, which no
    ledger counts. More only where they differ.

    >>> import torch, fsfunc as ff
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> def main():
    ...     w = torch.tensor([1.0, float(mesh.rank)])
    ...     check_replicated({"w": ff.pmean(w, "data")}, "data")
    ...     check_replicated({"w": w}, "data")
    >>> ff.spmd(main, mesh)()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    AssertionError: 'w' f32[2] differs along "data", where it is claimed to be one ...
      at (1,) rank 0 has 0.0
      at (1,) rank 1 has 1.0
    ...
    """
    ranks = get_group(axis)
    names, leaves = _replicated_leaves(value, ranks)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    descriptions = [
        describe_tensor(x.shape, x.dtype) if isinstance(x, Tensor) else ""
        for x in leaves
    ]
    checksums_left = map(str, checksums(tensors))
    contents = [
        next(checksums_left) if isinstance(x, Tensor) else repr(x) for x in leaves
    ]
    keys = [f"{name} {kind}" for name, kind in zip(names, descriptions, strict=True)]
    lines_of_ranks = differing_lines(
        [*zip(keys, contents, strict=True)], ranks
    ).values()
    if len({tuple(key for key, _ in lines) for lines in lines_of_ranks}) > 1:
        local_names = ", ".join(map(repr, names[:_SHOWN])) or "no leaves"
        raise AssertionError(
            f"the ranks along {ranks.name} have trees of unlike structure, shapes or "
            f"dtypes: this one has {local_names}"
        )
    for name, x, *lines in zip(names, leaves, *lines_of_ranks, strict=True):
        if len(set(lines)) > 1:
            with silence(), torch.no_grad():
                raise AssertionError(_describe_difference(name, x, ranks))


def _replicated_leaves(value: PyTree, ranks: RankGroup) -> tuple[list[str], list[Leaf]]:
    """Returns the paths and leaves that must be one value along an axis."""
    paths, leaves, _ = tree.flatten_with_paths(value, is_leaf=is_sharded)
    names, parts = [], []
    for path, x in zip(paths, leaves, strict=True):
        if is_sharded(x):
            if not set(x.layout.axes).isdisjoint(ranks.axis):
                continue
            x = x.local
        for suffix, part in _dense_parts(x):
            names.append(path + suffix)
            parts.append(part)
    return names, parts


def _dense_parts(x: Leaf) -> list[tuple[str, Leaf]]:
    """Returns a leaf as it is; of a sparse tensor, its indices and its values."""
    if not isinstance(x, Tensor) or x.layout == torch.strided:
        return [("", x)]
    x = x.detach().to_sparse_coo().coalesce()
    return [(" indices", x.indices()), (" values", x.values())]


def _describe_difference(name: str, x: Leaf, ranks: RankGroup) -> str:
    leaf_text = (
        describe_tensor(x.shape, x.dtype, repr(name))
        if isinstance(x, Tensor)
        else repr(name)
    )
    opening = (
        f"{leaf_text} differs along {ranks.name}, where it is claimed to be one value"
    )
    if not isinstance(x, Tensor):
        return f"{opening}; this rank has {x!r}"
    flat = x.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    # As bytes: no backend sends numbers of 8 bits.
    bits = gather_stacked(flat.view(torch.uint8), ranks)
    values_of_ranks = bits.view(flat.dtype)
    bits = bits.view(ranks.size, flat.numel(), -1)
    differs = (bits != bits[:1]).any(-1).any(0)
    first_unlike = int(differs.int().argmax())
    index = index_of_element(first_unlike, x.shape)
    lines = [
        f"  at {index} rank {rank} has {row[first_unlike].item()!r}"
        for rank, row in zip(ranks.ranks, values_of_ranks, strict=True)
    ]
    omitted = [f"  and {len(lines) - _SHOWN} more ranks"] if len(lines) > _SHOWN else []
    advice = "sum or average it over the axis, or send one rank's by ff.pbroadcast"
    return "\n".join([f"{opening}: {advice}", *lines[:_SHOWN], *omitted])


def check_types(
    step: Callable[..., Any],
    mesh: Mesh,
    state: PyTree,
    *batch: PyTree,
    axis: Axis | tuple[()] | None = None,
    layouts: LayoutRules | None = None,
) -> None:
    """Raises unless the types of values in ``step`` fit on all ranks of a mesh.

    The step is run on tensors without data, as the first rank and as the last. Each
    value has a type: replicated (I), each rank's own (V), or a part of one value. The
    check follows types through every operator, and refuses combinations without a
    meaning. A sharded step runs this check in its first call.

    Args:
        step, mesh, state, batch, axis, layouts: as for `assert_equals_one_device`.

    Raises:
        LawError, NotATensor: names the line, the leaf, and the way out.
        Exception: what the step raises itself.

    Cost: no memory, and nothing is sent but what ranks compare.

    >>> import torch, fsfunc as ff
    >>> unit = ff.unit(lambda w, x: x @ w)
    >>> def noisy(w, x):
    ...     g = ff.value_and_grad(lambda w, x: unit(w, x).sum())(w, x)[1]
    ...     return ff.tree.map(lambda g: g + torch.randn_like(g), g)
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> step = ff.shard(noisy, mesh, "data")
    >>> check_types(step, mesh, torch.ones(3), torch.ones(4, 3))
    Traceback (most recent call last):
        ...
    fsfunc.comm.typed_maps.LawError: ...
    """
    check_mesh(mesh, "check_types")
    axes = batch_axes(step, mesh) if axis is None else axis_names(axis)

    def main() -> None:
        local_batch_rows = local_batch(batch, mesh, axes) if axes else batch
        placed = place(step, state, *local_batch_rows, layouts=layouts)
        check(step, (placed, *local_batch_rows), {}, here(mesh), axes)

    spmd(main, mesh)()
