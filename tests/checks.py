"""What tests claim: equal trees, unchanged ones, nothing sent, refused in words."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from fsfunc.testing import assert_equal
from fsfunc.testing.comparing import copy_tensors as held

# Equal trees


def same(found: Any, expected: Any) -> None:
    """Trees of one structure, with the same shapes, dtypes and values."""
    assert_equal(found, expected)


def close(found: Any, expected: Any, tolerance: float = 1e-6) -> None:
    """Trees of one structure, with the same shapes and dtypes, and near values."""
    assert_equal(found, expected, tolerance)


@contextmanager
def unchanged(*values: Any) -> Iterator[None]:
    """Nobody writes into these trees inside."""
    before = held(values)
    yield
    same(held(values), before)


# On simulated ranks


def simulated(size: int = 2, /, **axes: int) -> ff.Mesh:
    """A mesh of one axis "data", or of these."""
    return ff.make_mesh(axes or {"data": size}, "simulated")


def on_ranks(
    step: Callable[..., Any],
    params: Any,
    *batch: Any,
    mesh: ff.Mesh | None = None,
    laid: Callable[..., Any] | None = None,
    calls: int = 1,
    over: Any = None,
) -> Any:
    """What ``step(params, *batch)`` gives each rank, of its rows: whole, the last call.

    Args:
        laid: what parameters are placed for, if not for the step itself.
        calls: the second one goes by what the first one learnt.
        over: the axes over which the batch is cut; by default all.
    """
    mesh = simulated() if mesh is None else mesh
    over = tuple(mesh.axes) if over is None else over

    def main() -> Any:
        mine = ff.local_batch(batch, mesh, over) if over else batch
        placed = ff.place(laid or step, params, *mine)
        for _ in range(calls - 1):
            step(placed, *mine)
        return ff.unshard(step(placed, *mine))

    return ff.spmd(main, mesh)()


def with_ledger(
    wrap: Callable[[ff.Mesh], Any],
    params: Any,
    *batch: Any,
    mesh: ff.Mesh | None = None,
    planned: bool = False,
    **how: Any,
) -> list[tuple[Any, Any]]:
    """What a transformed step of placed parameters gives on each rank: (whole, ledger).

    ``wrap(mesh)`` transforms the step; where there is an axis "data", each rank has its
    part of the batch. By default there are two ranks. ``how`` is for ``ff.place``. If
    it is ``planned``, it sends what its plan says.
    """
    mesh = mesh or simulated()

    def main() -> tuple[Any, Any]:
        step = wrap(mesh)
        cut = batch and "data" in mesh.axes
        mine = ff.local_batch(batch, mesh, "data") if cut else batch
        placed = ff.place(step, params, *mine, **how)
        plan = ff.plan(step, placed, *mine) if planned else None
        with ff.ledger() as log:
            found = step(placed, *mine)
        assert plan is None or plan.ranks[0].ledger.table() == log.table()
        return ff.unshard(found), log

    return ff.spmd(main, mesh)()


class Run(NamedTuple):
    """What a rank has after some steps."""

    params: Any  # whole
    outs: list[Any]  # what each step returned beside the state
    state: Any  # as it lies
    logs: list[Any]  # the ledger of each step
    seen: list[Any]  # what `look` saw after each step

    @property
    def sent(self) -> list[Any]:
        """(op, axis, bytes, unit, phase) of all collectives."""
        records = [r for log in self.logs for r in log.records]
        return [(r.op, r.axis, r.bytes, r.unit, r.phase) for r in records]


def trained(
    step: Callable[..., Any],
    init: Any,
    optimizer: ff.Optimizer,
    *batch: Any,
    mesh: ff.Mesh | None = None,
    steps: int = 2,
    batches: Any = None,
    over: Any = None,
    call: Callable[..., Any] | None = None,
    look: Callable[[Any], Any] | None = None,
    **laid: Any,
) -> list[Run]:
    """A `Run` of each rank after some transformed steps, each of the rank's rows.

    Args:
        batches: the arguments of each step, in place of ``batch`` in all.
        over: the axes over which they are cut; by default all but those that have the
            work of one loss, "pipe" and "model". Or a function: the rank's part of one.
        call: `planned_and_run`, whose results are then kept in place of ledgers.
        look: is given the state after each step.
        laid: options of ``ff.init_state``.
    """
    mesh = mesh or simulated()
    given = [batch] * steps if batches is None else batches
    if over is None:
        over = tuple(axis for axis in mesh.axes if axis not in ("pipe", "model"))

    def part(given: Any) -> Any:
        if callable(over):
            return tuple(map(over, given))
        return ff.local_batch(given, mesh, over) if over else given

    def main() -> Run:
        mine = [tree.map(_copied, part(b)) for b in given]
        state = ff.init_state(step, init, optimizer, *mine[0], **laid)
        outs, logs, seen = [], [], []
        for args in mine:
            with ff.ledger() as log:
                if call is None:
                    state, out = step(state, *args)
                else:
                    log = call(step, state, *args)
                    state, out = log.out
            outs.append(out)
            logs.append(log)
            seen += [look(state)] if look else []
        return Run(ff.unshard(state.params), outs, state, logs, seen)

    return list(ff.spmd(main, mesh)())


def _copied(x: Any) -> Any:
    """A part of a batch would hold all of it."""
    return x.clone() if isinstance(x, torch.Tensor) else x


@contextmanager
def nothing_sent() -> Iterator[None]:
    with ff.ledger() as log:
        yield
    assert log.records == []


# What is refused


def refused(call: Callable[[], Any], error: type[Exception], way_out: str) -> str:
    """The message with which a call is refused, before anything is sent.

    ``way_out`` is searched in it as a regular expression: what is wrong, what to do.
    """
    with nothing_sent(), pytest.raises(error, match=way_out) as caught:
        call()
    return str(caught.value)


def all_refused(table: Any, sent: bool = False) -> Any:
    """A test of each row (call, error, way out)::

        test_bad_input_is_refused = all_refused({
            "zero=4": (lambda: shard(f, zero=4), ValueError, "0, 1, 2 or 3"),
        })

    Args:
        table: rows by name, or in order.
        sent: whether something may have been sent by then.
    """

    def test(call: Any, error: Any, way_out: str) -> None:
        if not sent:
            refused(call, error, way_out)
            return
        with pytest.raises(error, match=way_out):
            call()

    return refusals(table)(test)


def refusals(table: Any) -> Any:
    """Parametrizes a test of one's own over rows (call, error, way out)."""
    rows = table if isinstance(table, dict) else dict(enumerate(table))
    return pytest.mark.parametrize(
        ("call", "error", "way_out"), list(rows.values()), ids=map(str, rows)
    )
