"""`remat`: the same bits and gradients as without it, in less memory."""

import pytest
import torch
import torch.nn.functional as F

import fsfunc as ff
from tests.checks import same
from tests.probes import Calls, LiveBytes

D = 6
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(4, D, generator=GENERATOR)


def weights(n=3, dtype=torch.float32):
    def one():
        w = torch.randn(D, D, generator=GENERATOR, dtype=dtype)
        return {"w": w, "b": torch.ones(D, dtype=dtype)}

    return [one() for _ in range(n)]


P = weights()


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


def cast_in_glue(ps, x):
    """A leaf cast by autocast inside a unit and outside it."""
    with torch.autocast("cpu", torch.bfloat16):
        return (loss(ps, x) + (x @ ps[0]["w"]).float().sum()).float()


def twice_in_a_unit(ps, x):
    unit = ff.unit(lambda w, x: torch.sin(x @ w) @ w)
    with torch.autocast("cpu", torch.bfloat16):
        return unit(ps[0]["w"], x).float().sum()


def shared_inputs(ps, x):
    """One input is made from another, and one is given twice."""
    unit = ff.unit(lambda a, b, c, d: (a * b * c.sin() * d).sum())
    w = ps[0]["w"]
    return unit(w, w * 2, w, x[:, :1].sum())


def strided(ps, x):
    """Folded into one matmul or not, as a weight needs a gradient or does not."""
    unit = ff.unit(lambda w, x: (x.transpose(0, 2) @ (w * 1)).sin())
    return unit(ps[0]["w"], x.expand(3, 4, D).contiguous().transpose(0, 2)).sum()


def asking_for_a_number(ps, x):
    unit = ff.unit(lambda w, x: (x @ w * w.detach().sum().item()).sin())
    return unit(ps[0]["w"], x).sum()


LOSSES = [loss, twice_in_a_unit, shared_inputs, strided, asking_for_a_number]


@pytest.mark.parametrize("policy", [None, ff.SaveOnly("x"), ff.SaveAllBut("x")])
@pytest.mark.parametrize("f", LOSSES)
def test_the_bits_are_those_without_it(f, policy) -> None:
    def remat(f):
        return ff.remat(f, policy)

    grad = ff.value_and_grad(f)
    expected = from_seed(grad, P, X)
    same(from_seed(remat(grad), P, X), expected)
    same(from_seed(ff.value_and_grad(remat(f)), P, X), expected)
    same(from_seed(remat(remat(grad)), P, X), expected)


def test_a_leaf_that_autocast_also_casts_outside_the_unit() -> None:
    """One cast or two: they round otherwise, but neither gradient may be lost."""
    grad = ff.value_and_grad(cast_in_glue)
    expected = from_seed(grad, P, X)
    found = from_seed(ff.remat(grad), P, X)
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0.02)


def test_autocast_around_the_gradient_call_and_around_nothing_later() -> None:
    grad = ff.value_and_grad(loss)
    with torch.autocast("cpu", torch.bfloat16):
        expected = from_seed(grad, P, X)
        same(from_seed(ff.remat(grad), P, X), expected)
    ps = [{k: v.clone().requires_grad_() for k, v in p.items()} for p in P]
    with torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(0)
        out = ff.remat(loss)(ps, X)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    out.backward()  # outside autocast, with the generator elsewhere
    assert torch.equal(torch.get_rng_state(), state)
    with torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(0)
        plain = [{k: v.detach().requires_grad_() for k, v in p.items()} for p in P]
        loss(plain, X).backward()
    same([p["w"].grad for p in ps], [p["w"].grad for p in plain])


def test_nothing_more_is_left_in_autocasts_cache() -> None:
    w = torch.eye(64)
    unit = ff.unit(lambda w, x: x @ w)
    grad = ff.value_and_grad(lambda w, x: unit(w, x).float().sum())

    def left(f):
        with torch.autocast("cpu", torch.bfloat16), LiveBytes(w) as memory:
            f(w, torch.ones(1, 64))
            return memory.live

    assert left(ff.remat(grad)) <= left(grad)


def smooth(ps, x):
    for p in ps:
        x = inner(p, x)
    return (x**2).sum()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_under_every_torch_func_transform() -> None:
    ps, x = weights(2, torch.float64), X.double()
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


@pytest.mark.parametrize("f", [smooth, shared_inputs])
def test_second_order_by_plain_autograd(f) -> None:
    def second(f):
        ps = [{k: v.clone().requires_grad_() for k, v in p.items()} for p in P]
        x = X.clone().requires_grad_()
        inputs = [ps[0]["w"], x]
        first = torch.autograd.grad(f(ps, x), inputs, create_graph=True)
        total = sum((g**2).sum() for g in first)
        return first, torch.autograd.grad(total, inputs)

    torch.testing.assert_close(second(ff.remat(f)), second(f))
    policy = ff.SaveOnly("x")
    torch.testing.assert_close(second(ff.remat(f, policy)), second(f))


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


def test_an_input_that_needs_no_gradient_gets_none() -> None:
    """A mask that needed one would push attention off its fast path."""
    mask = torch.zeros(2, 2)

    @ff.unit
    def attention(w, x, mask):
        assert not mask.requires_grad and not x.requires_grad
        q = (x @ w).view(1, 1, 2, D)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    names = ("_scaled_dot_product_flash", "mm.", "bmm")

    def counted(around):
        with Calls(names[0]) as flash, Calls(*names[1:]) as products:
            around(ff.value_and_grad(lambda w, x: attention(w, x, mask).sum()))(
                P[0]["w"], X[:2]
            )
        return flash.count, products.count

    assert counted(lambda f: f) == (2, 2)  # forward and backward; x @ w and dw, no dx
    assert counted(ff.remat) == (3, 3)  # each forward once more


def test_pulled_back_twice() -> None:
    ps = [{k: v.clone().requires_grad_() for k, v in p.items()} for p in P]
    for policy in (None, ff.SaveOnly("x")):
        torch.manual_seed(0)
        out = ff.remat(loss, policy)(ps, X)
        first = torch.autograd.grad(out, ps[0]["w"], retain_graph=True)
        same(torch.autograd.grad(out, ps[0]["w"]), first)


@pytest.mark.parametrize("when", [1, 2], ids=["forward", "backward"])
def test_raising_in_the_middle_leaves_the_generator_as_it_was(when) -> None:
    calls = []

    @ff.unit
    def unit(w, x):
        y = F.dropout(x * w)
        calls.append(0)
        if len(calls) == when:
            raise ArithmeticError("in the middle")
        return y

    w = torch.ones(D, requires_grad=True)
    torch.manual_seed(0)
    with pytest.raises(ArithmeticError):
        out = ff.remat(unit)(w, X)
        torch.manual_seed(0)
        out.sum().backward()
    if when == 2:
        expected = torch.manual_seed(0).get_state()
        torch.manual_seed(0)
        assert torch.equal(torch.get_rng_state(), expected)
    calls.clear()
    grad = ff.remat(ff.value_and_grad(lambda w: unit(w, X).sum()))
    torch.manual_seed(0)
    torch.randint(1 << 62, ())
    expected = torch.get_rng_state()
    torch.manual_seed(0)
    with pytest.raises(ArithmeticError):
        grad(w.detach())
    assert torch.equal(torch.get_rng_state(), expected)


def test_with_nothing_to_differentiate_nothing_is_kept() -> None:
    with LiveBytes(P, X) as memory, torch.no_grad():
        out = ff.remat(loss)(P, X)
    assert memory.live == out.nbytes
    with pytest.raises(TypeError, match="SaveOnly"):
        ff.remat(loss, policy="dots")  # type: ignore[arg-type]
