"""The models that most tests train: units, their parameters, losses, steps and data.

Integers as floats: sums, products, and means over powers of two, are exact in whatever
order they are added, so that a sharded step must give the very bits of one device.
What rounds anyway (`layer`) is held to a tolerance.
"""

import torch
from torch import Tensor

import fsfunc as ff
from fsfunc.testing import integers

WIDTH = 4


def floats(*shape: int, seed: int = 0, dtype=torch.float32) -> Tensor:
    """Normal numbers, the same for one seed and shape."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw, dtype=dtype)


# Units


def affine(p, x):
    """``x @ w + b``, or without ``b`` where there is none."""
    y = x @ p["w"]
    return y + p["b"] if "b" in p else y


@ff.unit
def linear(p, x):
    """Exact on integers."""
    return affine(p, x)


@ff.unit
def layer(p, x):
    """Smooth; the name by which a plan or a ledger knows it is ``layer``."""
    return torch.tanh(affine(p, x))


@ff.unit
def split(p, x):
    """Two matrices, of which a rank of an axis may have some features: `splits`."""
    return x + ff.nn.row_linear(ff.nn.column_linear(x, p["up"]).tanh(), p["down"])


# Their parameters


def layers(n=2, width=WIDTH, *, bias=True, make=integers, seed=0, dtype=torch.float32):
    """``[{"w", "b"}, ...]``: of `linear` or `layer`, ``n`` times."""

    def one(k):
        p = {"w": make(width, width, seed=seed + 2 * k, dtype=dtype)}
        return p | {"b": make(width, seed=seed + 2 * k + 1, dtype=dtype)} if bias else p

    return [one(k) for k in range(n)]


def splits(where=""):
    """Layouts of the parameters of `split`, whose paths begin with this."""
    return {where + k: ff.Split(i, "model") for i, k in enumerate(("up", "down"))}


# Losses and steps


def chain(unit=layer):
    """``loss(params, x)``: the mean square of what a list of layers makes of x."""

    def loss(params, x):
        for p in params:
            x = unit(p, x)
        return x.square().mean()

    return loss


def train_step(loss, optimizer):
    """``step(state, *batch) -> (state, loss)``, as a user writes it."""

    def step(state, *batch):
        value, grads = ff.value_and_grad(loss)(state.params, *batch)
        return state.apply_gradients(grads, optimizer), value

    return step
