"""Attention over a sequence cut among ranks: equal to the whole, at a counted cost."""

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc.nn import (
    all_to_all_attention,
    ring_attention,
    unzigzag,
    zigzag,
)
from tests.checks import close, simulated

FORMS = {"ring": ring_attention, "all_to_all": all_to_all_attention}
ORDERS = {"every key": None, "zigzag": "zigzag", "contiguous": "contiguous"}
orders, forms = st.sampled_from(list(ORDERS.values())), st.sampled_from(list(FORMS))


def tensors(seed, shape_q, shape_k, shape_v, dtype=torch.float64):
    """q, k, v and a cotangent."""
    generator = torch.Generator().manual_seed(seed)
    shapes = shape_q, shape_k, shape_v, (*shape_q[:3], shape_v[3])
    draws = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return [x.to(dtype) for x in draws]


def judged(q, k, v, w, causal, scale=None):
    """torch's attention of the whole, in fp64, and its gradients."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, enable_gqa=True
    )
    return out.detach(), *torch.autograd.grad((out * w.double()).sum(), (q, k, v))


def cut(x, size, order):
    """What each rank holds."""
    return (zigzag(x, size, 2) if order == "zigzag" else x).chunk(size, 2)


def join(parts, order):
    whole = torch.cat(parts, 2)
    return unzigzag(whole, len(parts), 2) if order == "zigzag" else whole


def attention(form, order, **how):
    causal = {} if order is None else {"causal": True, "order": order}
    return lambda q, k, v: FORMS[form](q, k, v, "context", **causal, **how)


def on_ranks(fn, size, order, *whole):
    """``fn`` of each rank's parts; its results, joined."""
    mesh = simulated(context=size)
    parts = [cut(x, size, order) for x in whole]

    def main():
        return fn(*(x[ff.axis_index("context")] for x in parts))

    return [join(xs, order) for xs in zip(*ff.spmd(main, mesh)(), strict=True)]


def pulled(attend):
    """Its value and gradients, by plain autograd."""

    def run(q, k, v, w):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = attend(q, k, v)
        return out.detach(), *torch.autograd.grad((out * w).sum(), (q, k, v))

    return run


def transformed(attend):
    """The same, by torch.func."""

    def run(q, k, v, w):
        def loss(*qkv):
            out = attend(*qkv)
            return (out * w).sum(), out

        grads, out = torch.func.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
        return out, *grads

    return run


@st.composite
def cases(draw):
    """(axis size, order, shapes of q, k and v)."""
    size, order = draw(st.integers(1, 4)), draw(orders)
    batch, read, groups = (draw(st.integers(1, n)) for n in (2, 3, 3))
    width, value = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    value = draw(st.sampled_from([width, value]))
    n = draw(st.integers(1, 3)) * (2 if order else 1) * size
    m = n if order else draw(st.integers(1, 3)) * size
    shapes = (
        (batch, read * groups, n, width),
        (batch, read, m, width),
        (batch, read, m, value),
    )
    return size, order, shapes


# Equal to the whole


@settings(max_examples=25)
@given(cases(), st.sampled_from([True, False]), st.sampled_from([None, 0.3]))
def test_a_ring_is_torchs_attention(case, recompute, scale) -> None:
    size, order, shapes = case
    whole = tensors(size, *shapes)
    attend = attention("ring", order, recompute=recompute, scale=scale)
    expected = judged(*whole, causal=order is not None, scale=scale)
    for way in (pulled, transformed):
        close(on_ranks(way(attend), size, order, *whole), list(expected), 1e-12)
    singles = [x.float() for x in whole]
    found = on_ranks(pulled(attend), size, order, *singles)
    close([x.double() for x in found], list(expected), 2e-6)


@settings(max_examples=15)
@given(cases(), st.sampled_from([True, False]))
def test_all_to_all_is_torchs_attention(case, recompute) -> None:
    size, order, shapes = case
    shapes = [(b, heads * size, *rest) for b, heads, *rest in shapes]
    whole = tensors(size, *shapes)
    attend = attention("all_to_all", order, recompute=recompute)
    expected = judged(*whole, causal=order is not None)
    for way in (pulled, transformed):
        close(on_ranks(way(attend), size, order, *whole), list(expected), 1e-12)
