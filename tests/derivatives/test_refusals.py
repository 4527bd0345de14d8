"""What has no one meaning under ``shard`` is refused, and the message mends it."""

import pytest
import torch

import fsfunc as ff
from fsfunc.tracing.refusals import LawError
from tests.derivatives import refused
from tests.derivatives.judging import MESHES, W, X
from tests.derivatives.worlds import by_units

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


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("name", EVERY)
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

        return lambda w, x: ff.value_and_grad(loss)(w, x)[1]

    def found(reduce):
        shard = lambda f: ff.shard(f, MESHES[2], "data", zero=zero or 0)  # noqa: E731

        def main():
            mine = ff.local_batch(X, MESHES[2], "data")
            w = W if zero is None else ff.place(shard(by_units), W, mine)
            return ff.unshard(shard(step(reduce))(w, mine))

        return ff.spmd(main, MESHES[2])()

    psum = lambda x: ff.psum(x, "data")  # noqa: E731
    for one, right in zip(found(reduced_by_hand(psum)), found(psum), strict=True):
        assert all(torch.equal(one[k], right[k]) for k in right)
    with pytest.raises(LawError, match="backward of Reduce.*sends nothing.*psum of"):
        found(reduced_by_hand(lambda g: g))
