"""Recompute points are the best there are, and a plan says what they promise."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc.planning.recomputation import recompute_points
from fsfunc.runtime.memory import KINDS
from fsfunc.transforms.rematerialization import remat_calls
from tests.checks import all_refused, same

numbers = st.integers(0, 9)


@st.composite
def chains(draw):
    n = draw(st.integers(1, 8))
    lists = [draw(st.lists(numbers, min_size=n, max_size=n)) for _ in range(3)]
    return *lists, draw(st.integers(1, n))


def played(sizes, kept, runs):
    """The peak of a chain whose calls run forward and then backward."""
    starts = dict(runs)
    held, peak, i, steps = 0, 0, 0, []
    while i < len(sizes):
        stop = starts.get(i, i + 1)
        whole = sum(sizes[i:stop])
        rests = kept[stop - 1] if i in starts else whole
        peak = max(peak, held + whole)
        held += rests
        peak = max(peak, held)
        steps.append((whole, rests))
        i = stop
    for whole, rests in reversed(steps):
        held -= rests
        peak = max(peak, held + whole)
    assert held == 0
    return peak


def every(n, longest):
    """All ways to recompute: tuples of runs."""
    for cuts in itertools.product((False, True), repeat=n - 1):
        ends = [i + 1 for i, cut in enumerate(cuts) if cut]
        pieces = list(zip([0, *ends], [*ends, n], strict=True))
        for chosen in itertools.product((False, True), repeat=len(pieces)):
            picked = zip(pieces, chosen, strict=True)
            if all(
                b - a <= longest if again else b - a == 1 for (a, b), again in picked
            ):
                yield tuple(p for p, again in zip(pieces, chosen, strict=True) if again)


def spent(seconds, runs):
    return sum(sum(seconds[a:b]) for a, b in runs)


@given(chains(), st.integers(1, 8))
def test_segments_against_all_ways(chain, k):
    sizes, kept, seconds, longest = chain
    n = len(sizes)
    whole = [
        runs
        for runs in every(n, longest)
        if sum(b - a for a, b in runs) == n and len(runs) <= k
    ]
    if not whole:
        with pytest.raises(ValueError, match="do not hold"):
            recompute_points(sizes, kept, segments=k, longest=longest)
        return
    found = recompute_points(sizes, kept, segments=k, seconds=seconds, longest=longest)
    assert found.runs in whole
    assert found.peak == played(sizes, kept, found.runs)
    assert found.peak == min(played(sizes, kept, runs) for runs in whole)
    assert found.seconds == sum(seconds)


@given(chains(), st.integers(0, 40))
def test_bound_against_all_ways(chain, bound):
    sizes, kept, seconds, longest = chain
    ways = {
        runs: (spent(seconds, runs), played(sizes, kept, runs))
        for runs in every(len(sizes), longest)
    }
    within = [figures for figures in ways.values() if figures[1] <= bound]
    if not within:
        least = min(peak for _, peak in ways.values())
        with pytest.raises(ValueError, match=f"is {least}, {least - bound} too much"):
            recompute_points(sizes, kept, bound=bound, seconds=seconds, longest=longest)
        return
    found = recompute_points(sizes, kept, bound=bound, seconds=seconds, longest=longest)
    assert (found.seconds, found.peak) == min(within)
    assert ways[found.runs] == (found.seconds, found.peak)


def largest_sum_between(sizes, k):
    """The definition of FairScale's points: the largest sum of k pieces, least."""
    best = math.inf
    for ends in itertools.combinations(range(1, len(sizes)), min(k, len(sizes)) - 1):
        pieces = itertools.pairwise([0, *ends, len(sizes)])
        best = min(best, max(sum(sizes[a:b]) for a, b in pieces))
    return best


@given(st.lists(numbers, min_size=1, max_size=8), st.integers(1, 8))
def test_the_fairscale_case(sizes, k):
    found = recompute_points(sizes, segments=k)
    assert found.peak == largest_sum_between(sizes, k)
    pieces = itertools.pairwise([0, *found.splits, len(sizes)])
    assert found.peak == max(sum(sizes[a:b]) for a, b in pieces)
    assert len(found.splits) < k


def points(*args, **how):
    return lambda: recompute_points(*args, **how)


V = ValueError
test_bad_input_is_refused = all_refused([
    (points([1, 2], [1], segments=1), V, "kept has 1 numbers for 2 calls"),
    (points([1, -2], segments=1), V, r"activations\[1\] = -2"),
    (points([1, math.inf], segments=1), V, r"activations\[1\] = inf"),
    (points([1, 2], segments=1, seconds=[1]), V, "seconds has 1 numbers"),
    (points([1, 2]), V, "one of segments= and bound="),
    (points([1, 2], segments=1, bound=1), V, "one of segments= and bound="),
    (points([1, 2], segments=0), V, "segments=0: there is at least one"),
    (points([1, 2], bound=9, longest=0), V, "longest=0"),
    (points([1, 2, 3], segments=1, longest=2), V, "give 2 segments or more"),
    (points([5, 2], bound=1), V, "the least there is, is 5, 4 too much"),
])  # fmt: skip


# Applied

WIDTH, ROWS = 8, 256


@ff.unit
def block(p, x):
    return x + torch.tanh(torch.tanh(x @ p[0]) @ p[1])


@ff.unit
def head(p, x):
    return (x @ p).square().mean()


def loss_fn(params, x):
    for p in params["blocks"]:
        x = block(p, x)
    return head(params["head"], x)


def model(layers=5):
    draw = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=draw)  # noqa: E731
    blocks = [[make(WIDTH, 4 * WIDTH), make(4 * WIDTH, WIDTH)] for _ in range(layers)]
    return {"blocks": blocks, "head": make(WIDTH, 1)}, make(ROWS, WIDTH)


def activations_of(f, params, batch):
    """The most bytes of activations that a plan of ``f`` holds."""
    found = ff.plan(f, params, batch).ranks[0]
    column = KINDS.index("activations")
    return max(held[column] for _, held in found.memory)


def test_the_promise_is_what_a_plan_says():
    params, batch = model()
    program = ff.program(loss_fn, params, batch)
    all_kept = sum(call.activations for call in program.calls)
    bound = 0.5 * all_kept
    found = recompute_points(program, bound=bound, longest=1)
    gradient = ff.value_and_grad(loss_fn)
    before = activations_of(gradient, params, batch)
    after = activations_of(remat_calls(gradient, found.calls), params, batch)
    # Beside what is kept, a backward holds gradients: as many in both.
    assert after - found.peak == before - all_kept > 0
    assert found.names[0] == "block" and found.names[-1] == "head"


def test_remat_calls_is_the_loss_and_runs_again_what_was_chosen():
    params, batch = model()
    plain = ff.value_and_grad(loss_fn)
    some = remat_calls(plain, [1, 4])
    same(some(params, batch), plain(params, batch))
    work = ff.plan(some, params, batch).ranks[0].work
    assert work["block", "recompute"].calls == 2
    assert work["block", "forward"].calls == 5
    every = ff.plan(ff.remat(plain), params, batch).ranks[0].work
    assert every["block", "recompute"].calls == 5
