"""A backward pass is autograd's, and so are its two halves, bits and operations."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import fsfunc as ff
from fsfunc.pipelining.stages import StageVjp
from tests.checks import same
from tests.probes import LiveBytes

D = 4
ROWS = torch.tensor([0, 3, 3, 1])
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
    "linear": F.linear,
    "viewed product": lambda a, b: F.linear(a, b.view(2, 2, D).flatten(0, 1)),
    "lookup": lambda a, b: a + F.embedding(ROWS, b),
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


def plainly(vjp: StageVjp, params: list[Tensor], cts) -> Any:
    """What autograd itself gives."""
    roots = [(y, g) for y, g in zip(vjp.outputs, cts, strict=True) if g is not None]
    inputs = [*vjp.inputs, *params]
    if roots and inputs:
        torch.autograd.backward(*zip(*roots, strict=True), inputs=inputs)
    return [x.grad for x in vjp.inputs], [w.grad for w in params]


@given(NETS)
def test_the_halves_are_the_whole(net):
    """The same bits; every operation once; every side effect once and in order."""
    alone = plainly(*build(net))
    RUNS.clear()
    vjp, params, cts = build(net)
    grads, whole = flops(lambda: vjp.backward(cts))
    expected, effects = (grads, [w.grad for w in params]), list(RUNS)
    same(expected, alone)
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


def run(vjp: StageVjp, cts, halves: bool) -> tuple[Any, tuple[int, ...]]:
    """The inputs' gradients, and the operations of each part."""
    if not halves:
        found, whole = flops(lambda: vjp.backward(cts))
        return found, (whole,)
    found, first = flops(lambda: vjp.input_gradient(cts))
    _, second = flops(vjp.weight_gradient)
    return found, (first, second)


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
    "below": (lambda x, w, v: [torch.relu(x @ w) @ (w @ v)], 2, (6, 6, 0)),
    "no inputs": (lambda x, *ws: [deep(x.detach(), [*ws])], 3, (5, 0, 5)),
}  # fmt: skip


@pytest.mark.parametrize("name", WAITS)
def test_products_of_weights_wait_where_they_can(name):
    """No operation runs for both halves."""
    net, n, products = WAITS[name]

    def make():
        x, ws = leaves(1, 0)[0], leaves(n, 10)
        return StageVjp(net(x, *ws), [x] * (name != "no inputs"), ws)

    ones = [torch.ones(D, D, dtype=torch.double)]
    found = *run(make(), ones, False)[1], *run(make(), ones, True)[1]
    assert found == tuple(2 * D**3 * k for k in products)


# Memory


def eyes(n: int, grads: bool) -> list[Tensor]:
    ws = [torch.eye(64, requires_grad=True) for _ in range(n)]
    for w in ws:
        w.grad = torch.zeros(64, 64) if grads else None
    return ws


def sines(h: Tensor, ws: list[Tensor]) -> Tensor:
    for w in ws:
        h = torch.sin(h @ w)
    return h


def test_a_whole_backward_frees_as_it_goes():
    ws, x = eyes(6, True), torch.ones(64, 64, requires_grad=True)
    with LiveBytes(x, ws, [w.grad for w in ws]) as memory:
        vjp = StageVjp([sines(x, ws)], [x], ws)
        held = memory.live
        memory.peak = memory.live
        found = vjp.backward([torch.ones(64, 64)])
        assert memory.peak <= held + 5 * x.nbytes
        del found
        assert memory.live == 0


HELD: dict[str, Any] = {  # by which product, or lookup, a weight is read
    "linear": F.linear,
    "with a bias": lambda x, w: F.linear(x, w, torch.ones(64)),
    "a product": torch.mm,
    "viewed": lambda x, w: F.linear(x, w.view(8, 8, 64).flatten(0, 1)),
    "rows": lambda x, w: x + F.embedding(torch.tensor([3]), w),
}


@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("halves", [False, True])
def test_no_second_gradient_is_made(name, halves):
    x, (w,) = torch.ones(1, 64, requires_grad=True), eyes(1, True)

    def once() -> None:
        run(StageVjp([HELD[name](x, w)], [x], [w]), [torch.ones(1, 64)], halves)

    with LiveBytes(w, w.grad) as memory:
        once()
    assert memory.peak < 64 * 64 * 4


# Units that compute again


WIDE, N = 8, 2  # width, units
PRODUCT = 2 * 4 * WIDE * WIDE  # operations of one product of a unit
X = torch.randint(-3, 4, (4, WIDE), generator=torch.Generator().manual_seed(0)).double()
CT = torch.arange(4.0 * WIDE).view(4, WIDE).double() - 9


def weights() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            k: torch.randint(-2, 3, (WIDE, WIDE), generator=generator).double()
            for k in ("v", "w")
        }
        for _ in range(N)
    ]


@ff.unit
def block(p, x):
    return x + torch.relu(x @ p["v"]) @ p["w"]


def stage(ps, x, tied=False):
    for i, p in enumerate(ps):
        x = block(ps[0] if tied and i == N - 1 else p, x)
    return x


def pulled(f, halves: bool, **how: Any) -> tuple[Any, tuple[int, ...]]:
    """(gradients, operations forward and of each part) of a stage on plain tensors."""
    ps = [{k: w.requires_grad_() for k, w in p.items()} for p in weights()]
    leaves = [w for p in ps for w in p.values()]
    x = X.clone().requires_grad_()
    y, forward = flops(lambda: f(ps, x, **how))
    found, parts = run(StageVjp([y], [x], leaves), [CT], halves)
    return (found, [w.grad for w in leaves]), (forward, *parts)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("around", [1, 2], ids=["remat", "remat of remat"])
def test_a_recomputed_unit_computes_again_once(tied, around):
    f = stage
    for _ in range(around):
        f = ff.remat(f)
    expected, _ = pulled(stage, False, tied=tied)
    found, (forward, first, second) = pulled(f, True, tied=tied)
    same(found, expected)
    again = forward - N * PRODUCT  # nobody reads a unit's last product
    assert forward == 2 * N * PRODUCT
    assert first + second == again + 2 * forward
    if not tied:
        assert (first, second) == (again + forward, forward)
