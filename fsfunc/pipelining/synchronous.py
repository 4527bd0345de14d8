"""Schedules of a step that updates once: whole backwards, and split ones.

With whole backwards, four differ in three things only: the order of a rank's forwards,
the order of its backwards, and how many forwards it runs before the first backward.
With split ones, the gradient of the inputs (I) is what the stage before waits for; that
of the parameters (W) can come at any later time, and fill what would be a bubble. Only
it gives the activations back.
"""

from __future__ import annotations

from collections.abc import Iterable

from fsfunc.pipelining.actions import (
    Action,
    Schedule,
    ScheduleError,
    numbered,
    ranks_for,
)

Pairs = list[tuple[int, int]]  # (stage, microbatch)


def gpipe(n_stages: int, n_microbatches: int) -> Schedule:
    """Return the schedule of all forwards, then all backwards, one stage a rank.

    Args:
        n_stages: stages, as many as ranks.
        n_microbatches: microbatches of a batch, from 1 on.

    Raises:
        ScheduleError: a count below 1.

    Cost: bubble (P-1)(f+b); every rank holds all M microbatches.
    Source: Huang et al., GPipe, 2019.

    >>> from fsfunc.pipelining.actions import listing
    >>> print(listing(gpipe(2, 3)))
    0: F0 F1 F2 B0 B1 B2
    1: F0 F1 F2 B0 B1 B2
    """
    ranks_for(n_stages, n_microbatches)
    runs = [[(rank, m) for m in range(n_microbatches)] for rank in range(n_stages)]
    return tuple(_alternating(run, run, n_microbatches) for run in runs)


def one_f_one_b(n_stages: int, n_microbatches: int) -> Schedule:
    """Return the schedule in which a rank takes a backward as soon as one can come.

    Rank r runs P-1-r forwards, then one forward and one backward in turn.

    Args:
        n_stages: stages, as many as ranks.
        n_microbatches: microbatches of a batch, from 1 on.

    Raises:
        ScheduleError: a count below 1.

    Cost: bubble (P-1)(f+b); rank r holds min(M, P-r) microbatches.
    Source: Harlap et al., PipeDream, 2018; Narayanan et al., Megatron-LM, 2021.

    >>> from fsfunc.pipelining.actions import listing
    >>> print(listing(one_f_one_b(2, 3)))
    0: F0 F1 B0 F2 B1 B2
    1: F0 B0 F1 B1 F2 B2
    """
    ranks_for(n_stages, n_microbatches)
    runs = [[(rank, m) for m in range(n_microbatches)] for rank in range(n_stages)]
    return tuple(
        _alternating(run, run, n_stages - 1 - rank) for rank, run in enumerate(runs)
    )


def looped_bfs(n_stages: int, n_microbatches: int, *, chunks: int = 2) -> Schedule:
    """Return GPipe over several stages a rank: each stage takes all microbatches.

    Stage s is on rank s % P. The backwards run in the mirrored order.

    Args:
        n_stages: all stages, P * chunks.
        n_microbatches: microbatches of a batch, from 1 on.
        chunks: stages on each rank.

    Raises:
        ScheduleError: a count below 1; stages that chunks does not divide.

    Cost: bubble (P-1)(f+b)/v for M a multiple of P; every rank holds M microbatches.
    Source: Lamy-Poirier, Breadth-First Pipeline Parallelism, 2023.

    >>> from fsfunc.pipelining.actions import listing
    >>> print(listing(looped_bfs(4, 2)))
    0: F0@0 F1@0 F0@2 F1@2 B1@2 B0@2 B1@0 B0@0
    1: F0@1 F1@1 F0@3 F1@3 B1@3 B0@3 B1@1 B0@1
    """
    ranks = ranks_for(n_stages, n_microbatches, chunks)
    rows = []
    for rank in range(ranks):
        stages = range(rank, n_stages, ranks)
        run = [(s, m) for s in stages for m in range(n_microbatches)]
        rows.append(_alternating(run, run[::-1], len(run)))
    return tuple(rows)


def interleaved_1f1b(
    n_stages: int, n_microbatches: int, *, chunks: int = 2
) -> Schedule:
    """Return 1F1B over several stages a rank, which divides the bubble by them.

    Stage s is on rank s % P. Microbatches go in rounds of P (of nearly P where M is
    no multiple of it): each stage of a rank takes a round before the next stage does.

    Args:
        n_stages: all stages, P * chunks.
        n_microbatches: microbatches of a batch, from 1 on.
        chunks: stages on each rank, v.

    Raises:
        ScheduleError: a count below 1; stages that chunks does not divide.

    Cost: bubble (P-1)(f+b)/v for M a multiple of P; rank r then holds at most
    ((v-1)P + 2(P-1-r) + 1)/v microbatches.
    Source: Narayanan et al., Megatron-LM, 2021, section 2.2.

    >>> from fsfunc.pipelining.actions import listing
    >>> print(listing(interleaved_1f1b(4, 2)))
    0: F0@0 F1@0 F0@2 F1@2 B0@2 B1@2 B0@0 B1@0
    1: F0@1 F1@1 F0@3 B0@3 F1@3 B1@3 B0@1 B1@1
    """
    ranks = ranks_for(n_stages, n_microbatches, chunks)
    rounds = rounds_of(n_microbatches, ranks)
    rows = []
    for rank in range(ranks):
        stages = range(rank, n_stages, ranks)
        ahead = (chunks - 1) * len(rounds[0]) + 2 * (ranks - 1 - rank)
        rows.append(
            _alternating(
                _by_round(rounds, stages), _by_round(rounds, stages[::-1]), ahead
            )
        )
    return tuple(rows)


def rounds_of(n_microbatches: int, ranks: int) -> list[range]:
    """Return the microbatches in rounds of P each, or of more where P divides them not.

    >>> rounds_of(3, 4), rounds_of(8, 4), rounds_of(11, 4)
    ([range(0, 3)], [range(0, 4), range(4, 8)], [range(0, 6), range(6, 11)])
    """
    count = max(1, n_microbatches // ranks)
    size, longer = divmod(n_microbatches, count)
    starts = [n * size + min(n, longer) for n in range(count + 1)]
    return [range(a, b) for a, b in zip(starts, starts[1:], strict=False)]


def _by_round(rounds: Iterable[range], stages: Iterable[int]) -> Pairs:
    return [(s, m) for group in rounds for s in stages for m in group]


def _alternating(forwards: Pairs, backwards: Pairs, ahead: int) -> tuple[Action, ...]:
    """Return `ahead` forwards, then a forward and a backward in turn, then the rest."""
    ahead = min(ahead, len(forwards))
    row = [Action("F", *pair) for pair in forwards[:ahead]]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        row += [Action("F", *forward), Action("B", *backward)]
    row += [Action("B", *pair) for pair in backwards[len(forwards) - ahead :]]
    return tuple(row)


def zb_h1(n_stages: int, n_microbatches: int) -> Schedule:
    """Return 1F1B with the backwards split and W put off by a rank's number.

    Args:
        n_stages: stages, as many as ranks.
        n_microbatches: microbatches of a batch, from 1 on.

    Raises:
        ScheduleError: a count below 1.

    Cost: bubble (P-1)(f+i-w) for M >= P, w <= f and w <= i; every rank holds P
    microbatches, as many as the first rank of 1F1B.
    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023, section 2.

    >>> from fsfunc.pipelining.actions import listing
    >>> print(listing(zb_h1(2, 3)))
    0: F0 F1 I0 W0 F2 I1 W1 I2 W2
    1: F0 I0 F1 I1 W0 F2 I2 W1 W2
    """
    ranks_for(n_stages, n_microbatches)
    rows = []
    for rank in range(n_stages):
        ahead = min(n_stages - 1 - rank, n_microbatches)
        pattern = ["F"] * ahead
        for n in range(n_microbatches):
            pattern += (
                ["F"] * (ahead + n < n_microbatches) + ["I"] + ["W"] * (n >= rank)
            )
        pattern += ["W"] * min(rank, n_microbatches)
        rows.append(numbered([(kind, rank) for kind in pattern], n_microbatches))
    return tuple(rows)


def zb_v(n_stages: int, n_microbatches: int, *, chunks: int = 2) -> Schedule:
    """Return the zero-bubble schedule of two stages a rank, laid out as a V.

    Rank r has the stages r and 2P-1-r, so that the first and the last stage are on
    one rank and the loss's gradient starts where the forward began.

    Args:
        n_stages: all stages, 2P.
        n_microbatches: microbatches of a batch, from 1 on.
        chunks: stages on each rank: 2, no other.

    Raises:
        ScheduleError: a count below 1, an odd number of stages, chunks other than 2.

    Cost: for f = i = w and M >= 2P-1 no bubble within a rank's span, and (P-1)f/2 by
    makespan; every rank holds P microbatches. For fewer microbatches it is the
    schedule of 2P-1 with the surplus left out: `greedy` finds shorter ones there.
    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023, section 6.

    >>> from fsfunc.pipelining.actions import listing
    >>> print(listing(zb_v(2, 1)))
    0: F0@0 F0@1 I0@1 W0@1 I0@0 W0@0
    """
    if chunks != 2:
        raise ScheduleError(f"zb_v has 2 stages on each rank, got chunks={chunks}")
    ranks = ranks_for(n_stages, n_microbatches, chunks)
    count = max(n_microbatches, 2 * ranks - 1)
    rows = []
    for rank in range(ranks):
        F0, I0, W0 = (("F", rank), ("I", rank), ("W", rank))
        last = n_stages - 1 - rank
        F1, I1, W1 = (("F", last), ("I", last), ("W", last))
        below = ranks - rank
        pattern = [F0] * (2 * below - 1) + [F1, F0] * rank + [F1, I1, W1] * below
        fresh = count - (2 * ranks - 1 - rank)  # forwards of the first stage left
        pattern += [F0, I0, W0, F1, I1, W1] * fresh
        pattern += [I0, W0, F1, I1, W1] * (count - ranks - fresh)
        pattern += [I0, I1] * rank + [I0, W0] * below + [W1] * rank + [W0] * rank
        rows.append(numbered(pattern, n_microbatches))
    return tuple(rows)
