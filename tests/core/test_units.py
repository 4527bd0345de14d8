"""`unit`: any pytree in and out, nothing captured, nothing changed in place."""

from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F

import fsfunc as ff
from fsfunc import tree
from fsfunc._torch import FakeTensor
from tests.checks import close, on_ranks

Point = namedtuple("Point", "a b")
MESH = ff.make_mesh({"data": 2}, "simulated")
X = torch.arange(6.0).view(2, 3)
W = torch.linspace(-1, 1, 9).view(3, 3)


def sharded(f, params, *rest, zero=3, around=lambda f: f):
    """What rank 0 gets of f(params, *rest) under shard over two ranks, called twice."""
    g = around(ff.shard(f, MESH, "data", zero=zero))
    return on_ranks(g, params, *rest, mesh=MESH, calls=2, over=())[0]


def interpreted(f, params, *rest, but=""):
    """(name, value and gradient) of `f` under the interpretations of its units."""
    g = ff.value_and_grad(f)
    ways = {
        "plain": lambda: g(params, *rest),
        "remat": lambda: ff.remat(g)(params, *rest),
        "shard": lambda: sharded(g, params, *rest),
        "shard(remat), zero=1": lambda: sharded(ff.remat(g), params, *rest, zero=1),
        "remat(shard)": lambda: sharded(g, params, *rest, around=ff.remat),
    }
    return ((name, way()) for name, way in ways.items() if name != but)


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


# Bodies, each a function of a matrix and of rows of data.


class Old(torch.autograd.Function):
    """Keeps the weight, and what is new, past autograd's sight, as in 2020."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.x, ctx.w, ctx.y = x, w, torch.tanh(x @ w)
        return ctx.y + 1

    @staticmethod
    def backward(ctx, g):
        g = g * (1 - ctx.y**2)
        return g @ ctx.w.t(), ctx.x.t() @ g


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


def causal(w, x):
    q = (x @ w).view(1, 1, *x.shape)
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


def views(w, x):
    return torch.tanh(x @ w), w.T, w


inner = ff.unit(lambda w, x: torch.sin(x @ w))
BODIES = {
    "linear": lambda w, x: x @ w,
    "view of the parameter": lambda w, x: w[:2].sum(0) * x,
    "views as outputs": views,
    "detached": lambda w, x: x @ w.detach() * w.sum(),
    "torch.func inside": func_inside,
    "checkpoint inside": checkpoint_inside,
    "old-style Function": lambda w, x: Old.apply(x, w),
    "embedding": lambda w, x: F.embedding(torch.arange(3), w) * x.sum(),
    "normalised weight": lambda w, x: torch.tanh(x @ F.normalize(w)),
    "causal attention": causal,
    "dropout": lambda w, x: F.dropout(x @ w, 0.5) @ w,
    "autocast": autocast_inside,
    "data_ptr": pointers,
    "in place on its own": in_place_on_own,
    "no_grad inside": under_no_grad,
    "units inside": lambda w, x: inner(w, x) + inner(w, x) @ w,
    # Of a row of equal numbers it would magnify what rounding leaves.
    "layer norm": lambda w, x: F.layer_norm(x @ w + X[0], (3,), w[0], w[1]),
}


def three_calls(unit):
    """A first, a middle and a last unit, the first called twice on one leaf."""

    def loss(ws, x):
        for w in (*ws, ws[0]):
            out = unit(w, x)
            x = out if isinstance(out, torch.Tensor) else sum(o.sum() * x for o in out)
        return torch.sin(x).square().mean()

    return loss


@pytest.mark.parametrize("name", BODIES)
def test_every_body_is_right_under_every_interpretation(poisoned, name) -> None:
    """As on one device, though buffers that were let go of turn NaN.

    Of the sharded ones two, by turns.
    """
    body = BODIES[name]
    ws, x = [W, W.flip(0) * 0.5, W.t() + 0.1], torch.linspace(-1, 1, 9).view(3, 3)
    torch.manual_seed(1)
    expected = ff.value_and_grad(three_calls(body))(ws, x)
    but = ("shard", "shard(remat), zero=1", "remat(shard)")[
        list(BODIES).index(name) % 3
    ]
    for how, found in interpreted(three_calls(ff.unit(body)), ws, x, but=but):
        if name == "dropout":  # which draws by unit, and otherwise on each rank
            assert all(x.isfinite().all() for x in tree.leaves(found)), how
        else:
            close(found, expected, 1e-5)


def test_any_pytree_in_and_out() -> None:
    expected = None
    for _, found in interpreted(uses_many, W, X):
        expected = expected or found
        torch.testing.assert_close(found, expected)


def test_in_place_on_an_output_in_glue() -> None:
    unit = ff.unit(lambda w, x: (x @ w, x @ w))

    def f(w, x):
        a, b = unit(w, x)
        a.mul_(2)
        return (a * b).sum()

    expected = 2 * ((X @ W) ** 2).sum()
    for _, (value, _) in interpreted(f, W, X):
        torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("where", ["plain", "shard", "remat"])
def test_an_error_of_torchs_names_the_innermost_unit_once(where, caplog) -> None:
    """And torch's log of fake tensors does not stand before it."""

    @ff.unit
    def inner(w, x):
        return x @ w

    @ff.unit
    def outer(w, x):
        return inner(w, x).sum()

    step = ff.value_and_grad(lambda w, x: outer(w["w"], x))
    given = {"w": torch.ones(4, 2)}, torch.ones(2, 3)
    ways = {
        "plain": lambda: step(*given),
        "remat": lambda: ff.remat(step)(*given),
        "shard": lambda: sharded(step, *given),
    }
    with pytest.raises(RuntimeError) as raised:
        ways[where]()
    units = [x for x in raised.value.__notes__ if "unit" in x]
    assert units == ["in unit 'outer/inner'"]
    assert not caplog.records
