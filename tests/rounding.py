"""Matrix products that round as another processor's might.

A library of products takes other blocks for other numbers of rows, on each processor in
its own way, so bits are alike where the shapes are, and else where all sums are exact.
With ``FSFUNC_ROUNDING=rows`` in the environment the shapes decide how a product is
rounded: its terms are added up in two parts, or in more bits and rounded once, as fused
multiply-adds nearly do. A test that asserts more than there is fails.
"""

import os

import numpy
import torch

_LIBRARY = None


def _split(a, b):
    """Where the terms of a product part: another place for each shape."""
    return (7 * a.shape[-2] + 3 * b.shape[-1]) % max(a.shape[-1], 1)


def _is_small(a, b):
    """Whether a floating product is small enough to be made term by term."""
    return a.dtype.is_floating_point and a.numel() * b.shape[-1] <= 1 << 16


def _in_more_bits(a, b):
    if a.dtype != torch.float64:
        made = a.double() @ b.double()
    else:
        wide = [x.detach().numpy().astype(numpy.longdouble) for x in (a, b)]
        made = torch.from_numpy((wide[0] @ wide[1]).astype(numpy.float64))
    return made.to(a.dtype)


def _product(adds):
    """A product as two, each added in place by ``adds``, which stays as it is."""

    def product(a, b, *, out=None):
        if (a.shape[-2] // 2 + b.shape[-1]) % 2 and _is_small(a, b):
            made = _in_more_bits(a, b)
            return made if out is None else out.copy_(made)
        k = _split(a, b)
        made = a.new_zeros((*a.shape[:-1], b.shape[-1]))
        adds(made, a[..., k:], b[..., k:, :])
        if k:
            rest = torch.zeros_like(made)
            made += adds(rest, a[..., :k], b[..., :k, :])
        return made if out is None else out.copy_(made)

    return product


def _added(product):
    def added(bias, a, b, *, beta=1, alpha=1, out=None):
        found = product(a, b)
        found = found if alpha == 1 else alpha * found
        if beta:
            found = found + (bias if beta == 1 else beta * bias)
        return found if out is None else out.copy_(found)

    return added


def round_by_shapes():
    """Has products round by their shapes, if the environment says so."""
    global _LIBRARY
    if os.environ.get("FSFUNC_ROUNDING") != "rows" or _LIBRARY is not None:
        return
    mm = _product(torch.ops.aten.addmm_.default)
    bmm = _product(torch.ops.aten.baddbmm_.default)
    _LIBRARY = torch.library.Library("aten", "IMPL")
    kernels = {"mm": mm, "bmm": bmm, "addmm": _added(mm), "baddbmm": _added(bmm)}
    for name, kernel in kernels.items():
        for overload in (name, f"{name}.out"):
            _LIBRARY.impl(overload, kernel, "CPU", allow_override=True)
