"""A small GPT as pure functions: three units, and a tree of parameters.

The shapes of the parameters are the configuration: nothing else is passed around.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

import fsfunc as ff
from fsfunc.nn import column_linear, row_linear, vocab_embedding

# How its weights are split over an axis "model" of the mesh, if there is one: heads,
# hidden features and the vocabulary.
SPLIT_OVER_MODEL = {
    "embed/token": ff.Split(0, "model"),
    "blocks/*/qkv": ff.Split(1, "model"),
    "blocks/*/proj": ff.Split(1, "model"),
    "blocks/*/up": ff.Split(0, "model"),
    "blocks/*/down": ff.Split(1, "model"),
}


def init_params(
    generator: torch.Generator,
    *,
    vocab: int,
    seq: int,
    dim: int,
    layers: int,
    heads: int,
) -> dict:
    """The parameters at the start, scaled as in GPT-2 (section 2.3 of its paper).

    Every matrix is normal with deviation 0.02; the two that write into the residual
    stream of each block are smaller by sqrt(2 * layers), so that its variance does not
    grow with depth.
    """

    def normal(*shape: int, std: float = 0.02) -> Tensor:
        return torch.randn(shape, generator=generator) * std

    into_stream = 0.02 / math.sqrt(2 * layers)
    return {
        "embed": {"token": normal(vocab, dim), "position": normal(seq, dim)},
        "blocks": [
            {
                "norm1": torch.ones(dim),
                "qkv": normal(3, heads, dim // heads, dim),
                "proj": normal(dim, dim, std=into_stream),
                "norm2": torch.ones(dim),
                "up": normal(4 * dim, dim),
                "down": normal(dim, 4 * dim, std=into_stream),
            }
            for _ in range(layers)
        ],
        "head": {"norm": torch.ones(dim), "vocab": normal(vocab, dim)},
    }


@ff.unit
def embed(params: dict, tokens: Tensor) -> Tensor:
    """[batch, seq] token numbers to [batch, seq, dim]."""
    position = params["position"][: tokens.shape[1]]
    return vocab_embedding(params["token"], tokens) + position


@ff.unit
def block(params: dict, x: Tensor) -> Tensor:
    """[batch, seq, dim] to the same: causal attention, then an MLP, each pre-normed."""
    x = x + attention(params, rms_norm(x, params["norm1"]))
    hidden = F.gelu(column_linear(rms_norm(x, params["norm2"]), params["up"]))
    return x + row_linear(hidden, params["down"])


@ff.unit
def head(params: dict, x: Tensor, targets: Tensor | None = None) -> Tensor:
    """The mean cross entropy of the targets [batch, seq]; without them, the logits."""
    logits = F.linear(rms_norm(x, params["norm"]), params["vocab"]).float()
    if targets is None:
        return logits
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def attention(params: dict, x: Tensor) -> Tensor:
    q, k, v = column_linear(x, params["qkv"]).permute(2, 0, 3, 1, 4)  # of my heads
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return row_linear(mixed.transpose(1, 2).flatten(2), params["proj"])


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight)


def loss_fn(params: dict, batch: dict) -> Tensor:
    """The mean loss of a batch {"tokens", "targets"}; knows nothing of devices."""
    x = embed(params["embed"], batch["tokens"])
    for p in params["blocks"]:
        x = block(p, x)
    return head(params["head"], x, batch["targets"])


def next_logits(params: dict, tokens: Tensor) -> Tensor:
    """The logits [batch, vocab] of the token that follows tokens [batch, seq]."""
    x = embed(params["embed"], tokens)
    for p in params["blocks"]:
        x = block(p, x)
    return head(params["head"], x[:, -1])
