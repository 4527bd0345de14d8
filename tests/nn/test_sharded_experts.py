"""Experts under ``shard``: along an axis of the data each rank has its own.

To ``shard`` the axis of the experts is one of the data: every rank has samples of its
own, and an expert's gradient is that of the mean over all of them.
"""

import pytest
import torch

import fsfunc as ff
from fsfunc.nn import expert_layer, top_2_gating, top_k_gating
from tests.checks import close, simulated
from tests.models import floats, train_step

DIM, EXPERTS, TOKENS = 4, 4, 16
LAYOUTS = {"*/experts/*": ff.Split(0, "expert")}
OPTIMIZER = ff.chain(ff.clip_by_global_norm(0.5), ff.sharded_adam(0.01))


def wide(*shape, seed):
    return floats(*shape, seed=seed, dtype=torch.float64)


def parameters():
    return [
        {
            "gate": wide(EXPERTS, DIM, seed=k),
            "experts": {
                "up": wide(EXPERTS, DIM, 8, seed=k + 1),
                "down": wide(EXPERTS, 8, DIM, seed=k + 2),
            },
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


def by_groups(loss, n):
    """The mean of a loss over groups of tokens, each routed by itself."""
    return lambda params, x: torch.stack([loss(params, g) for g in x.chunk(n)]).mean()


GATINGS = {
    "top-2": lambda logits: top_2_gating(logits),
    "dropless": lambda logits: top_k_gating(logits, 2, capacity_factor=None),
}  # fmt: skip


def trained(step, x, layouts=None, record="fake"):
    state = ff.init_state(
        step, parameters(), OPTIMIZER, x, layouts=layouts, record=record
    )
    for _ in range(2):
        state, loss = step(state, x)
    return ff.unshard((state.params, state.opt_state)), loss


@pytest.mark.parametrize("name", GATINGS)
@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("axes", [{"expert": 4}, {"data": 2, "expert": 2}], ids=str)
def test_experts_of_the_ranks_train_as_on_one_device(axes, zero, name):
    mesh, x = simulated(**axes), wide(TOKENS, DIM, seed=5)
    alone = by_groups(model(GATINGS[name]), mesh.size)
    expected = trained(train_step(alone, OPTIMIZER), x)

    def main():
        step = train_step(model(GATINGS[name], "expert"), OPTIMIZER)
        step = ff.shard(ff.remat(step), mesh, tuple(axes), zero=zero)
        mine = ff.local_batch(x, mesh, tuple(axes))
        record = "real" if zero == 1 else "fake"
        return trained(ff.donate(step), mine, LAYOUTS, record)

    for found in ff.spmd(main, mesh)():
        close(found, expected, 1e-10)
