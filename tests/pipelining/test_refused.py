"""Schedules, costs and cuts that cannot be are refused in words."""

import functools
from functools import partial

import torch

import fsfunc as ff
from fsfunc.pipelining.actions import Action, ScheduleError, count_ranks, owners, parse
from fsfunc.pipelining.player import other_end
from fsfunc.pipelining.schedules import gpipe, greedy
from fsfunc.pipelining.stage_plans import cut
from fsfunc.pipelining.timing import Costs, bubble, simulate
from fsfunc.pipelining.transfers import with_transfers
from tests.checks import all_refused

S = ff.schedules
TEXT = [
    *(
        (parse, [["F0"], ["F0", "B0", entry]], r"rank 1, entry 2: .* is no action")
        for entry in ["", "F", "G3", "F-1", "F3>1", "SF3", "SF3<1", "RB3>1", "F3@"]
    ),
    (parse, [["F0"], [None]], r"rank 1, entry 0: None is no action"),
    (parse, "F0 B0", "'F0 B0' is no schedule, which is a list of rows"),
    (parse, [[3]], "rank 0, entry 0: 3 is no action"),
    (owners, parse(["F0", "F1@0"]), "rank 1 has F1@0, but stage 0 is on rank 0"),
    (owners, parse(["F0", "", "F0"]), "stage 1 is on no rank"),
    (owners, parse(["", ""]), "stage 0 is on no rank.*no action"),
    (other_end, Action("F", 3, 1), "F1@3 is no transfer"),
    (with_transfers, with_transfers(gpipe(2, 1)), "has transfers already"),
    (with_transfers, parse(["B0 F0"]), "B0@0 comes before F0@0"),
    (simulate, parse(["B0 F0"]), "B0@0 comes before F0@0"),
    *(
        (partial(with_transfers, edges={edge}), gpipe(2, 1), "to a later one of the 2")
        for edge in [(1, 0), (0, 0), (0, 2), (-1, 1)]
    ),
]
ACTIONS = [
    (("X", 0, 0), "no action has the kind 'X'"),
    (("F", -1, 0), "stage=-1"),
    (("F", 0, 1.5), "microbatch=1.5"),
    (("F", True, 0), "stage=True"),
    (("F", 0, 0, 1), "F has no peer; got peer=1"),
    (("SF", 0, 0), "SF has a peer, .* got peer=None"),
    (("RB", 0, 0, -2), "got peer=-2"),
]
COUNTS = {"n_stages": 4, "n_microbatches": 4, "chunks": 1}
NUMBERS = [
    *(
        (
            partial(count_ranks, **COUNTS | {name: value}),
            f"{name} must be an integer fr",
        )
        for name in COUNTS
        for value in [0, -1, 1.0, True]
    ),
    *(
        (partial(getattr(S, name), *counts), "must be an integer from 1 on")
        for name in (
            *("gpipe", "one_f_one_b", "looped_bfs", "interleaved_1f1b", "zb_h1"),
            *("zb_v", "greedy", "asynchronous"),
        )
        for counts in [(0, 1), (4, 0), (4, 2.0)]
    ),
    *(
        (partial(make, 5, 4, chunks=2), "5 stages do not come to 2 on each rank")
        for make in (S.interleaved_1f1b, S.looped_bfs, S.zb_v, S.greedy)
    ),
    (partial(S.zb_v, 6, 4, chunks=3), "2 stages on each rank, got chunks=3"),
    (partial(S.asynchronous, 2, 2, interval=0), "interval must be an integer from 1"),
    *(
        (partial(greedy, 2, 3, memory_bound=n), "has to hold one microbatch")
        for n in [0, 0.5, -1, float("nan")]
    ),
    (partial(greedy, 3, 2, costs=Costs(f=[1, 2])), "costs f have 2 stages"),
    (partial(simulate, gpipe(3, 1), Costs(f=[1, 2])), "2 stages; F0@2 has none of"),
    (partial(bubble, gpipe(2, 2), by="rank"), "'rank'"),
    (partial(Costs, f=-1), "f has the time -1"),
    (partial(Costs, i=float("nan")), "i has the time nan"),
    (partial(Costs, w=[1, float("inf")]), "w has the time inf"),
    (partial(Costs, send=-1), "send has the time -1"),
    (partial(Costs, send=[1, 2]), "send is one number"),
    (partial(S.staleness, S.zb_v(4, 2)), "rank 0 has several stages"),
    (partial(S.staleness, parse(["F0 B0", "F0"])), "rank 1 has forwards without a b"),
]
WRONG = [  # rows of ranks that do not run, or are not whole
    ([], "stage 0 is on no rank; the schedule has no action"),
    (["F0 B0", "F0@0 B0@0"], "rank 1 has F0@0, but stage 0 is on rank 0"),
    (["F0 F1 B0"], "microbatch 1 of stage 0 needs F, and B or I and W, .* has F$"),
    (["F0 B0 I0 W0"], "microbatch 0 .* it has B, F, I, W"),
    (["F0 I0"], "it has F, I"),
    (["F0 W0"], "it has F, W"),
    (["F0 B0", "F0"], "rank 1: microbatch 0 of stage 1 needs F, and B or I and W"),
    (["F0 F2"], "microbatch 1 of stage 0 needs F, each once; it has nothing"),
    (["F0 F0 B0"], "F0@0 comes 2 times"),
    (["F0 W0 I0"], "rank 0: W0@0 comes before I0@0, which it needs"),
    (["F0 B0 SF0>0"], "rank 0: SF0@0>0 has no place"),
    (["F0 SF0>1", "F0"], r"rank 1 has no RF0@1<0; the stages 1 and 0 are joined"),
    (["F0 F1", "F0 F1 B0"], "rank 0: microbatch 0 of stage 0 needs F, and"),
    # Every gradient has one update.
    (["F0 U0 B0"], "rank 0: U0@0 is to take up gradients, microbatch 0's .*is none"),
    (["F0 I0 U0 W0"], "since the update before there is none"),
    (["F0 B0 F1 B1 U0"], "since the update before there is microbatch 1's as last"),
    (["F0 B0 F1 B1 U1 U0"], "U0@0 is to take up gradients, .* there is none"),
    (["F0 B0 U0 U0"], "U0@0 comes 2 times"),
    (["F0 U0"], "there is none"),
    (["F0 B0 U1"], "U1@0 .*microbatch 0's as last|needs F, and B"),
    (["F0 F1 B0 U0 B1"], r"of microbatches \[1\] of stage 0: .*missing.* U1@0"),
    (["F0 B0 U0", "F0 B0"], "rank 1: no update takes .* of stage 1"),
]
SCHEDULES = [
    *((partial(call, given), words) for call, given, words in TEXT),
    *((partial(Action, *given), words) for given, words in ACTIONS),
    *NUMBERS,
    *((partial(ff.verify, rows), words) for rows, words in WRONG),
]

BALANCES = [
    ([1, 2], 3, "least one call for each"),
    ([1, 2], 0, "at least one stage"),
    ([1, -2], 1, "not below 0"),
    ([1, float("inf")], 1, "finite"),
]
UNITS = r"5 unit calls \(embed, block x3, head\)"
CUTS = [
    ([1] * 6, None, rf"stages=\[1, 1, 1, 1, 1, 1\], but loss has {UNITS}"),
    (None, 6, "6 stages, but loss has 5 unit calls"),
    (None, 0, "0 stages, but"),
    (None, None, "no stages, but"),
    ([], None, r"stages=\[\], but"),
    ([2, 3], 3, r"3 stages, stages=\[2, 3\], but"),
    ([5, 0], None, "each stage has at least one"),
    ([6, -1], None, "each stage has at least one"),
    ([2, 2], None, rf"stages=\[2, 2\], but loss has {UNITS}"),
    ([2, 3.0], None, "Give counts that sum to them, or the names"),
    ([True, 4], None, "Give counts"),
    (["embed", 4], None, "Give counts"),
    (["embed", "decoder"], None, r"'decoder'\], but loss has 5 .*\(embed, block x3"),
    (["embed", "block:3"], None, "Give counts"),
    (["embed", "block:x"], None, "Give counts"),
    (["block", "head"], None, "begin, the first of all too"),
    (["embed", "head", "block"], None, "names, in order"),
    (["embed", "block", "block:0"], None, "at least one"),
]


@functools.cache
def program():
    def named(name):
        def unit(p, x):
            return x * p

        unit.__name__ = name
        return ff.unit(unit)

    embed, block, head = map(named, ("embed", "block", "head"))

    def loss(p, x):
        for unit in (embed, block, block, block, head):
            x = unit(p, x)
        return x.sum()

    return ff.program(loss, torch.ones(2), torch.ones(2))


def cut_as(stages, n):
    return lambda: cut(program(), stages, n)


test_what_cannot_be_is_refused = all_refused([
    *((call, ScheduleError, words) for call, words in SCHEDULES),
    *(
        (partial(ff.balance, costs, n), ValueError, words)
        for costs, n, words in BALANCES
    ),
    *((cut_as(stages, n), ValueError, words) for stages, n, words in CUTS),
])  # fmt: skip
