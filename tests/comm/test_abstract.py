"""Abstract meshes: one rank runs for each distinct program, and nothing is computed."""

import pytest
import torch

import fsfunc as ff
from fsfunc import _torch, tree
from fsfunc.comm.launch import PerRank
from fsfunc.comm.mesh import here
from tests.models import chain, layers

GRID = ff.make_mesh({"a": 2, "b": 3, "c": 2}, "abstract")


def counted(fn):
    ran = []

    def main(*args):
        ran.append(here().rank)
        return fn(*args)

    return main, ran


@pytest.mark.parametrize(
    "ask, ranks, asked",
    [
        (lambda: 0, (0,), ()),
        (lambda: ff.axis_size("b"), (0,), ()),
        (lambda: ff.axis_index("b"), (0, 2, 4), ("b",)),
        (lambda: ff.axis_index(("c", "a")), (0, 1, 6, 7), ("a", "c")),
        (lambda: GRID.coordinate("a"), (0, 6), ("a",)),
        (lambda: GRID.coordinates(), tuple(range(12)), ("a", "b", "c")),
        (lambda: GRID.rank, tuple(range(12)), ("a", "b", "c")),
        (lambda: GRID.coordinate("a", rank=7), (0,), ()),
        (lambda: ff.ppermute(torch.ones(2), "b", [(0, 1), (1, 2), (2, 0)]), (0,), ()),
        # Some send, and some do not.
        (lambda: ff.ppermute(torch.ones(2), "b", [(0, 1)]), (0, 2, 4), ("b",)),
    ],
)
def test_ranks_run_that_ask_for_what_tells_them_apart(ask, ranks, asked):
    main, ran = counted(ask)
    found = ff.spmd(main, GRID)()
    assert isinstance(found, PerRank)
    assert (found.ranks, found.asked) == (ranks, asked)
    assert sorted(ran) == list(ranks) and len(found) == len(ranks)


def test_what_one_program_asks_makes_others():
    """Asked along the second axis only where the first is 1."""

    def branching():
        if ff.axis_index("a") == 1:
            return "b", ff.axis_index("b")
        return "a", 0

    main, ran = counted(branching)
    found = ff.spmd(main, GRID)()
    assert found.asked == ("a", "b") and found.ranks == (0, 2, 4, 6, 8, 10)
    assert sorted(ran) == [0, 2, 4, 6, 8, 10]
    mesh = ff.make_mesh(GRID.axes, "simulated")
    for main in branching, lambda: (ff.axis_index("c"), ff.axis_index(("b", "c"))):
        real, found = ff.spmd(main, mesh)(), ff.spmd(main, GRID)()
        assert [found.of(rank, GRID) for rank in range(12)] == list(real)


def test_collectives_and_batches_ask_nothing():
    def main(x):
        x = ff.local_batch(x, GRID, ("a", "b"))
        x = ff.psum(ff.all_gather(x, "a"), "b")
        return ff.psum_scatter(ff.pmax(ff.pbroadcast(x, "c", source=1), "c"), "c")

    found = ff.spmd(main, GRID)(torch.zeros(12, 5))
    assert found.ranks == (0,) and found[0].shape == (2, 5)
    assert isinstance(found[0], _torch.FakeTensor)
    vast = ff.make_mesh({"data": 10**6, "pipe": 10**3}, "abstract")
    assert ff.spmd(lambda: ff.psum(torch.ones(2), "data"), vast)().ranks == (0,)


def test_uneven_batches_are_distinct_programs():
    main = lambda x: ff.local_batch(x, GRID, "b", uneven=True)  # noqa: E731
    found = ff.spmd(main, GRID)(torch.zeros(7, 5))
    assert found.asked == ("b",)
    assert [x.shape[0] for x in found] == [3, 2, 2]
    assert ff.spmd(main, GRID)(torch.zeros(6, 5)).asked == ()


def test_a_sharded_step_is_one_program_and_a_pipeline_is_one_per_stage():
    mesh = ff.make_mesh({"data": 256, "pipe": 3}, "abstract")
    optimizer = ff.sgd(0.1)
    step = optimizer(ff.value_and_grad(chain()))
    params, x = layers(3), torch.ones(4, 4)
    shard = ff.shard(step, mesh, "data")
    both = ff.shard(ff.pipeline(step, mesh, "pipe", n_microbatches=2), mesh, "data")
    for transformed, ranks, asked in ((shard, (0,), ()), (both, (0, 1, 2), ("pipe",))):
        init = lambda fn=transformed: ff.init_state(fn, params, optimizer, x)  # noqa: E731
        state = ff.spmd(init, mesh)()
        assert (state.ranks, state.asked) == (ranks, asked)
        state, metrics = ff.spmd(transformed, mesh)(state, x).unzip()
        assert (state.ranks, state.asked) == (ranks, asked)
        assert (metrics.ranks, metrics.asked) == (ranks, asked)
        assert {m["loss"].shape for m in metrics} == {torch.Size([])}
        assert ff.spmd(transformed, mesh)(state, x).ranks == ranks
        local = tree.leaves(state[0].params, is_leaf=ff.is_sharded)[0].local
        assert isinstance(local, _torch.FakeTensor) and local.numel() <= 1


def test_results_of_another_mesh_are_refused():
    asks = lambda: ff.axis_index("b")  # noqa: E731
    found, cut = ff.spmd(asks, GRID)(), ff.spmd(asks, GRID)()
    cut.pop()
    small = ff.make_mesh({"a": 2, "b": 1, "c": 1}, "abstract")
    simulated = ff.make_mesh(GRID.axes, "simulated")
    for value, mesh, said in (
        (found, small, "cannot go to .*'abstract'"),
        (found, simulated, "3 ranks' values cannot go to"),
        (ff.spmd(asks, simulated)(), GRID, "cannot go to"),
        (cut, GRID, "a list of 2 ranks' values"),
    ):
        with pytest.raises(ValueError, match=said):
            ff.spmd(lambda i: i, mesh)(value)


def test_too_many_programs():
    mesh = ff.make_mesh({"a": 1024, "b": 4}, "abstract")
    ran = []

    def main():
        ran.append(1)
        return ff.axis_index("a")

    match = r"\['a'\].* 1024 ranks .* at most 512.*local_batch"
    with pytest.raises(ValueError, match=match):
        ff.spmd(main, mesh)()
    assert len(ran) == 1  # found out before they run
    most = ff.make_mesh({"a": 512}, "abstract")
    assert len(ff.spmd(lambda: ff.axis_index("a"), most)()) == 512


def test_nothing_is_computed_and_arguments_stay():
    x = torch.zeros(3)

    def main(x, y):
        x.add_(1)
        if y["n"] != 4:
            raise ValueError("mine")
        return x, y, torch.ones(3) * 2

    found = ff.spmd(main, GRID)(x, {"n": 4})
    assert torch.equal(x, torch.zeros(3))
    assert isinstance(found[0][0], _torch.FakeTensor) and found[0][1] == {"n": 4}
    assert isinstance(found[0][2], _torch.FakeTensor)
    with pytest.raises(ValueError, match="mine"):  # an error is that of the program
        ff.spmd(main, GRID)(x, {"n": 5})
    assert not _torch.fake_active()
