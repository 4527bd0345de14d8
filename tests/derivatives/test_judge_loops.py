"""Drawn loops over rows: right, or refused; and refused only where they are not right.

`JUDGED=2000 pytest tests/derivatives/test_judge_loops.py` judges as many programs.
"""

import os

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from fsfunc.tracing.refusals import LawError, RowsApart
from tests.derivatives.drawn_loops import ROWS, is_of_a_batch, loops, run
from tests.derivatives.judging import MESHES, WAYS, W, X
from tests.derivatives.test_judge import STACKS
from tests.derivatives.worlds import by_units

ROWS_A_RANK = {2: 4, 3: 4, 4: 2}  # even, so that blocks weigh alike
EXAMPLES = int(os.environ.get("JUDGED", "60"))
ROUTES = ["fake", "real", "odd"]


def data(n):
    return X[: n * ROWS_A_RANK[n]]


def on_ranks(drawn, n, way, record, stack):
    """What it gives on each rank; ``odd``: fake tensors cannot go through it."""

    def step(w, x):
        if record == "odd":
            x = x + 0 * torch.unique(x.detach()).sum()
        return run(drawn, w, ROWS[drawn.rows](x))

    def main():
        shard = lambda f: ff.shard(stack(f), MESHES[n], "data", zero=way or 0)  # noqa: E731
        mine, f = ff.local_batch(data(n), MESHES[n], "data"), shard(step)
        if way is None:
            w = W
        elif record == "odd":
            w = ff.place(shard(by_units), W, mine)
        else:
            w = ff.place(f, W, mine, record=record)
        return ff.unshard(f(w, mine))

    return ff.spmd(main, MESHES[n])()


def together(rows, n):
    """The rows that meet in one mean: the same block of every rank."""
    each = [rows(part) for part in data(n).chunk(n)]
    return [torch.cat(blocks) for blocks in zip(*each, strict=True)]


def close(one, other):
    pairs = zip(tree.leaves(one), tree.leaves(other), strict=True)
    return all(torch.allclose(a, b, rtol=1e-7, atol=1e-9) for a, b in pairs)


@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
@given(
    loops(),
    st.sampled_from([n for n in MESHES if n > 1]),
    st.sampled_from(WAYS),
    st.sampled_from(ROUTES),
    st.sampled_from(sorted(STACKS)),
)
def test_right_or_refused(drawn, n, way, record, stack):
    rows = ROWS[drawn.rows]
    by_law = run(drawn, W, together(rows, n))
    right = not is_of_a_batch(drawn) or close(by_law, run(drawn, W, rows(data(n))))
    try:
        found = on_ranks(drawn, n, way, record, STACKS[stack])
    except RowsApart:
        assert not right, "refused, though it is right"
        return
    except LawError:  # of other laws, that the other judge knows
        assert way is None
        return
    assert right, "accepted, though one device gives something else"
    for one in found:
        assert close(one, by_law), (one, by_law)
