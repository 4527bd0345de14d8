"""`accumulate`: the plain loop over microbatches, wherever it stands."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.packing import split_buffers
from tests.checks import same
from tests.models import integers
from tests.probes import LiveBytes

P = {
    "a": integers(3, 4, seed=1, high=3), "none": None, "n": 2,
    "b": [integers(4, seed=2, high=3), integers(4, 2, seed=3, high=3)],
}  # fmt: skip
X, Y = integers(8, 3, seed=4, high=3), integers(8, 2, seed=5, high=3)


@ff.unit
def hidden(p, x):
    return (x @ p["a"] + p["b"]) * p["n"]


def first(p, x):
    return hidden({"a": p["a"], "b": p["b"][0], "n": p["n"]}, x)


@ff.unit
def squares(w, h, y):
    return (h @ w - y) ** 2


def total(p, batch):
    return squares(p["b"][1], first(p, batch["x"]), batch["y"]).sum()


def mean(p, batch):
    return total(p, batch) / len(batch["x"])


def weighted(p, batch):
    keep = (batch["y"].sum(1) > 0).float()
    errors = squares(p["b"][1], first(p, batch["x"]), batch["y"]).sum(1)
    return ff.Weighted((errors * keep).sum(), keep.sum())


BATCH = {"x": X, "y": Y}


def loop(f, params, batch, n):
    """What `accumulate` says that it equals."""
    parts = [{k: v.chunk(n)[i] for k, v in batch.items()} for i in range(n)]
    outs = [ff.value_and_grad(f)(params, part) for part in parts]
    add = lambda *xs: sum(xs[1:], xs[0]) / n  # noqa: E731
    return tree.map(add, *outs)


@pytest.mark.parametrize("f", [total, mean])
@given(st.sampled_from([1, 2, 4, 8]))
def test_it_equals_the_plain_loop_bit_by_bit(f, n) -> None:
    same(ff.accumulate(ff.value_and_grad(f), n)(P, BATCH), loop(f, P, BATCH, n))


@given(st.sampled_from([1, 2, 4, 8]))
def test_a_mean_and_a_weighted_loss_equal_those_of_the_whole_batch(n) -> None:
    for f in (mean, weighted):
        grad = ff.value_and_grad(f)
        same(ff.accumulate(grad, n)(P, BATCH), grad(P, BATCH))


ONE = {
    (f, n): ff.accumulate(ff.value_and_grad(f), n)(P, BATCH)
    for f in (total, mean, weighted)
    for n in (1, 2, 4, 8)
}


@pytest.mark.parametrize("f", [total, mean, weighted], ids=lambda f: f.__name__)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks, n", [(2, 2), (2, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("order", ["shard(accumulate)", "accumulate(shard)", "both"])
def test_with_shard_in_either_order_it_equals_one_device(
    f, zero, ranks, n, order
) -> None:
    mesh = ff.make_mesh({"data": ranks}, "simulated")

    def main():
        g = ff.value_and_grad(f)
        if order == "shard(accumulate)":
            g = ff.shard(ff.accumulate(g, n), mesh, "data", zero=zero)
        elif order == "accumulate(shard)":
            g = ff.accumulate(ff.shard(g, mesh, "data", zero=zero), n)
        else:
            g = ff.accumulate(g, max(n // 2, 1))
            g = ff.accumulate(ff.shard(g, mesh, "data", zero=zero), min(n, 2))
        mine = ff.local_batch(BATCH, mesh, "data")
        params = ff.place(g, P, mine)
        with ff.ledger() as log:
            value, grads = g(params, mine)
        kept = tree.leaves(grads, is_leaf=is_sharded)
        flat = len(split_buffers(grads).tensors)
        assert all(not is_sharded(x) or x.packed is not None for x in kept)
        return value, ff.unshard(grads), flat, log

    value, grads, flat, log = ff.spmd(main, mesh)()[0]
    same((value, grads), ONE[f, n * ranks])
    assert flat == 2  # gradients stay one tensor for each unit
    reduction = "psum" if zero == 0 else "psum_scatter"
    units = [r for r in log.of(0) if r.op == reduction and r.phase != "loss"]
    times = {"shard(accumulate)": 1, "accumulate(shard)": n}.get(order, min(n, 2))
    assert len(units) == 2 * times


def test_gradients_that_autograd_hands_out_twice_or_expanded() -> None:
    x = torch.arange(4.0)
    grad = ff.value_and_grad(lambda p, x: (p[0] + p[1]).sum() * x.sum())
    _, grads = ff.accumulate(grad, 4)((torch.ones(3), torch.ones(3)), x)
    same(grads, (torch.full((3,), 1.5),) * 2)


class Hand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, x):
        ctx.x = x
        return (w * x).sum()

    @staticmethod
    def backward(ctx, g):
        return ctx.x, None  # the caller's own memory


def test_the_callers_data_are_not_written_into() -> None:
    x = torch.arange(6.0)
    before = x.clone()
    _, grad = ff.accumulate(ff.value_and_grad(Hand.apply), 3)(torch.ones(2), x)
    same((x, grad), (before, torch.tensor([2.0, 3.0])))


def test_batches_of_any_form() -> None:
    def f(w, a, pair, *, scale, n, c=None):
        return (w * a * pair[0] * pair[1]["c"]).sum() * scale * n

    w, a, c = torch.tensor(2.0), integers(4), integers(4, seed=1)
    g = ff.value_and_grad(f, batch_argnums=(1, 2))
    given_ = (w, a, (a, {"c": c}))
    keywords = {"scale": torch.tensor(0.5), "n": 3}
    value, grad = ff.accumulate(g, 2)(*given_, **keywords)
    expected = g(*given_, **keywords)
    same((value * 2, grad * 2), expected)
    own = ff.value_and_grad(f, argnums=1, batch_argnums=(1, -1))
    value, grad = ff.accumulate(own, 2)(*given_, **keywords)
    same((value * 2, grad * 2), own(*given_, **keywords))


def test_nested() -> None:
    g = ff.value_and_grad(mean)
    expected = ff.accumulate(g, 8)(P, BATCH)
    same(ff.accumulate(ff.accumulate(g, 2), 4)(P, BATCH), expected)
    same(ff.accumulate(ff.accumulate(g, 1), 8)(P, BATCH), expected)


def test_two_gradient_calls_in_a_step_are_accumulated_each() -> None:
    def step(p, batch):
        a, ga = ff.value_and_grad(mean)(p, batch)
        b, gb = ff.value_and_grad(total)(p, batch)
        return (a, ga), (b, gb)

    same(
        ff.accumulate(step, 2)(P, BATCH),
        (loop(mean, P, BATCH, 2), loop(total, P, BATCH, 2)),
    )


def test_a_gradient_call_within_the_loss_is_not_cut_again() -> None:
    def rows(p, batch):
        inner = lambda x: total(p, {**batch, "x": x})  # noqa: E731
        value, g = ff.value_and_grad(inner)(batch["x"])
        return value + g.square().sum()

    found = ff.accumulate(ff.value_and_grad(rows), 4)(P, BATCH)
    same(found, loop(rows, P, BATCH, 4))


@pytest.mark.parametrize(
    "n, why", [(3, "8 is not a multiple of 3"), (5, "8 is not"), (16, "at least one")]
)
def test_a_number_that_does_not_divide_the_batch_is_refused(n, why) -> None:
    with pytest.raises(ValueError, match=rf"1/x.*{n} microbatches: .*{why}") as info:
        ff.accumulate(ff.value_and_grad(mean), n)(P, BATCH)
    assert "(8, 3)" in str(info.value)


def test_losses_weighted_in_some_microbatches_alone_are_refused() -> None:
    def loss(w, x):
        return ff.Weighted((w * x).sum(), len(x)) if x[0] else (w * x).mean()

    grad = ff.accumulate(ff.value_and_grad(loss), 2)
    with pytest.raises(TypeError, match="a mean in others"):
        grad(torch.tensor(1.0), torch.tensor([0.0, 0, 1, 1]))


@pytest.mark.parametrize("n", [0, -1, 2.0, "2"])
def test_a_number_that_is_none_is_refused(n) -> None:
    with pytest.raises(ValueError, match="number of microbatches"):
        ff.accumulate(ff.value_and_grad(mean), n)


def test_under_torch_func_and_differentiated_again() -> None:
    def f(w, x):
        return (torch.sin(w * x) ** 2).mean()

    def g(w):
        return ff.accumulate(ff.value_and_grad(f), 2)(w, X)[1]

    w = torch.linspace(-1, 1, 3)
    expected = torch.func.jacrev(torch.func.grad(lambda w: f(w, X)))(w)
    torch.testing.assert_close(torch.func.jacrev(g)(w), expected)
    leaf = w.clone().requires_grad_()
    (again,) = torch.autograd.grad(g(leaf).sum(), leaf)
    torch.testing.assert_close(again, expected.sum(0))
    maps = torch.func.vmap(lambda w: ff.accumulate(ff.value_and_grad(f), 4)(w, X)[1])
    torch.testing.assert_close(maps(torch.stack([w, 2 * w]))[1], g(2 * w))


def test_it_holds_three_gradients_at_most_and_one_microbatch() -> None:
    w, x = torch.ones(64, 64), torch.ones(4 * 512, 64)

    def peak(n):
        with LiveBytes(w, x) as memory:
            ff.accumulate(
                ff.value_and_grad(lambda w, x: torch.sin(torch.sin(x @ w)).sum()), n
            )(w, x)
        return memory.peak / w.nbytes

    once, four = peak(1), peak(4)
    assert once > 64 and four <= once / 4 + 3, (once, four)
