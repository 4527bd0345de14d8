"""Averages of parameters, schedule-free training, and steps that are skipped."""

import math

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fsfunc as ff
from fsfunc import tree
from tests.checks import simulated
from tests.optim.shards import place, unshard, whole
from tests.optim.trees import (
    assert_bits,
    assert_near,
    copies,
    donated,
    floating,
    like,
    trained,
)

NAN, INF = math.nan, math.inf


def of_torch(average, steps=5):
    """The weights and torch's average of them, step by step, and the gradients."""
    model = torch.nn.Linear(3, 2)
    params = {k: p.detach().clone() for k, p in model.named_parameters()}
    kept, optimizer = average(model), torch.optim.SGD(model.parameters(), lr=0.1)
    grads = [like(params, k) for k in range(steps)]
    for g in grads:
        for k, p in model.named_parameters():
            p.grad = g[k].clone()
        optimizer.step()
        kept.update_parameters(model)
    named = dict(kept.module.named_parameters())
    return params, grads, {k: named[k].detach() for k in params}


@pytest.mark.parametrize(
    ("average", "ours"),
    [
        (AveragedModel, ff.swa(ff.sgd(0.1))),
        (
            lambda m: AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.8)),
            ff.ema(ff.sgd(0.1), 0.8),
        ),
    ],
    ids=["swa", "ema"],
)
def test_an_average_is_torchs(average, ours):
    params, grads, expected = of_torch(average)
    after, state = trained(ours, params, grads)
    assert_near(expected, ff.eval_params(state, after))


def free_by_hand(p, grads, rate, b1, decay, step):
    x = y = z = p
    total = 0.0
    for t, g in enumerate(grads):
        weight = max(rate(k) for k in range(t + 1)) ** 2
        total += weight
        c = weight / total if total else 0.0
        z = z - rate(t) * (step(g, t) + decay * y)
        x = (1 - c) * x + c * z
        y = b1 * x + (1 - b1) * z
    return x, y, z


def rms_steps():
    state = {"v": 0.0}

    def step(g, t):
        state["v"] = 0.99 * state["v"] + 0.01 * g * g
        return g / ((state["v"] / (1 - 0.99 ** (t + 1))).sqrt() + 1e-8)

    return step


@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_schedule_free_is_the_papers(kind, decay):
    rate = lambda count: 0.1 * min(count / 3, 1.0, 4 / (count + 1))  # noqa: E731
    p = torch.randn(3, 2, dtype=torch.float64)
    grads = [torch.randn(3, 2, dtype=torch.float64) for _ in range(6)]
    bases = {
        "sgd": ff.sgd(rate),
        "adam": ff.sharded_adam(rate, b1=0.0, b2=0.99, weight_decay=0.0),
    }
    step = {"sgd": lambda g, t: g, "adam": rms_steps()}[kind]
    x, y, z = free_by_hand(p, grads, rate, 0.8, decay, step)
    optimizer = ff.schedule_free(bases[kind], rate, b1=0.8, weight_decay=decay)
    after, state = trained(optimizer, p, grads)
    found = after, state.z, ff.eval_params(state, after)
    assert_near((y, z, x), found, 1e-9)


def test_a_frozen_leaf_keeps_its_bits_schedule_free():
    params = {"w": torch.randn(3), "frozen": torch.randn(7)}
    optimizer = ff.schedule_free(ff.sgd(0.1), 0.1, weight_decay=0.1)
    grads = {"w": torch.randn(3), "frozen": None}
    after, state = trained(optimizer, params, [grads] * 3)
    assert after["frozen"] is params["frozen"]
    assert_bits(params["frozen"], state.z["frozen"])


@pytest.mark.parametrize(
    "bad, at", [(NAN, "first/b"), (INF, "split"), (-INF, "owned"), (NAN, "norm")]
)
def test_one_rank_that_overflows_stops_all(bad, at):
    """Whatever leaf it is in; nothing is written, and nothing counted inside."""
    axes = {"data": 2, "model": 2}
    params, mesh = whole(0), simulated(**axes)
    grads = [like(params, k, scale=3.0) for k in range(3)]
    one = dict(zip(tree.paths(grads[1]), tree.leaves(grads[1]), strict=True))[at]
    one.view(-1)[-1] = bad  # of which one rank holds the last element
    inner = ff.chain(ff.clip_by_global_norm(1.0), ff.sharded_adam(0.1))
    optimizer = ff.apply_if_finite(inner)
    expected, _ = trained(inner, params, [grads[0], grads[2]])

    def run():
        with donated():
            return trained(
                optimizer, place(params, axes), [place(g, axes) for g in grads]
            )

    by_rank = ff.spmd(run, mesh)()
    assert_near(floating(expected), floating(unshard(by_rank, mesh)))
    for _, state in by_rank:
        assert state[:3] == (0, True, 1) and state.inner_state[1].count == 2


def test_a_skipped_step_writes_nothing_and_gives_up_as_told():
    optimizer = ff.apply_if_finite(ff.sgd(1.0, momentum=0.9), 2)
    w = torch.ones(2)
    state = optimizer.init(w)
    bad = torch.tensor([NAN, 1.0])
    for k in range(2):
        before, mine = copies((w, state)), w
        updates, its = optimizer.update(bad, state, w)
        assert_bits(torch.zeros(2), updates)
        with donated():
            w, state = optimizer.apply(bad, state, w)
        assert w is mine and its[:3] == state[:3] == (k + 1, False, k + 1)
        assert_bits(floating(before), floating((w, state)))
    w, state = optimizer.apply(bad, state, w)  # the third in a row
    assert w[0].isnan() and w[1] == 0.0 and state[:3] == (3, False, 3)
