"""A plan lays out a state by one call of each kind of unit call, as by all of them."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.functional import dropout

import fsfunc as ff
from fsfunc import tree
from fsfunc.planning import equal_calls

MESH = ff.make_mesh({"data": 4}, "abstract")
BODIES: list[str] = []  # that ran, by name


def unit(name):
    def made(fn):
        def body(*args, **keywords):
            BODIES.append(name)
            return fn(*args, **keywords)

        body.__name__ = name
        return ff.unit(body)

    return made


@unit("linear")
def linear(p, x):
    return torch.tanh(x @ p["w"]) + p["b"]


@unit("partial")
def partial(p, x):  # reads one of its leaves
    return x @ p["w"]


@unit("branches")
def branches(p, x, how=False, scale=1.0):
    return x @ p["w"] * scale if how else x + p["b"]


@unit("signed")
def signed(p, x, zero):
    return x @ p["w"] if math.copysign(1.0, zero) < 0 else x + p["b"]


@unit("outer")
def outer(p, x):
    return linear(p, x @ p["w"])


@unit("two")
def two(p, x):  # its first output lies in its input
    return x[:], (x @ p["w"]).detach(), "a word"


@unit("random")
def random(p, x):
    return dropout(x @ p["w"], 0.5)


@unit("sends")
def sends(p, x):
    return ff.pmean(x, "data") @ p["w"]


@unit("steep")
def steep(p, x):
    return torch.func.grad(lambda x: (x @ p["w"]).sum())(x) + x @ p["w"]


@unit("tied")
def tied(p, x, q):
    return x @ p["w"] @ q["w"].T


@unit("lookup")
def lookup(p, x):
    return p["w"][x.argmax(-1) % 8]


CALLS = {
    "linear": linear,
    "partial": partial,
    "how": lambda p, x: branches(p, x, how=True),
    "not": branches,
    "off": lambda p, x: branches(p, x, how=False),
    "scale": lambda p, x: branches(p, x, how=True, scale=2.0),
    "minus": lambda p, x: signed(p, x, -0.0),
    "plus": lambda p, x: signed(p, x, 0.0),
    "outer": outer,
    "two": lambda p, x: two(p, x)[0] + two(p, x)[1],
    "random": random,
    "sends": sends,
    "steep": steep,
    "itself": lambda p, x: tied(p, x, p),
    "another": lambda p, x: tied(p, x, tree.map(torch.relu, p)),
    "double": lambda p, x: linear(p, x.double()).float(),
    "constant": lambda p, x: linear(p, x.detach()),
    "wide": lambda p, x: linear(p, x.repeat(2, 1))[:4],
    "strided": lambda p, x: linear(p, x.T.contiguous().T),
    "lookup": lookup,
    "frozen": lambda p, x: linear(tree.map(torch.detach, p), x),
}


def planned(names, repeat, *, transform, plan=ff.plan, **options):
    def loss(params, x):
        for i, name in enumerate(names):
            for p in params[i * repeat : (i + 1) * repeat]:
                x = CALLS[name](p, x)
        return x.square().mean()

    optimizer = ff.sharded_adam(0.1)
    step = ff.shard(transform(optimizer(ff.value_and_grad(loss))), MESH, "data")
    count = range(len(names) * repeat)

    def init():
        return [{"w": torch.zeros(8, 8), "b": torch.zeros(8)} for _ in count]

    return plan(step, init, optimizer, torch.ones(4, 8), **options)


def said(plan):
    """All that a plan says: events, leaves and their layouts, records, calls."""
    records = [
        (r.op, r.axis, r.bytes, r.dtype, r.unit, r.phase) for r in plan.records()
    ]
    ranks = [
        (
            [(type(e), *(e[:1] if hasattr(e, "record") else e)) for e in r.events],
            dict(r.kinds), list(r.leaves), dict(r.calls), dict(r.derived),
        )
        for r in plan.ranks
    ]  # fmt: skip
    return records, ranks


TRANSFORMS = {
    "plain": lambda f: f,
    "remat": ff.remat,
    "bfloat16": lambda f: ff.precision(f, torch.bfloat16),
    "microbatches": lambda f: ff.accumulate(f, 2),
}


def check_equal(names, transform):
    """The plan is that by all calls; so is what is raised in its place."""
    outcomes = []
    for kind in (equal_calls.EqualCalls, lambda: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fsfunc.planning.planner.EqualCalls", kind)
            try:
                plan = planned(names, 3, transform=TRANSFORMS[transform])
                outcomes.append(said(plan))
            except (RuntimeError, ValueError, TypeError) as error:
                outcomes.append((type(error), str(error)))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("name", CALLS)
def test_a_plan_is_that_by_all_calls(name):
    check_equal(["linear", name], "plain")


@settings(deadline=None, max_examples=12)
@given(
    st.lists(st.sampled_from(sorted(CALLS)), min_size=1, max_size=4),
    st.sampled_from(sorted(TRANSFORMS)),
)
@example(["outer"], "microbatches")
def test_a_plan_of_any_calls_is_that_by_all_of_them(names, transform):
    check_equal(names, transform)


def ran(names, **options):
    BODIES.clear()
    planned(names, 5, transform=lambda f: f, **options)
    return len(BODIES)


def test_equal_bodies_run_once_to_lay_out_a_state():
    # Recorded, and planned. The first call is of its own kind: it is given data.
    assert ran(["linear"]) == 2 + 5
    assert ran(["linear", "linear"]) == 2 + 10
    assert ran(["linear", "how", "not", "scale"]) == 2 + 3 + 20
    assert ran(["how", "off"]) == 2 + 1 + 10  # one structure, two values
    assert ran(["linear", "minus", "plus"]) == 2 + 2 + 15  # equal, and two numbers
    assert ran(["linear"], every_microbatch=True) == 5 + 5


@pytest.mark.parametrize("name", ["outer", "two"])
def test_what_does_more_than_compute_runs_each_time(name):
    CALLS["once"] = {"two": lambda p, x: two(p, x)[0]}.get(name, CALLS[name])
    calls = 2 if name == "outer" else 1
    assert ran(["once"]) == (5 + 5) * calls


def test_a_state_that_is_laid_out_for_a_run_is_recorded_by_all_calls():
    state = lambda step, *given: ff.init_state(step, *given)  # noqa: E731
    mesh = ff.make_mesh({"data": 1}, "simulated")
    BODIES.clear()
    optimizer = ff.sharded_adam(0.1)

    def loss(params, x):
        for p in params:
            x = linear(p, x)
        return x.sum()

    step = ff.shard(optimizer(ff.value_and_grad(loss)), mesh, "data")
    init = lambda: [{"w": torch.zeros(8, 8), "b": torch.zeros(8)}] * 1  # noqa: E731
    ff.spmd(lambda: state(step, init, optimizer, torch.ones(4, 8)), mesh)()
    assert len(BODIES) == 2


def test_a_step_that_differentiates_by_torch_is_recorded_by_all_calls():
    """No graph stands behind what an equal call returns."""

    def step(state, x):
        params = tree.map(lambda w: w.detach().requires_grad_(), state.params)
        y = x
        for p in params:
            y = linear(p, y)
        leaves = tree.leaves(params)
        grads = torch.autograd.grad(y.sum(), leaves)
        return state, grads[0].sum()

    optimizer = ff.sharded_adam(0.1)
    init = lambda: [{"w": torch.zeros(8, 8), "b": torch.zeros(8)} for _ in range(3)]  # noqa: E731
    outcomes = []
    for every in (False, True):
        try:
            plan = ff.plan(
                ff.shard(step, MESH, "data"), init, optimizer, torch.ones(4, 8),
                every_microbatch=every,
            )  # fmt: skip
            outcomes.append(said(plan))
        except Exception as error:
            outcomes.append((type(error), str(error)))
    assert outcomes[0] == outcomes[1]
