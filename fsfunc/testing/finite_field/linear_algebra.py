"""Rules of products of matrices, convolutions and attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsfunc.testing.finite_field import field as numbers
from fsfunc.testing.finite_field.field import (
    NOTHING,
    Field,
    matmul,
    modulo,
    product,
    residue,
)
from fsfunc.testing.finite_field.reductions import total
from fsfunc.testing.finite_field.rules import add, multiply, number, rule, value


@rule("mm", "bmm", "mv", "dot", "matmul")
def multiply_matrices(f: Field, a: Any, b: Any, out_dtype: Any = None) -> Tensor:
    """Returns products of matrices, or of vectors."""
    return matmul(value(a), value(b))


@rule("addmm", "baddbmm", "addmv")
def add_product(
    f: Field, x: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1
) -> Tensor:
    """Returns beta x + alpha a b; for beta 0 x is not read."""
    both = multiply(f, matmul(value(a), value(b)), alpha)
    return both if beta == 0 else add(f, both, multiply(f, x, beta))


@rule("addbmm")
def add_products(
    f: Field, x: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1
) -> Tensor:
    """Returns beta x + alpha times the sum of the products of a batch."""
    both = multiply(f, total(matmul(value(a), value(b)), 0), alpha)
    return both if beta == 0 else add(f, both, multiply(f, x, beta))


@rule("addr")
def add_outer(
    f: Field, x: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1
) -> Tensor:
    """Returns beta x + alpha times the outer product of two vectors."""
    both = multiply(f, product(value(a)[:, None], value(b)), alpha)
    return both if beta == 0 else add(f, both, multiply(f, x, beta))


@rule("_grouped_mm")
def grouped_product(
    f: Field, a: Any, b: Any, offs: Tensor, bias: Any = None, out_dtype: Any = None
) -> Tensor:
    """Each group of rows, up to its offset, times a matrix of its own."""
    a, b = value(a), value(b)
    if a.dim() != 2 or b.dim() not in (2, 3):
        raise NotImplementedError("only rows in groups have an exact rule")
    ends = offs.tolist()
    spans = list(zip([0, *ends[:-1]], ends, strict=True))
    if b.dim() == 2:  # the gradient by the matrices: groups along the summed dim
        return torch.stack([matmul(a[:, s:e], b[s:e]) for s, e in spans])
    parts = [matmul(a[s:e], b[i]) for i, (s, e) in enumerate(spans)]
    rest = a.new_zeros(len(a) - ends[-1], b.shape[-1])
    return torch.cat([*parts, rest])


# Convolutions


@rule("convolution")
def convolve(
    f: Field, x: Any, w: Any, bias: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int,
) -> Tensor:  # fmt: skip
    """Returns a convolution, or its transpose, of any number of dims."""
    x, w = value(x), value(w)
    how = stride, padding, dilation, transposed, output_padding, groups
    fn = lambda a, b: torch.ops.aten.convolution(a, b, None, *how)  # noqa: E731
    y = numbers.bilinear(fn, x, w, w.shape[1 - transposed] * math.prod(w.shape[2:]))
    return y if bias is None else modulo(y + value(bias).view(-1, *[1] * (y.dim() - 2)))


@rule("convolution_backward")
def convolve_backward(
    f: Field, g: Any, x: Any, w: Any, bias_sizes: Any, stride: Any, padding: Any,
    dilation: Any, transposed: bool, output_padding: Any, groups: int,
    mask: Sequence[bool],
) -> tuple[Any, ...]:  # fmt: skip
    """Returns the gradients by the input, the weights and the bias."""
    g, x, w = value(g), value(x), value(w)
    how = [0], stride, padding, dilation, transposed, output_padding, groups
    run = torch.ops.aten.convolution_backward
    by_x = by_w = by_bias = None
    if mask[0]:
        terms = w.shape[transposed] * math.prod(w.shape[2:])
        fn = lambda a, b: run(a, x, b, *how, [True, False, False])[0]  # noqa: E731
        by_x = numbers.bilinear(fn, g, w, terms)
    if mask[1]:
        terms = len(g) * math.prod((x if transposed else g).shape[2:])
        fn = lambda a, b: run(a, b, w, *how, [False, True, False])[1]  # noqa: E731
        by_w = numbers.bilinear(fn, g, x, terms)
    if mask[2]:
        by_bias = total(g, [0, *range(2, g.dim())])
    return by_x, by_w, by_bias


# Attention: each kernel is its formula


def attention(
    f: Field, q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: Any
) -> tuple[Tensor, Tensor]:
    """Returns (the output, the log of the sum of each query's exponentials)."""
    scores = _scores(f, value(q), value(k), mask, causal, scale)
    weights = f.exp(scores)  # no maximum is taken off: nothing overflows
    sums = total(weights, -1, True)
    out = product(matmul(weights, value(v)), f.inverse(sums))
    return out, f.log(sums).squeeze(-1)


def attention_backward(
    f: Field, g: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, mask: Any,
    causal: bool, scale: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients by queries, keys and values, from the formula."""
    g, q, k, v, out = (value(x) for x in (g, q, k, v, out))
    scores = _scores(f, q, k, mask, causal, scale)
    p = f.exp(f.add(scores, number(lse).unsqueeze(-1), minus=True))
    by_v = matmul(p.transpose(-1, -2), g)
    slope = modulo(matmul(g, v.transpose(-1, -2)) - total(product(g, out), -1, True))
    slope = product(product(slope, p), _scale(q, scale))
    return matmul(slope, k), matmul(slope.transpose(-1, -2), q), by_v


def _scale(q: Tensor, scale: Any) -> float:
    return numbers.constant(q.shape[-1] ** -0.5 if scale is None else scale)


def _scores(
    f: Field, q: Tensor, k: Tensor, mask: Any, causal: bool, scale: Any
) -> Tensor:
    scores = product(matmul(q, k.transpose(-1, -2)), _scale(q, scale))
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = torch.where(seen, scores, NOTHING)
    if mask is None:
        return scores
    if mask.dtype == torch.bool:
        return torch.where(mask, scores, NOTHING)
    return f.add(scores, number(mask))


@rule("_scaled_dot_product_flash_attention_for_cpu")
def flash_attention(
    f: Field, q: Any, k: Any, v: Any, dropout_p: float = 0.0, is_causal: bool = False,
    *, attn_mask: Any = None, scale: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns what torch's kernel on CPU does, by the formula."""
    _no_dropout(dropout_p)
    return attention(f, q, k, v, attn_mask, is_causal, scale)


@rule("_scaled_dot_product_flash_attention_for_cpu_backward")
def flash_attention_backward(
    f: Field, g: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dropout_p: float,
    is_causal: bool, *, attn_mask: Any = None, scale: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of that kernel."""
    return attention_backward(f, g, q, k, v, out, lse, attn_mask, is_causal, scale)


@rule("_scaled_dot_product_attention_math")
def attention_by_products(
    f: Field, q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, dropout_mask: Any = None, *, scale: Any = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns what torch's attention without a kernel does."""
    _no_dropout(dropout_p)
    if enable_gqa:
        groups = q.shape[-3] // k.shape[-3]
        k, v = (x.repeat_interleave(groups, -3) for x in (k, v))
    out, lse = attention(f, q, k, v, attn_mask, is_causal, scale)
    return out, residue(lse)


def _no_dropout(p: float) -> None:
    if p:
        raise NotImplementedError(f"dropout_p={p} draws numbers: give dropout_p=0.0")
