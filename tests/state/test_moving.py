"""Laws of moves: a tree that was laid out for one stack, placed for another.

It has the bits and layouts of the whole tree placed there, what ranks send is what they
need and have not, a plan says so before, and the next steps are those of one that was
begun there.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.slices import take
from tests.checks import same, simulated
from tests.covering import by_turns
from tests.state.moves import (
    STACKS,
    WHOLE,
    batch_of,
    begun,
    loss_fn,
    mesh_of,
    params_of,
    step_of,
)


def by_path(state):
    paths = tree.paths(state, is_leaf=is_sharded)
    return dict(zip(paths, tree.leaves(state, is_leaf=is_sharded), strict=True))


def elements(layout, coordinates):
    """The numbers of the elements of a whole leaf that a rank has."""
    numbers = torch.arange(layout.numel).view(layout.shape)
    return set(take(numbers, layout, coordinates).reshape(-1).tolist())


def has_gathered(leaf):
    return leaf.packed is not None and leaf.packed.is_cached(leaf.dtype)


def lacking(old, new, old_mesh, mesh, rank):
    """The bytes that a rank needs for its part and has not."""
    if not (is_sharded(old) and is_sharded(new)) or has_gathered(old):
        return 0
    needed = elements(new.layout, mesh.coordinates(rank))
    missing = needed - elements(old.layout, old_mesh.coordinates(rank))
    return len(missing) * new.local.element_size()


def check_move(start, end):
    old_mesh, mesh = mesh_of(start), mesh_of(end)

    def begin():
        state = begun(start, old_mesh)
        return state, ff.unshard(state)

    states, wholes = ff.spmd(begin, old_mesh)().unzip()
    rules = STACKS[end][2] or (STACKS[start][2] and WHOLE)
    options = {} if rules is None else {"layouts": rules}

    def move(state, whole):
        step, x = step_of(end, mesh), batch_of(end, mesh)
        expected = ff.place(step, whole, x, layouts=STACKS[end][2])
        placed = lambda t, x: ff.place(step, t, x, on=old_mesh, **options)  # noqa: E731
        plan = ff.plan(placed, state, x)
        with ff.ledger() as log:
            moved = placed(state, x)
        planned = plan.ranks[0].records
        facts = lambda rs: [(r.op, r.axis, r.bytes, r.dtype) for r in rs]  # noqa: E731
        assert facts(planned) == facts(log.of(mesh.rank))
        before, lacked = by_path(state), 0
        found, wanted = by_path(moved), by_path(expected)
        assert found.keys() == wanted.keys()
        for path, leaf in found.items():
            assert is_sharded(leaf) == is_sharded(wanted[path]), path
            if is_sharded(leaf):
                assert leaf.layout == wanted[path].layout, path
                assert torch.equal(leaf.local, wanted[path].local), path
            lacked += lacking(before[path], leaf, old_mesh, mesh, mesh.rank)
        same(ff.unshard(moved), whole)
        after, metrics = step(moved, x)
        same(ff.unshard(after), ff.unshard(step(expected, x)[0]))
        return lacked, log.bytes(rank=mesh.rank)

    lacked, sent = ff.spmd(move, mesh)(states, wholes).unzip()
    assert sum(lacked) == sum(sent), (start, end)
    return sum(sent)


PAIRS = by_turns(STACKS, list(STACKS), each=2)


@pytest.mark.parametrize("start, end", PAIRS)
def test_a_move_is_a_placement_and_sends_what_is_lacking(start, end):
    check_move(start, end)


def test_bytes_of_moves_known_in_closed_form():
    whole = 8 * (3 * (4 * 6 + 4 + 6 * 4))  # of the layers
    trees = 3  # parameters, and two moments of each
    assert check_move("zero=3", "zero=0") == 3 * trees * whole
    assert check_move("zero=0", "zero=3") == 0
    assert check_move("zero=3", "offloaded") == 0


# What is drawn: any two layouts of any leaf


@st.composite
def layouts(draw, shape, axes):
    """A layout of a tensor over some of the axes, and the mesh they are of."""
    left = draw(st.permutations(sorted(axes)))
    parts = []
    for axis in left[: draw(st.integers(0, len(left)))]:
        n = axes[axis]
        kinds = ["flat", "owned"] + ["split"] * bool(shape)
        kind = draw(st.sampled_from(kinds))
        if kind == "split":
            parts.append(ff.Split(draw(st.integers(0, len(shape) - 1)), axis, n))
        elif kind == "owned":
            parts.append(ff.Owned(axis, n, draw(st.integers(0, n - 1))))
        else:
            room = math.prod(shape) + draw(st.integers(0, 5))
            offset = draw(st.integers(0, room - math.prod(shape)))
            chunk = -(-room // n)
            parts.append(ff.Flat((axis,), n, "u", offset, chunk))
            break
    return ff.Layout(shape, torch.float32, tuple(parts), "w")


@given(st.data())
def test_any_two_layouts_of_any_leaf(data):
    from fsfunc.sharded.transfers import Side, Transfer

    shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=3)))
    axes = {"a": 2, "b": data.draw(st.integers(1, 3))}
    mesh = simulated(**axes)
    positions = tuple(mesh.coordinates(r) for r in range(mesh.size))
    old, new = (Side(data.draw(layouts(shape, axes)), positions) for _ in range(2))
    transfer = Transfer(old, new)
    numbers = torch.arange(math.prod(shape), dtype=torch.float32).view(shape) + 1
    before = [take(numbers, old.layout, at).contiguous() for at in positions]
    sent = [transfer.elements_sent(r, x) for r, x in enumerate(before)]
    assert [len(x) for x in sent] == [sum(row) for row in transfer.counts]
    for rank, at in enumerate(positions):
        part = torch.zeros(new.layout.local_shape(at))
        rows = [
            x.split(row)[rank]
            for x, row in zip(sent, map(list, transfer.counts), strict=True)
        ]
        transfer.write_own(rank, before[rank], part)
        transfer.write_received(rank, part, torch.cat(rows))
        assert torch.equal(part, take(numbers, new.layout, at))
        lacked = elements(new.layout, at) - elements(old.layout, at)
        assert sum(map(len, rows)) == len(lacked)


# Optimizers' states

OTHERS = lambda: ff.sharded_adam(0.01)  # noqa: E731
MATRICES = lambda kind: ff.partition(  # noqa: E731
    {"matrix": kind, "other": OTHERS()},
    lambda path, leaf: "matrix" if leaf.ndim == 2 else "other",
)
OPTIMIZERS = {
    "muon": lambda: MATRICES(ff.muon(0.1)),
    "shampoo": lambda: MATRICES(ff.shampoo(0.1, block=4)),
    "adafactor": lambda: ff.adafactor(0.1),
    "ema": lambda: ff.ema(ff.lion(0.01), 0.9),
    "schedule-free": lambda: ff.schedule_free(ff.sgd(0.1), 0.1),
    "loss scale": lambda: ff.loss_scale(ff.lamb(0.01)),
    "bfloat16 moments": lambda: ff.sharded_adam(0.01, moment_dtype=torch.bfloat16),
    "from torch": lambda: ff.from_torch(torch.optim.Adagrad, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("end", ["HSDP", "zero=0"])
def test_every_optimizer_goes_on_as_if_it_had_begun_there(name, end):
    optimizer, old_mesh, mesh = OPTIMIZERS[name], mesh_of("zero=3"), mesh_of(end)
    states = ff.spmd(lambda: begun("zero=3", old_mesh, optimizer), old_mesh)()
    begun_there = ff.spmd(lambda: begun(end, mesh, optimizer), mesh)()

    def move(state, there):
        step, x = step_of(end, mesh, optimizer), batch_of(end, mesh)
        moved = ff.place(step, state, x, on=old_mesh)
        layouts = lambda s: {  # noqa: E731
            p: x.layout.parts for p, x in by_path(s).items() if is_sharded(x)
        }
        assert layouts(moved) == layouts(there)
        after, _ = step(moved, x)
        expected, _ = step(there, x)
        ff.testing.assert_equal(ff.unshard(after), ff.unshard(expected), 1e-6)

    ff.spmd(move, mesh)(states, begun_there)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: ff.sharded_adam(0.01, moment_dtype=torch.uint8),
        lambda: ff.error_feedback(ff.sharded_adam(0.01)),
    ],
)
def test_what_belongs_to_buffers_is_refused_with_the_way_out(optimizer):
    mesh = simulated(4)
    wrapped = lambda zero: ff.shard(  # noqa: E731
        optimizer()(ff.value_and_grad(loss_fn)), mesh, "data", zero=zero
    )

    def main():
        x = batch_of("zero=3", mesh).float()
        init = lambda: tree.map(torch.Tensor.float, params_of())  # noqa: E731
        state = ff.init_state(wrapped(3), init, optimizer(), x)
        with pytest.raises(
            ValueError, match="begin its state anew|moments in 8 bits were made for"
        ):
            ff.place(wrapped(0), state, x)
        params = ff.place(ff.shard(loss_fn, mesh, "data", zero=0), state.params, x)
        same(ff.unshard(params), ff.unshard(state.params))

    ff.spmd(main, mesh)()
