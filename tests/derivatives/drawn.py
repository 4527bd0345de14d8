"""Programs drawn by a grammar, as data: nested tuples that print as they are.

Own matrices H (rows of data), own numbers S, trees of parameters P, numbers A that are
the same on every rank. Inside a derivative's function ``("x",)`` and ``("w",)`` mean
what it is differentiated by. Some constructs have no meaning for parts, or none at all:
the judge lets them be refused, or right.
"""

from functools import cache

import torch
from hypothesis import strategies as st

from tests.derivatives import worlds

# By kind, what a node is called and the kinds of its parts; and what is odd.
GRAMMAR = {
    "H": ["x", "unit P leaf H", "tanh H", "add H H", "centre H", "attend H", "shift H",
          "slope S H by_x"],
    "S": ["msq H", "pmean S", "psum S", "squares P", "norm P", "plus S S", "times S S",
          "whole S H", "evaluated S"],
    "P": ["w", "step S P by_w", "scaled P A", "jittered P seed", "mixed P P", "laid P",
          "reduced P S"],
}  # fmt: skip
ODD = {
    "H": ["own_matrix H", "by_hand P leaf H"],
    "S": ["rough_sum P", "per_sample S"],
    "P": ["times_own P S", "rough_noise P", "turned P", "sized P", "times_item P S",
          "times_own P A"],
}  # fmt: skip
ENDS = {"H": ("x",), "S": ("msq", ("x",)), "P": ("w",)}
PARTS = {
    "leaf": st.sampled_from("ab"),
    "seed": st.integers(0, 99),
    "by_x": st.sampled_from(["grad_x", "vag_x"]),
    "by_w": st.sampled_from(["grad_w", "vag_w"]),
}


@cache
def programs(kind, depth, odd=True):
    """Nodes of a kind, with so many below one another."""
    if depth == 0:
        return st.just(ENDS[kind])
    parts = PARTS | {k: programs(k, depth - 1, odd) for k in ENDS}
    parts["A"] = st.one_of(
        nodes("norm", parts["P"]),
        nodes("pmean", parts["S"]),
        nodes("evaluated", parts["S"]),
    )
    made = [line.split() for line in GRAMMAR[kind] + (ODD[kind] if odd else [])]
    return st.one_of(
        [nodes(name.replace("_", " "), *map(parts.get, rest)) for name, *rest in made]
    )


def nodes(name, *parts):
    return st.tuples(st.just(name), *parts)


def losses(depth=3, odd=True):
    """Numbers that depend on units somewhere: else nothing is sharded."""
    return nodes("plus", programs("S", depth, odd), st.just(PLAIN))


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
    "evaluated": lambda o, go, w, x, s: o.value(lambda w, x: go(s, w=w, x=x), w, x),
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
