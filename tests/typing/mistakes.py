"""Ten mistakes that a checker must find: the rule that finds it ends the line."""

import torch
from torch import Tensor

import fsfunc as ff

Params = dict[str, Tensor]
mesh = ff.make_mesh({"data": 4}, "simulated")


@ff.unit
def layer(params: Params, x: Tensor) -> Tensor:
    return x @ params["w"]


def loss_fn(params: Params, batch: Tensor) -> Tensor:
    return layer(params, batch).mean()


def metrics(params: Params, batch: Tensor) -> dict[str, Tensor]:
    return {"loss": layer(params, batch).mean()}


params: Params = {"w": torch.ones(2, 2)}
x = torch.ones(4, 2)
optimizer = ff.sgd(0.1)
grad_fn = ff.value_and_grad(loss_fn)

# A name that is not there.
ff.shrad(grad_fn, mesh, "data")  # reportAttributeAccessIssue
# A stage of ZeRO, a policy, a schedule, a backend and a type that are none.
ff.shard(grad_fn, mesh, "data", zero=7)  # reportArgumentType
ff.remat(grad_fn, "sometimes")  # reportArgumentType
ff.search(
    *(loss_fn, optimizer, params, x, 8, ff.hardware.A100_80),
    schedules=["1f1b"],  # reportArgumentType
)
ff.make_mesh({"data": 2}, "threads")  # reportArgumentType
ff.psum(x, "data", to="sum")  # reportArgumentType
# A loss that returns no scalar.
ff.value_and_grad(metrics)  # reportArgumentType
# A transformed function called as the plain one may not be.
ff.remat(ff.shard(grad_fn, mesh, "data"))(params)  # reportCallIssue
# A parameter where the tree of them is wanted.
layer(params["w"], x)  # reportArgumentType
# A state where its parameters are wanted.
ff.value(loss_fn)(ff.TrainState(params), x)  # reportArgumentType
