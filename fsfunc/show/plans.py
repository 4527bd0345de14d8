"""``plan``: what a step will do, as tables."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from fractions import Fraction
from pathlib import Path
from typing import Any

from fsfunc.comm.ledgers import Record
from fsfunc.planning.events import PHASES
from fsfunc.planning.plans import Plan, PlannedLeaf, RankPlan
from fsfunc.printing.folding import alike, counted
from fsfunc.printing.tables import (
    Report,
    Table,
    of_axes,
    of_bytes,
    of_count,
    of_flops,
)
from fsfunc.sharded.placements import describe
from fsfunc.show.layouts import in_words
from fsfunc.show.memory_curves import (
    OUTSIDE_UNITS,
    alive_table,
    kinds_table,
    unit_of,
)


def plan(plan: Plan, rank: int | None = None) -> Report:
    """The tables of a plan: units, collectives, parameters, state, and memory.

    Bytes and FLOPs are those of one rank and one step; 1 GB is 10^9 bytes. Rows that
    differ in a number alone, as equal layers do, are one row: ``blocks/0-999/up``.
    Rows add up: of a unit that runs a thousand times, they say what all calls take.

    Args:
        plan: of ``ff.plan``.
        rank: the rank of the program to show; by default the lowest that was planned.

    Returns:
        A ``Report``: print it, or print it in colours with ``rich.print``.

    Raises:
        TypeError: no plan.
        IndexError: a rank that the mesh has not.

    >>> import torch
    >>> from fsfunc.planning.events import Op, Ran, Took
    >>> from fsfunc.comm.mesh import Mesh
    >>> product = Op("aten.mm", 2 * 10**9, 3 * 10**6, torch.float32, (1, 10, 10, 10))
    >>> events = [Took(0, 4096, "", "", ""), Ran(product, "block", "forward")]
    >>> own = RankPlan(0, 8, {"data": 0}, events, {0: "parameters"}, [], [])
    >>> shown = plan(Plan(Mesh({"data": 8}, "abstract"), (own,)))
    >>> print(shown.parts[0])
    rank 0 of data=8 and 7 more that run the same program
    2.00 GFLOP (forward 2.00 G), 0 B sent, at most 4.10 kB held
    """
    chosen = check_plan(plan).on(rank)
    parts: list[Table | str] = [_totals(plan, chosen, rank)]
    tables = [
        _programs(plan) if len(plan.ranks) > 1 else None,
        _units(chosen),
        _collectives(chosen),
        _parameters(chosen),
        _state(chosen),
        kinds_table(chosen),
        alive_table(chosen),
    ]
    for table in tables:
        if table is not None and table.rows:
            parts += ["", table]
    return Report(tuple(parts))


def _totals(plan: Plan, rank_plan: RankPlan, rank: int | None) -> str:
    """The ranks of a program, and its figures in one line."""
    shown = rank_plan.rank if rank is None else rank
    first = f"rank {shown} of {of_axes(plan.mesh.axes) or 'one'}"
    if rank_plan.alike > 1:
        first += f" and {rank_plan.alike - 1} more that run the same program"
    phases = [(p, rank_plan.flops(phase=p)) for p in _phases(rank_plan)]
    split = ", ".join(f"{p} {of_count(n)}" for p, n in phases if n)
    split = f" ({split})" if split else ""
    sent = _sent(rank_plan) or "0 B sent"
    held = f"at most {of_bytes(rank_plan.peak_bytes)} held"
    return f"{first}\n{of_flops(rank_plan.flops())}{split}, {sent}, {held}"


def _sent(rank_plan: RankPlan) -> str:
    """The bytes that a rank sends over each axis: ``1.2 GB sent over data``."""
    over: dict[str, Fraction] = defaultdict(Fraction)
    for record in rank_plan.records:
        over[",".join(record.axis)] += record.bytes
    return ", ".join(f"{of_bytes(n)} sent over {axis}" for axis, n in over.items() if n)


def _phases(rank_plan: RankPlan) -> list[str]:
    """The phases in which something runs, in order."""
    found = dict.fromkeys(phase for _, phase in rank_plan.work)
    return [p for p in PHASES if p in found] + [p for p in found if p not in PHASES]


def _programs(plan: Plan) -> Table:
    """One row for each distinct program."""
    rows = [
        (
            str(rank_plan.rank),
            str(rank_plan.alike),
            " ".join(f"{axis}={at}" for axis, at in rank_plan.coordinates.items()),
            of_bytes(rank_plan.peak_bytes),
            of_count(rank_plan.flops()),
            _sent(rank_plan) or "0 B",
        )
        for rank_plan in plan.ranks
    ]
    head = ("<rank", ">ranks alike", "<at", ">peak", ">FLOP", "<sent")
    return Table("programs", head, rows)


def _units(rank_plan: RankPlan) -> Table:
    """One row for each unit: its parameters, and what it computes in each phase."""
    phases = [p for p in _phases(rank_plan) if rank_plan.flops(phase=p)]
    leaves: dict[str, list[PlannedLeaf]] = defaultdict(list)
    for leaf in rank_plan.leaves:
        if leaf.kind == "parameters":
            leaves[unit_of(leaf)].append(leaf)
    names = dict.fromkeys([u for u, _ in rank_plan.work] + list(leaves) + list(rank_plan.derived))
    flops: dict[tuple[str, str], int] = defaultdict(int)
    calls: dict[str, int] = defaultdict(int)
    for (unit, phase), work in rank_plan.work.items():
        flops[unit, phase] += work.flops
        calls[unit] = max(calls[unit], work.calls)

    def figures(unit: str) -> tuple[int, ...]:
        held = leaves[unit]
        return (
            calls[unit],
            len(held),
            sum(numel(leaf) for leaf in held),
            sum(leaf.bytes for leaf in held),
            *(flops[unit, p] for p in phases),
            rank_plan.derived.get(unit, 0),
        )

    layouts = {u: "; ".join(dict.fromkeys(map(_layout_of, leaves[u]))) for u in names}
    rows = []
    keyed = [(unit, (figures(unit), layouts[unit]), unit) for unit in names]
    for group, found in alike(keyed):
        n, row = len(found), figures(found[0])
        if not any(row):
            continue
        counts = [of_count(n * x) if x else "" for x in row[:3]]
        computed = [of_count(n * x) if x else "" for x in row[4:-1]]
        held, kept = (of_bytes(n * x) if x else "" for x in (row[3], row[-1]))
        name = counted(group, OUTSIDE_UNITS)
        rows.append((name, *counts, layouts[found[0]], held, *computed, kept))
    head = ("<unit", ">calls", ">tensors", ">elements", "<layout", ">held here")
    head += (*(f">{p} FLOP" for p in phases), ">derived, a call")
    return _without_empty(Table("units", head, rows))


def _without_empty(table: Table) -> Table:
    """The table without the columns that have nothing in them."""
    full = [i for i, _ in enumerate(table.head) if any(row[i] for row in table.rows)]
    rows = [tuple(row[i] for i in full) for row in table.rows]
    return Table(table.title, tuple(table.head[i] for i in full), rows)


def numel(leaf: PlannedLeaf) -> int:
    """The elements of the whole."""
    return math.prod(leaf.shape)


def _whole_bytes(leaf: PlannedLeaf) -> int:
    return numel(leaf) * leaf.dtype.itemsize


def _layout_of(leaf: PlannedLeaf) -> str:
    """The layout of a leaf in words; that of one layer on each stage is one."""
    return "whole" if leaf.layout is None else in_words(leaf.layout, owner=False)


def _common_layout(leaves: list[PlannedLeaf]) -> str:
    """The one layout of several leaves, with their owner if that is one too."""
    said = {in_words(leaf.layout) for leaf in leaves if leaf.layout is not None}
    return said.pop() if len(said) == 1 else _layout_of(leaves[0])


def _collectives(rank_plan: RankPlan) -> Table:
    """One row for each collective, axis and phase."""
    found: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
    for record in rank_plan.records:
        found[record.op, ",".join(record.axis), record.phase].append(record)
    rows = [
        (
            op,
            axis,
            phase or "update",
            str(len(records)),
            of_bytes(sum((r.bytes for r in records), Fraction(0))),
            of_bytes(max(r.bytes for r in records)),
            _line(records[0].where),
        )
        for (op, axis, phase), records in found.items()
    ]
    head = ("<collective", "<over", "<phase", ">count", ">sends", ">largest", "<first")
    return Table("collectives", head, rows)


def _line(where: str) -> str:
    """``file:line``, as short as it is plain from the current folder."""
    path, colon, line = where.rpartition(":")
    if not colon:
        return where
    here = Path(path)
    if here.is_relative_to(os.getcwd()):
        return f"{here.relative_to(os.getcwd())}:{line}"
    return f"{here.name}:{line}"


def parameter_groups(rank_plan: RankPlan) -> list[tuple[list[str], list[PlannedLeaf]]]:
    """Paths and leaves of the parameters, those that differ in a number together."""
    keyed = [
        (leaf.path, (leaf.shape, leaf.dtype, _layout_of(leaf)), leaf)
        for leaf in rank_plan.leaves
        if leaf.kind == "parameters"
    ]
    return alike(keyed)


def _parameters(rank_plan: RankPlan) -> Table:
    """One row for each parameter, or for all that differ in a layer's number."""
    rows = []
    for names, leaves in parameter_groups(rank_plan):
        first, held = leaves[0], sum(leaf.bytes for leaf in leaves)
        what = describe(first.shape, first.dtype)
        whole = of_bytes(sum(map(_whole_bytes, leaves)))
        rows.append(
            (counted(names), what, _common_layout(leaves), whole, of_bytes(held))
        )
    head = ("<path", "<each", "<layout", ">whole", ">held here")
    return Table("parameters", head, rows)


def _state(rank_plan: RankPlan) -> Table:
    """One row for each part of what the step is given."""
    found: dict[tuple[str, str], list[PlannedLeaf]] = defaultdict(list)
    for leaf in rank_plan.leaves:
        found[leaf.path.partition("/")[0], leaf.kind].append(leaf)
    rows = []
    for (part, kind), leaves in found.items():
        whole = sum(map(_whole_bytes, leaves))
        here = sum(leaf.bytes for leaf in leaves)
        elements = of_count(sum(map(numel, leaves)))
        row = (part, kind, str(len(leaves)), elements, of_bytes(whole), of_bytes(here))
        rows.append(row)
    if len(rows) > 1:
        held = of_bytes(sum(leaf.bytes for leaf in rank_plan.leaves))
        rows.append(("total", "", "", "", "", held))
    head = ("<given", "<kind", ">tensors", ">elements", ">whole", ">held here")
    return Table("state and batch", head, rows)


def check_plan(plan: Any) -> Plan:
    """``plan``, if it is one."""
    if not isinstance(plan, Plan):
        raise TypeError(
            f"this shows a plan, and got {type(plan).__name__}: make one by ff.plan("
            "step, state, batch) inside spmd; a rank's own is chosen by rank="
        )
    return plan
