"""What the tests of layers share: wide numbers, and a transformer over any axes."""

import functools

import torch
import torch.nn.functional as F

import fsfunc as ff
from fsfunc.nn import (
    column_linear,
    ring_attention,
    row_linear,
    vocab_cross_entropy,
    vocab_embedding,
    zigzag_positions,
)
from tests.models import floats

wide = functools.partial(floats, dtype=torch.float64)
VOCAB, DIM, HEAD, LENGTH, BATCH = 8, 8, 2, 8, 8
COLUMN, ROW = ff.Split(0, "model"), ff.Split(1, "model")
LAYOUTS = {
    "embed/tokens": COLUMN,
    "blocks/*/[qkv]": COLUMN,
    "blocks/*/up*": COLUMN,
    "blocks/*/out": ROW,
    "blocks/*/down": ROW,
    "head": COLUMN,
}
BLOCK = {
    "norm": (DIM,), "q": (16, DIM), "k": (8, DIM), "v": (8, DIM), "out": (DIM, 16),
    "out_bias": (DIM,), "up": (16, DIM), "up_bias": (16,), "down": (DIM, 16),
}  # fmt: skip


def parameters(layers=2):
    """Of 8 heads, of which two share keys and values."""

    def block(k):
        return {n: wide(*s, seed=k + i) / 2 for i, (n, s) in enumerate(BLOCK.items())}

    return {
        "embed": {
            "tokens": wide(VOCAB, DIM, seed=90) / 2,
            "positions": wide(LENGTH, DIM, seed=91) / 2,
        },
        "blocks": [block(10 * k) for k in range(layers)],
        "head": wide(VOCAB, DIM, seed=92) / 2,
    }


def samples(seed=1):
    draw = torch.Generator().manual_seed(seed)
    drawn = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=draw)
    return {"tokens": drawn[:, :-1], "targets": drawn[:, 1:]}


def model(axes, dim=None, attend=ring_attention):
    """``loss(params, batch)`` of a causal model, for ranks along these axes.

    With ``dim`` sequences are split over "model" between layers.
    """
    context, split = axes.get("context"), "model" if "model" in axes else None

    def entering(w):
        return w if dim is None else ff.pcast(w, split, to="V")

    @ff.unit
    def embed(p, tokens):
        positions = p["positions"]
        if context:
            at = ff.axis_index("context")
            positions = positions[zigzag_positions(LENGTH, context, at)]
        if dim is not None:
            parts = entering(positions).chunk(axes["model"])
            positions = parts[ff.axis_index("model")]
        return vocab_embedding(p["tokens"], tokens, sequence_dim=dim) + positions

    @ff.unit
    def block(p, x):
        h = F.layer_norm(x, (DIM,), entering(p["norm"]))
        q, k, v = (
            y.unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for y in column_linear(h, (p["q"], p["k"], p["v"]), sequence_dim=dim)
        )
        if context:
            y = attend(q, k, v, "context", causal=True, order="zigzag")
        else:
            how = {"is_causal": True, "enable_gqa": True}
            y = F.scaled_dot_product_attention(q, k, v, **how)
        y = y.transpose(1, 2).flatten(2)
        x = x + row_linear(y, p["out"], p["out_bias"], sequence_dim=dim)
        h = column_linear(x, p["up"], p["up_bias"], sequence_dim=dim)
        return x + row_linear(torch.tanh(h), p["down"], sequence_dim=dim)

    @ff.unit
    def head(w, x, targets):
        logits = column_linear(x, w, sequence_dim=dim)
        return vocab_cross_entropy(logits, targets, split)

    def loss(params, batch):
        x = embed(params["embed"], batch["tokens"])
        for p in params["blocks"]:
            x = block(p, x)
        return head(params["head"], x, batch["targets"])

    return loss
