"""``python -m fsfunc prove``: a script's step on a mesh is its plain step, or not."""

import re
import sys
from pathlib import Path

import pytest

from fsfunc.__main__ import main
from tests.programs import ROOT

SCRIPT = """
import sys
import torch
import fsfunc as ff

@ff.unit
def layer(p, x):
    return torch.tanh(x @ p)

def build(mesh):
    optimizer = ff.sharded_adam(1e-3)
    scale = float(sys.argv[1]) if mesh and len(sys.argv) > 1 else 1.0

    def train_step(state, x):
        loss_fn = lambda w, x: scale * layer(w, x).mean()
        loss, grads = ff.value_and_grad(loss_fn)(state.params, x)
        return state.apply_gradients(grads, optimizer), {"loss": loss}

    rows = torch.zeros(4 if mesh is None else 2, 3)
    step = train_step if mesh is None else ff.shard(train_step, mesh, "data")
    return step, lambda: torch.zeros(3, 3), optimizer, rows
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "argv", ["pytest"])
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_it_prints_what_is_equal(script, capsys):
    assert main(["prove", str(script), "--mesh", "data=2", "--calls", "1"]) == 0
    said = capsys.readouterr().out
    assert (
        "shard(train_step, data=2, zero=3) on Mesh({'data': 2}, 'simulated') equals"
        in said
    )
    assert "0/opt_state/mu" in said and "1/loss" in said and "1 call, 2 draws" in said


def test_it_says_where_they_part(script, capsys):
    arguments = ["prove", str(script), "--mesh", "data=2", "--", "1.000000001"]
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert "is not train_step on one device" in said and "differs" in said


WHOLE = "torch.zeros(4 if mesh is None else 2, 3)"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("4 if mesh", "6 if mesh", r"rows .* are \[3, 3\] for a rank, and build"),
        (WHOLE, f"{WHOLE}.long()", "all rows .* are alike"),
        (".mean()", ".mean() * torch.rand(())", "draws numbers"),
    ],
)
def test_what_cannot_be_proven_is_refused(script, capsys, old, new, says):
    text = SCRIPT.replace(old, new).replace("layer(w, x)", "layer(w, x.float())")
    script.write_text(text)
    assert main(["prove", str(script), "--mesh", "data=2"]) == 2
    assert re.search(says, capsys.readouterr().err.replace("\n", " "))


def test_the_example_is_proven_as_a_pipeline_too(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pytest"])
    sizes = "--layers 2 --dim 8 --heads 2 --seq 4 --batch 4 --remat".split()
    example = str(ROOT / "examples" / "train_gpt.py")
    mesh = ["--mesh", "data=2,pipe=2", "--calls", "1"]
    assert main(["prove", example, *mesh, "--", *sizes]) == 0
    assert "equals train_step on one device" in capsys.readouterr().out
