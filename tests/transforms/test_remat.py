"""`remat`: the same bits and gradients as without it, in less memory."""

import random
from functools import partial

import numpy
import pytest
import torch
import torch.nn.functional as F

import fsfunc as ff
from fsfunc.transforms.policies import checkpoint_name as name
from tests.checks import all_refused, same
from tests.models import chain, floats, layers
from tests.probes import LiveBytes

D = 6
X = floats(4, D, seed=9)


P = layers(3, D, make=floats)


@ff.unit
def inner(p, x):
    return torch.tanh(x @ p["w"]) * p["b"]


@ff.unit
def block(p, x):
    h = F.dropout(inner(p, x), 0.25)
    return F.layer_norm(h + x, (D,))


def loss(ps, x):
    for p in ps:
        x = block(p, x)
    return (x**3).sum()


def from_seed(f, *args):
    torch.manual_seed(11)
    return f(*args)


def squares(body):
    """The loss of one unit, whose body takes two matrices."""
    unit = ff.unit(lambda ps, x: body(ps[0]["w"], ps[1]["w"], x))
    return lambda ps, x: (unit(ps[:2], x) ** 2).sum().float()


def attention(a, b, x):
    q = torch.sin(x @ a).view(1, 2, 2, D)
    return name(F.scaled_dot_product_attention(q, q, q, is_causal=True), "h")


def dropped(a, b, x):
    h = name(F.dropout(torch.sin(x @ a), 0.5), "h")
    return 1 + F.dropout(h, 0.5)  # what is drawn next does not change


def split(a, b, x):
    one, other = (x @ a).chunk(2, -1)
    return torch.sin(name(one, "h")) * name(other, "h")


def strided(a, b, x):
    """Folded into one matmul or not, as a weight needs a gradient or does not."""
    x = x.expand(3, 4, D).contiguous().transpose(0, 2)
    return name(torch.sin(x.transpose(0, 2) @ (a * 1)), "h") @ (b * 1)


def shared_inputs(ps, x):
    """One input is made from another, and one is given twice."""
    unit = ff.unit(lambda a, b, c, d: (a * b * c.sin() * d).sum())
    w = ps[0]["w"]
    return unit(w, w * 2, w, x[:, :1].sum())


BODIES = {
    "attention": attention,
    "dropped": dropped,
    "split": split,
    "strided": strided,
    "changed after": lambda a, b, x: torch.sin(name(x @ a, "h").add_(1)) @ b,
    "changed before": lambda a, b, x: torch.sin(name((x @ a).add_(1).mul_(2), "h")) @ b,
    "a view": lambda a, b, x: torch.sin(name((x @ a).t(), "h")) @ b[:4],
    "twice in a unit": lambda a, b, x: torch.sin(x @ a) @ a,
    "asking for a number": lambda a, b, x: (x @ a * a.detach().sum().item()).sin(),
}
LOSSES = {"blocks": loss, "shared inputs": shared_inputs}
LOSSES |= {kind: squares(body) for kind, body in BODIES.items()}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", LOSSES)
def test_the_bits_are_those_without_it(kind, autocast) -> None:
    f = LOSSES[kind]
    grad = ff.value_and_grad(f)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = from_seed(grad, P, X)
        for policy in (None, ff.SaveOnly("h"), ff.SaveAllBut("h")):
            remat = lambda f, policy=policy: ff.remat(f, policy)  # noqa: E731
            for again in (remat(grad), ff.value_and_grad(remat(f)), remat(remat(grad))):
                same(from_seed(again, P, X), expected)


def test_a_backward_outside_of_autocast_computes_as_the_forward_did() -> None:
    ps = [{k: v.clone().requires_grad_() for k, v in p.items()} for p in P]
    with torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(0)
        out = ff.remat(loss)(ps, X)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    out.backward()  # with the generator elsewhere, too
    assert torch.equal(torch.get_rng_state(), state)
    with torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(0)
        plain = [{k: v.detach().requires_grad_() for k, v in p.items()} for p in P]
        loss(plain, X).backward()
    same([p["w"].grad for p in ps], [p["w"].grad for p in plain])


def smooth(ps, x):
    for p in ps:
        x = inner(p, x)
    return (x**2).sum()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_under_every_torch_func_transform() -> None:
    ps, x = layers(2, D, make=floats, dtype=torch.float64), X.double()
    again = ff.remat(smooth)
    close = torch.testing.assert_close
    grad = torch.func.grad(smooth)
    close(torch.func.grad(again)(ps, x), grad(ps, x))
    value, pull = torch.func.vjp(again, ps, x)
    close(
        (value, *pull(value)), (lambda v, p: (v, *p(v)))(*torch.func.vjp(smooth, ps, x))
    )
    close(
        torch.func.jvp(again, (ps, x), (ps, x)),
        torch.func.jvp(smooth, (ps, x), (ps, x)),
    )
    per_sample = torch.func.vmap(torch.func.grad(again), in_dims=(None, 0))
    close(per_sample(ps, x), torch.func.vmap(grad, in_dims=(None, 0))(ps, x))
    inside = torch.func.vmap(lambda x: ff.remat(ff.value_and_grad(smooth))(ps, x)[1])
    close(inside(x), per_sample(ps, x))
    w = ps[0]["w"]

    def of_one(f):
        return lambda w: f([{**ps[0], "w": w}, ps[1]], x)

    close(torch.func.hessian(of_one(again))(w), torch.func.hessian(of_one(smooth))(w))


def test_memory_falls_to_the_inputs_and_one_unit() -> None:
    x = torch.randn(64, 64)
    ws = [torch.eye(64) for _ in range(8)]

    @ff.unit
    def deep(w, x):
        for _ in range(4):
            x = torch.sin(x @ w)
        return x

    def f(ws):
        h = x
        for w in ws:
            h = deep(w, h)
        return h.sum()

    def live(around):
        with LiveBytes(x, ws) as memory:
            leaves = [w.detach().requires_grad_() for w in ws]
            out = around(f)(leaves)
            after_forward = memory.live / x.nbytes
            grads = torch.autograd.grad(out, leaves)
        del grads
        return after_forward, memory.peak / x.nbytes

    after, peak = live(lambda f: f)
    # Each of 32 steps keeps x @ w and its sine: 64. Then: one output for each unit.
    assert after > 63
    after, peak = live(ff.remat)
    assert after <= 8.1 and peak <= 8 + 8 + 8 + 4, (after, peak)


OWN = torch.Generator()
DRAWS = {
    "python": lambda x: random.random() * x,
    "numpy": lambda x: float(numpy.random.rand()) * x,
    "torch.Generator": lambda x: torch.rand(x.shape, generator=OWN) * x,
    "one made inside": lambda x: x.normal_(generator=torch.Generator().manual_seed(3)),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_recompute_draws_the_same_of_every_generator(draw) -> None:
    @ff.unit
    def noisy(p, x, on):
        return torch.tanh((draw((x @ p["w"]).detach()) if on else x) * p["b"])

    def loss(ps, x, on):
        for p in ps:
            x = noisy(p, x, on)
        return (x**2).sum()

    def run(f):
        random.seed(1), numpy.random.seed(1), OWN.manual_seed(1)
        out = [f(P, X, on) for on in (False, True, True)]
        return out, random.random(), numpy.random.rand(), OWN.get_state()

    step = ff.value_and_grad(loss, batch_argnums=1)
    for f in (ff.remat(step), ff.remat(step, policy=ff.SaveOnly("h"))):
        same(run(f), run(step))


def test_a_number_beside_a_derivative_that_a_unit_takes_by_torch_func() -> None:
    slope = torch.func.grad(lambda h: (h.sin() ** 2).sum())
    unit = ff.unit(lambda p, x: torch.tanh(slope(x @ p["w"]) * 0.5) * p["b"])
    step = ff.value_and_grad(lambda ps, x: unit(ps[1], unit(ps[0], x)).sum())
    same(ff.remat(step)(P, X), step(P, X))


def test_a_unit_within_that_uses_torch_func_draws_what_it_draws_without_remat() -> None:
    slope = torch.func.grad(lambda h: (h.sin() ** 2).sum())
    within = ff.unit(lambda p, x: F.dropout(slope(x @ p["w"]), 0.5) * p["b"])
    outer = ff.unit(lambda p, x: torch.tanh(within(p, x)))
    step = ff.value_and_grad(lambda ps, x: outer(ps[1], outer(ps[0], x)).sum())
    for _ in range(2):  # in the first call of all it is not known that it does
        same(from_seed(ff.remat(step), P, X), from_seed(step, P, X))


# By microbatch


AGAIN = {"always": (1, 3), "except_last": (0, 2), "never": (0, 0)}


@pytest.mark.parametrize("mode", AGAIN)
def test_how_many_microbatches_are_recomputed(mode) -> None:
    runs = []

    @ff.unit
    def layer(p, x):
        runs.append(p)
        return F.dropout(name(torch.tanh(x @ p["w"]), "h"), 0.25)  # keeps no names

    def ran(step):
        runs.clear()
        return from_seed(step, P, floats(12, D)), len(runs) / len(P)

    loss = chain(layer)
    grad = ff.value_and_grad(loss)
    for n, again in zip((1, 3), AGAIN[mode], strict=True):
        expected, plain = ran(ff.accumulate(grad, n))
        for step in (
            ff.accumulate(ff.remat(grad, mode), n),
            ff.remat(ff.accumulate(grad, n), mode),
            ff.accumulate(ff.value_and_grad(ff.remat(loss, mode)), n),
        ):
            found, count = ran(step)
            assert count - plain == again
            same(found, expected)


MODES = "'always', 'except_last', 'never', or None"
test_another_policy_is_refused = all_refused(
    [(partial(ff.remat, len, p), TypeError, MODES) for p in ("last", 3, ["always"])]
)
