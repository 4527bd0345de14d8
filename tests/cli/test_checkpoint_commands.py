"""`python -m fsfunc checkpoint` and `consolidate`: what they print and refuse."""

import pytest
import torch
from safetensors.torch import load_file

import fsfunc as ff
from fsfunc.cli import main


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "step-3"
    tree = {"params": {"w": torch.arange(6.0).view(2, 3)}, "step": 3}
    ff.save(path, tree, metadata={"run": "a"})
    return path


def test_a_checkpoint_is_listed_and_proven(saved, capsys):
    assert main(["checkpoint", str(saved), "--prove"]) == 0
    shown = capsys.readouterr().out
    for part in ("params/w", "f32[2, 3]", "step", "3", "run", "every checksum is"):
        assert part in shown


def test_a_damaged_one_is_told(saved, capsys):
    file = next(saved.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert main(["checkpoint", str(saved)]) == 0
    assert main(["checkpoint", str(saved), "--prove"]) == 2
    assert "is damaged between bytes" in capsys.readouterr().err


def test_a_subtree_becomes_one_file(saved, tmp_path, capsys):
    file = tmp_path / "w.safetensors"
    assert main(["consolidate", str(saved), str(file), "--at", "params"]) == 0
    assert load_file(file)["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert main(["consolidate", str(saved), str(file)]) == 2
    assert "exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["checkpoint", "{}/none"], "there is no checkpoint"),
        (["checkpoint", "{}/step-3", "--at", "model"], "holds nothing at 'model'"),
        (["consolidate", "{}/none", "{}/file"], "there is no checkpoint"),
    ],
)
def test_what_is_not_there_is_refused(saved, capsys, arguments, said):
    given = [a.format(saved.parent) for a in arguments]
    assert main(given) == 2
    assert said in capsys.readouterr().err
