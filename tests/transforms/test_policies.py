"""Policies: what they name is not computed again; `test_remat` has the bits."""

import gc

import pytest
import torch
import torch.nn.functional as F

import fsfunc as ff
from fsfunc import _torch
from fsfunc.comm.attribution import internal
from fsfunc.transforms.policies import checkpoint_name
from tests.checks import same
from tests.probes import Calls, LiveBytes

D = 8
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(4, D, generator=GENERATOR)
P = [{k: torch.randn(D, D, generator=GENERATOR) for k in "abc"} for _ in range(2)]
MESH = ff.make_mesh({"data": 2}, "simulated")


@ff.unit
def block(p, x):
    h = checkpoint_name(torch.tanh(x) @ p["a"], "first")
    h = F.dropout(h, 0.25)
    t = (x * 2).sum()  # a temporary, whose memory the next op may take
    del t
    h = checkpoint_name(torch.sin(h) @ p["b"], "second")
    return torch.cos(h) @ p["c"]


def loss(ps, x):
    for p in ps:
        x = block(p, x)
    return (x**2).sum()


def matmuls(f, *args):
    torch.manual_seed(3)
    with Calls("mm.", "addmm", "bmm") as calls:
        out = f(*args)
    return calls.count, out


PLAIN = matmuls(ff.value_and_grad(loss), P, X)

# Each of two blocks: 3 products forward, 5 or 6 backward; recomputed: 2, since the last
# one's value is not needed for its own gradient.
POLICIES = [
    (None, 4),
    (ff.SaveOnly("first"), 2),
    (ff.SaveOnly("first", "second"), 0),
    (ff.SaveOnly("unknown"), 4),
    (ff.SaveAllBut(), 0),
    (ff.SaveAllBut("first"), 2),
]


@pytest.mark.parametrize("policy, again", POLICIES, ids=range(len(POLICIES)))
def test_named_values_are_not_computed_again(policy, again) -> None:
    count, out = matmuls(ff.remat(ff.value_and_grad(loss), policy), P, X)
    same(out, PLAIN[1])
    assert count - PLAIN[0] == again


def test_a_name_is_of_what_made_the_value_and_not_of_what_lay_there_before() -> None:
    """A collective's result may lie where a value that the unit dropped has lain."""

    @ff.unit
    def layer(p, x):
        dropped = x * p
        key, total = _torch.storage_key(dropped), dropped.sum()
        del dropped
        with internal():  # as what a collective makes
            results = [x + p for _ in range(20)]
        results.sort(key=lambda y: _torch.storage_key(y) != key)
        return total * checkpoint_name(results[0], "summed").sum()

    x = torch.linspace(0, 1, 1000)
    value_and_grad = ff.value_and_grad(layer)
    same(ff.remat(value_and_grad, ff.SaveOnly("summed"))(x, x), value_and_grad(x, x))


@pytest.mark.parametrize(
    ("order", "zero"), [("remat(shard)", 0), ("shard(remat)", 1), ("remat(shard)", 3)]
)
def test_names_beside_collectives(order, zero) -> None:
    @ff.unit
    def mixing(p, x):
        h = checkpoint_name(x @ p["a"], "first")
        h = checkpoint_name(ff.psum(torch.sin(h), "data"), "summed")
        return checkpoint_name(h @ p["b"], "second") @ p["c"]

    def f(ps, x):
        for p in ps:
            x = torch.sin(mixing(p, x))
        return (x**2).sum()

    def run(policy):
        def main():
            g = ff.value_and_grad(f)
            if order == "remat(shard)":
                g = ff.remat(ff.shard(g, MESH, "data", zero=zero), policy)
            else:
                g = ff.shard(ff.remat(g, policy), MESH, "data", zero=zero)
            x = ff.local_batch(X, MESH, "data")
            params = ff.place(g, P, x)
            with Calls("mm.") as calls:
                value, grads = g(params, x)
            return calls.count, (value, ff.unshard(grads))

        return ff.spmd(main, MESH)()

    whole, saved = run(None), run(ff.SaveOnly("first", "second", "summed"))
    for (n, expected), (m, out) in zip(whole, saved, strict=True):
        same(out, expected)
        assert n - m == 4


def test_kept_values_go_as_the_backward_runs() -> None:
    """Each unit's goes when its own backward is done, not all of them at the end."""
    n, x = 8, torch.randn(256, 64)
    ws = [torch.eye(64) for _ in range(n)]
    alive = []

    @ff.unit
    def unit(w, x):
        h = checkpoint_name(torch.sin(x) @ w, "h")
        return torch.sin(h)

    def f(ws):
        h = x
        for w in ws:
            h = unit(w, h)
            if h.requires_grad:
                h.register_hook(lambda _: alive.append(memory.live))
        return h.sum()

    with LiveBytes(x, ws) as memory:
        ff.remat(ff.value_and_grad(f), ff.SaveOnly("h"))(ws)
    fall = (alive[1] - alive[-1]) / x.nbytes
    # An output and a kept value go with each unit, a gradient of a quarter comes.
    assert fall > 0.8 * 1.75 * (n - 2), fall


def test_a_unit_that_does_something_else_the_second_time_is_refused() -> None:
    calls = []

    @ff.unit
    def fickle(w, x):
        calls.append(0)
        if len(calls) > 1:
            x = torch.sin(x)
        return checkpoint_name(x @ w, "h").sum()

    with pytest.raises(RuntimeError, match="must do the same again"):
        ff.remat(ff.value_and_grad(fickle), ff.SaveOnly("h"))(P[0]["a"], X)


def test_what_an_op_made_together_goes_without_the_garbage_collector() -> None:
    x, w = torch.randn(256, 64), torch.eye(64)

    @ff.unit
    def unit(w, x):
        high, low = torch.split_with_sizes_copy(x @ w, [128, 128])  # two of one op
        return checkpoint_name(torch.sin(high) + low, "h")

    step = ff.remat(ff.value_and_grad(lambda w: unit(w, x).sum()), ff.SaveOnly("h"))
    step(w)
    gc.collect()
    gc.disable()
    try:
        with LiveBytes(x, w) as memory:
            out = step(w)
            assert memory.live == sum(y.nbytes for y in out)
    finally:
        gc.enable()
