"""The README's code runs as it stands, and the index has every public name."""

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch

import fsfunc as ff
from fsfunc.cli import main
from fsfunc.cli.commands import public, sentence

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
    assert outlives == "[0, 0, 0, 0]\n"
    assert rest == [""]
    x = torch.randn(2, 3, 8)
    trained = names["trained"](x).square().mean()
    assert abs(names["module_loss"](names["params"], x) - trained) < 1e-6


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
