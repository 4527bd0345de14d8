"""Memory over a step: the curve's data, the text, the picture, and bad input."""

import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsfunc.comm.mesh import Mesh
from fsfunc.foresight.events import Gave, Replayed, Took
from fsfunc.foresight.plans import Plan, RankPlan
from fsfunc.memory_kinds import KINDS
from fsfunc.show import memory
from fsfunc.show.curves import curve_of
from fsfunc.show.memories import ROWS, stack
from fsfunc.show.palette import MEMORY
from tests.show.planned import ran, segment, small, stages


def golden(text):
    """Text as a test writes it: without the first newline and the last."""
    return text.strip("\n")


def lone(events, kinds):
    return Plan(Mesh({}, "abstract"), (RankPlan(0, 1, {}, events, kinds, [], []),))


@st.composite
def plans(draw):
    """Plans of random events: memory of all kinds taken and given, segments."""
    events, kinds, alive = [], {}, []
    for number in range(draw(st.integers(1, 25))):
        what = draw(st.sampled_from(["take", "take", "give", "run", "replay"]))
        if what == "take":
            events.append(Took(number, draw(st.integers(1, 9)), "aten.mm", "f", "x"))
            kinds[number] = draw(st.sampled_from(KINDS))
            alive.append(number)
        elif what == "give" and alive:
            events.append(Gave(alive.pop(draw(st.integers(0, len(alive) - 1)))))
        elif what == "replay":
            top = draw(st.integers(0, 30))
            body = segment([(1, top), (2, -top)] if top else [], 0)
            events.append(Replayed(body, "f", draw(st.sampled_from(["forward", "b"]))))
        else:
            events.append(ran("f", draw(st.sampled_from(["forward", "backward"]))))
    return lone(events, kinds)


@given(plans(), st.integers(1, 40))
def test_the_curve_is_what_the_plan_says(plan, count):
    own = plan.ranks[0]
    curve = curve_of(own)
    assert sum(curve.peak[1]) == own.peak_bytes
    assert curve.given == (0,) * len(KINDS)  # nothing without an operator
    assert dict(zip(KINDS, curve.peak[1], strict=True)) == own.peak
    assert curve.length == sum(1 for _ in own.ops())
    times = [at for at, _ in curve.points]
    assert times == sorted(times) and all(0 <= t <= curve.length for t in times)
    ends = [turn.end for turn in curve.turns]
    assert [turn.start for turn in curve.turns] == [0, *ends][: len(ends)]
    columns = curve.columns(count)
    assert max(map(sum, columns)) == own.peak_bytes
    if own.peak_bytes:
        assert columns[curve.peak_column(count)] == curve.peak[1]
    if curve.length >= count and curve.turns:
        assert all(curve.phases(count))


@given(st.lists(st.integers(0, 50), min_size=6, max_size=6), st.integers(0, 100))
def test_a_column_is_stacked_to_scale(held, above):
    top = max(sum(held) + above, 1)
    column = stack(tuple(held), list(MEMORY), top)
    assert len(column) == round(ROWS * sum(held) / top)
    for kind in MEMORY:
        exact = ROWS * held[KINDS.index(kind)] / top
        assert abs(column.count(kind) - exact) <= 1


def test_a_step_in_full():
    assert memory(small()).text(60) == golden("""
memory of rank 0: at most 1.86 kB, in the backward of block

                                     ▼
1.86 kB ┤                            aaa
        │                            aaa           aaaa
        │                            aaa           aaaa
        │                     aaa    aaa           aaaa
        │         aaa         aaa    aaa    aaaa   aaaa
        │  aaa    aaa         aaa    aaa    aaaa   aaaa
  930 B ┤  aaa  aaaaaaaaaaaaaaaaaaaaaaaaaaa aaaa   aaaa
        │  aaa  aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
        │bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb
        │mmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm
        │pppppppppppppppppppppppppppppppppppppppppppppppppp
        │pppppppppppppppppppppppppppppppppppppppppppppppppp
    0 B └──────────────────────────────────────────────────
         forward          BBRRRRRRRBBBBBBBRRRRRRRBBBBBBBBUU

   kind         at first  at the peak  at most  at last
a  activations       0 B      1.30 kB  1.30 kB      0 B
g  gathered          0 B          0 B    128 B      0 B
d  gradients         0 B          0 B     64 B      0 B
b  buffers          32 B         32 B     32 B     32 B
m  moments         264 B        264 B    264 B    264 B
p  parameters      264 B        264 B    264 B    264 B
   together        560 B      1.86 kB  1.86 kB    560 B""")


def test_what_is_given_to_a_step_of_nothing(tmp_path):
    shown = memory(lone([Took(0, 8, "", "", "")], {0: "moments"}))
    assert "8 B ┤" + "m" * 20 in shown.text(26)
    shown.save(tmp_path / "m.png")
    assert (tmp_path / "m.png").stat().st_size > 5000


def test_the_rank_is_chosen():
    assert str(memory(stages())).startswith("memory of rank 0: at most 8 B, before any")
    assert str(memory(stages(), 3)).startswith("memory of rank 3: at most 24 B")


def test_rich_gives_each_kind_its_colour():
    from rich.console import Console

    file = io.StringIO()
    console = Console(
        file=file, width=60, force_terminal=True, color_system="truecolor"
    )
    console.print(memory(small()))
    for kind, sign in (("activations", "a"), ("parameters", "p"), ("moments", "m")):
        color = MEMORY[kind].color
        red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
        assert f"48;2;{red};{green};{blue}m{sign}" in file.getvalue()


def test_the_picture_has_the_data(tmp_path):
    pytest.importorskip("matplotlib")
    from fsfunc.show.stacks import drawn

    path = tmp_path / "memory.png"
    shown = memory(small(), path=path)
    assert path.read_bytes()[:4] == b"\x89PNG" and path.stat().st_size > 5000
    figure = drawn(shown.curve, shown.title, shown.kinds)
    (axes,) = figure.axes
    assert len(axes.collections) == len(shown.kinds) == 6
    tops = [c.get_paths()[0].vertices[:, 1].max() for c in axes.collections]
    assert tops == sorted(tops) and tops[-1] == small().peak_bytes
    (mark,) = [line for line in axes.lines if len(set(line.get_xdata())) == 1]
    assert mark.get_xdata()[0] == shown.curve.peak[0]
    said = [text.get_text() for text in axes.texts]
    peak = small().ranks[0].peak
    assert said[0] == shown.title
    assert said[1].startswith(f"activations {peak['activations']}") or " kB" in said[1]
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == [*reversed(shown.kinds), "in the forward", "in the recompute",
                     "in the backward", "in the update"]  # fmt: skip
    memory(small(), path=tmp_path / "memory.svg")
    assert "<svg" in (tmp_path / "memory.svg").read_text()


def test_bad_input_is_refused(tmp_path, monkeypatch):
    with pytest.raises(TypeError, match="shows a plan, and got list"):
        memory([])
    with pytest.raises(ValueError, match="no memory to show"):
        memory(lone([ran("f", "forward")], {}))
    with pytest.raises(IndexError, match="rank 9"):
        memory(small(), 9)
    with pytest.raises(ValueError, match="odd"):
        memory(small(), path=tmp_path / "m.odd")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib, or print"):
        memory(small(), path=tmp_path / "m.png")
    assert list(tmp_path.iterdir()) == []
