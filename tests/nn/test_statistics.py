"""Deferred batch statistics: those of the whole batch, however it was cut."""

import functools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc.core.losses import add_aux
from fsfunc.tree.structure import TreeMismatch
from tests.checks import all_refused, close, same, simulated
from tests.covering import examples
from tests.probes import LiveBytes

C = 3
GENERATOR = torch.Generator().manual_seed(0)


def draw(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=GENERATOR, dtype=dtype)


def affine():
    return {"weight": draw(C), "bias": draw(C)}


# The model: two layers, each followed by a norm, whose statistics go out beside it.


@ff.unit
def layer(p, x):
    h = torch.einsum("oc,nc...->no...", p["w"], x)
    y, stats = ff.batch_norm(p["norm"], h)
    return torch.tanh(y) + x, stats, h


def model(params, x):
    """The loss and, beside it, each layer's statistics and what it normalised."""
    found, seen = [], []
    for p in params:
        x, stats, h = layer(p, x)
        found.append(stats)
        seen.append(h)
    return (x * x).mean(), (found, seen)


GRAD = ff.value_and_grad(model, has_aux=True)
PARAMS = [{"w": draw(C, C), "norm": affine()} for _ in range(2)]
FRESH = [ff.init_statistics(C) for _ in PARAMS]


def torchs(batches, momentum):
    """What BatchNorm makes of whole batches, one list of layers' inputs for each."""
    kinds = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d}
    kinds[5] = torch.nn.BatchNorm3d
    out = []
    for inputs in zip(*batches, strict=True):
        norm = kinds[inputs[0].ndim](C, momentum=momentum)
        for x in inputs:
            norm(x)
        mean, var, count = norm.running_mean, norm.running_var, norm.num_batches_tracked
        out.append(ff.RunningStatistics(mean, var, count))
    return out


def shape_of(ndim, n):
    return (n, C, *(2, 3, 2)[: ndim - 2])


SIZES = st.lists(st.integers(2, 7), min_size=1, max_size=5)
NDIMS, MOMENTA = st.integers(2, 5), st.sampled_from([0.1, None, 1.0, 0.0, 0.35])


@settings(max_examples=examples(10))
@given(st.lists(SIZES, min_size=1, max_size=3), NDIMS, MOMENTA)
def test_uneven_microbatches_give_torchs_statistics(batches, ndim, momentum) -> None:
    running, seen = FRESH, []
    GENERATOR.manual_seed(ndim)  # an example is the same each time
    for sizes in batches:
        parts = [model(PARAMS, draw(*shape_of(ndim, n)) * 3 + 2)[1] for n in sizes]
        stats, inputs = functools.reduce(add_aux, parts)
        assert [s.tree.count.item() for s in stats] == [inputs[0][:, 0].numel()] * 2
        running = ff.commit_statistics(running, stats, momentum)
        seen.append(inputs)
    close(running, torchs(seen, momentum))


@settings(max_examples=4)
@given(
    st.lists(st.integers(1, 3), min_size=2, max_size=3),
    NDIMS,
    st.sampled_from(["s", "sa"]),
)
@example([2, 1], 3, "as")
@example([1, 2], 2, "sra")
def test_uneven_ranks_and_several_microbatches(sizes, ndim, order) -> None:
    mesh, n = simulated(len(sizes)), 2
    sizes = [2 * n * size for size in sizes]
    GENERATOR.manual_seed(ndim)
    x = draw(*shape_of(ndim, sum(sizes)))
    wraps = {"a": lambda f: ff.accumulate(f, n), "r": ff.remat}
    wraps["s"] = lambda f: ff.shard(f, mesh, "data")

    def main():
        step = functools.reduce(lambda f, key: wraps[key](f), order, GRAD)
        mine = x.split(sizes)[ff.axis_index("data")]
        (_, (stats, seen)), _ = step(ff.place(step, PARAMS, mine), mine)
        return ff.commit_statistics(FRESH, stats, None), seen

    outs = ff.spmd(main, mesh)()
    whole = [torch.cat(hs) for hs in zip(*(seen for _, seen in outs), strict=True)]
    close(outs[0][0], torchs([whole], None))
    for other, _ in outs:  # the same bits on every rank
        same(other, outs[0][0])


def test_a_recompute_counts_nothing_twice() -> None:
    x, calls, n = draw(8, C), [], 2

    @ff.unit
    def noted(p, x):
        calls.append(0)
        return layer.fn(p, x)

    def loss(p, x):
        y, stats, _ = noted(p, x)
        return (y**2).mean(), stats

    grad = ff.value_and_grad(loss, has_aux=True)
    expected = ff.accumulate(grad, n)(PARAMS[0], x)
    before = len(calls)
    same(ff.accumulate(ff.remat(grad), n)(PARAMS[0], x), expected)
    assert before == n and len(calls) == 3 * n
    assert expected[0][1].tree.count.item() == 8


@pytest.mark.parametrize(
    ("ndim", "names"), [(2, "weight bias"), (3, "weight"), (4, "bias"), (5, "")]
)
def test_value_and_gradients_are_those_of_torch(ndim, names) -> None:
    params = {k: v for k, v in affine().items() if k in names.split()}
    x = draw(*shape_of(ndim, 5))

    def ours(p, x):
        return torch.sin(ff.batch_norm(p, x, eps=1e-3)[0]).sum()

    def theirs(p, x):
        w, b = p.get("weight"), p.get("bias")
        y = F.batch_norm(x, None, None, w, b, training=True, eps=1e-3)
        return torch.sin(y).sum()

    both = [ff.value_and_grad(f, argnums=(0, 1))(params, x) for f in (ours, theirs)]
    same(*both)
    same(ff.batch_norm(None, x)[0], F.batch_norm(x, None, None, training=True))


@pytest.mark.parametrize("ratio", [1e2, 1e5])
def test_a_mean_far_larger_than_the_deviation_costs_no_digits(ratio) -> None:
    x = draw(600, C) + ratio * torch.tensor([1.0, -1.0, 0.5])
    parts = [ff.batch_norm(None, piece)[1] for piece in x.split([2, 98, 500])]
    stats = functools.reduce(add_aux, parts)
    found = ff.commit_statistics(ff.init_statistics(C), stats, None)
    close(found.var.double() / x.double().var(0), torch.ones(C).double(), 2e-6)
    close(found.mean.double() / x.double().mean(0), torch.ones(C).double(), 1e-7)
    naive = (x * x).mean(0) - x.mean(0) ** 2  # what FairScale's sums come to
    assert (naive / x.double().var(0) - 1).abs().max() > 1e-4


def test_evaluation_normalises_by_running_statistics() -> None:
    params, x = affine(), draw(1, C, 4)  # one sample is enough here
    running = ff.RunningStatistics(draw(C), draw(C).abs(), torch.tensor(1))
    y, stats = ff.batch_norm(params, x, running=running)
    expected = F.batch_norm(x, running.mean, running.var, *params.values())
    same((y, stats), (expected, None))
    unit = ff.unit(ff.batch_norm)
    grads = ff.value_and_grad(lambda p: unit(p, x, running=running)[0].sum())(params)[1]
    close(grads["bias"], torch.full((C,), 4.0))


def test_statistics_hold_one_copy_for_a_moment() -> None:
    x = draw(256, C, 16)
    with LiveBytes(x) as memory:
        y, stats = ff.batch_norm(None, x)
    assert memory.peak <= 2.1 * x.nbytes
    assert memory.live <= 1.1 * x.nbytes
    del y, stats


test_bad_input_is_refused = all_refused({
    "one value": (lambda: ff.batch_norm(None, draw(1, C)), ValueError,
        "more than 1 value per channel"),
    "a weight": (lambda: ff.batch_norm({"weight": draw(4)}, draw(4, C)), ValueError,
        r"weight has shape \(4,\).*\(4, 3\)"),
    "running": (lambda: ff.batch_norm(None, draw(4, C), running=ff.init_statistics(2)),
        ValueError, r"running mean has shape \(2,\)"),
    "layers": (lambda: ff.commit_statistics(FRESH, [ff.batch_norm(None, draw(4,
        C))[1]]), TreeMismatch, "does not match the first"),
    "channels": (lambda: ff.commit_statistics(ff.init_statistics(2), ff.batch_norm(None,
        draw(4, C))[1]), ValueError, "3 channels for running ones of 2"),
})  # fmt: skip
