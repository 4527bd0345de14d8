"""The law of every transform: on any mesh a step returns what it does on one device.

``assert_equals_one_device`` checks it: it runs the plain step, then the transformed one
on every rank, and compares leaf by leaf. Where a leaf differs, the message says what
``mistakes.py`` makes of it, which collectives touched it, and, by running both again
under observers (``parting.py``), the first value inside that differs. ``prove`` calls
``Comparison`` in a finite field.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.backends.interrupts import reraising_interrupts
from fsfunc.comm.mesh import Axis, Mesh, axis_names, check_mesh
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.comm.traffic import Ledger, ledger
from fsfunc.core.frames import title
from fsfunc.state.layout_rules import LayoutRules
from fsfunc.state.unsharding import unshard
from fsfunc.testing.comparing import Difference, copy_tensors, find_difference
from fsfunc.testing.costs import describe_record
from fsfunc.testing.finite_field import exact as exactly
from fsfunc.testing.finite_field import residues
from fsfunc.testing.mistakes import Case, explain
from fsfunc.testing.observed_runs import ValueBudget
from fsfunc.testing.parting import StepPair
from fsfunc.testing.step_runs import (
    StepCaller,
    batch_axes,
    describe_write,
    rows_of_rank,
)
from fsfunc.tree.types import PyTree

_SHOWN = 8  # ranks, and collectives, that an error message lists
_MAX_VALUE_BYTES = 1 << 30  # of the values that a search for the first difference saves
_DRAWS = 2  # of an exact run: in one, values may agree by chance, about 1 in PRIME


@api_boundary
def assert_equals_one_device(
    step: Callable[..., Any],
    transformed: Callable[..., Any],
    mesh: Mesh,
    state: PyTree,
    *batch: PyTree,
    axis: Axis | tuple[()] | None = None,
    layouts: LayoutRules | None = None,
    calls: int = 2,
    goes_on: Callable[[Any], Any] | None = None,
    whole: Callable[[Any], Any] = unshard,
    tolerance: float = 0.0,
    uneven: bool = False,
    exact: bool = False,
) -> None:
    """Raises unless ``transformed`` on every rank equals ``step`` on one device.

    One device calls ``step(state, *batch)``. Each rank of the mesh lays the state out
    by ``place``, takes its rows of the batch, and calls ``transformed``; its result,
    unsharded, must be the same: values, gradients, new states and whatever else a step
    returns. Nor may a call write into a state that was not donated.

    Args:
        step: the step of one device; any function of (state, \\*batch), that may return
            any tree.
        transformed: the same for ranks: by transforms of fsfunc's, or your own.
        mesh: of simulated ranks, or of processes.
        state: a tree, whole, the same on every rank.
        batch: trees of tensors, cut along dim 0.
        axis: the axes over which the batch is cut; ``()`` gives all of it to all ranks.
            By default those that the transforms take means over, or without transforms
            all axes.
        layouts: as for ``ff.place``.
        calls: the number of calls; a second one uses what the first one learnt.
        goes_on: returns the next call's state for the result of a call (``lambda out:
            out[0]``); by default every call is given the first one, or a copy of it if
            it was donated.
        whole: returns, on each rank, what one device returns, for the rank's result.
        tolerance: the largest difference of two numbers, relative to theirs or to 1. By
            default 0: give integers, as :func:`integers` makes them.
        uneven: whether ranks may have different numbers of rows.
        exact: compares exact runs (:func:`ff.testing.exact`), from random residues in
            place of the floats of ``state`` and ``batch``: every difference counts, and
            none is rounding. :func:`ff.prove` reports such a comparison.

    Raises:
        ValueError: a mesh whose ranks have no values of their own; nothing to compare;
            a tolerance of an exact run.
        AssertionError: with the mesh, the leaf, its first element that differs and what
            each rank has there, the mistake that would explain it, the last collectives
            that touched it, and, on simulated ranks, the first value inside that
            differs (:func:`ff.testing.first_difference`), if 1 GiB holds the values
            of all units.

    Cost of a failure: three more runs of both at most, on simulated ranks.

    >>> import torch, fsfunc as ff
    >>> unit = ff.unit(lambda w, x: x @ w)
    >>> step = ff.value_and_grad(lambda w, x: unit(w, x).sum() / len(x))
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> w, x = ff.testing.integers(3), ff.testing.integers(4, 3)
    >>> assert_equals_one_device(step, ff.shard(step, mesh, "data"), mesh, w, x)

    A transform of one's own, that forgot that the loss is a mean:

    >>> def by_hand(w, x):
    ...     return ff.psum(step(w, x), "data")
    >>> assert_equals_one_device(
    ...     step, by_hand, mesh, w, x)  # doctest: +ELLIPSIS +NORMALIZE_WHITESPACE
    Traceback (most recent call last):
        ...
    AssertionError: by_hand on Mesh({'data': 2}, 'simulated') is not
    value_and_grad(<lambda>) on one device
    '0' f32[] differs
      one device  2.5
      rank 0      5.0
      rank 1      5.0
    it is 2 times too large, the size of "data": a sum in the place of a mean, ...
    """
    comparison = Comparison(
        step, transformed, mesh, axis, layouts, calls, goes_on, whole, tolerance, uneven
    )
    if not exact:
        comparison.compare(state, batch)
        return
    if tolerance:
        raise ValueError(
            f"tolerance={tolerance} in an exact run, where nothing is near: leave one "
            "of the two out"
        )
    for draw in range(_DRAWS):
        with exactly(draw):
            comparison.compare(*residues((state, batch), draw))


@dataclass(frozen=True)
class Comparison:
    """The arguments of :func:`assert_equals_one_device` but for state and batch."""

    step: Callable[..., Any]
    transformed: Callable[..., Any]
    mesh: Mesh
    axis: Axis | tuple[()] | None = None
    layouts: LayoutRules | None = None
    calls: int = 2
    goes_on: Callable[[Any], Any] | None = None
    whole: Callable[[Any], Any] = unshard
    tolerance: float = 0.0
    uneven: bool = False

    @property
    def caller(self) -> StepCaller:
        """What calls both steps."""
        return StepCaller(
            self.calls, self.goes_on, self.layouts, self.whole, self.uneven
        )

    def compare(self, state: PyTree, batch: Sequence[PyTree]) -> None:
        """Runs both steps, and raises AssertionError where they differ."""
        self.check_ranks(state, batch, self.run_on_one_device(state, batch))

    def run_on_one_device(self, state: PyTree, batch: Sequence[PyTree]) -> list[PyTree]:
        """Calls the plain step; returns the result of each call.

        Raises:
            ValueError: a mesh whose ranks have no values; nothing to compare.
            AssertionError: a call wrote into its state or batch.
        """
        mesh = check_mesh(self.mesh, "assert_equals_one_device")
        if mesh.backend in ("abstract", "vmap"):
            raise ValueError(
                f"assert_equals_one_device on {mesh}, whose ranks have no values of "
                'their own: give it ranks, as ff.make_mesh(axes, "simulated")'
            )
        if self.calls < 1:
            raise ValueError(f"calls={self.calls}: nothing would be compared")
        generator_state = torch.get_rng_state()
        copies = (copy_tensors(state), copy_tensors(batch))
        expected = self.caller.on_one_device(self.step, state, batch)
        # The ranks would start from a state that the plain step has changed.
        if write := describe_write(copies, state, batch):
            raise AssertionError(f"{title(self.step)}, on one device: it {write}")
        torch.set_rng_state(generator_state)  # the ranks draw the same numbers
        if not any(isinstance(x, Tensor) for x in tree.leaves(expected)):
            raise ValueError(
                f"{title(self.step)} returns no tensor: nothing would be compared"
            )
        return expected

    def check_ranks(
        self, state: PyTree, batch: Sequence[PyTree], expected: list[PyTree]
    ) -> None:
        """Calls the transformed step on every rank, and compares with ``expected``.

        Raises:
            AssertionError: as ``assert_equals_one_device``.
        """
        mesh, axis = self.mesh, self.axis
        axes = batch_axes(self.transformed, mesh) if axis is None else axis_names(axis)
        with ledger() as log:
            outputs, written, rows = self.caller.on_ranks(
                self.transformed, mesh, axes, state, batch
            )
        over_processes = mesh.backend == "processes"
        runs = _CollectedRuns(
            self, state, batch, axes, expected,
            [mesh.rank] if over_processes else [*range(mesh.size)], outputs, rows, log,
        )  # fmt: skip
        for call in range(self.calls):
            runs.compare(call, self.tolerance)
            for rank, write in zip(runs.ranks, written, strict=True):
                if write:
                    raise AssertionError(
                        f"{runs.heading(0)}: on rank {rank} it {write}"
                    )

    @reraising_interrupts()
    def describe_first_difference(
        self, state: PyTree, batch: Sequence[PyTree], axes: tuple[str, ...]
    ) -> list[str]:
        """Returns a line on the first value inside that differs, if it can be found."""
        # It runs both steps again on all ranks. Over processes the others may have
        # failed already, or not have failed at all, and would not run it.
        if self.mesh.backend != "simulated":
            return []
        meshes = None, self.mesh
        budget = ValueBudget(_MAX_VALUE_BYTES)
        search = StepPair(
            self.step, self.transformed, meshes, self.caller, axes, budget
        )
        try:
            difference = search.find(state, batch)
        except Exception as error:  # the difference it would explain is to be raised
            message = str(error).partition("\n")[0]
            if budget.is_exceeded:
                return [
                    "where they part is not told: it would keep more than "
                    f"{_MAX_VALUE_BYTES >> 30} GiB of values; "
                    "ff.testing.first_difference keeps all, or give a smaller model"
                ]
            return [f"where they part is not told: {type(error).__name__}: {message}"]
        if difference is None:
            return ["no value inside differs by more than rounding does"]
        return (
            [f"the first value that differs: {difference}"] if difference.seen else []
        )


@dataclass(frozen=True)
class _CollectedRuns:
    """The results on one device, and those of the ranks that run in this process.

    Args:
        axes: the axes over which the batch is cut.
        expected: for each call, the result on one device.
        ranks: the ranks that run here.
        outputs: for each of them, the result of each call.
        rows: for each of them, the number of rows of its batch.
        log: what the ranks sent.
    """

    comparison: Comparison
    state: PyTree
    batch: Sequence[PyTree]
    axes: tuple[str, ...]
    expected: Sequence[PyTree]
    ranks: Sequence[int]
    outputs: Sequence[Sequence[PyTree]]
    rows: Sequence[int]
    log: Ledger

    def heading(self, call: int) -> str:
        ours, theirs = title(self.comparison.transformed), title(self.comparison.step)
        heading = f"{ours} on {self.comparison.mesh} is not {theirs} on one device"
        return (
            f"{heading}, in its call {call + 1} of {self.comparison.calls}"
            if call
            else heading
        )

    def compare(self, call: int, tolerance: float) -> None:
        """Raises if a call's result differs on any rank; names the first leaf."""
        differences = []
        for rank, outputs in zip(self.ranks, self.outputs, strict=True):
            try:
                difference = find_difference(
                    outputs[call], self.expected[call], tolerance
                )
            except tree.TreeMismatch as error:
                raise AssertionError(
                    f"{self.heading(call)}: on rank {rank} {error}"
                ) from None
            if difference is not None:
                differences.append(difference)
        if differences:
            paths = tree.paths(self.expected[call])
            first = min(differences, key=lambda d: paths.index(d.path))
            raise AssertionError(self.message(call, first, paths.index(first.path)))

    def message(self, call: int, difference: Difference, position: int) -> str:
        actual = [tree.leaves(outputs[call])[position] for outputs in self.outputs]
        lines = [self.heading(call), difference.message]
        lines.append(
            f"  one device  {difference.describe_element(difference.expected)}"
        )
        by_rank = [*zip(self.ranks, actual, strict=True)]
        lines += [
            f"  rank {r:<7}{difference.describe_element(x)}"
            for r, x in by_rank[:_SHOWN]
        ]
        if len(by_rank) > _SHOWN:
            lines.append(f"  and {len(by_rank) - _SHOWN} more ranks")
        # A diagnosis needs the leaf of every rank; a process has only its own.
        has_all_ranks = len(self.ranks) == self.comparison.mesh.size
        if has_all_ranks and all(
            isinstance(x, Tensor) for x in [difference.expected, *actual]
        ):
            case = Case(
                difference.expected, actual, self.comparison.mesh,
                _find_state_leaf(difference, self.state), self.axes, self.rows,
                lambda: self.outputs_of_rows_alone(call, position),
            )  # fmt: skip
            lines.append(explain(case))
        lines += _describe_collectives(difference.path, self.log)
        lines += self.comparison.describe_first_difference(
            self.state, self.batch, self.axes
        )
        return "\n".join(lines)

    def outputs_of_rows_alone(self, call: int, position: int) -> Sequence[Tensor]:
        """Returns what one device makes of each rank's rows, of one leaf."""
        mesh, caller = self.comparison.mesh, self.comparison.caller
        parts = [rows_of_rank(self.batch, mesh, self.axes, r) for r in range(mesh.size)]
        outputs = [
            caller.on_one_device(self.comparison.step, self.state, rows)[call]
            for rows in parts
        ]
        return [tree.leaves(out)[position] for out in outputs]


def _find_state_leaf(difference: Difference, state: PyTree) -> Tensor | None:
    """Returns the leaf of the state that the differing leaf is the new value of.

    It is taken to be the one whose path is the longest end of the leaf's path.
    """
    names, best, best_length = difference.path.split("/"), None, 0
    paths, leaves, _ = tree.flatten_with_paths(state)
    for path, x in zip(paths, leaves, strict=True):
        state_names = path.split("/") if path else []
        fits = state_names == names[len(names) - len(state_names) :] and isinstance(
            x, Tensor
        )
        if (
            fits
            and len(state_names) >= best_length
            and x.shape == difference.expected.shape
        ):
            best, best_length = x, len(state_names)
    return best


def _describe_collectives(path: str, log: Ledger) -> list[str]:
    """Lists the first rank's collectives that touched a leaf, or its last ones."""
    records = log.of()
    if not records:
        return ["nothing was sent"]
    leaf = path.rpartition("/")[2]
    pattern = re.compile(rf"[/(]{re.escape(leaf)}[ )]")
    of_leaf = [r for r in records if leaf and pattern.search(r.what)]
    shown = (of_leaf or records)[-_SHOWN:]
    lines = ["collectives of this leaf:" if of_leaf else "the last collectives:"]
    return [
        *lines,
        *[f"  {line}" for line in dict.fromkeys(map(describe_record, shown))],
    ]
