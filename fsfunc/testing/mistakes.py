"""What a wrong tensor is, beside the right one: so many times it, in another order.

Each rule is a question to two tensors, in float64, and a sentence that names the cause.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fsfunc.comm.mesh import Axis, Mesh
from fsfunc.testing.comparing import far

__all__ = ["Shares", "multiple", "named", "near", "over_axes", "said_of"]


@dataclass(frozen=True)
class Shares:
    """A mesh, the axes over which a batch is cut, and the rows of each rank."""

    mesh: Mesh
    axes: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()

    def __str__(self) -> str:
        return ", ".join(map(str, self.rows))

    @property
    def padded(self) -> float:
        """The rows that there are, by those that ranks have once all have as many."""
        return sum(self.rows) / (len(self.rows) * max(self.rows, default=1) or 1)


def said_of(
    found: Tensor,
    expected: Tensor,
    before: Tensor | None,
    shares: Shares,
    parts: bool = True,
) -> Iterator[str]:
    """What would make ``found`` of ``expected``; the first is the best guess.

    Args:
        before: what was given, in whose place they come.
        parts: whether to go on to which part is wrong.
    """
    if not bool(found.any()) and bool(expected.any()):
        yield (
            "it is zero: lost on its way (a detached tensor, one captured by closure, "
            "a custom backward that returns nothing), or never summed"
        )
    if before is not None and before.shape == found.shape:
        if near(found, before) and not near(expected, before):
            yield (
                "it is what the call was given: never updated, or an old copy is "
                "returned"
            )
    if (by := ratio(found, expected)) is not None:
        yield from _times(by, "it", expected, shares)
    if before is not None and before.shape == found.shape:
        by = ratio(found - before, expected - before)
        if by is not None:
            yield from _times(by, "its change", expected, shares)
    yield from _rounded(found, expected)
    yield from _another_order(found, expected)
    if parts:
        yield from _normalised(found, expected, shares)
        yield from _where(found, expected, shares)


def _times(by: float, what: str, like: Tensor, shares: Shares) -> Iterator[str]:
    """Why a value would be so many times the right one."""
    is_close = lambda a, b: math.isclose(a, b, rel_tol=1e-6)  # noqa: E731
    for axis in over_axes(shares.mesh):
        n = shares.mesh.axis_size(axis)
        if n > 1 and is_close(by, n):
            yield (
                f"{what} is {n} times too large, the size of {named(axis)}: a sum in "
                "the place of a mean, a part counted on every rank, or reduced twice"
            )
        if n > 1 and is_close(by * n, 1):
            yield (
                f"{what} is {n} times too small, the size of {named(axis)}: a mean in "
                "the place of a sum, or divided twice"
            )
        if n > 1 and like.numel() > 1 and is_close(max(by, 1 / by), math.sqrt(n)):
            way = "large" if by > 1 else "small"
            yield (
                f"{what} is sqrt({n}) times too {way}, {n} being the size of "
                f"{named(axis)}: a norm that counts copies once for each rank, or only "
                "a rank's part"
            )
    if is_close(by, -1):
        yield f"{what} has the wrong sign"
    elif shares.padded < 1 and is_close(by, shares.padded):
        yield (
            f"{what} is {by:.6g} times that of one device, as if ranks with "
            f"{shares} rows all had {max(shares.rows)}: padding leaks into a mean"
        )
    elif _whole(by):
        yield (
            f"{what} is {by:.0f} times too large: counted {by:.0f} times, or "
            "accumulated without division"
        )
    elif _whole(1 / by):
        yield f"{what} is {1 / by:.0f} times too small: divided once too often"
    elif like.numel() > 1:
        yield f"{what} is {by:.6g} times that of one device: scaled by another number"


def _whole(x: float) -> bool:
    return x > 1.5 and math.isclose(x, round(x), rel_tol=1e-6)


def _rounded(found: Tensor, expected: Tensor) -> Iterator[str]:
    """Less precise than it should be."""
    if not expected.numel() or near(found, expected):
        return
    gap, scale = (found - expected).abs().max(), expected.abs().max()
    if near(found, _bf16(expected)) or near(found, expected.half().double()):
        yield "it is rounded to 16 bits: cast, or reduced, in bfloat16 or float16"
    elif bool(gap <= 0.05 * scale):
        if near(found, _bf16(found)) and not near(expected, _bf16(expected)):
            yield "it has 8 bits of precision: reduced, or added up, in bfloat16"


def _bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).double()


def _another_order(found: Tensor, expected: Tensor) -> Iterator[str]:
    """The right elements elsewhere."""
    if found.ndim == 2 and near(found, expected.T):
        yield "it is transposed: cut, or joined, along the other dim"
    same = near(found.flatten().sort().values, expected.flatten().sort().values)
    if same and found.numel() > 1:
        yield (
            "it has the right elements in another order: parts joined along another "
            "dim, or in another order of ranks"
        )


def _normalised(found: Tensor, expected: Tensor, shares: Shares) -> Iterator[str]:
    """Each part along a dim is right but for a factor of its own."""
    for axis in over_axes(shares.mesh):
        n = shares.mesh.axis_size(axis)
        for dim, length in enumerate(expected.shape):
            if n == 1 or length % n or length == n:
                continue
            factors = []
            for a, b in zip(found.chunk(n, dim), expected.chunk(n, dim), strict=True):
                k = a.sum(dim, keepdim=True) / b.sum(dim, keepdim=True)
                factors.append(k if near(a, k * b) else None)
            if all(k is not None for k in factors):
                yield (
                    f"each {n}th of dim {dim} has a factor of its own: a softmax, norm "
                    f"or mean ran over a dim that is split over {named(axis)}"
                )


def _where(found: Tensor, expected: Tensor, shares: Shares) -> Iterator[str]:
    """Which part is wrong, and whose it is."""
    apart = far(found, expected, 1e-6)
    for dim, n in enumerate(apart.shape):
        others = [d for d in range(apart.ndim) if d != dim]
        lines = apart.any(dim=others) if others else apart
        wrong = lines.nonzero().flatten().tolist()
        if not 0 < len(wrong) < n:
            continue
        chosen = found.index_select(dim, torch.tensor(wrong))
        what = f"elements {_ranges(wrong)} of dim {dim}"
        if not bool(chosen.any()):
            yield (
                f"{what} are zero, and no others wrong: dropped (a capacity, a mask), "
                "or never filled"
            )
        first = n // max(shares.mesh.axis_size(shares.axes), 1) if shares.axes else n
        if dim == 0 and sum(shares.rows) == n and min(wrong) >= first:
            yield (
                f"only {what} are wrong, none of the first rank's rows: the others' "
                "draws, positions or mask are as if they were the first's (a key, or "
                "an offset, without axis_index)"
            )
        yield f"only {what} are wrong, on every rank"


def _ranges(numbers: list[int]) -> str:
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}:{numbers[-1] + 1}"
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")


def near(a: Tensor, b: Tensor) -> bool:
    """Whether they are equal but for rounding."""
    return a.shape == b.shape and not bool(far(a, b, 1e-6).any())


def ratio(a: Tensor, b: Tensor) -> float | None:
    """k, where a = k b, and neither is zero."""
    if not a.numel() or not bool(b.any()) or not bool(a.any()):
        return None
    at = int(b.abs().argmax())
    k = float(a.flatten()[at] / b.flatten()[at])
    scale = float(a.abs().max())  # near to zero all is near
    return k if k not in (0.0, 1.0) and near(a / scale, k * b / scale) else None


def multiple(delta: Tensor, x: Tensor) -> float | None:
    """k, where delta = k x once x is repeated, and neither is zero."""
    if x.ndim > delta.ndim or not x.numel() or not bool(delta.any()):
        return None
    try:
        wide = x.expand_as(delta)
    except RuntimeError:
        return None
    return 1.0 if near(delta, wide) else ratio(delta, wide)


def over_axes(mesh: Mesh) -> list[Axis]:
    """Each axis of a mesh, and all of them."""
    names = list(mesh.axes)
    return [*names, tuple(names)] if len(names) > 1 else list(names)


def named(axis: Axis) -> str:
    """An axis as messages show it."""
    names = (axis,) if isinstance(axis, str) else axis
    return ", ".join(f'"{name}"' for name in names)
