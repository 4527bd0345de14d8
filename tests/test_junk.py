"""What is no function, optimizer, number or batch is refused where it is given."""

import pytest
import torch

import fsfunc as ff
from tests import checks

MESH = checks.simulated(2)
W, X = torch.ones(2, 2), torch.ones(4, 2)
loss = ff.unit(lambda w, x: (x @ w).square().mean())
optimizer = ff.sgd(0.1)


def step(state, x):
    grads = ff.value_and_grad(loss)(state.params, x)[1]
    return state.apply_gradients(grads, optimizer), None


SHARDED = ff.shard(step, MESH, "data")
DATA = torch.utils.data.TensorDataset(torch.arange(8))

FUNCTIONS = {
    "unit": lambda: ff.unit(5),
    "remat": lambda: ff.remat(3),
    "shard": lambda: ff.shard(None, MESH, "data"),
    "pipeline": lambda: ff.pipeline(3, MESH, "data", n_microbatches=2),
    "accumulate": lambda: ff.accumulate("loss", 2),
    "precision": lambda: ff.precision(3, compute=torch.bfloat16),
    "donate": lambda: ff.donate(3),
    "value_and_grad": lambda: ff.value_and_grad(3),
    "spmd": lambda: ff.spmd(3, MESH),
    "observe_gradients": lambda: ff.observe_gradients(3, torch.sum),
    "an optimizer": lambda: optimizer(3),
    "place": lambda: ff.place(3, W, X),
    "init_state": lambda: ff.init_state(3, W, optimizer, X),
    "abstract_state": lambda: ff.abstract_state(3, W, optimizer, X),
    "plan": lambda: ff.plan(3, W, X),
}


@pytest.mark.parametrize("who", FUNCTIONS)
def test_a_transform_takes_functions_alone(who):
    with pytest.raises(TypeError, match=f"{who} takes a function, .* of type "):
        FUNCTIONS[who]()


OTHERS = {
    "no optimizer": (
        lambda: ff.spmd(lambda: ff.init_state(SHARDED, W, 3, X), MESH)(),
        TypeError, "got 3 of type int as its optimizer",
    ),
    "nor is None": (
        lambda: ff.spmd(lambda: ff.abstract_state(SHARDED, W, None, X), MESH)(),
        TypeError, "of type NoneType as its optimizer",
    ),
    "chain": (
        lambda: ff.chain(optimizer, 3), TypeError, "got 3 of type int at place 1",
    ),
    "a batch size": (
        lambda: ff.batches(DATA, MESH, "data", 1.5), TypeError,
        "batch_size=1.5: it must be an integer",
    ),
    "a seed": (
        lambda: ff.batches(DATA, MESH, "data", 4, seed=None), TypeError,
        "seed=None: it must be an integer",
    ),
    "an empty batch": (
        lambda: ff.spmd(
            lambda: ff.shard(ff.value_and_grad(loss), MESH, "data")(
                ff.place(ff.shard(loss, MESH, "data"), W, X), X[:0]
            ), MESH,
        )(),
        ValueError, "no rows",
    ),
    "an empty batch on one device": (
        lambda: ff.value_and_grad(loss)(W, X[:0]), ValueError, "no rows",
    ),
    "estimates": (
        lambda: ff.estimate("step", 3), TypeError, "is given a str and a int",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", OTHERS)
def test_it_names_what_it_was_given(what):
    call, error, message = OTHERS[what]
    with pytest.raises(error, match=message):
        call()
