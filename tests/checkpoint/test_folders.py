"""Which folder is the newest checkpoint, which are deleted, and what a save leaves."""

import os

import pytest
import torch

import fsfunc as ff
from fsfunc.checkpoint.save_lock import mark
from tests.checkpoint.trees import PAIR, on

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


def test_the_one_just_saved_stays_though_its_number_is_lower(tmp_path):
    """A run that went back to an earlier step."""
    for i in (90, 100):
        ff.save(tmp_path / f"step-{i}", W)
    ff.save(tmp_path / "step-60", W, keep=2)
    assert "step-60" in names(tmp_path) and len(names(tmp_path)) == 2


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
