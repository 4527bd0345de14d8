"""The index has every public name, by its own word and by those of others."""

import inspect
import pkgutil
import pydoc
from importlib import import_module

import pytest

import fsfunc as ff
from fsfunc.cli import main
from fsfunc.cli.names_command import (
    EXAMPLES,
    ROOMS,
    WORDS,
    first_sentence,
    public_objects,
)
from tests.programs import ROOT


def test_the_index_has_every_public_name():
    """``help(fsfunc)`` has each, or its room; ``python -m fsfunc names`` a sentence."""
    listed = set(ff.__doc__.split())
    assert {name.partition(".")[0] for name in public_objects()} - listed == set()
    assert [
        name
        for name, thing in public_objects().items()
        if not first_sentence(name, thing)
    ] == []


def test_the_command_prints_names_and_finds_words(capsys):
    assert main(["names"]) == 0
    assert capsys.readouterr().out.count("\n") == len(public_objects())
    assert main(["names", "zero stage 9"]) == 2
    assert main(["names", "gradint", "acumulation"]) == 2
    said = capsys.readouterr().err
    assert "(there is: gradient, accumulation); fewer words find more" in said
    assert main(["names", "one_f_one"]) == 0
    assert capsys.readouterr().out.startswith("ff.schedules.one_f_one_b: Returns the")


USERS = {
    "fsdp": "shard", "ddp": "shard", "zero": "shard", "all gather": "all_gather",
    "gradient clip": "clip_by_global_norm", "checkpoint": "consolidate",
    "eval": "value", "evaluation": "ema", "activation checkpointing": "remat",
    "torch.compile": "jit",
    "reduce scatter": "psum_scatter", "gradient accumulation": "accumulate",
    "state dict": "consolidate", "dataloader": "batches", "moe": "nn.expert_layer",
    "lora": "from_module", "frozen": "masked", "eval mode": "from_module",
    "grad norm": "global_norm", "resume": "latest", "bf16": "master_weights",
    "generate": "shard", "cuda": "make_mesh", "learning rate": "warmup_cosine",
    "metrics": "Summed",
}  # fmt: skip


@pytest.mark.parametrize("words", USERS)
def test_a_name_is_found_by_what_others_call_it(words, capsys):
    assert main(["names", *words.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"ff.{USERS[words]}: ") for line in lines[:6])


@pytest.mark.parametrize(
    "words, file",
    [("tensorboard", "loop.py"), ("log", "loop.py"), ("lora", "finetune.py")],
)
def test_an_example_is_found_where_no_name_says_it_all(words, file, capsys):
    assert main(["names", *words.split()]) == 0
    assert f"examples/{file}: {EXAMPLES[file][0]}\n" in capsys.readouterr().out


def test_words_are_said_of_names_that_are_there():
    assert WORDS.keys() <= public_objects().keys()
    assert all((ROOT / "examples" / file).exists() for file in EXAMPLES)


def test_versions_are_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert not ended.value.code and ff.__version__ in capsys.readouterr().out


def helped(module):
    """What ``help`` prints of a module."""
    return pydoc.plain(pydoc.render_doc(module))


def test_help_lists_what_shows_things_a_line_each():
    functions = [n for n, f in vars(ff.show).items() if inspect.isfunction(f)]
    description, _, rest = helped(ff.show).partition("PACKAGE CONTENTS")
    listed = [line.split(maxsplit=1) for line in description.splitlines()]
    said = {words[0] for words in listed if len(words) == 2}
    assert set(functions) == set(ff.show.__all__) <= said
    for name in functions:
        assert f"\n    {name}(" in rest  # in full below


def test_help_has_no_machinery_of_modules():
    packages = [ff] + [
        import_module(m.name)
        for m in pkgutil.walk_packages(ff.__path__, "fsfunc.")
        if m.ispkg
    ]
    assert ff.testing in packages and ff.nn in packages
    for module in (*packages, *(getattr(ff, name) for name in ROOMS)):
        assert "__getattr__" not in (said := helped(module)), module.__name__
        assert "__dir__" not in said, module.__name__
    assert ff.testing.strategies.meshes and "plan" in dir(ff)  # and still there
