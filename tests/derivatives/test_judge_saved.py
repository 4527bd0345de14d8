"""Drawn steps that carry something of each rank's own are saved and go on: bit by bit.

`JUDGED=2000 pytest tests/derivatives/test_judge_saved.py` judges as many programs.
"""

import os
import tempfile
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from fsfunc.sharded.leaf import NotATensor
from fsfunc.tracing.refusals import LawError
from tests.derivatives.drawn import losses, matrices, run
from tests.derivatives.judging import MESHES, W, X, by_law
from tests.derivatives.test_judge import close, pytestmark
from tests.derivatives.worlds import NoMeaning, Ranks, by_units

__all__ = ["pytestmark"]

EXAMPLES = int(os.environ.get("JUDGED", "40"))
SAVES = {
    "save": ff.save,
    "save_async": lambda path, state: ff.save_async(path, state).wait(),
}


def carrying(loss, hidden):
    """A step of parameters, and of numbers that each rank adds to its rows."""

    def step(o, w, h, x):
        x = o.own(torch.add, x, h)
        g = o.vag_w(lambda w: run(o, loss, w, x), w)
        moved = o.map(lambda a, g: a - 0.1 * g, w, g)
        return moved, o.own(torch.tanh, run(o, hidden, w, x))

    return step


def twice(step):
    """Two steps, one after the other."""

    def program(o, w, x):
        h = o.own(torch.zeros_like, x)
        for _ in range(2):
            w, h = step(o, w, h, x)
        return {"w": w, "h": h}

    return program


def on_ranks(step, n, zero, save, folder):
    """The same in two runs: the second goes on with what the first has saved."""
    mesh, path = MESHES[n], Path(folder) / "saved"

    def main():
        mine = ff.local_batch(X, mesh, "data")

        @lambda f: ff.shard(f, mesh, "data", zero=zero)
        def sharded(state, x):
            w, h = step(Ranks(), state["w"], state["h"], x)
            return {"w": w, "h": h}

        w = ff.place(ff.shard(by_units, mesh, "data", zero=zero), W, mine)
        first = {"w": w, "h": torch.zeros_like(mine)}
        state = sharded(first, mine)
        save(path, state)
        found = ff.load(path, first)
        same = tree.map(torch.equal, *map(ff.unshard, (state, found)))
        assert all(tree.leaves(same)), "it came back otherwise"
        return ff.unshard(sharded(found, mine))

    return ff.spmd(main, mesh)()


@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
@given(
    losses(),
    matrices(2, odd=True),
    st.sampled_from([n for n in MESHES if n > 1]),
    st.sampled_from([0, 1, 2, 3]),
    st.sampled_from(sorted(SAVES)),
)
def test_right_or_refused(loss, hidden, n, zero, save):
    step = carrying(loss, hidden)
    try:
        expected = by_law(twice(step), n, parts=bool(zero))
    except NoMeaning:
        expected = None
    except NotImplementedError:
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = on_ranks(step, n, zero, SAVES[save], folder)
        except (LawError, NotATensor):
            return
        except (ValueError, RuntimeError) as error:
            assert "derivative" in str(error) or type(error) is RuntimeError, error
            return
    assert expected is not None, "accepted, though it has no meaning"
    assert close(found, expected), (found[0], expected[0])
