"""``html``: a plan as one page that any browser opens, to hover over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from os import PathLike
from pathlib import Path

from fsfunc.planning.estimation import Estimate
from fsfunc.planning.machines import Hardware
from fsfunc.planning.plans import Plan, PlannedLeaf, RankPlan
from fsfunc.printing.folding import alike, counted
from fsfunc.printing.tables import Report, Table, of_axes, of_count
from fsfunc.sharded.placements import describe
from fsfunc.show import estimates, plans
from fsfunc.show.chart_markup import WIDEST, Sheet, marks, text
from fsfunc.show.charts import MEMORY
from fsfunc.show.layouts import grid_of, in_words
from fsfunc.show.memory_plot import MemoryChart, memory
from fsfunc.show.shardings import LeafPicture, of_ranks
from fsfunc.show.stream_charts import StreamChart, streams

_HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"/><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"/><style>
body {{ font: 13px/1.5 system-ui, sans-serif; color: #22262e; background: #fff;
  margin: 2em; overflow-wrap: anywhere }}
h1 {{ font-size: 1.4em; margin: 0 0 .2em }} 
h2 {{ font-size: 1.15em; margin: 2em 0 .4em }}
h3 {{ font-size: 1em; margin: 1.2em 0 .2em }} p {{ margin: .3em 0; max-width: 110ch }}
.faint {{ color: #737a87 }} .wide, .scroll {{ overflow-x: auto }}
.scroll h3, .scroll p {{ position: sticky; left: 0; width: fit-content;
  max-width: calc(100vw - 4.5em) }}
table {{ border-collapse: collapse; margin: .6em 0 1em }}
caption {{ text-align: left; font-weight: 600; white-space: nowrap }}
td, th {{ padding: 0 1em 0 0; text-align: left; font-weight: normal;
  white-space: nowrap }}
th {{ color: #737a87 }} .r {{ text-align: right }} summary {{ cursor: pointer }}
label {{ display: block; margin: .4em 0 }} label input {{ vertical-align: middle }}
.leaf {{ display: inline-block; vertical-align: top; margin: 0 2.5em 1.2em 0;
  max-width: 100% }}
.leaf td {{ border: 1px solid #fff; padding: .1em .5em; text-align: center }}
@media (max-width: 600px) {{ body {{ margin: 1em }} }}
{style}
</style></head><body>
"""
_ZOOM = f"""<label>wider <input type="range" min="1" max="{WIDEST}" step="0.5" value="1"
oninput="document.getElementById('time').style.width = 100 * value + '%'"/></label>
"""


def html(
    plan: Plan,
    estimate: Estimate | None = None,
    hardware: Hardware | None = None,
    *,
    title: str = "",
    path: str | PathLike[str] | None = None,
) -> str:
    """One page with all of a plan: its times, memory, layouts and tables.

    A file by itself: it loads nothing, and is well-formed XML. Every span of the
    estimate is there once (a message where it is sent); what one points at says
    what it is, its times and its bytes.

    Args:
        plan: of ``ff.plan``.
        estimate: of the plan; without one there are no times, and memory is over
            operators.
        hardware: on which; with it: whether the plan fits.
        title: of the page; by default the step's name, its stack and its mesh.
        path: the file to write.

    Raises:
        TypeError, ValueError: no plan, or the estimate of another one.

    >>> from fsfunc.comm.mesh import Mesh
    >>> from fsfunc.planning.plans import RankPlan
    >>> own = RankPlan(0, 8, {"data": 0}, [], {}, [], [])
    >>> "<h1>a step on data=8</h1>" in html(Plan(Mesh({"data": 8}, "abstract"), (own,)))
    True
    """
    plans.check_plan(plan)
    where = of_axes(plan.mesh.axes) or "one device"
    title = title or f"{plan.step or 'a step'} on {where}"
    tables = list[str]()
    if estimate is not None:
        tables += _report(estimates.estimate(estimate, plan, hardware))
    facts = f'<p class="faint">{text(_facts(plan, estimate))}</p>'
    page = [f"<h1>{text(title)}</h1>", facts, *tables]
    chart = None
    if estimate is not None and estimate.spans:
        chart = streams(estimate, ranks=[own.rank for own in plan.ranks])
    drawn, style = _over_time(plan, estimate, chart)
    page += [*drawn, "<h2>layouts</h2>", *_layouts(plan), "<h2>tables</h2>"]
    for own in plan.ranks:
        page += [f"<details><summary>all of {text(_rank(plan, own))}</summary>"]
        page += [*_report(plans.plan(plan, own.rank)), "</details>"]
    head = _HEAD.format(title=text(title), style=style)
    written = "\n".join([head, *page, "</body></html>\n"])
    if path is not None:
        Path(path).write_text(written, encoding="utf-8")
    return written


def _facts(plan: Plan, estimate: Estimate | None) -> str:
    """The model, what a rank is given of the batch, and the devices."""
    leaves = {leaf.path: leaf for own in plan.ranks for leaf in own.leaves}
    model = [leaf for leaf in leaves.values() if leaf.kind == "parameters"]
    batch = [x for x in leaves.values() if x.path.partition("/")[0] == "batch"]
    facts = []
    if model:
        numbers = of_count(sum(map(plans.numel, model)))
        facts.append(f"{numbers} parameters in {len(model)} tensors")
    if batch:
        given = ", ".join(describe(x.shape, x.dtype) for x in batch[:_GIVEN])
        more = f" and {len(batch) - _GIVEN} more" if len(batch) > _GIVEN else ""
        facts.append(f"batch of a rank {given}{more}")
    ranks = f"{plan.mesh.size} ranks" if plan.mesh.size > 1 else "1 rank"
    facts.append(ranks + (f" on {estimate.hardware}" if estimate is not None else ""))
    return ", ".join(facts)


_GIVEN = 3  # tensors of a batch that the title names


def _rank(plan: Plan, own: RankPlan) -> str:
    """``rank 0 ×16, pipe=0``: of ranks that run different programs, where it is."""
    alike = f" ×{own.alike}" if own.alike > 1 else ""
    at = "".join(f", {axis}={own.coordinates[axis]}" for axis in plan.asked)
    return f"rank {own.rank}{alike}{at}"


def _over_time(
    plan: Plan, estimate: Estimate | None, chart: StreamChart | None
) -> tuple[list[str], str]:
    """The streams and the memory of all ranks over one axis, and their style."""
    held = {
        own.rank: memory(plan, own.rank, estimate=estimate)
        for own in plan.ranks
        if own.peak_bytes
    }
    timed = chart is not None
    end = max((one.curve.length for one in held.values()), default=0.0)
    start, end = (chart.start, chart.end) if chart is not None else (0.0, end)
    say = chart.say_time if chart is not None else lambda at: f"{at:.0f}"
    sheet = Sheet(start, end, say)
    page = [f"<h2>over {'time' if timed else 'operators'}</h2>"]
    if not timed and not held:
        return [], sheet.style()
    page += [_ZOOM, *([marks(chart.looks())] if chart is not None else [])]
    kinds = {kind for one in held.values() for kind in one.kinds}
    if held:
        page.append(marks(look for kind, look in MEMORY.items() if kind in kinds))
    page.append('<div class="scroll"><div class="time" id="time">')
    top = round(1.02 * max((own.peak_bytes for own in plan.ranks), default=0))
    for own in plan.ranks:
        page.append(f"<h3>{text(_rank(plan, own))}</h3>")
        if chart is not None:
            for row in chart.rows_of(own.rank):
                page += sheet.row(row)
        if (one := held.get(own.rank)) is not None:
            page += sheet.memory(one, top)
        page += sheet.axis()
        if one is not None:
            page += _peak(one)
    if chart is not None and chart.late:
        page.append(f"<p>{text(chart.said_late)}</p>")
    return [*page, "</div></div>"], sheet.style()


def _peak(chart: MemoryChart) -> Iterator[str]:
    """What a rank's memory is when most is held."""
    parts = "; ".join(words for _, words in chart.said())
    yield f'<p>{text(chart.title)}<br/><span class="faint">{text(parts)}</span></p>'


def _report(report: Report) -> Iterator[str]:
    for part in report.parts:
        if isinstance(part, Table):
            yield from _table(part)
        elif part:
            yield "<p>" + "<br/>".join(map(text, part.splitlines())) + "</p>"


def _table(table: Table) -> Iterator[str]:
    classes = ['class="r"' if mark == ">" else "" for mark, *_ in table.head]

    def row(cells: Iterable[str], tag: str) -> str:
        pairs = zip(cells, classes, strict=True)
        return "".join(f"<{tag} {how}>{text(cell)}</{tag}>" for cell, how in pairs)

    yield f'<div class="wide"><table><caption>{text(table.title)}</caption>'
    yield f"<tr>{row((name[1:] for name in table.head), 'th')}</tr>"
    yield from (f"<tr>{row(cells, 'td')}</tr>" for cells in table.rows[: table.most])
    yield f"</table>{table.rest}</div>"


def _layouts(plan: Plan) -> Iterator[str]:
    """The grid of each parameter; of those that differ in a number alone, the first."""
    seen: set[str] = set()
    for own in plan.ranks:
        for names, leaves in plans.parameter_groups(own):
            if leaves[0].layout is not None and not seen & set(names):
                yield '<div class="leaf">'
                yield from (*_leaf(plan, names, leaves), "</div>")
            seen.update(names)


def _leaf(plan: Plan, names: list[str], leaves: list[PlannedLeaf]) -> Iterator[str]:
    """Equal leaves: who owns which of them, and who holds the cells of the first."""
    first = leaves[0].layout
    assert first is not None, "the caller leaves out leaves without a layout"
    keyed = [
        (name, in_words(leaf.layout), name)
        for name, leaf in zip(names, leaves, strict=True)
        if leaf.layout is not None
    ]
    layouts = {name: said for name, said, _ in keyed}
    groups = [found for found, _ in alike(keyed)]
    yield f"{text(counted(names))}: {describe(first.shape, first.dtype)}"
    for found in groups:
        which = f"{counted(found)}: " if len(groups) > 1 else ""
        yield f"<br/>{text(which + layouts[found[0]])}"
    if len(groups) > 1:
        yield f'<br/><span class="faint">the ranks of {text(names[0])}:</span>'
    yield from _grid(LeafPicture(first, plan.mesh, None, grid_of(first)))


def _grid(picture: LeafPicture) -> Iterator[str]:
    """A cell for each part, which names the ranks that hold it."""
    grid = picture.grid
    if grid is None:
        yield "<details><summary>its parts</summary>"
        yield from (*_table(picture.table()), "</details>")
        return
    colors = grid.colors
    yield '<div class="wide"><table>'
    for rows, keys in zip(pairwise(grid.rows), grid.keys, strict=True):
        yield "<tr>"
        for columns, key in zip(pairwise(grid.columns), keys, strict=True):
            ranks = of_ranks(picture.holders(key))
            said = f"rows {rows[0]}:{rows[1]}, columns {columns[0]}:{columns[1]}"
            yield f'<td style="background:{colors[key]}" title="{said}: rank {ranks}">'
            yield f"{ranks}</td>"
        yield "</tr>"
    yield "</table></div>"
