"""Several models in one state: every copy lies as its own model, never as another's."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.packing import split_buffers
from fsfunc.state.mirroring import mirrors
from tests.checks import close, same

MESH = ff.make_mesh({"data": 2}, "simulated")
ZEROS = pytest.mark.parametrize("zero", range(4))
layer = ff.unit(lambda p, x: torch.relu(x @ p["w"] + p["b"]))


def linear(a, b, seed=0):
    draw = torch.Generator().manual_seed(seed + 7 * a + b)
    make = lambda *s: torch.randint(-1, 2, s, generator=draw).double()  # noqa: E731
    return {"w": make(a, b), "b": make(b)}


def run(layers, x):
    for p in layers:
        x = layer(p, x)
    return x


def copied(t):
    return tree.map(torch.clone, t)


def layouts(t):
    found = tree.leaves(t, is_leaf=is_sharded)
    return [x.layout if is_sharded(x) else None for x in found]


# What is a copy of what


def found(shapes, taken, **options):
    """Copies and what they copy, as paths in one string."""
    parted = {tuple(p.split("/")): s for p, s in shapes.items()}
    which = [p for p in parted if "/".join(p).startswith(taken)]
    pairs = mirrors(parted, which, **options).items()
    return {"/".join(p): "/".join(source) for p, (source, _, _) in pairs}


W, B, V = (4, 3), (3,), (3, 4)


@pytest.mark.parametrize(
    ("shapes", "taken", "expected"),
    [
        # Beside its model, though another one is just like it.
        (
            {"a/p/w": W, "a/mu/w": W, "b/p/w": W, "b/mu/w": W},
            ("a/p", "b/p"),
            {"a/mu/w": "a/p/w", "b/mu/w": "b/p/w"},
        ),
        # By the model's name further down.
        (
            {"p/a/w": W, "p/b/w": W, "opt/0/a/mu/w": W, "opt/1/b/mu/w": W},
            ("p",),
            {"opt/0/a/mu/w": "p/a/w", "opt/1/b/mu/w": "p/b/w"},
        ),
        # The whole of a model, not a part of another that happens to be alike.
        (
            {"g/0/w": W, "g/1/w": V, "d/0/w": V, "d/1/w": W, "e/0/w": V, "e/1/w": W},
            ("g", "d"),
            {"e/0/w": "d/0/w", "e/1/w": "d/1/w"},
        ),
        # Of two that are just like it by the name that both have, or else of neither.
        (
            {"g/w": W, "d/w": W, "ema_d/w": W},
            ("g", "d/"),
            {"ema_d/w": "d/w"},
        ),
        ({"g/w": W, "d/w": W, "ema/w": W}, ("g", "d/"), {}),
        # Some of the leaves: of what is trained, of one of several models.
        ({"p/w": W, "p/b": B, "mu/b": B}, ("p",), {"mu/b": "p/b"}),
        (
            {"a/w": W, "b/w": W, "ema/a/w": W},
            ("a", "b"),
            {"ema/a/w": "a/w"},
        ),
        # With others beside them, that are no copies.
        (
            {"p/w": W, "p/b": B, "o/w": W, "o/b": B, "o/t": ()},
            ("p",),
            {"o/w": "p/w", "o/b": "p/b"},
        ),
        # A model of one leaf, wherever its copies lie.
        ({"p": W, "o/0": W, "o/1": B}, ("p",), {"o/0": "p"}),
        (
            {"a/p": W, "b/p": W, "a/o/mu": W, "b/o/mu": W},
            ("a/p", "b/p"),
            {"a/o/mu": "a/p", "b/o/mu": "b/p"},
        ),
        # Another shape, or another name: no copy. Nor is an unused part of a model.
        ({"p/w": W, "p/b": B, "mu/w": V, "nu/v": W}, ("p",), {}),
        ({"p/0/w": W, "p/1/w": W, "p/2/w": W}, ("p/0", "p/1"), {}),
        ({"a/p/0": W, "a/p/1": B, "b/p/0": W, "b/p/1": B}, ("a/p/0", "b"), {}),
    ],
)  # fmt: skip
def test_a_copy_is_known_by_its_structure(shapes, taken, expected):
    assert found(shapes, taken) == expected


def test_of_two_alike_the_trained_one_is_meant():
    shapes = {"online/w": W, "target/w": W, "mu/w": W}
    taken = ("online", "target")
    assert found(shapes, taken) == {}
    assert found(shapes, taken, trained=[("online", "w")]) == {"mu/w": "online/w"}
    assert found(shapes, taken, fixed=[("mu", "w")]) == {}


NAMES = st.sampled_from(["w", "b", "0", "1", "mu", "g"])
SHAPES = st.sampled_from([(2, 3), (3, 2), (3,), ()])
MODELS = st.recursive(
    SHAPES,
    lambda below: st.dictionaries(NAMES, below, min_size=1, max_size=3),
    max_leaves=5,
)


def flat(t, path=()):
    if isinstance(t, tuple):
        return {path: t}
    return {k: v for name, x in t.items() for k, v in flat(x, (*path, name)).items()}


@given(
    st.dictionaries(st.sampled_from(["gen", "disc", "enc"]), MODELS, min_size=1),
    st.sampled_from(["beside", "by name", "all"]),
)
@settings(max_examples=200)
def test_moments_lie_as_their_own_model_whatever_the_others_are(models, where):
    state, expected = {}, {}
    for name, model in models.items():
        ours = (name, "params") if where == "beside" else ("params", name)
        state |= flat(model, ours)
        for moment in ("first", "second"):
            theirs = {
                "beside": (name, "opt", moment),
                "by name": ("opt", name, moment),
                "all": ("opt", moment, name),
            }[where]
            state |= flat(model, theirs)
            tails = flat(model)
            expected |= {(*theirs, *tail): (*ours, *tail) for tail in tails}
    taken = [p for p in state if "params" in p[:2] and "opt" not in p[:2]]
    got = {p: source for p, (source, _, _) in mirrors(state, taken).items()}
    assert {p: got[p] for p in got} == {p: expected[p] for p in got}  # none wrong
    alone = [isinstance(m, tuple) for m in models.values()]
    if where == "all" and len(models) > 1 or not any(alone):
        assert got == expected


# Where they lie


@ZEROS
def test_a_copy_of_one_model_adds_to_it(zero):
    state = {"g": [linear(4, 4), linear(4, 5)], "d": [linear(5, 4), linear(4, 4)]}
    state["ema_d"] = copied(state["d"])

    def loss(models, x):
        return run([*models["g"], *models["d"]], x).sum()

    def step(q, x):
        return ff.value_and_grad(loss)({"g": q["g"], "d": q["d"]}, x)

    def main():
        sharded = ff.shard(step, MESH, "data", zero=zero)
        q = ff.place(sharded, state, torch.ones(2, 4).double())
        assert layouts(q["ema_d"]) == layouts(q["d"])
        assert None not in layouts(q)
        if zero in (1, 2):  # what is never gathered has no whole buffer
            shards = {
                id(x.packed): x.packed for x in tree.leaves(q["ema_d"], is_sharded)
            }
            assert all(shard.whole is None for shard in shards.values())
        return ff.unshard(tree.map(torch.add, q["ema_d"], q["d"]))

    for double in ff.spmd(main, MESH)():
        same(double, tree.map(lambda x: 2 * x, state["d"]))


@given(
    st.integers(0, 3),
    st.lists(st.sampled_from([(2, 3), (3, 3), (3, 2)]), min_size=2, max_size=3),
    st.booleans(),
    st.integers(0, 2),
)
@settings(max_examples=25)
def test_every_moment_lies_as_its_model(zero, sizes, beside, averaged):
    """Models of like names and often like shapes, their moments and one average."""
    names = [f"m{i}" for i in range(len(sizes))]
    params = {n: {"l": linear(*s)} for n, s in zip(names, sizes, strict=True)}
    moments = {n: {"mu": copied(p), "nu": copied(p)} for n, p in params.items()}
    chosen = names[averaged % len(names)]
    if beside:
        state = {n: {"params": params[n], "opt": moments[n]} for n in names}
        read = lambda t: {n: t[n]["params"] for n in names}  # noqa: E731
        opt = lambda t, n: t[n]["opt"]  # noqa: E731
    else:
        state = {"params": params, "opt": moments}
        read = lambda t: t["params"]  # noqa: E731
        opt = lambda t, n: t["opt"][n]  # noqa: E731
    state |= {"average": {chosen: copied(params[chosen])}}

    def loss(params):
        ones = {
            n: torch.ones(1, s[0]).double() for n, s in zip(names, sizes, strict=True)
        }
        return sum(layer(params[n]["l"], ones[n]).sum() for n in names)

    def step(t):
        return ff.value_and_grad(loss)(read(t))

    def main():
        t = ff.place(ff.shard(step, MESH, "data", zero=zero), state)
        for n in names:
            for copy in (opt(t, n)["mu"], opt(t, n)["nu"]):
                assert layouts(copy) == layouts(read(t)[n])
                tree.map(torch.add, copy, read(t)[n])
        if beside:  # which of several alike it is, its name does not tell
            assert layouts(t["average"])[0] is not None or len(set(sizes)) < len(sizes)
        else:
            assert layouts(t["average"][chosen]) == layouts(read(t)[chosen])
        return ff.unshard(t)

    for whole in ff.spmd(main, MESH)():
        same(whole, state)


def test_a_part_of_the_moments_lies_where_the_whole_would():
    """Of a buffer of two leaves one is trained: its moment adds to its parameter."""
    state = {"params": {"l": linear(4, 3)}, "mu": {"l": {"w": linear(4, 3)["w"]}}}

    def main():
        loss = lambda t: layer(t["params"]["l"], torch.ones(1, 4).double()).sum()  # noqa: E731
        t = ff.place(ff.shard(loss, MESH, "data"), state)
        assert layouts(t["mu"])[0] == t["params"]["l"]["w"].layout
        return ff.unshard(tree.map(torch.add, t["mu"]["l"]["w"], t["params"]["l"]["w"]))

    expected = state["mu"]["l"]["w"] + state["params"]["l"]["w"]
    assert all(torch.equal(x, expected) for x in ff.spmd(main, MESH)())


# A generative adversarial network, and an average of its generator


OPTIMIZER = ff.sgd(2.0**-4, momentum=0.5)


def fake_rows(params, noise):
    return run(params, noise)


def d_loss(d, g, noise, rows):
    with torch.no_grad():
        made = fake_rows(g, noise)
    return (run(d, made) - run(d, rows)).mean()


def g_loss(g, d, noise):
    return -run(d, fake_rows(g, noise)).mean()


def gan_step(state, batch):
    noise, rows = batch
    g, d = state["g"], state["d"]
    loss, grads = ff.value_and_grad(d_loss)(d.params, g.params, noise, rows)
    d = d.apply_gradients(grads, OPTIMIZER)
    other, grads = ff.value_and_grad(g_loss)(g.params, d.params, noise)
    g = g.apply_gradients(grads, OPTIMIZER)
    ema = tree.map(lambda e, p: 0.5 * e + 0.5 * p, state["ema_g"], g.params)
    return {"g": g, "d": d, "ema_g": ema}, (loss, other)


def gan():
    draw = torch.Generator().manual_seed(3)
    g, d = [linear(2, 4), linear(4, 4)], [linear(4, 4, 5), linear(4, 2, 5)]
    state = {
        "g": ff.TrainState(g, OPTIMIZER.init(g)),
        "d": ff.TrainState(d, OPTIMIZER.init(d)),
        "ema_g": copied(g),
    }
    batch = [torch.randint(-2, 3, (4, n), generator=draw).double() for n in (2, 4)]
    return state, tuple(batch)


@ZEROS
def test_a_generative_adversarial_network_trains_as_on_one_device(zero):
    state, batch = gan()
    for _ in range(2):
        state, losses = gan_step(state, batch)

    def main():
        step = ff.shard(gan_step, MESH, "data", zero=zero)
        mine = ff.local_batch(batch, MESH, "data")
        placed = ff.place(step, gan()[0], mine)
        assert None not in layouts({k: placed[k] for k in ("ema_g",)})
        for _ in range(2):
            placed, found = step(placed, mine)
        moments = split_buffers(placed["g"].opt_state).tensors
        held = sum(x.numel() for x in moments if isinstance(x, torch.Tensor))
        return ff.unshard(placed), found, held

    for whole, found, held in ff.spmd(main, MESH)():
        close(found, losses, 1e-9)
        close(whole, state, 1e-9)
        assert held == (32 if zero == 0 else 16)


# What a state carries besides


def averaging_step(state, x):
    loss, grads = ff.value_and_grad(lambda p, x: run(p, x).mean())(state.params, x)
    new = state.apply_gradients(grads, OPTIMIZER)
    ema = tree.map(lambda e, p: 0.5 * e + 0.5 * p, state.extra["ema"], new.params)
    seen = state.extra["seen"] + 1
    return new.replace(extra={"ema": ema, "seen": seen, "note": "kept"}), loss


@ZEROS
@pytest.mark.parametrize("how", ["tree", "function", "deferred"])
def test_a_state_with_an_average_of_its_weights(zero, how):
    params = [linear(4, 4), linear(4, 4, 1)]
    rest = {"seen": torch.zeros(3), "note": "kept"}
    of = lambda params: {"ema": params, **rest}  # noqa: E731
    extra = of(params) if how == "tree" else of
    init = (lambda: [copied(p) for p in params]) if how == "deferred" else params
    x = torch.randint(
        -2, 3, (4, 4), generator=torch.Generator().manual_seed(1)
    ).double()
    alone = ff.init_state(averaging_step, params, OPTIMIZER, x, extra=of(params))
    alone, loss = averaging_step(alone, x)

    def main():
        step = ff.shard(averaging_step, MESH, "data", zero=zero)
        mine = ff.local_batch(x, MESH, "data")
        shapes = ff.abstract_state(step, init, OPTIMIZER, mine, extra=extra)
        state = ff.init_state(step, init, OPTIMIZER, mine, extra=extra)
        assert layouts(state) == layouts(shapes)
        assert layouts(state.extra["ema"]) == layouts(state.params)
        assert not is_sharded(state.extra["seen"])
        same(ff.unshard(state.extra["ema"]), params)
        state, found = ff.donate(step)(state, mine)
        return ff.unshard(state), found

    for state, found in ff.spmd(main, MESH)():
        assert torch.equal(found, loss)
        same(state, alone)
    assert torch.equal(rest["seen"], torch.zeros(3))
