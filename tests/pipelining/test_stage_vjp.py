"""The two halves of a backward pass: the bits and the operations of the whole."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fsfunc.pipelining.stage_vjp import StageVjp
from tests.checks import same
from tests.probes import LiveBytes

D = 4
RUNS: list[str] = []  # what `Both` and `Side` note


class Both(torch.autograd.Function):
    """A product whose backward makes both gradients at once, as users write them."""

    @staticmethod
    def forward(ctx, x, w):  # type: ignore[override]
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        RUNS.append("both")
        x, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g


class Enter(torch.autograd.Function):
    """Parameters on their way in, several at once: the form of a sharded unit's."""

    @staticmethod
    def forward(ctx, token, *ws):  # type: ignore[override]
        return (token.clone(), *[w.view_as(w) for w in ws])

    @staticmethod
    def backward(ctx, token, *gs):  # type: ignore[override]
        RUNS.append("enter")
        return (token, *gs)


class Exit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, token, *ys):  # type: ignore[override]
        return (token.clone(), *[y.detach() for y in ys])

    @staticmethod
    def backward(ctx, token, *gs):  # type: ignore[override]
        RUNS.append("exit")
        return (token, *gs)


# Networks: instructions over a growing list of values, each D x D


UNARY: dict[str, Any] = {
    "relu": torch.relu,
    "transpose": lambda a: a.t(),
    "double": lambda a: a + a,
    "rows": lambda a: a.sum(0, keepdim=True).expand(D, D),
    "halves": lambda a: torch.cat(a.split(D // 2)[::-1]),
}
BINARY: dict[str, Any] = {
    "product": torch.mm,
    "added product": lambda a, b: torch.addmm(b[0], a, b),
    "convolution": lambda a, b: F.conv1d(a[None], b.view(D, D, 1))[0],
    "custom product": Both.apply,
    "sum": torch.add,
    "elementwise": torch.mul,
    "difference": lambda a, b: a - b,
}
PICK = st.integers(0, 30)
STEP = st.one_of(
    st.tuples(st.sampled_from(sorted(UNARY)), PICK),
    st.tuples(st.sampled_from(sorted(BINARY)), PICK, PICK),
    st.tuples(st.just("unit"), PICK, PICK, PICK),
)
NETS = st.tuples(
    st.integers(0, 2),  # inputs
    st.integers(0, 3),  # parameters
    st.lists(STEP, min_size=1, max_size=8),
    st.lists(PICK, min_size=1, max_size=3),  # outputs, from the last value back
)


def whole_numbers(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=generator).double()


def leaves(count: int, seed: int) -> list[Tensor]:
    return [whole_numbers(D, D, seed=seed + i).requires_grad_() for i in range(count)]


def build(net) -> tuple[StageVjp, list[Tensor], list[Tensor | None]]:
    """The vjp of a network, its parameters, and cotangents for its outputs."""
    n_inputs, n_params, steps, outs = net
    xs, ws = leaves(n_inputs, 0), leaves(n_params, 100)
    values, tokens, ends = [*xs, *ws, whole_numbers(D, D, seed=7)], [], []
    pick = lambda i: values[i % len(values)]  # noqa: E731
    for name, *at in steps:
        if name in UNARY:
            values.append(UNARY[name](pick(at[0])))
        elif name in BINARY:
            values.append(BINARY[name](pick(at[0]), pick(at[1])))
        else:
            tokens.append(torch.zeros((), dtype=torch.double, requires_grad=True))
            token, v, w = Enter.apply(tokens[-1], pick(at[1]), pick(at[2]))
            x = pick(at[0]) @ v
            token, y = Exit.apply(token, torch.relu(x) @ w + v)
            values.append(y)
            ends.append(token)
    picked = [values[-1 - i % len(values)] for i in outs]
    picked = [y for y in picked if y.requires_grad]
    cotangents: list[Tensor | None] = [
        None if i == 1 else whole_numbers(D, D, seed=50 + i)
        for i, _ in enumerate(picked)
    ]
    cotangents += [torch.zeros_like(end) for end in ends]
    return StageVjp([*picked, *ends], xs, [*ws, *tokens]), [*ws, *tokens], cotangents


def flops(run) -> tuple[Any, int]:
    def adding(total, a, b, **_: Any) -> int:
        """A product added to what is there: torch's own table lacks it."""
        return 2 * a[0] * a[1] * b[1]

    adds = {torch.ops.aten.addmm_: adding}
    with FlopCounterMode(display=False, custom_mapping=adds) as counter:
        out = run()
    return out, counter.get_total_flops()


@given(NETS)
def test_the_halves_are_the_whole(net):
    """The same bits; every operation once; every side effect once and in order."""
    RUNS.clear()
    vjp, params, cts = build(net)
    grads, whole = flops(lambda: vjp.backward(cts))
    expected, effects = (grads, [w.grad for w in params]), list(RUNS)
    RUNS.clear()
    vjp, params, cts = build(net)
    for w in params:
        w.grad = None
    grads, first = flops(lambda: vjp.input_gradient(cts))
    in_first = list(RUNS)
    _, second = flops(vjp.weight_gradient)
    same((grads, [w.grad for w in params]), expected)
    assert first + second == whole
    assert sorted(RUNS) == sorted(effects)
    assert len(in_first) <= len(RUNS)


# What runs when


def counted(make, *cts):
    """(whole, first, second): operations of the backward and of its halves."""
    vjp = make()
    _, whole = flops(lambda: vjp.backward(cts))
    vjp = make()
    _, first = flops(lambda: vjp.input_gradient(cts))
    _, second = flops(vjp.weight_gradient)
    return whole, first, second


def deep(x: Tensor, ws: list[Tensor]) -> Tensor:
    for i, w in enumerate(ws):
        x = F.layer_norm(x, (D,)) if i % 2 else torch.sin(x)
        x = F.linear(x, w, w[0].detach()) if i % 3 else x @ w
    return x


WAITS: dict[str, Any] = {  # outputs, weights, products in all and in the two halves
    "a chain": (lambda x, *ws: [deep(x, [*ws])], 5, (10, 5, 5)),
    "a weight used twice in a row": (lambda x, w, v: [(x @ w @ v) @ w], 2, (6, 5, 1)),
    "a derived weight, derived back once": (
        lambda x, w, v: [torch.relu(x @ (w @ v)).t() @ (w @ v).t()], 2, (8, 2, 6),
    ),
    "a weight used above where it is derived": (
        lambda x, w, v: [torch.relu(x @ (w @ v)) @ w], 2, (6, 6, 0),
    ),
    "below": (lambda x, w, v: [torch.relu(x @ w) @ (w @ v)], 2, (6, 6, 0)),
    "beside an output": (
        lambda x, w, v: [torch.relu(x @ (u := w @ v)) @ w, u], 2, (6, 6, 0),
    ),
    "no inputs": (lambda x, *ws: [deep(x.detach(), [*ws])], 3, (5, 0, 5)),
}  # fmt: skip


@pytest.mark.parametrize("name", WAITS)
def test_products_of_weights_wait_where_they_can(name):
    """No operation runs for both halves."""
    net, n, products = WAITS[name]

    def make():
        x, ws = leaves(1, 0)[0], leaves(n, 10)
        return StageVjp(net(x, *ws), [x] * (name != "no inputs"), ws)

    ones = [torch.ones(D, D, dtype=torch.double)] * (1 + (name == "beside an output"))
    assert counted(make, *ones) == tuple(2 * D**3 * k for k in products)


def test_a_weight_that_is_an_output_too():
    """What is given for it adds to what its products make."""
    for view in (lambda w: w, lambda w: w.t()):
        x, (w,) = leaves(1, 0)[0], leaves(1, 10)
        v = view(w)
        g = torch.ones(D, D, dtype=torch.double)
        StageVjp([torch.relu(x @ v), v], [x], [w]).backward([g, 5 * g])
        y = torch.relu(x @ view(w)) + 5 * view(w)
        same(w.grad, torch.autograd.grad(y, w, g)[0])


def units(n: int):
    """A stage of units, each between an `Enter` and an `Exit` of its own."""
    x = whole_numbers(D, D, seed=0).requires_grad_()
    ws, tokens, ends, y = leaves(n, 10), [], [], x
    for w in ws:
        tokens.append(torch.zeros((), dtype=torch.double, requires_grad=True))
        token, v = Enter.apply(tokens[-1], w)
        token, y = Exit.apply(token, torch.relu(y @ v))
        ends.append(token)
    vjp = StageVjp([y, *ends], [x], [*ws, *tokens])
    return vjp, [torch.ones_like(y), *[torch.zeros_like(end) for end in ends]]


def test_units_are_left_in_the_first_half_and_entered_in_the_second():
    vjp, cts = units(3)
    RUNS.clear()
    vjp.input_gradient(cts)
    assert RUNS == ["exit"] * 3
    vjp.weight_gradient()
    assert RUNS == ["exit"] * 3 + ["enter"] * 3


class Numbered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, number, w, v):  # type: ignore[override]
        ctx.number = number
        return w * 1, v * 1

    @staticmethod
    def backward(ctx, g, h):  # type: ignore[override]
        RUNS.append(ctx.number)
        return None, g, h


def test_side_effects_of_the_second_half_keep_the_order_of_a_backward():
    """Ranks whose graphs differ, as by an unused output, must still agree on it."""

    def run(whole: bool, used: bool) -> list[Any]:
        RUNS.clear()
        x, ws = leaves(1, 0)[0], leaves(6, 10)
        pairs = [Numbered.apply(i, *ws[2 * i : 2 * i + 2]) for i in range(3)]
        y = x @ pairs[0][0]
        y = (y if used else x) @ pairs[1][0] + pairs[0][1]
        y = y @ pairs[2][0] @ pairs[2][1] @ pairs[1][1]
        vjp, cts = StageVjp([y], [x], ws), [torch.ones(D, D)]
        if whole:
            vjp.backward(cts)
        else:
            vjp.input_gradient(cts)
            assert RUNS == []
            vjp.weight_gradient()
        return list(RUNS)

    assert [run(w, u) for w in (True, False) for u in (True, False)] == [[2, 1, 0]] * 4


def test_gradients_add_up_in_place():
    x, ws = leaves(1, 0)[0], leaves(3, 10)
    for w in ws:
        w.grad = torch.ones_like(w)
    places = [w.grad.data_ptr() for w in ws]  # type: ignore[union-attr]
    for half in (False, True, True):
        vjp = StageVjp([deep(x, ws)], [x], ws)
        if half:
            vjp.input_gradient([torch.ones(D, D, dtype=torch.double)])
            vjp.weight_gradient()
        else:
            vjp.backward([torch.ones(D, D, dtype=torch.double)])
    assert [w.grad.data_ptr() for w in ws] == places  # type: ignore[union-attr]
    assert x.grad is None


def test_dropout_and_integers_and_what_nobody_uses():
    def net(half: bool):
        torch.manual_seed(0)
        (x, unused), ws = leaves(2, 0), leaves(3, 10)
        table = ws[2][torch.tensor([0, 3, 1, 1])]
        y = F.dropout(x @ ws[0] + table, 0.5)
        vjp = StageVjp([y, y * 2], [x, unused], ws)
        cts = [torch.ones_like(y), None]
        if half:
            found = vjp.input_gradient(cts)
            vjp.weight_gradient()
        else:
            found = vjp.backward(cts)
        return found, [w.grad for w in ws]

    same(net(True), net(False))
    assert net(True)[0][1] is None and net(True)[1][1] is None


# Memory


def test_the_outputs_may_go_and_the_rest_goes_with_the_second_half():
    ws = [torch.eye(64, requires_grad=True) for _ in range(6)]
    x = torch.ones(64, 64)
    with LiveBytes(x, ws) as memory:
        leaf = x.detach().requires_grad_()
        h = leaf
        for w in ws:
            h = torch.sin(h @ w)
        out = h * 2  # nothing saves it
        vjp = StageVjp([out], [leaf], ws)
        del h, out
        forward = memory.live / x.nbytes
        vjp.input_gradient([torch.ones(64, 64)])
        first = memory.live / x.nbytes
        vjp.weight_gradient()
        del vjp
        last = memory.live / x.nbytes
    assert forward == 6 + 5  # x @ w and its sine, but for the last sine
    assert forward <= first <= forward + 6
    assert last == 6  # the gradients


def test_a_whole_backward_frees_as_it_goes():
    ws = [torch.eye(64, requires_grad=True) for _ in range(6)]
    for w in ws:
        w.grad = torch.zeros(64, 64)
    x = torch.ones(64, 64, requires_grad=True)
    with LiveBytes(x, ws, [w.grad for w in ws]) as memory:
        h = x
        for w in ws:
            h = torch.sin(h @ w)
        vjp = StageVjp([h], [x], ws)
        del h
        held = memory.live
        memory.peak = memory.live
        found = vjp.backward([torch.ones(64, 64)])
        assert memory.peak <= held + 5 * x.nbytes
        del found
        assert memory.live == 0


def test_the_second_half_holds_one_weight_gradient_at_a_time():
    ws = [torch.eye(64, requires_grad=True) for _ in range(8)]
    for w in ws:
        w.grad = torch.zeros(64, 64)
    x = torch.ones(1, 64, requires_grad=True)
    h = x
    for w in ws:
        h = torch.sin(F.linear(h, w))
    vjp = StageVjp([h], [x], ws)
    vjp.input_gradient([torch.ones(1, 64)])
    with LiveBytes(ws, [w.grad for w in ws]) as memory:
        vjp.weight_gradient()
    assert memory.peak <= 2 * 64 * 64 * 4


def test_a_unit_is_entered_when_its_gradients_are_there():
    x, n = torch.ones(1, 64, requires_grad=True), 8
    ws = [torch.eye(64, requires_grad=True) for _ in range(n)]
    tokens = [torch.zeros((), requires_grad=True) for _ in ws]
    h, ends = x, []
    for w, start in zip(ws, tokens, strict=True):
        token, v = (y.view_as(y) for y in Enter.apply(start, w))
        token, h = Exit.apply(token, torch.sin(h @ v))
        ends.append(token)
        w.grad = torch.zeros(64, 64)
    vjp = StageVjp([h, *ends], [x], [*ws, *tokens])
    vjp.input_gradient([torch.ones(1, 64), *[torch.zeros(()) for _ in ends]])
    del ends, h, v, token
    with LiveBytes(ws, [w.grad for w in ws]) as memory:
        vjp.weight_gradient()
    assert memory.peak <= 3 * 64 * 64 * 4
