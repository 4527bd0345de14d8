"""A step that does another thing each time it is run is told so before it counts."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch.func import grad, jvp

import fsfunc as ff
from fsfunc.tracing import recorder
from fsfunc.tracing.rules import Unsteady
from tests.checks import simulated

MESH = simulated(2)
W, X = torch.ones(2, 1), torch.ones(4, 2)
unit = ff.unit(lambda w, x: (x @ w).square().mean())


class Trainer:
    """A step whose rate falls with a count of its own."""

    def __init__(self, guarded):
        self.n, self.guarded = 0, guarded

    def step(self, w, x):
        rate = 0.1 / (1 + self.n)
        if not (self.guarded and ff.recording()):
            self.n += 1
        g = ff.value_and_grad(unit)(w, x)[1]
        return ff.tree.map(lambda a, g: a - rate * g, w, g)


class LibraryTrainer(Trainer):
    """The same where nobody but the library reads what is sharded."""

    def step(self, w, x):
        optimizer = ff.sgd(0.1 / (1 + self.n))
        if not (self.guarded and ff.recording()):
            self.n += 1
        g = ff.value_and_grad(unit)(w, x)[1]
        return optimizer.apply(g, optimizer.init(w), w)[0]


KINDS = pytest.mark.parametrize("kind", [Trainer, LibraryTrainer])


def trained(kind, guarded):
    """The parameters after three steps, and how many the trainer counts."""

    def main():
        t = kind(guarded)
        f = ff.shard(t.step, MESH, "data")
        w = ff.place(f, W, X)
        for _ in range(3):
            w = f(w, X)
        return ff.unshard(w), t.n

    return ff.spmd(main, MESH)()


@KINDS
def test_a_count_that_recordings_raise_is_refused(kind):
    text = r"is given -?0\.\d+ when .* and -?0\.0\d+ when .*Python state.*ff.recording"
    with pytest.raises(Unsteady, match=text):
        trained(kind, False)


def made_at_the_first_run_alone(runs, w, x):
    rate = 0.1 / (1 + len(runs))
    runs.append(torch.full((3,), 2.0).sum() if not runs else None)
    g = ff.value_and_grad(unit)(w, x)[1]
    return ff.tree.map(lambda a, g: a - rate * g, w, g)


def scaled(factors):
    """By what the library alone hears of: it says more than the record does there."""

    def step(runs, w, x):
        runs.append(1)
        w = ff.tree.map(torch.sub, w, ff.value_and_grad(unit)(w, x)[1])
        for factor in factors(len(runs)):
            w = ff.tree_scale(w, factor)
        return w

    return step


COUNTS = {
    "made at first": (made_at_the_first_run_alone, "Python state"),
    # At a line at which the record said nothing; and once more than it has called it.
    "later": (scaled(lambda n: [1 / n] if n > 1 else []), "0.5 .* and 0.3"),
    "at a known line": (scaled(lambda n: [0.5, 1 / n][:n]), "0.5 .* and 0.3"),
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_in_a_closure_is_refused(name):
    step, said = COUNTS[name]
    f = ff.shard(partial(step, []), MESH, "data")
    with pytest.raises(Unsteady, match=said):
        ff.spmd(lambda: f(ff.place(f, W, X), X), MESH)()


def falling(runs, counts, w, x):
    """A step whose rate falls with the calls, where it counts them."""
    optimizer = ff.sgd(0.1 / (1 + len(runs)))
    runs.extend([1] * counts)
    g = ff.value_and_grad(unit)(w, x)[1]
    return optimizer.apply(g, optimizer.init(w), w)[0]


def test_a_count_of_the_first_rank_alone_is_refused():
    """The ranks' functions are two: what the one does says nothing of the other."""

    def main():
        f = ff.shard(partial(falling, [], MESH.rank == 0), MESH, "data")
        return f(ff.place(f, W, X), X)

    with pytest.raises(Unsteady, match="Python state"):
        ff.spmd(main, MESH)()


@pytest.mark.parametrize("made, times", [("before", 2), ("by each rank", 3)])
def test_ranks_that_share_a_function_run_it_twice(made, times):
    """The first and the last one, once each; and of unlike ones the first again."""
    runs = []

    def step(w, x):
        runs.append(1)
        g = ff.value_and_grad(unit)(w, x)[1]
        return ff.tree_scale(g, 0.1)

    def main():
        mine = step if made == "before" else partial(step)
        f = ff.shard(ff.remat(mine), mesh, "data")
        ff.place(f, W, X)

    mesh = simulated(4)
    ff.spmd(main, mesh)()
    assert len(runs) == times


@KINDS
def test_the_way_out_is_right(kind):
    t, w = kind(True), W
    for _ in range(3):
        w = t.step(w, X)
    for found, n in trained(kind, True):
        assert n == t.n == 3
        torch.testing.assert_close(found, w)


def test_a_schedule_of_the_state_is_steady():
    def step(state, x):
        rate = 0.1 / (1 + state.step)
        g = ff.value_and_grad(unit)(state.params, x)[1]
        return state.replace(
            params=ff.tree.map(lambda a, g: a - rate * g, state.params, g),
            step=state.step + 1,
        )

    def main():
        f = ff.shard(step, MESH, "data")
        state = ff.init_state(f, W, ff.sgd(0.1), X)
        return ff.unshard(f(f(state, X), X).params)

    state = ff.TrainState(W)
    right = step(step(state, X), X).params
    assert all(torch.equal(found, right) for found in ff.spmd(main, MESH)())


def test_numbers_of_python_and_numpy_are_as_if_nothing_had_run():
    """They are drawn alike in each recording, and once more in the first real call."""
    seen = []

    def step(w, x):
        drawn = random.random() + np.random.rand()
        if not ff.recording():
            seen.append(drawn)
        g = ff.value_and_grad(unit)(w, x)[1]
        return ff.tree.map(lambda a, g: a - drawn * g, w, g)

    one = ff.make_mesh({"data": 1}, "simulated")

    def main():
        f = ff.shard(step, one, "data")
        return f(ff.place(f, W, X), X)

    random.seed(0)
    np.random.seed(0)
    ff.spmd(main, one)()
    random.seed(0)
    np.random.seed(0)
    assert seen == [random.random() + np.random.rand()]


@ff.unit
def layer(w, x):
    return torch.tanh(x @ w)


def curvature(runs, params, x):
    """A Hessian-vector product, which counts how often it is called."""
    runs.append(1)
    loss = lambda w: layer(w, x).square().mean()  # noqa: E731
    return jvp(grad(loss), (params,), (params,))[1]


# torch scripts its own forward-mode decompositions, and warns of it.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_step_is_tried_twice_at_most():
    """Recorded and checked: that it is steady the one shows of the other."""

    def main():
        runs = []
        step = ff.shard(partial(curvature, runs), MESH, "data")
        placed = ff.place(step, torch.ones(3, 3), torch.ones(2, 3))
        tried = len(runs)
        step(placed, torch.ones(2, 3))
        return tried, len(runs)

    for tried, all_ in ff.spmd(main, MESH)():
        assert 1 <= tried <= 2 and all_ == tried + 1


def decayed(optimizer):
    """A step whose types are checked: it combines gradients with parameters."""

    def step(state, x):
        loss, g = ff.value_and_grad(unit)(state.params, x)
        g = ff.tree.map(lambda a, g: g + 0.1 * a, state.params, g)
        return state.apply_gradients(g, optimizer), loss

    return step


def test_a_first_state_with_moments_is_recorded_once(monkeypatch):
    """Where its types are checked, that is the run to compare the record with."""
    runs, run = [], recorder._Recording.run

    def counted(self, *args):
        runs.append(args)
        return run(self, *args)

    monkeypatch.setattr(recorder._Recording, "run", counted)
    mesh = ff.make_mesh({"data": 1}, "simulated")
    for optimizer in (ff.sharded_adam(0.1), ff.sgd(0.1, momentum=0.9)):
        runs.clear()
        step = ff.shard(decayed(optimizer), mesh, "data")
        ff.spmd(lambda o, s: ff.init_state(s, W, o, X), mesh)(optimizer, step)
        assert len(runs) == 1


def test_a_first_state_that_counts_its_runs_is_refused():
    optimizer, runs = ff.sharded_adam(0.1), []

    def begin(params):
        runs.append(1)
        made = (len(runs) * X[0]).sum()
        return ff.TrainState(params, optimizer.init(params), extra=made)

    mesh = ff.make_mesh({"data": 1}, "simulated")
    step = ff.shard(decayed(optimizer), mesh, "data")
    main = ff.spmd(lambda: ff.init_state(step, W, begin, X), mesh)
    with pytest.raises(Unsteady, match="Python state"):
        main()
