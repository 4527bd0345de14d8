"""jit(step, whole_step=True): one graph of a step is the step, and sends the same."""

import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings

import fsfunc as ff
from fsfunc.runtime.memory import pool_of
from fsfunc.testing import assert_equals_one_device
from fsfunc.testing import strategies as draw
from fsfunc.transforms.step_graphs import StepGraph
from tests.checks import all_refused, close, same, simulated, trained
from tests.covering import LONG_TESTS, by_turns, examples
from tests.models import chain, floats, integers, layers, linear, train_step

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")


def whole(step, **options):
    """The graph itself: its operators are run one by one."""
    return ff.jit(step, whole_step=True, **{"backend": "eager", **options})


STACKS = draw.meshes(("a", "b"), max_axes=2).flatmap(
    lambda mesh: draw.transform_stacks(mesh, ("remat", "accumulate"))
)


@given(draw.train_steps(frozen=True), STACKS)
@settings(max_examples=examples(8))
def test_a_graph_of_any_stack_has_the_bits_of_one_device(drawn, stack):
    """In its second call, which is that of the graph."""
    assert_equals_one_device(
        drawn.step,
        whole(stack(drawn.step)),
        stack.mesh,
        drawn.state,
        drawn.batch(2 * stack.rows),
        axis=stack.axes,
        calls=2,
    )


X = floats(8, 4, seed=3)


def steps(transform, mesh, optimizer, calls=5, loss=None, batch=X, params=None):
    """Each rank's losses and parameters; its ledgers and number of updates."""
    step = transform(train_step(loss or chain(), optimizer), mesh, tuple(mesh.axes))
    params = layers(3, make=floats) if params is None else params
    runs = trained(step, params, optimizer, batch, mesh=mesh, steps=calls)
    sent = [([log.table() for log in r.logs], r.state.step) for r in runs]
    return [(r.outs, r.params) for r in runs], sent


@pytest.mark.parametrize(("zero", "donated"), by_turns(range(4), [False, True]))
def test_it_sends_what_the_step_sends_and_counts_its_updates(zero, donated):
    """Adam's equation rounds otherwise than its kernel, and its rate is a schedule."""
    optimizer = ff.chain(
        ff.clip_by_global_norm(1.0), ff.sharded_adam(ff.warmup_cosine(0.1, 2, 9))
    )

    def plain(step, mesh, axes):
        step = ff.shard(ff.remat(step), mesh, axes, zero=zero)
        return ff.donate(step) if donated else step

    def mine(step, mesh, axes):
        step = whole(ff.shard(ff.remat(step), mesh, axes, zero=zero))
        return ff.donate(step) if donated else step

    found, sent = steps(mine, simulated(3), optimizer, batch=floats(9, 4))
    expected, spent = steps(plain, simulated(3), optimizer, batch=floats(9, 4))
    close(found, expected)
    assert sent == spent and all(type(n) is int and n == 5 for _, n in sent)


@pytest.mark.parametrize("zero", range(4))
def test_units_that_share_a_message_copy_their_gradients_once(zero, monkeypatch):
    made, mesh = [], simulated(2)
    monkeypatch.setattr(StepGraph, "compile", noting(StepGraph.compile, made))

    def transform(wrap, least):
        return lambda step, mesh, axes: wrap(
            ff.shard(step, mesh, axes, zero=zero, min_bytes=least)
        )

    how = dict(optimizer=ff.sgd(0.125), calls=3)
    found, sent = steps(transform(whole, 10**6), mesh, **how)
    expected, spent = steps(transform(lambda f: f, 10**6), mesh, **how)
    close(found, expected)
    assert sent == spent
    _, apart = steps(transform(whole, 0), mesh, **how)
    for (few, _), (more, _) in zip(sent, apart, strict=True):
        few, more = (sum(n for _, _, n, _ in logs[-1]) for logs in (few, more))
        assert few < more
    copied = made[0].find_nodes(op="call_function", target=torch.ops.aten.cat.default)
    assert len(copied) == 1


def test_no_buffers_are_kept_beside_a_graph():
    """The first call, which is no graph, has left those of its gathers."""
    mesh = simulated(2)

    def around(step, mesh, axes):
        return whole(ff.shard(ff.accumulate(step, 2), mesh, axes))

    steps(around, mesh, ff.sgd(0.125), calls=2)
    assert not any(pool_of(mesh, rank).storages for rank in range(2))


@ff.unit
def gelu(p, x):
    return x + F.gelu(x @ p["w"]) @ p["w"].T


@ff.unit
def doubled_before_a_write(p, x):
    product = x @ p["w"]
    seen = product.view(-1)
    twice = (seen * 2).view(product.shape)
    product.add_(1.0)
    added = x + torch.sin(seen).view(product.shape)
    return added + twice @ p["w"].T


DATA = (simulated(2), "data")
ACTIVATIONS = {
    "zero=3": (gelu, lambda step: ff.shard(step, *DATA), 2),
    "zero=2": (gelu, lambda step: ff.shard(step, *DATA, zero=2), 0),
    "remat": (gelu, lambda step: ff.shard(ff.remat(step), *DATA), 0),
    "a write": (doubled_before_a_write, lambda step: ff.shard(step, *DATA), 0),
}


@pytest.mark.parametrize("of", ACTIVATIONS)
def test_at_zero_3_an_activation_is_computed_again(of, monkeypatch):
    """Of the last layer not, which is not gathered again; nor if it was written."""
    layer, around, again = ACTIVATIONS[of]
    made, optimizer = [], ff.sgd(0.01)
    monkeypatch.setattr(StepGraph, "compile", noting(StepGraph.compile, made))
    params = [{"w": 0.1 * floats(4, 4, seed=k)} for k in range(3)]
    how = {"calls": 3, "loss": chain(layer), "params": params}
    found, _ = steps(lambda s, *at: whole(around(s)), DATA[0], optimizer, **how)
    expected, _ = steps(lambda s, *at: around(s), DATA[0], optimizer, **how)
    close(found, expected)
    ops = [x.target for x in made[0].nodes]
    assert ops.count(torch.ops.fsfunc.again.default) == again
    runs = {2: 5, 0: 3}[again] if layer is gelu else 0
    assert ops.count(torch.ops.aten.gelu.default) == runs * (1 + (of == "remat"))


def noting(compile, made):
    def noted(self, *given):
        made.append(self.traced.graph.graph)
        return compile(self, *given)

    return noted


def updated(optimizer, compute=None, tolerance=1e-5):
    """(around a step, options of `steps`, and how near a graph of it is)."""

    def around(step, mesh, axes):
        step = ff.precision(step, compute=compute) if compute else step
        return ff.shard(ff.accumulate(step, 2), mesh, axes, zero=3)

    params = layers(2, bias=False, make=floats if compute else integers)
    how = {"optimizer": optimizer, "params": params, "loss": chain(linear)}
    return around, how, tolerance


def reduced(step, mesh, axes):
    step = ff.shard(step, mesh, axes)
    return ff.precision(step, torch.float32, reduce=torch.float32)


OPTIMIZERS = {
    "sgd": ff.sgd(0.125, momentum=0.5),
    "lion": ff.lion(0.125),
    "lamb": ff.lamb(0.01),
    "muon": ff.muon(0.01),
    "master": ff.master_weights(ff.sgd(0.125)),
}
HALVES = layers(2, make=floats, dtype=torch.bfloat16)
ALIKE = {
    **{k: updated(o) for k, o in OPTIMIZERS.items()},
    **{f"{k}, bf16": updated(o, torch.bfloat16) for k, o in OPTIMIZERS.items()},
    "sums in float32": (reduced, {"optimizer": ff.sgd(0.5), "params": HALVES}, 0),
}


@pytest.mark.parametrize("name", ALIKE)
def test_updates_casts_and_sums_are_those_of_the_step(name):
    around, how, tolerance = ALIKE[name]
    found, _ = steps(lambda *given: whole(around(*given)), simulated(2), **how)
    expected, _ = steps(around, simulated(2), **how)
    close(found, expected, tolerance)


def test_new_shapes_are_traced_at_once_and_then_python_runs_no_more():
    traced = []

    @ff.unit
    def seen(p, x):
        traced.append(len(x))
        return x @ p["w"]

    optimizer = ff.sgd(0.125)
    step = train_step(chain(seen), optimizer)
    params = layers(1, bias=False)
    states = [ff.TrainState(params, optimizer.init(params))] * 2
    run = whole(step)
    for rows, more in ((8, 1), (8, 1), (8, 0), (4, 2), (8, 0), (4, 0), (4, 0)):
        before, x = len(traced), floats(rows, 4, seed=rows)
        states[0], _ = run(states[0], x)
        assert len(traced) - before == more, rows
        states[1], _ = step(states[1], x)
    close(states[0], states[1])


@pytest.mark.parametrize("zero", [0, 1])
def test_ranks_with_batches_of_other_shapes_have_weights_of_the_same_bits(zero):
    """Adam's equation in a graph rounds otherwise than its kernel in the step."""
    optimizer, mesh = ff.sharded_adam(0.1), simulated(2)
    step = whole(ff.shard(train_step(chain(), optimizer), mesh, "data", zero=zero))

    def main():
        rank, mine = ff.axis_index("data"), ff.local_batch(X, mesh, "data")
        state = ff.init_state(step, layers(2, make=floats), optimizer, mine)
        found = []
        for rows in (4, 4, 3 if rank else 4, 4, 2, 1 if rank else 4):
            state, _ = step(state, mine[:rows])
            found.append(ff.unshard(state.params))
        return found

    same(*ff.spmd(main, mesh)())


@torch._dynamo.config.patch(recompile_limit=2)
def test_graphs_are_kept_for_a_bounded_number_of_shapes_and_of_states():
    run = whole(lambda state, x, n: (state * n, x))
    for rows in (1, 2, 3, 2):
        run(torch.ones(2), torch.ones(rows), 2)
    with pytest.raises(RuntimeError, match=r"2 sets of shapes.*others: f32\[4\], 2"):
        run(torch.ones(2), torch.ones(4), 2)
    with pytest.raises(RuntimeError, match="as tensors what numbers"):
        run(torch.ones(2), torch.ones(3), 3)
    traced = []
    run = whole(lambda state: (traced.append(len(state)), state * 2)[1])
    for n in (1, 1, 2, 2, 3, 3, 1):  # the third has the first forgotten
        same(run(torch.ones(n)), torch.full((n,), 2.0))
    assert traced == [1] * 2 + [2] * 2 + [3] * 2 + [1]


class Rates:
    """A schedule that reads a Python object, which somebody changes between steps."""

    now = 0.25

    def __call__(self, count):
        return self.now


def looked_up(count):
    return {2: 0.125}.get(count, 0.25)


RATES = {
    "looked up": looked_up,
    "by a branch": lambda count: 0.125 if count < 2 else 0.25,
    "by the type": lambda count: 0.125 * (1 + count) if isinstance(count, int) else 9.0,
    "an object's": Rates(),
}


@pytest.mark.parametrize("name", RATES)
def test_a_schedule_is_asked_before_each_run(name):
    rate, params = RATES[name], layers(1, bias=False)
    optimizer = ff.sgd(rate, momentum=0.5)
    step = train_step(chain(linear), optimizer)
    states = [ff.TrainState(params, optimizer.init(params))] * 2
    run = whole(step)
    for k in range(5):
        if isinstance(rate, Rates):
            rate.now = 2.0**-k
        states = [f(state, X)[0] for f, state in zip((run, step), states, strict=True)]
    close(*states)


def test_rows_of_a_data_set_and_parts_of_kept_buffers_are_one_graph():
    """On each rank at the same calls, wherever its part begins."""
    traced, optimizer, mesh = [], ff.sgd(0.125), simulated(2)

    @ff.unit
    def seen(p, x):
        traced.append(ff.axis_index("data"))
        return x @ p["w"]

    def main(wrap):
        step = ff.shard(train_step(chain(seen), optimizer), mesh, "data", zero=1)
        run, params = ff.donate(wrap(step)), layers(1, bias=False, make=floats)
        rows = floats(12, 4, seed=ff.axis_index("data"))
        state = ff.init_state(run, params, optimizer, rows[:2])
        for k in range(5):
            state, value = run(state, rows[2 * k : 2 * k + 2])
        return ff.unshard(state.params), value

    found = ff.spmd(lambda: main(whole), mesh)()
    assert traced.count(0) == traced.count(1)
    close(list(found), list(ff.spmd(lambda: main(lambda f: f), mesh)()))


def test_donated_it_writes_what_nobody_else_holds():
    optimizer, mesh = ff.sgd(0.125), simulated(2)
    step = whole(ff.shard(train_step(chain(), optimizer), mesh, "data"))

    def main():
        mine, run = ff.local_batch(X, mesh, "data"), ff.donate(step)
        state = ff.init_state(run, layers(2, make=floats), optimizer, mine)
        for _ in range(2):
            state, _ = run(state, mine)
        flat, old = state.params[0]["w"].packed.flat, state
        at, view, before = flat.data_ptr(), flat[:], flat.clone()
        del flat
        state, _ = run(state, mine)  # somebody holds a view: other memory
        moved = state.params[0]["w"].packed.flat
        same(view, before)
        assert moved.data_ptr() != at
        with pytest.raises(RuntimeError, match="donated"):
            run(old, mine)
        at = moved.data_ptr()
        del moved
        state, _ = run(state, mine)
        assert state.params[0]["w"].packed.flat.data_ptr() == at

    ff.spmd(main, mesh)()


def test_a_graph_that_raises_has_spoiled_a_donated_state(monkeypatch):
    optimizer, mesh = ff.sgd(0.125), simulated(2)
    step = whole(ff.shard(train_step(chain(), optimizer), mesh, "data"))

    def broken(self, x, y, number):
        raise ArithmeticError("broken")

    def main():
        mine, run = ff.local_batch(X, mesh, "data"), ff.donate(step)
        state = ff.init_state(run, layers(2, make=floats), optimizer, mine)
        for _ in range(2):
            state, _ = run(state, mine)
        if ff.axis_index("data") == 0:
            monkeypatch.setattr("fsfunc.transforms.graph_collectives.Run.wait", broken)
        ff.psum(torch.zeros(1), "data")
        try:
            run(state, mine)
        finally:
            with pytest.raises(RuntimeError, match="neither the old one nor the new"):
                state.params[0]["w"].local  # noqa: B018

    with pytest.raises(ArithmeticError):
        ff.spmd(main, mesh)()


def test_ranks_that_drift_apart_along_an_unnamed_axis_are_found():
    optimizer, mesh = ff.sgd(0.125), simulated(data=2, other=2)
    step = whole(ff.shard(train_step(chain(), optimizer), mesh, "data"))

    def main():
        mine = ff.local_batch(X, mesh, "data")
        state = ff.init_state(step, layers(2, make=floats), optimizer, mine)
        for k in range(8):
            unlike = k >= 3 and ff.axis_index("other")
            state, _ = step(state, mine + 1 if unlike else mine)

    with pytest.raises(ValueError, match="ranks along 'other' are given unlike"):
        ff.spmd(main, mesh)()


def test_a_plan_and_a_derivative_of_it_are_those_of_the_step():
    optimizer, mesh = ff.sgd(0.125), simulated(2)
    step = ff.shard(train_step(chain(), optimizer), mesh, "data")
    given = lambda: layers(2, make=floats), optimizer, X[:4]
    plans = [ff.plan(f, *given, mesh=mesh).bytes() for f in (step, whole(step))]
    assert plans[0] == plans[1] > 0
    square = whole(lambda x: (x**2).sum())
    x = torch.ones(3)
    for _ in range(3):
        same(torch.func.grad(square)(x), 2 * x)


BESIDE, BUFFER = torch.zeros(3), floats(4, 4)
A, B = floats(3), floats(3, seed=1)


def closed_over(state, x):
    grads = ff.value_and_grad(chain())(state, x)[1]
    new = ff.tree.map(lambda p, g: p - 0.1 * g, state, grads)
    return new, BESIDE * 2 + torch.arange(3) + torch.tensor(0.5)


def doubled(state, x):
    return ff.tree.map(lambda p: p * 2, state), x.sum()


def by_shape(state, x):
    return ff.tree.map(lambda p: p + x.sum(0), state), (x * 2, len(x), "text")


CALLS = {  # a function, and what it is given, call by call
    "results by the shapes of a batch": (
        by_shape, [(torch.zeros(4), floats(n, 4, seed=n)) for n in (8, 8, 5, 5, 8)]),
    "tensors that it closes over": (closed_over, [(layers(1, make=floats), X)] * 4),
    "no tensors among arguments": (lambda name: BESIDE * 2, [("a",)] * 3),
    "leaves that are one, and views": (doubled, [
        *[({"a": A, "b": A, "c": A}, BUFFER[0]),
          ({"a": A, "b": B, "c": A}, BUFFER[1].clone())] * 2,
        ({"a": A, "b": A, "c": A}, BUFFER[1])]),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_in_each_call_it_gives_what_the_function_gives(name):
    fn, calls = CALLS[name]
    run = whole(fn)
    for args in calls:
        same(run(*args), fn(*args))
        BESIDE.add_(1)


def test_a_sharded_state_in_another_dtype_has_a_graph_of_its_own():
    optimizer, mesh = ff.sgd(0.125), simulated(2)
    total = ff.unit(lambda p: p["w"].sum())
    step = ff.shard(train_step(lambda p, x: total(p[0]), optimizer), mesh, "data")
    run = whole(step)

    def main():
        mine = ff.local_batch(X, mesh, "data")
        state = ff.init_state(step, layers(1), optimizer, mine)
        for kind in (torch.Tensor.double, torch.Tensor.bfloat16):
            cast = ff.tree.map(kind, state.params)
            for _ in range(2):
                found, expected = (
                    f(ff.TrainState(cast, state.opt_state), mine) for f in (run, step)
                )
                same(found, expected)

    ff.spmd(main, mesh)()


def test_generators_go_on_as_after_the_step_itself():
    optimizer, found = ff.sgd(0.125), []
    step = ff.accumulate(train_step(chain(), optimizer), 2)
    for run in (step, whole(step)):
        torch.manual_seed(0)
        state = ff.TrainState(params := layers(1, make=floats), optimizer.init(params))
        for _ in range(3):
            state, _ = run(state, X)
        found.append((state.params, torch.rand(2)))
    close(*found)


@pytest.mark.slow
def test_jit_of_a_part_within_is_compiled_with_the_step():
    loss, params = chain(), layers(1, make=floats)
    run = whole(lambda p, x: ff.value_and_grad(ff.jit(loss, backend="eager"))(p, x))
    for _ in range(3):
        close(run(params, X), ff.value_and_grad(loss)(params, X))


# What it refuses

MESH = simulated(2)


def sharded(step):
    return ff.shard(step, MESH, "data")


def of_loss(loss, optimizer=None):
    return whole(sharded(train_step(loss, optimizer or ff.sgd(0.1))))


@ff.unit
def dropped(p, x):
    return torch.nn.functional.dropout(x @ p["w"], 0.5)


def counting():
    calls = []

    def step(state, x):
        calls.append(1)
        grads = ff.value_and_grad(chain())(state.params, x)[1]
        return state.apply_gradients(grads, ff.sgd(0.1)), len(calls)

    return step


def branching(state, x):
    value, grads = ff.value_and_grad(chain())(state.params, x)
    if state.step % 2 == 1:
        grads = ff.tree.map(lambda g: -g, grads)
    return state.apply_gradients(grads, ff.sgd(0.1)), value


def integer_beside(params, x):
    return chain()(params, x), torch.tensor(len(x))


def with_integer(state, x):
    gradient = ff.value_and_grad(integer_beside, has_aux=True)
    value, grads = gradient(state.params, x)
    return state.apply_gradients(grads, ff.sgd(0.1)), value[0]


PLAIN = train_step(chain(), ff.sgd(0.1))
REFUSED = {
    "draws": (lambda: of_loss(chain(dropped)), "draws random numbers"),
    "Python counts": (lambda: whole(sharded(counting())), r"returned \d, then \d"),
    "Python branches": (lambda: whole(sharded(branching)), "asks for a tensor's value"),
    "only good steps": (
        lambda: of_loss(chain(), ff.apply_if_finite(ff.sgd(0.1))),
        "only if all gradients are finite",
    ),
    "integers of microbatches": (
        lambda: whole(sharded(ff.accumulate(with_integer, 2))),
        "integers, which microbatches must agree on",
    ),
    "donate within": (lambda: whole(ff.donate(sharded(PLAIN))), "put it around"),
    "within another": (lambda: ff.remat(whole(sharded(PLAIN))), "goes around all"),
    "offload": (
        lambda: whole(ff.offload(sharded(PLAIN), params="host")),
        "a step with offload: one graph takes shard, accumulate",
    ),
    "only": (lambda: whole(sharded(PLAIN), only="layer"), "takes no only="),
    "backend": (lambda: whole(sharded(PLAIN), backend="cudagraphs"), "inductor"),
}


GOOD = ff.apply_if_finite(ff.sgd(0.1))


def twice(make, optimizer):
    def main():
        mine, step = ff.local_batch(X, MESH, "data"), make()
        laid = sharded(train_step(chain(), optimizer))
        state = ff.init_state(laid, layers(2), optimizer, mine)
        for _ in range(2):
            state, _ = step(state, mine)

    return ff.spmd(main, MESH)


test_what_a_graph_cannot_hold_is_refused = all_refused({
    k: (twice(make, GOOD if "good" in k else ff.sgd(0.1)), (RuntimeError, ValueError),
        said) for k, (make, said) in REFUSED.items()
}, sent=True)  # fmt: skip


def rated(w):
    optimizer = ff.sgd(lambda count: 0.1)
    state = optimizer.init(w[0])._replace(count=w[1] + 1)
    return optimizer.apply(w[0], state, w[0])[0]


def called(step, x=X, state=None):
    """Twice, of which the first call is traced."""
    run, state = whole(step), state or (torch.ones(2), 2)
    return lambda: [run(state, x) for _ in range(2)]


def falling():
    optimizer = ff.sgd(lambda count: 0.1 - 0.04 * count)
    run = whole(train_step(chain(), optimizer))
    state = ff.TrainState(params := layers(1), optimizer.init(params))
    for _ in range(4):
        state, _ = run(state, X)


def of_generator(make):
    def call():
        drawn = make(0)
        called(lambda w, x: x * drawn.uniform(1.0, 2.0))()

    return call


PARAMETER, LONG = torch.nn.Parameter(torch.ones(2)), (torch.ones(2), 2**60 + 1)
HOST = ff.offload(lambda v: v * 2, activations="host")
R, T = RuntimeError, TypeError
test_what_a_graph_would_freeze_or_change_is_refused = all_refused({
    "an argument": (called(lambda w, x: w, {1, 2}), T, "with a set"),
    "memory": (called(lambda w, x: w, torch.eye(2).to_sparse()), T, "is sparse"),
    "lazy bits": (called(lambda w, x: w, (torch.ones(2) * 1j).conj()), T, "lazily"),
    "an integer": (called(lambda w, x: w, 0, LONG), ValueError, "do not hold it"),
    "a result": (called(lambda w, x: (w, lambda: x)), T, "returns a function"),
    "a place": (called(lambda w, x: x.as_strided((2,), (1,))), R, "as_strided"),
    "a dtype": (called(lambda w, x: (w, x.sum() * w[1])), R, "trace f64"),
    "a graph": (called(lambda w, x: (w, PARAMETER * 2)), R, "that has a graph"),
    "Python's": (called(lambda w, x: x * random.random()), R, "draws random"),
    "numpy's": (called(lambda w, x: x * numpy.random.rand()), R, "draws random"),
    **{f"{make.__module__} {make.__name__}": (of_generator(make), R, "Python's or num")
       for make in (random.Random, numpy.random.default_rng, numpy.random.RandomState)},
    "a count's": (called(lambda w, x: rated(w)), R, "that it computes"),
    "noise": (called(lambda w, x: ff.randn_like(x)), R, "randn_like draws"),
    "within": (called(lambda w, x: HOST(w[0])), ValueError, "a step with offload"),
    "a rate": (falling, ValueError, r"rate -0.0.* at count 3"),
})  # fmt: skip


def test_bits_of_complex_numbers_are_no_reason():
    called(lambda w, x: w, torch.ones(2) * -1j)()


# Compiled


@pytest.mark.slow
@pytest.mark.parametrize("make", [ff.sharded_adam, ff.sgd])
def test_compiled_it_is_near_the_step(make):
    optimizer = make(0.01)
    step = train_step(chain(), optimizer)
    run = ff.donate(ff.jit(ff.remat(step), whole_step=True))
    params = layers(2, make=floats)
    states = [
        ff.TrainState(ff.tree.map(torch.clone, params), optimizer.init(params))
        for _ in range(2)
    ]
    for _ in range(4):
        states[0], found = run(states[0], X)
        states[1], expected = step(states[1], X)
        close(found, expected, 1e-5)
    close(states[0], states[1], 1e-4)


@pytest.mark.processes
def test_compiled_over_processes_it_is_near_and_sends_the_same(processes):
    zeros = "013" if LONG_TESTS else "03"  # the ends: whole, and all in parts
    printed = processes(
        """
        import sys, torch, fsfunc as ff
        from tests.models import chain, train_step

        mesh, optimizer = ff.make_mesh({"data": 2}), ff.sharded_adam(0.01)
        train = train_step(chain(), optimizer)
        x = ff.local_batch(torch.randn(8, 8), mesh, "data")
        params = [{"w": torch.eye(8) + 0.1} for _ in range(3)]

        def run(wrap, zero, rows=(4,) * 4):
            step = ff.donate(wrap(ff.shard(ff.remat(train), mesh, "data", zero=zero)))
            state = ff.init_state(step, params, optimizer, x)
            for n in rows:
                with ff.ledger() as log:
                    state, value = step(state, x[:n])
            return ff.unshard(state.params), value, log.table()

        # One rank runs the step as it is, while the other has a graph already.
        rows = (4,) * 5 if mesh.rank == 0 else (4, 4, 2, 2, 3)
        eager = lambda f: ff.jit(f, whole_step=True, backend="eager")
        *found, sent = run(eager, 3, rows)
        *expected, planned = run(lambda f: f, 3, rows)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        assert sent == planned, (sent, planned)

        for zero in map(int, sys.argv[1:]):
            *found, sent = run(lambda f: ff.jit(f, whole_step=True), zero)
            *expected, planned = run(lambda f: f, zero)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
            assert sent == planned, (sent, planned)
            print("near", zero)
        """,
        2,
        *zeros,
        timeout=300,
    )
    assert printed.count("near") == 2 * len(zeros), printed
