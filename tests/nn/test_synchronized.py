"""A batch that is spread over ranks is normalised as one device normalises it."""

import functools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc.nn import sync_batch_norm
from tests.checks import all_refused, close, nothing_sent, same, simulated, with_ledger
from tests.models import floats
from tests.nn.models import wide
from tests.probes import LiveBytes

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
C, X = 3, torch.ones(4)


PARAMS = [
    {
        "w": wide(C, C, seed=k),
        "norm": {"weight": wide(C, seed=k + 1), "bias": wide(C, seed=k + 2)},
    }
    for k in (0, 10)
]
FRESH = [ff.init_statistics(C, dtype=torch.float64) for _ in PARAMS]


def model(axis):
    """``loss(params, x)``, and beside it each layer's statistics.

    ``axis``: over which rows are spread; None: torch's own norm.
    """
    splits = [name for name in ff.tree.leaves(axis) if name != "data"]

    @ff.unit
    def layer(p, x):
        w = p["w"]
        for name in splits:
            w = ff.pcast(w, name, to="V")
        h = torch.einsum("oc,nc...->no...", w, x)
        if axis is None:
            values = p["norm"]["weight"], p["norm"]["bias"]
            y = F.batch_norm(h, None, None, *values, training=True, eps=1e-3)
            stats = ff.batch_norm(None, h)[1]
        else:
            y, stats = sync_batch_norm(p["norm"], h, axis, eps=1e-3)
        return x + torch.tanh(y), stats

    def loss(params, x):
        found = []
        for p in params:
            x, stats = layer(p, x)
            found.append(stats)
        total, count = x.square().sum() + x.sum(), torch.tensor(float(x.numel()))
        for name in splits:
            total, count = ff.psum(total, name), ff.psum(count, name)
        return ff.Weighted(total, count), found

    return loss


def batch(sizes, ndim):
    return wide(sum(sizes), C, *(2, 3, 2)[: ndim - 2], seed=sum(sizes)) + 2


def mine(x, sizes, axis):
    return x.split(sizes)[ff.axis_index(axis)]


def stepped(grad, params, x):
    params = ff.place(grad, params, x)
    (value, stats), grads = grad(params, x)
    running = ff.commit_statistics(FRESH, stats, None)
    return value, running, ff.unshard(grads)


WRAPS = {
    "r": lambda f, mesh: ff.remat(f),
    "a": lambda f, mesh: ff.accumulate(f, 2),
    "s": lambda f, mesh: ff.shard(f, mesh, "data"),
    "0": lambda f, mesh: ff.shard(f, mesh, "data", zero=0),
    "2": lambda f, mesh: ff.shard(f, mesh, "data", zero=2),
}


def wrapped(order, axis, mesh):
    grad = ff.value_and_grad(model(axis), has_aux=True)
    return functools.reduce(lambda f, key: WRAPS[key](f, mesh), order, grad)


@settings(max_examples=4)
@given(
    st.lists(st.integers(0, 4), min_size=2, max_size=3).filter(lambda n: sum(n) > 1),
    st.integers(2, 5),
    st.sampled_from(["s", "rs", "sr", "0", "2r"]),
)
@example([3, 0], 2, "rs")
@example([0, 2, 0], 4, "2r")
def test_uneven_ranks_and_empty_ones_are_one_device(sizes, ndim, order) -> None:
    x = batch(sizes, ndim)
    expected = stepped(wrapped("", None, None), PARAMS, x)
    mesh = simulated(len(sizes))

    def main():
        step = wrapped(order, "data", mesh)
        return stepped(step, PARAMS, mine(x, sizes, "data"))

    outs = ff.spmd(main, mesh)()
    close(outs[0], expected, 1e-11)
    for other in outs:
        same(other, outs[0])


@pytest.mark.parametrize(
    ("kind", "inner", "sizes"),
    [
        ("rows", "r", [1, 3, 2, 2]),
        ("model", "", [1, 3, 2, 2]),
        ("model", "", [0, 3, 2, 0]),
        ("both", "", [1, 3, 2, 2]),
        ("both turned", "r", [0, 3, 2, 0]),
    ],
)
def test_over_axes_that_split_the_work_of_one_loss(kind, inner, sizes) -> None:
    axes, axis = {"data": 2, "rows": 2}, ("data", "rows")
    if kind == "model":
        axes, axis = {"rows": 4}, "rows"
    elif kind == "rows":  # every data rank normalises its own
        sizes, axis = sizes[:2] * 2, "rows"
    elif kind == "both turned":
        axis = ("rows", "data")
    mesh, x = simulated(**axes), batch(sizes, 3)
    whole = x if kind != "rows" else x[: sum(sizes[:2])]
    expected = stepped(wrapped("", None, None), PARAMS, whole)
    if kind == "rows":
        sizes = sizes[:2]

    def main():
        order = inner if kind == "model" else inner + "s"
        step = wrapped(order, axis, mesh)
        return stepped(step, PARAMS, mine(whole, sizes, axis))

    for value, running, grads in ff.spmd(main, mesh)():
        close((value, grads), (expected[0], expected[2]), 1e-11)
        if kind != "rows":  # where both data ranks have the same rows, and count them
            close(running, expected[1], 1e-11)


@pytest.mark.parametrize("order", ["as", "sar"])
def test_a_microbatch_of_all_ranks_is_one_batch(order) -> None:
    x, mesh = batch([2, 2, 2, 2], 3), simulated(2)
    alone = ff.accumulate(wrapped("", None, None), 2)
    by_micro = torch.cat([x[0:2], x[4:6], x[2:4], x[6:8]])
    expected = stepped(alone, PARAMS, by_micro)

    def main():
        step = wrapped(order, "data", mesh)
        return stepped(step, PARAMS, ff.local_batch(x, mesh, "data"))

    for found in ff.spmd(main, mesh)():
        close(found, expected, 1e-11)


def test_one_copy_is_kept_for_the_backward() -> None:
    x = floats(256, C, 16).requires_grad_()

    def main():
        with LiveBytes(x, NORM) as memory:
            y, _ = sync_batch_norm(NORM, x, "rows")
        assert memory.live <= 2.1 * x.nbytes  # of which y is one
        return y

    ff.spmd(main, simulated(rows=2))()


def total(axis):
    """A loss without units, whose ranks' terms add up."""

    def loss(p, x):
        y, _ = sync_batch_norm(p, x, axis)
        value = torch.sin(y * x).sum()
        return value if axis is None else ff.psum(value, axis)

    return loss


NORM = PARAMS[0]["norm"]


@pytest.mark.parametrize("n, order, times", [(2, "s", 2), (4, "rs", 3), (2, "sr", 3)])
def test_one_sum_forward_and_one_backward_and_one_for_a_recompute(n, order, times):
    x, how = batch([2] * n, 2), {"mesh": simulated(n)}
    wrap = lambda mesh: wrapped(order, "data", mesh)  # noqa: E731
    sent, others = 2 * (n - 1) * (2 * C + 1) * 8 / n, ("loss", "sums")
    for ((_, stats), _), log in with_ledger(wrap, PARAMS, x, **how):
        assert [s.tree.count.item() for s in stats] == [2 * n] * len(PARAMS)
        sums = [r for r in log.records if r.op == "psum" and r.phase not in others]
        assert [r.bytes for r in sums] == [sent] * (times * len(PARAMS))


def test_evaluation_normalises_by_running_statistics_and_sends_nothing() -> None:
    values = wide(C, seed=1), wide(C, seed=2) ** 2, FRESH[0].count
    how, x = {"running": ff.RunningStatistics(*values)}, batch([2, 1], 3)

    def loss(p, x, axis):
        with nothing_sent():
            y, stats = sync_batch_norm(p, x, axis, **how)
        assert stats is None
        return y.cos().sum() if axis is None else ff.psum(y.cos().sum(), axis)

    def main():
        return torch.func.grad(loss)(NORM, mine(x, [2, 1], "rows"), "rows")

    expected = torch.func.grad(loss)(NORM, x, None)
    for found in ff.spmd(main, simulated(rows=2))():
        close(found, expected, 1e-12)


@pytest.mark.parametrize("first", [0, 1])
def test_fewer_than_two_rows_of_all_ranks_raise_on_all(first) -> None:
    """Of one value the variance that is committed would be 0 / 0."""

    def main():
        rows = 0 if ff.axis_index("rows") else first
        with pytest.raises(ValueError, match=f"of 'rows' have {first} together"):
            sync_batch_norm(None, torch.ones(rows, C), "rows")

    ff.spmd(main, simulated(rows=2))()


def on_two(call):
    return ff.spmd(call, simulated(rows=2))


test_bad_input_is_refused = all_refused({
    "one value on one rank": (lambda: sync_batch_norm(None, torch.ones(1, C), None),
        ValueError, "more than 1 value per channel"),
    "a weight": (on_two(lambda: sync_batch_norm({"weight": X}, torch.ones(4, C),
        "rows")), ValueError, r"weight has shape \(4,\)"),
    "an axis": (on_two(lambda: sync_batch_norm(None, torch.ones(4, C), "column")),
        ValueError, 'unknown axis "column"'),
})  # fmt: skip
