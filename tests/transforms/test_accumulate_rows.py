"""Which arguments `accumulate` and `pipeline` cut: the batch, as they are told."""

import time

import pytest

import fsfunc as ff
from tests import models
from tests.checks import refused, same, simulated

ROWS, MESH, OPTIMIZER = 8, simulated(), ff.sgd(0.5)
vag = ff.value_and_grad


def integers(*shape):
    return models.integers(*shape, seed=sum(shape), high=3)


@ff.unit
def layer(params, x):
    return x @ params["w"]


W, SCALE, X, Y = integers(3, 1), integers(ROWS), integers(ROWS, 3), integers(ROWS, 1)
# Frozen parameters and buffers with as many rows as the batch.


def empty_pipeline(f, n, **told):
    mesh = simulated(pipe=1)
    g = ff.pipeline(f, mesh, "pipe", n_microbatches=n, **told)
    return lambda *args, **named: ff.spmd(lambda: g(*args, **named), mesh)()[0]


def scaled(w, scale, x):
    """A frozen vector, as long as the batch."""
    return layer({"w": w}, x * scale.sum()).square().mean()


BOTH = pytest.mark.parametrize("cut", [ff.accumulate, empty_pipeline])
ARGS = (W, SCALE, X)


@BOTH
@pytest.mark.parametrize("told", [2, -1, (2,), "x"])
def test_the_batch_is_what_is_told(cut, told):
    args, named = ((W, SCALE), {"x": X}) if told == "x" else (ARGS, {})
    own, call = {"batch_argnums": told}, vag(scaled)
    for g in (cut(call, 4, **own), cut(vag(scaled, **own), 4)):
        same(g(*args, **named), call(*args, **named))


def mean_of_rows(w, x, y):
    return (w * x * y).sum(1).mean()


@BOTH
def test_nothing_is_guessed(cut):
    call = vag(scaled)
    no = lambda f, words: refused(f, ValueError, words)  # noqa: E731
    no(lambda: cut(call, 2)(*ARGS), "arguments 1, 2 hold .*batch_argnums=")
    no(lambda: cut(call, 2)(W, SCALE, x=X), "arguments 1, 'x' hold .*batch_argnums=")
    same(cut(call, 1)(*ARGS), call(*ARGS))  # nothing is to be cut
    for odd in (3, -4, "y", (1, "x")):
        g = cut(call, 2, batch_argnums=odd)
        no(lambda g=g: g(*ARGS), "3 positional arguments and no keywords")
    both = vag(mean_of_rows, argnums=(0, 1))  # parameters, or rows?
    no(lambda: cut(both, 2)(integers(3), X), "arguments 1 hold tensors: say which")
    pair = cut(vag(scaled, batch_argnums=(1, 2)), 2)
    no(lambda: pair(W, SCALE, X[:4]), "batch leaves differ in dim 0, .*'2': 4")
    alone = vag(lambda w, x: layer({"w": w}, x).mean())
    empty = lambda: cut(alone, 2)(W, X[:0])  # noqa: E731
    no(empty, r"0 rows .*\(0, 3\).*the batch is empty")
    start = time.perf_counter()
    no(lambda: cut(alone, 100_000)(W, X[:4]), "100000")
    assert time.perf_counter() - start < 2
