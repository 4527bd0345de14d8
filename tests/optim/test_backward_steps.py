"""`step_in_backward`: bits and bytes of the usual step, and gradients of one unit."""

import functools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from fsfunc.runtime.memory import KINDS
from tests import checks, models
from tests.checks import all_refused, simulated
from tests.models import layer
from tests.optim.optimizers import ours
from tests.optim.steps import trained as stacked
from tests.optim.trees import assert_bits
from tests.planning.comparing import planned_and_run

WIDTH, UNITS, ROWS = 8, 3, 24
BF16 = torch.bfloat16


@ff.unit
def nested(p, x):
    """Its own leaf is read again after the inner unit's call."""
    return layer(p["inner"], x * p["own"]) * p["own"]


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 2


def flat(i):
    return {"w": draw(WIDTH, WIDTH, seed=i), "b": draw(WIDTH, seed=i + 50)}


def init():
    return [flat(i) for i in range(UNITS)]


def batch_of(rows=ROWS):
    return draw(rows, WIDTH, seed=99), draw(rows, WIDTH, seed=98)


def loss_fn(params, batch):
    x, y = batch
    for p in params:
        x = layer(p, x)
    return (x - y).square().mean()


def trained(optimizer, around, mesh, loss=loss_fn, init=init, steps=3, **laid):
    """(params, optimizer's state, losses, bytes) of donated steps, whole, by rank."""
    stack = lambda f, mesh: ff.donate(around(f))  # noqa: E731
    how = {"init": init(), "mesh": mesh, "look": ff.unshard, **laid}
    runs = stacked(stack, optimizer, loss, [batch_of()] * steps, **how)

    return [(r.params, r.seen[-1], r.losses, sorted(r.sent)) for r in runs]


def assert_same(optimizer, around, mesh, **options):
    usual = trained(optimizer, around, mesh, **options)
    found = trained(ff.step_in_backward(optimizer), around, mesh, **options)
    for a, b in zip(found, usual, strict=True):
        assert_bits(a[:3], b[:3])
        assert a[3] == b[3]


ADAM = ff.sharded_adam(1e-2)
adam = functools.partial(ff.sharded_adam, 1e-2)
GRID, MESH = simulated(node=2, data=2), simulated()


def sharded(f, mesh=MESH, **how):
    return ff.shard(f, mesh, "data", **how)


ONE, THREE = simulated(1), simulated(3)
STACKS = {
    "one rank": (ONE, lambda f: sharded(f, ONE, zero=0)),
    "remat": (THREE, lambda f: sharded(ff.remat(f), THREE)),
    "bf16": (MESH, lambda f: sharded(ff.precision(f, BF16), zero=2)),
    "accumulate": (MESH, lambda f: sharded(ff.accumulate(ff.remat(f), 2), zero=0)),
    "HSDP, each": (GRID, lambda f: sharded(
        ff.accumulate(f, 2), GRID, replicate="node", reduce_each=True)),
    "two axes": (GRID, lambda f: ff.shard(f, GRID, ("node", "data"), zero=2)),
    "kept": (MESH, lambda f: sharded(f, reshard_after_forward=False)),
    "remat around": (MESH, lambda f: ff.remat(sharded(f))),
    "offload": (MESH, lambda f: ff.offload(
        sharded(f), params="host", moments="host")),
    "float16": (THREE, lambda f: sharded(
        ff.precision(f, torch.float16, torch.float32), THREE)),
    "smaller": (MESH, lambda f: sharded(f, reduction=ff.QuantizedReduction())),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:gradients are computed in float16")
@pytest.mark.parametrize("name", STACKS)
def test_it_is_the_usual_step_in_bits_and_bytes(name):
    mesh, around = STACKS[name]
    assert_same(ADAM, around, mesh, steps=2)


def by_unit(*optimizers):
    """One for each unit."""
    return ff.partition(
        {str(i): o for i, o in enumerate(optimizers)}, lambda path, leaf: path[0]
    )


OPTIMIZERS = {
    "elementwise": lambda: by_unit(
        ff.sgd(0.1, momentum=0.9, nesterov=True), ff.lion(1e-2),
        ff.from_torch(torch.optim.RMSprop, lr=0.01, momentum=0.9)),
    "adams": lambda: by_unit(
        adam(moment_dtype=BF16), ff.sharded_adam(ff.warmup_cosine(0.1, 2, 9)),
        adam(weight_decay=0.5, mask=lambda path, leaf: leaf.ndim > 1)),
    "averages": lambda: ff.ema(ff.swa(ours("own Signum"), start=1), 0.9),
    "schedule_free": lambda: ff.schedule_free(ff.sgd(0.1), 0.1),
    "some leaves": lambda: ff.partition(
        {"w": ADAM, "b": ff.sgd(0.1)},
        lambda path, leaf: None if path.startswith("1/") else path[-1]),
    "one's own": lambda: ff.chain(ff.clip_by_value(1e-3), ff.Optimizer(
        ADAM.init, ADAM.update, elementwise=True)),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_that_treats_each_element_by_itself_will_do(name):
    assert_same(OPTIMIZERS[name](), sharded, MESH)


@pytest.mark.parametrize("within", [ff.master_weights, ff.stochastic_rounding])
def test_parameters_of_16_bits_with_copies(within):
    def low():
        return tree.map(lambda x: x.to(BF16), init())

    def loss(params, batch):
        return loss_fn(params, [x.to(BF16) for x in batch])

    assert_same(within(ADAM), sharded, MESH, init=low, loss=loss)


# What a loss may do with parameters

KINDS_OF_CALL = "unit nested no_grad beside detached inner peek".split()
CALLS = st.sampled_from(KINDS_OF_CALL)
PEEK = [("peek", 0), ("unit", 1), ("unit", 0)]  # the last of them is stepped first


@ff.unit
def peeking(p, x, inner):
    """Reads another unit's parameters without a gradient, when it runs again too."""
    with torch.no_grad():
        other = layer(inner, x)
    return nested(p, x) + other


@settings(max_examples=4)
@given(
    calls=st.lists(st.tuples(CALLS, st.integers(0, 2)), min_size=1, max_size=6),
    remat=st.booleans(),
    micro=st.sampled_from([1, 2]),
    min_bytes=st.sampled_from([0, 700]),
    zero=st.sampled_from([0, 2, 3]),
    size=st.sampled_from([1, 2]),
)
@example(PEEK, True, 1, 0, 0, 2)
@example(PEEK, True, 1, 0, 3, 2)
@example([("peek", 1), ("peek", 2), ("nested", 2)], True, 1, 700, 2, 2)
def test_whatever_a_loss_reads_again(calls, remat, micro, min_bytes, zero, size):
    """Buffers that several calls read, with a graph, without one, or outside units."""

    def loss(params, batch):
        x, y = batch
        for kind, i in calls:
            p = params["nested"][i]
            if kind == "unit":
                x = layer(params["flat"][i], x)
            elif kind == "nested":
                x = nested(p, x)
            elif kind == "inner":
                x = layer(p["inner"], x)
            elif kind == "peek":
                x = peeking(p, x, params["flat"][i])
            elif kind == "no_grad":
                with torch.no_grad():
                    other = layer(params["flat"][i], x)
                x = x + other
            elif kind == "detached":
                x = x + layer(params["flat"][i], x).detach()
            else:
                squares = tree.map(torch.square, params["flat"][i])
                x = x + 1e-2 * ff.tree_sum(squares)
        return (x - y).square().mean()

    def params():
        return {
            "flat": [flat(i) for i in range(3)],
            "nested": [{"inner": flat(i + 9), "own": draw(WIDTH)} for i in range(3)],
        }

    mesh = simulated(size)

    def around(f):
        f = ff.remat(f) if remat else f
        f = ff.accumulate(f, micro) if micro > 1 else f
        return ff.shard(f, mesh, "data", zero=zero, min_bytes=min_bytes)

    assert_same(ADAM, around, mesh, loss=loss, init=params, steps=2)


def test_split_leaves_and_those_that_ranks_own():
    mesh = simulated(data=2, model=2)

    def loss(params, batch):
        x, y = batch
        for p in params:
            x = models.split(p, x)
        return (x - y).square().mean()

    def params():
        return [
            {k: draw(WIDTH, WIDTH, seed=i) for k in ("up", "down")} for i in range(3)
        ]

    around, laid = lambda f: sharded(f, mesh), {"layouts": models.splits("*/")}  # noqa: E731
    assert_same(ADAM, around, mesh, loss=loss, init=params, steps=2, **laid)


# Memory


@pytest.mark.parametrize("zero, size", [(0, 2), (3, 3), (0, 1)])
def test_gradients_are_those_of_one_unit_as_planned(zero, size):
    """Measured: what autograd gives of one unit, the buffer it travels in, and a part.

    On one rank nothing travels: what autograd gives and the buffer, before it is given.
    """
    mesh, optimizer = simulated(size), ff.step_in_backward(ADAM)
    unit = 4 * (WIDTH * WIDTH + WIDTH)

    def main():
        step = sharded(optimizer(ff.value_and_grad(loss_fn)), mesh, zero=zero)
        batch = ff.local_batch(batch_of(), mesh, "data")
        state = ff.init_state(step, init(), optimizer, batch)
        step = ff.donate(step)
        state, _ = step(state, batch)
        both = planned_and_run(step, state, batch)
        both.check()
        return both.plan.ranks[0].memory

    at = KINDS.index("gradients")
    for memory in ff.spmd(main, mesh)():
        top = max(held[at] for _, held in memory)
        assert unit <= top <= 2 * unit + unit // (size if zero else 1) + 64


def test_a_state_is_written_where_it_lies_and_the_peak_falls():
    """By the gradients of all units but two."""
    count = 9

    def places(state):
        leaves = tree.leaves(state, is_leaf=ff.is_sharded)
        return [x.local.data_ptr() for x in leaves if ff.is_sharded(x)]

    def main(optimizer):
        params = [flat(i) for i in range(count)]
        step = sharded(ff.remat(optimizer(ff.value_and_grad(loss_fn))))
        batch = ff.local_batch(batch_of(2), MESH, "data")
        state = ff.init_state(step, params, optimizer, batch)
        state, _ = ff.donate(step)(state, batch)
        where = places(state)
        with ff.testing.live_bytes(state, batch) as seen:
            state, _ = ff.donate(step)(state, batch)
        assert places(state) == where
        return seen.peak_bytes

    usual, found = [
        ff.spmd(main, MESH)(o)[0] for o in (ADAM, ff.step_in_backward(ADAM))
    ]
    part = 4 * (WIDTH * WIDTH + WIDTH) // 2
    assert found <= usual - (count - 5) * part


# What is refused


def stepped(optimizer, around=sharded, loss=loss_fn, grad=None):
    step = ff.donate(around(optimizer(grad or ff.value_and_grad(loss))))
    checks.trained(step, init(), optimizer, batch_of(), steps=1)


def weighted(params, batch):
    return ff.Weighted(loss_fn(params, batch) * 3, 3)


def twice(params, batch):
    value, grads = ff.value_and_grad(loss_fn)(params, batch)
    return value, ff.value_and_grad(loss_fn)(params, batch)[1]


def doubled(params, batch):
    value, grads = ff.value_and_grad(loss_fn)(params, batch)
    return value, tree.map(lambda g: 2 * g, grads)


def clipped(params, batch):
    value, grads = ff.value_and_grad(loss_fn)(params, batch)
    return value, ff.tree_scale(grads, 1 / ff.global_norm(grads))


def swapped(params, batch):
    value, grads = ff.value_and_grad(loss_fn)(params, batch)
    return value, [grads[1], grads[0], *grads[2:]]


SIB, STAGES = ff.step_in_backward(ADAM), simulated(data=1, pipe=2)
NORMS = {
    "a norm": ff.chain(ff.clip_by_global_norm(1e6),
                       ff.sgd(ff.warmup_cosine(1.0, 100, 1000))),
    "lamb": ff.lamb(0.1), "lars": ff.lars(0.1), "adafactor": ff.adafactor(0.1),
    "muon": ff.partition({"w": ff.muon(0.1), "b": ADAM}, lambda path, leaf: path[-1]),
    "apply_if_finite": ff.apply_if_finite(ADAM),
    "moments in float16": adam(moment_dtype=torch.float16),
    "moments in 8 bits": adam(moment_dtype=torch.uint8),
}  # fmt: skip
BAD = {
    **{name: (lambda o=o: stepped(ff.step_in_backward(o)), "each element by itself")
       for name, o in NORMS.items()},
    "loss_scale within": (lambda: ff.step_in_backward(ff.loss_scale(ADAM)),
                          "without step_in_backward"),
    "one's own": (lambda: ff.step_in_backward(ff.Optimizer(ADAM.init, ADAM.update)),
                  "elementwise=True"),
    "itself within": (lambda: ff.step_in_backward(SIB), "makes its"),
    "loss_scale around": (lambda: stepped(ff.loss_scale(SIB)), "nothing around"),
    "clip around": (lambda: stepped(ff.chain(ff.clip_by_global_norm(1.0), SIB)),
                    "nothing around"),
    "its own apply": (lambda: SIB.apply(init(), ADAM.init(init()), init()),
                      r"step_in_backward\(optimizer\)\(grad_fn\)"),
    "weighted": (lambda: stepped(SIB, loss=weighted), "Return a mean"),
    "twice": (lambda: stepped(SIB, grad=twice), "one loss"),
    "zero=1": (lambda: stepped(SIB, lambda f: sharded(f, zero=1)), "zero=2"),
    "accumulate(shard)": (
        lambda: stepped(SIB, lambda f: ff.accumulate(sharded(f), 2)),
        r"shard\(accumulate"),
    "a pipeline": (lambda: stepped(SIB, lambda f: sharded(ff.pipeline(
        f, STAGES, "pipe", n_microbatches=2), STAGES)), "without it"),
}  # fmt: skip


test_refused = all_refused({k: (call, ValueError, w) for k, (call, w) in BAD.items()})
UP = "used this gradient up"
test_a_gradient_that_is_used_up_cannot_be_used_again = all_refused(
    {  # known once gradients are given
        "swapped": (lambda: stepped(SIB, grad=swapped), ValueError, "other grad"),
        "doubled": (lambda: stepped(SIB, grad=doubled), RuntimeError, UP),
        "clipped": (lambda: stepped(SIB, grad=clipped), RuntimeError, UP),
    },
    sent=True,
)
