"""Checks of what ranks hold: replicated values, batches, types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.comparison import unlike
from fsfunc.comm.descriptions import checksums
from fsfunc.comm.groups import RankGroup, gathered, group
from fsfunc.comm.launch import local_batch, spmd
from fsfunc.comm.ledgers import silence
from fsfunc.comm.mesh import Axis, Mesh, axis_names, check_mesh, here
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.placements import describe_tensor
from fsfunc.state.layout_rules import LayoutRules
from fsfunc.state.placing import place
from fsfunc.testing.comparing import place_of
from fsfunc.testing.step_runs import batch_axes
from fsfunc.tracing.type_check import check

_SHOWN = 8  # ranks of a message, or leaves


class OddBatch(ValueError):
    """Some rank's data are not finite, or are empty."""


def check_batch(batch: Any, axis: Axis, name: str = "the batch") -> None:
    """Raises on every rank if any rank's leaf is not finite, or is empty.

    A loss is one number for all ranks: if it is NaN, this names the ranks whose rows
    made it so. Any tree can be checked: a batch, gradients, the result of a step.

    Args:
        batch: a tree of tensors, arrays and numbers, with the same leaves on every
            rank; of sharded leaves each rank checks its own part.
        axis: the axis of the ranks, all of which must call this; one name or several.
        name: the name of the tree, for the message.

    Raises:
        OddBatch: names the ranks, the leaves, and how many elements are NaN or
            infinite.

    Cost: each leaf is read once, and waited for; one gather of 24 bytes a leaf, which
    is in no ledger.

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
    where = group(axis)
    paths, leaves, _ = tree.flatten_with_paths(batch)
    tensors = {
        # As it is: torch.as_tensor moves a tensor to the default device.
        p: (x if isinstance(x, Tensor) else torch.as_tensor(x)).detach()
        for p, x in zip(paths, leaves, strict=True)
        if _has_values(x)
    }
    tensors = tensors or {
        "": torch.zeros(0, device="cpu")
    }  # no leaf at all is empty too
    mine = torch.stack([_counts(x).cpu() for x in tensors.values()])
    with silence():
        every = gathered(mine, where).tolist()
    rows = []
    for rank, counts in zip(where.ranks, every, strict=True):
        for path, (nans, infinite, size) in zip(tensors, counts, strict=True):
            kinds = {"NaN": nans, "infinite": infinite}
            bad = [f"{n} of {size} elements {what}" for what, n in kinds.items() if n]
            bad = bad if size else ["empty"]
            if bad:
                rows.append(f"  rank {rank} {path!r}: {', '.join(bad)}")
    if rows:
        more = [f"  and {len(rows) - _SHOWN} more"] if len(rows) > _SHOWN else []
        title = f"{name} is not what a step expects:"
        raise OddBatch("\n".join([title, *rows[:_SHOWN], *more]))


def _has_values(x: Any) -> bool:
    if isinstance(x, Tensor):
        return not x.is_meta
    kind = getattr(getattr(x, "dtype", None), "kind", "")  # a numpy array's
    return isinstance(x, float) or kind != "" and kind in "biufc"


def _counts(x: Tensor) -> Tensor:
    """(how many are NaN, how many infinite, how many there are)."""
    size = torch.tensor(x.numel(), device=x.device)
    if not (x.is_floating_point() or x.is_complex()):
        return torch.stack([0 * size, 0 * size, size])
    return torch.stack([x.isnan().sum(), x.isinf().sum(), size])


def check_replicated(value: Any, axis: Axis) -> None:
    """Raises, on every rank, unless the ranks along ``axis`` have the same bits.

    Every rank calls it. Of sharded leaves those are compared that are not cut along the
    axis: each rank's part.

    Args:
        value: a tree of tensors of any dtype; other leaves are compared as they print.
        axis: one name or several.

    Raises:
        AssertionError: names the first leaf and element that differ, and what each rank
            has there.

    Cost: each tensor is read once, and waited for; one gather of 16 bytes, in no
    ledger. More only where they differ.

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
    where = group(axis)
    names, leaves = _claimed(value, where)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    kinds = [
        describe_tensor(x.shape, x.dtype) if isinstance(x, Tensor) else ""
        for x in leaves
    ]
    sums = map(str, checksums(tensors))
    texts = [next(sums) if isinstance(x, Tensor) else repr(x) for x in leaves]
    keys = [f"{name} {kind}" for name, kind in zip(names, kinds, strict=True)]
    every = unlike([*zip(keys, texts, strict=True)], where).values()
    if len({tuple(key for key, _ in lines) for lines in every}) > 1:
        mine = ", ".join(map(repr, names[:_SHOWN])) or "no leaves"
        raise AssertionError(
            f"the ranks along {where.name} have trees of unlike structure, shapes or "
            f"dtypes: this one has {mine}"
        )
    for name, x, *lines in zip(names, leaves, *every, strict=True):
        if len(set(lines)) > 1:
            with silence(), torch.no_grad():
                raise AssertionError(_message(name, x, where))


def _claimed(value: Any, where: RankGroup) -> tuple[list[str], list[Any]]:
    """The leaves that are to be one value along an axis, by path."""
    paths, leaves, _ = tree.flatten_with_paths(value, is_leaf=is_sharded)
    names, found = [], []
    for path, x in zip(paths, leaves, strict=True):
        if is_sharded(x):
            if not set(x.layout.axes).isdisjoint(where.axis):
                continue
            x = x.local
        for what, part in _dense(x):
            names.append(path + what)
            found.append(part)
    return names, found


def _dense(x: Any) -> list[tuple[str, Any]]:
    """A leaf; of a sparse tensor, its indices and its values."""
    if not isinstance(x, Tensor) or x.layout == torch.strided:
        return [("", x)]
    x = x.detach().to_sparse_coo().coalesce()
    return [(" indices", x.indices()), (" values", x.values())]


def _message(name: str, x: Any, where: RankGroup) -> str:
    what = (
        describe_tensor(x.shape, x.dtype, repr(name))
        if isinstance(x, Tensor)
        else repr(name)
    )
    opening = f"{what} differs along {where.name}, where it is claimed to be one value"
    if not isinstance(x, Tensor):
        return f"{opening}; this rank has {x!r}"
    flat = x.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    # As bytes: no backend sends numbers of 8 bits.
    bits = gathered(flat.view(torch.uint8), where)
    every = bits.view(flat.dtype)
    bits = bits.view(where.size, flat.numel(), -1)
    differs = (bits != bits[:1]).any(-1).any(0)
    first = int(differs.int().argmax())
    index = place_of(first, x.shape)
    lines = [
        f"  at {index} rank {rank} has {row[first].item()!r}"
        for rank, row in zip(where.ranks, every, strict=True)
    ]
    more = [f"  and {len(lines) - _SHOWN} more ranks"] if len(lines) > _SHOWN else []
    advice = "sum or average it over the axis, or send one rank's by ff.pbroadcast"
    return "\n".join([f"{opening}: {advice}", *lines[:_SHOWN], *more])


def check_types(
    step: Callable[..., Any],
    mesh: Mesh,
    state: Any,
    *batch: Any,
    axis: Axis | tuple[()] | None = None,
    layouts: LayoutRules | None = None,
) -> None:
    """Raises unless ``step``, transformed, has one meaning on all ranks of a mesh.

    The step is run on tensors without data, as the first rank and the last. Whether a
    value is replicated (I), a rank's own (V), or a part of one value is followed
    through every operator; combinations without a meaning are refused. A sharded step
    does this in its first call.

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
        mine = local_batch(batch, mesh, axes) if axes else batch
        placed = place(step, state, *mine, layouts=layouts)
        check(step, (placed, *mine), {}, here(mesh), axes)

    spmd(main, mesh)()
