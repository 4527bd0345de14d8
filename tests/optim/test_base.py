"""The contract of an optimizer, its compositions, clipping, and schedules."""

import functools
import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import lr_scheduler

import fsfunc as ff
from fsfunc import tree
from fsfunc.optim.optimizer import finish_step
from fsfunc.optim.reductions import global_norm, tree_sum
from fsfunc.optim.schedules import constant, cosine_decay, join, linear, warmup_cosine
from fsfunc.optim.transformations import clip_by_global_norm
from tests.optim.trees import (
    SEEDS,
    SHAPES,
    assert_bits,
    copies,
    donated,
    floating,
    like,
    params_of,
    trained,
)


class State(NamedTuple):
    params: Any
    opt_state: Any

    def apply_gradients(self, grads, optimizer):
        return State(*optimizer.apply(grads, self.opt_state, self.params))


def double(grads, state, params=None):
    return tree.map(lambda g: 2 * g, grads), state + 1


def test_update_alone_makes_an_optimizer():
    optimizer = ff.Optimizer(lambda params: 0, double)
    p, g = torch.ones(2), torch.tensor([1.0, 2.0])
    after, state = optimizer.apply(g, 0, p)
    assert_bits([torch.tensor([3.0, 5.0]), 1], [after, state])
    assert_bits(torch.ones(2), p)
    with donated():
        assert optimizer.apply(g, 0, p)[0] is p
    assert_bits(after, p)


def test_an_apply_of_ones_own_is_used_and_waits_for_its_commit():
    called = []

    def apply(grads, state, params):
        called.append(state)
        return params, state

    optimizer = ff.Optimizer(lambda params: 0, double, apply)
    assert optimizer.apply(1, 2, 3) == (3, 2) and called == [2]
    step = optimizer.phases(1, 5, 3, True)
    next(step)
    assert called == [2]
    assert finish_step(step) == (3, 5) and called == [2, 5]


def test_called_on_a_gradient_function_it_is_a_train_step():
    optimizer = ff.sgd(0.5)

    def grad_fn(params, x, *, shift=0.0):
        return (params * x).sum() + shift, x

    p, x = torch.ones(2), torch.tensor([1.0, 2.0])
    step = optimizer(grad_fn)
    state, metrics = step(State(p, optimizer.init(p)), x, shift=1.0)
    assert_bits(torch.tensor([0.5, 0.0]), state.params)
    assert metrics.keys() == {"loss"} and metrics["loss"] == 4.0
    with_aux = optimizer(lambda params, x: ((params.sum(), {"n": 1}), x))
    _, metrics = with_aux(State(p, optimizer.init(p)), x)
    assert metrics == {"loss": p.sum(), "aux": {"n": 1}}


class Marked(NamedTuple):
    """A state with fields that are named like marks of the library's."""

    rounds: int
    evaluated: bool
    origins: torch.Tensor


def test_a_field_named_like_a_mark_is_none():
    mine = ff.Optimizer(lambda p: Marked(0, False, p), lambda g, s, p=None: (g, s))
    optimizer, p = ff.chain(mine, ff.scale(0.5)), torch.ones(2)
    state = ff.TrainState(p, optimizer.init(p))
    assert_bits(state.replace(params=2 * p).opt_state, state.opt_state)
    states = list(state.opt_state)  # as good as a tuple
    assert_bits(optimizer.update(p, states)[0], p / 2)


def test_a_chain_composes_in_order():
    p, g = torch.tensor([10.0]), torch.tensor([4.0])
    decay, half = ff.add_decayed_weights(0.1), ff.scale(-0.5)
    for transforms, expected in [
        ((decay, half), -(4 + 1) / 2),
        ((half, decay), -4 / 2 + 1),
        ((decay, half, ff.sgd(2.0)), (4 + 1) / 2 * 2),
    ]:
        optimizer = ff.chain(*transforms)
        state = optimizer.init(p)
        assert_bits(torch.tensor([expected]), optimizer.update(g, state, p)[0])
        assert_bits(p + expected, optimizer.apply(g, state, p)[0])


# Partitions


@given(shapes=SHAPES, seed=SEEDS)
def test_a_partition_is_each_optimizer_on_its_own_leaves(shapes, seed):
    def label(path, leaf):
        return "adam" if leaf.ndim > 1 else "sgd" if path != "head" else None

    optimizers = {
        "adam": ff.chain(ff.clip_by_global_norm(1.0), ff.sharded_adam(0.1)),
        "sgd": ff.sgd(0.1, momentum=0.9),
    }
    params = params_of(shapes, seed)
    grads = [like(params, seed + k) for k in range(3)]
    both = ff.partition(optimizers, label)
    if all(label(p, x) is None for p, x in _named(params)):
        return
    after, state = trained(both, params, grads)
    for name, optimizer in optimizers.items():
        mine = {p: x for p, x in _named(params) if label(p, x) == name}
        its_grads = [{p: x for p, x in _named(g) if p in mine} for g in grads]
        alone, its_state = trained(optimizer, mine, its_grads)
        found = {p: x for p, x in _named(after) if p in mine}
        assert_bits(alone, found)
        assert len(tree.leaves(state[name])) == len(tree.leaves(its_state))
    for path, x in _named(after):
        if label(path, x) is None:
            assert x is dict(_named(params))[path]


def _named(values):
    paths, leaves, _ = tree.flatten_with_paths(values)
    return [(p, x) for p, x in zip(paths, leaves, strict=True) if p != "steps"]


# Norms, sums and clipping of whole trees; of shards: `test_sharded`


ORDERS = st.sampled_from([1.0, 2.0, 3.0, math.inf])


def non_empty(values):
    return [x for x in floating(values) if x.numel()]


@given(shapes=SHAPES, seed=SEEDS, p=ORDERS)
def test_the_norm_has_the_bits_of_torchs(shapes, seed, p):
    values = params_of(shapes, seed)
    # torch refuses the infinite norm of an empty tensor.
    assert_bits(get_total_norm(non_empty(values), p), global_norm(values, p))


@given(shapes=SHAPES, seed=SEEDS, p=ORDERS)
def test_the_norm_of_half_precision_is_summed_in_float32(shapes, seed, p):
    values = params_of(shapes, seed, torch.bfloat16)
    wide = tree.map(lambda x: x.float() if x.is_floating_point() else x, values)
    assert global_norm(values, p).dtype == torch.float32
    torch.testing.assert_close(global_norm(values, p), global_norm(wide, p))


def test_one_double_makes_the_norm_double():
    values = {"a": torch.ones(3), "b": torch.ones(1, dtype=torch.float64)}
    expected = torch.tensor(2.0, dtype=torch.float64)
    torch.testing.assert_close(global_norm(values), expected)
    assert_bits(torch.tensor(4.0, dtype=torch.float64), tree_sum(values))


@given(shapes=SHAPES, seed=SEEDS)
def test_the_sum(shapes, seed):
    values = params_of(shapes, seed)
    expected = torch.cat([x.flatten() for x in floating(values)]).double().sum()
    torch.testing.assert_close(tree_sum(values), expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("values", [{}, {"n": 3, "none": None}, torch.ones(0, 3)])
def test_nothing_sums_to_zero(values):
    for found in (tree_sum(values), global_norm(values), global_norm(values, math.inf)):
        assert_bits(torch.tensor(0.0), found)


@given(shapes=SHAPES, seed=SEEDS, p=ORDERS, max_norm=st.sampled_from([0.1, 1.0, 50.0]))
def test_clipping_is_torchs(shapes, seed, p, max_norm):
    params = params_of(shapes, seed)
    grads = like(params, seed)
    before = copies(grads)
    clip = clip_by_global_norm(max_norm, p=p)
    clipped, state = clip.update(grads, clip.init(params))
    assert_bits(before, grads)
    assert state == ()
    leaves = [torch.nn.Parameter(x) for x in non_empty(params)]
    for leaf, grad in zip(leaves, non_empty(grads), strict=True):
        leaf.grad = grad.clone()
    clip_grads_with_norm_(leaves, max_norm, get_total_norm(non_empty(grads), p))
    assert_bits([leaf.grad for leaf in leaves], non_empty(clipped))


def test_clipping_keeps_the_dtype():
    clipped, _ = clip_by_global_norm(1.0).update(torch.ones(4).bfloat16(), ())
    assert_bits(torch.full((4,), 0.5).bfloat16(), clipped)


def test_the_norm_runs_under_vmap_and_differentiates():
    x = torch.tensor([[3.0, 4.0], [6.0, 8.0]])
    assert_bits(torch.tensor([5.0, 10.0]), torch.func.vmap(global_norm)(x))
    torch.testing.assert_close(torch.func.grad(global_norm)(x[0]), x[0] / 5)

    def clipped(g):
        return clip_by_global_norm(1.0).update(g, ())[0]

    torch.testing.assert_close(
        torch.func.vmap(clipped)(x), torch.tensor([[0.6, 0.8]] * 2)
    )


# Schedules, against torch's, count by count


STEPS = st.integers(1, 20)
RATES = st.floats(1e-4, 10)


def rates_by_torch(make, rate, n):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    scheduler = make(optimizer)
    found = []
    for _ in range(n):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def assert_same(schedule, expected):
    found = [schedule(count) for count in range(len(expected))]
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(rate=RATES, steps=STEPS, start=st.floats(0.01, 1), end=st.floats(0, 1))
def test_linear(rate, steps, start, end):
    make = functools.partial(
        lr_scheduler.LinearLR, start_factor=start, end_factor=end, total_iters=steps
    )
    expected = rates_by_torch(make, rate, steps + 5)
    assert_same(linear(start * rate, end * rate, steps), expected)


@given(rate=RATES, steps=STEPS, end=st.floats(0, 1e-4))
def test_cosine_decay(rate, steps, end):
    make = functools.partial(lr_scheduler.CosineAnnealingLR, T_max=steps, eta_min=end)
    assert_same(cosine_decay(rate, steps, end), rates_by_torch(make, rate, steps + 1))
    assert cosine_decay(rate, steps, end)(steps + 7) == end


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # SequentialLR's own use
@given(rate=RATES, warmup=STEPS, decay=STEPS)
def test_warmup_cosine(rate, warmup, decay):
    def make(optimizer):
        rise = lr_scheduler.LinearLR(optimizer, 0.1, 1.0, warmup)
        fall = lr_scheduler.CosineAnnealingLR(optimizer, decay)
        return lr_scheduler.SequentialLR(optimizer, [rise, fall], [warmup])

    schedule = warmup_cosine(rate, warmup, warmup + decay, start=0.1 * rate)
    assert_same(schedule, rates_by_torch(make, rate, warmup + decay + 1))


def test_join_restarts_the_count():
    def count(step):
        return step

    schedule = join([count, count, constant(9)], [2, 5])
    assert [schedule(step) for step in range(7)] == [0, 1, 0, 1, 2, 9, 9]


def test_a_tensor_is_counted_as_a_number_is():
    rate = join([constant(1.0), warmup_cosine(0.5, 2, 6, end=0.1)], [3])
    for count in range(12):
        found = rate(torch.tensor(count))
        assert isinstance(found, torch.Tensor)
        assert found.item() == pytest.approx(rate(count), abs=1e-6)
