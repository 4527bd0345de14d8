"""Even loads of experts: a loss of the global batch, and a bias that is moved by loads.

The loss of the ranks' tokens is that of one device with all of them; so is the bias.
"""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import nn, tree
from tests.checks import all_refused, close, same, simulated, with_ledger
from tests.covering import examples
from tests.nn.models import wide

TOKENS, DIM, EXPERTS, LAYERS = 16, 4, 5, 2
# Unlike from rank to rank, so that the loads of one are not those of all.
X = wide(TOKENS, DIM, seed=5) + torch.arange(TOKENS, dtype=torch.float64)[:, None] / 4


def parameters():
    shapes = {"gate": (DIM, EXPERTS), "experts": (EXPERTS, DIM, DIM)}
    return [
        {name: wide(*shape, seed=k + len(name)) for name, shape in shapes.items()}
        for k in range(LAYERS)
    ]


GATES = {
    "top-1": lambda logits, **how: nn.top_1_gating(logits, capacity_factor=None, **how),
    "top-2": lambda logits, **how: nn.top_2_gating(logits, capacity_factor=None, **how),
    "top-k": lambda logits, **how: nn.top_k_gating(logits, 3, **how),
}


def expert(w, x):
    return torch.tanh(x @ w)


def mixture(gate):
    """A unit that returns its output, the load-balance loss, and counts."""

    @ff.unit
    def layer(p, x, used=None, **how):
        routing = gate(x @ p["gate"], used_token=used, **how)
        y = nn.expert_layer(x, routing, expert, p["experts"])
        return x + y, routing.aux_loss, ff.Summed(routing.counts)

    return layer


def balance_loss(gate, axis=None):
    """The load-balance losses of all layers alone: they are what is to be equal."""
    layer = mixture(gate)

    def loss(params, x, used=None):
        total = 0.0
        for k, p in enumerate(params):
            x, aux, _ = layer(p, x, used, balance_axis=axis)
            total = total + (k + 1) * aux
        return total

    return loss


def used(counts):
    """Which tokens are no padding: the first of each rank's, so many."""
    rows = [torch.arange(TOKENS // len(counts)) < n for n in counts]
    return torch.cat(rows)


PADDED = 4, 1, 0, 3  # tokens of each rank
FOUR, TWO_BY_TWO = {"data": 4}, {"data": 2, "expert": 2}


@pytest.mark.parametrize(
    ("name", "axes", "counts"),
    [
        ("top-1", FOUR, None),
        ("top-2", FOUR, PADDED),
        ("top-k", FOUR, PADDED),
        ("top-k", TWO_BY_TWO, None),
    ],
)
def test_the_loss_of_the_global_batch_is_that_of_one_device(name, axes, counts):
    batch = (X,) if counts is None else (X, used(counts))
    alone = ff.value_and_grad(balance_loss(GATES[name]))(parameters(), *batch)
    local = ff.value_and_grad(balance_loss(GATES[name]))
    ours = ff.value_and_grad(balance_loss(GATES[name], tuple(axes)))
    mesh, means = simulated(**axes), []

    def main(step):
        mine = ff.local_batch(batch, mesh, tuple(axes))
        step = ff.shard(ff.remat(step), mesh, tuple(axes))
        placed = ff.place(step, parameters(), *mine)
        plan = ff.plan(step, placed, *mine)
        with ff.ledger() as log:
            found = step(placed, *mine)
        assert plan.ranks[0].ledger.table() == log.table()
        return ff.unshard(found), log

    for found, log in ff.spmd(main, mesh)(ours):
        close(found, alone, 1e-12)
        # Of int64 counts, once a layer and again in its recompute, by rings of four.
        sent = [r for r in log.records if r.op == "psum" and r.dtype == torch.int64]
        assert len(sent) == 2 * LAYERS
        if len(axes) == 1:
            assert {r.bytes for r in sent} == {Fraction(2 * 3, 4) * 8 * EXPERTS}
    means = ff.spmd(main, mesh)(local)
    assert abs(means[0][0][0] - alone[0]) > 1e-3  # the loss of a rank's tokens differs


@settings(max_examples=examples(6))
@given(st.lists(st.integers(0, 4), min_size=4, max_size=4))
def test_of_any_numbers_of_tokens(counts):
    """Also of none at all, of which the loss is 0."""
    batch = X, used(counts)
    alone = balance_loss(GATES["top-k"])(parameters(), *batch)
    loss = ff.value(balance_loss(GATES["top-k"], "data"))
    wrap = lambda mesh: ff.shard(loss, mesh, "data")  # noqa: E731
    for found, _ in with_ledger(wrap, parameters(), *batch, mesh=simulated(4)):
        close(found, alone, 1e-12)


def by_counts(params, x, counts):
    """The losses of layers by the counts of a pass before; and their counts."""
    total, seen, layer = 0.0, [], mixture(GATES["top-k"])
    for k, p in enumerate(params):
        given = None if counts is None else counts[k]
        x, aux, count = layer(p, x, balance_counts=given)
        total, seen = total + (k + 1) * aux, [*seen, count]
    return total, seen


def over_microbatches(params, x):
    """Two passes over the microbatches, of which the first one counts."""
    count = lambda params, x: by_counts(params, x, None)  # noqa: E731
    _, seen = ff.accumulate(ff.value(count, has_aux=True), 2)(params, x)
    counts = [c.tree for c in seen]
    loss = lambda params, x: by_counts(params, x, counts)[0]  # noqa: E731
    return ff.accumulate(ff.value_and_grad(loss), 2)(params, x)


def test_the_loss_of_all_microbatches_is_exact_in_two_passes():
    alone = ff.value_and_grad(balance_loss(GATES["top-k"]))(parameters(), X)
    close(over_microbatches(parameters(), X), alone, 1e-12)
    wrap = lambda mesh: ff.shard(over_microbatches, mesh, "data")  # noqa: E731
    for found, _ in with_ledger(wrap, parameters(), X, mesh=simulated(4)):
        close(found, alone, 1e-12)


# A bias of choices


def test_a_bias_chooses_and_does_nothing_else():
    logits = torch.tensor([[2.0, 1.0, 0.0]], requires_grad=True)
    bias = torch.tensor([-1.0, 0.0, 0.0], requires_grad=True)
    routing = nn.top_k_gating(logits, 2, bias=bias)
    assert routing.indices.tolist() == [[1, 2]]
    probs = logits.softmax(-1)[0, 1:]
    close(routing.weights[0], probs / probs.sum())
    loss = (routing.weights * torch.tensor([1.0, 2.0])).sum() + routing.aux_loss
    assert torch.autograd.grad(loss, [logits, bias], allow_unused=True)[1] is None
    zero = nn.top_k_gating(logits, 2, bias=torch.zeros(3))
    same(zero, nn.top_k_gating(logits, 2))
    assert nn.top_1_gating(logits, bias=bias).indices.tolist() == [[1]]


def test_a_bias_moves_by_the_sign_of_what_is_missing():
    """By the loads of all, exactly; in any tree, of Summed or plain counts."""
    bias = {"a": torch.zeros(4), "b": torch.ones(2, dtype=torch.float64)}
    loads = {"a": torch.tensor([3, 1, 2, 2]), "b": torch.tensor([5, 5])}
    moved = nn.balance_bias(bias, loads, rate=0.25)
    expected = [-0.25, 0.25, 0.0, 0.0]
    same(moved, {"a": torch.tensor(expected), "b": bias["b"]})
    same(
        nn.balance_bias(bias, {k: ff.Summed(x) for k, x in loads.items()}, 0.25), moved
    )


SGD = ff.sgd(0.05)


def balanced_step(rate):
    """A step of a mixture whose biases are moved by the loads of the step."""
    layer = mixture(lambda logits, **how: nn.top_k_gating(logits, 2, **how))

    def step(state, x):
        train, bias = state

        def loss(params, x):
            counts = []
            for p, b in zip(params, bias, strict=True):
                x, _, count = layer(p, x, bias=b)
                counts.append(count)
            return (x - 1).square().mean(), counts

        (_, counts), g = ff.value_and_grad(loss, has_aux=True)(train.params, x)
        bias = nn.balance_bias(bias, counts, rate)
        return (train.apply_gradients(g, SGD), bias), [c.tree for c in counts]

    return step


def sharded(f, mesh, **how):
    return ff.shard(f, mesh, "data", **how)


def piped(f, mesh):
    return ff.pipeline(f, mesh, "pipe", n_microbatches=2)


STACKS = {
    "ranks": ({"data": 4}, sharded),
    "zero=1": ({"data": 2}, lambda f, mesh: sharded(f, mesh, zero=1)),
    "remat": ({"data": 2}, lambda f, mesh: sharded(ff.remat(f), mesh)),
    "accumulate": ({"data": 2}, lambda f, mesh: sharded(ff.accumulate(f, 2), mesh)),
    "pipeline": ({"pipe": 2}, piped),
    "both": ({"data": 2, "pipe": 2}, lambda f, mesh: sharded(piped(f, mesh), mesh)),
}


def run_balanced(step, axes, wrap, steps=4):
    mesh, over = simulated(**axes), tuple(a for a in axes if a == "data")

    def main():
        mine = ff.local_batch(X, mesh, over) if over else X
        transformed = wrap(step, mesh)
        bias = [torch.zeros(EXPERTS, dtype=torch.float64) for _ in range(LAYERS)]
        state = ff.place(
            transformed,
            (ff.TrainState(parameters(), SGD.init(parameters())), bias),
            mine,
        )
        counts = []
        for _ in range(steps):
            state, seen = transformed(state, mine)
            counts.append(seen)
        return ff.unshard(state[0].params), ff.unshard(state[1]), counts

    return ff.spmd(main, mesh)()


@pytest.mark.parametrize("name", STACKS)
def test_a_bias_evens_the_loads_alike_on_any_mesh(name):
    axes, wrap = STACKS[name]
    step = balanced_step(0.02)
    ((params, bias, counts),) = run_balanced(step, {"data": 1}, sharded)
    for found in run_balanced(step, axes, wrap):
        same(found[1:], (bias, counts))  # of integers: to the bit
        close(found[0], params, 1e-12)
    assert any((b != 0).any() for b in bias)


test_bad_input_is_refused = all_refused(
    {
        "a bias of others": (
            lambda: nn.top_k_gating(torch.zeros(2, 3), 1, bias=torch.zeros(2)),
            ValueError, "one number for each",
        ),
        "counts of others": (
            lambda: nn.top_k_gating(torch.zeros(2, 3), 1, balance_counts=torch.ones(2)),
            ValueError, "one number for each",
        ),
        "both": (
            lambda: nn.top_k_gating(
                torch.zeros(2, 3), 1, balance_counts=torch.ones(3), balance_axis="data"
            ),
            ValueError, "leave out the axis",
        ),
        "loads of others": (
            lambda: nn.balance_bias(torch.zeros(3), torch.ones(2)),
            ValueError, "one number an expert",
        ),
        "a tree of others": (
            lambda: nn.balance_bias([torch.zeros(3)], {"a": torch.ones(3)}),
            tree.TreeMismatch, "match",
        ),
    }
)  # fmt: skip
