"""Ranks that average gradients, and are all given one batch: they are warned."""

import warnings

import pytest
import torch

import fsfunc as ff
from tests.checks import same, simulated
from tests.models import chain, floats, layers, train_step

SGD, X = ff.sgd(0.125), floats(8, 4)
MESH, GRID = simulated(2), simulated(node=2, data=2)
STEP = train_step(chain(), SGD)
WHOLE = {"data": ("data",), "node": ("node",), "both": ("node", "data")}


def trained(batch, mesh=MESH, axis="data", *, step=STEP, calls=2, **how):
    """A step's states and ledgers, of what ``batch`` gives each rank."""

    def main():
        sharded, mine = ff.shard(step, mesh, axis, **how), batch(mesh)
        state = ff.init_state(sharded, layers(), SGD, mine)
        with ff.ledger() as log:
            for _ in range(calls):
                state, _ = sharded(state, batch(mesh))
        return ff.unshard(state), log.table()

    states, tables = ff.spmd(main, mesh)().unzip()
    return list(states), [str(table) for table in tables]


def whole(mesh):
    return X.clone()  # each rank has read the same file


def along(*axes, x=X):
    return lambda mesh: ff.local_batch(x, mesh, axes)


GIVEN = {  # what ranks are given, over which axes, and those along which it is equal
    "the whole batch": (whole, MESH, "data", {}, "'data'"),
    "one, at zero=0": (whole, MESH, "data", {"zero": 0}, "'data'"),
    "one of one row": (lambda m: X[:1].clone(), MESH, "data", {}, "'data'"),
    "a tree": (lambda m: {"x": X.clone()}, MESH, "data", {"zero": 1}, "'data'"),
    "no part along one axis": (along("data"), GRID, ("node", "data"), {}, "'node'"),
    "nor along the other": (along("node"), GRID, ("node", "data"), {}, "'data'"),
    "the same by replicas": (along("data"), GRID, "data", {"replicate": "node"},
                             "'node'"),
    "one, on a grid": (whole, GRID, ("node", "data"), {}, "'node' and 'data'"),
}  # fmt: skip


def of_trees(state, batch):
    return STEP(state, batch["x"] if isinstance(batch, dict) else batch)


@pytest.mark.parametrize("name", GIVEN)
def test_it_is_told_with_the_way_out(name):
    given, mesh, axis, how, names = GIVEN[name]
    told = rf"along {names} are given equal batches.*ff\.local_batch.*equal_batches="
    with pytest.warns(UserWarning, match=told) as seen:
        found = trained(given, mesh, axis, step=of_trees, **how)
    assert len(seen) == 1
    said = tuple(names.replace("'", "").split(" and "))
    with warnings.catch_warnings():  # and nothing else changes by saying so
        warnings.simplefilter("error")
        meant = trained(given, mesh, axis, step=of_trees, equal_batches=said, **how)
    same(meant, found)


ONES, INDEX = torch.ones(8, 4), torch.arange(4.0).expand(8, 4)
QUIET = {
    "each its own": (along("data"), MESH, "data"),
    "each its own of a grid": (along("node", "data"), GRID, ("node", "data")),
    "rows that are all alike": (lambda m: ONES.clone(), MESH, "data"),
    "rows of numbers, all alike": (lambda m: INDEX.clone(), MESH, "data"),
    "their own parts of such": (along("data", x=ONES), MESH, "data"),
    "no rows": (lambda m: X[:0], MESH, "data"),
    "one rank": (whole, simulated(1), "data"),
    "one of two axes that has ranks": (
        *(along("data"), simulated(node=1, data=2), ("node", "data")),
    ),
    "an axis of no mean": (along("data"), simulated(data=2, model=2), "data"),
}


def over_rows(state, x):
    """The mean over rows, of none too."""

    def loss(params, x):
        for p in params:
            x = torch.tanh(layer(p, x))
        return x.square().sum() / max(len(x), 1)

    value, g = ff.value_and_grad(loss)(state.params, x)
    return state.apply_gradients(g, SGD), value


layer = ff.unit(lambda p, x: x @ p["w"] + p["b"])


@pytest.mark.parametrize("name", QUIET)
def test_what_is_right_is_not_told(name):
    given, mesh, axis = QUIET[name]
    trained(given, mesh, axis, step=over_rows)


def test_a_batch_that_differs_in_one_leaf_is_each_ranks_own():
    """Of a step that is given, beside the data, what its rank is to do with it."""

    def step(state, batch):
        return STEP(state, batch["x"] * batch["by"])

    trained(lambda m: {"x": X.clone(), "by": m.rank + 1.0}, step=step)


def test_a_later_call_and_an_evaluation_are_not_compared():
    def main():
        sharded = ff.shard(STEP, MESH, "data")
        loss = ff.shard(chain(), MESH, "data")
        state = ff.init_state(sharded, layers(), SGD, X)
        state, _ = sharded(state, ff.local_batch(X, MESH, "data"))
        loss(state.params, X.clone())
        return sharded(state, X.clone())[1].item()

    ff.spmd(main, MESH)()


def test_an_axis_that_is_none_of_the_mean_is_refused():
    with pytest.raises(ValueError, match="equal_batches='node': .* takes a mean"):
        ff.shard(STEP, GRID, "data", equal_batches="node")


@pytest.mark.processes
def test_processes_are_told_once(processes):
    out = processes(
        """
        import warnings
        import fsfunc as ff
        import tests.tracing.test_equal_batches as cases

        mesh = ff.make_mesh({"data": 2}, timeout=30)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            cases.trained(cases.along("data"), mesh)
            assert not seen, seen
            cases.trained(cases.whole, mesh)
            cases.trained(cases.whole, mesh, equal_batches="data")
        print(mesh.rank, [str(w.message)[:20] for w in seen])
        """,
        2,
    )
    assert "0 ['the ranks along 'da" in out.replace('"', "'") and "1 []" in out, out
