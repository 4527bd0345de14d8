"""What a checkpoint costs: nearly nothing sent, no copy of the state, one slab read."""

import gc
import json
import threading
import time
from pathlib import Path

import pytest
import torch

import fsfunc as ff
from fsfunc.runtime.scopes import gc_paused
from tests.checkpoint.forging import text_of
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
    n = 1 << 10
    state = {f"w{i}": torch.full((n, n), float(i)).t() for i in range(8)}
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


# Of many leaves


def busy(act, plain, times=5):
    """Processor time of it over that of what is plain, in turns, at best."""
    found = []
    for _ in range(times):
        seconds = []
        for one in (plain, act):
            gc.collect()
            began = time.process_time()
            one()
            seconds.append(time.process_time() - began)
        found.append(seconds[1] / seconds[0])
    return min(found)


def many(folder, count, boxes):
    """A manifest of so many leaves, each of boxes in as many files."""
    name = "shard-{:05}-model-00001-of-00001.safetensors".format
    chunks = lambda i: [[f, 64 + 8 * i, [2 * f, 0], [2, 1]] for f in range(boxes)]  # noqa: E731
    leaf = lambda i: {"shape": [2 * boxes, 1], "dtype": "float32", "chunks": chunks(i)}  # noqa: E731
    nbytes = 64 + 8 * count
    sums = "0" * 8 * -(-nbytes // MIB)
    body = {
        "version": 1,
        "leaves": {f"model.layers.{i // 10}.w{i % 10}": leaf(i) for i in range(count)},
        "files": [
            {"name": name(f + 1), "bytes": nbytes, "crc32": sums} for f in range(boxes)
        ],
        "values": {}, "metadata": {}, "random": {}, "mesh": {},
    }  # fmt: skip
    folder.mkdir()
    (folder / "fsfunc.json").write_bytes(text_of(body))
    return folder


def test_a_manifest_of_many_leaves_takes_little_more_than_its_json(tmp_path):
    """To be read and proven, or refused by a target that is another."""
    path = many(tmp_path / "a", 10_000, boxes=2)
    text = (path / "fsfunc.json").read_text()

    def plain():
        with gc_paused():
            json.loads(text)

    assert len(ff.metadata(path).tensors) == 10_000
    assert busy(lambda: ff.metadata(path), plain) < 6.5

    def refused():
        with pytest.raises(ValueError, match="has no 'other'"):
            ff.load(path, {"other": torch.zeros(1)})

    assert busy(refused, plain) < 9


def test_what_ranks_hold_alike_is_read_once_more_and_not_sent(tmp_path):
    """Leaves that ranks have cut among them are not read for it at all."""
    row = ff.Layout((2, MIB), torch.float32, (ff.Split(0, "data", 2),), "cut")

    def main(mesh):
        state = {"cut": ff.Sharded(torch.full((1, MIB), 1.0 * mesh.rank), row)}
        state |= {"whole": torch.ones(MIB), "own": torch.ones(MIB) * mesh.rank}
        logs = []
        for names in (["cut"], ["cut", "whole"], list(state)):
            with ff.ledger() as log:
                ff.save(tmp_path / str(len(names)), {k: state[k] for k in names})
            logs.append([(r.op, r.bytes) for r in log.of(mesh.rank)])
        return logs

    for cut, whole, own in on({"data": 2}, main):
        assert cut == whole
        assert len(own) == len(whole) + 2 and sum(n for _, n in own) < 512
