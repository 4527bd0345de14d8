"""A user's program, as an editor types it: what stands behind each ``reveal_type``.

A checker reads it and nothing runs it (`test_typing.py`). Below each line that reveals
a type stands that type, as pyright prints it.
"""

from pathlib import Path
from typing import reveal_type

import torch
from torch import Tensor

import fsfunc as ff

Params = dict[str, Tensor]
State = ff.TrainState[Params]


# Functions of parameters, and their gradients.


@ff.unit
def layer(params: Params, x: Tensor, *, scale: float = 2) -> Tensor:
    return torch.tanh(x @ params["w"]) * scale


def loss_fn(params: Params, batch: Tensor) -> Tensor:
    return layer(params, batch).square().mean()


def summed(params: Params, batch: Tensor):
    return sum(layer(params, row).square().mean() for row in batch.split(1))


def weighted(params: Params, batch: Tensor) -> tuple[ff.Weighted, ff.Summed[Tensor]]:
    rows = layer(params, batch).square().mean(1)
    return ff.Weighted(rows.sum(), len(rows)), ff.Summed((rows > 1).sum())


reveal_type(layer)
# (params: dict[str, Tensor], x: Tensor, *, scale: float = 2) -> Tensor
grad_fn = ff.value_and_grad(loss_fn)
reveal_type(grad_fn)
# (dict[str, Tensor], batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]
with_aux = ff.value_and_grad(weighted, has_aux=True)
reveal_type(with_aux)
# (dict[str, Tensor], batch: Tensor) -> tuple[tuple[Tensor, Summed[Tensor]], dict[str,
# Tensor]]
both = ff.value_and_grad(loss_fn, argnums=(0, 1))
reveal_type(both)
# (dict[str, Tensor], Tensor) -> tuple[Tensor, tuple[dict[str, Tensor], Tensor]]
by_batch = ff.value_and_grad(loss_fn, argnums=1)
reveal_type(by_batch)
# (dict[str, Tensor], Tensor) -> tuple[Tensor, Tensor]
by_rows = ff.value_and_grad(summed)
reveal_type(by_rows)
# (dict[str, Tensor], batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]
evaluate = ff.value(loss_fn)
reveal_type(evaluate)
# (params: dict[str, Tensor], batch: Tensor) -> Tensor


# Transforms keep the signature of what they take.

mesh = ff.make_mesh({"data": 4}, "simulated")


def train_step(state: State, batch: Tensor) -> tuple[State, Tensor]:
    loss, grads = grad_fn(state.params, batch)
    return state.apply_gradients(grads, optimizer), loss


optimizer = ff.chain(ff.clip_by_global_norm(1.0), ff.sharded_adam(1e-3))
step = ff.accumulate(ff.remat(train_step, "except_last"), 2)
step = ff.precision(step, torch.bfloat16, torch.float32)
step = ff.donate(ff.shard(ff.jit(step), mesh, "data", zero=3))
reveal_type(step)
# (state: TrainState[dict[str, Tensor]], batch: Tensor) -> tuple[TrainState[dict[str,
# Tensor]], Tensor]

made = optimizer(grad_fn)
sharded = ff.shard(made, mesh, "data", zero=2)
local = ff.local_sgd(train_step, mesh, "data", every=4)


# States, on the ranks.


def init() -> Params:
    return {"w": torch.randn(8, 8)}


def main(folder: Path) -> float:
    batch = ff.local_batch(torch.randn(32, 8), mesh, "data")
    reveal_type(batch)
    # Tensor
    state = ff.init_state(step, init, optimizer, batch)
    reveal_type(state)
    # TrainState[dict[str, Tensor]]
    state, loss = step(state, batch)
    reveal_type(loss)
    # Tensor
    reveal_type(state.params)
    # dict[str, Tensor]
    ff.save(folder, state)
    state = ff.load(folder, state, donate=True)
    reveal_type(state)
    # TrainState[dict[str, Tensor]]

    other = ff.init_state(sharded, init(), optimizer, batch)
    reveal_type(other)
    # TrainState[dict[str, Tensor]]
    other, metrics = sharded(other, batch)
    reveal_type(metrics)
    # dict[str, Tensor]

    copies = ff.init_state(local, init, optimizer, batch)
    reveal_type(copies)
    # LocalState[TrainState[dict[str, Tensor]]]
    reveal_type(ff.consensus(copies).params)
    # dict[str, Tensor]

    # Leaves are typed as the tensors that they stand for; of one, ask what it is.
    params = ff.place(grad_fn, init(), batch)
    reveal_type(params)
    # dict[str, Tensor]
    if ff.is_sharded(leaf := params["w"]):
        reveal_type(leaf)
        # Sharded
        reveal_type(leaf.layout)
        # Layout
    reveal_type(ff.unshard(params))
    # dict[str, Tensor]
    for _, weight in ff.whole_leaves(params, only=0):
        reveal_type(weight)
        # Tensor

    pending = ff.start(ff.psum, batch, "data")
    reveal_type(pending.wait())
    # Tensor
    reveal_type(ff.pmean({"loss": loss}, "data"))
    # dict[str, Tensor]
    reveal_type(ff.global_norm(params))
    # Tensor
    reveal_type(ff.nn.rms_norm(batch))
    # Tensor
    ff.testing.assert_equal(ff.tree.map(torch.clone, params), params)
    reveal_type(ff.axis_index("data"))
    # int
    return loss.item()


on_ranks = ff.spmd(main, mesh)(Path("checkpoint"))
reveal_type(on_ranks)
# PerRank[float]
