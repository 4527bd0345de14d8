"""Comparison of trees, and integer data whose sums are exact in any order.

Sums and products of integers, and means over powers of two, have the same bits in any
order: a sharded step must give the very bits of one device, without a tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.placements import describe_tensor
from fsfunc.testing.finite_field import is_exact


@dataclass(frozen=True)
class Difference:
    """Two leaves that are not equal.

    Args:
        path: the leaf's, in the tree.
        said: what differs, and where, in words.
        found, expected: the two leaves.
        index: of the first element that differs, where both have one.
    """

    path: str
    said: str
    found: Any
    expected: Any
    index: tuple[int, ...] | None = None

    def at_index(self, x: Any) -> str:
        """The element of ``x``, a leaf like these two, at the index."""
        if not isinstance(x, Tensor):
            return repr(x)
        if self.index is None or len(self.index) != x.ndim:
            return describe_tensor(x.shape, x.dtype)
        if any(i >= n for i, n in zip(self.index, x.shape, strict=True)):
            return f"nothing ({describe_tensor(x.shape, x.dtype)})"
        return repr(x.detach()[self.index].item())


def difference(found: Any, expected: Any, tolerance: float = 0.0) -> Difference | None:
    """The first leaf in which two trees differ, or None.

    Args:
        tolerance: the largest difference of two numbers, relative to theirs or to 1;
            0 requires equal values.

    Raises:
        TreeMismatch: the structures differ.
    """
    tree.check_same_structure(expected, found)
    names, leaves, _ = tree.flatten_with_paths(found)
    for path, a, b in zip(names, leaves, tree.leaves(expected), strict=True):
        if (seen := _unlike(path, a, b, tolerance)) is not None:
            return seen
    return None


def _unlike(path: str, a: Any, b: Any, tolerance: float) -> Difference | None:
    name = repr(path) if path else "the value"
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        same = _same(a, b, tolerance)
        return None if same else Difference(path, f"{name} differs", a, b)
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        said = f"{name} is a {type(a).__name__}, not a {type(b).__name__}"
        return Difference(path, said, a, b)
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        kinds = describe_tensor(a.shape, a.dtype), describe_tensor(b.shape, b.dtype)
        return Difference(path, f"{name} is {kinds[0]}, not {kinds[1]}", a, b)
    differs = far(a, b, tolerance)
    if not bool(differs.any()):
        return None
    first = int(differs.reshape(-1).to(torch.uint8).argmax())
    index = place_of(first, a.shape)
    count = int(differs.sum())
    said = f"{describe_tensor(a.shape, a.dtype, name)} differs"
    if a.ndim:
        said += f" at {index}, in {count} of {a.numel()} elements"
    return Difference(path, said, a, b, index)


def place_of(number: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The index of an element, of its number in rows."""
    found = torch.unravel_index(torch.tensor(number, device="cpu"), tuple(shape))
    return tuple(int(i) for i in found)


def _same(a: Any, b: Any, tolerance: float) -> bool:
    if isinstance(a, bool | int | float) and type(a) is not type(b):
        return False  # as 1 and 1.0
    if isinstance(a, float) and isinstance(b, float):
        return a == b or math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)
    if "numpy" in (type(a).__module__, type(b).__module__):
        return _same_arrays(a, b, tolerance)
    return bool(a == b)


def _same_arrays(a: Any, b: Any, tolerance: float) -> bool:
    """`_same` of numpy's arrays and scalars: those of other shapes would broadcast."""
    if type(a) is not type(b) or (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    if a.dtype.kind not in "biufc":
        return bool((a == b).all())
    return not bool(far(torch.as_tensor(a), torch.as_tensor(b), tolerance).any())


def far(a: Tensor, b: Tensor, tolerance: float) -> Tensor:
    """True in the elements that are neither equal nor near; NaN is near nothing."""
    a, b = a.detach(), b.detach()
    same = a == b
    if is_exact():
        return ~same  # nothing is near in a finite field
    if tolerance and (a.is_floating_point() or a.is_complex()):
        wide = torch.complex128 if a.is_complex() else torch.float64
        a, b = a.to(wide), b.to(wide)
        near = (a - b).abs() <= tolerance * (1 + b.abs())
        same = same | near & b.isfinite()  # all is near to an infinity
    return ~same


def assert_equal(found: Any, expected: Any, tolerance: float = 0.0) -> None:
    """Raises unless two trees have one structure, and the same shapes, dtypes, values.

    Args:
        tolerance: how far numbers may be from each other, relative to theirs or to 1;
            0: not at all.

    Raises:
        TreeMismatch: where structures differ, by path.
        AssertionError: names the first leaf that differs, and its first element.

    >>> import torch
    >>> assert_equal({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([1.0, 4.0])})
    Traceback (most recent call last):
        ...
    AssertionError: 'w' f32[2] differs at (1,), in 1 of 2 elements
      expected 4.0
      found 2.0
    """
    seen = difference(found, expected, tolerance)
    if seen is not None:
        raise AssertionError(
            f"{seen.said}\n  expected {seen.at_index(seen.expected)}\n"
            f"  found {seen.at_index(seen.found)}"
        )


def held(values: Any) -> list[Tensor]:
    """Copies of all tensors in a tree, of sharded leaves their parts."""
    leaves = tree.leaves(values, is_leaf=is_sharded)
    parts = [x.local if is_sharded(x) else x for x in leaves]
    return [x.detach().clone() for x in parts if isinstance(x, Tensor)]


def integers(
    *shape: int, seed: int = 0, high: int = 2, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Integers of ``-high`` to ``high``, the same for one seed and shape.

    >>> integers(2, 3)
    tensor([[ 2.,  2.,  1.],
            [-2.,  1.,  2.]])
    """
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-high, high + 1, shape, generator=draw, device="cpu").to(dtype)
