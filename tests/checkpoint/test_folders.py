"""The newest checkpoint that can be loaded, what a save leaves, who may save where."""

import os
import time

import pytest
import torch

import fsfunc as ff
from fsfunc.checkpoint import folders
from fsfunc.checkpoint.folders import unique_name
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


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_newest_is_passed_over_and_told(tmp_path, name):
    """Also by every rank; and a restart goes on from the one before."""
    steps(tmp_path, 1, 2, 3)
    DAMAGE[name](tmp_path / "step-3")

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


def test_what_is_no_checkpoint_says_what_there_is_instead(tmp_path):
    w, runs = {"w": torch.ones(1)}, tmp_path / "runs"
    runs.mkdir()
    for nothing in (None, ff.latest(runs), ff.latest(tmp_path / "none")):
        with pytest.raises(FileNotFoundError, match=r"None, .* Begin anew then"):
            ff.load(nothing, w)
    with pytest.raises(CheckpointError, match="safetensors file$"):
        ff.load(runs, w)
    (runs / ".step-3.saving-0").mkdir()  # a rank was killed while it saved
    assert ff.latest(runs) is None
    for path, kind in ((runs, CheckpointError), (runs / "step-3", FileNotFoundError)):
        with pytest.raises(kind, match=r"step-3\.saving-0 alone, .* begin anew"):
            ff.load(path, w)
    for step in (9, 10):
        ff.save(runs / f"step-{step}", w)
    for path, kind in ((runs, CheckpointError), (runs / "step-8", FileNotFoundError)):
        with pytest.raises(kind, match=r"2, the newest step-10: ff\.load\(ff\.latest"):
            ff.load(path, w)


def test_the_newest_within_a_checkpoint_is_refused(tmp_path):
    """Taken for none, it would have a run begin anew."""
    ff.save(tmp_path / "step-10", {"w": torch.ones(1)})
    with pytest.raises(ValueError, match="step-10 is a checkpoint itself"):
        ff.latest(tmp_path / "step-10")


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


def left_by(process, host=None, number=0):
    """A name that a process took."""
    return f"{host or unique_name()[:8]}{process:08x}{number:016x}"


DEAD = 1 << 22  # no process has such a number


def test_what_a_killed_run_left_is_removed(tmp_path):
    dead = left_by(DEAD)
    for name in (".step-3.saving", ".step-1.deleting", ".other.saving"):
        (tmp_path / f"{name}-{dead}").mkdir()
        (tmp_path / f"{name}-{dead}" / "shard-00001.safetensors").write_text("half")
    (tmp_path / f".step-8.saving-{dead}").mkdir()
    (tmp_path / f".step-8.saving-{dead}" / "notes.txt").write_text("mine")
    (tmp_path / ".step-9.saving").mkdir()  # of no save's making
    (tmp_path / ".step-9.saving.txt").write_text("mine")
    ff.save(tmp_path / "step-3", W)
    left = [
        f".other.saving-{dead}",
        f".step-8.saving-{dead}",
        ".step-9.saving",
        ".step-9.saving.txt",
        "step-3",
    ]
    assert names(tmp_path) == left
    ff.save(tmp_path / "step-4", W, keep=1)
    assert names(tmp_path) == [*left[:-1], "step-4"]
    assert (tmp_path / left[1] / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "host, process, age, stays",
    [
        (None, DEAD, 0, False),
        (None, os.getppid(), 0, True),  # which lives
        (None, os.getppid(), 90_000, False),  # its number is another's by now
        (None, os.getpid(), 0, False),  # this process saves nothing there
        ("00000000", DEAD, 0, True),  # of another host
        ("00000000", DEAD, 90_000, False),
    ],
    ids=["dead", "lives", "old", "this one", "elsewhere", "old elsewhere"],
)
def test_what_a_living_process_may_write_is_left_alone(
    tmp_path, host, process, age, stays
):
    folder = tmp_path / f".step-1.saving-{left_by(process, host)}"
    folder.mkdir()
    (folder / "shard-00001-half.safetensors").write_text("half")
    for path in (folder / "shard-00001-half.safetensors", folder):
        os.utime(path, (time.time() - age,) * 2)
    ff.save(tmp_path / "step-1", W)
    assert folder.exists() == stays
    same(ff.load(tmp_path / "step-1", W), W)


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
    with pytest.raises(ValueError, match="(?s)different paths, or trees.*at-1"):
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


def test_of_two_that_save_one_path_the_second_raises(tmp_path, monkeypatch):
    """Each writes into a folder of its own."""
    publish, other = folders.publish, {"w": STATE["w"] + 1}

    def late(folder, path):
        monkeypatch.setattr(folders, "publish", publish)
        ff.save(path, other)
        publish(folder, path)

    monkeypatch.setattr(folders, "publish", late)
    with pytest.raises(FileExistsError, match="step-1 exists"):
        ff.save(tmp_path / "step-1", STATE)
    assert names(tmp_path) == ["step-1"]
    same(ff.load(tmp_path / "step-1", STATE), other)


def test_a_checkpoint_of_which_a_file_went_missing_gets_no_name(tmp_path, monkeypatch):
    sync = os.fsync

    def removing(file):
        sync(file)
        for path in tmp_path.rglob("shard-*"):
            path.unlink()

    monkeypatch.setattr("os.fsync", removing)
    with pytest.raises(ff.CheckpointError, match="is missing"):
        ff.save(tmp_path / "step-1", STATE)
    assert names(tmp_path) == []


def test_what_is_being_saved_is_not_taken_for_remains(tmp_path, monkeypatch):
    publish = folders.publish

    def look(folder, path):
        monkeypatch.setattr(folders, "publish", publish)
        ff.save(tmp_path / "step-2", STATE)
        assert folder.exists()
        publish(folder, path)

    monkeypatch.setattr(folders, "publish", look)
    ff.save(tmp_path / "step-1", STATE)
    assert names(tmp_path) == ["step-1", "step-2"]
