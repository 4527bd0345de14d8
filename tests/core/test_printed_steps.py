"""A step prints as its stack; else it is as the function that it was made of."""

import copy
import functools
import inspect
import pickle

import pytest
import torch

import fsfunc as ff
from fsfunc.core.frames import title

DATA = ff.make_mesh({"data": 4}, "simulated")
HYBRID = ff.make_mesh({"node": 2, "data": 2}, "simulated")
PIPE = ff.make_mesh({"pipe": 2, "data": 2}, "simulated")
OPTIMIZER = ff.sharded_adam(1e-3)


@ff.unit
def block(params, x):
    return params * x


def loss_fn(params, x):
    """The loss."""
    return block(params, x).mean()


def train_step(state, batch):
    loss, grads = ff.value_and_grad(loss_fn)(state.params, batch)
    return state.apply_gradients(grads, OPTIMIZER), loss


class Doubled(ff.Interpretation):
    @property
    def configuration(self):
        return (("factor", 2), ("else_", None))


grad = ff.value_and_grad(loss_fn)
PRINTED = {
    "shard(remat(train_step), data=4, zero=3)": lambda: ff.shard(
        ff.remat(train_step), DATA, "data", zero=3
    ),
    "donate(shard(train_step, data=4, zero=1))": lambda: ff.donate(
        ff.shard(train_step, DATA, "data", zero=1)
    ),
    "shard(value_and_grad(loss_fn), data=2, zero=3, replicate=node, min_bytes=8)": (
        lambda: ff.shard(grad, HYBRID, "data", replicate="node", min_bytes=8)
    ),
    "shard(loss_fn, node=2, data=2, zero=2)": lambda: ff.shard(
        loss_fn, HYBRID, ("node", "data"), zero=2
    ),
    "shard(pipeline(sharded_adam(value_and_grad(loss_fn)), pipe=2, n_microbatches=4), "
    "data=2, zero=3)": lambda: ff.shard(
        ff.pipeline(OPTIMIZER(grad), PIPE, "pipe", n_microbatches=4), PIPE, "data"
    ),
    "accumulate(precision(train_step, compute=torch.bfloat16), n=2)": (
        lambda: ff.accumulate(ff.precision(train_step, torch.bfloat16), 2)
    ),
    "remat(block)": lambda: ff.remat(block),
    "jit(offload(train_step, moments=host), mode=default)": lambda: ff.jit(
        ff.offload(train_step, moments="host"), mode="default"
    ),
    "jit(train_step, whole_step=True)": lambda: ff.jit(train_step, whole_step=True),
    "local_sgd(train_step, data=4, every=8)": lambda: ff.local_sgd(
        train_step, DATA, "data", every=8
    ),
    "value_and_grad(loss_fn, argnums=(0, 1), has_aux=True)": lambda: ff.value_and_grad(
        loss_fn, (0, 1), has_aux=True
    ),
    "value_and_grad(loss_fn, argnums=(0,))": lambda: ff.value_and_grad(loss_fn, (0,)),
    "shard(partial, data=4, zero=3)": lambda: ff.shard(
        functools.partial(ff.remat(loss_fn), torch.ones(2)), DATA, "data"
    ),
    "value_and_grad(Linear)": lambda: ff.value_and_grad(torch.nn.Linear(2, 1)),
    "shard(value(loss_fn), data=4, zero=3)": lambda: ff.shard(
        ff.value(loss_fn), DATA, "data"
    ),
    "doubled(train_step, factor=2)": lambda: ff.transformed(train_step, Doubled()),
    "remat(<lambda>)": lambda: ff.remat(lambda params: params),
}


@pytest.mark.parametrize("printed", PRINTED)
def test_it_prints_as_its_stack(printed):
    step = PRINTED[printed]()
    assert repr(step) == str(step) == title(step) == printed


def test_what_is_no_stack_has_its_name():
    assert title(train_step) == "train_step" and title(block) == "block"


def test_it_stands_for_the_function_within():
    step = ff.shard(ff.remat(loss_fn), DATA, "data")
    assert step.__name__ == "loss_fn" and step.__doc__ == "The loss."
    assert (step.__module__, step.__qualname__) == (__name__, "loss_fn")
    assert inspect.unwrap(step) is loss_fn and callable(step)
    assert inspect.signature(step) == inspect.signature(loss_fn)
    assert inspect.getsource(step) == inspect.getsource(loss_fn)
    assert functools.wraps(step)(lambda: 0).interpretations == step.interpretations
    assert copy.deepcopy({"step": step})["step"] is step is copy.copy(step)


def test_it_has_the_attributes_of_the_function_whatever_their_names():
    def counted(w):
        return w.sum()

    counted.called, counted.run, counted.f = 0, "mine", None
    call = ff.remat(counted)
    call.called += 1
    assert (call.called, call.run, call.f) == (1, "mine", None)
    assert repr(call) == "remat(counted)" and call(torch.ones(2)) == 2


@pytest.mark.parametrize(
    "within", [functools.partial(loss_fn, torch.ones(2)), torch.nn.Linear(2, 1)]
)
def test_it_is_copied_whatever_is_within(within):
    step = ff.remat(within)
    assert copy.deepcopy({"step": step})["step"] is step is copy.copy(step)
    assert step.__name__ == "run"
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(step)


@ff.value_and_grad
def decorated(w):
    return w.sum()


def test_it_is_pickled_by_name():
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(ff.remat(loss_fn))


def test_a_keyword_may_have_any_name():
    call = ff.remat(lambda self, f, run: self + f + run)
    assert call(self=1, f=2, run=3) == 6


def test_a_method_of_a_class_is_given_its_instance():
    class Scaled:
        @functools.partial(ff.value_and_grad, argnums=1)
        def loss(self, w):
            return 3 * w.sum()

    value, grads = Scaled().loss(torch.ones(2))
    assert value == 6 and grads.tolist() == [3, 3]
