"""Drawn programs, on drawn meshes and stacks: right by the law, or refused. Never else.

`JUDGED=2000 pytest tests/derivatives/test_judge.py` judges as many programs of each.
"""

import os
import re
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from fsfunc.sharded.leaf import NotATensor
from fsfunc.testing import NoExactRule, exact, residues
from fsfunc.testing.finite_field import is_exact, values
from fsfunc.tracing.rules import LawError, RowsApart
from tests.covering import examples
from tests.derivatives import drawn_loops
from tests.derivatives.drawn import losses, programs, run
from tests.derivatives.drawn_loops import ROWS, is_of_a_batch, loops
from tests.derivatives.judging import MESHES, WAYS, W, X, by_law, of_ranks, on
from tests.derivatives.worlds import NoMeaning, Ranks

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
STACKS = {"": lambda f: f, "remat": ff.remat}
TAKES = ["vag_w", "grad_w", "vag_x", "grad_x", "value"]
# Recorded on tensors without data, as it really runs, or where neither can go.
ROUTES = ["fake", "real", "odd"]
RANKS = st.sampled_from([n for n in MESHES if n > 1])
STACK = st.sampled_from(sorted(STACKS))
COMMON = {"suppress_health_check": list(HealthCheck)}


def many(count):
    drawn = int(os.environ.get("JUDGED", examples(count)))
    return settings(max_examples=drawn, **COMMON)


def close(found, expected):
    """Whether all ranks have what the law says: in floats, to rounding."""
    pairs = zip(tree.leaves(list(found)), tree.leaves(list(expected)), strict=True)
    if is_exact():
        return all(torch.equal(values(a), values(b)) for a, b in pairs)
    same = {"rtol": 1e-7, "atol": 1e-8, "equal_nan": True}
    return all(torch.allclose(a, b, **same) for a, b in pairs)


def judged(judge):
    """A judge of programs in exact runs; of those that draw numbers, in floats."""

    def judges(*programs):
        try:
            with exact():
                judge(*programs, *residues((W, X)))
        except NoExactRule as error:
            assert "draws numbers" in str(error), error
            judge(*programs, W, X)

    return judges


@judged
def judge(expect, find, alone, w, x):
    """What is found is what is expected, or refused; errors of torch come alone too."""
    try:
        expected = expect(w, x)
    except NoMeaning:
        expected = None
    except NoExactRule:
        raise
    except NotImplementedError:
        return
    try:
        found = find(w, x)
    except (LawError, NotATensor):
        return
    except ValueError as error:  # of the rules that hold as a step runs
        assert "derivative" in str(error), error
        return
    except RuntimeError as error:
        if isinstance(error, NoExactRule):
            raise
        with pytest.raises(RuntimeError, match=re.escape(str(error)[:40])):
            alone(w, x)
        return
    assert expected is not None, "accepted, though it has no meaning"
    assert close(found, expected), (found[0], expected[0])


def step_of(node, take):
    """The drawn loss, or a derivative of it."""

    def step(o, w, x):
        if take == "value":
            return run(o, node, w, x)
        if take.endswith("w"):
            return getattr(o, take)(lambda w: run(o, node, w, x), w)
        return getattr(o, take)(lambda x: run(o, node, w, x), x)

    return step


# A leaf read outside units and in them: its gradient is told with both.
ROUGH = ("pmean", ("times", ("rough sum", ("w",)), ("msq", ("x",))))
SHIFT = ("shift", ("unit", ("w",), "a", ("x",)))
SHIFTED = (
    "whole",
    ("whole", ("per sample", ("msq", ("x",))), ("attend", ("x",))),
    SHIFT,
)
IN_UNITS = ("msq", ("unit", ("w",), "b", ("unit", ("w",), "a", ("x",))))
# A number that ff.value returns, as a factor of parts: its cotangent is a sum of them.
EVALUATED = ("evaluated", ("whole", ("msq", ("x",)), ("x",)))
FACTOR = ("squares", ("times own", ("w",), EVALUATED))


@many(24)
@given(
    losses(), st.sampled_from(TAKES), RANKS, st.sampled_from(WAYS),
    st.sampled_from(["fake", *ROUTES]), STACK,
)  # fmt: skip
@example(("plus", ROUGH, IN_UNITS), "vag_w", 2, 0, "fake", "")
@example(("plus", SHIFTED, IN_UNITS), "vag_x", 2, 0, "real", "")
@example(("plus", ROUGH, IN_UNITS), "vag_w", 3, 0, "fake", "remat")
@example(("plus", FACTOR, IN_UNITS), "vag_x", 2, 1, "fake", "")
def test_programs_are_right_or_refused(node, take, n, way, route, stack):
    program = step_of(node, take)
    parts = {"parts": bool(way), "placed": way is not None}
    how = {"wrap": STACKS[stack], "route": route}
    judge(
        lambda w, x: by_law(program, n, w=w, x=x, **parts),
        lambda w, x: on(n, way, of_ranks(program), w=w, x=x, **how),
        lambda w, x: on(1, way, of_ranks(program), w=w, x=x, **how),
    )


ROWS_A_RANK = {2: 4, 3: 4, 4: 2}  # even, so that blocks weigh alike


def together(rows, n, data):
    """The rows that meet in one mean: the same block of every rank."""
    each = [rows(part) for part in data.chunk(n)]
    return [torch.cat(blocks) for blocks in zip(*each, strict=True)]


@many(8)
@given(loops(), RANKS, st.sampled_from(WAYS), st.sampled_from(ROUTES), STACK)
def test_loops_are_right_or_refused_where_they_are_not(drawn, n, way, route, stack):
    """And refused only there."""
    judge_loop(drawn, n, way, route, stack)


@judged
def judge_loop(drawn, n, way, route, stack, w, x):
    rows, data = ROWS[drawn.rows], x[: n * ROWS_A_RANK[n]]
    by_law = drawn_loops.run(drawn, w, together(rows, n, data))
    alone = drawn_loops.run(drawn, w, rows(data))
    right = not is_of_a_batch(drawn) or close([by_law], [alone])
    step = lambda w, x: drawn_loops.run(drawn, w, rows(x))  # noqa: E731
    try:
        found = on(n, way, step, w=w, x=data, wrap=STACKS[stack], route=route)
    except RowsApart:
        assert not right, "refused, though it is right"
        return
    except LawError:  # of other laws, that the other judge knows
        assert way is None
        return
    assert right, "accepted, though one device gives something else"
    assert close(found, [by_law] * n), (found, by_law)


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


def in_two_runs(step, n, zero, save, w, x):
    """The same: the second goes on with what the first has saved, bit by bit."""
    mesh = MESHES[n]

    def main(path):
        mine = ff.local_batch(x, mesh, "data")

        @lambda f: ff.shard(f, mesh, "data", zero=zero)
        def sharded(state, x):
            w, h = step(Ranks(), state["w"], state["h"], x)
            return {"w": w, "h": h}

        first = {"w": w, "h": torch.zeros_like(mine)}
        first = ff.place(sharded, first, mine, layouts={"h": ff.Own("data")})
        state = sharded(first, mine)
        save(path, state)
        found = ff.load(path, first)
        same = tree.map(torch.equal, *map(ff.unshard, (state, found)))
        assert all(tree.leaves(same)), "it came back otherwise"
        return ff.unshard(sharded(found, mine))

    with tempfile.TemporaryDirectory() as folder:
        return ff.spmd(main, mesh)(Path(folder) / "saved")


@many(6)
@given(
    losses(), programs("H", 2), RANKS, st.integers(0, 3),
    st.sampled_from(sorted(SAVES)),
)  # fmt: skip
def test_what_is_saved_goes_on(loss, hidden, n, zero, save):
    step = carrying(loss, hidden)
    judge(
        lambda w, x: by_law(twice(step), n, parts=bool(zero), w=w, x=x),
        lambda w, x: in_two_runs(step, n, zero, SAVES[save], w, x),
        lambda w, x: in_two_runs(step, 1, zero, SAVES[save], w, x),
    )
