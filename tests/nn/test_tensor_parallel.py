"""Layers whose weights are split are the layers of one device, and send what they say.

A small transformer, whose weights are split as Megatron splits them, with sequences
whole or split between layers, is trained on simulated ranks under every ``shard``.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from fsfunc.nn import column_linear, row_linear, vocab_embedding
from fsfunc.sharded.leaf import NotATensor
from tests.checks import close, refusals, refused, simulated
from tests.models import floats, train_step

VOCAB, DIM, HEAD, LENGTH, BATCH = 8, 8, 2, 4, 4
KV_HEADS = 4  # of 8 heads: queries share keys
COLUMN, ROW = ff.Split(0, "model"), ff.Split(1, "model")
LAYOUTS = {
    "embedding": COLUMN,
    "blocks/*/[qkv]": COLUMN,
    "blocks/*/up": COLUMN,
    "blocks/*/up_bias": COLUMN,
    "blocks/*/out": ROW,
    "blocks/*/down": ROW,
}


def wide(*shape, seed):
    return floats(*shape, seed=seed, dtype=torch.float64) / 2


def parameters(layers=2):
    def block(k):
        return {
            "norm": wide(DIM, seed=k),
            "q": wide(8 * HEAD, DIM, seed=k + 1),
            "k": wide(KV_HEADS * HEAD, DIM, seed=k + 2),
            "v": wide(KV_HEADS * HEAD, DIM, seed=k + 3),
            "out": wide(DIM, 8 * HEAD, seed=k + 4),
            "out_bias": wide(DIM, seed=k + 5),
            "up": wide(16, DIM, seed=k + 6),
            "up_bias": wide(16, seed=k + 7),
            "down": wide(DIM, 16, seed=k + 8),
        }

    return {
        "embedding": wide(VOCAB, DIM, seed=90),
        "blocks": [block(10 * k) for k in range(layers)],
        "head": wide(VOCAB, DIM, seed=91),
    }


def model(axis=None, dim=None):
    """``loss(params, tokens)``; with ``dim`` sequences are split between layers."""

    def entering(w):
        return w if dim is None else ff.pcast(w, axis, to="V")

    @ff.unit
    def embed(w, tokens):
        return vocab_embedding(w, tokens, sequence_dim=dim)

    @ff.unit
    def block(p, x):
        h = F.layer_norm(x, (DIM,), entering(p["norm"]))
        weights = p["q"], p["k"], p["v"]
        q, k, v = (
            y.unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for y in column_linear(h, weights, sequence_dim=dim)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y = y.transpose(1, 2).flatten(2)
        x = x + row_linear(y, p["out"], p["out_bias"], sequence_dim=dim)
        h = column_linear(x, p["up"], p["up_bias"], sequence_dim=dim)
        return x + row_linear(torch.tanh(h), p["down"], sequence_dim=dim)

    @ff.unit
    def head(w, x, targets):
        x = x if dim is None else ff.all_gather(x, axis, dim=dim, to="I")
        return F.cross_entropy((x @ w.T).flatten(0, 1), targets.flatten())

    def loss(params, tokens):
        x = embed(params["embedding"], tokens[:, :-1])
        for p in params["blocks"]:
            x = block(p, x)
        return head(params["head"], x, tokens[:, 1:])

    return loss


OPTIMIZER = ff.chain(ff.clip_by_global_norm(0.5), ff.sharded_adam(0.01))
TOKENS = torch.randint(
    VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1)
)


def trained(step, tokens, layouts=None):
    state = ff.init_state(step, parameters(), OPTIMIZER, tokens, layouts=layouts)
    for _ in range(2):
        state, loss = step(state, tokens)
    return ff.unshard((state.params, state.opt_state)), loss


WHOLE = trained(train_step(model(), OPTIMIZER), TOKENS)


@settings(max_examples=12)
@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([None, 1, 2]),
    st.sampled_from([0, 1, 2, 3]),
    st.sampled_from([None, 1]),
    st.sampled_from([lambda f: f, ff.remat, lambda f: ff.accumulate(f, 2)]),
    st.booleans(),
)
def test_a_split_model_trains_as_one_device_does(n, data, zero, dim, inner, donated):
    axes = {"model": n} if data is None else {"data": data, "model": n}
    mesh = simulated(**axes)

    def main():
        step = inner(train_step(model("model", dim), OPTIMIZER))
        if data is not None:
            step = ff.shard(step, mesh, "data", zero=zero)
        step = ff.donate(step) if donated else step
        tokens = TOKENS if data is None else ff.local_batch(TOKENS, mesh, "data")
        return trained(step, tokens, LAYOUTS)

    for found in ff.spmd(main, mesh)():
        close(found, WHOLE, 1e-10)


@pytest.mark.parametrize("dim", [None, 1])
@pytest.mark.parametrize("n", [2, 4])
def test_a_block_sends_four_sums_of_an_activation(n, dim):
    """Megatron's count; reduce-scatters and gathers are each half of one."""
    step = ff.value_and_grad(model("model", dim))
    mesh, counts = simulated(model=n), []
    for layers in (1, 2):

        def main(layers=layers):
            params = ff.place(step, parameters(layers), TOKENS, layouts=LAYOUTS)
            with ff.ledger() as log:
                step(params, TOKENS)
            return log.bytes("model")

        counts.append(ff.spmd(main, mesh)()[0])
    activation = BATCH * LENGTH * DIM * 8
    sums = 4 * 2 * (n - 1) * activation // n
    norms = 0 if dim is None else 2 * (n - 1) * DIM * 8 // n  # of one weight's gradient
    if dim is not None:  # of the products' inputs, again for the weights' gradients
        norms += 2 * (n - 1) * DIM * 8 // n  # the bias that meets split activations
    assert counts[1] - counts[0] == sums + norms


def test_second_derivatives_are_those_of_one_device():
    def product(params, tokens):
        towards = tree.map(torch.cos, params)
        return towards, torch.func.grad(
            lambda p: ff.global_norm(torch.func.grad(smooth)(p, tokens))
        )(params)

    def smooth(params, tokens):
        return mlp(params, tokens)

    @ff.unit
    def layer(p, x):
        return x + row_linear(torch.tanh(column_linear(x, p["up"])), p["down"])

    def mlp(params, x):
        for p in params:
            x = layer(p, x)
        return x.square().mean()

    params = [
        {"up": wide(8, DIM, seed=k), "down": wide(DIM, 8, seed=k + 1)} for k in (0, 2)
    ]
    x = wide(4, DIM, seed=9)
    layouts = {"*/up": COLUMN, "*/down": ROW}
    expected = product(params, x)[1]
    mesh = simulated(data=2, model=2)

    def main():
        step = ff.shard(lambda p, x: product(p, x)[1], mesh, "data")
        mine = ff.local_batch(x, mesh, "data")
        placed = ff.place(step, params, mine, layouts=layouts)
        return ff.unshard(step(placed, mine))

    for found in ff.spmd(main, mesh)():
        close(found, expected, 1e-10)


def test_a_padding_row_gets_no_gradient_on_the_rank_that_has_it():
    weight, tokens = wide(VOCAB, DIM, seed=3), torch.tensor([[5, 2, 5], [7, 0, 1]])
    for padding in (5, -1, 0):
        weight.requires_grad_()
        y = F.embedding(tokens, weight, padding % VOCAB)
        (expected,) = torch.autograd.grad(y.sin().sum(), weight)

        def main(padding=padding):
            table = ff.unit(
                lambda w, t: vocab_embedding(w, t, padding_idx=padding).sin().sum()
            )
            w = ff.place(table, weight.detach(), tokens, layouts={"": COLUMN})
            return ff.unshard(ff.value_and_grad(table)(w, tokens)[1])

        for found in ff.spmd(main, simulated(model=4))():
            close(found, expected, 1e-12)


def test_a_table_and_its_padding_hold_on_a_mesh_of_vmap():
    def summed(w):
        layout = ff.Layout((4, 4), torch.float32, (ff.Split(0, "model", 2),), "w")
        tokens = torch.tensor([1, 2, 3, 2], dtype=torch.uint8)
        w = ff.Sharded(w, layout)
        return vocab_embedding(w, tokens, padding_idx=2).sum()

    mesh = ff.make_mesh({"model": 2}, "vmap")
    found = ff.spmd(torch.func.grad(summed), mesh)(torch.ones(2, 4))
    assert [g[:, 0].tolist() for g in found] == [[0, 1], [0, 1]]


# What is refused


def leaf(dim, axis="model", *more, n=4):
    layout = ff.Layout((n, n), torch.float32, (ff.Split(dim, axis, 2), *more), "w")
    shape = (2, 4) if dim == 0 else (4, 2)
    return ff.Sharded(torch.ones(shape), layout)


def over_data(layer, x):
    """The layer over the axis along which each rank has its own ``x``."""
    step = ff.shard(lambda x: layer(leaf(0, "data"), x), simulated(data=2), "data")
    return lambda: ff.spmd(lambda: step(x), simulated(data=2))()


ROWS = ff.Layout((4, 4), torch.float32, (ff.Split(1, "data", 2),), "w")
X, TABLE = torch.ones(3, 4), torch.eye(4)


@refusals({
    "a column layer of rows": (lambda: column_linear(X, leaf(1)), ValueError,
        "split over model=2 along dim 1 is no leaf for it: split it along dim 0"),
    "a row layer of columns": (lambda: row_linear(X, leaf(0)), ValueError,
        "row_linear: .* split it along dim 1"),
    "unlike axes": (lambda: column_linear(X, (leaf(0), leaf(0, "other"))), ValueError,
        "lay it out over the axis of w"),
    "a whole bias": (lambda: column_linear(X, leaf(0), torch.ones(4)), ValueError,
        "a whole tensor is no leaf for it: lay it out over the axis of w"),
    "fewer biases": (lambda: column_linear(X, (TABLE, TABLE), (None,)), ValueError,
        "2 weights and 1 biases: give .* each its bias or None"),
    "no weights": (lambda: column_linear(X, ()), ValueError, "give one at least"),
    "features as a sequence": (lambda: row_linear(X, leaf(1), sequence_dim=-1),
        ValueError, "row_linear: sequence_dim=-1 .* one of the dims before the last"),
    "unequal parts": (lambda: vocab_embedding(leaf(0, n=5), torch.tensor([1])),
        ValueError, "the axis does not divide 5: pad it to 6, or cut it to 4"),
    "a buffer": (lambda: column_linear(X, leaf(0, "model", ff.Flat(("d",), 1, "u", 0,
        8))), ValueError, "lies in a buffer: read it in an @ff.unit"),
    "inputs of ranks": (over_data(lambda w, x: column_linear(x, w), X), ValueError,
        'column_linear: over axis "data" shard averages .* another axis'),
    "features of ranks' inputs": (over_data(lambda w, x: row_linear(x,
        ff.Sharded(w.local.T, ROWS)), X), ValueError,
        'row_linear: over axis "data" shard averages'),
    "tokens of ranks": (over_data(vocab_embedding, torch.tensor([1, 2])), ValueError,
        'tokens: over axis "data" shard averages'),
    "a split bias": (lambda: row_linear(X, leaf(1), leaf(0)), ValueError,
        "added once: leave it whole"),
    "a plain product": (lambda: F.linear(X, leaf(0)), NotATensor,
        "column_linear takes weights that are split along dim 0"),
    "padding": (lambda: vocab_embedding(torch.eye(4), torch.tensor([1]), padding_idx=4),
        ValueError,
        "padding_idx=4 is outside the vocabulary of 4: give one from -4 to 3"),
    "a token": (lambda: vocab_embedding(torch.eye(4), torch.tensor([1, 4])), IndexError,
        "token 4 is outside the vocabulary of 4: give 0 to 3"),
    "a token below": (lambda: vocab_embedding(torch.eye(4), torch.tensor([-1])),
        IndexError, "token -1 is outside"),
    "a token under vmap, turned round": (lambda: torch.vmap(torch.vmap(vocab_embedding,
        (None, 1)), (None, 0))(TABLE, torch.tensor([[[0, 1, 2], [3, 0, 8]]] * 4)),
        IndexError, "token 8 is outside the vocabulary of 4"),
    "floats": (lambda: vocab_embedding(torch.eye(4), torch.ones(2)), TypeError,
        "tokens are integers, got torch.float32"),
})  # fmt: skip
def test_bad_input_is_refused(call, error, way_out):
    refused(call, error, way_out)


def test_a_token_outside_is_refused_on_every_rank():
    def main():
        with pytest.raises(IndexError, match="token 9 is outside the vocabulary of 8"):
            vocab_embedding(w, torch.tensor([9]))
        return True

    layout = ff.Layout((8, 2), torch.float32, (ff.Split(0, "model", 2),), "w")
    w = ff.Sharded(torch.ones(4, 2), layout)
    assert ff.spmd(main, simulated(model=2))() == [True, True]


def test_a_sequence_that_the_axis_does_not_divide_is_refused():
    def main():
        with pytest.raises(ValueError, match="3 is not a multiple of 2"):
            row_linear(torch.ones(3, 2), leaf(1), sequence_dim=0)
        return math.pi

    assert ff.spmd(main, simulated(model=2))()
