"""Attention over a sequence cut among ranks, as it is used; what it refuses.

That it is torch's of the whole, under any mask, is drawn in test_attention_masks.py.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc.comm.backends.link import CollectiveMismatch
from fsfunc.nn import (
    all_to_all_attention,
    ring_attention,
    unzigzag,
    zigzag,
    zigzag_positions,
)
from tests.checks import all_refused, close, same, simulated
from tests.covering import examples

# forward mode loads torch's own decompositions, which scripts them
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

FORMS = {"ring": ring_attention, "all_to_all": all_to_all_attention}


def tensors(seed, shape_q, shape_k, shape_v, dtype=torch.float64):
    """q, k, v and a cotangent."""
    generator = torch.Generator().manual_seed(seed)
    shapes = shape_q, shape_k, shape_v, (*shape_q[:3], shape_v[3])
    draws = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return [x.to(dtype) for x in draws]


def whole_causal(q, k, v):
    """torch's attention of the whole."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


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
        return out.detach(), *torch.autograd.grad(out, (q, k, v), w)

    return run


def transformed(attend):
    """The same, by torch.func."""

    def run(q, k, v, w):
        out, pull = torch.func.vjp(attend, q, k, v)
        return out, *pull(w)

    return run


# Derivatives that may be asked for beside value and gradients


def curved(attend):
    """Second derivatives by plain autograd, with a key made of the query."""

    def run(q, k, v, w, *ts):
        q, k, v, w = (x.detach().requires_grad_() for x in (q, k, v, w))
        out = attend(q, k + q.sin(), v)
        gs = torch.autograd.grad((out * w).sum(), (q, k, v), create_graph=True)
        total = sum((g * t).sum() for g, t in zip(gs, ts, strict=True))
        return torch.autograd.grad(total, (q, k, v, w))

    return run


def curved_without_graph_of_cotangent(attend):
    def run(q, k, v, w, *ts):
        k = k.detach().requires_grad_()
        (g,) = torch.autograd.grad((attend(q, k, v) * w).sum(), k, create_graph=True)
        return torch.autograd.grad((g * ts[1]).sum(), k)

    return run


def forward_over_reverse(attend):
    def run(q, k, v, w, *ts):
        def pull(*qkv):
            return torch.func.vjp(attend, *qkv)[1](w)

        return torch.func.jvp(pull, (q, k, v), ts)[1]

    return run


def forward_mode(attend):
    def run(q, k, v, w, *ts):
        with torch.autograd.forward_ad.dual_level():
            duals = map(torch.autograd.forward_ad.make_dual, (q, k, v), ts)
            return tuple(torch.autograd.forward_ad.unpack_dual(attend(*duals)))

    return run


def mapped(attend):
    def run(q, k, v, w, *ts):
        both = (torch.stack(pair) for pair in zip((q, k, v), ts, strict=True))
        return tuple(torch.func.vmap(attend)(*both))

    return run


def mapped_backward(attend):
    def run(q, k, v, w, *_):
        q = q.detach().requires_grad_()
        out = attend(q, k, v)
        pull = torch.func.vmap(lambda w: torch.autograd.grad(out, q, w)[0])
        return tuple(pull(torch.stack([w, 2 * w])))

    return run


WAYS = [
    curved,
    curved_without_graph_of_cotangent,
    forward_over_reverse,
    forward_mode,
    mapped,
    mapped_backward,
]


# As it is used


@pytest.mark.parametrize(
    ("form", "dtype"), [("ring", torch.bfloat16), ("all_to_all", torch.float16)]
)
def test_half_dtypes_are_summed_in_fp32(form, dtype) -> None:
    for value in (8, 9):  # by a kernel, and by products
        shapes = (1, 4, 64, 8), (1, 4, 64, 8), (1, 4, 64, value)
        whole = tensors(0, *shapes, dtype=dtype)
        expected = pulled(whole_causal)(*(x.double() for x in whole))
        found = on_ranks(pulled(attention(form, "zigzag")), 2, "zigzag", *whole)
        for x, y in zip(found, expected, strict=True):
            assert x.dtype == dtype
            steps = 3 * torch.finfo(dtype).eps * y.abs().max()  # of rounding
            assert (x.double() - y).abs().max() <= steps


@pytest.mark.parametrize("value", [4, 5])  # by a kernel, and by products
@pytest.mark.parametrize("form", FORMS)
def test_under_autocast_half_dtypes_are_sent(form, value) -> None:
    shapes = (1, 2, 8, 4), (1, 2, 8, 4), (1, 2, 8, value)
    whole = tensors(0, *shapes, dtype=torch.float32)
    ring = attention(form, "zigzag")

    def cast(*qkv):
        with torch.autocast("cpu", torch.bfloat16):
            return ring(*qkv)

    expected = on_ranks(pulled(ring), 2, "zigzag", *(x.bfloat16() for x in whole))
    with ff.ledger() as log:
        found = on_ranks(pulled(cast), 2, "zigzag", *whole[:3], whole[3].bfloat16())
    same([x.bfloat16() for x in found], expected)
    assert {r.dtype for r in log.records} == {torch.bfloat16}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("over", ["samples", "one loss"])
def test_a_context_axis_is_one_of_shards_or_splits_the_work_of_one_loss(over, form):
    """Outside units, and of what comes out of them; within: test_four_axes.py."""
    w, x, *_ = tensors(0, (4, 4, 1, 1), (1, 2, 8, 4), (1,) * 4)
    w, project = w[..., 0, 0], ff.unit(lambda w, x: x @ w)

    def loss(attend):
        def run(w, x):
            q = project(w, x)
            return (attend(q, x, q) ** 3 + q).mean()

        return run

    mesh, parts = simulated(context=2), cut(x, 2, "zigzag")
    mine = loss(attention(form, "zigzag"))

    def one(w, x):
        return ff.pmean(mine(ff.pcast(w, "context", to="V"), x), "context")

    def main():
        x = parts[ff.axis_index("context")]
        if over == "one loss":
            return ff.value_and_grad(one)(w, x)
        grad = ff.shard(ff.value_and_grad(mine), mesh, "context")
        value, grads = grad(ff.place(grad, w, x), x)
        return value, ff.unshard(grads)

    for found in ff.spmd(main, mesh)():
        close(found, ff.value_and_grad(loss(whole_causal))(w, x), 1e-12)


# Refused


def refusing(call, size=2):
    return lambda: ff.spmd(call, simulated(context=size))()


def zeros(heads, n, width=4, batch=1, **how):
    return torch.zeros(batch, heads, n, width, **how)


def ring(q, k, v, **how):
    return refusing(lambda: ring_attention(q, k, v, "context", **how))


def ulysses(q, k, v, size=2, **how):
    return refusing(lambda: all_to_all_attention(q, k, v, "context", **how), size)


X, IDS = zeros(2, 4), torch.zeros(1, 4, dtype=torch.int64)
Y = {"order": "zigzag"}
test_bad_input_is_refused = all_refused({
    "odd": (ring(*[zeros(2, 3)] * 3, causal=True, order="zigzag"), ValueError,
        "3 positions a rank.*multiple of 4, not 6"),
    "odd, all to all": (ulysses(*[zeros(2, 1)] * 3, causal=True, order="zigzag"),
        ValueError, "all_to_all_attention: 1 positions.*multiple of 4, not 2"),
    "order": (ring(X, X, X, order="striped"), ValueError, "'zigzag' or 'contiguous'"),
    "no order": (ring(X, X, X, causal=True), TypeError,
        "ring_attention: causal=True over 'context' needs order=.*ff.nn.zigzag.*"
        '"contiguous"'),
    "no order, all to all": (ulysses(X, X, X, causal=True, size=1), TypeError,
        "all_to_all_attention: causal=True over 'context' needs order="),
    "a scale to learn": (ring(X, X, X, scale=torch.ones(())), TypeError,
        "scale is a tensor, .* multiply q by it"),
    "heads": (ring(zeros(6, 4), zeros(4, 4), zeros(4, 4)), ValueError,
        "query heads are a multiple of key heads; got q"),
    "heads, all to all": (ulysses(*[zeros(6, 4)] * 3, size=4), ValueError,
        '6 query heads and 6 key heads are not cut into 4 by "context".*divides 6, or '
        "ring_attention"),
    "key heads, all to all": (ulysses(zeros(8, 4), zeros(2, 4), zeros(2, 4), size=4),
        ValueError, "divides 2"),
    "dims": (ring(X[0], X, X), ValueError,
        r"batch, heads, n, head_dim.*q [^ ]* \(2, 4, 4\)"),
    "k and v": (ring(X, X, zeros(2, 5)), ValueError, "k and v are alike in"),
    "batch": (ring(zeros(2, 4, batch=2), X, X), ValueError,
        "q and k are alike in batch"),
    "head_dim": (ring(zeros(2, 4, 3), X, X), ValueError, "alike in head_dim"),
    "no keys": (ring(X, zeros(2, 0), zeros(2, 0)), ValueError, "there are keys"),
    "causal lengths": (ring(zeros(2, 2), X, X, causal=True, order="zigzag"), ValueError,
        "as many queries as keys"),
    "dtypes": (ring(X, X, X.double()), ValueError,
        "one floating dtype.*v torch.float64"),
    "integers": (ring(X.long(), X.long(), X.long()), ValueError, "q torch.int64"),
    "axis": (refusing(lambda: ring_attention(X, X, X, "contxt")), ValueError,
        'unknown axis "contxt"'),
    "a window without order": (ring(X, X, X, window=2), TypeError,
        "ring_attention: window=2 over 'context' needs order=.*ff.nn.zigzag"),
    "a mask without order": (ring(X, X, X, attn_mask=zeros(2, 4, 8)), TypeError,
        "attn_mask over 'context' needs order="),
    "a negative window": (ring(X, X, X, window=(-1, 2), **Y), ValueError,
        r"window=\(-1, 2\) is no number .* from 0 on"),
    "a window of three": (ring(X, X, X, window=(1, 2, 3), **Y), ValueError,
        r"window=\(1, 2, 3\) is no number .* nor a pair"),
    "a window of truth": (ring(X, X, X, window=True, **Y), ValueError, "window=True"),
    "lengths under a window": (ring(zeros(2, 2), X, X, window=1, **Y), ValueError,
        "as many queries as keys; got q"),
    "lengths of documents": (ring(zeros(2, 2), X, X, documents=IDS), ValueError,
        "as many queries as keys; got q"),
    "documents by lengths": (ring(X, X, X, documents=torch.tensor([0, 3, 4])),
        ValueError, r"documents are \[batch, n\], .*\(1, 4\).*rank has, got \(3,\)"),
    "documents of the whole": (ring(X, X, X, documents=IDS.repeat(1, 2)), ValueError,
        r"documents are .*got \(1, 8\)"),
    "fractions of documents": (ring(X, X, X, documents=IDS.double()), TypeError,
        "numbered by integers, got torch.float64"),
    "a mask of this rank's keys": (ring(X, X, X, attn_mask=zeros(2, 4), **Y),
        ValueError, r"attn_mask is .*\(1, 2, 4, 8\).*of all.*got \(1, 2, 4, 4\)"),
    "a mask of all queries": (ring(X, X, X, attn_mask=zeros(2, 8, 8), **Y), ValueError,
        r"got \(1, 2, 8, 8\)"),
    "a mask of integers": (ring(X, X, X, attn_mask=zeros(1, 4, 8).int(), **Y),
        TypeError, "truth values .* got torch.int32"),
    "odd halves under a window": (ring(*[zeros(2, 3)] * 3, window=1, **Y), ValueError,
        "3 positions a rank are not two half-blocks"),
    "no mesh": (lambda: ring_attention(X, X, X, "context"), ff.comm.mesh.NoMesh,
        "no mesh in sight"),
    "a sequence": (lambda: zigzag(torch.zeros(10), 2, 0), ValueError,
        "10 is not cut into the 4 half-blocks of an axis of size 2.*multiples of 4"),
    "a short sequence": (lambda: unzigzag(torch.zeros(1, 3), 2, 1), ValueError,
        "multiples of 4$"),
    "a dim": (lambda: zigzag(torch.zeros(4), 2, 1), IndexError, "out of range"),
    "an index": (lambda: zigzag_positions(4, 2, 2), ValueError, "index=2 is off"),
})  # fmt: skip


def test_unlike_shapes_of_as_many_numbers_do_not_meet() -> None:
    def attend():
        x = zeros(*((2, 4), (4, 2))[ff.axis_index("context")])
        return ring_attention(x, x, x, "context")

    with pytest.raises(CollectiveMismatch, match=r"rank 1 ppermute .*\[1, 4, 2, 8\]"):
        refusing(attend)()


# The order


@settings(max_examples=examples(15))
@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2), st.integers(0, 2))
def test_zigzag_and_back(size, half, before, after) -> None:
    n, dim = 2 * size * half, before
    x = torch.arange(n).view(*[1] * before, n, *[1] * after)
    x = x.expand(*[2] * before, n, *[2] * after)
    turned = zigzag(x, size, dim)
    same(unzigzag(turned, size, dim), x)
    same(zigzag(x, size, dim - x.ndim), turned)
    for i, part in enumerate(turned.chunk(size, dim)):
        at = zigzag_positions(n, size, i)
        same(part, x.index_select(dim, at))
        blocks = (i, 2 * size - 1 - i)
        assert at.tolist() == [b * half + j for b in blocks for j in range(half)]
