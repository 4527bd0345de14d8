"""``first_difference``: the first value at which two steps part.

It runs both steps under observers (``observed_runs.py``), on the same data and random
numbers, and compares the logs (``observed_differences.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.mesh import Axis, Mesh, axis_names
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.core.frames import title
from fsfunc.sharded.leaf import is_sharded
from fsfunc.state.layout_rules import LayoutRules
from fsfunc.state.unsharding import unshard
from fsfunc.testing.finite_field import exact as exactly
from fsfunc.testing.finite_field import is_exact, residues
from fsfunc.testing.observed_differences import LogComparison
from fsfunc.testing.observed_runs import RunLog, ValueBudget, observe
from fsfunc.testing.places import FirstDifference
from fsfunc.testing.step_runs import StepCaller, batch_axes
from fsfunc.tree.types import Leaf, PyTree


@api_boundary
def first_difference(
    a: Callable[..., Any],
    b: Callable[..., Any],
    state: PyTree,
    *batch: PyTree,
    mesh: Mesh | None = None,
    axis: Axis | tuple[()] | None = None,
    layouts: LayoutRules | None = None,
    calls: int = 2,
    goes_on: Callable[[Any], Any] | None = None,
    whole: Callable[[Any], Any] = unshard,
    uneven: bool = False,
    exact: bool = True,
    draws: int = 4,
) -> FirstDifference | None:
    """Returns the first value at which ``b`` parts from ``a``; None if they are equal.

    Both are called as :func:`ff.testing.assert_equals_one_device` does it, and are
    equal if their calls return the same. If not, the arguments and results of units and
    their cotangents are compared, in this order: forward, in the order of calls;
    recompute, with the forward of the same call; backward, in the other order; the loss
    and the gradients; the results of the step. Each is compared as the value of the
    whole batch: rows of ranks and microbatches one after another, means, sums. So steps
    under different transforms have the same values, whichever rank computes them.

    If a unit's inputs agree and its outputs do not, the unit is at fault (in the
    backward, the other way round). If its inputs differ and nothing before them, the
    code between the units is. Values under ``torch.func`` are not observed. In floats
    ``jit(..., whole_step=True)`` is refused, as nothing may be around it.

    Args:
        a, b: the steps, each for one device or, by its transforms, for simulated ranks.
        state, batch, layouts, calls, goes_on, whole, uneven: as for
            ``assert_equals_one_device``.
        mesh: the mesh of ``b``, if none of its transforms has one; without either ``b``
            is for one device.
        axis: the axes over which the batch is cut, for steps on ranks.
        exact: whether to compare exact runs, in which each difference counts; inside of
            :func:`ff.testing.exact`, its field is used. If not, a number differs that
            is further from that of ``a`` than 16 times the error of ``a`` against its
            own run in float64 (at most a thousandth of the largest number, at least 16
            units in the last place of it).
        draws: how often an exact run is drawn, until one differs: a difference behind a
            comparison of numbers (a clipped norm) shows in some draws alone.

    Raises:
        ValueError: a mesh of processes, or whose ranks have no values; no calls or
            draws.
        TreeMismatch: they return trees of other structures.
        NoExactRule: an exact run does not know an operator.

    Cost: a run of each step, and memory for all of these values. Where a value of the
    parts is a mean, also a run of ``a`` for each part.

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
    if calls < 1 or draws < 1:
        raise ValueError(f"calls={calls}, draws={draws}: nothing would be compared")
    caller = StepCaller(calls, goes_on, layouts, whole, uneven)
    axes = None if axis is None else axis_names(axis)
    search = StepPair(a, b, meshes, caller, axes)
    if not exact or is_exact():
        return search.find(state, batch)
    for draw in range(draws):
        with exactly(draw):
            first = search.find(*residues((state, batch), draw))
        if first is not None:
            return first
    return None


def _mesh_of(step: Callable[..., Any], mesh: Mesh | None) -> Mesh | None:
    """Returns ``mesh``, or that of the transforms around a step; it is simulated."""
    step_meshes = [
        getattr(handler, "mesh", None)
        for handler in getattr(step, "interpretations", ())
    ]
    mesh = next(
        (candidate for candidate in (mesh, *step_meshes) if candidate is not None), None
    )
    if mesh is not None and mesh.backend != "simulated":
        raise ValueError(
            f"first_difference of {title(step)} on {mesh}: it compares the values of "
            "all ranks in one process; give both steps a mesh of the same axes by "
            'ff.make_mesh(axes, "simulated")'
        )
    return mesh


@dataclass(frozen=True)
class StepPair:
    """Two steps to run and compare; see :func:`first_difference`.

    Args:
        meshes: the mesh of each step; None: one device.
        axes: the axes over which the batch is cut; None: by the transforms.
        budget: counts the bytes of the values that are saved.
    """

    a: Callable[..., Any]
    b: Callable[..., Any]
    meshes: tuple[Mesh | None, Mesh | None]
    caller: StepCaller
    axes: tuple[str, ...] | None = None
    budget: ValueBudget = field(default_factory=ValueBudget)

    def find(self, state: PyTree, batch: Sequence[PyTree]) -> FirstDifference | None:
        """Runs both steps once; returns the first difference."""
        generator_state = torch.get_rng_state()
        logs = []
        for step, mesh in zip((self.a, self.b), self.meshes, strict=True):
            logs.append(self._observe(step, mesh, state, batch))
            torch.set_rng_state(generator_state)
        ours, theirs, float64_log = *logs, None
        # In floats each value may be off by its own rounding: a run in float64 tells by
        # how much.
        if not is_exact():
            state64, batch64 = (tree.map(_to_float64, x) for x in (state, batch))
            float64_log = self._observe(self.a, self.meshes[0], state64, batch64)
            torch.set_rng_state(generator_state)
        comparison = LogComparison(
            self.a, self.caller, state, batch, ours, theirs, float64_log
        )
        returned = comparison.first_returned()
        if returned is None:
            return None
        difference = comparison.first(returned)
        torch.set_rng_state(generator_state)
        return difference

    def _observe(
        self,
        step: Callable[..., Any],
        mesh: Mesh | None,
        state: PyTree,
        batch: Sequence[PyTree],
    ) -> RunLog:
        axes: tuple[str, ...] = ()
        if mesh is not None:
            axes = batch_axes(step, mesh) if self.axes is None else self.axes
        return observe(step, mesh, axes, self.caller, state, batch, self.budget)


def _to_float64(x: Leaf) -> Leaf:
    floats = isinstance(x, Tensor) and x.is_floating_point() and not is_sharded(x)
    return x.detach().double() if floats else x
