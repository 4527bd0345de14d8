"""The law of every transform: on any mesh a step is what it is on one device."""

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
from fsfunc.testing.comparing import Difference, difference, held
from fsfunc.testing.costs import said
from fsfunc.testing.finite_field import exact as exactly
from fsfunc.testing.finite_field import residues
from fsfunc.testing.mistakes import Case, explain
from fsfunc.testing.observed_runs import KeptValues
from fsfunc.testing.parting import StepPair
from fsfunc.testing.step_runs import Calls, batch_axes, rows_of, written_into

_SHOWN = 8  # ranks, and collectives, of a message
_KEPT = 1 << 30  # bytes of values, of which the first that differs is sought


@api_boundary
def assert_equals_one_device(
    step: Callable[..., Any],
    transformed: Callable[..., Any],
    mesh: Mesh,
    state: Any,
    *batch: Any,
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
    how = Comparison(
        step, transformed, mesh, axis, layouts, calls, goes_on, whole, tolerance, uneven
    )
    if not exact:
        how.compare(state, batch)
        return
    if tolerance:
        raise ValueError(
            f"tolerance={tolerance} in an exact run, where nothing is near: leave one "
            "of the two out"
        )
    for draw in range(_DRAWS):
        with exactly(draw):
            how.compare(*residues((state, batch), draw))


_DRAWS = 2


@dataclass(frozen=True)
class Comparison:
    """What :func:`assert_equals_one_device` compares, and how; see its arguments."""

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
    def how(self) -> Calls:
        """How both steps are called."""
        return Calls(self.calls, self.goes_on, self.layouts, self.whole, self.uneven)

    def compare(self, state: Any, batch: Sequence[Any]) -> None:
        """Runs both, and raises where they differ, as ``assert_equals_one_device``."""
        self.on_ranks(state, batch, self.on_one(state, batch))

    def on_one(self, state: Any, batch: Sequence[Any]) -> list[Any]:
        """Returns the results of each call on one device.

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
        draws, given = torch.get_rng_state(), (held(state), held(batch))
        expected = self.how.on_one(self.step, state, batch)
        if what := written_into(given, state, batch):  # the ranks would begin from that
            raise AssertionError(f"{title(self.step)}, on one device: it {what}")
        torch.set_rng_state(draws)
        if not any(isinstance(x, Tensor) for x in tree.leaves(expected)):
            raise ValueError(
                f"{title(self.step)} returns no tensor: nothing would be compared"
            )
        return expected

    def on_ranks(self, state: Any, batch: Sequence[Any], expected: list[Any]) -> None:
        """Raises unless each rank's calls return what is expected.

        Raises:
            AssertionError: as ``assert_equals_one_device``.
        """
        mesh, axis = self.mesh, self.axis
        axes = batch_axes(self.transformed, mesh) if axis is None else axis_names(axis)
        with ledger() as log:
            outs, written, rows = self.how.on_ranks(
                self.transformed, mesh, axes, state, batch
            )
        alone = mesh.backend == "processes"
        seen = _Runs(
            self, state, batch, axes, expected,
            [mesh.rank] if alone else [*range(mesh.size)], outs, rows, log,
        )  # fmt: skip
        for k in range(self.calls):
            seen.compare(k, self.tolerance)
            for rank, what in zip(seen.ranks, written, strict=True):
                if what:
                    raise AssertionError(f"{seen.heading(0)}: on rank {rank} it {what}")

    @reraising_interrupts()
    def parting(self, state: Any, batch: Any, axes: tuple[str, ...]) -> list[str]:
        """A line on the first value inside that differs, if ranks are simulated."""
        if self.mesh.backend != "simulated":  # of which others may have failed already
            return []
        meshes = None, self.mesh
        kept = KeptValues(_KEPT)
        search = StepPair(self.step, self.transformed, meshes, self.how, axes, kept)
        try:
            first = search.first(state, batch)
        except Exception as error:  # what it would explain was found already
            said = str(error).partition("\n")[0]
            if kept.too_many:
                return [
                    "where they part is not told: it would keep more than "
                    f"{_KEPT >> 30} GiB of values; ff.testing.first_difference keeps "
                    "all, or give a smaller model"
                ]
            return [f"where they part is not told: {type(error).__name__}: {said}"]
        if first is None:
            return ["no value inside differs by more than rounding does"]
        return [f"the first value that differs: {first}"] if first.seen else []


@dataclass(frozen=True)
class _Runs:
    """The runs on one device and on the ranks hosted here."""

    of: Comparison
    state: Any
    batch: Any
    axes: tuple[str, ...]
    expected: Sequence[Any]
    ranks: Sequence[int]
    outs: Sequence[Sequence[Any]]
    rows: Sequence[int]
    log: Ledger

    def heading(self, k: int) -> str:
        ours, theirs = title(self.of.transformed), title(self.of.step)
        said = f"{ours} on {self.of.mesh} is not {theirs} on one device"
        return f"{said}, in its call {k + 1} of {self.of.calls}" if k else said

    def compare(self, k: int, tolerance: float) -> None:
        """Raises where a call differs on any rank, at the first leaf that does."""
        seen = []
        for rank, out in zip(self.ranks, self.outs, strict=True):
            try:
                found = difference(out[k], self.expected[k], tolerance)
            except tree.TreeMismatch as error:
                raise AssertionError(
                    f"{self.heading(k)}: on rank {rank} {error}"
                ) from None
            if found is not None:
                seen.append(found)
        if seen:
            order = tree.paths(self.expected[k])
            first = min(seen, key=lambda d: order.index(d.path))
            raise AssertionError(self.message(k, first, order.index(first.path)))

    def message(self, k: int, seen: Difference, position: int) -> str:
        found = [tree.leaves(out[k])[position] for out in self.outs]
        lines = [self.heading(k), seen.said]
        lines.append(f"  one device  {seen.at_index(seen.expected)}")
        each = [*zip(self.ranks, found, strict=True)]
        lines += [f"  rank {r:<7}{seen.at_index(x)}" for r, x in each[:_SHOWN]]
        if len(each) > _SHOWN:
            lines.append(f"  and {len(each) - _SHOWN} more ranks")
        every = len(self.ranks) == self.of.mesh.size  # over processes we know our own
        if every and all(isinstance(x, Tensor) for x in [seen.expected, *found]):
            case = Case(
                seen.expected, found, self.of.mesh, _before(seen, self.state),
                self.axes, self.rows, lambda: self.alone(k, position),
            )  # fmt: skip
            lines.append(explain(case))
        lines += _origin(seen.path, self.log)
        lines += self.of.parting(self.state, self.batch, self.axes)
        return "\n".join(lines)

    def alone(self, k: int, position: int) -> Sequence[Tensor]:
        """The results of one device on each rank's rows."""
        mesh, how = self.of.mesh, self.of.how
        parts = [rows_of(self.batch, mesh, self.axes, r) for r in range(mesh.size)]
        outs = [how.on_one(self.of.step, self.state, part)[k] for part in parts]
        return [tree.leaves(out)[position] for out in outs]


def _before(seen: Difference, state: Any) -> Tensor | None:
    """The leaf of the state that has the longest end of a returned leaf's path."""
    names, best, at = seen.path.split("/"), None, 0
    paths, leaves, _ = tree.flatten_with_paths(state)
    for path, x in zip(paths, leaves, strict=True):
        own = path.split("/") if path else []
        fits = own == names[len(names) - len(own) :] and isinstance(x, Tensor)
        if fits and len(own) >= at and x.shape == seen.expected.shape:
            best, at = x, len(own)
    return best


def _origin(path: str, log: Ledger) -> list[str]:
    """The collectives that touched a leaf, or the last ones; of the first rank."""
    records = log.of()
    if not records:
        return ["nothing was sent"]
    leaf = path.rpartition("/")[2]
    named = re.compile(rf"[/(]{re.escape(leaf)}[ )]")
    about = [r for r in records if leaf and named.search(r.what)]
    shown = (about or records)[-_SHOWN:]
    lines = ["collectives of this leaf:" if about else "the last collectives:"]
    return [*lines, *[f"  {line}" for line in dict.fromkeys(map(said, shown))]]
