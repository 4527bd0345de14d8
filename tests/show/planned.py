"""Plans of a few events, and spans, written by hand, for what shows them."""

import itertools
from fractions import Fraction

import torch

from fsfunc.comm.ledgers import Record
from fsfunc.comm.mesh import Mesh
from fsfunc.planning.events import Allocated, Freed, Op, Ran
from fsfunc.planning.plans import Plan, PlannedLeaf, RankPlan
from fsfunc.planning.simulation import Span
from fsfunc.sharded.packed_layouts import pack_flat

F32 = torch.float32
_KEYS = itertools.count(1000)


def op(name="aten.mm", flops=0):
    return Op(name, flops, 12, F32)


def ran(unit, phase, flops=0, name="aten.mm"):
    return Ran(op(name, flops), unit, phase)


def record(name, phase, size, unit="", axis=("data",), line=7):
    return Record(
        name, axis, Fraction(size), F32, unit, phase, 0, f"/x/train.py:{line}"
    )


def body(size, flops, unit, phase):
    """Three operators; the first has the FLOPs, the second holds ``size`` bytes."""
    key = next(_KEYS)
    held = [Allocated(key, size, "aten.mm", unit, phase)] if size else []
    freed = [Freed(key)] if size else []
    first, second = ran(unit, phase, flops), ran(unit, phase)
    return [first, *held, second, *freed, ran(unit, phase)]


def lone(events, kinds=(), records=(), mesh=None):
    """A plan of one rank."""
    own = RankPlan(0, 1, {}, events, dict(kinds), [], list(records))
    return Plan(mesh or Mesh({}, "abstract"), (own,))


def small():
    """Two equal layers and a head over 4 ranks, forward and backward."""
    leaves, events, kinds = [], [], {}
    shapes = {"blocks/0/w": (16, 8), "blocks/1/w": (16, 8), "head": (6,)}
    for key, (path, shape) in enumerate(shapes.items()):
        unit = "head" if path == "head" else "block"
        layout = pack_flat([shape], F32, [path], ["data"], 4, f"{unit}:{path}")[0]
        size = 4 * layout.local_shape({"data": 0})[0]
        for part, kind in (("params", "parameters"), ("opt_state/mu", "moments")):
            leaf = PlannedLeaf(f"{part}/{path}", kind, shape, F32, size, layout, unit)
            leaves.append(leaf)
            number = key + (10 if kind == "moments" else 0)
            events.append(Allocated(number, size, "", "", ""))
            kinds[number] = kind
    leaves.append(PlannedLeaf("batch/x", "buffers", (2, 4), F32, 32, None, ""))
    events += [Allocated(20, 32, "", "", "")]
    kinds[20] = "buffers"
    for i in (0, 1):
        events += [Allocated(30 + i, 128, "aten.empty", "block", "forward")]
        kinds[30 + i] = "gathered"
        events += [*body(400, 2000, "block", "forward"), Freed(30 + i)]
        events += [Allocated(40 + i, 200, "aten.mm", "block", "forward")]
    events += [ran("head", "forward", 50), ran("head", "backward", 100)]
    for i in (1, 0):
        events += body(400, 2000, "block", "recompute")
        events += [*body(900, 4000, "block", "backward"), Freed(40 + i)]
        events += [Allocated(50 + i, 32, "aten.add", "block", "backward")]
        kinds[50 + i] = "gradients"
    events += [ran("", "update", 0, "aten.add_"), Freed(50), Freed(51)]
    records = [
        record("all_gather", "forward", 384, "block", line=3),
        record("all_gather", "forward", 384, "block", line=3),
        record("psum_scatter", "backward", 96, "block"),
        record("psum_scatter", "backward", 200, "head"),
        record("psum", "loss", Fraction(25, 2)),
    ]
    calls = {("block", "forward"): 2, ("block", "recompute"): 2}
    content = events, kinds, leaves, records, calls, {"block": 64}
    own = RankPlan(0, 4, {"data": 0}, *content)
    return Plan(Mesh({"data": 4}, "abstract"), (own,))


def stages():
    """Two ranks of a pipeline that run programs of their own, of four."""
    mesh = Mesh({"pipe": 2, "data": 2}, "abstract")
    ranks = []
    for stage, (flops, size) in enumerate([(100, 8), (300, 24)]):
        events = [
            Allocated(0, size, "", "", ""),
            ran(f"blocks/{stage}", "forward", flops),
        ]
        sent = [record("ppermute", "forward", 40, axis=("pipe",))] * (1 - stage)
        at = {"pipe": stage, "data": 0}
        own = RankPlan(2 * stage, 2, at, events, {0: "parameters"}, [], sent)
        ranks.append(own)
    return Plan(mesh, tuple(ranks), ("pipe",))


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


def golden(text):
    """Text as a test writes it: without the first newline and the last."""
    return text.strip("\n")
