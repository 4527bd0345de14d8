"""Rules of products of matrices, convolutions and attention.

A sum of many products of residues is too large for float64: ``sum_of_products`` cuts
one factor into pieces, runs torch's own operator on each, and adds up modulo PRIME.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fsfunc.testing.finite_field import field as numbers
from fsfunc.testing.finite_field.field import (
    MINUS_INFINITY,
    Field,
    matmul,
    modulo,
    product,
    strip_companions,
)
from fsfunc.testing.finite_field.reductions import total
from fsfunc.testing.finite_field.rules import (
    add,
    lift_operand,
    multiply,
    residue_of,
    rule,
)


@rule("mm", "bmm", "mv", "dot", "matmul")
def multiply_matrices(
    f: Field, a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Returns products of matrices, or of vectors."""
    return matmul(residue_of(a), residue_of(b))


@rule("addmm", "baddbmm", "addmv")
def add_product(
    f: Field, x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """Returns beta x + alpha a b; for beta 0 x is not read."""
    product_term = multiply(f, matmul(residue_of(a), residue_of(b)), alpha)
    return product_term if beta == 0 else add(f, product_term, multiply(f, x, beta))


@rule("addbmm")
def add_products(
    f: Field, x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """Returns beta x + alpha times the sum of the products of a batch."""
    product_term = multiply(f, total(matmul(residue_of(a), residue_of(b)), 0), alpha)
    return product_term if beta == 0 else add(f, product_term, multiply(f, x, beta))


@rule("addr")
def add_outer(
    f: Field, x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """Returns beta x + alpha times the outer product of two vectors."""
    product_term = multiply(f, product(residue_of(a)[:, None], residue_of(b)), alpha)
    return product_term if beta == 0 else add(f, product_term, multiply(f, x, beta))


@rule("_grouped_mm")
def grouped_product(
    f: Field,
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiplies each group of rows, up to its offset, by a matrix of its own."""
    a, b = residue_of(a), residue_of(b)
    if a.dim() != 2 or b.dim() not in (2, 3):
        raise NotImplementedError("only rows in groups have an exact rule")
    ends = offs.tolist()
    spans = list(zip([0, *ends[:-1]], ends, strict=True))
    if b.dim() == 2:  # the gradient by the matrices: groups along the summed dim
        return torch.stack([matmul(a[:, s:e], b[s:e]) for s, e in spans])
    parts = [matmul(a[s:e], b[i]) for i, (s, e) in enumerate(spans)]
    empty_rows = a.new_zeros(len(a) - ends[-1], b.shape[-1])
    return torch.cat([*parts, empty_rows])


# Convolutions


@rule("convolution")
def convolve(
    f: Field,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """Returns a convolution, or its transpose, of any number of dims."""
    x, w = residue_of(x), residue_of(w)
    options = stride, padding, dilation, transposed, output_padding, groups
    run = lambda a, b: torch.ops.aten.convolution(a, b, None, *options)  # noqa: E731
    y = numbers.sum_of_products(
        run, x, w, w.shape[1 - transposed] * math.prod(w.shape[2:])
    )
    return (
        y
        if bias is None
        else modulo(y + residue_of(bias).view(-1, *[1] * (y.dim() - 2)))
    )


@rule("convolution_backward")
def convolve_backward(
    f: Field,
    g: Tensor,
    x: Tensor,
    w: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Returns the gradients by the input, the weights and the bias."""
    g, x, w = residue_of(g), residue_of(x), residue_of(w)
    options = [0], stride, padding, dilation, transposed, output_padding, groups
    run = torch.ops.aten.convolution_backward
    by_x = by_w = by_bias = None
    if mask[0]:
        terms = w.shape[transposed] * math.prod(w.shape[2:])
        fn = lambda a, b: run(a, x, b, *options, [True, False, False])[0]  # noqa: E731
        by_x = numbers.sum_of_products(fn, g, w, terms)
    if mask[1]:
        terms = len(g) * math.prod((x if transposed else g).shape[2:])
        fn = lambda a, b: run(a, b, w, *options, [False, True, False])[1]  # noqa: E731
        by_w = numbers.sum_of_products(fn, g, x, terms)
    if mask[2]:
        by_bias = total(g, [0, *range(2, g.dim())])
    return by_x, by_w, by_bias


# Attention: every kernel is computed by the formula


def attention(
    f: Field,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Returns (the output, the log of the sum of each query's exponentials)."""
    scores = _scores(f, residue_of(q), residue_of(k), mask, causal, scale)
    weights = f.exp(scores)  # no maximum is subtracted: nothing overflows
    sums = total(weights, -1, True)
    out = product(matmul(weights, residue_of(v)), f.inverse(sums))
    return out, f.log(sums).squeeze(-1)


def attention_backward(
    f: Field,
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients by queries, keys and values, from the formula."""
    g, q, k, v, out = (residue_of(x) for x in (g, q, k, v, out))
    scores = _scores(f, q, k, mask, causal, scale)
    p = f.exp(f.add(scores, lift_operand(lse).unsqueeze(-1), minus=True))
    by_v = matmul(p.transpose(-1, -2), g)
    slope = modulo(matmul(g, v.transpose(-1, -2)) - total(product(g, out), -1, True))
    slope = product(product(slope, p), _scale(q, scale))
    return matmul(slope, k), matmul(slope.transpose(-1, -2), q), by_v


def _scale(q: Tensor, scale: float | None) -> float:
    return numbers.constant(q.shape[-1] ** -0.5 if scale is None else scale)


def _scores(
    f: Field,
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
) -> Tensor:
    scores = product(matmul(q, k.transpose(-1, -2)), _scale(q, scale))
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = torch.where(visible, scores, MINUS_INFINITY)
    if mask is None:
        return scores
    if mask.dtype == torch.bool:
        return torch.where(mask, scores, MINUS_INFINITY)
    return f.add(scores, lift_operand(mask))


@rule("_scaled_dot_product_flash_attention_for_cpu")
def flash_attention(
    f: Field,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns what torch's fused CPU kernel does, by the formula."""
    _no_dropout(dropout_p)
    return attention(f, q, k, v, attn_mask, is_causal, scale)


@rule("_scaled_dot_product_flash_attention_for_cpu_backward")
def flash_attention_backward(
    f: Field,
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of that kernel."""
    return attention_backward(f, g, q, k, v, out, lse, attn_mask, is_causal, scale)


@rule("_scaled_dot_product_attention_math")
def attention_by_products(
    f: Field,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    dropout_mask: Tensor | None = None,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns what torch's attention without a kernel does."""
    _no_dropout(dropout_p)
    if enable_gqa:
        groups = q.shape[-3] // k.shape[-3]
        k, v = (x.repeat_interleave(groups, -3) for x in (k, v))
    out, lse = attention(f, q, k, v, attn_mask, is_causal, scale)
    return out, strip_companions(lse)


def _no_dropout(p: float) -> None:
    if p:
        raise NotImplementedError(f"dropout_p={p} draws numbers: give dropout_p=0.0")
