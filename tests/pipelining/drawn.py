"""Losses drawn at random: units, and all kinds of operations between them.

A loss is a list of steps over a growing list of tensors, all ``[2, 3]`` and
integer-valued. Whoever needs to know what feeds what finds out by running it.
"""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

import fsfunc as ff

COUNT = 3  # parameter sets


@ff.unit
def chain(p, x):
    return x * p["w"] + 1


@ff.unit
def join(p, x, *, other):
    return x * p["w"] + 3 * other


@ff.unit
def parts(p, x):
    return {"a": x + p["w"], "b": (5 * x, "text", 7)}


@ff.unit
def passing(p, x, y):
    return x * p["w"], y


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (x / 2).round() + x

    @staticmethod
    def backward(ctx, g):
        return g


EXACT = {  # steps whose result depends on every element of what they use
    "chain", "join", "parts", "passing", "add", "scale", "no_grad", "through", "view",
    "masked", "cast", "read",
}  # fmt: skip
PARTIAL = {"add_", "assign", "half", "buffer", "out"}


@dataclass(frozen=True)
class Drawn:
    """A loss: (kind, first tensor, second tensor, parameters) of each step."""

    steps: tuple[tuple[str, int, int, int], ...]

    @property
    def exact(self):
        return {kind for kind, *_ in self.steps} <= EXACT

    def loss(self, params, batch):
        """What the last tensor adds up to."""
        values, fixed = [batch["x"] * 1], set()
        roots = [0]  # tensors of one root share memory; those in fixed, with a unit

        def made(x, root=None):
            values.append(x)
            roots.append(len(roots) if root is None else root)

        def writable(i):
            return values[i].clone() if roots[i] in fixed else values[i]

        for kind, i, j, k in self.steps:
            i, j, p = i % len(values), j % len(values), params[k]
            x, y = values[i], values[j]
            if kind == "chain":
                made(chain(p, x))
            elif kind == "join":
                made(join({"w": p["w"]}, x, other=y))
            elif kind == "parts":
                out = parts({"w": p["w"]}, x)
                made(out["a"])
                made(out["b"][0])
            elif kind == "passing":
                first, second = passing(p, x, y)
                made(first)
                made(second)
                fixed |= {roots[j], roots[-1]}
            elif kind == "add":
                made(x + y)
            elif kind == "scale":
                made(2 * x)
            elif kind == "no_grad":
                with torch.no_grad():
                    made(3 * x)
            elif kind == "through":
                made(StraightThrough.apply(x))
            elif kind == "view":
                made(x.t().t().view(-1).view(2, 3), roots[i])
            elif kind == "masked":
                made(torch.where(batch["mask"] > 0, x, 0))
            elif kind == "cast":
                made(x.float().double())
            elif kind == "read":
                made(x + p["r"])
            elif kind == "add_":
                target = writable(i)
                with torch.no_grad():
                    target.add_(y)
                made(target, None if target is not x else roots[i])
            elif kind == "assign":
                target = writable(i)
                target[0] = y[1]
                made(target, None if target is not x else roots[i])
            elif kind == "half":
                made(torch.cat([x[:1], y[1:]]))
            elif kind == "buffer":
                buffer = torch.zeros(2, 3, dtype=torch.float64)
                buffer[:, 0] = x[:, 1]
                made(buffer)
            elif kind == "out":
                with torch.no_grad():
                    made(torch.add(x, 1, out=torch.empty_like(y)))
            else:
                raise ValueError(kind)
        return values[-1].sum()


def params_of(seed=0):
    draw = torch.Generator().manual_seed(seed)

    def one():
        return torch.randint(1, 4, (3,), generator=draw).double()

    return [{"w": one(), "r": one()} for _ in range(COUNT)]


def batch_of(seed=0):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randint(-4, 5, (2, 3), generator=draw).double()
    return {"x": x, "mask": torch.tensor([[1, 0, 1], [0, 1, 1]])}


_NUMBER = st.integers(0, 9)


def losses(kinds=EXACT | PARTIAL, max_size=10):
    """Strategy: a loss of at least one unit call."""
    step = st.tuples(
        st.sampled_from(sorted(kinds)), _NUMBER, _NUMBER, st.integers(0, COUNT - 1)
    )
    many = st.lists(step, min_size=1, max_size=max_size)
    return many.map(lambda steps: Drawn((("chain", 0, 0, 0), *steps)))
