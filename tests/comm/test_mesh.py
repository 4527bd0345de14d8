"""Where ranks lie, who is asking, and what each is handed."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc.comm.launch import PerRank
from fsfunc.comm.mesh import Mesh, NoMesh, here
from tests.checks import all_refused, simulated

SIZES = st.dictionaries(st.sampled_from("abc"), st.integers(1, 4), min_size=1)


@given(sizes=SIZES, data=st.data())
def test_the_ranks_are_counted_row_by_row(sizes, data):
    """And members differ only along the axis, and come in its order."""
    mesh = Mesh(sizes, "simulated")
    everywhere = list(itertools.product(*[range(n) for n in sizes.values()]))
    assert mesh.size == len(everywhere)
    names = data.draw(st.permutations(list(sizes)))
    axis = tuple(names[: data.draw(st.integers(1, len(names)))])
    for rank, place in enumerate(everywhere):
        coordinates = dict(zip(sizes, place, strict=True))
        assert mesh.coordinates(rank) == coordinates
        assert mesh.rank_at(coordinates) == rank
        members = mesh.members(axis, rank)
        assert len(members) == mesh.axis_size(axis)
        assert members[mesh.coordinate(axis, rank)] == rank
        for i, other in enumerate(members):
            assert mesh.coordinate(axis, other) == i
            there = mesh.coordinates(other)
            assert all(there[a] == coordinates[a] for a in sizes if a not in axis)


PAIR = simulated(2)


def cut(batch):
    return lambda: ff.spmd(lambda: ff.local_batch(batch, PAIR, "data"), PAIR)()


def made(*args):
    return lambda: ff.make_mesh(*args)


REFUSED = {
    'axis "data" needs a size of at least 1: 0': made({"data": 0}, "simulated"),
    'axis "data" needs a size of at least 1: 2.0': made({"data": 2.0}, "simulated"),
    "an axis needs a name": made({"": 2}, "simulated"),
    "an axis needs a name, got 3": made({3: 2}, "simulated"),
    "unknown backend 'gpu'.*simulated": made({"data": 2}, "gpu"),
    'unknown axis "dota".*data': lambda: PAIR.axis_size("dota"),
    "named once": lambda: PAIR.members(("data", "data"), 0),
    "at least one": lambda: PAIR.members((), 0),
    r"'x' of shape \(5, 2\).*size 2 along dim 0.*uneven": cut({"x": torch.ones(5, 2)}),
    "differ in dim 0.*'x': 2, 'y': 4": cut({"x": torch.ones(2), "y": torch.ones(4)}),
    "'x' is a scalar": cut({"x": torch.ones(())}),
}
NOBODY_ASKS = {
    "no mesh in sight": lambda: ff.psum(torch.ones(1), "data"),
    "inside spmd": lambda: PAIR.rank,
    "run.* inside spmd": lambda: ff.local_batch(torch.ones(2), PAIR, "data"),
}


test_bad_axes_names_and_batches_are_refused = all_refused(
    {says: (call, ValueError, says) for says, call in REFUSED.items()}
    | {says: (call, NoMesh, says) for says, call in NOBODY_ASKS.items()}
)


def test_processes_need_a_launcher(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert ff.make_mesh({"data": 2}).backend == "simulated"
    with pytest.raises(RuntimeError, match='torchrun.*backend="simulated"'):
        ff.make_mesh({"data": 2}, "processes")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    said = "2 ranks, but there are 3 processes.*per-node 2"
    with pytest.raises(ValueError, match=said):
        ff.make_mesh({"data": 2})


def test_another_mesh_over_the_same_ranks():
    """A transform may name its own mesh: who asks keeps the rank."""
    line, square = (ff.make_mesh(s, "simulated") for s in ({"x": 4}, {"a": 2, "b": 2}))
    assert ff.spmd(lambda: square.coordinate("b"), line)() == [0, 1, 0, 1]
    pair = ff.make_mesh({"x": 2}, "simulated")
    with pytest.raises(ValueError, match="2 ranks, but 4 are running"):
        ff.spmd(lambda: here(pair), line)()


@pytest.mark.parametrize("backend", ["simulated", "vmap"])
def test_results_go_back_in(backend):
    mesh = ff.make_mesh({"data": 3}, backend)
    index = torch.arange(3)
    first = ff.spmd(lambda x: x * 2 + ff.axis_index("data"), mesh)(index.sum())
    second = ff.spmd(lambda x, y: x + y, mesh)(first, torch.tensor(1))
    assert [int(x) for x in second] == [7, 8, 9]
    assert isinstance(second, list)
    assert ff.spmd(lambda x: x, mesh)([1, 2]) == [[1, 2]] * 3  # a list is one value
    for wrong in (first[:2], first + first):
        with pytest.raises(ValueError, match=r"a list of \d ranks' values.*has 3"):
            ff.spmd(lambda x: x, mesh)(PerRank(wrong))
    if backend == "vmap":
        out = ff.spmd(lambda x: {"x": x, "n": ff.axis_size("data")}, mesh)(index[1])
        assert [(o["x"].item(), o["n"]) for o in out] == [(1, 3)] * 3
        with pytest.raises(RuntimeError, match="random"):
            ff.spmd(lambda: torch.rand(2), mesh)()


@pytest.mark.parametrize("backend", ["simulated", "vmap"])
@given(sizes=SIZES, data=st.data())
def test_the_parts_make_the_batch(backend, sizes, data):
    axis = tuple(data.draw(st.permutations(list(sizes))))
    mesh = ff.make_mesh(sizes, backend)
    uneven = backend == "simulated"
    rows = data.draw(st.integers(0, 9)) * (1 if uneven else mesh.size)
    batch = {"x": torch.arange(rows), "y": (torch.ones(rows, 2), "name", None)}
    parts = ff.spmd(lambda: ff.local_batch(batch, mesh, axis, uneven=uneven), mesh)()
    in_order = [parts[r] for r in mesh.members(axis, 0)]
    assert torch.cat([p["x"] for p in in_order]).tolist() == list(range(rows))
    assert {len(p["x"]) for p in parts} <= {rows // mesh.size, rows // mesh.size + 1}
    assert all(p["y"][1] == "name" and p["y"][2] is None for p in parts)


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ([{"x": 1.0}, {"y": 1.0}], "rank 1 is given another structure"),
        ([1.0, 5.0], "rank 1 is given 5.0, not 1.0"),
        ([torch.zeros(()), 0.0], "rank 1 is given 0.0, not "),
        ([{}, []], "rank 1 is given another structure"),
    ],
)
def test_ranks_of_a_vmap_mesh_that_differ_in_what_is_no_tensor_are_refused(
    values, fault
):
    ranks = PerRank(values)
    with pytest.raises(ValueError, match=fault):
        ff.spmd(lambda x: x, ff.make_mesh({"data": 2}, "vmap"))(ranks)
