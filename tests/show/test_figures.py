"""Charts in colours: what pictures and terminals show is the data; bad input."""

import io
import sys
from xml.etree import ElementTree

import pytest

from fsfunc.pipelining.schedules import gpipe, zb_h1, zb_v
from fsfunc.show import memory, plan, streams, timeline
from fsfunc.show.charts import (
    GAPS,
    MEMORY,
    OUTSIDE,
    SENDING,
    WAITS,
    by_sign,
    computing,
)
from tests.show.planned import STEP, small

to_hex = pytest.importorskip("matplotlib.colors").to_hex
Text = pytest.importorskip("matplotlib.text").Text
SVG = "{http://www.w3.org/2000/svg}"

CHARTS = {
    "timeline": lambda **given: timeline(zb_h1(2, 2), **given),
    "streams": lambda **given: streams(STEP, **given),
    "memory": lambda **given: memory(small(), **given),
}
F, B, U = (by_sign(kind).color for kind in "FBU")


def boxes(shown):
    """The (row, start, end, colour) of a picture's bars, in the order of painting."""
    (axes,) = shown.figure().axes
    found = []
    for collection in axes.collections:
        color = to_hex(collection.get_facecolor()[0])
        for box in collection.get_paths():
            (left, low), (right, high) = box.vertices.min(0), box.vertices.max(0)
            row = round((low + high) / 2)
            found.append((row, round(left, 6), round(right, 6), color))
    return found


def test_each_action_and_each_bubble_has_its_colour():
    waits, outside = WAITS.color, OUTSIDE.color
    assert sorted(boxes(timeline(gpipe(2, 2)))) == sorted([
        (0, 0, 1, F), (0, 1, 2, F), (0, 2, 5, waits), (0, 5, 7, B), (0, 7, 9, B),
        (1, 0, 1, outside), (1, 1, 2, F), (1, 2, 3, F), (1, 3, 5, B), (1, 5, 7, B),
        (1, 7, 9, outside),
    ])  # fmt: skip
    assert [box[3] for box in boxes(timeline(zb_h1(1, 1)))] == [
        by_sign(kind).color for kind in "FIW"
    ]


def test_a_picture_of_streams_has_the_spans():
    shown = streams(STEP)
    (axes,) = shown.figure().axes
    names = [text.get_text() for text in axes.get_yticklabels()]
    assert names == [lane.name for lane in shown.lanes]
    colors = {look.title: look.color for look in (computing() | SENDING).values()}
    colors |= {look.title: look.color for look in GAPS.values()}
    colors |= {"send": SENDING["message"].color, "receive": SENDING["message"].color}
    expected = {
        (row, span.start, span.end, colors.get(span.name, colors.get(span.phase)))
        for row, lane in enumerate(shown.lanes)
        for span in lane.spans
        if span.phase != OUTSIDE.title
    }
    assert {box for box in boxes(shown) if box[3] != OUTSIDE.color} == expected


def test_a_picture_of_memory_has_the_curve():
    shown = memory(small())
    figure = shown.figure()
    (axes,) = figure.axes
    assert len(axes.collections) == len(shown.kinds) == 6
    tops = [c.get_paths()[0].vertices[:, 1].max() for c in axes.collections]
    assert tops == sorted(tops) and tops[-1] == small().peak_bytes
    (mark,) = axes.lines
    assert mark.get_xdata()[0] == shown.curve.peak[0]
    assert mark.get_ydata()[0] > small().peak_bytes  # above it
    assert axes.get_title(loc="left") == shown.title
    marks, parts = figure.legends
    assert parts.get_title().get_text() == "at the peak, 1.86 kB"
    words = [text.get_text() for text in parts.get_texts()]
    assert words[0] == "activations of block: 1.30 kB" and "buffers: 32 B" in words
    words = [text.get_text() for text in marks.get_texts()]
    phases = ["in the forward", "in the recompute", "in the backward", "in the update"]
    assert words == [*reversed(shown.kinds), *phases]


@pytest.mark.parametrize("chart", CHARTS)
def test_charts_are_saved(chart, tmp_path, monkeypatch):
    make = CHARTS[chart]
    shown = make(path=tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "drawn.png").stat().st_size > 5000
    with pytest.raises(ValueError, match="odd"):
        shown.save(tmp_path / "drawn.odd")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    shown.save(tmp_path / "drawn.svg")
    assert "<svg" in (tmp_path / "drawn.svg").read_text()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ImportError, match="pip install matplotlib, or print"):
        make(path=tmp_path / "none.png")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("chart", CHARTS)
def test_an_svg_says_what_the_picture_says(chart):
    """The same model: titles, marks, names, ticks, labels; and bars of one colour."""
    shown = CHARTS[chart]()
    page, figure = ElementTree.fromstring(shown.svg()), shown.figure()
    drawn = {x.get_text() for x in figure.findobj(Text) if x.get_text()}
    said = {x.text for x in page.iter(f"{SVG}text")}
    title = "\n".join(figure.axes[0].get_title(loc="left").split())
    assert set(title.split()) <= set(" ".join(said).split())
    titles = {line for x in drawn for line in x.splitlines()}
    assert said - titles <= {
        words for words in said if " ".join(words.split()) in title
    }
    if chart != "memory":
        bars = [b for row in shown.rows for b in row.bars]
        boxes = [
            r for r in page.iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None
        ]
        assert [r.find(f"{SVG}title").text for r in boxes] == [b.words for b in bars]


def test_labels_fit_their_bars_and_no_text_lies_on_another():
    charts = timeline(zb_v(8, 8)), streams(STEP), memory(small())
    for figure in (chart.figure() for chart in charts):
        figure.draw_without_rendering()
        (axes,) = figure.axes
        marked = [axes.title, axes._left_title, *axes.texts, *axes.get_xticklabels()]
        for legend in figure.legends:
            marked += [legend.get_title(), *legend.get_texts()]
        texts = [x for x in marked if x.get_text()]
        extents = [x.get_window_extent() for x in texts]
        width, height = figure.bbox.size
        for i, one in enumerate(extents):
            assert one.x0 >= -1 and one.x1 <= width + 1, texts[i]
            assert one.y0 >= -1 and one.y1 <= height + 1, texts[i]
            for k, other in enumerate(extents[:i]):
                lap = min(one.x1, other.x1) - max(one.x0, other.x0)
                high = min(one.y1, other.y1) - max(one.y0, other.y0)
                assert min(lap, high) < 2, (texts[i], texts[k])
        bars = [
            p.get_extents(axes.transData)
            for c in axes.collections
            for p in c.get_paths()
        ]
        for one, text in zip(extents, texts, strict=True):
            if text in axes.texts:
                assert any(b.x0 <= one.x0 and one.x1 <= b.x1 for b in bars), text


@pytest.mark.parametrize(
    ("chart", "looks", "letters"),
    [
        ("timeline", computing(), ["F0", "I0", "W0"]),
        ("streams", computing() | SENDING, ["FFFFFF", "gg"]),
        ("memory", MEMORY, ["a", "p", "m"]),
    ],
)
def test_a_terminal_shows_each_kind_in_its_colour(chart, looks, letters):
    from rich.console import Console

    file = io.StringIO()
    options = {"force_terminal": True, "color_system": "truecolor"}
    shown = CHARTS[chart]()
    Console(file=file, width=60, **options).print(shown)
    signs = {look.sign: look.color for look in looks.values()}
    for said in letters:
        color = signs[said[0]]
        red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
        assert f"48;2;{red};{green};{blue}m{said}" in file.getvalue()


@pytest.mark.parametrize("shown", [*CHARTS.values(), lambda: plan(small())])
def test_a_terminal_without_colours_shows_the_text(shown):
    from rich.console import Console

    file = io.StringIO()
    Console(file=file, width=200).print(shown())
    printed = [line.rstrip() for line in file.getvalue().splitlines()]
    assert printed == shown().text(200).splitlines()


@pytest.mark.parametrize("shown", [CHARTS["timeline"], lambda: plan(small())])
def test_a_notebook_prints_the_same_text(shown, monkeypatch):
    """There rich writes into a cell, and to no file."""
    expected = str(shown())
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert str(shown()) == expected
