"""Hooks that a forward hangs on modules within its units see what those return."""

import copy

import pytest
import torch
from torch import nn

import fsfunc as ff
from tests.interop.models import Block, close, seeded

X = torch.randn(4, 4, generator=seeded(0)).double()


def collect(module, found):
    module.register_forward_hook(lambda m, args, out: found.append((args[0], out)))


class Watched(nn.Module):
    """Collects what some modules of its layers return, as transformers' models do."""

    def __init__(self, hang=collect):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.hang = hang

    def forward(self, x, seen=True):
        found = []
        for layer in self.layers if seen else ():
            self.hang(layer.up, found)
        for layer in self.layers:
            x = layer(x)
        return x, found


def made(*hang):
    torch.manual_seed(0)
    return Watched(*hang).double()


@pytest.mark.parametrize("units", [Block, [Block, nn.Linear], Watched])
def test_what_they_see_is_what_the_module_would_show(units):
    module = made()
    apply, params, buffers = ff.from_module(module, units)
    for seen in (True, False, True):
        x, found = apply(params, buffers, X, seen)
        expected, others = copy.deepcopy(module)(X, seen)
        close(x, expected.detach())
        close([y for pair in found for y in pair], [y for p in others for y in p])
    assert not module.layers[0].up._forward_hooks


ONLY = "hangs a hook on 'up' within a unit"
HANG = {
    "before": (lambda m, _: m.register_forward_pre_hook(lambda m, args: None),
        f"{ONLY}.*before from_module"),
    "backward": (lambda m, _: m.register_full_backward_hook(lambda m, given, out: None),
        ONLY),
    "with keywords": (lambda m, _: m.register_forward_hook(lambda m, a, k, out: None,
        with_kwargs=True), ONLY),
    "changing": (lambda m, _: m.register_forward_hook(lambda m, args, out: 2 * out),
        "Linear within a unit.*changes what it returns"),
}  # fmt: skip


@pytest.mark.parametrize("name", HANG)
def test_hooks_that_only_the_unit_could_run_are_refused(name):
    hang, says = HANG[name]
    module = made(hang)
    apply, params, buffers = ff.from_module(module, Block)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=says):
            apply(params, buffers, X)
    apply(params, buffers, X, seen=False)
    apply, params, buffers = ff.from_module(module, Watched)
    close(apply(params, buffers, X)[0], copy.deepcopy(module)(X)[0].detach())
