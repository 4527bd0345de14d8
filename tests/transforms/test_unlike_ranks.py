"""Ranks that call units in another order, or other ones: told, never computed with."""

import pytest
import torch

import fsfunc as ff
from fsfunc.comm.backends.link import CollectiveMismatch
from fsfunc.comm.groups import get_group
from tests.checks import simulated


@ff.unit
def first(w, x):
    return torch.tanh(x @ w)


def loss(ws, x, calls):
    for i in calls:
        x = first(ws[i], x)
    return x.square().mean()


SAME = (0, 1, 2)
UNLIKE = {
    "another order": (1, 0, 2),
    "another order, prefetched": (0, 2, 1),
    "other leaves": (0, 1, 1),
    "one call less": (0, 1),
}
WS = [torch.full((3, 3), 0.1 * i) for i in range(3)]
GRADIENTS = {"ours": ff.value_and_grad(loss), "stock": torch.func.grad(loss)}


HOW = [(0, "stock", 1), (1, "ours", 0), (2, "ours", 1), (3, "ours", 1), (3, "stock", 0)]


@pytest.mark.parametrize(
    ("zero", "mode", "times", "unlike"),
    [(*how, name) for how, name in zip(HOW, [*UNLIKE, *UNLIKE], strict=False)]
    + [(3, "ours", 1, name) for name in UNLIKE],
)
def test_another_order_is_told(zero, unlike, times, mode):
    mesh, called = simulated(2), []

    def main():
        x, f = torch.ones(2, 3), ff.shard(GRADIENTS[mode], mesh, "data", zero=zero)
        ws = ff.place(f, WS, x, SAME)
        for _ in range(times):
            called.append(f(ws, x, SAME))
        return f(ws, x, SAME if mesh.rank == 0 else UNLIKE[unlike])

    with pytest.raises(CollectiveMismatch, match=r"of first\([012]\)") as caught:
        ff.spmd(main, mesh)()
    assert len(called) == 2 * times
    rows = str(caught.value).splitlines()[1:]
    assert rows[0].partition(" at ")[0][8:] != rows[1].partition(" at ")[0][8:]


@pytest.mark.parametrize(("inner", "zero"), [("pipe", 0), ("data", 3), ("pipe", 1)])
def test_another_order_is_told_under_a_pipeline(zero, inner):
    mesh = simulated(data=2, pipe=2)
    wraps = {
        "pipe": lambda f: ff.pipeline(f, mesh, "pipe", n_microbatches=2),
        "data": lambda f: ff.shard(f, mesh, "data", zero=zero),
    }

    def main():
        f = ff.value_and_grad(loss)
        for name in (inner, *(set(wraps) - {inner})):
            f = wraps[name](f)
        x, calls = torch.ones(2, 3), (*SAME, 3)
        ws = ff.place(f, [*WS, WS[0].clone()], x, calls)
        # The other order is of one stage.
        return f(ws, x, calls if mesh.coordinate("data") == 0 else (1, 0, 2, 3))

    with pytest.raises(CollectiveMismatch, match=r"of first\([01]\)"):
        ff.spmd(main, mesh)()


def test_a_stage_that_sends_another_microbatch_is_told():
    def main():
        where = get_group("data")
        name = f"first #0.0, microbatch {where.index}"
        if where.index:
            return where.receive((2,), torch.float32, "cpu", 0, name).wait()
        return where.send(torch.ones(2), 1, name).wait()

    with pytest.raises(CollectiveMismatch, match="(?s)microbatch 0.*microbatch 1"):
        ff.spmd(main, simulated(2))()
