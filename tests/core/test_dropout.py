"""Random numbers follow from the step, the unit call and the data."""

import pytest
import torch
import torch.nn.functional as F

import fsfunc as ff
from tests.checks import on_ranks, same, simulated

D, B = 16, 8
# Ones and halves: what survives is exact, and tells which mask it was.
P = [torch.full((D,), 2.0**-i) for i in range(3)]
X = torch.ones(B, D)


@ff.unit
def inner(w, x):
    return F.dropout(x * w, 0.5)


@ff.unit
def block(w, x):
    return F.dropout(inner(w, x) + inner(w, x), 0.5)


def loss(ps, x):
    return sum((block(p, x) * (i + 1)).mean() for i, p in enumerate(ps))


def run(make, ranks=1, axes=None, f=loss, replicate=None):
    """Value and gradient of the loss from a fixed seed; rank 0's."""
    torch.manual_seed(5)
    grad = ff.value_and_grad(f)
    if ranks == 1 and axes is None:
        return make(grad)(P, X)
    mesh = simulated(ranks, **axes or {})
    g = make(grad, lambda g: ff.shard(g, mesh, "data", zero=3, replicate=replicate))
    outs = on_ranks(g, P, X, mesh=mesh)
    for out in outs:
        same(out, outs[0])
    return outs[0]


A, R = ff.accumulate, ff.remat
FOUR = run(lambda g: A(g, 4))


@pytest.mark.parametrize(
    "ranks, make",
    [
        (4, lambda g, s: s(g)),
        (2, lambda g, s: A(s(g), 2)),
        (1, lambda g, s: A(s(A(g, 2)), 2)),
        (4, lambda g, s: R(s(g))),
        (2, lambda g, s: s(A(R(g), 2))),
        (2, lambda g, s: A(R(s(g)), 2)),
    ],
)
def test_masks_are_equal_microbatch_by_microbatch(ranks, make) -> None:
    """One device with four microbatches, or four ranks, or two with two each."""
    same(run(make, ranks, {}), FOUR)


def test_nested_units_draw_apart_from_their_outer_one() -> None:
    seen = {}

    @ff.unit
    def outer(w, x):
        seen["first"] = F.dropout(x)
        for i in range(2):
            unit = ff.unit(lambda w, x, i=i: seen.setdefault(i, F.dropout(x)))
            unit(w, x)
        seen["second"] = F.dropout(x)
        return (x * w).sum()

    ff.value_and_grad(outer)(torch.ones(D), X)
    assert len({tuple(m.flatten().tolist()) for m in seen.values()}) == 4


def test_a_step_repeats_from_the_default_generator_and_draws_one_number() -> None:
    grad = ff.value_and_grad(loss)
    torch.manual_seed(0)
    first, second = grad(P, X), grad(P, X)
    after = torch.get_rng_state()
    torch.manual_seed(0)
    same(grad(P, X), first)
    state = torch.get_rng_state()
    same(ff.remat(grad)(P, X), second)
    assert torch.equal(torch.get_rng_state(), after)
    assert first[0] != second[0]
    torch.set_rng_state(state)  # all that a resumed run needs
    same(grad(P, X), second)
    torch.manual_seed(0)
    for _ in range(2):
        torch.randint(1 << 62, ())
    assert torch.equal(torch.get_rng_state(), after)
