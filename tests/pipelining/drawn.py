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


def without_grad(do):
    @torch.no_grad()
    def step(x, y, p, batch):
        return [do(x, y)]

    return step


def buffer(x, y, p, batch):
    found = torch.zeros(2, 3, dtype=torch.float64)
    found[:, 0] = x[:, 1]
    return [found]


def two_parts(x, y, p, batch):
    out = parts({"w": p["w"]}, x)
    return [out["a"], out["b"][0]]


EXACT = {  # steps whose results depend on every element of what they use
    "chain": lambda x, y, p, batch: [chain(p, x)],
    "join": lambda x, y, p, batch: [join({"w": p["w"]}, x, other=y)],
    "parts": two_parts,
    "passing": lambda x, y, p, batch: [*passing(p, x, y)],
    "add": lambda x, y, p, batch: [x + y],
    "scale": lambda x, y, p, batch: [2 * x],
    "no_grad": without_grad(lambda x, y: 3 * x),
    "through": lambda x, y, p, batch: [StraightThrough.apply(x)],
    "view": lambda x, y, p, batch: [x.t().t().view(-1).view(2, 3)],
    "masked": lambda x, y, p, batch: [torch.where(batch["mask"] > 0, x, 0)],
    "cast": lambda x, y, p, batch: [x.float().double()],
    "read": lambda x, y, p, batch: [x + p["r"]],
}
PARTIAL = {
    "half": lambda x, y, p, batch: [torch.cat([x[:1], y[1:]])],
    "buffer": buffer,
    "out": without_grad(lambda x, y: torch.add(x, 1, out=torch.empty_like(y))),
}
WRITES = {  # into the first tensor
    "add_": torch.no_grad()(torch.Tensor.add_),
    "assign": lambda x, y: x.__setitem__(0, y[1]),
}


@dataclass(frozen=True)
class Drawn:
    """A loss: (kind, first tensor, second tensor, parameters) of each step."""

    steps: tuple[tuple[str, int, int, int], ...]

    def loss(self, params, batch):
        """What the last tensor adds up to."""
        values, fixed = [batch["x"] * 1], set()
        roots = [0]  # tensors of one root share memory; those in fixed, with a unit
        for kind, i, j, k in self.steps:
            i, j = i % len(values), j % len(values)
            x, y, shares = values[i], values[j], kind == "view"
            if kind in WRITES:
                shares = roots[i] not in fixed
                x = x if shares else x.clone()
                WRITES[kind](x, y)
                made = [x]
            else:
                made = (EXACT | PARTIAL)[kind](x, y, params[k], batch)
            for x in made:
                values.append(x)
                roots.append(roots[i] if shares else len(roots))
            if kind == "passing":
                fixed |= {roots[j], roots[-1]}
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


def losses(kinds=(*EXACT, *PARTIAL, *WRITES)):
    """Strategy: a loss of at least one unit call."""
    step = st.tuples(
        st.sampled_from(sorted(kinds)), _NUMBER, _NUMBER, st.integers(0, COUNT - 1)
    )
    many = st.lists(step, min_size=1, max_size=10)
    return many.map(lambda steps: Drawn((("chain", 0, 0, 0), *steps)))
