"""Programs drawn by a grammar, as data: nested tuples that print as they are.

Own matrices H (rows of data), own numbers S, trees of parameters P, numbers A that are
the same on every rank. Inside a derivative's function ``("x",)`` and ``("w",)`` mean
what it is differentiated by. Some constructs have no meaning for parts, or none at all:
the judge lets them be refused, or right.
"""

import torch
from hypothesis import strategies as st

from tests.derivatives import worlds

LEAVES = st.sampled_from("ab")
SEEDS = st.integers(0, 99)


def nodes(name, *parts):
    return st.tuples(st.just(name), *parts)


def matrices(depth, odd):
    if depth == 0:
        return st.just(("x",))
    h, s, p = (f(depth - 1, odd) for f in (matrices, numbers, trees))
    made = [
        st.just(("x",)),
        nodes("unit", p, LEAVES, h),
        nodes("tanh", h),
        nodes("add", h, h),
        nodes("centre", h),
        nodes("attend", h),
        nodes("shift", h),
        nodes("slope", s, h, st.sampled_from(["grad_x", "vag_x"])),
    ]
    if odd:
        made += [nodes("own matrix", h), nodes("by hand", p, LEAVES, h)]
    return st.one_of(made)


def numbers(depth, odd):
    if depth == 0:
        return st.just(("msq", ("x",)))
    h, s, p = (f(depth - 1, odd) for f in (matrices, numbers, trees))
    made = [
        nodes("msq", h),
        nodes("pmean", s),
        nodes("psum", s),
        nodes("squares", p),
        nodes("norm", p),
        nodes("plus", s, s),
        nodes("times", s, s),
        nodes("whole", s, h),
    ]
    if odd:
        made += [nodes("rough sum", p), nodes("per sample", s)]
    return st.one_of(made)


def trees(depth, odd):
    if depth == 0:
        return st.just(("w",))
    s, p = numbers(depth - 1, odd), trees(depth - 1, odd)
    made = [
        st.just(("w",)),
        nodes("step", s, p, st.sampled_from(["grad_w", "vag_w"])),
        nodes("scaled", p, st.one_of(nodes("norm", p), nodes("pmean", s))),
        nodes("jittered", p, SEEDS),
        nodes("mixed", p, p),
        nodes("laid", p),
        nodes("reduced", p, s),
    ]
    if odd:
        made += [nodes("times own", p, s), nodes("rough noise", p), nodes("turned", p)]
        made += [nodes("sized", p), nodes("times item", p, s)]
        made.append(
            nodes("times own", p, st.one_of(nodes("norm", p), nodes("pmean", s)))
        )
    return st.one_of(made)


def losses(depth=3, odd=True):
    """Numbers that depend on units somewhere: else nothing is sharded."""
    return nodes("plus", numbers(depth, odd), st.just(PLAIN))


PLAIN = ("msq", ("unit", ("w",), "b", ("unit", ("w",), "a", ("x",))))


def run(o, node, w, x):
    """What a node is in a world, for these parameters and these data."""
    kind, *parts = node
    go = lambda part, w=w, x=x: run(o, part, w, x)  # noqa: E731
    return _RUN[kind](o, go, w, x, *parts)


def _slope(o, go, w, x, s, h, take):
    found = getattr(o, take)(lambda h: go(s, x=h), go(h))
    return o.own(lambda g: g.clamp(-2, 2), found)


def _step(o, go, w, x, s, p, take):
    p = go(p)
    g = getattr(o, take)(lambda w: go(s, w=w), p)
    return o.map(lambda a, g: a - 0.1 * g, p, g)


def _laid(o, go, w, x, p):
    full = o.unshard(go(p))
    made = {k: o.own(lambda a: a / (1 + a.norm()), full[k]) for k in full}
    return o.lay(made, w)


def _reduced(o, go, w, x, p, s):
    """Whole matrices, on each rank its own, and back as their mean."""
    full, s = o.unshard(go(p)), go(s)
    made = {k: o.own(lambda a, s: a * s.tanh(), full[k], s) for k in full}
    return o.reduce(made, w)


def _whole(o, go, w, x, s, h):
    return o.whole(lambda o, w, h: run(o, s, w, h), w, go(h))


def _per_sample(o, go, w, x, s):
    """Refused outside whole units, but where nothing of the derivative is placed."""
    g = o.per_sample(lambda w, x: go(s, w=w, x=x), w, x)
    return o.own(lambda *leaves: sum(a.sum() for a in leaves), *worlds.values(g))


def _own_matrix(o, go, w, x, h):
    h = go(h)
    matrix = o.own(lambda h: (h.T @ h).tanh(), h)
    return o.own_matrix(matrix, h)


def _attend(o, go, w, x, h):
    h = go(h)
    every = o.gather(h)
    return o.own(lambda h, e: (h @ e.T).softmax(1) @ e, h, every)


def _centre(o, go, w, x, h):
    h = go(h)
    return o.own(torch.sub, h, o.pmean(o.own(lambda h: h.mean(0), h)))


_RUN = {
    "x": lambda o, go, w, x: x,
    "w": lambda o, go, w, x: w,
    "unit": lambda o, go, w, x, p, k, h: o.unit(o.leaf(go(p), k), go(h)),
    "tanh": lambda o, go, w, x, h: o.own(torch.tanh, go(h)),
    "add": lambda o, go, w, x, g, h: o.own(torch.add, go(g), go(h)),
    "centre": _centre,
    "attend": _attend,
    "shift": lambda o, go, w, x, h: o.shift(go(h)),
    "slope": _slope,
    "own matrix": _own_matrix,
    "by hand": lambda o, go, w, x, p, k, h: o.by_hand(o.leaf(go(p), k), go(h)),
    "msq": lambda o, go, w, x, h: o.own(lambda h: h.square().mean(), go(h)),
    "pmean": lambda o, go, w, x, s: o.pmean(go(s)),
    "psum": lambda o, go, w, x, s: o.psum(go(s)),
    "squares": lambda o, go, w, x, p: o.tree_sum(o.map(lambda a: a * a, go(p))),
    "norm": lambda o, go, w, x, p: o.norm(go(p)),
    "plus": lambda o, go, w, x, s, t: o.own(torch.add, go(s), go(t)),
    "times": lambda o, go, w, x, s, t: o.own(lambda s, t: s * t.tanh(), go(s), go(t)),
    "whole": _whole,
    "rough sum": lambda o, go, w, x, p: o.rough_sum(go(p)),
    "per sample": _per_sample,
    "step": _step,
    "scaled": lambda o, go, w, x, p, s: o.scale(go(p), o.own(torch.tanh, go(s))),
    "jittered": lambda o, go, w, x, p, seed: o.map(
        lambda a, e: a + 0.1 * e, go(p), o.noise(w, seed)
    ),
    "mixed": lambda o, go, w, x, p, q: o.map(lambda a, b: (a * b).tanh(), go(p), go(q)),
    "laid": _laid,
    "reduced": _reduced,
    "times own": lambda o, go, w, x, p, s: o.times_own(go(p), go(s)),
    "turned": lambda o, go, w, x, p: o.turned(go(p)),
    "sized": lambda o, go, w, x, p: o.sized(go(p)),
    "times item": lambda o, go, w, x, p, s: o.times_item(go(p), go(s)),
    "rough noise": lambda o, go, w, x, p: o.rough_noise(go(p)),
}
