"""Leaves of which each rank has a value of its own: every one is saved, and comes back.

Where no rank's bits differ from the others' a leaf is one value, as ever.
"""

import itertools
import json

import pytest
import torch
from safetensors.torch import load_file

import fsfunc as ff
from fsfunc import tree
from fsfunc.checkpoint.reading import prove
from fsfunc.comm.comparison import RanksDiffer
from fsfunc.sharded.leaf import is_sharded
from tests.checkpoint.forging import body_of
from tests.checkpoint.trees import alike, any_bits, on

PAIR, GRID = {"data": 2}, {"data": 2, "model": 3}


def parts(t):
    """This rank's tensors and numbers."""
    leaves = tree.leaves(t, is_leaf=is_sharded)
    return [x.local if is_sharded(x) else x for x in leaves]


def equal(a, b):
    return all(map(alike, parts(a), parts(b)))


# A step that carries something of each rank's own


def carrying(mesh, made=ff.init_state, **how):
    """The step of a model with a hidden state and batch statistics, and its state."""
    unit, optimizer = ff.unit(lambda w, x: x @ w), ff.sgd(0.5, momentum=0.5)

    def loss(w, extra, x):
        mean = 0.5 * extra["mean"] + 0.5 * x.mean(0)
        h = torch.tanh(unit(w, x - mean) + extra["h"])
        return h.square().mean(), {"h": h, "mean": mean}

    def step(state, x):
        (value, extra), grads = ff.value_and_grad(loss, has_aux=True)(
            state.params, state.extra, x
        )
        return state.apply_gradients(grads, optimizer, extra=extra), value

    step = ff.donate(ff.shard(step, mesh, "data", **how))
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(mesh.rank))
    extra = {"h": torch.zeros(2, 3), "mean": torch.zeros(3)}
    told = {"extra": extra, "layouts": {"extra/*": ff.Own("data")}}
    return step, made(step, torch.eye(3), optimizer, x, **told), x


@pytest.mark.parametrize("zero, donated", [(0, True), (1, False), (3, True)])
def test_a_run_goes_on_bit_by_bit_with_what_is_each_ranks_own(tmp_path, donated, zero):
    """Three steps are one, a checkpoint, and two; in the target's memory too."""

    def main(mesh):
        step, state, x = carrying(mesh, zero=zero)
        kind = ff.init_state if donated else ff.abstract_state
        target = carrying(mesh, kind, zero=zero)[1]
        state, _ = step(state, x)
        saving = ff.save_async(tmp_path / "a", state)
        for _ in range(2):  # which changes nothing of what is saved
            state, loss = step(state, x)
        saving.wait()
        found = ff.load(tmp_path / "a", target, donate=donated)
        for _ in range(2):
            found, again = step(found, x)
        assert equal(found, state) and torch.equal(loss, again)
        return state.extra["h"].tolist()

    hidden = on(PAIR, main)
    assert hidden[0] != hidden[1]
    assert own_of(tmp_path / "a") == {"extra/h": PAIR, "extra/mean": PAIR}


def own_of(path):
    return {
        p: dict(x.stacked_axes)
        for p, x in ff.metadata(path).tensors.items()
        if x.stacked_axes
    }


# Any leaf, own along any axes


def value(dtype, shape, seed):
    """Any bits: NaNs of all kinds, negative zeros."""
    return any_bits(shape, dtype, seed)


def seed_of(mesh, axes):
    return 1 + sum(10**i * (1 + mesh.coordinate(a)) for i, a in enumerate(axes))


OVER = [("data",), ("model",), ("data", "model"), ()]
KINDS = [
    (torch.float32, (2, 3)), (torch.bfloat16, ()), (torch.bool, (9,)),
    (torch.int64, (1,)), (torch.complex64, (2, 1)), (torch.float8_e5m2, (5,)),
]  # fmt: skip


@pytest.mark.parametrize("how", ["whole", "strided", "split", "meta"])
def test_any_leaf_comes_back_as_each_rank_had_it(tmp_path, how):
    rows = ff.Layout((6, 2), torch.float32, (ff.Split(0, "model", 3),), "w")

    def state_of(mesh):
        state = {
            f"{i}{'-'.join(axes)}": value(*kind, seed_of(mesh, axes))
            for (i, kind), axes in itertools.product(enumerate(KINDS), OVER)
        }
        if how == "strided":
            state = {p: torch.stack([x, x], -1)[..., 1] for p, x in state.items()}
        if how == "split":  # over one axis, and each rank's own along the other
            mine = value(torch.float32, (2, 2), seed_of(mesh, ["data", "model"]))
            same = value(torch.float32, (2, 2), seed_of(mesh, ["model"]))
            state |= {"s": ff.Sharded(mine, rows), "t": ff.Sharded(same, rows)}
        return state

    def main(mesh):
        state = state_of(mesh)
        ff.save(tmp_path / "a", state)
        target = tree.map(torch.zeros_like, state)
        if how == "meta":
            target = tree.map(lambda x: x.to("meta"), state)
        found = ff.load(tmp_path / "a", target)
        assert equal(found, state)
        return found

    on(GRID, main)
    own = own_of(tmp_path / "a")
    expected = {
        f"{i}{'-'.join(axes)}": {axis: GRID[axis] for axis in axes}
        for i, axes in itertools.product(range(len(KINDS)), OVER)
        if axes
    }
    assert own == expected | ({"s": PAIR} if how == "split" else {})
    assert prove(ff.metadata(tmp_path / "a"))


def test_bits_decide_not_numbers(tmp_path):
    """A NaN is not another value for being a NaN; a zero is one for its sign."""
    nan = torch.tensor([float("nan"), 1.0])

    def main(mesh):
        sign = 1.0 - 2.0 * mesh.rank
        odd = torch.tensor([0x7FC00000 + mesh.rank], dtype=torch.int32)
        state = {
            "nan": nan.clone(), "payload": odd.view(torch.float32),
            "zero": torch.zeros(2) * sign, "signs": torch.ones(4, 4) * sign,
        }  # fmt: skip
        ff.save(tmp_path / "a", state)
        assert equal(ff.load(tmp_path / "a", tree.map(torch.empty_like, state)), state)

    on(PAIR, main)
    assert own_of(tmp_path / "a").keys() == {"payload", "zero", "signs"}


# Elsewhere


@pytest.fixture
def saved(tmp_path):
    """``h`` f32[3], each rank's own, and what the ranks share."""
    path = tmp_path / "a"

    def main(mesh):
        ff.save(path, {"h": torch.arange(3.0) + 10 * mesh.rank, "w": torch.ones(2)})

    on(PAIR, main)
    return path


TARGET = {"h": torch.zeros(3), "w": torch.zeros(2)}


@pytest.mark.parametrize("mesh", [{}, {"data": 3}, {"model": 2}], ids=str)
def test_on_other_axes_it_is_refused_with_the_ways_out(saved, mesh):
    def main(_):
        with pytest.raises(ValueError) as raised:
            ff.load(saved, TARGET)
        said = str(raised.value)
        assert "'h' f32[3], each rank's own over data=2" in said
        assert str(mesh) in said and "ff.pmean" in said and "only=" in said
        # the ways out
        kept = ff.load(saved, TARGET, only="w")
        assert kept["w"].sum() == 2 and kept["h"].sum() == 0
        kept = ff.load(saved, {"w": torch.zeros(2)}, strict=False)
        assert kept["w"].sum() == 2
        every = ff.load(saved, torch.zeros(2, 3), at="h")
        assert every.tolist() == [[0, 1, 2], [10, 11, 12]]

    on(mesh, main)


def test_a_mean_of_it_is_one_value_that_loads_anywhere(saved):
    def main(mesh):
        found = ff.load(saved, TARGET)
        ff.save(saved.with_name("b"), ff.pmean(found, "data"))

    on(PAIR, main)
    assert ff.load(saved.with_name("b"), TARGET)["h"].tolist() == [5, 6, 7]


def test_it_is_read_under_other_names_and_in_other_dtypes(saved):
    def main(mesh):
        target = {"x": {"y": torch.zeros(3, dtype=torch.float64)}}
        found = ff.load(saved, target, only="x", rename={"x/y": "h"}, cast=True)
        assert found["x"]["y"].tolist() == [10 * mesh.rank + i for i in range(3)]
        with pytest.raises(
            ValueError, match="each rank's own over data=2 in the check"
        ):
            ff.load(saved, {"h": torch.zeros(4), "w": torch.zeros(2)})

    on(PAIR, main)


def test_more_axes_and_other_layouts_load_it_too(saved):
    """Along the axis each rank its own; along others all the same, or parts of it."""
    layout = ff.Layout((3,), torch.float32, (ff.Split(0, "model", 3),), "h")

    def main(mesh):
        target = {"h": ff.Sharded(torch.zeros(1), layout), "w": torch.zeros(2)}
        found = ff.load(saved, target)["h"].local.tolist()
        whole = ff.load(saved, TARGET)["h"].tolist()
        return found, whole

    for data, model in itertools.product(range(2), range(3)):
        found, whole = on(GRID, main)[3 * data + model]
        assert found == [10 * data + model]
        assert whole == [10 * data + i for i in range(3)]

    def turned(mesh):  # axes in another order
        return ff.load(saved, TARGET)["h"].tolist() == [
            10 * mesh.coordinate("data") + i for i in range(3)
        ]

    assert all(on({"model": 3, "data": 2}, turned))
    layout = ff.Layout((3,), torch.float32, (ff.Split(0, "data", 2),), "h")
    with pytest.raises(ValueError, match="split over data=2"):
        on(PAIR, lambda mesh: ff.load(
            saved, {"h": ff.Sharded(torch.zeros(2 - mesh.rank), layout), **TARGET2}
        ))  # fmt: skip


TARGET2 = {"w": torch.zeros(2)}


def test_others_read_the_stack(saved):
    """Under the leaf's name: a row for each rank; in one file too, which loads."""
    one = ff.consolidate(saved, saved.with_name("one.safetensors"))
    assert load_file(one)["h"].tolist() == [[0, 1, 2], [10, 11, 12]]
    assert own_of(one) == {"h": PAIR}
    found = on(PAIR, lambda _: ff.load(one, TARGET)["h"].tolist())
    assert found == [[0, 1, 2], [10, 11, 12]]
    with pytest.raises(ValueError, match="each rank's own"):
        ff.load(one, TARGET)
    part = ff.consolidate(saved, saved.with_name("part"), at="h")
    assert own_of(part) == {"": PAIR}


def test_it_is_told_where_a_checkpoint_is_shown(saved):
    assert "h f32[3], each rank's own over data=2" in str(ff.metadata(saved))
    assert "f32[3], each rank's own over data=2" in str(ff.show.checkpoint(saved))
    assert ff.metadata(saved).leaves["h"] == ((2, 3), torch.float32)


def test_what_is_one_value_is_written_as_ever(saved):
    """A word more where ranks differ, and none elsewhere: older ones are read."""
    leaves = body_of(saved)["leaves"]
    assert leaves["w"].keys() == {"shape", "dtype", "chunks"}
    assert leaves["h"]["own"] == PAIR
    assert json.dumps(leaves["h"]["shape"]) == "[2, 3]"


# What is no tensor, and trees that differ


UNLIKE = {
    "int": lambda rank: rank,
    "bool": lambda rank: rank == 1,
    "text": lambda rank: f"rank {rank}",
    "float": lambda rank: 0.5 * rank,
    "shape": lambda rank: torch.zeros(2 + rank),
    "dtype": lambda rank: torch.zeros(2).to(torch.float64 if rank else torch.float32),
    "number": lambda rank: torch.zeros(2) if rank else 1.0,
    "None": lambda rank: torch.zeros(2) if rank else None,
}


@pytest.mark.parametrize("i, leaf", list(enumerate(UNLIKE)))
def test_what_cannot_be_kept_of_each_rank_names_the_leaf_and_the_ranks(
    tmp_path, i, leaf
):
    save = [ff.save, ff.save_async][i % 2]

    def main(mesh):
        with pytest.raises(RanksDiffer, match="rank 0: .*rank 1: ") as raised:
            save(tmp_path / "a", {"w": torch.ones(2), "mine": UNLIKE[leaf](mesh.rank)})
        assert "'mine'" in str(raised.value) and "torch.tensor(x)" in str(raised.value)

    on(PAIR, main)
    assert not list(tmp_path.iterdir())


def test_a_state_that_ranks_lay_out_in_other_ways_is_refused(tmp_path):
    def main(mesh):
        layout = ff.Layout((2,), torch.float32, (ff.Split(0, "data", 2),), "w")
        w = ff.Sharded(torch.ones(1), layout) if mesh.rank else torch.ones(2)
        with pytest.raises(RanksDiffer, match=r"'w': rank 0: f32\[2\]; rank 1: .*ov"):
            ff.save(tmp_path / "a", {"w": w})

    on(PAIR, main)


# Whatever else a state carries


def loss(params, x):
    unit = ff.unit(lambda p, x: torch.tanh(x @ p["w"] + p["b"]))
    return unit(params[1], unit(params[0], x)).square().mean()


def hybrid(step, mesh, **how):
    return ff.shard(step, mesh, "data", replicate="node", **how)


NODES, HYBRID = {"node": 3}, {"node": 2, "data": 2}
QUANTIZED = {"reduction": ff.QuantizedReduction(4)}
PUSH = ff.graphs.directed_exponential(3)
STATES = {
    "local_sgd": (NODES, ff.sgd(0.1, momentum=0.9),
                  lambda s, m: ff.local_sgd(s, m, "node", every=3)),
    "gossip": (NODES, ff.sgd(0.1), lambda s, m: ff.gossip(s, m, "node", PUSH)),
    "local_sgd(shard)": (
        HYBRID, ff.sharded_adam(0.1),
        lambda s, m: ff.local_sgd(ff.shard(s, m, "data"), m, "node", every=3),
    ),
    "error feedback": (HYBRID, ff.error_feedback(ff.sgd(0.1)),
                       lambda s, m: hybrid(s, m, **QUANTIZED)),
    "PowerSGD": (HYBRID, ff.powersgd(ff.sgd(0.1), 1, 1.0), hybrid),
    "8-bit moments": (HYBRID, ff.sharded_adam(0.1, moment_dtype=torch.uint8), hybrid),
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_what_a_state_carries_beside_parameters_comes_back_on_every_rank(
    tmp_path, name
):
    """None of it was one rank's alone; nor is anything that ranks share kept twice."""
    axes, optimizer, wrap = STATES[name]

    def main(mesh):
        draw = torch.Generator().manual_seed(1)
        params = [
            {"w": torch.randn(4, 4, generator=draw), "b": torch.zeros(4)}
            for _ in range(2)
        ]
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(mesh.rank))
        step = wrap(optimizer(ff.value_and_grad(loss)), mesh)
        first = ff.init_state(step, params, optimizer, x)
        state = first
        for _ in range(2):
            state, _ = step(state, x)
        ff.save(tmp_path / "a", state)
        found = ff.load(tmp_path / "a", first)
        assert equal(found, state)
        assert equal(step(found, x), step(state, x))

    on(axes, main)
    assert not own_of(tmp_path / "a")


def test_moments_in_8_bits_of_another_layout_are_told_what_to_leave_out(tmp_path):
    optimizer = ff.sharded_adam(0.1, moment_dtype=torch.uint8)
    params, x = [{"w": torch.ones(4, 4), "b": torch.zeros(4)}] * 2, torch.ones(4, 4)
    params = ff.tree.map(torch.clone, params)

    def made(mesh, zero):
        step = ff.shard(optimizer(ff.value_and_grad(loss)), mesh, "data", zero=zero)
        return step, ff.init_state(step, params, optimizer, x)

    on({"data": 2}, lambda mesh: ff.save(tmp_path / "a", made(mesh, 3)[1]))

    def other(mesh):
        step, state = made(mesh, 0)
        with pytest.raises(ValueError, match=r"8 bits.*only=\[.params., .step.\]"):
            ff.load(tmp_path / "a", state)
        return step(ff.load(tmp_path / "a", state, only=["params", "step"]), x)[1]

    on({"data": 4}, other)
