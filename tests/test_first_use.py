"""What a newcomer does on the first day, and once got wrong numbers for."""

import pytest
import torch

import fsfunc as ff

MESH = ff.make_mesh({"data": 2}, "simulated")
X = torch.arange(32.0).view(8, 4) / 32


@ff.unit
def layer(params, x):
    return torch.tanh(x @ params["w"])


def loss_fn(params, x):
    return layer(params, x).square().mean()


def scaled_loss(params, x):
    return (layer({"w": params["w"]}, x) * params["s"]).square().mean()


def parameters():
    return {"w": torch.arange(16.0).view(4, 4) / 16, "s": torch.ones(4)}


STOCK = {
    "grad": lambda f: torch.func.grad(f),
    "grad_and_value": lambda f: lambda p, x: torch.func.grad_and_value(f)(p, x)[0],
    "vjp": lambda f: lambda p, x: torch.func.vjp(f, p, x)[1](torch.ones(()))[0],
    "jacrev": lambda f: lambda p, x: torch.func.jacrev(f)(p, x),
}


@pytest.mark.parametrize("kind", STOCK)
def test_a_step_of_torch_func_can_be_placed(kind):
    def main():
        params = {"w": parameters()["w"]}
        step = ff.shard(STOCK[kind](loss_fn), MESH, "data")
        placed = ff.place(step, params, X)
        assert ff.is_sharded(placed["w"]), "the unit's leaf was not seen"
        return ff.unshard(ff.shard(torch.func.grad(loss_fn), MESH, "data")(placed, X))

    expected = torch.func.grad(loss_fn)({"w": parameters()["w"]}, X)
    for found in ff.spmd(main, MESH)():
        torch.testing.assert_close(found["w"], expected["w"])


def test_torch_func_on_a_leaf_outside_units_is_refused():
    step = ff.shard(torch.func.grad(scaled_loss), MESH, "data")
    with pytest.raises(ValueError, match="gradient by 's'.*ff.value_and_grad of"):
        ff.spmd(lambda: ff.place(step, parameters(), X), MESH)()


def test_a_plain_state_that_ranks_share_is_donated_once():
    optimizer = ff.sgd(1.0)

    def step(state, x):
        grads = ff.value_and_grad(scaled_loss)(state.params, x)[1]
        return state.apply_gradients(grads, optimizer), None

    state = ff.TrainState(parameters(), optimizer.init(parameters()))
    donated = ff.donate(ff.shard(step, MESH, "data"))
    with pytest.raises(RuntimeError, match="'params/s'.*a state of its own"):
        ff.spmd(lambda: donated(state, ff.local_batch(X, MESH, "data")), MESH)()


def test_a_step_that_raises_gives_the_donated_state_back():
    state = ff.TrainState(parameters(), {})

    def fails(state, x):
        raise ArithmeticError("before any write")

    for _ in range(2):
        with pytest.raises(ArithmeticError):
            ff.donate(fails)(state, X)


def test_another_ranks_state_is_refused():
    call = ff.shard(loss_fn, MESH, "data")
    place = ff.spmd(lambda: ff.place(call, {"w": torch.eye(4)}, X), MESH)
    with pytest.raises(
        ValueError, match="w f32.*is the part of {'data': 0} of 2 ranks"
    ):
        ff.spmd(call, MESH)(place()[0], X)
    wider = ff.make_mesh({"data": 4}, "simulated")
    other = ff.shard(loss_fn, wider, "data")
    with pytest.raises(ValueError, match="of 2 ranks, but this is .*4"):
        ff.spmd(lambda p: other(p, X), wider)(ff.spmd(lambda: place()[0], wider)())


def test_a_notebook_goes_on_with_what_spmd_returned():
    optimizer = ff.sgd(0.1)

    def step(state, x):
        loss, grads = ff.value_and_grad(loss_fn)(state.params, x)
        return state.apply_gradients(grads, optimizer), loss

    sharded = ff.shard(step, MESH, "data")
    params = {"w": parameters()["w"]}
    states = ff.spmd(lambda: ff.init_state(sharded, params, optimizer, X), MESH)()
    losses = []
    for _ in range(3):
        states, values = ff.spmd(sharded, MESH)(states, X).unzip()
        losses.append(values[0].item())
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]


def test_a_state_without_an_optimizer_state():
    state = ff.TrainState(parameters())
    with pytest.raises(ValueError, match="no optimizer state.*init_state"):
        state.apply_gradients(parameters(), ff.sharded_adam())


def test_axes_are_a_mapping():
    with pytest.raises(TypeError, match="axes as {name: size}"):
        ff.make_mesh(["data", 2])


@pytest.mark.processes
def test_bare_calls_under_processes(torchrun):
    printed = torchrun(BARE, 2)
    assert printed.count("16.0 1.0") == 2, printed


BARE = """
import torch, fsfunc as ff

mesh = ff.make_mesh({"data": 2})
layer = ff.unit(lambda w, x: x @ w)
call = ff.shard(lambda w, x: layer(w, x).sum(), mesh, "data")
w = ff.place(call, torch.eye(4), torch.ones(4, 4))
print(call(w, torch.ones(4, 4)).item(), ff.unshard(w)[0, 0].item())
"""
