"""``check_types``: the type check of a transformed step, before it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsfunc.comm.launch import local_batch, spmd
from fsfunc.comm.mesh import Axis, Mesh, axis_names, check_mesh, here
from fsfunc.state.layout_rules import LayoutRules
from fsfunc.state.placing import place
from fsfunc.testing.one_device import batch_axes
from fsfunc.tracing.type_check import check

__all__ = ["check_types"]


def check_types(
    step: Callable[..., Any],
    mesh: Mesh,
    state: Any,
    *batch: Any,
    axis: Axis | tuple[()] | None = None,
    layouts: LayoutRules | None = None,
) -> None:
    """Raises unless ``step``, transformed, has one meaning on all ranks of a mesh.

    The step is run on tensors without data, at the first coordinate and the last. What
    is one value on all ranks (I), a rank's own (V), or a part of one value is followed
    through every operator; where they meet in a way that means nothing, it is refused.
    A sharded step asks this of itself in its first call.

    Args:
        step, mesh, state, batch, axis, layouts: as for `assert_equals_one_device`.

    Raises:
        LawError, NotATensor: names the line, the leaf, and the way out.
        Exception: what the step raises itself.

    Cost: no memory, and nothing is sent but what ranks compare.

    >>> import torch, fsfunc as ff
    >>> unit = ff.unit(lambda w, x: x @ w)
    >>> def noisy(w, x):
    ...     g = ff.value_and_grad(lambda w, x: unit(w, x).sum())(w, x)[1]
    ...     return ff.tree.map(lambda g: g + torch.randn_like(g), g)
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> step = ff.shard(noisy, mesh, "data")
    >>> check_types(step, mesh, torch.ones(3), torch.ones(4, 3))
    Traceback (most recent call last):
        ...
    fsfunc.comm.shard_linear_maps.LawError: ...
    """
    check_mesh(mesh, "check_types")
    axes = batch_axes(step, mesh) if axis is None else axis_names(axis)

    def main() -> None:
        mine = local_batch(batch, mesh, axes) if axes else batch
        placed = place(step, state, *mine, layouts=layouts)
        check(step, (placed, *mine), {}, here(mesh), axes)

    spmd(main, mesh)()
