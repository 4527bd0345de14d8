"""Cross-entropy of a vocabulary in parts, and of logits that nobody ever holds.

The judge is torch's own loss of the whole logits, in float64.
"""

from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc.nn import linear_cross_entropy, vocab_cross_entropy
from tests.checks import all_refused, close, simulated, unchanged, with_ledger
from tests.covering import examples
from tests.probes import LiveBytes

# Of torch's own forward mode.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

D = 3
DRAWN = torch.Generator().manual_seed(0)


def draw(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=DRAWN, dtype=dtype)


def drawn_targets(n, classes, ignored=-100):
    y = torch.randint(classes, (n,), generator=DRAWN)
    return torch.where(torch.rand(n, generator=DRAWN) < 0.2, ignored, y)


def judge(z, y, *, z_loss=0.0, ignore_index=-100, reduction="mean", **how):
    """Torch's loss of whole logits, and the z-loss by its formula."""
    how |= {"ignore_index": ignore_index, "reduction": reduction}
    kept = y != ignore_index
    squares = torch.where(kept, torch.logsumexp(z, -1) ** 2, 0)
    if reduction == "mean":
        squares = squares.sum() / kept.sum()
    elif reduction == "sum":
        squares = squares.sum()
    return F.cross_entropy(z, y, **how) + (z_loss * squares if z_loss else 0)


def judged(x, w, y, **how):
    return judge(F.linear(x, w), y, **how)


def of_logits(x, w, y, axis=None, tile=None, **how):
    """The other function, of the logits of a last layer whose weight is split."""
    x = x if axis is None else ff.pcast(x, axis, to="V")
    return vocab_cross_entropy(F.linear(x, w), y, axis, **how)


def tiled(x, w, y, axis=None, **how):
    return linear_cross_entropy(x, w, y, axis=axis, **how)


BOTH = pytest.mark.parametrize("fn", [of_logits, tiled])


def weighed(loss):
    """One number of the losses of several tokens, each with another weight."""
    return (loss * torch.arange(1, 1 + loss.numel())).sum() if loss.ndim else loss


def by_autograd(fn, x, w):
    """The value and both gradients, by autograd alone."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    value = fn(x, w)
    return value.detach(), torch.autograd.grad(value, (x, w))


def by_functions(fn, x, w):
    found, value = torch.func.grad_and_value(fn, (0, 1))(x, w)
    return value, found


def by_ranks(n, fn, w, x=None, dim=0):
    """``fn(part of w)`` on ranks; of x too, which is cut along ``dim``."""

    def main():
        i = ff.axis_index("model")
        cut = () if x is None else (x.tensor_split(n, dim)[i],)
        return fn(w.tensor_split(n)[i], *cut)

    return ff.spmd(main, simulated(model=n))()


HOW = {
    "label_smoothing": st.sampled_from([0.0, 0.1, 1.0]),
    "z_loss": st.sampled_from([0.0, 0.01]),
    "reduction": st.sampled_from(["mean", "sum", "none"]),
    "ignore_index": st.sampled_from([-100, 0]),
}
ALL = {"label_smoothing": 0.1, "z_loss": 0.01, "reduction": "mean", "ignore_index": -1}


@settings(max_examples=examples(16))
@given(
    fn=st.sampled_from([of_logits, tiled]),
    derive=st.sampled_from([by_autograd, by_functions]),
    ranks=st.integers(1, 4),
    own=st.integers(1, 4),
    tokens=st.integers(0, 7),
    tile=st.integers(1, 8),
    how=st.fixed_dictionaries(HOW),
    kept=st.sampled_from([True, True, False]),
)
@example(tiled, by_autograd, 2, 3, 7, 3, ALL, True)
@example(of_logits, by_functions, 2, 3, 7, 3, ALL, True)
@example(tiled, by_functions, 3, 2, 7, 2, ALL | {"reduction": "sum"}, True)
@example(tiled, by_autograd, 2, 3, 7, 3, ALL | {"reduction": "none"}, True)
def test_it_is_the_loss_of_whole_logits(
    fn, derive, ranks, own, tokens, tile, how, kept
):
    x, w = draw(tokens, D), draw(ranks * own, D)
    y = drawn_targets(tokens, ranks * own, how["ignore_index"])
    y = y if kept else torch.full_like(y, how["ignore_index"])
    value, (dx, dw) = by_autograd(lambda x, w: weighed(judged(x, w, y, **how)), x, w)

    def mine(x, w):
        return weighed(fn(x, w, y, "model", tile=tile, **how))

    with ff.ledger() as log, unchanged(x, w):
        found = by_ranks(ranks, lambda part: derive(mine, x, part), w)
    for mine, part in zip(found, dw.tensor_split(ranks), strict=True):
        torch.testing.assert_close(
            mine, (value, (dx, part)), rtol=1e-11, atol=1e-11, equal_nan=True
        )
    # Of each token the maximum and two or three sums, and back the gradient of x.
    sums = 2 + (how["label_smoothing"] > 0)
    ring = Fraction(2 * (ranks - 1), ranks) * 8 * tokens
    assert log.bytes("model", "pmax") == float(ring)
    assert log.bytes("model", "psum") == float(ring * (sums + D))


@BOTH
@pytest.mark.parametrize(
    ("transform", "reduction"),
    [("hessian", "mean"), ("mixed", "none"), ("jvp", "mean"), ("vmap", "none")],
)
def test_every_derivative_holds(fn, transform, reduction):
    x, w, y = draw(4, D), draw(5, D), drawn_targets(4, 5)
    xs, ys = draw(2, 4, D), torch.stack([y, y.flip(0)])
    both, how = (0, 1), {"label_smoothing": 0.2, "z_loss": 0.1, "reduction": reduction}

    def derived(loss):
        def f(x, w, y=y):
            return weighed(loss(x, w, y, **how))

        return {
            "hessian": lambda: torch.func.hessian(f, both)(x, w),
            "mixed": lambda: torch.func.jacrev(torch.func.jacfwd(f, both), both)(x, w),
            "jvp": lambda: torch.func.jvp(f, (x, w), (w[:4], -w)),
            "vmap": lambda: torch.vmap(torch.func.grad(f), (0, None, 0))(xs, w, ys),
        }[transform]()

    tiles = {"tile": 2} if fn is tiled else {}
    found = derived(lambda *args, **how: fn(*args, **how, **tiles))
    close(found, derived(judged), 1e-10)


# Masked classes


def test_a_rank_may_have_masked_classes_alone():
    """As where a vocabulary is padded to a multiple of the axis."""
    z, y = draw(4, 6), torch.tensor([0, 1, 2, 3])
    z[:, 4:] = -torch.inf
    grad = torch.func.grad(lambda z: vocab_cross_entropy(z, y, "model"))

    def main():
        part = z.tensor_split(3, 1)[ff.axis_index("model")]
        leaf = part.clone().requires_grad_()
        vocab_cross_entropy(leaf, y, "model").backward()
        return leaf.grad, grad(part), torch.vmap(grad)(part[None])[0]

    expected = torch.func.grad(lambda z: judge(z, y))(z)
    for found in zip(*ff.spmd(main, simulated(model=3))(), strict=True):
        close(torch.cat(found, 1), expected, 1e-12)


# Large margins


@pytest.mark.parametrize(("classes", "tile"), [(32, 5), (37, 16), (37, None)])
def test_margins_are_those_of_the_equation(classes, tile):
    """Whatever is left for the last tile: where FairScale's is wrong."""
    x, w, y = draw(17, D), draw(classes, D), drawn_targets(17, classes)

    def margins(x, w):
        cosines = F.normalize(x, dim=1) @ F.normalize(w, dim=1).T
        own = F.one_hot(y.clamp(min=0), classes).double()
        return judge(30 * (cosines - 0.35 * own), y, reduction="sum")

    how = {"scale": 30.0, "margin": 0.35, "reduction": "sum", "tile": tile}
    expected = by_autograd(margins, x, w)
    for derive in (by_autograd, by_functions):
        found = derive(lambda x, w: linear_cross_entropy(x, w, y, **how), x, w)
        close(found, expected, 1e-10)
    if classes % 2 == 0:
        split = lambda x, w: tiled(x, w, y, "model", **how)  # noqa: E731
        value, (dx, dw) = expected
        for i, found in enumerate(by_ranks(2, lambda p: by_autograd(split, x, p), w)):
            close(found, (value, (dx, dw.tensor_split(2)[i])), 1e-10)


# Memory


N, WIDE, V, TILE = 64, 4, 1024, 4
LOGITS = 4 * N * V


def peak_and_kept(fn):
    """Of the loss with its backward pass, alone, and what it keeps: in bytes."""
    x = draw(N, WIDE, dtype=torch.float32).requires_grad_()
    w = draw(V, WIDE, dtype=torch.float32).requires_grad_()
    y = drawn_targets(N, V)
    with LiveBytes(x, w, y) as live:
        loss = fn(x, w, y)
        forward, kept = live.peak, live.live
        grads = torch.autograd.grad(loss, (x, w))
        del loss, grads
    return live.peak, forward, kept


def test_gradients_that_are_made_forward_take_their_own_size_and_a_tile():
    peak, forward, kept = peak_and_kept(lambda *a: linear_cross_entropy(*a, tile=TILE))
    gradients, tile, small = 4 * (V + N) * WIDE, 4 * TILE * V, 64 * N
    assert gradients <= kept <= gradients + small
    assert forward <= gradients + tile + small
    assert peak <= max(forward, 2 * gradients + small)
    plain = peak_and_kept(lambda x, w, y: F.cross_entropy(F.linear(x, w), y))
    assert plain[0] >= 2 * LOGITS  # the judge of the probe


@pytest.mark.parametrize("transformed", [False, True])
def test_nobody_holds_all_logits(transformed):
    x, w = draw(N, WIDE, dtype=torch.float32), draw(V, WIDE).float()
    how = {"tile": TILE} if transformed else {"tile": TILE, "reduction": "none"}

    def loss(x, w):
        return linear_cross_entropy(x, w, drawn_targets(N, V), **how).sum()

    if transformed:
        with LiveBytes(x, w) as live, torch.no_grad():
            torch.func.grad(loss, (0, 1))(x, w)
        peak = live.peak
    else:
        peak, _, kept = peak_and_kept(lambda x, w, y: loss(x, w))
        assert kept <= 64 * N
    assert peak <= 3 * 4 * TILE * V + 3 * 4 * (V + N) * WIDE < LOGITS


# Dtypes


@pytest.mark.parametrize(
    ("fn", "dtype", "derive"),
    [
        (tiled, torch.bfloat16, by_autograd),
        (tiled, torch.float16, by_functions),
        (of_logits, torch.bfloat16, by_autograd),
    ],
)
def test_narrow_dtypes_are_summed_in_a_wider_one(fn, dtype, derive):
    x, w = draw(300, D).to(dtype), draw(50, D).to(dtype)
    y = drawn_targets(300, 50)
    tiles = {"tile": 7} if fn is tiled else {}
    value, grads = derive(lambda x, w: fn(x, w, y, **tiles), x, w)
    assert value.dtype == torch.float32
    assert [g.dtype for g in grads] == [dtype, dtype]
    expected, judges = by_autograd(lambda x, w: judged(x, w, y), x.double(), w.double())
    eps = torch.finfo(dtype).eps
    close(value.double(), expected, 2 * eps)
    for g, j in zip(grads, judges, strict=True):
        # One rounding of each, not one for each of 43 tiles.
        assert (g.double() - j).abs().max() <= 2 * eps * j.abs().max()


@pytest.mark.parametrize("derive", [by_autograd, by_functions])
def test_tiles_are_added_up_in_fp32(derive):
    """Each adds to one row about what is lost of it in bf16 after 256 of them."""
    x, w = draw(600, D).abs().bfloat16(), torch.zeros(4, D).bfloat16()
    y = torch.zeros(600, dtype=torch.int64)
    how = {"reduction": "sum", "tile": 1}
    _, (_, dw) = derive(lambda x, w: linear_cross_entropy(x, w, y, **how), x, w)
    close(dw[0].double() / (-0.75 * x.double().sum(0)), torch.ones(D).double(), 2**-7)


@pytest.mark.parametrize("derive", [by_autograd, by_functions])
def test_a_scaled_loss_keeps_small_gradients_in_fp16(derive):
    """Of each token 1 / (tokens * classes): 2.7 times the least number."""
    tokens, classes = 2**9, 3 * 2**12
    x, w = torch.ones(tokens, 1).half(), torch.zeros(classes, 1).half()
    y = torch.zeros(tokens, dtype=torch.int64)
    loss = lambda x, w: 2.0**13 * linear_cross_entropy(x, w, y, tile=64)  # noqa: E731
    _, (_, dw) = derive(loss, x, w)
    close(dw[1:], torch.full_like(dw[1:], 2**13 / classes), 2e-3)


def test_autocast_makes_products_in_its_dtype_and_nothing_else():
    x, w, y = draw(40, D).float(), draw(9, D).float(), drawn_targets(40, 9)
    narrow = by_autograd(lambda x, w: tiled(x, w, y), x.bfloat16(), w.bfloat16())

    def loss(x, w):
        with torch.autocast("cpu"):
            return tiled(x, w, y)

    value, grads = by_autograd(loss, x, w)
    close(value, narrow[0], 0.0)
    assert [g.dtype for g in grads] == [torch.float32] * 2
    close([g.bfloat16() for g in grads], list(narrow[1]), 0.0)
    with torch.autocast("cpu"):  # which would also see what goes back
        value, grads = by_functions(lambda x, w: tiled(x, w, y), x, w)
        cosines = by_autograd(lambda x, w: tiled(x, w, y, scale=9.0), x, w)
    close([g.bfloat16() for g in grads], list(narrow[1]), 0.02)
    # Cosines are those of what was given.
    close(cosines, by_autograd(lambda x, w: tiled(x, w, y, scale=9.0), x, w), 0.0)


# Leaves that are split, under the transforms


@ff.unit
def body(p, tokens):
    return torch.tanh(F.embedding(tokens, p))


@ff.unit
def head(p, h, y, reduction="mean"):
    loss = linear_cross_entropy(
        h, p, y, tile=3, label_smoothing=0.1, reduction=reduction
    )
    return loss.mean()


@ff.unit
def middle(p, h):
    return torch.tanh(h @ p)


STACKS = {
    "shard": ({"data": 2, "model": 2}, lambda f, m: ff.shard(f, m, "data")),
    "shard(remat)": (
        {"data": 2, "model": 2}, lambda f, m: ff.shard(ff.remat(f), m, "data")),
    # Gradients of weights come later: both are made at once.
    "pipeline": ({"pipe": 2, "model": 2}, lambda f, m: ff.pipeline(
        f, m, "pipe", n_microbatches=2, schedule=ff.schedules.zb_h1)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("stack", "reduction"),
    [("shard", "none"), ("shard(remat)", "mean"), ("pipeline", "mean")],
)
def test_a_leaf_that_is_split_names_its_axis(stack, reduction):
    """And a plan knows what is sent."""
    params = {"embed": draw(12, D), "middle": draw(D, D), "head": draw(12, D)}
    batch = tuple(torch.randint(12, (2, 8), generator=DRAWN).unbind())

    def loss(p, batch):
        h = middle(p["middle"], body(p["embed"], batch[0]))
        return head(p["head"], h, batch[1], reduction)

    axes, wrap = STACKS[stack]
    grad = ff.value_and_grad(loss)
    how = {"layouts": {"head": ff.Split(0, "model")}, "planned": "data" in axes}
    step, mesh = lambda mesh: wrap(grad, mesh), simulated(**axes)
    for found, log in with_ledger(step, params, batch, mesh=mesh, **how):
        close(found, grad(params, batch), 1e-12)
        assert "pipe" in axes or all(log.bytes(axis) > 0 for axis in axes)


@settings(max_examples=6)
@given(ranks=st.integers(1, 3), own=st.integers(1, 3), tile=st.integers(1, 9))
def test_tokens_may_come_split_along_a_sequence(ranks, own, tile):
    x, w, length = draw(2, ranks * own, D), draw(ranks * 2, D), ranks * own
    y = drawn_targets(2 * length, ranks * 2).view(2, length)
    how = {"sequence_dim": 1, "tile": tile, "reduction": "sum"}

    def mine(w, x):
        return by_autograd(lambda x, w: tiled(x, w, y, "model", **how), x, w)

    expected = by_autograd(
        lambda x, w: judged(x.flatten(0, 1), w, y.flatten(), reduction="sum"), x, w
    )
    with ff.ledger() as log:
        found = by_ranks(ranks, mine, w, x, dim=1)
    dx, dw = (
        g.tensor_split(ranks, d) for d, g in zip((1, 0), expected[1], strict=True)
    )
    for i, mine in enumerate(found):
        close(mine, (expected[0], (dx[i], dw[i])), 1e-11)
    moved = (ranks - 1) * 2 * own * D * 8
    assert log.bytes("model", "all_gather") == moved
    assert log.bytes("model", "psum_scatter") == moved


# What is refused


X, W, Y = draw(4, D), draw(6, D), torch.tensor([0, 5, 3, -100])


def bad(index):
    y = Y.clone()
    y[1] = index
    return y


def on_ranks(fn, *args, **how):
    return ff.spmd(lambda: fn(*args, **how), simulated(model=2))


def leaf(shape, *parts):
    layout = ff.Layout(shape, torch.float64, parts, "head")
    return ff.Sharded(draw(*layout.local_shape({"model": 0, "d": 0})), layout)


VOCAB = lambda *args, **how: lambda: vocab_cross_entropy(*args, **how)  # noqa: E731
LINEAR = lambda *args, **how: lambda: linear_cross_entropy(*args, **how)  # noqa: E731


def of_leaf(shape, *parts, **how):
    return on_ranks(linear_cross_entropy, X, leaf(shape, *parts), Y, **how)


def of_averages():
    loss = lambda w, y: vocab_cross_entropy(X @ w.T, y, "data")  # noqa: E731
    step = ff.shard(ff.value_and_grad(loss), simulated(2), "data")
    ff.spmd(lambda: ff.place(step, W, Y), simulated(2))()


test_bad_input_is_refused = all_refused({
    "past the end": (VOCAB(X, bad(3)), IndexError, "target 3 .* of 3: .* 0 to 2"),
    "below 0": (VOCAB(X, bad(-1)), IndexError, "target -1 .* ignore_index=-100"),
    "of a tile": (LINEAR(X, W, bad(6)), IndexError, "target 6 .* 0 to 5"),
    "past all ranks": (on_ranks(vocab_cross_entropy, X, bad(6), "model"), IndexError,
        "target 6 is outside the vocabulary of 6"),
    "of all ranks' tiles": (on_ranks(linear_cross_entropy, X, W, bad(12), axis="model"),
        IndexError, "target 12 is outside the vocabulary of 12"),
    "under vmap": (lambda: torch.vmap(vocab_cross_entropy, (None, 0))(X, bad(9)[None]),
        IndexError, "target 9"),
    "probabilities": (VOCAB(X, X), TypeError, "targets are integers"),
    "truth values": (VOCAB(X, Y > 0), TypeError, "targets are integers"),
    "too few targets": (VOCAB(X, Y[:2]), ValueError, r"\(2,\) for .* \(4,\)"),
    "reduction": (VOCAB(X, Y, reduction="avg"), ValueError, "'mean', 'sum' or"),
    "smoothing below 0": (VOCAB(X, Y, label_smoothing=-0.1), ValueError, "within"),
    "smoothing above 1": (LINEAR(X, W, Y, label_smoothing=1.5), ValueError, "within"),
    "an axis of averages": (of_averages, ValueError, "another axis of the mesh"),
    "no tile": (LINEAR(X, W, Y, tile=0), ValueError, "at least one"),
    "margin": (LINEAR(X, W, Y, margin=0.3), ValueError, "scale="),
    "sequence_dim": (on_ranks(linear_cross_entropy, X, W, Y, axis="model",
        sequence_dim=1), ValueError, "before the last"),
    "another dim": (of_leaf((6, 6), ff.Split(1, "model", 2)), ValueError,
        "head .* along dim 0, over one axis"),
    "another axis": (of_leaf((6, 3), ff.Split(0, "model", 2), axis="data"), ValueError,
        "leave axis= out"),
    "cut too": (of_leaf((6, 3), ff.Split(0, "model", 2), ff.Flat(("d",), 1, "u", 0,
        18)), ValueError, "an @ff.unit"),
    "a whole leaf": (of_leaf((6, 3), axis="model"), ValueError,
        'split it along dim 0, over axis "model"'),
    "not divided": (of_leaf((7, 3), ff.Split(0, "model", 2)), ValueError,
        "divide 7: pad it to 8, or cut it to 6"),
})  # fmt: skip


@pytest.mark.parametrize("by", [(0,), (1,), (0, 1)])
def test_a_second_derivative_by_autograd_is_refused_where_it_would_be_lost(by):
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    loss = linear_cross_entropy(x, w, Y)
    dx, dw = torch.autograd.grad(loss, (x, w), create_graph=True)
    for g in (dx, dw):
        with pytest.raises(RuntimeError, match="torch.func"):
            total = loss + g.square().sum()
            torch.autograd.grad(total, [(x, w)[i] for i in by], retain_graph=True)
