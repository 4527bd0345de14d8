"""Optimizers over shards: what they send, and the buffers that stay whole."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsfunc import tree
from fsfunc.comm.launch import make_mesh, spmd
from fsfunc.comm.ledgers import ledger
from fsfunc.optim import (
    chain,
    clip_by_global_norm,
    global_norm,
    sgd,
    sharded_adam,
    tree_sum,
)
from fsfunc.sharded.layout import Layout, pack_flat
from fsfunc.sharded.leaf import FlatShard, Sharded
from fsfunc.sharded.packing import split_buffers
from fsfunc.sharded.placements import Split
from tests.optim.optimizers import by_shape, matrices
from tests.optim.shards import MESHES, place, whole
from tests.optim.trees import SEEDS, assert_bits, copies, donated, floating, trained


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
        "partition": lambda: by_shape(sharded_adam(0.1), sgd(0.1, momentum=0.9)),
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
