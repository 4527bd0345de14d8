"""Units that draw outside gradient calls: each rank its own numbers, as within them."""

import contextlib
import hashlib
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.func import vmap

import fsfunc as ff
from fsfunc.runtime import generators
from tests.checks import close, same, simulated

WIDTH = 24
W, X = torch.ones(1), torch.ones(2, WIDTH)


@ff.unit
def masked(w, x):
    return F.dropout(x * w, 0.5)


@ff.unit
def noisy(w, x):
    return x * w + torch.randn_like(x)


@ff.unit
def outer(w, x):
    return masked(w, x) + noisy(w, x)


@ff.unit
def still(w, x):
    return x * w


def gradient(w, x):
    return ff.value_and_grad(lambda x: noisy(w, x).square().sum())(x)[1]


own_gradient = ff.unit(gradient, whole=True)


def stock(fn):
    """By ``torch.func.grad``, whose units are in no gradient call of ours."""

    def run(w, x):
        return torch.func.grad(lambda x: fn(w, x).sum())(x)

    return run


def taped(fn):
    """By ``torch.autograd``."""

    def run(w, x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(fn(w, x).sum(), x)[0]

    return run


def within(mode):
    def wrap(fn):
        def run(w, x):
            with mode():
                return fn(w, x)

        return run

    return wrap


def mapped(fn):
    def run(w, x):
        return vmap(lambda x: fn(w, x), randomness="different")(x)

    return run


WAYS = {
    "plainly": lambda fn: fn,
    "no_grad": within(torch.no_grad),
    "inference_mode": within(torch.inference_mode),
    "torch.func.grad": stock,
    "torch.autograd": taped,
    "vmap": mapped,
    "remat": ff.remat,
    "remat, torch.autograd": lambda fn: taped(ff.remat(fn)),
    "precision": lambda fn: ff.precision(fn, compute=torch.float64),
    "accumulate": lambda fn: ff.accumulate(fn, 2),
}


def forward(unit):
    def fn(w, x):
        return unit(w, x) + 2 * unit(w, x)

    return fn


@pytest.mark.parametrize(
    "way, unit",
    [(way, outer) for way in WAYS]
    + [(way, own_gradient) for way in WAYS if way != "inference_mode"],
)
def test_ranks_draw_apart_in_every_way_that_a_unit_runs(way, unit):
    mesh = simulated(3)
    fn = forward(unit)
    if way in ("torch.func.grad", "torch.autograd", "remat, torch.autograd"):
        fn = forward(lambda w, x: unit(w, x) * unit(w, x))
    step = ff.shard(WAYS[way](fn), mesh, "data")

    def main(seed):
        placed = ff.place(step, W, X)
        torch.manual_seed(seed)
        found = [step(placed, X) for _ in range(2)]
        return found, torch.rand(3)

    every, again = ff.spmd(main, mesh)(1), ff.spmd(main, mesh)(1)
    same([out for out, _ in every], [out for out, _ in again])
    masks = {tuple(x.flatten().tolist()) for out, _ in every for x in out}
    assert len(masks) == 6  # of two calls on three ranks
    for _, after in every:  # what ranks draw outside units stays equal
        same(after, every[0][1])


def test_a_recompute_in_a_stock_backward_draws_what_was_drawn():
    """The gradient of the dropped sum is the mask itself."""
    fn = lambda w, x: masked(w, x)  # noqa: E731

    def both(w, x):
        x = x.clone().requires_grad_()
        y = ff.remat(fn)(w, x)
        return y.detach(), torch.autograd.grad(y.sum(), x)[0]

    step = ff.shard(both, MESH, "data")

    def main():
        placed = ff.place(step, W, X)
        y, g = step(placed, X)
        same(g, y)

    ff.spmd(main, MESH)()


MESH = simulated()


@pytest.mark.parametrize("fails", [False, True])
def test_a_unit_that_draws_nothing_leaves_the_generator_alone(fails):
    """An evaluation between two steps changes no mask; nor does a call that raises."""

    @ff.unit
    def raising(w, x):
        torch.rand(3)
        raise ValueError("no")

    step = ff.shard(forward(raising if fails else still), MESH, "data")

    def main():
        if fails:
            placed = ff.place(still_step, W, X)
        else:
            placed = ff.place(step, W, X)
        torch.manual_seed(3)
        before = torch.get_rng_state()
        with pytest.raises(ValueError) if fails else contextlib.nullcontext():
            step(placed, X)
        assert torch.equal(torch.get_rng_state(), before)

    still_step = ff.shard(forward(still), MESH, "data")
    ff.spmd(main, MESH)()


def test_generators_that_stand_still_are_seeded_once(monkeypatch):
    """A unit call that finds them as the last one did takes what that made of them."""
    mesh, made = simulated(2), []
    step = ff.shard(forward(still), mesh, "data")

    def sha(data, **how):
        made.append(mesh.rank)
        return hashlib.sha1(data, **how)

    def main():
        placed = ff.place(step, W, X)
        torch.manual_seed(11)
        with torch.no_grad():
            for _ in range(4):
                step(placed, X)
            torch.rand(1)
            step(placed, X)

    monkeypatch.setattr(generators, "sha1", sha)
    ff.spmd(main, mesh)()
    assert sorted(made) == [0, 0, 1, 1]


def test_ranks_without_rows_go_on_with_the_numbers_of_the_others():
    step = ff.shard(forward(noisy), MESH, "data")

    def main():
        rows = X[:0] if MESH.rank else X
        placed = ff.place(step, W, X)
        torch.manual_seed(0)
        return [step(placed, rows) is None or torch.rand(2) for _ in range(3)]

    first, second = ff.spmd(main, MESH)()
    same(first, second)


@pytest.mark.parametrize("unit", [masked, own_gradient])
def test_ranks_of_a_model_axis_draw_alike(unit):
    mesh = simulated(data=2, model=2)
    step = ff.shard(forward(unit), mesh, "data")

    def main():
        torch.manual_seed(0)
        return step(ff.place(step, W, X), X)

    a, b, c, d = ff.spmd(main, mesh)()
    same(a, b)
    same(c, d)
    assert not torch.equal(a, c)


def test_a_gradient_call_in_a_unit_repeats_from_the_default_generator():
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        found.append(own_gradient(W, X))
    same(*found)


def test_one_rank_draws_what_one_device_does():
    mesh = simulated(1)
    step = ff.shard(forward(outer), mesh, "data")
    torch.manual_seed(0)
    expected = forward(outer)(W, X)
    torch.manual_seed(0)

    def main():
        placed = ff.place(step, W, X)
        torch.manual_seed(0)
        return step(placed, X)

    same(ff.spmd(main, mesh)()[0], expected)


@pytest.mark.parametrize("glue", [False, True])
def test_a_pipelined_forward_pass_draws_anew_in_each_call(glue):
    mesh = simulated(data=2, pipe=2)

    def loss(ps, x):
        for p in ps:
            x = masked(p, x)
            x = F.dropout(x, 0.1) if glue else x
        return x.sum()

    ps = [torch.ones(1) for _ in range(4)]
    x = torch.ones(4, 64)
    step = ff.shard(ff.pipeline(loss, mesh, "pipe", n_microbatches=2), mesh, "data")

    def main():
        placed = ff.place(step, ps, x)
        torch.manual_seed(0)
        return [step(placed, x) for _ in range(3)], torch.rand(2)

    every = ff.spmd(main, mesh)()
    for of, (out, after) in enumerate(every):
        same(out, every[of - of % 2][0])  # the two stages of a replica
        same(after, every[0][1])
        assert len({float(y) for y in out}) == 3
    assert not torch.equal(every[0][0][0], every[2][0][0])


def test_a_pipelined_forward_pass_that_draws_nothing_leaves_the_generator_alone():
    mesh = simulated(pipe=2)
    step = ff.pipeline(
        lambda ps, x: sum(still(p, x).sum() for p in ps), mesh, "pipe", n_microbatches=1
    )

    def main():
        placed = ff.place(step, [W, W], X)
        before = torch.get_rng_state()
        step(placed, X)
        assert torch.equal(torch.get_rng_state(), before)

    ff.spmd(main, mesh)()


def test_an_inner_gradient_of_ranks_is_that_of_microbatches():
    """Four ranks, or four microbatches on one device, in inner calls too."""

    def inner(w, x):
        return ff.value_and_grad(lambda x: masked(w, x).square().sum())(x)[1]

    def loss(w, x):
        return (masked(w, x) * inner(w, x)).mean()

    x = 1 + torch.arange(8.0 * WIDTH).view(8, WIDTH) / WIDTH
    torch.manual_seed(5)
    expected = ff.accumulate(ff.value_and_grad(loss), 4)(W, x)
    mesh = simulated(4)
    step = ff.shard(ff.value_and_grad(loss), mesh, "data")

    def main():
        mine = ff.local_batch(x, mesh, "data")
        placed = ff.place(step, W, mine)
        torch.manual_seed(5)
        return ff.unshard(step(placed, mine))

    for found in ff.spmd(main, mesh)():
        close(found, expected)


@pytest.mark.processes
def test_processes_draw_what_simulated_ranks_do(processes):
    printed = processes(Path(__file__), 2)
    assert printed.count("drawn") == 2
    for out, rank in zip(as_simulated(), range(2), strict=True):
        assert f"drawn {rank} {out}" in printed


def draw(mesh):
    step = ff.shard(forward(outer), mesh, "data")
    placed = ff.place(step, W, X)
    torch.manual_seed(0)
    return [round(v, 4) for v in step(placed, X).flatten().tolist()]


def as_simulated():
    return ff.spmd(lambda: draw(MESH), MESH)()


if __name__ == "__main__":
    mesh = ff.make_mesh({"data": 2})
    print("drawn", mesh.rank, draw(mesh))
    sys.exit()
