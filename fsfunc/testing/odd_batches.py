"""What data no rank expected: NaN, infinity or nothing at all, asked of every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.groups import group
from fsfunc.comm.ledgers import silence
from fsfunc.comm.mesh import Axis

__all__ = ["OddBatch", "check_batch"]

_SHOWN = 12  # lines of a message


class OddBatch(ValueError):
    """Some rank's data are not finite, or are empty."""


def check_batch(batch: Any, axis: Axis, name: str = "the batch") -> None:
    """Raises, on every rank alike, where any rank's leaf is not finite, or is empty.

    A loss is one number for all ranks: if it is NaN, this says whose rows made it so.
    Any tree may be asked about: a batch, gradients, what a step returned.

    Args:
        batch: a tree of tensors, arrays and numbers, of the same leaves on every rank;
            of sharded leaves each rank looks at its own part.
        axis: the ranks that are asked, all of which call this; one name or several.
        name: what the message calls it.

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
    fsfunc.testing.odd_batches.OddBatch: the batch is not what a step expects:
      rank 0 'x': 1 of 6 elements infinite
      rank 0 'y': 1 of 3 elements infinite
    on simulated rank 1 of Mesh({'data': 2}, 'simulated')
    """
    where = group(axis)
    paths, leaves, _ = tree.flatten_with_paths(batch)
    tensors = {
        p: torch.as_tensor(x).detach()
        for p, x in zip(paths, leaves, strict=True)
        if _has_values(x)
    }
    tensors = tensors or {"": torch.zeros(0)}  # no leaf at all is empty too
    every = mine = torch.stack([_counts(x).cpu() for x in tensors.values()])
    if where.size > 1:
        with silence():
            x = mine.to(where.link.device)
            every = where.start("all_gather", x).wait().cpu()
    rows = []
    each = every.view(where.size, len(tensors), 3).tolist()
    for rank, found in zip(where.ranks, each, strict=True):
        for path, (nans, infinite, size) in zip(tensors, found, strict=True):
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
