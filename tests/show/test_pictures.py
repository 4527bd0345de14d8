"""A schedule as a picture: its colours at known places, its size, and bad input."""

import sys

import pytest

from fsfunc.pipelining.actions import Action
from fsfunc.pipelining.schedules import (
    asynchronous,
    gpipe,
    interleaved_1f1b,
    zb_h1,
    zb_v,
)
from fsfunc.pipelining.timing import Costs
from fsfunc.show import Timeline, timeline
from fsfunc.show.palette import COMPUTE, GAPS, OUTSIDE, WAITS, lighter
from fsfunc.show.pictures import DPI, LEFT, MARK_BAND, RIGHT, ROW, TOP, WIDEST

image = pytest.importorskip("matplotlib.image")


class Picture:
    """A saved timeline, asked for the colour at a rank and a time."""

    def __init__(self, shown, path):
        shown.save(path)
        self.pixels = image.imread(path)
        self.makespan = shown.makespan

    @property
    def inches(self):
        height, width, _ = self.pixels.shape
        return width / DPI, height / DPI

    def color(self, rank, time, below=0.12):
        """The colour ``below`` inches under the middle of the row: beside the label."""
        axis = self.inches[0] - LEFT - RIGHT
        x = round((LEFT + axis * time / self.makespan) * DPI)
        y = round((TOP + ROW * (rank + 0.5) + below) * DPI)
        return "#" + "".join(
            f"{round(255 * part):02x}" for part in self.pixels[y, x, :3]
        )


def test_each_kind_and_each_bubble_has_its_colour(tmp_path):
    picture = Picture(timeline(gpipe(2, 2)), tmp_path / "t.png")
    forward, backward = COMPUTE["F"].color, COMPUTE["B"].color
    waits, outside = GAPS[WAITS].color, GAPS[OUTSIDE].color
    middles = [0.5, 1.5, 3.0, 6.0, 8.5]
    assert [picture.color(0, t) for t in middles] == [
        forward, forward, waits, backward, backward
    ]  # fmt: skip
    middles = [0.5, 1.5, 2.5, 4.5, 6.5, 8.0]
    assert [picture.color(1, t) for t in middles] == [
        outside, forward, forward, backward, backward, outside
    ]  # fmt: skip
    assert picture.color(0, 0.5, below=ROW / 2) == "#ffffff"  # between two rows


def test_input_and_weight_gradients_differ(tmp_path):
    picture = Picture(timeline(zb_h1(1, 1)), tmp_path / "t.png")
    seen = [picture.color(0, time) for time in (0.5, 1.5, 2.5)]
    assert seen == [COMPUTE[kind].color for kind in "FIW"]


def test_an_update_is_a_line_between_two_actions(tmp_path):
    picture = Picture(timeline(asynchronous(1, 2)), tmp_path / "t.png")
    seen = [picture.color(0, time) for time in (2.5, 3.0, 3.5)]
    assert seen == [COMPUTE[kind].color for kind in "BUF"]
    picture = Picture(timeline(asynchronous(1, 2), Costs(u=1)), tmp_path / "t.png")
    assert picture.color(0, 3.5) == COMPUTE["U"].color


def test_a_later_stage_of_a_rank_is_lighter(tmp_path):
    picture = Picture(timeline(interleaved_1f1b(2, 1)), tmp_path / "t.png")
    first, last = (lighter(COMPUTE["F"].color, chunk, 2) for chunk in (0, 1))
    assert first != last
    assert [picture.color(0, t) for t in (0.25, 0.75)] == [first, last]


def test_bars_are_labelled_where_there_is_room(tmp_path):
    def has_ink(picture, time):
        column = {picture.color(0, time, y / 100) for y in range(-5, 6)}
        return len(column) > 1

    roomy = Picture(timeline(gpipe(1, 1)), tmp_path / "roomy.png")
    offsets = [time / 100 for time in range(30, 70)]
    assert any(has_ink(roomy, offset) for offset in offsets)
    crowded = Picture(timeline(gpipe(1, 400)), tmp_path / "crowded.png")
    inside = [m + 0.5 for m in range(400)]
    assert not any(has_ink(crowded, time) for time in inside)


def test_the_size_follows_the_schedule_up_to_a_bound(tmp_path):
    sizes = [
        Picture(timeline(gpipe(ranks, count)), tmp_path / "t.png").inches
        for ranks, count in [(2, 2), (2, 12), (4, 12), (4, 300)]
    ]
    assert sizes[0][0] < sizes[1][0] < sizes[2][0]
    assert sizes[1][1] == pytest.approx(sizes[2][1] - 2 * ROW, abs=2 / DPI)
    assert sizes[3][0] == pytest.approx(LEFT + WIDEST + RIGHT, abs=2 / DPI)


def test_a_long_legend_goes_on_below(tmp_path):
    one = Picture(timeline(zb_v(4, 12)), tmp_path / "one.png")
    two = Picture(timeline(zb_v(4, 2)), tmp_path / "two.png")
    assert one.inches[0] > two.inches[0]
    assert two.inches[1] == pytest.approx(one.inches[1] + MARK_BAND, abs=2 / DPI)
    right = two.pixels[-round(0.6 * DPI) :, -round(0.1 * DPI) :]
    assert right.min() == 1.0  # nothing is cut off


def test_other_formats_and_the_path_of_timeline(tmp_path):
    timeline(gpipe(2, 2), path=tmp_path / "t.svg")
    assert "<svg" in (tmp_path / "t.svg").read_text()


def test_bad_input_is_refused(tmp_path, monkeypatch):
    shown = timeline(gpipe(2, 2))
    with pytest.raises(ValueError, match="odd"):
        shown.save(tmp_path / "t.odd")
    nothing = Timeline.of_events([(0, Action("F", 0, 0), 1.0, 1.0)])
    with pytest.raises(ValueError, match="every action takes no time"):
        nothing.save(tmp_path / "t.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib, or print"):
        shown.save(tmp_path / "t.png")
    assert list(tmp_path.iterdir()) == []


def test_actions_without_time_are_not_drawn(tmp_path):
    shown = timeline(["F0 I0 W0"], Costs(w=0))
    picture = Picture(shown, tmp_path / "t.png")
    assert picture.color(0, 1.9) == COMPUTE["I"].color
