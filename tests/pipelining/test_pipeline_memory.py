"""What a rank holds while a schedule runs: as many microbatches as are counted."""

import pytest
import torch

import fsfunc as ff
from fsfunc import _torch
from fsfunc.pipelining.verification import peak_microbatches as count_held
from tests.pipelining.models import NAMED
from tests.probes import LiveBytes

ROWS, WIDTH, WIDE = 2, 4, 64
KEPT = ROWS * WIDTH * WIDE * 8  # bytes that one unit call keeps for its backward
IDS = 1720 * 8


def storages(size):
    """Counts the storages of real tensors of ``size`` bytes, of those made inside."""
    return LiveBytes(fakes=False, size=size)


WATCH = {}  # by rank


@ff.unit
def wide(p, x):
    """Keeps KEPT bytes for the gradient of its parameter."""
    if not isinstance(x, _torch.FakeTensor):
        watch, found = WATCH[ff.axis_index("pipe")]
        found.append(watch.live // KEPT)
    return x.repeat(1, WIDE) @ p


def loss_fn(params, x):
    for p in params:
        x = wide(p, x)
    return x.mean()


def held(ranks, m, name):
    """The most calls that each rank held, as they stood when a forward began."""
    schedule, chunks = NAMED[name]
    mesh = ff.make_mesh({"pipe": ranks}, "simulated")
    n = ranks * chunks
    params = [torch.ones(WIDTH * WIDE, WIDTH, dtype=torch.float64) for _ in range(n)]
    x = torch.ones(m * ROWS, WIDTH, dtype=torch.float64)
    made = schedule(n, m, chunks=chunks) if chunks > 1 else schedule(n, m)

    def main():
        rank = ff.axis_index("pipe")
        grad = ff.pipeline(
            ff.value_and_grad(loss_fn), mesh, "pipe", n_microbatches=m,
            schedule=schedule,
        )  # fmt: skip
        placed = ff.place(grad, params, x)
        with storages(KEPT) as watch:
            WATCH[rank] = watch, []
            grad(placed, x)
            return (max(WATCH[rank][1]) + 1) / chunks, watch.live

    found = ff.spmd(main, mesh)()
    assert [alive for _, alive in found] == [0] * ranks  # nothing is left
    return [most for most, _ in found], made


@pytest.mark.parametrize("name", NAMED)
def test_a_rank_holds_what_the_verifier_counts(name):
    """Whose formulas are those of `test_bubbles`."""
    for ranks, m in [(3, 6), (1, 3)]:
        found, made = held(ranks, m, name)
        assert found == list(count_held(made))


@pytest.mark.parametrize("name", ["gpipe", "zb_h1"])
def test_of_an_activation_on_its_way_there_is_one_copy(name):
    """Where it arrived, the sender has none left; integers, without gradients."""
    m, seen, out, watches = 6, [], [], {}
    mesh = ff.make_mesh({"pipe": 2}, "simulated")

    class Keep(torch.autograd.Function):
        """The identity, which keeps what came in until the backward is over."""

        @staticmethod
        def forward(ctx, x, ids):
            ctx.save_for_backward(ids)
            return x.view_as(x)

        @staticmethod
        def backward(ctx, g):
            out.append(-1)
            return g, None

    def note(x, count):
        if not isinstance(x, _torch.FakeTensor):
            seen.append((sum(w.live for w in watches.values()) // IDS, sum(out)))
            out.append(count)

    @ff.unit
    def first(p, x):
        note(x, +1)
        return x * p, torch.zeros(IDS // 8, dtype=torch.int64)

    @ff.unit
    def last(p, x, ids):
        note(x, 0)
        return (Keep.apply(x, ids) * p).sum()

    grad = ff.value_and_grad(lambda params, x: last(params[1], *first(params[0], x)))
    grad = ff.pipeline(grad, mesh, "pipe", n_microbatches=m, schedule=NAMED[name][0])

    def main():
        params = [torch.ones(WIDTH, dtype=torch.float64) for _ in range(2)]
        x = torch.ones(m * ROWS, WIDTH, dtype=torch.float64)
        with storages(IDS) as watches[ff.axis_index("pipe")]:
            grad(params, x)

    ff.spmd(main, mesh)()
    assert len(seen) == 2 * m
    assert max(alive for alive, _ in seen) >= 2
    # One more, where a receive is posted ahead of what is not sent yet.
    assert all(alive <= count + 1 for alive, count in seen), seen
    assert [w.live for w in watches.values()] == [0, 0]
