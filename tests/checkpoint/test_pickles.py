"""Pickles can run any code: none is ever loaded."""

import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import fsfunc as ff
from fsfunc.checkpoint.stored import CheckpointError
from fsfunc.tree.structure import TreeMismatch


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
