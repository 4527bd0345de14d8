"""Losses that are easy to get wrong when cut into stages, one by one."""

import functools

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from tests.checks import close, same
from tests.pipelining.models import (
    NAMED,
    WIDTH,
    Spec,
    Step,
    bare,
    batch_of,
    chain,
    drop,
    identity,
    join,
    layer,
    nested,
    through,
)

S = ff.schedules
SCHEDULES = ("1f1b", "zb_h1", "interleaved", "zb_v")
CALLS = 4


def parameters():
    return Spec((Step(),) * CALLS).params(5)


def teacher(params, batch):
    """Units under no_grad: what they give needs no gradient, on whichever stage."""
    with torch.no_grad():
        aim = layer(params["layers"][0], batch["x"])
    h = layer(params["layers"][1], batch["x"])
    h = layer(params["layers"][2], layer(params["layers"][3], h))
    return ((h - aim) * batch["y"]).mean()


def every_distance(params, batch):
    """Each unit takes the outputs of all before."""
    seen = [batch["x"]]
    for p in params["layers"]:
        seen.append(join(p, seen[-1], sum(seen)))
    return (sum(seen) * batch["y"]).mean()


def without_the_last(params, batch):
    """The loss reads none of the last two units, whose gradients are zeros."""
    h = layer(params["layers"][1], layer(params["layers"][0], batch["x"]))
    layer(params["layers"][3], layer(params["layers"][2], h))
    return (h * batch["y"]).mean()


def of_the_batch_alone(params, batch):
    """Nothing travels, though there are stages."""
    found = [layer(p, batch["x"]) for p in params["layers"]]
    return (found[-1] * batch["y"]).mean() + params["gain"].sum()


def on_no_unit(params, batch):
    """The loss reads no unit at all."""
    through(params, batch["x"])
    return (params["gain"] * batch["y"]).mean()


def constant(params, batch):
    """The loss depends on no parameter."""
    through(params, batch["x"])
    return batch["y"].mean()


def everything_tied(params, batch):
    """One leaf in all units and in the glue."""
    p = params["layers"][0]
    h = batch["x"]
    for _ in range(CALLS):
        h = layer(p, h) * p["b"]
    return (h * batch["y"]).mean()


def in_place(params, batch):
    """What one stage writes into is what another has saved, and a third reads."""
    first = layer(params["layers"][0], batch["x"])
    second = join(params["layers"][1], first, first)
    first = first + 0
    first.add_(second)
    second[:, 1:].mul_(2)
    third = layer(params["layers"][2], second)
    third += first
    return ((layer(params["layers"][3], third) + second) * batch["y"]).mean()


def written_output(params, batch):
    """An output that is written into is seen changed by all who read it later."""
    h = layer(params["layers"][0], batch["x"])
    kept = h
    h.add_(1)
    a = layer(params["layers"][1], h)
    h.mul_(2)
    b = layer(params["layers"][2], kept)
    return (layer(params["layers"][3], a + b + kept) * batch["y"]).mean()


def views(params, batch):
    """Slices, transposes and views of outputs, on both sides of a cut."""
    h = layer(params["layers"][0], batch["x"])
    left, right = h.chunk(2, -1)
    h = layer(params["layers"][1], torch.cat([right, left], -1))
    h = layer(params["layers"][2], h.t().t().view(-1, WIDTH))
    h = layer(params["layers"][3], h.unflatten(-1, (2, 2)).transpose(1, 2).flatten(1))
    return (h * batch["y"]).mean()


def a_mask_that_travels(params, batch):
    """Booleans and integers of one unit, which two others read."""
    out = signs(params["layers"][0], batch["x"])
    h = layer(params["layers"][1], out["h"]) * out["positive"]
    h = layer(params["layers"][2], h)[:, :1] + params["layers"][3]["w"][out["best"]]
    h = layer(params["layers"][3], h.masked_fill(out["positive"], 1.0))
    return (h * batch["y"]).mean()


@ff.unit
def signs(p, x):
    h = x @ p["w"]
    return {"h": h, "positive": h > 0, "best": h.argmax(-1)}


def one_inside_another(params, batch):
    inner = [params["layers"][1], params["layers"][2]]
    h = layer(params["layers"][0], batch["x"])
    h = nested({"inner": inner, "shift": params["tied"]}, h)
    h = bare(None, h)
    return (identity(None, layer(params["layers"][3], h)) * batch["y"]).mean()


def of_keywords(params, batch, *, weights=None, scale=1):
    h = through(params, batch["x"])
    if weights is not None:
        h = h * weights[:, None]
    return (h * batch["y"]).mean() * scale * batch["scale"]


def transposed(params, batch):
    """Outputs that are not contiguous travel, and so do their gradients."""
    h = batch["x"]
    for p in params["layers"]:
        h = turned(p, h).mT + 1
    return (h * batch["y"]).mean()


turned = ff.unit(lambda p, x: (x @ p["w"]).t())


def expanded(params, batch):
    """The gradient of a sum is one number at every place."""
    h = through(params, batch["x"])
    return h.sum() / 16


def a_scalar_travels(params, batch):
    h = layer(params["layers"][0], batch["x"])
    size = total(params["layers"][1], h)
    h = layer(params["layers"][2], h) * size
    return (layer(params["layers"][3], h) * batch["y"]).mean()


total = ff.unit(lambda p, x: (x * p["b"]).sum() / 4)


def second_order_inside(params, batch):
    """A unit that differentiates within itself."""
    h = through(params, batch["x"], slopes)
    return (h * batch["y"]).mean()


@ff.unit
def slopes(p, x):
    return torch.func.vjp(lambda y: (y * y) @ p["w"], x)[1](x)[0]


def with_dropout(params, batch):
    return chain(params, batch, drop)


LOSSES = (
    teacher, every_distance, without_the_last, of_the_batch_alone, on_no_unit,
    constant, everything_tied, in_place, written_output, views, a_mask_that_travels,
    one_inside_another, of_keywords, transposed, expanded, a_scalar_travels,
    second_order_inside, with_dropout,
)  # fmt: skip


def pipelined(f, m=2, schedule="1f1b", **options):
    mesh = ff.make_mesh({"pipe": 2}, "simulated")
    how, _ = NAMED[schedule]
    return mesh, ff.pipeline(f, mesh, "pipe", n_microbatches=m, schedule=how, **options)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's, of a stand-in
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_it_equals_one_device(loss, schedule):
    params, batch = parameters(), batch_of(4, 3)
    torch.manual_seed(0)
    expected = ff.accumulate(ff.value_and_grad(loss), 2)(params, batch)
    mesh, grad = pipelined(ff.value_and_grad(loss), 2, schedule)
    torch.manual_seed(0)

    def main():
        placed = ff.place(grad, params, batch)
        value, grads = grad(placed, batch)
        again = grad(params, batch)[0]
        return value, ff.unshard(grads), again

    for value, grads, again in ff.spmd(main, mesh)():
        same((value, grads), expected)
        if loss is not with_dropout:  # whose masks are drawn anew
            same(again, value)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_value_may_have_several_consumers_on_its_own_rank(ranks):
    """Of eight stages on two ranks, four take what the first one makes."""
    deep = {"layers": parameters()["layers"] * 2}
    batch = batch_of(4, 3)
    call = ff.value_and_grad(every_distance)
    expected = ff.accumulate(call, 2)(deep, batch)
    mesh = ff.make_mesh({"pipe": ranks}, "simulated")
    for schedule in (S.interleaved_1f1b, S.looped_bfs):
        how = functools.partial(schedule, chunks=8 // ranks)
        grad = ff.pipeline(call, mesh, "pipe", n_microbatches=2, schedule=how)
        for found in ff.spmd(lambda g=grad: g(deep, batch), mesh)():
            same(found, expected)


def test_data_are_not_trivial():
    """Every loss that could has a gradient for each layer."""
    params, batch = parameters(), batch_of(4, 3)
    for loss in LOSSES:
        _, grads = ff.value_and_grad(loss)(params, batch)
        some = [any(g.any() for g in tree.leaves(p) if g is not None)
                for p in grads["layers"]]  # fmt: skip
        if loss in (on_no_unit, constant):
            assert not any(some)
        else:
            assert any(some), loss.__name__


def test_keywords_are_cut_too():
    params, batch = parameters(), batch_of(6, 3)
    more = {"weights": torch.arange(6.0, dtype=torch.float64), "scale": 2}
    loss = ff.value_and_grad(of_keywords, batch_argnums=(1, "weights"))
    expected = ff.accumulate(loss, 3)(params, batch, **more)
    mesh, grad = pipelined(loss, 3)
    for found in ff.spmd(lambda: grad(params, batch, **more), mesh)():
        same(found, expected)


def test_a_weight_may_depend_on_the_data():
    """Tokens that count are few in one microbatch and many in another."""

    def loss(params, batch):
        counts = (batch["y"] > 0).to(torch.float64)
        h = through(params, batch["x"])
        return ff.Weighted((h * counts).sum(), counts.sum())

    params, batch = parameters(), batch_of(7, 3)
    expected = ff.value_and_grad(loss)(params, batch)
    mesh, grad = pipelined(ff.value_and_grad(loss), 3)
    for found in ff.spmd(lambda: grad(params, batch), mesh)():
        same(found, expected)


def test_floats_agree_closely():
    draw = torch.Generator().manual_seed(0)
    layers = [
        {"w": torch.randn(WIDTH, WIDTH, generator=draw), "b": torch.ones(WIDTH)}
        for _ in range(8)
    ]
    batch = {k: torch.randn(10, WIDTH, generator=draw) for k in "xy"}

    def loss(params, batch):
        h = through(
            {"layers": params}, batch["x"], lambda p, x: torch.tanh(layer(p, x))
        )
        return (h - batch["y"]).square().mean()

    expected = ff.value_and_grad(loss)(layers, batch)
    for schedule in NAMED:
        mesh, grad = pipelined(ff.value_and_grad(loss), 4, schedule)
        for found in ff.spmd(lambda g=grad: g(layers, batch), mesh)():
            close(found, expected, 2e-6)


def test_random_numbers_between_units_are_drawn_by_the_one_stage_that_uses_them():
    def loss(params, batch):
        h = layer(params["layers"][1], layer(params["layers"][0], batch["x"]))
        h = layer(params["layers"][2], h + torch.randint(0, 2, h.shape))
        return (layer(params["layers"][3], h) * batch["y"]).mean()

    params, batch = parameters(), batch_of(4, 3)
    mesh, grad = pipelined(ff.value_and_grad(loss), 2, stages=[2, 2])

    def main():
        torch.manual_seed(4)
        first = grad(params, batch)
        torch.manual_seed(4)
        return first, grad(params, batch), grad(params, batch)

    outs = ff.spmd(main, mesh)()
    same(outs[0], outs[1])
    first, again, other = outs[0]
    same(again, first)
    assert not torch.equal(other[0], first[0])


def test_the_default_generator_goes_on_as_on_one_device():
    params, batch = parameters(), batch_of(4, 3)
    torch.manual_seed(0)
    ff.value_and_grad(with_dropout)(params, batch)
    expected = torch.rand(3)
    mesh, grad = pipelined(ff.value_and_grad(with_dropout))

    def main():
        torch.manual_seed(0)
        grad(params, batch)
        return torch.rand(3)

    for found in ff.spmd(main, mesh)():
        same(found, expected)


def test_several_arguments_and_frozen_leaves():
    """Integers are not differentiated; nor are leaves of another, placed argument."""

    def loss(base, batch, p, scale):
        h = batch["x"]
        for q, frozen in zip(p["layers"], base, strict=True):
            h = frozen_layer({"own": q, "frozen": frozen}, h) * scale
        return (h * batch["y"]).mean()

    params, batch = parameters(), batch_of(4, 3)
    base = [{"w": q["w"] + 1, "n": torch.tensor([1, 2])} for q in params["layers"]]
    scale = torch.tensor(2.0, dtype=torch.float64)
    call = ff.value_and_grad(loss, (2, 3), batch_argnums=1)
    expected = call(base, batch, params, scale)
    for schedule in SCHEDULES:
        mesh, grad = pipelined(call, 2, schedule)

        def main(grad=grad):
            given = ff.place(lambda t: grad(t[0], batch, t[1], scale), (base, params))
            owned = [x for x in tree.leaves(given, is_leaf=ff.is_sharded)
                     if ff.is_sharded(x)]  # fmt: skip
            value, grads = grad(given[0], batch, given[1], scale)
            return value, ff.unshard(grads), len(owned)

        for value, grads, owned in ff.spmd(main, mesh)():
            same((value, grads), expected)
            assert owned == 4 * CALLS


@ff.unit
def frozen_layer(p, x):
    return layer.fn(p["own"], x) + x @ p["frozen"]["w"] * p["frozen"]["n"].sum()


def test_a_pipelined_loss_may_be_differentiated_inside_a_step_of_any_shape():
    """Two gradient calls in one step, of two losses."""

    def step(params, batch):
        first = ff.value_and_grad(every_distance)(params, batch)
        second = ff.value_and_grad(views)(params, batch)
        return first, second

    params, batch = parameters(), batch_of(4, 3)
    expected = ff.accumulate(step, 2)(params, batch)
    mesh, run = pipelined(step)
    for found in ff.spmd(lambda: run(params, batch), mesh)():
        same(found, expected)


def test_evaluation_in_another_cut_reads_a_placed_state():
    """Forward alone, by the schedule of training; on rows that M does not divide."""
    params, batch = parameters(), batch_of(5, 3)
    with torch.no_grad():
        expected = views(params, batch)
    for schedule in SCHEDULES:
        mesh, grad = pipelined(ff.value_and_grad(views), 2, schedule)
        _, evaluate = pipelined(views, 4, schedule)

        def main(grad=grad, evaluate=evaluate):
            placed = ff.place(grad, params, batch)
            found = evaluate(placed, batch)
            return found, found.requires_grad

        for found, tracked in ff.spmd(main, mesh)():
            close(found, expected, 1e-12)
            assert not tracked


def test_a_forward_pass_returns_rows_joined():
    def predict(params, batch):
        h = through(params, batch["x"])
        return {"rows": h, "best": h.argmax(-1), "mean": h.mean(), "text": "text"}

    params, batch = parameters(), batch_of(5, 3)
    expected = predict(params, batch)
    mesh, run = pipelined(predict, 3)
    for found in ff.spmd(lambda: run(params, batch), mesh)():
        close(found, tree.map(_detached, expected), 1e-12)


def test_a_schedule_of_forwards_evaluates():
    params, batch = parameters(), batch_of(4, 3)
    mesh = ff.make_mesh({"pipe": 2}, "simulated")
    run = ff.pipeline(
        views, mesh, "pipe", n_microbatches=2, schedule=["F0 F1", "F0 F1"]
    )
    expected = views(params, batch).detach()
    same(list(ff.spmd(lambda: run(params, batch), mesh)()), [expected] * 2)


def _detached(x):
    return x.detach() if isinstance(x, torch.Tensor) else x
