"""Comparison of two steps' logs, value by value in the order in which a step computes.

``first_difference`` (``parting.py``) observes both steps, and asks a ``LogComparison``
first whether their results differ, and then for the first value before that differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.testing.alignment import Near, Verdict, compare_values
from fsfunc.testing.comparing import find_difference
from fsfunc.testing.finite_field import is_exact, values
from fsfunc.testing.observed_runs import BatchPart, RunLog, UnitRun, ValueKey, observe
from fsfunc.testing.places import (
    FirstDifference,
    describe_unit_call,
    place_in_unit,
    place_of_value,
)
from fsfunc.testing.step_runs import StepCaller, rows_of_rank
from fsfunc.tree.types import Leaf, PyTree

Check = Callable[[], tuple[Verdict, FirstDifference]]


@dataclass(frozen=True)
class LogComparison:
    """The logs of two steps, of which ``ours`` is taken to be right.

    Args:
        step: the step that ``ours`` is of.
        caller: what called both.
        state, batch: the arguments of both.
        ours, theirs: the logs.
        in_float64: the log of ``step`` in float64; None in exact runs. How far values
            may be apart is measured by it.
        logs_of_parts: logs of ``step`` on the rows of one part, by call and part, made
            when they are first needed.
    """

    step: Callable[..., Any]
    caller: StepCaller
    state: PyTree
    batch: Sequence[PyTree]
    ours: RunLog
    theirs: RunLog
    in_float64: RunLog | None
    logs_of_parts: dict[tuple[int, BatchPart], RunLog] = field(default_factory=dict)

    # What the calls return

    def first_returned(self) -> FirstDifference | None:
        """Returns the first leaf that differs in the results of the calls, or None."""
        for call in range(self.caller.count):
            expected = self.ours.outputs[0][call]
            paths, leaves, _ = tree.flatten_with_paths(expected)
            for outputs in self.theirs.outputs:
                tree.check_same_structure(expected, outputs[call])
            leaves_by_rank = [
                tree.leaves(outputs[call]) for outputs in self.theirs.outputs
            ]
            float64_leaves: Any = [[None] * len(paths)]
            if self.in_float64 is not None:
                float64_leaves = [
                    tree.leaves(outputs[call]) for outputs in self.in_float64.outputs
                ]
            for i, (path, x) in enumerate(zip(paths, leaves, strict=True)):
                is_near = self._make_is_near([(x, float64_leaves[0][i])])
                ranks = [
                    rank
                    for rank, their_leaves in enumerate(leaves_by_rank)
                    if not _leaves_agree(x, their_leaves[i], is_near)
                ]
                if ranks:
                    phase = "reduction" if self._is_reduced(call, x) else "update"
                    value = (
                        f"{path!r} of what the step returns" if path else "its value"
                    )
                    is_one_rank = len(ranks) == 1 < len(leaves_by_rank)
                    rank = ranks[0] if is_one_rank else None
                    return FirstDifference(call, phase, None, (), value, path, rank)
        return None

    def _is_reduced(self, call: int, x: Leaf) -> bool:
        """Returns whether a result is a loss or gradient, returned as it is."""
        return isinstance(x, Tensor) and any(
            y.shape == x.shape and _equal(x, y)
            for (call_of_result, *_), by_rank in self.ours.gradient_results.items()
            for y in by_rank.values()
            if call_of_result == call
        )

    # Inside

    def first(self, returned: FirstDifference) -> FirstDifference:
        """Returns the first difference before ``returned``, or ``returned`` itself.

        It also counts what agreed, and what could not be compared.
        """
        equal = uncompared = 0
        for check in self._ordered_checks(returned.call):
            verdict, place = check()
            if verdict.agrees is False:
                place = _with_rank_and_microbatch(
                    replace(place, seen=True), verdict.wrong
                )
                on_one_device = self.theirs.mesh is None  # there is no rank to name
                returned = replace(place, rank=None) if on_one_device else place
                break
            equal += bool(verdict.agrees)
            uncompared += verdict.agrees is None
        gradient_calls = {
            segment
            for call, segment, _ in self.ours.gradient_results
            if call == returned.call
        }
        return replace(
            returned,
            compared=equal,
            uncompared=uncompared,
            seen=returned.seen or bool(equal or uncompared),
            gradient_calls=len(gradient_calls),
            unmatched=self._describe_unmatched(returned.call),
        )

    def _describe_unmatched(self, last_call: int) -> str:
        """Returns a sentence on the first unit call that only one step makes, or ""."""
        first, second = (
            {run for run in log.unit_runs if run.call <= last_call}
            for log in (self.ours, self.theirs)
        )
        if not first ^ second:
            return ""
        run = min(first ^ second)
        ordinal = "first" if run in first else "second"
        unit_call = describe_unit_call(run.path, run.numbers)
        return f"{unit_call} was seen in the {ordinal} step alone"

    def _ordered_checks(self, last: int) -> Iterator[Check]:
        """Yields the checks of all values up to call ``last``, in order."""
        checks: list[tuple[tuple[Any, ...], Check]] = []
        for key in self.ours.values.keys() & self.theirs.values.keys():
            checks.append(
                (_position_in_call(key), lambda key=key: self._compare_value(key))
            )
        for log in (self.ours, self.theirs):
            for run in log.recomputed:
                by_part = log.recomputed[run].values()
                units_before = min(
                    unlike.units_before
                    for by_rank in by_part
                    for unlike in by_rank.values()
                )
                position = (*run.numbers, units_before - 0.5)  # between units inside
                order = run.call, run.segment, 1, run.repeat, position
                report = lambda run=run, log=log: self._report_recompute(run, log)  # noqa: E731
                checks.append((order, report))
        for number, key in enumerate(self.ours.gradient_results):
            if key in self.theirs.gradient_results:
                order = *key[:2], 3, number
                checks.append(
                    (order, lambda key=key: self._compare_gradient_result(key))
                )
        for (call, *_), check in sorted(checks, key=lambda pair: pair[0]):
            if call <= last:
                yield check

    def _compare_value(self, key: ValueKey) -> tuple[Verdict, FirstDifference]:
        """Compares a value of a unit."""
        pairs = [
            (
                observed.value,
                float64_value.value
                if (float64_value := self._float64_value(key, part, rank))
                else None,
            )
            for part, by_rank in self.ours.values[key].items()
            for rank, observed in by_rank.items()
        ]
        is_near = self._make_is_near(pairs)
        verdict = compare_values(key, self.ours, self.theirs, is_near)
        if verdict.needs_parts:
            verdict = self._compare_parts(key, is_near)
        return verdict, place_of_value(key)

    def _report_recompute(
        self, run: UnitRun, log: RunLog
    ) -> tuple[Verdict, FirstDifference]:
        """Reports a recompute that computed something else than its forward."""
        by_part = log.recomputed[run]
        parts_and_ranks = [
            (part, rank)
            for part, by_rank in sorted(by_part.items())
            for rank in by_rank
        ]
        part, rank = parts_and_ranks[0]
        unlike = by_part[part][rank]
        is_argument, is_inner = unlike.units_before < 0, len(run.path) > 1
        value = unlike.name if is_argument else f"what {unlike.name} gives"
        # An inner unit's input is made by the code of the unit around it.
        if is_argument and is_inner and unlike.name.startswith("input"):
            value = f"{describe_unit_call(run.path, run.numbers)}'s {unlike.name}"
            run = run._replace(path=run.path[:-1], numbers=run.numbers[:-1])
        value += ", not as in the forward"
        return Verdict(False, parts_and_ranks), place_in_unit(
            run, "recompute", value, ""
        )

    def _compare_gradient_result(
        self, key: tuple[int, int, str | None]
    ) -> tuple[Verdict, FirstDifference]:
        """Compares the loss, or a leaf of the gradients, of a gradient call."""
        our_results = self.ours.gradient_results[key]
        their_results = self.theirs.gradient_results[key]
        call, segment, leaf = key
        log = self.in_float64
        float64_values = {} if log is None else log.gradient_results.get(key, {})
        is_near = self._make_is_near(
            [(x, float64_values.get(rank)) for rank, x in our_results.items()]
        )
        candidates = (
            _whole_candidates(our_results, self.ours, is_near),
            _whole_candidates(their_results, self.theirs, is_near),
        )
        value = "the loss" if leaf is None else f"the gradient of {leaf!r}"
        place = FirstDifference(
            call, "reduction", None, (), value if leaf != "" else "the gradient",
            leaf or "", segment=segment,
        )  # fmt: skip
        if any(
            is_near(x, y)
            for x in candidates[0]
            for y in candidates[1]
            if x.shape == y.shape
        ):
            return Verdict(), place
        our_first = next(iter(our_results.values()))
        wrong = [
            rank
            for rank, y in their_results.items()
            if y.shape == our_first.shape and not is_near(our_first, y)
        ]
        if len(wrong) == 1 < len(their_results):
            place = replace(place, rank=wrong[0])
        return Verdict(False), place

    # Contributions to means

    def _compare_parts(self, key: ValueKey, is_near: Near) -> Verdict:
        """Compares each part of theirs with what our step makes of its rows alone."""
        if self.ours.mesh is not None:
            return Verdict(False)
        gradient_call = key.run.call, key.run.segment
        wrong, is_weighted = [], gradient_call in self.theirs.weighted_losses
        row_counts = [len(x) for x in tree.leaves(self.batch) if _is_cut(x)]
        if any(n % part.count for part in self.theirs.values[key] for n in row_counts):
            return Verdict(None)  # unequal parts are weighted by their rows
        for part, by_rank in sorted(self.theirs.values[key].items()):
            value_alone = self._value_of_part(key, part, min(by_rank))
            for rank, observed in by_rank.items():
                if value_alone is None:
                    return Verdict(False)
                x = self.theirs.contribution(key, observed)
                if key.is_cotangent and not is_weighted:
                    x = x * part.count  # from its share of the mean to its own mean
                if x.shape != value_alone.shape or not is_near(value_alone, x):
                    wrong.append((part, rank))
        # Right parts whose mean is wrong: the mean is at fault. A value that is no mean
        # was not compared by this.
        if wrong or self.theirs.takes_mean(key):
            return Verdict(False, wrong)
        return Verdict(None)

    def _value_of_part(
        self, key: ValueKey, part: BatchPart, rank: int
    ) -> Tensor | None:
        """Returns our step's value from the rows of one part, if the unit runs then."""
        state, caller = self.state, self.caller
        if caller.next_state is not None and key.run.call:
            state = caller.next_state(self.ours.outputs[0][key.run.call - 1])
        batch, mesh = self.batch, self.theirs.mesh
        if mesh is not None and self.theirs.axes:
            batch = rows_of_rank(batch, mesh, self.theirs.axes, rank)
        index, count = part.microbatch
        if (call_and_part := (key.run.call, part)) not in self.logs_of_parts:
            batch = tree.map(
                lambda x: x.tensor_split(count)[index] if _is_cut(x) else x, batch
            )
            self.logs_of_parts[call_and_part] = observe(
                self.step, None, (), StepCaller(1), state, batch, self.theirs.budget
            )
        key_alone = key._replace(run=key.run._replace(call=0))
        by_part = self.logs_of_parts[call_and_part].values.get(key_alone, {})
        return next((v.value for r in by_part.values() for v in r.values()), None)

    # Nearness

    def _float64_value(self, key: ValueKey, part: BatchPart, rank: int) -> Any:
        if self.in_float64 is None:
            return None
        return self.in_float64.values.get(key, {}).get(part, {}).get(rank)

    def _make_is_near(self, pairs: Sequence[tuple[Leaf, Leaf]]) -> Near:
        """Returns a function that tells whether a value is near to ours.

        Args:
            pairs: our values, each with that of the run in float64, or None.
        """
        if self.in_float64 is None:
            return _equal
        tolerance = 0.0
        for x, y in pairs:
            if isinstance(x, Tensor) and x.numel() and _rounds(x):
                size = float(x.detach().abs().max())
                tolerance = max(tolerance, _FACTOR * torch.finfo(x.dtype).eps * size)
                if isinstance(y, Tensor):
                    error = _FACTOR * float((x.detach() - y.detach()).abs().max())
                    tolerance = max(tolerance, min(error, _MAX_ERROR * size))
        tolerance = tolerance if math.isfinite(tolerance) else 0.0

        def near(x: Tensor, y: Tensor) -> bool:
            if not (_rounds(x) and _rounds(y)):
                return torch.equal(x, y)
            kind = torch.complex128 if x.is_complex() else torch.float64
            x, y = x.to(kind), y.to(kind)
            return torch.allclose(x, y, 0.0, tolerance, equal_nan=True)

        return near


def _with_rank_and_microbatch(
    place: FirstDifference, wrong: Sequence[tuple[BatchPart, int]]
) -> FirstDifference:
    """Adds the rank, and the microbatch, if all wrong parts have the same one."""
    ranks = {rank for _, rank in wrong}
    microbatches = {part.microbatch for part, _ in wrong}
    if len(ranks) == 1:
        place = replace(place, rank=min(ranks))
    if len(microbatches) == 1 and (microbatch := min(microbatches))[1] > 1:
        place = replace(place, microbatch=microbatch)
    return place


def _rounds(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


_FACTOR = 16.0  # times the rounding error: kernels of other shapes add in other orders
_MAX_ERROR = 1e-3  # of the largest number: beyond, the float64 run took another path


def _equal(x: Tensor, y: Tensor) -> bool:
    if is_exact() and x.is_floating_point() and y.is_floating_point():
        x, y = values(x), values(y)
    with _torch.beneath_all_modes():
        return torch.equal(x, y)


def _leaves_agree(x: Leaf, y: Leaf, is_near: Near) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.shape == y.shape and is_near(x, y)
    return find_difference(y, x) is None


def _is_cut(x: Leaf) -> bool:
    """Returns whether a leaf of the batch is cut into rows."""
    return isinstance(x, Tensor) and x.ndim > 0


def _whole_candidates(
    by_rank: dict[int, Tensor], log: RunLog, is_near: Near
) -> list[Tensor]:
    """Returns what the ranks' results of a gradient call may be for the whole batch."""
    by_place = {
        log.rows_index(rank)[0]: x for rank, x in sorted(by_rank.items(), reverse=True)
    }
    xs = [x for _, x in sorted(by_place.items())]
    first, candidates = xs[0], []
    if all(x.shape == first.shape and is_near(first, x) for x in by_rank.values()):
        candidates.append(first)
    if len(xs) > 1:
        same_shape = all(x.shape == first.shape for x in xs)
        if not log.averages_ranks and same_shape and first.is_floating_point():
            candidates.append(torch.stack(xs).mean(0))  # a step that averages by itself
        if first.ndim and all(x.shape[1:] == first.shape[1:] for x in xs):
            candidates.append(torch.cat(xs))
    return candidates


_KINDS = ("parameter", "input", "output", "returned", "loss")


def _position_in_call(key: ValueKey) -> tuple[Any, ...]:
    """Returns the sort key of a value among all of a call of the step.

    A unit's arguments come before all values inside it, and its results after them. In
    the backward it is the other way round.
    """
    run, kinds = key.run, _KINDS.index(key.kind)
    end = math.inf if kinds > 1 else -1
    position = (*run.numbers, end)
    segment = run.call, run.segment
    if key.is_cotangent:
        return *segment, 2, -run.repeat, tuple(-n for n in position), kinds, key.leaf
    return *segment, 0, run.repeat, position, kinds, key.leaf
