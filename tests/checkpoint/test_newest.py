"""The newest that can be loaded, and what stays."""

import os

import pytest
import torch

import fsfunc as ff
from fsfunc.checkpoint.stored import CheckpointError
from tests.checkpoint.trees import PAIR, on
from tests.checks import same

W = {"w": torch.ones(2)}


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def steps(folder, *numbers, **options):
    for i in numbers:
        ff.save(folder / f"step-{i}", {"w": torch.full((2,), float(i))}, **options)


def shard(path):
    return next(path.glob("*.safetensors"))


def shortened(path):
    os.truncate(shard(path), 9)


def flipped(path):
    data = bytearray(shard(path).read_bytes())
    data[-1] ^= 1
    shard(path).write_bytes(data)


DAMAGE = {
    "truncated": shortened,
    "gone": lambda path: shard(path).unlink(),
    "a pipe": lambda path: replaced_by_pipe(shard(path)),
    "an empty manifest": lambda path: os.truncate(path / "fsfunc.json", 0),
    "half a manifest": lambda path: os.truncate(path / "fsfunc.json", 99),
}


def replaced_by_pipe(file):
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_newest_is_passed_over_and_told(tmp_path, what):
    """Also by every rank; and a restart goes on from the one before."""
    steps(tmp_path, 1, 2, 3)
    DAMAGE[what](tmp_path / "step-3")

    def main(mesh):
        with pytest.warns(RuntimeWarning, match="step-3 cannot be loaded"):
            found = ff.latest(tmp_path)
        return found.name, ff.load(found, W)["w"].tolist()

    assert on(PAIR, main) == [("step-2", [2.0, 2.0])] * 2
    assert names(tmp_path) == ["step-1", "step-2", "step-3"]


def test_flipped_bits_are_looked_for_where_asked(tmp_path):
    steps(tmp_path, 1, 2)
    flipped(tmp_path / "step-2")
    assert ff.latest(tmp_path).name == "step-2"
    with pytest.warns(RuntimeWarning, match="damaged between bytes"):
        assert ff.latest(tmp_path, proven=True).name == "step-1"


def test_where_none_can_be_loaded_no_run_begins_anew(tmp_path):
    steps(tmp_path, 1, 2)
    for i in (1, 2):
        shortened(tmp_path / f"step-{i}")
    with pytest.warns(RuntimeWarning), pytest.raises(CheckpointError, match="none of"):
        ff.latest(tmp_path)
    assert ff.latest(tmp_path, "epoch-*") is None


def test_keep_counts_what_can_be_loaded(tmp_path):
    """What cannot be is never the one that stays; nor is it deleted."""
    steps(tmp_path, 1, 2, 3, 4)
    for i in (3, 4):
        shortened(tmp_path / f"step-{i}")
    steps(tmp_path, 5, keep=2)
    assert names(tmp_path) == ["step-2", "step-3", "step-4", "step-5"]
    steps(tmp_path, 6, keep=1)
    assert names(tmp_path) == ["step-3", "step-4", "step-6"]


def test_a_first_checkpoint_of_this_format_is_loaded(tmp_path):
    """It had one rank's generators alone."""
    from tests.checkpoint.forging import body_of, text_of

    torch.manual_seed(3)
    steps(tmp_path, 1)
    expected = torch.rand(2)
    body = body_of(tmp_path / "step-1")
    body["random"] = body["random"]["states"][0]
    (tmp_path / "step-1" / "fsfunc.json").write_bytes(text_of(body))
    same(ff.load(tmp_path / "step-1", W), W)
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize("at", range(2))
def test_what_is_deleted_may_be_killed_at_any_moment(tmp_path, monkeypatch, at):
    """The next save removes the rest."""
    unlink, left = os.unlink, []

    def killed(path, *args, **options):
        if ".deleting" in str(path):
            left.append(path)
            if len(left) > at:
                raise ZeroDivisionError
        return unlink(path, *args, **options)

    steps(tmp_path, 1)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr("os.unlink", killed)
        steps(tmp_path, 2, keep=1)
    gone, found = names(tmp_path)
    assert gone.startswith(".step-1.deleting-") and found == "step-2"
    steps(tmp_path, 3, keep=1)
    assert names(tmp_path) == ["step-3"]
