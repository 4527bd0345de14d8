"""Memory over a step: the curve's data, the text, the picture, and bad input."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsfunc.planning.estimation import estimate
from fsfunc.planning.events import Allocated, Freed
from fsfunc.planning.hardware import A100_40
from fsfunc.runtime.memory import KINDS
from fsfunc.show import memory
from fsfunc.show.charts import MEMORY
from fsfunc.show.memory_curves import peak_by_unit
from fsfunc.show.memory_plot import ROWS, curve_of, stack
from tests.show.planned import body, golden, lone, ran, small, stages


@st.composite
def plans(draw):
    """Plans of random events: memory of all kinds taken and given."""
    events, kinds, alive = [], {}, []
    for number in range(draw(st.integers(1, 25))):
        action = draw(st.sampled_from(["take", "take", "give", "run", "body"]))
        if action == "take":
            events.append(
                Allocated(number, draw(st.integers(1, 9)), "aten.mm", "f", "x")
            )
            kinds[number] = draw(st.sampled_from(KINDS))
            alive.append(number)
        elif action == "give" and alive:
            events.append(Freed(alive.pop(draw(st.integers(0, len(alive) - 1)))))
        elif action == "body":
            phase = draw(st.sampled_from(["forward", "b"]))
            events += body(draw(st.integers(0, 30)), 0, "f", phase)
        else:
            events.append(ran("f", draw(st.sampled_from(["forward", "backward"]))))
    return lone(events, kinds)


@given(plans(), st.integers(1, 40))
def test_the_curve_is_what_the_plan_says(plan, count):
    own = plan.ranks[0]
    curve = curve_of(own)
    assert sum(curve.peak[1]) == own.peak_bytes
    assert curve.at_start == (0,) * len(KINDS)  # nothing without an operator
    assert dict(zip(KINDS, curve.peak[1], strict=True)) == own.peak
    assert curve.length == sum(1 for _ in own.ops())
    times = [at for at, _ in curve.points]
    assert times == sorted(times) and all(0 <= t <= curve.length for t in times)
    turns = curve.phases.spans
    ends = [turn.end for turn in turns]
    assert [turn.start for turn in turns] == [0, *ends][: len(ends)]
    columns = curve.columns(count)
    assert max(map(sum, columns)) == own.peak_bytes
    if own.peak_bytes:
        assert columns[curve.peak_column(count)] == curve.peak[1]
    if curve.length >= count and turns:
        assert all(curve.phases.columns(0, curve.length, count))
    top = max(own.peak_bytes, 1)
    for held in columns:  # stacked to scale
        column = stack(tuple(held), list(MEMORY), top)
        assert len(column) == round(ROWS * sum(held) / top)
        for kind in MEMORY:
            exact = ROWS * held[KINDS.index(kind)] / top
            assert abs(column.count(kind) - exact) <= 1


def test_a_step_in_full():
    assert memory(small()).text(60) == golden("""
memory of rank 0: at most 1.86 kB, in the backward of block, by aten.mm

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
   together        560 B      1.86 kB  1.86 kB    560 B

at the peak
kind         unit     bytes  share
activations  block  1.30 kB   70 %
parameters   block    256 B   14 %
moments      block    256 B   14 %
buffers                32 B    2 %
parameters   head       8 B   <1 %
moments      head       8 B   <1 %""")


@given(plans())
def test_over_time_it_is_the_same_memory(plan):
    own, times = plan.ranks[0], estimate(plan, A100_40)
    curve, timed = curve_of(own), curve_of(own, times.spans)
    assert [held for _, held in timed.points] == [held for _, held in curve.points]
    moments = [at for at, _ in timed.points]
    assert moments == sorted(moments)
    assert all(0 <= at <= timed.length for at in moments)
    ends = [span.end for span in timed.phases.spans]
    assert timed.length == max(ends, default=0.0) and timed.peak[1] == curve.peak[1]
    if own.peak_bytes:
        assert sum(size for _, _, size in peak_by_unit(own)) == own.peak_bytes
        assert timed.columns(7)[timed.peak_column(7)] == timed.peak[1]


def test_a_chart_over_time():
    plan = small()
    shown = memory(plan, estimate=estimate(plan, A100_40))
    assert "kB at 144 µs, in the backward of block" in shown.title
    assert "0 s" in shown.text(60) and "252 µs" in shown.text(60)
    with pytest.raises(ValueError, match="of another plan, without rank 2"):
        memory(stages(), 3, estimate=estimate(plan, A100_40))


def test_equal_layers_are_one_row_and_what_comes_later_was_not_there_at_first():
    layers = [f"model.layers.{i}" for i in (0, 1, 10)]
    took = [Allocated(0, 8, "", "", "")]
    took += [Allocated(i, 4, "aten.mm", unit, "x") for i, unit in enumerate(layers, 1)]
    took += [Allocated(9, 30, "aten.empty", "model.norm", "x", "lm_head")]
    plan = lone([*took, Allocated(10, 1, "", "", "")], {9: "gathered", 10: "buffers"})
    held = peak_by_unit(plan.ranks[0])
    assert ("activations", "model.layers.0-1,10 ×3", 12) in held
    assert ("gathered", "lm_head", 30) in held
    shown = memory(plan)
    assert sum(shown.curve.at_start) == 8
    assert "gathered of lm_head: 30 B" in [words for _, words in shown.peak_parts()]
