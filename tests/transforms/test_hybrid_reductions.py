"""Under HSDP sums over replicas run beside the backward, and once where asked."""

import pytest
import torch

import fsfunc as ff
from fsfunc.comm.comparison import RanksDiffer
from fsfunc.core.frames import frame
from fsfunc.planning.events import Ran, Started, Waited
from tests.checks import close, refused, same, simulated, trained
from tests.models import WIDTH, chain, integers, layers, linear, train_step

MESH = simulated(node=2, data=2)
LAYERS, MICRO = 3, 4  # of microbatches more than two: first, some, last
OPTIMIZER = ff.sgd(0.5)
STEP = train_step(chain(linear), OPTIMIZER)
BATCH = integers(4 * MICRO, WIDTH, seed=9, high=1)


def params():
    return layers(LAYERS)


def once(zero=3, each=True):
    """Each microbatch is reduced over "data", their sum over "node"."""
    step = ff.accumulate(STEP, MICRO)
    options = {"zero": zero, "replicate": "node", "reduce_each": each}
    return ff.shard(step, MESH, "data", **options)


def run(step):
    """(whole parameters, ledger) of each rank after one step."""
    runs = trained(step, params(), OPTIMIZER, BATCH, mesh=MESH, steps=1)
    return [(run.params, run.logs[0]) for run in runs]


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_an_axis_over_which_nothing_is_summed_wants_one_batch(zero):
    """Else the parameters of its ranks would go apart, and none would say so."""
    step = ff.shard(STEP, MESH, "data", zero=zero)
    with pytest.raises(
        RanksDiffer,
        match=r"along 'node' are given unlike batches(.|\n)*'0': rank 0.*rank 2",
    ):
        run(step)

    def told(state, batch):  # a mean of what is told makes no parameters equal
        state, metrics = STEP(state, batch)
        return state, ff.tree.map(lambda x: ff.pmean(x, "node"), metrics)

    with pytest.raises(RanksDiffer, match="along 'node' are given unlike batches"):
        run(ff.shard(told, MESH, "data", zero=zero))

    def asks(state, batch):  # whoever asks for its place knows of the axis
        ff.axis_index("node")
        return STEP(state, batch)

    how, half = {"mesh": MESH, "over": "data"}, BATCH[: len(BATCH) // 2]
    first, *others = trained(step, params(), OPTIMIZER, half, **how)
    for other in others:
        same(other.params, first.params)
    trained(ff.shard(asks, MESH, "data"), params(), OPTIMIZER, half, **how)


DRIFTS = {
    "seeds, in a unit": lambda x: x,
    "seeds": lambda x: torch.nn.functional.dropout(x, 0.5, True),
    "draws of its own": lambda x: own_dropout(x),
    "its place": lambda x: x * (1 + ff.axis_index("node")),
}


def own_dropout(x):
    with ff.nn.own_draws("node"):
        return torch.nn.functional.dropout(x, 0.5, True)


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("why", DRIFTS)
def test_ranks_that_a_first_step_drives_apart_are_told(zero, why):
    """Along an axis that nothing names: by seeds, draws, or their place on it."""

    @ff.unit
    def noisy(p, x):
        return linear(p, torch.nn.functional.dropout(x, 0.5, "unit" in why))

    def loss(params, x):
        for p in params:
            x = DRIFTS[why](noisy(p, x))
        return x.square().mean()

    step = ff.shard(train_step(loss, OPTIMIZER), MESH, "data", zero=zero)

    def main(apart):
        batch = ff.local_batch(BATCH, MESH, "data")
        state = ff.init_state(step, params(), OPTIMIZER, batch)
        torch.manual_seed(MESH.rank if apart else 1)
        for _ in range(2):
            state, _ = step(state, batch)
        ff.testing.check_replicated(state.params, "node")

    if "seeds" in why:
        ff.spmd(main, MESH)(False)  # right as long as they are seeded alike
    with pytest.raises(RanksDiffer, match="along 'node' return different states"):
        ff.spmd(main, MESH)("seeds" in why)


@pytest.mark.parametrize("zero", [0, 3])
def test_bytes_over_data_are_of_each_and_over_replicas_of_one(zero):
    how = {"zero": zero, "replicate": "node"}
    both = run(ff.shard(ff.accumulate(STEP, MICRO), MESH, "data", **how))[0][1]
    each = run(ff.accumulate(ff.shard(STEP, MESH, "data", **how), MICRO))[0][1]
    found, log = run(once(zero))[0]
    same(found, run(once(zero))[3][0])
    op = "psum" if zero == 0 else "psum_scatter"
    assert log.count(op, axis="data") == each.count(op, axis="data")
    assert log.bytes("data", op) == each.bytes("data", op)
    assert log.count("psum", axis="node") == both.count("psum", axis="node") == LAYERS
    assert log.bytes("node") == both.bytes("node") == each.bytes("node") // MICRO


def test_a_sum_over_replicas_runs_beside_the_backward():
    """Between its start and its wait the next unit's backward is computed."""
    step = ff.shard(STEP, MESH, "data", replicate="node")
    events = ff.plan(step, params, OPTIMIZER, BATCH[:MICRO]).ranks[0].events
    started = [
        (i, e.number)
        for i, e in enumerate(events)
        if isinstance(e, Started) and e.record and e.record.axis == ("node",)
    ]
    assert len(started) == LAYERS
    for at, number in started[:-1]:
        end = next(
            i for i, e in enumerate(events) if isinstance(e, Waited) and e[0] == number
        )
        between = {e.unit for e in events[at:end] if isinstance(e, Ran)}
        assert any(unit.startswith("linear") for unit in between)


def test_each_at_zero_1_is_refused():
    refused(lambda: once(zero=1), ValueError, "zero=2 keeps parameters whole")


def test_what_some_microbatches_leave_out_is_summed_at_the_end():
    scale = ff.unit(lambda p, x: x * p["s"])

    def loss(p, x):
        if not any(i for i, _ in frame().micro):  # the first alone
            x = scale(p["scale"], x)
        return chain(linear)(p["layers"], x)

    both = {"layers": params(), "scale": {"s": torch.full((WIDTH,), 2.0)}}
    step = ff.accumulate(train_step(loss, OPTIMIZER), MICRO)
    expected, _ = step(ff.TrainState(both, OPTIMIZER.init(both)), in_turn())
    sharded = ff.shard(step, MESH, "data", replicate="node", reduce_each=True)
    for run in trained(sharded, both, OPTIMIZER, BATCH, mesh=MESH, steps=1):
        close(run.params, expected.params, 1e-6)


def in_turn():
    """The batch in the order in which one device takes what ranks take at once."""
    ranks = BATCH.view(4, MICRO, WIDTH)
    return ranks.transpose(0, 1).reshape(BATCH.shape)
