"""Command lines that work, and what is said of those that do not."""

import json
import re
import sys

import pytest
import torch

import fsfunc as ff
from fsfunc.cli import main
from tests.programs import ROOT

COMMANDS = ("plan", "prove", "hardware", "checkpoint", "consolidate", "names")
LONG = ("plan", "prove")  # they run the example
EXAMPLE = "examples/train_gpt.py"


def refused(capsys, *arguments):
    """What the command line prints as it ends."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert not shown.out
    return shown.err


def example_of(command, capsys):
    """The arguments of the example that a command's help ends with."""
    with pytest.raises(SystemExit):
        main([command, "--help"])
    last = capsys.readouterr().out.partition("example:\n")[2]
    line = " ".join(last.replace("\\\n", " ").split())
    assert line.startswith(f"python -m fsfunc {command} ")
    return line.split()[3:]


@pytest.mark.parametrize(
    "command", [pytest.param(c, marks=pytest.mark.slow) if c in LONG else c
                for c in COMMANDS]
)  # fmt: skip
def test_the_example_of_each_command_works(command, capsys, tmp_path, monkeypatch):
    ff.save(tmp_path / "runs/step-200", {"params": {"w": torch.ones(2)}})
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pytest"])
    assert main(example_of(command, capsys)) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_refuses_what_it_does_not_have_with_an_example(command, capsys):
    more = {"plan": [EXAMPLE, "--mesh", "data=2"], "prove": [EXAMPLE, "--mesh=data=2"]}
    given = more.get(command, ["a", "b"][: COMMANDS.index(command) - 2])
    said = refused(capsys, command, *given, "--bogus", "3")
    start = f"python -m fsfunc {command}: no such argument: --bogus"
    assert (
        said.startswith(start) and f"example:\n    python -m fsfunc {command}" in said
    )
    assert said.endswith(f"more: python -m fsfunc {command} --help\n")


@pytest.mark.parametrize("command", ["plan", "prove"])
def test_options_of_the_script_are_put_behind_two_dashes(command, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    start = f"    python -m fsfunc {command} {EXAMPLE} --mesh data=4 -- "
    for given, corrected in (
        (["--mesh", "data=4", "--layers", "2"], "--layers 2"),
        (["--layers=2", "--mesh", "data=4"], "--layers=2"),
        (["--lr", "1e-3", "--mesh", "data=4", "--", "--remat"], "--lr 1e-3 --remat"),
        (["--mesh", "data=4", "--text", "a b"], "--text 'a b'"),
    ):
        said = refused(capsys, command, EXAMPLE, *given)
        assert f"options of {EXAMPLE} itself follow --:\n" in said
        assert f"{start}{corrected}\n" in said
    # Which of them is the script, and which an option's value, nobody can tell.
    said = refused(capsys, command, "--layers", "2", EXAMPLE, "--mesh", "data=4")
    assert f"python -m fsfunc {command} SCRIPT --mesh AXES -- OPTIONS OF SCRIPT" in said


def test_options_of_a_model_are_put_there_too(capsys, tmp_path):
    config = tmp_path / "config.json"
    config.write_text("{}")
    start = ["plan", "--hf", str(config), "--mesh", "data=4"]
    said = refused(capsys, *start, "--length", "128")
    assert f"    python -m fsfunc {' '.join(start)} -- --length 128\n" in said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["plan", EXAMPLE, "--mesh=data=2", "--hardwre", "h100"], "mean --hardware?"),
        (
            ["hardware", "--second", "2"],
            "Did you mean --seconds?",
        ),  # never taken for it
        (["plan", EXAMPLE], "required: --mesh"),
        (["hardware", "--seconds", "x"], "invalid float value: 'x'"),
        (["names", "--", "gather"], "nothing may follow -- here"),
        (["plans"], "(choose from 'plan', 'prove'"),
        ([], "required: COMMAND"),
    ],
)
def test_a_wrong_argument_is_told_with_the_way_out(given, said, capsys):
    shown = refused(capsys, *given)
    assert said in shown and "example:\n    python -m fsfunc " in shown
    assert re.search(r"more: python -m fsfunc.* --help\n$", shown)


SCRIPT = """
import torch
import fsfunc as ff

layer = ff.unit(lambda p, x: torch.tanh(x @ p))

def train_step(state, batch):
    loss = lambda w, x: layer(w, x).sum()
    loss, grads = ff.value_and_grad(loss)(state.params, batch["x"])
    return state.apply_gradients(grads, ff.sgd(0.1)), loss

def build(mesh):
    step = ff.shard(ff.remat(train_step), mesh, "data")
    return step, lambda: torch.zeros(30, 50), ff.sgd(0.1), {"x": torch.zeros(4, 30)}
"""


def test_a_plan_begins_with_what_was_planned(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pytest"])
    path = tmp_path / "planned_step.py"
    path.write_text(SCRIPT)
    assert main(["plan", str(path), "--mesh", "data=4"]) == 0
    step, batch, parameters, blank, _ = capsys.readouterr().out.split("\n", 4)
    assert step.startswith("step ") and "shard(remat(train_step)" in step
    assert batch.split(maxsplit=1) == ["batch", "x f32[4, 30] on each of 4 ranks"]
    assert (parameters.split(), blank) == (["parameters", "1.50", "k"], "")


def test_of_experts_those_count_that_a_token_is_sent_to(tmp_path, capsys):
    pytest.importorskip("transformers")
    width, inner, experts, layers = 32, 48, 4, 2
    config = {
        "model_type": "mixtral", "num_local_experts": experts, "vocab_size": 64,
        "num_experts_per_tok": 2, "hidden_size": width, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 4, "max_position_embeddings": 16,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    given = ["plan", "--hf", str(path), "--mesh", "data=4", "--", "--length", "8"]
    assert main(given) == 0
    lines = capsys.readouterr().out.splitlines()
    attention, routed = 4 * width**2, 3 * width * inner
    around = 2 * 64 * width + width + layers * (attention + 2 * width + experts * width)
    whole, active = (around + layers * n * routed for n in (experts, 2))
    assert f"{whole / 1e3:.1f} k in all, {active / 1e3:.1f} k active" in lines[3]
    assert lines[2].split(maxsplit=1) == ["tokens", "32 a step, over all ranks"]
