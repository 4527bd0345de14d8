"""The rows of a batch: dim 0, along which microbatches are cut."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

__all__ = ["rows_of"]


def rows_of(batch: Mapping[str, Tensor], n: int, *, even: bool = False) -> int:
    """How many rows a batch has, once it is known that ``n`` parts can be cut of it.

    Args:
        batch: path -> leaf, of one dim or more.
        n: how many parts; where nothing is to be cut, any number goes.
        even: whether the parts must be of one size.

    Raises:
        ValueError: leaves that differ in dim 0, fewer rows than parts, or a number of
            rows that the parts do not divide.
    """
    rows = {path: x.shape[0] for path, x in batch.items()}
    if len(set(rows.values())) > 1:
        raise ValueError(
            f"batch leaves differ in dim 0, along which microbatches are cut: {rows}; "
            "make what has no batch dim inside the loss; frozen parameters go into the "
            "first argument, or the loss captures them"
        )
    count = next(iter(rows.values()), n)
    if count >= n and not (even and count % n):
        return count
    shapes = {path: tuple(x.shape) for path, x in batch.items()}
    if count == 0:
        why = "the batch is empty, and a mean over no rows is no number: leave it out"
    elif count < n:
        why = "give at least one row each"
    else:
        why = f"{count} is not a multiple of {n}"
    raise ValueError(
        f"cannot cut {count} rows (dim 0 of the batch leaves {shapes}) into {n} "
        f"microbatches: {why}"
    )
