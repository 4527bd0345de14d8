"""The drawn programs of `test_judge`, on the other routes: recorded as they really run,
and where tensors without data cannot go. Right, or refused, there too.
"""

import os

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc.sharded.leaf import NotATensor
from fsfunc.tracing.refusals import LawError
from tests.derivatives.drawn import losses
from tests.derivatives.judging import MESHES, W, X, by_law
from tests.derivatives.test_judge import TAKES, close, pytestmark, step_of
from tests.derivatives.worlds import NoMeaning, Ranks, by_units

__all__ = ["pytestmark"]

EXAMPLES = int(os.environ.get("JUDGED", "50"))


def on_ranks(program, n, way, record):
    mesh = MESHES[n]

    def step(w, x):
        if record == "odd":
            x = x + 0 * torch.unique(x.detach()).sum()
        return program(Ranks(), w, x)

    def main():
        shard = lambda f: ff.shard(f, mesh, "data", zero=way)  # noqa: E731
        mine = ff.local_batch(X, mesh, "data")
        if record == "odd":
            w = ff.place(shard(by_units), W, mine)
        else:
            w = ff.place(shard(step), W, mine, record="real")
        return ff.unshard(shard(step)(w, mine))

    return ff.spmd(main, mesh)()


@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
@given(
    losses(),
    st.sampled_from(TAKES),
    st.sampled_from([n for n in MESHES if n > 1]),
    st.sampled_from([0, 1, 3]),
    st.sampled_from(["real", "odd"]),
)
def test_right_or_refused_on_every_route(node, take, n, way, record):
    step = step_of(node, take)
    try:
        expected = by_law(step, n, parts=bool(way))
    except NoMeaning:
        expected = None
    except NotImplementedError:
        return
    try:
        found = on_ranks(step, n, way, record)
    except (LawError, NotATensor):
        return
    except (ValueError, RuntimeError) as error:
        # Of the rules that hold as a step runs; and torch's own.
        assert "derivative" in str(error) or type(error) is RuntimeError, error
        return
    assert expected is not None, "accepted, though it has no meaning"
    assert close(found, expected), (found[0], expected[0])
