"""Drawn programs, on drawn meshes and stacks: right by the law, or refused. Never else.

`JUDGED=2000 pytest tests/derivatives/test_judge.py` judges as many programs.
"""

import os
import re

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from fsfunc.sharded.leaf import NotATensor
from fsfunc.tracing.refusals import LawError
from tests.derivatives.drawn import losses, run
from tests.derivatives.judging import MESHES, WAYS, by_law, on_ranks
from tests.derivatives.worlds import NoMeaning

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
EXAMPLES = int(os.environ.get("JUDGED", "250"))
STACKS = {"": lambda f: f, "remat": ff.remat}
TAKES = ["vag_w", "grad_w", "vag_x", "grad_x", "value"]


def step_of(node, take):
    """The drawn loss, or a derivative of it."""

    def step(o, w, x):
        if take == "value":
            return run(o, node, w, x)
        if take.endswith("w"):
            return getattr(o, take)(lambda w: run(o, node, w, x), w)
        return getattr(o, take)(lambda x: run(o, node, w, x), x)

    return step


def close(found, expected):
    """Whether all ranks have what the law says, to rounding."""
    for one, right in zip(found, expected, strict=True):
        for a, b in zip(tree.leaves(one), tree.leaves(right), strict=True):
            if not torch.allclose(a, b, rtol=1e-7, atol=1e-8, equal_nan=True):
                return False
    return True


# A leaf read beside units and in them: its gradient is told with both.
ROUGH = ("pmean", ("times", ("rough sum", ("w",)), ("msq", ("x",))))
IN_UNITS = ("msq", ("unit", ("w",), "b", ("unit", ("w",), "a", ("x",))))


@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
@given(
    losses(),
    st.sampled_from(TAKES),
    st.sampled_from([n for n in MESHES if n > 1]),
    st.sampled_from(WAYS),
    st.sampled_from(sorted(STACKS)),
)
@example(("plus", ROUGH, IN_UNITS), "vag_w", 2, 0, "")
@example(("plus", ROUGH, IN_UNITS), "vag_w", 3, 0, "remat")
def test_right_or_refused(node, take, n, way, stack):
    step = step_of(node, take)
    try:
        expected = by_law(step, n, parts=bool(way), placed=way is not None)
    except NoMeaning:
        expected = None
    except NotImplementedError:
        return
    try:
        found = on_ranks(step, n, way, wrap=STACKS[stack])
    except (LawError, NotATensor):
        return
    except ValueError as error:  # of the rules that hold as a step runs
        assert "derivative" in str(error), error
        return
    except RuntimeError as error:  # torch's own, on one device too
        with pytest.raises(RuntimeError, match=re.escape(str(error)[:40])):
            on_ranks(step, 1, way, wrap=STACKS[stack])
        return
    assert expected is not None, "accepted, though it has no meaning"
    assert close(found, expected), (found[0], expected[0])
