"""What a refusal names as a way out is taken, and means what it does on one device.

By the cases of `tracing.rules`: every one that names a way out has rows here.
"""

import pytest
import torch
from torch.func import grad, hessian, vmap

import fsfunc as ff
from fsfunc import tree
from fsfunc.tracing import rules
from tests.checks import close
from tests.derivatives.judging import W, X, gradient, on
from tests.derivatives.worlds import by_units, unit

each = tree.map
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


def mean(x):
    """Over ranks, and on one device."""
    return ff.pmean(x, "data")


def own_means(w, x):
    """Whole tensors, each rank's own."""
    return {k: a * x.mean() for k, a in w.items()}


# What a step returns; of own values their mean, which is that of one device

MEANT = ff.unit(lambda w, x: own_means(w, x), whole=True)
HESSIAN = ff.unit(
    lambda w, x: hessian(lambda a: by_units(w | {"a": a}, x))(w["a"]), whole=True
)
HYPER = ff.unit(lambda w, x: torch.tanh((x[:, None] @ (w * x[:, :, None]))[:, 0]))


def clipped(w, x):
    one = lambda w, row: by_units(w, row[None])  # noqa: E731
    rows = vmap(grad(one), (None, 0))(w, x)
    return {k: g.clamp(-0.01, 0.01).mean(0) for k, g in rows.items()}


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, x):
        ctx.save_for_backward(w, x)
        return x @ w * w.sum()

    @staticmethod
    def backward(ctx, g):
        w, x = ctx.saved_tensors
        return x.T @ g * w.sum() + (x @ w * g).sum(), g @ w.T * w.sum()


CLIPPED = ff.unit(clipped, whole=True)
TRIANGLE = ff.unit(lambda w, x: w["a"].triu() * x.mean(), whole=True)
MAPPED = ff.unit(
    lambda w, x: vmap(lambda row, x: (x @ row).mean(), (0, None))(w["a"], x), whole=True
)
BY_HAND = ff.unit(lambda w, x: Squared.apply(w, x))
READ = ff.unit(lambda s, x: (s["s"] * x).square().mean())
PLACED = {"s": torch.tensor(0.5, dtype=X.dtype)}


def noise(w, x):
    draw = ff.randn_like(w, generator=torch.Generator().manual_seed(1))
    return each(torch.add, w, draw)


def ranges(w, x):
    whole = ff.unshard(w)
    shifts = torch.arange(9, dtype=X.dtype).view(3, 3)
    return ff.lay_like({k: a + shifts for k, a in whole.items()}, w)


def sorted_whole(w, x):
    return ff.lay_like({k: a.sort()[0] for k, a in ff.unshard(w).items()}, w)


def by_shape(w, x):
    wide = each(lambda a: len(a.shape) > 1, w, is_leaf=ff.is_sharded)
    return each(lambda a, yes: a * 0.9 if yes else a, w, wide)


def scaled_by_norm(w, x):
    return by_units(ff.tree_scale(w, 1 + ff.global_norm(w)), x)


def in_parameters(w, x):
    return mean(unit(w["b"], unit(w["a"], x)).sum() / x.shape[0])


def by_unsharded(w, x):
    full = ff.unshard(w)
    return mean(unit(full["b"], full["a"]).sum())


def one_by_pcast(w, x):
    every = ff.all_gather(x, "data", to="I")
    loss = lambda e: (ff.pcast(e, "data", to="V") * x.sum()).mean()  # noqa: E731
    return ff.pmean(ff.value_and_grad(loss)(every)[1], "data") * ff.axis_size("data")


def one_left_out(w, x):
    every = ff.all_gather(x, "data")
    g = ff.value_and_grad(lambda e: (e * x.sum()).mean())(every)[1]
    return ff.pmean(g, "data") * ff.axis_size("data")


def plain_gradient(wrap):
    """Of a number that is one value on all ranks, by torch's own."""
    return lambda s, x: grad(lambda s: mean((wrap(s["s"]) * x).square().mean()))(s)


def doubled(said):
    """By what is made of a parameter, with and without a word on whose it is."""

    def step(s, x):
        loss = lambda t: (t["s"] * x).square().mean()  # noqa: E731
        return ff.value_and_grad(loss)(said(each(lambda a: 2 * a, s)))[1]

    return step


def whose(make):
    """A tensor made in the step, by which the gradient is each rank's own."""

    def step(w, x):
        d = make(x)
        g = ff.value_and_grad(lambda d: by_units(w, x + d))(d)[1]
        return mean(g.sum(0) / ff.axis_size("data")) * ff.axis_size("data")

    return step


def made_of_one(whose):
    """A second gradient, by what the first was used for (SAM)."""

    def loss(p, x):
        return by_units({k: p[k] for k in W}, x) * p["s"].exp()

    def step(p, x):
        g = gradient(loss)(p, x)
        moved = each(lambda a, g: a - 0.1 * g, p, g)
        out = gradient(loss)(moved | {"s": whose(moved["s"])}, x)
        return out | {"s": mean(out["s"])}

    return step


def sum_of_pairs(a):
    return torch.view_as_real(torch.complex(a, 2 * a)).sum(-1)


TEXTS = {
    "random": [noise],
    "own": [
        lambda w, x: each(lambda a: a * mean(x.mean()), w),
        lambda w, x: ff.tree_scale(w, mean(x.mean())),
        gradient(lambda w, x: by_units(ff.tree_scale(w, mean(x.mean())), x)),
        lambda w, x: ff.reduce_like(own_means(ff.unshard(w), x), w),
        lambda w, x: ff.reduce_like(MEANT(w, x), w),
    ],
    "positions": [ranges, lambda w, x: each(lambda a: a + torch.ones_like(a), w)],
    "sums": [
        gradient(lambda w, x: by_units(w, x) + ff.tree_sum(each(torch.square, w))),
        gradient(lambda w, x: by_units(w, x) + ff.global_norm(w)),
    ],
    "mixes": [sorted_whole, lambda w, x: mean(HESSIAN(w, x))],
    "dims": [
        lambda w, x: ff.lay_like(each(torch.triu, ff.unshard(w)), w),
        lambda w, x: mean(TRIANGLE(w, x)),
    ],
    "pairs": [
        lambda w, x: each(lambda a: torch.complex(a, 2 * a).imag, w),
        lambda w, x: ff.lay_like(each(sum_of_pairs, ff.unshard(w)), w),
    ],
    "shape": [by_shape, lambda w, x: each(torch.zeros_like, w)],
    "term": [gradient(scaled_by_norm)],
    "input": [in_parameters, by_unsharded],
    "disagrees": [
        lambda w, x: ff.lay_like(mean(own_means(ff.unshard(w), x)), w),
        lambda w, x: ff.reduce_like(own_means(ff.unshard(w), x), w),
        gradient(lambda w, x: by_units(w, x * x.square().sum(1, keepdim=True))),
    ],
    "parameters": [
        gradient(lambda w, x: (unit(w["a"], x) * x).sum() / len(x) + by_units(w, x)),
        gradient(lambda w, x: HYPER(w["a"], x).square().mean() + by_units(w, x)),
        gradient(lambda w, x: unit(mean(x.T @ x / len(x)), unit(w["a"], x)).mean()),
    ],
    "lost": [
        lambda w, x: ff.tree_sum(each(torch.square, w)),
        lambda w, x: ff.tree_sum(tree.leaves(w, is_leaf=ff.is_sharded)),
    ],
    "parts": [
        lambda w, x: ff.tree_sum(w),
        lambda w, x: ff.global_norm(w),
        lambda w, x: ff.unshard(w)["a"].sum(),
    ],
    "one value": [one_by_pcast, one_left_out],
    "rows": [lambda w, x: mean(HESSIAN(w, x))],
    "own gradient": [
        lambda w, x: grad(lambda w: by_units(w, x))(w),
        lambda w, x: grad(lambda w: (ff.unshard(w)["a"] * x.mean()).sum())(w),
    ],
    "whose": [
        whose(torch.zeros_like),
        whose(lambda x: ff.pcast(torch.zeros(x.shape, dtype=x.dtype), "data", to="V")),
        whose(lambda x: ff.assume(torch.zeros(x.shape, dtype=x.dtype), "data", "V")),
    ],
    "bare": [
        lambda w, x: each(lambda g: 2 * g, gradient(by_units)(w, x)),
        lambda w, x: tree.leaves(ff.unshard(gradient(by_units)(w, x))),
    ],
}
# The same of steps that are given a number beside the parameters
BESIDE = {
    "unaveraged": [
        lambda s, x: ff.value_and_grad(lambda s: (s["s"] * x).square().mean())(s)[1],
        plain_gradient(lambda s: ff.pcast(s, "data", to="V")),
        doubled(lambda t: ff.assume(t, "data", "I")),
        lambda s, x: gradient(READ)(s, x),
    ],
    "made of one": [made_of_one(lambda s: ff.assume(s, "data", "I"))],
    "returned": [
        lambda s, x: {"s": s["s"] - mean(x.mean())},
        lambda s, x: each(
            torch.sub,
            s,
            ff.value_and_grad(lambda s: (s["s"] * x).square().mean())(s)[1],
        ),
    ],
}
# Of rows, what vmap maps, a Function of a leaf
OTHERS = {
    "apart": [lambda w, x: ff.reduce_like(CLIPPED(w, x), w)],
    "mapped": [lambda w, x: mean(MAPPED(w, x).sum(0))],
    "cut": [gradient(lambda w, x: BY_HAND(w["a"], x).square().mean())],
}
ELSEWHERE = {
    "unanswered": "test_refusals.py",  # a Function's backward returns the transpose
    "written": "state/test_born_layouts.py",  # layouts={path: ff.Own("data")}
    "no term": "",  # of the library itself: they name no way out
    "no part": "",
    "one more": "tracing/test_rules.py",
    "unlike": "",  # as of the one before
    "numbers": "state/test_unlike_steps.py",
    "beside": "core/test_auxiliary.py",
    "enters": "nn/test_kinds_of_axes.py",
    "counted": "nn/test_kinds_of_axes.py",
    "loss": "nn/test_kinds_of_axes.py",
    "no graph": "tracing/test_rules.py",
    "reshaped": "test_found_by_users.py",
    "hidden": "test_found_by_users.py",
    "count": "tracing/test_steadiness.py",
    "kept": "tracing/test_steadiness.py",
    "python": "tracing/test_rules.py",
    "scripts": "tracing/test_rules.py",
}
EVERY = TEXTS | BESIDE | OTHERS
ROWS = [(name, i) for name, steps in EVERY.items() for i in range(len(steps))]


@pytest.mark.parametrize(("name", "i"), ROWS)
def test_a_way_out_is_taken_and_means_what_it_does_on_one_device(name, i):
    zero = (3, 0, 1)[(len(name) + i) % 3]
    step, how = EVERY[name][i], {}
    if name == "made of one":
        how = {"w": W | PLACED, "laid": lambda p, x: by_units({k: p[k] for k in W}, x)}
    elif name in BESIDE:
        how = {"w": PLACED, "laid": lambda s, x: s["s"] * x.mean()}
    (alone,) = on(1, zero, step, **how)
    for found in on(2, zero, step, **how):
        close(found, alone, 1e-9)


def test_what_is_made_of_one_value_is_refused_without_a_word():
    how = {"w": PLACED, "laid": lambda s, x: s["s"] * x.mean()}
    with pytest.raises(rules.LawError, match="(?s)mean over the.*ff.assume"):
        on(2, 3, doubled(lambda t: t), **how)


def test_every_refusal_that_names_a_way_out_is_here():
    cases = [case for rule in rules.RULES for case in rule.texts]
    assert sorted(cases) == sorted([*EVERY, *ELSEWHERE])
