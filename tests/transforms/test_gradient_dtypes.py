"""`precision(gradients=)`: gradients of fewer bits, rounded once; 14 bytes in all."""

import functools

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from tests.checks import close, on_ranks, refused, same, simulated, trained
from tests.models import floats, layer, layers

WIDTH, UNITS = 32, 4
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
COUNT, BUFFER = UNITS * (WIDTH * WIDTH + WIDTH), WIDTH * WIDTH + WIDTH
ADAM = ff.sharded_adam(1e-2)


def loss_fn(params, batch):
    x, y = batch
    for p in params:
        x = layer(p, x)
    return (x - y).square().mean()


def draw(*shape, seed=0, dtype=FP32):
    return floats(*shape, seed=seed, dtype=dtype) / 8


def init():
    return layers(UNITS, WIDTH, make=draw)


def batch_of():
    return draw(12, WIDTH, seed=99), draw(12, WIDTH, seed=98)


half = functools.partial(ff.precision, compute=BF16, reduce=FP32)


@pytest.mark.parametrize("order", ["inside", "outside"])
def test_ranks_of_a_pipeline_hold_them_in_one_dtype(order):
    """Those of other stages' units, and of leaves that several stages use, too."""
    mesh = simulated(data=2, pipe=2)
    cut = functools.partial(ff.shard, mesh=mesh, axis="data")
    staged = functools.partial(ff.pipeline, mesh=mesh, axis="pipe", n_microbatches=2)
    tied = lambda p, batch: loss_fn([*p, p[0]], batch)  # noqa: E731

    def main(given):
        grad = half(ff.value_and_grad(tied), gradients=given)
        grad = staged(cut(grad)) if order == "inside" else cut(staged(grad))
        batch = ff.local_batch(batch_of(), mesh, "data")
        grads = grad(ff.place(grad, init(), batch), batch)[1]
        kinds = {x.local.dtype for x in tree.leaves(grads, is_leaf=ff.is_sharded)}
        return ff.unshard(grads), kinds

    wide, narrow = ff.spmd(main, mesh)(FP32)[0], ff.spmd(main, mesh)(BF16)
    for grads, kinds in narrow:
        assert kinds == {BF16}
        close(tree.map(torch.Tensor.float, grads), wide[0], 1e-2)


@pytest.mark.parametrize(
    "zero, tied, around", [(0, False, None), (3, True, None), (1, True, BF16)]
)
def test_ranks_of_a_pipeline_agree_where_units_have_other_ones(zero, tied, around):
    """What stages know of each other's units is less than `precision` around these."""
    mesh = simulated(data=2, pipe=2)
    narrow = ff.precision(layer, FP32, gradients=BF16)
    units = [narrow, layer, layer, narrow, layer]

    def loss(params, batch):
        x, y = batch
        for unit, p in zip(units, [*params, params[0]], strict=tied):
            x = unit(p, x)
        return (x - y).square().mean()

    def main():
        grad = ff.value_and_grad(loss)
        if around is not None:
            grad = ff.precision(grad, FP32, gradients=around)
        grad = ff.pipeline(ff.shard(grad, mesh, "data", zero=zero), mesh, "pipe",
            n_microbatches=2)  # fmt: skip
        batch = ff.local_batch(batch_of(), mesh, "data")
        grads = grad(ff.place(grad, init(), batch), batch)[1]
        leaves = tree.leaves(grads, is_leaf=ff.is_sharded)
        return ff.unshard(grads), {x.local.dtype for x in leaves}

    expected = ff.value_and_grad(loss)(init(), batch_of())[1]
    for grads, kinds in ff.spmd(main, mesh)():
        assert kinds == {around or FP32}
        close(tree.map(torch.Tensor.float, grads), expected, 1e-2)


@pytest.mark.parametrize(
    "size, zero, given", [(1, 3, FP16), (2, 0, BF16), (3, 1, FP16), (3, 3, BF16)]
)
def test_each_is_rounded_once(size, zero, given):
    mesh = simulated(size)

    def grads(given):
        grad = half(ff.value_and_grad(loss_fn), gradients=given)
        grad = ff.accumulate(grad, 2, batch_argnums=1)
        grad = ff.shard(grad, mesh, "data", zero=zero)
        return [g for _, g in on_ranks(grad, init(), batch_of(), mesh=mesh)]

    for wide, narrow in zip(grads(None), grads(given), strict=True):
        same(narrow, tree.map(lambda x: (2 * x).to(given) / 2, wide))


@pytest.mark.parametrize(
    "order, zero", [("nw", 3), ("wn", 1), ("wnw", 0), ("nwn", 3), ("nf", 1), ("fn", 0)]
)
def test_a_buffer_may_have_both_kinds(zero, order):
    """Whole numbers, of which no sum is rounded."""
    x, w = torch.arange(8.0).reshape(4, 2), torch.ones(2)
    wide = ff.unit(lambda w, x: x * w)
    kinds = {"w": wide, "n": ff.precision(wide, FP32, gradients=BF16)}
    kinds["f"] = ff.precision(wide, FP32, gradients=FP32)

    def loss(w, x):
        for kind in order:
            x = kinds[kind](w, x)
        return 2 * x.mean()

    grad = ff.value_and_grad(loss)
    sharded = ff.shard(grad, simulated(), "data", zero=zero)
    for _, found in on_ranks(sharded, w, x):
        assert torch.equal(found.float(), grad(w, x)[1])


def held(values):
    """Bytes of the storages of a tree on this rank."""
    leaves = tree.leaves(values, is_leaf=ff.is_sharded)
    parts = [x.local if ff.is_sharded(x) else x for x in leaves]
    stored = [x.untyped_storage() for x in parts if isinstance(x, torch.Tensor)]
    return sum({s.data_ptr(): s.nbytes() for s in stored}.values())


@pytest.mark.parametrize(
    "given, stated, zero", [(None, 16, 3), (BF16, 14, 1), (BF16, 14, 3)]
)
def test_bytes_a_parameter_are_those_stated(given, stated, zero):
    """Of a rank's part; at zero 1 and 2 the whole of 2 bytes is the cache's."""
    mesh = simulated(4)

    def main():
        found = []

        def train(state, batch):
            loss, grads = ff.value_and_grad(loss_fn)(state.params, batch)
            if not ff.recording():  # which reads no storages
                found.append(held(state) + held(grads))
            return state.apply_gradients(grads, ADAM), loss

        step = ff.shard(half(train, gradients=given), mesh, "data", zero=zero)
        batch = ff.local_batch(batch_of(), mesh, "data")
        state = ff.init_state(step, init(), ADAM, batch)
        found.clear()
        step = ff.donate(step)
        for _ in range(2):
            state, _ = step(state, batch)
        return found

    for found in ff.spmd(main, mesh)():
        assert found[-1] == stated * COUNT / 4


@pytest.mark.parametrize("moment_dtype", [None, BF16])
def test_no_whole_of_them_is_made_in_float32(moment_dtype):
    """The peak, as planned: the update copies as much as one buffer has at a time."""
    mesh = simulated(1)
    optimizer = ff.sharded_adam(1e-2, moment_dtype=moment_dtype)
    step = optimizer(ff.value_and_grad(loss_fn))
    step = ff.donate(ff.shard(half(step, gradients=BF16), mesh, "data"))

    def main():
        batch = batch_of()
        state = ff.init_state(step, init(), optimizer, batch)
        plan = ff.plan(step, state, batch)
        with ff.testing.live_bytes(state, batch) as seen:
            step(state, batch)
        assert plan.ranks[0].peak_bytes == seen.peak_bytes
        return seen.peak_bytes - held(batch)

    copies = 4 if moment_dtype is None else 12
    stated = (14 if moment_dtype is None else 10) * COUNT
    assert ff.spmd(main, mesh)()[0] <= stated + copies * BUFFER + 1024


UPDATES = {
    "adam": ADAM,
    "sgd": ff.sgd(0.1, momentum=0.9),
    "lion": ff.lion(0.1),
    "clipped": ff.chain(ff.clip_by_global_norm(1e-2), ff.sgd(0.1)),
    "lamb": ff.lamb(0.1),
    "8 bits": ff.sharded_adam(0.1, moment_dtype=torch.uint8),
    "torch's": ff.from_torch(torch.optim.RMSprop, lr=0.01),
}


@pytest.mark.parametrize("name", UPDATES)
def test_optimizers_read_them_as_if_they_were_wide(name):
    """Norms too, which are made in float32; a clipped gradient is rounded again."""
    mesh, optimizer = simulated(), UPDATES[name]

    def main():
        grad = ff.shard(half(ff.value_and_grad(loss_fn), gradients=BF16), mesh, "data")
        batch = ff.local_batch(batch_of(), mesh, "data")
        params = ff.place(grad, init(), batch)
        grads, state = grad(params, batch)[1], optimizer.init(params)
        wide = tree.map(lambda g: g.float(), grads)
        a, b = [optimizer.apply(g, state, params)[0] for g in (grads, wide)]
        norms = [ff.global_norm(g) for g in (grads, wide)]
        return ff.unshard(a), ff.unshard(b), *norms

    for a, b, norm, expected in ff.spmd(main, mesh)():
        assert norm.dtype == FP32 and torch.isclose(norm, expected, rtol=1e-6)
        if name == "clipped":
            for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True):
                torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
        else:
            same(a, b)


@pytest.mark.parametrize(
    "make", [lambda o: ff.loss_scale(o, 2.0**10), ff.step_in_backward]
)
def test_the_step_is_the_same(make):
    mesh = simulated(3)

    def params(optimizer):
        step = half(optimizer(ff.value_and_grad(loss_fn)), gradients=BF16)
        step = ff.donate(ff.shard(step, mesh, "data"))
        return trained(step, init(), optimizer, batch_of(), mesh=mesh)[0].params

    same(params(make(ADAM)), params(ADAM))


def test_what_is_no_dtype_is_refused():
    call = functools.partial(ff.precision, loss_fn, BF16, gradients=torch.int8)
    refused(call, ValueError, "a floating dtype, such as torch.bfloat16")
