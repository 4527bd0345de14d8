"""Every leaf of a sharded function's state is laid out: in parts, whole, or own."""

import copy

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from fsfunc.comm.comparison import RanksDiffer
from tests.checks import close, refused, same, simulated
from tests.models import floats

MESH = simulated(2)
W, X = {"w": floats(3, 3), "s": floats(3)}, floats(4, 3)
unit = ff.unit(lambda w, x: torch.tanh(x @ w))


def loss(p, x):
    return (unit(p["w"], x) * p["s"]).square().mean()


def sgd(p, x):
    g = ff.value_and_grad(loss)(p, x)[1]
    return tree.map(lambda a, g: a - 0.1 * g, p, g)


def everywhere(main):
    return ff.spmd(main, MESH)()


def mine():
    return ff.local_batch(X, MESH, "data")


# By what is done with the laid out parameters outside the step: plain tensors.
MADE = {
    "nothing was laid out": lambda p: W,
    "arithmetic": lambda p: tree.map(lambda a: a * 0.5, p),
    "a copy": copy.deepcopy,
    "a slice": lambda p: {**p, "s": p["s"][:2]},
}


@pytest.mark.parametrize("f", [sgd, loss, torch.func.grad(loss)])
@pytest.mark.parametrize("made", MADE)
def test_a_plain_tensor_in_the_state_is_refused(made, f):
    """Of which nobody knows if it is one value: before anything is sent."""
    placed = everywhere(lambda: ff.place(ff.shard(sgd, MESH, "data"), W, mine()))
    step = ff.shard(f, MESH, "data")
    call = lambda p: step(MADE[made](p), mine())  # noqa: E731
    says = "'s' f32.*not laid out.*ff.init_state.*ff.place.*ff.Own.*ff.lay_like"
    refused(lambda: ff.spmd(call, MESH)(placed), ValueError, says)


def test_what_stays_laid_out():
    """Twins, other names, what the library makes of it, and what a step returns."""

    def main():
        step = ff.shard(sgd, MESH, "data")
        p = ff.place(step, W, mine())
        detached = tree.map(lambda a: a.detach(), p)
        again = ff.lay_like(tree.map(lambda a: a * 1.0, p), p)
        optimizer = ff.sharded_adam(0.1)
        state = ff.TrainState(p, optimizer.init(p))
        new, _ = ff.shard(optimizer(ff.value_and_grad(loss)), MESH, "data")(
            state, mine()
        )
        step({"w": new.params["w"], "s": new.params["s"]}, mine())
        each = [p, detached, again, ff.unshard(p), step(p, mine())]
        return [ff.unshard(step(q, mine())) for q in each]

    for each in everywhere(main):
        once = sgd(W, X)
        same(each, [once] * 4 + [sgd(once, X)])


def carried(state, x):
    """A hidden state of each rank's rows, and a gradient by it."""
    h = torch.tanh(state["h"] + unit(state["w"], x))
    by_h = ff.value_and_grad(lambda h: (h * state["s"] * x).sum())(h)[1]
    return {**state, "h": h, "g": by_h}


OWN = {"h": ff.Own("data"), "g": ff.Own("data")}


def test_what_is_each_ranks_own_is_carried_on():
    begun = {**W, "h": torch.zeros(2, 3), "g": torch.zeros(2, 3)}

    def main():
        step = ff.shard(carried, MESH, "data")
        state = ff.place(step, begun, mine(), layouts=OWN)
        for _ in range(3):
            state = step(state, mine())
        return ff.unshard(state)

    for rank, found in enumerate(everywhere(main)):
        state, rows = begun, X.chunk(2)[rank]
        for _ in range(3):
            state = carried(state, rows)
        same(found, state)  # the gradient by an own value is no mean


def test_own_values_may_differ_from_the_start_and_others_may_not():
    def main(own):
        step = ff.shard(carried, MESH, "data")
        begun = {**W, "h": torch.full((2, 3), MESH.rank * 1.0), "g": torch.zeros(2, 3)}
        return ff.place(step, begun, mine(), layouts=OWN if own else None)["h"]

    found = ff.spmd(main, MESH)(True)
    assert [x[0, 0].item() for x in found] == [0, 1]
    refused(lambda: ff.spmd(main, MESH)(False), RanksDiffer, "'h': rank 0")


@pytest.mark.parametrize("donated", [False, True])
def test_an_own_value_in_the_place_of_one_is_refused_where_it_is_given_back(donated):
    def main():
        around = ff.donate if donated else lambda f: f
        step = around(ff.shard(lambda s, x: {**s, "h": s["h"] + x}, MESH, "data"))
        state = ff.place(step, {"h": torch.zeros(2, 3)}, mine())
        with pytest.raises(ValueError, match="'h' f32.*not laid out.*ff.Own"):
            step(step(state, mine()), mine())

    everywhere(main)


LAYOUTS = {
    "a parameter of a unit": ({"w": ff.Own("data")}, TypeError, "'w'.*unit takes it"),
    "another axis": ({"h": ff.Own("node")}, ValueError, r"averages over \('data',\)"),
    "no path": ({"hh": ff.Own("data")}, ValueError, "no leaf's path matches 'hh'"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_own_is_for_leaves_of_no_unit_along_the_axes_of_the_shard(name):
    layouts, error, says = LAYOUTS[name]
    begun = {**W, "h": torch.zeros(2, 3), "g": torch.zeros(2, 3)}
    step = ff.shard(carried, MESH, "data")
    place = lambda: ff.place(step, begun, mine(), layouts=layouts)  # noqa: E731
    refused(lambda: everywhere(place), error, says)


# Programs that once gave another number on each rank, in silence


def by_hidden(s, x):
    return ff.value_and_grad(lambda h: (h * x).sum())(s["h"])[1]


def with_hidden(f, x, **begun):
    state = {**W, "h": torch.zeros(2, 3), **begun}
    return ff.place(f, state, x, layouts={"h": ff.Own("data")})


def test_an_own_place_that_is_given_a_whole_leaf_leaves_that_whole():
    def main():
        x, shard = mine(), lambda f: ff.shard(f, MESH, "data")
        reset = shard(lambda s, x: {**s, "h": s["h0"]})
        state = with_hidden(reset, x, h0=torch.ones(2, 3))
        new = reset(state, x)
        grad = shard(
            lambda s, x: ff.value_and_grad(lambda a: (a * x).sum())(s["h0"])[1]
        )
        return grad(state, x), grad(new, x), shard(by_hidden)(new, x)

    one, other = everywhere(main)
    mean = X.view(2, 2, 3).mean(0)
    for found, rows in zip((one, other), X.chunk(2), strict=True):
        same(found, (mean, mean, rows))


KINDS_OF_STEPS = {
    "an optimizer": lambda x: ff.sgd(0.1).init(
        with_hidden(ff.shard(by_hidden, MESH, "data"), x)
    ),
    "clipped by what is own": lambda x: with_hidden(
        ff.shard(clipped_with_hidden, MESH, "data"), x
    ),
}


def clipped_with_hidden(s, x):
    g = ff.value_and_grad(lambda w: (unit(w, x) + s["h"]).square().mean())(s["w"])[1]
    by = (s["h"] + x).sum()
    return {**s, "w": ff.tree_scale(g, by)}


@pytest.mark.parametrize("name", KINDS_OF_STEPS)
def test_own_values_meet_no_optimizer(name):
    says = "which is each rank's own|differs from rank to rank"
    refused(lambda: everywhere(lambda: KINDS_OF_STEPS[name](mine())), ValueError, says)


# A value of each rank in the place of "s", and how it came there.
APART = {
    "the rank's index": lambda s, x: s["s"] * (1 + ff.axis_index("data")),
    "a choice of the rank's": lambda s, x: s["s"] + x.mean(0) * (MESH.rank > 0),
    "a branch": lambda s, x: x.mean(0) if s["s"].sum() > -1e9 else s["s"],
}


@pytest.mark.parametrize("name", APART)
def test_a_value_that_differs_is_never_taken_for_one(name):
    def main():
        f = ff.shard(lambda s, x: {**s, "s": APART[name](s, x)}, MESH, "data")
        train = ff.shard(sgd, MESH, "data")
        return train(f(ff.place(train, W, mine()), mine()), mine())

    with pytest.raises(ValueError, match="'s' f32.*not laid out"):
        everywhere(main)


def writes(s, x):
    s["s"].copy_(x.mean(0))
    return unit(s["w"], x).mean()


def test_writes_into_a_leaf_that_is_one_value_are_refused():
    def main():
        f = ff.shard(writes, MESH, "data")
        f(ff.place(ff.shard(sgd, MESH, "data"), W, mine()), mine())

    refused(lambda: everywhere(main), ValueError, "writes a value that differs")


def test_ranks_that_wrote_unlike_values_outside_are_told():
    def main():
        f = ff.shard(sgd, MESH, "data")
        p = ff.place(f, W, mine())
        p["s"].add_(MESH.rank)
        f(p, mine())

    with pytest.raises(RanksDiffer, match="'0/s'"):
        everywhere(main)


OUTSIDE = {
    "value_and_grad": lambda f, p, x: ff.value_and_grad(f)(p, x)[1],
    "torch.func.grad": lambda f, p, x: torch.func.grad(f)(p, x),
}


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("how", OUTSIDE)
def test_a_gradient_taken_outside_of_a_sharded_loss_is_a_mean(how, zero):
    """By leaves that units take, and by leaves that are one value."""

    def main():
        f = ff.shard(loss, MESH, "data", zero=zero)
        return ff.unshard(OUTSIDE[how](f, ff.place(f, W, mine()), mine()))

    expected = ff.value_and_grad(loss)(W, X)[1]
    for found in everywhere(main):
        close(found, expected)


def test_a_gradient_within_it_is_one_too():
    def step(p, x):
        g = ff.value_and_grad(loss)(p, x)[1]
        return loss(tree.map(lambda a, g: a - 0.1 * g, p, g), x)

    def main():
        f = ff.shard(step, MESH, "data")
        p = ff.place(f, W, mine())
        return ff.unshard(ff.value_and_grad(f)(p, mine())[1])

    expected = ff.value_and_grad(step)(W, X)[1]
    for found in everywhere(main):
        close(found, expected)


def test_other_elements_of_a_leaf_s_memory_are_no_leaf():
    """As many of them, from the same one on."""

    def main():
        f = ff.shard(lambda s, x: s["a"].sum(), MESH, "data")
        a = ff.place(f, {"a": torch.arange(5.0)}, mine())["a"]
        f({"a": a.view(5)}, mine())
        ff.lay_like({"a": a[:3]}, {"a": a[:3]})
        f({"a": a[::2]}, mine())

    refused(lambda: everywhere(main), ValueError, "'a' f32.*not laid out")


# What is cut, or is to be


SGD = ff.sgd(0.125)


def stepping(loss):
    return SGD(ff.value_and_grad(loss))


def beside_units(p, x):
    return (torch.tanh(x @ p["w"]) * p["s"]).square().mean()


def begun(way, loss, mesh, **how):
    def main():
        step, x = ff.shard(stepping(loss), mesh, "data", **how), X[: 4 // mesh.size]
        if way == "place":
            return ff.place(step, ff.TrainState(W, SGD.init(W)), x)
        return ff.init_state(step, W, SGD, x)

    return ff.spmd(main, mesh)()


@pytest.mark.parametrize("way, zero", [("init_state", 3), ("place", 2), ("place", 1)])
def test_a_step_of_which_nothing_is_cut_is_told(way, zero):
    told = (
        rf"zero={zero}\) cuts nothing .* all 48 bytes of its 2 leaves.*@ff.unit.*zero=0"
    )
    with pytest.warns(UserWarning, match=told) as seen:
        begun(way, beside_units, MESH, zero=zero)
    assert len(seen) == 1


def test_a_step_of_complex_leaves_of_which_nothing_is_cut_is_told():
    def loss(p, x):
        return (x * p["w"]).abs().square().mean()

    def main():
        step = ff.shard(stepping(loss), MESH, "data")
        return ff.init_state(step, {"w": torch.ones(3, dtype=torch.cfloat)}, SGD, X[:2])

    with pytest.warns(UserWarning, match="all 24 bytes of its leaf"):
        ff.spmd(main, MESH)()


WHOLE_ON_PURPOSE = {
    "zero=0": (beside_units, MESH, {"zero": 0}),
    "one rank": (beside_units, simulated(1), {}),
    "some are cut": (loss, MESH, {}),
    "replicas alone": (beside_units, simulated(node=2, data=1), {"replicate": "node"}),
}


@pytest.mark.parametrize("way", ["init_state", "place"])
@pytest.mark.parametrize("name", WHOLE_ON_PURPOSE)
def test_what_stays_whole_on_purpose_is_not_told(name, way):
    of, mesh, how = WHOLE_ON_PURPOSE[name]
    begun(way, of, mesh, **how)


def test_a_call_that_makes_no_step_is_not_told():
    def main():
        gradients = ff.shard(ff.value_and_grad(beside_units), MESH, "data")
        ff.place(gradients, W, mine())
        evaluated = ff.shard(lambda s, x: (s, beside_units(s, x)), MESH, "data")
        ff.place(evaluated, W, mine())

    everywhere(main)


TWO = {
    "a key like a path": {"a/b": torch.ones(2), "a": {"b": torch.ones(3)}},
    "a number and its text": {0: torch.ones(2), "0": torch.ones(3)},
}


@pytest.mark.parametrize("way", ["init_state", "place"])
@pytest.mark.parametrize("name", TWO)
def test_two_leaves_of_one_path_are_told_apart(name, way):
    read = ff.unit(lambda p, x: sum(w.square().sum() for w in tree.leaves(p)) * x.sum())
    value, g = ff.value_and_grad(read)(TWO[name], torch.ones(2))
    assert value.item() == 10 and len(tree.leaves(g)) == 2  # one device: as they lie

    def main():
        step, x = ff.shard(stepping(read), MESH, "data"), torch.ones(1)
        if way == "place":
            return ff.place(step, ff.TrainState(TWO[name]), x)
        return ff.init_state(step, TWO[name], SGD, x)

    with pytest.raises(ValueError, match="two leaves of .* have the path .*rename"):
        everywhere(main)
