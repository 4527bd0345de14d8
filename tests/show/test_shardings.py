"""Which rank holds which elements, and a plan as tables: exact text, and sums."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc.comm.mesh import Mesh
from fsfunc.sharded.layout import Layout, Owned, Split, every_coordinate
from fsfunc.sharded.packed_layouts import pack_flat
from fsfunc.sharded.slices import take
from fsfunc.show import plan, sharding
from fsfunc.show.layouts import MAX_COLUMNS, MAX_ROWS, grid_of, part_in_words
from tests.models import chain, layers
from tests.show.planned import golden, small

F32 = torch.float32


@st.composite
def layouts(draw, max_dims=3):
    """Layouts of few elements: products of Owned, Split and Flat, uneven and empty."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=max_dims)))
    parts, names = [], iter(["pipe", "model", "expert", "data"])
    if draw(st.booleans()):
        size = draw(st.integers(1, 2))
        parts.append(Owned(next(names), size, draw(st.integers(0, size - 1))))
    for _ in range(draw(st.integers(0, 2 if shape else 0))):
        dim = draw(st.integers(0, len(shape) - 1))
        parts.append(Split(dim, next(names), draw(st.integers(1, 3))))
    if draw(st.booleans()):
        before, after = draw(st.integers(0, 5)), draw(st.integers(0, 5))
        packed = pack_flat(
            [(before,), shape, (after,)], F32, ["a", "w", "b"], [next(names)],
            draw(st.integers(1, 4)), "u", outer=[(), parts, ()],
        )  # fmt: skip
        return packed[1]
    return Layout(shape, F32, tuple(parts), "w")


def elements(layout, at):
    """What a rank holds, flattened row-major."""
    full = torch.arange(layout.numel).view(layout.shape)
    return take(full, layout, at).flatten().tolist()


def owners(layout):
    """For each element, flattened row-major, the key of those who hold it."""
    held = {}
    for at in every_coordinate(layout):
        for element in elements(layout, at):
            assert element not in held
            held[element] = layout.key(at)
    return held


@given(layouts())
def test_every_element_lies_in_the_cell_of_who_holds_it(layout):
    grid, held = grid_of(layout), owners(layout)
    assert len(held) == layout.numel
    cut = {p.dim for p in layout.parts if isinstance(p, Split)}
    if grid is None:
        assert layout.numel == 0 or len(cut) > 1 and 1 in cut and 2 in cut
        return
    columns = math.prod(layout.shape[grid.dims :])
    assert (grid.rows[0], grid.columns[0]) == (0, 0)
    assert grid.rows[-1] * grid.columns[-1] == layout.numel
    assert len(grid.rows) <= MAX_ROWS + 1 and len(grid.columns) <= MAX_COLUMNS + 1
    for element, key in held.items():
        assert grid.holders_at(*divmod(element, columns)) == key


@given(layouts(), st.integers(1, 3), st.integers(0, 200))
def test_a_rank_is_said_to_hold_what_it_holds(layout, replicas, pick):
    mesh = Mesh({"replica": replicas, **layout.sizes}, "abstract")
    rank = pick % mesh.size
    shown = sharding(layout, mesh, rank=rank)
    at = mesh.coordinates(rank)
    held = sum(key == layout.key(at) for key in owners(layout).values())
    last = shown.text().splitlines()[-1]
    assert last.startswith(f"rank {rank} holds ")
    assert f": {held} of {layout.numel} elements, {4 * held} B, as [" in last
    ranks = shown.holders(layout.key(at))
    assert rank in ranks and len(ranks) == replicas
    assert {layout.key(mesh.coordinates(r)) for r in ranks} == {layout.key(at)}


@given(layouts())
def test_words_index_the_elements(layout):
    full = torch.arange(layout.numel, dtype=torch.int64).view(layout.shape)
    for at in every_coordinate(layout):
        said = part_in_words(layout, at)
        block, _, span = said.partition(".flat")
        found = full
        if block not in ("all", "nothing", ""):
            found = eval(f"full{block}")
        if said == "nothing":
            found = full.new_empty(0)
        if span:
            found = eval(f"found.reshape(-1){span}")
        assert found.flatten().tolist() == elements(layout, at)


def test_a_grid_of_two_axes():
    parts = (Split(0, "data", 2), Split(1, "model", 2))
    mesh = Mesh({"data": 2, "model": 2}, "abstract")
    assert str(sharding(Layout((5, 3), F32, parts, "w"), mesh)) == golden("""
w f32[5, 3], split over data=2 along dim 0, split over model=2 along dim 1
a cell names the ranks that hold it

      0:2    2
    ┌─────┬─────┐
0:3 │  0  │  1  │
    ├─────┼─────┤
3:5 │  2  │  3  │
    └─────┴─────┘

rank  at              holds       elements  as
0     data=0 model=0  [0:3, 0:2]         6  [3, 2]
1     data=0 model=1  [0:3, 2:3]         3  [3, 1]
2     data=1 model=0  [3:5, 0:2]         4  [2, 2]
3     data=1 model=1  [3:5, 2:3]         2  [2, 1]""")


def test_what_is_too_fine_for_a_grid_is_a_table():
    flat = pack_flat([(4096, 512)], F32, ["w"], ["data"], 1024, "u")[0]
    shown = sharding(flat, rank=1023)
    assert shown.grid is None and len(shown.holder_coordinates) == 1024
    *_, more, _, last = shown.text().splitlines()
    assert more == "... and 1004 more"
    assert last.startswith("rank 1023 holds .flat[2095104:2097152]: 2048 of 2097152 el")
    inner = (Split(1, "a", 2), Split(2, "b", 2))
    assert sharding(Layout((2, 4, 4), F32, inner, "w")).grid is None


def state_of(mesh, zero=3):
    optimizer = ff.sharded_adam(1e-3)
    step = ff.shard(optimizer(ff.value_and_grad(chain())), mesh, "data", zero=zero)
    return ff.init_state(step, lambda: layers(3), optimizer, torch.zeros(2, 4))


def test_a_state_is_a_table():
    mesh = ff.make_mesh({"data": 4}, "simulated")
    shown = ff.spmd(lambda: str(sharding(state_of(mesh).params)), mesh)()
    assert shown[3] == golden("""
over data=4

path      whole      layout            rank 3 holds  bytes each
0-2/b ×3  f32[4]     flat over data=4  nothing              0 B
0-2/w ×3  f32[4, 4]  flat over data=4  .flat[11:16]        20 B

rank 3 holds 60 B in 6 leaves""")
    assert "0-2/b ×3  f32[4]     flat over data=4  all " in shown[0]
    state = ff.spmd(lambda: state_of(mesh), mesh)()[0]
    text = sharding(state, rank=3).text()
    assert "params/0-2/w ×3        f32[4, 4]" in text
    assert "step                   int        whole             all" in text
    assert text.splitlines()[-1] == "rank 3 holds 180 B in 20 leaves"


# A plan as tables


def test_a_plan_in_full():
    assert str(plan(small())) == golden("""
rank 0 of data=4 and 3 more that run the same program
16.1 kFLOP (forward 4.05 k, recompute 4.00 k, backward 8.10 k), 1.08 kB sent over data, at most 1.86 kB held

units
unit   calls  tensors  elements  layout            held here  forward FLOP  recompute FLOP  backward FLOP  derived, a call
block      2        2       256  flat over data=4      256 B        4.00 k          4.00 k         8.00 k             64 B
head                1         6  flat over data=4        8 B            50                            100

collectives
collective    over  phase     count   sends  largest  first
all_gather    data  forward       2   768 B    384 B  train.py:3
psum_scatter  data  backward      2   296 B    200 B  train.py:7
psum          data  loss          1  12.5 B   12.5 B  train.py:7

parameters
path                    each        layout              whole  held here
params/blocks/0-1/w ×2  f32[16, 8]  flat over data=4  1.02 kB      256 B
params/head             f32[6]      flat over data=4     24 B        8 B

state and batch
given      kind        tensors  elements    whole  held here
params     parameters        3       262  1.05 kB      264 B
opt_state  moments           3       262  1.05 kB      264 B
batch      buffers           1         8     32 B       32 B
total                                                  560 B

memory at the peak, in the backward of block, by aten.mm
kind           bytes  share
parameters     264 B   14 %
moments        264 B   14 %
activations  1.30 kB   70 %
buffers         32 B    2 %
total        1.86 kB

what is held then, largest first
kind         unit   taken by             phase     tensors  bytes  share
activations  block  aten.mm              backward        1  900 B   48 %
activations  block  aten.mm              forward         2  400 B   22 %
parameters          (given to the step)                  3  264 B   14 %
moments             (given to the step)                  3  264 B   14 %
buffers             (given to the step)                  1   32 B    2 %""")  # noqa: E501
