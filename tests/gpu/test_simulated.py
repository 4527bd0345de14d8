"""Simulated ranks on one card: one device's numbers, and the CPU's collectives."""

import pytest
import torch

import fsfunc as ff
from tests.checks import simulated
from tests.gpu.programs import (
    ADAM,
    DEVICE,
    close,
    dropped,
    example,
    layer,
    on_ranks,
    step_of,
    trained,
)

pytestmark = pytest.mark.gpu

KEPT = pytest.mark.parametrize("around", [lambda f: f, ff.remat], ids=["kept", "remat"])


@pytest.mark.parametrize("zero", range(4))
@KEPT
def test_simulated_ranks_on_one_gpu(zero, around):
    """Two ranks are two microbatches, with the same random numbers in each."""
    mesh = simulated(2)
    step = ff.shard(around(step_of(dropped)), mesh, "data", zero=zero)
    expected = trained(ff.accumulate(step_of(dropped), 2))
    with ff.ledger() as log:
        found = on_ranks(ff.donate(step), mesh)
    for mine in found:
        close(mine, expected)
    assert log.bytes("data") > 0


def records(device, wrap, mesh, steps=2):
    """What each rank sends, in order: gathers ahead of their use, too."""
    step = wrap(step_of(layer))
    with ff.ledger() as log:
        on_ranks(step, mesh, steps=steps, given=example(device=device))
    return {
        rank: [(r.op, r.axis, r.bytes, r.dtype, r.unit, r.phase) for r in log.of(rank)]
        for rank in range(mesh.size)
    }


@pytest.mark.parametrize("zero", range(4))
@KEPT
def test_what_is_sent_is_sent_in_the_order_of_the_cpu(zero, around):
    """Prefetched gathers stand before the unit that they are not for."""
    mesh = simulated(2)
    wrap = lambda f: ff.shard(around(f), mesh, "data", zero=zero)  # noqa: E731
    found = records(DEVICE, wrap, mesh)
    assert found == records("cpu", wrap, mesh)
    assert found[0]


def test_a_rank_that_waits_does_not_take_the_others_results():
    """Each collective, on tensors of the card: its result, and that on every rank."""
    mesh = simulated(3)

    def main():
        index = ff.axis_index("data")
        x = torch.arange(6.0, device=DEVICE) + 10 * index
        pairs = [(0, 1), (1, 2), (2, 0)]
        return [
            ff.psum(x, "data"),
            ff.pmean(x, "data"),
            ff.pmax(x, "data"),
            ff.all_gather(x, "data"),
            ff.psum_scatter(x, "data"),
            ff.all_to_all(x, "data", split_dim=0, concat_dim=0),
            ff.ppermute(x, "data", pairs),
            ff.pbroadcast(x, "data", source=1),
        ]

    every = [torch.arange(6.0) + 10 * r for r in range(3)]
    total = torch.stack(every).sum(0)
    for rank, found in enumerate(ff.spmd(main, mesh)()):
        assert {x.device.type for x in found} == {DEVICE.type}
        close(
            found,
            [
                total,
                total / 3,
                every[2],
                torch.cat(every),
                total[2 * rank : 2 * rank + 2],
                torch.cat([x[2 * rank : 2 * rank + 2] for x in every]),
                every[rank - 1],
                every[1],
            ],
        )


def test_two_axes():
    """Copies of shards: a step over a node and over nodes is that over all."""
    grid = simulated(node=2, data=2)
    step = ff.shard(step_of(dropped), grid, "data", replicate="node")
    expected = trained(ff.accumulate(step_of(dropped), 4))
    for mine in on_ranks(step, grid, axis=("node", "data"), optimizer=ADAM):
        close(mine, expected)
