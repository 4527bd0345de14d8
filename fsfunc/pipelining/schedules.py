"""The named schedules of a pipeline, and a search for one: `ff.schedules`.

A schedule is made by a pure function `(n_stages, n_microbatches, **options)`, which
``pipeline(schedule=)`` calls. It is a tuple of actions for each rank (see `actions`).
In the costs below P is the number of ranks, M of microbatches, v of stages a rank; f, i
and w are the times of F, I and W for all stages of a rank, and b = i + w.

The four with whole backwards (B) differ in three things only: the order of a rank's
forwards, the order of its backwards, and how many forwards it runs before the first
backward. If the backward is split, the stage before waits for the gradient of the
inputs (I) alone. That of the parameters (W) can come at any later time, and fill what
would be a bubble; the activations are freed after it. An asynchronous schedule updates
in between.

No closed form is best for every number of microbatches and every cost: `greedy` plays
the pipeline forward in time under a few rules of thumb, adds the named schedules, and
takes the one that ends first.

To add a schedule, write such a function here, and its name into `ScheduleName`: that
is all that ``ff.search`` needs. Its stages a rank are the default of its argument
``chunks``; all else that a search asks, its actions say. `_named` lists those that
`greedy` tries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import Literal, TypeAlias

from fsfunc.pipelining import actions, player, timing, verification
from fsfunc.pipelining.actions import (  # noqa: F401
    Action,
    Schedule,
    ScheduleError,
    forward_only,
    listing,
    owners,
    parse,
)

_Pairs = list[tuple[int, int]]  # (stage, microbatch)

# The functions below of (n_stages, n_microbatches) whose steps need no more than that:
# ``ff.search`` tries those that it is given of these.
ScheduleName: TypeAlias = Literal[
    "gpipe",
    "one_f_one_b",
    "looped_bfs",
    "interleaved_1f1b",
    "zb_h1",
    "zb_v",
    "greedy",
]


def gpipe(n_stages: int, n_microbatches: int) -> Schedule:
    """Returns the schedule of all forwards, then all backwards, one stage a rank.

    Args:
        n_stages: stages, as many as ranks.
        n_microbatches: microbatches of a batch, from 1 on.

    Raises:
        ScheduleError: a count below 1.

    Cost: bubble (P-1)(f+b); every rank holds all M microbatches.
    Source: Huang et al., GPipe, 2019.

    >>> print(listing(gpipe(2, 3)))
    0: F0 F1 F2 B0 B1 B2
    1: F0 F1 F2 B0 B1 B2
    """
    actions.count_ranks(n_stages, n_microbatches)
    runs = [[(rank, m) for m in range(n_microbatches)] for rank in range(n_stages)]
    return tuple(_alternating(run, run, n_microbatches) for run in runs)


def one_f_one_b(n_stages: int, n_microbatches: int) -> Schedule:
    """Returns the schedule in which a rank takes a backward as soon as one can come.

    Rank r runs P-1-r forwards, then one forward and one backward in turn.

    Args:
        n_stages: stages, as many as ranks.
        n_microbatches: microbatches of a batch, from 1 on.

    Raises:
        ScheduleError: a count below 1.

    Cost: bubble (P-1)(f+b); rank r holds min(M, P-r) microbatches.
    Source: Harlap et al., PipeDream, 2018; Narayanan et al., Megatron-LM, 2021.

    >>> print(listing(one_f_one_b(2, 3)))
    0: F0 F1 B0 F2 B1 B2
    1: F0 B0 F1 B1 F2 B2
    """
    actions.count_ranks(n_stages, n_microbatches)
    runs = [[(rank, m) for m in range(n_microbatches)] for rank in range(n_stages)]
    return tuple(
        _alternating(run, run, n_stages - 1 - rank) for rank, run in enumerate(runs)
    )


def looped_bfs(n_stages: int, n_microbatches: int, *, chunks: int = 2) -> Schedule:
    """Returns GPipe over several stages a rank: each stage takes all microbatches.

    Stage s is on rank s % P. The backwards run in the mirrored order.

    Args:
        n_stages: all stages, P * chunks.
        n_microbatches: microbatches of a batch, from 1 on.
        chunks: stages on each rank.

    Raises:
        ScheduleError: a count below 1; stages that chunks does not divide.

    Cost: bubble (P-1)(f+b)/v for M a multiple of P; every rank holds M microbatches.
    Source: Lamy-Poirier, Breadth-First Pipeline Parallelism, 2023.

    >>> print(listing(looped_bfs(4, 2)))
    0: F0@0 F1@0 F0@2 F1@2 B1@2 B0@2 B1@0 B0@0
    1: F0@1 F1@1 F0@3 F1@3 B1@3 B0@3 B1@1 B0@1
    """
    ranks = actions.count_ranks(n_stages, n_microbatches, chunks)
    rows = []
    for rank in range(ranks):
        stages = range(rank, n_stages, ranks)
        run = [(s, m) for s in stages for m in range(n_microbatches)]
        rows.append(_alternating(run, run[::-1], len(run)))
    return tuple(rows)


def interleaved_1f1b(
    n_stages: int, n_microbatches: int, *, chunks: int = 2
) -> Schedule:
    """Returns 1F1B over several stages a rank, which divides the bubble by them.

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

    >>> print(listing(interleaved_1f1b(4, 2)))
    0: F0@0 F1@0 F0@2 F1@2 B0@2 B1@2 B0@0 B1@0
    1: F0@1 F1@1 F0@3 B0@3 F1@3 B1@3 B0@1 B1@1
    """
    ranks = actions.count_ranks(n_stages, n_microbatches, chunks)
    rounds = actions.split_into_rounds(n_microbatches, ranks)
    rows = []
    for rank in range(ranks):
        stages = range(rank, n_stages, ranks)
        # The last stage's first backward comes after all chunks took a round; each rank
        # before the last is a stage's forward and backward further away from it.
        ahead = (chunks - 1) * len(rounds[0]) + 2 * (ranks - 1 - rank)
        rows.append(
            _alternating(
                _by_round(rounds, stages), _by_round(rounds, stages[::-1]), ahead
            )
        )
    return tuple(rows)


def _by_round(rounds: Iterable[range], stages: Iterable[int]) -> _Pairs:
    return [(s, m) for group in rounds for s in stages for m in group]


def _alternating(forwards: _Pairs, backwards: _Pairs, ahead: int) -> tuple[Action, ...]:
    """Returns `ahead` forwards, then forward and backward in turn, then the others."""
    ahead = min(ahead, len(forwards))
    row = [Action("F", *pair) for pair in forwards[:ahead]]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        row += [Action("F", *forward), Action("B", *backward)]
    row += [Action("B", *pair) for pair in backwards[len(forwards) - ahead :]]
    return tuple(row)


def zb_h1(n_stages: int, n_microbatches: int) -> Schedule:
    """Returns 1F1B with the backwards split and W put off by a rank's number.

    Args:
        n_stages: stages, as many as ranks.
        n_microbatches: microbatches of a batch, from 1 on.

    Raises:
        ScheduleError: a count below 1.

    Cost: bubble (P-1)(f+i-w) for M >= P, w <= f and w <= i; every rank holds P
    microbatches, as many as the first rank of 1F1B.
    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023, section 2.

    >>> print(listing(zb_h1(2, 3)))
    0: F0 F1 I0 W0 F2 I1 W1 I2 W2
    1: F0 I0 F1 I1 W0 F2 I2 W1 W2
    """
    actions.count_ranks(n_stages, n_microbatches)
    # Rank r has r W's in hand: with them it fills the time in which it would wait for
    # the I of the stage after it.
    rows = []
    for rank in range(n_stages):
        ahead = min(n_stages - 1 - rank, n_microbatches)
        pattern = ["F"] * ahead
        for n in range(n_microbatches):
            pattern += (
                ["F"] * (ahead + n < n_microbatches) + ["I"] + ["W"] * (n >= rank)
            )
        pattern += ["W"] * min(rank, n_microbatches)
        rows.append(
            actions.number_microbatches(
                [(kind, rank) for kind in pattern], n_microbatches
            )
        )
    return tuple(rows)


def zb_v(n_stages: int, n_microbatches: int, *, chunks: int = 2) -> Schedule:
    """Returns the zero-bubble schedule of two stages a rank, laid out as a V.

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

    >>> print(listing(zb_v(2, 1)))
    0: F0@0 F0@1 I0@1 W0@1 I0@0 W0@0
    """
    if chunks != 2:
        raise ScheduleError(f"zb_v has 2 stages on each rank, got chunks={chunks}")
    ranks = actions.count_ranks(n_stages, n_microbatches, chunks)
    count = max(n_microbatches, 2 * ranks - 1)
    rows = []
    for rank in range(ranks):
        F0, I0, W0 = (("F", rank), ("I", rank), ("W", rank))
        last = n_stages - 1 - rank
        F1, I1, W1 = (("F", last), ("I", last), ("W", last))
        # The paper's V for 2P-1 microbatches, part by part: forwards down the V, a
        # steady state of F, I and W in both stages, and the weight gradients left over.
        below = ranks - rank
        pattern = [F0] * (2 * below - 1) + [F1, F0] * rank + [F1, I1, W1] * below
        fresh = count - (2 * ranks - 1 - rank)  # forwards of the first stage left
        pattern += [F0, I0, W0, F1, I1, W1] * fresh
        pattern += [I0, W0, F1, I1, W1] * (count - ranks - fresh)
        pattern += [I0, I1] * rank + [I0, W0] * below + [W1] * rank + [W0] * rank
        rows.append(actions.number_microbatches(pattern, n_microbatches))
    return tuple(rows)


def asynchronous(n_stages: int, n_microbatches: int, *, interval: int = 1) -> Schedule:
    """Returns 1F1B in which a stage updates as soon as it has gradients.

    Each stage updates its parameters after every `interval`-th backward, and at the
    end by the gradients that remain. A forward uses the parameters as they then are; a
    backward uses those of its own forward. `staleness` counts the updates between them.

    Args:
        n_stages: stages, as many as ranks.
        n_microbatches: microbatches of a batch, from 1 on.
        interval: how many microbatches an update takes up; from M on there is one
            update, and the step is that of `one_f_one_b`.

    Raises:
        ScheduleError: a count below 1.

    Cost: bubble (P-1)(f+b) of a call: the more microbatches, the less; rank r holds
    min(M, P-r) microbatches, and as many versions of its parameters at most.
    Source: Narayanan et al., PipeDream, 2019; Gaunt et al., AMPNet, 2017.

    >>> print(listing(asynchronous(2, 3)))
    0: F0 F1 B0 U0 F2 B1 U1 B2 U2
    1: F0 B0 U0 F1 B1 U1 F2 B2 U2
    """
    if type(interval) is not int or interval < 1:
        raise ScheduleError(f"interval must be an integer from 1 on, got {interval!r}")
    rows = []
    for row in one_f_one_b(n_stages, n_microbatches):
        extended_row: list[Action] = []
        for action in row:
            extended_row.append(action)
            count = action.microbatch + 1
            # Every `interval`-th gradient, and those that remain after the last.
            is_due = action.traits.ends_gradients
            if is_due and not (count % interval and count < n_microbatches):
                extended_row.append(Action("U", action.stage, action.microbatch))
        rows.append(tuple(extended_row))
    return tuple(rows)


def staleness(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Returns how many updates come between a forward and its backward.

    Entry [r][m] is how many updates old, on rank r, the parameters of microbatch m's
    gradient are when that gradient is complete (after B or W). In `asynchronous(P, M,
    interval=k)` it is m // k - max(0, m - w) // k with w = P-1-r; so min(m, P-1-r) at
    interval 1, and 0 on the last rank. Without updates it is 0.

    Raises:
        ScheduleError: a rank with several stages, or a microbatch without a backward.

    >>> staleness(asynchronous(3, 5))
    ((0, 1, 2, 2, 2), (0, 1, 1, 1, 1), (0, 0, 0, 0, 0))
    """
    rows = []
    for rank, row in enumerate(schedule):
        if len({action.stage for action in row}) > 1:
            raise ScheduleError(f"rank {rank} has several stages: staleness is of one")
        updates, updates_before, ages = 0, dict[int, int](), dict[int, int]()
        for action in row:
            if action.traits.updates:
                updates += 1
            elif action.traits.is_forward:
                updates_before[action.microbatch] = updates
            elif action.traits.ends_gradients:
                ages[action.microbatch] = updates - updates_before[action.microbatch]
        if ages.keys() != updates_before.keys():
            raise ScheduleError(f"rank {rank} has forwards without a backward")
        rows.append(tuple(ages[m] for m in sorted(ages)))
    return tuple(rows)


def greedy(
    n_stages: int,
    n_microbatches: int,
    *,
    costs: timing.Costs | None = None,
    memory_bound: float | None = None,
    chunks: int = 1,
) -> Schedule:
    """Returns the schedule of least makespan among some that keep to the memory bound.

    Tried are the named schedules with as many stages a rank, and schedules from greedy
    play: a rank that is free takes what is ready, by a rule. Each rule is tried with
    stages placed round and round (0 1 0 1) and to and fro (0 1 1 0). Of equally long
    schedules the one that saves fewer activations is returned.

    Args:
        n_stages: all stages, P * chunks.
        n_microbatches: microbatches of a batch, from 1 on.
        costs: what actions cost; None: f = i = w = 1 for a rank's stages together.
        memory_bound: the most microbatches whose activations a rank may save (see
            `verification.peak_microbatches`), from 1 on; None: any.
        chunks: stages on each rank.

    Raises:
        ScheduleError: a count below 1, stages that chunks does not divide, a bound
            below 1: a rank has to hold one microbatch.

    Cost: plays the pipeline once for each rule: time in proportion to the actions.

    >>> from fsfunc.pipelining.timing import bubble
    >>> from fsfunc.pipelining.verification import peak_microbatches as peaks
    >>> short = greedy(8, 4, chunks=2)  # too few microbatches for zb_v
    >>> bubble(zb_v(8, 4)), bubble(short), max(peaks(zb_v(8, 4))), max(peaks(short))
    (3.0, 1.5, 4.0, 4.0)
    >>> bubble(greedy(4, 8)), bubble(greedy(4, 8, memory_bound=3))
    (3.0, 9.0)
    """
    costs = timing.Costs() if costs is None else costs
    ranks = actions.count_ranks(n_stages, n_microbatches, chunks)
    if memory_bound is not None and not memory_bound >= 1:
        raise ScheduleError(
            f"memory_bound={memory_bound}: a rank has to hold one microbatch at least"
        )
    schedules = [
        schedule
        for schedule in _named(n_stages, n_microbatches, chunks)
        if memory_bound is None
        or max(verification.peak_microbatches(schedule)) <= memory_bound
    ]
    # The bound counts microbatches of all a rank's stages; a play counts those of one.
    bound = n_microbatches if memory_bound is None else memory_bound
    counts = range(chunks, n_microbatches * chunks + 1)
    room = max(count for count in counts if count / chunks <= bound)
    for placement in _placements(ranks, chunks):
        for rule in _RULES:
            schedules.append(_Play(placement, n_microbatches, costs, room, rule).run())

    def order(schedule: Schedule) -> tuple[float, float]:
        ends = (event.end for event in timing.simulate(schedule, costs))
        return max(ends), max(verification.peak_microbatches(schedule))

    return min(schedules, key=order)


def _named(n_stages: int, n_microbatches: int, chunks: int) -> Iterator[Schedule]:
    """Yields the named schedules of so many stages a rank.

    Frugal ones first: of two that are equally good, `min` returns the first.
    """
    if chunks == 1:
        for make in (one_f_one_b, zb_h1, gpipe):
            yield make(n_stages, n_microbatches)
        return
    if chunks == 2:
        yield zb_v(n_stages, n_microbatches)
    for make in (interleaved_1f1b, looped_bfs):
        yield make(n_stages, n_microbatches, chunks=chunks)


def _placements(ranks: int, chunks: int) -> list[list[int]]:
    """Returns lists of the rank of each stage: round and round, and to and fro."""
    order = list(range(ranks))
    looped = order * chunks
    zigzag = [rank for n in range(chunks) for rank in order[:: -1 if n % 2 else 1]]
    return [looped] if looped == zigzag else [looped, zigzag]


@dataclass(frozen=True)
class _Rule:
    """How a free rank chooses: an I that is ready, else an F, else a W.

    Args:
        deep: whether it takes, of several forwards, that of the last stage; if not,
            that of the earliest round of P microbatches, and there of the first stage.
        patience: a rank idles instead of starting a W if an I or F is known to become
            ready before this share of the W's time has passed.
    """

    deep: bool
    patience: float


_RULES = [_Rule(*each) for each in product([True, False], [0.0, 0.5, 1.0])]


@dataclass(eq=False)
class _Play(player.Player):
    """The pipeline played in time, each rank choosing what it starts when it is free.

    Each stage takes the microbatches in their order.

    Args:
        owners: the rank of each stage.
        count: how many microbatches there are.
        room: the most activations that a rank may save, in microbatches of one stage.
    """

    owners: list[int]
    count: int
    costs: timing.Costs
    room: int
    rule: _Rule

    def __post_init__(self) -> None:
        super().__init__()
        ranks = max(self.owners) + 1
        stages = list(enumerate(self.owners))
        self.chunks = len(stages) // ranks
        self.stages_of_rank = [[s for s, r in stages if r == k] for k in range(ranks)]
        self.rows: list[list[Action]] = [[] for _ in range(ranks)]
        self.free_at: list[float] = [0] * ranks  # when its last action ends
        self.saved = [0] * ranks
        # By kind and stage: when the actions so far end, by microbatch.
        self.ends: dict[str, list[list[float]]] = {
            kind: [[] for _ in self.owners] for kind in "FIW"
        }

    def run(self) -> Schedule:
        self.play(map(self._rank, range(len(self.rows))))
        return tuple(tuple(row) for row in self.rows)

    def _rank(self, rank: int) -> Iterator[None]:
        while True:
            if self.free_at[rank] <= self.now:
                choice = self._choose(rank, self.now)
                if choice is not None:
                    self._start(rank, self.now, *choice)
            yield

    def _choose(self, rank: int, now: float) -> tuple[str, int] | None:
        """Returns the kind and stage of what the rank starts now, None for nothing."""
        ready: dict[str, list[tuple[int, int]]] = {"I": [], "F": [], "W": []}
        soon = inf
        for stage in self.stages_of_rank[rank]:
            for kind in "IF":
                time = self._ready_time(kind, stage)
                if time <= now:
                    earliest = len(self.ends[kind][stage]) // len(self.stages_of_rank)
                    deep = kind == "I" or self.rule.deep
                    ready[kind].append((0, -stage) if deep else (earliest, stage))
                else:
                    soon = min(soon, time)
            n_done = len(self.ends["W"][stage])
            if n_done < len(self.ends["I"][stage]):
                ready["W"].append((n_done, -stage))
        # I first: it frees the stage before, and leads to the W that frees memory.
        for kind in "IF":
            if ready[kind]:
                return kind, abs(min(ready[kind])[1])
        if ready["W"]:
            stage = abs(min(ready["W"])[1])
            w = self.costs.of(Action("W", stage, 0), self.chunks)
            if soon >= now + self.rule.patience * w:
                return "W", stage
        return None

    def _ready_time(self, kind: str, stage: int) -> float:
        """Returns when the stage's next F or I can start, inf where that is unknown."""
        m = len(self.ends[kind][stage])
        rank = self.owners[stage]
        other = stage - 1 if kind == "F" else stage + 1
        if m == self.count or kind == "F" and not self._has_room(stage):
            return inf
        time = 0.0
        if kind == "I":
            if m == len(self.ends["F"][stage]):
                return inf
            time = self.ends["F"][stage][m]
        if 0 <= other < len(self.owners):
            if m == len(self.ends[kind][other]):
                return inf
            crosses = self.owners[other] != rank
            time = max(time, self.ends[kind][other][m] + crosses * self.costs.send)
        return time

    def _has_room(self, stage: int) -> bool:
        """Returns whether, after one more F, all under way can end, oldest first.

        A greedy F that fills the memory with late microbatches could leave no room for
        the forwards that the oldest one still needs in the rank's other stages: a
        deadlock. So the rest of each microbatch under way is counted before the F.
        """
        rank = self.owners[stage]
        room = self.room - self.saved[rank] - 1
        begun_counts = [
            len(self.ends["F"][s]) + (s == stage) for s in self.stages_of_rank[rank]
        ]
        ended_counts = [len(self.ends["W"][s]) for s in self.stages_of_rank[rank]]
        for m in range(min(ended_counts), max(begun_counts)):
            # With room for one microbatch in all stages every later one can end too.
            if room >= self.chunks or room < 0:
                break
            if room < sum(n <= m for n in begun_counts):
                return False
            room += sum(
                a <= m < b for a, b in zip(ended_counts, begun_counts, strict=True)
            )
        return room >= 0

    def _start(self, rank: int, now: float, kind: str, stage: int) -> None:
        action = Action(kind, stage, len(self.ends[kind][stage]))
        end = now + self.costs.of(action, self.chunks)
        self.ends[kind][stage].append(end)
        self.rows[rank].append(action)
        self.saved[rank] += action.traits.activation_change
        self.free_at[rank] = end
        self.wake(rank, end)
        # The rank of the stage that waits for this: W has none, its own rank wakes it.
        other = stage + {"F": 1, "I": -1, "W": 0}[kind]
        if 0 <= other < len(self.owners):
            self.wake(self.owners[other], end + self.costs.send)
