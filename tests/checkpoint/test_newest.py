"""The newest that can be loaded; what stays; whose a folder is; what to do about it."""

import errno
import json
import os
import time

import pytest
import torch

import fsfunc as ff
from fsfunc.checkpoint import finding, save_lock
from fsfunc.checkpoint.save_lock import MARK, is_alive, mark
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


def test_a_second_job_in_the_folder_is_told_of_and_its_own_stays(tmp_path, monkeypatch):
    """What lies there when a job begins is its own: it goes on from that."""
    steps(tmp_path, 1, 2)
    monkeypatch.setattr(finding, "_KNOWN", {})  # as in another process
    steps(tmp_path, 3, keep=2)
    assert names(tmp_path) == ["step-2", "step-3"]
    with monkeypatch.context() as patch:
        patch.setattr(finding, "_KNOWN", {})
        steps(tmp_path, 4)
    with pytest.warns(RuntimeWarning, match="step-4 was saved by another job"):
        steps(tmp_path, 5, keep=1)
    assert names(tmp_path) == ["step-4", "step-5"]


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


# Who is alive


@pytest.fixture
def left(tmp_path, monkeypatch):
    """What a killed job left, an hour ago; and how to say who it was."""
    folder = tmp_path / ".step-1.saving"
    folder.mkdir()
    os.close(mark(folder))

    def by(age=3600.0, **said):
        me = save_lock.this_job()
        (folder / MARK).write_text(json.dumps(me | said))
        for path in (folder / MARK, folder):
            os.utime(path, (time.time() - age,) * 2)
        return folder

    return by


def without_locks(monkeypatch):
    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(save_lock.fcntl, "flock", none)


DEAD = 1 << 22  # no process has such a number


def test_a_job_is_alive_where_its_lock_its_process_or_its_files_say_so(
    left, monkeypatch
):
    now = time.time()
    assert not is_alive(left(), now)  # on this host, and not locked
    assert not is_alive(left(age=0), now)
    assert not is_alive(left(host="n2"), now)
    assert is_alive(left(host="n2", age=5), now)  # no lock is seen from here, perhaps
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    assert not is_alive(left(host="n2", age=5), now)  # this job, begun again
    assert is_alive(left(host="n2", age=5, job="41"), now)
    without_locks(monkeypatch)
    assert is_alive(left(), now) and not is_alive(left(process=str(DEAD)), now)
    assert is_alive(left(host="n2", age=5, job="41"), now)
    assert not is_alive(left(host="n2", job="41"), now)


def test_two_jobs_that_save_one_path_are_told(tmp_path, left):
    left(host="n2", process="7", job="41", age=5)
    with pytest.raises(FileExistsError, match="step-1: process 7 on n2, job 41"):
        ff.save(tmp_path / "step-1", W)
    assert names(tmp_path) == [".step-1.saving"]
    left(host="n2", process="7", job="41")
    ff.save(tmp_path / "step-1", W)
    assert names(tmp_path) == ["step-1"]


def test_what_was_killed_before_it_was_marked_is_empty(tmp_path):
    """It goes once it is old: nobody is about to mark it. What is not empty stays."""
    for i, (old, full) in enumerate([(True, False), (True, True), (False, False)]):
        folder = tmp_path / f".step-1.saving-{i:032x}"
        folder.mkdir()
        if full:
            (folder / "notes.txt").write_text("mine")
        os.utime(folder, (time.time() - 3600 * old,) * 2)
    ff.save(tmp_path / "step-1", W)
    assert [name[-1] for name in names(tmp_path)] == ["1", "2", "1"]
    assert names(tmp_path)[-1] == "step-1"


@pytest.mark.parametrize("at", range(3))
def test_what_is_deleted_may_be_killed_at_any_moment(tmp_path, monkeypatch, at):
    """Its mark goes last: the next save removes the rest."""
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
    assert (tmp_path / gone / MARK).exists()
    steps(tmp_path, 3, keep=1)
    assert names(tmp_path) == ["step-3"]


# What the system says


def failing(code):
    def act(*_):
        raise OSError(code, os.strerror(code))

    return act


@pytest.mark.parametrize(
    "code, advice",
    [(errno.ENOSPC, "make room"), (errno.EACCES, "ask for the rights"),
     (errno.EIO, "look at it, and try again"), (errno.EMFILE, "ulimit -n")],
)  # fmt: skip
def test_errors_of_the_system_say_what_to_do(tmp_path, monkeypatch, code, advice):
    save = [ff.save, lambda *a: ff.save_async(*a).wait()][code % 2]

    def main(mesh):
        with pytest.raises((OSError, CheckpointError), match=advice) as raised:
            save(tmp_path / "a", W)
        return type(raised.value)

    monkeypatch.setattr("os.fsync", failing(code))
    kinds = on(PAIR, main)
    assert kinds[0] is type(OSError(code, ""))


def test_errors_of_a_load_say_what_to_do(tmp_path, monkeypatch):
    steps(tmp_path, 1)
    monkeypatch.setattr("os.preadv", failing(errno.EIO))
    with pytest.raises(OSError, match="look at it, and try again"):
        ff.load(tmp_path / "step-1", W)
    with pytest.raises(OSError, match="name a shorter path"):
        ff.metadata(tmp_path / ("n" * 300))
