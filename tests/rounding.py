"""Matrix products that round as another processor's might.

A library of products takes other blocks for other numbers of rows, on each processor in
its own way, so bits are alike where the shapes are, and else where all sums are exact.
With ``FSFUNC_ROUNDING=rows`` in the environment every product adds up its terms in two
parts, and where they part depends on the shapes: a test that asserts more fails.
"""

import os

import torch

_LIBRARY = None


def _split(a, b):
    """Where the terms of a product part: another place for each shape."""
    return (7 * a.shape[-2] + 3 * b.shape[-1]) % max(a.shape[-1], 1)


def _product(out):
    def product(a, b):
        k = _split(a, b)
        made = a.new_empty((*a.shape[:-1], b.shape[-1]))
        out(a[..., k:], b[..., k:, :], out=made)
        if k:
            rest = torch.empty_like(made)
            made += out(a[..., :k], b[..., :k, :], out=rest)
        return made

    return product


def _added(product):
    def added(bias, a, b, *, beta=1, alpha=1):
        found = product(a, b)
        found = found if alpha == 1 else alpha * found
        return found + (bias if beta == 1 else beta * bias) if beta else found

    return added


def round_by_shapes():
    """Has products round by their shapes, if the environment says so."""
    global _LIBRARY
    if os.environ.get("FSFUNC_ROUNDING") != "rows" or _LIBRARY is not None:
        return
    mm = _product(torch.ops.aten.mm.out)
    bmm = _product(torch.ops.aten.bmm.out)
    _LIBRARY = torch.library.Library("aten", "IMPL")
    kernels = {"mm": mm, "bmm": bmm, "addmm": _added(mm), "baddbmm": _added(bmm)}
    for name, kernel in kernels.items():
        _LIBRARY.impl(name, kernel, "CPU", allow_override=True)
