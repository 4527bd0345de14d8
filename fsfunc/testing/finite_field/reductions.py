"""Rules of sums, means, norms and variances, and of maxima, sorts and medians.

Sums are taken modulo PRIME. Whatever compares goes by the order of the field, and takes
numbers with their companions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fsfunc.testing.finite_field import field as numbers
from fsfunc.testing.finite_field.field import (
    PRIME,
    Field,
    modulo,
    product,
    strip_companions,
)
from fsfunc.testing.finite_field.rules import lift_operand, residue_of, rule

Dims = int | Sequence[int] | None
ValuesAndIndices = tuple[Tensor, Tensor]  # as torch's max(dim=) returns them


def _dims(x: Tensor, dim: Dims) -> list[int]:
    """Returns the dims to reduce, counted from the start; all if none is named."""
    dims = [dim] if isinstance(dim, int) else list(dim or range(x.dim()))
    return [d % x.dim() for d in dims] if x.dim() else []


def total(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Returns sums of residues."""
    dims = _dims(x, dim)
    return modulo(x.sum(dims, keepdim)) if dims else x


@rule("sum", "sum.dim_IntList", "prims.sum", "nansum")
def sum_of(
    f: Field,
    x: Tensor,
    dim: Dims = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns sums over dims, all by default."""
    return total(residue_of(x), dim, keepdim)


@rule("mean", "mean.dim")
def mean(
    f: Field,
    x: Tensor,
    dim: Dims = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns means over dims, all by default."""
    x = residue_of(x)
    count = math.prod(x.shape[d] for d in _dims(x, dim))
    return product(total(x, dim, keepdim), pow(count, PRIME - 2, PRIME))


def moments(
    x: Tensor, dim: Dims, correction: float | None, keepdim: bool
) -> tuple[Tensor, Tensor]:
    """Returns the variance and the mean of residues."""
    dims = _dims(x, dim)
    count = math.prod(x.shape[d] for d in dims)
    center = product(total(x, dims, True), pow(count, PRIME - 2, PRIME))
    centered = modulo(x - center)
    degrees_of_freedom = count - (1 if correction is None else correction)
    scale = numbers.constant(1 / degrees_of_freedom) if degrees_of_freedom > 0 else 0.0
    var = product(total(product(centered, centered), dims, keepdim), scale)
    return var, center if keepdim or not dims else center.squeeze(dims)


@rule("var.correction", "prims.var")
def variance(
    f: Field,
    x: Tensor,
    dim: Dims = None,
    correction: float | None = None,
    keepdim: bool = False,
) -> Tensor:
    """Returns variances over dims."""
    return moments(residue_of(x), dim, correction, keepdim)[0]


@rule("var_mean.correction")
def variance_and_mean(
    f: Field,
    x: Tensor,
    dim: Dims = None,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns variances and means over dims."""
    return moments(residue_of(x), dim, correction, keepdim)


@rule("std.correction")
def deviation(
    f: Field,
    x: Tensor,
    dim: Dims = None,
    correction: float | None = None,
    keepdim: bool = False,
) -> Tensor:
    """Returns standard deviations: roots, whose squares are the variances."""
    return f.root(moments(residue_of(x), dim, correction, keepdim)[0])


@rule("linalg_vector_norm")
def norm(
    f: Field, x: Tensor, ord: float = 2, dim: Dims = None, keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Returns norms over dims; that of order 2 is a root of a sum of squares."""
    x = lift_operand(x)
    if ord == 2:
        return f.root(total(f.square(x), dim, keepdim))
    magnitude = torch.where(f.order_keys(x) < 0, f.negative(x), x)
    if ord == math.inf:
        return largest(f, magnitude, dim, keepdim)
    if ord == 1:
        return total(strip_companions(magnitude), dim, keepdim)
    if ord == 0:
        return total((residue_of(x) != 0).to(torch.float64), dim, keepdim)
    powers = f.random_function(f"pow {ord!r}", strip_companions(magnitude))
    return f.random_function(f"pow {1 / ord!r}", total(powers, dim, keepdim))


@rule("prod", "prod.dim_int")
def multiply_all(
    f: Field,
    x: Tensor,
    dim: int | None = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns products over a dim, or of all."""
    x = residue_of(x)
    if not x.dim():
        return x
    slices = x.flatten() if dim is None else x.movedim(dim, 0)
    products = torch.ones_like(slices.sum(0))
    for part in slices:
        products = product(products, part)
    return products.unsqueeze(dim) if dim is not None and keepdim else products


@rule("cumsum")
def running_sum(
    f: Field, x: Tensor, dim: int, dtype: torch.dtype | None = None
) -> Tensor:
    """Returns the sums of all up to each element along a dim."""
    return modulo(residue_of(x).cumsum(dim))


@rule("cumprod")
def running_product(
    f: Field, x: Tensor, dim: int, dtype: torch.dtype | None = None
) -> Tensor:
    """Returns the products of all up to each element along a dim."""
    x = residue_of(x)
    if not x.dim():
        return x
    parts, products = x.unbind(dim), []
    for part in parts:
        products.append(product(products[-1], part) if products else part)
    return torch.stack(products, dim) if products else x


# The largest, by the order of the field. It carries its exponential, since a softmax
# subtracts it: exp(x - max) / sum exp(x - max) must be the same for any max.


def _gather_extreme(
    f: Field, x: Tensor, index: Tensor, dim: int, keepdim: bool
) -> Tensor:
    extreme = f.attach_exponential(x.gather(dim, index))
    return extreme if keepdim else extreme.squeeze(dim)


def largest(
    f: Field, x: Tensor, dim: Dims = None, keepdim: bool = False, smallest: bool = False
) -> Tensor:
    """Returns the largest (or least) over some dims."""
    dims = _dims(x, dim)
    if not dims:
        return f.attach_exponential(x)
    kept_dims = [d for d in range(x.dim()) if d not in dims]
    count = math.prod(x.shape[d] for d in dims)
    rows = x.permute(*kept_dims, *dims).reshape(*[x.shape[d] for d in kept_dims], count)
    keys = f.order_keys(rows)
    index = (keys.argmin if smallest else keys.argmax)(-1, keepdim=True)
    extreme = _gather_extreme(f, rows, index, -1, False)
    if keepdim:
        for d in sorted(dims):
            extreme = extreme.unsqueeze(d)
    return extreme


@rule("amax", "prims.amax", "max")
def amax(f: Field, x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Returns the largest over dims."""
    return largest(f, lift_operand(x), dim, keepdim)


@rule("amin", "prims.amin", "min")
def amin(f: Field, x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Returns the least over dims."""
    return largest(f, lift_operand(x), dim, keepdim, smallest=True)


@rule("logsumexp")
def log_sum_exp(f: Field, x: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    """Returns a logarithm whose exponential is the sum of exponentials."""
    return f.log(total(f.exp(lift_operand(x)), dim, keepdim))


@rule("logcumsumexp")
def running_log_sum_exp(f: Field, x: Tensor, dim: int) -> Tensor:
    """Returns the log of the sum of exponentials up to each element along a dim."""
    return f.log(modulo(f.exp(lift_operand(x)).cumsum(dim)))


@rule("_log_softmax")
def log_softmax(f: Field, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Returns x minus the logarithm of the sum of exponentials."""
    x = lift_operand(x)
    return f.add(x, log_sum_exp(f, x, dim, True), minus=True)


def _extreme_along(
    f: Field, x: Tensor, dim: int, keepdim: bool, smallest: bool
) -> ValuesAndIndices:
    x = lift_operand(x)
    keys = f.order_keys(x)
    index = (keys.argmin if smallest else keys.argmax)(dim, keepdim=True)
    return _gather_extreme(
        f, x, index, dim, keepdim
    ), index if keepdim else index.squeeze(dim)


@rule("max.dim")
def max_along(f: Field, x: Tensor, dim: int, keepdim: bool = False) -> ValuesAndIndices:
    """Returns the largest along a dim, and its index."""
    return _extreme_along(f, x, dim, keepdim, smallest=False)


@rule("min.dim")
def min_along(f: Field, x: Tensor, dim: int, keepdim: bool = False) -> ValuesAndIndices:
    """Returns the least along a dim, and its index."""
    return _extreme_along(f, x, dim, keepdim, smallest=True)


@rule("argmax")
def argmax(
    f: Field, x: Tensor, dim: int | None = None, keepdim: bool = False
) -> Tensor:
    """Returns the index of the largest."""
    return f.order_keys(lift_operand(x)).argmax(dim, keepdim)


@rule("argmin")
def argmin(
    f: Field, x: Tensor, dim: int | None = None, keepdim: bool = False
) -> Tensor:
    """Returns the index of the least."""
    return f.order_keys(lift_operand(x)).argmin(dim, keepdim)


@rule("topk")
def topk(
    f: Field,
    x: Tensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
) -> tuple[Tensor, Tensor]:
    """Returns the k largest, or least, along a dim, and their indices."""
    x = lift_operand(x)
    index = f.order_keys(x).topk(k, dim, largest, sorted).indices
    return x.gather(dim, index), index


@rule("sort")
def sort(
    f: Field, x: Tensor, dim: int = -1, descending: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns numbers in their order along a dim, and their old indices."""
    x = lift_operand(x)
    index = torch.sort(
        f.order_keys(x), dim=dim, descending=descending, stable=True
    ).indices
    return x.gather(dim, index), index


@rule("sort.stable")
def stable_sort(
    f: Field,
    x: Tensor,
    *,
    stable: bool | None = None,
    dim: int = -1,
    descending: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns the same as `sort`, which is stable always."""
    return sort(f, x, dim, descending)


@rule("kthvalue")
def kth_value(
    f: Field, x: Tensor, k: int, dim: int = -1, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns the k-th in order along a dim, and its index."""
    x = lift_operand(x)
    index = torch.kthvalue(f.order_keys(x), k, dim, True).indices
    with_dim = x.gather(dim, index), index
    return with_dim if keepdim else (with_dim[0].squeeze(dim), with_dim[1].squeeze(dim))


@rule("median.dim")
def median_along(
    f: Field, x: Tensor, dim: int, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns the lower median along a dim, and its index."""
    count = x.shape[dim] if x.dim() else 1
    return kth_value(f, x, (count + 1) // 2, dim, keepdim)


@rule("median")
def median(f: Field, x: Tensor) -> Tensor:
    """Returns the lower median of all."""
    return median_along(f, lift_operand(x).flatten(), 0)[0]


def _running_extreme(f: Field, x: Tensor, dim: int, smallest: bool) -> ValuesAndIndices:
    """Returns the largest or smallest of all up to each element, and its index."""
    x = lift_operand(x)
    cumulative = torch.cummin if smallest else torch.cummax
    index = cumulative(f.order_keys(x), dim).indices
    return f.attach_exponential(x.gather(dim, index)), index


@rule("cummax")
def running_max(f: Field, x: Tensor, dim: int) -> ValuesAndIndices:
    """Returns the largest of all up to each element, and its index."""
    return _running_extreme(f, x, dim, smallest=False)


@rule("cummin")
def running_min(f: Field, x: Tensor, dim: int) -> ValuesAndIndices:
    """Returns the least of all up to each element, and its index."""
    return _running_extreme(f, x, dim, smallest=True)


@rule("_unique2")
def unique(
    f: Field,
    x: Tensor,
    sorted: bool = True,
    inverse: bool = False,
    counts: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns distinct numbers in order, the index of each element's, and counts."""
    x = residue_of(x)
    keys, group_of_element, counts_of_groups = torch.unique(
        f.order_keys(x), True, True, True
    )
    distinct = x.new_empty(len(keys)).scatter(
        0, group_of_element.flatten(), x.flatten()
    )
    return distinct, group_of_element, counts_of_groups
