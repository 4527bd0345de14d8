"""Experts under ``shard``: along an axis of the data each rank has its own.

To ``shard`` the axis of the experts is one of the data: every rank has samples of its
own, and an expert's gradient is that of the mean over all of them.
"""

import pytest
import torch

import fsfunc as ff
from fsfunc.nn import expert_layer, top_2_gating, top_k_gating
from fsfunc.testing import assert_equals_one_device
from tests.checks import simulated
from tests.models import train_step
from tests.nn.models import wide

DIM, EXPERTS = 4, 4
LAYOUTS = {"**/experts/*": ff.Split(0, "expert")}
OPTIMIZER = ff.chain(ff.clip_by_global_norm(0.5), ff.sharded_adam(0.01))


def parameters():
    shapes = {"up": (EXPERTS, DIM, 8), "down": (EXPERTS, 8, DIM)}
    return [
        {
            "gate": wide(EXPERTS, DIM, seed=k),
            "experts": {n: wide(*s, seed=k + len(n)) for n, s in shapes.items()},
        }
        for k in (0, 10)
    ]


def expert(p, x):
    return torch.tanh(x @ p["up"]) @ p["down"]


def model(gating, axis=None):
    @ff.unit
    def block(p, x):
        routing = gating(x @ p["gate"].T)
        y = expert_layer(x, routing, expert, p["experts"], axis)
        return x + y, routing.aux_loss

    def loss(params, x):
        total = 0.0
        for p in params:
            x, aux = block(p, x)
            total = total + 0.01 * aux
        return total + x.square().mean()

    return loss


GATINGS = {
    "top-2": lambda logits: top_2_gating(logits),
    "dropless": lambda logits: top_k_gating(logits, 2, capacity_factor=None),
}  # fmt: skip


@pytest.mark.parametrize(
    ("axes", "zero", "name"),
    [
        ({"expert": 2}, 0, "top-2"),
        ({"data": 2, "expert": 2}, 1, "dropless"),
        ({"data": 2, "expert": 2}, 3, "top-2"),
    ],
)
def test_experts_of_the_ranks_train_as_on_one_device(axes, zero, name):
    """On which groups of tokens are each routed by themselves."""
    mesh, x = simulated(**axes), wide(16, DIM, seed=5)
    alone, ours = model(GATINGS[name]), model(GATINGS[name], "expert")

    def by_groups(params, x):
        return torch.stack([alone(params, g) for g in x.chunk(mesh.size)]).mean()

    step = ff.shard(ff.remat(train_step(ours, OPTIMIZER)), mesh, tuple(axes), zero=zero)
    assert_equals_one_device(
        train_step(by_groups, OPTIMIZER),
        ff.donate(step),
        mesh,
        ff.TrainState(parameters(), OPTIMIZER.init(parameters())),
        x,
        layouts=LAYOUTS,
        goes_on=lambda out: out[0],
        exact=True,
    )
