"""The classic mistakes of sharding: each is found, and the message names its cause."""

import time

import pytest

from tests.testing import planted_layers, planted_steps

BUGS = {**planted_steps.BUGS, **planted_layers.BUGS}

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found_and_named(name):
    bug = BUGS[name]
    if bug.right is not None:
        bug.check(bug.right)
    start = time.process_time()
    with pytest.raises(Exception, match=bug.said):
        bug.check(bug.wrong)
    assert time.process_time() - start < 10
