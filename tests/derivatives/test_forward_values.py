"""What forward mode brings out of a unit is the rank's own, as what the unit returns.

It was taken for a constant, which all ranks have alike: parts were multiplied by a
rank's own number in silence, and the Gauss-Newton products of a solver were taken for
gradients of other rows.
"""

import pytest
import torch
from torch.func import grad, jvp

import fsfunc as ff
from fsfunc import tree
from fsfunc.tracing.rules import LawError, RowsApart
from tests.checks import close
from tests.derivatives.judging import by_turns, on
from tests.derivatives.worlds import unit

each = tree.map
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


def outputs(w, x):
    return unit(w["b"], unit(w["a"], x))


def loss(w, x):
    return outputs(w, x).square().mean()


def slope(w, x, v):
    return jvp(lambda w: outputs(w, x), (w,), (v,))[1]


def gauss_newton(w, x, v):
    jv = slope(w, x, v).detach()
    return grad(lambda w: (outputs(w, x) * jv).mean())(w)


def by_a_quadratic(w, x, v):
    return grad(lambda v: slope(w, x, v).square().mean() / 2)(v)


def fisher(w, x, v):
    """The empirical one: of this batch's gradient."""
    g = grad(loss)(w, x)
    return ff.tree_scale(g, ff.tree_sum(each(torch.mul, g, v)))


def hessian(w, x, v):
    return jvp(lambda w: grad(loss)(w, x), (w,), (v,))[1]


def solved(product):
    """Two steps of conjugate gradients."""

    def step(w, x):
        g = grad(loss)(w, x)
        d, r, q = each(torch.zeros_like, g), g, g
        for _ in range(2):
            a, rr = product(w, x, q), dot(r, r)
            share = rr / dot(q, a)
            d = each(lambda d, q, s=share: d + s * q, d, q)
            r = each(lambda r, a, s=share: r - s * a, r, a)
            share = dot(r, r) / rr
            q = each(lambda r, q, s=share: r + s * q, r, q)
        return d

    return step


def dot(a, b):
    return ff.tree_sum(each(torch.mul, a, b))


PRODUCTS = {f.__name__: f for f in (gauss_newton, by_a_quadratic, fisher, hessian)}


@by_turns(PRODUCTS, (3, 0, 1, 2))
def test_products_in_a_solver_equal_one_device(name, zero):
    step = solved(PRODUCTS[name])
    (alone,) = on(1, zero, step)
    for found in on(2, zero, step):
        close(found, alone, 1e-9)


def a_factor(w, x):
    m = slope(w, x, w).sum()
    return each(lambda a: a * m, w)


def laid(w, x):
    m, full = slope(w, x, w).mean(), ff.unshard(w)
    return ff.lay_like({k: a * m for k, a in full.items()}, w)


def in_a_level_of_its_own(w, x):
    """Of a second jvp around the first."""
    m = jvp(lambda w: slope(w, x, w), (w,), (w,))[1].sum()
    return each(lambda a: a * m, w)


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("step", [a_factor, laid, in_a_level_of_its_own])
def test_it_differs_from_rank_to_rank(step, zero):
    with pytest.raises(LawError, match="differs from rank to rank"):
        on(2, zero, step)


def test_the_mean_of_it_is_one_number():
    def step(w, x):
        m = slope(w, x, w).mean()
        m = m if ff.axis_size("data") == 1 else ff.pmean(m, "data")
        return each(lambda a: a * m, w)

    (alone,) = on(1, 3, step)
    for found in on(2, 3, step):
        close(found, alone, 1e-9)


def test_products_row_by_row_are_still_told_apart():
    """Each row's own product, clipped: of the mean over ranks of two rows, that is."""

    def step(w, x):
        rows = [gauss_newton(w, x[i : i + 1], w) for i in range(len(x))]
        return each(lambda *g: sum(a.clamp(-0.1, 0.1) for a in g), *rows)

    with pytest.raises(RowsApart):
        on(2, 3, step)
