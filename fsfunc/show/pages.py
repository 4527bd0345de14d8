"""``html``: a plan as one page that any browser opens, to hover over.

`html` puts the page together: `Sheet` draws rows of bars and memory over one axis of
time, `_layouts` the grids of parameters, `_report` the tables.

All positions in its charts are shares of their width, so that they fit any page and can
be widened. A label is shown if its bar has room for it, by rules of the page's style
that ask for the bar's width (container queries): nothing runs in the browser but the
slider that widens the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from html import escape
from itertools import pairwise
from os import PathLike
from pathlib import Path

from fsfunc.planning.estimation import Estimate
from fsfunc.planning.machines import Hardware
from fsfunc.planning.plans import Plan, PlannedLeaf, RankPlan
from fsfunc.printing.folding import group_alike, name_group
from fsfunc.printing.tables import Report, Table, of_axes, of_bytes, of_count, visible
from fsfunc.runtime.memory import KINDS
from fsfunc.sharded.placements import describe_tensor
from fsfunc.show import estimates, plans
from fsfunc.show.charts import MEMORY, Bar, Look, Row, Tick, outline, ticks
from fsfunc.show.layouts import grid_of, in_words
from fsfunc.show.memory_plot import MemoryChart, memory
from fsfunc.show.shardings import LeafPicture, of_ranks
from fsfunc.show.stream_charts import StreamChart, streams

WIDEST = 60  # times the page's width: how far a chart can be widened
COLUMNS = 600  # of the memory's chart, one to hover over each
_LETTER, _PADDING = 6.7, 6  # pixels of a label: of each letter, and around it
_PAGE = 1500  # pixels of a wide page
_TICKS = {0: 5, 800: 12, 2400: 36, 8000: 120}  # by an axis' pixels, how many marks
STYLE = """
.time { min-width: 100% }
.row { display: grid; grid-template-columns: 76px 1fr; padding-right: 54px;
  align-items: stretch }
.key { position: sticky; left: 0; z-index: 2; background: #fff; color: #737a87;
  font-size: 11px; line-height: 22px; padding-right: 6px; text-align: right;
  overflow-wrap: anywhere }
.lane { position: relative; height: 22px; overflow: hidden; margin: 1px 0;
  background: linear-gradient(90deg, #22262e1c 1px, #0000 1px) 0 0 / var(--grid) }
.lane i { position: absolute; top: 0; bottom: 0; min-width: 1px; overflow: hidden;
  font: 11px/22px system-ui, sans-serif; text-align: center; white-space: nowrap;
  box-shadow: inset 1px 0 #fff9; container-type: inline-size }
.lane i span, .axis span { display: none }
.lane i:hover { filter: brightness(.85) }
.plain i { box-shadow: none }
.axis { position: relative; height: 20px; container-type: inline-size; margin: 0 0 8px;
  border-top: 1px solid #b9bec8 }
.axis span { position: absolute; white-space: nowrap; padding-left: 3px; color: #737a87;
  font: 11px/18px system-ui, sans-serif; border-left: 1px solid #b9bec8 }
.area { position: relative; height: 170px; margin-top: 10px;
  background: linear-gradient(90deg, #22262e1c 1px, #0000 1px) 0 0 / var(--grid) }
.area svg { display: block; width: 100%; height: 100% }
.area u { position: absolute; left: 0; right: 0; border-top: 1px solid #22262e26 }
.area rect:hover { fill: #22262e; fill-opacity: .25 }
.sizes { position: sticky; left: 0; z-index: 2; background: #fff; margin-top: 10px }
.sizes span { position: absolute; right: 6px; transform: translateY(50%);
  white-space: nowrap; font: 11px/1 system-ui, sans-serif; color: #737a87 }
.sizes span:first-child { transform: none }
.marks span { white-space: nowrap; margin-right: 1.1em }
.marks i { display: inline-block; width: .9em; height: .9em; margin-right: .35em;
  vertical-align: -.1em }
"""


class Sheet:
    """A chart's time axis, and the style of what has been drawn over it so far."""

    start: float
    end: float

    def __init__(self, start: float, end: float, format_value: Callable[[float], str]):
        self.start, self.end = start, end
        self.looks: dict[tuple[str, str], str] = {}  # (colour, ink) -> class
        # (letters of a label, letters of the next longer one of its bar or 0).
        self.label_sizes: set[tuple[int, int]] = set()
        self.ticks: list[Tick] = []
        if end > start:
            self.ticks = ticks(end, format_value, tuple(_TICKS.values()), start)

    def style(self) -> str:
        """Returns the rules that the page needs for what was drawn."""
        first_two = [tick.value for tick in self.ticks if not tick.level][:2]
        grid = self._share(first_two[1] - first_two[0]) if len(first_two) > 1 else 100.0
        rules = [STYLE, f":root {{ --grid: {grid:.4f}% 100% }}"]
        for (color, ink), name in self.looks.items():
            rules.append(f".{name} {{ background: {color}; color: {ink} }}")
        # A label is shown in bars that have room for it, and none for the longer one.
        for letters, longer in sorted(self.label_sizes):
            at_least = f"(min-width: {_pixels(letters)}px)"
            at_most = (
                f" and (max-width: {_pixels(longer) - 0.01:.2f}px)" if longer else ""
            )
            rule = f".lane .w{letters}-{longer} {{ display: inline }}"
            rules.append(f"@container {at_least}{at_most} {{ {rule} }}")
        for level, width in enumerate(_TICKS):
            rule = f".axis .t{level} {{ display: inline }}"
            rules.append(f"@container (min-width: {width}px) {{ {rule} }}")
        return "\n".join(rules)

    def _share(self, time: float) -> float:
        """Returns a length of time in per cent of the width."""
        return 100 * time / (self.end - self.start)

    def row(self, row: Row) -> Iterator[str]:
        """Yields a row of bars, its name left of it."""
        plain = "" if len(row.bars) < _PAGE / 4 else " plain"
        yield f'<div class="row"><div class="key">{text(row.short)}</div>'
        yield f'<div class="lane{plain}">'
        yield from map(self._bar, row.bars)
        yield "</div></div>"

    def _bar(self, bar: Bar) -> str:
        left, width = self._share(bar.start - self.start), bar.end - bar.start
        look = self.looks.setdefault((bar.color, bar.ink), f"c{len(self.looks)}")
        position = f"left:{left:.3f}%;width:{self._share(width):.3f}%"
        # Labels without room on the widest page are not in the file.
        widest = WIDEST * _PAGE * self._share(width) / 100
        labels, longer = list[str](), 0
        for label in bar.labels:
            letters = len(label)
            if label and _pixels(letters) <= widest:
                self.label_sizes.add((letters, longer))
                labels.append(f'<span class="w{letters}-{longer}">{text(label)}</span>')
                longer = letters
        attributes = f'class="{look}" style="{position}" title="{text(bar.words)}"'
        return f"<i {attributes}>{''.join(labels)}</i>"

    def axis(self) -> Iterator[str]:
        """Yields the marks of time."""
        yield '<div class="row"><div class="key"></div><div class="axis">'
        for tick in self.ticks:
            left = self._share(tick.value - self.start)
            attributes = f'class="t{tick.level}" style="left:{left:.3f}%"'
            yield f"<span {attributes}>{text(tick.text)}</span>"
        yield "</div></div>"

    def memory(self, chart: MemoryChart, top: int) -> Iterator[str]:
        """Yields a rank's memory as stacked areas, with words for each moment.

        Args:
            top: bytes at the upper edge, one for all charts of a page.
        """
        curve = chart.curve
        columns = curve.columns(COLUMNS)
        sizes = [tick for tick in ticks(top, of_bytes, (4,)) if tick.value <= top]
        yield '<div class="row"><div class="sizes">'
        heights = [f'style="bottom:{100 * tick.value / top:.2f}%"' for tick in sizes]
        for tick, height in zip(sizes, heights, strict=True):
            yield f"<span {height}>{tick.text}</span>"
        yield '</div><div class="area">'
        yield from (f"<u {height}></u>" for height in heights[1:])
        yield f'<svg viewBox="0 0 {COLUMNS} 1000" preserveAspectRatio="none">'
        for look, below, above in chart.areas(columns):
            yield f'<path fill="{look.color}" d="{outline(below, above, top)}"/>'
        # An invisible rectangle over each run of equal columns has the words.
        start = 0
        for x, column in enumerate(columns):
            if x + 1 < COLUMNS and columns[x + 1] == column:
                continue
            each = (
                f"{look.title} {of_bytes(column[KINDS.index(look.title)])}"
                for look, *_ in chart.areas([column])
            )
            when = chart.describe_position(start * curve.length / COLUMNS)
            words = text(f"{when}: {of_bytes(sum(column))}: {', '.join(each)}")
            shape = f'x="{start}" width="{x + 1 - start}" height="1000"'
            yield f'<rect {shape} fill-opacity="0"><title>{words}</title></rect>'
            start = x + 1
        yield "</svg></div></div>"


def text(words: str) -> str:
    """Returns words as HTML, with escapes for letters that would not be seen."""
    return escape(visible(words))


def legend_html(looks: Iterable[Look]) -> str:
    """Returns the legend of looks."""
    entries = (
        f'<span><i style="background:{look.color}"></i>{text(look.title)}</span> '
        for look in looks
    )
    return f'<p class="marks">{"".join(entries)}</p>'


def _pixels(letters: int) -> float:
    """Returns the width of a label."""
    return round(_LETTER * letters + _PADDING, 2)


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
    """Returns one page with all of a plan: its times, memory, layouts and tables.

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
    mesh = of_axes(plan.mesh.axes) or "one device"
    title = title or f"{plan.step or 'a step'} on {mesh}"
    tables = list[str]()
    if estimate is not None:
        tables += _report(estimates.estimate(estimate, plan, hardware))
    facts = f'<p class="faint">{text(_facts(plan, estimate))}</p>'
    page = [f"<h1>{text(title)}</h1>", facts, *tables]
    chart = None
    if estimate is not None and estimate.spans:
        chart = streams(estimate, ranks=[p.rank for p in plan.ranks])
    # The style's rules are known once all is drawn.
    charts, style = _over_time(plan, estimate, chart)
    page += [*charts, "<h2>layouts</h2>", *_layouts(plan), "<h2>tables</h2>"]
    for rank_plan in plan.ranks:
        page += [f"<details><summary>all of {text(_rank(plan, rank_plan))}</summary>"]
        page += [*_report(plans.plan(plan, rank_plan.rank)), "</details>"]
    head = _HEAD.format(title=text(title), style=style)
    file = "\n".join([head, *page, "</body></html>\n"])
    if path is not None:
        Path(path).write_text(file, encoding="utf-8")
    return file


def _facts(plan: Plan, estimate: Estimate | None) -> str:
    """Describes the model, a rank's part of the batch, and the devices."""
    leaves = {leaf.path: leaf for p in plan.ranks for leaf in p.leaves}
    model = [leaf for leaf in leaves.values() if leaf.kind == "parameters"]
    batch = [x for x in leaves.values() if x.path.partition("/")[0] == "batch"]
    facts = []
    if model:
        numbers = of_count(sum(map(plans.numel, model)))
        facts.append(f"{numbers} parameters in {len(model)} tensors")
    if batch:
        named = ", ".join(
            describe_tensor(x.shape, x.dtype) for x in batch[:_NAMED_TENSORS]
        )
        unnamed = len(batch) - _NAMED_TENSORS
        others = f" and {unnamed} more" if unnamed > 0 else ""
        facts.append(f"batch of a rank {named}{others}")
    ranks = f"{plan.mesh.size} ranks" if plan.mesh.size > 1 else "1 rank"
    facts.append(ranks + (f" on {estimate.hardware}" if estimate is not None else ""))
    return ", ".join(facts)


_NAMED_TENSORS = 3  # tensors of a batch that the title names


def _rank(plan: Plan, rank_plan: RankPlan) -> str:
    """Returns ``rank 0 ×16, pipe=0``: the rank, how many are alike, where it is.

    That is along the axes whose ranks run different programs.
    """
    alike = f" ×{rank_plan.alike}" if rank_plan.alike > 1 else ""
    position = "".join(
        f", {axis}={rank_plan.coordinates[axis]}" for axis in plan.differing_axes
    )
    return f"rank {rank_plan.rank}{alike}{position}"


def _over_time(
    plan: Plan, estimate: Estimate | None, chart: StreamChart | None
) -> tuple[list[str], str]:
    """Draws the streams and the memory of all ranks over one axis.

    Returns the page's lines, and their style.
    """
    memory_charts = {
        rank_plan.rank: memory(plan, rank_plan.rank, estimate=estimate)
        for rank_plan in plan.ranks
        if rank_plan.peak_bytes
    }
    is_timed = chart is not None
    end = max((c.curve.length for c in memory_charts.values()), default=0.0)
    start, end = (chart.start, chart.end) if chart is not None else (0.0, end)
    format_value = chart.format_time if chart is not None else lambda n: f"{n:.0f}"
    sheet = Sheet(start, end, format_value)
    page = [f"<h2>over {'time' if is_timed else 'operators'}</h2>"]
    if not is_timed and not memory_charts:
        return [], sheet.style()
    page += [_ZOOM, *([legend_html(chart.looks())] if chart is not None else [])]
    kinds = {kind for c in memory_charts.values() for kind in c.kinds}
    if memory_charts:
        page.append(legend_html(look for kind, look in MEMORY.items() if kind in kinds))
    page.append('<div class="scroll"><div class="time" id="time">')
    # One scale for all ranks, so that their memory can be compared.
    top = round(1.02 * max((p.peak_bytes for p in plan.ranks), default=0))
    for rank_plan in plan.ranks:
        page.append(f"<h3>{text(_rank(plan, rank_plan))}</h3>")
        if chart is not None:
            for row in chart.rows_of(rank_plan.rank):
                page += sheet.row(row)
        if (memory_chart := memory_charts.get(rank_plan.rank)) is not None:
            page += sheet.memory(memory_chart, top)
        page += sheet.axis()
        if memory_chart is not None:
            page += _peak(memory_chart)
    if chart is not None and chart.late:
        page.append(f"<p>{text(chart.late_note)}</p>")
    return [*page, "</div></div>"], sheet.style()


def _peak(chart: MemoryChart) -> Iterator[str]:
    """Yields a paragraph on the peak of a rank's memory."""
    parts = "; ".join(words for _, words in chart.peak_parts())
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
        return "".join(f"<{tag} {cls}>{text(cell)}</{tag}>" for cell, cls in pairs)

    yield f'<div class="wide"><table><caption>{text(table.title)}</caption>'
    yield f"<tr>{row((name[1:] for name in table.head), 'th')}</tr>"
    yield from (f"<tr>{row(cells, 'td')}</tr>" for cells in table.rows[: table.most])
    yield f"</table>{table.footer}</div>"


def _layouts(plan: Plan) -> Iterator[str]:
    """Yields the grid of each parameter, of equal layers' only the first.

    Ranks of different programs may have the same parameters.
    """
    drawn: set[str] = set()
    for rank_plan in plan.ranks:
        for names, leaves in plans.parameter_groups(rank_plan):
            if leaves[0].layout is not None and not drawn & set(names):
                yield '<div class="leaf">'
                yield from (*_leaf(plan, names, leaves), "</div>")
            drawn.update(names)


def _leaf(plan: Plan, names: list[str], leaves: list[PlannedLeaf]) -> Iterator[str]:
    """Yields equal leaves: their layouts, and who holds the parts of the first."""
    layout = leaves[0].layout
    assert layout is not None, "the caller leaves out leaves without a layout"
    keyed = [
        (name, in_words(leaf.layout), name)
        for name, leaf in zip(names, leaves, strict=True)
        if leaf.layout is not None
    ]
    layouts = {name: words for name, words, _ in keyed}
    groups = [group_names for group_names, _ in group_alike(keyed)]
    yield f"{text(name_group(names))}: {describe_tensor(layout.shape, layout.dtype)}"
    for group_names in groups:
        prefix = f"{name_group(group_names)}: " if len(groups) > 1 else ""
        yield f"<br/>{text(prefix + layouts[group_names[0]])}"
    if len(groups) > 1:
        yield f'<br/><span class="faint">the ranks of {text(names[0])}:</span>'
    yield from _grid(LeafPicture(layout, plan.mesh, None, grid_of(layout)))


def _grid(picture: LeafPicture) -> Iterator[str]:
    """Yields a table with a cell for each part, which names the ranks that hold it."""
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
            cell = f"rows {rows[0]}:{rows[1]}, columns {columns[0]}:{columns[1]}"
            yield f'<td style="background:{colors[key]}" title="{cell}: rank {ranks}">'
            yield f"{ranks}</td>"
        yield "</tr>"
    yield "</table></div>"
