"""State that a forward leaves in attributes: refused, or gone after the call."""

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


UNSEEN = {
    "an attribute": (Around(set_scale), "block.scale on a unit from outside"),
    "a mask": (Around(set_mask), "sets block.part.state on a unit from outside"),
    "a mode": (Around(set_mode), "sets block.norm.training on a unit from outside"),
    "a part": (Around(set_part), "sets block._modules on a unit from outside"),
    "a method": (Around(by_method), "sets block.part.cache on a unit from outside"),
    "a loss": (Penalized(), "unit 'layers.0' changes penalty, which is lost"),
    "a list": (Summing([]), "unit 'first' changes losses, .* return it"),
    "a deque": (Summing(deque()), "unit 'first' changes losses"),
    "a dict": (Summing({"all": []}), "unit 'first' changes losses"),
    "settings": (Settled(early=True), "layers.0.settings on a unit from out"),
    "what others have": (Settled(fills=True), "unit 'layers.0' changes settings"),
    "an argument": (Filling(list, list.append), "unit 'first' changes .* it is given"),
    "a dict given": (Filling(dict, put), "unit 'first' changes .* it is given"),
    "an item": (Filling(lambda: [1, 2], set_first), "unit 'first' changes .* is given"),
}  # fmt: skip
UNITS = Block, Auxiliary, Noting, Sharing, Appending


@pytest.mark.parametrize("what", UNSEEN)
def test_what_units_would_miss_is_refused_and_right_where_all_is_one(what):
    module, says = UNSEEN[what]
    units = [
        unit for unit in UNITS if any(isinstance(m, unit) for m in module.modules())
    ]
    apply, params, buffers = ff.from_module(module, units)
    step = ff.value_and_grad(lambda p: apply(p, buffers, X, mutable=True)[0].sum())
    for call in (step, ff.remat(step), step):  # nothing of it stays
        with pytest.raises(RuntimeError, match=says):
            call(params)
    whole = ff.from_module(module, units="")[0]
    expected = copy.deepcopy(module)(X)
    for _ in range(2):
        found = whole(params, buffers, X, mutable=True)[0]
        torch.testing.assert_close(found, expected.detach())


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


LEFT = {
    "list": lambda: Growing([], lambda s: s),
    "deque": lambda: Growing(deque(maxlen=9), lambda s: s),
    "nested": lambda: Growing({"d": [[]]}, lambda s: s["d"][0]),
    "object": lambda: Growing(Settings(), lambda s: s.seen),
    "namespace": lambda: Growing(SimpleNamespace(d=[]), lambda s: s.d),
    "slots": lambda: Growing(Slotted(), lambda s: s.d),
    "module": lambda: Growing([Slotted(), Inner([])], lambda s: s[1].state),
    "count": lambda: Counter(add, 0),
    "sum": lambda: Counter(accumulate, torch.zeros(4)),
    "note": lambda: Counter(note, None),
    "after every unit": lambda: Settled(),
}  # fmt: skip


@pytest.mark.parametrize("what", LEFT)
@pytest.mark.parametrize("units", [(), ""])
def test_what_is_left_behind_is_refused_or_asked_for_and_gone(what, units):
    module = LEFT[what]()
    apply, params, buffers = ff.from_module(module, units)
    expected = copy.deepcopy(module)(X).square().mean().detach()

    def step(mutable):
        def loss(p):
            return apply(p, buffers, X, mutable=True)[0].square().mean()

        plain = lambda p: apply(p, buffers, X).square().mean()  # noqa: E731
        return ff.value_and_grad(loss if mutable else plain)

    if what not in ("slots", "namespace"):  # of which each call has a copy of its own
        for _ in range(2):
            with pytest.raises(RuntimeError, match="changes .*lost after the call"):
                step(False)(params)
    wrap = lambda mesh: ff.shard(ff.remat(step(True)), mesh, "data")  # noqa: E731
    # Recorded first: what is fake must not stay.
    values = [found[0] for found, _ in with_ledger(wrap, params)]
    values += [step(True)(params)[0] for _ in range(2)]
    torch.testing.assert_close(values, [expected] * 4)


class Setting(nn.Module):
    """Notes what its settings come to, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.layer, self.settings = nn.Linear(4, 4), Settings()
        self.settings.kind, self.installed = None, False

    def forward(self, x):
        self.installed, y = True, self.layer(x)
        assert self.settings.kind is None
        self.settings.kind = "regression"
        return y


@pytest.mark.parametrize("units", [(), ""])
def test_settings_may_be_set(units):
    module = Setting()
    apply, params, buffers = ff.from_module(module, units)
    for _ in range(2):
        torch.testing.assert_close(apply(params, buffers, X), module.layer(X))


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
