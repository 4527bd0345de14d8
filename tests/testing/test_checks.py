"""What the other checks pass, refuse, and say."""

import sys

import numpy as np
import pytest
import torch

import fsfunc as ff
from fsfunc.testing import (
    NotFinite,
    OddBatch,
    assert_cost,
    assert_equal,
    assert_equals_one_device,
    check_batch,
    check_collective,
    check_replicated,
    check_types,
    finite,
    poison,
)
from tests.checks import all_refused, on_ranks, simulated
from tests.models import chain, floats, layers, linear, train_step

MESH = simulated()


def one(x):
    return {"a": [x, 1.5], "none": None}


UNEQUAL = {
    "a value": (
        one(torch.tensor([1.0, 2.0])), one(torch.tensor([1.0, 3.0])),
        r"'a/0' f32\[2\] differs at \(1,\), in 1 of 2 elements\n"
        r"  expected 3.0\n  found 2.0",
    ),
    "NaN": (
        torch.tensor(float("nan")), torch.tensor(float("nan")),
        r"the value f32\[\] differs\n  expected nan",
    ),
    "a shape": (
        one(torch.ones(2)), one(torch.ones(2, 1)), r"f32\[2\], not f32\[2, 1\]",
    ),
    "a dtype": (one(torch.ones(2)), one(torch.ones(2).double()), r"not f64\[2\]"),
    "a kind": (one(1.0), one(torch.ones(())), "'a/0' is a float, not a Tensor"),
    "a number": (one(1), one(2), "'a/0' differs\n  expected 2\n  found 1"),
    "a number's kind": (one(1), one(1.0), "'a/0' differs\n  expected 1.0\n  found 1"),
    "an array's shape": (one(np.ones(1)), one(np.ones((1, 1))), "'a/0' differs"),
    "an array's dtype": (one(np.float32(1)), one(np.float64(1)), "'a/0' differs"),
    "an array's value": (one(np.zeros(2)), one(np.ones(2)), "'a/0' differs"),
}  # fmt: skip


@pytest.mark.parametrize(("found", "expected", "said"), UNEQUAL.values(), ids=UNEQUAL)
def test_unequal_trees_say_where(found, expected, said):
    with pytest.raises(AssertionError, match=said):
        assert_equal(found, expected)


def test_equal_trees_and_near_ones_pass():
    for x in torch.zeros(0), torch.tensor(True):
        assert_equal(one(x), one(x.clone()))
    assert_equal(one(np.ones(2)), one(np.array([1.0, 1.0 + 1e-7])), 1e-6)
    inf = torch.tensor([1.0, torch.inf])
    assert_equal(inf, torch.tensor([1.0 + 1e-7, torch.inf]), 1e-6)
    for other in (torch.tensor([1.0, 1.0]), -inf):  # near to nothing else
        with pytest.raises(AssertionError, match="differs at"):
            assert_equal(other, inf, 1e-6)
    with pytest.raises(ff.tree.TreeMismatch):
        assert_equal([1], (1,))


def some():
    grid = ff.make_mesh({"data": 2, "model": 2}, "simulated")
    only = lambda: ff.axis_index("model") or ff.psum(torch.ones(3), "data")  # noqa: E731
    return ff.spmd(only, grid)


def sends(count):
    def main():
        for _ in range(count):
            x = ff.psum(torch.ones(3), "data")
        return ff.all_gather(x, "data")

    return ff.spmd(main, MESH)


COSTS = {
    "bytes over an axis": (
        dict(bytes={"data": 12}),
        r"rank 0 sends 24 bytes over 'data', not 12:\n"
        r"  psum over data at .*:\d+  12 bytes\n  all_gather over data",
    ),
    "bytes over another": (
        dict(bytes={"data": 24, "node": 8}), "sends 0 bytes over 'node', not 8",
    ),
    "bytes in all": (dict(bytes=1), "sends 24 bytes in all, not 1"),
    "one op": (
        dict(collectives={"psum": 2, "all_gather": 1}),
        "sends 1 collectives 'psum', not 2",
    ),
    "an op by axis": (
        dict(collectives={"psum node": 1, "all_gather": 1}),
        "sends 0 collectives 'psum node', not 1",
    ),
    "an op that is not named": (
        dict(collectives={"psum": 1}), "sends 1 collectives 'all_gather', not 0",
    ),
    "an op over an axis that is not named": (
        dict(collectives={"psum node": 0, "all_gather": 1}),
        "sends 1 collectives 'psum data', not 0",
    ),
    "all": (dict(collectives=3), "sends 2 collectives in all, not 3"),
    "another rank": (dict(bytes=1, rank=1), "rank 1 sends 24 bytes in all, not 1"),
}  # fmt: skip


@pytest.mark.parametrize(("how", "said"), COSTS.values(), ids=COSTS)
def test_a_cost_that_is_not_met_lists_what_was_sent(how, said):
    with pytest.raises(AssertionError, match=said):
        assert_cost(sends(1), **how)


def test_a_cost_that_is_met_returns_what_ran():
    met = dict(bytes={"data": 36}, collectives={"psum data": 2, "all_gather": 1})
    found = assert_cost(sends(2), **met)
    assert [x.tolist() for x in found] == [[2.0] * 6] * 2
    assert assert_cost(lambda: 3, bytes=0, collectives=0) == 3
    with pytest.raises(AssertionError, match="rank 1 sends 0 bytes in all, not 12"):
        assert_cost(some(), bytes=12)  # who sends nothing has a cost too


STEP, GIVEN = lambda p, x: None, (torch.ones(2), torch.ones(2, 2))


def passes(**how):
    return lambda: check_collective(lambda x: x, **how)


test_what_would_compare_nothing_is_refused = all_refused({
    "a type": (passes(to="X"), ValueError, "type 'X': it is V, I, R or P"),
    "a derivative": (
        passes(under=["hessian"]), ValueError, "under='hessian': it is one of"
    ),
    "no cost": (lambda: assert_cost(lambda: 1), ValueError, "bytes= or collectives="),
    "no elements": (passes(shape=(0, 2)), ValueError, "any map passes"),
    "no sizes": (passes(sizes=()), ValueError, "nothing would be asked"),
    "no derivatives": (passes(under=()), ValueError, "nothing would be asked"),
    "no tensor": (
        lambda: assert_equals_one_device(STEP, STEP, MESH, *GIVEN),
        ValueError, "returns no tensor",
    ),
    "no calls": (
        lambda: assert_equals_one_device(STEP, STEP, MESH, *GIVEN, calls=0),
        ValueError, "calls=0",
    ),
})  # fmt: skip


def test_strategies_need_hypothesis(monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    monkeypatch.delitem(sys.modules, "fsfunc.testing.strategies", raising=False)
    monkeypatch.delitem(vars(ff.testing), "strategies", raising=False)
    with pytest.raises(ImportError, match="pip install hypothesis"):
        _ = ff.testing.strategies


@pytest.mark.parametrize("odd", [float("nan"), np.array([1.0, np.inf]), [], None])
def test_a_batch_without_tensors_may_be_odd_too(odd):
    given = odd, 1.0

    def main():
        check_batch(given[ff.axis_index("data")], "data")

    with pytest.raises(OddBatch, match="rank 0 '.*': (1 of|empty)"):
        ff.spmd(main, MESH)()


def replicated(value, axis="data", mesh=MESH):
    return lambda: ff.spmd(lambda: check_replicated(value(), axis), mesh)()


def rank():
    return ff.axis_index("data")


UNLIKE = {
    "an element": (
        lambda: {"w": torch.arange(3) * (rank() + 1)},
        r"'w' i64\[3\] differs(.*\n)*  at \(1,\) rank 0 has 1\n"
        r"  at \(1,\) rank 1 has 2",
    ),
    "a bit": (
        lambda: torch.tensor([1.0, [0.0, -0.0][rank()]]), r"at \(1,\) rank 0 has -?0.0",
    ),
    "a number": (
        lambda: {"w": torch.ones(2), "n": rank()},
        "'n' differs along \"data\".*; this rank has",
    ),
    "a shape": (
        lambda: torch.ones(1 + rank()), "trees of unlike structure, shapes or dtypes",
    ),
    "a leaf": (lambda: [1] * (1 + rank()), "unlike structure"),
    "all leaves": (lambda: [1] * rank(), "unlike structure"),
    "8 bits": (
        lambda: torch.ones(2).mul(1 + rank()).to(torch.float8_e4m3fn),
        r"at \(0,\) rank 0 has 1.0",
    ),
    "a sparse tensor's values": (
        lambda: {"w": torch.eye(2).mul(1 + rank()).to_sparse()},
        r"'w values' f32\[2\] differs(.*\n)*  at \(0,\) rank 0 has 1.0",
    ),
    "its places": (
        lambda: {"w": torch.eye(2).roll(rank(), 0).to_sparse()},
        "'w indices' i64",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("value", "said"), UNLIKE.values(), ids=UNLIKE)
def test_what_is_not_one_value_is_said_with_each_ranks(value, said):
    with pytest.raises(AssertionError, match=said):
        replicated(value)()


def test_one_value_is_compared_in_one_reduction_that_no_ledger_has():
    step = ff.shard(train_step(chain(linear), ff.sgd(0.1)), MESH, "data")

    def main():
        x = torch.ones(2, 4)
        state = ff.init_state(step, layers(2), ff.sgd(0.1), x)
        nan = torch.tensor([float("nan"), -0.0, 1.0])
        sparse = torch.eye(2).to_sparse()
        check_replicated((state, nan, "text", torch.zeros(0), sparse), "data")

    assert_cost(ff.spmd(main, MESH), bytes=0)
    grid = simulated(data=2, model=2)
    own = lambda: torch.tensor(ff.axis_index("model"))  # noqa: E731
    replicated(own, "data", grid)()
    with pytest.raises(AssertionError, match='along "data", "model"'):
        replicated(own, ("data", "model"), grid)()


ONES, ZEROS = torch.ones(2), torch.zeros(2)


def test_a_collective_on_a_mesh_of_several_axes_with_its_transpose():
    mesh = simulated(data=2, node=2)
    check_collective(
        lambda x: ff.all_gather(x, "data"),
        mesh=mesh,
        transpose=lambda g: ff.psum_scatter(g, "data"),
    )
    with pytest.raises(AssertionError, match="another transpose than you gave"):
        check_collective(lambda x: ff.all_gather(x, "data"), transpose=lambda g: g)


def test_what_a_step_raises_while_its_types_are_checked_comes_through():
    grad = ff.value_and_grad(lambda w, x: linear(w, x).sum())
    given = layers(1)[0], torch.ones(2, 4)
    check_types(ff.shard(grad, MESH, "data"), MESH, *given)
    with pytest.raises(IndexError, match="pop from empty list"):
        check_types(ff.shard(lambda w, x: [].pop(), MESH, "data"), MESH, *given)


def test_poison_fills_what_is_new_and_what_is_let_go_of():
    step = ff.shard(ff.value_and_grad(chain(linear)), MESH, "data")
    kept = torch.are_deterministic_algorithms_enabled()
    with poison():
        assert torch.empty(3).isnan().all()
        found = on_ranks(step, layers(2), torch.ones(4, 4))
    assert kept == torch.are_deterministic_algorithms_enabled()
    assert_equal(
        found[0], ff.value_and_grad(chain(linear))(layers(2), torch.ones(4, 4))
    )


@ff.unit
def log(p, x):
    return (x * p).log()


@ff.unit
def root(p, x):  # finite at zero, with an infinite slope
    return (x * p).sqrt()


def grad_of(*units):
    def loss(p, x):
        for k, one in enumerate(units):
            x = one(p[f"{k}"], x)
        return x.sum()

    return ff.value_and_grad(loss)


P = {"0": ONES, "1": ONES}


NANS = {
    "what is given": (
        grad_of(log), torch.tensor([1.0, torch.nan]),
        r"loss is given nan at \(1,\) of argument '1' f32\[2\] on one device",
    ),
    "a unit": (
        grad_of(root, log), torch.tensor([0.0, 1.0]),
        r"unit 'log' returns -inf at \(0,\) of f32\[2\]",
    ),
    "glue": (
        ff.value_and_grad(lambda p, x: log(p["0"], x / 0).sum()), ONES,
        "unit 'log' is given inf at",
    ),
    "a gradient": (grad_of(root), ZEROS, "there is a gradient of nan at"),
    "a cotangent": (
        grad_of(lambda p, x: log(p, x + 1), root), ZEROS,
        "the cotangent of what unit 'log' returns is inf",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("step", "x", "said"), NANS.values(), ids=NANS)
def test_the_first_value_that_is_not_finite_is_named(step, x, said):
    with pytest.raises(NotFinite, match=said):
        finite(step)(P, x)


def test_finite_changes_nothing_and_goes_with_other_transforms():
    params, x = layers(2, make=floats), floats(4, 4, seed=9)
    plain = ff.value_and_grad(chain())
    assert_equal(finite(plain)(params, x), plain(params, x))

    def main():
        mine = ff.local_batch(x, MESH, "data")
        inner, outer = ff.shard(plain, MESH, "data"), finite(plain)
        every = [inner, finite(inner), ff.shard(ff.remat(outer), MESH, "data")]
        whole = ff.shard(lambda p, x: x.mean(), MESH, "data")
        placed = ff.place(whole, params, mine)
        return [ff.unshard(step(placed, mine)) for step in every]

    for first, *others in ff.spmd(main, MESH)():
        for found in others:
            assert_equal(found, first)
