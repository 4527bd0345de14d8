"""Which folder is the newest checkpoint, what a save leaves, and who may save where."""

import os
import time

import pytest
import torch

import fsfunc as ff
from fsfunc.checkpoint import folders
from fsfunc.checkpoint.save_lock import mark
from tests.checkpoint.trees import PAIR, on
from tests.checks import same

W = {"w": torch.ones(2)}


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_the_newest_has_the_highest_number(tmp_path):
    assert ff.latest(tmp_path) is None and ff.latest(tmp_path / "nowhere") is None
    for name in ("step-9", "step-00000010", "step-2"):
        ff.save(tmp_path / name, W)
        assert ff.latest(str(tmp_path)).name in ("step-9", "step-00000010")
    assert ff.latest(tmp_path) == tmp_path / "step-00000010"
    assert ff.latest(tmp_path, "*-?").name == "step-9"
    assert ff.latest(tmp_path, "epoch-*") is None


def test_what_is_no_complete_checkpoint_is_not_the_newest(tmp_path):
    ff.save(tmp_path / "step-1", W)
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-3").mkdir()
    ff.consolidate(tmp_path / "step-1", tmp_path / "step-3" / "a.safetensors")
    (tmp_path / "step-4").write_text("a file")
    (tmp_path / "step-5").symlink_to("nothing")
    ff.save(tmp_path / "other" / "step-6", W)
    for ending in ("saving", "deleting"):
        (tmp_path / "step-1").rename(tmp_path / f".step-7.{ending}")
        assert ff.latest(tmp_path) is None
        (tmp_path / f".step-7.{ending}").rename(tmp_path / "step-1")
    assert ff.latest(tmp_path) == tmp_path / "step-1"


def test_only_checkpoints_of_its_name_are_deleted(tmp_path):
    others = ["best", "step-best", "step-1-best", "run-1-step-1", "Step-1", "step-"]
    for name in others:
        ff.save(tmp_path / name, W)
    (tmp_path / "step-3").mkdir()  # no checkpoint, though it is called like one
    (tmp_path / "step-3" / "notes.txt").write_text("mine")
    (tmp_path / "step-4").write_text("a file")
    ff.consolidate(tmp_path / "best", tmp_path / "step-5")
    for i in range(10, 15):
        ff.save(tmp_path / f"step-{i}", W, keep=2)
    mine = ["step-3", "step-4", "step-5"]
    assert names(tmp_path) == sorted([*others, *mine, "step-13", "step-14"])
    assert (tmp_path / "step-3" / "notes.txt").read_text() == "mine"


def test_of_several_numbers_the_last_counts(tmp_path):
    """The others tell runs apart."""
    for name in ("lr1e-3-step-9", "lr1e-4-step-7"):
        ff.save(tmp_path / name, W)
    ff.save(tmp_path / "lr1e-4-step-8", W, keep=1)
    assert names(tmp_path) == ["lr1e-3-step-9", "lr1e-4-step-8"]
    assert ff.latest(tmp_path).name == "lr1e-3-step-9"


def test_the_one_just_saved_stays_though_its_number_is_lower(tmp_path):
    """A run that went back to an earlier step."""
    for i in (90, 100):
        ff.save(tmp_path / f"step-{i}", W)
    ff.save(tmp_path / "step-60", W, keep=2)
    assert "step-60" in names(tmp_path) and len(names(tmp_path)) == 2


def test_keep_deletes_nothing_where_saving_fails(tmp_path, monkeypatch):
    ff.save(tmp_path / "step-1", W)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError):
        ff.save(tmp_path / "step-2", W, keep=1)
    assert names(tmp_path) == ["step-1"]


def test_what_a_killed_run_left_is_removed(tmp_path):
    for name in (".step-3.saving", ".step-1.deleting", ".other.saving", ".step-x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "shard-00001.safetensors").write_text("half")
        os.close(mark(tmp_path / name))
    (tmp_path / ".step-8.saving").mkdir()  # of no save's making
    (tmp_path / ".step-8.saving" / "notes.txt").write_text("mine")
    (tmp_path / ".step-9.saving.txt").write_text("mine")
    ff.save(tmp_path / "step-3", W)
    left = [
        ".other.saving",
        ".step-8.saving",
        ".step-9.saving.txt",
        ".step-x",
        "step-3",
    ]
    assert names(tmp_path) == left
    ff.save(tmp_path / "step-4", W, keep=1)
    assert names(tmp_path) == [*left[:-1], "step-4"]
    with pytest.raises(FileExistsError, match="no save made it: move it away"):
        ff.save(tmp_path / "step-8", W)
    assert (tmp_path / ".step-8.saving" / "notes.txt").read_text() == "mine"
    assert names(tmp_path) == [*left[:-1], "step-4"]


def test_metadata_needs_no_mesh(tmp_path):
    given = {"lr": 0.5, "layers": [1, 2], "name": "größe", "none": None, "nan": 1e400}

    def main(mesh):
        w = ff.Layout((3, 2), torch.bfloat16, (ff.Split(0, "data", 2),), "w")
        part = torch.ones(w.local_shape(mesh.coordinates()), dtype=torch.bfloat16)
        state = {"a": {"w": ff.Sharded(part, w)}, "step": 3, "b": True, "s": "x"}
        ff.save(tmp_path / "a", state, metadata=given)

    on(PAIR, main)
    stored = ff.metadata(tmp_path / "a")
    assert stored.metadata == given
    assert stored.leaves == {"a/w": ((3, 2), torch.bfloat16)}
    assert stored.values == {"step": 3, "b": True, "s": "x"}
    assert (stored.version, stored.mesh, stored.nbytes) == (1, PAIR, 12)
    assert "a/w bf16[3, 2]" in str(stored)


def test_a_relative_path_is_that_of_the_call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saving = ff.save_async("a/../b//c/", W)
    monkeypatch.chdir("/")
    saving.wait()
    same(ff.load(tmp_path / "b" / "c", W), W)


def test_each_rank_gets_its_own_generator_back(tmp_path):
    """Ranks that draw each for themselves; more of them take the states in turn."""

    def save(mesh):
        torch.manual_seed(mesh.rank)
        ff.save(tmp_path / "a", W)
        return torch.rand(2).tolist()

    def load(_):
        torch.manual_seed(9)
        ff.load(tmp_path / "a", W)
        return torch.rand(2).tolist()

    expected = on(PAIR, save)
    assert expected[0] != expected[1]
    assert on(PAIR, load) == expected
    assert on({"data": 3}, load) == [*expected, expected[0]]
    assert on({}, load) == expected[:1]


# Several ranks, several runs, one folder


THREE = ff.make_mesh({"data": 3}, "simulated")
STATE = {"w": torch.arange(4.0)}


def rank():
    return int(ff.axis_index("data"))


@pytest.mark.parametrize("save", [ff.save, ff.save_async])
def test_ranks_that_name_different_paths_are_told(tmp_path, save):
    with pytest.raises(ValueError, match="the ranks save to different paths"):
        ff.spmd(lambda: save(tmp_path / f"at-{rank()}", STATE), THREE)()
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_load_different_checkpoints_are_told(tmp_path):
    for i in range(2):
        ff.save(tmp_path / f"step-{i}", {"w": STATE["w"] + i})
    with pytest.raises(ValueError, match="the ranks load different checkpoints"):
        ff.spmd(lambda: ff.load(tmp_path / f"step-{rank() % 2}", STATE), THREE)()


def test_a_rank_that_finds_nothing_is_heard_by_all(tmp_path):
    ff.save(tmp_path / "here", STATE)
    name = lambda: "nowhere" if rank() == 1 else "here"  # noqa: E731
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        ff.spmd(lambda: ff.load(tmp_path / name(), STATE), THREE)()


def test_what_another_process_writes_is_left_alone(tmp_path):
    """It holds the lock of its folder; what a killed one left is locked no more."""
    alive, dead = tmp_path / ".seed-1.saving", tmp_path / ".seed-2.saving"
    for folder in (dead, alive):
        folder.mkdir()
        (folder / "shard-00001-half.safetensors").write_text("half")
    os.close(mark(dead))
    lock = mark(alive)
    try:
        ff.save(tmp_path / "seed-0", STATE)
        assert alive.exists() and not dead.exists()
        with pytest.raises(FileExistsError, match="another process is saving"):
            ff.save(tmp_path / "seed-1", STATE)
    finally:
        os.close(lock)
    ff.save(tmp_path / "seed-1", STATE)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["seed-0", "seed-1"]


def test_a_save_is_locked_while_it_is_under_way(tmp_path, monkeypatch):
    seen = []
    appear = folders.appear

    def look(folder, path):
        seen.append(folder.name)
        folders._remove_dead(folder, time.time())
        assert folder.exists()
        appear(folder, path)

    monkeypatch.setattr(folders, "appear", look)
    ff.save(tmp_path / "step-1", STATE)
    ff.save_async(tmp_path / "step-2", STATE).wait()
    assert seen == [".step-1.saving", ".step-2.saving"]
