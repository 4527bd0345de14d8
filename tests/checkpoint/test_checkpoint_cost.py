"""What a checkpoint costs: nearly nothing sent, no copy of the state, one slab read."""

import threading
import time
from pathlib import Path

import pytest
import torch

import fsfunc as ff
from tests.checkpoint.stacks import STACKS, abstract, made
from tests.checkpoint.trees import on
from tests.probes import LiveBytes

MIB = 1 << 20
SLAB = 8 * MIB
AGREED = {"psum": 8, "pmax": 32, "all_gather": 192}  # bytes that a rank sends, at most


@pytest.mark.parametrize("name", ["zero=3 on 4", "zero=1 on 3", "shard(pipeline)"])
def test_a_few_numbers_are_sent_and_nothing_of_the_tensors(tmp_path, name):
    def main(mesh):
        _, state, _ = made(name, mesh)
        logs = []
        for act in (
            lambda: ff.save(tmp_path / "a", state),
            lambda: ff.save_async(tmp_path / "b", state).wait(),
            lambda: ff.load(tmp_path / "a", state),
            lambda: ff.load(tmp_path / "a", abstract(state)),
        ):
            with ff.ledger() as log:
                act()
            logs.append(log.of(mesh.rank))
        return logs

    for logs in on(STACKS[name][0], main):
        for log, at_most in zip(logs, (6, 6, 3, 3), strict=True):
            assert len(log) <= at_most
            assert all(r.bytes <= AGREED[r.op] for r in log), log
            assert all(r.phase == "checkpoint" for r in log), log


def state_of(count=8, n=1 << 20):
    return {f"w{i}": torch.full((n,), float(i)) for i in range(count)}


def resident():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


class Resident:
    """How far the resident memory rises above where it stood."""

    def __enter__(self):
        self.before, self.rise, self.over = resident(), 0, False
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self):
        while not self.over:
            self.rise = max(self.rise, resident() - self.before)
            time.sleep(0.0005)

    def __exit__(self, *_):
        self.over = True
        self.thread.join()


def strided(n=1 << 10):
    """Leaves that are not contiguous, of 4 MiB each."""
    return {f"w{i}": torch.full((n, n), float(i)).t() for i in range(8)}


@pytest.mark.parametrize("save", [ff.save, ff.save_async])
def test_saving_makes_no_copy(tmp_path, save):
    state = state_of()
    ff.save(tmp_path / "first", state)  # imports, buffers
    with LiveBytes(state) as live, Resident() as memory:
        saving = save(tmp_path / "a", state)
        if saving is not None:
            saving.wait()
    assert live.peak <= 4096
    assert memory.rise <= 4 * MIB


def test_what_is_not_contiguous_is_copied_leaf_by_leaf(tmp_path):
    state = strided()
    with LiveBytes(state) as live:
        ff.save(tmp_path / "a", state)
    assert live.peak <= 4 * MIB + 4096


def test_loading_makes_its_result_and_one_slab(tmp_path):
    state = state_of()
    on({"data": 2}, lambda mesh: ff.save(tmp_path / "a", state))
    nbytes, target = sum(x.nbytes for x in state.values()), abstract(state)
    ff.load(tmp_path / "a", target)
    with LiveBytes(state, target) as live, Resident() as memory:
        found = ff.load(tmp_path / "a", target)
    assert found["w3"][0] == 3
    assert live.peak <= nbytes + SLAB
    assert memory.rise <= nbytes + SLAB + 4 * MIB


def test_loading_columns_of_a_row_major_leaf_takes_one_slab(tmp_path):
    """The worst case: each rank wants a little of every row."""
    whole = torch.arange(4 * MIB, dtype=torch.float32).view(-1, 64)  # 16 MiB
    ff.save(tmp_path / "a", {"w": whole})
    layout = ff.Layout(tuple(whole.shape), whole.dtype, (ff.Split(1, "data", 4),), "w")

    def main(mesh):
        shape = layout.local_shape(mesh.coordinates())
        target = {"w": ff.Sharded(torch.empty(shape, device="meta"), layout)}
        with LiveBytes() as live:
            found = ff.load(tmp_path / "a", target)["w"].local
        assert torch.equal(found, whole[:, 16 * mesh.rank : 16 * (mesh.rank + 1)])
        return live.peak - found.nbytes

    assert max(on({"data": 4}, main)) <= SLAB


def test_one_file_is_made_one_leaf_at_a_time(tmp_path):
    state = state_of()
    on({"data": 2}, lambda mesh: ff.save(tmp_path / "a", state))
    ff.consolidate(tmp_path / "a", tmp_path / "first.safetensors")
    with LiveBytes() as live:
        ff.consolidate(tmp_path / "a", tmp_path / "one.safetensors")
    assert live.peak <= 2 * 4 * MIB + 4096  # a leaf, and its meta tensor


def test_a_state_being_saved_is_made_a_second_time_once(tmp_path):
    """A donated step that is given it makes a new state; the next writes into that."""
    optimizer = ff.sgd(0.1)
    step = ff.donate(optimizer(ff.value_and_grad(lambda w, x: (w * x).sum())))
    state = ff.TrainState(torch.ones(MIB), optimizer.init(torch.ones(MIB)))
    state, _ = step(state, torch.ones(()))
    saving = ff.save_async(tmp_path / "a", state)
    first = state.params.data_ptr()
    state, _ = step(state, torch.ones(()))
    second = state.params.data_ptr()
    state, _ = step(state, torch.ones(()))
    assert first != second or saving.done()
    assert state.params.data_ptr() == second
    saving.wait()
