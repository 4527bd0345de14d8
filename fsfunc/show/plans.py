"""``plan``: what a step will do, as tables.

Each table is a function of one rank's plan. Rows of layers that differ in a number
alone are one row (`alike`, `counted` of `printing.folding`).
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from fractions import Fraction
from pathlib import Path

from fsfunc.comm.ledgers import Record
from fsfunc.planning.events import PHASES
from fsfunc.planning.plans import Plan, PlannedLeaf, RankPlan
from fsfunc.printing.folding import fold_programs, group_alike, name_group
from fsfunc.printing.tables import Report, Table, of_axes, of_bytes, of_count, of_flops
from fsfunc.sharded.placements import describe_tensor
from fsfunc.show.layouts import in_words
from fsfunc.show.memory_curves import OUTSIDE_UNITS, alive_table, kinds_table, unit_of


def plan(plan: Plan, rank: int | None = None) -> Report:
    """Shows the tables of a plan: units, collectives, parameters, state, and memory.

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
    >>> from fsfunc.planning.events import Allocated, Op, Ran
    >>> from fsfunc.comm.mesh import Mesh
    >>> product = Op("aten.mm", 2 * 10**9, 3 * 10**6, torch.float32, (1, 10, 10, 10))
    >>> events = [Allocated(0, 4096, "", "", ""), Ran(product, "block", "forward")]
    >>> own = RankPlan(0, 8, {"data": 0}, events, {0: "parameters"}, [], [])
    >>> shown = plan(Plan(Mesh({"data": 8}, "abstract"), (own,)))
    >>> print(shown.parts[0])
    rank 0 of data=8 and 7 more that run the same program
    2.00 GFLOP (forward 2.00 G), 0 B sent, at most 4.10 kB held
    """
    rank_plan = check_plan(plan).on(rank)
    parts: list[Table | str] = [_totals(plan, rank_plan, rank)]
    tables = [
        _programs(plan) if len(plan.ranks) > 1 else None,
        _units(rank_plan),
        _collectives(rank_plan),
        _parameters(rank_plan),
        _state(rank_plan),
        kinds_table(rank_plan),
        alive_table(rank_plan),
    ]
    for table in tables:
        if table is not None and table.rows:
            parts += ["", table]
    return Report(tuple(parts))


def _totals(plan: Plan, rank_plan: RankPlan, rank: int | None) -> str:
    """Returns the ranks of a program, and its figures in one line."""
    shown = rank_plan.rank if rank is None else rank
    ranks_text = f"rank {shown} of {of_axes(plan.mesh.axes) or 'one'}"
    if rank_plan.alike > 1:
        ranks_text += f" and {rank_plan.alike - 1} more that run the same program"
    phases = [(p, rank_plan.flops(phase=p)) for p in _phases(rank_plan)]
    by_phase = ", ".join(f"{p} {of_count(n)}" for p, n in phases if n)
    by_phase = f" ({by_phase})" if by_phase else ""
    sent = _sent(rank_plan) or "0 B sent"
    peak = f"at most {of_bytes(rank_plan.peak_bytes)} held"
    return f"{ranks_text}\n{of_flops(rank_plan.flops())}{by_phase}, {sent}, {peak}"


def _sent(rank_plan: RankPlan) -> str:
    """Returns the bytes sent over each axis: ``1.2 GB sent over data``."""
    sent: dict[str, Fraction] = defaultdict(Fraction)  # as shares of a gather are
    for record in rank_plan.records:
        sent[",".join(record.axis)] += record.bytes
    return ", ".join(f"{of_bytes(n)} sent over {axis}" for axis, n in sent.items() if n)


def _phases(rank_plan: RankPlan) -> list[str]:
    """Returns the phases in which something runs, in order."""
    phases = dict.fromkeys(phase for _, phase in rank_plan.work)
    return [p for p in PHASES if p in phases] + [p for p in phases if p not in PHASES]


def _programs(plan: Plan) -> Table:
    """Returns a table with a row for each distinct program, or for all of one size."""
    rows = [
        (
            str(rank_plan.rank),
            str(rank_plan.alike),
            " ".join(f"{axis}={i}" for axis, i in rank_plan.coordinates.items()),
            of_bytes(rank_plan.peak_bytes),
            of_count(rank_plan.flops()),
            _sent(rank_plan) or "0 B",
        )
        for rank_plan in plan.ranks
    ]
    head = ("<rank", ">ranks alike", "<at", ">peak", ">FLOP", "<sent")
    return Table("programs", head, fold_programs(rows, coordinates=2))


def _units(rank_plan: RankPlan) -> Table:
    """Returns a table of units: their parameters, and what they compute in phases."""
    phases = [p for p in _phases(rank_plan) if rank_plan.flops(phase=p)]
    leaves: dict[str, list[PlannedLeaf]] = defaultdict(list)
    for leaf in rank_plan.leaves:
        if leaf.kind == "parameters":
            leaves[unit_of(leaf)].append(leaf)
    names = dict.fromkeys(
        [u for u, _ in rank_plan.work] + list(leaves) + list(rank_plan.derived)
    )
    flops: dict[tuple[str, str], int] = defaultdict(int)
    calls: dict[str, int] = defaultdict(int)
    for (unit, phase), work in rank_plan.work.items():
        flops[unit, phase] += work.flops
        # The phases of one call of a unit, such as its backward, are no further calls.
        calls[unit] = max(calls[unit], work.calls)

    def figures(unit: str) -> tuple[int, ...]:
        params = leaves[unit]
        return (
            calls[unit],
            len(params),
            sum(numel(leaf) for leaf in params),
            sum(leaf.bytes for leaf in params),
            *(flops[unit, p] for p in phases),
            rank_plan.derived.get(unit, 0),
        )

    layouts = {u: "; ".join(dict.fromkeys(map(_layout_of, leaves[u]))) for u in names}
    rows = []
    keyed = [(unit, (figures(unit), layouts[unit]), unit) for unit in names]
    for group, units in group_alike(keyed):
        n, row = len(units), figures(units[0])
        if not any(row):
            continue
        counts = [of_count(n * x) if x else "" for x in row[:3]]
        computed = [of_count(n * x) if x else "" for x in row[4:-1]]
        size, derived = (of_bytes(n * x) if x else "" for x in (row[3], row[-1]))
        name = name_group(group, OUTSIDE_UNITS)
        rows.append((name, *counts, layouts[units[0]], size, *computed, derived))
    head = ("<unit", ">calls", ">tensors", ">elements", "<layout", ">held here")
    head += (*(f">{p} FLOP" for p in phases), ">derived, a call")
    return _without_empty(Table("units", head, rows))


def _without_empty(table: Table) -> Table:
    """Returns the table without the columns that have nothing in them."""
    full = [i for i, _ in enumerate(table.head) if any(row[i] for row in table.rows)]
    rows = [tuple(row[i] for i in full) for row in table.rows]
    return Table(table.title, tuple(table.head[i] for i in full), rows)


def numel(leaf: PlannedLeaf) -> int:
    """Returns the number of elements of the whole leaf."""
    return math.prod(leaf.shape)


def _whole_bytes(leaf: PlannedLeaf) -> int:
    return numel(leaf) * leaf.dtype.itemsize


def _layout_of(leaf: PlannedLeaf) -> str:
    """Describes the layout of a leaf without the stage that owns it.

    So layers on different stages of a pipeline have one layout.
    """
    return "whole" if leaf.layout is None else in_words(leaf.layout, owner=False)


def _common_layout(leaves: list[PlannedLeaf]) -> str:
    """Describes the one layout of several leaves, with their owner if that is one."""
    texts = {in_words(leaf.layout) for leaf in leaves if leaf.layout is not None}
    return texts.pop() if len(texts) == 1 else _layout_of(leaves[0])


def _collectives(rank_plan: RankPlan) -> Table:
    """Returns a table with a row for each collective, axis and phase."""
    groups: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
    for record in rank_plan.records:
        groups[record.op, ",".join(record.axis), record.phase].append(record)
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
        for (op, axis, phase), records in groups.items()
    ]
    head = ("<collective", "<over", "<phase", ">count", ">sends", ">largest", "<first")
    return Table("collectives", head, rows)


def _line(where: str) -> str:
    """Returns ``file:line``, relative to the current folder if it is within."""
    path, colon, line = where.rpartition(":")
    if not colon:
        return where
    file = Path(path)
    if file.is_relative_to(os.getcwd()):
        return f"{file.relative_to(os.getcwd())}:{line}"
    return f"{file.name}:{line}"


def parameter_groups(rank_plan: RankPlan) -> list[tuple[list[str], list[PlannedLeaf]]]:
    """Groups the parameters that differ in a number alone, as (paths, leaves)."""
    keyed = [
        (leaf.path, (leaf.shape, leaf.dtype, _layout_of(leaf)), leaf)
        for leaf in rank_plan.leaves
        if leaf.kind == "parameters"
    ]
    return group_alike(keyed)


def _parameters(rank_plan: RankPlan) -> Table:
    """Returns a table with a row for each parameter, or for all of equal layers."""
    rows = []
    for names, leaves in parameter_groups(rank_plan):
        first, local_bytes = leaves[0], sum(leaf.bytes for leaf in leaves)
        each = describe_tensor(first.shape, first.dtype)
        whole = of_bytes(sum(map(_whole_bytes, leaves)))
        rows.append(
            (
                name_group(names),
                each,
                _common_layout(leaves),
                whole,
                of_bytes(local_bytes),
            )
        )
    head = ("<path", "<each", "<layout", ">whole", ">held here")
    return Table("parameters", head, rows)


def _state(rank_plan: RankPlan) -> Table:
    """Returns a table with a row for each part of the state and the batch."""
    groups: dict[tuple[str, str], list[PlannedLeaf]] = defaultdict(list)
    for leaf in rank_plan.leaves:
        groups[leaf.path.partition("/")[0], leaf.kind].append(leaf)
    rows = []
    for (part, kind), leaves in groups.items():
        whole = of_bytes(sum(map(_whole_bytes, leaves)))
        local = of_bytes(sum(leaf.bytes for leaf in leaves))
        elements = of_count(sum(map(numel, leaves)))
        rows.append((part, kind, str(len(leaves)), elements, whole, local))
    if len(rows) > 1:
        total = of_bytes(sum(leaf.bytes for leaf in rank_plan.leaves))
        rows.append(("total", "", "", "", "", total))
    head = ("<given", "<kind", ">tensors", ">elements", ">whole", ">held here")
    return Table("state and batch", head, rows)


def check_plan(plan: Plan) -> Plan:
    """Returns ``plan``; raises TypeError if it is none."""
    if not isinstance(plan, Plan):
        raise TypeError(
            f"this shows a plan, and got {type(plan).__name__}: make one by ff.plan("
            "step, state, batch) inside spmd; a rank's own is chosen by rank="
        )
    return plan
