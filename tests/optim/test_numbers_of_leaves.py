"""A number for each leaf: norms, rates, clipping factors, beside sharded leaves."""

import math

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from fsfunc.sharded.leaf import NotATensor
from fsfunc.tracing.rules import LawError
from tests.checks import close, simulated

MESH = simulated(2)
DRAW = torch.Generator().manual_seed(3)
layer = ff.unit(lambda w, x: torch.tanh(x @ w["w"] + w["b"]))


def drawn(*shape):
    return torch.randn(shape, generator=DRAW, dtype=torch.float64)


def state():
    params = {k: {"w": drawn(3, 3), "b": drawn(3)} for k in "ab"}
    rates = {k: {"w": drawn(), "b": drawn()} for k in "ab"}
    return {"params": params, "rates": rates, "means": {"m": drawn(3)}}


def loss(params, x):
    return layer(params["b"], layer(params["a"], x)).square().mean()


def gradient(s, x):
    return ff.value_and_grad(loss)(s["params"], x)[1]


def adaptive_clipping(s, x):
    """AGC: of each leaf the gradient is clipped by the parameter's own norm."""
    g = gradient(s, x)
    sizes, norms = ff.leaf_norms((s["params"], g))
    shares = tree.map(lambda a, b: (0.1 * a / b).clamp(max=1), sizes, norms)
    new = tree.map(lambda w, g, c: w - c * g, s["params"], g, shares)
    return s | {"params": new}


def rates_of_layers(s, x):
    g = gradient(s, x)
    new = tree.map(lambda w, g, r: w - r * g, s["params"], g, s["rates"])
    return s | {"params": new}


def rates_in_python(s, x):
    chosen = lambda path, _: 0.5 if path.endswith("w") else 0.1  # noqa: E731
    r = tree.map_with_path(chosen, s["params"], is_leaf=ff.is_sharded)
    new = tree.map(lambda w, g, r: w - r * g, s["params"], gradient(s, x), r)
    return s | {"params": new}


def norms_kept(s, x):
    """What a step computes beside what it is given, both whole."""
    norms = ff.leaf_norms(gradient(s, x))
    v = tree.map(lambda v, n: 0.9 * v + 0.1 * n * n, s["rates"], norms)
    return s | {"rates": v}


def means_kept(s, x):
    mean = x.mean(0) if ff.axis_size("data") == 1 else ff.pmean(x.mean(0), "data")
    return s | {"means": tree.map(torch.add, s["means"], {"m": mean})}


STEPS = [adaptive_clipping, rates_of_layers, rates_in_python, norms_kept, means_kept]


def on(mesh, step, zero, s, x, steps=2):
    def main():
        mine = ff.local_batch(x, mesh, "data")
        f = ff.shard(step, mesh, "data", zero=zero)
        placed = ff.place(f, s, mine)
        for _ in range(steps):
            placed = f(placed, mine)
        return ff.unshard(placed)

    return ff.spmd(main, mesh)()


@pytest.mark.parametrize(
    ("step", "zero"), [(step, (3, 1, 2, 3, 0)[i]) for i, step in enumerate(STEPS)]
)
def test_a_number_stands_beside_a_sharded_leaf(step, zero):
    s, x = state(), drawn(4, 3)
    (alone,) = on(simulated(1), step, zero, s, x)
    for found in on(MESH, step, zero, s, x):
        close(found, alone, 1e-12)


def an_own_number(s, x):
    own = tree.map(lambda _: x.mean(), s["params"], is_leaf=ff.is_sharded)
    return s | {"params": tree.map(torch.mul, s["params"], own)}


def a_whole_tensor(s, x):
    whole = tree.map(lambda a: x.new_ones(a.shape), s["params"], is_leaf=ff.is_sharded)
    return s | {"params": tree.map(torch.mul, s["params"], whole)}


def the_number_first(s, x):
    return s | {"params": tree.map(torch.mul, s["rates"], s["params"])}


@pytest.mark.parametrize(
    ("step", "error", "text"),
    [
        (an_own_number, LawError, "differs from rank to rank.*ff.pmean"),
        (
            a_whole_tensor,
            tree.TreeMismatch,
            "'a/b'.*Beside a leaf, its tree given first",
        ),
        (
            the_number_first,
            (tree.TreeMismatch, NotATensor),
            "rates/a/b.*params/a/b.*its tree given first",
        ),
    ],
)
def test_other_things_beside_a_leaf_are_refused(step, error, text):
    beside_gradients = lambda s, x: step(s | {"g": gradient(s, x)}, x)  # noqa: E731
    with pytest.raises(error, match=text):
        on(MESH, beside_gradients, 3, state(), drawn(4, 3))


@ff.unit
def mlp(p, x):
    return ff.nn.row_linear(
        torch.tanh(ff.nn.column_linear(x, p["up"])), p["down"], p["bias"]
    )


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("p", [2.0, math.inf])
def test_norms_of_leaves_that_are_split_over_a_model_axis_too(zero, p):
    """And of their gradients: one collective over each set of axes."""
    mesh = simulated(data=2, model=2)
    layouts = {"up": ff.Split(0, "model"), "down": ff.Split(1, "model")}
    params = {"up": drawn(4, 3), "down": drawn(3, 4), "bias": drawn(3)}
    x = drawn(4, 3)

    def step(params, x):
        g = ff.value_and_grad(lambda w, x: mlp(w, x).square().mean())(params, x)[1]
        return ff.leaf_norms((params, g), p)

    def main():
        mine = ff.local_batch(x, mesh, "data")
        f = ff.shard(step, mesh, "data", zero=zero)
        placed = ff.place(f, params, mine, layouts=layouts)
        with ff.ledger() as log:
            out = f(placed, mine)
        op = "pmax" if p == math.inf else "psum"
        return out, log.count(op, axis="model" if zero == 0 else ("data", "model"))

    row_linear = zero == 0 and p < math.inf  # has one of its own
    for found, count in ff.spmd(main, mesh)():
        close(found, step(params, x), 1e-12)
        assert count == 1 + row_linear
