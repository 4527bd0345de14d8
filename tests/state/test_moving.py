"""Laws of moves: a tree that was laid out for one stack, placed for another.

It has the bits and layouts of the whole tree placed there, what ranks send is what they
need and have not, a plan says so before, and the next steps are those of one that was
begun there.
"""

import hashlib
import json
import math
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.slices import take
from fsfunc.state import placing
from fsfunc.state.leaf_moves import run_moves
from tests.checks import same, simulated, unchanged
from tests.covering import by_turns
from tests.state.moves import (
    STACKS,
    WHOLE,
    batch_of,
    begun,
    layer,
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


# Memory, and what is given up


@pytest.mark.parametrize("start, end", [("zero=3", "HSDP"), ("HSDP", "merged")])
def test_a_donated_move_holds_one_buffer_twice_at_most(start, end, monkeypatch):
    """At its peak the larger state, a buffer of the other, and one leaf's messages."""
    peaks = {}

    def measured(moves, *args, **how):
        # Tensors without data, which say where everything is to lie, take no memory.
        parts = [m.old_part for m in moves.values()]
        with ff.testing.live_bytes(parts) as seen:
            parts.clear()
            moved = run_moves(moves, *args, **how)
        peaks[mesh.rank] = seen.peak_bytes
        return moved

    monkeypatch.setattr("fsfunc.state.moving.run_moves", measured)
    old_mesh, mesh = mesh_of(start), mesh_of(end)
    optimizer = lambda: ff.sharded_adam(0.01)  # noqa: E731

    def large():
        ones = torch.ones
        return [
            {"up": ones(4, 600), "bias": ones(4), "down": ones(600, 4)}
            for _ in range(12)
        ]

    @ff.unit
    def wide(p, x):
        return x + torch.tanh(x @ p["up"].T + p["bias"]) @ p["down"].T

    def loss(params, x):
        for p in params:
            x = wide(p, x)
        return x.square().mean()

    def step_on(name, mesh):
        return STACKS[name][1](optimizer()(ff.value_and_grad(loss)), mesh)

    x = torch.ones(1, 600)
    states = ff.spmd(
        lambda: ff.init_state(step_on(start, old_mesh), large, optimizer(), x), old_mesh
    )()

    def bytes_of(state):
        buffers = {
            id(leaf.packed): leaf.packed.flat
            for leaf in by_path(state).values()
            if is_sharded(leaf)
        }
        return [flat.nbytes for flat in buffers.values()]

    def move():
        state = states[mesh.rank]
        states[mesh.rank] = None
        before = bytes_of(state)
        moved = ff.place(step_on(end, mesh), state, x, on=old_mesh, donate=True)
        after = bytes_of(moved)
        largest = max(before + after)
        messages = 3 * 600 * 4 * 4  # a leaf sent, received, and put into one message
        state_bytes = max(sum(before), sum(after))
        assert peaks[mesh.rank] <= state_bytes + largest + messages
        with pytest.raises(RuntimeError, match="given to ff.place"):
            by_path(state)["params/0/up"].local  # noqa: B018
        with pytest.raises(RuntimeError, match="given to ff.place"):
            ff.place(step_on(end, mesh), state, x)
        return ff.unshard(moved)

    whole = ff.spmd(ff.unshard, old_mesh)(states)[0]
    for moved in ff.spmd(move, mesh)():
        same(moved, whole)


def test_without_donate_the_tree_stays_as_it_was():
    mesh = simulated(4)

    def main():
        state, x = begun("zero=3", mesh), batch_of("zero=0", mesh)
        with unchanged(state):
            ff.place(step_of("zero=0", mesh), state, x)

    ff.spmd(main, mesh)()


def test_evaluation_on_gathered_parameters_sends_nothing():
    """At zero=1 each rank has all of the parameters, once they were gathered."""
    mesh = simulated(4)

    def main():
        x = batch_of("zero=1", mesh)
        state = begun("zero=1", mesh)
        ff.shard(ff.value(loss_fn), mesh, "data", zero=1)(state.params, x)
        with ff.ledger() as log:
            params = ff.place(
                ff.shard(ff.value(loss_fn), mesh, "data", zero=0), state.params, x
            )
        assert log.of(mesh.rank) == []
        same(ff.unshard(params), ff.unshard(state.params))

    ff.spmd(main, mesh)()


def test_the_same_move_again_records_nothing(monkeypatch):
    """And takes numbers and values as they are then."""
    mesh = simulated(4)
    recorded = []
    record = placing._record

    def counted(*args, **how):
        recorded.append(1)
        return record(*args, **how)

    monkeypatch.setattr(placing, "_record", counted)

    def main():
        x, state = batch_of("zero=3", mesh), begun("zero=3", mesh)
        step, whole_step = step_of("zero=3", mesh), step_of("zero=0", mesh)
        ff.place(whole_step, state, x)
        count = len(recorded)
        state, _ = step(state, x)
        moved = ff.place(whole_step, state, x)
        assert len(recorded) == count
        same(ff.unshard(moved), ff.unshard(state))
        assert moved.step == 2
        # Rules are others: so it is another move.
        ff.place(whole_step, state, x, layouts={"params/gain": ()})
        assert len(recorded) > count or mesh.rank not in (0, 3)

    ff.spmd(main, mesh)()


@pytest.mark.parametrize("end", ["zero=0", "HSDP"])
def test_parameters_that_no_unit_takes_any_more_are_whole(end):
    """The next step leaves layers out: they and their moments lie alike."""
    old_mesh, mesh = mesh_of("zero=3"), mesh_of(end)
    states = ff.spmd(lambda: begun("zero=3", old_mesh), old_mesh)()
    wholes = ff.spmd(ff.unshard, old_mesh)(states)

    def first_layer(params, x):
        return (layer(params["layers"][0], x) * params["gain"]).square().mean()

    def move(state, whole):
        step, x = step_of(end, mesh, loss=first_layer), batch_of(end, mesh)
        expected = ff.place(step, whole, x)
        moved = ff.place(step, state, x, on=old_mesh)
        assert not is_sharded(by_path(moved)["params/layers/1/up"])
        for path, leaf in by_path(moved).items():
            same(leaf, by_path(expected)[path])
        same(ff.unshard(step(moved, x)[0]), ff.unshard(step(expected, x)[0]))

    ff.spmd(move, mesh)(states, wholes)


def uneven_moves(mesh, skewed=True):
    """Moves again and again; ranks have batches of other lengths at other times."""
    step = lambda zero: ff.shard(ff.value(loss_fn), mesh, "data", zero=zero)  # noqa: E731
    cut_step, whole_step = step(3), step(0)
    later = ff.shard(lambda *args: loss_fn(*args) * 2, mesh, "data", zero=1)
    x = lambda n: torch.ones(n, 6, dtype=torch.float64)  # noqa: E731
    cut = ff.place(cut_step, params_of(), x(1))
    ff.place(whole_step, cut, x(1))  # from here on rank 0 knows this length
    for n in (1 + mesh.rank, 5 - mesh.rank) if skewed else (1, 2):
        whole = ff.place(whole_step, cut, x(n))
    ff.place(later, cut, x(1))
    return sum(x.sum().item() for x in tree.leaves(ff.unshard(whole)))


def test_a_rank_that_knows_a_move_records_it_with_one_that_does_not():
    mesh = simulated(2)
    (found, same_there) = ff.spmd(lambda: uneven_moves(mesh), mesh)()
    assert found == same_there == ff.spmd(lambda: uneven_moves(mesh, False), mesh)()[0]


def test_splits_in_a_list_are_those_in_a_tuple():
    grid = mesh_of("split")
    rules = {p: [split] for p, split in STACKS["split"][2].items()}
    rules["params/gain"] = []

    def main():
        state, x = begun("HSDP", grid), batch_of("split", grid)
        step = step_of("split", grid)
        found = ff.place(step, state, x, layouts=rules)
        wanted = ff.place(
            step, state, x, layouts={p: tuple(r) for p, r in rules.items()}
        )
        for leaf, other in zip(
            by_path(found).values(), by_path(wanted).values(), strict=True
        ):
            same(leaf, other)
        assert by_path(found)["params/layers/0/up"].layout.splits
        # Also where no transform lays it out.
        same(
            ff.place(loss_fn, state.params, x, layouts={"**": []}),
            ff.unshard(state.params),
        )

    ff.spmd(main, grid)()


def test_a_function_may_be_any_callable():
    """One that has no hash, or of which there are no weak references."""

    class Unhashable:
        def __eq__(self, other):
            return self is other

        def __call__(self, params, x):
            return loss_fn(params, x)

    class Slots:
        __slots__ = ()
        __call__ = Unhashable.__call__

    mesh = simulated(2)

    def main():
        x = batch_of("zero=3", mesh)
        for f in (Unhashable(), Slots()):
            cut = ff.place(ff.shard(f, mesh, "data"), params_of(), x)
            same(ff.place(f, cut, x, layouts={"**": ()}), params_of())

    ff.spmd(main, mesh)()


def test_a_function_without_transforms_has_whole_what_it_names():
    mesh = simulated(4)

    def main():
        cut = begun("zero=3", mesh).params
        x = batch_of("zero=3", mesh)
        kept = ff.place(loss_fn, cut, x)  # nothing says how it is to lie
        assert by_path(kept)["layers/0/up"].layout == by_path(cut)["layers/0/up"].layout
        whole = ff.place(loss_fn, cut, x, layouts={"**": ()})
        same(whole, ff.unshard(cut))
        return loss_fn(whole, x)

    ff.spmd(main, mesh)()


def test_a_mesh_in_another_order_is_another_place():
    """Its axes have the same names and sizes, and a rank is elsewhere on them."""
    a, b = ff.make_mesh({"x": 2, "y": 2}), ff.make_mesh({"y": 2, "x": 2})
    f = lambda m: ff.shard(ff.unit(lambda w, x: (w * x).sum()), m, ("x", "y"))  # noqa: E731
    w, x = torch.arange(8.0), torch.ones(8)
    placed = ff.spmd(lambda: ff.place(f(a), w, x), a)()
    for call in (
        ff.unshard,
        lambda t: ff.place(f(b), t, x),
        lambda t: list(ff.whole_leaves(t)),
        lambda t: ff.save(Path("never"), t),
    ):
        with pytest.raises(ValueError, match=r"on=mesh|on its own mesh"):
            ff.spmd(call, b)(placed)
    moved = ff.spmd(lambda t: ff.place(f(b), t, x, on=a), b)(placed)
    same(ff.spmd(ff.unshard, b)(moved)[0], w)


# What is refused


def test_refusals_say_the_way_out():
    mesh, grid = mesh_of("zero=3"), mesh_of("split")
    states = ff.spmd(lambda: begun("zero=3", mesh), mesh)()
    split = ff.spmd(lambda: begun("split", grid), grid)()

    def refused(match, state, name, where, **how):
        def main(state):
            x = batch_of(name, where)
            with pytest.raises(ValueError, match=match):
                ff.place(step_of(name, where), state, x, **how)

        ff.spmd(main, where)(state)

    refused("on=mesh", states, "HSDP", grid)
    refused("ff.remesh moves a state", states, "HSDP", grid, on=simulated(3))
    refused("on no rank", states, "zero=0", mesh, record="real")
    with torch.inference_mode():
        refused("move it before, and enter", states, "zero=0", mesh)
    refused(
        'split over "model" of size 2, which it cannot', split, "zero=3", mesh, on=grid
    )
    averaged = ff.spmd(
        lambda s: s.replace(extra=ff.tree.map(torch.clone, s.params)), mesh
    )(states)
    refused(
        r"no unit of the function takes 'extra.*like=", averaged, "HSDP", grid, on=mesh
    )


def test_a_copy_of_parameters_lies_where_like_says():
    mesh, grid = mesh_of("zero=3"), mesh_of("HSDP")
    copied = lambda s: s.replace(extra=ff.tree.map(torch.clone, s.params))  # noqa: E731
    states = ff.spmd(lambda: copied(begun("zero=3", mesh)), mesh)()

    def main(state):
        step, x = step_of("HSDP", grid), batch_of("HSDP", grid)
        moved = ff.place(step, state, x, on=mesh, like={"extra": "params"})
        leaves = by_path(moved)
        for path in [
            p for p in leaves if p.startswith("extra") and is_sharded(leaves[p])
        ]:
            assert leaves[path].layout == leaves[path.replace("extra", "params")].layout
        ff.tree.map(torch.add, moved.extra, moved.params)
        return ff.unshard(moved.extra), ff.unshard(moved.params)

    for extra, params in ff.spmd(main, grid)(states):
        same(extra, params)


def test_ranks_that_have_other_layouts_raise_before_anything_is_sent():
    mesh = simulated(2)

    def main():
        zero = 3 if mesh.rank == 0 else 2
        step = lambda z: ff.shard(ff.value(loss_fn), mesh, "data", zero=z)  # noqa: E731
        x = torch.ones(2, 6, dtype=torch.float64)
        params = ff.place(step(3), params_of(), x)
        with ff.ledger() as log:
            ff.place(step(zero), params, x)
        assert not log.records

    with pytest.raises(ValueError, match="unlike steps"):
        ff.spmd(main, mesh)()


# Over processes


def main():
    """As a program: what each rank has after some moves, and what it sent."""
    torch.set_num_threads(1)
    meshes = {name: mesh_of(name, None) for name in CHAIN}
    first = meshes[CHAIN[0]]
    (line,) = ff.spmd(lambda: chain_of_moves(meshes), first)()
    uneven = ff.make_mesh({"data": 4}, None)
    (total,) = ff.spmd(lambda: uneven_moves(uneven), uneven)()
    os.write(1, f"{json.dumps([first.rank, total, *line])}\n".encode())
    torch.distributed.destroy_process_group()


CHAIN = ("zero=3", "HSDP", "pipeline", "zero=0", "merged")


def chain_of_moves(meshes):
    """The digests of a rank's parts after each move, and the bytes it sent."""
    old_mesh = meshes[CHAIN[0]]
    state, lines = begun(CHAIN[0], old_mesh), []
    for name in CHAIN[1:]:
        mesh = meshes[name]
        with ff.ledger() as log:
            state = ff.place(
                step_of(name, mesh),
                state,
                batch_of(name, mesh),
                on=old_mesh,
                donate=True,
            )
        sha = hashlib.sha256()
        for path, x in by_path(state).items():
            if is_sharded(x):
                sha.update(f"{path} {x.layout}".encode())
                sha.update(x.local.contiguous().numpy().tobytes())
        lines.append((sha.hexdigest(), float(log.bytes(rank=mesh.rank))))
        old_mesh = mesh
    return lines


@pytest.mark.processes
def test_processes_move_as_simulated_ranks_do(processes):
    printed = processes(Path(__file__), 4).splitlines()
    found = {rank: lines for rank, _, *lines in map(json.loads, printed)}
    assert len({json.loads(line)[1] for line in printed}) == 1
    meshes = {name: mesh_of(name) for name in CHAIN}
    simulated_ranks = ff.spmd(lambda: chain_of_moves(meshes), meshes[CHAIN[0]])()
    for rank, expected in enumerate(simulated_ranks):
        assert found[rank] == [list(line) for line in expected], rank


if __name__ == "__main__":
    main()
