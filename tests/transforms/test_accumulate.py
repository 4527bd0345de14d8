"""`accumulate`: the plain loop over microbatches, wherever it stands."""

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from fsfunc.transforms.gradient_sums import GradientSums
from tests.checks import all_refused, on_ranks, same, simulated
from tests.models import integers
from tests.probes import LiveBytes

P = {
    "a": integers(3, 4, seed=1, high=3), "none": None, "n": 2,
    "b": [integers(4, seed=2, high=3), integers(4, 2, seed=3, high=3)],
}  # fmt: skip
X, Y = integers(8, 3, seed=4, high=3), integers(8, 2, seed=5, high=3)
BATCH = {"x": X, "y": Y}
COUNTS = st.sampled_from([1, 2, 4, 8])
vag = ff.value_and_grad


@ff.unit
def hidden(p, x):
    return (x @ p["a"] + p["b"]) * p["n"]


@ff.unit
def squares(w, h, y):
    return (h @ w - y) ** 2


def errors(p, batch):
    h = hidden({"a": p["a"], "b": p["b"][0], "n": p["n"]}, batch["x"])
    return squares(p["b"][1], h, batch["y"])


def total(p, batch):
    return errors(p, batch).sum()


def mean(p, batch):
    return total(p, batch) / len(batch["x"])


def weighted(p, batch):
    keep = (batch["y"].sum(1) > 0).float()
    return ff.Weighted((errors(p, batch).sum(1) * keep).sum(), keep.sum())


def loop(f, params, batch, n):
    """What `accumulate` says that it equals."""
    parts = [{k: v.chunk(n)[i] for k, v in batch.items()} for i in range(n)]
    outs = [vag(f)(params, part) for part in parts]
    return tree.map(lambda *xs: sum(xs[1:], xs[0]) / n, *outs)


@pytest.mark.parametrize("f", [total, mean, weighted])
@given(COUNTS)
def test_it_equals_the_plain_loop_or_the_whole_batch_bit_by_bit(f, n):
    found = ff.accumulate(vag(f), n)(P, BATCH)
    if f is not weighted:
        same(found, loop(f, P, BATCH, n))
    if f is not total:
        same(found, vag(f)(P, BATCH))


class Hand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, x):
        ctx.x = x
        return (w * x).sum()

    @staticmethod
    def backward(ctx, g):
        return ctx.x, None  # the caller's own memory


def test_gradients_that_come_twice_expanded_or_in_the_callers_memory():
    x = torch.arange(4.0)
    grad = vag(lambda p, x: (p[0] + p[1]).sum() * x.sum())
    _, grads = ff.accumulate(grad, 4)((torch.ones(3), torch.ones(3)), x)
    same(grads, (torch.full((3,), 1.5),) * 2)
    x = torch.arange(6.0)
    before = x.clone()
    _, grad = ff.accumulate(vag(Hand.apply), 3)(torch.ones(2), x)
    same((x, grad), (before, torch.tensor([2.0, 3.0])))


@pytest.mark.parametrize("told", [{}, {"argnums": 1, "batch_argnums": (1, -1)}])
def test_batches_of_any_form(told):
    def f(w, a, pair, *, scale, n, c=None):
        return (w * a * pair[0] * pair[1]["c"]).sum() * scale * n

    a, c = integers(4), integers(4, seed=1)
    args, named = (
        (torch.tensor(2.0), a, (a, {"c": c})),
        {"scale": 0.5 * X[0, 0], "n": 3},
    )
    g = vag(f, **({"batch_argnums": (1, 2)} | told))
    value, grad = ff.accumulate(g, 2)(*args, **named)
    same((value * 2, grad * 2), g(*args, **named))


def some_weighted(w, x):
    return ff.Weighted((w * x).sum(), len(x)) if x[0] else (w * x).mean()


def cut(n):
    return lambda: ff.accumulate(vag(mean), n)(P, BATCH)


test_bad_input_is_refused = all_refused(
    {
        "3": (cut(3), ValueError, r"1/x.*\(8, 3\).*8 is not a multiple of 3"),
        "16": (cut(16), ValueError, "16 microbatches: .*at least one"),
        **{str(n): (cut(n), ValueError, "number of micro") for n in (0, -1, 2.0, "2")},
        "some weighted": (
            lambda: ff.accumulate(vag(some_weighted), 2)(
                torch.tensor(1.0), torch.tensor([0.0, 0, 1, 1])
            ),
            TypeError,
            "a mean in others",
        ),
    }
)


def test_under_torch_func_and_differentiated_again():
    def f(w, x):
        return (torch.sin(w * x) ** 2).mean()

    def g(w, n=2):
        return ff.accumulate(vag(f), n)(w, X)[1]

    w, close = torch.linspace(-1, 1, 3), torch.testing.assert_close
    expected = torch.func.jacrev(torch.func.grad(lambda w: f(w, X)))(w)
    close(torch.func.jacrev(g)(w), expected)
    leaf = w.clone().requires_grad_()
    close(torch.autograd.grad(g(leaf).sum(), leaf)[0], expected.sum(0))
    maps = torch.func.vmap(lambda w: g(w, 4))
    close(maps(torch.stack([w, 2 * w]))[1], g(2 * w))


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_transform_reads_of_a_microbatch_stays_as_it_was(ranks):
    """Though sums of later ones are added in the memory of the first's gradients."""
    mesh, kept = ff.make_mesh({"data": ranks}), {}

    class Keeping(ff.Interpretation):
        def gradient(self, run):
            def keep(call):
                outcome = run(call)
                kept.setdefault(ff.axis_index("data"), []).append(outcome.mean()[1])
                return outcome

            return keep

    sharded = ff.shard(vag(total), mesh, "data")
    step = ff.accumulate(ff.transformed(sharded, Keeping()), 2)

    def main():
        rows = ff.local_batch(BATCH, mesh, "data")
        params = ff.place(step, P, rows)
        step(params, rows)
        mine = kept[ff.axis_index("data")][-2:]
        parts = [{k: v.chunk(2)[i] for k, v in rows.items()} for i in range(2)]
        for found, part in zip(mine, parts, strict=True):
            same(ff.unshard(found)[0], ff.unshard(sharded(params, part)[1]))

    ff.spmd(main, mesh)()


def test_it_holds_three_gradients_at_most_and_one_microbatch():
    w, x = torch.ones(64, 64), torch.ones(4 * 512, 64)
    grad = vag(lambda w, x: torch.sin(torch.sin(x @ w)).sum())

    def peak(n):
        with LiveBytes(w, x) as memory:
            ff.accumulate(grad, n)(w, x)
        return memory.peak / w.nbytes

    once, four = peak(1), peak(4)
    assert once > 64 and four <= once / 4 + 3, (once, four)


BF16, FP32 = torch.bfloat16, torch.float32
SUMS = {  # dtypes of parameters, reductions and the loss; and whether it is told
    "as they come": (BF16, None, FP32, True),
    "before they are reduced": (FP32, None, FP32, True),
    "before they are reduced wide": (FP32, FP32, FP32, False),
    "losses": (FP32, FP32, BF16, True),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_too_narrow_for_so_many_terms_are_told(name):
    dtype, reduce, value, told = SUMS[name]
    unit, mesh = ff.unit(lambda w, x: w * x), simulated(1)

    def main():
        loss = lambda w, x: unit(w, x).float().mean().to(value)  # noqa: E731
        f = ff.accumulate(ff.precision(ff.value_and_grad(loss), BF16, reduce), 128)
        w, x = torch.ones((), dtype=dtype), torch.ones(128)
        f = f if name == "as they come" else ff.shard(f, mesh, "data")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            f(ff.place(f, w, x), x)
        return " ".join(str(s.message) for s in seen)

    said = ff.spmd(main, mesh)()[0]
    assert ("128 microbatches are added in torch.bfloat16" in said) == told


def test_gradients_are_added_where_the_sum_of_microbatches_lies(monkeypatch):
    """With the bits of buffers of their own, also of a leaf that a unit has twice."""

    @ff.unit
    def twice(p, x):
        return torch.tanh(x @ p["a"]) @ p["b"]

    def loss(params, x):
        for w in params:
            x = twice({"a": w, "b": w}, x)
        return x.square().mean()

    draw = torch.Generator().manual_seed(2)
    params = [torch.randn(4, 4, generator=draw) for _ in range(2)]
    batch, mesh = torch.randn(16, 4, generator=draw), simulated()
    step = ff.shard(ff.accumulate(ff.value_and_grad(loss), 4), mesh, "data", zero=2)
    allocate, counts = GradientSums._allocate, []

    def run():
        made = []
        counted = lambda *args: made.append(1) or allocate(*args)  # noqa: E731
        monkeypatch.setattr(GradientSums, "_allocate", counted)
        found = on_ranks(step, params, batch, mesh=mesh, calls=2)
        counts.append(len(made))
        return found

    run()  # is checked before it runs
    together = run()
    monkeypatch.setattr(GradientSums, "_sum_so_far", lambda *_: None)
    for found, expected in zip(together, run(), strict=True):
        same(found, expected)
    assert 4 * counts[1] == counts[2]
