"""What was seen of two steps, compared in the order in which a step computes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.testing.alignment import Near, Verdict, compared
from fsfunc.testing.comparing import difference
from fsfunc.testing.finite_field import is_exact, values
from fsfunc.testing.observed_runs import Part, RunLog, Slot, UnitRun, observe
from fsfunc.testing.places import (
    FirstDifference,
    place_in_unit,
    place_of_slot,
    unit_call,
)
from fsfunc.testing.step_runs import Calls, rows_of

Check = Callable[[], tuple[Verdict, FirstDifference]]


@dataclass(frozen=True)
class Compared:
    """What was seen of two steps.

    Args:
        step: the step that ``ours`` is of, and ``how`` it was called.
        state, batch: what it was called with.
        wide: the same in float64, where runs are not exact.
        alone: what is seen of ``step`` on a part's rows, by call, once it is asked.
    """

    step: Callable[..., Any]
    how: Calls
    state: Any
    batch: Any
    ours: RunLog
    theirs: RunLog
    wide: RunLog | None
    alone: dict[tuple[int, Part], RunLog] = field(default_factory=dict)

    # What the calls return

    def returned(self) -> FirstDifference | None:
        """The first leaf that differs in what the calls return, by their number."""
        for k in range(self.how.count):
            expected = self.ours.outs[0][k]
            paths, leaves, _ = tree.flatten_with_paths(expected)
            for out in self.theirs.outs:
                tree.check_same_structure(expected, out[k])
            found = [tree.leaves(out[k]) for out in self.theirs.outs]
            wides: Any = [[None] * len(paths)]
            if self.wide is not None:
                wides = [tree.leaves(out[k]) for out in self.wide.outs]
            for i, (path, x) in enumerate(zip(paths, leaves, strict=True)):
                near = self._near([(x, wides[0][i])])
                ranks = [r for r, ys in enumerate(found) if not _same(x, ys[i], near)]
                if ranks:
                    phase = "reduction" if self._is_reduced(k, x) else "update"
                    value = (
                        f"{path!r} of what the step returns" if path else "its value"
                    )
                    alone = len(ranks) == 1 < len(found)
                    rank = ranks[0] if alone else None
                    return FirstDifference(k, phase, None, (), value, path, rank)
        return None

    def _is_reduced(self, call: int, x: Any) -> bool:
        """True of a loss or a gradient that a step returns as it is."""
        return isinstance(x, Tensor) and any(
            y.shape == x.shape and _equal(x, y)
            for (k, *_), by_rank in self.ours.reduced.items()
            for y in by_rank.values()
            if k == call
        )

    # Inside

    def first(self, returned: FirstDifference) -> FirstDifference:
        """The first difference before one in what a call returns, or that one."""
        equal = uncompared = 0
        for check in self._in_order(returned.call):
            verdict, said = check()
            if verdict.agrees is False:
                said = _told(replace(said, seen=True), verdict.wrong)
                alone = self.theirs.mesh is None  # there is no rank to name
                returned = replace(said, rank=None) if alone else said
                break
            equal += bool(verdict.agrees)
            uncompared += verdict.agrees is None
        gradient_calls = {at for k, at, _ in self.ours.reduced if k == returned.call}
        return replace(
            returned,
            compared=equal,
            uncompared=uncompared,
            seen=returned.seen or bool(equal or uncompared),
            gradient_calls=len(gradient_calls),
            unmatched=self._unmatched(returned.call),
        )

    def _unmatched(self, last: int) -> str:
        """Says which unit call is the first that was seen in one step alone."""
        first, second = (
            {run for run in side.called if run.call <= last}
            for side in (self.ours, self.theirs)
        )
        if not first ^ second:
            return ""
        run = min(first ^ second)
        which = "first" if run in first else "second"
        return f"{unit_call(run.path, run.numbers)} was seen in the {which} step alone"

    def _in_order(self, last: int) -> Iterator[Check]:
        checks: list[tuple[Any, Check]] = []
        for slot in self.ours.values.keys() & self.theirs.values.keys():
            checks.append((_order(slot), lambda slot=slot: self._value(slot)))
        for side in (self.ours, self.theirs):
            for run in side.recomputed:
                by_part = side.recomputed[run].values()
                after = min(made.after for by in by_part for made in by.values())
                place = (*run.numbers, after - 0.5)  # between units within
                key = run.call, run.segment, 1, run.time, place
                again = lambda run=run, side=side: self._recompute(run, side)  # noqa: E731
                checks.append((key, again))
        for n, key in enumerate(self.ours.reduced):
            if key in self.theirs.reduced:
                order = *key[:2], 3, n
                checks.append((order, lambda key=key: self._reduced(key)))
        for (call, *_), check in sorted(checks, key=lambda pair: pair[0]):
            if call <= last:
                yield check

    def _value(self, slot: Slot) -> tuple[Verdict, FirstDifference]:
        pairs = [
            (
                seen.value,
                wide.value if (wide := self._wide_of(slot, part, rank)) else None,
            )
            for part, by_rank in self.ours.values[slot].items()
            for rank, seen in by_rank.items()
        ]
        near = self._near(pairs)
        verdict = compared(slot, self.ours, self.theirs, near)
        if verdict.of_mean:
            verdict = self._of_parts(slot, near)
        return verdict, place_of_slot(slot)

    def _recompute(self, run: UnitRun, side: RunLog) -> tuple[Verdict, FirstDifference]:
        by_part = side.recomputed[run]
        where = [(p, r) for p, by_rank in sorted(by_part.items()) for r in by_rank]
        part, rank = where[0]
        made = by_part[part][rank]
        argument, outer = made.after < 0, len(run.path) > 1
        value = made.name if argument else f"what {made.name} gives"
        # It is made, within another unit, by the code of that one.
        if argument and outer and made.name.startswith("input"):
            value = f"{unit_call(run.path, run.numbers)}'s {made.name}"
            run = run._replace(path=run.path[:-1], numbers=run.numbers[:-1])
        value += ", not as in the forward"
        # Parts that were recomputed as they were computed are not among them.
        return Verdict(False, where), place_in_unit(run, "recompute", value, "")

    def _reduced(self, key: Any) -> tuple[Verdict, FirstDifference]:
        a, b = self.ours.reduced[key], self.theirs.reduced[key]
        call, segment, leaf = key
        wide = {} if self.wide is None else self.wide.reduced.get(key, {})
        near = self._near([(x, wide.get(r)) for r, x in a.items()])
        ways = _averages(a, self.ours, near), _averages(b, self.theirs, near)
        value = "the loss" if leaf is None else f"the gradient of {leaf!r}"
        said = FirstDifference(
            call, "reduction", None, (), value if leaf != "" else "the gradient",
            leaf or "", segment=segment,
        )  # fmt: skip
        if any(near(x, y) for x in ways[0] for y in ways[1] if x.shape == y.shape):
            return Verdict(), said
        first = next(iter(a.values()))
        wrong = [
            r for r, y in b.items() if y.shape == first.shape and not near(first, y)
        ]
        if len(wrong) == 1 < len(b):
            said = replace(said, rank=wrong[0])
        return Verdict(False), said

    # Contributions to means

    def _of_parts(self, slot: Slot, near: Near) -> Verdict:
        """Compares each part of theirs with what ``a`` has of its rows alone."""
        if self.ours.mesh is not None:
            return Verdict(False)
        where = slot.run.call, slot.run.segment
        wrong, weighted = [], where in self.theirs.weighted
        rows = [len(x) for x in tree.leaves(self.batch) if _is_cut(x)]
        if any(n % part.count for part in self.theirs.values[slot] for n in rows):
            return Verdict(None)  # unequal parts have other weights than their means
        for part, by_rank in sorted(self.theirs.values[slot].items()):
            own = self._alone(slot, part, min(by_rank))
            for rank, seen in by_rank.items():
                if own is None:
                    return Verdict(False)
                x = self.theirs.contributed(slot, seen)
                if slot.backward and not weighted:
                    x = x * part.count  # to its own mean
                if x.shape != own.shape or not near(own, x):
                    wrong.append((part, rank))
        if wrong or self.theirs.takes_mean(slot):  # that of a sum is none of its parts'
            return Verdict(False, wrong)
        return Verdict(None)

    def _alone(self, slot: Slot, part: Part, rank: int) -> Tensor | None:
        """The value of a slot that ``a`` has of the rows of one part, if it runs."""
        state, how = self.state, self.how
        if how.goes_on is not None and slot.run.call:
            state = how.goes_on(self.ours.outs[0][slot.run.call - 1])
        batch, mesh = self.batch, self.theirs.mesh
        if mesh is not None and self.theirs.axes:
            batch = rows_of(batch, mesh, self.theirs.axes, rank)
        index, count = part.micro
        if (key := (slot.run.call, part)) not in self.alone:
            batch = tree.map(
                lambda x: x.tensor_split(count)[index] if _is_cut(x) else x, batch
            )
            self.alone[key] = observe(
                self.step, None, (), Calls(1), state, batch, self.theirs.kept
            )
        own = slot._replace(run=slot.run._replace(call=0))
        by_part = self.alone[key].values.get(own, {})
        return next((v.value for r in by_part.values() for v in r.values()), None)

    # Nearness

    def _wide_of(self, slot: Slot, part: Part, rank: int) -> Any:
        if self.wide is None:
            return None
        return self.wide.values.get(slot, {}).get(part, {}).get(rank)

    def _near(self, pairs: Sequence[tuple[Any, Any]]) -> Near:
        """What is near to ours, given (value, value of the run in float64)."""
        if self.wide is None:
            return _equal
        slack = 0.0
        for x, y in pairs:
            if isinstance(x, Tensor) and x.numel() and _rounds(x):
                size = float(x.detach().abs().max())
                slack = max(slack, _FACTOR * torch.finfo(x.dtype).eps * size)
                if isinstance(y, Tensor):
                    gap = _FACTOR * float((x.detach() - y.detach()).abs().max())
                    slack = max(slack, min(gap, _MOST * size))
        slack = slack if math.isfinite(slack) else 0.0

        def near(x: Tensor, y: Tensor) -> bool:
            if not (_rounds(x) and _rounds(y)):
                return torch.equal(x, y)
            kind = torch.complex128 if x.is_complex() else torch.float64
            x, y = x.to(kind), y.to(kind)
            return torch.allclose(x, y, 0.0, slack, equal_nan=True)

        return near


def _told(said: FirstDifference, wrong: Sequence[tuple[Part, int]]) -> FirstDifference:
    """With the rank, and the microbatch, where it is one."""
    ranks, micro = {r for _, r in wrong}, {p.micro for p, _ in wrong}
    if len(ranks) == 1:
        said = replace(said, rank=min(ranks))
    if len(micro) == 1 and (one := min(micro))[1] > 1:
        said = replace(said, microbatch=one)
    return said


def _rounds(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


_FACTOR = 16.0  # kernels of other shapes add in other orders
_MOST = 1e-3  # of the largest number; further off it is another one, drawn anew, say


def _equal(x: Tensor, y: Tensor) -> bool:
    if is_exact() and x.is_floating_point() and y.is_floating_point():
        x, y = values(x), values(y)
    with _torch.beneath_all_modes():
        return torch.equal(x, y)


def _same(x: Any, y: Any, near: Near) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.shape == y.shape and near(x, y)
    return difference(y, x) is None


def _is_cut(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim > 0


def _averages(by_rank: dict[int, Tensor], of: RunLog, near: Near) -> list[Tensor]:
    """What the results of a gradient call on ranks may be of the whole batch."""
    by_place = {
        of.place(rank)[0]: x for rank, x in sorted(by_rank.items(), reverse=True)
    }
    xs = [x for _, x in sorted(by_place.items())]
    first, ways = xs[0], []
    if all(x.shape == first.shape and near(first, x) for x in by_rank.values()):
        ways.append(first)
    if len(xs) > 1:
        even = all(x.shape == first.shape for x in xs)
        if not of.averages and even and first.is_floating_point():
            ways.append(torch.stack(xs).mean(0))  # a step that averages by itself
        if first.ndim and all(x.shape[1:] == first.shape[1:] for x in xs):
            ways.append(torch.cat(xs))
    return ways


_KINDS = ("parameter", "input", "output", "returned", "loss")


def _order(slot: Slot) -> tuple[Any, ...]:
    """The place of a value among all of a call of the step.

    What a unit is given comes before, and what it returns after, all within it; in the
    backward it is the other way round.
    """
    run, kinds = slot.run, _KINDS.index(slot.kind)
    end = math.inf if kinds > 1 else -1
    place = (*run.numbers, end)
    before = run.call, run.segment
    if slot.backward:
        return *before, 2, -run.time, tuple(-n for n in place), kinds, slot.leaf
    return *before, 0, run.time, place, kinds, slot.leaf
