"""How stages are given; cuts against all cuts."""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc.pipelining.stage_plans import cut
from tests.covering import examples


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
    """Costs and a number of stages."""
    draw = random.Random(seed)
    k, most = draw.randint(1, 8), draw.choice([0, 1, 3, 50])
    costs = [draw.choice([0, 1, most, draw.randint(0, most)]) for _ in range(k)]
    return costs, draw.randint(1, k)


@settings(max_examples=examples(60))
@given(st.integers(0, 10**9))
def test_a_cut_is_the_best_of_all(seed):
    costs, n = problem(seed)

    def worth(counts):
        spent = parts(costs, counts)
        return max(spent), sum(s**2 for s in spent), sum(c**2 for c in counts)

    cuts = [*all_cuts(len(costs), n)]
    found = ff.balance(costs, n)
    assert found in cuts and worth(found) == min(map(worth, cuts))


@given(st.lists(st.floats(0, 1e6), min_size=3, max_size=8), st.integers(1, 3))
def test_costs_may_be_times(costs, n):
    best = min(max(parts(costs, c)) for c in all_cuts(len(costs), n))
    found = max(parts(costs, ff.balance(costs, n)))
    assert found == pytest.approx(best, rel=1e-9, abs=1e-3)
