"""The models that most tests train: units, their parameters, losses, steps and data.

Integers as floats: sums, products, and means over powers of two, are exact in whatever
order they are added, so that a sharded step must give the very bits of one device.
What rounds anyway (`layer`, `gpt`) is held to a tolerance.
"""

import torch
from torch import Tensor

import fsfunc as ff

WIDTH = 4


def integers(*shape: int, seed: int = 0, high: int = 2, dtype=torch.float32) -> Tensor:
    """Integers of ``-high`` to ``high``, the same for one seed and shape."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-high, high + 1, shape, generator=draw).to(dtype)


def floats(*shape: int, seed: int = 0, dtype=torch.float32) -> Tensor:
    """Normal numbers, the same for one seed and shape."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw, dtype=dtype)


def tokens(rows: int, length: int = 5, vocabulary: int = 16, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (rows, length), generator=draw)


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
def relu(p, x):
    """Exact on integers, and not linear."""
    return torch.relu(affine(p, x))


@ff.unit
def layer(p, x):
    """Smooth; the name by which a plan or a ledger knows it is ``layer``."""
    return torch.tanh(affine(p, x))


@ff.unit
def block(p, x):
    """Two matrices around a ReLU, beside the input."""
    return x + torch.relu(x @ p["up"]) @ p["down"]


@ff.unit
def embed(p, tokens):
    """Its backward reads none of its parameters."""
    return p["table"][tokens]


@ff.unit
def attention(p, x):
    """One causal head, beside the input: (rows, length, width)."""
    q, k, v = (x @ p["qkv"]).chunk(3, -1)
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return x + y @ p["out"]


@ff.unit
def head(p, x):
    """Scores over the rows of a table, which may be the embedding's."""
    return x @ p["table"].T


# Their parameters


def layers(n=2, width=WIDTH, *, bias=True, make=integers, seed=0, dtype=torch.float32):
    """``[{"w", "b"}, ...]``: of `linear`, `relu` or `layer`, ``n`` times."""

    def one(k):
        p = {"w": make(width, width, seed=seed + 2 * k, dtype=dtype)}
        return p | {"b": make(width, seed=seed + 2 * k + 1, dtype=dtype)} if bias else p

    return [one(k) for k in range(n)]


def gpt_params(n=2, width=8, vocabulary=16, seed=0):
    """Of `gpt`: an embedding that is the head too, and ``n`` blocks of two units."""
    made = (seed + k for k in range(4 * n + 1))

    def draw(*shape):
        return floats(*shape, seed=next(made)) / width**0.5

    return {
        "embed": {"table": draw(vocabulary, width)},
        "blocks": [
            {
                "attention": {"qkv": draw(width, 3 * width), "out": draw(width, width)},
                "mlp": {"up": draw(width, 4 * width), "down": draw(4 * width, width)},
            }
            for _ in range(n)
        ],
    }


# Losses and steps


def chain(unit=layer):
    """``loss(params, x)``: the mean square of what a list of layers makes of x."""

    def loss(params, x):
        for p in params:
            x = unit(p, x)
        return x.square().mean()

    return loss


def gpt(params, tokens):
    """The mean cross entropy of each next token; ``tokens``: (rows, length)."""
    x = embed(params["embed"], tokens[:, :-1])
    for p in params["blocks"]:
        x = block(p["mlp"], attention(p["attention"], x))
    scores = head(params["embed"], x)
    return torch.nn.functional.cross_entropy(
        scores.flatten(0, 1), tokens[:, 1:].flatten()
    )


def train_step(loss, optimizer):
    """``step(state, *batch) -> (state, loss)``, as a user writes it."""

    def step(state, *batch):
        value, grads = ff.value_and_grad(loss)(state.params, *batch)
        return state.apply_gradients(grads, optimizer), value

    return step
