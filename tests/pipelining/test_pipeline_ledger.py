"""What a pipeline sends, on every rank, and what a clock around its run sees."""

import time
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc.pipelining.transfers import with_transfers
from tests import models
from tests.checks import close, simulated, with_ledger
from tests.covering import examples
from tests.pipelining.models import (
    NAMED,
    WIDTH,
    Spec,
    Step,
    batch_of,
    chain,
    layer,
    parameters,
    parts,
)

ITEM = 8  # bytes of a float64
ROW = WIDTH * ITEM
MESH = simulated(pipe=2)
S = ff.schedules


def records(f, mesh, m, schedule, args, **options):
    """What each rank sent in one call."""
    options |= {"n_microbatches": m, "schedule": schedule}
    wrap = lambda mesh: ff.pipeline(f, mesh, "pipe", **options)  # noqa: E731
    return [log.records for _, log in with_ledger(wrap, *args, mesh=mesh)]


def table(sent):
    """(op, unit, phase) -> [count, bytes], of one rank."""
    found = {}
    for r in sent:
        assert r.axis == ("pipe",)
        row = found.setdefault((r.op, r.unit, r.phase), [0, 0])
        row[0] += 1
        row[1] += r.bytes
    return {key: tuple(row) for key, row in found.items()}


def broadcast(numbers, ranks):
    return (1, Fraction(numbers * ITEM * (ranks - 1), ranks))


@given(
    st.integers(1, 3), st.integers(1, 4), st.sampled_from(sorted(NAMED)),
    st.integers(0, 3),
)  # fmt: skip
@settings(max_examples=examples(8))
def test_a_chain_sends_each_activation_once_each_way(ranks, m, name, more):
    schedule, chunks = NAMED[name]
    count = ranks * chunks
    params, batch = parameters(count), batch_of(m + more, 0)
    del params["tied"]  # what no unit takes is whole, and summed
    mesh = simulated(pipe=ranks)
    stages = [1] * count
    owners = S.owners(
        schedule(count, m, chunks=chunks) if chunks > 1 else schedule(count, m)
    )
    both = records(
        ff.value_and_grad(chain), mesh, m, schedule, (params, batch), stages=stages
    )
    alone = records(chain, mesh, m, schedule, (params, batch), stages=stages)
    rows = m + more
    for rank in range(ranks):
        mine = [s for s in range(count) if owners[s] == rank]
        on = [s for s in mine if s + 1 < count and owners[s + 1] != rank]
        back = [s for s in mine if s and owners[s - 1] != rank]
        forward = {
            ("ppermute", "layer", "forward"): (len(on) * m, len(on) * rows * ROW)
        }
        backward = {
            ("ppermute", "layer", "backward"): (len(back) * m, len(back) * rows * ROW)
        }
        loss = {("pbroadcast", "", "loss"): broadcast(1, ranks)}
        for found, wanted in (
            (both[rank], forward | backward | loss),
            (alone[rank], forward | loss),
        ):
            some = ranks > 1
            wanted = {key: row for key, row in wanted.items() if row[0] and some}
            assert table(found) == wanted


def test_of_placed_leaves_only_those_that_stages_share_are_summed():
    """And those of each dtype on their own; a leaf used on one rank never."""

    def loss(params, batch):
        h = layer(params["layers"][0], batch["x"]) * params["tied"]
        h = layer(params["layers"][1], h)
        h = shifted({"own": params["layers"][2], "all": params["all"]}, h)
        h = shifted({"own": params["layers"][3], "all": params["all"]}, h)
        return (h * batch["y"]).mean() + shifted.fn(
            {"own": params["layers"][0], "all": params["all"]}, batch["x"]
        ).mean() * 0

    params, batch = parameters(4), batch_of(4, 0)
    params["all"] = torch.ones(WIDTH, dtype=torch.float32)
    call = ff.value_and_grad(loss)
    first = sum(x.numel() for x in params["layers"][0].values() if x is not None)
    for sent in records(call, MESH, 2, S.gpipe, (params, batch)):
        sums = [r for r in sent if r.phase == "shared gradients"]
        # The glue reads layer 0 and "all" on the last rank, "tied" on one alone: what
        # no unit takes, or glue reads too, is whole on every rank.
        assert {(r.dtype, int(r.bytes)) for r in sums} == {
            (torch.float64, (first + WIDTH) * 8),
            (torch.float32, WIDTH * 4),
        }
        assert len(sums) == 2


@ff.unit
def shifted(p, x):
    return layer.fn(p["own"], x) + p["all"].to(x.dtype)


def test_a_skip_goes_straight_to_its_consumer():
    def loss(params, batch):
        seen = [layer(params["layers"][0], batch["x"])]
        for p in params["layers"][1:]:
            seen.append(layer(p, seen[-1]))
        return ((seen[3] + seen[0]) * batch["y"]).mean()

    args, m = (parameters(4), batch_of(4, 0)), 2
    call = ff.value_and_grad(loss)
    sent = records(call, simulated(pipe=4), m, S.one_f_one_b, args)
    messages = {"forward": [2, 1, 1, 0], "backward": [0, 1, 1, 2]}
    for phase, wanted in messages.items():
        for rank, n in enumerate(wanted):
            found = table(sent[rank]).get(("ppermute", "layer", phase), (0, 0))
            assert found == (n * m, n * 4 * ROW)


def test_of_a_tree_of_outputs_only_what_is_needed_travels():
    """Booleans and integers go forward, and have no gradients to come back."""

    def loss(params, batch):
        out = parts(params["layers"][0], batch["x"])
        mask, (ids, *_) = out["rest"]
        h = layer(params["layers"][1], out["h"] * mask)
        return (h + params["tied"][ids][:, None]).mean()

    params, batch, m = parameters(2), batch_of(4, 0), 2
    first, last = records(
        ff.value_and_grad(loss), MESH, m, S.one_f_one_b, (params, batch)
    )
    sent = [(r.dtype, int(r.bytes)) for r in first if r.op == "ppermute"]
    rows = 4 // m
    one = [(torch.float64, rows * ROW), (torch.bool, rows * WIDTH),
           (torch.int64, rows * 8)]  # fmt: skip
    assert sorted(sent, key=str) == sorted(one * m, key=str)
    assert table(last)["ppermute", "parts", "backward"] == (m, 4 * ROW)


def test_what_a_loss_returns_goes_out_in_one_broadcast_and_one_for_each_tensor():
    spec = Spec((Step(),) * 2, ends="sum", aux=True)
    params, batch = spec.params(0), batch_of(4, 0)
    for sent in records(spec.gradient(), MESH, 2, S.gpipe, (params, batch)):
        loss = [r for r in sent if r.phase == "loss"]
        # total, weight and the aux's mean; the rows; two integers.
        assert [float(r.bytes) for r in loss] == [3 * 8 / 2, *[8 / 2], 8 / 2, 4 * 8 / 2]


ORDERS = {
    "shard(pipeline)": lambda shard, pipe: shard(pipe(VAG)),
    "pipeline(shard)": lambda shard, pipe: pipe(shard(VAG)),
    "shard(accumulate(pipeline))": lambda s, pipe: s(ff.accumulate(pipe(VAG), 2)),
    "accumulate(shard(pipeline))": lambda s, pipe: ff.accumulate(s(pipe(VAG)), 2),
}
VAG = ff.value_and_grad(models.chain())


@pytest.mark.parametrize(
    ("zero", "order"), [*enumerate(ORDERS), (3, "shard(pipeline)")]
)
def test_gradients_are_reduced_before_ranks_wait_for_the_loss(order, zero):
    """So that a stage's reductions run beside the others' last backwards."""
    mesh = ff.make_mesh({"data": 2, "pipe": 2}, "simulated")
    params, x = models.layers(4, make=models.floats), models.floats(8, 4, seed=3)
    step = ORDERS[order](
        lambda f: ff.shard(f, mesh, "data", zero=zero),
        lambda f: ff.pipeline(f, mesh, "pipe", n_microbatches=2),
    )
    expected = VAG(params, x)[1]
    for (_, found), log in with_ledger(lambda mesh: step, params, x, mesh=mesh):
        close(found, expected)
        last = max(i for i, r in enumerate(log.records) if r.op == "pbroadcast")
        back = {i: r for i, r in enumerate(log.records) if r.phase == "backward"}
        assert max(back) < last, log.records
        # Of each of the rank's two units once, or once a call that is accumulated.
        reduced = [r for r in back.values() if "psum" in r.op]
        assert len(reduced) == 2 * (1 + order.startswith("accumulate"))


# By the clock


def run(schedule, m):
    step = ff.value_and_grad(models.chain(models.linear))
    step = ff.pipeline(step, MESH, "pipe", n_microbatches=m, schedule=schedule)
    with ff.clock() as events:
        step(models.layers(4), torch.ones(4, 4))
    return events


@pytest.mark.parametrize("schedule", [S.gpipe, S.zb_v])
def test_it_sees_every_action_of_the_schedule(schedule):
    """The gradients that leave before their backward's end, too."""
    n = 4 if schedule is S.zb_v else 2
    rows = with_transfers(schedule(n, 4), {(s, s + 1) for s in range(n - 1)})
    with ff.clock() as outer:
        every = ff.spmd(lambda: run(schedule, 4), MESH)()
    for row, events in zip(rows, every, strict=True):
        assert sorted(e.action for e in events) == sorted(row)
    # One around all ranks sees what theirs see.
    assert sorted(outer) == sorted(e for events in every for e in events)


def test_a_rank_that_waits_for_another_does_not_compute_meanwhile():
    """An action begins when what it needs has come, not when its rank asks for it."""
    slow = 0.05

    @ff.unit
    def first(w, x):
        if not ff.recording():
            time.sleep(slow)
        return x @ w

    second = ff.unit(lambda w, x: x @ w)

    def loss(params, x):
        return second(params[1], first(params[0], x)).mean()

    def run():
        step = ff.pipeline(ff.value_and_grad(loss), MESH, "pipe", n_microbatches=3)
        with ff.clock() as events:
            step([torch.ones(4, 4), torch.ones(4, 4)], torch.ones(6, 4))
        return {e.action: e for e in events if e.action.kind == "F"}

    one, two = ff.spmd(run, MESH)()
    assert len(one) == len(two) == 3
    for a, b in zip(sorted(one), sorted(two), strict=True):
        assert one[a].end - one[a].start >= slow
        assert two[b].start >= one[a].start + slow  # it waited, and did not compute


def test_rows_of_text_are_verified_and_timed_as_they_are():
    rows = ["F0 F1 B0 B1", "F0 B0 F1 B1"]
    ff.verify(rows)
    with pytest.raises(S.ScheduleError, match="rank 0: microbatch 1 of stage 0"):
        ff.verify(["F0 F1 B0", "F0 B0 F1 B1"])
    assert ff.bubble(rows) == ff.bubble(S.parse(rows)) == 3
