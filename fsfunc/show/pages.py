"""``html``: a plan as one page that any browser opens, to hover over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import pairwise
from os import PathLike
from pathlib import Path

from fsfunc.planning.estimation import Estimate
from fsfunc.planning.machines import Hardware
from fsfunc.planning.plans import Plan
from fsfunc.planning.simulation import Span
from fsfunc.printing.folding import counted
from fsfunc.printing.tables import Report, Table, of_axes, of_bytes, of_seconds, visible
from fsfunc.runtime.memory import KINDS
from fsfunc.show import estimates, plans
from fsfunc.show.figures import MEMORY, Look, is_dark, look_of
from fsfunc.show.lanes import Lane, named
from fsfunc.show.layouts import grid_of
from fsfunc.show.memory_plot import MemoryChart, memory
from fsfunc.show.shardings import LeafPicture, of_ranks
from fsfunc.show.stream_charts import streams

COLUMNS = 600  # of the memory, one to hover over each
_HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"/><title>{title}</title><style>
body {{ font: 13px/1.45 system-ui, sans-serif; color: #22262e; margin: 2em }}
h1 {{ font-size: 1.3em }} h2 {{ font-size: 1.1em; margin: 1.6em 0 .4em }}
table {{ border-collapse: collapse; margin: .3em 0 1em }}
td, th, caption {{ padding: 0 .8em 0 0; text-align: left; font-weight: normal }}
th {{ color: #737a87 }} .r {{ text-align: right }} summary {{ cursor: pointer }}
.scroll {{ overflow-x: auto; border: 1px solid #e3e5ea; padding: .3em 0 }}
.lane {{ position: relative; height: 22px; margin: 2px 0; overflow: hidden }}
.lane i {{ position: absolute; top: 0; bottom: 0; min-width: 1px; overflow: hidden;
  font: 10px/22px system-ui; text-align: center; white-space: nowrap;
  box-shadow: inset 1px 0 #fff8 }}
.name {{ position: sticky; left: 0; width: fit-content; max-width: 92vw;
  padding: 0 .4em }}
svg {{ display: block; width: 100%; height: 180px }}
rect:hover {{ fill: #22262e; fill-opacity: .25 }} i:hover {{ filter: brightness(.8) }}
.mark {{ display: inline-block; width: .9em; height: .9em; margin: 0 .3em 0 1em }}
.leaf {{ display: inline-block; vertical-align: top; margin: 0 2em 1em 0 }}
.leaf td {{ border: 1px solid #fff; padding: .1em .5em; text-align: center }}
</style></head><body>
"""
_ZOOM = """<label>zoom <input type="range" min="1" max="60" step="0.5" value="1"
oninput="document.getElementById('time').style.width = 100 * value + '%'"/></label>
"""


def html(
    plan: Plan,
    estimate: Estimate | None = None,
    hardware: Hardware | None = None,
    *,
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
    title = _text(f"a step on {of_axes(plan.mesh.axes) or 'one device'}")
    page = [_HEAD.format(title=title), f"<h1>{title}</h1>"]
    if estimate is not None:
        page += _report(estimates.estimate(estimate, plan, hardware))
    page += ["<h2>over time</h2>", _ZOOM, '<div class="scroll"><div id="time">']
    lanes: Sequence[Lane] = ()
    if estimate is not None and estimate.spans:
        chart = streams(estimate, ranks=[own.rank for own in plan.ranks])
        lanes = chart.lanes
        page.append(_legend(chart.looks()))
    for own in plan.ranks:
        for lane in lanes:
            if lane.rank == own.rank:
                page += _lane(lane, chart.start, chart.end)
        if own.peak_bytes:
            page += _memory(memory(plan, own.rank, estimate=estimate))
    page += ["</div></div>", "<h2>layouts</h2>", *_layouts(plan)]
    for own in plan.ranks:
        one = f"rank {own.rank}" + (f" ×{own.alike}" if own.alike > 1 else "")
        page += [f"<details><summary>all of {one}</summary>"]
        page += [*_report(plans.plan(plan, own.rank)), "</details>"]
    written = "\n".join([*page, "</body></html>\n"])
    if path is not None:
        Path(path).write_text(written, encoding="utf-8")
    return written


def _text(text: str) -> str:
    return escape(visible(text))


def _report(report: Report) -> Iterator[str]:
    for part in report.parts:
        if isinstance(part, Table):
            yield from _table(part)
        elif part:
            yield "<p>" + "<br/>".join(map(_text, part.splitlines())) + "</p>"


def _table(table: Table) -> Iterator[str]:
    classes = ['class="r"' if mark == ">" else "" for mark, *_ in table.head]

    def row(cells: Iterable[str], tag: str) -> str:
        pairs = zip(cells, classes, strict=True)
        return "".join(f"<{tag} {how}>{_text(cell)}</{tag}>" for cell, how in pairs)

    yield f"<table><caption>{_text(table.title)}</caption>"
    yield f"<tr>{row((name[1:] for name in table.head), 'th')}</tr>"
    yield from (f"<tr>{row(cells, 'td')}</tr>" for cells in table.rows[: table.most])
    yield f"</table>{table.rest}"


def _legend(looks: Iterable[Look]) -> str:
    marks = (
        f'<span class="mark" style="background:{look.color}"></span>{_text(look.title)}'
        for look in looks
    )
    return f'<div class="name">{"".join(marks)}</div>'


def _lane(lane: Lane, start: float, end: float) -> Iterator[str]:
    yield f'<div class="name">{_text(lane.name)}</div><div class="lane">'
    scale = 100 / (end - start)
    for span in lane.spans:
        left, right = ((at - start) * scale for at in (span.start, span.end))
        color = look_of(span).color
        ink = "#fff" if is_dark(color) else "#22262e"
        how = f"left:{left:.4f}%;width:{right - left:.4f}%;background:{color}"
        words = f'title="{_text(_words(span))}">{_text(named(span))}'
        yield f'<i style="{how};color:{ink}" {words}</i>'
    yield "</div>"


def _words(span: Span) -> str:
    """All that a span says: ``block F3, forward: 1.20 ms to 1.35 ms, 150 µs``.

    Of what is sent its bytes too: ``..., 150 µs, 2.10 MB``.
    """
    said = ", ".join(filter(None, (named(span), span.phase)))
    ends = f"{of_seconds(span.start)} to {of_seconds(span.end)}"
    sent = f", {of_bytes(span.bytes)}" if span.bytes else ""
    return f"{said}: {ends}, {of_seconds(span.end - span.start)}{sent}"


def _memory(chart: MemoryChart) -> Iterator[str]:
    """The memory of a rank as stacked areas; one hovers over columns, for the bytes."""
    curve, top = chart.curve, sum(chart.curve.peak[1])
    columns = curve.columns(COLUMNS)
    parts = _text("; ".join(words for _, words in chart.said()))
    yield f'<div class="name">{_text(chart.title)}<br/>at the peak: {parts}</div>'
    yield _legend(MEMORY[kind] for kind in chart.kinds)
    yield f'<svg viewBox="0 0 {COLUMNS} 100" preserveAspectRatio="none">'
    below = [0.0] * COLUMNS
    for kind in chart.kinds:
        sizes = [held[KINDS.index(kind)] for held in columns]
        above = [b + 100 * n / top for b, n in zip(below, sizes, strict=True)]
        steps = [f"V{100 - y:.3f}H{x + 1}" for x, y in enumerate(above)]
        steps += reversed([f"V{100 - y:.3f}H{x}" for x, y in enumerate(below)])
        yield f'<path fill="{MEMORY[kind].color}" d="M0 100{"".join(steps)}Z"/>'
        below = above
    for x, held in enumerate(columns):
        at = x * curve.length / COLUMNS
        when = of_seconds(at) if curve.timed else f"operator {at:.0f}"
        sizes = (f"{k} {of_bytes(held[KINDS.index(k)])}" for k in chart.kinds)
        said = _text(f"{when}: {of_bytes(sum(held))}: {', '.join(sizes)}")
        yield f'<rect x="{x}" width="1" height="100" fill-opacity="0">'
        yield f"<title>{said}</title></rect>"
    yield "</svg>"


def _layouts(plan: Plan) -> Iterator[str]:
    """The grid of each parameter; of those that differ in a number alone, the first."""
    seen: set[str] = set()
    for own in plan.ranks:
        for names, leaves in plans.parameter_groups(own):
            layout = leaves[0].layout
            if layout is not None and not seen & set(names):
                yield f'<div class="leaf">{_text(counted(names))}<br/>'
                picture = LeafPicture(layout, plan.mesh, None, grid_of(layout))
                yield from (*_leaf(picture), "</div>")
            seen.update(names)


def _leaf(picture: LeafPicture) -> Iterator[str]:
    grid = picture.grid
    yield _text(picture.said)
    if grid is None:
        yield "<details><summary>its parts</summary>"
        yield from (*_table(picture.table()), "</details>")
        return
    colors = grid.colors
    yield "<table>"
    for rows, keys in zip(pairwise(grid.rows), grid.keys, strict=True):
        yield "<tr>"
        for columns, key in zip(pairwise(grid.columns), keys, strict=True):
            ranks = of_ranks(picture.holders(key))
            said = f"rows {rows[0]}:{rows[1]}, columns {columns[0]}:{columns[1]}"
            yield f'<td style="background:{colors[key]}" title="{said}: rank {ranks}">'
            yield f"{ranks}</td>"
        yield "</tr>"
    yield "</table>"
