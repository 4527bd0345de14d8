"""A plan and its estimate as plain values, to be written as JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from fsfunc.comm.ledgers import Ledger, Record
from fsfunc.planning.estimation import Estimate
from fsfunc.planning.machines import Hardware
from fsfunc.planning.plans import Plan, RankPlan

__all__ = ["facts"]


def facts(
    plan: Plan, estimate: Estimate | None = None, hardware: Hardware | None = None
) -> dict[str, Any]:
    """What a plan, and its estimate if given, say: dicts, lists, numbers and names.

    With ``hardware`` also its memory, and whether the plan fits. Bytes and FLOPs are
    of one rank and step, times in seconds. Spans are left out: ``show.trace`` writes
    them.

    >>> from fsfunc.comm.mesh import Mesh
    >>> own = RankPlan(0, 8, {"data": 0}, [], {}, [], [])
    >>> found = facts(Plan(Mesh({"data": 8}, "abstract"), (own,)))
    >>> found["mesh"], found["programs"][0]["alike"], found["peak_bytes"]
    ({'data': 8}, 8, 0)
    """
    found = {
        "mesh": dict(plan.mesh.axes),
        "flops": plan.flops,
        "peak_bytes": plan.peak_bytes,
        "derived": plan.derived,
        "programs": [_program(own) for own in plan.ranks],
    }
    if estimate is not None:
        found["estimate"] = _estimate(estimate)
    if hardware is not None:
        found["memory"] = hardware.memory
        found["fits"] = plan.peak_bytes <= hardware.memory
    return found


def _program(own: RankPlan) -> dict[str, Any]:
    phases = dict.fromkeys(phase for _, phase in own.work)
    return {
        "rank": own.rank,
        "alike": own.alike,
        "coordinates": dict(own.coordinates),
        "flops": own.flops(),
        "flops_by_phase": {phase: own.flops(phase=phase) for phase in phases},
        "peak_bytes": own.peak_bytes,
        "peak_by_kind": own.peak,
        "bytes_sent": own.ledger.bytes(),
        "collectives": _collectives(own.records),
    }


def _collectives(records: Iterable[Record]) -> list[dict[str, Any]]:
    """How many of each op over some axes in one phase there are, and their bytes."""
    found: dict[tuple[str, tuple[str, ...], str], list[Record]] = defaultdict(list)
    for record in records:
        found[record.op, record.axis, record.phase].append(record)
    return [
        {
            "op": op,
            "axes": list(axes),
            "phase": phase,
            "count": len(alike),
            "bytes": Ledger(alike).bytes(),
        }
        for (op, axes, phase), alike in found.items()
    ]


def _estimate(estimate: Estimate) -> dict[str, Any]:
    names = ("hardware", "seconds", "compute", "exposed", "bubble")
    names += ("flops_per_second", "share_of_peak", "tokens_per_second")
    of_rank = ("rank", "alike", "compute", "exposed", "bubble", "idle")
    found = {name: getattr(estimate, name) for name in names}
    ranks = [{name: getattr(r, name) for name in of_rank} for r in estimate.ranks]
    return {**found, "ranks": ranks}
