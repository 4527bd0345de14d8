"""What has no one meaning under ``shard`` is refused, and the message mends it."""

import pytest

import fsfunc as ff
from fsfunc.tracing.refusals import LawError
from tests.derivatives import refused
from tests.derivatives.judging import MESHES, W, X

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
