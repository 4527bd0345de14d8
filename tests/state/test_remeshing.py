"""Laws of `ff.remesh`: the same run with more ranks or fewer."""

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from fsfunc.comm.comparison import RanksDiffer
from fsfunc.comm.launch import PerRank
from fsfunc.sharded.leaf import is_sharded
from tests.checks import close, same, simulated
from tests.state.moves import SPLIT, adam, loss_fn, params_of
from tests.state.test_moving import by_path, elements

ROWS = math.lcm(*range(2, 9)) // 10 * 2  # 168: of 2, 3, 4, 6, 7 and 8 ranks alike
X = torch.randn(
    ROWS, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(4)
)


def weighted_loss(params, x):
    """Exact for parts of unequal lengths."""
    return ff.Weighted(loss_fn(params, x) * x.numel(), x.numel())


def stepped(mesh, zero=3, optimizer=adam, **how):
    step = optimizer()(ff.value_and_grad(weighted_loss))
    return ff.shard(step, mesh, "data", zero=zero, **how)


def rows_of(mesh):
    axes = tuple(a for a in mesh.axes if a in ("node", "data"))
    return ff.local_batch(X, mesh, axes, uneven=True)


def begin(mesh, **how):
    """The first states of all ranks, as they lie."""
    return ff.spmd(
        lambda: ff.init_state(stepped(mesh, **how), params_of, adam(), rows_of(mesh)),
        mesh,
    )()


def train(states, mesh, count=1, **how):
    def run(state):
        step, losses = stepped(mesh, **how), []
        for _ in range(count):
            state, metrics = step(state, rows_of(mesh))
            losses.append(metrics["loss"].item())
        return state, losses

    after, losses = ff.spmd(run, mesh)(states).unzip()
    return after, losses[0]


def whole(states, mesh):
    return ff.spmd(ff.unshard, mesh)(states)[0]


def lacked(states, mesh, after, new_mesh):
    """The bytes that new ranks need and have not; rank i stays rank i."""
    total = 0
    for rank, state in enumerate(after):
        old = by_path(states[rank]) if rank < len(states) else {}
        for path, leaf in by_path(state).items():
            if not isinstance(leaf, torch.Tensor) and not is_sharded(leaf):
                continue
            if is_sharded(leaf):
                need = elements(leaf.layout, new_mesh.coordinates(rank))
                if path in old:
                    need -= elements(old[path].layout, mesh.coordinates(rank))
                total += len(need) * leaf.local.element_size()
            elif path not in old:
                total += leaf.nbytes
    return total


@pytest.mark.parametrize("zero", range(4))
def test_a_run_goes_on_with_4_then_3_then_8_then_2_ranks(zero):
    mesh = simulated(data=4)
    states = begin(mesh, zero=zero)
    alone_state = whole(states, mesh)
    alone = adam()(ff.value_and_grad(weighted_loss))
    for size in (4, 3, 8, 2):
        new_mesh = simulated(data=size)
        with ff.ledger() as log:
            after = ff.remesh(states, new_mesh, on=mesh)
        assert log.records or size == 4 or not zero
        sent = sum(log.bytes(rank=r) for r in range(max(size, mesh.size)))
        assert sent == lacked(states, mesh, after, new_mesh)
        same(whole(after, new_mesh), whole(states, mesh))
        begun_there = begin(new_mesh, zero=zero)
        for found, expected in zip(after, begun_there, strict=True):
            wanted = by_path(expected)
            for path, leaf in by_path(found).items():
                assert is_sharded(leaf) == is_sharded(wanted[path])
                assert not is_sharded(leaf) or leaf.layout == wanted[path].layout
        states, losses = train(after, new_mesh, 2, zero=zero)
        for loss in losses:
            alone_state, metrics = alone(alone_state, X)
            assert abs(loss - metrics["loss"].item()) <= 1e-9
        mesh = new_mesh
    close(whole(states, mesh), alone_state, 1e-9)


def test_twenty_random_changes_and_kills_equal_an_undisturbed_run():
    chance = random.Random(5)
    mesh = simulated(node=2, data=2)
    how = {"replicate": "node"}
    states = begin(mesh, **how)
    alone_state = whole(states, mesh)
    alone = adam()(ff.value_and_grad(weighted_loss))
    kills = 0
    for _ in range(20):
        nodes, size = chance.choice(
            [(1, 2), (1, 3), (1, 7), (2, 1), (2, 2), (2, 3), (2, 4)]
        )
        new_mesh, left = simulated(node=nodes, data=size), list(states)
        if mesh.axes["node"] == 2:  # each part lies on two ranks: one of them dies
            left[chance.randrange(mesh.size)] = None
            kills += 1
        states = ff.remesh(left, new_mesh, on=mesh)
        mesh = new_mesh
        states, (loss,) = train(states, mesh, **how)
        alone_state, metrics = alone(alone_state, X)
        assert abs(loss - metrics["loss"].item()) <= 1e-9
    assert kills >= 5
    close(whole(states, mesh), alone_state, 1e-9)


def test_an_exact_run_proves_what_moves():
    """In a finite field: a step, other ranks, a step, another zero and mesh, a step."""
    four, three, grid = simulated(data=4), simulated(data=3), simulated(node=1, data=3)
    alone = adam()(ff.value_and_grad(loss_fn))
    given_params = params_of()
    with ff.testing.exact():
        params, x = ff.testing.residues((given_params, X[:12]))
        expected = ff.TrainState(params, adam().init(params))
        for _ in range(3):
            expected, _ = alone(expected, x)

        def step(mesh, zero, axes="data"):
            return ff.shard(alone, mesh, axes, zero=zero)

        def begin():
            state = ff.init_state(step(four, 3), params, adam(), rows(four))
            return step(four, 3)(state, rows(four))[0]

        def go_on(state):
            state, _ = step(three, 3)(state, rows(three))
            other = step(grid, 1, ("node", "data"))
            state = ff.place(other, state, rows(grid), on=three, donate=True)
            return other(state, rows(grid))[0]

        rows = lambda mesh: ff.local_batch(x, mesh, tuple(mesh.axes))  # noqa: E731
        states = ff.remesh(ff.spmd(begin, four)(), three, on=four)
        same(whole(ff.spmd(go_on, three)(states), grid), expected)


def test_one_that_replaces_a_rank_is_sent_its_parts_and_nobody_else_anything():
    mesh = simulated(node=2, data=3)
    states = begin(mesh, replicate="node")
    left = PerRank(states)
    left[1] = None
    with ff.ledger() as log:
        after = ff.remesh(left, mesh, on=mesh)
    parts = [x.local.nbytes for x in by_path(states[1]).values() if is_sharded(x)]
    # Leaves of no unit are whole on each rank.
    plain = [x.nbytes for x in by_path(states[1]).values() if torch.is_tensor(x)]
    sent = {r: log.bytes(rank=r) for r in range(6)}
    assert sum(sent.values()) == sum(parts) + sum(plain)
    for found, expected in zip(after, states, strict=True):
        same(found, expected)


def test_what_was_gathered_is_sent_to_nobody_who_has_it():
    """And a rank that is gone took nothing along: the others have all of it."""
    mesh, new_mesh = simulated(4), simulated(2)

    def begin():
        loss = ff.shard(ff.value(weighted_loss), mesh, "data", zero=1)
        params = ff.place(loss, params_of(), rows_of(mesh))
        loss(params, rows_of(mesh))
        return params

    states = PerRank(ff.spmd(begin, mesh)())
    expected = whole(states, mesh)
    states[3] = None
    with ff.ledger() as log:
        after = ff.remesh(states, new_mesh, on=mesh)
    assert not log.records
    same(whole(after, new_mesh), expected)


def test_two_models_whose_buffers_bear_one_name():
    """They are told apart by their leaves; the larger one says how long a buffer is."""
    mesh, new_mesh = simulated(2), simulated(5)
    unit = ff.unit(lambda w, x: x @ w)

    def f(models, x):
        return sum(unit(m["w"], x[:, : m["w"].shape[0]]).sum() for m in models)

    models = [{"w": torch.randn(n, n)} for n in (4, 3, 5)]
    placed = lambda m: ff.place(ff.shard(f, m, "data"), models, torch.ones(5, 5))  # noqa: E731
    after = ff.remesh(ff.spmd(lambda: placed(mesh), mesh)(), new_mesh, on=mesh)
    for found, expected in zip(
        after, ff.spmd(lambda: placed(new_mesh), new_mesh)(), strict=True
    ):
        for path, leaf in by_path(found).items():
            assert leaf.layout == by_path(expected)[path].layout
            assert torch.equal(leaf.local, by_path(expected)[path].local)


@given(st.data())
def test_any_sizes_of_axes(data):
    sizes = st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (1, 4), (2, 3)])
    zero = data.draw(st.integers(0, 3))
    both = data.draw(st.booleans())
    axis = ("node", "data") if both else "data"
    replicate = {} if both else {"replicate": "node"}

    def made(nodes, n):
        mesh = simulated(node=nodes, data=n)
        step = ff.shard(
            adam()(ff.value_and_grad(weighted_loss)), mesh, axis, zero=zero, **replicate
        )
        return mesh, step

    mesh, step = made(*data.draw(sizes))
    states = ff.spmd(
        lambda: ff.init_state(step, params_of, adam(), rows_of(mesh)), mesh
    )()
    new_mesh, new_step = made(*data.draw(sizes))
    after = ff.remesh(states, new_mesh, on=mesh)
    same(whole(after, new_mesh), whole(states, mesh))
    again = ff.remesh(after, mesh, on=new_mesh)
    for found, expected in zip(again, states, strict=True):
        same(found, expected)
    ff.spmd(lambda s: new_step(s, rows_of(new_mesh)), new_mesh)(after)


def test_blocks_of_a_split_grow():
    def made(n):
        mesh = simulated(data=2, model=n)
        step = ff.shard(adam()(ff.value_and_grad(loss_fn)), mesh, "data")
        return mesh, step

    rules = {p.removeprefix("params/"): rule for p, rule in SPLIT.items()}
    (mesh, step), (new_mesh, new_step) = made(2), made(4)
    x = X[:16]
    states = ff.spmd(
        lambda: ff.init_state(
            step, params_of, adam(), ff.local_batch(x, mesh, "data"), layouts=rules
        ),
        mesh,
    )()
    after = ff.remesh(states, new_mesh, on=mesh)
    same(whole(after, new_mesh), whole(states, mesh))
    one = lambda f, m: lambda s: ff.unshard(f(s, ff.local_batch(x, m, "data"))[0])  # noqa: E731
    close(
        ff.spmd(one(new_step, new_mesh), new_mesh)(after)[0],
        ff.spmd(one(step, mesh), mesh)(states)[0],
        1e-9,
    )
    with pytest.raises(ValueError, match="cannot be split over 3 ranks"):
        ff.remesh(states, simulated(data=2, model=3), on=mesh)


# What is refused


def test_lost_parts_name_the_last_checkpoint():
    mesh = simulated(data=4)
    states = begin(mesh)
    states[2] = None
    with pytest.raises(
        ValueError, match=r"were on rank 2 alone.*replicate.*run/step-7"
    ):
        ff.remesh(states, simulated(data=3), on=mesh, checkpoint="run/step-7")
    with pytest.raises(ValueError, match="all 4 ranks.*are gone"):
        ff.remesh(PerRank([None] * 4), simulated(data=3), on=mesh)


def test_ranks_at_unlike_steps_are_refused():
    mesh = simulated(data=2)
    states = begin(mesh)
    later, _ = train(states, mesh)
    with pytest.raises(RanksDiffer, match="step"):
        ff.remesh(PerRank([states[0], later[1]]), simulated(data=3), on=mesh)


def test_other_refusals_say_the_way_out():
    mesh = simulated(data=2)
    states = begin(mesh)
    with pytest.raises(ValueError, match="on= is the mesh"):
        ff.remesh(states, simulated(data=3), on=simulated(other=2))
    with pytest.raises(ValueError, match='lies along "data", an axis'):
        ff.remesh(states, simulated(other=2), on=mesh)
    with pytest.raises(ValueError, match="takes the list of their states"):
        ff.remesh(states[0], simulated(data=3), on=mesh)
    with pytest.raises(ValueError, match="inside spmd"):
        ff.spmd(lambda s: ff.remesh(s, simulated(data=3), on=mesh), mesh)(states)
    eight_bits = lambda: ff.sharded_adam(0.01, moment_dtype=torch.uint8)  # noqa: E731
    step = stepped(mesh, optimizer=eight_bits)
    floats = lambda: tree.map(torch.Tensor.float, params_of())  # noqa: E731
    coded = ff.spmd(
        lambda: ff.init_state(step, floats, eight_bits(), rows_of(mesh).float()), mesh
    )()
    with pytest.raises(ValueError, match="codes in 8 bits.*begin the optimizer"):
        ff.remesh(coded, simulated(data=3), on=mesh)
    grid = simulated(pipe=2, data=1)
    piped = ff.pipeline(
        adam()(ff.value_and_grad(loss_fn)), grid, "pipe", n_microbatches=2
    )
    in_stages = ff.spmd(lambda: ff.init_state(piped, params_of, adam(), X), grid)()
    with pytest.raises(ValueError, match='owners along "pipe", which would become 1'):
        ff.remesh(in_stages, simulated(pipe=1, data=2), on=grid)
    more = ff.remesh(in_stages, simulated(pipe=2, data=2), on=grid)
    same(whole(more, simulated(pipe=2, data=2)), whole(in_stages, grid))
