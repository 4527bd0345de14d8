"""Gradients of single microbatches in a pipeline: observed, and AdaScale's gains."""

import pytest
import torch

import fsfunc as ff
from fsfunc.comm.typed_maps import LawError
from tests.checks import all_refused, close, same, simulated
from tests.models import floats, integers, layers, linear
from tests.optim.steps import ALONE, PIPE, data, gain_of, loss, squares, trained
from tests.planning.comparing import planned_and_run

LINE, SGD = simulated(data=1, pipe=2), ff.sgd(0.5, momentum=0.9)


def pipe(s, mesh, m, schedule, stages=None):
    schedule = getattr(ff.schedules, schedule)
    return ff.pipeline(
        s, mesh, "pipe", n_microbatches=m, schedule=schedule, stages=stages
    )


def loss_of(order, unit=linear):
    """Of these layers in order, and of a gain outside units, if there is one."""

    def loss(p, x):
        y = x
        for k in order:
            y = unit(p["layers"][k], y)
        return (y if p["gain"] is None else y * p["gain"]).square().mean()

    return loss


def facts(records):
    return [(r.op, r.axis, r.bytes) for r in records]


TIED, ENDS = (0, 1, 2, 3, 0), [1, 1, 1, 2]  # the first stage and the last of a rank
# The mesh; how many samples a step has; which layers, in order; and the stack.
STACKS = {
    "1f1b": (LINE, 4, range(4), lambda s, m: pipe(s, m, 4, "one_f_one_b")),
    "split weight gradients": (
        LINE, 4, TIED, lambda s, m: ff.remat(pipe(s, m, 4, "zb_v", ENDS))),
    "units of a stage in one buffer": (
        PIPE, 4, range(4), lambda s, m: data(
            pipe(s, m, 2, "zb_h1"), m, min_bytes=1 << 20)),
    "in accumulate": (
        LINE, 6, range(4), lambda s, m: ff.accumulate(
            pipe(s, m, 3, "interleaved_1f1b"), 2)),
    "shard(pipeline)": (
        PIPE, 4, TIED, lambda s, m: data(pipe(s, m, 2, "zb_v", ENDS), m)),
    "pipeline(shard)": (
        PIPE, 6, range(4), lambda s, m: pipe(
            data(s, m, min_bytes=1 << 20), m, 3, "one_f_one_b")),
}  # fmt: skip


@pytest.mark.parametrize("name", STACKS)
def test_each_microbatch_is_seen_whole_and_once(name):
    """To the bit where means are exact; nothing else is sent than their sum."""
    mesh, n, order, stack = STACKS[name]
    exact, loss = n == 4, loss_of(order)
    how = {"dtype": torch.float64, "make": lambda *s, **k: integers(*s, **k, high=2)}
    gain = None if "shard" in name else layers(**how)[0]["b"]
    params = {"layers": layers(4, **how), "gain": gain}
    x = integers(2 * n, 4, seed=9, high=2, dtype=torch.float64)
    alone = [ff.value_and_grad(loss)(params, rows)[1] for rows in x.chunk(n)]
    wanted = sum(squares(g) for g in ff.tree.leaves(alone) if g is not None)

    def observed(p, x):
        observing = ff.observe_gradients(ff.value_and_grad(loss), squares)
        out, total, count = observing(p, x)
        return out[1], ff.psum(total, "data"), count

    def main():
        f, mine = stack(observed, mesh), ff.local_batch(x, mesh, "data")
        plain = stack(ff.value_and_grad(loss), mesh)
        placed = ff.place(f, params, mine)
        with ff.ledger() as log:
            grads = plain(placed, mine)[1]
        both = planned_and_run(f, placed, mine)
        seen = both.out[1:]
        (same if exact else close)(both.out[0], grads)
        return seen, *map(facts, (log.records, both.sent, both.plan.ranks[0].records))

    for (total, count), before, sent, planned in ff.spmd(main, mesh)():
        (same if exact else close)(total, wanted)
        assert count == n // mesh.axes["data"]
        # Two ranks all-reduce one number in as many bytes as it has.
        new = [("psum", ("pipe",), 8)] + [("psum", ("data",), 8)] * (mesh is PIPE)
        assert planned == sent and sorted(sent) == sorted(before + new)


WS, BATCHES = list(floats(4, 4, 4, seed=1)), [floats(8, 4, seed=k) for k in range(2)]


@pytest.mark.parametrize(
    ("mesh", "stack", "wrap"),
    [
        (LINE, lambda s, m: pipe(s, m, 4, "zb_h1"),
         lambda ada: ff.loss_scale(ada(SGD))),
        (PIPE, lambda s, m: ff.donate(data(pipe(s, m, 2, "one_f_one_b"), m)),
         lambda ada: ada(ff.loss_scale(ff.sharded_adam(0.05)))),
    ],
    ids=["pipeline", "shard(pipeline)"],
)  # fmt: skip
def test_gains_are_those_of_one_device(mesh, stack, wrap):
    def run(stack, mesh):
        return trained(stack, wrap(ff.adascale), loss, BATCHES, WS, mesh, look=gain_of)

    (one,) = run(lambda s, m: ff.accumulate(s, 4), ALONE)
    assert all(1 < gain < 4 for gain, _ in one.seen)
    for found in run(stack, mesh):
        close((found.seen, found.params), (one.seen, one.params), 3e-6)


# What is refused


def stepped(loss, m=4):
    stack = lambda s, mesh: pipe(s, mesh, m, "gpipe")  # noqa: E731
    return lambda: trained(stack, ff.adascale(SGD), loss, BATCHES, WS, LINE)


def there_and_back(ws, x):
    return loss([*ws, ws[0]], x)


def weighted(ws, x):
    return ff.Weighted(loss(ws, x), 3.0)


def penalty(ws, x):
    return sum(w.square().sum() for w in ws)


def observed(*losses):
    def step(ws, x):
        return [ff.value_and_grad(loss)(ws, x) for loss in losses]

    f, x = pipe(ff.observe_gradients(step, squares), LINE, 2, "gpipe"), BATCHES[0]
    return lambda: ff.spmd(lambda: f(ff.place(f, WS, x), x), LINE)()


test_where_no_sample_lies_whole_it_is_refused = all_refused(
    {
        "stages on two ranks": (stepped(there_and_back), LawError, "use '0'"),
        "uneven": (stepped(loss, 5), LawError, "unlike numbers of rows"),
        "Weighted": (stepped(weighted), LawError, "Weighted"),
        "one sample": (stepped(loss, 1), ValueError, "this step has one"),
        "no units": (observed(penalty), LawError, "another gradient call"),
        "two calls": (observed(penalty, loss), LawError, "more than once"),
    },
    sent=True,
)
