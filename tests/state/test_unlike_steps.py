"""Ranks whose optimizers, numbers or values differ: told before the first step.

Each program is made of its rank's index. With the index it is refused, and the error
says where it differs; with 0 on every rank it runs.
"""

import inspect
from functools import partial

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from fsfunc.comm.comparison import RanksDiffer
from fsfunc.comm.descriptions import describe_lines, describe_value
from fsfunc.comm.typed_maps import LawError
from tests.checks import simulated
from tests.models import chain
from tests.optim.optimizers import EVERY

MESH = simulated(2)
X = torch.ones(4, 3)


@ff.unit
def layer(w, x):
    return torch.tanh(x @ w)


def params():
    return [torch.full((3, 3), 0.1) for _ in range(2)]


loss = chain(layer)


def train(optimizer, change=lambda g: g):
    def step(state, x):
        value, grads = ff.value_and_grad(loss)(state.params, x)
        return state.apply_gradients(change(grads), optimizer), value

    return step


def sgd(r):
    return ff.sgd(0.1)


def given(optimizer, zero, r):
    """Made by a state's own optimizer."""
    own = optimizer(r)
    step = ff.shard(own(ff.value_and_grad(loss)), MESH, "data", zero=zero)
    step(ff.init_state(step, params, own, X), X)


def applied(optimizer, change, zero, r):
    """Made by what the step does with gradients."""
    step = ff.shard(train(optimizer(r), partial(change, r)), MESH, "data", zero=zero)
    step(ff.init_state(step, params, sgd(r), X), X)


def placed(optimizer, change, zero, r):
    step = ff.shard(train(optimizer(r), partial(change, r)), MESH, "data", zero=zero)
    step(ff.place(step, ff.TrainState(params(), optimizer(0).init(params())), X), X)


def beside(zero, r, **more):
    step = ff.shard(train(sgd(r)), MESH, "data", zero=zero)
    ff.init_state(step, params, sgd(r), X, **more)


def no_shard(zero, r):
    split = {"*": ff.Split(r, "data")}
    ff.place(lambda ws: ws, [torch.ones(2, 2)], layouts=split)


def plainly(r, g):
    return g


def scaled(r, g):
    return tree.map(lambda x: x * (1.0 + r), g)


def scaled_on_one(r, g):
    return tree.map(lambda x: x * 2, g) if r else g


def scaled_by_a_tensor(r, g):
    by = torch.tensor(1.0 + r)
    return tree.map(lambda x: x * by, g)


def own(number):
    """Another's optimizer, whose number is known to its closure alone."""

    def update(grads, state, params=None):
        return tree.map(lambda g: -number * g, grads), state

    return ff.Optimizer(lambda params: (), update)


def other(grads, state, params=None):
    return tree.map(torch.neg, grads), state


def rate(n):
    return 0.1


def torchs(r):
    return ff.from_torch(torch.optim.RMSprop, lr=0.1, alpha=0.9 + r / 100)


def by_leaf(r):
    label = lambda path, leaf: "b" if path == str(r) else "a"  # noqa: E731
    return ff.partition({"a": ff.sgd(0.1), "b": ff.lion(0.1)}, label)


STATED = {  # optimizers, and the line in which ranks differ
    "another one": (lambda r: ff.sgd(1.0) if r else ff.lion(1.0),
                    "optimizer: rank 0: lion; rank 1: sgd"),
    "a rate": (lambda r: ff.sgd(0.1 + r), "learning_rate: rank 0: 0.1; rank 1: 1.1"),
    "a tensor": (lambda r: ff.sgd(torch.tensor(0.1 + r * 1e-6)),
                 "optimizer/learning_rate: rank 0: tensor f32.* 0.1000000"),
    "decay": (lambda r: ff.sharded_adam(weight_decay=0.1 * r), "optimizer/weight_dec"),
    "another schedule": (lambda r: ff.sgd((lambda n: 0.1) if r else rate),
                         "optimizer/learning_rate: rank 0: <function rate>"),
    "a schedule": (
        lambda r: ff.chain(ff.scale(1.0), ff.sgd(ff.linear(0.1, 0.0, 10 + r))),
        "optimizer/transforms/1/learning_rate at count 1: rank 0: 0.09",
    ),
    "a mask": (lambda r: ff.sharded_adam(mask=lambda path, leaf: path == str(r)),
               "optimizer/mask of '0': rank 0: True; rank 1: False"),
    "labels": (by_leaf, "optimizer/labels of '0': rank 0: 'b'; rank 1: 'a'"),
    "within": (lambda r: ff.ema(ff.master_weights(ff.sgd(1.0 + r))),
               "optimizer/optimizer/optimizer/learning_rate"),
    "moments": (lambda r: ff.lion(moment_dtype=[None, torch.float64][r]),
                "optimizer/moment_dtype: rank 0: None; rank 1: torch.float64"),
    "torch's": (torchs, "optimizer/alpha: rank 0: 0.9; rank 1: 0.91"),
    "one's own": (lambda r: ff.Optimizer(lambda p: (), other if r else own(1)[1]),
                  "optimizer/update: rank 0: <function own.<locals>.update>"),
    "one's own, configured": (
        lambda r: ff.Optimizer(lambda p: (), other, configuration={"lr": r}),
        "optimizer/lr: rank 0: 0; rank 1: 1",
    ),
    "scales": (lambda r: ff.loss_scale(ff.sgd(1.0), 8.0 + r), "optimizer/initial"),
}  # fmt: skip
CASES = {
    **{f"given: {k}": (partial(given, o), RanksDiffer, e)
       for k, (o, e) in STATED.items()},
    "applied: another one": (
        partial(applied, lambda r: ff.sgd(0.1 + r), plainly), RanksDiffer,
        "that applies gradients/learning_rate: rank 0: 0.1; rank 1: 1.1"),
    "placed: another one": (
        partial(placed, lambda r: ff.sgd(0.1 + r), plainly), RanksDiffer,
        "that applies gradients/learning_rate: rank 0: 0.1; rank 1: 1.1"),
    "a number in a closure": (
        partial(placed, lambda r: own(1.0 + r), plainly), LawError,
        "mul .*test_unlike_steps"),
    "scaled": (partial(applied, sgd, scaled), LawError, "mul .*test_unlike_steps"),
    "scaled by a tensor": (partial(applied, sgd, scaled_by_a_tensor), LawError,
                           "mul .*test_unlike_steps"),
    "scaled on one": (partial(applied, sgd, scaled_on_one), RanksDiffer,
                      "outside units: rank 0: nothing; rank 1: something"),
    "scaled by tree_scale": (
        partial(applied, sgd, lambda r, g: ff.tree_scale(g, 1.0 + r)), RanksDiffer,
        "tree_scale: rank 0: 1.0; rank 1: 2.0"),
    "record": (lambda z, r: beside(z, r, record=["fake", "real"][r]), RanksDiffer,
               "record: rank 0: fake; rank 1: real"),
    "extra": (lambda z, r: beside(z, r, extra={"a": torch.ones(2) * r}), RanksDiffer,
              "'extra/a': rank 0: f32"),
    "a word in extra": (lambda z, r: beside(z, r, extra={"a": "bc"[r]}), RanksDiffer,
                        "'extra/a': rank 0: 'b'; rank 1: 'c'"),
    "layouts": (no_shard, RanksDiffer, r"layouts/\*: rank 0: Split"),
}  # fmt: skip


@pytest.mark.parametrize("i, case", list(enumerate(CASES)))
def test_it_is_told_and_what_is_alike_runs(i, case):
    zero = 3 * (i % 2)
    program, error, says = CASES[case]
    with pytest.raises(error, match=f"(?s){says}"):
        ff.spmd(lambda: program(zero, MESH.rank), MESH)()
    if case != "layouts":  # which has an axis of its own
        ff.spmd(lambda: program(zero, 0), MESH)()


@pytest.mark.parametrize("name", EVERY)
def test_an_optimizer_says_what_it_was_made_of(name):
    optimizer = EVERY[name]()
    said = dict(describe_lines("optimizer", optimizer))
    assert said["optimizer"] == optimizer.called != "Optimizer"
    assert repr(optimizer) == describe_value(optimizer) and " at 0x" not in repr(
        optimizer
    )
    make = getattr(ff, optimizer.called)
    known = dict(optimizer.configuration)
    wanted = inspect.signature(make).parameters
    assert make is ff.from_torch or known.keys() == wanted.keys()


def test_tensors_are_told_by_their_values():
    one, other = torch.ones(40), torch.ones(40)
    other[20] += 1e-6
    assert describe_value(one) == describe_value(one.clone()) != describe_value(other)
    assert describe_value(torch.tensor(0.1)) != describe_value(
        torch.tensor(0.1).nextafter(one[0])
    )
    assert describe_value(torch.ones(2, device="meta")) == "tensor f32[2]"
    assert (
        describe_value(partial(other.add, 1, alpha=2))
        == "<function Tensor.add>(0=1, alpha=2)"
    )


@pytest.mark.processes
def test_processes_are_told_too(processes):
    """One program, whose ranks go on after each error: all of them raise together."""
    out = processes(
        """
        import torch, fsfunc as ff
        import tests.state.test_unlike_steps as cases

        cases.MESH = mesh = ff.make_mesh({"data": 2}, timeout=30)
        told = []
        for name, (program, error, says) in cases.CASES.items():
            for index in (mesh.rank, 0):
                try:
                    program(3, index)
                except (cases.RanksDiffer, cases.LawError) as error:
                    told.append((name, index))
                    assert index == mesh.rank, name
        names = {name for name, index in told}
        assert mesh.rank == 0 or names == set(cases.CASES), set(cases.CASES) - names
        print("told", len(told))
        """,
        2,
    )
    assert out.count(f"told {len(CASES)}") >= 1, out


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("odd", [0, 1])
def test_whichever_rank_comes_first_a_number_that_differs_is_told(waits, odd):
    def step(by, ws, x):
        return tree.map(lambda g: g * by, ff.value_and_grad(loss)(ws, x)[1])

    def main():
        ws = ff.place(ff.shard(loss, MESH, "data"), params(), X)
        if waits:  # after a collective the last to come goes on first
            ff.psum(torch.ones(()), "data")
        by = 2.0 if MESH.rank == odd else 1.0
        ff.shard(partial(step, by), MESH, "data")(ws, X)

    with pytest.raises(LawError, match="differs from rank to rank"):
        ff.spmd(main, MESH)()
