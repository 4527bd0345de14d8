"""Optimizers over shards: equal to the whole tree, and spending what they say."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsfunc import tree
from fsfunc.comm.launch import make_mesh, spmd
from fsfunc.comm.ledgers import ledger
from fsfunc.comm.mesh import here
from fsfunc.optim import (
    chain,
    clip_by_global_norm,
    global_norm,
    masked,
    partition,
    sgd,
    sharded_adam,
    tree_sum,
)
from fsfunc.sharded.layout import Layout, pack_flat
from fsfunc.sharded.leaf import FlatShard, Sharded, is_sharded
from fsfunc.sharded.packing import split_buffers
from fsfunc.sharded.placements import Owned, Split
from fsfunc.sharded.slices import assemble, take
from tests.optim.trees import (
    SEEDS,
    assert_bits,
    assert_near,
    copies,
    donated,
    floating,
    like,
    trained,
    trained_by_update,
)

MESHES = st.sampled_from(
    [{"data": n, "model": 1} for n in (1, 2, 3, 5, 8)]
    + [{"data": 2, "model": 3}, {"data": 1, "model": 4}]
)


def whole(seed):
    """A model of two units, a split leaf, an owned one and a replicated one."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    return {
        "first": {"w": draw(3, 5), "b": draw(5), "scale": draw(), "none": draw(0, 2)},
        "second": [draw(4, 4), draw(2)],
        "split": draw(7, 2),
        "owned": draw(3),
        "norm": draw(6),
        "steps": torch.tensor(3),
    }


def layouts(values, axes):
    """By path, how each leaf lies; one flat buffer over one axis, one over two."""
    paths, leaves, _ = tree.flatten_with_paths(values)
    shapes = {p: tuple(x.shape) for p, x in zip(paths, leaves, strict=True)}
    found = {}
    for unit, over in (("first", ["data"]), ("second", ["data", "model"])):
        names = [p for p in paths if p.startswith(unit)]
        packed = pack_flat(
            [shapes[p] for p in names],
            torch.float32,
            names,
            over,
            [axes[a] for a in over],
            unit,
        )
        found.update(zip(names, packed, strict=True))
    split, owned = Split(0, "model", axes["model"]), Owned("data", axes["data"], 0)
    found["split"] = Layout(shapes["split"], torch.float32, (split,), "split")
    found["owned"] = Layout(shapes["owned"], torch.float32, (owned,), "owned")
    return found


def place(values, axes):
    """This rank's part of ``values``; the leaves of a unit share a shard."""
    at = here().mesh.coordinates()
    plan, shards = layouts(values, axes), {}
    for layout in plan.values():
        if layout.flat:
            shards.setdefault(layout.flat.buffer, []).append(layout)
    made = {}
    for members in shards.values():
        place_of = members[0].flat
        own = {axis: at[axis] for axis in place_of.axes}
        shard = FlatShard(tuple(members), torch.zeros(place_of.chunk), own)
        made.update({leaf.name: leaf for leaf in shard.leaves()})

    def part(path, x):
        if path not in plan:
            return x.clone()
        local = take(x, plan[path], at)
        if path not in made:
            return Sharded(local.clone(), plan[path])
        made[path].local.copy_(local)
        return made[path]

    names = iter(tree.paths(values))
    leaves, treedef = tree.flatten(values)
    return tree.unflatten(treedef, [part(next(names), x) for x in leaves])


def unshard(by_rank, mesh):
    """The whole tree of which each rank gave its part."""

    def join(*parts):
        if not is_sharded(parts[0]):
            return parts[0]
        places = [mesh.coordinates(rank) for rank in range(mesh.size)]
        held = list(zip(places, [x.local for x in parts], strict=True))
        return assemble(held, parts[0].layout)

    return tree.map(join, *by_rank, is_leaf=is_sharded)


def matrices(path, leaf):
    return leaf.ndim > 1  # of a flat shard the local one has one dim


def partitioned():
    return partition(
        {"matrix": sharded_adam(0.1), "other": sgd(0.1, momentum=0.9)},
        lambda path, leaf: "matrix" if leaf.ndim > 1 else "other",
    )


OPTIMIZERS = {
    "adam": lambda: sharded_adam(0.1, weight_decay=0.3),
    "adam, decay cuts the buffers": lambda: sharded_adam(
        0.1, weight_decay=0.3, mask=matrices
    ),
    "clipped adam": lambda: chain(
        clip_by_global_norm(1.0), sharded_adam(0.1, mask=matrices)
    ),
    "sgd": lambda: sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "partition": partitioned,
    "masked": lambda: masked(
        chain(clip_by_global_norm(1.0), sharded_adam(0.1)), matrices
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@given(axes=MESHES, seed=SEEDS)
def test_sharded_is_whole(name, axes, seed):
    optimizer = OPTIMIZERS[name]()
    params = whole(seed)
    grads = [like(params, seed + k, scale=3.0) for k in range(3)]
    expected = trained(optimizer, params, grads)
    mesh = make_mesh(axes, "simulated")

    def run(by):
        mine = place(params, axes)
        return by(optimizer, mine, [place(g, axes) for g in grads])

    def donating(*args):
        with donated():
            return trained(*args)

    results = [spmd(run, mesh)(by) for by in (trained, donating, trained_by_update)]
    for by_rank in results:
        assert_near(floating(expected), floating(unshard(by_rank, mesh)))
    for pure, given_away in zip(results[0], results[1], strict=True):
        assert_bits(floating(pure), floating(given_away))


@given(axes=MESHES, seed=SEEDS, p=st.sampled_from([1.0, 2.0, 3.0, math.inf]))
def test_norms_and_sums_count_each_element_once(axes, seed, p):
    values = whole(seed)
    mesh = make_mesh(axes, "simulated")

    def run():
        mine = place(values, axes)
        return global_norm(mine, p), tree_sum(mine)

    for norm, total in spmd(run, mesh)():
        torch.testing.assert_close(norm, global_norm(values, p), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(total, tree_sum(values), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("measure", "op"),
    [
        (global_norm, "psum"),
        (tree_sum, "psum"),
        (lambda values: global_norm(values, math.inf), "pmax"),
        (lambda values: clip_by_global_norm(1.0).update(values, ()), "psum"),
    ],
)
def test_one_number_is_sent_for_each_set_of_axes(measure, op):
    axes = {"data": 2, "model": 3}
    mesh = make_mesh(axes, "simulated")
    with ledger() as log:
        spmd(lambda: measure(place(whole(0), axes)), mesh)()
    for rank in range(mesh.size):
        assert len(log.of(rank)) == 3
        for over, n in (("data", 2), ("model", 3), (("data", "model"), 6)):
            assert log.count(op, over, rank) == 1
            assert log.bytes(over, rank=rank) == pytest.approx(2 * (n - 1) / n * 4)


@pytest.mark.parametrize("name", ["adam", "sgd", "adam, decay cuts the buffers"])
def test_an_elementwise_optimizer_sends_nothing(name):
    axes = {"data": 2, "model": 3}
    grads = like(whole(0), 1)

    def run():
        trained(OPTIMIZERS[name](), place(whole(0), axes), [place(grads, axes)])

    with ledger() as log:
        spmd(run, make_mesh(axes, "simulated"))()
    assert log.records == []


def unit_of_two():
    shapes, names = [(3, 5), (5,)], ["w", "b"]
    members = pack_flat(shapes, torch.float32, names, ["data"], 2, "unit")
    shard = FlatShard(members, torch.ones(10), {"data": 0})
    return dict(zip(names, shard.leaves(), strict=True))


def packed_of(values):
    ((_, shard),) = split_buffers(values).groups
    return shard


@pytest.mark.parametrize("in_place", [False, True])
def test_a_unit_is_one_tensor_that_stays_one(monkeypatch, in_place):
    calls = []
    real = torch._fused_adamw_

    def counted(params, *rest, **how):
        calls.append([len(x) for x in params])
        return real(params, *rest, **how)

    monkeypatch.setattr(torch, "_fused_adamw_", counted)
    params, grads, optimizer = unit_of_two(), unit_of_two(), sharded_adam()
    flat = packed_of(params).flat
    state = optimizer.init(params)
    assert packed_of(state.mu).flat.shape == flat.shape
    updates, _ = optimizer.update(grads, state, params)
    assert packed_of(updates) is not None
    nu = packed_of(state.nu).flat
    with donated(params, state) if in_place else torch.no_grad():
        after, later = optimizer.apply(grads, state, params)
    assert calls == [[10]]
    for made in (after, later.mu, later.nu):
        assert packed_of(made) is not None
    assert (packed_of(after).flat is flat) == in_place
    assert (packed_of(later.nu).flat is nu) == in_place
    # A leaf that is written over is spent, so what comes back is another.
    assert after["w"] is not params["w"]
    assert bool(params["w"].spent) == bool(state.mu["w"].spent) == in_place


@pytest.mark.parametrize("cut", ["decay", "partition", "frozen"])
def test_a_unit_cut_by_its_leaves_keeps_its_shard_in_place(cut):
    params, grads = unit_of_two(), unit_of_two()
    optimizer = {
        "decay": lambda: sharded_adam(mask=matrices),
        "partition": partitioned,
        "frozen": sharded_adam,
    }[cut]()
    if cut == "frozen":
        grads["b"] = None
    expected = trained(optimizer, params, [grads])
    flat, version = packed_of(params).flat, packed_of(params).flat._version
    with donated(params):
        actual = trained(optimizer, params, [grads])
    assert_bits(floating(expected), floating(actual))
    assert packed_of(actual[0]).flat is flat and flat._version > version
    for k, leaf in params.items():
        frozen = cut == "frozen" and k == "b"
        assert (actual[0][k] is leaf) == frozen and bool(leaf.spent) != frozen


@pytest.mark.parametrize("make", [sharded_adam, lambda: sgd(0.1)])
def test_a_whole_buffer_is_seen_to_have_changed(make):
    members = pack_flat([(4,)], torch.float32, ["w"], ["data"], 2, "unit")
    buffer = torch.ones(4)
    shard = FlatShard(members, buffer[2:], {"data": 1}, whole=buffer)
    shard.keep(buffer)
    (params,) = shard.leaves()
    (grads,) = shard.like(torch.ones(2)).leaves()
    optimizer = make()
    state = optimizer.init(params)
    optimizer.apply(grads, state, params)
    assert shard.shows(torch.float32)
    with donated():
        after, _ = optimizer.apply(grads, state, params)
    assert packed_of(after) is shard and not shard.shows(torch.float32)


def test_padding_stays_zero():
    members = pack_flat([(3,)], torch.float32, ["w"], ["data"], 2, "unit")
    shard = FlatShard(members, torch.tensor([2.0, 0.0]), {"data": 1})
    (params,) = shard.leaves()
    optimizer = sharded_adam(0.1)
    after, state = trained(optimizer, params, [params] * 3)
    for made in (after, state.mu, state.nu):
        assert packed_of(made).flat[0] != 0 and packed_of(made).flat[1] == 0


def test_moments_may_have_a_dtype_of_their_own():
    optimizer = sharded_adam(moment_dtype=torch.bfloat16)
    params = unit_of_two()
    after, state = trained(optimizer, params, [unit_of_two()] * 2)
    assert packed_of(state.mu).flat.dtype == torch.bfloat16
    assert packed_of(after).flat.dtype == torch.float32


def test_an_optimizer_runs_with_vmap_for_a_mesh_axis():
    params, g = torch.ones(2), torch.tensor([3.0, 4.0])
    mesh = make_mesh({"data": 2}, "vmap")
    layout = Layout((4,), torch.float32, (Split(0, "data", 2),), "w")
    optimizer = chain(clip_by_global_norm(1.0), sharded_adam(0.1))

    def run(p, g):
        w = Sharded(p, layout)
        after, _ = trained(optimizer, w, [Sharded(g, layout)])
        return after.local, global_norm(Sharded(g, layout))

    for after, norm in spmd(run, mesh)(params, g):
        torch.testing.assert_close(norm, torch.tensor(50.0).sqrt())
        torch.testing.assert_close(after, torch.full((2,), 0.9 - 0.001))


def test_a_gradient_that_lies_otherwise_is_refused():
    params = unit_of_two()
    optimizer = sharded_adam()
    state = optimizer.init(params)
    before = copies(floating(params))
    for stranger in (
        torch.ones(3, 5),
        Sharded(torch.ones(10), Layout((3, 5), torch.float32)),
    ):
        with donated(), pytest.raises(tree.TreeMismatch, match="'w'.*flat over data=2"):
            optimizer.apply({**unit_of_two(), "w": stranger}, state, params)
    assert_bits(before, floating(params))
