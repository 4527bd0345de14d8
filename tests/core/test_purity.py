"""What a unit may not do: capture what is differentiated, change what it is given."""

import re

import pytest
import torch
from torch import nn

import fsfunc as ff
from tests.checks import same, simulated
from tests.core.test_units import W, X, interpreted, sharded


def captures(derive, unit_of=ff.unit):
    def f(w, x):
        captured = derive(w)
        return unit_of(lambda p, x: torch.exp(x * captured.sum()) * p)(x[0], x).sum()

    return f


@pytest.mark.parametrize(
    ("derive", "around", "grad"),
    [
        (lambda w: w, ff.remat, False),
        (lambda w: w * 2, lambda f: f, True),
        (lambda w: w.view(-1), lambda f: f, False),
        (lambda w: w.unbind()[1], ff.remat, True),
    ],
    ids=["leaf", "derived", "view", "one of several"],
)
def test_a_captured_differentiated_tensor_is_refused(derive, around, grad) -> None:
    captured = derive(nn.Parameter(W))
    f = around(captures(lambda _: captured))
    with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match="closure"):
        f(W, X)
    shape = re.escape(str(tuple(captured.shape)))
    with pytest.raises(RuntimeError, match=f"Sum.*shape {shape} captured"):
        ff.value_and_grad(around(captures(derive)))(W, X)


def test_a_gradient_by_a_detached_input_is_taken_by_torch_func() -> None:
    """A tensor that `requires_grad_` made within is told from none made before."""
    made = lambda x: x.detach().requires_grad_()  # noqa: E731
    within = ff.unit(lambda w, x: (x @ w).tanh() * made(x))
    with pytest.raises(RuntimeError, match=r"In place of .*torch\.func\.grad"):
        within(W, X)

    def force(w, x):
        return torch.func.grad(lambda x: (x @ w).tanh().sum())(x.detach()) @ w

    loss = lambda f: lambda w, x: f(w, x).square().sum()  # noqa: E731
    expected = torch.func.grad(loss(force))(W, X)
    for f in (loss(ff.unit(force)), ff.remat(loss(ff.unit(force)))):
        torch.testing.assert_close(ff.value_and_grad(f)(W, X)[1], expected)


def test_constants_buffers_and_detached_tensors_may_be_captured() -> None:
    constant, parameter = torch.ones(3), nn.Parameter(torch.ones(3))
    norm = nn.BatchNorm1d(3, affine=False).eval()

    @ff.unit
    def f(w, x):
        with torch.no_grad():
            y = x * parameter
        return norm(x @ w) + constant + y + parameter.detach() + torch.arange(3)

    for _ in interpreted(lambda w, x: f(w, x).sum(), W, X):
        pass
    _, pull = torch.func.vjp(lambda x: x * 2, torch.ones(3))
    (left,) = pull(torch.ones(3))  # an earlier transform's tensor, now a constant
    ff.value_and_grad(lambda w: ff.unit(lambda w: (w * left).sum())(w))(W)


@pytest.mark.parametrize(
    ("how", "which"),
    [
        ("plain", "params at 'a/0'"), ("remat", "input 0"), ("shard", "scale"),
        ("shard", "params at 'a/0'"), ("no_grad", "input 0"), ("func", "scale"),
    ],
)  # fmt: skip
def test_an_input_changed_in_place_is_refused(how, which) -> None:
    @ff.unit
    def unit(p, x, *, scale):
        with torch.no_grad():
            {"params at 'a/0'": p["a"][0], "input 0": x, "scale": scale}[which].add_(1)
        return (x @ p["a"][0] * scale).sum()

    def f(p, x):
        return unit(p, x.clone(), scale=torch.ones(1))

    p = {"a": [W.clone()]}
    with pytest.raises(RuntimeError, match=f"changed its {which}.*in place"):
        if how == "shard":
            sharded(ff.value_and_grad(f), p, X)
        elif how == "no_grad":
            with torch.no_grad():
                f(p, X)
        elif how == "func":
            torch.func.grad(f)(p, X)
        else:
            around = ff.remat if how == "remat" else lambda f: f
            around(ff.value_and_grad(f))(p, X)


def test_a_changed_activation_still_raises_autograds_own_error() -> None:
    @ff.unit
    def f(w, x):
        h = torch.exp(x @ w)
        with torch.no_grad():
            h.add_(1)
        return h.sum()

    for run in (lambda f: f(W, X), lambda f: sharded(f, W, X)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run(ff.value_and_grad(f))
    # A recompute has the value before it is changed.
    right = ff.value_and_grad(lambda w, x: (torch.exp(x @ w) + 1).sum())(W, X)
    same(ff.remat(ff.value_and_grad(f))(W, X), right)


@pytest.mark.parametrize("around", [lambda f: f, ff.remat], ids=["plain", "remat"])
@pytest.mark.parametrize("zero", [None, 0, 3])
def test_writes_that_autograd_does_not_see_are_refused(zero, around) -> None:
    @ff.unit
    def unit(p, x):
        p["a"][0].data.mul_(0.9)
        return (x @ p["a"][0]).sum()

    step, p = around(ff.value_and_grad(unit)), {"a": [W.clone()]}
    with pytest.raises(RuntimeError, match="changed its params at 'a/0' .*in place"):
        step(p, X) if zero is None else sharded(step, p, X, zero=zero)
    assert torch.equal(p["a"][0], W)
    sgd = ff.sgd(0.1)

    def train(state, x):
        _, grads = step(state.params, x)
        return state.apply_gradients(grads, sgd)

    def main():
        f = ff.shard(train, simulated(2), "data", zero=zero)
        return f(ff.init_state(f, p, sgd, X), X)

    if zero is not None:
        with pytest.raises(
            RuntimeError, match="changed its params at 'a/0' .*in place"
        ):
            ff.spmd(main, simulated(2))()


@pytest.mark.parametrize("flag", [True, "train"])
def test_a_branch_that_a_flag_chooses_is_checked_when_it_is_first_taken(flag) -> None:
    def f(w, x, flag):
        captured = w * 2
        unit = units.setdefault(
            0, ff.unit(lambda p, x, flag, c: x @ p * (c().sum() if flag else 1.0))
        )
        return unit(w, x, flag, lambda: captured).sum()

    units: dict = {}
    ff.value_and_grad(f)(W, X, "" if flag == "train" else False)
    with pytest.raises(RuntimeError, match="captured by closure"):
        ff.value_and_grad(f)(W, X, flag)
