"""A plan as tables: exact text of small ones, sums, equal layers, and bad input."""

import pytest
import torch

import fsfunc as ff
from fsfunc.planning.planner import plan as plan_of
from fsfunc.printing.folding import together
from fsfunc.show import plan
from tests.models import chain, layers
from tests.show.planned import golden, lone, ran, small, stages


def test_a_plan_in_full():
    assert str(plan(small())) == golden("""
rank 0 of data=4 and 3 more that run the same program
16.1 kFLOP (forward 4.05 k, recompute 4.00 k, backward 8.10 k), 1.08 kB sent over data, at most 1.86 kB held

units
unit   calls  tensors  elements  layout            held here  forward FLOP  recompute FLOP  backward FLOP  derived, a call
block      2        2       256  flat over data=4      256 B        4.00 k          4.00 k         8.00 k             64 B
head                1         6  flat over data=4        8 B            50                            100

collectives
collective    over  phase     count   sends  largest  first
all_gather    data  forward       2   768 B    384 B  train.py:3
psum_scatter  data  backward      2   296 B    200 B  train.py:7
psum          data  loss          1  12.5 B   12.5 B  train.py:7

parameters
path                    each        layout              whole  held here
params/blocks/0-1/w ×2  f32[16, 8]  flat over data=4  1.02 kB      256 B
params/head             f32[6]      flat over data=4     24 B        8 B

state and batch
given      kind        tensors  elements    whole  held here
params     parameters        3       262  1.05 kB      264 B
opt_state  moments           3       262  1.05 kB      264 B
batch      buffers           1         8     32 B       32 B
total                                                  560 B

memory at the peak, in the backward of block, by aten.mm
kind           bytes  share
parameters     264 B   14 %
moments        264 B   14 %
activations  1.30 kB   70 %
buffers         32 B    2 %
total        1.86 kB

what is held then, largest first
kind         unit   taken by             phase     tensors  bytes  share
activations  block  aten.mm              backward        1  900 B   48 %
activations  block  aten.mm              forward         2  400 B   22 %
parameters          (given to the step)                  3  264 B   14 %
moments             (given to the step)                  3  264 B   14 %
buffers             (given to the step)                  1   32 B    2 %""")  # noqa: E501


def test_each_program_has_a_line():
    text = str(plan(stages()))
    assert (
        golden("""
programs
rank  ranks alike  at             peak  FLOP  sent
0               2  pipe=0 data=0   8 B   100  40 B sent over pipe
2               2  pipe=1 data=0  24 B   300  0 B""")
        in text
    )
    assert text.startswith("rank 0 of pipe=2, data=2 and 1 more that run the same")
    text = str(plan(stages(), rank=3))
    assert text.startswith("rank 3 of pipe=2, data=2 and 1 more that run the same")
    assert "300 FLOP (forward 300), 0 B sent, at most 24 B held" in text
    assert "blocks/1" in text and "blocks/0" not in text


def test_equal_layers_are_one_row_and_add_up():
    events = [ran(f"blocks/{i}", "forward", 3) for i in range(1000)]
    events += [ran("blocks/1000", "forward", 5), ran("head", "backward", 7)]
    rows = plan(lone(events)).tables["units"].rows
    assert str(plan(lone([]))) == "rank 0 of one\n0 FLOP, 0 B sent, at most 0 B held"
    assert rows == [
        ("blocks/0-999 ×1000", "3.00 k", ""),
        ("blocks/1000", "5", ""),
        ("head", "", "7"),
    ]


def test_a_real_plan_says_what_the_plan_says():
    mesh = ff.make_mesh({"data": 256}, "abstract")
    optimizer = ff.sgd(0.1)
    step = ff.shard(optimizer(ff.value_and_grad(chain())), mesh, "data")
    init = lambda: layers(10, 64, bias=False)  # noqa: E731
    found = plan_of(step, init, optimizer, torch.zeros(4, 64))
    shown = plan(found, rank=200)
    (unit,) = [row for row in shown.tables["units"].rows if row[1]]
    assert unit[1:6] == ("10", "10", "41.0 k", "flat over data=256", "640 B")
    rows = shown.tables["collectives"].rows
    assert [(row[0], int(row[3])) for row in rows if row[2] != "loss"] == [
        ("all_gather", found.count("all_gather") - int(rows[1][3])),
        ("all_gather", int(rows[1][3])),
        ("psum_scatter", 10),
    ]
    assert len(str(shown).splitlines()) < 70


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["head"], "head"),
        ([""], ""),
        (["b/3", "b/1", "b/2", "b/3"], "b/1-3"),
        (["b/0/x", "b/2/x", "b/4/x", "b/6/x"], "b/*/x"),
        ([f"s/{i}/b/{j}" for i in (0, 1) for j in (0, 1, 2)], "s/0-1/b/0-2"),
        (["s/0/b/0", "s/1/b/1"], "s/*/b/*"),
    ],
)
def test_names_that_differ_in_a_number_are_one(names, said):
    assert together(names) == said
