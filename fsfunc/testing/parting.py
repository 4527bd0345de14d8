"""first_difference: the first value at which two steps part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.mesh import Axis, Mesh, axis_names
from fsfunc.printing.tables import Printed
from fsfunc.sharded.leaf import is_sharded
from fsfunc.state.layout_rules import LayoutRules
from fsfunc.testing.alignment import Near, Verdict, compared
from fsfunc.testing.finite_field import exact as exactly
from fsfunc.testing.finite_field import is_exact, residues, values
from fsfunc.testing.observed_runs import Observed, Part, Slot, UnitRun, observe
from fsfunc.testing.step_runs import Calls, batch_axes, rows_of, title


@dataclass(frozen=True, repr=False)
class FirstDifference(Printed):
    """Where two steps part; it prints as a sentence.

    Attributes:
        call: the call of the step, from 0.
        phase: forward, recompute, backward, reduction (of a gradient call's loss and
            gradients) or update (all that the step makes of them).
        unit, numbers: the unit, as ``outer/inner``, and its call's number in each unit
            around it; None and () outside of units.
        value: what of it differs.
        leaf: its path.
        rank: where it differs; None on all ranks, or where it is not known.
        microbatch: (index, count) of the rank's own; None as above.
        uncompared: the values before it whose layout on the ranks is not known.
    """

    call: int
    phase: str
    unit: str | None
    numbers: tuple[int, ...]
    value: str
    leaf: str
    rank: int | None = None
    microbatch: tuple[int, int] | None = None
    uncompared: int = 0

    def pieces(self, width: int | None) -> list[str]:
        where = f"in call {self.call + 1} of the step: " if self.call else ""
        if self.unit is not None:
            where += _named([self.unit], self.numbers) + ", "
        said = f"{where}{self.phase}, {self.value}"
        if self.rank is not None:
            said += f", rank {self.rank}"
        if self.microbatch is not None:
            said += ", microbatch {} of {}".format(*self.microbatch)
        return [said]


def first_difference(
    a: Callable[..., Any],
    b: Callable[..., Any],
    state: Any,
    *batch: Any,
    mesh: Mesh | None = None,
    axis: Axis | tuple[()] | None = None,
    layouts: LayoutRules | None = None,
    calls: int = 2,
    goes_on: Callable[[Any], Any] | None = None,
    uneven: bool = False,
    exact: bool = True,
    draws: int = 4,
) -> FirstDifference | None:
    """Returns the first value at which ``b`` parts from ``a``; None if they are equal.

    Both are called as :func:`ff.testing.assert_equals_one_device` does it, and are
    equal if their calls return the same. Where not, the values that units are given,
    return and owe are compared, in this order: forward, in the order of calls;
    recompute, with the forward of the same call; backward, in the other order; the loss
    and the gradients; what the step returns. Each is the value of the whole batch:
    rows of ranks and microbatches one after another, means, sums. So steps under unlike
    transforms have the same values, whoever computes them.

    A unit is at fault whose inputs agree and whose outputs do not (in the backward, the
    other way round); where its inputs differ and nothing before them, what lies between
    the units is. Not seen: what runs under ``torch.func``, and units of a step that
    ``jit`` compiles as a whole.

    Args:
        a, b: the steps, each for one device or, by its transforms, for simulated ranks.
        state, batch, layouts, calls, goes_on, uneven: as for
            ``assert_equals_one_device``.
        mesh: that of ``b``, if no transform has one; without either it is for one
            device.
        axis: the axes over which the batch is cut, for those on ranks.
        exact: compares exact runs, in which each difference counts. If not, a number
            differs that is further from that of ``a`` than 16 times what ``a`` is there
            from its own run in float64 (and than 16 units in the last place).
        draws: how often an exact run is drawn, until one differs: a difference behind a
            comparison of numbers (a clipped norm) shows in some draws alone.

    Raises:
        ValueError: a mesh of processes, or without ranks.
        TreeMismatch: they return trees of other structures.
        NoExactRule: an exact run does not know an operator.

    Cost: a run of each, which keeps all of these values, some twice as long as one
    without; where the values of parts are means, one of ``a`` for each part.

    >>> import torch, fsfunc as ff
    >>> layer = ff.unit(lambda w, x: torch.tanh(x @ w))
    >>> @ff.value_and_grad
    ... def step(w, x):
    ...     return layer(w, layer(w, x)).mean()
    >>> class Scaled(ff.Interpretation):  # on all ranks but the first, the second call
    ...     def unit(self, run, call):
    ...         by = 1 + 1e-9 * ff.axis_index("data") * call.number
    ...         return lambda w, x: run(w, x) * by
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> faulty = ff.shard(ff.transformed(step, Scaled()), mesh, "data")
    >>> w, x = torch.zeros(3, 3), torch.zeros(4, 3)
    >>> first_difference(step, faulty, w, x)
    unit '<lambda>' call 1, forward, its output, by the transforms around it, rank 1
    """
    meshes = _mesh_of(a, None), _mesh_of(b, mesh)
    how = Calls(calls, goes_on, layouts, uneven=uneven)
    over = None if axis is None else axis_names(axis)
    search = Search(a, b, meshes, how, over)
    if not exact or is_exact():
        return search.first(state, batch)
    for draw in range(draws):
        with exactly(draw):
            first = search.first(*residues((state, batch), draw))
        if first is not None:
            return first
    return None


def _mesh_of(step: Any, mesh: Mesh | None) -> Mesh | None:
    """The mesh that is given, or that of the transforms around a step."""
    named = [getattr(h, "mesh", None) for h in getattr(step, "interpretations", ())]
    mesh = next((m for m in (mesh, *named) if m is not None), None)
    if mesh is not None and mesh.backend != "simulated":
        raise ValueError(
            f"first_difference of {title(step)} on {mesh}: it compares the values of "
            "all ranks in one process; give both steps a mesh of the same axes by "
            'ff.make_mesh(axes, "simulated")'
        )
    return mesh


@dataclass(frozen=True)
class Search:
    """Runs two steps, and compares what was seen; see :func:`first_difference`."""

    a: Callable[..., Any]
    b: Callable[..., Any]
    meshes: tuple[Mesh | None, Mesh | None]
    how: Calls
    axes: tuple[str, ...] | None = None

    def first(self, state: Any, batch: Any) -> FirstDifference | None:
        """Returns the first difference of one run, exact or not."""
        draws = torch.get_rng_state()
        seen = []
        for step, mesh in zip((self.a, self.b), self.meshes, strict=True):
            seen.append(self._observed(step, mesh, state, batch))
            torch.set_rng_state(draws)
        ours, theirs, wide = *seen, None
        if not is_exact():
            state64, batch64 = (tree.map(_wide, x) for x in (state, batch))
            wide = self._observed(self.a, self.meshes[0], state64, batch64)
            torch.set_rng_state(draws)
        found = _Compared(self, ours, theirs, wide, state, batch)
        returned = found.returned()
        if returned is None:
            return None
        first = found.inside()
        torch.set_rng_state(draws)
        return returned if first is None else first

    def _observed(self, step: Any, mesh: Mesh | None, *data: Any) -> Observed:
        axes: tuple[str, ...] = ()
        if mesh is not None:
            axes = batch_axes(step, mesh) if self.axes is None else self.axes
        return observe(step, mesh, axes, self.how, *data)


def _wide(x: Any) -> Any:
    floats = isinstance(x, Tensor) and x.is_floating_point() and not is_sharded(x)
    return x.detach().double() if floats else x


@dataclass(frozen=True)
class _Compared:
    """What was seen of two steps.

    Args:
        wide: ``a`` in float64, where runs are not exact.
    """

    search: Search
    ours: Observed
    theirs: Observed
    wide: Observed | None
    state: Any
    batch: Any

    # What the calls return

    def returned(self) -> FirstDifference | None:
        """The first leaf that differs in what the calls return, by their number."""
        for k in range(self.search.how.count):
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

    def inside(self) -> FirstDifference | None:
        """The first difference before the step's own results, in order."""
        uncompared = 0
        for check in self._in_order():
            verdict, said = check()
            uncompared += verdict.agrees is None
            if verdict.agrees is False:
                return replace(self._told(said, verdict.wrong), uncompared=uncompared)
        return None

    def _in_order(self) -> Iterator[Callable[[], tuple[Verdict, FirstDifference]]]:
        checks: list[tuple[Any, Callable[[], tuple[Verdict, FirstDifference]]]] = []
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
        for _, check in sorted(checks, key=lambda pair: pair[0]):
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
        return verdict, _found(slot)

    def _recompute(
        self, run: UnitRun, side: Observed
    ) -> tuple[Verdict, FirstDifference]:
        by_part = side.recomputed[run]
        where = [(p, r) for p, by_rank in sorted(by_part.items()) for r in by_rank]
        part, rank = where[0]
        made = by_part[part][rank]
        argument, outer = made.after < 0, len(run.path) > 1
        value = made.name if argument else f"what {made.name} gives"
        if (
            argument and outer and made.name.startswith("input")
        ):  # as its caller makes it
            value = f"{_named(run.path, run.numbers)}'s {made.name}"
            run = run._replace(path=run.path[:-1], numbers=run.numbers[:-1])
        value += ", not as in the forward"
        # Parts that were recomputed as they were computed are not among them.
        return Verdict(False, where), _said(run, "recompute", value, "")

    def _reduced(self, key: Any) -> tuple[Verdict, FirstDifference]:
        a, b = self.ours.reduced[key], self.theirs.reduced[key]
        call, _, leaf = key
        wide = {} if self.wide is None else self.wide.reduced.get(key, {})
        near = self._near([(x, wide.get(r)) for r, x in a.items()])
        ways = _averages(a, self.ours, near), _averages(b, self.theirs, near)
        value = "the loss" if leaf is None else f"the gradient of {leaf!r}"
        said = FirstDifference(
            call, "reduction", None, (), value if leaf != "" else "the gradient",
            leaf or "",
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

    def _told(
        self, said: FirstDifference, wrong: Sequence[tuple[Part, int]]
    ) -> FirstDifference:
        """With the rank and the microbatch, as far as not all are alike."""
        if not wrong:
            return said
        part, rank = min(wrong)
        ranks = {r for _, r in wrong}
        parts = {p.micro for p, r in wrong if r == rank}
        count = part.micro[1]
        alone = len(ranks) == 1
        micro = part.micro if 1 < count and len(parts) < count else None
        every = not alone and (self.theirs.mesh is None or micro is None)
        return replace(said, rank=None if every else rank, microbatch=micro)

    # Contributions to means

    def _of_parts(self, slot: Slot, near: Near) -> Verdict:
        """Compares each part of theirs with what ``a`` has of its rows alone."""
        if self.ours.mesh is not None:
            return Verdict(False)
        where = slot.run.call, slot.run.segment
        wrong, weighted = [], where in self.theirs.weighted
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
        return Verdict(False, wrong) if wrong else Verdict(None)

    def _alone(self, slot: Slot, part: Part, rank: int) -> Tensor | None:
        """The value of a slot that ``a`` has of the rows of one part, if it runs."""
        state, how = self.state, self.search.how
        if how.goes_on is not None and slot.run.call:
            state = how.goes_on(self.ours.outs[0][slot.run.call - 1])
        batch, mesh = self.batch, self.theirs.mesh
        if mesh is not None and self.theirs.axes:
            batch = rows_of(batch, mesh, self.theirs.axes, rank)
        index, count = part.micro
        batch = tree.map(
            lambda x: x.tensor_split(count)[index] if _is_cut(x) else x, batch
        )
        seen = observe(self.search.a, None, (), Calls(1), state, batch)
        own = slot._replace(run=slot.run._replace(call=0))
        found = seen.values.get(own, {})
        return next((v.value for r in found.values() for v in r.values()), None)

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
            if isinstance(x, Tensor) and x.is_floating_point() and x.numel():
                size = float(x.detach().double().abs().max())
                slack = max(slack, _FACTOR * torch.finfo(x.dtype).eps * size)
                if isinstance(y, Tensor):
                    gap = (x.detach().double() - y.detach().double()).abs().max()
                    slack = max(slack, _FACTOR * float(gap))
        slack = slack if math.isfinite(slack) else 0.0

        def near(x: Tensor, y: Tensor) -> bool:
            return torch.allclose(x.double(), y.double(), 0.0, slack, equal_nan=True)

        return near


_FACTOR = 16.0  # kernels of other shapes add in other orders


def _equal(x: Tensor, y: Tensor) -> bool:
    if is_exact() and x.is_floating_point() and y.is_floating_point():
        x, y = values(x), values(y)
    with _torch.beneath_all_modes():
        return torch.equal(x, y)


def _same(x: Any, y: Any, near: Near) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.shape == y.shape and near(x, y)
    return isinstance(x, Tensor) == isinstance(y, Tensor) and (
        isinstance(x, Tensor) or bool(x == y)
    )


def _is_cut(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim > 0


def _averages(by_rank: dict[int, Tensor], of: Observed, near: Near) -> list[Tensor]:
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


def _called(slot: Slot, name: str) -> str:
    """What a value is, of a unit of this name."""
    leaf, kind = f" {slot.leaf!r}" if slot.leaf else "", slot.kind
    if slot.backward:
        return f"the cotangent of {name} {kind}{leaf}"
    if kind in ("parameter", "input"):
        return f"{name} {kind}{leaf}, as given"
    if kind == "returned":
        return f"{name} output{leaf}, by the transforms around it"
    return "the loss" if kind == "loss" else f"{name} output{leaf}"


def _found(slot: Slot) -> FirstDifference:
    """Names the unit whose code makes a value; within another one, that one."""
    run, phase = slot.run, "backward" if slot.backward else "forward"
    outer = len(run.path) > 1 and slot.kind == ("output" if slot.backward else "input")
    if not outer:
        return _said(run, phase, _called(slot, "its"), slot.leaf)
    inner = _named(run.path, run.numbers)
    run = run._replace(path=run.path[:-1], numbers=run.numbers[:-1])
    return _said(run, phase, _called(slot, f"{inner}'s"), slot.leaf)


def _named(path: Sequence[str], numbers: Sequence[int]) -> str:
    return f"unit {'/'.join(path)!r} call {'/'.join(map(str, numbers))}"


def _said(run: UnitRun, phase: str, value: str, leaf: str) -> FirstDifference:
    unit = "/".join(run.path) or None
    return FirstDifference(run.call, phase, unit, run.numbers, value, leaf)
