"""Learned rules of one element: of one device's numbers, at any cut, and for nothing.

The meta-gradient is the sum over all elements of all ranks; what it costs is the one
collective that any whole parameter costs.
"""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, jvp, vmap

import fsfunc as ff
from fsfunc import tree
from fsfunc.comm.comparison import RanksDiffer
from fsfunc.testing import integers
from fsfunc.tracing.rules import LawError
from tests.checks import close, refusals, same, simulated, with_ledger
from tests.covering import examples
from tests.models import chain, floats, layers

each, F64 = tree.map, torch.float64
LOSS = chain()
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


def network(meta, g, w, m):
    """A small network of the features of an element, and its momentum."""
    m = 0.9 * m + g
    features = torch.stack([g, w, m, torch.ones_like(g)])
    hidden = torch.tanh(features @ meta["in"])
    return {"update": -0.1 * hidden @ meta["out"] * meta["rate"].exp(), "m": m}


def state(n=2, width=3):
    """What a learned optimizer trains; parts of width 3 are uneven, or empty."""
    params = layers(n, width, make=floats, dtype=F64)
    meta = {"in": floats(4, 5, dtype=F64), "out": floats(5, seed=1, dtype=F64)}
    meta["rate"] = torch.tensor(0.1, dtype=F64)
    return {"meta": meta, "params": params, "m": each(torch.zeros_like, params)}


X = floats(8, 3, seed=9, dtype=F64)
LIKE = {"like": {"m": "params"}}
UPDATE = ff.elementwise(network)


def unrolled(meta, params, m, x, steps=2):
    for _ in range(steps):
        g = ff.value_and_grad(LOSS)(params, x)[1]
        new = UPDATE(meta, g, params, m)
        params, m = each(torch.add, params, new["update"]), new["m"]
    return LOSS(params, x)


def alike(tensors):
    """Tangents, or cotangents, that are no multiple of the tensors."""
    return each(lambda a: a.cos(), tensors)


def by_meta(s, x):
    return ff.value_and_grad(unrolled)(s["meta"], s["params"], s["m"], x)


def by_all(s, x):
    by = ff.value_and_grad(unrolled, argnums=(0, 1, 2))
    return by(s["meta"], s["params"], s["m"], x)


def by_torch(s, x):
    def loss(meta, *others):
        return unrolled(ff.pcast(meta, "data", to="V"), *others, x, steps=1)

    return grad(loss, argnums=(0, 1))(s["meta"], s["params"], s["m"])


def along(s, x):
    loss = lambda meta: unrolled(meta, s["params"], s["m"], x)  # noqa: E731
    found = jvp(loss, (s["meta"],), (alike(s["meta"]),))
    return ff.pmean(torch.stack(found), "data")


def mapped(s, x):
    """Evolution strategies: the losses of several optimizers."""
    metas = each(lambda a: torch.stack([a, 2 * a, a - 1]), s["meta"])
    losses = vmap(lambda meta: unrolled(meta, s["params"], s["m"], x, 1))(metas)
    return ff.pmean(losses, "data")


def twice(s, x):
    slope = lambda meta: sum(  # noqa: E731
        a.square().sum() for a in tree.leaves(by_meta({**s, "meta": meta}, x)[1])
    )
    return ff.value_and_grad(slope)(s["meta"])


def hessian_vector(s, x):
    def loss(meta):
        return unrolled(ff.pcast(meta, "data", to="V"), s["params"], s["m"], x, steps=1)

    return jvp(grad(loss), (s["meta"],), (alike(s["meta"]),))[1]


def of_sums(s, x):
    """A loss that is no unit's: of every element, also of those that no rank holds."""
    square = ff.elementwise(lambda meta, w: (w * meta["rate"] + 1).square())
    loss = lambda meta, w: ff.tree_sum(square(meta, w))  # noqa: E731
    LOSS(s["params"], x)  # what the parameters are laid out for
    return ff.value_and_grad(loss, argnums=(0, 1))(s["meta"], s["params"])


def by_leaf(s, x):
    """With one number for all elements of a leaf, that is differentiated too."""
    rule = lambda meta, g, w, n, k: w - k * meta["rate"] * g / n  # noqa: E731

    def loss(meta, params):
        g = ff.value_and_grad(LOSS)(params, x)[1]
        ks = each(lambda _: 0.5, g, is_leaf=ff.is_sharded)
        return LOSS(ff.elementwise(rule)(meta, g, params, ff.leaf_norms(g), ks), x)

    return ff.value_and_grad(loss, argnums=(0, 1))(s["meta"], s["params"])


ROUTES = [
    by_meta, by_all, by_torch, along, mapped, twice, hessian_vector, of_sums, by_leaf
]  # fmt: skip


def on(size, step, s, **how):
    how = {**LIKE, **how}
    return with_ledger(lambda mesh: ff.shard(step, mesh, "data"), s, X,
                       mesh=simulated(size), **how)  # fmt: skip


@pytest.mark.parametrize("step", ROUTES, ids=lambda f: f.__name__)
def test_a_learned_rule_is_that_of_one_device(step):
    s = state(1 if step in (twice, hessian_vector) else 2)
    ((alone, _),) = on(1, step, s)
    for size in (2, 4) if step in (along, hessian_vector) else (4,):
        for found, _ in on(size, step, s):
            close(found, alone, 1e-12)


TRANSFORMS = {
    "zero=0": lambda f, mesh: ff.shard(f, mesh, "data", zero=0),
    "zero=1": lambda f, mesh: ff.shard(f, mesh, "data", zero=1),
    "zero=2, remat": lambda f, mesh: ff.shard(ff.remat(f), mesh, "data", zero=2),
    "more ranks than elements": lambda f, mesh: ff.shard(f, mesh, "data"),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_under_other_transforms(name):
    size = 8 if name.startswith("more") else 2
    s = state(1, 1 if size == 8 else 3)
    x = X[:, : s["params"][0]["w"].shape[0]]
    alone = by_meta(s, x)
    mesh = simulated(size)
    wrap = lambda mesh: TRANSFORMS[name](by_meta, mesh)  # noqa: E731
    for found, _ in with_ledger(wrap, s, x, mesh=mesh, planned=True, **LIKE):
        close(found, alone, 1e-12)


def sent(step, size, s):
    records = on(size, step, s)[0][1].records
    return [(r.op, r.bytes, r.phase) for r in records]


def test_a_rule_sends_nothing_and_its_gradient_one_psum():
    size, s = 4, state()

    def applied(s, x):
        g = ff.value_and_grad(LOSS)(s["params"], x)[1]
        return UPDATE(s["meta"], g, s["params"], s["m"])

    plain = sent(lambda s, x: ff.value_and_grad(LOSS)(s["params"], x), size, s)
    assert sent(applied, size, s) == plain
    # A ring: each rank sends 2 (n - 1)/n of the 8 bytes of each number in `meta`.
    numbers = sum(a.numel() for a in tree.leaves(s["meta"]))
    psum = ("psum", Fraction(2 * (size - 1), size) * 8 * numbers, "plain gradients")

    def learned(s, x):
        def loss(meta):
            updates = UPDATE(meta, s["m"], s["params"], s["m"])["update"]
            return LOSS(each(torch.add, s["params"], updates), x)

        return ff.value_and_grad(loss)(s["meta"])

    assert sent(learned, size, s) == [*plain, psum]


@settings(max_examples=examples(8))
@given(
    shapes=st.lists(
        st.sampled_from([(), (1,), (3,), (2, 3), (0,), (5, 2)]), min_size=1
    ),
    size=st.integers(1, 5),
    zero=st.sampled_from([0, 1, 3]),
)
def test_every_element_counts_once(shapes, size, zero):
    """Exactly, in integers; a rule that makes 5 of 0 adds nothing for padding."""
    params = [integers(*shape, seed=k, dtype=F64) for k, shape in enumerate(shapes)]
    whole = integers(3, seed=9, dtype=F64)  # in no unit
    rule = ff.elementwise(lambda meta, w: meta["a"] * w + meta["b"])
    unit = ff.unit(lambda p, x: sum(a.sum() for a in p) * x.sum())

    def step(s, x):
        unit(s["params"], x)
        loss = lambda meta: ff.tree_sum(rule(meta, [s["params"], s["whole"]]))  # noqa: E731
        return ff.value_and_grad(loss)(s["meta"])

    meta = {k: torch.tensor(v, dtype=F64) for k, v in (("a", 2.0), ("b", 5.0))}
    s = {"params": params, "meta": meta, "whole": whole}
    elements = [*params, whole]
    a, b = sum(x.sum() for x in elements), sum(x.numel() for x in elements)
    b = torch.tensor(b, dtype=F64)
    expected = 2 * a + 5 * b, {"a": a, "b": b}
    x = torch.ones(size, 1, dtype=F64)
    wrap = lambda mesh: ff.shard(step, mesh, "data", zero=zero)  # noqa: E731
    for found, _ in with_ledger(wrap, s, x, mesh=simulated(size)):
        same(found, expected)


def trainer(s, x):
    """A step of meta-training; the loss of what was learned so far is returned."""
    value, g = ff.value_and_grad(after_two)(s["meta"], s["params"], x)
    return {**s, "meta": each(lambda a, b: a - 0.5 * b, s["meta"], g)}, value


def after_two(meta, params, x):
    rule = lambda meta, g, w: network(meta, g, w, g)["update"]  # noqa: E731
    for _ in range(2):
        g = ff.value_and_grad(LOSS)(params, x)[1]
        params = each(torch.add, params, ff.elementwise(rule)(meta, g, params))
    return LOSS(params, x)


def test_a_learned_optimizer_is_trained_as_on_one_device():
    s = state()
    del s["m"]

    def losses(size):
        mesh = simulated(size)

        def main():
            mine = ff.local_batch(X, mesh, "data")
            step = ff.donate(ff.shard(trainer, mesh, "data"))
            here, found = ff.place(step, s, mine), []
            for _ in range(6):
                here, value = step(here, mine)
                found.append(value.item())
            return found

        return ff.spmd(main, mesh)()

    (alone,) = losses(1)
    assert alone[-1] < 0.9 * alone[0]
    for found in losses(4):
        assert found == pytest.approx(alone, rel=1e-12)


def test_meta_training_is_proven():
    s = state(1)
    del s["m"]
    mesh = simulated(2)
    ff.prove(trainer, ff.shard(trainer, mesh, "data"), mesh, s, X)


def on_data_and_model(step, s, sizes):
    mesh = simulated(**sizes)

    def main():
        mine = ff.local_batch(X, mesh, "data")
        sharded = ff.shard(step, mesh, "data")
        here = ff.place(sharded, s, mine, layouts={"up": ff.Split(0, "model")})
        with ff.ledger() as log:
            found = sharded(here, mine)
        return ff.unshard(found), log

    return ff.spmd(main, mesh)()


@ff.unit
def half_split(p, x):
    """A split matrix after a whole one."""
    y = ff.nn.column_linear(x * p["b"], p["up"])
    return ff.psum(y.square().sum(1), "model").mean()


FACTORS = {
    "elementwise": ff.elementwise(lambda meta, w: meta.exp() * w),
    "tree_scale": lambda meta, w: ff.tree_scale(w, meta.exp()),
}


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("sizes", [(1, 2), (2, 2)])
def test_parts_of_a_model_axis_count_and_whole_leaves_beside_them_once(name, sizes):
    s = {
        "up": floats(4, 3, dtype=F64),
        "b": floats(3, dtype=F64),
        "s": floats(dtype=F64),
    }

    def step(s, x):
        loss = lambda meta, w: half_split(FACTORS[name](meta, w), x)  # noqa: E731
        w = {"up": s["up"], "b": s["b"]}
        return ff.value_and_grad(loss, argnums=(0, 1))(s["s"], w)

    ((alone, _),) = on_data_and_model(step, s, {"data": 1, "model": 1})
    for found, log in on_data_and_model(step, s, {"data": sizes[0], "model": sizes[1]}):
        close(found, alone, 1e-12)
        # Forward the loss; backward the inputs, and the factor of the split matrix.
        assert log.count("psum", axis="model") == 3


def test_a_leaf_takes_part_where_every_tree_has_it():
    seen = []

    def rule(meta, g, w):
        seen.append(g.dtype)
        return g + w, (g > w)

    grads = {"a": torch.ones(2), "b": None, "c": torch.ones(()), "n": torch.ones(2)}
    params = {"a": torch.zeros(2), "b": torch.ones(3), "c": 2.0, "n": None}
    total, flags = ff.elementwise(rule)(None, grads, params)
    expected = {"a": torch.ones(2), "b": None, "c": torch.tensor(3.0), "n": None}
    same(total, expected)
    same(
        flags, {"a": torch.ones(2) > 0, "b": None, "c": torch.tensor(False), "n": None}
    )
    assert seen and ff.elementwise(rule)(None, {"n": 3}, {"n": 4}) == {"n": None}


def test_an_empty_part_has_the_dtypes_of_others_and_no_infinite_derivative():
    """The rule's derivative is not finite at what stands in for an element."""

    def rule(meta, w):
        return (meta * (w - 1)).abs().sqrt().float()

    def step(s, x):
        LOSS([s["w"]], x)
        loss = lambda meta: ff.tree_sum(ff.elementwise(rule)(meta, s["w"]))  # noqa: E731
        return ff.value_and_grad(loss)(s["meta"]), ff.elementwise(rule)(
            s["meta"], s["w"]
        )

    w = {"w": torch.full((1, 1), 3.0, dtype=F64)}
    s = {"w": w, "meta": torch.tensor(2.0, dtype=F64)}
    x = torch.ones(2, 1, dtype=F64)
    alone = step(s, x)
    for found, _ in with_ledger(lambda mesh: ff.shard(step, mesh, "data"), s, x):
        close(found, alone, 1e-6)


def of_parts(rule):
    """A step on two ranks that applies a rule to its parameters."""
    applied = ff.elementwise(rule)

    def step(s, x):
        LOSS(s["params"], x)
        return applied(s["meta"], s["params"])

    s = {k: v for k, v in state(1).items() if k != "m"}
    return lambda: on(2, step, s, like={})


OUTSIDE = torch.tensor(2.0, dtype=F64)


def seeded(meta, w):
    return w + torch.randn((), generator=torch.Generator().manual_seed(0), dtype=F64)


REFUSED = {
    "a norm": (lambda meta, w: w / w.norm(), "leaf_norms"),
    "a mean": (lambda meta, w: w - w.mean(), "of one element it says nothing"),
    "a softmax": (lambda meta, w: w.softmax(0), "_softmax is not elementwise"),
    "sorted": (lambda meta, w: w.sort().values, "sort is not elementwise"),
    "summed on": (lambda meta, w: w.cumsum(0), "cumsum is not elementwise"),
    "noise": (lambda meta, w: w + torch.randn_like(w), r"ff.randn_like\(tree\)"),
    "seeded noise": (seeded, r"ff.randn_like\(tree\)"),
    "dropout": (lambda meta, w: torch.dropout(w, 0.5, True), "ff.randn_like"),
    "a branch": (lambda meta, w: w if w > 0 else -w, "torch.where"),
    "a value": (lambda meta, w: w * w.item(), "torch.where"),
    "another tensor": (lambda meta, w: w * OUTSIDE, "give it in meta"),
    "a collective": (lambda meta, w: ff.psum(w, "data"), "Call it before"),
    "two numbers": (lambda meta, w: torch.stack([w, w]), r"shape \[2\]"),
    "a number": (lambda meta, w: (w, 0.0), "returns 0.0"),
    "nothing": (lambda meta, w: None, "returns nothing"),
    "a write": (lambda meta, w: w.mul_(2), "work on a copy"),
    "a write to meta": (lambda meta, w: meta["rate"].add_(1) * w, "work on a copy"),
}
PLACES = {
    "an index": (lambda meta, w: w[0], IndexError, "invalid index"),
    "places": (lambda meta, w: w * torch.arange(len(w)), TypeError, "len"),
    "the rank": (
        lambda meta, w: w * float(ff.axis_index("data")),
        RanksDiffer,
        "lay out for unlike",
    ),
}


@refusals({k: (of_parts(f), ValueError, text) for k, (f, text) in REFUSED.items()})
def test_what_is_no_rule_of_one_element_is_refused(call, error, way_out):
    with pytest.raises(error, match=way_out):
        call()


@pytest.mark.parametrize("name", sorted(REFUSED.keys() - {"a collective"}))
def test_it_is_refused_on_one_device_too(name):
    rule, text = REFUSED[name]
    s = state(1)
    with pytest.raises(ValueError, match=text):
        ff.elementwise(rule)(s["meta"], s["params"])


@refusals({k: (of_parts(f), error, text) for k, (f, error, text) in PLACES.items()})
def test_an_element_does_not_know_its_place(call, error, way_out):
    with pytest.raises(error, match=way_out) as caught:
        call()
    assert error is RanksDiffer or "one element at a time" in caught.value.__notes__[0]


def own_meta(s, x):
    LOSS(s["params"], x)
    return UPDATE({**s["meta"], "rate": x.mean()}, s["m"], s["params"], s["m"])


def parts_as_meta(s, x):
    LOSS(s["params"], x)
    rule = ff.elementwise(lambda meta, w: w * meta["w"].sum())
    return rule(s["params"][0], s["params"])


MISUSED = {
    "of this rank": (own_meta, LawError, "disagrees|rank's own|differs"),
    "in parts": (parts_as_meta, TypeError, "ff.unshard"),
}


@pytest.mark.parametrize("name", MISUSED)
def test_what_is_learned_is_one_value(name):
    step, error, text = MISUSED[name]
    with pytest.raises(error, match=text):
        on(2, step, state(1))


def test_trees_that_do_not_fit():
    with pytest.raises(tree.TreeMismatch, match="'b': one has .*0-dim"):
        good = {"b": torch.ones(2)}
        ff.elementwise(lambda meta, g, w: g)(None, good, {"b": torch.ones(3)})
    with pytest.raises(tree.TreeMismatch, match="trees of elementwise"):
        ff.elementwise(lambda meta, g, w: g)(None, good, {"c": torch.ones(2)})
    with pytest.raises(TypeError, match="elementwise takes a function"):
        ff.elementwise(3)
