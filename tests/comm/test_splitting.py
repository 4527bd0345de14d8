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
from torch.func import grad, vjp

import fsfunc as ff
from fsfunc.comm.backends.link import Handle
from fsfunc.comm.backends.simulated import SimulatedLink

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
    def main():
        shards = [torch.ones(i + 1, dtype=torch.float64) / 9 for i in range(layers)]
        f = lambda shards: prefetched(shards, torch.tensor(0.3), depth)  # noqa: E731
        if plain:
            for shard in shards:
                shard.requires_grad_()
            f(shards).backward()
        else:
            y, pull = vjp(f, shards)
            pull(torch.ones_like(y))

    with pytest.MonkeyPatch.context() as patch:
        seen = watch(patch)
        ff.spmd(main, MESH)()
    forward, backward = seen[: 2 * layers], seen[2 * layers :]
    assert backward == dual(forward)
    ahead = [a for a, _ in forward].index("wait")
    assert ahead == min(depth + 1, layers)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_prefetched_gradient_is_that_of_the_plain_program(depth):
    shards = [torch.full((i + 1,), 0.1 * i) for i in range(4)]

    def plain(shards):
        x = torch.tensor(0.3)
        for shard in shards:
            x = (x * ff.all_gather(shard, "data").sum()).tanh()
        return x

    def main():
        split = grad(lambda s: prefetched(s, torch.tensor(0.3), depth))(shards)
        return [split, grad(plain)(shards)]

    with ff.ledger() as log:
        for split, whole in ff.spmd(main, MESH)():
            assert all(torch.equal(a, b) for a, b in zip(split, whole, strict=True))
    kinds = [(r.op, r.bytes, r.phase) for r in log.of(0)]
    assert sorted(kinds[:8]) == sorted(kinds[8:])
    assert log.count("all_gather") == log.count("psum_scatter") == 8


def in_any_order():
    a = ff.start(ff.psum, torch.ones(1), "data")
    b = ff.start(ff.all_gather, torch.full((1,), 2.0), "data")
    first, second = (b, a) if ff.axis_index("data") else (a, b)
    first.wait()
    second.wait()
    return a.wait().tolist() + b.wait().tolist()


def every_time_the_same():
    x = torch.ones(2, requires_grad=True)
    pending = ff.start(ff.all_gather, x, "data")
    y = pending.wait()
    (pending.wait() + y).sum().backward()
    return y is pending.wait(), x.grad.tolist()


def a_pytree_as_a_whole():
    given = {"a": torch.ones(2), "b": [torch.ones(())]}
    out = ff.start(ff.pmean, given, "data").wait()
    return out["a"].tolist(), out["b"][0].item()


def integers():
    return [
        ff.start(collective, torch.tensor([3]), "data").wait().item()
        for collective in (ff.pmax, ff.psum)
    ]


def keywords():
    return ff.start(ff.ppermute, torch.ones(1), "data", [(0, 1)]).wait().item()


def inference_tensors():
    with torch.inference_mode():
        return ff.start(ff.psum, torch.ones(1), "data").wait().item()


def nothing_held_after_landing():
    leaf = torch.ones(3, requires_grad=True)
    x = leaf * 1
    y = ff.start(ff.psum, x, "data").wait()
    gone = weakref.ref(x)
    del x
    gc.collect()
    return gone() is None and y.requires_grad  # the graph lives, the input does not


@pytest.mark.parametrize(
    ("main", "expected"),
    [
        (in_any_order, [[2, 2, 2]] * 2),
        (every_time_the_same, [(True, [4, 4])] * 2),
        (a_pytree_as_a_whole, [([1, 1], 1)] * 2),
        (integers, [[3, 6]] * 2),
        (keywords, [0, 1]),
        (inference_tensors, [2, 2]),
        (nothing_held_after_landing, [True, True]),
    ],
)
def test_a_flight_gives(main, expected):
    assert ff.spmd(main, MESH)() == expected


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


def test_writing_into_what_is_in_flight_is_refused():
    def main():
        x = torch.ones(2)
        pending = ff.start(ff.psum, x, "data")
        x.add_(1)
        pending.wait()

    with pytest.raises(RuntimeError, match=r"psum of shape \(2,\).*written in place"):
        ff.spmd(main, MESH)()


def test_only_collectives_start():
    with pytest.raises(TypeError, match="takes a collective"):
        ff.spmd(lambda: ff.start(lambda x, axis: x, torch.ones(1), "data"), MESH)()


def test_two_in_a_row_are_two_starts():
    chain = lambda x, axis: ff.psum(ff.psum(x, axis), axis)  # noqa: E731
    with pytest.raises(TypeError, match="needs tensors"):
        ff.spmd(lambda: ff.start(chain, torch.ones(1), "data"), MESH)()
