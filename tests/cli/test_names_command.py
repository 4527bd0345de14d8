"""The index has every public name, by its own word and by those of others."""

import pytest

import fsfunc as ff
from fsfunc.cli import main
from fsfunc.cli.names_command import WORDS, public, sentence


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


USERS = {
    "fsdp": "shard", "ddp": "shard", "zero": "shard", "all gather": "all_gather",
    "gradient clip": "clip_by_global_norm", "checkpoint": "consolidate",
    "eval": "value", "evaluation": "ema", "activation checkpointing": "remat",
    "torch.compile": "jit",
    "reduce scatter": "psum_scatter", "gradient accumulation": "accumulate",
    "state dict": "consolidate", "dataloader": "batches", "moe": "nn.expert_layer",
}  # fmt: skip


@pytest.mark.parametrize("words", USERS)
def test_a_name_is_found_by_what_others_call_it(words, capsys):
    assert main(["names", *words.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"ff.{USERS[words]}: ") for line in lines[:6])


def test_words_are_said_of_names_that_are_there():
    assert WORDS.keys() <= public().keys()


def test_versions_are_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert not ended.value.code and ff.__version__ in capsys.readouterr().out
