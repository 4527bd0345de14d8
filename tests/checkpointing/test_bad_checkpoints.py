"""What is damaged, foreign, dangerous or asked for wrongly: a clear error on all ranks."""

import errno
import json
import os
import pickle
import resource
import shutil
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import fsfunc as ff
from fsfunc.checkpointing.manifest import CheckpointError
from fsfunc.checkpointing.reading import prove
from fsfunc.structure import TreeMismatch
from tests.checkpointing.drawn import laid_out, on
from tests.probes import same

PAIR = {"data": 2}


def tree_of(n=6, step=3):
    layers = [{"w": torch.arange(1.0 * n).view(2, -1), "b": torch.ones(3) * i}
              for i in range(2)]  # fmt: skip
    return {"params": {"layers": layers, "h": torch.ones(2).bfloat16()}, "step": step}


def empty(state):
    zero = lambda x: torch.zeros_like(x) if isinstance(x, torch.Tensor) else 0  # noqa: E731
    return ff.tree.map(zero, state)


def split(n):
    """The layouts of ``tree_of`` on two ranks, in the order of its leaves."""
    half = ff.Split("data", 2, 1)
    w = ff.Layout((2, n // 2), torch.float32, (half,))
    return [None if x == "step" else w if x == "w" else ff.Layout(*x)
            for x in (((2,), torch.bfloat16), B, "w", B, "w", "step")]  # fmt: skip


B = (3,), torch.float32


def save_on_two(path, n=6, **options):
    """Saves `tree_of` with the matrices split over two ranks."""
    state = tree_of(n)
    on(PAIR, lambda mesh: ff.save(path, laid_out(state, split(n), mesh), **options))
    return state


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A small checkpoint of two files, and one whose files have several blocks."""
    folder = tmp_path_factory.mktemp("kept")
    return {n: (folder / str(n), save_on_two(folder / str(n), n)) for n in (6, 3 << 18)}


class Changed:
    """A checkpoint while one of its files has other bytes (None: is gone)."""

    def __init__(self, file, data):
        self.file, self.data, self.before = file, data, file.read_bytes()

    def __enter__(self):
        self.file.unlink()
        if self.data is not None:
            self.file.write_bytes(self.data)

    def __exit__(self, *_):
        self.file.write_bytes(self.before)


@settings(max_examples=120)
@given(
    st.sampled_from([6, 6, 6, 3 << 18]),
    st.integers(0),
    st.integers(0, 1 << 40),
    st.integers(0, 7),
)
def test_a_flipped_bit_is_found(kept, n, which, where, bit):
    path, state = kept[n]
    files = sorted(path.iterdir())
    file = files[which % len(files)]
    data = bytearray(file.read_bytes())
    where %= len(data)
    data[where] ^= 1 << bit
    torch.manual_seed(5)
    random = torch.get_rng_state()
    with Changed(file, data):
        try:
            found = ff.load(path, empty(state))
        except CheckpointError as error:
            assert str(file) in str(error) and "damaged" in str(error)
            assert torch.equal(torch.get_rng_state(), random)
        else:  # only where nothing was said: white space of the manifest
            assert file.name == "fsfunc.json" and json.loads(data)
            same(found, state)
        if file.name != "fsfunc.json":
            with pytest.raises(CheckpointError, match="damaged between bytes"):
                prove(ff.metadata(path))


@settings(max_examples=30)
@given(st.integers(0), st.integers(0, 1 << 40), st.booleans())
def test_a_file_of_another_length_is_found(kept, which, length, longer):
    path, state = kept[6]
    files = sorted(path.iterdir())
    file = files[which % len(files)]
    data = file.read_bytes()
    data = data + bytes(1 + length % 9) if longer else data[: length % len(data)]
    with Changed(file, data), pytest.raises(CheckpointError) as raised:
        ff.load(path, empty(state))
    assert str(file) in str(raised.value)


@pytest.mark.parametrize("which", range(3))
def test_a_missing_file_is_named_on_every_rank(kept, which):
    """Also where one rank alone would have read it."""
    path, state = kept[6]
    file = sorted(path.iterdir())[which]

    def load(mesh):
        target = laid_out(empty(state), split(6), mesh)
        with pytest.raises(CheckpointError) as raised:
            ff.load(path, target)
        same(target, laid_out(empty(state), split(6), mesh))
        return str(raised.value)

    with Changed(file, None):
        for said in on(PAIR, load):
            assert file.name in said
    on(PAIR, lambda mesh: ff.load(path, laid_out(state, split(6), mesh)))


def altered(path, **changes):
    """Rewrites a manifest, with a checksum that suits it."""
    file = path / "fsfunc.json"
    body = json.loads(file.read_bytes())["body"] | changes
    text = json.dumps(body, separators=(",", ":"))
    sum_ = zlib.crc32(text.encode())
    file.write_text(f'{{"crc32": {sum_}, "body":\n{text}\n}}\n')


@pytest.mark.parametrize("version", [0, 2, 99, None, "1"])
def test_another_version_is_told(tmp_path, version):
    path = tmp_path / "a"
    ff.save(path, tree_of())
    altered(path, version=version)
    with pytest.raises(CheckpointError, match="reads version 1") as raised:
        ff.load(path, tree_of())
    assert f"format version {version!r}" in str(raised.value)
    with pytest.raises(CheckpointError, match="version"):
        ff.metadata(path)


W = "params/layers/0/w"
CHANGES = {
    "a leaf too many": (
        lambda s: s["params"]["layers"][1].update(c=torch.ones(1)),
        TreeMismatch, ["params/layers/1", "'c'"],
    ),
    "a leaf too few": (
        lambda s: s["params"]["layers"][0].pop("b"),
        TreeMismatch, ["params/layers/0", "'b'"],
    ),
    "a subtree too few": (
        lambda s: s["params"]["layers"].pop(), TreeMismatch, ["params/layers"]
    ),
    "a leaf for a subtree": (
        lambda s: s["params"].update(layers=torch.ones(1)),
        TreeMismatch, ["params/layers"],
    ),
    "another shape": (
        lambda s: s["params"]["layers"][0].update(w=torch.zeros(3, 2)),
        ValueError, [W, "f32[2, 3]", "f32[3, 2]", "give a target"],
    ),
    "another dtype": (
        lambda s: s["params"]["layers"][0].update(w=torch.zeros(2, 3).half()),
        ValueError, [W, "f32[2, 3]", "f16[2, 3]"],
    ),
    "a number for a tensor": (
        lambda s: s["params"].update(h=1), ValueError, ["params/h", "bf16[2]", "int"]
    ),
    "a tensor for a number": (
        lambda s: s.update(step=torch.ones(())), ValueError, ["step", "f32[]", "int"]
    ),
    "another kind of number": (
        lambda s: s.update(step=1.0), ValueError, ["step", "float", "int"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_target_that_does_not_match_is_told_by_path(kept, change):
    path, state = kept[6]
    target = empty(state)
    act, kind, words = CHANGES[change]
    act(target)
    with pytest.raises(kind) as raised:
        ff.load(path, target)
    for word in [*words, str(path)]:
        assert word in str(raised.value), f"{word!r} is not in: {raised.value}"


def test_a_subtree_that_is_not_there_is_told(kept):
    with pytest.raises(KeyError, match="holds nothing at 'model'.*params"):
        ff.load(kept[6][0], torch.ones(1), at="model")


def test_a_missing_checkpoint_is_told_on_every_rank(tmp_path):
    def load(mesh):
        with pytest.raises(FileNotFoundError, match="no checkpoint at .*nowhere"):
            ff.load(tmp_path / "nowhere", torch.ones(1))
        return True

    assert on(PAIR, load) == [True, True]
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        ff.load(tmp_path, torch.ones(1))


# Pickles


class Bomb:
    """Its pickle makes a file when it is loaded."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def plant(kind, folder, bomb):
    """A checkpoint with a bomb in it; returns the path to offer."""
    torch_file = folder / {"a .bin": "pytorch_model.bin"}.get(kind, "model.pt")
    match kind:
        case "torch.save" | "a .bin":
            torch.save({"w": bomb}, torch_file)
        case "torch.save, old":
            torch.save({"w": bomb}, torch_file, _use_new_zipfile_serialization=False)
        case "no suffix" | "as safetensors":
            torch_file = folder / ("w.safetensors" if "as" in kind else "weights")
            torch.save({"w": bomb}, torch_file)
        case "pickle" | "pickle, protocol 0":
            torch_file = folder / "w"
            protocol = 0 if kind[-1] == "0" else None
            torch_file.write_bytes(pickle.dumps({"w": bomb}, protocol))
        case "a folder":
            torch.save({"w": bomb}, torch_file)
            return folder
        case "a folder beside safetensors":
            save_file({"v": torch.ones(1)}, folder / "model.safetensors")
            torch.save({"w": bomb}, folder / "model.pt")
            return folder
        case "DCP":
            with_bytes = {"w": torch.ones(2), "o": {"bomb": bomb}}
            dcp.save(with_bytes, checkpoint_id=folder / "dcp", no_dist=True)
            return folder / "dcp"
        case "DCP's own file":
            dcp.save({"o": bomb}, checkpoint_id=folder / "dcp", no_dist=True)
            return next((folder / "dcp").glob("*.distcp"))
        case "the manifest":
            ff.save(folder / "a", {"w": torch.ones(2)})
            (folder / "a" / "fsfunc.json").write_bytes(pickle.dumps(bomb))
            return folder / "a"
    return torch_file


@pytest.mark.filterwarnings("ignore")  # torch's own of its old formats
@pytest.mark.parametrize(
    "kind",
    [
        "torch.save", "a .bin", "torch.save, old", "no suffix", "as safetensors",
        "pickle", "pickle, protocol 0", "a folder", "a folder beside safetensors",
        "DCP", "DCP's own file", "the manifest",
    ],
)  # fmt: skip
def test_a_pickle_is_never_loaded(tmp_path, kind):
    mark = tmp_path / "mark"
    path = plant(kind, tmp_path, Bomb(mark))
    said = []
    for look in (
        lambda: ff.load(path, {"w": torch.zeros(2)}),
        lambda: ff.metadata(path),
        lambda: ff.consolidate(path, tmp_path / "one.safetensors"),
    ):
        try:
            look()
        except (CheckpointError, TreeMismatch) as error:
            said.append(str(error))
    assert not mark.exists(), "the pickle was loaded"
    if kind != "a folder beside safetensors":
        assert len(said) == 3
    if kind not in ("pickle, protocol 0", "a folder beside safetensors"):
        for text in said:
            assert "pickle" in text or kind == "the manifest", text


# What cannot be saved


class Odd:
    pass


FAKE = torch.empty(2, device="meta")
SPARSE = torch.eye(3).to_sparse()
REFUSED = {
    "an object": (Odd(), TypeError, "a Odd"),
    "a function": (tree_of, TypeError, "a function"),
    "bytes": (b"x", TypeError, "a bytes"),
    "a complex number": (1j, TypeError, "a complex"),
    "a dtype": (torch.float32, TypeError, "a dtype"),
    "a fake tensor": (FAKE, ValueError, "meta"),
    "a sparse tensor": (SPARSE, ValueError, "sparse"),
    "complex128": (torch.ones(1, dtype=torch.complex128), TypeError, "complex128"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("save", [ff.save, ff.save_async])
def test_what_cannot_be_saved_is_refused_before_anything_is_written(
    tmp_path, what, save
):
    leaf, kind, words = REFUSED[what]

    def main(mesh):
        mine = leaf if mesh.rank == 1 else torch.ones(1)  # and the others hear of it
        with pytest.raises(kind, match=words) as raised:
            save(tmp_path / "a", {"deep": [{"in": mine}], "w": torch.ones(2)})
        assert "deep/0/in" in str(raised.value)
        assert mesh.rank == 1 or "rank 1 could not go on" in str(raised.value)

    on(PAIR, main)
    assert not list(tmp_path.iterdir())


def test_a_donated_state_is_refused(tmp_path):
    optimizer = ff.sgd(0.1)
    step = ff.donate(optimizer(ff.value_and_grad(lambda w, x: (w * x).sum())))
    w = torch.ones(2)
    spent = ff.TrainState(w, optimizer.init(w))
    state, _ = step(spent, torch.ones(2))
    with pytest.raises(RuntimeError, match="donated"):
        ff.save(tmp_path / "a", spent)
    assert not list(tmp_path.iterdir())
    ff.save(tmp_path / "a", state)


def test_keys_that_look_like_paths_are_told_apart(tmp_path):
    odd = {"a/b": torch.ones(1), "a.b": torch.zeros(1), "ü\n\"'": torch.ones(2), "": 1}
    odd |= {"k" * 5000: torch.ones(3), "..": torch.ones(1), "a": {"c": 2}}
    ff.save(tmp_path / "a", odd)
    same(ff.load(tmp_path / "a", empty(odd)), odd)
    with pytest.raises(ValueError, match="two leaves .* 'a/b'.*rename"):
        ff.save(tmp_path / "b", {"a/b": torch.ones(1), "a": {"b": torch.ones(1)}})


@pytest.mark.parametrize("given", [{"x": torch.ones(1)}, {"x": Odd()}, {1, 2}])
def test_metadata_that_json_cannot_hold_is_refused(tmp_path, given):
    with pytest.raises(TypeError, match="JSON"):
        ff.save(tmp_path / "a", tree_of(), metadata=given)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("keep", [0, -1, 1.5])
def test_a_keep_that_means_nothing_is_refused(tmp_path, keep):
    with pytest.raises(ValueError, match="keep"):
        ff.save(tmp_path / "a", tree_of(), keep=keep)


def test_a_sharded_leaf_needs_its_mesh(tmp_path, kept):
    path, state = kept[6]
    (first, _) = on(PAIR, lambda mesh: laid_out(state, split(6), mesh))
    for mesh in ({}, {"data": 3}, {"model": 2}):
        for act in (
            lambda _: ff.save(tmp_path / "a", first),
            lambda _: ff.load(path, first),
        ):
            with pytest.raises(ValueError, match="lies over 'data' of size 2"):
                on(mesh, act)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("backend", ["abstract", "vmap"])
def test_a_mesh_without_values_is_told(tmp_path, backend):
    mesh = ff.make_mesh(PAIR, backend)
    with pytest.raises(RuntimeError, match="holds no values"):
        ff.spmd(lambda: ff.save(tmp_path / "a", {"w": torch.ones(1)}), mesh)()
    assert not list(tmp_path.iterdir())


def test_ranks_that_save_different_trees_are_told(tmp_path):
    def main(mesh, who):
        more = {"v": torch.ones(3)} if mesh.rank == who else {}
        with pytest.raises((CheckpointError, ValueError), match="another tree|'v'"):
            ff.save(tmp_path / "a", {"w": torch.ones(4), **more})

    for who in (0, 1):
        on(PAIR, lambda mesh, who=who: main(mesh, who))
        assert not list(tmp_path.iterdir())


# Where it cannot be written


def test_a_path_that_exists_is_left_alone(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    ff.save(tmp_path / "saved", tree_of(step=1))
    (tmp_path / "link").symlink_to("saved")
    (tmp_path / "dangling").symlink_to("nothing")
    before = sorted(tmp_path.rglob("*"))

    def main(mesh):
        for name in ("file", "folder", "saved", "link", "dangling"):
            for save in (ff.save, ff.save_async):
                with pytest.raises(FileExistsError, match=f"{name} exists"):
                    save(tmp_path / name, tree_of(step=2))

    on(PAIR, main)
    assert sorted(tmp_path.rglob("*")) == before
    assert ff.load(tmp_path / "saved", empty(tree_of()))["step"] == 1


def test_folders_on_the_way_are_made_or_told(tmp_path):
    ff.save(tmp_path / "a" / "b" / "c", tree_of())
    assert ff.latest(tmp_path / "a" / "b") == tmp_path / "a" / "b" / "c"
    (tmp_path / "file").write_text("mine")
    for name in ("file/a", "n" * 300):
        with pytest.raises(OSError):
            ff.save(tmp_path / name, tree_of())
        with pytest.raises(OSError):
            ff.save_async(tmp_path / name, tree_of())
    if os.getuid():  # root may write anywhere
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(PermissionError):
            ff.save(tmp_path / "locked" / "a", tree_of())


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
            rank = ff.mesh.here().rank
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


@settings(max_examples=80)
@given(st.integers(0, 1 << 40), st.integers(0, 255))
def test_a_foreign_file_with_any_other_head_is_refused(foreign, where, value):
    """Or read: without checksums nobody can tell numbers from other numbers."""
    path, data = foreign
    data = bytearray(data)
    length = 8 + int.from_bytes(data[:8], "little")
    data[where % length] = value
    path.write_bytes(data)
    try:
        found = ff.load(path, {"step": 0, "w": torch.zeros(2, 3), "z": torch.zeros(2)})
    except (CheckpointError, TreeMismatch, ValueError):
        return
    assert found["w"].shape == (2, 3)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    folder = tmp_path_factory.mktemp("foreign")
    ff.save(folder / "a", {"w": torch.ones(2, 3), "z": torch.ones(2), "step": 3})
    path = ff.consolidate(folder / "a", folder / "a.safetensors")
    return Path(path), Path(path).read_bytes()
