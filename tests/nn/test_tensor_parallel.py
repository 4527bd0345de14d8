"""Layers whose weights are split send what they say, or say why they do not run.

That they train as one device does is drawn in test_four_axes.py.
"""

import pytest
import torch
import torch.nn.functional as F

import fsfunc as ff
from fsfunc.comm.comparison import RanksDiffer
from fsfunc.nn import column_linear, row_linear, vocab_embedding
from fsfunc.sharded.leaf import NotATensor
from fsfunc.testing import assert_equals_one_device
from tests.checks import all_refused, simulated, with_ledger
from tests.nn.models import (
    BATCH,
    COLUMN,
    DIM,
    LAYOUTS,
    LENGTH,
    VOCAB,
    model,
    parameters,
    samples,
    wide,
)  # fmt: skip


@pytest.mark.parametrize(("n", "dim"), [(2, None), (4, 1)])
def test_a_block_sends_four_sums_of_an_activation(n, dim):
    """Megatron's count; reduce-scatters and gathers are each half of one."""
    step, counts = ff.value_and_grad(model({"model": n}, dim)), []
    how = {"mesh": simulated(model=n), "layouts": LAYOUTS}
    for layers in (1, 2):
        given = parameters(layers), samples()
        log = with_ledger(lambda mesh: step, *given, **how)[0][1]
        counts.append(log.bytes("model"))
    sums = 4 * 2 * (n - 1) * (BATCH * LENGTH * DIM * 8) // n
    # Of one weight's gradient, and of the bias that meets split activations.
    vectors = 0 if dim is None else 2 * 2 * (n - 1) * DIM * 8 // n
    assert counts[1] - counts[0] == sums + vectors


@pytest.mark.parametrize("sharded", [True, False])
def test_ranks_that_split_a_layer_are_given_one_batch(sharded):
    """Else each adds its part of other rows to theirs, and no shape tells."""
    mesh = simulated(data=2, model=2)
    loss = ff.value_and_grad(model({"model": 2}, None))
    step = ff.shard(loss, mesh, "data") if sharded else loss

    def main(axes):
        mine = samples(int(ff.axis_index(axes)))
        placed = ff.place(step, parameters(1), mine, layouts=LAYOUTS)
        return step(placed, mine)[0]

    with pytest.raises(RanksDiffer, match="along 'model' are given unlike batches"):
        ff.spmd(lambda: main(("data", "model")), mesh)()
    found = ff.spmd(lambda: main(("data",)), mesh)()
    assert found[0] == found[1] and found[2] == found[3]


@pytest.mark.parametrize("padding", [5, -1, 0])
def test_a_padding_row_gets_no_gradient_on_the_rank_that_has_it(padding):
    weight, tokens = wide(VOCAB, DIM, seed=3), torch.tensor([[5, 2, 5], [7, 0, 1]])

    def by(table):
        unit = ff.unit(lambda w, t: table(w, t).sin().sum())
        return ff.value_and_grad(lambda w, t: unit(w, t))

    theirs = by(lambda w, t: F.embedding(t, w, padding % VOCAB))
    ours = by(lambda w, t: vocab_embedding(w, t, padding_idx=padding))
    how = {"axis": (), "layouts": {"": COLUMN}, "calls": 1, "exact": True}
    assert_equals_one_device(theirs, ours, simulated(model=2), weight, tokens, **how)


# What is refused


def leaf(dim, axis="model", *more, n=4):
    layout = ff.Layout((n, n), torch.float32, (ff.Split(dim, axis, 2), *more), "w")
    shape = (2, 4) if dim == 0 else (4, 2)
    return ff.Sharded(torch.ones(shape), layout)


def over_data(layer, x):
    """The layer over the axis along which each rank has its own ``x``."""
    step = ff.shard(lambda _, x: layer(leaf(0, "data"), x), simulated(data=2), "data")
    return lambda: ff.spmd(lambda: step({}, x), simulated(data=2))()


ROWS = ff.Layout((4, 4), torch.float32, (ff.Split(1, "data", 2),), "w")
X, TABLE, TWO = torch.ones(3, 4), torch.eye(4), simulated(model=2)


test_bad_input_is_refused = all_refused({
    "a column layer of rows": (lambda: column_linear(X, leaf(1)), ValueError,
        "split over model=2 along dim 1 is no leaf for it: split it along dim 0"),
    "a row layer of columns": (lambda: row_linear(X, leaf(0)), ValueError,
        "row_linear: .* split it along dim 1"),
    "unlike axes": (lambda: column_linear(X, (leaf(0), leaf(0, "other"))), ValueError,
        "lay it out over the axis of w"),
    "a whole bias": (lambda: column_linear(X, leaf(0), torch.ones(4)), ValueError,
        "a whole tensor is no leaf for it: lay it out over the axis of w"),
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
    "a sequence": (ff.spmd(lambda: row_linear(X[:, :2], leaf(1), sequence_dim=0),
        TWO),
        ValueError, "3 is not a multiple of 2"),
    "a token on any rank": (ff.spmd(lambda: vocab_embedding(leaf(0),
        torch.tensor([9])), TWO), IndexError, "token 9 is outside the vocabulary of 4"),
    "floats": (lambda: vocab_embedding(torch.eye(4), torch.ones(2)), TypeError,
        "tokens are integers, got torch.float32"),
})  # fmt: skip
