"""Derivatives that papers take are those of one device, at any zero."""

import pytest
import torch

import fsfunc as ff
from examples import derivatives
from fsfunc import tree
from tests.checks import close, on_ranks, simulated

WAYS = ["penalty", "maml", "one_task", "learned_rate", "wgan_gp", "fgsm", "contrastive"]
WAYS += ["dp_sgd", "sgld", "curvature", "muon", "shampoo"]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("way", WAYS)
def test_each_way_is_one_device_s(way):
    draw = torch.Generator().manual_seed(0)
    w = [torch.randn(3, 3, generator=draw, dtype=torch.float64) for _ in range(2)]
    rows = torch.randn(8, 3, generator=draw, dtype=torch.float64)
    fn = getattr(derivatives, way)

    def step(w, x):
        torch.manual_seed(5)  # noise is of the default generator
        if way == "curvature":
            return fn(w, x, tree.map(torch.ones_like, w))
        if way in ("dp_sgd", "sgld", "muon", "shampoo"):
            return fn(w, x)
        if way == "learned_rate":
            rate = ff.assume(torch.tensor(0.5, dtype=torch.float64), "data", "I")
            return ff.value_and_grad(fn)((w, rate), x)[1]
        return ff.value_and_grad(fn)(w, x)[1]

    def found(n, zero, x=rows):
        mesh = simulated(n)
        sharded = lambda f: ff.shard(f, mesh, "data", zero=zero)  # noqa: E731
        return on_ranks(sharded(step), w, x, mesh=mesh, laid=sharded(derivatives.loss))

    expected = found(1, 3)[0]
    if way == "one_task":  # two tasks, each on half of the rows
        halves = [found(1, 3, x)[0] for x in rows.chunk(2)]
        expected = tree.map(lambda a, b: (a + b) / 2, *halves)
    for zero in (WAYS.index(way) % 3, 3):  # 3, and another by turns
        for one in found(2, zero):
            close(one, expected, 1e-9)
