"""Streams over time: the lanes' data, exact text, the picture, and bad input."""

import io
import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsfunc.foresight.estimating import estimate
from fsfunc.foresight.simulating import Span
from fsfunc.hardware import A100_40
from fsfunc.show import streams
from fsfunc.show.palette import MOVES, PHASE, STALL
from fsfunc.show.strips import merged
from tests.show.planned import small

COLORS = {look.title: look.color for look in (*PHASE.values(), *MOVES.values())}


def golden(text):
    """Text as a test writes it: without the first newline and the last."""
    return text.strip("\n")


def span(stream, name, phase, start, end, rank=0, unit="f"):
    return Span(rank, stream, name, unit, phase, start, end)


STEP = [
    span("data", "all_gather", "forward", 0.0, 1.0),
    span("compute", "f", "forward", 1.0, 4.0),
    span("compute", "f", "recompute", 4.0, 5.0),
    span("compute", "f", "backward", 5.0, 8.0),
    span("to 1", "send", "forward", 4.0, 4.5),
    span("data", "psum_scatter", "backward", 8.0, 9.0),
    span("compute", "update", "update", 9.0, 10.0, unit=""),
    span("compute", "g", "forward", 4.5, 7.5, rank=1),
    span("from 0", "receive", "", 4.0, 4.5, rank=1),
]


def test_a_step_in_full():
    assert streams(STEP).text(37) == golden("""
                0 s            10.0 s
rank 0 compute │  FFFFFFRRBBBBBB░░UU│
rank 0 data    │gg              ss  │
rank 0 to 1    │        >           │
rank 1 compute │         FFFFFF     │
rank 1 from 0  │        >           │

 F  forward  R  recompute  B  backward  U  update  ░  waits for a transfer
 g  all_gather  s  psum_scatter  >  message

stream          spans    busy  share
rank 0 compute      4  8.00 s   80 %
rank 0 data         2  2.00 s   20 %
rank 0 to 1         1  500 ms    5 %
rank 1 compute      1  3.00 s   30 %
rank 1 from 0       1  500 ms    5 %""")


def test_a_part_of_the_time_and_of_the_ranks():
    shown = streams(STEP, ranks=[0], between=(4.0, 5.0))
    assert [lane.name for lane in shown.lanes] == ["rank 0 compute", "rank 0 to 1"]
    text = shown.text(37)
    assert "4.00 s" in text and "│RRRRRRRRRRRRRRRRRRRR│" in text
    assert "rank 0 to 1         1  500 ms   50 %" in text


def test_spans_are_cut_at_both_ends():
    (compute,) = streams(STEP, ranks=[1], between=(5.0, 7.0)).lanes
    assert compute.busy == 2.0


def test_of_many_ranks_some_are_shown():
    spans = [span("compute", "f", "forward", 0, 1, rank=r) for r in range(20)]
    assert "\n4 more ranks: ranks=[...]" in streams(spans).text()
    assert "more ranks" not in streams(spans, ranks=[17, 3]).text()
    assert [lane.rank for lane in streams(spans, ranks=[17, 3]).lanes] == [17, 3]


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(1, 9), st.sampled_from([*PHASE])),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 60),
)
def test_a_column_shows_what_takes_most_of_it(pieces, count):
    spans, now = [], 0.0
    for wait, long, phase in pieces:
        spans.append(span("compute", "f", phase, now + wait, now + wait + long))
        now += wait + long
    (lane,) = streams(spans).lanes
    assert lane.busy == sum(long for _, long, _ in pieces)
    width = now / count
    for i, look in enumerate(lane.columns(0.0, now, count)):
        low, high = i * width, (i + 1) * width
        shares = dict.fromkeys(PHASE, 0.0)
        for s in spans:
            shares[s.phase] += max(min(s.end, high) - max(s.start, low), 0.0)
        busy = sum(shares.values())
        if look is None:
            assert busy <= width / 2 + 1e-9
        else:
            assert busy >= width / 2 - 1e-9
            assert math.isclose(shares[look.title], max(shares.values()), abs_tol=1e-9)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.sampled_from("ab"))))
def test_bars_are_merged_where_no_eye_tells_them_apart(pieces):
    bars, now = [], 0
    for wait, long, color in pieces:
        bars.append((now + wait, now + wait + long, color))
        now += wait + long
    assert merged([(0, 1, "a"), (4, 5, "a")], 1.5) == [(0, 1, "a"), (4, 5, "a")]
    found = merged(bars, 1.5)
    assert merged(bars, 0) == bars
    for start, end, color in bars:
        assert sum(s <= start and end <= e and color == c for s, e, c in found) == 1
    busy = sum(end - start for start, end, _ in found)
    assert 0 <= busy - sum(long for _, long, _ in pieces) <= 1.5 * len(bars)


def test_an_estimate_says_its_times():
    found = estimate(small(), A100_40)
    shown = streams(found)
    assert shown.title == repr(found)
    assert str(shown).startswith(repr(found))
    assert {lane.stream for lane in shown.lanes} == {"compute"}
    assert sum(lane.busy for lane in shown.lanes) == pytest.approx(found.compute)


def test_rich_gives_each_phase_its_colour():
    from rich.console import Console

    file = io.StringIO()
    console = Console(
        file=file, width=37, force_terminal=True, color_system="truecolor"
    )
    console.print(streams(STEP))
    for title, letters in (("forward", "FFFFFF"), ("all_gather", "gg")):
        color = COLORS[title]
        red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
        assert f"48;2;{red};{green};{blue}m{letters}" in file.getvalue()


def test_the_picture_has_the_data(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.colors import to_hex

    from fsfunc.show.strips import drawn

    path = tmp_path / "streams.png"
    shown = streams(STEP, path=path)
    assert path.read_bytes()[:4] == b"\x89PNG" and path.stat().st_size > 5000
    strips = [lane.strip() for lane in shown.lanes]
    assert strips[0].waits == (1.0, 10.0, STALL.color) and strips[1].waits is None
    figure = drawn("t", strips, 0.0, 10.0, {"forward": COLORS["forward"]})
    (axes,) = figure.axes
    assert [t.get_text() for t in axes.get_yticklabels()] == [s.name for s in strips]
    seen = set()
    for collection in axes.collections:
        for box in collection.get_paths():
            (left, low), (right, high) = box.vertices.min(0), box.vertices.max(0)
            row = round((low + high) / 2)
            color = to_hex(collection.get_facecolor()[0])
            seen.add((row, round(left, 6), round(right, 6), color))
    expected = {(i, *bar) for i, strip in enumerate(strips) for bar in strip.bars}
    expected |= {(i, *s.waits) for i, s in enumerate(strips) if s.waits}
    assert seen == expected


@pytest.mark.parametrize(
    ("spans", "options", "error", "match"),
    [
        ([], {}, ValueError, "no spans to show"),
        ([STEP[0], (0, "F0", 0, 1)], {}, TypeError, "span 1 is .*give an estimate"),
        ([span("compute", "f", "forward", 2, 1)], {}, ValueError, "from 2 to 1"),
        ([span("compute", "f", "x", 0, math.nan)], {}, ValueError, "from 0 to nan"),
        (STEP, {"ranks": [7]}, ValueError, r"rank 7 has no spans: .* \[0, 1\] are"),
        (STEP, {"between": (5, 5)}, ValueError, "no time between 5 and 5"),
        (STEP, {"between": (11, 12)}, ValueError, "nothing happens .* ends at 10 s"),
        ([span("compute", "f", "x", 0, 0)], {}, ValueError, "no time between 0.0 and"),
    ],
)
def test_bad_input_is_refused(spans, options, error, match):
    with pytest.raises(error, match=match):
        streams(spans, **options)


def test_without_matplotlib_the_text_is_there(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib, or print"):
        streams(STEP, path=tmp_path / "s.png")
    assert list(tmp_path.iterdir()) == []
