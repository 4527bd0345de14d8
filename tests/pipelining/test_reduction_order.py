"""Derivatives go before reductions: in what is sent, in the plan, and in its time."""

import gc
import weakref

import pytest
import torch

import fsfunc as ff
from fsfunc.planning.events import Started, Waited
from fsfunc.testing import assert_equals_one_device
from fsfunc.transforms.gradient_sums import GradientSums
from tests.checks import same, with_ledger
from tests.optim.steps import data
from tests.pipelining.models import NAMED, batch_of, chain, layer, parameters

M, CALLS = 2, 4
MESH = ff.make_mesh({"pipe": 2, "data": 2}, "simulated")


def pipelined(f, mesh, schedule="1f1b", zero=0, m=M, **options):
    made = NAMED[schedule][0]
    f = ff.pipeline(f, mesh, "pipe", n_microbatches=m, schedule=made)
    return data(f, mesh, zero=zero, **options)


def inputs():
    made = batch_of(16, 3)
    return parameters(CALLS, ("layers",), 5), {key: made[key] for key in "xy"}


def planned(mesh, schedule, zero):
    """The plan of a train step."""
    optimizer, (params, batch) = ff.sgd(0.5), inputs()
    step = pipelined(optimizer(ff.value_and_grad(chain)), mesh, schedule, zero)
    rows = {key: x[:8] for key, x in batch.items()}
    return ff.plan(step, lambda: params, optimizer, rows)


def in_turn(monkeypatch):
    """Each reduction begins as its gradient is there, and ends before the next one."""
    monkeypatch.setattr(GradientSums, "order_reductions", lambda *_: None)


def table(log):
    """(op, axis, name, bytes, unit, phase) of each record, in any order."""
    traits = [
        (r.op, r.axis, r.what, r.bytes, r.unit, r.phase, str(r.dtype))
        for r in log.records
    ]
    return sorted(traits, key=str)


@pytest.mark.parametrize(
    ("schedule", "zero"),
    [("1f1b", 0), ("zb_v", 0), ("zb_h1", 1), ("zb_v", 2), ("interleaved", 3)],
)
def test_the_order_changes_no_bit_and_no_message(schedule, zero, monkeypatch):
    grad = ff.value_and_grad(chain)
    wrap = lambda mesh: pipelined(grad, mesh, schedule, zero)  # noqa: E731
    given = inputs()
    plain = ff.accumulate(grad, 2 * M)(*given)
    first = with_ledger(wrap, *given, mesh=MESH, planned=True)
    in_turn(monkeypatch)
    turns = with_ledger(wrap, *given, mesh=MESH)
    for (found, log), (expected, log_in_turn) in zip(first, turns, strict=True):
        same(found, expected)
        same(found, plain)
        assert table(log) == table(log_in_turn)


OTHERS = {
    "replicas": {"zero": 2, "replicate": "node"},
    "each": {"zero": 2, "reduce_each": True},
    "accumulated": {"zero": 0},
}


@pytest.mark.parametrize("name", OTHERS)
def test_of_other_stacks_too(name):
    axes = {"node": 2} if name == "replicas" else {}
    mesh = ff.make_mesh({**axes, "pipe": 2, "data": 2}, "simulated")
    grad, options = ff.value_and_grad(chain), OTHERS[name]

    def build(f):
        if name == "accumulated":
            f = ff.pipeline(
                f, mesh, "pipe", n_microbatches=2, schedule=NAMED["zb_v"][0]
            )
            return data(ff.accumulate(f, 2), mesh, **options)
        return pipelined(f, mesh, "zb_v", m=2, **options)

    params, batch = inputs()
    assert_equals_one_device(
        ff.accumulate(grad, 8), build(grad), mesh, params, batch, exact=True,
        axis=tuple(axis for axis in ("node", "data") if axis in mesh.axes),
    )  # fmt: skip


def is_derivative(record):
    return record.op == "ppermute" and record.phase == "backward"


@pytest.mark.parametrize(
    ("schedule", "zero"),
    [("1f1b", 0), ("1f1b", 3), ("zb_v", 2), ("interleaved", 0), ("interleaved", 3)],
)
def test_a_derivative_is_sent_before_a_reduction_is_waited_for(schedule, zero):
    """In the plan's events, whose ledger the run's is, in its order."""
    mesh = ff.make_mesh({"pipe": 2, "data": 2}, "abstract")
    for rank in planned(mesh, schedule, zero).ranks:
        started, last_send, first_wait, begun = {}, -1, len(rank.events), []
        for place, event in enumerate(rank.events):
            if isinstance(event, Started) and event.record is not None:
                record = event.record
                if is_derivative(record):
                    last_send = place
                elif record.op in ("psum", "psum_scatter") and record.unit:
                    started[event.number] = record
                    begun.append(place)
            if isinstance(event, Waited) and event.number in started:
                first_wait = min(first_wait, place)
        assert begun and last_send < first_wait
        # Of a rank with one stage the reductions begin then, too. Of one with several
        # those of the later stage go on beside the derivatives of the earlier one.
        if schedule == "1f1b":
            assert last_send < begun[0]
        elif schedule == "interleaved" and mesh.coordinate("pipe", rank.rank) == 1:
            assert begun[0] < last_send


def test_the_run_sends_in_the_order_of_its_plan():
    step = lambda mesh: pipelined(ff.value_and_grad(chain), mesh, "zb_v", 2)  # noqa: E731

    def main():
        params, batch = inputs()
        mine, step_here = ff.local_batch(batch, MESH, "data"), step(MESH)
        placed = ff.place(step_here, params, mine)
        plan = ff.plan(step_here, placed, mine)
        with ff.ledger() as log:
            step_here(placed, mine)
        order = lambda records: [(r.op, r.axis, r.what) for r in records]  # noqa: E731
        assert order(log.records) == order(plan.ranks[0].records)
        return len(log.records)

    assert min(ff.spmd(main, MESH)()) > 2 * M


def wide(params, x):
    for p in params["layers"]:
        x = layer(p, x)
    return x.square().mean()


SLOW = ff.hardware.replace(ff.hardware.H100, levels=(ff.Level(0, 5e9, 1e-5),))


def estimated(stages, ranks, zero, width=4096):
    """A plan of two layers a stage, and its estimate."""
    mesh = ff.make_mesh({"pipe": stages, "data": ranks}, "abstract")
    one = lambda: {"w": torch.zeros(width, width), "b": torch.zeros(width)}  # noqa: E731
    init = lambda: {"layers": [one() for _ in range(2 * stages)]}  # noqa: E731
    optimizer, batch = ff.sgd(0.1), torch.zeros(8 * 256, width)
    step = pipelined(optimizer(ff.value_and_grad(wide)), mesh, zero=zero, m=8)
    plan = ff.plan(step, init, optimizer, batch)
    return plan, ff.estimate(plan, SLOW)


def test_reductions_of_stages_take_their_time_at_once(monkeypatch):
    """A plan's time is that of computing and of one stage's reductions."""
    plan, found = estimated(4, 16, zero=0)
    alone = estimated(4, 1, zero=0)[1].seconds
    on_link = [
        sum(s.end - s.start for s in found.spans if s[:2] == (rank.rank, "data"))
        for rank in plan.ranks
    ]
    in_turn(monkeypatch)
    turns, slower = estimated(4, 16, zero=0)
    assert found.seconds < alone + 1.1 * max(on_link)
    assert slower.seconds > alone + 1.5 * max(on_link)
    assert plan.peak_bytes <= 1.01 * turns.peak_bytes


def test_a_rank_that_raises_beside_reductions_in_flight_is_named(monkeypatch):
    """And nothing of the failed step is left: the next one has one device's bits."""
    order, sums = GradientSums.order_reductions, weakref.WeakSet()
    grad, given = ff.value_and_grad(chain), inputs()
    wrap = lambda mesh: pipelined(grad, mesh, "interleaved", 2)  # noqa: E731

    def breaking(self, holds, others_wait):
        order(self, holds, others_wait)
        sums.add(self)
        if self.reducing and others_wait and self.groups.where.rank == 3:
            raise ArithmeticError("beside a reduction")

    with monkeypatch.context() as patched:
        patched.setattr(GradientSums, "order_reductions", breaking)
        with pytest.raises(ArithmeticError, match="beside a reduction") as raised:
            with_ledger(wrap, *given, mesh=MESH)
    assert any("simulated rank 3" in note for note in raised.value.__notes__)
    del raised
    gc.collect()
    assert not sums
    for found, _ in with_ledger(wrap, *given, mesh=MESH):
        same(found, ff.accumulate(grad, 2 * M)(*given))
