"""Each rule of the first call: what breaks it is refused by its name, its way out runs.

The examples are those that ``help(ff.shard)`` shows.
"""

import itertools
from functools import partial

import pytest
import torch
from torch.func import grad, jacfwd
from torch.utils.checkpoint import checkpoint

import fsfunc as ff
from fsfunc.tracing.rules import RULES, RowsApart, Unsteady
from tests.checks import simulated

pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated",
    # torch 2.11's checkpoint cannot be left midway, by a refusal either.
    "ignore:Exception ignored in. <generator object _checkpoint_without_reentrant"
    ":pytest.PytestUnraisableExceptionWarning",
)

MESHES = {1: simulated(data=2), 2: simulated(data=2, model=2)}
BY_NAME = {rule.name: rule for rule in RULES}
STATE = {"w": {k: torch.eye(4) for k in "ab"}, "s": torch.tensor(0.5)}
X = torch.arange(32.0).reshape(8, 4).sin()
unit = ff.unit(lambda a, x: torch.tanh(x @ a))


def doubled(a: torch.Tensor):
    return 2 * a


def loss(w, x):
    return unit(w["b"], unit(w["a"], x)).square().mean()


def run(program):
    """Calls a step that does what an example says; and records it."""
    mesh, scripted = MESHES[2 if "model" in program else 1], "scripted" in program

    def main():
        names = {
            "ff": ff, "torch": torch, "each": ff.tree.map, "loss": loss, "unit": unit,
            "grad": grad, "jacfwd": jacfwd, "count": itertools.count(1),
            "checkpoint": partial(checkpoint, use_reentrant=False),
            "scripted": scripted and torch.jit.script(doubled),
        }  # fmt: skip

        def step(state, x):
            w, rows = state["w"], x.split(1)
            grads = [grad(loss)(w, row) for row in rows] if "grads" in program else ()
            return eval(program, names | state | {"x": x, "grads": grads})

        shard = lambda f: ff.shard(f, mesh, "data")  # noqa: E731
        mine = ff.local_batch(X, mesh, "data")
        laid = ff.place(shard(lambda state, x: loss(state["w"], x)), STATE, mine)
        if scripted or "apply_" in program:
            ff.place(shard(step), STATE, mine)  # which records it
        shard(step)(laid, mine)

    ff.spmd(main, mesh)()


@pytest.mark.parametrize("name", BY_NAME)
def test_what_breaks_a_rule_is_refused_by_its_name(name):
    rule = BY_NAME[name]
    told = rf"\(rule '{name}' of help\(ff.shard\)\)"
    with pytest.raises(rule.error, match=told):
        run(rule.refused_example)


@pytest.mark.parametrize("name", BY_NAME)
def test_its_way_out_runs(name):
    run(BY_NAME[name].accepted_example)


def test_help_lists_the_rules():
    told = ff.shard.__doc__ or ""
    for rule in RULES:
        examples = (rule.refused_example, rule.accepted_example)
        words = (rule.name, rule.sentence, *examples)
        assert all(" ".join(w.split()) in " ".join(told.split()) for w in words)


def test_a_case_belongs_to_one_rule():
    cases = [case for rule in RULES for case in rule.texts]
    assert len(cases) == len(set(cases)) and len(BY_NAME) == len(RULES)
    assert {RowsApart, Unsteady} <= {rule.error for rule in RULES}
