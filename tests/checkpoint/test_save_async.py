"""Saving in the background: the state of the call, whatever runs meanwhile."""

import gc
import os
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch

import fsfunc as ff
from fsfunc.checkpoint import safetensors
from fsfunc.checkpoint.agreement import SavePeers
from fsfunc.checkpoint.stored import CheckpointError
from fsfunc.checkpoint.tasks import in_flight
from fsfunc.comm.mesh import here
from fsfunc.comm.watch.mailboxes import GONE, SILENT, Board, Message
from fsfunc.transforms.gathers import Gathers
from tests.checkpoint.stacks import STACKS, made
from tests.checkpoint.trees import PAIR, on
from tests.checks import same
from tests.programs import forked

PATIENCE = 20  # seconds


@pytest.fixture
def gate(monkeypatch):
    """Holds the writing of every rank until it is opened, or a rank's goes wrong."""
    opened, broken = threading.Event(), {}
    write = safetensors.write_file

    def held(path, head, entries):
        assert opened.wait(PATIENCE)
        for rank, error in broken.items():
            if path.name.startswith(f"shard-{rank + 1:05}"):
                raise error
        return write(path, head, entries)

    monkeypatch.setattr(safetensors, "write_file", held)
    opened.broken = broken
    yield opened
    opened.set()


def zeros(state):
    zero = lambda x: torch.zeros_like(x) if isinstance(x, torch.Tensor) else x  # noqa: E731
    return ff.tree.map(zero, state)


@pytest.mark.parametrize(
    "name, donated",
    [("one device", True), ("zero=1 on 3", True), ("HSDP zero=3", False),
     ("shard(pipeline)", True)],
)  # fmt: skip
def test_the_state_of_the_call_is_saved(tmp_path, gate, name, donated):
    """Two steps run before a byte is written; they train as they would have."""

    def main(mesh):
        step, state, mine = made(name, mesh)
        pure = step
        step = ff.donate(step) if donated else step
        state, _ = step(state, mine[0])  # parts, gathered buffers and all
        whole = (lambda x: x) if mesh is None else ff.unshard
        before = ff.tree.map(
            lambda x: x.clone() if isinstance(x, torch.Tensor) else x, whole(state)
        )
        saving = ff.save_async(tmp_path / "a", state)
        assert not saving.done()
        for batch in mine[1:3]:
            state, _ = step(state, batch)
        after = whole(state)
        gate.set()
        saving.wait()
        assert saving.done()
        found = whole(ff.load(tmp_path / "a", zeros(state)))
        same(found, before)
        again = ff.load(tmp_path / "a", state)
        for batch in mine[1:3]:
            again, _ = pure(again, batch)
        same(whole(again), after)
        if mesh is not None:
            ff.psum(torch.ones(1), tuple(mesh.axes))
        state, _ = step(state, mine[3])

    on(STACKS[name][0], main)


def stepping(mesh, zero):
    """A step over 5 elements and its state, whose gathered buffer shows nothing yet."""
    optimizer = ff.sgd(0.1)
    loss = ff.unit(lambda w, x: (w * x).sum())
    step = ff.shard(optimizer(ff.value_and_grad(loss)), mesh, "data", zero=zero)
    return step, ff.init_state(step, lambda: torch.ones(5), optimizer, torch.ones(5))


@pytest.mark.parametrize("zero", [1, 2])
def test_a_gather_is_no_change(tmp_path, gate, monkeypatch, zero):
    """The save ends while the buffer that its part lies in is being gathered."""

    def main(mesh):
        step, state = stepping(mesh, zero)
        saving = ff.save_async(tmp_path / "a", state)
        slowly.saving[mesh_rank()] = saving
        step(state, torch.ones(5))
        saving.wait()
        same(ff.unshard(ff.load(tmp_path / "a", state)).params, torch.ones(5))

    def slowly(self, shard, full, dtype):
        gate.set()
        slowly.saving[mesh_rank()].thread.join()
        return arrived(self, shard, full, dtype)

    slowly.saving, arrived = {}, Gathers.decode
    monkeypatch.setattr(Gathers, "decode", slowly)
    mesh = ff.make_mesh(PAIR, "simulated")
    ff.spmd(lambda: main(mesh), mesh)()


@pytest.mark.parametrize("zero", [1, 2])
def test_a_change_beside_a_gather_is_found(tmp_path, gate, zero):
    def main(mesh):
        step, state = stepping(mesh, zero)
        saving = ff.save_async(tmp_path / "a", state)
        state.params.local.add_(1)
        step(state, torch.ones(5))
        gate.set()
        with pytest.raises(CheckpointError, match="'params' was changed in place"):
            saving.wait()

    mesh = ff.make_mesh(PAIR, "simulated")
    ff.spmd(lambda: main(mesh), mesh)()


def mesh_rank():
    return here().rank


def test_a_donated_step_writes_in_place_again_afterwards(tmp_path):
    optimizer = ff.sgd(0.1)
    step = ff.donate(optimizer(ff.value_and_grad(lambda w, x: (w * x).sum())))
    w = torch.ones(2)
    where = w.data_ptr()
    state = ff.TrainState(w, optimizer.init(w))
    saving = ff.save_async(tmp_path / "a", state)
    saving.wait()
    state, _ = step(state, torch.ones(2))
    assert state.params.data_ptr() == where


def test_a_state_that_is_saved_and_stepped_is_spent(tmp_path, gate):
    """It is still a state that was donated: nobody else goes on with it."""
    optimizer = ff.sgd(0.1)
    step = ff.donate(optimizer(ff.value_and_grad(lambda w, x: (w * x).sum())))
    state = ff.TrainState(torch.ones(2), optimizer.init(torch.ones(2)))
    saving = ff.save_async(tmp_path / "a", state)
    step(state, torch.ones(2))
    with pytest.raises(RuntimeError, match="donated"):
        step(state, torch.ones(2))
    gate.set()
    saving.wait()


@pytest.mark.parametrize("through", ["itself", "a view", "its base", "its buffer"])
def test_writing_into_what_is_saved_is_found(tmp_path, gate, through):
    base = torch.zeros(8)
    state = {"w": base[2:6], "v": torch.ones(3)}
    saving = ff.save_async(tmp_path / "a", state)
    target = {
        "itself": state["w"],
        "a view": state["w"][1:2],
        "its base": base,
        "its buffer": base.detach(),
    }[through]
    target.add_(1)
    gate.set()
    with pytest.raises(CheckpointError, match="'w' was changed in place"):
        saving.wait()
    assert nothing_saved(tmp_path)


def test_the_state_is_let_go_when_it_is_saved(tmp_path):
    """Also where nobody waits: whoever keeps the `SaveTask` keeps no state."""
    x = torch.ones(10)
    storage = weakref.ref(x.untyped_storage())
    saving = ff.save_async(tmp_path / "a", {"w": x})
    del x
    until(saving.done)
    gc.collect()
    assert storage() is None
    saving.wait()


def nothing_saved(folder):
    """Whether no checkpoint and no tensors are there (a note of the error may be)."""
    return ff.latest(folder) is None and not list(folder.rglob("*.safetensors"))


def until(is_done):
    end = time.monotonic() + PATIENCE
    while not is_done():
        assert time.monotonic() < end
        time.sleep(0.002)


def two():
    """Leaves of which each of two ranks writes one."""
    return {"w": torch.ones(3), "v": torch.ones(3)}


def full():
    return OSError(28, "No space left on device")


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_rank_is_raised_by_all_that_wait(tmp_path, gate, rank):
    gate.broken[rank] = full()

    def main(mesh):
        saving = ff.save_async(tmp_path / "a", two())
        gate.set()
        with pytest.raises((OSError, CheckpointError), match="No space left"):
            saving.wait()
        assert saving.done()
        with pytest.raises((OSError, CheckpointError), match="No space left"):
            saving.wait()  # it stays so
        ff.psum(torch.ones(1), "data")

    on(PAIR, main)
    assert nothing_saved(tmp_path)


def test_a_rank_that_writes_late_hears_of_an_error_and_leaves_nothing(
    tmp_path, monkeypatch
):
    write = safetensors.write_file

    def late(path, head, entries):
        if path.name.startswith("shard-00001"):
            raise full()
        time.sleep(0.3)
        return write(path, head, entries)

    monkeypatch.setattr(safetensors, "write_file", late)

    def main(mesh):
        saving = ff.save_async(tmp_path / "a", two())
        with pytest.raises((OSError, CheckpointError), match="No space left"):
            saving.wait()

    on(PAIR, main)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_so_full_that_not_even_a_note_fits(tmp_path, gate, rank, monkeypatch):
    """Until the files that were written for nothing are gone."""
    gate.broken[rank] = full()
    make = open

    def no_room(path, mode="r", *args, **options):
        written = set(mode) & set("wax") and str(tmp_path) in str(path)
        if written and list(tmp_path.rglob(f"shard-{rank + 1:05}-*")):
            raise full()
        return make(path, mode, *args, **options)

    def main(mesh):
        saving = ff.save_async(tmp_path / "a", two())
        if mesh.rank == rank:
            half = f"shard-{rank + 1:05}-half.safetensors"
            (next(tmp_path.glob(".a.saving-*")) / half).write_text("half of it")
            monkeypatch.setattr("builtins.open", no_room)
            monkeypatch.setattr("io.open", no_room)
        ff.psum(torch.ones(1), "data")
        gate.set()
        with pytest.raises((OSError, CheckpointError), match="No space left"):
            saving.wait()

    waits = threading.Thread(target=on, args=(PAIR, main), daemon=True)
    waits.start()
    waits.join(PATIENCE / 4)
    assert not waits.is_alive(), "a rank waits for ever"


@pytest.mark.parametrize("save", [ff.save, ff.save_async])
def test_an_error_that_nobody_waited_for_comes_with_the_next_save(tmp_path, gate, save):
    gate.broken[1] = full()

    def main(mesh):
        saving = ff.save_async(tmp_path / "step-0", two())
        gate.set()
        until(saving.done)
        ff.psum(torch.ones(1), "data")
        with pytest.raises((OSError, CheckpointError), match="No space left"):
            save(tmp_path / "step-1", two())
        ff.psum(torch.ones(1), "data")
        gate.broken.clear()
        ff.save(tmp_path / "step-2", two())

    on(PAIR, main)
    assert [p.name for p in tmp_path.iterdir()] == ["step-2"]


def test_a_second_save_waits_for_the_first(tmp_path, gate):
    states = [{"w": torch.full((3,), float(i))} for i in range(4)]

    def main(mesh):
        savings = [ff.save_async(tmp_path / "step-0", states[0])]
        gate.set()
        savings += [ff.save_async(tmp_path / f"step-{i}", states[i]) for i in (1, 2)]
        assert savings[0].done() and savings[1].done()
        ff.save(tmp_path / "step-3", states[3])
        assert all(s.done() for s in savings)
        for saving in reversed(savings):
            saving.wait()

    on(PAIR, main)
    for i, state in enumerate(states):
        same(ff.load(tmp_path / f"step-{i}", {"w": torch.ones(3)}), state)


def test_saves_of_two_runs_of_ranks_do_not_meet(tmp_path, gate):
    """As in a notebook: `spmd` again and again, each with ranks of its own."""
    mesh = ff.make_mesh(PAIR, "simulated")

    def begin(i):
        state = {"w": torch.full((3,), float(i))}
        return ff.spmd(lambda: ff.save_async(tmp_path / f"step-{i}", state), mesh)()

    first = begin(1)
    threading.Timer(0.05, gate.set).start()
    second = begin(2)
    third = ff.save_async(tmp_path / "step-3", {"w": torch.full((3,), 3.0)})
    for saving in (*first, *second, third):
        saving.wait()
    for i in (1, 2, 3):
        found = ff.load(tmp_path / f"step-{i}", {"w": torch.ones(3)})
        assert found["w"].tolist() == [i] * 3


def test_the_generators_are_those_of_the_call(tmp_path, gate):
    torch.manual_seed(3)
    saving = ff.save_async(tmp_path / "a", {"w": torch.ones(1)})
    drawn = torch.rand(3)
    gate.set()
    saving.wait()
    torch.manual_seed(9)
    ff.load(tmp_path / "a", {"w": torch.ones(1)}, random=False)
    assert not torch.equal(torch.rand(3), drawn)
    ff.load(tmp_path / "a", {"w": torch.ones(1)})
    assert torch.equal(torch.rand(3), drawn)


@pytest.mark.parametrize(
    "state, timeout, saved", [(SILENT, 60, True), (SILENT, 1, False), (GONE, 60, False)]
)
def test_a_silent_rank_is_waited_for_in_moderation(tmp_path, state, timeout, saved):
    """It may be busy; one that is known to have gone is not waited for."""
    board, mesh = Board(), SimpleNamespace(size=3)
    board.missing = lambda ranks: dict.fromkeys(ranks, state)
    link = SimpleNamespace(board=board, timeout=timeout)
    others = SavePeers(SimpleNamespace(link=link, rank=0, mesh=mesh), tmp_path / "a")
    board.put(Message("save", 1, 1))
    late = threading.Timer(2.0, board.put, (Message("save", 2, 1),))
    late.start()
    try:
        if saved:
            return others.wait()
        with pytest.raises(CheckpointError, match=f"rank 2 {state[:15]}"):
            others.wait()
        assert late.is_alive()
    finally:
        late.cancel()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_has_nothing_in_flight(tmp_path, gate):
    """As a worker of a data loader, which may live for longer than its parent."""
    saving = ff.save_async(tmp_path / "a", {"w": torch.ones(1)})
    if not (pid := os.fork()):
        os._exit(3 if in_flight(None) is None else 4)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    gate.set()
    saving.wait()


ENDS = """
import sys, torch, fsfunc as ff
from fsfunc.checkpoint import safetensors
if sys.argv[2] == "fails":
    def broken(*_):
        raise OSError(28, "No space left on device")
    safetensors.write_file = broken
ff.save_async(sys.argv[1], {"w": torch.ones(1 << 20)})
if sys.argv[2] == "raises":
    raise RuntimeError("the training failed")
"""


@pytest.mark.slow  # programs of their own
@pytest.mark.parametrize("how", ["well", "fails", "raises"])
def test_python_does_not_end_before_it_is_saved(tmp_path, how):
    done = forked("-c", ENDS, tmp_path / "a", how, timeout=60)
    if how == "fails":
        assert "a was not saved" in done.stderr and "No space left" in done.stderr
        assert nothing_saved(tmp_path)
    else:
        found = ff.load(tmp_path / "a", {"w": torch.zeros(1 << 20)})
        assert found["w"].sum() == 1 << 20
    assert done.returncode == {"well": 0, "fails": 120, "raises": 1}[how]
