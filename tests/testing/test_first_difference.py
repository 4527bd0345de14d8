"""Where two steps part is told: the unit, its call, the phase, the rank, the leaf.

``FSFUNC_LONG_TESTS=1`` plants a hundred faults.
"""

import os
import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from fsfunc.core.execution_context import running
from fsfunc.core.frames import frame
from fsfunc.testing import assert_equals_one_device, first_difference, one_device
from tests.checks import simulated

EVERY = os.environ.get("FSFUNC_LONG_TESTS") == "1"
BLOCKS = 16 if EVERY else 2  # each calls two units within: 48 unit calls
WIDTH, ROWS = 2, 8
TINY = 1e-9


@dataclass
class Fault:
    """What goes wrong, in which call of a unit."""

    kind: str = ""
    path: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()
    leaf: str = ""
    rank: int | None = None
    micro: int | None = None

    def strikes(self, kind):
        """True in the unit's body, on the rank and in the microbatch that it is for."""
        f, at = frame(), self.rank
        return (
            self.kind == kind
            and not ff.recording()
            and (f.path, f.numbers) == (self.path, self.numbers)
            and (at is None or f.here is not None and f.here.rank == at)
            and (self.micro is None or f.micro[-1][0] == self.micro)
        )


NOW = Fault()


class Owed(torch.autograd.Function):
    """The identity, whose backward is a little too large."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g * (1 + TINY)


def computed(w, x):
    """What each unit does, and the faults in it."""
    x = Owed.apply(x) if NOW.strikes("backward of an input") else x
    w = Owed.apply(w) if NOW.strikes("backward of a parameter") else w
    y = x @ w
    if running().recompute and NOW.strikes("recompute"):
        y = y * (1 + TINY)
    y = torch.tanh(y)
    return y * (1 + TINY) if NOW.strikes("forward") else y


@ff.unit
def mixing(p, x):
    return x + computed(p["w"], x)


@ff.unit
def gating(p, x):
    return computed(p["w"], x) * p["gain"]


@ff.unit
def block(p, x):
    y = gating(p["gating"], mixing(p["mixing"], x))
    return x + computed(p["w"], y)


def loss_fn(params, x):
    for p in params:
        x = block(p, x)
    return x.square().mean()


OPTIMIZER = ff.sharded_adam(1e-2, weight_decay=0.1)


def train_step(state, x):
    loss, grads = ff.value_and_grad(loss_fn)(state.params, x)
    new = state.apply_gradients(grads, OPTIMIZER)
    if NOW.kind == "update":
        new = new.replace(params=at_leaf(new.params, lambda w: w * (1 + TINY)))
    return new, {"loss": loss}


def at_leaf(params, fn):
    """Does ``fn`` to one leaf."""
    paths, leaves, structure = tree.flatten_with_paths(params, is_leaf=ff.is_sharded)
    i = paths.index(NOW.leaf)
    leaves[i] = tree.map(fn, leaves[i])
    return tree.unflatten(structure, leaves)


class Reduction(ff.Interpretation):
    """Sums the gradients of a leaf in place of averaging them."""

    def gradient(self, run):
        def changed(call):
            outcome = run(call)
            _, (grads,) = outcome.mean()
            return outcome.with_mean((at_leaf(grads, lambda g: g * 2),))

        return changed


class Stale(ff.Interpretation):
    """Gives a unit a parameter that was not updated."""

    def unit(self, run, call):
        def stale(p, x):
            at, rank = call.frame.here, NOW.rank
            if (call.path, call.numbers) == (NOW.path, NOW.numbers):
                here = rank is None or at is not None and at.rank == rank
                here = here and not ff.recording()
                # On all ranks, which thus do the same.
                p = {**p, "w": p["w"] * (1 - TINY * here)}
            return run(p, x)

        return stale


DATA, PIPE = simulated(data=2), simulated(pipe=2)
BOTH, HYBRID = simulated(data=2, pipe=2), simulated(data=2, node=2)


def pipeline(f, mesh, **how):
    return ff.pipeline(f, mesh, "pipe", n_microbatches=4, **how)


STACKS = {
    **{f"zero {z}": lambda f, z=z: ff.shard(f, DATA, "data", zero=z) for z in range(4)},
    "remat outside": lambda f: ff.remat(ff.shard(f, DATA, "data")),
    "remat inside": lambda f: ff.shard(ff.remat(f), DATA, "data"),
    "accumulated": lambda f: ff.shard(ff.accumulate(f, 2), DATA, "data"),
    "accumulated, rematerialized": lambda f: ff.remat(ff.accumulate(f, 4)),
    "pipeline": lambda f: pipeline(f, PIPE),
    "zero bubbles": lambda f: pipeline(f, PIPE, schedule=ff.schedules.zb_h1),
    "sharded pipeline": lambda f: ff.shard(
        pipeline(ff.remat(f), BOTH), BOTH, "data", zero=2
    ),
    "hybrid": lambda f: ff.shard(f, HYBRID, "data", replicate="node"),
    "donated": lambda f: ff.donate(ff.shard(f, DATA, "data", zero=1)),
    "offloaded": lambda f: ff.shard(ff.offload(f, params="host"), DATA, "data"),
}
MESHES = {
    "accumulated, rematerialized": None, "pipeline": PIPE, "zero bubbles": PIPE,
    "sharded pipeline": BOTH, "hybrid": HYBRID,
}  # fmt: skip
MICRO = {
    "accumulated": 2, "accumulated, rematerialized": 4, "pipeline": 4,
    "zero bubbles": 4, "sharded pipeline": 4,
}  # fmt: skip
PHASES = {
    "forward": "forward", "recompute": "recompute", "stale": "forward",
    "backward of an input": "backward", "backward of a parameter": "backward",
    "reduction": "reduction", "update": "update",
}  # fmt: skip


def planted(seed):
    """A fault, and the stack that it is in; drawn."""
    draw = random.Random(seed)
    stack = draw.choice([*STACKS])
    kinds = [k for k in PHASES if k != "recompute" or "remat" in stack]
    kind, k = draw.choice(kinds), draw.randrange(BLOCKS)
    name, inner = draw.choice([("", ""), ("gating", 1), ("mixing", 0)])
    if kind == "backward of an input":  # that of the first unit is not differentiated
        k = max(k, 1)
    path = ("block", name) if name else ("block",)
    numbers = (k, inner) if name else (k,)
    leaf = "/".join([str(k), *path[1:], "w"])
    fault = Fault(kind, path, numbers, leaf)
    mesh = MESHES.get(stack, DATA)
    if kind in ("reduction", "update"):
        return stack, fault
    if mesh is not None and "data" in mesh.axes:
        fault.rank = draw.randrange(mesh.size)
    if mesh is BOTH:  # a unit runs on one stage alone
        stage = k // (BLOCKS // 2)
        fault.rank = 2 * draw.randrange(2) + stage
    if kind != "stale" and stack in MICRO and draw.random() < 0.5:
        fault.micro = draw.randrange(MICRO[stack])
    return stack, fault


PLANTED = [planted(seed) for seed in range(100 if EVERY else 12)]


def data():
    zeros = torch.zeros
    params = [
        {
            "w": zeros(WIDTH, WIDTH),
            "mixing": {"w": zeros(WIDTH, WIDTH)},
            "gating": {"w": zeros(WIDTH, WIDTH), "gain": zeros(WIDTH)},
        }
        for _ in range(BLOCKS)
    ]
    x = zeros(ROWS, WIDTH)
    return ff.init_state(train_step, params, OPTIMIZER, x), x


def searched(stack, fault, monkeypatch, **how):
    step = train_step
    if fault.kind == "stale":
        step = ff.transformed(step, Stale())
    step = STACKS[stack](step)
    if fault.kind == "reduction":
        step = ff.transformed(step, Reduction())

    def right(state, x):
        monkeypatch.setitem(globals(), "NOW", Fault())
        return train_step(state, x)

    def wrong(state, x):
        monkeypatch.setitem(globals(), "NOW", fault)
        return step(state, x)

    wrong.interpretations = step.interpretations
    how = {"calls": 1, "goes_on": lambda out: out[0], "draws": 1, **how}
    return first_difference(right, wrong, *data(), **how)


@pytest.mark.parametrize("stack", STACKS if EVERY else ["remat inside", "pipeline"])
def test_equal_steps_do_not_part(stack, monkeypatch):
    assert searched(stack, Fault(), monkeypatch) is None


@pytest.mark.parametrize(("stack", "fault"), PLANTED)
def test_a_fault_is_found_where_it_is(stack, fault, monkeypatch):
    seen = searched(stack, fault, monkeypatch)
    assert seen is not None
    assert (seen.phase, seen.unmatched) == (PHASES[fault.kind], "")
    if fault.kind in ("reduction", "update"):
        assert fault.leaf in seen.leaf
        return
    assert (seen.unit, seen.numbers) == ("/".join(fault.path), fault.numbers)
    if fault.rank is not None:
        assert seen.rank == fault.rank
    if fault.micro is not None:
        assert seen.microbatch == (fault.micro, MICRO[stack])


# Aligned, whatever is around: where results alone differ, nothing inside is accused


layer = ff.unit(lambda w, x: torch.tanh(x @ w))


def mean(params, x):
    for w in params:
        x = layer(w, x)
    return x.square().mean()


def weighted(params, x):
    for w in params:
        x = layer(w, x)
    return ff.Weighted(x.square().sum(), x.numel())


def adapted(params, x):
    """Two gradient calls, of which the second begins from the first."""
    _, grads = ff.value_and_grad(mean)(params, x)
    params = tree.map(lambda w, g: w - 0.1 * g, params, grads)
    return ff.value_and_grad(weighted)(params, x)


def with_metric(step, by):
    """The step, that returns a metric too, which is ``by`` times the loss."""

    def changed(params, x):
        loss, grads = step(params, x)
        return loss, grads, loss * by

    changed.interpretations = getattr(step, "interpretations", ())
    return changed


AROUND = {
    "weights": (weighted, 8, lambda f: ff.shard(f, DATA, "data"), {}),
    "uneven weights": (
        weighted, 7, lambda f: ff.shard(f, DATA, "data"), {"uneven": True}),
    "a weighted pipeline": (
        weighted, 8, lambda f: ff.shard(pipeline(f, BOTH), BOTH, "data"), {}),
    "uneven microbatches": (
        mean, 7, lambda f: ff.pipeline(f, PIPE, "pipe", n_microbatches=3), {}),
    "accumulation around": (
        mean, 8, lambda f: ff.accumulate(ff.shard(f, DATA, "data"), 2), {}),
    "accumulation in a pipeline": (
        mean, 8, lambda f: ff.pipeline(
            ff.accumulate(f, 2), PIPE, "pipe", n_microbatches=2), {}),
    "one batch": (mean, 8, lambda f: ff.shard(f, DATA, "data"), {"axis": ()}),
    "two gradient calls": (None, 8, lambda f: ff.shard(f, DATA, "data"), {}),
    "precision": (
        mean, 8, lambda f: ff.shard(
            ff.precision(f, torch.bfloat16), DATA, "data"), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", AROUND)
def test_no_value_is_accused_that_is_assembled_of_parts(name):
    loss, rows, stack, how = AROUND[name]
    step = adapted if loss is None else ff.value_and_grad(loss)
    data = [torch.zeros(2, 2) for _ in range(4)], torch.zeros(rows, 2)
    seen = first_difference(
        with_metric(step, 1.0),
        with_metric(stack(step), 1 + TINY),
        *data,
        calls=1,
        **how,
    )
    assert (seen.unit, seen.leaf, seen.uncompared) == (None, "2", 0)
    assert not seen.unmatched


# What is no unit's


@pytest.fixture
def data_of_layers():
    return [torch.zeros(2, 2) for _ in range(3)], torch.zeros(8, 2)


def test_what_lies_between_units_is_told_by_what_it_gives(data_of_layers):
    def scaled(at):
        def loss(params, x):
            for k, w in enumerate(params):
                x = layer(w, x * (1 + TINY) if k == at else x)
            loss = x.square().mean()
            return loss * (1 + TINY) if at == 3 else loss

        return ff.shard(ff.value_and_grad(loss), DATA, "data")

    one = ff.value_and_grad(mean)
    seen = first_difference(one, scaled(1), *data_of_layers)
    assert (seen.numbers, seen.value) == ((1,), "its input '0', as given")
    seen = first_difference(one, scaled(3), *data_of_layers)
    assert (seen.phase, seen.unit, seen.value) == ("forward", None, "the loss")


def test_a_step_by_hand_is_told_by_what_it_reduces(data_of_layers):
    one = ff.value_and_grad(mean)
    by_hand = {
        name: lambda w, x, reduce=reduce: reduce(one(w, x), "data")
        for name, reduce in (("right", ff.pmean), ("wrong", ff.psum))
    }
    how = {"mesh": DATA, "calls": 1, "draws": 1}
    assert first_difference(one, by_hand["right"], *data_of_layers, **how) is None
    seen = first_difference(one, by_hand["wrong"], *data_of_layers, **how)
    assert (seen.phase, seen.leaf, seen.rank) == ("reduction", "0", None)


def test_a_later_call_is_named(data_of_layers):
    counted = []

    def step(params, x):
        loss, grads = ff.value_and_grad(mean)(params, x)
        if not ff.recording():
            counted.append(0)
        late = len(counted) % 4 > 2  # of two ranks, the second call
        return loss * (1 + TINY * late), grads

    seen = first_difference(
        ff.value_and_grad(mean), ff.shard(step, DATA, "data"), *data_of_layers, draws=1
    )
    assert str(seen).startswith("in call 2 of the step: reduction, '0' of what")


def test_it_is_drawn_until_a_comparison_lets_the_difference_through():
    def one(by):
        unit = ff.unit(lambda w, x: (x @ w).square().mean())

        def step(w, x):
            size = unit(w, x)
            return torch.where(size < 1, size * by, size * 0)

        return step

    data = torch.zeros(3), torch.zeros(4, 3)
    found = {
        draws: first_difference(one(1), one(1 + TINY), *data, calls=1, draws=draws)
        for draws in (1, 4)
    }
    assert found[1] is None
    assert (found[4].value, found[4].compared) == ("its value", 4)
    with pytest.raises(ValueError, match="draws=0: nothing would be compared"):
        first_difference(one(1), one(1), *data, draws=0)


# Floats


def test_in_floats_a_difference_is_one_that_rounding_does_not_make(data_of_layers):
    draw = torch.Generator().manual_seed(0)
    drawn = tree.map(lambda x: torch.randn(x.shape, generator=draw), data_of_layers)

    def scaled(by):
        def loss(params, x):
            for k, w in enumerate(params):
                x = layer(w, x) * (by if k == 1 else 1)
            return x.square().mean()

        return ff.shard(ff.value_and_grad(loss), DATA, "data")

    one = ff.value_and_grad(mean)
    assert first_difference(one, scaled(1.0), *drawn, exact=False) is None
    assert first_difference(one, scaled(1 + 1e-9), *drawn, exact=False) is None
    seen = first_difference(one, scaled(1 + 1e-4), *drawn, exact=False)
    assert (seen.phase, seen.unit, seen.numbers) == ("forward", "<lambda>", (2,))


# Where it is said


def test_an_assertion_says_where_steps_part(data_of_layers):
    one, owed = ff.value_and_grad(mean), ff.unit(lambda w, x: torch.tanh(x @ w) * 2)

    def loss(params, x):
        return owed(params[2], layer(params[1], layer(params[0], x))).square().mean()

    two = ff.shard(ff.value_and_grad(loss), DATA, "data")
    said = "the first value that differs: unit '<lambda>' call 2, forward, its output$"
    with pytest.raises(AssertionError, match=said):
        assert_equals_one_device(one, two, DATA, *data_of_layers, exact=True)
    integers = [ff.testing.integers(*x.shape) for x in tree.leaves(data_of_layers)]
    with pytest.raises(AssertionError, match=said):
        assert_equals_one_device(one, two, DATA, integers[:3], integers[3])
    with pytest.raises(AssertionError, match=said):
        ff.prove(one, two, DATA, *data_of_layers, calls=1)


def test_a_search_that_fails_hides_nothing():
    """Its run in float64 is refused here: the step multiplies by a float32."""
    weight = torch.ones(2, 2)
    unit = ff.unit(lambda w, x: (x @ weight) * w)
    one = ff.value_and_grad(lambda w, x: unit(w, x).sum())
    with pytest.raises(AssertionError) as caught:
        assert_equals_one_device(
            one, ff.shard(one, DATA, "data"), DATA, torch.ones(2), torch.ones(4, 2)
        )
    last = str(caught.value).splitlines()[-1]
    assert last.startswith("where they part is not told: RuntimeError: expected m1")


def test_a_mesh_of_processes_is_refused(data_of_layers):
    mesh = ff.make_mesh({"data": 2}, "abstract")
    one = ff.value_and_grad(mean)
    with pytest.raises(ValueError, match='same axes by ff.make_mesh.axes, "simulated"'):
        first_difference(one, ff.shard(one, mesh, "data"), *data_of_layers)


# What is said of it


def test_a_loss_without_units_is_said(data_of_layers):
    def step(by):
        return ff.value_and_grad(lambda params, x: (x @ params[0]).mean() * by)

    two = ff.shard(step(2), DATA, "data")
    seen = first_difference(step(1), two, *data_of_layers)
    assert str(seen) == "forward, the loss"
    with pytest.raises(AssertionError, match="that differs: forward, the loss$"):
        assert_equals_one_device(step(1), two, DATA, *data_of_layers, exact=True)


def test_the_gradient_call_is_named_where_there_are_several(data_of_layers):
    def step(by):
        last = ff.unit(lambda w, x: torch.tanh(x @ w) * by)

        def second(params, x):
            return last(params[1], layer(params[0], x)).square().mean()

        def step(params, x):
            first = ff.value_and_grad(mean)(params, x)
            return first, ff.value_and_grad(second)(params, x), last(params[0], x).sum()

        return ff.shard(step, DATA, "data") if by > 1 else step

    seen = first_difference(step(1), step(1 + TINY), *data_of_layers)
    assert str(seen) == (
        "in gradient call 2 of 2: unit '<lambda>' call 1, forward, its output"
    )


def test_a_unit_after_gradient_calls_is_said_to_be_there(data_of_layers):
    def step(by):
        last = ff.unit(lambda w, x: torch.tanh(x @ w) * by)

        def step(params, x):
            return ff.value_and_grad(mean)(params, x), last(params[0], x).mean()

        return ff.shard(step, DATA, "data") if by > 1 else step

    seen = first_difference(step(1), step(1 + TINY), *data_of_layers)
    assert str(seen) == (
        "after gradient call 1: unit '<lambda>' call 0, forward, its output"
    )


@pytest.mark.parametrize("around", ["shard", "accumulate"])
def test_a_sum_in_the_place_of_a_mean_is_in_the_loss(around, data_of_layers):
    one = ff.value_and_grad(lambda params, x: layer(params[0], x).square().sum())
    two = {
        "shard": ff.shard(one, DATA, "data"), "accumulate": ff.accumulate(one, 2)
    }[around]  # fmt: skip
    seen = first_difference(one, two, *data_of_layers)
    assert str(seen) == "forward, the loss"


def test_a_comparison_of_residuals_is_not_taken_for_a_recompute(data_of_layers):
    """Of a unit whose residuals are compared while its body runs."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return g @ w.mT, x.mT @ g

    unit = ff.unit(lambda w, x: torch.tanh(Product.apply(x, w)))

    def step(fault):
        def loss(params, x):
            for k, w in enumerate(params):
                x = unit(w, x)
                x = Owed.apply(x) if fault and not k else x
            return x.square().mean()

        return ff.value_and_grad(loss)

    two = ff.remat(step(True))
    seen = first_difference(step(False), two, *data_of_layers)
    assert str(seen) == (
        "unit '<lambda>' call 0, backward, the cotangent of its output, as given"
    )


def test_results_that_are_no_tensors_are_compared():
    def step(by):
        return lambda w, x: (w * x, np.full(2, by))

    data = torch.zeros(1), torch.zeros(4)
    assert first_difference(step(1), step(1), *data) is None
    assert first_difference(step(1), step(2), *data).leaf == "1"


def test_an_assertion_keeps_no_more_values_than_it_says(data_of_layers, monkeypatch):
    one = ff.value_and_grad(mean)
    two = ff.shard(
        ff.value_and_grad(lambda params, x: mean(params, x) * 2), DATA, "data"
    )
    monkeypatch.setattr(one_device, "_MAX_VALUE_BYTES", 1000)
    with pytest.raises(AssertionError, match="would keep more than .* a smaller model"):
        assert_equals_one_device(one, two, DATA, *data_of_layers, exact=True)
    monkeypatch.setattr(one_device, "_MAX_VALUE_BYTES", 100_000)
    with pytest.raises(AssertionError, match="that differs: forward, the loss$"):
        assert_equals_one_device(one, two, DATA, *data_of_layers, exact=True)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("extra", "call 0 was seen in the first"),
        ("<lambda>", "call 3 was seen in the second"),
    ],
)
def test_unit_calls_of_one_step_alone_are_said(name, said, data_of_layers):
    def extra(w, x):
        return x

    extra.__name__ = name
    extra = ff.unit(extra)
    two = ff.value_and_grad(lambda params, x: mean(params, extra(params[0], x)) * 2)
    seen = first_difference(ff.value_and_grad(mean), two, *data_of_layers, draws=1)
    assert str(seen).endswith(f"; unit '<lambda>' {said} step alone")
