"""A card's generator: kept, swapped with the ranks, and seeded by unit calls."""

import json

import pytest
import torch
import torch.nn.functional as F

import fsfunc as ff
from tests.checks import on_ranks, simulated
from tests.gpu.programs import (
    DEVICE,
    REHEARSED,
    dropped,
    example,
    on_host,
    same,
    step_of,
    trained,
)
from tests.gpu.programs import on_ranks as trained_on_ranks
from tests.programs import python

pytestmark = pytest.mark.gpu

D, ROWS = 16, 8


def drawn(*shape):
    return torch.rand(shape, device=DEVICE)


# Recomputed


AROUND = {
    "one device": lambda f, mesh: f,
    "zero=3": lambda f, mesh: ff.shard(f, mesh, "data"),
    "zero=1": lambda f, mesh: ff.shard(f, mesh, "data", zero=1),
    "microbatches": lambda f, mesh: ff.accumulate(ff.shard(f, mesh, "data"), 2),
}


@pytest.mark.parametrize("name", AROUND)
def test_a_recompute_draws_what_the_forward_drew(name):
    """Bit by bit, over three steps; and the caller's generator ends as without."""

    def main(around):
        mesh = simulated(2)
        step = AROUND[name](around(step_of(dropped)), mesh)
        one = name == "one device"
        found = [trained(step)] if one else trained_on_ranks(step, mesh)
        return on_host(list(found)), drawn(4).tolist()

    kept, computed_again = main(lambda f: f), main(ff.remat)
    same(computed_again[0], kept[0])
    assert computed_again[1] == kept[1]


def test_a_recompute_of_a_call_that_draws_in_several_ways():
    """By the default generator of the card, of the host, and by one of its own."""
    own = torch.Generator(DEVICE)

    @ff.unit
    def noisy(p, x):
        x = F.dropout(x @ p["w"], 0.5) + torch.randn_like(x)
        x = x * torch.rand(x.shape).to(x.device)
        mask = torch.full_like(x.detach(), 0.5).bernoulli()
        return x * torch.rand(x.shape, generator=own, device=DEVICE) + mask

    def loss(params, x):
        for p in params:
            x = noisy(p, x).sigmoid()
        return x.mean()

    def run(around):
        torch.manual_seed(3)
        own.manual_seed(4)
        params, batch = example()
        found = around(ff.value_and_grad(loss))(params, batch.abs())
        own_next = torch.rand(2, generator=own, device=DEVICE)
        return found, drawn(2), torch.rand(2), own_next

    same(run(ff.remat), run(lambda f: f))


# The same masks on any mesh: ones and halves, so sums are exact in any order


@ff.unit
def inner(w, x):
    return F.dropout(x * w, 0.5)


@ff.unit
def block(w, x):
    return F.dropout(inner(w, x) + inner(w, x), 0.5)


def loss(ps, x):
    return sum((block(p, x) * (i + 1)).mean() for i, p in enumerate(ps))


def masked(make, ranks=1):
    """Value and gradient of the loss from a fixed seed; rank 0's."""
    weights = [torch.full((D,), 2.0**-i, device=DEVICE) for i in range(3)]
    batch = torch.ones(ROWS, D, device=DEVICE)
    torch.manual_seed(5)
    gradient, mesh = ff.value_and_grad(loss), simulated(ranks)
    if ranks == 1:
        return on_host(make(gradient, lambda f: f)(weights, batch))
    step = make(gradient, lambda f: ff.shard(f, mesh, "data"))
    outs = on_ranks(step, weights, batch, mesh=mesh)
    for out in outs:
        same(out, outs[0])
    return on_host(outs[0])


A, R = ff.accumulate, ff.remat


@pytest.mark.parametrize(
    "ranks, make",
    [
        (4, lambda g, s: s(g)),
        (2, lambda g, s: A(s(g), 2)),
        (2, lambda g, s: s(A(R(g), 2))),
        (4, lambda g, s: R(s(g))),
        (1, lambda g, s: A(R(g), 4)),
    ],
)
def test_masks_are_equal_microbatch_by_microbatch(ranks, make):
    """One device with four microbatches, or four ranks, or two with two each."""
    expected = masked(lambda g, s: A(g, 4))
    same(masked(make, ranks), expected)


def test_units_draw_apart_by_rank_and_alike_by_seed():
    mesh = simulated(3)

    def main():
        seen = []

        @ff.unit
        def mask(w, x):
            seen.append(F.dropout(torch.ones(64, device=DEVICE), 0.5))
            return (x * w).sum()

        step = ff.shard(ff.value_and_grad(mask), mesh, "data")
        x = torch.ones(3, D, device=DEVICE)
        w = ff.place(step, torch.ones(D, device=DEVICE), x)
        torch.manual_seed(7)
        del seen[:]
        step(w, x)
        step(w, x)
        return [x.tolist() for x in seen]

    masks = list(ff.spmd(main, mesh)())
    assert [len(mine) for mine in masks] == [2, 2, 2]
    assert len({tuple(x) for mine in masks for x in mine}) == 6
    assert list(ff.spmd(main, mesh)()) == masks


# Simulated ranks: each has the generator for itself


def in_turns(mesh):
    """What ranks draw that take turns between two draws, and the caller afterwards."""

    def main():
        first = drawn(3)
        ff.psum(torch.ones(1), "data")
        second = torch.randn(2, device=DEVICE)
        ff.psum(torch.ones(1), "data")
        return torch.cat([first, second, drawn(ff.axis_index("data") + 1)]).tolist()

    torch.manual_seed(11)
    return [list(x) for x in ff.spmd(main, mesh)()], drawn(2).tolist()


def test_ranks_draw_as_if_each_were_alone():
    """From the caller's state on; afterwards the caller goes on from rank 0's."""
    torch.manual_seed(11)
    first, second = drawn(3), torch.randn(2, device=DEVICE)
    after = torch.cuda.get_rng_state() if not REHEARSED else torch.get_rng_state()
    found, last = in_turns(simulated(3))
    for rank, mine in enumerate(found):
        if REHEARSED:
            torch.set_rng_state(after)
        else:
            torch.cuda.set_rng_state(after)
        third = drawn(rank + 1)
        assert mine == torch.cat([first, second, third]).tolist()
    if REHEARSED:
        torch.set_rng_state(after)
    else:
        torch.cuda.set_rng_state(after)
    drawn(1)
    assert last == drawn(2).tolist()


BEFORE_CUDA = """
import json, sys, torch
from tests.checks import simulated
from tests.gpu.test_random_numbers import in_turns

used = torch.cuda.is_initialized()
found = in_turns(simulated(3)), in_turns(simulated(3))
with open(sys.argv[1], "w") as file:
    json.dump([used, *found], file)
"""


def test_ranks_that_are_the_first_to_use_the_card(tmp_path):
    """They draw what they draw where it was in use before."""
    done = python("-c", BEFORE_CUDA, tmp_path / "found", timeout=60)
    assert done.returncode == 0, done.stderr
    used, first, again = json.loads((tmp_path / "found").read_text())
    assert not used
    assert first == again
    assert first == json.loads(json.dumps(in_turns(simulated(3))))


def test_a_seed_within_a_rank_is_that_ranks_alone():
    mesh = simulated(2)

    def main():
        if ff.axis_index("data") == 1:
            torch.manual_seed(5)
        ff.psum(torch.ones(1), "data")
        return drawn(4).tolist()

    torch.manual_seed(1)
    zeroth = drawn(4).tolist()
    torch.manual_seed(5)
    first = drawn(4).tolist()
    torch.manual_seed(1)
    assert list(ff.spmd(main, mesh)()) == [zeroth, first]
