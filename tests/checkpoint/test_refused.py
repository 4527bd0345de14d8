"""What cannot be saved, or not there, or is a pickle: refused, unwritten and unread."""

import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import fsfunc as ff
from fsfunc.checkpoint.stored import CheckpointError
from fsfunc.tree.structure import TreeMismatch
from tests.checkpoint.trees import (
    PAIR,
    empty,
    laid_out,
    on,
    save_on_two,
    split,
    tree_of,
)
from tests.checks import same


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
    "a dtype of nobody": (torch.ones(1).to(torch.float8_e4m3fnuz), TypeError, "fnuz"),
}


@pytest.mark.parametrize("i, name", list(enumerate(REFUSED)))
def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path, i, name):
    save = [ff.save, ff.save_async][i % 2]
    leaf, kind, words = REFUSED[name]

    def main(mesh):
        mine = leaf if mesh.rank == 1 else torch.ones(1)  # and the others hear of it
        with pytest.raises(kind, match=words) as raised:
            save(tmp_path / "a", {"deep": [{"in": mine}], "w": torch.ones(2)})
        assert "deep/0/in" in str(raised.value)
        assert mesh.rank == 1 or "rank 1 could not go on" in str(raised.value)

    on(PAIR, main)
    assert not list(tmp_path.iterdir())


def test_keys_that_look_like_paths_are_told_apart(tmp_path):
    odd = {"a/b": torch.ones(1), "a.b": torch.zeros(1), "ü\n\"'": torch.ones(2), "": 1}
    odd |= {"k" * 5000: torch.ones(3), "..": torch.ones(1), "a": {"c": 2}}
    ff.save(tmp_path / "a", odd)
    same(ff.load(tmp_path / "a", empty(odd)), odd)
    with pytest.raises(ValueError, match="two leaves .* 'a/b'.*rename"):
        ff.save(tmp_path / "b", {"a/b": torch.ones(1), "a": {"b": torch.ones(1)}})


@pytest.mark.parametrize("given", [{"x": torch.ones(1)}, {"x": Odd()}])
def test_metadata_that_json_cannot_hold_is_refused(tmp_path, given):
    with pytest.raises(TypeError, match="JSON"):
        ff.save(tmp_path / "a", tree_of(), metadata=given)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("keep", [0, -1])
def test_a_keep_that_means_nothing_is_refused(tmp_path, keep):
    with pytest.raises(ValueError, match="keep"):
        ff.save(tmp_path / "a", tree_of(), keep=keep)


def test_a_sharded_leaf_needs_its_mesh(tmp_path):
    path = tmp_path / "kept"
    state = save_on_two(path)
    (first, _) = on(PAIR, lambda mesh: laid_out(state, split(6), mesh))
    for mesh in ({}, {"data": 3}, {"model": 2}):
        for act in (
            lambda _: ff.save(tmp_path / "a", first),
            lambda _: ff.load(path, first),
        ):
            with pytest.raises(ValueError, match="laid out over 'data' of size 2"):
                on(mesh, act)
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize("backend", ["abstract", "vmap"])
def test_a_mesh_without_values_is_told(tmp_path, backend):
    mesh = ff.make_mesh(PAIR, backend)
    with pytest.raises(RuntimeError, match="holds no values"):
        ff.spmd(lambda: ff.save(tmp_path / "a", {"w": torch.ones(1)}), mesh)()
    assert not list(tmp_path.iterdir())


# Pickles can run any code: none is ever loaded


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


@pytest.mark.parametrize(
    "read", [lambda path: ff.load(path, {"w": torch.ones(1)}), ff.metadata]
)
def test_a_folder_without_checkpoints_is_told(tmp_path, read):
    with pytest.raises(FileNotFoundError, match="ff.latest returns .*ff.init_state"):
        read(ff.latest(tmp_path))
