"""Processes that come to unlike collectives: every one of three is told, by no numbers.

As a program, rank 2 does what the others do not. The mesh is closed then, and they go
on by another. A line is printed for each case that went as it should.
"""

import contextlib
import itertools
import os
import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fsfunc as ff
from fsfunc.comm.backends.channels import Channel
from fsfunc.comm.backends.link import digest
from fsfunc.comm.groups import get_group

ones = torch.ones


def call(op, x, **how):
    return lambda: op(x, "data", **how)


def gradient(op):
    return lambda: torch.func.grad(lambda x: op(x, "data").sum())(ones(3))


def in_two(x):
    return lambda: ff.start(ff.psum_scatter, x, "data").wait()


# What ranks 0 and 1 call, what rank 2 calls, and how a table names the two.
CASES = {
    "op": (
        call(ff.psum, ones(4)), call(ff.all_gather, ones(4)),
        ('psum over "data", float32[4]', 'all_gather over "data", float32[4]'),
    ),
    "size": (call(ff.psum, ones(4)), call(ff.psum, ones(8)), ("32[4]", "32[8]")),
    "size, past one hop": (
        call(ff.psum, ones(40_000)), call(ff.psum, ones(80_000)),
        ("float32[40000]", "float32[80000]"),
    ),
    "hops": (call(ff.psum, ones(4)), call(ff.psum, ones(4000)), ("32[4]", "32[4000]")),
    "nothing to send": (
        call(ff.all_gather, ones(0)), call(ff.all_gather, ones(3)), ("[0]", "[3]"),
    ),
    "two phases": (in_two(ones(6)), in_two(ones(3)), ("psum_scatter", "float32[3]")),
    "gradient": (
        gradient(ff.all_gather), gradient(ff.psum_scatter),
        ("all_gather", "psum_scatter"),
    ),
}  # fmt: skip


@ff.unit
def layer(w, x):
    return torch.tanh(x @ w)


def loss(ws, x, order):
    for i in order:
        x = layer(ws[i], x)
    return x.square().mean()


IN_STEPS = ["unshard", "global_norm", "units in another order, never compared"]


def steps(mesh):
    """Cases of sharded functions: what was placed, and what is called unlike."""
    ws, x = [torch.eye(3), 2 * torch.eye(3)], ones(2, 3)
    f = ff.shard(ff.value_and_grad(loss), mesh, "data")
    placed = ff.place(f, ws, x, (0, 1))
    new = lambda: ff.shard(ff.value_and_grad(loss), mesh, "data")  # noqa: E731
    norm, unshard = (lambda fn=fn: fn(placed) for fn in (ff.global_norm, ff.unshard))
    found = [
        (unshard, call(ff.psum, ones(3)), ("all_gather", "(unshard)", "psum")),
        (norm, unshard, ("psum", "all_gather")),
        (
            lambda: new()(placed, x, (0, 1)),
            lambda: new()(placed, x, (1, 0)),
            ("layer(0)", "layer(1)"),
        ),
    ]
    return f, placed, dict(zip(IN_STEPS, found, strict=True))


def differs(mesh, like, unlike, says):
    """Whether every rank raises, and its error names what all of them called."""
    try:
        found = (unlike if mesh.rank == 2 else like)()
    except RuntimeError as error:
        text = str(error)
        rows = [text.splitlines()[1 + r].strip() for r in range(3)]
        told = all(row.startswith(f"rank {r} ") for r, row in enumerate(rows))
        lines = all(re.search(r"unlike_calls.py:\d+$", row) for row in rows)
        named = all(s in rows[0] or s in rows[2] for s in says)
        return told and lines and named and rows[0][7:] != rows[2][7:] or text
    return f"returned {found}"


def transfers(mesh):
    """Rank 0 sends what rank 1 does not expect."""
    where = get_group("data")
    if mesh.rank == 2:
        return "left out"
    try:
        if mesh.rank == 0:
            where.send(ones(4), 1).wait()
        else:
            where.receive((8,), torch.float32, "cpu", 0).wait()
    except RuntimeError as error:
        return all(s in str(error) for s in ("send", "receive", "[4]", "[8]"))
    return False


def in_a_step(mesh, f, placed):
    """A step that ranks have compared sends no headers; unlike buffers never meet."""
    x, order = ones(2, 3), (1, 0) if mesh.rank == 2 else (0, 1)
    sent = []
    send = Channel.send

    def noted(self, x, *rest, **how):
        sent.append(x.numel())
        return send(self, x, *rest, **how)

    Channel.send = noted
    f(placed, x, (0, 1))
    bare = 512 not in sent
    try:
        found = f(placed, x, order)
    except RuntimeError as error:
        named = "all_gather" in str(error) and "of layer(" in str(error)
        return bare and (named or str(error))
    finally:
        Channel.send = send
    return f"returned {found}"


def leaves(mesh):
    """Rank 2 is done where the others are not."""
    ff.spmd(lambda: ff.psum(ones(5), "data"), mesh)()
    try:
        ff.spmd(lambda: mesh.rank == 2 or ff.psum(ones(5), "data"), mesh)()
    except RuntimeError as error:
        rows = str(error).splitlines()[1:]
        names = ["psum", "psum", "end"]
        rows = zip(range(3), names, rows, strict=True)
        return all(f'rank {r} {n} over "data"' in row for r, n, row in rows)
    return "left"


@contextlib.contextmanager
def reading_late(late):
    """Inside, this rank is slow between what it sends and what it reads."""
    send = Channel.send

    def slow(self, *args, **how):
        try:
            return send(self, *args, **how)
        finally:
            time.sleep(0.5 * late)

    Channel.send = slow
    try:
        yield
    finally:
        Channel.send = send


CASE = itertools.count()


def all_done():
    """Waits until each rank has come here as often as this one."""
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store, key = dist.TCPStore(*where, is_master=False), f"done/{next(CASE)}"
    store.add(key, 1)
    while store.add(key, 0) < 3:
        time.sleep(0.01)


def anew(timeout=60):
    """A mesh of its own for each case, and that of the last one is no more.

    The ranks meet within a minute, however short the mesh's own time is. A slow one may
    still read what the others called as they are done with the case: their connections
    stay until it is.
    """
    if dist.is_initialized():
        all_done()
        dist.destroy_process_group()
    mesh = ff.make_mesh({"data": 3}, timeout=60)
    return mesh if timeout == 60 else ff.make_mesh({"data": 3}, timeout=timeout)


def closed(mesh, found):
    """Whether what follows an error raises, and names it: as was ``found``, if so."""
    if found is not True and found != "left out":
        return found
    says = "waits in vain" if found == "left out" else "this mesh is closed since "
    for _ in range(2):
        try:
            total = ff.spmd(lambda: ff.psum(ones(5), "data"), mesh)()[0]
            return f"and then {total}"
        except RuntimeError as error:
            if says not in str(error):
                return str(error)
        says = "this mesh is closed since "
    return True


def main():
    found = {}
    for name in (*CASES, *IN_STEPS):
        mesh = anew()
        case = CASES.get(name) or ff.spmd(steps, mesh)(mesh)[0][2][name]
        told = ff.spmd(lambda m=mesh, case=case: differs(m, *case), mesh)()[0]
        found[name] = closed(mesh, told)
    mesh = anew(timeout=3)  # rank 2 has no part in it
    found["transfer"] = closed(mesh, ff.spmd(lambda: transfers(mesh), mesh)()[0])

    for name in ("op", "size"):
        natively = anew()
        natively.link.paired = False  # as on NCCL
        case = CASES[name]
        told = ff.spmd(lambda m=natively, case=case: differs(m, *case), natively)()[0]
        found[f"{name}, natively"] = closed(natively, told)

    mesh = anew()
    with reading_late(mesh.rank == 1):
        told = ff.spmd(lambda: differs(mesh, *CASES["op"]), mesh)()[0]
        found["op, read late"] = closed(mesh, told)

    os.environ["FSFUNC_CHECK"] = "1"
    checked = anew()
    f, placed, _ = ff.spmd(lambda: steps(checked), checked)()[0]
    run = lambda order: lambda: f(placed, ones(2, 3), order)  # noqa: E731
    like = ff.spmd(run((0, 1)), checked)()[0]
    found["checked, alike"] = torch.is_tensor(like[0])
    case = run((0, 1)), run((1, 0)), ("layer(0)", "layer(1)")
    told = []
    with contextlib.suppress(RuntimeError):  # it is the end that is compared next
        ff.spmd(lambda: told.append(differs(checked, *case)), checked)()
        told = ["went on"]
    found["checked"] = closed(checked, *told)
    found["leaves early, checked"] = leaves(anew())

    os.environ["FSFUNC_CHECK"] = "0"
    short = anew(timeout=2)
    f, placed, _ = ff.spmd(lambda: steps(short), short)()[0]
    ff.spmd(lambda: f(placed, ones(2, 3), (0, 1)), short)()
    began = time.perf_counter()
    found["in a step"] = ff.spmd(lambda: in_a_step(short, f, placed), short)()[0]
    if time.perf_counter() - began > 40:
        found["in a step"] = "late"
    for name, right in found.items():
        print(f"{name}: {'told' if right is True else right}", flush=True)


@pytest.mark.processes
def test_every_rank_is_told_what_each_one_called(processes):
    lines = processes(Path(__file__), 3).splitlines()
    names = {line.partition(":")[0] for line in lines}
    assert len(lines) == 3 * len(names) and len(names) >= 14
    assert [line for line in lines if not line.endswith(": told")] == []


def test_a_digest_is_of_all_that_must_be_equal():
    """What simulated ranks compare as it is, processes compare by eight bytes."""
    said = ("psum", (("source", 0),), ("data",), (4,), torch.float32, "w")
    other = ("pmax", (("source", 1),), ("node",), (2, 2), torch.int32, "b")
    unlike = [said[:i] + other[i : i + 1] + said[i + 1 :] for i in range(len(said))]
    assert len({digest(each) for each in (said, *unlike)}) == 1 + len(said)


if __name__ == "__main__":
    main()
