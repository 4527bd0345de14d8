"""What a gradient is under ``shard``: wherever research takes one, it is the law's.

Each program runs at every ``zero``, on placed and on whole parameters, on 1 to 4 ranks;
the judge is plain autograd over all ranks' data at once (`worlds.Law`).
"""

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from tests.checks import close
from tests.covering import LONG_TESTS
from tests.derivatives.cases import LOSSES, STEPS, loss
from tests.derivatives.judging import (
    MESHES,
    WAYS,
    W,
    X,
    assert_lawful,
    by_law,
    of_ranks,
    on,
)
from tests.derivatives.worlds import by_units, unit

# torch scripts its own forward-mode decompositions, and warns of it.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

EVERY = [(n, way) for n in (2, 3) for way in WAYS]
EVERY += [(1, 3), (1, None), (4, 0), (4, 3)]
SOME = [(2, 0), (2, 1), (3, 3), (2, None)]
FEW = [(1, 3), (2, 1), (2, None), (3, 3)]


# torch.func has no end at which to take a mean of what a plain parameter gets outside
# units: squares of it, that meet the rank's own loss.
REFUSED = {("times_squares", "grad_w", None)}


def taken_by(how, program):
    """The program as a loss, differentiated by its parameters."""
    return lambda o, w, x: getattr(o, how)(lambda w: program(o, w, x), w)


def turns(names, ways, each):
    """(name, some of the ways): by turns, so that all of them come up."""
    return [
        (name, [ways[(i * each + k) % len(ways)] for k in range(each)])
        for i, name in enumerate(names)
    ]


def holds(name, how, n, way, **wrap):
    step = taken_by(how, LOSSES[name])
    if n > 1 and (name, how, way) in REFUSED:
        with pytest.raises(ValueError, match="one value on all ranks, is this ra"):
            on(n, way, of_ranks(step))
    else:
        assert_lawful(on(n, way, of_ranks(step), **wrap), by_law(step, n))


SOME_WAYS = 3 if LONG_TESTS else 2


@pytest.mark.parametrize(("name", "ways"), turns(LOSSES, EVERY, SOME_WAYS))
def test_a_loss_has_the_gradient_of_the_mean(name, ways):
    for n, way in ways:
        holds(name, "vag_w", n, way)


TOLD = ("times_squares", [(2, None)])


@pytest.mark.parametrize(("name", "ways"), [*turns(LOSSES, SOME, 1), TOLD])
def test_so_it_has_by_torch_func_and_under_remat(name, ways):
    holds(name, "grad_w", *ways[0])
    holds(name, "vag_w", 2, ways[0][1], wrap=ff.remat)


@pytest.mark.parametrize(("name", "ways"), turns(STEPS, EVERY, 3))
def test_a_step_gives_what_the_law_says(name, ways):
    for n, way in ways:
        assert_lawful(on(n, way, of_ranks(STEPS[name])), by_law(STEPS[name], n))


def test_parameters_and_data_at_once():
    """``argnums=(0, 1)``: the mean's for the one, its own for the other."""

    def step(o, w, x):
        if not o.law:
            f = lambda w, x: loss(o, w, x)  # noqa: E731
            return ff.value_and_grad(f, argnums=(0, 1))(w, x)[1]
        by_w = o.grad_w(lambda w: loss(o, w, x), w)
        return by_w, o.grad_x(lambda x: loss(o, w, x), x)

    for n, way in FEW:
        assert_lawful(on(n, way, of_ranks(step)), by_law(step, n))


def test_a_weighted_loss_is_divided_by_the_mean_weight():
    """Of an own value: total_r / the mean weight."""

    def step(o, w, x):
        if not o.law:
            f = lambda x: ff.Weighted(x.pow(3).sum(), x[:, 0].exp().sum())  # noqa: E731
            return ff.value_and_grad(f)(x)[1]
        weight = sum(part[:, 0].exp().sum() for part in x) / o.n
        return [3 * part**2 / weight for part in x]

    for n in MESHES:
        assert_lawful(on(n, None, of_ranks(step)), by_law(step, n))


def test_plain_autograd_by_own_values():
    """Inside a step, by torch.autograd itself, in both ways."""

    def step(o, w, x):
        if o.law:
            return o.grad_x(lambda x: loss(o, w, x), x)
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            value = loss(o, w, x)
        (found,) = torch.autograd.grad(value, x, retain_graph=True)
        value.backward()
        assert torch.equal(found, x.grad)
        return found

    for n, way in FEW:
        assert_lawful(on(n, way, of_ranks(step)), by_law(step, n))


@pytest.mark.parametrize("way", [0, 3])
def test_noise_is_one_draw_however_the_ranks_are_seeded(way):
    def main():
        mine = ff.local_batch(X, MESHES[2], "data")
        shard = lambda f: ff.shard(f, MESHES[2], "data", zero=way)  # noqa: E731

        def step(w, x):
            torch.manual_seed(ff.axis_index("data"))
            return ff.randn_like(w)

        return ff.unshard(shard(step)(ff.place(shard(by_units), W, mine), mine))

    with ff.ledger() as log:
        found = ff.spmd(main, MESHES[2])()
    torch.manual_seed(0)
    assert_lawful(found, [ff.randn_like(W)] * 2, 0)
    assert log.count("pbroadcast", rank=0) == 1


def target_network(s, x):
    loss = lambda p: (unit(p["a"], x) - unit(s["old"]["a"], x).detach()).square().mean()  # noqa: E731
    new = tree.map(
        lambda a, g: a - 0.1 * g, s["new"], ff.value_and_grad(loss)(s["new"])[1]
    )
    return tree.map(lambda e, a: 0.9 * e + 0.1 * a, s["old"], new)


def by_whole_matrices(w, x):
    full = ff.unshard(w)
    f = lambda full: torch.tanh(x @ full["a"] @ full["b"]).mean()  # noqa: E731
    return ff.reduce_like(ff.value_and_grad(f)(full)[1], w)


@pytest.mark.parametrize("zero", [0, 3])
def test_what_is_nearly_refused_runs(zero):
    pair = {"new": {"a": W["a"]}, "old": {"a": W["b"]}}
    laid = lambda s, x: (unit(s["new"]["a"], x) + unit(s["old"]["a"], x)).mean()  # noqa: E731
    for step, params, lay in [
        (target_network, pair, laid), (by_whole_matrices, W, by_units)
    ]:  # fmt: skip
        (right,) = on(1, zero, step, params, lay)
        for found in on(2, zero, step, params, lay):
            close(found, right)
