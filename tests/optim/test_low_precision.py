"""Parameters and moments of fewer bits: near float32, and as many bytes as said."""

import functools
import warnings

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from fsfunc.sharded.leaf import is_sharded
from fsfunc.testing import integers
from tests.checks import all_refused, simulated
from tests.optim.shards import mixed, placed, together
from tests.optim.steps import parts
from tests.optim.steps import trained as stacked
from tests.optim.trees import assert_bits, floating, like, trained

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WIDTH, UNITS = 24, 2


@ff.unit
def layer(params, x):
    return torch.tanh(x @ params["w"].to(x.dtype) + params["b"].to(x.dtype))


def loss_fn(params, batch):
    x, y = batch
    for p in params:
        x = layer(p, x)
    return (x.float() - y).square().mean()


def model(dtype):
    draw = torch.Generator().manual_seed(0)
    make = lambda *shape: (torch.randn(shape, generator=draw) / 5).to(dtype)  # noqa: E731
    return [{"w": make(WIDTH, WIDTH), "b": make(WIDTH)} for _ in range(UNITS)]


def data():
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(32, WIDTH, generator=draw)
    return x, torch.tanh(x.roll(1, 1) * 0.5)


MESH = simulated(2)


def last_loss(optimizer, dtype=FP32, ranks=1):
    """Of the first rank."""
    how, mesh = {"batches": [data()] * 20, "init": model(dtype)}, simulated(ranks)
    around = lambda f, mesh: ff.shard(f, mesh, "data") if ranks > 1 else f  # noqa: E731
    stack = lambda f, mesh: ff.donate(around(f, mesh))  # noqa: E731
    return stacked(stack, optimizer, loss_fn, mesh=mesh, **how)[0].losses[-1]


adam = functools.partial(ff.sharded_adam, 3e-3)
U8 = torch.uint8
KINDS = {
    "masters of bf16": (lambda: ff.master_weights(adam()), BF16),
    "masters of fp16": (lambda: ff.loss_scale(ff.master_weights(adam())), FP16),
    "moments in fp16": (lambda: adam(moment_dtype=FP16), FP32),
    "moments in bf16": (lambda: adam(moment_dtype=BF16), FP32),
    "all in fp16": (lambda: ff.loss_scale(adam(moment_dtype=FP16)), FP16),
    "8 bits": (lambda: adam(moment_dtype=U8), FP32),
    "by chance, 8 bits": (lambda: ff.stochastic_rounding(adam(moment_dtype=U8)), BF16),
    "by chance": (lambda: ff.stochastic_rounding(adam()), BF16),
}


@functools.cache
def float32s():
    return last_loss(adam())


@pytest.mark.parametrize(("i", "name"), [*enumerate(KINDS)])
def test_it_trains_as_float32_does(i, name):
    """On one device, or on two ranks, by turns."""
    make, dtype = KINDS[name]
    assert abs(last_loss(make(), dtype, 1 + i % 2) / float32s() - 1) < 0.05


ADAM_BYTES = {  # of parameter, copy and moments, a parameter, in whole blocks of 256
    "masters of bf16": 2 + 4 + 8,
    "moments in fp16": 4 + 4,
    "all in fp16": 2 + 4,
    "8 bits": 4 + 2 * (1 + 4 / 256),
    "by chance": 2 + 8,
    "by chance, 8 bits": 2 + 2 * (1 + 4 / 256),
}


@pytest.mark.parametrize("name", ADAM_BYTES)
def test_bytes_a_parameter_are_those_stated(name):
    make, dtype = KINDS[name]
    unit, optimizer = ff.unit(lambda w, x: x @ w.to(x.dtype)), make()
    step = optimizer(ff.value_and_grad(lambda w, x: unit(w, x).float().mean()))

    def main():
        sharded, x = ff.shard(step, MESH, "data"), torch.ones(4, 128)
        params = torch.ones(128, 128, dtype=dtype)
        state = ff.init_state(sharded, params, optimizer, x)
        sizes = [held(state)]
        for run in (sharded, ff.donate(sharded)):
            state, _ = run(state, x)
            sizes.append(held(state))
        return sizes

    for sizes in ff.spmd(main, MESH)():
        assert sizes == [ADAM_BYTES[name] * 128 * 128 / 2] * 3


def held(state):
    """Bytes of the storages of a state on this rank."""
    held = [x for x in parts(state) if isinstance(x, torch.Tensor)]
    stored = [x.untyped_storage() for x in held]
    return sum({s.data_ptr(): s.nbytes() for s in stored}.values())


@pytest.mark.parametrize(
    "name", ["masters of bf16", "by chance", "moments in fp16", "all in fp16"]
)
def test_ranks_make_the_update_of_one_device(name):
    make, dtype = KINDS[name]
    optimizer = make()
    grads, mesh = tree.map(torch.sin, model(dtype)), simulated(3)
    three = lambda params, grads: trained(optimizer, params, [grads] * 3)[0]  # noqa: E731
    expected = three(model(dtype), grads)
    for zero in (0, 3):

        def main(zero=zero):
            step = ff.shard(ff.value_and_grad(loss_fn), mesh, "data", zero=zero)
            placed = ff.place(step, model(dtype), data())
            return ff.unshard(three(placed, ff.place(step, grads, data())))

        for found in ff.spmd(main, mesh)():
            assert_bits(expected, found)


def test_rounded_by_chance_it_is_right_in_the_mean_and_anew_each_step():
    step = 2.0**-8  # a half of the distance of two neighbours of 1
    w = torch.ones(4, 50_000, dtype=BF16)
    optimizer = ff.stochastic_rounding(ff.sgd(0.5 * step))
    state = optimizer.init({"a": w, "b": w})
    g = torch.full(w.shape, -1.0)
    first, state = optimizer.apply({"a": g, "b": g}, state, {"a": w, "b": w})
    up = first["a"] > 1
    assert set(first["a"].unique().tolist()) == {1.0, 1 + 2 * step}
    assert abs(up.float().mean() - 0.25) < 0.005
    assert not torch.equal(first["a"], first["b"])
    again, _ = optimizer.apply({"a": g, "b": g}, state, {"a": w, "b": w})
    assert not torch.equal(first["a"], again["a"])
    odd = torch.tensor([torch.inf, -torch.inf, torch.nan])
    odd[2:].view(torch.int32).fill_(2**31 - 1)  # a NaN to which 1 cannot be added
    kept, _ = optimizer.apply(-odd, optimizer.init(w[0, :3]), w[0, :3])
    assert str(kept.tolist()) == "[inf, -inf, nan]"


@pytest.mark.parametrize("kind", [ff.sharded_adam, ff.lamb])
@pytest.mark.parametrize("by", ["apply", "update"])
def test_float16_moments_of_float64_parameters_are_near_their_own(kind, by):
    params = {"w": torch.linspace(-1, 1, 8, dtype=torch.float64), "b": torch.ones(3)}

    def run(moments):
        optimizer, p = kind(0.1, moment_dtype=moments), params
        state = optimizer.init(p)
        for _ in range(3):
            made, state = getattr(optimizer, by)(tree.map(torch.sin, p), state, p)
            p = made if by == "apply" else tree.map(torch.add, p, made)
        return p

    found, wanted = run(FP16), run(None)
    assert found["w"].dtype == torch.float64
    for name in params:
        torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=1e-3)


def test_float16_moments_follow_fairscales_scale():
    optimizer, w = ff.sharded_adam(0.1, moment_dtype=FP16), torch.ones(3)
    state = optimizer.init(w)
    wide, its = ff.sharded_adam(0.1), None
    _, its = wide.apply(torch.full((3,), 2.0), wide.init(w), w)
    w1, state = optimizer.apply(torch.full((3,), 2.0), state, w)
    assert state.scale == 2**16 and state.good_steps == 1
    torch.testing.assert_close(
        state.nu.float() / state.scale, its.nu, rtol=1e-3, atol=0
    )
    large = torch.tensor([1.0, 1.0, 50.0])  # 0.001 * 50 ** 2 * 2 ** 16 is too large
    w2, lost = optimizer.apply(large, state, w1)
    assert lost.scale == 2**15 and not lost.mu.any() and not lost.nu.any()
    assert w2.isfinite().all() and not torch.equal(w1, w2) and lost.good_steps == 0
    late = state._replace(scale=2.0**14, good_steps=1999)
    _, grown = optimizer.apply(torch.zeros(3), late, w1)
    assert grown.scale == 2**15 and grown.good_steps == 0
    torch.testing.assert_close(  # the same moments, in another scale
        grown.mu.float() / grown.scale,
        0.9 * late.mu.float() / late.scale,
        rtol=1e-3,
        atol=0,
    )


def test_an_overflow_on_one_rank_is_one_on_all():
    optimizer = adam(moment_dtype=FP16)
    step = ff.shard(ff.value_and_grad(loss_fn), MESH, "data")

    def main():
        params = ff.place(step, model(FP32), data())
        grads = [{k: torch.ones_like(x) for k, x in p.items()} for p in model(FP32)]
        grads[0]["b"][-1] = 100.0
        _, state = optimizer.apply(
            ff.place(step, grads, data()), optimizer.init(params), params
        )
        last = state._replace(scale=1.0)
        grads[0]["b"][-1] = torch.inf
        with pytest.raises(RuntimeError, match="at a scale of 1"):
            optimizer.apply(ff.place(step, grads, data()), last, params)
        return state.scale

    assert ff.spmd(main, MESH)() == [2**15, 2**15]


def test_codes_stay_near_the_moments_of_float32():
    torch.manual_seed(0)
    w = torch.randn(140_000)  # two chunks, the last one short
    scale = 10.0 ** torch.linspace(-6, 2, 140_000)  # of gradients
    coded, wide = (ff.sharded_adam(1e-2, moment_dtype=d) for d in (torch.uint8, FP32))
    states, ws = [coded.init(w), wide.init(w)], [w, w]
    for _ in range(100):
        g = torch.randn(140_000) * scale
        pairs = zip((coded, wide), states, ws, strict=True)
        ws, states = zip(*(o.apply(g, s, x) for o, s, x in pairs), strict=True)
    moved = (ws[1] - w).square().mean().sqrt()
    assert (ws[0] - ws[1]).square().mean().sqrt() < 0.2 * moved
    grown = (ws[0] - w).abs().mean() / (ws[1] - w).abs().mean()
    assert abs(grown - 1) < 0.02


@pytest.mark.parametrize("axes", [{"data": 2, "model": 2}, {"data": 3, "model": 2}])
def test_codes_of_parts_stay_as_near(axes):
    """Flat over one axis or two, uneven, split, a stage's own, and whole.

    Also where only some leaves of a buffer had a gradient in between.
    """
    (values, plan), mesh = mixed(axes), simulated(**axes)

    def steps(lay):
        grads = [lay(like(values, k)) for k in range(4)]
        leaves, treedef = tree.flatten(grads[1], is_sharded)
        some = [g if i % 2 else None for i, g in enumerate(leaves)]
        return lay(values), [grads[0], tree.unflatten(treedef, some), *grads[2:]]

    def main():
        mine = steps(lambda t: placed(t, plan))
        return trained(adam(moment_dtype=U8), *mine)[0]

    found = floating(together(ff.spmd(main, mesh)(), mesh))
    expected = floating(trained(adam(), *steps(lambda t: t))[0])
    for x, y, start in zip(found, expected, floating(values), strict=True):
        assert (x - y).norm() <= 0.1 * (y - start).norm()


@pytest.mark.parametrize("ranks", [0, 2])
def test_what_has_no_gradient_keeps_its_codes(ranks):
    """Behind and before leaves of its buffer that have one, too."""
    optimizer = adam(moment_dtype=U8)

    def main():
        params, grads = model(FP32), tree.map(torch.cos, model(FP32))
        if ranks:
            call = ff.shard(ff.value_and_grad(loss_fn), MESH, "data")
            params, grads = (ff.place(call, t, data()) for t in (params, grads))
        params, before = optimizer.apply(grads, optimizer.init(params), params)
        some = [{**grads[0], "w": None}, {**grads[1], "b": None}]
        none = tree.map(lambda _: None, grads, is_leaf=is_sharded)
        later = [optimizer.apply(g, before, params)[1] for g in (some, none)]
        return [before, *later]

    kept, alive = [], []
    for states in ff.spmd(main, MESH)() if ranks else [main()]:
        for old, new, same in zip(*(s[1:3] for s in states), strict=True):  # mu and nu
            assert_bits(parts(old), parts(same))
            for a, b in zip(parts(old.codes), parts(new.codes), strict=True):
                kept.append((a.view(-1, 256) == b.view(-1, 256)).all(1))
            alive += [x.flatten() > 0 for x in parts(new.scales)]
    # A leaf of three blocks has none in one unit, one of a block in the other.
    assert 0.3 < torch.cat(kept).float().mean() < 0.8
    assert torch.cat(alive).float().mean() > 0.9  # none was forgotten


def free():
    return ff.schedule_free(ff.sgd(0.1), 0.1)


NARROW = {  # the parameters' dtype, the optimizer, and what is said of its moments
    "float16": (FP16, adam, "below 6e-8"),
    "bfloat16": (BF16, adam, "decay by b2 = 0.999"),
    "bfloat16, a shorter memory": (BF16, lambda: adam(b2=0.95), None),
    "asked for": (BF16, lambda: adam(moment_dtype=BF16), None),
    "wide": (BF16, lambda: adam(moment_dtype=FP32), None),
    "masters": (FP16, lambda: ff.master_weights(adam()), None),
    "by chance": (BF16, lambda: ff.stochastic_rounding(adam()), None),
    "lamb": (FP16, ff.lamb, "below 6e-8"),
    "lion": (BF16, ff.lion, None),
    "lion, a longer memory": (BF16, lambda: ff.lion(b2=0.998), "decay by b2 = 0.998"),
    "lion in fp16": (FP16, ff.lion, "below 6e-8"),
    "lion, asked for": (FP32, lambda: ff.lion(moment_dtype=FP16), "below 6e-8"),
    "lion in 8 bits": (FP16, lambda: ff.lion(moment_dtype=U8), None),
    "an average": (BF16, lambda: ff.ema(ff.sgd(0.1)), "not move by 1 - 0.999"),
    "a shorter average": (BF16, lambda: ff.ema(ff.sgd(0.1), 0.9), None),
    "an average asked for": (BF16, lambda: ff.ema(ff.sgd(0.1), dtype=BF16), None),
    "a mean": (FP16, lambda: ff.swa(ff.sgd(0.1)), "not move by 1 / n of a change"),
    "a mean in fp32": (FP16, lambda: ff.swa(ff.sgd(0.1), dtype=FP32), None),
    "a mean of iterates": (BF16, free, "not move by 1 / n of a change"),
    "a mean of masters": (BF16, lambda: ff.master_weights(free()), None),
}


@pytest.mark.parametrize(
    "name, ranks",
    [(name, 0) for name in NARROW]
    + [(name, 2) for name in ("bfloat16", "masters", "an average")],
)
def test_moments_too_narrow_are_told_where_nobody_asked_for_them(name, ranks):
    dtype, make, said = NARROW[name]

    def main():
        params = [*model(dtype), {"n": torch.tensor(3), "w": None}]
        if ranks:
            params = ff.place(ff.shard(loss_fn, MESH, "data"), params[:2], data())
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            make().init(params)
        return [str(w.message) for w in seen]

    # Simulated ranks share what is recorded: the first one says it for all.
    found = ff.spmd(main, MESH)()[0] if ranks else main()
    assert len(found) == (said is not None), found
    assert said is None or said in found[0] and "ff.master_weights" in found[0]


def codes_of_another_mesh():
    params, optimizer = model(FP32), adam(moment_dtype=torch.uint8)
    state = optimizer.init([params[0]])
    optimizer.apply([params[1]], optimizer.init(params), [params[1]])
    return state


def differentiated(optimizer, dtype=FP32):
    w = torch.ones(3, dtype=dtype)
    torch.func.grad(lambda g: optimizer.apply(g, optimizer.init(w), w)[0].sum())(w)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_codes_of_parts_and_of_whole_leaves_stand_side_by_side(zero):
    """A leaf that no unit reads is whole on every rank, and so are its moments."""
    unit, mesh = ff.unit(lambda w, x: x @ w), ff.make_mesh({"data": 2}, "simulated")
    loss = lambda p, x: (unit(p["w"], x) * p["s"]).square().mean()  # noqa: E731
    optimizer = adam(moment_dtype=torch.uint8)
    params = {"w": integers(4, 4), "s": integers(4, seed=1)}
    x = integers(4, 4, seed=2)
    plain = optimizer(ff.value_and_grad(loss))
    step = ff.shard(plain, mesh, "data", zero=zero)

    def states(step, rows):
        """After one step, whose moments were never codes, and after two."""
        first, _ = step(ff.init_state(step, params, optimizer, rows), rows)
        second, _ = step(first, rows)
        return ff.unshard(first.params), ff.unshard(second.params)

    alone, _ = states(plain, x)
    found = ff.spmd(lambda: states(step, ff.local_batch(x, mesh, "data")), mesh)()
    for first, _ in found:
        torch.testing.assert_close(first, alone, rtol=1e-6, atol=1e-6)
    assert torch.equal(found[0][1]["s"], found[1][1]["s"])


EIGHT, CHANCE = adam(moment_dtype=torch.uint8), ff.stochastic_rounding(adam())
test_bad_input_is_refused = all_refused({
    "codes of another layout": (codes_of_another_mesh, ValueError, r"init\(params\)"),
    "codes, differentiated": (lambda: differentiated(EIGHT), RuntimeError,
                              "leave moment_dtype out"),
    "by chance, differentiated": (lambda: differentiated(CHANCE, BF16), RuntimeError,
                                  "master_weights"),
    "by chance, in float16": (lambda: CHANCE.init({"w": torch.ones(2, dtype=FP16)}),
                              TypeError, "'w' is float16.*master_weights"),
    "an update without parameters": (
        lambda: ff.master_weights(ff.sgd(0.1)).update(torch.ones(2), None), ValueError,
        r"update\(grads, state, params\)"),
    "moments in whole numbers": (lambda: adam(moment_dtype=torch.int8), TypeError,
                                 "torch.uint8"),
})  # fmt: skip
