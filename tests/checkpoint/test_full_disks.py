"""Disks that fail at any moment: all ranks raise, and nothing is left behind."""

import errno
import os
import resource
import shutil

import pytest
import torch

import fsfunc as ff
from fsfunc.comm.mesh import here
from tests.checkpoint.trees import PAIR, empty, on, tree_of
from tests.checks import same


def test_a_disk_that_is_full_in_the_middle_of_a_file(tmp_path):
    """The limit of a file's size: the system itself refuses to write more."""
    ff.save(tmp_path / "step-1", {"w": torch.ones(9)})
    files = list(tmp_path.rglob("*.safetensors"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for save in (ff.save, lambda *a: ff.save_async(*a).wait()):
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, before[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                save(tmp_path / "step-2", {"w": torch.ones(1 << 20)})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert list(tmp_path.rglob("*.safetensors")) == files
    assert ff.latest(tmp_path) == tmp_path / "step-1"
    same(ff.load(tmp_path / "step-1", {"w": torch.zeros(9)}), {"w": torch.ones(9)})


class Failing:
    """Calls of the file system below a folder; the ``at``-th of a rank fails."""

    CALLS = ("mkdir", "open", "fsync", "rename", "replace", "unlink", "write")

    def __init__(self, patch, folder, rank=None):
        self.folder, self.rank, self.at, self.count = str(folder), rank, None, 0
        for name in self.CALLS:
            if name != "write":
                patch.setattr(os, name, self._counted(getattr(os, name)))
        opened = self._counted(open)
        patch.setattr("builtins.open", opened)
        patch.setattr("io.open", opened)

    def _counted(self, real):
        def call(*args, **options):
            inside = isinstance(args[0], int) or self.folder in os.fspath(args[0])
            if self.at is not None and inside and self._mine():
                self.count += 1
                if self.count == self.at:
                    raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args, **options)

        return call

    def _mine(self):
        try:
            rank = here().rank
        except RuntimeError:
            rank = None
        return rank == self.rank


@pytest.mark.parametrize("rank", [None, 0, 1], ids="alone first second".split())
def test_every_call_of_the_file_system_may_fail(tmp_path, monkeypatch, rank):
    """In turn: all ranks raise, nothing is left, and the last checkpoint is whole."""
    axes, old, new = ({} if rank is None else PAIR), tree_of(step=1), tree_of(step=2)
    on(axes, lambda mesh: ff.save(tmp_path / "step-1", old))
    failing = Failing(monkeypatch, tmp_path, rank)

    def main(mesh):
        try:
            ff.save(tmp_path / "step-2", new)
        except OSError as error:
            return error
        return None

    for at in range(1, 100):
        failing.at, failing.count = at, 0
        errors = on(axes, main)
        failing.at = None
        complete = ff.latest(tmp_path)
        same(ff.load(complete, empty(new)), new if complete.name[-1] == "2" else old)
        assert ff.latest(tmp_path) is not None
        if errors[0] is None:  # mkdir forgives where the folder is there
            assert errors == [None] * len(errors) and complete.name == "step-2"
            if failing.count < at:
                break
        else:
            assert all("No space left" in str(e) for e in errors), errors
        left = {p.name for p in tmp_path.iterdir()} - {"step-1"}
        # Only a failure after the rename leaves something: the whole checkpoint.
        assert left <= {"step-2"}, f"the {at}th call failed"
        shutil.rmtree(tmp_path / "step-2", ignore_errors=True)
    else:
        raise AssertionError("it never ends")
    assert at > 3
