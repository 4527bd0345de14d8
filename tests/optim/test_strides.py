"""Leaves and gradients that lie otherwise in memory are stepped as dense ones are.

Transposed, permuted, of every second element, a window of other memory, expanded: by
every optimizer, donated or not, whole and in shards. torch's own have the bits of their
class, over whole and sharded leaves.
"""

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from tests import checks
from tests.checks import simulated
from tests.optim.optimizers import CLASSES, EVERY, ours, theirs
from tests.optim.trees import (
    assert_bits,
    assert_near,
    by_torch,
    copies,
    donated,
    floating,
    like,
    params_of,
    trained,
)

ALL = pytest.mark.parametrize("name", CLASSES)
STEPS = 7  # RAdam's sixth step is of another kind than its first


def grads_of(params, seed, steps=STEPS):
    return [like(params, seed + k) for k in range(steps)]


def test_a_rank_without_elements_counts_too():
    empty = {"w": torch.ones(0)}
    _, state = trained(ours("NAdam"), empty, [empty] * 3)
    _, other = trained(ours("NAdam"), {"w": torch.ones(2)}, [{"w": torch.ones(2)}] * 3)
    assert state.numbers == other.numbers and state.numbers["step"] == 3.0


def test_a_gradient_that_comes_late_finds_a_fresh_moment():
    params = {"early": torch.ones(2), "late": torch.ones(2)}
    optimizer = ours("Adagrad")
    state = optimizer.init(params)
    g = torch.tensor([1.0, 2.0])
    params, state = optimizer.apply({"early": g, "late": None}, state, params)
    assert_bits(torch.full((2,), 0.5), state.moments["sum"]["late"])
    params, state = optimizer.apply({"early": g, "late": g}, state, params)
    assert_bits(torch.full((2,), 0.5) + g * g, state.moments["sum"]["late"])


@pytest.mark.gpu
@ALL
def test_on_a_gpu_it_has_the_bits_of_the_class(name):
    params = tree.map(
        lambda x: x.cuda() if isinstance(x, torch.Tensor) else x,
        params_of([(300, 7), (5,)], 0),
    )
    grads = [
        tree.map(lambda g: g.cuda(), g)
        for g in grads_of(params_of([(300, 7), (5,)], 0), 0)
    ]
    expected = by_torch(theirs(name), params, grads)
    for variant in (torch.no_grad, donated):
        kept = copies(grads)
        with variant():
            after, state = trained(ours(name), copies(params), grads)
        assert_bits(expected, floating(after))
        assert_bits(kept, grads)
        assert all(type(n) is float for n in state.numbers.values())


FORMS = {
    "dense": torch.Tensor.contiguous,
    "transposed": lambda x: x.mT.contiguous().mT,
    "backwards": lambda x: x.permute(*range(x.ndim)[::-1]).contiguous().permute(
        *range(x.ndim)[::-1]
    ),
    "every second": lambda x: torch.stack([x, x + 1], -1).flatten(-2)[..., ::2],
    "a window": lambda x: torch.cat([x.new_ones(3), x.flatten()])[3:].view(x.shape),
    "expanded": lambda x: x[:1].expand_as(x),
}  # fmt: skip
SHAPES = ((4, 6), (2, 3, 2, 2))
MATRICES = ((4, 6),)  # for those that take no others
STEPPED = ["master_weights", "powersgd", "step_in_backward"]
DATA = simulated(2)


def leaves_of(name, seed):
    """Leaves of the shapes that the optimizer takes, one of each form, by form."""
    shapes = MATRICES if name in ("muon", "shampoo") else SHAPES
    low = name in ("master_weights", "stochastic_rounding")
    draw, out = torch.Generator().manual_seed(seed), {}
    for form in FORMS:
        made = [torch.randn(s, generator=draw) for s in shapes]
        made = [x[:1].expand_as(x).clone() if form == "expanded" else x for x in made]
        out[form] = [x.bfloat16() if low else x for x in made]
    return out


def formed(values):
    """The same numbers, each leaf in the form that its name says."""
    return {form: list(map(FORMS[form], xs)) for form, xs in values.items()}


def dense(values):
    return copies(tree.map(torch.Tensor.contiguous, values))


def distance(params, goals, x):
    pairs = zip(tree.leaves(params), tree.leaves(goals), strict=True)
    return sum(((p.float() - g * x.mean()) ** 2).sum() for p, g in pairs) / 2


unit = ff.unit(distance)


@pytest.mark.parametrize("name", STEPPED)
def test_a_step_is_that_of_dense_ones(name):
    """Leaves that a unit takes, and such as stay whole, on one device and on two."""
    goals, xs = tree.map(torch.Tensor.float, leaves_of(name, 7)), torch.arange(1.0, 5.0)

    def loss(params, x):
        whole = 0.0 if name == "powersgd" else distance(params["whole"], goals, x)
        return unit(params["unit"], goals, x) + whole

    def run(lie, around):
        optimizer = EVERY[name]()
        step = around(ff.accumulate(optimizer(ff.value_and_grad(loss)), 2))
        params = {k: lie(leaves_of(name, 0)) for k in ("unit", "whole")}
        if name == "powersgd":
            del params["whole"]
        return optimizer, ff.donate(step), params

    def alone(lie):
        optimizer, step, params = run(lie, lambda f: f)
        state = ff.TrainState(params, optimizer.init(params))
        for _ in range(2):
            state, _ = step(state, xs)
        return floating(state.params)

    def sharded(lie):
        optimizer, step, params = run(lie, lambda f: ff.shard(f, DATA, "data"))
        return floating(checks.trained(step, params, optimizer, xs)[0].params)

    if name == "master_weights":
        assert_near(alone(dense), alone(formed))
    assert_near(sharded(dense), sharded(formed))


LATER = FORMS | {"sparse": lambda x: x.to_sparse(), "of less bits": torch.Tensor.half}


@pytest.mark.parametrize("form", LATER)
@pytest.mark.parametrize("around", [torch.no_grad, donated])
def test_gradients_may_lie_otherwise_than_those_of_the_step_before(form, around):
    params = {"w": torch.arange(24.0).view(4, 6), "v": torch.ones(2, 3, 2, 2)}
    first = tree.map(lambda x: x / 8 - 1, params)
    then = tree.map(lambda x: LATER[form](x[:1].expand_as(x).clone() + 1), params)
    plain = tree.map(lambda x: x.to_dense().float().contiguous(), then)

    def run(last):
        with around():
            return floating(trained(ff.sharded_adam(0.1), copies(params), last)[0])

    assert_bits(run([first, plain, first]), run([first, then, first]))
