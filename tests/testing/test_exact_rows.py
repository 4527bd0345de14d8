"""Of each capability in the table of examples: that it is proven, or why it is not.

Where other tests have the proof they are named; what is left is proven here.
"""

import re

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from fsfunc.testing import NoExactRule, assert_equals_one_device
from tests.checks import simulated
from tests.programs import ROOT
from tests.testing.test_exact import HYBRID, check, train_step

MESH = simulated(data=2)
NO_VALUES = "it computes no values of a step"

# What begins a row of its table: a file with the proof, or why there is none.
PROVEN = {
    "ZeRO 0 to 3": "testing/test_exact.py",
    "recompute": "testing/test_exact.py",
    "mixed precision": "testing/test_exact.py: its algebra; a cast changes nothing",
    "compiled units": "testing/test_exact.py: as the function that was compiled",
    "fewer bytes": "optim/test_laws.py: masters and narrow moments; codes of 8 bits "
    "and stochastic rounding read bits",
    "offload": "testing/test_exact.py",
    "pipelines": "testing/test_exact.py",
    "tensor and sequence": "nn/test_kinds_of_axes.py",
    "context parallelism": "nn/test_kinds_of_axes.py",
    "experts": "nn/test_kinds_of_axes.py",
    "norms, dropout": "nn/test_kinds_of_axes.py; dropout draws numbers",
    "smaller and fewer": "testing/test_exact_rows.py: hierarchical ones; messages of 8 "
    "bits read bits, and those of low rank and local updates are another function",
    "optimizers": "optim/test_laws.py; testing/test_exact_matrices.py",
    "equal to other": "their own kernels run, in floats",
    "derivatives": "testing/test_exact_rows.py",
    "planning": NO_VALUES,
    "states": NO_VALUES,
    "weights for others": NO_VALUES,
    "states that move": "state/test_remeshing.py",
    "checkpoints": NO_VALUES,
    "`nn.Module`": "testing/test_exact_rows.py",
    "data": NO_VALUES,
    "testing your own": NO_VALUES,
    "proof": "testing/test_exact.py",
    "failures": NO_VALUES,
    "one rank again": "it runs what it is given",
    "pictures": NO_VALUES,
}


def test_every_row_of_the_table_is_proven_or_says_why():
    table = (ROOT / "examples/README.md").read_text().partition("| capability")[2]
    rows = re.findall(r"^\| (?!-)(.+?) \|", table.partition("\n\n")[0], re.M)
    assert len(rows) == len(PROVEN)
    for row, begins in zip(rows, PROVEN, strict=True):
        assert row.startswith(begins), (row, begins)
    for where in PROVEN.values():
        for file in re.findall(r"[\w/]+\.py", where):
            assert "exact" in (ROOT / "tests" / file).read_text()


def test_hierarchical_messages_bring_the_same_numbers():
    how = {
        "gather": ff.HierarchicalGather("node", keep=True),
        "reduction": ff.HierarchicalReduction("node"),
    }
    check(ff.shard(train_step, HYBRID, ("data", "node"), **how), HYBRID)


layer = ff.unit(lambda w, x: torch.tanh(x @ w["a"]) @ w["b"])
W = {"a": torch.zeros(3, 4), "b": torch.zeros(4, 1)}
X = torch.zeros(4, 3)


def loss(w, x):
    return layer(w, x).square().mean()


gradient = ff.value_and_grad(loss)


def penalty(w, x):
    """A loss with the squares of its own gradient."""
    value, g = gradient(w, x)
    return value + ff.tree_sum(tree.map(torch.square, g))


def adapted(w, x):
    """The loss after a step (MAML)."""
    g = gradient(w, x)[1]
    return loss(tree.map(lambda p, g: p - 0.1 * g, w, g), x)


def by_rows(w, x):
    return torch.func.vmap(lambda row: loss(w, row[None]))(x).mean()


DERIVATIVES = {
    "of a gradient": ff.value_and_grad(penalty),
    "through a step": ff.value_and_grad(adapted),
    "row by row": ff.value_and_grad(by_rows),
    "along a direction": lambda w, x: torch.func.jvp(
        lambda w: gradient(w, x)[1], (w,), (w,)
    )[1],
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("name", DERIVATIVES)
def test_higher_derivatives_are_those_of_one_device(name, zero):
    step = DERIVATIVES[name]
    sharded = ff.shard(step, MESH, "data", zero=zero)
    assert_equals_one_device(step, sharded, MESH, W, X, exact=True)


def test_a_module_is_the_same_function_in_units():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.LayerNorm(4)
            self.mixed = torch.nn.MultiheadAttention(4, 2, batch_first=True)
            self.wide, self.back = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)

        def forward(self, x):
            h = self.norm(x)
            x = x + self.mixed(h, h, h, need_weights=False)[0]
            return x + self.back(torch.nn.functional.silu(self.wide(x)))

    module = torch.nn.Sequential(Block(), Block())
    apply, params, buffers = ff.from_module(module, units=Block)
    step = ff.value_and_grad(lambda p, x: apply(p, buffers, x).square().mean())
    x = torch.zeros(4, 3, 4)
    sharded = ff.shard(ff.remat(step), MESH, "data")
    assert_equals_one_device(step, sharded, MESH, params, x, exact=True)


def test_what_draws_numbers_is_refused():
    dropped = ff.unit(lambda w, x: torch.dropout(x @ w["a"] @ w["b"], 0.5, train=True))
    step = ff.value_and_grad(lambda w, x: dropped(w, x).mean())
    with pytest.raises(NoExactRule, match="draws numbers"):
        ff.prove(step, ff.shard(step, MESH, "data"), MESH, W, X)
