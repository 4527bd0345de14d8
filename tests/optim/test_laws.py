"""The laws of all optimizers: torch's bits, pure or donated, whole or in shards."""

import zlib

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from tests.optim.optimizers import KINDS
from tests.optim.shards import MESHES, place, unshard, whole
from tests.optim.trees import (
    SEEDS,
    SHAPES,
    assert_bits,
    assert_near,
    by_torch,
    copies,
    donated,
    floating,
    like,
    params_of,
    trained,
    trained_by_update,
)

STEPS = 7  # RAdam's sixth step is of another kind than its first
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


def of_every_kind(examples, kinds=KINDS, **drawn):
    """Over kinds by name, each with drawn settings, and ``drawn`` of their own."""

    def over(test):
        def run(name, data, **rest):
            kind = KINDS[name]
            test(kind, data.draw(kind.settings), **rest)

        run.__name__ = test.__name__
        drawing = settings(max_examples=examples)(given(data=st.data(), **drawn)(run))

        def chosen(name):  # each kind has draws of its own
            seed(zlib.crc32(name.encode()))(drawing)(name=name)

        return pytest.mark.parametrize("name", kinds)(chosen)

    return over


TWINS = [name for name, kind in KINDS.items() if kind.theirs]


@pytest.mark.filterwarnings("ignore:Adam's moments are as narrow")  # as torch's are
@of_every_kind(3, TWINS, shapes=SHAPES, seed=SEEDS, dtype=DTYPES)
def test_apply_has_the_bits_of_torchs(kind, how, shapes, seed, dtype):
    params = params_of(shapes, seed, dtype)
    grads = [like(params, seed + k) for k in range(STEPS)]
    expected = by_torch(kind.theirs(**how), params, grads)
    after, state = trained(kind.ours(**how), params, grads)
    assert_bits(expected, floating(after))
    assert state.count == STEPS
    assert after["steps"] is params["steps"] and after["no"] is None


@of_every_kind(3, shapes=SHAPES, seed=SEEDS)
def test_updates_add_up_and_their_structure_stays(kind, how, shapes, seed):
    params, optimizer = params_of(shapes, seed), kind.ours(**how)
    grads = [like(params, seed + k, scale=3.0) for k in range(3)]
    applied, state = trained(optimizer, params, grads)
    updated, its_state = trained_by_update(optimizer, params, grads)
    tolerance = 1e-5 if kind.exact else 1e-6
    assert_near(floating(applied), floating(updated), tolerance)
    assert_near(state, its_state, 1e-5)
    if kind.plain:
        expected = by_torch(kind.plain(**how), params, grads)
        assert_near(expected, floating(updated))
    first = tree.flatten(optimizer.init(params))[1]
    assert tree.flatten(state)[1] == tree.flatten(its_state)[1] == first


@of_every_kind(3, shapes=SHAPES, seed=SEEDS)
def test_donated_is_pure_and_pure_changes_nothing(kind, how, shapes, seed):
    params, optimizer = params_of(shapes, seed), kind.ours(**how)
    state = optimizer.init(params)
    for k in range(2):
        grads = like(params, seed + k)
        before = copies((params, state, grads))
        pure = optimizer.apply(grads, state, params)
        updates, later = optimizer.update(grads, state, params)
        assert_bits(before, (params, state, grads))
        assert updates["no"] is None and updates["steps"] is None
        (assert_bits if kind.exact else assert_near)(pure[1], later)

        mine = floating((params, state))
        versions = [x._version for x in mine]
        with donated():
            given_away = optimizer.apply(grads, state, params)
        assert_bits(pure, given_away)
        assert_bits(before[2], grads)
        kept = len(floating(params)) if kind.anew else len(mine)
        pairs = zip(mine, floating(given_away), strict=True)
        assert all(a is b for a, b in list(pairs)[:kept])
        # `shard` sees by the version what changed; fused operators bump none.
        held = floating((before[0], before[1]))
        for now, version, then in zip(mine, versions, held, strict=True):
            assert now._version > version or torch.equal(now, then)
        params, state = given_away


@of_every_kind(2, axes=MESHES, seed=SEEDS)
def test_sharded_is_whole(kind, how, axes, seed):
    optimizer, params = kind.ours(**how), whole(seed)
    steps = STEPS if kind is KINDS["RAdam"] else 3
    grads = [like(params, seed + k, scale=3.0) for k in range(steps)]
    expected, _ = trained(optimizer, params, grads)
    mesh = ff.make_mesh(axes, "simulated")

    def run(by):
        return by(optimizer, place(params, axes), [place(g, axes) for g in grads])

    def donating(*args):
        with donated():
            return trained(*args)

    with ff.ledger() as log:
        pure, given_away = [ff.spmd(run, mesh)(by) for by in (trained, donating)]
        updated = ff.spmd(run, mesh)(trained_by_update)
    assert kind.sends or log.records == []
    agree = assert_bits if kind.exact else assert_near
    for by_rank in (pure, given_away):
        agree(floating(expected), floating(unshard(by_rank, mesh)))
        assert len({repr(getattr(s, "numbers", 0)) for _, s in by_rank}) == 1
    assert_near(floating(expected), floating(unshard(updated, mesh)), 1e-5)
    for mine, in_place in zip(pure, given_away, strict=True):
        assert_bits(floating(mine), floating(in_place))
