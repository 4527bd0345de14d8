"""What was planned: the transforms around a step, its batch, its parameters."""

from __future__ import annotations

import math
from typing import Any

from fsfunc.core.frames import title
from fsfunc.planning.plans import Plan, PlannedLeaf
from fsfunc.printing.tables import of_count
from fsfunc.sharded.placements import describe
from fsfunc.testing.step_runs import batch_axes


def heading(
    plan: Plan, step: Any, tokens: float | None = None, idle: int | None = 0
) -> str:
    """The step of a plan, in lines.

    Args:
        step: what was planned, in its transforms.
        tokens: of a step over all ranks; None: not known.
        idle: the parameters that a token does not pass, being of experts that it is
            not sent to; None: not known.
    """
    count = parameter_count(plan)
    lines = {"step": title(step), "batch": _batch(plan, step)}
    if tokens is not None:
        lines["tokens"] = f"{tokens:,.0f} a step, over all ranks"
    lines["parameters"] = of_count(count)
    if idle:
        lines["parameters"] += f" in all, {of_count(count - idle)} active per token"
    return "\n".join(f"{name:<12}{said}" for name, said in lines.items() if said)


def parameter_count(plan: Plan) -> int:
    """The elements of all parameters, whole."""
    return sum(
        math.prod(leaf.shape)
        for leaf in plan.ranks[0].leaves
        if leaf.kind == "parameters"
    )


def _batch(plan: Plan, step: Any) -> str:
    """The leaves of a rank's batch, and how many ranks have one of their own."""
    leaves = [x for x in plan.ranks[0].leaves if x.path.partition("/")[0] == "batch"]
    said = ", ".join(map(_leaf, leaves))
    ranks = plan.mesh.axis_size(batch_axes(step, plan.mesh))
    return f"{said} on each of {ranks} ranks" if said and ranks > 1 else said


def _leaf(leaf: PlannedLeaf) -> str:
    return describe(leaf.shape, leaf.dtype, leaf.path.partition("/")[2])
