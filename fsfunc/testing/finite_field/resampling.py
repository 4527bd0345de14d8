"""Rules of pooling by means and of interpolation: linear maps with constant weights.

The weights are read off torch's own kernel, which is given each position alone; each is
the simplest fraction near to it. A backward is the transpose of its forward.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from fsfunc.testing.finite_field.field import (
    Field,
    constant,
    matmul,
    modulo,
    product,
    simplest_between,
)
from fsfunc.testing.finite_field.reductions import total
from fsfunc.testing.finite_field.rules import rule, value

Sizes = tuple[int, ...]

_NEAR = Fraction(1, 1 << 40)  # kernels round their weights by less


@functools.lru_cache(maxsize=256)
def _weights(name: str, sizes: Sizes, how: tuple[Any, ...]) -> tuple[Tensor, Sizes]:
    """Returns the matrix [positions in, positions out] of a kernel, and its out sizes.

    Args:
        sizes: the input's, without rows and channels.
        how: the kernel's other arguments.
    """
    n = math.prod(sizes)
    one_each = torch.eye(n, dtype=torch.float64).view(n, 1, *sizes)
    how = tuple(list(x) if isinstance(x, tuple) else x for x in how)
    images = getattr(torch.ops.aten, name).default(one_each, *how)
    known: dict[float, float] = {}
    for w in set(images.flatten().tolist()):
        low, high = Fraction(w) - _NEAR, Fraction(w) + _NEAR
        known[w] = constant(float(simplest_between(low, high)))
    matrix = [known[w] for w in images.flatten().tolist()]
    return torch.tensor(matrix, dtype=torch.float64).view(n, -1), images.shape[2:]


def _hashed(how: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(tuple(x) if isinstance(x, list) else x for x in how)


def resampled(name: str, dims: int, x: Tensor, how: Sequence[Any]) -> Tensor:
    """Returns what a kernel makes of the last ``dims`` dims of residues."""
    matrix, sizes = _weights(name, tuple(x.shape[-dims:]), _hashed(how))
    return matmul(x.flatten(-dims), matrix).unflatten(-1, sizes)


def transposed(
    name: str, dims: int, g: Tensor, sizes: Sequence[int], how: Sequence[Any]
) -> Tensor:
    """Returns its backward: for a cotangent, and the sizes of its input."""
    matrix, _ = _weights(name, tuple(sizes)[-dims:], _hashed(how))
    return matmul(g.flatten(-dims), matrix.mT).unflatten(-1, tuple(sizes)[-dims:])


def _pooling(name: str, dims: int) -> None:
    @rule(name)
    def forward(f: Field, x: Any, *how: Any) -> Tensor:
        return resampled(name, dims, value(x), how)

    @rule(f"{name}_backward")
    def backward(f: Field, g: Any, x: Any, *how: Any) -> Tensor:
        how = how or (tuple(g.shape[-dims:]),)  # of an adaptive one
        return transposed(name, dims, value(g), x.shape, how)


def _upsampling(name: str, dims: int) -> None:
    @rule(name)
    def forward(f: Field, x: Any, *how: Any) -> Tensor:
        return resampled(name, dims, value(x), how)

    @rule(f"{name}_backward")
    def backward(f: Field, g: Any, output_size: Any, input_size: Any, *how: Any):
        return transposed(name, dims, value(g), input_size, (output_size, *how))


for dims in (2, 3):
    _pooling(f"avg_pool{dims}d", dims)
    _pooling(f"_adaptive_avg_pool{dims}d", dims)
for dims in (1, 2, 3):
    _upsampling(f"upsample_nearest{dims}d", dims)
    _upsampling(f"_upsample_nearest_exact{dims}d", dims)
for name, dims in (("linear1d", 1), ("bilinear2d", 2), ("bicubic2d", 2),
                   ("trilinear3d", 3)):  # fmt: skip
    _upsampling(f"upsample_{name}", dims)
for name in ("bilinear2d", "bicubic2d"):
    _upsampling(f"_upsample_{name}_aa", 2)


@rule("_trilinear")
def products_of_three(
    f: Field, a: Any, b: Any, c: Any, expand_a: Any, expand_b: Any, expand_c: Any,
    summed: Any, unroll_dim: int = 1,
) -> Tensor:  # fmt: skip
    """Sums of products of three, each with dims of one where it has none."""
    each = [value(a), value(b), value(c)]
    for i, dims in enumerate((expand_a, expand_b, expand_c)):
        for dim in sorted(dims):
            each[i] = each[i].unsqueeze(dim)
    both = product(product(each[0], each[1]), each[2])
    return total(both, summed) if summed else modulo(both)
