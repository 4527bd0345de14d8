"""The observer: which operators ran, whose they were, and what memory they took."""

import gc

import pytest
import torch

import fsfunc as ff
from fsfunc import _torch
from fsfunc.planning.events import PHASES, Ran
from fsfunc.planning.observer import Observer

MESH = ff.make_mesh({"data": 2}, "simulated")


def watched(f, *args):
    with ff.testing.live_bytes(*args) as seen:
        out = f(*args)
    return seen, out


# Memory of real runs


def test_live_bytes_counts_from_making_to_the_last_tensor():
    x = torch.ones(100)

    def f(x):
        y = x + 1  # 800
        z = y[:50]
        del y  # z holds it
        w = z.clone()  # 1000
        del z  # 600
        return w * 2  # 800, then 600

    seen, out = watched(f, x)
    assert seen.peak_bytes == 1000
    assert seen.bytes == [400, 800, 1000, 600, 800, 600]
    del out
    assert seen.bytes[-1] == 600  # nobody watches any more


@pytest.mark.parametrize("op", ["all_gather", "psum", "psum_scatter", "ppermute"])
def test_live_bytes_of_a_collective_is_its_result(op):
    """What other ranks, or the link, do besides is not counted."""
    x = torch.ones(8, 100)
    size = {"all_gather": 2, "psum": 1, "psum_scatter": 0.5, "ppermute": 1}[op]

    def call(x):
        if op == "ppermute":
            return ff.ppermute(x, "data", [(0, 1), (1, 0)])
        return getattr(ff, op)(x, "data")

    def main():
        mine = x.clone()
        seen, out = watched(call, mine)
        plan = ff.plan(call, mine).peak_bytes
        return seen.peak_bytes, seen.bytes[-1], plan

    for peak, last, plan in ff.spmd(main, MESH)():
        assert peak == last == plan == 3200 * (1 + size)


# Operators


def ops(f, *args):
    observer = Observer(strangers=True)
    with observer:
        f(*args)
    return [(e.op, e.unit, e.phase) for e in observer.book.events if type(e) is Ran]


def test_an_operator_says_what_it_did():
    a, b, c = torch.ones(3, 4), torch.ones(4, 5), torch.ones(2, 3, 4)
    ((op, unit, phase),) = ops(torch.mm, a, b)
    assert (op.name, op.flops, op.dims) == ("aten.mm", 2 * 3 * 4 * 5, (1, 3, 4, 5))
    assert op.bytes == 4 * (12 + 20 + 15) and op.dtype == torch.float32
    assert (unit, phase) == ("", "update")
    ((op, *_),) = ops(torch.bmm, c, c.transpose(1, 2))
    assert op.dims == (2, 3, 4, 3) and op.flops == 2 * 2 * 3 * 4 * 3
    assert op.bytes == 4 * (24 + 24 + 18)
    ((op, *_),) = ops(lambda: a.add_(1))
    assert (op.name, op.bytes, op.flops) == ("aten.add_", 48, 0)
    ((op, *_),) = ops(lambda: a.sum())
    assert op.bytes == 48 + 4
    ((op, *_),) = ops(lambda: a[:1].expand(64, 4) + 1)
    assert op.bytes == 16 + 64 * 16  # a broadcast dim is there once


# On whose behalf


def test_the_phases_of_a_step():
    layer = ff.unit(lambda p, x: torch.tanh(x @ p))
    layer.__name__ = "layer"
    optimizer = ff.sharded_adam(0.1)

    def train(state, x):
        loss, grads = ff.value_and_grad(lambda p, x: layer(p, x).sum() * 2)(
            state.params, x
        )
        return state.apply_gradients(grads, optimizer), loss

    w, x = torch.ones(3, 3), torch.ones(2, 3)
    state = ff.TrainState(w, optimizer.init(w))
    found = ff.plan(ff.remat(train), state, x).ranks[0]
    by_place = {}
    for ran in found.ops():
        by_place.setdefault((ran.unit, ran.phase), []).append(ran.op.name)
    assert {phase for _, phase in by_place} == set(PHASES)
    assert by_place["layer", "forward"] == ["aten.mm", "aten.tanh"]
    assert by_place["layer", "recompute"] == ["aten.mm", "aten.tanh"]
    assert "aten.mm" in by_place["layer", "backward"]
    assert {"aten.sum", "aten.mul"} <= set(by_place["", "forward"])
    assert any("adam" in name for name in by_place["", "update"])
    assert not any("adam" in name for (_, phase), names in by_place.items()
                   if phase != "update" for name in names)  # fmt: skip


def test_a_backward_belongs_to_the_unit_whose_forward_made_it():
    one, two = ff.unit(lambda p, x: x @ p), ff.unit(lambda p, x: torch.tanh(x) * p)
    one.__name__, two.__name__ = "one", "two"

    @ff.unit
    def around(p, x):
        return one(p, two(p, x)).exp()

    def loss(p, x):
        return around(p, one(p, x)).sin().sum()

    p, x = torch.ones(3, 3), torch.ones(3, 3)
    found = ff.plan(ff.value_and_grad(loss), p, x).ranks[0]
    backward = {}
    for ran in found.ops():
        if ran.phase == "backward":
            backward.setdefault(ran.unit, set()).add(ran.op.name)
    assert "aten.mm" in backward["one"] and "aten.mm" in backward["around/one"]
    assert "aten.tanh_backward" in backward["around/two"]
    assert "aten.cos" in backward[""] and "aten.mul" in backward["around"]


# What a plan needs of the garbage collector


def test_garbage_collection_goes_on_afterwards():
    assert gc.isenabled()
    ff.plan(lambda x: x * 2, torch.ones(2))
    assert gc.isenabled()
    with pytest.raises(RuntimeError):
        ff.plan(lambda x: x @ x, torch.ones(2, 3))
    assert gc.isenabled()
    gc.disable()
    try:
        ff.plan(lambda x: x * 2, torch.ones(2))
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert not _torch.fake_active()
