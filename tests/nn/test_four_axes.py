"""One step over four axes at once, and over any of them, is the step of one device.

Stages lie along "pipe", samples along "data", parts of their sequences along "context"
(to ``shard`` these are data, too), and heads, features and the vocabulary along
"model".
"""

import pytest
import torch
import torch.nn.functional as F

import fsfunc as ff
from fsfunc.nn import (
    column_linear,
    ring_attention,
    row_linear,
    vocab_cross_entropy,
    vocab_embedding,
    zigzag,
    zigzag_positions,
)
from tests.checks import close, simulated
from tests.models import floats, train_step

VOCAB, DIM, HEADS, LENGTH, BATCH = 8, 8, 4, 8, 8
LAYOUTS = {
    "embed/tokens": ff.Split(0, "model"),
    "blocks/*/qkv": ff.Split(1, "model"),
    "blocks/*/out": ff.Split(1, "model"),
    "blocks/*/up": ff.Split(0, "model"),
    "blocks/*/down": ff.Split(1, "model"),
    "head": ff.Split(0, "model"),
}
OPTIMIZER = ff.chain(ff.clip_by_global_norm(0.5), ff.sharded_adam(0.01))


def wide(*shape, seed):
    return floats(*shape, seed=seed, dtype=torch.float64) / 2


def parameters():
    def block(k):
        return {
            "norm": wide(DIM, seed=k),
            "qkv": wide(3, HEADS, DIM // HEADS, DIM, seed=k + 1),
            "out": wide(DIM, DIM, seed=k + 2),
            "up": wide(4 * DIM, DIM, seed=k + 3),
            "down": wide(DIM, 4 * DIM, seed=k + 4),
        }

    return {
        "embed": {
            "tokens": wide(VOCAB, DIM, seed=90),
            "positions": wide(LENGTH, DIM, seed=91),
        },
        "blocks": [block(10 * k) for k in range(4)],
        "head": wide(VOCAB, DIM, seed=92),
    }


def model(axes):
    """``loss(params, batch)`` of a causal model, for ranks along these axes."""
    context = "context" if "context" in axes else None
    split = "model" if "model" in axes else None

    @ff.unit
    def embed(p, tokens):
        positions = p["positions"]
        if context is not None:
            at = ff.axis_index(context)
            positions = positions[zigzag_positions(LENGTH, axes[context], at)]
        return vocab_embedding(p["tokens"], tokens) + positions

    @ff.unit
    def block(p, x):
        h = F.layer_norm(x, (DIM,), p["norm"])
        q, k, v = column_linear(h, p["qkv"]).permute(2, 0, 3, 1, 4)
        if context is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = ring_attention(q, k, v, context, causal=True, order="zigzag")
        x = x + row_linear(y.transpose(1, 2).flatten(2), p["out"])
        return x + row_linear(torch.tanh(column_linear(x, p["up"])), p["down"])

    @ff.unit
    def head(w, x, targets):
        return vocab_cross_entropy(column_linear(x, w), targets, split)

    def loss(params, batch):
        x = embed(params["embed"], batch["tokens"])
        for p in params["blocks"]:
            x = block(p, x)
        return head(params["head"], x, batch["targets"])

    return loss


def samples():
    draw = torch.Generator().manual_seed(1)
    drawn = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=draw)
    return {"tokens": drawn[:, :-1], "targets": drawn[:, 1:]}


def part(batch, mesh):
    """A rank's rows, and of these its part of each sequence."""
    if "data" in mesh.axes:
        batch = ff.local_batch(batch, mesh, "data")
    if (n := mesh.axes.get("context", 1)) > 1:
        at = ff.axis_index("context")
        batch = {k: zigzag(x, n, 1).chunk(n, 1)[at] for k, x in batch.items()}
    return batch


def trained(step, batch, layouts=None):
    state = ff.init_state(step, parameters(), OPTIMIZER, batch, layouts=layouts)
    for _ in range(2):
        state, loss = step(state, batch)
    return ff.unshard((state.params, state.opt_state)), loss


def plain(step):
    return step


WHOLE = trained(train_step(model({}), OPTIMIZER), samples())


@pytest.mark.parametrize(
    ("axes", "zero", "inner"),
    [
        ({"pipe": 2, "data": 2, "model": 2, "context": 2}, 3, ff.remat),
        ({"pipe": 2, "data": 2, "model": 2, "context": 2}, 1, plain),
        ({"data": 2, "context": 2}, 3, ff.remat),
        ({"context": 4}, 2, plain),
        ({"model": 2, "context": 2}, 0, ff.remat),
        ({"pipe": 3, "context": 2}, 3, plain),
    ],
    ids=lambda x: getattr(x, "__name__", None) or str(x),
)
def test_a_step_over_all_axes_is_that_of_one_device(axes, zero, inner):
    mesh = simulated(**axes)

    def main():
        step = inner(train_step(model(axes), OPTIMIZER))
        if "pipe" in axes:
            step = ff.pipeline(step, mesh, "pipe", n_microbatches=2)
        data = tuple(a for a in ("data", "context") if a in axes)
        step = ff.shard(step, mesh, data, zero=zero)
        layouts = LAYOUTS if "model" in axes else None
        return trained(step, part(samples(), mesh), layouts)

    for found in ff.spmd(main, mesh)():
        close(found, WHOLE, 1e-9)
