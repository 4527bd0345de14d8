"""What no function can do for a module is refused, by name and with the way out."""

import threading
import warnings

import pytest
import torch
from torch import nn

import fsfunc as ff
from tests.interop.models import Block, Stack

X = torch.ones(3, 4)


class Writing(nn.Module):
    """Writes what it is told to."""

    def __init__(self, write):
        super().__init__()
        self.layer, self.write = nn.Linear(4, 4), write
        self.register_buffer("count", torch.zeros(()))
        self.constant = torch.ones(())

    def forward(self, x):
        self.write(self)
        return self.layer(x)


def add(module):
    module.count += 1


def replace(module):
    module.count = module.count + 1


def constant(module):
    module.constant.add_(1)


def parameter(module):
    module.layer.weight = nn.Parameter(torch.zeros(4, 4))


def register(module):
    module.register_buffer("late", torch.ones(()))


@pytest.mark.parametrize("units", [(), Writing])
@pytest.mark.parametrize(
    ("write", "says"),
    [
        (add, "writes the buffer '0.count'.*mutable=True"),
        (replace, "writes the buffer '0.count'.*mutable=True"),
        (constant, "into '.*constant', which is no buffer: register it"),
        (parameter, "parameter 'weight'|sets the parameter"),
        (register, "registers or removes the buffer 'late'"),
    ],
)
def test_a_forward_that_changes_what_it_does_not_return(write, says, units):
    module = nn.Sequential(Writing(write))
    apply, params, buffers = ff.from_module(module, units)
    for _ in range(2):  # the first time leaves nothing behind
        with pytest.raises((RuntimeError, TypeError), match=says):
            apply(params, buffers, X)
    assert module[0].count == 0 and buffers["0.count"] == 0
    assert module[0].constant == 1


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.other = [self.layer.weight]

    def forward(self, x):
        return self.layer(x) @ self.other[0]


def test_a_parameter_in_a_list_is_told():
    apply, params, buffers = ff.from_module(Listed())
    with pytest.raises(RuntimeError, match="'layer.weight' is read where it is not"):
        apply(params, buffers, X)


def test_names_and_shapes_are_checked():
    apply, params, buffers = ff.from_module(Stack())
    tokens = torch.zeros(1, 1, dtype=torch.long)
    less = {k: v for k, v in params.items() if k != "blocks.0.up.bias"}
    with pytest.raises(ValueError, match="no tensor 'blocks.0.up.bias' .near: 'blo"):
        apply(less | {"blocks.0.up.bios": X}, buffers, tokens)
    with pytest.raises(ValueError, match="module has not, 'head.weight'"):
        apply(params | {"head.weight": X}, buffers, tokens)
    with pytest.raises(ValueError, match=r"'embed.weight' has shape \(3, 4\), and \(5"):
        apply(params | {"embed.weight": X}, buffers, tokens)
    with pytest.raises(TypeError, match="dict of tensors by name"):
        apply(list(params.values()), buffers, tokens)
    with pytest.raises(ValueError, match="buffers has, and the module has not, 'a'"):
        ff.to_module(Stack(), params, {"a": X})
    with pytest.raises(ValueError, match="no tensor 'embed.weight'"):
        ff.to_module(Stack(), {})


def test_shards_are_put_together_first():
    module = nn.Linear(4, 4)
    apply, params, buffers = ff.from_module(module)
    mesh = ff.make_mesh({"data": 2}, "simulated")

    def main():
        f = ff.shard(lambda p, x: apply(p, buffers, x).sum(), mesh, "data")
        placed = ff.place(f, params, X)
        with pytest.raises(TypeError, match="'weight' is this rank's part.*unshard"):
            ff.to_module(module, placed)
        return ff.to_module(module, ff.unshard(placed))

    for found in ff.spmd(main, mesh)():
        assert torch.equal(found.weight, module.weight)


def overlapping():
    module = nn.Linear(4, 4)
    module.part = nn.Parameter(module.weight.data[:2])
    return module


def locked(module):
    module.lock = threading.Lock()
    return module


def compiled(module):
    with warnings.catch_warnings():  # torch's own, of other parts of it
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.compile(module)


def compiled_in_place():
    module = nn.Sequential(Block())
    module[0].compile(backend="eager")
    return module


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: Block, TypeError, "expected an nn.Module"),
        (lambda: nn.LazyLinear(2), ValueError, "'weight' has no shape yet"),
        (lambda: nn.DataParallel(Block()), TypeError, r"DataParallel.*\.module"),
        (lambda: compiled(Block()), TypeError, r"OptimizedModule.*\._orig_mod"),
        (compiled_in_place, TypeError, "'0' is compiled in place.*before its compile"),
        (overlapping, ValueError, "'part' and 'weight'|'weight' and 'part'"),
        (lambda: nn.Embedding(2, 2, max_norm=1.0), ValueError, "max_norm"),
        (lambda: locked(Block()), TypeError, "cannot be copied"),
    ],
)  # fmt: skip
def test_a_module_that_cannot_be_a_function(make, error, says):
    with pytest.raises(error, match=says):
        ff.from_module(make())


def test_a_module_on_meta_has_no_buffers_to_give():
    module = nn.BatchNorm1d(4, device="meta")
    params = {"weight": torch.ones(4), "bias": torch.zeros(4)}
    with pytest.raises(ValueError, match="give buffers="):
        ff.to_module(module, params)
