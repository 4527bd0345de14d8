"""What is no function, optimizer, number, mesh or batch is refused at once."""

import numpy as np
import torch

import fsfunc as ff
from tests.checks import all_refused, simulated

MESH = simulated(2)
W, X = torch.ones(2, 2), torch.ones(4, 2)
loss = ff.unit(lambda w, x: (x @ w).square().mean())
GRADIENT = ff.value_and_grad(loss)
optimizer = ff.sgd(0.1)


def step(state, x):
    return state.apply_gradients(GRADIENT(state.params, x)[1], optimizer), None


SHARDED = ff.shard(step, MESH, "data")
DATA = torch.utils.data.TensorDataset(torch.arange(8))
FUNCTIONS = {
    "unit": lambda f: ff.unit(f),
    "remat": lambda f: ff.remat(f),
    "shard": lambda f: ff.shard(f, MESH, "data"),
    "pipeline": lambda f: ff.pipeline(f, MESH, "data", n_microbatches=2),
    "accumulate": lambda f: ff.accumulate(f, 2),
    "precision": lambda f: ff.precision(f, compute=torch.bfloat16),
    "donate": lambda f: ff.donate(f),
    "value_and_grad": lambda f: ff.value_and_grad(f),
    "spmd": lambda f: ff.spmd(f, MESH),
    "observe_gradients": lambda f: ff.observe_gradients(f, torch.sum),
    "an optimizer": lambda f: optimizer(f),
    "place": lambda f: ff.place(f, W, X),
    "init_state": lambda f: ff.init_state(f, W, optimizer, X),
    "abstract_state": lambda f: ff.abstract_state(f, W, optimizer, X),
    "plan": lambda f: ff.plan(f, W, X),
}
NUMBERS = {
    "sharded_adam": lambda n: ff.sharded_adam(n),
    "sgd": lambda n: ff.sgd(n),
    "momentum": lambda n: ff.sgd(1e-2, momentum=n),
    "b1": lambda n: ff.sharded_adam(b1=n),
    "eps": lambda n: ff.sharded_adam(eps=n),
    "clipping": lambda n: ff.clip_by_global_norm(n),
}
NAMED = {
    "shard": lambda mesh, axis: ff.shard(step, mesh, axis),
    "pipeline": lambda mesh, axis: ff.pipeline(step, mesh, axis, n_microbatches=1),
    "local_batch": lambda mesh, axis: ff.local_batch(X, mesh, axis),
    "spmd": lambda mesh, axis: ff.spmd(lambda: ff.psum(X, axis), mesh)(),
}


def empty():
    f = ff.shard(GRADIENT, MESH, "data")
    return f(ff.place(ff.shard(loss, MESH, "data"), W, X), X[:0])


def of_arrays():
    ff.value_and_grad(lambda p, x: x.sum())({"w": np.eye(2)}, X)


def of_integers():
    params = {"w": torch.eye(2).long(), "n": 3}
    ff.value_and_grad(lambda p, x: (x @ p["w"].float()).sum())(params, X)


OTHERS = {
    "no optimizer": (
        lambda: ff.spmd(lambda: ff.init_state(SHARDED, W, 3, X), MESH)(),
        TypeError, "'int' object is not callable",
    ),
    "nor is None": (
        lambda: ff.spmd(lambda: ff.abstract_state(SHARDED, W, None, X), MESH)(),
        TypeError, "'NoneType' object is not callable",
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
    "estimates": (
        lambda: ff.estimate("step", 3), TypeError, "is given a str and a int",
    ),
    "a plan's mesh": (
        lambda: ff.plan(step, W, optimizer, X, mesh={"data": 2}),
        TypeError, "plan needs a mesh",
    ),
    "a loader's mesh": (
        lambda: ff.batches([1, 2, 3], "data", "data", 2),
        TypeError, "batches needs a mesh",
    ),
    "axes": (
        lambda: ff.make_mesh(["data", 2]), TypeError, "axes as {name: size}",
    ),
    "nothing to differentiate": (
        of_integers, TypeError, "argument 0: nothing .*int64.*float32",
    ),
    "arrays": (of_arrays, TypeError, "argument 0 at 'w', a numpy array float64"),
    "outside spmd": (
        lambda: SHARDED(ff.TrainState(W), X), RuntimeError, "run it inside spmd",
    ),
    "no optimizer state": (
        lambda: ff.TrainState(W).apply_gradients(W, optimizer),
        ValueError, "no optimizer state.*init_state",
    ),
}  # fmt: skip


A_STRING = r" is '1e-2', a str: it must be a number; give float\('1e-2'\)"
EVERY = OTHERS | {
    who: (lambda f=f: f(3), TypeError, f"{who} takes a function, .* of type ")
    for who, f in FUNCTIONS.items()
} | {
    f"{name}='1e-2'": (lambda f=f: f("1e-2"), TypeError, A_STRING)
    for name, f in NUMBERS.items()
} | {
    f"{who} over {axis}": (
        lambda f=f, axis=axis: f(MESH, axis),
        TypeError, f"axis={axis}.*is a name, .* 'data'; this",
    )
    for who, f in NAMED.items() for axis in (0, None)
} | {
    f"{who} on {mesh}": (
        lambda f=f, mesh=mesh: f(mesh, "data"),
        TypeError, f"{who} needs a mesh, got .*make_mesh",
    )
    for who, f in NAMED.items() for mesh in (None, "data", {"data": 2})
}  # fmt: skip


test_junk_is_refused = all_refused(EVERY)


def test_numbers_that_are_no_tensors_have_no_gradient():
    assert ff.value_and_grad(lambda p, x: x.sum())({"n": 3}, X)[1] == {"n": None}
