"""GPT as it was written in 2021: biases, LayerNorm, attention in plain operators.

What the published runs trained. Attention makes its scores, masks all of them, and
takes a softmax of them: memory holds them, and nothing is spared below the diagonal.
Dropout, which those runs may have had, is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from compared.models import Size, concatenate_flat
from torch import Tensor

import fsfunc as ff

Tree = dict[str, Any]


def init_params(size: Size, dtype: torch.dtype = torch.float32) -> Tree:
    """The parameters as a tree: embed, a list of blocks, head."""
    d = size.width

    def normal(*shape: int) -> Tensor:
        return 0.02 * torch.randn(shape, dtype=dtype)

    def linear(n_in: int, n_out: int) -> Tree:
        return {"w": normal(n_out, n_in), "b": torch.zeros(n_out, dtype=dtype)}

    def norm() -> Tree:
        return {"w": torch.ones(d, dtype=dtype), "b": torch.zeros(d, dtype=dtype)}

    def block() -> Tree:
        return {
            "norm1": norm(),
            "qkv": linear(d, 3 * d),
            "out": linear(d, d),
            "norm2": norm(),
            "up": linear(d, 4 * d),
            "down": linear(4 * d, d),
        }

    return {
        "embed": {"token": normal(size.vocabulary, d), "place": normal(size.length, d)},
        "blocks": [block() for _ in range(size.layers)],
        "head": {"norm": norm(), "w": normal(size.vocabulary, d)},
    }


def parameters(size: Size) -> int:
    """How many parameters there are."""
    d = size.width
    block = 12 * d * d + 13 * d
    return size.layers * block + (2 * size.vocabulary + size.length + 2) * d


def make_batch(size: Size) -> dict[str, Tensor]:
    """Tokens and targets of one rank, each int64[sequences, length]."""
    shape = (size.sequences, size.length)
    tokens = torch.zeros(shape, dtype=torch.int64)
    return {"tokens": tokens, "targets": tokens.clone()}


def loss_of(size: Size) -> Callable[[Tree, Any], Tensor]:
    """``loss_fn(params, batch)`` with every block recomputed in its backward."""
    heads = size.heads

    def linear(p: Tree, x: Tensor) -> Tensor:
        return F.linear(x, p["w"], p["b"])

    def norm(p: Tree, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], p["w"], p["b"])

    @ff.unit
    def embed(p: Tree, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, p["token"]) + p["place"][: tokens.shape[1]]

    @ff.remat
    @ff.unit
    def block(p: Tree, x: Tensor) -> Tensor:
        mixed = attend(linear(p["qkv"], norm(p["norm1"], x)), heads)
        x = x + linear(p["out"], mixed)
        return x + linear(p["down"], F.gelu(linear(p["up"], norm(p["norm2"], x))))

    @ff.unit
    def head(p: Tree, x: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(norm(p["norm"], x), p["w"])
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return concatenate_flat(embed, block, head)


def attend(qkv: Tensor, heads: int) -> Tensor:
    """Causal attention of [b, t, 3·d] projections, all t·t scores made: [b, t, d]."""
    b, t, triple = qkv.shape
    d = triple // 3 // heads
    q, k, v = qkv.view(b, t, 3, heads, d).permute(2, 0, 3, 1, 4)
    scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(d))
    later = torch.ones(t, t, dtype=torch.bool, device=qkv.device).triu(1)
    weights = scores.masked_fill(later, float("-inf")).softmax(-1)
    return (weights @ v).transpose(1, 2).reshape(b, t, triple // 3)
