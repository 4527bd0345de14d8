"""Functions in a module that hold the module: refused, or copied with it."""

import functools
import types

import pytest
import torch
from torch import nn

import fsfunc as ff
from tests.interop.models import close

X = torch.ones(3, 4)


def pair():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def patched(m):
    old = m[0].forward
    m[0].forward = lambda x: 2 * old(x)


def kept(m):
    m.f = lambda x: m[0](x)


def hooked(m):
    m[0].register_forward_hook(lambda mod, args, out: out @ m[1].weight)


def default(m):
    m[1].register_forward_pre_hook(lambda mod, args, w=m[0].weight: (args[0] @ w,))


def listed(m):
    m.steps = [functools.partial(lambda f, x: f(x), lambda x: m[0](x))]


def nested(m):
    trainer = types.SimpleNamespace(model=m)
    m.f = lambda x: trainer.model[0](x)


def of_a_global(m):
    names = {"m": m}
    exec("def f(x): return m[0](x)", names)
    m.f = names["f"]


@pytest.mark.parametrize(
    "hold", [patched, kept, hooked, default, listed, nested, of_a_global]
)
def test_a_function_that_holds_the_module_is_refused(hold):
    module = pair()
    hold(module)
    with pytest.raises(TypeError, match="by closure, default or global name.*Method"):
        ff.from_module(module)


def test_methods_and_hooks_that_hold_nothing_are_copied():
    """The way out that the error names."""
    module = pair()
    cls, scale, seen = type(module[0]), 2.0, []
    module[0].forward = types.MethodType(
        lambda self, x: scale * cls.forward(self, x), module[0]
    )
    module[1].register_forward_hook(
        lambda mod, args, out: seen.append(1) or out @ mod.weight
    )
    apply, params, buffers = ff.from_module(module)
    found = ff.value_and_grad(lambda p: apply(p, buffers, X).square().mean())(params)
    loss = module(X).square().mean()
    grads = torch.autograd.grad(loss, list(module.parameters()))
    close(list(found[1].values()), list(grads), 0.0)
    close(found[0], loss.detach(), 0.0)


def test_a_hook_on_a_parameter_is_refused():
    module = pair()
    module[0].weight.register_hook(lambda g: g * 0.1)
    with pytest.raises(TypeError, match="'0.weight' has a hook.*gradients"):
        ff.from_module(module)
