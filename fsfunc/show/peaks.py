"""Tables of what is held when a plan holds most."""

from __future__ import annotations

from collections import defaultdict

from fsfunc.planning.events import Ran, Took
from fsfunc.planning.plans import PlannedLeaf, RankPlan
from fsfunc.printing.folding import alike, together
from fsfunc.printing.tables import Table, of_bytes, of_share

OUTSIDE_UNITS = "(outside units)"
_GIVEN = "(given to the step)"


def unit_of(leaf: PlannedLeaf) -> str:
    """The unit of a leaf; a buffer's name goes on with its first leaf."""
    return leaf.unit.partition(":")[0]


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


def held_by_unit(own: RankPlan) -> list[tuple[str, str, int]]:
    """(kind, unit or "", bytes) of what is held at the peak, largest first."""
    given: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for leaf in own.leaves:
        given[leaf.kind][unit_of(leaf)] += leaf.bytes
    sizes: dict[tuple[str, str], int] = defaultdict(int)
    left: dict[str, int] = defaultdict(int)  # of what the step was given
    for held in own.alive():
        if held.op:
            sizes[held.kind, held.unit] += held.bytes
        else:
            left[held.kind] += held.bytes
    for kind, size in left.items():
        units = given[kind]
        if sum(units.values()) != size:  # some are gone by then, of whatever units
            units = {"": size}
        for unit, n in units.items():
            sizes[kind, unit] += n
    keyed = [(unit, kind, (kind, size)) for (kind, unit), size in sizes.items() if size]
    found = [
        (rows[0][0], together(names), sum(size for _, size in rows))
        for names, rows in alike(keyed)
    ]
    return sorted(found, key=lambda row: -row[2])


def peak_words(own: RankPlan) -> str:
    """The moment of most memory: ``in the backward of block, by aten.mm``."""
    event = own.events[own.peak_at] if own.events else None
    if isinstance(event, Took) and event.op:
        return f"in {_turn(event.unit, event.phase)}, by {_operator(event.op)}"
    if isinstance(event, Ran):
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
        by = _operator(op) if op else _GIVEN
        unit = together(names) or (OUTSIDE_UNITS if op else "")
        count = str(sum(len(numbers) for _, numbers in groups))
        share = of_share(total, own.peak_bytes)
        row = (kind, unit, by, phase, count, of_bytes(total), share)
        found.append((total, row))
    found.sort(key=lambda row: -row[0])
    head = ("<kind", "<unit", "<taken by", "<phase", ">tensors", ">bytes", ">share")
    title = "what is held then, largest first"
    return Table(title, head, [row for _, row in found], most=10)
