"""Which modules are units: each way to say so, and what matches nothing."""

import re

import pytest
from torch import nn

import fsfunc as ff
from tests.interop.models import Block, Stack

PARTS = (".norm", ".up", ".drop", ".down")
BLOCKS = tuple(f"blocks.{i}" for i in range(3))


def units(spec, module=None):
    return ff.from_module(Stack() if module is None else module, spec)[0].units


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (Block, BLOCKS),
        ((Block, nn.Embedding), BLOCKS),
        ("blocks.*", BLOCKS),
        ("blocks.[01]", ("blocks.0", "blocks.1", "blocks.2.norm", "blocks.2.up")),
        ("b*.?", BLOCKS),
        ("blocks.[!12]", ("blocks.0", "blocks.1.norm", "blocks.1.up")),
        (re.compile(r"blocks\.\d"), BLOCKS),
        (lambda name, m: isinstance(m, Block), BLOCKS),
        ("**.up", tuple(f"{b}.{p}" for b in BLOCKS for p in ("norm", "up", "down"))),
        (["blocks.0", "blocks.0.up"], ("blocks.0", "blocks.0.up", "blocks.1.norm")),
        ("blocks.**", tuple(b + x for b in BLOCKS for x in ("", *PARTS))),
        ("", ("Stack",)),
    ],
)  # fmt: skip
def test_units_are_told_in_many_ways(spec, expected):
    found = units(spec)
    if found != ("Stack",):
        assert found[0] == "embed" and found[-1] == "head"  # they own leaves
        found = found[1:-1]
    assert found[: len(expected)] == expected


def test_names_of_one_module_mean_its_first():
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    module.append(module[0])
    assert units("2", module) == units("0", module) == ("0",)


class Policy:
    """FairScale's policy and its recursion, in its own order of steps."""

    def __init__(self, least):
        self.least, self.found = least, []

    def wants(self, module, recurse, count):
        if recurse:
            return count >= self.least and not isinstance(module, nn.MultiheadAttention)
        through = nn.ModuleList, nn.ModuleDict
        return count >= self.least and not isinstance(module, through)

    def wrap(self, name, module):
        count = sum(p.numel() for p in module.parameters())
        if not self.wants(module, True, count):
            return 0
        taken = 0
        for part, child in module.named_children():
            taken += self.wrap(f"{name}.{part}".strip("."), child)
        if self.wants(module, False, count - taken):
            self.found.append(name)
            return count
        return taken


@pytest.mark.parametrize("least", [1, 30, 80, 250])
def test_sizes_are_counted_as_fairscale_does(least):
    layer = nn.TransformerEncoderLayer(4, 2, 8)
    module = nn.Sequential(Stack(), layer, nn.ModuleList([nn.Linear(4, 4)]))
    policy = Policy(least)
    policy.wrap("", module)
    assert sorted(ff.by_size(least).names(module)) == sorted(policy.found)


def test_attention_is_not_cut_by_size():
    module = nn.Sequential(nn.Linear(10, 10), nn.MultiheadAttention(100, 1))
    assert ff.by_size(40).names(module) == ["0", ""]
    assert units(ff.by_size(40), module) == units(40, module) == ("Sequential", "0")
