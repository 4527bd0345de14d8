"""Units whose functions are compiled are as the plain ones; nothing else compiles.

Their numbers, what they send and what they hold are those of the plain functions; while
a step is recorded or planned, the plain ones run.
"""

import weakref

import pytest
import torch
from torch._dynamo import lookup_backend

import fsfunc as ff
from fsfunc.transforms.gathers import Gathers
from tests.checks import same, simulated
from tests.models import integers

# The compiler asks every tensor for its .grad, and hides this from who prints warnings.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]

MESH, PIPE, BOTH = simulated(2), simulated(pipe=2), simulated(data=2, pipe=2)
WIDTH, UNITS, STEPS = 4, 3, 2
RAN = []  # once for each run of a compiled graph


def counted(graph, inputs):
    """The backend "aot_eager", each run of whose graphs is noted."""
    run = lookup_backend("aot_eager")(graph, inputs)

    def noted(*args):
        RAN.append(graph)
        return run(*args)

    return noted


def layer(p, x):
    return x + torch.relu(x @ p["up"]) @ p["down"].t()


plain = ff.unit(layer)
compiled = ff.unit(torch.compile(layer, backend=counted))


@pytest.fixture(autouse=True)
def forgotten():
    """No test sees what another one ran or compiled."""
    RAN.clear()
    yield
    torch._dynamo.reset()


def params():
    def make(seed):
        return integers(WIDTH, 8, seed=seed, high=1, dtype=torch.float64)

    return [{"up": make(2 * k), "down": make(2 * k + 1)} for k in range(UNITS)]


BATCH = integers(8, WIDTH, seed=7, dtype=torch.float64)
OPTIMIZER = ff.sgd(2.0**-6)


def loss_of(unit, glue=lambda x: x, after=lambda: None):
    def loss(params, x):
        for p in params:
            x = glue(unit(p, x))
        after()
        return x.sum(-1).mean()

    return loss


def step_of(loss):
    return OPTIMIZER(ff.value_and_grad(loss))


def trained(loss, transform=lambda step: step, mesh=MESH, record="fake"):
    """(losses, whole parameters, what was sent) of one rank, after some steps."""

    def main():
        step = transform(step_of(loss))
        mine = ff.local_batch(BATCH, mesh, "data") if "data" in mesh.axes else BATCH
        state = ff.init_state(step, params(), OPTIMIZER, mine, record=record)
        if mesh.rank == 0:  # it goes first
            assert not RAN, "a compiled function ran while the step was recorded"
        losses = []
        with ff.ledger() as log:
            for _ in range(STEPS):
                state, metrics = step(state, mine)
                losses.append(metrics["loss"])
        sent = [(r.op, r.axis, r.bytes, r.phase) for r in log.of(mesh.rank)]
        return losses, ff.unshard(state.params), sent

    torch.manual_seed(0)
    return ff.spmd(main, mesh)()[0]


def shard(step, mesh=MESH, **options):
    return ff.shard(step, mesh, "data", **options)


def pipe(step, mesh=PIPE, **options):
    return ff.pipeline(step, mesh, "pipe", n_microbatches=2, **options)


def bf16(step):
    return ff.precision(step, compute=torch.bfloat16)


STACKS = {
    "zero=3": (shard, MESH),
    "zero=3 remat": (lambda s: shard(ff.remat(s)), MESH),
    "remat(shard)": (lambda s: ff.remat(shard(s, zero=1)), MESH),
    "accumulate(shard)": (lambda s: ff.accumulate(shard(s), 2), MESH),
    "donate, bf16": (lambda s: ff.donate(shard(bf16(s))), MESH),
    "pipeline": (lambda s: pipe(s, schedule=ff.schedules.zb_h1), PIPE),
    "pipeline(shard(remat))": (lambda s: pipe(shard(ff.remat(s), BOTH), BOTH), BOTH),
}
# Runs of units on all ranks: the recompute of each, and one for each microbatch.
RUNS = {"accumulate(shard)": 2, "pipeline(shard(remat))": 4}


@pytest.mark.parametrize("stack", STACKS)
def test_a_compiled_unit_is_the_plain_one(stack):
    """The same bits, and the same record of what was sent, call by call."""
    transform, mesh = STACKS[stack]
    expected = trained(loss_of(plain), transform, mesh)
    assert not RAN
    same(trained(loss_of(compiled), transform, mesh), expected)
    each = RUNS.get(stack, 2 if "remat" in stack or mesh is PIPE else 1)
    ranks = 2 if "data" in mesh.axes else 1
    assert len(RAN) == STEPS * UNITS * ranks * each


def watching_gathers(monkeypatch):
    """(counts, look): each ``look()`` appends how many gathered buffers are alive."""
    gathered, alive, start = [], [], Gathers.start_gather

    def watched(runtime, *given):
        full, work = start(runtime, *given)
        gathered.append(weakref.ref(full))
        return full, work

    def look():
        alive.append(sum(full() is not None for full in gathered))

    monkeypatch.setattr(Gathers, "start_gather", watched)
    return alive, look


SLOW = pytest.mark.slow  # the real compiler


def compile_(fn, **options):
    return torch.compile(fn, backend=counted, **options)


def test_what_is_compiled_between_units_runs_plainly_in_a_stage():
    """It may be given stand-ins for what other stages hold, which have no memory."""

    def glue(x):
        return torch.relu(x) + 1

    fast = torch.compile(glue, backend="inductor")
    expected = trained(loss_of(plain, glue), *STACKS["pipeline"])
    same(trained(loss_of(compiled, fast), *STACKS["pipeline"]), expected)
    assert len(RAN) == STEPS * UNITS * 2  # units are compiled all the same


@SLOW
def test_a_compiled_unit_draws_again_what_it_drew():
    def dropped(p, x):
        return torch.nn.functional.dropout(layer(p, x), 0.5)

    unit = ff.unit(torch.compile(dropped, backend="inductor"))
    once = trained(loss_of(unit), *STACKS["zero=3"])
    again = trained(loss_of(unit), *STACKS["remat(shard)"])
    same(again[:2], once[:2])


def test_a_plan_of_compiled_units_is_that_of_plain_ones():
    mesh = ff.make_mesh({"data": 8}, "abstract")

    def planned(unit):
        step = ff.shard(ff.remat(step_of(loss_of(unit))), mesh, "data")
        return ff.plan(step, params, OPTIMIZER, BATCH, mesh=mesh)

    found, expected = planned(compiled), planned(plain)
    assert not RAN
    assert found.bytes("data") == expected.bytes("data") > 0
    assert (found.peak_bytes, found.flops) == (expected.peak_bytes, expected.flops)


REFUSED = {
    "a gradient call": lambda: (compile_(ff.value_and_grad(loss_of(plain))), params()),
    "a loss": lambda: (ff.value_and_grad(compile_(loss_of(plain))), params()),
    "a unit": lambda: (compile_(plain), params()[0]),
    "a unit in a unit": lambda: (
        ff.unit(compile_(lambda p, x: plain(p, x))),
        params()[0],
    ),
    "a transformed loss": lambda: (compile_(ff.remat(loss_of(plain))), params()),
    "a step": lambda: (
        compile_(step_of(loss_of(plain))),
        ff.TrainState(params(), OPTIMIZER.init(params())),
    ),
}
WAY_OUT = r"units compile, steps do not.*ff.unit\(torch.compile\(fn\)\)"


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_around_units_does_not_compile(name):
    fn, first = REFUSED[name]()
    with pytest.raises(RuntimeError, match=WAY_OUT) as error:
        fn(first, BATCH)
    assert type(error.value) is RuntimeError


def test_as_one_graph_it_is_refused_by_the_compiler_in_our_words():
    fn = torch.compile(ff.value_and_grad(loss_of(plain)), fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=WAY_OUT):
        fn(params(), BATCH)
