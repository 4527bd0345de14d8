"""One rank's call again, without the others: the same bits, and the same error."""

import json
import random
import re
import sys
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import given, settings

import fsfunc as ff
from fsfunc import tree
from fsfunc.checkpoint.stored import CheckpointError
from fsfunc.comm.backends.link import call_signature
from fsfunc.comm.comparison import RanksDiffer
from fsfunc.comm.watch.watchdog import Watchdog
from fsfunc.sharded.leaf import is_sharded
from fsfunc.testing import PartsFromRecording, recorded, replay
from fsfunc.testing import strategies as draw
from fsfunc.testing.one_device import batch_axes
from fsfunc.testing.recordings.files import read_call, recorded_calls, write_call
from fsfunc.testing.recordings.keeping import CallRecorder, leaf_checksums
from fsfunc.testing.recordings.tree_reader import TreeReader
from fsfunc.testing.recordings.tree_writer import TreeWriter
from tests.covering import examples
from tests.models import chain, floats, layers
from tests.programs import forked

MESH = ff.make_mesh({"data": 2}, "simulated")
OPTIMIZER = ff.chain(ff.clip_by_global_norm(1.0), ff.sharded_adam(1e-2))
loss = chain()
train = OPTIMIZER(ff.value_and_grad(loss))


def held(value):
    """What is equal where all bits are: the leaves, as bytes."""
    found = []
    for x in tree.leaves(value, is_leaf=is_sharded):
        x = x.local if is_sharded(x) else x
        tensor = isinstance(x, torch.Tensor)
        raw = tensor and x.detach().contiguous().view(-1).view(torch.uint8).tolist()
        found.append((x.dtype, tuple(x.shape), raw) if tensor else x)
    return found


def rows(mesh=MESH, axes="data", count=8):
    return ff.local_batch(floats(count, 4), mesh, axes)


def run(step, state, batch, mesh=MESH, calls=2):
    """By rank, what each call returned, going on with the state that it returned."""

    def main():
        placed, mine, outs = state(), batch(), []
        for _ in range(calls):
            placed, metrics = step(placed, mine)
            outs.append(held((placed, metrics)))
        return outs

    return ff.spmd(main, mesh)()


def first_state(step, batch=rows, optimizer=OPTIMIZER, n=2):
    make = lambda: layers(n, make=floats)  # noqa: E731
    return lambda: ff.init_state(step, make, optimizer, batch())


def once(step, batch=rows, params=None):
    """Calls ``step`` on every rank with parameters that it has laid out."""

    def main():
        x = batch()
        whole = layers(1, make=floats) if params is None else params
        return step(ff.place(step, whole, x), x)

    return ff.spmd(main, MESH)()


def messages(folder, rank=0, call=-1):
    said, tensors = read_call(recorded_calls(folder, rank)[call].path)
    return said["messages"], tensors


# The same bits


@settings(max_examples=examples(4), deadline=None)
@given(draw.meshes(max_size=4).flatmap(draw.transform_stacks), draw.train_steps())
def test_each_rank_of_a_random_stack_runs_again(tmp_path_factory, stack, drawn):
    folder = tmp_path_factory.mktemp("recorded")
    mesh, step = stack.mesh, stack(drawn.step)
    axes, batch = batch_axes(step, mesh), drawn.batch(2 * stack.rows)
    rows = lambda: ff.local_batch(batch, mesh, axes) if axes else batch  # noqa: E731
    state = lambda: ff.place(step, drawn.state, rows())  # noqa: E731
    torch.manual_seed(1)
    with recorded(folder):
        outs = run(step, state, rows, mesh)
    before = torch.get_rng_state()
    last, again = mesh.size - 1, stack(drawn.step)  # that has learnt nothing yet
    for rank, call in ((last, 1), (0, 1), (last, 0)):
        assert held(replay(folder, again, rank=rank, call=call)) == outs[rank][call]
    assert torch.equal(before, torch.get_rng_state())


@ff.unit
def dropped(p, x):
    return torch.nn.functional.dropout(torch.tanh(x @ p["w"] + p["b"]), 0.5)


DROPS = OPTIMIZER(ff.value_and_grad(chain(dropped)))
CASES = {
    "donated": lambda m: ff.donate(ff.shard(train, m, "data", zero=1)),
    "dropout": lambda m: ff.shard(ff.remat(ff.accumulate(DROPS, 2)), m, "data"),
    "offload": lambda m: ff.offload(ff.shard(train, m, "data"), params="host"),
    "zero-bubble": lambda m: ff.pipeline(
        train, m, "data", n_microbatches=4, schedule=ff.schedules.zb_h1
    ),
    "quantized": lambda m: ff.shard(
        train, m, "data", zero=2, reduction=ff.QuantizedReduction()
    ),
    "whole graph": lambda m: ff.jit(
        ff.shard(train, m, "data"), whole_step=True, backend="eager"
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_rank_runs_again_under(name, tmp_path):
    step = CASES[name](MESH)
    batch = (lambda: floats(8, 4)) if name == "zero-bubble" else rows
    with recorded(tmp_path):
        outs = run(step, first_state(step, batch), batch)
    again = CASES[name](ff.make_mesh({"data": 2}, "simulated"))
    if name == "whole graph":  # of which a first run has none
        with pytest.warns(RuntimeWarning, match="returned other bits"):
            replay(tmp_path, again, rank=1)
    assert held(replay(tmp_path, again, rank=1)) == outs[1][-1]


def test_every_default_generator_stands_as_it_did(tmp_path):
    def draws(x):
        made = random.gauss(0, 1), numpy.random.normal(), torch.randn(1).item()
        return [x * made[0], *made[1:]]

    random.gauss(0, 1)  # one of two: the other one is to come
    step = ff.transformed(draws, ff.Interpretation())
    with recorded(tmp_path):
        made = step(torch.ones(1))
    after = random.getstate(), numpy.random.get_state()[1].tolist()
    assert replay(tmp_path, step, rank=0) == made
    assert after == (random.getstate(), numpy.random.get_state()[1].tolist())


@pytest.mark.parametrize("zero", range(4))
def test_a_state_that_keeps_what_it_gathered(zero, tmp_path):
    """At zero=1 and 2 a second call with one state gathers nothing."""
    make = lambda: ff.shard(ff.value_and_grad(loss), MESH, "data", zero=zero)  # noqa: E731
    step = make()

    def main():
        x = rows()
        placed = ff.place(step, layers(2, make=floats), x)
        return [held(step(placed, x)) for _ in range(2)]

    with recorded(tmp_path):
        outs = ff.spmd(main, MESH)()
    first, second = (len(messages(tmp_path, 1, call)[0]) for call in (0, 1))
    assert first - second == (2 if zero in (1, 2) else 0)
    assert held(replay(tmp_path, make(), rank=1)) == outs[1][-1]


def test_a_gradient_call_around_shard_is_one_call(tmp_path):
    step = ff.shard(loss, MESH, "data")
    grad = ff.value_and_grad(step)

    def main():
        x = rows()
        return held(grad(ff.place(step, layers(2, make=floats), x), x))

    with recorded(tmp_path):
        outs = ff.spmd(main, MESH)()
    assert held(replay(tmp_path, grad, rank=1)) == outs[1]


@pytest.mark.parametrize("packed", [True, False])
def test_a_backward_of_ones_own_is_no_part_of_a_call(packed, tmp_path):
    step = ff.shard(loss, MESH, "data")

    def main():
        x = rows()
        params = ff.place(step, layers(2, make=floats), x)
        if not packed:
            params = tree.map(lambda w: w.clone().requires_grad_(), params)
        else:
            for leaf in tree.leaves(params, is_leaf=is_sharded):
                leaf.packed.flat.requires_grad_()
        value = step(params, x)
        value.backward()
        return value.item()

    with recorded(tmp_path):
        values = ff.spmd(main, MESH)()
    value = replay(tmp_path, step, rank=1)
    assert value.item() == values[1]
    with pytest.raises(PartsFromRecording, match="after the end of call 0"):
        value.backward()


def test_a_step_that_no_transform_has(tmp_path):
    """By the transform that does nothing; with keywords, and without a mesh too."""

    def plain(w, *, by):
        return ff.psum(w * by, "data") if ff.tree.leaves(by) == [2] else w * by

    step = ff.transformed(plain, ff.Interpretation())
    with recorded(tmp_path / "ranks"):
        out = ff.spmd(lambda: step(torch.ones(2) + ff.axis_index("data"), by=2), MESH)()
    assert replay(tmp_path / "ranks", step, rank=1).tolist() == out[1].tolist()
    with recorded(tmp_path / "one"):
        step(torch.ones(2), by=3)
    assert replay(tmp_path / "one", step, rank=0).tolist() == [3, 3]


def test_each_rank_may_open_its_own(tmp_path):
    step = ff.shard(lambda w, x: ff.psum(w * x, "data"), MESH, "data")

    def main():
        w = ff.place(step, torch.ones(2), torch.ones(2))
        with recorded(tmp_path):
            return step(w, torch.ones(2))

    ff.spmd(main, MESH)()
    assert replay(tmp_path, step, rank=1).tolist() == [2, 2]


def test_nothing_else_is_a_call(tmp_path):
    """A step that is laid out, planned, mapped, or called by another one."""
    inner = ff.remat(lambda w, x: (w * x).sum())
    step = ff.shard(lambda w, x: inner(w, x), MESH, "data")

    def main():
        w = ff.place(step, torch.ones(2), torch.ones(2))
        torch.func.grad(inner)(torch.ones(2), torch.ones(2))
        return step(w, torch.ones(2))

    with recorded(tmp_path):
        ff.spmd(main, MESH)()
        abstract = ff.make_mesh({"data": 2}, "abstract")
        ff.spmd(lambda: inner(torch.ones(2), torch.ones(2)), abstract)()
    assert [one.call for one in recorded_calls(tmp_path, 0)] == [0]


# The same error


def test_an_error_is_raised_again_and_names_the_folder(tmp_path):
    @ff.unit
    def odd(p, x):
        if not ff.recording() and float(x.sum()) > 5:
            raise ArithmeticError(f"it is {float(x.sum())}")
        return x * p["w"].sum()

    step = ff.shard(ff.value_and_grad(chain(odd)), MESH, "data")
    batch = lambda: torch.full((2, 4), float(ff.axis_index("data")))  # noqa: E731
    with recorded(tmp_path), pytest.raises(ArithmeticError, match="it is 8.0") as told:
        once(step, batch)
    call = f"ff.testing.replay({str(tmp_path)!r}, step, rank=1)"
    assert any(call in note for note in told.value.__notes__)
    with pytest.raises(ArithmeticError, match="^it is 8.0") as again:
        replay(tmp_path, step, rank=1)
    assert type(again.value) is type(told.value)
    assert again.value.args == told.value.args
    # The other rank raised nothing: it was stopped where it waited.
    with pytest.raises(PartsFromRecording, match="never came in .*: the error"):
        replay(tmp_path, step, rank=0)


def test_a_nan_of_one_rank_is_found_alone(tmp_path):
    @ff.unit
    def root(p, x):
        return (x @ p["w"] + p["b"]).sqrt()

    step = ff.shard(OPTIMIZER(ff.value_and_grad(chain(root))), MESH, "data")
    batch = lambda: torch.full((2, 4), 1.0 - 2 * ff.axis_index("data"))  # noqa: E731
    params = [{"w": torch.eye(4), "b": torch.zeros(4)}]

    def main():
        x = batch()
        state = ff.init_state(step, params, OPTIMIZER, x)
        return step(state, x)[1]["loss"].item()

    with recorded(tmp_path):
        assert ff.spmd(main, MESH)()[0] != ff.spmd(main, MESH)()[0]  # NaN, everywhere
    looked = ff.testing.finite(step)
    with pytest.raises(ff.testing.NotFinite, match="unit 'root' returns nan .* rank 1"):
        replay(tmp_path, looked, rank=1)
    # On the other rank it comes from without: the mean of the losses is not finite.
    with pytest.raises(ff.testing.NotFinite, match="^the loss is nan .* on rank 0"):
        replay(tmp_path, looked, rank=0)

    with pytest.raises(ValueError, match="no number") as told, recorded(tmp_path):
        ff.spmd(main, MESH)()
        raise ValueError("the loss is no number")
    last = f"the last call, 2, is recorded: ff.testing.replay({str(tmp_path)!r}, step,"
    assert told.value.__notes__[0].startswith(last)
    with recorded(tmp_path), pytest.raises(ff.testing.NotFinite) as told:
        step = looked
        ff.spmd(main, MESH)()
    assert str(tmp_path) in told.value.__notes__[0]


def test_what_ranks_compare_is_not_compared_again(tmp_path):
    """A rank alone has nobody to differ from: it is said why its call ended."""
    step = ff.shard(lambda w, x: (w, x.sum()), MESH, "data")

    def main():
        x = torch.ones(2)
        w = ff.place(step, torch.ones(2), x)
        w += ff.axis_index("data")  # replicated, by its layout
        return step(w, x)

    with recorded(tmp_path), pytest.raises(RanksDiffer, match="return different"):
        ff.spmd(main, MESH)()
    with pytest.raises(PartsFromRecording, match="from without.* by RanksDiffer"):
        replay(tmp_path, step, rank=1)


# Another program


def psums(*, more=0, then=(), dim=0):
    def step(w, x):
        y = ff.psum(w * x, "data") + more * x
        z = ff.all_gather(y, "data", dim=dim)
        for extra in then:
            z = extra(z)
        return z

    return ff.shard(step, MESH, "data")


def test_another_program_is_refused_where_it_parts(tmp_path):
    with recorded(tmp_path):
        once(psums(), lambda: torch.ones(2, 2), torch.ones(2, 2))
    gathered = 'all_gather over "data", float32[2, 2]'
    for step, said in {
        psums(then=[lambda z: ff.psum(z, "data")]): (
            'asks for psum over "data", float32[4, 2]', "after 2 messages"
        ),
        ff.shard(lambda w, x: ff.psum(w * x, "data"), MESH, "data"): (
            "message 1 of 2 in call 0 of rank 1", f"still {gathered}", "has ended"
        ),
        ff.shard(lambda w, x: ff.pmax(w * x, "data"), MESH, "data"): (
            "message 0 of 2", 'was psum over "data"', "asks for pmax"
        ),
        ff.shard(
            lambda w, x: ff.all_gather(ff.psum(w * x, "data")[:1], "data"), MESH, "data"
        ): ("message 1 of 2", f"was {gathered}", "float32[1, 2]", "recordings.py:"),
    }.items():  # fmt: skip
        with pytest.raises(PartsFromRecording) as told:
            replay(tmp_path, step, rank=1)
        assert all(text in str(told.value) for text in said), str(told.value)
    with pytest.warns(RuntimeWarning, match="message 1 of 2 .* other bits are sent"):
        out = replay(tmp_path, psums(more=1), rank=1)
    assert out.tolist() == [[2, 2]] * 4  # what was received, all the same
    with pytest.warns(RuntimeWarning, match="returned other bits in"):
        replay(tmp_path, psums(then=[lambda z: z + 1]), rank=1)


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(CheckpointError, match="none at all"):
        replay(tmp_path / "no", psums(), rank=0)
    with recorded(tmp_path, calls=3):
        for _ in range(2):
            once(psums(), lambda: torch.ones(2, 2), torch.ones(2, 2))
    there = r"calls \[0, 1\] of rank 0; calls \[0, 1\] of rank 1"
    with pytest.raises(CheckpointError, match=f"call 7 of rank 1: it has {there}"):
        replay(tmp_path, psums(), rank=1, call=7)
    with pytest.raises(CheckpointError, match="a call of rank 2"):
        replay(tmp_path, psums(), rank=2)
    three = ff.shard(lambda w, x: x, ff.make_mesh({"data": 3}, "simulated"), "data")
    with pytest.raises(ValueError, match="axes .*'data': 2.* given one over .*: 3"):
        replay(tmp_path, three, rank=0)
    for wrong in ({"calls": 0}, {"most": 1.5}):
        with pytest.raises((TypeError, ValueError), match=f"{[*wrong][0]}="):
            with recorded(tmp_path, **wrong):
                pass


# Files


def test_the_last_calls_are_kept_within_so_many_bytes(tmp_path):
    step = psums()

    def calls(folder, n=4, **bounds):
        with recorded(folder, **bounds):
            for _ in range(n):
                once(step, lambda: torch.ones(2, 2), torch.ones(2, 2))
        return [one.call for one in recorded_calls(folder, 1)]

    assert calls(tmp_path / "a", calls=3) == [1, 2, 3]
    assert calls(tmp_path / "a", 1, calls=2) == [3, 4]  # it goes on counting
    size = recorded_calls(tmp_path / "a", 1)[0].path.stat().st_size
    assert calls(tmp_path / "b", calls=9, most=2 * size + 9) == [2, 3]
    assert calls(tmp_path / "c", calls=9, most=size - 1) == [3]
    with pytest.warns(RuntimeWarning, match=r"receives 80 bytes or .*most=79"):
        assert calls(tmp_path / "d", 1, most=79) == []


def test_what_is_kept_is_what_the_ledger_says(tmp_path):
    """And the arguments, and the generators' states."""
    step = ff.shard(train, MESH, "data")
    with recorded(tmp_path, calls=1), ff.ledger() as log:
        run(step, first_state(step), rows, calls=1)
    said, tensors = messages(tmp_path, 1)
    found = {op: 0 for op, *_ in said}
    for i, (op, *_) in enumerate(said):
        found[op] += tensors.pop(f"message {i}").nbytes
    n = 2
    assert found == {
        "all_gather": log.bytes("data", "all_gather", rank=1) * n / (n - 1),
        "psum_scatter": log.bytes("data", "psum_scatter", rank=1) / (n - 1),
        "psum": log.bytes("data", "psum", rank=1) * n / (2 * (n - 1)),
    }
    assert len(said) == log.count(rank=1)
    states = torch.get_rng_state().nbytes
    params = 2 * (16 + 4) * 4 // n
    assert sum(x.nbytes for x in tensors.values()) - states == 3 * params + 4 * 4 * 4


def test_no_other_message_is_sent(tmp_path):
    step = ff.shard(train, MESH, "data")
    with ff.ledger() as plain:
        run(step, first_state(step), rows)
    with ff.ledger() as log, recorded(tmp_path):
        run(step, first_state(step), rows)
    assert log.table(1) == plain.table(1) and log.ranks == plain.ranks


KILLED = """
import os, signal, sys
import torch, fsfunc as ff
from fsfunc.testing.recordings import files

appear, seen = files.publish, []

def killed(part, path):
    seen.append(path)
    if len(seen) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    appear(part, path)

files.publish = killed
step = ff.remat(lambda w, x: w * x)
with ff.testing.recorded(sys.argv[1]):
    for i in range(9):
        step(torch.ones(2), i)
"""


def test_a_recording_that_was_cut_off_is_never_read(tmp_path):
    program, folder = tmp_path / "killed.py", tmp_path / "recorded"
    program.write_text(KILLED)
    assert forked(program, folder).returncode not in (0, 1)
    step = ff.remat(lambda w, x: w * x)
    assert replay(folder, step, rank=0).tolist() == [1, 1]  # the last that is complete
    assert any(path.name.startswith(".") for path in folder.iterdir())
    with recorded(folder):
        step(torch.ones(2), 5)
    assert not any(path.name.startswith(".") for path in folder.iterdir())

    path = recorded_calls(folder)[-1].path
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:40], b"", whole[:-1] + b"?", whole + b"\0"):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="damaged"):
            replay(folder, step, rank=0)
    ff.save(tmp_path / "a", {"w": torch.ones(2)})
    ff.consolidate(tmp_path / "a", tmp_path / "b")
    path.write_bytes((tmp_path / "b").read_bytes())
    with pytest.raises(CheckpointError, match="is no recording of version 1"):
        replay(folder, step, rank=0)


@pytest.mark.filterwarnings("default")
def test_a_full_disk_leaves_the_step_as_it_is(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(write_call.__globals__, "write_file", full)
    step = ff.remat(lambda w, x: w * x)
    with recorded(tmp_path), pytest.warns(RuntimeWarning, match="No space left"):
        assert step(torch.ones(2), 2).tolist() == [2, 2]
    assert not list(tmp_path.iterdir())


# Trees


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Record:
    x: Any
    name: str = "a"


class Odd:
    pass


def again(value, like=()):
    """A tree, written as JSON and read."""
    writer = TreeWriter()
    node = writer.add(value)
    said = json.loads(json.dumps({"node": node, **writer.tables}))
    reader = TreeReader(said, writer.tensors, {})
    return reader.fill(said["node"], *like) if like else reader.tree(said["node"])


def test_trees_come_again_as_they_were():
    x = torch.arange(6.0).view(2, 3)
    value = {
        "b": [Pair(x.t(), None), Record(x.to(torch.complex128) * 1j)],
        "a": OrderedDict(z=(1, 2.5, float("inf"), True, "é", None), y=3 + 2j),
        3: {"empty": torch.empty(0, 2), "half": x.to(torch.float8_e4m3fn), "u": x > 1},
        "kinds": (torch.float16, torch.Size([1, 2]), b"\0\1", torch.device("cpu")),
        "parameter": torch.nn.Parameter(x, requires_grad=False),
        "grad": x.clone().requires_grad_(),
        "channels": torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": torch.ones(1, 3).expand(4, 3),
        "conjugated": (x + 1j * x).conj(),
        "same": [x, x],
    }
    made = again(value)
    assert list(made) == list(value) and type(made["a"]) is OrderedDict
    assert list(made["a"]) == ["z", "y"]
    assert tree.flatten(made)[1] == tree.flatten(value)[1]
    for old, new in zip(tree.leaves(value), tree.leaves(made), strict=True):
        assert type(old) is type(new)
        if isinstance(old, torch.Tensor):
            assert old.dtype == new.dtype and old.requires_grad == new.requires_grad
            assert held(old.resolve_conj()) == held(new)
            if 0 not in old.stride() and old.numel():
                assert old.stride() == new.stride()
        else:
            assert old == new
    assert made["same"][0] is made["same"][1]


def test_no_class_is_imported_for_a_file():
    pair = again(Pair(1, 2))
    assert type(pair) is Pair
    writer = TreeWriter()
    kind, name, static, nodes = writer.add(Pair(1, 2))
    reader = TreeReader(writer.tables, {}, {})
    for other in ("antigravity:x", "os:system", "builtins:int", f"{__name__}:Odd"):
        with pytest.raises(CheckpointError, match=re.escape(other)):
            reader.tree([kind, other, static, nodes])
    assert "antigravity" not in sys.modules


def test_objects_are_those_of_the_arguments_that_are_given():
    value, mine = {"w": torch.ones(2), "by": Odd()}, {"w": torch.zeros(2), "by": Odd()}
    with pytest.raises(CheckpointError, match=r"Odd, .* replay\(folder, step, state"):
        again(value)
    made = again(value, [mine])
    assert made["w"].tolist() == [1, 1] and made["by"] is mine["by"]
    with pytest.raises(CheckpointError, match="have 1 leaves, and the recorded ones 2"):
        again(value, [[1]])

    class Inner(NamedTuple):  # of a name that leads nowhere
        x: Any

    with pytest.raises(CheckpointError, match="Inner, and this program has imported"):
        again(Inner(1))
    assert again(Inner(1), [Inner(2)]) == Inner(1)


# Processes

PROGRAM = """
import json, sys
import fsfunc as ff
from fsfunc.testing.recordings.keeping import CallRecorder, leaf_checksums
from tests.models import floats, layers
from tests.testing.test_recordings import OPTIMIZER, pipelined, sharded

folder = sys.argv[1]

def say(*what):
    print(json.dumps([mesh.rank, *what]), flush=True)

mesh = ff.make_mesh({"data": 2})
step = sharded(mesh)
x = ff.local_batch(floats(8, 4), mesh, "data")
state = ff.init_state(step, lambda: layers(2, make=floats), OPTIMIZER, x)
with ff.testing.recorded(f"{folder}/sharded"):
    for _ in range(3):
        state, metrics = step(state, x)
say("sharded", leaf_checksums((state, metrics)))

gloo = ff.make_mesh({"data": 2}, shared_memory=False)
step = pipelined(gloo)
state = ff.init_state(step, lambda: layers(2, make=floats), OPTIMIZER, floats(8, 4))
with ff.testing.recorded(f"{folder}/pipelined"):
    state, metrics = step(state, floats(8, 4))
say("pipelined", leaf_checksums((state, metrics)))

step = ff.testing.finite(sharded(mesh))
state = ff.init_state(step, lambda: layers(2, make=floats), OPTIMIZER, x)
if mesh.rank:
    x[0, 1] = float("inf")
try:
    with ff.testing.recorded(f"{folder}/infinite"):
        step(state, x)
except Exception as error:
    say(type(error).__name__, *error.__notes__)
"""


def sharded(mesh):
    return ff.donate(ff.shard(ff.remat(train), mesh, "data"))


def pipelined(mesh):
    return ff.pipeline(train, mesh, "data", n_microbatches=2)


@pytest.mark.processes(slow=False)
def test_processes_are_recorded_and_run_again_in_one(processes, tmp_path):
    folder = tmp_path / "recorded"
    printed = processes(PROGRAM, 2, str(folder), timeout=60)
    said = {tuple(row[:2]): row[2:] for row in map(json.loads, printed.splitlines())}
    for name, make in {"sharded": sharded, "pipelined": pipelined}.items():
        for rank in range(2):
            out = replay(folder / name, make(MESH), rank=rank)
            assert [leaf_checksums(out)] == said[rank, name]
    call = "call 0 of rank {} is recorded: ff.testing.replay({!r}, step, rank={})"
    for rank, kind in enumerate(("PeerFailed", "NotFinite")):
        note = call.format(rank, str(folder / "infinite"), rank)
        assert any(text.startswith(note) for text in said[rank, kind])
    looked = ff.testing.finite(sharded(MESH))
    with pytest.raises(ff.testing.NotFinite, match="is given inf .* rank 1"):
        replay(folder / "infinite", looked, rank=1)
    with pytest.raises(PartsFromRecording, match="PeerFailed"):
        replay(folder / "infinite", looked, rank=0)


def test_a_rank_that_waits_says_where_its_call_is_recorded(capsys):
    dog, where = Watchdog(), SimpleNamespace(ranks=(0, 1), axis=("data",), link=None)
    said = call_signature("psum", {}, where.axis, torch.ones(3), "")
    record = dog.flight.begin(said, where, 0)
    at = SimpleNamespace(link=SimpleNamespace(flight=dog.flight))
    with CallRecorder(Path("tape"), 1, 1)._name_in_watchdog(at):
        dog._print_states(record)
    dog._print_states(record)
    lines = [x for x in capsys.readouterr().err.splitlines() if "[fsfunc]" in x]
    assert ["; its call is recorded in tape" in line for line in lines] == [True, False]
