"""What has no one meaning under ``shard`` is refused, and the message mends it."""

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from fsfunc.comm.backends.link import CollectiveMismatch
from fsfunc.tracing.rules import LawError
from tests.derivatives import refused
from tests.derivatives.judging import MESHES, W, X, gradient, on
from tests.derivatives.worlds import by_units

each = tree.map
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

EVERY = refused.STEPS | refused.PLAIN
# At zero=0 every rank has whole leaves, of which these are refused in other words.
WHOLE = ["an own factor", "laid own", "born here", "own rate", "more on one rank"]
# Simulated ranks share what the first of them found: it goes on till another differs.
LATE = {"another rate", "more on one rank"}


def attempted(name, zero):
    step, plain = EVERY[name][0], name in refused.PLAIN
    main = lambda: refused.attempt(step, MESHES[2], zero, W, X, plain)  # noqa: E731
    with ff.ledger() as log:
        try:
            ff.spmd(main, MESHES[2])()
        finally:
            assert not log.records or name in LATE


# torch 2.11 and 2.12 end it when the error is gone, in a thread without its hooks.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <generator object _checkpoint_without_reentrant"
    ":pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize(
    ("name", "zero"), [(name, (1, 3)[i % 2]) for i, name in enumerate(EVERY)]
)
def test_it_is_refused_with_the_way_out(name, zero):
    with pytest.raises(ValueError, match=EVERY[name][1]):
        attempted(name, zero)


@pytest.mark.parametrize("name", WHOLE)
def test_whole_leaves_too(name):
    with pytest.raises(LawError, match=r"differs from rank to rank|ranks|rank \d"):
        attempted(name, 0)


def reduced_by_hand(answer):
    class Reduce(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return ff.psum(x, "data")

        @staticmethod
        def backward(ctx, g):
            return answer(g)

    return Reduce.apply


@pytest.mark.parametrize("zero", [None, 0, 3])
def test_a_function_around_a_collective_answers_as_that_does(zero):
    """Its backward returns what psum's own would, or is told so."""

    def step(reduce):
        def loss(w, x):
            return (reduce(by_units(w, x)) * by_units(w, x)).sum()

        return gradient(loss)

    def found(reduce):
        return on(2, zero, step(reduce))

    psum = lambda x: ff.psum(x, "data")  # noqa: E731
    for one, right in zip(found(reduced_by_hand(psum)), found(psum), strict=True):
        assert all(torch.equal(one[k], right[k]) for k in right)
    with pytest.raises(LawError, match="backward of Reduce.*sends nothing.*psum of"):
        found(reduced_by_hand(lambda g: g))


def captured(w, x):
    old = tree.leaves(each(lambda a: a + 1, w))
    body = ff.unit(lambda m, x: (x @ m).mean() * sum(a.sum() for a in old))
    return body(w["a"], x)


def middle(rank):
    def step(w, x):
        g = gradient(by_units)(w, x)
        return each(lambda g: 2 * g, g) if ff.axis_index("data") == rank else g

    return step


def picked(rank):
    return torch.tensor([1.0, 2.0, 3.0])[rank]


def drawn(rank):
    return torch.rand((), generator=torch.Generator().manual_seed(rank))


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


RANKS_DIFFER = {
    "captured": (captured, "is given this rank's part of 'a' as an input", (3,)),
    "a rank in the middle": (middle(1), "only rank 1 computes mul", (0, 1)),
    "the last rank": (middle(2), "only rank 2 computes mul", (3,)),
    "picked": (scaled_by(picked), "differs from rank to rank", (0,)),
    "drawn": (scaled_by(drawn), "differs from rank to rank", (3,)),
    "asked": (asked, "differs from rank to rank", (0, 1)),
    "rows": (rows, "mixes the elements .* a range", (0, 3)),
}


@pytest.mark.parametrize("name", RANKS_DIFFER)
def test_what_differs_from_rank_to_rank_is_refused(name):
    step, text, zeros = RANKS_DIFFER[name]
    for zero in zeros:
        with pytest.raises(LawError, match=text):
            on(3, zero, step)


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


@pytest.mark.parametrize(
    ("made", "zero"),
    [
        (lambda w: w, 1),
        (lambda w: ff.lay_like(ff.unshard(w), w), 3),
        (ff.randn_like, 1),
    ],
)
def test_dims_of_a_part_are_not_asked_on_one_rank_either(made, zero):
    """There a part is all of its leaf, but of one dim."""
    step = lambda w, x: refused.by_dims(made(w), x)  # noqa: E731
    with pytest.raises(ValueError, match=r"ndim at .*is_leaf=ff.is_sharded"):
        ff.spmd(
            lambda: refused.attempt(step, MESHES[1], zero, W, X, False), MESHES[1]
        )()
