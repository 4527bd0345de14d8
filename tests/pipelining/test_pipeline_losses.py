"""Losses that are easy to get wrong when cut into stages, one by one."""

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
    batch_of,
    join,
    layer,
    through,
)

SCHEDULES = ("1f1b", "zb_h1", "interleaved", "zb_v")
MESH = ff.make_mesh({"pipe": 2}, "simulated")
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


def views(params, batch):
    """Slices, transposes and views of outputs, on both sides of a cut."""
    h = layer(params["layers"][0], batch["x"])
    left, right = h.chunk(2, -1)
    h = layer(params["layers"][1], torch.cat([right, left], -1))
    h = layer(params["layers"][2], h.t().t().view(-1, WIDTH))
    h = layer(params["layers"][3], h.unflatten(-1, (2, 2)).transpose(1, 2).flatten(1))
    return (h * batch["y"]).mean()


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


def second_order_inside(params, batch):
    """A unit that differentiates within itself."""
    h = through(params, batch["x"], slopes)
    return (h * batch["y"]).mean()


@ff.unit
def slopes(p, x):
    return torch.func.vjp(lambda y: (y * y) @ p["w"], x)[1](x)[0]


LOSSES = (
    teacher, every_distance, of_the_batch_alone, on_no_unit, constant, in_place, views,
    of_keywords, transposed, second_order_inside,
)  # fmt: skip


def piped(f, m=2, schedule="1f1b", **options):
    how, _ = NAMED[schedule]
    return ff.pipeline(f, MESH, "pipe", n_microbatches=m, schedule=how, **options)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's, of a stand-in
@pytest.mark.parametrize(
    ("loss", "schedule"),
    [(loss, SCHEDULES[k % 4]) for k, loss in enumerate(LOSSES)],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_it_equals_one_device(loss, schedule):
    params, batch = parameters(), batch_of(4, 3)
    torch.manual_seed(0)
    expected = ff.accumulate(ff.value_and_grad(loss), 2)(params, batch)
    after = torch.rand(3)
    some = [any(g.any() for g in tree.leaves(p) if g is not None)
            for p in expected[1]["layers"]]  # fmt: skip
    assert any(some) != (loss in (on_no_unit, constant))  # data are not trivial
    grad = piped(ff.value_and_grad(loss), 2, schedule)
    torch.manual_seed(0)

    def main():
        placed = ff.place(grad, params, batch)
        value, grads = grad(placed, batch)
        drawn = torch.rand(3)  # the generator goes on as on one device
        again = grad(params, batch)[0]
        return value, ff.unshard(grads), drawn, again

    for value, grads, drawn, again in ff.spmd(main, MESH)():
        same((value, grads, drawn), (*expected, after))
        same(again, value)


def by_tokens(params, batch):
    """Those that count are few in one microbatch and many in another."""
    counts = (batch["y"] > 0).to(torch.float64)
    return ff.Weighted((through(params, batch["x"]) * counts).sum(), counts.sum())


def two_calls(params, batch):
    """Two gradient calls in one step, of two losses."""
    first = ff.value_and_grad(every_distance)(params, batch)
    return first, ff.value_and_grad(views)(params, batch)


MORE = {"weights": torch.arange(6.0, dtype=torch.float64), "scale": 2}
KEYWORDS = ff.value_and_grad(of_keywords, batch_argnums=(1, "weights"))


@pytest.mark.parametrize(
    ("step", "m", "rows", "keywords"),
    [
        (KEYWORDS, 3, 6, MORE),
        (ff.value_and_grad(by_tokens), 3, 7, {}),
        (two_calls, 2, 4, {}),
    ],
    ids=["keywords", "weights by the data", "two calls"],
)
def test_keywords_are_cut_too(step, m, rows, keywords):
    args = parameters(), batch_of(rows, 3)
    one = step if rows % m else ff.accumulate(step, m)
    expected = one(*args, **keywords)
    found = ff.spmd(lambda: piped(step, m)(*args, **keywords), MESH)()
    same(list(found), [expected] * 2)


def test_random_numbers_between_units_are_drawn_by_the_one_stage_that_uses_them():
    def loss(params, batch):
        h = layer(params["layers"][1], layer(params["layers"][0], batch["x"]))
        h = layer(params["layers"][2], h + torch.randint(0, 2, h.shape))
        return (layer(params["layers"][3], h) * batch["y"]).mean()

    params, batch = parameters(), batch_of(4, 3)
    grad = piped(ff.value_and_grad(loss), 2, stages=[2, 2])

    def main():
        torch.manual_seed(4)
        first = grad(params, batch)
        torch.manual_seed(4)
        return first, grad(params, batch), grad(params, batch)

    outs = ff.spmd(main, MESH)()
    same(outs[0], outs[1])
    first, again, other = outs[0]
    same(again, first)
    assert not torch.equal(other[0], first[0])


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
    grad = piped(call, 2, "zb_v")

    def main():
        given = ff.place(lambda t: grad(t[0], batch, t[1], scale), (base, params))
        leaves = tree.leaves(given, is_leaf=ff.is_sharded)
        value, grads = grad(given[0], batch, given[1], scale)
        return value, ff.unshard(grads), sum(map(ff.is_sharded, leaves))

    for value, grads, owned in ff.spmd(main, MESH)():
        same((value, grads), expected)
        assert owned == 4 * CALLS


@ff.unit
def frozen_layer(p, x):
    return layer.fn(p["own"], x) + x @ p["frozen"]["w"] * p["frozen"]["n"].sum()


def test_a_forward_pass_returns_rows_joined():
    def predict(params, batch):
        h = through(params, batch["x"])
        return {"rows": h, "best": h.argmax(-1), "mean": h.mean(), "text": "text"}

    params, batch = parameters(), batch_of(5, 3)
    with torch.no_grad():
        expected = predict(params, batch)
    for found in ff.spmd(lambda: piped(predict, 3)(params, batch), MESH)():
        close(found, expected, 1e-12)


def test_a_schedule_of_forwards_evaluates():
    params, batch = parameters(), batch_of(4, 3)
    rows = ["F0 F1", "F0 F1"]
    run = ff.pipeline(views, MESH, "pipe", n_microbatches=2, schedule=rows)
    expected = views(params, batch).detach()
    same(list(ff.spmd(lambda: run(params, batch), MESH)()), [expected] * 2)


def test_sums_too_narrow_for_so_many_microbatches_are_told():
    """Else 600 gradients of 1 in bfloat16 are 256."""
    first, second = (ff.unit(lambda w, x: w * x) for _ in range(2))
    loss = lambda ws, x: second(ws[1], first(ws[0], x)).float().mean()  # noqa: E731
    f = ff.pipeline(ff.value_and_grad(loss), MESH, "pipe", n_microbatches=128)
    ws, x = list(torch.ones(2, dtype=torch.bfloat16)), torch.ones(128)
    with pytest.warns(UserWarning, match="128 microbatches are added in .*bfloat16"):
        ff.spmd(lambda: f(ff.place(f, ws, x), x), MESH)()
