"""What is printed, as HTML for notebooks and pages.

It is small, well-formed XML, and loads nothing. The cells of pictures alone have
colours, with their own background: all else takes those of the page around it, white or
dark. A viewer that drops styles shows tables as tables, and pictures as their text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, partial
from html import escape
from typing import TYPE_CHECKING

from fsfunc.printing.letters import visible, visible_lines

if TYPE_CHECKING:
    from rich.text import Text

_TABLE = "border-collapse:collapse;margin:.4em 0"
# Jupyter's own style of <pre> wraps lines, and is not monospaced.
_PICTURE = (
    "font-family:Menlo,'DejaVu Sans Mono',Consolas,monospace;white-space:pre;"
    "line-height:1.2;overflow-x:auto;margin:.4em 0"
)
_escaped = partial(escape, quote=False)  # no text stands in an attribute


def text_markup(text: str) -> str:
    """Returns lines of text as they are, or "" for none.

    >>> text_markup("a < b & \\x1b[2J")
    '<div style="white-space:pre-wrap">a &lt; b &amp; \\\\x1b[2J</div>'
    """
    markup = _escaped(visible_lines(text))
    return f'<div style="white-space:pre-wrap">{markup}</div>' if markup else ""


def table_markup(
    title: str, head: Sequence[str], rows: Iterable[Sequence[str]], footer: str = ""
) -> str:
    """Returns a table, its title above it, and below it a line on rows left out.

    Args:
        title: the title, or "".
        head: the columns' names, each after a mark: ``<`` flush left, ``>`` right.
        rows: as many cells as the head has.
        footer: the line below, or "".

    >>> print(table_markup("", (">size",), [("<4 B",)]))
    <table style="border-collapse:collapse;margin:.4em 0">
    <tr><th style="text-align:right">size</th></tr>
    <tr><td style="text-align:right">&lt;4 B</td></tr>
    </table>
    """
    sides = ["right" if mark == ">" else "left" for mark, *_ in head]

    def row(cells: Iterable[str], tag: str) -> str:
        columns = (
            f'<{tag} style="text-align:{side}">{_escaped(visible(cell))}</{tag}>'
            for cell, side in zip(cells, sides, strict=True)
        )
        return f"<tr>{''.join(columns)}</tr>"

    lines = [
        f'<table style="{_TABLE}">',
        row((name[1:] for name in head), "th"),
        *(row(cells, "td") for cells in rows),
        "</table>",
    ]
    if title:
        lines.insert(0, f"<div><b>{_escaped(visible(title))}</b></div>")
    return "\n".join([*lines, f"<div>{footer}</div>"] if footer else lines)


def picture_markup(lines: Iterable[Text]) -> str:
    """Returns lines of a picture, in which letters have rich's styles."""
    markup = "\n".join(map(_line_markup, lines))
    return f'<pre style="{_PICTURE}">{markup}</pre>'


def _line_markup(line: Text) -> str:
    markup, end = "", 0  # of the last span
    for span in sorted(line.spans):
        markup += _escaped(line.plain[end : span.start])
        letters = _escaped(line.plain[span.start : span.end])
        markup += f'<span style="{_css(str(span.style))}">{letters}</span>'
        end = span.end
    return markup + _escaped(line.plain[end:].rstrip())


@cache
def _css(style: str) -> str:
    """Returns rich's style of letters as CSS.

    >>> _css("#000000 on #4c7cb8"), _css("bright_black")
    ('color:#000000;background:#4c7cb8', 'color:#808080')
    """
    from rich.style import Style

    parsed = Style.parse(style)
    colors = {"color": parsed.color, "background": parsed.bgcolor}
    rules = [f"{k}:{c.get_truecolor().hex}" for k, c in colors.items() if c is not None]
    return ";".join(rules)
