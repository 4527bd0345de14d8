"""``recompute_points``: choose unit calls to recompute, for memory or time.

A call that is not recomputed saves its activations from its forward to its backward. A
run of calls that is recomputed together saves its output alone, and holds all of its
activations only while it runs: in the forward, and again before its backward. So many
short runs save many outputs, and a long run holds much while it is recomputed::

    calls      0 1 2 | 3 4 5 | 6 7 8      segments=3
    saved          2       5       8      outputs of runs, until their backward
    recomputed             3 4 5          activations of the one run under way
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fsfunc.comm.tracebacks import api_boundary
from fsfunc.tracing.programs import Program, Spec, TracedCall

Number = int | float


@dataclass(frozen=True)
class Points:
    """The consecutive calls that are recomputed together.

    Args:
        runs: (first, one past the last) call of each run, in order; a call in none of
            them is not recomputed.
        peak: the bytes at the fullest moment, in the unit of ``activations``.
        seconds: the time that is computed again, in the unit of ``seconds``.
        names: the names of all calls, if a program was given.
    """

    runs: tuple[tuple[int, int], ...]
    peak: Number
    seconds: Number
    names: tuple[str, ...] = ()

    @property
    def calls(self) -> tuple[int, ...]:
        """The numbers of the calls that are recomputed: for ``remat_calls``."""
        return tuple(i for start, stop in self.runs for i in range(start, stop))

    @property
    def splits(self) -> list[int]:
        """Calls where a run begins right after another: FairScale's reset points."""
        ends = {stop for _, stop in self.runs}
        return [start for start, _ in self.runs if start in ends]

    def __str__(self) -> str:
        runs = []
        for start, stop in self.runs:
            names = dict.fromkeys(self.names[start:stop])
            shown = f"{start}-{stop - 1}" if stop - start > 1 else f"{start}"
            runs.append(f"{shown} ({', '.join(names)})" if names else shown)
        which = ", ".join(runs) or "nothing"
        return f"recompute {which}: peak {self.peak:g}, {self.seconds:g} more"


@api_boundary
def recompute_points(
    activations: Sequence[Number] | Program,
    kept: Sequence[Number] | None = None,
    *,
    segments: int | None = None,
    bound: Number | None = None,
    seconds: Sequence[Number] | None = None,
    longest: int | None = None,
) -> Points:
    """Returns the runs of unit calls to recompute, for the least memory or time.

    ``segments=k``: every call is recomputed, in at most k runs, such that the peak is
    least. With ``kept`` all 0, as by default, the peak is the largest sum of
    activations of a run: FairScale's ``find_best_reset_points``.

    ``bound=b``: the peak stays within b, and what is recomputed takes the least time;
    of equals, the least peak. Any call may also be left out of the runs.

    The peak is the largest of: a run's activations, with what the calls before it
    saved; and what all calls have saved at the end. (A call in no run saves its
    ``activations``, a run the ``kept`` of its last call.) Parameters, gradients and the
    batch are not in it.

    Args:
        activations: the bytes that each call saves for its backward, with its output.
            Or ``program(loss_fn, params, batch)``, from which all lists are then taken.
        kept: the bytes of each call's output; by default 0.
        segments, bound: one of them.
        seconds: of each call's forward, in any unit; by default 1, of a program its
            FLOPs.
        longest: the most calls that a run has. 1 where calls are recomputed one by one,
            as ``remat`` and ``remat_calls`` do; a longer run is one unit around these
            calls: ``run = ff.unit(lambda ps, x: block(ps[1], block(ps[0], x)))``.

    Returns:
        :class:`Points`. ``remat_calls(step, points.calls)`` applies runs of one call.

    Raises:
        ValueError: lists of different lengths, negative or infinite numbers, both of
            ``segments`` and ``bound`` or neither, more than ``longest`` allows; a bound
            that no choice keeps to, with the least that there is.

    Cost: O(n^2 k) for segments. For a bound O(n^2 s), s the number of different best
    pairs of peak and time, about n where calls are alike (in general it is a knapsack).
    Both are exact.

    Source: Chen et al. (2016), Training deep nets with sublinear memory cost, for the
    problem; FairScale's ``suggest_checkpoint_location``.

    >>> recompute_points([1, 2, 3, 4, 5, 6], segments=3)
    Points(runs=((0, 3), (3, 5), (5, 6)), peak=9, seconds=6, names=())
    >>> recompute_points([10, 10, 10, 10], [1, 1, 1, 1], bound=33).calls
    (2,)
    """
    names: tuple[str, ...] = ()
    if isinstance(activations, Program):
        calls = activations.calls
        if kept is not None:
            raise ValueError("kept comes from the program: leave it out")
        names = tuple(call.name for call in calls)
        kept = [_output_bytes(call) for call in calls]
        seconds = [call.flops for call in calls] if seconds is None else seconds
        activations = [call.activations for call in calls]
    sizes = list(activations)
    chain = _Chain(
        _checked("activations", sizes, len(sizes)),
        _checked("kept", [0] * len(sizes) if kept is None else kept, len(sizes)),
        _checked(
            "seconds", [1] * len(sizes) if seconds is None else seconds, len(sizes)
        ),
        len(sizes) if longest is None else longest,
    )
    if not isinstance(chain.longest, int) or chain.longest < min(1, len(sizes)):
        raise ValueError(f"longest={longest!r}: a run has at least one call")
    if (segments is None) == (bound is None):
        raise ValueError("give one of segments= and bound=: they are two questions")
    if bound is None:
        return _least_peak(chain, segments, names)
    return _least_time(chain, bound, names)


class _Chain(NamedTuple):
    """The calls, one after another: bytes saved, bytes of outputs, seconds of each.

    Args:
        longest: the most calls that a run may have.
    """

    sizes: list[Number]
    output_sizes: list[Number]
    seconds: list[Number]
    longest: int


def _checked(name: str, values: Sequence[Number], n: int) -> list[Number]:
    if len(values) != n:
        raise ValueError(f"{name} has {len(values)} numbers for {n} calls")
    for i, value in enumerate(values):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name}[{i}] = {value!r}: it is finite and not below 0")
    return list(values)


def _output_bytes(call: TracedCall) -> int:
    return sum(x.nbytes for x in call.outputs.leaves if isinstance(x, Spec))


# Both searches go from the last call to the first. While later calls run, earlier ones
# hold what they saved: so the peak of a first run and of what follows it is
# max(the run's activations, its output + the peak of the rest), whatever came before.


def _least_peak(chain: _Chain, segments: int | None, names: tuple[str, ...]) -> Points:
    """Returns the least peak if everything is recomputed, in ``segments`` runs."""
    n = len(chain.sizes)
    if not isinstance(segments, int) or isinstance(segments, bool) or segments < 1:
        raise ValueError(f"segments={segments!r}: there is at least one")
    if segments * chain.longest < n:
        raise ValueError(
            f"{segments} segments of at most {chain.longest} calls do not hold {n}: "
            f"give {math.ceil(n / chain.longest)} segments or more"
        )
    # least[i]: the least peak of the calls from i on, in at most so many runs as rounds
    # of the loop; steps: by round and i, where the first of these runs ends.
    least: list[Number] = [math.inf] * n + [0]
    steps: list[list[int]] = []
    for _ in range(min(segments, n)):
        next_least: list[Number] = [math.inf] * n + [0]
        run_ends = [0] * n
        for i in range(n):
            total: Number = 0
            for j in range(i, min(n, i + chain.longest)):
                total += chain.sizes[j]
                peak = max(total, chain.output_sizes[j] + least[j + 1])
                if peak < next_least[i]:
                    next_least[i], run_ends[i] = peak, j + 1
        steps.append(run_ends)
        least = next_least
    runs, i = [], 0
    for run_ends in reversed(steps):
        if i < n:
            runs.append((i, run_ends[i]))
            i = run_ends[i]
    return Points(tuple(runs), least[0], sum(chain.seconds), names)


class _Way(NamedTuple):
    """A choice for the calls from some number on.

    Args:
        peak, seconds: what it costs.
        stop: one past the last call of its first run.
        is_recomputed: whether that run is recomputed.
        rest: the choice for the calls from ``stop`` on.
    """

    peak: Number
    seconds: Number
    stop: int
    is_recomputed: bool
    rest: _Way | None


def _least_time(chain: _Chain, bound: Number, names: tuple[str, ...]) -> Points:
    """Returns the choice of the least time that keeps to the bound."""
    ways = _ways(chain, bound)
    if not ways:
        least = _ways(chain, math.inf)[0]
        raise ValueError(
            f"nothing keeps the peak within {bound:g}: the least there is, is "
            f"{least.peak:g}, {least.peak - bound:g} too much"
        )
    best = ways[-1]
    runs, start, way = [], 0, best
    while way is not None and start < len(chain.sizes):
        if way.is_recomputed:
            runs.append((start, way.stop))
        start, way = way.stop, way.rest
    return Points(tuple(runs), best.peak, best.seconds, names)


def _ways(chain: _Chain, bound: Number) -> list[_Way]:
    """Returns all best pairs of peak and time within the bound, by growing peak."""
    n = len(chain.sizes)
    fronts: list[list[_Way]] = [[] for _ in range(n)] + [[_Way(0, 0, n, False, None)]]
    for i in reversed(range(n)):
        ways = []
        for later in fronts[i + 1]:
            peak = chain.sizes[i] + later.peak
            ways.append(_Way(peak, later.seconds, i + 1, False, later))
        total, recomputed_seconds = 0, 0
        for j in range(i, min(n, i + chain.longest)):
            total += chain.sizes[j]
            recomputed_seconds += chain.seconds[j]
            if total > bound:
                break
            # Of ways whose peak is below the run's own, all give that peak: only the
            # fastest counts.
            later_ways = fronts[j + 1]
            first = bisect_left(
                later_ways, total - chain.output_sizes[j], key=lambda w: w.peak
            )
            for later in later_ways[max(0, first - 1) :]:
                peak = max(total, chain.output_sizes[j] + later.peak)
                ways.append(
                    _Way(peak, recomputed_seconds + later.seconds, j + 1, True, later)
                )
        fronts[i] = _front(way for way in ways if way.peak <= bound)
    return fronts[0]


def _front(ways: Iterable[_Way]) -> list[_Way]:
    """Returns the ways that no other beats in peak and time, by growing peak."""
    best: list[_Way] = []
    for way in sorted(ways, key=lambda w: (w.peak, w.seconds)):
        if not best or way.seconds < best[-1].seconds:
            best.append(way)
    return best
