"""first_difference: the first value at which two steps part."""

from __future__ import annotations

from collections.abc import Callable
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
from fsfunc.testing.observed_differences import Compared
from fsfunc.testing.observed_runs import KeptValues, RunLog, observe
from fsfunc.testing.places import FirstDifference
from fsfunc.testing.step_runs import Calls, batch_axes


@api_boundary
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
    whole: Callable[[Any], Any] = unshard,
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
    the units is. Not seen is what runs under ``torch.func``. In floats
    ``jit(..., whole_step=True)`` is refused, as nothing may be around it.

    Args:
        a, b: the steps, each for one device or, by its transforms, for simulated ranks.
        state, batch, layouts, calls, goes_on, whole, uneven: as for
            ``assert_equals_one_device``.
        mesh: that of ``b``, if no transform has one; without either it is for one
            device.
        axis: the axes over which the batch is cut, for those on ranks.
        exact: compares exact runs, in which each difference counts; inside of
            :func:`ff.testing.exact`, that one. If not, a number differs that is further
            from that of ``a`` than 16 times what ``a`` is there from its own run in
            float64 (at most a thousandth of the largest number, at least 16 units in
            the last place of it).
        draws: how often an exact run is drawn, until one differs: a difference behind a
            comparison of numbers (a clipped norm) shows in some draws alone.

    Raises:
        ValueError: a mesh of processes, or whose ranks have no values; no calls or
            draws.
        TreeMismatch: they return trees of other structures.
        NoExactRule: an exact run does not know an operator.

    Cost: a run of each, in an exact run hardly longer than one without; it keeps all of
    these values. Where those of parts are means, a run of ``a`` for each part.

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
    how = Calls(calls, goes_on, layouts, whole, uneven)
    over = None if axis is None else axis_names(axis)
    search = StepPair(a, b, meshes, how, over)
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
class StepPair:
    """Runs two steps, and compares what was seen; see :func:`first_difference`."""

    a: Callable[..., Any]
    b: Callable[..., Any]
    meshes: tuple[Mesh | None, Mesh | None]
    how: Calls
    axes: tuple[str, ...] | None = None
    kept: KeptValues = field(default_factory=KeptValues)

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
        comparison = Compared(self.a, self.how, state, batch, ours, theirs, wide)
        returned = comparison.returned()
        if returned is None:
            return None
        first = comparison.first(returned)
        torch.set_rng_state(draws)
        return first

    def _observed(self, step: Any, mesh: Mesh | None, state: Any, batch: Any) -> RunLog:
        axes: tuple[str, ...] = ()
        if mesh is not None:
            axes = batch_axes(step, mesh) if self.axes is None else self.axes
        return observe(step, mesh, axes, self.how, state, batch, self.kept)


def _wide(x: Any) -> Any:
    floats = isinstance(x, Tensor) and x.is_floating_point() and not is_sharded(x)
    return x.detach().double() if floats else x
