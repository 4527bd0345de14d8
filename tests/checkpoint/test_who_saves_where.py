"""Several ranks, several runs, one folder: nobody waits for ever or harms another."""

import os

import pytest
import torch

import fsfunc as ff
from fsfunc.checkpoint.save_lock import mark

MESH = ff.make_mesh({"data": 3}, "simulated")
W = {"w": torch.arange(4.0)}


def rank():
    return int(ff.axis_index("data"))


@pytest.mark.parametrize("save", [ff.save, ff.save_async])
def test_ranks_that_name_different_paths_are_told(tmp_path, save):
    with pytest.raises(ValueError, match="the ranks save to different paths"):
        ff.spmd(lambda: save(tmp_path / f"at-{rank()}", W), MESH)()
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_load_different_checkpoints_are_told(tmp_path):
    for i in range(2):
        ff.save(tmp_path / f"step-{i}", {"w": W["w"] + i})
    with pytest.raises(ValueError, match="the ranks load different checkpoints"):
        ff.spmd(lambda: ff.load(tmp_path / f"step-{rank() % 2}", W), MESH)()


def test_what_another_process_writes_is_left_alone(tmp_path):
    """It holds the lock of its folder; what a killed one left is locked no more."""
    alive, dead = tmp_path / ".seed-1.saving", tmp_path / ".seed-2.saving"
    for folder in (dead, alive):
        folder.mkdir()
        (folder / "shard-00001-half.safetensors").write_text("half")
    os.close(mark(dead))
    lock = mark(alive)
    try:
        ff.save(tmp_path / "seed-0", W)
        assert alive.exists() and not dead.exists()
        with pytest.raises(FileExistsError, match="another process is saving"):
            ff.save(tmp_path / "seed-1", W)
    finally:
        os.close(lock)
    ff.save(tmp_path / "seed-1", W)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["seed-0", "seed-1"]
