"""A state that was saved and loaded is stepped as the one that was not."""

import math

import pytest
import torch

import fsfunc as ff
from tests.checks import simulated
from tests.models import floats
from tests.optim.optimizers import EVERY, TORCHS
from tests.optim.trees import assert_bits

DATA, WIDTH = simulated(2), 4


def by_largest(measure):
    """Gradients times what an infinite norm measures of them."""

    def update(grads, state, params=None):
        return ff.tree_scale(grads, -measure(grads)), state

    return ff.Optimizer(lambda params: (), update)


LARGEST = {
    "clipped by the largest, muon": lambda: ff.chain(
        ff.clip_by_global_norm(1.0, p=math.inf), ff.muon(0.1)
    ),
    "the largest of all": lambda: by_largest(lambda g: ff.global_norm(g, math.inf)),
    "the largest of each": lambda: by_largest(
        lambda g: ff.tree_sum(ff.leaf_norms(g, math.inf))
    ),
}
FOREIGN = {"Adagrad", "NAdam", "SGD dampened"}
CASES = {k: v for k, v in EVERY.items() if k not in TORCHS or k in FOREIGN} | LARGEST
WIDE = {"adascale", *LARGEST}


@ff.unit
def layer(w, x):
    return x + torch.tanh(x @ w)


def loss(params, x):
    for w in params:
        x = layer(w, x)
    return x.square().mean()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in sorted(CASES)]
    + [(name, torch.float64) for name in sorted(WIDE)]
    + [(name, torch.bfloat16) for name in sorted({*LARGEST, "master_weights"})],
)
def test_it_goes_on_as_if_nothing_had_been(name, dtype, tmp_path):
    init = lambda: list(floats(2, WIDTH, WIDTH, seed=1).to(dtype))  # noqa: E731
    xs = floats(2, 4, WIDTH, seed=2).to(dtype)

    def main(zero):
        make = lambda: ff.shard(  # noqa: E731  the next run's knows nothing yet
            optimizer(ff.value_and_grad(loss)), DATA, "data", zero=zero
        )
        step, x = make(), ff.local_batch(xs[0], DATA, "data")
        state, _ = step(ff.init_state(step, init, optimizer, x), x)
        ff.save(tmp_path / f"{zero}", state)
        after, _ = step(state, x)
        step = make()
        state = ff.load(
            tmp_path / f"{zero}", ff.abstract_state(step, init, optimizer, x)
        )
        return ff.unshard((after, step(state, x)[0]))

    optimizer = CASES[name]()
    for zero in (2, 3):
        assert_bits(*ff.spmd(main, DATA)(zero)[0])
