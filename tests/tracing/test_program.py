"""What a program shows is what feeds what: seen by spoiling everything else."""

import re

import pytest
import torch
from hypothesis import given, settings
from torch.nn import functional as F

import fsfunc as ff
from fsfunc import tree
from fsfunc.core.frames import Counter, Stage, frame, inside
from fsfunc.tracing.programs import Spec, Value
from tests.pipelining.drawn import EXACT, batch_of, losses, params_of


class Frozen(Stage):
    """Unit calls return what is in ``values``; their inputs are kept in ``seen``."""

    def __init__(self, values=None, clone=True):
        self.values, self.seen, self.out, self.clone = values, [], [], clone

    def decide(self, call, params, inputs, keywords):
        found = tree.leaves((params, inputs, keywords))
        self.seen.append([x.detach().clone() if tensor(x) else x for x in found])
        out = call.body(params, *inputs, **keywords)
        leaves, treedef = tree.flatten(out)
        if self.values is not None:
            for i, x in enumerate(leaves):
                if tensor(x):
                    x = self.values[Value(call.number, i)]
                    leaves[i] = x.clone() if self.clone else x
        self.out.append([x.detach().clone() if tensor(x) else x for x in leaves])
        return tree.unflatten(treedef, leaves)


def tensor(x):
    return isinstance(x, torch.Tensor)


def run(loss, params, batch, values=None, clone=True):
    """(inputs of each call and the loss, outputs by Value) of a run."""
    stage = Frozen(values, clone)
    with inside(frame().replace(handlers=(stage,), counter=Counter())), torch.no_grad():
        out = loss(params, batch)
    made = {
        Value(c, i): x
        for c, leaves in enumerate(stage.out)
        for i, x in enumerate(leaves)
        if tensor(x)
    }
    return [*stage.seen, tree.leaves(out)], made


def same(a, b):
    return all(
        torch.equal(x, y) if tensor(x) else x == y for x, y in zip(a, b, strict=True)
    )


def spoiled(x):
    """``x`` with every element another, and each by another amount."""
    if not x.is_floating_point():
        return x + 1
    return x + 10007 * torch.arange(1, x.numel() + 1).view(x.shape)


@settings(max_examples=10)
@given(losses())
def test_what_is_not_needed_may_be_anything(drawn):
    params, batch = params_of(), batch_of()
    shown = ff.program(drawn.loss, params, batch)
    seen, made = run(drawn.loss, params, batch)
    paths, leaves, treedef = tree.flatten_with_paths(params)
    assert len(shown.calls) == len(seen) - 1
    for k, user in enumerate((*shown.calls, shown.loss)):
        values = {
            v: x if v in user.needs else torch.full_like(x, torch.nan)
            for v, x in made.items()
        }
        kept = user.reads | getattr(user, "params", frozenset())
        mine = [
            x if path in kept else torch.full_like(x, torch.nan)
            for path, x in zip(paths, leaves, strict=True)
        ]
        other = {
            name: x if f"batch/{name}" in user.origins.batch else torch.zeros_like(x)
            for name, x in batch.items()
        }
        found, _ = run(drawn.loss, tree.unflatten(treedef, mine), other, values)
        assert same(found[k], seen[k])


@settings(max_examples=10)
@given(losses(EXACT))
def test_what_is_needed_makes_a_difference(drawn):
    params, batch = params_of(), batch_of()
    shown = ff.program(drawn.loss, params, batch)
    seen, made = run(drawn.loss, params, batch)
    paths, leaves, treedef = tree.flatten_with_paths(params)
    users = [*shown.calls, shown.loss]
    for value in made:
        found, _ = run(drawn.loss, params, batch, made | {value: spoiled(made[value])})
        changed = [not same(a, b) for a, b in zip(found, seen, strict=True)]
        assert changed == [value in user.needs for user in users]
    for i, path in enumerate(paths):
        mine = [spoiled(x) if i == j else x for j, x in enumerate(leaves)]
        found, _ = run(drawn.loss, tree.unflatten(treedef, mine), batch, made)
        changed = [not same(a, b) for a, b in zip(found, seen, strict=True)]
        for user, differs in zip(users, changed, strict=True):
            given_it = getattr(user, "params", frozenset())
            assert differs == (path in user.reads | given_it)


@settings(max_examples=10)
@given(losses())
def test_glue_writes_into_what_the_program_says_and_nothing_else(drawn):
    params, batch = params_of(), batch_of()
    shown = ff.program(drawn.loss, params, batch)
    _, made = run(drawn.loss, params, batch)
    before = {value: x._version for value, x in made.items()}
    run(drawn.loss, params, batch, made, clone=False)
    written = {value for value, x in made.items() if x._version != before[value]}
    assert written == shown.mutated


@settings(max_examples=10)
@given(losses())
def test_outputs_are_as_in_a_real_run(drawn):
    params, batch = params_of(), batch_of()
    shown = ff.program(drawn.loss, params, batch)
    tracked = tree.map(lambda x: x.clone().requires_grad_(), params)
    stage = Frozen()
    with inside(frame().replace(handlers=(stage,), counter=Counter())):
        drawn.loss(tracked, batch)
    assert len(stage.out) == len(shown.calls)
    for call, out in zip(shown.calls, stage.out, strict=True):
        for spec, x in zip(call.outputs.leaves, out, strict=True):
            if tensor(x):
                assert (spec.shape, spec.dtype) == (tuple(x.shape), x.dtype)
                assert spec.nbytes == x.numel() * x.element_size()
            else:
                assert spec == x


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


def test_what_repeats_with_glue_between_is_folded_too():
    def loss(p, x):
        for w in p["blocks"]:
            x = add_one(w, x * 2) + x
        return x.sum()

    p = {"blocks": [torch.ones(2)] * 20}
    assert told(loss, p, torch.ones(2)) == [
        "  g0 = mul(x, 2)",
        "%0 = add_one(p/blocks/0, g0) -> f32[2]",
        "  g1 = add(%0, x)",
        "[ g2-38 = mul(g1-37, 2)  x19",
        "[%1-19 = add_one(p/blocks/1-19, g2-38) -> f32[2]",
        "[ g3-39 = add(%1-19, g1-37)",
        "  g40 = sum(g39)",
        "loss = g40 -> f32[]",
    ]


def told(loss, *args, **keywords):
    """The listing without its first line."""
    return str(ff.program(loss, *args, **keywords)).splitlines()[1:]


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


def stacked(p, x):
    inner = ff.unit(lambda p, x: torch.tanh(torch.exp(x + p)))
    outer = ff.unit(lambda p, x: inner(p, x.t().view(-1)).exp())
    return outer(p, x).sum()


@pytest.mark.parametrize(
    "around", ["plain", "no_grad", "inference", "remat", "shard", "unit"]
)
def test_a_program_is_the_same_wherever_it_is_made(around):
    p, x = torch.ones(4), torch.ones(2, 2).t().expand(2, 2)
    mesh = ff.make_mesh({"data": 2}, "simulated")

    def step(p, x):
        return ff.program(stacked, p, x)

    def sharded():
        whole = ff.place(ff.shard(lambda p, x: p.sum(), mesh, "data"), p, x)
        return ff.shard(step, mesh, "data")(whole, x)

    kept = []
    into = ff.unit(lambda p, x: kept.append(step(p, x)) or p)
    found = {
        "plain": lambda: step(p, x),
        "no_grad": lambda: torch.no_grad()(step)(p, x),
        "inference": lambda: torch.inference_mode()(step)(p, x),
        "remat": lambda: ff.remat(step)(p, x),
        "shard": lambda: ff.spmd(sharded, mesh)()[0],
        "unit": lambda: into(p, x) is p and kept[0],
    }[around]()
    (call,) = found.calls
    assert call.name == "<lambda>" and call.outputs.leaves[0].requires_grad
    assert call.activations == 4 * 4 * 3 and found.loss.needs == {Value(0, 0)}
