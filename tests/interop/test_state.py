"""State that a forward leaves in attributes: refused, or gone after the call."""

import copy
from collections import deque

import pytest
import torch
from torch import nn

import fsfunc as ff
from tests.checks import with_ledger
from tests.interop.models import close, seeded

X = torch.randn(4, 4, generator=seeded(3))


class Layer(nn.Module):
    """A linear layer, and what else it does: ``do(self, x, y, *more)``, or nothing."""

    def __init__(self, do=None, **state):
        super().__init__()
        self.layer, self.do = nn.Linear(4, 4), do
        for name, value in state.items():
            setattr(self, name, value)

    def forward(self, x, *more):
        y = self.layer(x)
        out = None if self.do is None else self.do(self, x, y, *more)
        return y if out is None else out


class Part(Layer):
    """One whose state others set, or that remembers."""

    def __init__(self):
        super().__init__(lambda m, x, y: y if m.state is None else y * m.state)
        self.state, self.cache = None, None

    def remembered(self, x):
        self.cache = x if self.cache is None else self.cache
        return self.layer(self.cache)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.part, self.norm = Part(), nn.BatchNorm1d(4)

    def forward(self, x):
        return x + self.part(self.norm(x))


class Around(nn.Module):
    """Does something to a block before, or in place of, its call."""

    def __init__(self, do):
        super().__init__()
        self.block, self.do = Block(), do

    def forward(self, x):
        out = self.do(self.block, x)
        return self.block(x) if out is None else out


class Pair(nn.Module):
    """Two layers, what is given to both, and what is made of it all."""

    def __init__(self, make, then, given=None):
        super().__init__()
        self.first, self.second = make(), make()
        self.then, self.given = then, given

    def forward(self, x):
        given = () if self.given is None else (self.given(),)
        return self.then(self, self.second(self.first(x, *given), *given), *given)


class Settings:
    def __init__(self):
        self.scale, self.seen, self.kind = 1.0, [], None


def noting(container):
    """Layers that note their losses, which whoever is around reads."""

    def notes(m):
        return m.losses["all"] if isinstance(m.losses, dict) else m.losses

    return Pair(
        lambda: Layer(
            lambda m, x, y: notes(m).append(y.square().mean()),
            losses=copy.deepcopy(container),
        ),
        lambda m, x: x + sum(notes(m.first)) + sum(notes(m.second)),
    )


def penalized():
    def note(m, x, y):
        m.penalty = y.mean()

    def then(m, x):
        return x + m.first.penalty + m.second.penalty

    return Pair(lambda: Layer(note, penalty=0.0), then)


def settled(early=False, fills=False):
    """Layers that read, or fill, what they share with what is around them."""
    settings = Settings()

    def read(m, x, y):
        y = y * m.settings.scale
        if fills:
            m.settings.seen.append(y.mean())
        return y

    def then(m, x):
        m.first.settings.scale = 3.0  # no unit of this call is there to see it
        return x + sum(m.first.settings.seen)

    class Early(Pair):
        def forward(self, x):
            if early:
                self.first.settings.scale = 2.0
            return super().forward(x)

    return Early(lambda: Layer(read, settings=settings), then)


def filling(given, put):
    def then(m, x, into):
        found = into.values() if isinstance(into, dict) else into
        return x + sum(y for y in found if isinstance(y, torch.Tensor))

    def do(m, x, y, into):
        put(into, y.square().mean(1, keepdim=True))

    return Pair(lambda: Layer(do), then, given)


UNSEEN = {
    "an attribute": (Around(lambda b, x: setattr(b, "scale", 2)), "block.scale on a u"),
    "a mask": (Around(lambda b, x: setattr(b.part, "state", (x > 0).to(x.dtype))),
        "sets block.part.state on a unit from outside"),
    "a mode": (Around(lambda b, x: b.norm.eval() and None), "sets block.norm.training"),
    "a part": (Around(lambda b, x: setattr(b, "part", nn.Identity())),
        "sets block._modules on a unit from outside"),
    "a method": (Around(lambda b, x: b.part.remembered(x)), "sets block.part.cache on"),
    "a loss": (penalized(), "unit 'first' changes penalty, which is lost"),
    "a list": (noting([]), "unit 'first' changes losses, .* return it"),
    "a deque": (noting(deque()), "unit 'first' changes losses"),
    "a dict": (noting({"all": []}), "unit 'first' changes losses"),
    "settings": (settled(early=True), "first.settings on a unit from outside"),
    "what others have": (settled(fills=True), "unit 'first' changes settings"),
    "an argument": (filling(list, list.append), "unit 'first' changes .* it is given"),
    "a dict given": (filling(dict, lambda into, y: into.update(a=y)),
        "unit 'first' changes .* it is given"),
    "an item": (filling(lambda: [1, 2], lambda into, y: into.__setitem__(0, y)),
        "unit 'first' changes .* is given"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSEEN)
def test_what_units_would_miss_is_refused_and_right_where_all_is_one(name):
    module, says = UNSEEN[name]
    units = Block if isinstance(module, Around) else Layer
    apply, params, buffers = ff.from_module(module, units)
    step = ff.value_and_grad(lambda p: apply(p, buffers, X, mutable=True)[0].sum())
    for call in (step, ff.remat(step), step):  # nothing of it stays
        with pytest.raises(RuntimeError, match=says):
            call(params)
    whole = ff.from_module(module, units="")[0]
    expected = copy.deepcopy(module)(X)
    for _ in range(2):
        close(whole(params, buffers, X, mutable=True)[0], expected.detach(), 1e-5)


class Slotted:
    __slots__ = ("d",)

    def __init__(self):
        self.d = []


def growing(state, at):
    def grow(m, x, y):
        at(m.state).append(x.mean())
        return y * len(at(m.state))

    return Layer(grow, state=state)


def counter(before, after):
    def count(m, x, y):
        m.n = after(m, x)
        return y * m.n

    return Layer(count, n=before)


LEFT = {
    "list": lambda: growing([], lambda s: s),
    "nested": lambda: growing({"d": [deque(maxlen=9)]}, lambda s: s["d"][0]),
    "object": lambda: growing(Settings(), lambda s: s.seen),
    "slots": lambda: growing(Slotted(), lambda s: s.d),
    "module": lambda: growing([Slotted(), Layer(state=[])], lambda s: s[1].state),
    "count": lambda: counter(0, lambda m, x: m.n + 1),
    "sum": lambda: counter(torch.zeros(4), lambda m, x: m.n + x.detach().mean(0)),
    "note": lambda: counter(None, lambda m, x: x.mean()),
    "after every unit": settled,
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
@pytest.mark.parametrize("units", [(), ""])
def test_what_is_left_behind_is_refused_or_asked_for_and_gone(name, units):
    module = LEFT[name]()
    apply, params, buffers = ff.from_module(module, units)
    expected = copy.deepcopy(module)(X).square().mean().detach()

    def step(**how):
        def loss(p):
            out = apply(p, buffers, X, **how)
            return (out[0] if how else out).square().mean()

        return ff.value_and_grad(loss)

    if name != "slots":  # of which each call has a copy of its own
        for _ in range(2):
            with pytest.raises(RuntimeError, match="changes .*lost after the call"):
                step()(params)
    grad = step(mutable=True)
    # Recorded first: what is fake must not stay.
    found = with_ledger(lambda mesh: ff.shard(ff.remat(grad), mesh, "data"), params)
    values = [value for (value, _), _ in found] + [grad(params)[0] for _ in range(2)]
    close(values, [expected] * 4, 1e-5)


@pytest.mark.parametrize("units", [(), ""])
def test_settings_may_be_set(units):
    """As models of transformers note what their configs come to."""

    def note(m, x, y):
        m.installed = True
        assert m.settings.kind is None
        m.settings.kind = "regression"

    module = Layer(note, settings=Settings(), installed=False)
    apply, params, buffers = ff.from_module(module, units)
    for _ in range(2):
        close(apply(params, buffers, X), module.layer(X).detach(), 1e-5)
