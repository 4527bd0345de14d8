"""Comparison of trees, and integer data whose sums are exact in any order.

Everything in this folder that compares values does it by ``find_difference``. Sums and
products of integers, and means over powers of two, have the same bits in any order: on
such data a sharded step must give the very bits of one device, without a tolerance.
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
from fsfunc.tree.types import Leaf, PyTree


@dataclass(frozen=True)
class Difference:
    """Two leaves that are not equal.

    Args:
        path: the leaf's path in the tree.
        message: what differs, and where, in words.
        actual, expected: the two leaves.
        index: the first element that differs, if shapes and dtypes are equal.
    """

    path: str
    message: str
    actual: Leaf
    expected: Leaf
    index: tuple[int, ...] | None = None

    def describe_element(self, x: Leaf) -> str:
        """Returns, as text, what a leaf like these two has at the index."""
        if not isinstance(x, Tensor):
            return repr(x)
        if self.index is None or len(self.index) != x.ndim:
            return describe_tensor(x.shape, x.dtype)
        if any(i >= n for i, n in zip(self.index, x.shape, strict=True)):
            return f"nothing ({describe_tensor(x.shape, x.dtype)})"
        return repr(x.detach()[self.index].item())


def find_difference(
    actual: PyTree, expected: PyTree, tolerance: float = 0.0
) -> Difference | None:
    """Returns the first leaf in which two trees differ, or None.

    Args:
        tolerance: the largest difference of two numbers, relative to theirs or to 1;
            0 requires equal values.

    Raises:
        TreeMismatch: the structures differ.
    """
    tree.check_same_structure(expected, actual)
    names, leaves, _ = tree.flatten_with_paths(actual)
    for path, x, y in zip(names, leaves, tree.leaves(expected), strict=True):
        if (difference := _compare_leaves(path, x, y, tolerance)) is not None:
            return difference
    return None


def _compare_leaves(
    path: str, actual: Leaf, expected: Leaf, tolerance: float
) -> Difference | None:
    name = repr(path) if path else "the value"
    if not isinstance(actual, Tensor) and not isinstance(expected, Tensor):
        is_equal = _equal_values(actual, expected, tolerance)
        return (
            None if is_equal else Difference(path, f"{name} differs", actual, expected)
        )
    if not isinstance(actual, Tensor) or not isinstance(expected, Tensor):
        message = (
            f"{name} is a {type(actual).__name__}, not a {type(expected).__name__}"
        )
        return Difference(path, message, actual, expected)
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        descriptions = (
            describe_tensor(actual.shape, actual.dtype),
            describe_tensor(expected.shape, expected.dtype),
        )
        return Difference(
            path,
            f"{name} is {descriptions[0]}, not {descriptions[1]}",
            actual,
            expected,
        )
    mask = differing_elements(actual, expected, tolerance)
    if not bool(mask.any()):
        return None
    first_number = int(mask.reshape(-1).to(torch.uint8).argmax())
    index = index_of_element(first_number, actual.shape)
    count = int(mask.sum())
    message = f"{describe_tensor(actual.shape, actual.dtype, name)} differs"
    if actual.ndim:
        message += f" at {index}, in {count} of {actual.numel()} elements"
    return Difference(path, message, actual, expected, index)


def index_of_element(number: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the index of an element by its number in row-major order."""
    index = torch.unravel_index(torch.tensor(number, device="cpu"), tuple(shape))
    return tuple(int(i) for i in index)


def _equal_values(a: Leaf, b: Leaf, tolerance: float) -> bool:
    if isinstance(a, bool | int | float) and type(a) is not type(b):
        return False  # 1 == 1.0, but a step that returns another type is another step
    if isinstance(a, float) and isinstance(b, float):
        return a == b or math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)
    if "numpy" in (type(a).__module__, type(b).__module__):
        return _equal_arrays(a, b, tolerance)
    return bool(a == b)


def _equal_arrays(a: Any, b: Any, tolerance: float) -> bool:
    """Compares numpy's arrays and scalars."""
    # Shapes first: ``==`` would broadcast.
    if type(a) is not type(b) or (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    if a.dtype.kind not in "biufc":
        return bool((a == b).all())
    return not bool(
        differing_elements(torch.as_tensor(a), torch.as_tensor(b), tolerance).any()
    )


def differing_elements(a: Tensor, b: Tensor, tolerance: float) -> Tensor:
    """Returns a mask of the elements that are neither equal nor near.

    NaN is near nothing.
    """
    a, b = a.detach(), b.detach()
    equal = a == b
    if is_exact():
        return ~equal  # residues of a finite field have no order: none is near another
    if tolerance and (a.is_floating_point() or a.is_complex()):
        wide_dtype = torch.complex128 if a.is_complex() else torch.float64
        a, b = a.to(wide_dtype), b.to(wide_dtype)
        is_near = (a - b).abs() <= tolerance * (1 + b.abs())
        equal = equal | is_near & b.isfinite()  # all is near to an infinity
    return ~equal


def assert_equal(found: PyTree, expected: PyTree, tolerance: float = 0.0) -> None:
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
    difference = find_difference(found, expected, tolerance)
    if difference is not None:
        raise AssertionError(
            f"{difference.message}\n"
            f"  expected {difference.describe_element(difference.expected)}\n"
            f"  found {difference.describe_element(difference.actual)}"
        )


def copy_tensors(values: PyTree) -> list[Tensor]:
    """Copies all tensors in a tree; of sharded leaves this rank's parts."""
    leaves = tree.leaves(values, is_leaf=is_sharded)
    parts = [x.local if is_sharded(x) else x for x in leaves]
    return [x.detach().clone() for x in parts if isinstance(x, Tensor)]


def integers(
    *shape: int, seed: int = 0, high: int = 2, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Returns integers of ``-high`` to ``high``, the same for one seed and shape.

    >>> integers(2, 3)
    tensor([[ 2.,  2.,  1.],
            [-2.,  1.,  2.]])
    """
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-high, high + 1, shape, generator=draw, device="cpu").to(dtype)
