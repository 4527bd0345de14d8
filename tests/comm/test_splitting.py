"""start and wait: what overlaps forward overlaps backward, and nothing is touched.

That each collective in two phases has the values and derivatives of the collective at
once is tested with the collectives.
"""

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad

import fsfunc as ff
from fsfunc.comm.backends.link import Handle
from fsfunc.comm.backends.simulated import SimulatedLink
from tests.checks import refusals

MESH = ff.make_mesh({"data": 2}, "simulated")


class Watched(Handle):
    def __init__(self, work, seen, name):
        self.work, self.seen, self.name = work, seen, name

    def wait(self):
        self.seen.append(("wait", self.name))
        return self.work.wait()


def watch(monkeypatch):
    """What rank 0 starts and waits for, in order; a name is the size of the shard."""
    seen, start = [], SimulatedLink.start

    def watched(self, op, x, where, **how):
        work = start(self, op, x, where, **how)
        if self.rank:
            return work
        name = x.shape[0] // (1 if op == "all_gather" else where.size)
        seen.append(("start", name))
        return Watched(work, seen, name)

    monkeypatch.setattr(SimulatedLink, "start", watched)
    return seen


def prefetched(shards, x, depth):
    """Layers that each gather their weight, ``depth`` calls ahead of its use."""
    flights = []
    for i in range(len(shards)):
        while len(flights) < min(i + depth + 1, len(shards)):
            shard = shards[len(flights)]
            flights.append(ff.start(ff.all_gather, shard, "data"))
        x = (x * flights[i].wait().sum()).tanh()
    return x


def dual(order):
    """The backward pass of an order: turned round, starts and waits exchanged."""
    return [({"start": "wait", "wait": "start"}[a], n) for a, n in reversed(order)]


@given(depth=st.integers(0, 5), layers=st.integers(1, 5), plain=st.booleans())
def test_backward_is_the_forward_order_turned_round(depth, layers, plain):
    """And the gradient is that of the program that waits at once."""
    shards = [torch.full((i + 1,), 0.1 * i, dtype=torch.float64) for i in range(layers)]

    def gradient(depth):
        f = lambda s: prefetched(s, torch.tensor(0.3), depth)  # noqa: E731
        if not plain:
            return grad(f)(shards)
        mine = [shard.clone().requires_grad_() for shard in shards]
        f(mine).backward()
        return [shard.grad for shard in mine]

    expected = ff.spmd(lambda: gradient(0), MESH)()
    with pytest.MonkeyPatch.context() as patch, ff.ledger() as log:
        seen = watch(patch)
        for found, due in zip(
            ff.spmd(lambda: gradient(depth), MESH)(), expected, strict=True
        ):
            assert all(map(torch.equal, found, due))
    forward, backward = seen[: 2 * layers], seen[2 * layers :]
    assert backward == dual(forward)
    assert [a for a, _ in forward].index("wait") == min(depth + 1, layers)
    assert log.count("all_gather") == log.count("psum_scatter") == layers


def a_flight():
    """What is landed, in any order and as often as one likes."""
    x = torch.ones(2, requires_grad=True)
    pending = ff.start(ff.all_gather, x, "data")
    other = ff.start(ff.pmean, {"a": torch.ones(2), "b": [torch.ones(())]}, "data")
    for flight in (pending, other)[:: 1 if ff.axis_index("data") else -1]:
        flight.wait()
    (pending.wait() + pending.wait()).sum().backward()
    means = other.wait()["b"][0].item()
    whole = [
        ff.start(collective, torch.tensor([3]), "data").wait().item()
        for collective in (ff.pmax, ff.psum)
    ]
    to = ff.start(ff.ppermute, torch.ones(1), "data", [(0, 1)]).wait().item()
    with torch.inference_mode():
        inferred = ff.start(ff.psum, torch.ones(1), "data").wait().item()
    same = pending.wait() is pending.wait()
    return same, x.grad.tolist(), means, whole, to, inferred


def test_a_flight_lands():
    expected = [(True, [4, 4], 1, [3, 6], rank, 2) for rank in (0, 1)]
    assert ff.spmd(a_flight, MESH)() == expected


def test_nothing_is_held_after_landing(collected):
    def main():
        leaf = torch.ones(3, requires_grad=True)
        x = leaf * 1
        y = ff.start(ff.psum, x, "data").wait()
        gone = weakref.ref(x)
        del x
        gc.collect()
        return gone() is None and y.requires_grad  # the graph lives, the input does not

    assert ff.spmd(main, MESH)() == [True, True]


def written_in_flight():
    x = torch.ones(2)
    pending = ff.start(ff.psum, x, "data")
    x.add_(1)
    pending.wait()


def started(fn):
    return lambda: ff.start(fn, torch.ones(1), "data")


@refusals({
    "written": (
        written_in_flight, RuntimeError, r"psum of shape \(2,\).*written in place"
    ),
    "no collective": (started(lambda x, axis: x), TypeError, "takes a collective"),
    "two in a row": (
        started(lambda x, axis: ff.psum(ff.psum(x, axis), axis)),
        TypeError, "needs tensors",
    ),
})  # fmt: skip
def test_what_cannot_fly_is_refused(call, error, way_out):
    with pytest.raises(error, match=way_out):
        ff.spmd(call, MESH)()


def test_an_axis_of_size_1_and_a_cast_fly_nowhere():
    mesh = ff.make_mesh({"data": 1, "pipe": 2}, "simulated")

    def main():
        x = torch.ones(2)
        y = ff.start(ff.all_gather, x, "data").wait()
        z = ff.start(ff.pcast, x, "pipe", to="V").wait()
        return y.tolist() == z.tolist() == x.tolist()

    with ff.ledger() as log:
        assert ff.spmd(main, mesh)() == [True, True]
    assert log.records == []
