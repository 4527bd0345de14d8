"""`unit`: any pytree in and out, nothing captured, nothing changed in place."""

from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fsfunc as ff
from fsfunc._torch import FakeTensor
from tests.checks import same

Point = namedtuple("Point", "a b")
MESH = ff.make_mesh({"data": 2}, "simulated")
X = torch.arange(6.0).view(2, 3)
W = torch.linspace(-1, 1, 9).view(3, 3)


def sharded(f, params, *rest):
    """What rank 0 gets of f(params, *rest) under shard over two ranks."""

    def main():
        g = ff.shard(f, MESH, "data")
        value, grads = g(ff.place(g, params, *rest), *rest)
        return value, ff.unshard(grads)

    return ff.spmd(main, MESH)()[0]


def interpreted(f, params, *rest):
    """(name, value and gradient) of `f` under every interpretation of its units."""
    g = ff.value_and_grad(f)
    yield "plain", g(params, *rest)
    yield "remat", ff.remat(g)(params, *rest)
    yield "shard", sharded(g, params, *rest)
    yield "remat(shard)", sharded(ff.remat(g), params, *rest)
    whole = ff.shard(ff.remat(g), MESH, "data", zero=1)

    def main():
        value, grads = whole(ff.place(whole, params, *rest), *rest)
        return value, ff.unshard(grads)

    yield "shard(remat, zero=1)", ff.spmd(main, MESH)()[0]


class Old(torch.autograd.Function):
    """Keeps the weight past autograd's sight, as code from before 2020 does."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.x, ctx.w = x, w
        return x @ w

    @staticmethod
    def backward(ctx, g):
        return g @ ctx.w.t(), ctx.x.t() @ g


def many_outputs(w, x, none, n, pair, *, scale):
    h = x @ w
    return {"h": h, "again": h, "n": n, "none": none, "x": x, "w": w.view(9),
            "point": Point(h[0], w[1]), "ints": torch.arange(2), "s": "text",
            "scale": scale, "pair": pair, "ones": torch.ones(3)}  # fmt: skip


def uses_many(w, x):
    o = ff.unit(many_outputs)(w, x, None, 2, (x, [x]), scale=3.0)
    assert o["none"] is None and o["n"] == 2 and o["s"] == "text" and o["scale"] == 3.0
    assert o["ints"].dtype == torch.int64
    total = (o["h"] * o["again"]).sum() + (o["w"] * 2).sum() + o["x"].sum()
    return total + o["point"].a.sum() + o["point"].b.prod() + o["pair"][1][0].sum()


def func_inside(w, x):
    return torch.func.vmap(torch.func.grad(lambda x: (torch.sin(x @ w) ** 2).sum()))(x)


def checkpoint_inside(w, x):
    return torch.utils.checkpoint.checkpoint(
        lambda x: torch.sin(torch.sin(x @ w) @ w), x, use_reentrant=False
    )


def autocast_inside(w, x):
    with torch.autocast("cpu", torch.bfloat16):
        h = x @ w
    return h.float() @ w


def attention(w, x):
    q = (x @ w).view(1, 1, 2, 3)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)[0, 0]


def pointers(w, x):
    if not isinstance(w, FakeTensor):  # where a step is recorded
        assert w.data_ptr() != 0 and x.data_ptr() != 0
    return x @ w


def in_place_on_own(w, x):
    h = x @ w
    h += 1
    h[0] = 0
    return h.relu_()


def under_no_grad(w, x):
    with torch.no_grad():
        scale = (x @ w).abs().max()
    return (x @ w) / (1 + scale) * w.detach()[0]


BODIES = {
    "linear": lambda w, x: x @ w,
    "view of the parameter": lambda w, x: w[:2] * x,
    "the parameter": lambda w, x: w,
    "torch.func inside": func_inside,
    "checkpoint inside": checkpoint_inside,
    "old-style Function": lambda w, x: Old.apply(x, w),
    "embedding": lambda w, x: F.embedding(torch.tensor([0, 2]), w) * x,
    "normalised weight": lambda w, x: x @ F.normalize(w),
    "attention": attention,
    "autocast": autocast_inside,
    "data_ptr": pointers,
    "in place on its own": in_place_on_own,
    "no_grad inside": under_no_grad,
    "layer norm, three calls": lambda w, x: F.layer_norm(x @ w, (3,), w[0], w[1]),
}


@pytest.mark.parametrize("name", BODIES)
def test_every_body_is_right_under_every_interpretation(name) -> None:
    """The unit is called twice on the same leaf, the second time on its own output."""
    body = BODIES[name]
    unit = ff.unit(body)

    def f(w, x, run=unit):
        return (torch.sin(run(w, run(w, x)[:2])) * 2).sum()

    expected = ff.value_and_grad(lambda w, x: f(w, x, body))(W, X)
    for how, found in interpreted(f, W, X):
        torch.testing.assert_close(found, expected, msg=lambda m, how=how: how + m)


def test_any_pytree_in_and_out() -> None:
    expected = None
    for _, found in interpreted(uses_many, W, X):
        expected = expected or found
        torch.testing.assert_close(found, expected)


def test_outputs_have_the_same_requires_grad_under_remat() -> None:
    unit = ff.unit(many_outputs)
    w = W.clone().requires_grad_()
    plain = unit(w, X, None, 2, X, scale=1)
    again = ff.remat(unit)(w, X, None, 2, X, scale=1)
    for key in ("h", "again", "w", "x", "ones", "ints"):
        assert plain[key].requires_grad == again[key].requires_grad, key
    assert again["h"] is again["again"]


def test_in_place_on_an_output_in_glue() -> None:
    unit = ff.unit(lambda w, x: (x @ w, x @ w))

    def f(w, x):
        a, b = unit(w, x)
        a.mul_(2)
        return (a * b).sum()

    expected = 2 * ((X @ W) ** 2).sum()
    for _, (value, _) in interpreted(f, W, X):
        torch.testing.assert_close(value, expected)


def test_nested_units_take_their_own_leaves() -> None:
    inner = ff.unit(lambda p, x: torch.tanh(x @ p))

    @ff.unit
    def outer(p, x):
        for w in p["inner"]:
            x = inner(w, x)
        return x @ p["own"]

    @ff.unit
    def whole(p, x):
        return outer(p, outer(p, x)).sum()

    p = {"inner": [W, W * 2], "own": W + 1}
    found = dict(interpreted(whole, p, X))
    for how, out in found.items():
        torch.testing.assert_close(out, found["plain"], msg=lambda m, h=how: h + m)


def test_inference_mode_and_tensors_made_in_it() -> None:
    unit = ff.unit(lambda w, x: x @ w)
    w = nn.Parameter(W)
    with torch.inference_mode():
        made = X + 0
        same(unit(w, made), X @ W)
    with torch.no_grad():
        same(ff.unit(lambda w, x: x @ w)(w, made), X @ W)
