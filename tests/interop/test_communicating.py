"""What communicates by torch's own means is refused, and the ways out equal one device.

Those calls are over torch's process group: under simulated ranks they send nothing, and
under processes no ledger, plan or transpose has them.
"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.nn.functional import all_reduce

import fsfunc as ff
from fsfunc._torch.fake_results import Communicates
from tests.checks import close, simulated

MESH = simulated(2)
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
W = torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def on_ranks(step, params=W, mesh=MESH, **how):
    def main():
        f, mine = ff.shard(step, mesh, "data"), ff.local_batch(X, mesh, "data")
        return ff.unshard(f(ff.place(f, params, mine, **how), mine))

    return ff.spmd(main, mesh)()


def model(norm):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 2)).double()


class Norm(nn.BatchNorm1d):
    """What the refusal of SyncBatchNorm names."""

    def forward(self, x):
        params = {"weight": self.weight, "bias": self.bias}
        return ff.nn.sync_batch_norm(params, x, "data")[0]


def test_sync_batch_norm_is_refused_and_what_it_names_equals_one_device():
    with pytest.raises(TypeError, match="'1' is a SyncBatchNorm.*ff.nn.sync_batch_nor"):
        ff.from_module(model(nn.SyncBatchNorm(4)))
    found = []
    for norm in (Norm, nn.BatchNorm1d):
        module = model(norm(4, track_running_stats=False))
        apply, params, buffers = ff.from_module(module, units="*")
        loss = lambda p, x, a=apply, b=buffers: a(p, b, x).square().mean()  # noqa: E731
        found.append((ff.value_and_grad(loss), params))
    (synced, params), (plain, _) = found
    for out in on_ranks(synced, params):
        close(out, plain(params, X), 1e-12)


def test_sync_batch_norm_by_running_statistics_communicates_nothing():
    module = model(nn.SyncBatchNorm(4)).eval()
    apply, params, buffers = ff.from_module(module)
    close(apply(params, buffers, X), module(X).detach(), 1e-12)


def in_place(w, x):
    y = x @ w
    total = y.mean().detach().clone()
    dist.all_reduce(total)
    return y - total


UNITS = {
    "in place": in_place,
    "an autograd.Function": lambda w, x: x @ w - all_reduce((x @ w).mean()),
    "functional": lambda w, x: functional.all_reduce(x @ w, "sum", dist.group.WORLD),
}


def in_glue(w, x):
    loss, g = ff.value_and_grad(lambda w, x: (x @ w).square().mean())(w, x)
    dist.all_reduce(total := loss.clone())
    return total, g


def gradient(unit):
    unit = ff.unit(unit)
    return ff.value_and_grad(lambda w, x: unit(w, x).square().mean())


STEPS = {name: gradient(unit) for name, unit in UNITS.items()} | {"in glue": in_glue}


@pytest.fixture
def one_process():
    """torch's own group, of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_reduce is")
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("record", ["fake", "real"])
@pytest.mark.parametrize("name", STEPS)
def test_a_collective_of_torchs_own_is_refused(name, record):
    with pytest.raises(Communicates, match="all_?reduce.*past fsfunc.*ff.psum"):
        on_ranks(STEPS[name], record=record)


def test_without_a_group_too():
    with pytest.raises(Communicates, match=r"test_communicating.py:\d+.*ff.psum"):
        on_ranks(STEPS["in place"])
