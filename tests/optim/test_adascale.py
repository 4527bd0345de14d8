"""`adascale` has FairScale's gains, wherever its samples lie; `observe_gradients`."""

import pytest
import torch

import fsfunc as ff
from fsfunc.comm.shard_linear_maps import LawError
from tests.checks import close, simulated

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


@ff.unit
def layer(p, x):
    return torch.tanh(x @ p["w"] + p["b"])


def loss(p, x):
    return layer(p, x).square().mean()


PARAMS = {"w": torch.linspace(-1, 1, 12).view(4, 3), "b": torch.zeros(3)}


def batch(k, n):
    rows = torch.arange(8.0).view(2, 4)
    return torch.cat([torch.sin(rows * (i + 1) + k) for i in range(n)])


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("golden", GOLDENS)
def test_the_gains_are_fairscales(golden, stack):
    n, scale, smoothing, inner, gains, weights = GOLDENS[golden]
    size, around = STACKS[stack]
    if n % size:
        return  # fewer samples than ranks
    mesh = simulated(size)

    def main(optimizer):
        step = around(optimizer(ff.value_and_grad(loss)), mesh, n // size)
        cut = lambda x: ff.local_batch(x, mesh, "data") if size > 1 else x  # noqa: E731
        params = {k: x.clone() for k, x in PARAMS.items()}
        state = ff.init_state(step, params, optimizer, cut(batch(0, n)))
        found = []
        for k in range(3):
            state, _ = step(state, cut(batch(k, n)))
            inside = state.opt_state
            ours = inside.inner if isinstance(inside, LOSS_SCALE) else inside
            found.append(ours.gain.item())
        assert abs(ours.iterations.item() - sum(found)) < 1e-5
        return found, ff.unshard(state.params)["w"].flatten()[:3]

    for optimizer in (
        ff.adascale(inner, scale, smoothing=smoothing),
        ff.loss_scale(ff.adascale(inner, scale, smoothing=smoothing)),
        ff.adascale(ff.loss_scale(inner), scale, smoothing=smoothing),
    ):
        for found, w in ff.spmd(main, mesh)(optimizer):
            close(torch.tensor(found), torch.tensor(gains), 3e-6)
            close(w, torch.tensor(weights), 3e-6)


LOSS_SCALE = ff.optim.LossScaleState


@pytest.mark.parametrize("stack", STACKS)
def test_its_gains_are_as_wide_as_the_widest_parameter(stack):
    size, around = STACKS[stack]
    mesh, narrow = simulated(size), torch.float32
    optimizer = ff.adascale(ff.sgd(0.5), smoothing=0.5)
    wide = ff.unit(lambda p, x: torch.tanh(x @ p["w"].double() + p["b"]))
    mean = lambda p, x: wide(p, x).square().mean()  # noqa: E731

    def main(of_w, size, around, mesh):
        step = around(optimizer(ff.value_and_grad(mean)), mesh, 4 // size)
        params = {"w": PARAMS["w"].to(of_w), "b": PARAMS["b"].double()}
        cut = lambda x: ff.local_batch(x, mesh, "data") if size > 1 else x  # noqa: E731
        state = ff.init_state(step, params, optimizer, cut(batch(0, 4).double()))
        for k in range(3):
            state, _ = step(state, cut(batch(k, 4).double()))
        return state.opt_state.iterations, ff.unshard(state.params)["b"]

    for of_w, tolerance in ((torch.float64, 1e-9), (narrow, 1e-6)):
        alone = main(of_w, 1, STACKS["alone"][1], None)
        for found in ff.spmd(main, mesh)(of_w, size, around, mesh):
            assert found[0].dtype == torch.float64 and 3 < found[0] < 12
            close(found, alone, tolerance)


def test_it_sends_two_numbers_more():
    mesh = simulated(2)

    def main(optimizer):
        step = ff.shard(optimizer(ff.value_and_grad(loss)), mesh, "data")
        x = ff.local_batch(batch(0, 2), mesh, "data")
        state = ff.init_state(step, PARAMS, optimizer, x)
        with ff.ledger() as log:
            step(state, x)
        return log.bytes("data")

    (plain, _), (scaled, _) = (ff.spmd(main, mesh)(o) for o in (SGD, ff.adascale(SGD)))
    assert scaled - plain == 2 * 4  # |g_i|^2 of all, and |mean|^2 of its parts


# What is observed


def squares(g):
    return g.double().square().sum()


@ff.unit
def product(w, x):
    return torch.tanh(x @ w)


WS = [torch.randn(4, 4, generator=torch.Generator().manual_seed(k)) for k in range(3)]
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(9))


def observing(loss):
    return ff.observe_gradients(ff.value_and_grad(loss), squares)


def tied(ws, x):
    for w in [*ws, ws[0], ws[1], ws[0]]:  # one once, one twice, one three times
        x = product(w, x)
    return x.square().mean()


def expected(n):
    grads = [ff.value_and_grad(tied)(WS, x)[1] for x in X.chunk(n)]
    return sum(squares(g) for each in grads for g in each)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("min_bytes", [0, 1 << 20])
def test_each_sample_is_seen_whole_and_once(zero, min_bytes):
    mesh = simulated(2)
    how = {"zero": zero, "min_bytes": min_bytes}

    def main(around):
        def observed(ws, x):
            out, total, n = observing(tied)(ws, x)
            return out, ff.psum(total, "data"), n

        f, x = around(observed), ff.local_batch(X, mesh, "data")
        placed = ff.place(f, WS, x)
        out, total, n = f(placed, x)
        close(
            ff.unshard(out[1]),
            ff.unshard(around(ff.value_and_grad(tied))(placed, x)[1]),
        )
        return total, n

    stacks = {
        2: lambda g: ff.shard(g, mesh, "data", **how),
        4: lambda g: ff.remat(ff.shard(ff.accumulate(g, 2), mesh, "data", **how)),
    }
    for n, around in stacks.items():
        for total, count in ff.spmd(main, mesh)(around):
            close(total, expected(n))
            assert count == n // 2


@pytest.mark.parametrize("zero", [None, 0, 3])
def test_it_may_stand_around_what_cuts_and_shards(zero):
    """Where a gradient function is transformed already, its samples are the same."""
    mesh = simulated(2)

    def main():
        grad = ff.accumulate(ff.value_and_grad(tied), 2)
        x = X if zero is None else ff.local_batch(X, mesh, "data")
        if zero is not None:
            grad = ff.shard(grad, mesh, "data", zero=zero)
        placed = WS if zero is None else ff.place(grad, WS, x)
        for cut, n in ((grad, 2), (ff.accumulate(grad, 2), 4)):
            _, total, count = ff.observe_gradients(cut, squares)(placed, x)
            samples = n if zero is None else 2 * n
            close(total if zero is None else ff.psum(total, "data"), expected(samples))
            assert count == n

    ff.spmd(main, mesh)()


def test_of_split_leaves_all_blocks_are_seen():
    mesh = simulated(data=2, model=2)

    def loss(p, x):
        return split(p, x).square().mean()

    @ff.unit
    def split(p, x):
        h = torch.tanh(ff.nn.column_linear(x, p["up"]))
        return ff.nn.row_linear(h, p["down"], p["b"])

    p = {"up": WS[0], "down": WS[1], "b": WS[2][0]}
    own = [ff.value_and_grad(loss)(p, x)[1] for x in X.chunk(2)]
    wanted = sum(squares(g) for each in own for g in each.values())

    def main():
        def observed(p, x):
            out, total, n = observing(loss)(p, x)
            return ff.psum(total, "data")

        f, x = ff.shard(observed, mesh, "data"), ff.local_batch(X, mesh, "data")
        layouts = {"up": ff.Split(0, "model"), "down": ff.Split(1, "model")}
        return f(ff.place(f, p, x, layouts=layouts), x)

    for total in ff.spmd(main, mesh)():
        close(total, wanted)


def beside(ws, x):
    return tied(ws, x) + ff.tree_sum(ws)


def weighted(ws, x):
    return ff.Weighted(tied(ws, x), 3.0)


REFUSED = {
    "a pipeline": (tied, lambda g, m: ff.pipeline(g, m, "data", n_microbatches=2)),
    "Weighted": (weighted, lambda g, m: g),
    "beside units": (beside, lambda g, m: ff.shard(g, m, "data")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_where_a_rank_has_no_gradient_of_its_own_it_is_refused(case):
    loss, around = REFUSED[case]
    mesh = simulated(2)

    def main():
        step = ff.adascale(SGD)(ff.value_and_grad(loss))
        step = around(step, mesh)
        state = ff.init_state(step, WS, ff.adascale(SGD), X)
        step(state, X)

    with pytest.raises(LawError, match=case):
        ff.spmd(main, mesh)()


def test_under_a_derivative_it_is_refused():
    observed = observing(tied)
    with pytest.raises(LawError, match="gradients are differentiated"):
        torch.func.grad(lambda ws: observed(ws, X)[1])(WS)
    with pytest.raises(LawError, match="gradients are differentiated"):
        observed([w.clone().requires_grad_() for w in WS], X)


AGAIN = ff.adascale(SGD)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: ff.adascale(SGD, 0.5), "1 or more"),
        (lambda: ff.adascale(SGD, smoothing=1.0), "below 1"),
        (lambda: AGAIN.update(WS, AGAIN.init(WS), WS), "the step by"),
        (
            lambda: AGAIN(ff.value_and_grad(tied))(
                ff.TrainState(WS, AGAIN.init(WS)), X
            ),
            "this step has one",
        ),
    ],
)
def test_what_has_no_gain_is_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call()
