"""Plans that leave out equal unit calls, held against those that run all of them.

``every_microbatch=True`` runs all, and is the judge. A test also says whether calls are
left out: a plan that runs all of them in the end is right by itself.
"""

from collections import Counter

import pytest
import torch

import fsfunc as ff
from fsfunc.planning.events import Allocated, Freed, Started, Waited
from fsfunc.planning.hardware import H100
from fsfunc.planning.observer import Observer
from tests.models import layer

N, WIDTH = 16, 8
ADAM = ff.sharded_adam(1e-3)
AXES = {"data": 4}


@ff.unit
def embed(p, x):
    return x @ p["w"]


@ff.unit
def head(p, x):
    return (x @ p["w"]).square().mean()


def matrix():
    return {"w": torch.zeros(WIDTH, WIDTH)}


def flat(width=WIDTH):
    return {"w": torch.zeros(width, width), "b": torch.zeros(width)}


def init(count=N, make=flat):
    return {"embed": matrix(), "layers": [make() for _ in range(count)]} | {
        "head": matrix()
    }


@ff.unit
def linear(p, x):
    """Its result may be written: no derivative reads it."""
    return x @ p["w"] + p["b"]


def stack(layers, x, unit=layer):
    for p in layers:
        x = unit(p, x)
    return x


def plain(params, x):
    return head(params["head"], stack(params["layers"], embed(params["embed"], x)))


def through(run):
    """A loss whose layers are ``run(layers, x)``: x, or (x, added to the loss)."""

    def loss(params, x):
        x = run(params["layers"], embed(params["embed"], x))
        x, more = x if isinstance(x, tuple) else (x, 0)
        return head(params["head"], x) + more

    return loss


# What plans say


def all_that_is_said(rank):
    """The events, with storages and transfers numbered as they come."""
    sizes, started, said = {}, {}, []
    order, transfers = {}, []
    for e in rank.events:
        match e:
            case Allocated():
                sizes[e.storage] = e.bytes, rank.kinds.get(e.storage)
                order[e.storage] = len(order)
                said.append((*e[1:], rank.kinds.get(e.storage)))
            case Freed():
                said.append(("freed", order[e.storage], sizes.pop(e.storage)))
            case Started():
                fact = (*e[1:3], e.record and record_facts(e.record))
                started[e.number] = len(transfers), fact
                transfers.append(e.number)
                said.append(fact)
            case Waited():
                said.append(("waited", started.pop(e.number)))
            case _:
                said.append(e)
    return {
        "events": said,
        "never freed": Counter(sizes.values()),
        "records": [record_facts(r) for r in rank.records],
        "calls": dict(rank.calls), "derived": rank.derived, "turns": list(rank.turns),
        "memory": rank.memory, "peak": rank.peak_bytes, "leaves": rank.leaves,
        "work": rank.work,
    }  # fmt: skip


def record_facts(r):
    return (
        r.op, r.axis, r.bytes, r.dtype, r.unit, r.phase, r.rank, r.where, r.what,
    )  # fmt: skip


def planned(*args, **options):
    """A plan, and how often bodies ran in each run of the step."""
    counts = Counter()
    run_body = Observer.run_body

    def counted(self, *args):
        counts[self] += 1
        return run_body(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Observer, "run_body", counted)
        plan = ff.plan(*args, **options)
    return plan, list(counts.values())


def assert_equal(plan, judge):
    for rank, other in zip(plan.ranks, judge.ranks, strict=True):
        found, expected = all_that_is_said(rank), all_that_is_said(other)
        for fact in expected:
            assert found[fact] == expected[fact], fact
    assert ff.estimate(plan, H100).seconds == ff.estimate(judge, H100).seconds


def outcome(*args, **options):
    """A plan and its counts; or the error in its place."""
    try:
        return planned(*args, **options)
    except (RuntimeError, ValueError, TypeError) as error:
        return type(error), str(error)


def check(
    loss=plain,
    init=init,
    around=None,
    axes=AXES,
    optimizer=ADAM,
    step=None,
    batch=(8, WIDTH),
    **options,
):
    """Compares; returns the bodies that ran in each run, and how many there are."""
    mesh = ff.make_mesh(axes, "abstract")
    around = around or (lambda f, mesh: ff.shard(f, mesh, "data", min_bytes=0))
    step = around(step or optimizer(ff.value_and_grad(loss)), mesh)
    args, options = (
        (step, init, optimizer, torch.zeros(batch)),
        options | {"mesh": mesh},
    )
    quick, judge = [outcome(*args, every_microbatch=b, **options) for b in (0, 1)]
    if isinstance(judge[0], type):
        assert quick == judge
        return [0], 0
    assert not isinstance(quick[0], type), quick
    assert_equal(quick[0], judge[0])
    return quick[1], judge[1][0]


def assert_left_out(*args, share=0.0, **options):
    """Calls are left out, and at once."""
    counts, every = check(*args, **options)
    assert len(counts) == 1 and counts[0] < every * (1 - share)


def assert_all_run(*args, **options):
    counts, every = check(*args, **options)
    assert counts[-1] == every


# Stacks of transforms


def sharded(zero=3, within=lambda f: f, **options):
    options = {"min_bytes": 0, "zero": zero} | options
    return lambda f, mesh: ff.shard(within(f), mesh, "data", **options)


def outside(wrap, zero=3):
    return lambda f, mesh: wrap(sharded(zero)(f, mesh))


def four(f):
    return ff.accumulate(f, 4)


def half(f):
    return ff.precision(f, torch.bfloat16, reduce=torch.float32)
