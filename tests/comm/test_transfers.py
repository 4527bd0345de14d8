"""One rank sends to another: in order, in one copy, noted; nobody waits for ever."""

import gc
import re
import time
import weakref

import pytest
import torch

import fsfunc as ff
from fsfunc.comm.attribution import label
from fsfunc.comm.backends.baton import Deadlock
from fsfunc.comm.backends.link import CollectiveMismatch
from fsfunc.comm.groups import get_group

SHAPES = [(), (1,), (0, 3), (2, 0), (5, 7), (300, 41)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool]


def value(shape, dtype, number):
    generator = torch.Generator().manual_seed(number)
    return torch.randint(-9, 9, shape, generator=generator).to(dtype)


def everything(axis):
    """Every pair at once, both ways; {what: tensor} of this rank, and its ledger."""
    where = get_group(axis)
    others = [i for i in range(where.size) if i != where.index]
    kinds = [(shape, dtype) for shape in SHAPES for dtype in DTYPES]
    found, sent, received = {}, [], {}
    with ff.ledger() as log, label("blocks/3", "forward"):
        for number, (shape, dtype) in enumerate(kinds):
            for i in others:  # some receives are asked for before the send, some after
                if (number + i) % 2:
                    received[number, i] = where.receive(shape, dtype, "cpu", i)
                x = value(shape, dtype, number + 100 * where.index + 10 * i)
                sent.append(where.send(x, i))
                if not (number + i) % 2:
                    received[number, i] = where.receive(shape, dtype, "cpu", i)
            if number % 7 == 0:
                total = where.start("psum", torch.ones(5 + number), any_order=True)
                found[f"sum {number}"] = total.wait()
        for (number, i), work in reversed(received.items()):  # in any order
            found[f"{kinds[number]} from {i}"] = work.wait()
        for work in sent:
            work.wait()
    if not all(work.done() for work in sent):
        raise AssertionError("a send that was waited for is not done")
    for (number, i), (shape, dtype) in ((key, kinds[key[0]]) for key in received):
        expected = value(shape, dtype, number + 100 * i + 10 * where.index)
        x = found[f"{kinds[number]} from {i}"]
        if x.dtype != dtype or x.shape != shape or not torch.equal(x, expected):
            raise AssertionError(f"{kinds[number]} from {i}: {x} is not {expected}")
    records = [(r.op, r.axis, r.bytes, r.dtype, r.unit, r.phase) for r in log.of()]
    return found, records


def ranks(n=2, backend="simulated"):
    return ff.make_mesh({"pipe": n}, backend)


def run(main, n=2):
    return ff.spmd(main, ranks(n))()


# What arrives, and what the ledger says


@pytest.mark.parametrize("n", [2, 3])
def test_every_pair_both_ways(n):
    run(lambda: everything("pipe"), n)


def test_the_result_is_the_receivers_own(collected):
    """Without a gradient, in rows; what was never asked for goes with the ranks."""
    kept = []

    def main():
        where = get_group("pipe")
        x = torch.arange(6.0).view(2, 3).t().requires_grad_() * 1
        work = where.receive((3, 2), x.dtype, "cpu", 1 - where.index)
        where.send(x, 1 - where.index)
        where.start("psum", torch.ones(1)).wait()
        with torch.no_grad():
            x.fill_(7)
        y = work.wait()
        seen = y.tolist(), y.requires_grad, y.is_contiguous()
        y.fill_(9)
        where.start("psum", torch.ones(1)).wait()
        lost = torch.ones(10)
        kept.append(weakref.ref(lost.untyped_storage()))
        where.send(lost, 1 - where.index)
        return seen, x.unique().tolist()

    expected = torch.arange(6.0).view(2, 3).t().tolist()
    assert run(main) == [((expected, False, True), [7.0])] * 2
    gc.collect()
    assert [x() for x in kept] == [None, None]


def alone(transfer, other):
    """A send or a receive of rank 0 alone."""

    def main():
        where = get_group("pipe")
        if where.index == 0 and "send" in transfer:
            where.send(torch.ones(1), other)
        elif where.index == 0:
            where.receive((1,), torch.float32, "cpu", other)

    return main


@pytest.mark.parametrize("transfer", ["send to", "receive from"])
def test_only_another_rank_of_a_simulated_group(transfer):
    for other in (0, 2, -1):
        said = f'along "pipe", cannot {transfer} index {other}:'
        with pytest.raises(ValueError, match=said):
            run(alone(transfer, other))
    said = f"can {transfer.split()[0]} alone.*simulated mesh"
    with pytest.raises(RuntimeError, match=said):
        ff.spmd(alone(transfer, 1), ranks(2, "vmap"))()


def test_a_deadlock_says_who_waits_for_whom():
    def main():
        where = get_group("pipe")
        if where.index == 0:
            where.receive((2, 5), torch.float32, "cpu", 2).wait()
        if where.index == 1:
            where.send(torch.ones(4, dtype=torch.int64), 0).wait()

    said = r'(?s)rank 0 waits in receive over "pipe", float32\[2, 5\].*ranks \[2\].*'
    said += r'rank 1 waits in send over "pipe", int64\[4\].*ranks \[0\].*rank 2 has ret'
    with pytest.raises(Deadlock, match=said):
        run(main, 3)


# Errors


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (torch.ones(2, 3), r"float32\[2, 3\]"),
        (torch.ones(3, 2, dtype=torch.float64), r"float64\[3, 2\]"),
    ],
)
@pytest.mark.parametrize("first", [0, 1])
def test_another_shape_or_dtype_is_told_by_both(sent, says, first):
    def main():
        where = get_group("pipe")
        if where.index != first:  # lets the other one go ahead
            where.start("psum", torch.ones(1)).wait()
        with label(f"stages/{where.index}", "forward"):
            if where.index == 0:
                where.send(sent, 1)
            else:
                work = where.receive((3, 2), torch.float32, "cpu", 0)
        if where.index == first:
            where.start("psum", torch.ones(1)).wait()
        if where.index:
            work.wait()

    with pytest.raises(CollectiveMismatch) as caught:
        run(main)
    text = str(caught.value)
    assert re.search(rf'rank 0 send over "pipe", {says} of stages/0 \(forward\)', text)
    assert 'rank 1 receive over "pipe", float32[3, 2] of stages/1 (forward)' in text


MEMORY = """
    import time, weakref, torch, fsfunc as ff
    from fsfunc.comm.groups import get_group
    def main():
        where = get_group("pipe")
        if where.index == 0:
            x = torch.full((1 << 20,), 3.0)
            alive = weakref.ref(x.untyped_storage())
            work = where.send(x, 1)
            del x
            where.receive((), torch.float32, "cpu", 1).wait()  # it has not asked yet
            seen = [work.done(), alive() is None]
            where.send(torch.zeros(()), 1)
            end = time.monotonic() + 20
            while not work.done() and time.monotonic() < end:
                time.sleep(0.01)  # and nobody waits for the work
            return [*seen, work.done(), alive() is None]
        where.send(torch.zeros(()), 0).wait()
        time.sleep(0.1)
        y = where.receive((1 << 20,), torch.float32, "cpu", 0)
        later = where.receive((), torch.float32, "cpu", 0)
        return [later.wait().item(), y.wait().sum().item() == 3 << 20]
    (found,) = ff.spmd(main, ff.make_mesh({"pipe": 2}))()
    print(f"{found}\\n", end="", flush=True)
"""


@pytest.mark.processes
def test_a_process_lets_go_of_what_was_received(processes):
    out = processes(MEMORY, 2, timeout=60).splitlines()
    assert out == ["[False, False, True, True]", "[0.0, True]"]


ENDS = """
    import torch, fsfunc as ff
    from fsfunc.comm.groups import get_group
    def main():
        where = get_group("pipe")
        for _ in range(3):
            where.send(torch.ones(100_000), 1 - where.index)
        if {raises}:
            if where.index == 1:
                raise ArithmeticError("no such value")
            where.send(torch.ones(1), 1).wait()
    ff.spmd(main, ff.make_mesh({{"pipe": 2}}))()
    print("went on", flush=True)
"""


@pytest.mark.processes
def test_processes_end_with_sends_that_nobody_received(processes):
    began = time.perf_counter()
    assert processes(ENDS.format(raises=False), 2, timeout=60) == "went on\n" * 2
    with pytest.raises(AssertionError, match="no such value") as caught:
        processes(ENDS.format(raises=True), 2, timeout=60)
    assert "went on" not in str(caught.value)
    assert time.perf_counter() - began < 40
