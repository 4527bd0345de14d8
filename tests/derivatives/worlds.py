"""Two worlds in which one program means the same: fsfunc's ranks, and the law.

A program is a function ``program(o, w, x)`` of a world's operations ``o``, parameters
``w`` (a dict of square matrices) and this rank's data ``x`` (rows of features). In
:class:`Ranks` it runs on one rank. In :class:`Law` all ranks run at once, as lists, on
plain autograd, with no collective and nothing of fsfunc: a derivative by parameters is
that of the mean of the ranks' losses, one by own values that of their sum.
"""

from __future__ import annotations

import torch
from torch.func import grad, vmap

import fsfunc as ff
from fsfunc import tree

AXIS = "data"
_ = staticmethod
unit = ff.unit(lambda w, h: torch.tanh(h @ w))


class ByHand(torch.autograd.Function):
    """The unit, with a derivative by hand: a placed leaf is no tensor to it."""

    @staticmethod
    def forward(h, w):
        return unit(w, h)

    @staticmethod
    def setup_context(ctx, inputs, output):
        h, ctx.w = inputs
        ctx.save_for_backward(h, output)

    @staticmethod
    def backward(ctx, g):
        (h, y), w = ctx.saved_tensors, ctx.w
        g = g * (1 - y * y)
        return g @ w.T, h.T @ g


def by_units(w, x):
    """What lays parameters out: each matrix is taken by a unit of its own."""
    for k in sorted(w):
        x = unit(w[k], x)
    return x.square().mean()


class NoMeaning(Exception):
    """A program that is no one program over the ranks: it must be refused."""


class Ranks:
    """The operations as a user of fsfunc writes them."""

    law = False
    own = _(lambda fn, *values: fn(*values))
    unit, own_matrix = _(unit), _(unit)
    leaf = _(lambda w, k: w[k])
    psum = _(lambda v: ff.psum(v, AXIS))
    pmean = _(lambda v: ff.pmean(v, AXIS))
    gather = _(lambda v: ff.all_gather(v, AXIS))
    first = _(lambda v: ff.pbroadcast(v, AXIS, source=0))
    tree_sum, norm, scale = _(ff.tree_sum), _(ff.global_norm), _(ff.tree_scale)
    map, unshard = _(tree.map), _(ff.unshard)
    lay, reduce = _(ff.lay_like), _(ff.reduce_like)
    grad_w = grad_x = _(lambda loss, w: grad(loss)(w))
    vag_w = vag_x = _(lambda loss, w: ff.value_and_grad(loss)(w)[1])
    by_hand = _(lambda matrix, h: ByHand.apply(h, matrix))
    value = _(lambda loss, w, x: ff.value(loss)(w, x))

    def shift(self, v):
        n = ff.axis_size(AXIS)
        return ff.ppermute(v, AXIS, [(i, (i + 1) % n) for i in range(n)])

    def noise(self, w, seed):
        return ff.randn_like(w, generator=torch.Generator().manual_seed(seed))

    def whole(self, fn, w, *inputs):
        """``fn(o, w, *inputs)`` in a unit that has all parameters to itself."""
        return ff.unit(lambda w, *xs: fn(self, w, *xs), whole=True)(w, *inputs)

    def per_sample(self, loss, w, x):
        return vmap(grad(lambda w, one: loss(w, one[None])), (None, 0))(w, x)

    # What parts have no meaning for, unless they are whole
    times_own = _(lambda w, s: tree.map(lambda a: a * s, w))
    rough_noise = _(lambda w: tree.map(lambda a: a + torch.randn_like(a), w))
    rough_sum = _(lambda w: sum(a.square().sum() for a in tree.leaves(w)))
    turned = _(lambda w: tree.map(lambda a: a + 0.5 * a.T, w))
    sized = _(lambda w: tree.map(lambda a: a / (a.ndim + a.numel()), w))

    def times_item(self, w, s):
        return self.times_own(w, s.item())


class Law(Ranks):
    """The same for all ranks at once: an own value is the list of the ranks' values.

    Args:
        parts: whether parameters are in parts, so that each is one value or nothing.
        inside: whether we are in a unit, where parameters are the rank's own.
        placed: whether leaves were placed, and so claim to be one value.
    """

    law = True

    def __init__(self, n, parts=True, inside=False, placed=True):
        self.n, self.parts, self.inside, self.placed = n, parts, inside, placed

    def own(self, fn, *values):
        return [fn(*each) for each in zip(*map(self._each, values), strict=True)]

    def _each(self, v):
        """Own values rank by rank; what is one value, for each of them."""
        return v if isinstance(v, list) else [v] * self.n

    def unit(self, matrix, h):
        return self.own(lambda m, h: torch.tanh(h @ m), matrix, h)

    def psum(self, v):
        total = sum(self._each(v))
        return [total] * self.n

    def pmean(self, v):
        return [t / self.n for t in self.psum(v)]

    def gather(self, v):
        return [torch.cat(self._each(v))] * self.n

    def shift(self, v):
        v = self._each(v)
        return [v[r - 1] for r in range(self.n)]

    def first(self, v):
        return [self._each(v)[0]] * self.n

    def tree_sum(self, w):
        return self.own(lambda *leaves: sum(a.sum() for a in leaves), *w.values())

    def norm(self, w):
        squares = self.tree_sum(self.map(torch.square, w))
        return self.own(_root, squares)

    def scale(self, w, factor):
        if self.inside:
            return {k: self.own(torch.mul, a, factor) for k, a in w.items()}
        factor = self._agreed(factor)
        return self.map(lambda a: a * factor, w)

    def noise(self, w, seed):
        """Of the leaves' shapes alone."""
        shapes = {k: a[0] if isinstance(a, list) else a for k, a in w.items()}
        return super().noise(shapes, seed)

    def _agreed(self, v):
        """What is the same on every rank, as one value: of derivatives too."""
        if not self._agree(v):
            raise NoMeaning("a number that differs from rank to rank")
        return sum(self._each(v)) / self.n

    def _agree(self, v):
        v = self._each(v)
        return all(torch.allclose(x, v[0], rtol=1e-9, atol=1e-12) for x in v)

    def map(self, fn, *trees):
        found = {}
        for k in trees[0]:
            leaves = [t[k] for t in trees]
            several = any(isinstance(a, list) for a in leaves)
            found[k] = self.own(fn, *leaves) if several else fn(*leaves)
        return found

    def leaf(self, w, k):
        return self._one(w[k]) if self.placed else w[k]

    def _one(self, a):
        if isinstance(a, list) and not self.inside:
            raise NoMeaning("parameters that differ from rank to rank")
        return a

    def unshard(self, w):
        return {k: self._each(a) for k, a in w.items()}

    def lay(self, t, like):
        if self.inside:
            return t
        return {k: self._agreed(v) for k, v in t.items()}

    def reduce(self, t, like):
        return {k: sum(self._each(v)) / self.n for k, v in t.items()}

    def grad_w(self, loss, w):
        if self.inside:
            keys, w = list(w), {k: [_tracked(a) for a in self._each(w[k])] for k in w}
            each = [a for k in keys for a in w[k]]
            found = _pulled(sum(self._each(loss(w))), each)
            return {k: found[i * self.n : (i + 1) * self.n] for i, k in enumerate(keys)}
        own = {k for k, a in w.items() if isinstance(a, list) and not self.parts}
        w = {
            k: list(map(_tracked, a)) if k in own else _tracked(self._one(a))
            for k, a in w.items()
        }
        total = sum(self._each(loss(w)))
        found = {k: _pulled(total, w[k]) for k in own}  # as of anything else
        one = [k for k in w if k not in own]
        mean = _pulled(total / self.n, [w[k] for k in one])
        return {k: found.get(k, dict(zip(one, mean, strict=True)).get(k)) for k in w}

    vag_w = grad_w

    def value(self, loss, w, x):
        """The mean of the ranks' losses; in a unit it is this rank's own."""
        return loss(w, x) if self.inside else self.pmean(loss(w, x))

    def grad_x(self, loss, h):
        h = [_tracked(a) for a in h]
        return _pulled(sum(self._each(loss(h))), h)

    vag_x = grad_x

    def whole(self, fn, w, *inputs):
        """Each rank has the parameters to itself: derivatives are that rank's own."""
        inside = Law(self.n, parts=False, inside=True)
        own = {k: self._each(self._one(a)) for k, a in w.items()}
        return fn(inside, own, *map(self._each, inputs))

    def per_sample(self, loss, w, x):
        """Inside a unit, each rank's own; else only where the ranks' rows agree."""
        one = Law(self.n, parts=False, inside=True)
        w = {k: self._each(a) for k, a in w.items()}
        rows = len(x[0])
        each = [
            one.grad_w(lambda w, i=i: loss(w, [r[i : i + 1] for r in x]), w)
            for i in range(rows)
        ]
        found = {
            k: [torch.stack([g[k][r] for g in each]) for r in range(self.n)] for k in w
        }
        if not self.inside:
            for v in found.values():
                self._agreed(v)  # or rows of several ranks would mix
        return found

    def times_own(self, w, s):
        if self.parts or self.placed and not self.inside and self._agree(s):
            return self.scale(w, s)
        return {k: self.own(lambda a, s: a * s, a, s) for k, a in w.items()}

    def rough_noise(self, w):
        if self.parts:
            raise NoMeaning("noise that depends on how the leaf is cut")
        raise NotImplementedError("noise of torch's generator")

    def rough_sum(self, w):
        return self.own(
            lambda *leaves: sum(a.square().sum() for a in leaves), *w.values()
        )

    def turned(self, w):
        return self.map(lambda a: a + 0.5 * a.T, w)

    def sized(self, w):
        return self.map(lambda a: a / (a.ndim + a.numel()), w)

    def times_item(self, w, s):
        return self.times_own(w, self.own(torch.detach, s))

    def own_matrix(self, matrix, h):
        return self.unit(matrix, h)

    by_hand = own_matrix


def values(g):
    """A dict's values; of sharded leaves the tensors in them, as a tree map would."""
    return list(g.values()) if any(map(_is_own, g.values())) else tree.leaves(g)


def _root(x):
    """The root, whose derivative at 0 is 0, as that of a norm is."""
    return torch.where(x == 0, 0, torch.where(x == 0, 1, x).sqrt())


def _is_own(v):
    return isinstance(v, list)


def _tracked(a):
    return a.view_as(a) if a.requires_grad else a.detach().requires_grad_()


def _pulled(y, xs):
    if not xs or not y.requires_grad:
        return [torch.zeros_like(x) for x in xs]
    found = torch.autograd.grad(y, xs, create_graph=True, allow_unused=True)
    return [
        torch.zeros_like(x) if g is None else g for x, g in zip(xs, found, strict=True)
    ]
