"""What no function can do for a module is refused, by name and with the way out."""

import functools
import re
import threading
import types
import warnings

import pytest
import torch
from torch import nn

import fsfunc as ff
from tests.checks import all_refused, simulated
from tests.interop.models import Block, Stack, close

X, TOKENS = torch.ones(3, 4), torch.zeros(1, 1, dtype=torch.long)


def changed(change, module=None):
    """A module, after something was done to it."""
    torch.manual_seed(0)
    module = (
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) if module is None else module
    )
    change(module)
    return module


def of_a_global(m):
    names = {"m": m}
    exec("def f(x): return m[0](x)", names)
    m.f = names["f"]


def calls(holder):
    return lambda x: holder.model[0](x)


def patched(m):
    old = m[0].forward
    m[0].forward = lambda x: 2 * old(x)


HOLDS = {
    "patched": patched,
    "an attribute": lambda m: setattr(m, "f", lambda x: m[0](x)),
    "a hook": lambda m: m[0].register_forward_hook(lambda _, a, y: y @ m[1].weight),
    "a default": lambda m: m[1].register_forward_pre_hook(
        lambda _, args, w=m[0].weight: (args[0] @ w,)),
    "in a list": lambda m: setattr(m, "steps", [functools.partial(
        lambda f, x: f(x), lambda x: m[0](x))]),
    "in an object": lambda m: setattr(m, "f", calls(types.SimpleNamespace(model=m))),
    "of a global": of_a_global,
}  # fmt: skip


@pytest.mark.parametrize("hold", HOLDS)
def test_a_function_that_holds_the_module_is_refused(hold):
    with pytest.raises(TypeError, match="by closure, default or global name.*Method"):
        ff.from_module(changed(HOLDS[hold]))


def test_methods_and_hooks_that_hold_nothing_are_copied():
    """The way out that the error names."""
    scale, seen = 2.0, []

    def change(m):
        double = lambda self, x: scale * nn.Linear.forward(self, x)  # noqa: E731
        m[0].forward = types.MethodType(double, m[0])
        m[1].register_forward_hook(
            lambda mod, args, out: seen.append(1) or out @ mod.weight
        )

    module = changed(change)
    apply, params, buffers = ff.from_module(module)
    found = ff.value_and_grad(lambda p: apply(p, buffers, X).square().mean())(params)
    loss = module(X).square().mean()
    grads = torch.autograd.grad(loss, list(module.parameters()))
    close([found[0], *found[1].values()], [loss.detach(), *grads], 0.0)


# What a module may not be, or be given


def overlapping(module):
    module.part = nn.Parameter(module.weight.data[:2])


def compiled(module):
    with warnings.catch_warnings():  # torch's own, of other parts of it
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.compile(module)


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.other = [self.layer.weight]

    def forward(self, x):
        return self.layer(x) @ self.other[0]


def of(make, units=()):
    return lambda: ff.from_module(make(), units)


def calling(change, make=Stack, x=TOKENS):
    def call():
        apply, params, buffers = ff.from_module(make())
        apply(change(params), buffers, x)

    return call


def to_module(params=None, buffers=None, **meta):
    module = nn.BatchNorm1d(4, **meta)
    given = {"weight": torch.ones(4), "bias": torch.zeros(4)}
    return lambda: ff.to_module(module, given if params is None else params, buffers)


def renamed(p):
    less = {k: v for k, v in p.items() if k != "blocks.0.up.bias"}
    return less | {"blocks.0.up.bios": X}


test_bad_input_is_refused = all_refused({
    "lazy": (of(lambda: nn.LazyLinear(2)), ValueError, "'weight' has no shape yet"),
    "wrapped": (of(lambda: nn.DataParallel(Block())), TypeError, r"Parallel.*\.module"),
    "compiled": (of(lambda: compiled(Block())), TypeError, r"OptimizedM.*\._orig_mod"),
    "compiled in place": (of(lambda: changed(lambda m: m[0].compile(backend="eager"))),
        TypeError, "'0' is compiled in place.*before its compile"),
    "overlapping": (of(lambda: changed(overlapping, nn.Linear(4, 4))), ValueError,
        "'part' and 'weight'|'weight' and 'part'"),
    "max_norm": (of(lambda: nn.Embedding(2, 2, max_norm=1.0)), ValueError, "max_norm"),
    "a lock": (of(lambda: changed(lambda m: setattr(m, "lock", threading.Lock()))),
        TypeError, "cannot be copied"),
    "a hook on a parameter": (of(lambda: changed(
        lambda m: m[0].weight.register_hook(lambda g: g * 0.1))), TypeError,
        "'0.weight' has a hook.*gradients"),
    "in a list": (calling(lambda p: p, Listed, X), RuntimeError,
        "'layer.weight' is read where it is not"),
    "another name": (calling(renamed), ValueError,
        "no tensor 'blocks.0.up.bias' .near: 'blo"),
    "one too many": (calling(lambda p: p | {"head.weight": X}), ValueError,
        "module has not, 'head.weight'"),
    "a shape": (calling(lambda p: p | {"embed.weight": X}), ValueError,
        r"'embed.weight' has shape \(3, 4\), and \(5"),
    "no dict": (calling(lambda p: list(p.values())), TypeError, "dict of tensors by"),
    "another buffer": (to_module(buffers={"a": X}), ValueError, "module has not, 'a'"),
    "no parameters": (to_module({}), ValueError, "no tensor 'weight'"),
    "no buffers on meta": (to_module(device="meta"), ValueError, "give buffers="),
    "no such name": (of(Stack, "block.*"), ValueError, "'block.*' matches nothing;"),
    "near a name": (of(Stack, "blocks.0.upp"), ValueError, "'blocks.0.up'"),
    "no such pattern": (of(Stack, re.compile("blocks.9")), ValueError,
        "'blocks.9' matches nothing; there are 'blocks.2'"),
    "no such class": (of(Stack, nn.Conv2d), ValueError,
        "Conv2d matches nothing; there are 'Block', 'Dropout', 'Embedding'"),
    "no such size": (of(Stack, ff.by_size(10_000)), ValueError, "of 272 parameters"),
    "never true": (of(Stack, lambda name, m: False), ValueError, "<lambda> matches"),
    "a list of modules": (of(Stack, "blocks"), ValueError, 'never called.*"blocks.*"'),
    "one of two": (of(Stack, [Block, "nowhere"]), ValueError, "'nowhere' matches noth"),
    "a number": (of(Stack, 3.5), TypeError, "units has"),
    "a type": (of(Stack, int), TypeError, "units has"),
    "a tensor": (of(Stack, torch.ones(1)), TypeError, "units has"),
    "a truth value": (of(Stack, True), TypeError, "units has"),
})  # fmt: skip


def test_shards_are_put_together_first():
    module = nn.Linear(4, 4)
    apply, params, buffers = ff.from_module(module)
    mesh = simulated()

    def main():
        f = ff.shard(lambda p, x: apply(p, buffers, x).sum(), mesh, "data")
        placed = ff.place(f, params, X)
        with pytest.raises(TypeError, match="'weight' is this rank's part.*unshard"):
            ff.to_module(module, placed)
        return ff.to_module(module, ff.unshard(placed))

    for found in ff.spmd(main, mesh)():
        assert torch.equal(found.weight, module.weight)


# What a forward may not write


class Writing(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.layer, self.write = nn.Linear(4, 4), write
        self.register_buffer("count", torch.zeros(()))
        self.constant = torch.ones(())

    def forward(self, x):
        self.write(self)
        return self.layer(x)


WRITES = {
    "into a buffer": (lambda m: m.count.add_(1), "writes the buffer '0.count'.*mut"),
    "a buffer": (lambda m: setattr(m, "count", m.count + 1), "writes the buffer '0.co"),
    "a constant": (lambda m: m.constant.add_(1), "which is no buffer: register it"),
    "a parameter": (lambda m: setattr(m.layer, "weight", nn.Parameter(X)),
        "parameter 'weight'|sets the parameter"),
    "a new buffer": (lambda m: m.register_buffer("late", torch.ones(())),
        "registers or removes the buffer 'late'"),
}  # fmt: skip


@pytest.mark.parametrize("units", [(), Writing])
@pytest.mark.parametrize("name", WRITES)
def test_a_forward_that_changes_what_it_does_not_return(name, units):
    write, says = WRITES[name]
    module = nn.Sequential(Writing(write))
    apply, params, buffers = ff.from_module(module, units)
    for _ in range(2):  # the first time leaves nothing behind
        with pytest.raises((RuntimeError, TypeError), match=says):
            apply(params, buffers, X)
    assert module[0].count == 0 and buffers["0.count"] == 0
    assert module[0].constant == 1
