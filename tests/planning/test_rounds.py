"""Microbatches that a plan notes without running them are what it would have run."""

import pytest
import torch

import fsfunc as ff
from fsfunc.planning.observer import Observer
from tests.models import chain, floats, layer, layers

pytestmark = pytest.mark.usefixtures("uncollected")

N, WIDTH, LAYERS = 6, 8, 2
MESH = ff.make_mesh({"data": 2}, "abstract")
SHARDED = ff.sharded_adam(1e-3)


def inside(zero, n=N):
    return lambda step: ff.shard(ff.accumulate(step, n), MESH, "data", zero=zero)


def outside(zero, n=N):
    return lambda step: ff.accumulate(ff.shard(step, MESH, "data", zero=zero), n)


def weighted(params, x):
    total = chain(layer)(params, x)
    return ff.Weighted(total * len(x), len(x)), {"n": ff.Summed(x.sum()), "m": x.sum()}


def compressed(step):
    step = ff.precision(ff.remat(step), torch.bfloat16, reduce=torch.float32)
    return ff.shard(ff.accumulate(step, N), MESH, "data")


def sparing(step):
    return inside(3)(ff.remat(step, policy="except_last"))


def nested(step):
    return outside(2, 3)(ff.accumulate(step, 2))


STACKS = {
    "alone": lambda step: ff.accumulate(step, N),
    **{f"inside {zero}": inside(zero) for zero in range(4)},
    **{f"outside {zero}": outside(zero) for zero in range(4)},
    "compressed": compressed,
    "sparing": sparing,
    "nested": nested,
    "of activations on the host": lambda step: inside(3)(
        ff.offload(step, activations="host")
    ),
}


def trained(loss):
    def step(state, x):
        grad = ff.value_and_grad(loss, has_aux=loss is weighted)
        return state.apply_gradients(grad(state.params, x)[1], SHARDED)

    return step


def planned(step, monkeypatch, *, every, mesh=MESH, rows=4 * N, depth=LAYERS):
    """All that the plans of the ranks say, and how often a unit's body ran."""
    count = 0
    plainly = Observer.run_body

    def body(*args):
        nonlocal count
        count += 1
        return plainly(*args)

    with monkeypatch.context() as patch:
        patch.setattr(Observer, "run_body", body)
        init = lambda: layers(depth, WIDTH, make=floats)  # noqa: E731
        args, how = (step, init, SHARDED, torch.zeros(rows, WIDTH)), {"mesh": mesh}
        found = ff.plan(*args, **how, every_microbatch=every)
    return [getattr(r, fact) for r in found.ranks for fact in FACTS], count


FACTS = ("events", "kinds", "records", "calls", "derived", "memory", "peak", "turns")
BOTH = [(name, chain(layer)) for name in STACKS]
BOTH += [(name, weighted) for name in ("alone", "inside 1", "outside 3", "nested")]
NAMES = [f"{name}, {getattr(loss, '__name__', '')}" for name, loss in BOTH]


@pytest.mark.parametrize(("name", "loss"), BOTH, ids=NAMES)
def test_a_microbatch_that_is_not_run_is_noted_as_it_would_be(name, loss, monkeypatch):
    build = STACKS[name]
    step = trained(loss)
    plain, every = planned(build(step), monkeypatch, every=True)
    quick, run = planned(build(step), monkeypatch, every=False)
    assert all(a == b for a, b in zip(quick, plain, strict=True))
    assert run < every or name == "nested"


@pytest.mark.parametrize("zero", [0, 3])
def test_sums_of_a_sharded_step_are_all_that_a_microbatch_leaves(zero):
    """The first's gradients become the sums, to which those of others are added."""

    def peak(n):
        step, batch = outside(zero, n)(trained(chain(layer))), torch.zeros(2 * n, WIDTH)
        init = lambda: layers(8, WIDTH, make=floats)  # noqa: E731
        return ff.plan(ff.donate(step), init, SHARDED, batch, mesh=MESH).peak_bytes

    rows = 2 * WIDTH * 4  # of the batch
    unit = WIDTH * (WIDTH + 1) * 4  # whole; of the three in flight
    assert peak(2) - peak(1) <= 3 * unit + rows
    assert peak(6) - peak(2) <= 4 * rows


def test_what_a_microbatch_leaves_behind_has_every_one_run(monkeypatch):
    """Memory that grows, as of gradients by the batch, is no equal round."""

    def step(state, x):
        grad = ff.value_and_grad(chain(layer), (0, 1), batch_argnums=1)
        _, (grads, by_x) = grad(state.params, x)
        return state.apply_gradients(grads, SHARDED), by_x

    step = inside(3)(step)
    plain, every = planned(step, monkeypatch, every=True)
    assert planned(step, monkeypatch, every=False) == (plain, every)


def test_pipelined_microbatches_within_accumulated_ones(monkeypatch):
    mesh, found = ff.make_mesh({"pipe": 2}, "abstract"), []
    for every in (True, False):
        step = ff.pipeline(trained(chain(layer)), mesh, "pipe", n_microbatches=2)
        step = ff.accumulate(step, N)
        found.append(planned(step, monkeypatch, every=every, mesh=mesh))
    (plain, every), (quick, run) = found
    assert quick == plain and run < every
