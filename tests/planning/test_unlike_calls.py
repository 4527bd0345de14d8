"""Unit calls in a row that are unlike all run in a plan, which is right either way."""

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import dropout
from torch.overrides import TorchFunctionMode

import fsfunc as ff
from tests.models import layer
from tests.planning.left_out import (
    ADAM,
    WIDTH,
    N,
    assert_all_run,
    assert_left_out,
    check,
    embed,
    four,
    half,
    head,
    init,
    linear,
    matrix,
    outside,
    plain,
    sharded,
    stack,
    through,
)

pytestmark = pytest.mark.usefixtures("uncollected")


def looking_back(layers, x, at, detach, read):
    seen = []
    for i, p in enumerate(layers):
        x = layer(p, x)
        if i in at:
            seen.append(x.detach() if detach else x)
    return (x, sum(y.sum() for y in seen)) if read else x


# Of sixteen layers the calls 6 to 9 are left out.
PLACES = [range(N), [5], [6], [9], [10]]


@pytest.mark.parametrize("at", PLACES, ids=lambda at: str(list(at)[:2]))
@pytest.mark.parametrize("detach", [True, False])
def test_hidden_states_that_are_kept(at, detach):
    check(through(lambda ps, x: looking_back(ps, x, at, detach, False)))

    def loss(params, x):
        x, more = looking_back(params["layers"], x, at, detach, True)
        return head(params["head"], x) + more, {"states": more}

    check(step=ADAM(ff.value_and_grad(loss, has_aux=True)))


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Rounding(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out.round() if func is torch.tanh else out


def again(x):
    x.add_(1)
    return x


def hooked(x):
    x.register_hook(lambda g: g * 2)
    return x


BETWEEN = {
    "a product": lambda x: x * 2,
    "dropout": lambda x: dropout(x, 0.5),
    "a view": lambda x: x.view(x.shape),
    "a function of one's own": Doubling.apply,
    "a write": again,
    "an allocation": lambda x: (torch.empty(3), x)[1],
    "a hook": hooked,
    "nothing": lambda x: x.detach(),
}
AROUND = {
    "hooks": lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda x: x + 0, lambda x: x
    ),
    "a mode": Rounding,
    "no gradients": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "another kernel": lambda: torch.nn.attention.sdpa_kernel(
        torch.nn.attention.SDPBackend.MATH
    ),
    "nothing": contextlib.nullcontext,
}


@pytest.mark.parametrize("name", BETWEEN)
@pytest.mark.parametrize("at", [[9], [4], range(N)], ids=["one", "kept", "all"])
def test_between_layers_stands(name, at):
    def run(layers, x):
        for i, p in enumerate(layers):
            x = linear(p, x)
            x = BETWEEN[name](x) if i in at else x
        return x

    # One that stands after the fifth layer parts the run: eleven are too few to save.
    assert_all_run(through(run))


@pytest.mark.parametrize("name", AROUND)
def test_one_layer_in_the_middle_runs_under(name):
    def run(layers, x):
        for i, p in enumerate(layers):
            with AROUND[name]() if i == 9 else contextlib.nullcontext():
                x = layer(p, x)
        return x

    (assert_left_out if name == "nothing" else assert_all_run)(through(run))


def lost(layers, x):
    """What is collected makes the plan fail, and the loss goes on."""
    seen = []
    for p in layers:
        try:
            x = layer(p, x)
        except Exception:
            x = x * 2
        seen.append(x)
    return x, sum(y.sum() for y in seen)


def passed_over(layers, x):
    """The layers after the seventh may fail in a plan, and none is missed."""
    seen = []
    for i, p in enumerate(layers):
        with contextlib.suppress(Exception):
            x = layer(p, x)
        seen += [x] if i == 6 else []
    return x


def wrapped(layers, x):
    try:
        return lost(layers, x)
    except Exception as error:
        raise ValueError("of one's own") from error


@ff.unit
def failing(p, x):
    raise ValueError("no such layer")


def one_fails(layers, x):
    for i, p in enumerate(layers):
        with contextlib.suppress(ValueError):
            x = (failing if i == 7 else layer)(p, x)
    return x


@ff.unit
def cut(p, x):
    return torch.tanh(x.detach() @ p["w"] + p["b"])


@ff.unit
def shifted(p, x):
    """Nothing is saved for its backward, whose absence no memory shows."""
    return x.detach() + p["b"]


@ff.unit
def flagged(p, x, flag=False, scale=1.0):
    y = (x @ p["w"] + p["b"]) * scale
    return torch.tanh(y) if flag else y


@ff.unit
def measured(p, x):
    y = x @ p["w"] + p["b"]
    return torch.tanh(y), y.mean()


def collecting(layers, x):
    total = 0
    for p in layers:
        x, term = measured(p, x)
        total = total + term
    return x, total


def summing(layers, x):
    total = 0
    for i, p in enumerate(layers):
        x = layer(p, x)
        total = total + x.sum() if i % 100 == 9 else total
    return x, total


def on_two_lines(layers, x):
    for i, p in enumerate(layers):
        if 6 <= i < 10:
            x = layer(p, x)
        else:
            x = layer(p, x)
    return x


def twice(layers, x):
    for i, p in enumerate(layers):
        x = layer(p, x)
        x = layer(p, x) if i == 9 else x
    return x


def tied(layers, x):
    return stack(layers, x) @ layers[9]["w"]


def recomputed(layers, x):
    again = ff.remat(layer)
    for i, p in enumerate(layers):
        x = (again if i == 9 else layer)(p, x)
    return x


def compiled(layers, x):
    fast = ff.jit(layer)
    for i, p in enumerate(layers):
        x = (fast if i == 9 else layer)(p, x)
    return x


def in_bfloat16(layers, x):
    narrow = ff.precision(layer, torch.bfloat16)
    for i, p in enumerate(layers):
        x = (narrow if i == 9 else layer)(p, x).float()
    return x


def out_of_order(layers, x):
    return stack([*layers[:8], *reversed(layers[8:])], x)


UNLIKE = {
    "an error that is caught": lost,
    "an error that nobody sees": passed_over,
    "an error that is wrapped": wrapped,
    "a layer that fails": one_fails,
    "no gradient of inputs": lambda ps, x: stack(ps, x, cut),
    "no gradient of inputs, nor memory": lambda ps, x: stack(ps, x, shifted),
    "no gradient at all": lambda ps, x: stack(ps, x).detach(),
    "one flag": lambda ps, x: _each(ps, x, lambda i: {"flag": i == 9}),
    "one number": lambda ps, x: _each(ps, x, lambda i: {"scale": 1.0 + (i == 9)}),
    "new masks": lambda ps, x: _each(ps, x, lambda i: {"scale": torch.ones(WIDTH)}),
    "sums of results": collecting,
    "the sum of one result": summing,
    "two lines": on_two_lines,
    "one layer twice": twice,
    "a layer that is read again": tied,
    "one layer computed again": recomputed,
    "one layer compiled": compiled,
    "one layer in bfloat16": in_bfloat16,
    "an order of its own": out_of_order,
}


def _each(layers, x, keywords):
    for i, p in enumerate(layers):
        x = flagged(p, x, **keywords(i))
    return x


RUNS_ALL = {*UNLIKE} - {"an order of its own"}


@pytest.mark.parametrize("name", UNLIKE)
def test_a_loss_is_right_with(name):
    (assert_all_run if name in RUNS_ALL else check)(through(UNLIKE[name]))


@pytest.mark.parametrize("zero", range(4))
def test_a_backward_that_does_not_come_is_seen(zero):
    """The units reduce gradients of their own accord, though no loss reads them."""
    for name in (name for name in UNLIKE if name.startswith("no gradient")):
        assert_all_run(through(UNLIKE[name]), around=sharded(zero))


def test_layers_of_other_shapes_in_the_middle_run():
    def wider():
        layers = init()["layers"]
        layers[8] = {"w": torch.zeros(WIDTH, 2 * WIDTH), "b": torch.zeros(2 * WIDTH)}
        layers[9] = {"w": torch.zeros(2 * WIDTH, WIDTH), "b": torch.zeros(WIDTH)}
        return init() | {"layers": layers}

    assert_all_run(init=wider)


def test_a_leaf_that_the_loss_reads_too():
    def loss(params, x):
        return plain(params, x) + params["layers"][9]["b"].sum()

    assert_all_run(loss)


@ff.unit
def inner(p, x):
    return torch.tanh(x @ p["w"])


@ff.unit
def outer(p, x):
    return inner(p["inner"], x) + p["b"]


@pytest.mark.parametrize("within", [lambda f: f, ff.remat, four])
def test_nested_units_are_right(within):
    def nested():
        return {"inner": matrix(), "b": torch.zeros(WIDTH)}

    loss = through(lambda ps, x: stack(ps, x, outer))
    check(loss, lambda: init(make=nested), sharded(3, within))


@ff.unit
def masked(p, x, mask):
    return torch.tanh(x @ p["w"] + p["b"]) * mask


def test_inputs_that_the_recorded_run_did_not_give():
    """Each second run is planned: in it one layer has a mask without a gradient."""
    runs = 0

    def run(layers, x):
        nonlocal runs
        runs, mask = runs + 1, x.sum(0)
        for i, p in enumerate(layers):
            is_other = i == 8 and runs % 2 == 0
            x = masked(p, x, mask.detach() if is_other else mask)
        return x

    assert_all_run(through(run))
    assert runs == 6


def test_small_units_that_share_a_buffer():
    for min_bytes in (100, 600, 10_000):
        check(around=sharded(min_bytes=min_bytes))


class Every(ff.Interpretation):
    """Does something else in each fifth call."""

    def __init__(self):
        self.count = 0

    def unit(self, run, call):
        self.count += 1
        scale = 1.0 if self.count % 5 else 2.0
        return lambda p, *inputs: run(p, *(scale * x for x in inputs))


@pytest.mark.parametrize("where", ["within", "around"])
def test_all_layers_run_under_a_transform_of_ones_own(where):
    def around(f, mesh):
        counting = lambda f: ff.transformed(f, Every())  # noqa: E731
        if where == "within":
            return sharded(3, counting)(f, mesh)
        return counting(sharded()(f, mesh))

    assert_all_run(around=around)


def test_a_transform_without_a_part_in_unit_calls_leaves_layers_out():
    class Idle(ff.Interpretation):
        pass

    assert_left_out(around=sharded(3, lambda f: ff.transformed(f, Idle())))


def gradient_of_the_input(params, x):
    value, grad = ff.value_and_grad(lambda x, params: plain(params, x))(x, params)
    return value + grad.square().sum()


def by_torch(params, x):
    return plain(params, x) + torch.func.grad(lambda x: plain(params, x))(x).sum()


def by_autograd(params, x):
    x = x.detach().requires_grad_()
    value = plain(params, x)
    (grad,) = torch.autograd.grad(value, x, create_graph=True)
    return value + grad.square().sum()


@pytest.mark.parametrize("loss", [gradient_of_the_input, by_torch, by_autograd])
def test_a_loss_with_a_gradient_in_it(loss):
    check(loss)


def shorter(params, x):
    return plain(params | {"layers": params["layers"][:9]}, x)


def backwards(params, x):
    return plain(params | {"layers": params["layers"][::-1]}, x)


@pytest.mark.parametrize("other", [shorter, backwards, by_torch])
def test_a_step_of_two_losses(other):
    def step(state, x):
        value, grads = ff.value_and_grad(plain)(state.params, x)
        state = state.apply_gradients(grads, ADAM)
        more, grads = ff.value_and_grad(other)(state.params, x)
        return state.apply_gradients(grads, ADAM), value + more

    for zero in (3, 1):
        check(step=step, around=sharded(zero))


def test_two_networks_of_which_one_judges_the_other():
    def made(params, x):
        return stack(params["layers"], embed(params["embed"], x))

    def judged(params, x):
        return head(params["head"], stack(params["judge"], made(params, x)))

    def apart(params, x):
        return head(params["head"], stack(params["judge"], made(params, x).detach()))

    def step(state, x):
        _, grads = ff.value_and_grad(apart)(state.params, x)
        state = state.apply_gradients(grads, ADAM)
        value, grads = ff.value_and_grad(judged)(state.params, x)
        return state.apply_gradients(grads, ADAM), value

    check(step=step, init=lambda: init() | {"judge": init()["layers"]})


def test_what_a_step_raises_is_raised_once_more():
    def loss(params, x):
        raise_at = params["layers"][-1]
        for p in params["layers"]:
            if p is raise_at:
                raise ValueError("of the step")
            x = layer(p, x)

    assert check(loss) == ([0], 0)


GLUE = ["none", "scale", "view", "drop", "sum", "keep", "keep detached", "read later"]
UNITS = {"layer": layer, "linear": linear, "flagged": flagged}


@st.composite
def losses(draw):
    """Layers in some order of units, with something done at some places."""
    places = st.integers(0, N - 1)
    kinds = draw(st.sampled_from(list(UNITS)))
    units = dict.fromkeys(range(N), UNITS[kinds])
    if draw(st.booleans()):
        units[draw(places)] = UNITS[draw(st.sampled_from(list(UNITS)))]
    glue = draw(st.dictionaries(places, st.sampled_from(GLUE), max_size=2))

    def run(layers, x):
        seen, total = [], 0
        for i, p in enumerate(layers):
            x = units[i](p, x)
            how = glue.get(i)
            x = x * 2 if how == "scale" else x
            x = x.view(x.shape) if how == "view" else x
            x = dropout(x, 0.5) if how == "drop" else x
            total = total + x.sum() if how == "sum" else total
            seen += [x] if how in ("keep", "read later") else []
            seen += [x.detach()] if how == "keep detached" else []
        if "read later" in glue.values():
            total = total + sum(y.sum() for y in seen)
        return x, total

    run.__doc__ = f"{kinds}, {glue}"
    return run


AROUND_IT = [
    sharded(3), sharded(1), sharded(0), outside(ff.donate, 2), sharded(3, ff.remat),
    sharded(3, four), outside(four, 3), sharded(3, half), outside(ff.remat),
]  # fmt: skip


@settings(max_examples=6)
@given(losses(), st.sampled_from(AROUND_IT))
def test_any_loss_is_planned_as_with_all_calls(run, around):
    check(through(run), around=around)


@pytest.mark.slow
@settings(max_examples=100)
@given(losses(), st.sampled_from(AROUND_IT))
def test_many_losses_are_planned_as_with_all_calls(run, around):
    check(through(run), around=around)


# What a transform does to one layer, by the name of its leaves


@pytest.mark.parametrize("number", [0, 7, 15])
def test_all_layers_run_where_a_pattern_names_one(number):
    assert_all_run(around=sharded(reshard_after_forward={f"layers/{number}/**": False}))


def test_a_pattern_that_names_all_layers_leaves_calls_out():
    assert_left_out(around=sharded(reshard_after_forward={"layers/**": False}))
