"""The README's code runs as it stands, and the index has every public name."""

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch

import fsfunc as ff
from fsfunc.cli import main
from fsfunc.cli.names_command import public, sentence
from tests.checks import close

README = Path(__file__).parents[1] / "README.md"
CODES = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)


@pytest.fixture(scope="module")
def ran():
    """What the README's programs define, one after another, and what each prints."""
    found, printed = {}, []
    for code in CODES:
        with redirect_stdout(StringIO()) as out:
            exec(compile(code, str(README), "exec"), found)
        printed.append(out.getvalue())
    return found, printed


@pytest.fixture
def names(ran):
    return ran[0]


def test_the_readme_s_example_runs(ran):
    names, (step, plan, outlives, *rest) = ran
    assert "psum_scatter" in step and "all_gather" in step
    assert plan.startswith("5 ") and "on H100" in plan
    assert outlives == "[3, 3, 3, 3] [5, 5, 5, 5]\n"
    assert rest == [""] * 4
    x = torch.randn(2, 3, 8)
    trained = names["trained"](x).square().mean()
    assert abs(names["module_loss"](names["params"], x) - trained) < 1e-6


def test_two_models_are_one_device_s(names):
    weights, x = {k: torch.randn(8, 8) for k in "gd"}, torch.randn(8, 8)
    every = ff.spmd(names["gan"], names["mesh"])(weights, x)
    adam = names["adam"]
    whole = {k: ff.TrainState(w, adam.init(w)) for k, w in weights.items()}
    expected, _ = names["gan_step"](whole, x)
    for state in every:
        close(state["g"].params, expected["g"].params, 1e-6)
        close(state["d"].params, expected["d"].params, 1e-6)


def test_adapters_and_a_state_of_one_s_own(names):
    """And windows of a file, as a dataset."""
    w, x = torch.randn(8, 8), torch.randn(8, 8)
    adapters = {"a": torch.randn(8, 2), "b": torch.zeros(2, 8)}
    extra = {"w": w, "seen": torch.zeros(())}
    start = ff.TrainState(adapters, names["adam"].init(adapters), extra=extra)
    expected, _ = names["lora_step"](start, x)
    for state in ff.spmd(names["lora"], names["mesh"])(w, adapters, x):
        close(state.params, expected.params, 1e-6)
        assert torch.equal(state.extra["w"], w) and state.extra["seen"] == 1
    rows = ff.spmd(names["first_batch"], names["mesh"])(str(README))
    text = README.read_bytes()
    windows = {text[i : i + 16] for i in range(0, len(text), 16)}
    assert {bytes(row.tolist()) for row in torch.cat(rows)} <= windows


def test_the_index_has_every_public_name():
    """``help(fsfunc)`` has each, or its room; ``python -m fsfunc names`` a sentence."""
    listed = set(ff.__doc__.split())
    assert {name.partition(".")[0] for name in public()} - listed == set()
    assert [name for name, thing in public().items() if not sentence(name, thing)] == []


def test_the_command_prints_names_and_finds_words(capsys):
    assert main(["names"]) == 0
    assert capsys.readouterr().out.count("\n") == len(public())
    assert main(["names", "zero stage 9"]) == 2
    assert main(["names", "one_f_one"]) == 0
    assert capsys.readouterr().out.startswith("ff.schedules.one_f_one_b: Return the")
