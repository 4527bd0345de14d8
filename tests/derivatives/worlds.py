"""Two worlds in which one program means the same: fsfunc's ranks, and the law.

A program is a function ``program(o, w, x)`` of a world's operations ``o``, parameters
``w`` (a dict of square matrices) and this rank's data ``x`` (rows of features). In
:class:`Ranks` it runs on one rank. In :class:`Law` all ranks run at once, as lists, on
plain autograd, with no collective and nothing of fsfunc: a derivative by parameters is
that of the mean of the ranks' losses, one by own values that of their sum.
"""

from __future__ import annotations

import torch
from torch.func import grad, jvp, vmap

import fsfunc as ff
from fsfunc import tree

AXIS = "data"
unit = ff.unit(lambda w, h: torch.tanh(h @ w))


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

    def own(self, fn, *values):
        return fn(*values)

    def unit(self, matrix, h):
        return unit(matrix, h)

    def leaf(self, w, k):
        return w[k]

    def psum(self, v):
        return ff.psum(v, AXIS)

    def pmean(self, v):
        return ff.pmean(v, AXIS)

    def gather(self, v):
        return ff.all_gather(v, AXIS)

    def shift(self, v):
        n = ff.axis_size(AXIS)
        return ff.ppermute(v, AXIS, [(i, (i + 1) % n) for i in range(n)])

    def first(self, v):
        return ff.pbroadcast(v, AXIS, source=0)

    def scatter(self, v):
        return ff.psum_scatter(v, AXIS)

    def tree_sum(self, w):
        return ff.tree_sum(w)

    def norm(self, w):
        return ff.global_norm(w)

    def scale(self, w, factor):
        return ff.tree_scale(w, factor)

    def map(self, fn, *trees):
        return tree.map(fn, *trees)

    def noise(self, w, seed):
        return ff.randn_like(w, generator=torch.Generator().manual_seed(seed))

    def unshard(self, w):
        return ff.unshard(w)

    def lay(self, t, like):
        return ff.lay_like(t, like)

    def reduce(self, t, like):
        return ff.reduce_like(t, like)

    def grad_w(self, loss, w):
        return grad(loss)(w)

    def vag_w(self, loss, w):
        return ff.value_and_grad(loss)(w)[1]

    def grad_x(self, loss, h):
        return grad(loss)(h)

    def vag_x(self, loss, h):
        return ff.value_and_grad(loss)(h)[1]

    def hvp(self, loss, w, direction):
        return jvp(grad(loss), (w,), (direction,))[1]

    def whole(self, fn, w, *inputs):
        """``fn(o, w, *inputs)`` in a unit that has all parameters to itself."""
        return ff.unit(lambda w, *xs: fn(self, w, *xs), whole=True)(w, *inputs)

    def per_sample(self, loss, w, x):
        return vmap(grad(lambda w, one: loss(w, one[None])), (None, 0))(w, x)

    # What parts have no meaning for, unless they are whole

    def times_own(self, w, s):
        return tree.map(lambda a: a * s, w)

    def rough_noise(self, w):
        return tree.map(lambda a: a + torch.randn_like(a), w)

    def rough_sum(self, w):
        return sum(a.square().sum() for a in tree.leaves(w))

    def own_matrix(self, matrix, h):
        return unit(matrix, h)


class Law(Ranks):
    """The same for all ranks at once: an own value is the list of the ranks' values."""

    law = True

    def __init__(self, n):
        self.n = n

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

    def scatter(self, v):
        return list(sum(self._each(v)).tensor_split(self.n))

    def tree_sum(self, w):
        return [sum(a.sum() for a in w.values())] * self.n

    def norm(self, w):
        return [sum(a.square().sum() for a in w.values()).sqrt()] * self.n

    def scale(self, w, factor):
        return {k: a * self._agreed(factor) for k, a in w.items()}

    def _agreed(self, v):
        """What is the same on every rank, as one value: of derivatives too."""
        v = self._each(v)
        if not all(torch.allclose(x, v[0], rtol=1e-9, atol=1e-12) for x in v):
            raise NoMeaning("a number that differs from rank to rank")
        return sum(v) / self.n

    def map(self, fn, *trees):
        return {k: fn(*(t[k] for t in trees)) for k in trees[0]}

    def unshard(self, w):
        return {k: [a] * self.n for k, a in w.items()}

    def lay(self, t, like):
        return {k: self._agreed(v) for k, v in t.items()}

    def reduce(self, t, like):
        return {k: sum(self._each(v)) / self.n for k, v in t.items()}

    def grad_w(self, loss, w):
        w = {k: _tracked(a) for k, a in w.items()}
        mean = sum(self._each(loss(w))) / self.n
        return dict(zip(w, _pulled(mean, list(w.values())), strict=True))

    vag_w = grad_w

    def grad_x(self, loss, h):
        h = [_tracked(a) for a in h]
        return _pulled(sum(self._each(loss(h))), h)

    vag_x = grad_x

    def hvp(self, loss, w, direction):
        w = {k: _tracked(a) for k, a in w.items()}
        g = self.grad_w(loss, w)
        along = sum((g[k] * direction[k].detach()).sum() for k in g)
        first = dict(zip(w, _pulled(along, list(w.values())), strict=True))
        turned = {k: direction[k] for k in w}
        if any(a.grad_fn is not None for a in turned.values()):
            raise NotImplementedError("a direction that is differentiated")
        return first

    def whole(self, fn, w, *inputs):
        """Rank by rank, each alone: there every derivative is that rank's own."""
        alone = Law(1)
        found = []
        for each in zip(*map(self._each, inputs), strict=True):
            out = fn(alone, w, *([v] for v in each))
            found.append(tree.map(lambda y: y, _first(out)))
        if isinstance(found[0], dict):
            return {k: [f[k] for f in found] for k in found[0]}
        return found

    def per_sample(self, loss, w, x):
        (rows,) = x
        samples = [self.grad_w(lambda w, r=r: loss(w, [r[None]]), w) for r in rows]
        return {k: [torch.stack([s[k] for s in samples])] for k in w}

    def times_own(self, w, s):
        return self.scale(w, s)

    def rough_noise(self, w):
        raise NoMeaning("noise that depends on how the leaf is cut")

    def rough_sum(self, w):
        return [sum(a.square().sum() for a in w.values())] * self.n

    def own_matrix(self, matrix, h):
        if not all(torch.equal(m, matrix[0]) for m in matrix):
            raise NoMeaning("a unit's parameters that differ from rank to rank")
        return self.unit(matrix, h)


def _first(out):
    """What a rank alone gives: the only value of each list."""
    if isinstance(out, dict):
        return {k: v[0] if isinstance(v, list) else v for k, v in out.items()}
    return out[0] if isinstance(out, list) else out


def _tracked(a):
    return a.view_as(a) if a.requires_grad else a.detach().requires_grad_()


def _pulled(y, xs):
    if not y.requires_grad:
        return [torch.zeros_like(x) for x in xs]
    found = torch.autograd.grad(y, xs, create_graph=True, allow_unused=True)
    return [
        torch.zeros_like(x) if g is None else g for x, g in zip(xs, found, strict=True)
    ]
