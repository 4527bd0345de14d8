"""A small GPT as pure functions: three units, and a tree of parameters.

The shapes of the parameters are the configuration: nothing else is passed around.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

import fsfunc as ff
from fsfunc.nn import (
    column_linear,
    expert_layer,
    ring_attention,
    row_linear,
    top_2_gating,
    vocab_embedding,
    zigzag_positions,
)

BALANCE = 0.01  # what unevenly used experts cost

# Experts, where there are any, are those of the ranks along "data".
EXPERTS_OVER_DATA = {"blocks/*/experts/*": ff.Split(0, "data")}
# How other weights are split over an axis "model" of the mesh, if there is one: heads,
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
    experts: int = 0,
) -> dict:
    """The parameters at the start, scaled as in GPT-2 (section 2.3 of its paper).

    Every matrix is normal with deviation 0.02; the two that write into the residual
    stream of each block are smaller by sqrt(2 * layers), so that its variance does not
    grow with depth.
    """

    def normal(*shape: int, std: float = 0.02) -> Tensor:
        return torch.randn(shape, generator=generator) * std

    into_stream = 0.02 / math.sqrt(2 * layers)

    def hidden() -> dict:
        if not experts:
            up = normal(4 * dim, dim)
            return {"up": up, "down": normal(dim, 4 * dim, std=into_stream)}
        return {
            "gate": normal(experts, dim),
            "experts": {
                "up": normal(experts, 4 * dim, dim),
                "down": normal(experts, dim, 4 * dim, std=into_stream),
            },
        }

    return {
        "embed": {"token": normal(vocab, dim), "position": normal(seq, dim)},
        "blocks": [
            {
                "norm1": torch.ones(dim),
                "qkv": normal(3, heads, dim // heads, dim),
                "proj": normal(dim, dim, std=into_stream),
                "norm2": torch.ones(dim),
                **hidden(),
            }
            for _ in range(layers)
        ],
        "head": {"norm": torch.ones(dim), "vocab": normal(vocab, dim)},
    }


@ff.unit
def embed(params: dict, tokens: Tensor, context: str | None = None) -> Tensor:
    """[batch, seq] token numbers to [batch, seq, dim].

    With an axis `context` they are this rank's part of the sequences, in zig-zag order.
    """
    position = params["position"][: tokens.shape[1]]
    if context is not None:
        n, at = ff.axis_size(context), ff.axis_index(context)
        position = params["position"][zigzag_positions(n * tokens.shape[1], n, at)]
    return vocab_embedding(params["token"], tokens) + position


@ff.unit
def block(params: dict, x: Tensor, context: str | None = None) -> Tensor:
    """[batch, seq, dim] to the same: causal attention, then an MLP, each pre-normed."""
    x = x + attention(params, rms_norm(x, params["norm1"]), context)
    hidden = F.gelu(column_linear(rms_norm(x, params["norm2"]), params["up"]))
    return x + row_linear(hidden, params["down"])


@ff.unit
def sparse_block(
    params: dict, x: Tensor, context: str | None = None
) -> tuple[Tensor, Tensor]:
    """The same with experts for an MLP, of which a token takes two; and their loss."""
    x = x + attention(params, rms_norm(x, params["norm1"]), context)
    tokens = rms_norm(x, params["norm2"]).flatten(0, 1)
    routing = top_2_gating(F.linear(tokens, params["gate"]))
    mixed = expert_layer(tokens, routing, expert, params["experts"])
    return x + mixed.view_as(x), routing.aux_loss


def expert(params: dict, x: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, params["up"])), params["down"])


@ff.unit
def head(params: dict, x: Tensor, targets: Tensor | None = None) -> Tensor:
    """The mean cross entropy of the targets [batch, seq]; without them, the logits."""
    logits = F.linear(rms_norm(x, params["norm"]), params["vocab"]).float()
    if targets is None:
        return logits
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def attention(params: dict, x: Tensor, context: str | None = None) -> Tensor:
    q, k, v = column_linear(x, params["qkv"]).permute(2, 0, 3, 1, 4)  # of my heads
    if context is None:
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        mixed = ring_attention(q, k, v, context, causal=True, order="zigzag")
    return row_linear(mixed.transpose(1, 2).flatten(2), params["proj"])


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight)


def loss_fn(params: dict, batch: dict, context: str | None = None) -> Tensor:
    """The mean loss of a batch {"tokens", "targets"}; knows nothing of devices.

    Args:
        context: the axis over which sequences are cut, if they are.
    """
    x, balance = through_blocks(params, batch["tokens"], context)
    return head(params["head"], x, batch["targets"]) + BALANCE * balance


def through_blocks(
    params: dict, tokens: Tensor, context: str | None = None
) -> tuple[Tensor, Tensor | float]:
    """What the blocks make of tokens, and how unevenly they used experts."""
    x, balance = embed(params["embed"], tokens, context), 0.0
    for p in params["blocks"]:
        if "experts" in p:
            x, uneven = sparse_block(p, x, context)
            balance = balance + uneven
        else:
            x = block(p, x, context)
    return x, balance


def next_logits(params: dict, tokens: Tensor) -> Tensor:
    """The logits [batch, vocab] of the token that follows tokens [batch, seq]."""
    x, _ = through_blocks(params, tokens)
    return head(params["head"], x[:, -1])
