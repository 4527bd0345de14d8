"""What is made of laid out parameters lies as they do; all else is told, or whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from fsfunc.comm.comparison import RanksDiffer
from fsfunc.sharded.leaf import is_sharded
from fsfunc.tracing.rules import LawError
from tests.checks import close, on_ranks, same, simulated
from tests.optim.optimizers import KINDS, TORCHS

MESH = simulated(2)
layer = ff.unit(lambda p, x: torch.relu(x @ p["w"] + p["b"]))


def linear(a, b, seed=0):
    draw = torch.Generator().manual_seed(seed + 7 * a + b)
    make = lambda *s: torch.randint(-1, 2, s, generator=draw).double()  # noqa: E731
    return {"w": make(a, b), "b": make(b)}


def run(layers, x):
    for p in layers:
        x = layer(p, x)
    return x


def layouts(t):
    found = tree.leaves(t, is_leaf=is_sharded)
    return [x.layout if is_sharded(x) else None for x in found]


@given(
    st.integers(0, 3),
    st.lists(st.sampled_from([(2, 3), (3, 3), (3, 2)]), min_size=2, max_size=3),
    st.booleans(),
)
@settings(max_examples=6)
def test_what_is_made_of_laid_out_parameters_lies_as_they_do(zero, sizes, like):
    """Models of like names and often like shapes, their moments and averages."""
    params = {f"m{i}": {"l": linear(*s)} for i, s in enumerate(sizes)}

    def loss(params):
        ones = [torch.ones(1, s[0]).double() for s in sizes]
        each = zip(params.values(), ones, strict=True)
        return sum(layer(p["l"], x).sum() for p, x in each)

    def made(params):
        moments = {k: {"mu": tree.map(torch.clone, p)} for k, p in params.items()}
        return {"params": params, "opt": moments, "average": {"m1": params["m1"]}}

    def main():
        step = ff.shard(
            lambda t: ff.value_and_grad(loss)(t["params"]), MESH, "data", zero=zero
        )
        told = {f"opt/{k}/mu": f"params/{k}" for k in params} | {"average": "params"}
        if like:
            t = ff.place(step, made(params), like=told)
        else:
            t = ff.init_state(step, params, made)
        for k, p in t["params"].items():
            tree.map(torch.add, t["opt"][k]["mu"], p)
            parts = [x.parts for x in layouts(t["opt"][k])]
            assert parts == [x.parts for x in layouts(p)]
        tree.map(torch.add, t["average"]["m1"], t["params"]["m1"])
        memory = [x.untyped_storage().data_ptr() for x in tree.leaves(t["average"])]
        theirs = [x.untyped_storage().data_ptr() for x in tree.leaves(t["params"])]
        assert not set(memory) & set(theirs) - {0}
        return ff.unshard(t)

    for whole in ff.spmd(main, MESH)():
        same(whole, made(params))


# Of a train state the optimizer tells; what nobody tells stays whole, and is refused


FOREIGN = {"Adam amsgrad", "NAdam", "RMSprop", "SGD dampened"}
OPTIMIZERS = [name for name in KINDS if name not in TORCHS or name in FOREIGN]


@pytest.mark.parametrize("i, name", list(enumerate(OPTIMIZERS)))
def test_a_state_made_of_whole_parameters_is_right_or_refused(i, name):
    """Right in a `TrainState`, refused in a tree that nobody tells anything about."""
    zero, mesh = (0, 1, 3)[i % 3], simulated(1 if i % 7 == 0 else 2)
    optimizer = KINDS[name].ours()
    params = [linear(4, 4), linear(4, 4, 1)]
    x = torch.randint(-2, 3, (4, 4)).double()
    grad = ff.value_and_grad(lambda p, x: run(p, x).square().mean())
    whole = optimizer.init(params)

    def by_hand(t, x):
        return optimizer.apply(grad(t["p"], x)[1], t["of"], t["p"])[0]

    def placed(step, t):
        sharded = ff.shard(step, mesh, "data", zero=zero)
        return on_ranks(sharded, t, x, mesh=mesh)[0]

    step = lambda s, x: optimizer(grad)(s, x)[0].params  # noqa: E731
    state = ff.TrainState(params, whole)
    close(placed(step, state), step(state, x), 1e-9)
    tree_of = {"p": params, "of": whole}
    try:
        found = placed(by_hand, tree_of)
    except tree.TreeMismatch as error:
        assert "init(" in str(error)
    else:
        close(found, by_hand(tree_of, x), 1e-9)


def sums_by_hand(t):
    """Of parts and a whole copy, which lie in lists: nothing tells them apart."""
    pairs = zip(tree.leaves(t["w"]), tree.leaves(t["copy"]), strict=True)
    return sum((a * b).sum() for a, b in pairs)


@pytest.mark.parametrize("size", [2, 16])
def test_a_whole_copy_that_meets_parts_by_hand_is_refused(size):
    """Where a rank's part is one number too, which goes with any shape."""

    def step(t, x):
        ff.value_and_grad(lambda w, x: layer(w, x).sum())(t["w"], x)
        return sums_by_hand(t)

    def main():
        mesh = simulated(size)
        f, t = ff.shard(step, mesh, "data"), {"w": linear(3, 4), "copy": linear(3, 4)}
        return f(ff.place(f, t, torch.ones(1, 3).double()), torch.ones(1, 3).double())

    with pytest.raises((ValueError, RuntimeError, TypeError)):
        ff.spmd(main, simulated(size))()


REFUSED = {
    "no tensor": (lambda p: {"ema": p["w"].clone()}, TypeError, "is sharded.*tree_map"),
    "another shape": (
        lambda p: {"n": tree.map(lambda x: x[:1].sum(), p)},
        LawError,
        "mixes",
    ),
    "a norm": (lambda p: {"n": tree.map(lambda x: x / x.norm(), p)}, LawError, "norm"),
    "unlike": (lambda p: {"h": torch.ones(2) * MESH.rank}, RanksDiffer, "extra/h"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_function_may_not_make_of_parameters(name):
    extra, kind, text = REFUSED[name]
    optimizer = ff.sgd(0.1)
    step = optimizer(ff.value_and_grad(lambda p, x: layer(p, x).sum()))

    def main():
        f, x = ff.shard(step, MESH, "data"), torch.ones(2, 3).double()
        ff.init_state(f, linear(3, 4), optimizer, x, extra=extra)

    with pytest.raises(kind, match=text):
        ff.spmd(main, MESH)()


def test_extra_goes_with_an_optimizer():
    with pytest.raises(ValueError, match="extra= goes with an optimizer"):
        ff.init_state(lambda s: s, {}, lambda p: p, extra={"a": 1})
