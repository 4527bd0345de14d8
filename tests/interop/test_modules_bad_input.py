"""What no function can do for a module is refused, by name and with the way out."""

import copy
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


def from_outside(module):
    module.layer.scale = 2


def parameter(module):
    module.layer.weight = nn.Parameter(torch.zeros(4, 4))


def in_place(module):
    with torch.no_grad():
        module.layer.weight.mul_(2)


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


def test_a_forward_that_sets_attributes_of_units():
    apply, params, buffers = ff.from_module(Writing(from_outside))
    with pytest.raises(RuntimeError, match="layer.scale on a unit from outside"):
        apply(params, buffers, X)
    apply, params, buffers = ff.from_module(Writing(from_outside), units="")
    apply(params, buffers, X)


def test_a_parameter_changed_in_place():
    apply, params, buffers = ff.from_module(Writing(in_place), units="")
    params = {name: x.clone() for name, x in params.items()}
    with pytest.raises(RuntimeError, match="changes the parameter 'layer.weight'"):
        apply(params, buffers, X)


class Auxiliary(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.penalty = nn.Linear(4, 4), 0.0

    def forward(self, x):
        y = self.layer(x)
        self.penalty = y.mean()
        return y


class Penalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Auxiliary(), Auxiliary()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x + sum(layer.penalty for layer in self.layers)


def test_what_a_units_forward_sets_is_not_read_outside():
    module = Penalized()
    apply, params, buffers = ff.from_module(module, Auxiliary)
    with pytest.raises(
        RuntimeError, match="'layers.0.penalty' is read where it is not"
    ):
        apply(params, buffers, X)
    for units in ((), Penalized):  # all in one place
        apply, params, buffers = ff.from_module(module, units)
        torch.testing.assert_close(apply(params, buffers, X), module(X))


class Settings:
    def __init__(self):
        self.scale, self.seen = 1.0, []


class Sharing(nn.Module):
    """A layer that reads, or fills, what it shares with what is around it."""

    def __init__(self, settings, fills=False):
        super().__init__()
        self.layer, self.settings, self.fills = nn.Linear(4, 4), settings, fills

    def forward(self, x):
        y = self.layer(x) * self.settings.scale
        if self.fills:
            self.settings.seen.append(y.mean())
        return y


class Around(nn.Module):
    def __init__(self, early=False, fills=False):
        super().__init__()
        self.settings, self.early = Settings(), early
        self.layers = nn.ModuleList(Sharing(self.settings, fills) for _ in range(2))

    def forward(self, x):
        if self.early:
            self.settings.scale = 2.0
        for layer in self.layers:
            x = layer(x)
        self.settings.scale = 3.0  # no unit of this call is there to see it
        return x + sum(self.settings.seen)


def test_what_is_written_after_every_unit_has_run_is_gone():
    module = Around()
    apply, params, buffers = ff.from_module(module, Sharing)
    with torch.no_grad():
        expected = module(X)
    for _ in range(2):
        assert torch.equal(apply(params, buffers, X), expected)


def test_what_a_unit_would_read_and_does_not_see_is_refused():
    module = Around(early=True)
    apply, params, buffers = ff.from_module(module, Sharing)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="layers.0.settings on a unit from out"):
            apply(params, buffers, X)
    apply, params, buffers = ff.from_module(module, Around)
    with torch.no_grad():
        assert torch.equal(apply(params, buffers, X), copy.deepcopy(module)(X))


def test_what_units_fill_for_others_is_refused():
    module = Around(fills=True)
    apply, params, buffers = ff.from_module(module, Sharing)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match="'layers.0' fills layers.0.settings, which others have"
        ):
            apply(params, buffers, X)
    apply, params, buffers = ff.from_module(module, Around)
    with torch.no_grad():
        assert torch.equal(apply(params, buffers, X), copy.deepcopy(module)(X))


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
    with pytest.raises(ValueError, match=r"'blocks.0.up.bias' is missing \('blocks.0"):
        apply(less | {"blocks.0.up.bios": X}, buffers, tokens)
    with pytest.raises(ValueError, match="no 'head.weight'"):
        apply(params | {"head.weight": X}, buffers, tokens)
    with pytest.raises(ValueError, match=r"'embed.weight' has shape \(3, 4\), and \(5"):
        apply(params | {"embed.weight": X}, buffers, tokens)
    with pytest.raises(TypeError, match="dict of tensors by name"):
        apply(list(params.values()), buffers, tokens)
    with pytest.raises(ValueError, match="buffers: the module has no 'a'"):
        ff.to_module(Stack(), params, {"a": X})
    with pytest.raises(ValueError, match="'embed.weight' is missing"):
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
