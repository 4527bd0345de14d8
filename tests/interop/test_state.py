"""State that a forward leaves in attributes: gone after the call, or refused."""

import copy
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fsfunc as ff
from tests.checks import with_ledger
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


def set_scale(block, x):
    block.scale = 2


def set_mask(block, x):
    block.part.state = (x > 0).to(x.dtype)


def set_mode(block, x):
    block.norm.eval()


def set_part(block, x):
    block.part = nn.Identity()


def by_method(block, x):
    return block.remembered(x)


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


class Settled(nn.Module):
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


def put(into, y):
    into.update(a=y)


def set_first(into, y):
    into[0] = y


# What units would miss: refused where they are units, and right where all is one

UNSEEN = {
    "an attribute": (Around(set_scale), "block.scale on a unit from outside"),
    "a mask": (Around(set_mask), "sets block.part.state on a unit from outside"),
    "a mode": (Around(set_mode), "sets block.norm.training on a unit from outside"),
    "a part": (Around(set_part), "sets block._modules on a unit from outside"),
    "a method": (Around(by_method), "sets block.part.cache on a unit from outside"),
    "a loss": (Penalized(), "'layers.0.penalty' is read where it is not"),
    "a list": (Summing([]), "'first.losses' is read where it is"),
    "a deque": (Summing(deque()), "'first.losses' is read where it is"),
    "a dict": (Summing({"all": []}), "'first.losses' is read where it is"),
    "settings": (Settled(early=True), "layers.0.settings on a unit from out"),
    "what others have": (Settled(fills=True), "'layers.0' fills layers.0.settings, wh"),
    "an argument": (Filling(list, list.append), "unit 'first' changes .* it is given"),
    "a dict given": (Filling(dict, put), "unit 'first' changes .* it is given"),
    "an item": (Filling(lambda: [1, 2], set_first), "unit 'first' changes .* is given"),
}
UNITS = Block, Auxiliary, Noting, Sharing, Appending


@pytest.mark.parametrize("what", UNSEEN)
def test_what_units_would_miss_is_refused(what):
    module, says = UNSEEN[what]
    units = [
        unit for unit in UNITS if any(isinstance(m, unit) for m in module.modules())
    ]
    apply, params, buffers = ff.from_module(module, units)
    step = ff.value_and_grad(lambda p: apply(p, buffers, X, mutable=True)[0].sum())
    for call in (step, ff.remat(step), step):  # nothing of it stays
        with pytest.raises(RuntimeError, match=says):
            call(params)
    if what != "a part":  # which is refused to the end
        whole = ff.from_module(module, units="")[0]
        expected = copy.deepcopy(module)(X)
        for _ in range(2):
            found = whole(params, buffers, X, mutable=True)[0]
            torch.testing.assert_close(found, expected.detach())


def test_what_is_written_after_every_unit_has_run_is_gone():
    module = Settled()
    apply, params, buffers = ff.from_module(module, Sharing)
    with torch.no_grad():
        expected = module(X)
    for _ in range(2):
        assert torch.equal(apply(params, buffers, X), expected)


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
    wrap = lambda mesh: ff.shard(ff.remat(step), mesh, "data")  # noqa: E731
    # Recorded first: what is fake must not stay.
    values = [found[0] for found, _ in with_ledger(wrap, params)]
    values += [step(params)[0] for _ in range(2)]
    torch.testing.assert_close(values, [module(X).square().mean().detach()] * 4)


def test_copies_of_models_with_configs_are_used_again():
    from fsfunc.interop import structures

    made = []
    copied = structures.copied
    structures.copied = lambda m: made.append(m) or copied(m)
    try:
        apply, params, buffers = ff.from_module(hugging_face(llama), "model.layers.*")
        for _ in range(2):
            count = len(made)
            apply(params, buffers, **text(), use_cache=False)
    finally:
        structures.copied = copied
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
