"""The warning where ranks that average their gradients are given one batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.attribution import warn
from fsfunc.comm.comparison import Section, digests, has_values, whole_values
from fsfunc.comm.groups import group
from fsfunc.comm.mesh import Here
from fsfunc.sharded.leaf import is_sharded


def warn_of_equal(batch: Any, axes: tuple[str, ...], at: Here) -> None:
    """Warns where all ranks along one of ``axes`` are given equal batches.

    Not of batches without rows, or of rows that are all alike, as those of a part are
    the same as those of the whole.

    Cost: the batch is read once; over processes a gather of 16 bytes, in no ledger.
    """
    paths, leaves, _ = tree.flatten_with_paths(batch, is_leaf=is_sharded)
    where = group(axes, at)
    found = whole_values(paths, leaves, where.link.notes)
    rows = [x for x in leaves if has_values(x) and x.ndim and x.numel()]
    every = digests(found, where) if rows else digests(_NONE, where)
    quiet = where.link.notes is None and where.index  # its first process says it
    if every is None or _NONE.digest in every or quiet:
        return
    sizes = [at.mesh.axes[a] for a in axes]
    same = [a for i, a in enumerate(axes) if _equal_along(i, sizes, every)]
    if same and not all(map(_is_one_row, rows)):
        names, n = " and ".join(map(repr, same)), at.mesh.axis_size(tuple(same))
        every_axis, over = (a[0] if len(a) == 1 else tuple(a) for a in (axes, same))
        warn(_EQUAL.format(names, n, every_axis, over))


def _equal_along(i: int, sizes: Sequence[int], every: Sequence[bytes]) -> bool:
    """True if the ranks that differ in coordinate ``i`` alone have equal digests."""
    places = itertools.product(*map(range, sizes))
    by_place = dict(zip(places, every, strict=True))
    return all(x == by_place[*p[:i], 0, *p[i + 1 :]] for p, x in by_place.items())


def _is_one_row(x: Tensor) -> bool:
    """True if all rows of a tensor are alike; of one row, its elements."""
    with torch.no_grad():
        x = x.flatten() if len(x) == 1 else x
        return bool((x == x[:1]).all())


_NONE = Section("", [])
_EQUAL = (
    "the ranks along {} are given equal batches: all {} train on the same rows. Give "
    "each its own, ff.local_batch(batch, mesh, {!r}) of a batch that every rank holds; "
    "or say that it is meant, shard(..., equal_batches={!r})"
)
