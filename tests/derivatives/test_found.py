"""Programs that once were wrong without a word, or refused though they are right."""

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from fsfunc.comm.backends.link import CollectiveMismatch
from fsfunc.comm.crossings import LawError
from tests.derivatives.judging import MESHES, W, X
from tests.derivatives.worlds import by_units, unit

each = tree.map


def on(n, zero, step, params=W, laid=by_units):
    """What ``step`` returns on each of ``n`` ranks; one rank is the judge."""

    def main():
        shard = lambda f: ff.shard(f, MESHES[n], "data", zero=zero)  # noqa: E731
        mine = ff.local_batch(X, MESHES[n], "data")
        return ff.unshard(shard(step)(ff.place(shard(laid), params, mine), mine))

    return ff.spmd(main, MESHES[n])()


def gradient(loss):
    return lambda w, x: ff.value_and_grad(loss)(w, x)[1]


def captured(w, x):
    old = tree.leaves(each(lambda a: a + 1, w))
    body = ff.unit(lambda m, x: (x @ m).mean() * sum(a.sum() for a in old))
    return body(w["a"], x)


def middle(rank):
    def step(w, x):
        g = gradient(by_units)(w, x)
        return each(lambda g: 2 * g, g) if ff.axis_index("data") == rank else g

    return step


def filled(rank):
    return torch.zeros(()).fill_(1.0 + rank)


def picked(rank):
    return torch.tensor([1.0, 2.0, 3.0])[rank]


def drawn(rank):
    return torch.rand((), generator=torch.Generator().manual_seed(rank))


def seeded(rank):
    torch.manual_seed(rank)
    return torch.rand(())


def scaled_by(constant):
    def step(w, x):
        factor = constant(ff.axis_index("data"))
        return each(lambda a: a * factor, w)

    return step


def asked(w, x):
    rate = x.mean().item()
    return each(lambda a, g: a - rate * g, w, gradient(by_units)(w, x))


def rows(w, x):
    return each(lambda a: a / a.norm(dim=-1, keepdim=True), w)


REFUSED = {
    "captured": (captured, "is given this rank's part of 'a' as an input", (1, 3)),
    "a rank in the middle": (middle(1), "only rank 1 computes mul", (0, 1, 3)),
    "the last rank": (middle(2), "only rank 2 computes mul", (0, 3)),
    "filled": (scaled_by(filled), "differs from rank to rank", (0, 1, 3)),
    "picked": (scaled_by(picked), "differs from rank to rank", (0, 1, 3)),
    "drawn": (scaled_by(drawn), "differs from rank to rank", (0, 3)),
    "seeded": (scaled_by(seeded), "differs from rank to rank", (0, 3)),
    "asked": (asked, "differs from rank to rank", (0, 1, 3)),
    "rows": (rows, "mixes the elements .* a range", (0, 1, 3)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_told_now(name):
    step, text, zeros = REFUSED[name]
    for zero in zeros:
        with pytest.raises(LawError, match=text):
            on(3, zero, step)


def test_one_rank_is_told_what_several_are():
    with pytest.raises(LawError, match="mixes the elements"):
        on(1, 3, rows)


@pytest.mark.parametrize("zero", [0, 3])
def test_a_step_over_raw_leaves_says_whose_they_are(zero):
    """SAM: the second gradient is by a value made of a parameter and a mean."""
    params = W | {"t": torch.tensor(0.3, dtype=X.dtype)}

    def head(p, x):
        return by_units({k: p[k] for k in W}, x) * p["t"].exp()

    def step(p, x, whose=lambda p: p):
        g = gradient(head)(p, x)
        return gradient(head)(whose(each(lambda a, g: a - 0.1 * g, p, g)), x)

    laid = lambda p, x: by_units({k: p[k] for k in W}, x)  # noqa: E731
    with pytest.raises(LawError, match="made of parameters.*ff.assume"):
        on(2, zero, step, params, laid)

    def said(p, x):
        return step(p, x, lambda p: p | {"t": ff.assume(p["t"], "data", "I")})

    (right,) = on(1, zero, said, params, laid)
    for found in on(2, zero, said, params, laid):
        assert all(torch.allclose(found[k], right[k]) for k in right)


def test_psum_never_meets_pmean():
    def step(w, x):
        reduce = ff.pmean if ff.axis_index("data") else ff.psum
        return reduce(x.sum(), "data")

    with pytest.raises(CollectiveMismatch, match="(?s)psum.*of a mean"):
        on(2, 3, step)


def target_network(s, x):
    loss = lambda p: (unit(p["a"], x) - unit(s["old"]["a"], x).detach()).square().mean()  # noqa: E731
    new = each(lambda a, g: a - 0.1 * g, s["new"], ff.value_and_grad(loss)(s["new"])[1])
    return each(lambda e, a: 0.9 * e + 0.1 * a, s["old"], new)


def by_whole_matrices(w, x):
    full = ff.unshard(w)
    f = lambda full: torch.tanh(x @ full["a"] @ full["b"]).mean()  # noqa: E731
    return ff.reduce_like(ff.value_and_grad(f)(full)[1], w)


def weighted_l1(w, x):
    f = lambda w: by_units(w, x) + ff.tree_sum(each(lambda a: a.abs() * 0.1, w))  # noqa: E731
    return torch.func.grad(f)(w)


@pytest.mark.parametrize("zero", range(4))
def test_what_is_right_runs(zero):
    pair = {"new": {"a": W["a"]}, "old": {"a": W["b"]}}
    laid = lambda s, x: (unit(s["new"]["a"], x) + unit(s["old"]["a"], x)).mean()  # noqa: E731
    cases = [(target_network, pair, laid)]
    cases += [(step, W, by_units) for step in (by_whole_matrices, weighted_l1)]
    for step, params, lay in cases:
        (right,) = on(1, zero, step, params, lay)
        for found in on(2, zero, step, params, lay):
            pairs = zip(tree.leaves(found), tree.leaves(right), strict=True)
            assert all(torch.allclose(a, b) for a, b in pairs), step
