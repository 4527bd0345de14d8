"""Norms of features that are split over ranks are those of one device, and what they
send is two numbers a row, forward and backward."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc.nn import column_linear, layer_norm, rms_norm, row_linear, sync_batch_norm
from tests.checks import all_refused, close, simulated, with_ledger
from tests.covering import examples
from tests.models import floats
from tests.nn.models import wide

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
FEATURES = 8


class Kind(NamedTuple):
    """A norm, ours and torch's; the dim that is split, and numbers that are sent."""

    name: str
    dim: int
    shape: tuple[int, ...]
    numbers: int
    ours: Callable[..., Any]  # (x, weight, bias, axis)
    torchs: Callable[..., Any]

    def __repr__(self):
        return self.name


def of_batch(x, w, b, axis):
    params = {} if w is None else {"weight": w, "bias": b}
    return sync_batch_norm(params, x, axis, eps=1e-4)[0]


LAYER = Kind("layer", -1, (3, 2, FEATURES), 2 * 3 * 2,
    lambda x, w, b, axis: layer_norm(x, w, b, axis=axis, eps=1e-4),
    lambda x, w, b: F.layer_norm(x, (FEATURES,), w, b, 1e-4))  # fmt: skip
ROOT = Kind("root", -1, (3, 2, FEATURES), 3 * 2,  # a bias has no part in it
    lambda x, w, b, axis: rms_norm(x, w, axis=axis, eps=1e-4) + 0 * b,
    lambda x, w, b: F.rms_norm(x, (FEATURES,), w, 1e-4) + 0 * b)  # fmt: skip
BATCH = Kind("batch", 0, (8, FEATURES, 2), 2 * FEATURES + 1, of_batch,  # rows are split
    lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True, eps=1e-4),
)  # fmt: skip
KINDS = [LAYER, ROOT, BATCH]
W, B = wide(FEATURES, seed=1), wide(FEATURES, seed=2)


def part(x, dim=0, axis="model"):
    return x.chunk(ff.axis_size(axis), dim)[ff.axis_index(axis)]


def own(kind, x):
    """This rank's part of a parameter, or all of it."""
    return x if kind.dim == 0 else part(x)


def derivatives(kind, x, w, b, t, axis):
    """Value, first and second derivatives, and a tangent; of parts, this rank's."""

    def loss(x, w, b):
        y = kind.torchs(x, w, b) if axis is None else kind.ours(x, w, b, axis)
        return joined((torch.sin(y) * t).sum())

    def joined(value):
        return value if axis is None else ff.psum(value, axis)

    first = torch.func.grad(loss, argnums=(0, 1, 2))

    def again(*args):
        return joined(sum((g * g).sum() for g in first(*args)))

    second = torch.func.grad(again, argnums=(0, 1, 2))(x, w, b)
    tangent = torch.func.jvp(loss, (x, w, b), (t, w.cos(), b.cos()))[1]
    return (loss(x, w, b), tangent), first(x, w, b), second


@settings(max_examples=examples(14))
@given(st.sampled_from(KINDS), st.sampled_from([2, 4]), st.integers(0, 50))
def test_derivatives_to_any_order(kind, n, seed) -> None:
    x, t = wide(*kind.shape, seed=seed) + 1, wide(*kind.shape, seed=seed + 1)
    expected = derivatives(kind, x, W, B, t, None)

    def main():
        values = part(x, kind.dim), own(kind, W), own(kind, B), part(t, kind.dim)
        mine = tuple(
            (part(gx, kind.dim), own(kind, gw), own(kind, gb)) for gx, gw, gb in right
        )
        return derivatives(kind, *values, "model"), (expected[0], *mine)

    right = expected[1:]
    for found, whole in ff.spmd(main, simulated(model=n))():
        close(found, whole, 1e-9)


@settings(max_examples=5)
@given(
    st.sampled_from([layer_norm, rms_norm]),
    st.sampled_from(["", "s", "rs", "sr"]),
    st.sampled_from([1, 2]),
)
@example(layer_norm, "rs", 2)
def test_a_split_leaf_tells_the_axis(norm, order, n) -> None:
    """Between a column layer and a row layer; and a plan knows what is sent."""
    names = "w" if norm is rms_norm else "wb"

    @ff.unit
    def block(p, x):
        h = norm(torch.tanh(column_linear(x, p["up"])), *(p[k] for k in names))
        return row_linear(h, p["down"])

    def loss(params, x):
        return sum(block(p, x).square().mean() for p in params)

    def block_of(k):
        split = {"w": W, "b": B, "up": wide(FEATURES, 4, seed=k)}
        return {n: split[n].clone() for n in (*names, "up")} | {
            "down": wide(4, FEATURES, seed=k + 1)
        }

    axes = {"data": 2, "model": n} if order else {"model": n}
    params, x = [block_of(20), block_of(30)], wide(4, 4, seed=9)
    mesh = simulated(**axes)
    grad = step = ff.value_and_grad(loss)
    for key in order:
        step = ff.remat(step) if key == "r" else ff.shard(step, mesh, "data")
    layouts = {"*/[uwb]*": ff.Split(0, "model"), "*/down": ff.Split(1, "model")}

    how = {"mesh": mesh, "layouts": layouts, "planned": True}
    for found, _ in with_ledger(lambda mesh: step, params, x, **how):
        close(found, grad(params, x), 1e-11)


@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_one_sum_forward_and_one_backward(kind, n=4) -> None:
    x, t = wide(*kind.shape, seed=3), wide(*kind.shape, seed=4)

    def main():
        mine, w, b = part(x, kind.dim).requires_grad_(), own(kind, W), own(kind, B)
        with ff.ledger() as log:
            y = kind.ours(mine, w, b, "model")
            (y * part(t, kind.dim)).sum().backward()
        return [r.bytes for r in log.of()]

    sent = 2 * (n - 1) * kind.numbers * 8 / n
    assert ff.spmd(main, simulated(model=n))()[0] == [sent, sent]


@pytest.mark.parametrize("kind", [LAYER, BATCH], ids=repr)
def test_a_mean_far_larger_than_the_deviation_costs_no_digits(kind, ratio=1e4) -> None:
    x, t = floats(*kind.shape, seed=3) + ratio, floats(*kind.shape, seed=5)

    def derivative(norm, x, t):
        return norm(x), torch.func.grad(lambda x: (norm(x) * t).sum())(x)

    right = derivative(lambda x: kind.torchs(x, None, None), x.double(), t.double())

    def main():
        norm = lambda x: kind.ours(x, None, None, "model")  # noqa: E731
        return derivative(norm, part(x, kind.dim), part(t, kind.dim))

    outs = ff.spmd(main, simulated(model=2))()
    for k, expected in enumerate(right):
        found = torch.cat([out[k] for out in outs], kind.dim)
        close(found.double(), expected, 4e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", [LAYER, ROOT, BATCH], ids=repr)
def test_dtypes(kind, dtype) -> None:
    x, w, b = (v.to(dtype) for v in (wide(*kind.shape, seed=3), W, B))
    expected = kind.torchs(x.double(), w.double(), b.double()).to(dtype)

    def main():
        return kind.ours(part(x, kind.dim), own(kind, w), own(kind, b), "model")

    found = torch.cat(ff.spmd(main, simulated(model=4))(), kind.dim)
    close(found, expected, {torch.float32: 1e-6}.get(dtype, 2e-2))


# What is refused


def leaf(dim, axis="model"):
    layout = ff.Layout((4, 4)[: dim + 1], torch.float32, (ff.Split(dim, axis, 2),), "w")
    return ff.Sharded(torch.ones(2) if dim == 0 else torch.ones(4, 2), layout)


X = torch.ones(3, 2)


def ranks(call, n=2):
    return ff.spmd(call, simulated(model=n, other=1))


test_bad_input_is_refused = all_refused({
    "a whole weight": (ranks(lambda: layer_norm(X, torch.ones(4), axis="model")),
        ValueError, r"of the weight \(4,\): lay it out by ff.Split\(0"),
    "a whole bias": (ranks(lambda: layer_norm(X, leaf(0), torch.ones(4))), ValueError,
        r"of the bias \(4,\)"),
    "another dim": (ranks(lambda: rms_norm(X, leaf(1))), ValueError,
        "rms_norm: .* is no leaf for it: split it along dim 0"),
    "another axis": (ranks(lambda: layer_norm(X, leaf(0), axis="other")), ValueError,
        "is no leaf for it: split it .* over axis .other., or leave axis= out"),
    "axes at odds": (ranks(lambda: layer_norm(X, leaf(0, "other"), leaf(0))),
        ValueError, "is no leaf for it: split it .*, over axis .other."),
    "an unknown axis": (ranks(lambda: layer_norm(X, axis="column")), ValueError,
        'unknown axis "column"'),
})  # fmt: skip
