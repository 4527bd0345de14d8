"""The moment at which a rank holds most memory: when, how much, and of what."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from fsfunc.foresight.events import Ran, Replayed, Took
from fsfunc.foresight.plans import Plan, RankPlan
from fsfunc.show.amounts import of_bytes, of_share
from fsfunc.show.layers import alike, together
from fsfunc.show.tables import Table

__all__ = ["OUTSIDE", "alive_table", "check_plan", "kinds_table", "peak_words"]

OUTSIDE = "(outside units)"


def check_plan(plan: Any) -> Plan:
    """``plan``, if it is one."""
    if not isinstance(plan, Plan):
        raise TypeError(
            f"this shows a plan, and got {type(plan).__name__}: make one by ff.plan("
            "step, state, batch) inside spmd; a rank's own is chosen by rank="
        )
    return plan


def kinds_table(own: RankPlan) -> Table:
    """The memory of each kind when most is held."""
    rows = [
        (kind, of_bytes(size), of_share(size, own.peak_bytes))
        for kind, size in own.peak.items()
        if size
    ]
    at = peak_words(own)
    rows.append(("total", of_bytes(own.peak_bytes), ""))
    title = f"memory at the peak{f', {at}' if at else ''}"
    head = ("<kind", ">bytes", ">share")
    return Table(title, head, rows if own.peak_bytes else [])


def peak_words(own: RankPlan) -> str:
    """When most memory is held: ``in the backward of block, by aten.mm``."""
    event = own.events[own.peak_at] if own.events else None
    if isinstance(event, Took) and event.op:
        return f"in {_turn(event.unit, event.phase)}, by {_operator(event.op)}"
    if isinstance(event, Replayed | Ran):
        return f"in {_turn(event.unit, event.phase)}"
    return "before anything runs" if event is not None else ""


def _turn(unit: str, phase: str) -> str:
    """``the backward of block``."""
    return f"the {phase or 'step'}" + (f" of {unit}" if unit else "")


def _operator(op: str) -> str:
    """Without the overload, which says nothing to a reader."""
    return op.removesuffix(".default")


def alive_table(own: RankPlan) -> Table:
    """The largest groups of what is held at the peak."""
    sizes: dict[tuple[str, str, str, str], list[int]] = defaultdict(list)
    for held in own.alive():
        sizes[held.kind, held.op, held.unit, held.phase].append(held.bytes)

    keyed = [
        (unit, (kind, op, phase), ((kind, op, phase), numbers))
        for (kind, op, unit, phase), numbers in sizes.items()
    ]
    found: list[tuple[int, tuple[str, ...]]] = []
    for names, groups in alike(keyed):
        kind, op, phase = groups[0][0]
        total = sum(sum(numbers) for _, numbers in groups)
        by = "(within its body)" if phase else "(given to the step)"
        by = _operator(op) if op else by
        unit = together(names) or (OUTSIDE if op else "")
        count = str(sum(len(numbers) for _, numbers in groups))
        share = of_share(total, own.peak_bytes)
        row = (kind, unit, by, phase, count, of_bytes(total), share)
        found.append((total, row))
    found.sort(key=lambda row: -row[0])
    head = ("<kind", "<unit", "<taken by", "<phase", ">tensors", ">bytes", ">share")
    title = "what is held then, largest first"
    return Table(title, head, [row for _, row in found], most=10)
