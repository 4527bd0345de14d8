"""State that a forward leaves in attributes: gone after the call, or refused."""

import copy
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fsfunc as ff
from tests.interop.models import hugging_face, llama, seeded, text

X = torch.randn(4, 4, generator=seeded(3))


class Inner(nn.Module):
    def __init__(self, state=None):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.state, self.cache = state, None

    def forward(self, x):
        y = self.layer(x)
        return y if self.state is None else y * self.state

    def remembered(self, x):
        if self.cache is None:
            self.cache = x
        return self.layer(self.cache)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.part, self.norm = Inner(), nn.BatchNorm1d(4)

    def forward(self, x):
        return x + self.part(self.norm(x))

    def remembered(self, x):
        return self.part.remembered(x)


class Around(nn.Module):
    """Does something to a block before, or in place of, its call."""

    def __init__(self, do):
        super().__init__()
        self.block, self.do = Block(), do

    def forward(self, x):
        out = self.do(self.block, x)
        return self.block(x) if out is None else out


def set_mask(block, x):
    block.part.state = (x > 0).to(x.dtype)


def set_mode(block, x):
    block.norm.eval()


def set_part(block, x):
    block.part = nn.Identity()


def by_method(block, x):
    return block.remembered(x)


@pytest.mark.parametrize(
    ("do", "says"),
    [
        (set_mask, "sets block.part.state on a unit from outside"),
        (set_mode, "sets block.norm.training on a unit from outside"),
        (set_part, "sets block._modules on a unit from outside"),
        (by_method, "sets block.part.cache on a unit from outside"),
    ],
)
def test_what_is_set_below_a_unit_from_outside_is_refused(do, says):
    apply, params, buffers = ff.from_module(Around(do), Block)
    for _ in range(2):  # nothing of it stays
        with pytest.raises(RuntimeError, match=says):
            apply(params, buffers, X, mutable=True)
    whole = ff.from_module(Around(do), Around)[0]
    if do is not set_part:
        whole(params, buffers, X, mutable=True)


class Noting(nn.Module):
    """Notes its losses in a container, which whoever is around reads."""

    def __init__(self, container):
        super().__init__()
        self.layer, self.losses = nn.Linear(4, 4), container

    def forward(self, x):
        y = self.layer(x)
        note = self.losses["all"] if isinstance(self.losses, dict) else self.losses
        note.append(y.square().mean())
        return y


class Summing(nn.Module):
    def __init__(self, container):
        super().__init__()
        self.first, self.second = Noting(container), Noting(copy.deepcopy(container))

    def forward(self, x):
        x = self.second(self.first(x))
        losses = [m.losses for m in (self.first, self.second)]
        losses = [m["all"] if isinstance(m, dict) else m for m in losses]
        return x + sum(loss for found in losses for loss in found)


@pytest.mark.parametrize("container", [[], deque(), {"all": []}])
def test_a_units_list_of_losses_is_not_read_outside(container):
    module = Summing(container)
    apply, params, buffers = ff.from_module(module, Noting)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="'first.losses' is read where it is"):
            apply(params, buffers, X)
    apply, params, buffers = ff.from_module(module, Summing)
    expected = copy.deepcopy(module)(X)
    for _ in range(2):  # and the list is empty again
        torch.testing.assert_close(apply(params, buffers, X), expected)


class Growing(nn.Module):
    def __init__(self, state, at):
        super().__init__()
        self.layer, self.state, self.at = nn.Linear(4, 4), state, at

    def forward(self, x):
        kept = self.at(self.state)
        kept.append(x.mean())
        return self.layer(x) * len(kept)


class Slotted:
    __slots__ = ("d",)

    def __init__(self):
        self.d = []


def same(state):
    return state


STATES = {
    "list": (list, same),
    "deque": (lambda: deque(maxlen=9), same),
    "nested": (lambda: {"d": [[]]}, lambda s: s["d"][0]),
    "object": (lambda: SimpleNamespace(d=[]), lambda s: s.d),
    "slots": (Slotted, lambda s: s.d),
    "module": (lambda: [Slotted(), Inner([])], lambda s: s[1].state),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("units", [(), Growing])
def test_state_within_attributes_does_not_stay(state, units):
    make, at = STATES[state]
    module = Growing(make(), at)
    apply, params, buffers = ff.from_module(nn.Sequential(module), units)
    step = ff.value_and_grad(lambda p: apply(p, buffers, X).square().mean())
    mesh = ff.make_mesh({"data": 2}, "simulated")

    def main():  # recorded first: what is fake must not stay
        f = ff.shard(ff.remat(step), mesh, "data")
        return f(ff.place(f, params))[0]

    values = [*ff.spmd(main, mesh)(), *(step(params)[0] for _ in range(2))]
    torch.testing.assert_close(values, [module(X).square().mean().detach()] * 4)


def test_copies_of_models_with_configs_are_used_again():
    from fsfunc.interop import copies

    made = []
    copied = copies.copied
    copies.copied = lambda m: made.append(m) or copied(m)
    try:
        apply, params, buffers = ff.from_module(hugging_face(llama), "model.layers.*")
        for _ in range(2):
            count = len(made)
            apply(params, buffers, **text(), use_cache=False)
    finally:
        copies.copied = copied
    assert 0 < count == len(made)


class Counter(nn.Module):
    def __init__(self, do, before):
        super().__init__()
        self.layer, self.do, self.n = nn.Linear(4, 4), do, before

    def forward(self, x):
        self.do(self, x)
        return self.layer(x) * (1 if self.n is None else self.n)


def add(module, x):
    module.n += 1


def accumulate(module, x):
    module.n = module.n + x.detach().mean(0)


def note(module, x):
    module.n = x.mean()


@pytest.mark.parametrize("units", [(), Counter])
@pytest.mark.parametrize(("do", "before"), [(add, 0), (accumulate, torch.zeros(4))])
def test_counts_and_sums_in_attributes_are_refused(do, before, units):
    apply, params, buffers = ff.from_module(nn.Sequential(Counter(do, before)), units)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"changes (0\.)?n, which is lost.*buff"):
            apply(params, buffers, X)


@pytest.mark.parametrize("before", [None, 0.0, 3])
def test_what_is_made_anew_in_each_call_may_be_set(before):
    module = Counter(note, before)
    apply, params, buffers = ff.from_module(module)
    for _ in range(2):
        torch.testing.assert_close(apply(params, buffers, X), module(X))


class Appending(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.layer, self.how = nn.Linear(4, 4), how

    def forward(self, x, into):
        y = self.layer(x)
        self.how(into, y.square().mean(1, keepdim=True))
        return y


class Filling(nn.Module):
    def __init__(self, into, how):
        super().__init__()
        self.first, self.second = Appending(how), Appending(how)
        self.into = into

    def forward(self, x):
        into = self.into()
        x = self.second(self.first(x, into), into=into)
        found = into.values() if isinstance(into, dict) else into
        return x + sum(y for y in found if isinstance(y, torch.Tensor))


@pytest.mark.parametrize("transform", [lambda f: f, ff.remat])
@pytest.mark.parametrize(
    ("into", "how"),
    [
        (list, lambda into, y: into.append(y)),
        (dict, lambda into, y: into.update(a=y)),
        (lambda: [1, 2], lambda into, y: into.__setitem__(0, y)),
    ],
)
def test_an_argument_that_a_unit_fills_is_refused(into, how, transform):
    module = Filling(into, how)
    apply, params, buffers = ff.from_module(module, Appending)
    step = transform(ff.value_and_grad(lambda p: apply(p, buffers, X).sum()))
    with pytest.raises(RuntimeError, match="unit 'first' changes .* it is given"):
        step(params)
    apply, params, buffers = ff.from_module(module, Filling)
    torch.testing.assert_close(apply(params, buffers, X), module(X))
