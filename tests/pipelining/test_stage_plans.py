"""How stages are given; cuts against all cuts, and costs by the clock."""

import itertools
import random
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc.pipelining.balanced_cuts import profile
from fsfunc.pipelining.stage_plans import cut


@ff.unit
def embed(p, x):
    return {"h": x * p, "mask": x > 0}


@ff.unit
def block(p, h):
    return h * p["w"] + p["b"]


@ff.unit
def head(p, h):
    return h * p


def loss(params, x):
    first = embed(params["embed"], x)
    h = first["h"]
    for p in params["blocks"]:
        h = block(p, h)
    h = torch.where(first["mask"], h, 0) * params["gain"]
    return head(params["embed"], h).sum() + params["extra"].sum() + first["h"].mean()


def model():
    one = torch.ones(2)
    blocks = [{"w": one, "b": one} for _ in range(3)]
    return {"embed": one, "blocks": blocks, "gain": one, "extra": one}


def shown():
    return ff.program(loss, model(), torch.ones(2))


@pytest.mark.parametrize(
    ("stages", "counts"),
    [
        ([1, 3, 1], [1, 3, 1]),
        (["embed", "block", "head"], [1, 3, 1]),
        (["embed", "block:1", "block:2"], [2, 1, 2]),
        (["embed:0", "head"], [4, 1]),
        (["embed"], [5]),
    ],
)
def test_stages_are_given_by_counts_or_by_names(stages, counts):
    plans = cut(shown(), stages).stages
    assert [len(plan.calls) for plan in plans] == counts
    assert [c for plan in plans for c in plan.calls] == list(range(5))


def test_stages_are_balanced_by_flops():
    @ff.unit
    def small(p, x):
        return x @ p[:, :4].repeat(1, 2)

    @ff.unit
    def large(p, x):
        return x @ p @ p

    def chain(p, x):
        for unit in (large, large, small, small, small, small):
            x = unit(p, x)
        return x

    program = ff.program(chain, torch.ones(8, 8), torch.ones(2, 8))
    assert [len(plan.calls) for plan in cut(program, n=2).stages] == [2, 4]
    assert [len(plan.calls) for plan in cut(program, n=4).stages] == [1, 1, 2, 2]


# Cuts against all cuts, and costs by the clock


def all_cuts(k, n):
    for inner in itertools.combinations(range(1, k), n - 1):
        ends = [0, *inner, k]
        yield [b - a for a, b in itertools.pairwise(ends)]


def parts(values, counts):
    ends = [0, *itertools.accumulate(counts)]
    return [sum(values[a:b]) for a, b in itertools.pairwise(ends)]


def problem(seed):
    """Costs, memory, a number of stages and a bound on memory, or None."""
    draw = random.Random(seed)
    k = draw.randint(1, 8)

    def values():
        most = draw.choice([0, 1, 3, 50])
        return [draw.choice([0, 1, most, draw.randint(0, most)]) for _ in range(k)]

    costs, memory = values(), values()
    bound = draw.choice([None, draw.randint(max(memory), sum(memory)), max(memory) - 1])
    return costs, memory, draw.randint(1, k), bound


@settings(max_examples=60)
@given(st.integers(0, 10**9))
def test_a_cut_is_the_best_of_all(seed):
    costs, memory, n, bound = problem(seed)
    options = {} if bound is None else {"memory": memory, "bound": bound}

    def worth(counts):
        spent = parts(costs, counts)
        return max(spent), sum(s**2 for s in spent), sum(c**2 for c in counts)

    cuts = [
        c
        for c in all_cuts(len(costs), n)
        if bound is None or max(parts(memory, c)) <= bound
    ]
    if not cuts:
        with pytest.raises(ValueError, match=f"keeps each within memory {bound}"):
            ff.balance(costs, n, **options)
        return
    found = ff.balance(costs, n, **options)
    assert found in cuts and worth(found) == min(map(worth, cuts))


@given(st.lists(st.floats(0, 1e6), min_size=3, max_size=8), st.integers(1, 3))
def test_costs_may_be_times(costs, n):
    best = min(max(parts(costs, c)) for c in all_cuts(len(costs), n))
    found = max(parts(costs, ff.balance(costs, n)))
    assert found == pytest.approx(best, rel=1e-9, abs=1e-3)


# By the clock


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        time.sleep(0.02)
        return g


@ff.unit
def quick(p, x):
    return x * p


@ff.unit
def slow_forward(p, x):
    time.sleep(0.04)
    return x * p


@ff.unit
def slow_backward(p, x):
    torch.rand(2)
    return {"y": Slow.apply(x * p), "n": 3}


def timed(params, x):
    h = quick(params[0], x)
    time.sleep(0.01)  # nobody's
    assert h.grad_fn is None  # or every activation would be kept
    h = slow_forward(params[0], h)
    return quick(params[1], slow_backward(params[1], h)["y"]).sum()


def test_a_profile_tells_forward_and_backward_of_each_call():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    params = [torch.ones(2), torch.ones(2)]
    times = profile(timed, params, torch.ones(2), repeat=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(p.requires_grad for p in params)
    first, forward, backward, last = times
    assert forward >= 0.04 and backward >= 0.02
    assert max(first, last) < 0.02
    assert ff.balance(times, 2) == [2, 2]


def test_the_clock_wants_whole_parameters_and_a_run():
    mesh = ff.make_mesh({"data": 2}, "simulated")

    def main():
        step = ff.shard(ff.value_and_grad(lambda p, x: quick(p, x).sum()), mesh, "data")
        profile(lambda p, x: quick(p, x), ff.place(step, torch.ones(2), torch.ones(2)))

    with pytest.raises(ValueError, match="is sharded, and the clock needs whole"):
        ff.spmd(main, mesh)()
    with pytest.raises(ValueError, match="repeat=0: at least one"):
        profile(timed, [torch.ones(2)] * 2, torch.ones(2), repeat=0)
    with pytest.raises(TypeError, match="first argument of the loss is missing"):
        profile(timed)
