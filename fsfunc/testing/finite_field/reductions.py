"""Rules of sums, means, norms and variances, and of what looks for the largest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsfunc.testing.finite_field import field as numbers
from fsfunc.testing.finite_field.field import PRIME, Field, modulo, product, residue
from fsfunc.testing.finite_field.rules import number, rule, value

Dims = int | Sequence[int] | None
Along = tuple[Tensor, Tensor]  # numbers along a dim, and where they stood


def _dims(x: Tensor, dim: Dims) -> list[int]:
    """Returns the dims that are reduced, all of them for none named."""
    dims = [dim] if isinstance(dim, int) else list(dim or range(x.dim()))
    return [d % x.dim() for d in dims] if x.dim() else []


def total(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Returns sums of residues."""
    dims = _dims(x, dim)
    return modulo(x.sum(dims, keepdim)) if dims else x


@rule("sum", "sum.dim_IntList", "prims.sum", "nansum")
def sum_of(
    f: Field, x: Any, dim: Dims = None, keepdim: bool = False, dtype: Any = None
) -> Tensor:
    """Returns sums over dims, all by default."""
    return total(value(x), dim, keepdim)


@rule("mean", "mean.dim")
def mean(
    f: Field, x: Any, dim: Dims = None, keepdim: bool = False, dtype: Any = None
) -> Tensor:
    """Returns means over dims, all by default."""
    x = value(x)
    count = math.prod(x.shape[d] for d in _dims(x, dim))
    return product(total(x, dim, keepdim), pow(count, PRIME - 2, PRIME))


def moments(
    x: Tensor, dim: Dims, correction: Any, keepdim: bool
) -> tuple[Tensor, Tensor]:
    """Returns the variance and the mean of residues."""
    dims = _dims(x, dim)
    count = math.prod(x.shape[d] for d in dims)
    center = product(total(x, dims, True), pow(count, PRIME - 2, PRIME))
    away = modulo(x - center)
    free = count - (1 if correction is None else correction)
    scale = numbers.constant(1 / free) if free > 0 else 0.0
    spread = product(total(product(away, away), dims, keepdim), scale)
    return spread, center if keepdim or not dims else center.squeeze(dims)


@rule("var.correction", "prims.var")
def variance(
    f: Field, x: Any, dim: Dims = None, correction: Any = None, keepdim: bool = False
) -> Tensor:
    """Returns variances over dims."""
    return moments(value(x), dim, correction, keepdim)[0]


@rule("var_mean.correction")
def variance_and_mean(
    f: Field, x: Any, dim: Dims = None, correction: Any = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns variances and means over dims."""
    return moments(value(x), dim, correction, keepdim)


@rule("std.correction")
def deviation(
    f: Field, x: Any, dim: Dims = None, correction: Any = None, keepdim: bool = False
) -> Tensor:
    """Returns standard deviations: roots, whose squares are the variances."""
    return f.root(moments(value(x), dim, correction, keepdim)[0])


@rule("linalg_vector_norm")
def norm(
    f: Field, x: Any, ord: Any = 2, dim: Dims = None, keepdim: bool = False,
    dtype: Any = None,
) -> Tensor:  # fmt: skip
    """Returns norms over dims; that of order 2 is a root of a sum of squares."""
    x = number(x)
    if ord == 2:
        return f.root(total(f.square(x), dim, keepdim))
    size = torch.where(f.order(x) < 0, f.negative(x), x)
    if ord == math.inf:
        return largest(f, size, dim, keepdim)
    if ord == 1:
        return total(residue(size), dim, keepdim)
    if ord == 0:
        return total((value(x) != 0).to(torch.float64), dim, keepdim)
    powers = f.function(f"pow {ord!r}", residue(size))
    return f.function(f"pow {1 / ord!r}", total(powers, dim, keepdim))


@rule("prod", "prod.dim_int")
def multiply_all(
    f: Field, x: Any, dim: int | None = None, keepdim: bool = False, dtype: Any = None
) -> Tensor:
    """Returns products over a dim, or of all."""
    x = value(x)
    if not x.dim():
        return x
    whole = x.flatten() if dim is None else x.movedim(dim, 0)
    result = torch.ones_like(whole.sum(0))
    for part in whole:
        result = product(result, part)
    return result.unsqueeze(dim) if dim is not None and keepdim else result


@rule("cumsum")
def running_sum(f: Field, x: Any, dim: int, dtype: Any = None) -> Tensor:
    """Returns the sums of all up to each element along a dim."""
    return modulo(value(x).cumsum(dim))


@rule("cumprod")
def running_product(f: Field, x: Any, dim: int, dtype: Any = None) -> Tensor:
    """Returns the products of all up to each element along a dim."""
    x = value(x)
    if not x.dim():
        return x
    parts, result = x.unbind(dim), []
    for part in parts:
        result.append(product(result[-1], part) if result else part)
    return torch.stack(result, dim) if result else x


# The largest, by the order of the field. It carries its exponential, which a shift by
# it needs: exp(x - max) / sum exp(x - max) is the same for any max.


def _taken(f: Field, x: Tensor, at: Tensor, dim: int, keepdim: bool) -> Tensor:
    best = f.exponential(x.gather(dim, at))
    return best if keepdim else best.squeeze(dim)


def largest(
    f: Field, x: Tensor, dim: Dims = None, keepdim: bool = False, least: bool = False
) -> Tensor:
    """Returns the largest (or least) over some dims."""
    dims = _dims(x, dim)
    if not dims:
        return f.exponential(x)
    kept = [d for d in range(x.dim()) if d not in dims]
    count = math.prod(x.shape[d] for d in dims)
    rows = x.permute(*kept, *dims).reshape(*[x.shape[d] for d in kept], count)
    keys = f.order(rows)
    at = (keys.argmin if least else keys.argmax)(-1, keepdim=True)
    best = _taken(f, rows, at, -1, False)
    if keepdim:
        for d in sorted(dims):
            best = best.unsqueeze(d)
    return best


@rule("amax", "prims.amax", "max")
def amax(f: Field, x: Any, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Returns the largest over dims."""
    return largest(f, number(x), dim, keepdim)


@rule("amin", "prims.amin", "min")
def amin(f: Field, x: Any, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Returns the least over dims."""
    return largest(f, number(x), dim, keepdim, least=True)


@rule("logsumexp")
def log_sum_exp(f: Field, x: Any, dim: Dims, keepdim: bool = False) -> Tensor:
    """Returns a logarithm whose exponential is the sum of exponentials."""
    return f.log(total(f.exp(number(x)), dim, keepdim))


@rule("logcumsumexp")
def running_log_sum_exp(f: Field, x: Any, dim: int) -> Tensor:
    """Returns such logarithms of all up to each element along a dim."""
    return f.log(modulo(f.exp(number(x)).cumsum(dim)))


@rule("_log_softmax")
def log_softmax(f: Field, x: Any, dim: int, half_to_float: bool) -> Tensor:
    """Returns x minus the logarithm of the sum of exponentials."""
    x = number(x)
    return f.add(x, log_sum_exp(f, x, dim, True), minus=True)


def _along(f: Field, x: Any, dim: int, keepdim: bool, least: bool) -> Along:
    x = number(x)
    keys = f.order(x)
    at = (keys.argmin if least else keys.argmax)(dim, keepdim=True)
    return _taken(f, x, at, dim, keepdim), at if keepdim else at.squeeze(dim)


@rule("max.dim")
def max_along(f: Field, x: Any, dim: int, keepdim: bool = False) -> Along:
    """Returns the largest along a dim, and where it stands."""
    return _along(f, x, dim, keepdim, least=False)


@rule("min.dim")
def min_along(f: Field, x: Any, dim: int, keepdim: bool = False) -> Along:
    """Returns the least along a dim, and where it stands."""
    return _along(f, x, dim, keepdim, least=True)


@rule("argmax")
def argmax(f: Field, x: Any, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Returns where the largest stands."""
    return f.order(number(x)).argmax(dim, keepdim)


@rule("argmin")
def argmin(f: Field, x: Any, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Returns where the least stands."""
    return f.order(number(x)).argmin(dim, keepdim)


@rule("topk")
def topk(
    f: Field, x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    """Returns the k largest, or least, along a dim, and where they stand."""
    x = number(x)
    at = f.order(x).topk(k, dim, largest, sorted).indices
    return x.gather(dim, at), at


@rule("sort")
def sort(
    f: Field, x: Any, dim: int = -1, descending: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns numbers in their order along a dim, and where they stood."""
    x = number(x)
    at = torch.sort(f.order(x), dim=dim, descending=descending, stable=True).indices
    return x.gather(dim, at), at


@rule("sort.stable")
def stable_sort(
    f: Field, x: Any, *, stable: Any = None, dim: int = -1, descending: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns the same as `sort`, which is stable always."""
    return sort(f, x, dim, descending)


@rule("kthvalue")
def kth_value(
    f: Field, x: Any, k: int, dim: int = -1, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns the k-th in order along a dim, and where it stands."""
    x = number(x)
    at = torch.kthvalue(f.order(x), k, dim, True).indices
    kept = x.gather(dim, at), at
    return kept if keepdim else (kept[0].squeeze(dim), kept[1].squeeze(dim))


@rule("median.dim")
def median_along(
    f: Field, x: Any, dim: int, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns the lower median along a dim, and where it stands."""
    count = x.shape[dim] if x.dim() else 1
    return kth_value(f, x, (count + 1) // 2, dim, keepdim)


@rule("median")
def median(f: Field, x: Any) -> Tensor:
    """Returns the lower median of all."""
    return median_along(f, number(x).flatten(), 0)[0]


def _running(f: Field, x: Any, dim: int, least: bool) -> Along:
    x = number(x)
    running = torch.cummin if least else torch.cummax
    at = running(f.order(x), dim).indices
    return f.exponential(x.gather(dim, at)), at


@rule("cummax")
def running_max(f: Field, x: Any, dim: int) -> Along:
    """Returns the largest of all up to each element, and where it stands."""
    return _running(f, x, dim, least=False)


@rule("cummin")
def running_min(f: Field, x: Any, dim: int) -> Along:
    """Returns the least of all up to each element, and where it stands."""
    return _running(f, x, dim, least=True)


@rule("_unique2")
def unique(
    f: Field, x: Any, sorted: bool = True, inverse: bool = False, counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns each number once, in order; which one each element is; how many."""
    x = value(x)
    keys, places, numbers = torch.unique(f.order(x), True, True, True)
    found = x.new_empty(len(keys)).scatter(0, places.flatten(), x.flatten())
    return found, places, numbers
