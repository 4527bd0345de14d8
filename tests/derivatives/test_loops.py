"""Gradients in a loop over rows: the type check refuses what would be a mean too early.

Each gradient is the ranks' mean, of a row of every rank: what is not linear in it is
not what one device makes of one row.
"""

import pytest

import fsfunc as ff
from fsfunc import tree
from fsfunc.tracing.refusals import RowsApart
from tests import checks
from tests.derivatives.judging import MESHES, W, X, beside_units, by_turns
from tests.derivatives.loops import ALLOWED, REFUSED, running, slope
from tests.derivatives.worlds import by_units

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


# What means something for whole tensors alone.
OF_WHOLE = {"by_hand_stacked"}
ONE_ROW = ["by_hand", "critic", "critic_by_adam"]


def run(step, n, zero, rows=4):
    mesh = MESHES[n]

    def main():
        shard = lambda f: ff.shard(f, mesh, "data", zero=zero or 0)  # noqa: E731
        mine = ff.local_batch(X[: rows * n], mesh, "data")
        w = ff.place(shard(beside_units if zero is None else by_units), W, mine)
        return ff.unshard(shard(step)(w, mine))

    return ff.spmd(main, mesh)()


@by_turns(REFUSED, (None, 0, 3))
def test_what_is_a_mean_too_early_is_refused(name, zero):
    with pytest.raises(RowsApart, match="other rows of .*ff.reduce_like.*whole=True"):
        run(REFUSED[name], 2, zero)


@pytest.mark.parametrize("name", ["iterated", "own steps", "closure", "stock"])
def test_a_loop_over_one_row_is_a_loop(name):
    """With one row a rank nothing meets; over all ranks' rows it would."""
    with pytest.raises(RowsApart, match="whole=True"):
        run(REFUSED[name], 2, 3, rows=1)


@by_turns(ALLOWED, (None, 0, 3))
def test_what_is_none_runs(name, zero):
    run(ALLOWED[name], 2, None if name in OF_WHOLE else zero)
    if name in ONE_ROW:
        run(ALLOWED[name], 2, 3, rows=1)


@pytest.mark.parametrize("name", list(REFUSED)[::3])
def test_on_one_rank_each_gradient_is_of_its_row(name):
    (found,) = run(REFUSED[name], 1, 3)
    checks.close(tree.leaves(found), tree.leaves(REFUSED[name](W, X[:4])), 1e-9)


def test_the_way_out_is_right():
    """Per-sample clipping in a loop, in a unit that has the parameters to itself."""

    def private(w, x):
        body = ff.unit(lambda w, x: running(w, x), whole=True)
        return ff.reduce_like(body(w, x), w)

    right = running(W, X[:8])
    for zero in (0, 3):
        for found in run(private, 2, zero):
            checks.close(found, right, 1e-9)


def test_placing_a_step_that_loops_by_library_functions_checks_it():
    """Where nobody but the library reads gradients, types are else not looked at."""
    clip = ff.chain(ff.clip_by_global_norm(0.1))

    def step(w, x):
        state, found = clip.init(w), []
        for row in x.split(1):
            found.append(clip.update(slope(w, row), state, w)[0])
        return ff.tree_sum(found)

    with pytest.raises(RowsApart):
        mesh = MESHES[2]
        ff.spmd(lambda: ff.place(ff.shard(step, mesh, "data"), W, X[:3]), mesh)()
