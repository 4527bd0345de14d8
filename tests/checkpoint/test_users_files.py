"""What no save wrote is never deleted, written over, or followed out of a folder."""

import itertools
import os
import secrets
import shutil
import stat
import warnings
from pathlib import Path

import pytest
import torch

import fsfunc as ff
from fsfunc.checkpoint.folders import unique_name
from tests.checkpoint.trees import PAIR, on
from tests.checks import same

W = {"w": torch.ones(2)}


def everything(folder):
    """What lies in a folder and below: kind, and content or where a link leads."""
    found = {}
    for path in sorted(folder.rglob("*")):
        mode = os.lstat(path).st_mode
        says = os.readlink(path) if stat.S_ISLNK(mode) else ""
        found[str(path)] = path.read_bytes() if stat.S_ISREG(mode) else says
    return found


def a_file(path):
    path.write_text("mine")


def a_folder(path):
    path.mkdir()
    (path / "fsfunc.json").write_text("mine")
    (path / "shard-00001-model-00001-of-00001.safetensors").write_text("mine")


def an_empty_folder(path):
    path.mkdir()


def a_link_to(target):
    return lambda path: path.symlink_to(target)


OUTSIDE = "../archive"


def a_checkpoint(path):
    shutil.copytree(path.parent / "a", path)


THINGS = {
    "a file": a_file,
    "a folder": a_folder,
    "an empty folder": an_empty_folder,
    "a link to a folder": a_link_to(f"{OUTSIDE}/best"),
    "a link to a file": a_link_to(f"{OUTSIDE}/notes.txt"),
    "a dangling link": a_link_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a pipe": os.mkfifo,
}


@pytest.fixture
def run(tmp_path):
    """An empty folder beside an archive, of which nothing may change."""
    ff.save(tmp_path / "archive" / "best", W)
    (tmp_path / "archive" / "notes.txt").write_text("mine")
    before = everything(tmp_path / "archive")
    (tmp_path / "run").mkdir()
    yield tmp_path / "run"
    assert everything(tmp_path / "archive") == before
    same(ff.load(tmp_path / "archive" / "best", W), W)


SAVES = [ff.save, lambda *a, **k: ff.save_async(*a, **k).wait()]


@pytest.mark.parametrize("how", ["relative", "absolute", "through a link", "a link up"])
def test_keep_takes_a_link_and_not_what_it_leads_to(run, how):
    save = SAVES[len(how) % 2]
    archive = Path(OUTSIDE, "best")
    if how == "absolute":
        archive = run.parent / "archive" / "best"
    if how == "through a link":
        (run.parent / "other").symlink_to("archive/best")
        archive = "../other"
    if how == "a link up":  # the folder of the run is a link itself
        (run.parent / "link").symlink_to("run")
        run = run.parent / "link"
    (run / "step-1").symlink_to(archive)
    for i in (2, 3):
        save(run / f"step-{i}", W, keep=1)
    assert [p.name for p in run.iterdir()] == ["step-3"]


def test_a_link_may_be_the_newest(run):
    (run / "step-5").symlink_to(f"{OUTSIDE}/best")
    ff.save(run / "step-6", W, keep=2)
    ff.save(run / "step-4", W, keep=2)
    assert sorted(p.name for p in run.iterdir()) == ["step-4", "step-6"]


@pytest.mark.parametrize(
    "name, thing",
    [*zip(itertools.cycle(["notes.txt", "rank-list.json", "shards"]), THINGS)],
)
def test_what_a_user_puts_into_a_checkpoint_outlives_it(run, thing, name):
    """In its folder, which is no checkpoint any more."""
    ff.save(run / "step-1", W)
    THINGS[thing](run / "step-1" / name)
    mine = {p: x for p, x in everything(run).items() if name in p}
    for i in (2, 3):
        ff.save(run / f"step-{i}", W, keep=1)
    assert sorted(p.name for p in run.iterdir()) == ["step-1", "step-3"]
    assert everything(run / "step-1") == mine
    assert ff.latest(run).name == "step-3"


@pytest.mark.parametrize("name", [".step-1.deleting", ".step-2.saving", ".x.saving"])
@pytest.mark.parametrize(
    "thing", ["a file", "a folder", "an empty folder", "a link to a folder", "a pipe"]
)
def test_names_that_saves_use_may_be_taken(run, thing, name):
    """Then a save goes another way."""
    ff.save(run / "step-1", W)
    THINGS[thing](run / name)
    mine = {p: x for p, x in everything(run).items() if name in p}
    if name == ".step-2.saving":
        ff.save(run / "step-2", W, keep=1)
    elif name == ".x.saving":
        one = ff.consolidate(run / "step-1", run / "x")
        same(ff.load(one, W), W)
    else:
        ff.save(run / "step-2", W, keep=1)
    found = everything(run)
    assert {p: found[p] for p in mine} == mine
    assert (run / "step-1").exists() == (name == ".x.saving")


@pytest.mark.parametrize("thing", [*THINGS, "a checkpoint"])
def test_nothing_is_written_over(run, thing, monkeypatch):
    """Whether it was there before, or came while the rest was written."""
    make = THINGS.get(thing, a_checkpoint)
    ff.save(run / "a", W)
    make(run / "x")
    before = everything(run)
    for write in (
        ff.save,
        ff.save_async,
        lambda path, _: ff.consolidate(run / "a", path),
    ):
        with pytest.raises(FileExistsError, match="x exists"):
            write(run / "x", W)
    with pytest.raises(FileExistsError, match="x exists"):  # on every rank
        on(PAIR, lambda mesh: ff.save(run / "x", W))
    assert everything(run) == before
    sync = os.fsync

    def meanwhile(file):
        if not os.path.lexists(run / "y"):
            make(run / "y")
        sync(file)

    monkeypatch.setattr("os.fsync", meanwhile)
    for write in (ff.save, lambda path, _: ff.consolidate(run / "a", path)):
        with pytest.raises(FileExistsError, match="y exists"):
            write(run / "y", W)
        found = everything(run)
        assert {
            p: x for p, x in found.items() if not p.startswith(str(run / "y"))
        } == before
        (run / "y").rename(run.parent / secrets.token_hex(4))


def test_what_a_killed_consolidation_left_is_removed_and_a_living_ones_is_not(run):
    ff.save(run / "a", W)
    ours = f".x.saving-{unique_name()[:8]}{os.getppid():08x}{0:016x}"  # which lives
    dead = f".x.saving-{unique_name()[:8]}{1 << 22:08x}{secrets.token_hex(8)}"
    other = f".x.saving-{0:032x}"  # of another host
    for name in (
        ours,
        dead,
        other,
        ".x.saving",
        ".x.saving-1",
        ".y.saving-" + dead[-32:],
    ):
        (run / name).write_text("half")
    kept = {p.name for p in run.iterdir()} - {dead}
    ff.consolidate(run / "a", run / "x")
    assert {p.name for p in run.iterdir()} == kept | {"x"}


def test_what_cannot_be_deleted_fails_no_save(run, monkeypatch):
    ff.save(run / "step-1", W)

    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("fsfunc.checkpoint.finding.delete", denied)
        with pytest.warns(RuntimeWarning, match="step-1 is to make room, and cannot"):
            ff.save(run / "step-2", W, keep=1)
    assert ff.latest(run).name == "step-2"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ff.save(run / "step-3", W, keep=1)
    assert [p.name for p in run.iterdir()] == ["step-3"]


def test_remains_with_something_of_the_users_give_it_back(run):
    """A deletion that was killed, of a checkpoint in which there were notes."""
    ff.save(run / "step-1", W)
    (run / "step-1" / "notes.txt").write_text("mine")
    (run / "step-1").rename(run / f".step-1.deleting-{unique_name()}")
    ff.save(run / "step-2", W)
    assert everything(run / "step-1") == {str(run / "step-1" / "notes.txt"): b"mine"}
