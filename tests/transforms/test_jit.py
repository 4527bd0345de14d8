"""jit: the step of compiled units is the plain step, in what it sends and holds too."""

import re

import pytest
import torch

import fsfunc as ff
from tests.checks import close, same
from tests.core.test_compiled import (
    BATCH,
    RAN,
    STACKS,
    STEPS,
    UNITS,
    WIDTH,
    counted,
    forgotten,  # noqa: F401  # a fixture that each test has
    loss_of,
    params,
    plain,
    shard,
    trained,
    watching_gathers,
)
from tests.models import floats

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]
SLOW = pytest.mark.slow  # the real compiler


ORDERS = ["jit around", "jit within"]  # by turns, and both of one
BY_TURNS = [(stack, ORDERS[i % 2]) for i, stack in enumerate(STACKS)]
BY_TURNS += [(stack, ORDERS[1 - i % 2]) for i, stack in enumerate(STACKS)][:1]


@pytest.mark.parametrize(("stack", "order"), BY_TURNS)
def test_a_jitted_step_is_the_plain_one(stack, order):
    """The same bits, and the same record of what was sent, call by call."""
    transform, mesh = STACKS[stack]
    jit = lambda f: ff.jit(f, backend=counted)  # noqa: E731
    if order == "jit around":
        mine = lambda step: jit(transform(step))  # noqa: E731
    else:
        mine = lambda step: transform(jit(step))  # noqa: E731
    expected = trained(loss_of(plain), transform, mesh)
    assert not RAN
    same(trained(loss_of(plain), mine, mesh), expected)
    assert len(RAN) >= STEPS * UNITS


def of(*shapes, seed=0):
    return [
        floats(*shape, seed=seed + i, dtype=torch.float64)
        for i, shape in enumerate(shapes)
    ]


def test_equal_layers_and_steps_compile_once_and_another_shape_once_more():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return counted(graph, inputs)

    def loss(params, x):  # the first layer's input is differentiated, as the others'
        return loss_of(plain)(params["layers"], x * params["scale"])

    step = ff.jit(ff.value_and_grad(loss), backend=backend)
    given = {"layers": params(), "scale": of((WIDTH,))[0]}
    for rows, made in (8, 1), (8, 1), (4, 2), (8, 2):
        step(given, BATCH[:rows])
        assert len(graphs) == made


def branches(p, x):
    return x @ p if x.sum() > 0 else x


def nested(p, x):
    return plain(p, x) * 2


REFUSED = {
    "a value": (
        ff.unit(branches), {}, RuntimeError,
        r"test_jit.py.*unit 'branches' cannot be compiled.*only=",
    ),
    "a unit of units": (
        ff.unit(nested), {}, RuntimeError, r"unit 'nested' cannot be compiled.*only=",
    ),
    "names that are kept": (
        ff.unit(lambda p, x: ff.checkpoint_name(x @ p, "h")),
        {"policy": ff.SaveOnly("h")}, ValueError, "keeps values by name",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_compile_is_refused(case):
    unit, remat, error, said = REFUSED[case]
    loss = ff.jit(lambda p, x: unit(p, x).sum(), backend=counted)
    loss = ff.remat(loss, **remat) if remat else loss
    w = {"up": of((3, 3))[0], "down": of((3, 3))[0]}
    given = w if case == "a unit of units" else w["up"]
    with pytest.raises(error, match=re.compile(said, re.DOTALL)):
        ff.value_and_grad(loss)(given, of((2, 3))[0])


def test_numbers_that_change_come_to_a_limit_that_says_so():
    def tempered(numbers):
        unit = ff.unit(lambda p, x, k: x @ p["up"] * k)
        loss = lambda p, k: unit(p, BATCH, k).sum()  # noqa: E731
        step = ff.jit(ff.value_and_grad(loss), backend=counted)
        return [step(params()[0], k) for k in numbers]

    numbers = [k / 3 for k in range(4)]
    with torch._dynamo.config.patch(recompile_limit=2):
        with pytest.raises(Exception, match="(?s)'<lambda>' cannot.*as a tensor"):
            tempered(numbers)
        torch._dynamo.reset()
        tempered([torch.tensor(k, dtype=torch.float64) for k in numbers])


def test_only_the_units_that_are_meant_compile():
    outer = ff.unit(nested)
    w, x = params()[0], BATCH
    plainly = ff.value_and_grad(lambda p, x: outer(p, x).sum())
    for only in ("**/layer", ["nothing", "nested/layer"]):
        RAN.clear()
        found = ff.jit(plainly, only=only, backend=counted)(w, x)
        same(found, plainly(w, x))
        assert len(RAN) == 1
    ff.jit(plainly, only="layer", backend=counted)(w, x)
    assert len(RAN) == 1, "of a unit within another"


@pytest.mark.parametrize(
    ("stack", "backend"),
    [pytest.param("zero=3", "inductor", marks=SLOW), ("zero=3 remat", "aot_eager")],
)
def test_what_a_jitted_unit_gathered_goes_after_its_forward(
    monkeypatch, stack, backend
):
    """At the end of the forward a rank's last buffer is alive, and gathered again."""
    alive, look = watching_gathers(monkeypatch)
    transform, mesh = STACKS[stack]
    jitted = lambda step: ff.jit(transform(step), backend=backend)  # noqa: E731
    losses, _, sent = trained(loss_of(plain, after=look), jitted, mesh)
    assert alive[-2 * STEPS :] == [2] * (2 * STEPS)  # of two ranks each
    expected = trained(loss_of(plain), transform, mesh)
    torch.testing.assert_close(losses, expected[0])
    assert sent == expected[2]


@SLOW
def test_fused_kernels_train_as_the_plain_functions_do():
    """By the real compiler, over ranks and with a recompute, near the plain numbers."""
    stack = lambda step: shard(ff.remat(step))  # noqa: E731
    expected = trained(loss_of(plain), stack)
    found = trained(loss_of(plain), lambda step: ff.jit(stack(step)))
    close(found[:2], expected[:2])
    assert found[2] == expected[2]


def test_a_unit_that_calls_a_collective_is_refused_in_words_that_help():
    """It runs if it is left out, and in a step that is compiled whole."""
    mesh = ff.make_mesh({"data": 2}, "simulated")

    def norm(w, x):
        return (x - ff.pmean(x.mean(0), "data")) * w

    def scale(w, x):
        return torch.tanh(x * w)

    norm, scale = ff.unit(norm), ff.unit(scale)
    step = ff.value_and_grad(lambda p, x: norm(p[0], scale(p[1], x)).square().mean())
    params, x = [torch.ones(3), torch.ones(3)], torch.arange(12.0).view(4, 3) / 12

    def ran(made):
        def main():
            mine = ff.local_batch(x, mesh, "data")
            placed = ff.place(made, params, mine)
            for _ in range(2):
                out = made(placed, mine)
            return ff.unshard(out)

        return ff.spmd(main, mesh)()

    expected = ran(ff.shard(step, mesh, "data"))
    with pytest.raises(
        ValueError, match=r"'norm', called at .*py:\d+, .* only=.*whole_"
    ):
        ran(ff.shard(ff.jit(step, backend=counted), mesh, "data"))
    left_out = ff.shard(ff.jit(step, backend=counted, only="scale"), mesh, "data")
    whole = ff.jit(ff.shard(step, mesh, "data"), whole_step=True, backend="eager")
    for made in (left_out, whole):
        for found in ran(made):
            close(found, expected[0])
