"""Rules of pooling by means and of interpolation: linear maps with constant weights.

The weights are read off torch's own kernel, by calling it on the unit vectors; each is
taken for the simplest fraction near to it. A backward is the transpose of its forward.
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
    simplest_fraction_between,
)
from fsfunc.testing.finite_field.reductions import total
from fsfunc.testing.finite_field.rules import residue_of, rule

Sizes = tuple[int, ...]

_TOLERANCE = Fraction(1, 1 << 40)  # kernels round their weights by less


@functools.lru_cache(maxsize=256)
def _weight_matrix(
    name: str, sizes: Sizes, options: tuple[Any, ...]
) -> tuple[Tensor, Sizes]:
    """Returns the matrix [positions in, positions out] of a kernel, and its out sizes.

    Args:
        sizes: the input's sizes, without batch and channels.
        options: the kernel's other arguments.
    """
    n = math.prod(sizes)
    unit_inputs = torch.eye(n, dtype=torch.float64).view(n, 1, *sizes)
    options = tuple(list(x) if isinstance(x, tuple) else x for x in options)
    images = getattr(torch.ops.aten, name).default(unit_inputs, *options)
    number_of_weight: dict[float, float] = {}
    for w in set(images.flatten().tolist()):
        low, high = Fraction(w) - _TOLERANCE, Fraction(w) + _TOLERANCE
        number_of_weight[w] = constant(float(simplest_fraction_between(low, high)))
    matrix = [number_of_weight[w] for w in images.flatten().tolist()]
    return torch.tensor(matrix, dtype=torch.float64).view(n, -1), images.shape[2:]


def _as_hashable(options: Sequence[Any]) -> tuple[Any, ...]:
    """Replaces lists by tuples, for the cache."""
    return tuple(tuple(x) if isinstance(x, list) else x for x in options)


def resample(name: str, dims: int, x: Tensor, options: Sequence[Any]) -> Tensor:
    """Applies a kernel to the last ``dims`` dims of residues."""
    matrix, sizes = _weight_matrix(name, tuple(x.shape[-dims:]), _as_hashable(options))
    return matmul(x.flatten(-dims), matrix).unflatten(-1, sizes)


def resample_transposed(
    name: str, dims: int, g: Tensor, sizes: Sequence[int], options: Sequence[Any]
) -> Tensor:
    """Applies the transpose of a kernel to the cotangent of its result."""
    matrix, _ = _weight_matrix(name, tuple(sizes)[-dims:], _as_hashable(options))
    return matmul(g.flatten(-dims), matrix.mT).unflatten(-1, tuple(sizes)[-dims:])


def _register_pooling(name: str, dims: int) -> None:
    """Registers a pooling by means, and its backward."""

    @rule(name)
    def forward(f: Field, x: Tensor, *options: Any) -> Tensor:
        return resample(name, dims, residue_of(x), options)

    @rule(f"{name}_backward")
    def backward(f: Field, g: Tensor, x: Tensor, *options: Any) -> Tensor:
        options = options or (
            tuple(g.shape[-dims:]),
        )  # an adaptive pool's only option is its output's size
        return resample_transposed(name, dims, residue_of(g), x.shape, options)


def _register_upsampling(name: str, dims: int) -> None:
    """Registers an interpolation, and its backward."""

    @rule(name)
    def forward(f: Field, x: Tensor, *options: Any) -> Tensor:
        return resample(name, dims, residue_of(x), options)

    @rule(f"{name}_backward")
    def backward(
        f: Field,
        g: Tensor,
        output_size: Sequence[int],
        input_size: Sequence[int],
        *options: Any,
    ) -> Tensor:
        return resample_transposed(
            name, dims, residue_of(g), input_size, (output_size, *options)
        )


for dims in (2, 3):
    _register_pooling(f"avg_pool{dims}d", dims)
    _register_pooling(f"_adaptive_avg_pool{dims}d", dims)
for dims in (1, 2, 3):
    _register_upsampling(f"upsample_nearest{dims}d", dims)
    _register_upsampling(f"_upsample_nearest_exact{dims}d", dims)
for name, dims in (("linear1d", 1), ("bilinear2d", 2), ("bicubic2d", 2),
                   ("trilinear3d", 3)):  # fmt: skip
    _register_upsampling(f"upsample_{name}", dims)
for name in ("bilinear2d", "bicubic2d"):
    _register_upsampling(f"_upsample_{name}_aa", 2)


@rule("_trilinear")
def products_of_three(
    f: Field,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    expand_a: Sequence[int],
    expand_b: Sequence[int],
    expand_c: Sequence[int],
    summed: Sequence[int],
    unroll_dim: int = 1,
) -> Tensor:
    """Returns sums of products of three, after adding the dims of 1 that are named."""
    factors = [residue_of(a), residue_of(b), residue_of(c)]
    for i, dims in enumerate((expand_a, expand_b, expand_c)):
        for dim in sorted(dims):
            factors[i] = factors[i].unsqueeze(dim)
    products = product(product(factors[0], factors[1]), factors[2])
    return total(products, summed) if summed else modulo(products)
