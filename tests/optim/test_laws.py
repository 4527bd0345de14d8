"""The laws of all optimizers: torch's bits, pure or donated, in shards, in steps."""

import functools
import math
import zlib

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from fsfunc.testing import assert_equals_one_device
from tests.models import chain, floats, layer, layers
from tests.optim.optimizers import EVERY, KINDS, TORCHS, matrices
from tests.optim.shards import MESHES, place, unshard, whole
from tests.optim.steps import DATA, WIDTH, loss
from tests.optim.steps import trained as stacked
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


@pytest.mark.filterwarnings("ignore:.*moments have 16 bits")  # as torch's are
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


# In a sharded step: planned, donated, saved, and that of one device


def by_largest(measure):
    """Gradients times what an infinite norm measures of them."""

    def update(grads, state, params=None):
        return ff.tree_scale(grads, -measure(grads)), state

    return ff.Optimizer(lambda params: (), update)


LARGEST = {
    "clipped by the largest, muon": lambda: ff.chain(
        ff.clip_by_global_norm(1.0, p=math.inf), ff.muon(0.1)
    ),
    "the largest of all": lambda: by_largest(lambda g: ff.global_norm(g, math.inf)),
    "the largest of each": lambda: by_largest(
        lambda g: ff.tree_sum(ff.leaf_norms(g, math.inf))
    ),
}
FOREIGN = {"NAdam", "SGD dampened", "own Signum"}
# Of these, alike but for a detail, `test_laws` says as much.
LAWFUL = {*TORCHS, "clipped adam", "lion, 8 bits", "muon, and others"} - FOREIGN
LAWFUL |= {k for k in EVERY if "decay cuts" in k or "scaled" in k} - {"scaled masters"}
CASES = {k: v for k, v in EVERY.items() if k not in LAWFUL} | LARGEST
NARROW = {"adascale": torch.float64, "master_weights": torch.bfloat16}
NARROW |= {"scaled masters": torch.float16, "stochastic_rounding": torch.bfloat16}


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_step_is_planned_donated_and_saved(name, tmp_path):
    optimizer, dtype = CASES[name](), NARROW.get(name, torch.float32)
    init = lambda: list(floats(2, WIDTH, WIDTH, seed=1).to(dtype))  # noqa: E731
    x, zero = floats(4, WIDTH, seed=2).to(dtype), 2 + len(name) % 2

    def made():  # the next run's knows nothing yet
        return ff.shard(optimizer(ff.value_and_grad(loss)), DATA, "data", zero=zero)

    def main():
        step, mine = made(), ff.local_batch(x, DATA, "data")
        first = ff.init_state(step, init, optimizer, mine)
        planned = ff.plan(step, first, mine)
        with ff.ledger() as log:
            state, _ = step(first, mine)
        rank = ff.axis_index("data")
        assert planned[rank].ledger.table() == log.table(rank)
        ff.save(tmp_path / "a", state)
        after, _ = step(state, mine)
        again = ff.donate(made())
        empty = ff.abstract_state(again, init, optimizer, mine)
        resumed = ff.unshard(again(ff.load(tmp_path / "a", empty), mine)[0])
        after = ff.unshard(after)
        both = zip(*map(tree.leaves, (resumed.opt_state, after.opt_state)), strict=True)
        assert all(getattr(a, "dtype", 0) == getattr(b, "dtype", 0) for a, b in both)
        return after, resumed

    for after, resumed in ff.spmd(main, DATA)():
        assert_bits(after, resumed)


NOT_EXACT = {
    "adascale": "it compares samples, of which one device has one",
    "powersgd": "its state is made on the ranks",
    "shampoo": "its state is made on the ranks; test_exact_matrices has it",
    "own Signum": "it is told that its count is in float32",
} | {name: "codes of 8 bits are no numbers" for name in EVERY if "8 bits" in name}


@pytest.mark.parametrize("name", sorted((EVERY | LARGEST).keys() - NOT_EXACT.keys()))
def test_a_step_is_the_same_function_of_parts(name):
    optimizer = (EVERY | LARGEST)[name]()
    params, x = list(floats(2, WIDTH, WIDTH)), floats(4, WIDTH)
    step = optimizer(ff.value_and_grad(loss))
    state = ff.init_state(step, params, optimizer, x)
    assert_equals_one_device(
        step, ff.shard(step, DATA, "data", zero=2 + len(name) % 2), DATA, state, x,
        goes_on=lambda out: out[0], exact=True,
    )  # fmt: skip


# Those that reduce or average, a part of a model for each, in every stack


def everything():
    """One average over all, and no step that is odd."""
    parts = {
        "0": ff.chain(ff.clip_by_value(0.1), ff.lion(0.05, mask=matrices)),
        "1": ff.adafactor(0.05, weight_decay=0.1),
        "2": ff.lamb(0.05, weight_decay=0.1, mask=matrices),
        "3": ff.lars(0.5, trust_coefficient=0.1, trust_mask=matrices),
    }
    by_layer = ff.partition(parts, lambda path, leaf: path.split("/")[0])
    return ff.apply_if_finite(ff.ema(by_layer, 0.6))


PARAMS = layers(4, make=floats)
PARAMS[1]["steps"] = torch.tensor(3)
BATCH = floats(8, WIDTH, seed=5)


def average(state):
    return [x.clone() for x in tree.leaves(ff.unshard(state.inner_state.average))]


@functools.cache
def ran(stack):
    how = {"fn": chain(layer), "init": PARAMS, "look": average}
    return stacked(stack, everything(), batches=[BATCH] * 2, **how)


@pytest.mark.parametrize(
    "stack",
    ["shard zero=1", "accumulate(shard)", "donate(remat(shard))", "pipeline(shard)"],
)
def test_in_any_stack_a_step_is_that_of_one_device(stack):
    expected = ran("alone")[0]
    for found in ran(stack):
        assert_near(expected.params, found.params, 2e-5)
        assert_near(expected.seen, found.seen, 2e-5)
