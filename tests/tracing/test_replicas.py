"""Ranks that must have the same batches, seeds and states compare them in training.

What a step returns in its state is each rank's own in its next call, too; that this is
no factor of a gradient, but as a mean, `tests/derivatives` has.
"""

import pytest
import torch

import fsfunc as ff
from fsfunc.comm.comparison import RanksDiffer
from tests.checks import same, simulated
from tests.models import chain, floats, layers, splits, train_step

N = 2
MESH = simulated(N)
W, X = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.arange(8.0).reshape(4, 2)
unit = ff.unit(lambda w, x: x @ w)


@pytest.mark.parametrize("of", ["h", "late"])
def test_a_mean_of_own_numbers_that_a_step_carries_is_one_value(of):
    def step(s, x):
        loss = lambda w: (unit(w, x).mean(0) + s["h"]).sum()  # noqa: E731
        g, factor = ff.value_and_grad(loss)(s["w"])[1], ff.pmean(s[of].sum(), "data")
        w = ff.tree.map(lambda w, g: w - g * factor, s["w"], g)
        return {"w": w, "h": s["h"] + x.mean(0), "late": s["h"].sum()}

    def main():
        mine = ff.local_batch(X, MESH, "data")
        sharded = ff.shard(step, MESH, "data")
        first = {"w": W, "h": torch.zeros(2), "late": torch.tensor(0.0)}
        own = dict.fromkeys(("h", "late"), ff.Own("data"))
        state = ff.place(sharded, first, mine, layouts=own)
        for _ in range(3):
            state = sharded(state, mine)
        return ff.unshard(state)

    mine = torch.stack([x.mean(0) for x in X.chunk(N)])
    h, late, w = torch.zeros(N, 2), torch.zeros(N), W
    for _ in range(3):
        factor = (h.sum(1) if of == "h" else late).mean()
        w = w - factor * mine.mean(0)[:, None]
        h, late = h + mine, h.sum(1)
    for rank, state in enumerate(ff.spmd(main, MESH)()):
        same(state, {"w": w, "h": h[rank], "late": late[rank]})


NODES, MODEL = simulated(node=2, data=2), simulated(data=2, model=2)
OPTIMIZER, BATCH = ff.sgd(0.1), floats(4, 4)
SPLITS = splits()


@ff.unit
def split(p, x):
    y = ff.nn.row_linear(torch.tanh(ff.nn.column_linear(x, p["up"])), p["down"])
    return torch.nn.functional.dropout(y, 0.5, p["drops"])


def split_params(drops=False):
    return {"up": floats(8, 4), "down": floats(4, 8, seed=1), "drops": drops}


def split_loss(p, x):
    return split(p, x).square().mean()


def trained(step, params, mesh, given, layouts=None, calls=8, seed=lambda: 0):
    """The state of each rank after some calls of ``given(i)``."""

    def main():
        sharded, mine = ff.shard(step, mesh, "data"), given(0)
        state = ff.init_state(sharded, params, OPTIMIZER, mine, layouts=layouts)
        torch.manual_seed(seed())
        for i in range(1, calls + 1):
            out = sharded(state, given(i))
            state = out[0] if isinstance(out, tuple) else out
        return ff.unshard(state.params)

    return ff.spmd(main, mesh)()


def bare(state, batch):
    return train_step(chain(), OPTIMIZER)(state, batch)[0]


STEPS = {
    "along an axis that nothing names": (NODES, "node", layers(), None, chain()),
    "along an axis of split parameters": (
        *(MODEL, "model", split_params(), SPLITS, split_loss),
    ),
}


@pytest.mark.parametrize("late", [1, 4])
@pytest.mark.parametrize("name", STEPS)
def test_batches_that_differ_later_are_told(name, late):
    mesh, axis, params, layouts, loss = STEPS[name]

    def given(i):
        apart = mesh.coordinate(axis) if i >= late else 0
        return ff.local_batch(BATCH, mesh, "data") + apart

    step = train_step(loss, OPTIMIZER)
    with pytest.raises(RanksDiffer, match=f"along '{axis}' are given unlike batches"):
        trained(step, params, mesh, given, layouts)


@pytest.mark.parametrize("calls", [1, 4])
def test_a_state_that_is_all_a_step_returns_is_compared(calls):
    def given(i):
        return ff.local_batch(BATCH, NODES, "data")

    first, *others = trained(bare, layers(), NODES, given)
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)

    def drifts(state, batch):
        apart = (1 + NODES.rank // 2) if not ff.recording() else 1
        state = bare(state, batch)
        if state.step < calls:
            return state
        params = ff.tree.map(lambda x: x * apart, state.params)
        return state.replace(params=params)

    with pytest.raises(RanksDiffer, match="along 'node' return different states"):
        trained(drifts, layers(), NODES, given)


@pytest.mark.parametrize("zero", [0, 3])
def test_what_is_said_to_be_one_value_and_is_not_is_told(zero):
    mesh = simulated(2)

    def step(state, batch):
        mean = ff.assume(batch.mean(), "data", "I")
        return state.replace(extra={"mean": mean}), {}

    def main():
        sharded, mine = (
            ff.shard(step, mesh, "data"),
            ff.local_batch(BATCH, mesh, "data"),
        )
        state = ff.TrainState(layers(), extra={"mean": torch.zeros(())})
        return sharded(ff.place(sharded, state, mine), mine)

    with pytest.raises(RanksDiffer, match=r"of leaves that are one value(.|\n)*'extra"):
        ff.spmd(main, mesh)()


@pytest.mark.parametrize("drops", [False, True])
def test_ranks_of_split_parameters_that_draw_are_seeded_alike(drops):
    def run(axis):
        return trained(
            *(train_step(split_loss, OPTIMIZER), split_params(drops), MODEL),
            lambda i: ff.local_batch(BATCH, MODEL, "data"),
            layouts=SPLITS,
            seed=lambda: MODEL.coordinate(axis),
        )

    run("data")  # whose masks differ anyway
    if drops:
        with pytest.raises(RanksDiffer, match="along 'model' draw apart"):
            run("model")
    else:
        run("model")


@pytest.mark.parametrize("apart", ["never", "seeded along data", "seeded", "later"])
def test_stages_that_mix_rows_by_a_drawn_number_are_seeded_alike(apart):
    """The first stage mixes the inputs, the last one the targets."""
    mesh = simulated(pipe=2, data=2)

    def loss(layers, batch):
        x, y = batch
        for p in layers:
            x = unit(p, x)
        return (x - y).square().mean()

    def step(state, batch):
        part = torch.rand(())
        x, y = (part * v + (1 - part) * v.flip(0) for v in batch)
        _, grads = ff.value_and_grad(loss)(state.params, (x, y))
        return state.apply_gradients(grads, OPTIMIZER), {}

    def main():
        piped = ff.pipeline(step, mesh, "pipe", n_microbatches=2)
        sharded = ff.shard(piped, mesh, "data")
        batch = ff.local_batch((floats(8, 2), floats(8, 2)), mesh, "data")
        state = ff.init_state(sharded, [W, W + 1], OPTIMIZER, batch)
        by = {"seeded along data": "data", "seeded": "pipe"}.get(apart)
        torch.manual_seed(mesh.coordinate(by) if by else 0)
        for i in range(1, 5):
            if apart == "later" and i == 3 and mesh.coordinate("pipe"):
                torch.rand(1)
            state, _ = sharded(state, batch)

    if apart in ("never", "seeded along data"):
        ff.spmd(main, mesh)()
    else:
        with pytest.raises(RanksDiffer, match="along 'pipe' draw apart") as told:
            ff.spmd(main, mesh)()
        assert "stages lie along it" in str(told.value) and "rank" in str(told.value)


@pytest.mark.parametrize("zero", [0, 3])
def test_a_branch_that_is_first_taken_later_is_told_where_leaves_part(zero):
    count = [0]

    def late(g, batch):
        return ff.tree.map(lambda g: g * batch.mean(), g) if count[0] > 2 else g

    def step(params, batch):
        g = ff.value_and_grad(lambda p, x: (chain()(p["layers"], x) * p["s"]).mean())
        return ff.tree.map(torch.sub, params, late(g(params, batch)[1], batch))

    def main():
        f, batch = ff.shard(step, NODES, ("node", "data"), zero=zero), floats(4, 4)
        batch = ff.local_batch(batch, NODES, ("node", "data"))
        params = ff.place(f, {"layers": layers(), "s": torch.ones(())}, batch)
        for i in range(1, 5):
            count[0] = i
            params = f(params, batch)

    with pytest.raises(RanksDiffer, match="return different states.*one value"):
        ff.spmd(main, NODES)()


@pytest.mark.parametrize("zero", [0, 3])
def test_states_that_part_along_an_axis_of_split_parameters_are_told(zero):
    @ff.unit
    def biased(p, x):
        return split({**p["split"], "drops": False}, x) + p["bias"]

    def step(params, batch):
        _, g = ff.value_and_grad(lambda p, x: biased(p, x).square().mean())(
            params, batch
        )
        apart = 0 if ff.recording() else MODEL.coordinate("model")
        bias = ff.tree.map(lambda g: g * (1 + 0.01 * apart), g["bias"])
        return ff.tree.map(torch.sub, params, {**g, "bias": bias})

    def main():
        f, batch = ff.shard(step, MODEL, "data", zero=zero), floats(4, 4)
        params = {"split": split_params(), "bias": floats(4)}
        del params["split"]["drops"]
        layouts = {f"split/{name}": how for name, how in SPLITS.items()}
        batch = ff.local_batch(batch, MODEL, "data")
        params = ff.place(f, params, batch, layouts=layouts)
        for _ in range(4):
            params = f(params, batch)

    with pytest.raises(RanksDiffer, match="along 'model', over.*values of 'bias'"):
        ff.spmd(main, MODEL)()
