"""`adascale` has FairScale's gains, wherever its samples lie; `observe_gradients`."""

import pytest
import torch

import fsfunc as ff
from fsfunc.comm.typed_maps import LawError
from tests import checks
from tests.checks import all_refused, close, on_ranks, simulated, with_ledger
from tests.models import splits
from tests.optim.steps import DATA, WS, X, bytes_of, gain_of, squares, trained
from tests.optim.steps import layer as product

# By FairScale 0.4.13's AdaScale in one process, world_size=1, of the same model and
# data: (samples a step, scale, smoothing, optimizer): gains, and three weights after.
SGD, ADAM = ff.sgd(0.5, momentum=0.9), ff.sharded_adam(0.05, weight_decay=0.0)
GOLDENS = {
    "2": (2, None, None, SGD, [2.0, 1.6630050408722703, 1.5654937082929263],
          [-0.7502334713935852, -0.6084672212600708, -0.464241623878479]),
    "4": (4, None, None, SGD, [4.0, 3.5428056666880994, 3.7758507054380637],
          [-0.28736016154289246, -0.21105243265628815, -0.12401507049798965]),
    "4, not smoothed": (4, None, 0.0, SGD, [4.0, 3.1808340492574243, 4.0],
          [-0.28161752223968506, -0.20898818969726562, -0.12550461292266846]),
    "4, Adam": (4, None, None, ADAM, [4.0, 2.842588793316224, 2.7819854639250465],
          [-0.5396142601966858, -0.36530864238739014, -0.1919538527727127]),
    "4, half the scale": (4, 2.0, 0.5, SGD, [2.0, 1.9128273174539348, 1.9771391544230],
          [-0.6298601031303406, -0.526629626750946, -0.4204294979572296]),
}  # fmt: skip
STACKS = {
    "alone": (1, lambda s, mesh, c: ff.accumulate(s, c)),
    "shard": (2, lambda s, mesh, c: ff.shard(ff.accumulate(s, c), mesh, "data")),
    "shard zero=0": (2, lambda s, mesh, c: ff.shard(ff.accumulate(s, c), mesh, "data",
                                                    zero=0)),
    "accumulate(shard)": (2, lambda s, mesh, c: ff.accumulate(
        ff.remat(ff.shard(s, mesh, "data", zero=2)), c)),
    "four ranks": (4, lambda s, mesh, c: ff.donate(ff.shard(s, mesh, "data"))),
}  # fmt: skip
# Every golden on one device, one of them in each stack; one on ranks of a sample each.
CASES = [(golden, "alone") for golden in GOLDENS]
CASES += [("4", stack) for stack in STACKS if stack != "alone"]
CASES += [("2", "shard"), ("4, Adam", "accumulate(shard)")]
SCALED = [("4", "alone"), ("4", "accumulate(shard)")]  # beside loss_scale, too


@ff.unit
def layer(p, x):
    return torch.tanh(x @ p["w"].to(x.dtype) + p["b"])


def loss(p, x):
    return layer(p, x).square().mean()


PARAMS = {"w": torch.linspace(-1, 1, 12).view(4, 3), "b": torch.zeros(3)}


def batch(k, n):
    rows = torch.arange(8.0).view(2, 4)
    return torch.cat([torch.sin(rows * (i + 1) + k) for i in range(n)])


def ran(optimizer, n, stack, params=PARAMS, steps=3, look=None):
    size, around = STACKS[stack]
    batches = [batch(k, n).to(params["b"].dtype) for k in range(steps)]
    cut = lambda s, mesh: around(s, mesh, n // size)  # noqa: E731
    return trained(cut, optimizer, loss, batches, params, simulated(size), look=look)


@pytest.mark.parametrize("golden, stack", CASES)
def test_the_gains_are_fairscales(golden, stack):
    n, scale, smoothing, inner, gains, weights = GOLDENS[golden]
    ada = lambda inner: ff.adascale(inner, scale, smoothing=smoothing)  # noqa: E731
    scaled = [ff.loss_scale(ada(inner)), ada(ff.loss_scale(inner))]
    for optimizer in [ada(inner), *(scaled if (golden, stack) in SCALED else [])]:
        for found in ran(optimizer, n, stack, look=gain_of):
            each, total = zip(*found.seen, strict=True)
            assert abs(total[-1] - sum(each)) < 1e-5
            close(torch.tensor(each), torch.tensor(gains), 3e-6)
            w = found.params["w"].flatten()[:3]
            close(w, torch.tensor(weights), 3e-6)


@pytest.mark.parametrize("stack", ["alone", "shard", "accumulate(shard)"])
def test_what_changes_gradients_within_changes_no_gain(stack):
    def halved(p, x):
        value, g = ff.value_and_grad(loss)(p, x)
        return value, ff.tree.map(lambda g: g.mul_(0.5), g)

    size, around = STACKS[stack]
    ada, mesh = ff.adascale(ff.sgd(0.5), smoothing=0.0), simulated(size)

    def gains(grad_fn):
        step = around(ada(grad_fn), mesh, 4 // size)
        runs = checks.trained(step, PARAMS, ada, batch(0, 4).abs(), mesh=mesh, steps=1)
        return [run.state.opt_state.gain.item() for run in runs]

    plain = gains(ff.value_and_grad(loss))
    assert 1 < plain[0] < 4 and gains(halved) == plain


def test_it_sends_two_numbers_more():
    plain, scaled = (ran(o, 2, "shard", steps=1)[0] for o in (SGD, ff.adascale(SGD)))
    # |g_i|^2 of all, and |mean|^2 of its parts
    assert bytes_of(scaled) - bytes_of(plain) == 2 * 4


# What is observed


def observing(loss):
    return ff.observe_gradients(ff.value_and_grad(loss), squares)


def tied(ws, x):
    for w in [*ws, ws[0], ws[1], ws[0]]:  # one once, one twice, one three times
        x = product(w, x)
    return x.square().mean()


def expected(n):
    grads = [ff.value_and_grad(tied)(WS, x)[1] for x in X.chunk(n)]
    return sum(squares(g) for each in grads for g in each)


@pytest.mark.parametrize(
    "zero, min_bytes", [(0, 0), (1, 1 << 20), (2, 0), (3, 0), (3, 1 << 20)]
)
def test_each_sample_is_seen_whole_and_once(zero, min_bytes):
    """One a rank, or a microbatch each of two."""
    n = 2 if zero == 1 or not zero + min_bytes else 4

    def around(g):
        g = g if n == 2 else ff.accumulate(g, 2)
        g = ff.shard(g, DATA, "data", zero=zero, min_bytes=min_bytes)
        return g if n == 2 else ff.remat(g)

    def observed(ws, x):
        out, total, count = observing(tied)(ws, x)
        return out, ff.psum(total, "data"), count

    (_, plain), *_ = on_ranks(around(ff.value_and_grad(tied)), WS, X)
    for (_, grads), total, count in on_ranks(around(observed), WS, X):
        close((grads, total), (plain, expected(n)))
        assert count == n // 2


def test_of_split_leaves_all_blocks_are_seen():
    @ff.unit
    def split(p, x):
        h = torch.tanh(ff.nn.column_linear(x, p["up"]))
        return ff.nn.row_linear(h, p["down"], p["b"])

    loss = lambda p, x: split(p, x).square().mean()  # noqa: E731
    p = {"up": WS[0], "down": WS[1], "b": WS[2][0]}
    own = [ff.value_and_grad(loss)(p, x)[1] for x in X.chunk(2)]
    wanted = sum(squares(g) for each in own for g in each.values())

    def observed(p, x):
        return ff.psum(observing(loss)(p, x)[1], "data")

    how = {"mesh": simulated(data=2, model=2), "layouts": splits()}
    for total, _ in with_ledger(lambda mesh: shard(observed, mesh), p, X, **how):
        close(total, wanted)


# What is refused


def beside(ws, x):
    return tied(ws, x) + ff.tree_sum(ws)


def weighted(ws, x):
    return ff.Weighted(tied(ws, x), 3.0)


AGAIN = ff.adascale(SGD)


def stepped(loss, around):
    return lambda: trained(around, AGAIN, loss, [X], mesh=DATA)


def twice(f):
    """Two losses, whose gradients are summed: its samples nobody sees."""

    def both(ws, x):
        (a, g), (b, h) = f(ws, x), f(ws, 2 * x)
        return a + b, ff.tree.map(torch.add, g, h)

    return ff.observe_gradients(both, squares)


def one_sample():
    AGAIN(ff.value_and_grad(tied))(ff.TrainState(WS, AGAIN.init(WS)), X)


def shard(g, m):
    return ff.shard(g, m, "data")


TOTAL = lambda ws: observing(tied)(ws, X)[1]  # noqa: E731
test_where_there_is_no_gain_it_is_refused = all_refused({
    "Weighted": (stepped(weighted, lambda g, m: g), LawError, "Weighted"),
    "outside units": (stepped(beside, shard), LawError, "outside units"),
    "differentiated": (lambda: torch.func.grad(TOTAL)(WS), LawError,
                       "gradients are differentiated"),
    "that ask": (lambda: TOTAL([w.clone().requires_grad_() for w in WS]), LawError,
                 "gradients are differentiated"),
    "half a sample": (lambda: ff.adascale(SGD, 0.5), ValueError, "at least 1"),
    "smoothing": (lambda: ff.adascale(SGD, smoothing=1.0), ValueError, "below 1"),
    "update": (lambda: AGAIN.update(WS, AGAIN.init(WS), WS), ValueError, "the step by"),
    "two calls": (lambda: ff.accumulate(twice(ff.value_and_grad(tied)), 2)(WS, X),
                  LawError, "more than once"),
    "one sample": (one_sample, ValueError, "this step has one"),
})  # fmt: skip
