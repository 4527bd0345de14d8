"""A program reads like its loss, counts its costs, and refuses what no stage can do.

That what it says feeds what is right, pipelines of drawn losses show.
"""

import re

import pytest
import torch
from torch.nn import functional as F

import fsfunc as ff
from fsfunc.tracing.programs import Spec, Value

# Listings


@ff.unit
def embed(p, tokens):
    return p["table"][tokens]


@ff.unit
def block(p, h, mask=None, *, scale=1):
    return {"h": torch.tanh(h @ p["w"]) * scale, "mask": mask}


@ff.unit
def head(p, h):
    return h @ p["table"].T


def model(count=2):
    return {
        "embed": {"table": torch.ones(5, 4)},
        "blocks": [{"w": torch.ones(4, 4)} for _ in range(count)],
    }


TOKENS = {"tokens": torch.zeros(2, 3, dtype=torch.long)}


def language(params, batch, *, scale=2):
    mask = batch["tokens"] > 0
    h = first = embed(params["embed"], batch["tokens"])
    for p in params["blocks"]:
        out = block(p, h, mask, scale=scale)
        h, mask = out["h"], out["mask"]
    with torch.no_grad():
        spread = h.std()
    h = h + 0.5 * first
    h[0] = 1
    logits = head(params["embed"], h)
    loss = logits.mean() + params["blocks"][0]["w"].sum()
    return ff.Weighted(loss, 6), {"spread": spread, "name": "x"}


LISTING = """\
language: 4 unit calls
  g0 = gt(batch/tokens, 0)
%0 = embed(params/embed, batch/tokens) -> f32[2, 3, 4]
%1 = block(params/blocks/0, %0, g0, scale=2) -> {h: f32[2, 3, 4], mask: bool[2, 3]}
%2 = block(params/blocks/1, %1/h, %1/mask, scale=2) -> {h: f32[2, 3, 4], mask: bool[2, 3]}
  g1 = std(%2/h)  # no grad
  g2 = mul(%0, 0.5)
  g3 = add(%2/h, g2)
  g4 = lift_fresh(captured f32[])
  g5 = select(g3, 0, 0)
  g6 = fill_(g5, g4)
  g7 = select(g3, 0, 0)
%3 = head(params/embed, g3) -> f32[2, 3, 5]
  g8 = mean(%3)
  g9 = sum(params/blocks/0/w)
  g10 = add(g8, g9)
loss = [{total: g10, weight: 6}, {name: 'x', spread: g1}] -> \
[{total: f32[], weight: 6}, {name: 'x', spread: f32[]}]\
"""  # noqa: E501


def test_a_program_reads_like_the_loss():
    assert str(ff.program(language, model(), TOKENS)) == LISTING


add_one = ff.unit(lambda p, x: x + p)
add_one.__name__ = "add_one"


def here():
    """This file, as a pattern for a line of it."""
    return re.escape(__file__) + r":\d+"


def writes_parameter(p, x):
    with torch.no_grad():
        p["w"].add_(1)
    return add_one(p["w"], x).sum()


def writes_batch(p, x):
    x[0] = 0
    return add_one(p["w"], x).sum()


CAPTURED = torch.zeros(2)


def writes_captured(p, x):
    CAPTURED.add_(1)
    return add_one(p["w"], x).sum()


def unit_writes_captured(p, x):
    def counting(p, x):
        CAPTURED.add_(1)
        return x * p

    return ff.unit(counting)(p["w"], x).sum()


def norms_captured(p, x):
    def norm(p, x):
        return F.batch_norm((x * p).expand(3, 2), CAPTURED, CAPTURED, training=True)

    return ff.unit(norm)(p["w"], x).sum()


def writes_shared(p, x):
    h = add_one(p["w"], x)
    same = ff.unit(lambda p, x: x)
    same.__name__ = "same"
    same(p["w"], h)
    h.mul_(2)
    return h.sum()


def writes_twin(p, x):
    twins = ff.unit(lambda p, x: (x * p).split(1))
    twins.__name__ = "twins"
    a, b = twins(p["w"], x)
    return (a.add_(1) + b).sum()


def hides(p, x):
    class Box:
        x: torch.Tensor

    boxed = Box()
    boxed.x = x
    return ff.unit(lambda p, x: boxed)(p["w"], x).x


def draws_true_values(p, x):
    return picky(p["w"], x).sum()


@ff.unit
def picky(p, x):
    if x.sum() > 0:
        raise ValueError("too large")
    return x


def gradient_inside(p, x):
    return ff.value_and_grad(lambda p: add_one(p, x).sum())(p["w"])[0]


def gradient_of_the_batch(p, x):
    return ff.value_and_grad(lambda x: add_one(p["w"], x).sum())(x)[0]


def mapped(p, x):
    return torch.func.vmap(lambda x: add_one(p["w"], x))(x).sum()


MAPS = rf"maps unit 'add_one', at {here()}"
REFUSED = {  # what every stage would do again, and what cannot be cut
    writes_parameter: rf"writes in place into 'p/w', at {here()}: .* clone",
    writes_batch: rf"writes in place into 'x', at {here()}",
    writes_captured: rf"the loss writes .* captured .* \(2,\), at {here()}",
    unit_writes_captured: rf"unit 'counting' writes .* \(2,\), at {here()}",
    norms_captured: rf"unit 'norm' writes .* \(2,\), at {here()}",
    writes_shared: rf"at {here()}, into memory .* of unit 'same' shares",
    writes_twin: rf"at {here()}, into memory .* of unit 'twins' shares",
    draws_true_values: rf"'picky' .* {here()} .*too large.*where",
    gradient_inside: MAPS,
    gradient_of_the_batch: MAPS,
    mapped: MAPS,
    hides: "Box that holds a tensor out of sight",
}


@pytest.mark.parametrize("loss", REFUSED, ids=lambda f: f.__name__)
def test_what_no_stage_can_do_alone_is_refused(loss):
    with pytest.raises((RuntimeError, TypeError), match=REFUSED[loss]):
        ff.program(loss, {"w": torch.ones(2)}, torch.ones(2))
    assert CAPTURED.tolist() == [0, 0]
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


ASKS = {
    "item": lambda x: x * x.sum().item(),
    "if": lambda x: x if x.sum() > 0 else 2 * x,
    "mask": lambda x: x[x > 0],
    "list": lambda x: torch.tensor(x.tolist()),
    "numpy": lambda x: x * float(x.detach().numpy()[0]),
}


@pytest.mark.parametrize("kind", ASKS)
def test_glue_that_asks_for_a_value_is_told_where(kind):
    def loss(p, x):
        return ASKS[kind](add_one(p, x)).sum()

    with pytest.raises(RuntimeError, match=rf"value at {here()}.*Move it into a unit"):
        ff.program(loss, torch.ones(2), torch.ones(2))


@pytest.mark.parametrize("kind", sorted(set(ASKS) - {"mask"}))
def test_in_a_unit_a_value_may_be_asked_for(kind):
    unit = ff.unit(lambda p, x: (ASKS[kind](x * p), x))

    def loss(p, x):
        y, x = unit(p, add_one(p, x))
        return add_one(p, y).sum()

    shown = ff.program(loss, torch.ones(2), torch.ones(2))
    first, second = shown.calls[1].outputs.leaves
    expected = ASKS[kind](torch.ones(2, requires_grad=True)).requires_grad
    assert first == Spec((2,), torch.float32, expected)
    assert second == Spec((2,), torch.float32, True)
    assert [c.needs for c in shown.calls[1:]] == [{Value(0, 0)}, {Value(1, 0)}]


# Random numbers, costs, and what is left alone


def test_draws_between_units_are_followed():
    def loss(p, x):
        h = add_one(p, F.dropout(x, 0.5))
        noise = torch.randn(2)
        h = add_one(p, h + noise)
        return (add_one(p, h) * noise).sum()

    torch.manual_seed(3)
    before = torch.get_rng_state()
    shown = ff.program(loss, torch.ones(2), torch.ones(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert [d.op for d in shown.draws] == ["bernoulli_", "randn"]
    assert all(re.fullmatch(here(), d.line) for d in shown.draws)
    users = (*shown.calls, shown.loss)
    assert [u.origins.draws for u in users] == [{0}, {1}, set(), {1}]


def test_costs_are_counted():
    @ff.unit
    def attend(p, x):
        q, k, v = (x @ p["qkv"]).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)

    @ff.unit
    def double(p, x):
        return x.square()

    n, t, d = 3, 5, 8
    params = {"qkv": torch.ones(d, 3 * d)}
    call, other = ff.program(
        lambda p, x: double(p, attend(p, x)), params, torch.ones(n, t, d)
    ).calls
    assert call.flops == 2 * n * t * d * 3 * d + 2 * 2 * n * t * t * d
    assert call.weights == other.weights == 4 * d * 3 * d
    assert other.flops == 0
    assert other.activations == 4 * n * t * d  # the output; the other keeps its input
    assert call.activations == 4 * n * t * (4 * d + 2)  # q, k, v, the output, log-sums


def test_nothing_is_sent_and_sharded_leaves_are_whole():
    mesh = ff.make_mesh({"data": 2}, "simulated")
    params = {"w": torch.arange(3.0)}

    def loss(p, x):
        return ff.psum(add_one(p["w"], x), "data").sum()

    def main():
        step = ff.shard(ff.value_and_grad(loss), mesh, "data")
        placed = ff.place(step, params, torch.ones(3))
        with ff.ledger() as log:
            shown = ff.program(loss, placed, torch.ones(3))
        assert log.records == [] and placed["w"].local.shape[0] < 3
        return shown

    for shown in ff.spmd(main, mesh)():
        assert shown.calls[0].params == {"w"} and shown.loss.needs == {Value(0, 0)}
        assert shown.calls[0].outputs.leaves[0].shape == (3,)
