"""Loops over rows, drawn by a grammar: how rows are reached, what is made of each
gradient, how the results are joined, and what becomes of that.

``run(drawn, w, blocks)`` takes blocks of rows: a rank's own; of all ranks the rows that
meet in one mean; or all rows of a batch, one after the other. The first two agree by
the law, the last two where the program means on ranks what it means on one device.
"""

from typing import NamedTuple

import torch
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from tests.derivatives.worlds import by_units, unit

each = tree.map


class Loop(NamedTuple):
    """One program: by name, what `ROWS` and the other tables have."""

    rows: str
    loss: str
    change: str
    join: str
    after: str


ROWS = {
    "split": lambda x: x.split(1),
    "pairs": lambda x: x.split(2),
    "slices": lambda x: [x[i : i + 1] for i in range(len(x))],
    "rows": lambda x: [x[i][None] for i in range(len(x))],
    "unbound": lambda x: [row[None] for row in x.unbind()],
    "picked": lambda x: [x[[i]] for i in range(len(x))],
    "selected": lambda x: [x.index_select(0, torch.tensor([i])) for i in range(len(x))],
    "of a value": lambda x: [(x * 2)[i : i + 1] / 2 for i in range(len(x))],
    "from behind": lambda x: x.flip(0).split(1),
    "turned": lambda x: [x.T[:, i : i + 1].T for i in range(len(x))],
}


def stepped(w, x):
    """The loss after a step of the rows' own."""
    g = ff.value_and_grad(by_units)(w, x)[1]
    return by_units(each(lambda a, g: a - 0.3 * g, w, g), x)


def penalised(w, x):
    return by_units(w, x) + 0.1 * ff.tree_sum(each(torch.square, w))


def by_last(w, x):
    """Of the last matrix alone: the first only makes features."""
    h = unit(w["a"], x).detach()
    return unit(w["b"], h).square().mean()


LOSSES = {
    "plain": by_units,
    "penalised": penalised,
    "last": by_last,
    "stepped": stepped,
}


def told(loss):
    """The loss, and a tree of what is beside it."""

    def run(w, x):
        value = loss(w, x)
        beside = {"size": x.square().mean(), "rows": x, "n": [len(x), None]}
        return value, {**beside, "sum": ff.Summed(x.sum())}

    return run


def normed(g):
    norm = ff.global_norm(g)
    return each(lambda g: g / (0.1 + norm), g)


# Of a gradient, the loss and what is beside it.
CHANGES = {
    "as it is": lambda g, v, aux: g,
    "scaled": lambda g, v, aux: each(lambda g: 0.5 * g, g),
    "turned round": lambda g, v, aux: each(lambda g: 1 - g / 3, g),
    "tanh": lambda g, v, aux: each(lambda g: (3 * g).tanh(), g),
    "square": lambda g, v, aux: each(torch.square, g),
    "normed": lambda g, v, aux: normed(g),
    "by its loss": lambda g, v, aux: each(lambda g: g * v.exp(), g),
    "by what is beside": lambda g, v, aux: each(lambda g: g * aux["size"], g),
    "bounded": lambda g, v, aux: each(lambda g: g.clamp(-0.01, 0.01), g),
}


def mean(trees):
    return each(lambda *gs: sum(gs) / len(gs), *trees)


def running(trees):
    found = each(torch.zeros_like, trees[0])
    for i, g in enumerate(trees, 1):
        found = each(lambda m, g, i=i: m + (g - m) / i, found, g)
    return found


def in_place(trees):
    leaves, treedef = tree.flatten(each(torch.zeros_like, trees[0]))
    for g in trees:
        torch._foreach_add_(leaves, tree.leaves(g), alpha=1 / len(trees))
    return tree.unflatten(treedef, leaves)


def norms(trees):
    """Of each one a number, joined."""
    return torch.stack([ff.tree_sum(g) for g in trees]).mean()


JOINS = {"mean": mean, "running": running, "in place": in_place, "numbers": norms}
# In these no rows meet: parameters change from row to row, or one row is left.
OTHERS = ("one by one", "the last")

AFTER = {
    "as it is": lambda g: g,
    "tanh": lambda g: each(torch.tanh, g),
    "normed": normed,
    "moments": lambda g: each(lambda g: g / ((g * g).sqrt() + 0.1), g),
}


def run(drawn, w, blocks):
    """What a program gives, for blocks of rows."""
    loss, change = LOSSES[drawn.loss], CHANGES[drawn.change]
    gradient = ff.value_and_grad(told(loss), has_aux=True)
    found = []
    for rows in blocks:
        (value, aux), g = gradient(w, rows)
        found.append(change(g, value, aux))
        if drawn.join == "one by one":
            w = each(lambda a, g: a - 0.1 * g, w, found[-1])
    if drawn.join == "one by one":
        return w
    joined = found[-1] if drawn.join == "the last" else JOINS[drawn.join](found)
    return AFTER[drawn.after](joined) if isinstance(joined, dict) else joined


def is_of_a_batch(drawn):
    """Whether one device means by it what all rows say together."""
    return drawn.join not in OTHERS


def loops():
    return st.builds(
        Loop,
        *(st.sampled_from(sorted(table)) for table in (ROWS, LOSSES, CHANGES)),
        st.sampled_from([*sorted(JOINS), *OTHERS]),
        st.sampled_from(sorted(AFTER)),
    )
