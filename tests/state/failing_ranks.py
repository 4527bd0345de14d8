"""One of two processes fails as it lays out: both are told, and go on."""

import torch

import fsfunc as ff
from fsfunc.comm.comparison import RanksDiffer

layer = ff.unit(lambda w, x: (x @ w).square().mean())
W, X, OPTIMIZER = torch.ones(2, 2), torch.ones(4, 2), ff.sgd(0.1)


def step(state, x):
    value, g = ff.value_and_grad(layer)(state.params, x)
    return state.apply_gradients(g, OPTIMIZER), value


def made(fails):
    if fails == "function":
        raise OSError("no such file")
    return W.clone()


def fails_late(fails):
    """After the ranks have compared what they will do."""

    def init(params):
        laid = ff.is_sharded(ff.tree.leaves(params, is_leaf=ff.is_sharded)[0])
        if fails == "optimizer" and laid and not ff.recording():
            raise MemoryError("no room for moments")
        return OPTIMIZER.init(params)

    return ff.Optimizer(init, OPTIMIZER.update)


def recorded(fails):
    def run(state, x):
        if fails == "step":
            raise KeyError("a batch without labels")
        return step(state, x)

    return run


def main():
    mesh = ff.make_mesh({"data": 2}, timeout=20)
    for fails in ("step", "function", "optimizer"):
        mine = fails if mesh.rank == 1 else ""
        f = ff.shard(recorded(mine), mesh, "data")
        try:
            ff.init_state(f, lambda mine=mine: made(mine), fails_late(mine), X)
            said = "nothing"
        except Exception as error:
            said = type(error).__name__
            if mesh.rank == 0:
                assert isinstance(error, RanksDiffer), error
                assert "raised: rank 0: nothing; rank 1: " in str(error), error
        print(fails, said)
        good = ff.shard(step, mesh, "data")
        state, value = good(ff.init_state(good, W, OPTIMIZER, X), X)
        print(value.item())

    w = W + mesh.rank
    try:
        ff.place(good, ff.TrainState(w, OPTIMIZER.init(w)), X)
    except RanksDiffer as error:
        print("unlike", "whole parameters differ" in str(error))


if __name__ == "__main__":
    main()
