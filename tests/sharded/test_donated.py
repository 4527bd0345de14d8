"""Memory that a donated step writes into, and the marks on what it has taken."""

import copy

import pytest
import torch

import fsfunc as ff
from fsfunc.sharded.spent import spend, unspend, why_unusable
from tests.models import chain, floats, layers

MESH = ff.make_mesh({"data": 2}, "simulated")
X = torch.arange(8.0).view(2, 4) / 8
loss = chain()


def fresh():
    return layers(2, make=floats)


def step_of(optimizer):
    return optimizer(ff.value_and_grad(loss))


USES = {
    "arithmetic": lambda x: x + 1,
    "shape": lambda x: x.shape,
    "numpy": lambda x: x.numpy(),
    "view": lambda x: x.view(3),
    "a list of it": lambda x: torch.stack([torch.ones(3), x]),
    "written into": lambda x: torch.ones(3).copy_(x),
    "grad": lambda x: torch.func.grad(torch.sum)(x),
    "vmap": lambda x: torch.func.vmap(torch.sin)(x),
    "copied": copy.deepcopy,
    "inner": lambda x: x.data_ptr(),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    "make", [torch.ones, lambda n: torch.nn.Parameter(torch.ones(n))]
)
def test_a_spent_tensor_raises_and_can_be_given_back(make, use):
    x, kind = make(3), type(make(3))
    other = x.detach()
    spend(x, "it went")
    with pytest.raises(RuntimeError, match=r"f32\[3\]: it went"):
        USES[use](x)
    assert repr(x) == f"a spent {kind.__name__}: it went" and isinstance(x, kind)
    assert other.tolist() == [1, 1, 1] and why_unusable(x) == "it went"
    spend(x, "and again")
    with pytest.raises(RuntimeError, match="and again"):
        x + 1
    unspend(x)
    assert type(x) is kind and torch.equal(x, other) and not why_unusable(x)
    unspend(x)


def test_what_the_caller_keeps_of_the_state_stays():
    """A view of it, a module's parameters: the first step then works in memory new."""
    module = torch.nn.Linear(3, 3, bias=False)
    optimizer = ff.sgd(0.5)
    step = ff.donate(optimizer(ff.value_and_grad(lambda w: (w**2).sum())))
    w = module.weight.detach()
    before, state = w.clone(), ff.TrainState(w, optimizer.init(w))
    state, _ = step(state)
    assert torch.equal(module.weight, before)
    assert torch.equal(state.params, before - before)
    where = state.params.data_ptr()
    state, _ = step(state)
    assert state.params.data_ptr() == where
    seen = state.params[:1]
    held = seen.clone()
    state, _ = step(state)
    assert torch.equal(seen, held)


def test_what_a_step_puts_into_the_state_by_data_is_not_written():
    """A leaf that the step moves to memory of the caller's is no more the state's."""
    optimizer, mine = ff.sgd(0.5), torch.full((3,), 4.0)

    def step(state, grads):
        state.params["w"].data = mine
        return state.apply_gradients(grads, optimizer)

    start = {"w": torch.ones(3), "v": torch.ones(3)}
    state = ff.TrainState(start, optimizer.init(start))
    new = ff.donate(step)(state, {"w": torch.ones(3), "v": torch.ones(3)})
    assert new.params["w"].tolist() == [3.5] * 3 and mine.tolist() == [4.0] * 3


def test_a_plan_and_a_step_that_raises_give_them_back():
    """And what a step captured is not written."""
    optimizer, captured = ff.sgd(0.5), torch.ones(2)

    def step(state):
        if state.params[0] > 1:
            raise KeyError
        _, grads = ff.value_and_grad(lambda w: (w**2).sum())(captured)
        new = optimizer.apply(grads, optimizer.init(captured), captured)[0]
        return new, state

    w = torch.nn.Parameter(torch.full((2,), 2.0))
    state = ff.TrainState(w, optimizer.init(w))
    with pytest.raises(KeyError):
        ff.donate(step)(state)
    assert type(w) is torch.nn.Parameter and (w + 1).tolist() == [3, 3]
    new, _ = ff.donate(step)(ff.TrainState(torch.zeros(2), optimizer.init(w)))
    assert captured.tolist() == [1, 1] and new.tolist() == [0, 0]

    step = ff.donate(ff.shard(step_of(optimizer), MESH, "data"))

    def main():
        beside = ff.shard(lambda state, x: x.sum(), MESH, "data")  # they stay whole
        state = ff.TrainState(fresh(), optimizer.init(fresh()))
        rows = ff.local_batch(X, MESH, "data")
        state = ff.place(beside, state, rows)
        params = state.params
        ff.plan(step, state, rows)
        assert type(params[0]["w"]) is torch.Tensor
        step(state, rows)
        with pytest.raises(RuntimeError, match="donated"):
            params[0]["w"] + 1

    ff.spmd(main, MESH)()


@pytest.mark.parametrize("remat", [lambda f: f, ff.remat], ids=["keep", "remat"])
@pytest.mark.parametrize("outer", [True, False], ids=["shard(remat)", "remat(shard)"])
def test_a_backward_does_not_gather_what_was_written_since(remat, outer):
    """At zero=3 the graph holds nothing of the weights, and would take the new ones."""
    optimizer = ff.sgd(0.5)

    def main():
        shard = lambda f: ff.shard(f, MESH, "data")  # noqa: E731
        call = shard(remat(loss)) if outer else remat(shard(loss))
        step = shard(step_of(optimizer))
        rows = ff.local_batch(X, MESH, "data")
        state = ff.init_state(step, fresh, optimizer, rows)
        x = rows.clone().requires_grad_()
        (right,) = torch.autograd.grad(call(state.params, x), x)
        y = call(state.params, x)
        kept, _ = step(state, rows)
        (found,) = torch.autograd.grad(y, x, retain_graph=True)
        assert torch.equal(found, right)
        y = call(kept.params, x)
        ff.donate(step)(kept, rows)
        with pytest.raises(RuntimeError, match="written over|donated"):
            torch.autograd.grad(y, x)

    ff.spmd(main, MESH)()
