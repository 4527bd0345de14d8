"""Copies beside the parameters: who says what they lie like, and who has to."""

import pytest
import torch
from torch.func import vmap

import fsfunc as ff
from fsfunc import tree
from fsfunc.tracing.rules import LawError
from tests.checks import close, simulated

MESH = simulated(2)
layer = ff.unit(lambda w, x: torch.tanh(x @ w))
W = {k: torch.randn(3, 3, dtype=torch.float64) for k in "ab"}
X = torch.randn(4, 3, dtype=torch.float64)
each = tree.map


def net(w, x):
    return layer(w["b"], layer(w["a"], x)).square().mean()


def elastic(s, x):
    """The gradient of a loss with a penalty on the distance from a copy."""

    def loss(w):
        far = each(lambda a, b: (a - b) ** 2, w, s["w0"])
        return net(w, x) + ff.tree_sum(far)

    return ff.value_and_grad(loss)(s["w"])[1]


def state():
    return {"w": W, "w0": each(lambda a: a + 1, W)}


def on_ranks(step, s, zero=3, x=X, **how):
    def main():
        f = ff.shard(step, MESH, "data", zero=zero)
        mine = ff.local_batch(x, MESH, "data")
        placed = ff.place(f, s, mine, **how)
        return ff.unshard(f(placed, mine)), placed

    return ff.spmd(main, MESH)()


@pytest.mark.parametrize(
    "like, zero",
    [({"w0": "w"}, 0), ({"*0": "w"}, 1), ({"w0/a": "w/a", "w0/b": "w/b"}, 3)],
)
def test_a_copy_that_the_loss_reads_lies_as_it_is_said_to(like, zero):
    for found, placed in on_ranks(elastic, state(), zero, like=like):
        close(found, elastic(state(), X), 1e-9)
        for k in W:
            assert placed["w0"][k].layout.parts == placed["w"][k].layout.parts


def test_else_the_error_says_how_to_place_it():
    with pytest.raises(tree.TreeMismatch, match=r'other whole.*like=\{"w0": "w"\}'):
        on_ranks(elastic, state())


def test_a_gradient_at_an_average_that_was_packed_by_itself_says_how_to_place_it():
    optimizer = ff.ema(ff.sgd(0.1), 0.9)

    def step(s, x):
        grads = ff.value_and_grad(net)(s.params, x)[1]
        average = ff.eval_params(s.opt_state, s.params)
        there = ff.value_and_grad(net)(average, x)[1]
        return s.apply_gradients(grads, optimizer).apply_gradients(there, optimizer)

    s = ff.TrainState(W, optimizer.init(W))
    told = r"Have one lie.*like=\{'params/a': 'opt_state/average/a'\}"
    with pytest.raises(tree.TreeMismatch, match=told):
        on_ranks(step, s)
    trees = "params", "opt_state/average"
    for one, other in (trees, trees[::-1]):
        for found, _ in on_ranks(step, s, like={one: other}):
            close(found, step(s, X), 1e-9)


@pytest.mark.parametrize("way", ["clone", "lay_like"])
def test_the_other_ways_that_the_error_names(way):
    def step(s, x):
        return elastic({**s, "w0": ff.lay_like(s["w0"], s["w"])}, x)

    if way == "lay_like":
        for found, _ in on_ranks(step, state()):
            close(found, elastic(state(), X), 1e-9)
        return

    def main():
        f = ff.shard(elastic, MESH, "data")
        mine = ff.local_batch(X, MESH, "data")
        s = ff.place(f, {"w": W, "w0": W}, mine)
        s["w0"] = each(torch.clone, s["w"])
        return ff.unshard(f(s, mine))

    for found in ff.spmd(main, MESH)():
        close(found, elastic({"w": W, "w0": W}, X), 1e-9)


@pytest.mark.parametrize(
    "like, text",
    [
        ({"v": "w"}, "no floating leaf lies at, or below, 'v'"),
        ({"w0": "v"}, "'w0/a' .*would lie like 'v/a', which is not there"),
        ({"w0/a": "w/c"}, "'w0/a' .*would lie like 'w/c', which is not there"),
    ],
)
def test_what_is_not_there_is_named(like, text):
    with pytest.raises(ValueError, match=text):
        on_ranks(elastic, state(), like=like)


ADAM = ff.sharded_adam(0.1)


def two_models(s, x):
    out = []
    for model, moments in (("p", "one"), ("q", "two")):
        g = ff.value_and_grad(net)(s[model], x)[1]
        out.append(ADAM.apply(g, s[moments], s[model])[0])
    return out


def test_whose_an_optimizer_state_is_can_be_said():
    s = {"p": W, "q": each(torch.neg, W), "one": ADAM.init(W), "two": ADAM.init(W)}
    with pytest.raises(tree.TreeMismatch, match="One is whole.*init.placed.*like="):
        on_ranks(two_models, s)
    for found, _ in on_ranks(two_models, s, like={"one/*": "p", "two/*": "q"}):
        close(found, two_models(s, X), 1e-9)


# Messages

make = lambda h, z: (z @ h).view(3, 3)  # noqa: E731


def hypernetwork(h, x):
    """Weights that a unit makes, and another takes for parameters."""
    maker = ff.unit(make)
    return ff.value_and_grad(lambda h: layer(maker(h, x[0, :2]), x).mean())(h)[1]


def in_one_unit(h, x):
    one = ff.unit(lambda h, z, x: torch.tanh(x @ make(h, z)))
    return ff.value_and_grad(lambda h: one(h, x[0, :2], x).mean())(h)[1]


def as_an_input(h, x):
    maker, use = ff.unit(make), ff.unit(lambda _, x, w: torch.tanh(x @ w))
    loss = lambda h: use(None, x, maker(h, x[0, :2])).mean()  # noqa: E731
    return ff.value_and_grad(loss)(h)[1]


def test_a_hypernetwork_is_told_where_its_weights_go():
    h = torch.randn(2, 9, dtype=torch.float64)
    same = X[:2].repeat(2, 1)
    with pytest.raises(LawError, match="unit '<lambda>' .*as its parameters.*input"):
        on_ranks(hypernetwork, h)
    for step in (in_one_unit, as_an_input):
        for found, _ in on_ranks(step, h, x=same):
            close(found, hypernetwork(h, same), 1e-9)


def penalised(of):
    def step(w, x):
        return ff.value_and_grad(lambda w: net(w, x) + ff.tree_sum(of(w)))(w)[1]

    return step


def test_a_sum_of_parts_that_lost_their_layout_names_what_keeps_it():
    lost = penalised(lambda w: [a**2 for a in tree.leaves(w)])
    with pytest.raises(LawError, match=r"sum over a tree .*'a' .*layout was lost"):
        on_ranks(lost, W)
    by_map = penalised(lambda w: each(torch.square, w))
    by_leaves = penalised(lambda w: tree.leaves(w, is_leaf=ff.is_sharded))
    for step in (by_map, by_leaves):
        for found, _ in on_ranks(step, W):
            close(found, step(W, X), 1e-9)


def test_vmap_over_sharded_leaves_names_the_leaf():
    stacked = each(lambda a: torch.stack([a, -a]), W)
    outside = lambda w, x: ff.value_and_grad(  # noqa: E731
        lambda w: vmap(lambda w: net(w, x))(w).sum()
    )(w)[1]
    one = ff.unit(lambda w, x: vmap(net, (0, None))(w, x), whole=True)
    inside = lambda w, x: ff.value_and_grad(lambda w: one(w, x).sum())(w)[1]  # noqa: E731
    for zero in (0, 3):
        with pytest.raises(LawError, match="vmap maps over 'a'.*Map in a unit"):
            on_ranks(outside, stacked, zero)
        for found, _ in on_ranks(inside, stacked, zero):
            close(found, outside(stacked, X), 1e-9)
    unlike = {**stacked, "b": stacked["b"][:, :, :2]}  # parts have other sizes, too
    told = r"in the mapped dimension[\s\S]*ff\.unit\(lambda params"
    with pytest.raises(LawError, match=told):
        on_ranks(outside, unlike)
