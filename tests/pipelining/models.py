"""What the tests of ``pipeline`` share: losses of every kind, and how to compare.

The data are integers in float64, and means are over powers of two: all sums are exact,
so that whatever order a schedule adds in, the bits are those of one device.
"""

import functools
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

import fsfunc as ff

WIDTH = 4
KINDS = (
    "layer", "tied", "again", "skip", "parts", "lookup", "nested", "drop", "ignored",
    "same", "pair", "bare", "table", "integers",
)  # fmt: skip
GLUES = (
    "", "double", "no_grad", "straight", "add_", "setitem", "mask", "gain", "rows",
    "both", "detach",
)  # fmt: skip


@ff.unit
def layer(p, x):
    """Ends in a sum, whose result nobody saves: the loss may write into it."""
    return torch.relu(x) @ p["w"] + p["b"]


@ff.unit
def tied_layer(p, x):
    return x @ p["layer"]["w"] + p["tied"]


@ff.unit
def join(p, x, y):
    return torch.relu(x) @ p["w"] - y


@ff.unit
def parts(p, x):
    """A tree of outputs of every kind, some of which nobody reads."""
    y = x @ p["w"]
    return {"h": y, "rest": (y > 0, [y.argmax(-1), "text", 3]), "unread": y * 2}


@ff.unit
def lookup(p, x, ids, mask):
    return torch.where(mask, x, 0.0) + p["w"][ids]


@ff.unit
def nested(p, x):
    for inner in p["inner"]:
        x = layer(inner, x)
    return x + p["shift"]


@ff.unit
def drop(p, x):
    return torch.nn.functional.dropout(x, 0.5) + p["b"]


@ff.unit
def identity(p, x):
    """An output that is the input."""
    return x


@ff.unit
def pair(p, x):
    """Two outputs that are one tensor."""
    y = x + p["b"]
    return y, y


@ff.unit
def bare(p, x):
    """A unit without parameters."""
    return torch.relu(x)


@ff.unit
def table(p):
    """A parameter as an output."""
    return p["b"]


@ff.unit
def integers(p, x):
    """A layer with integer leaves, beside some that are read by nobody."""
    return x * p["i"] + p["b"]


PLAIN = {  # the kinds of units that take (p, x) and give one tensor
    "layer": layer,
    "nested": nested,
    "drop": drop,
    "same": identity,
    "bare": bare,
    "integers": integers,
}


class _Straight(torch.autograd.Function):
    """The sign, with the gradient of the identity."""

    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, g):
        return g


def glued(h, glue, params, batch, p):
    """What the loss does between two unit calls."""
    if glue == "double":
        return h * 2
    if glue == "no_grad":
        with torch.no_grad():
            factor = (h > 0).to(h.dtype) + 1
        return h * factor
    if glue == "straight":
        return _Straight.apply(h) + h
    if glue == "add_":
        return h.add_(1)
    if glue == "setitem":
        h[:, 0] = 1
    if glue == "mask":
        places = torch.arange(h.shape[1], device=h.device)
        return h.masked_fill(places > 2, 2.0)
    if glue == "gain":
        return h * params["gain"]
    if glue == "rows":
        return h - batch["x"]
    if glue == "both":
        return h + p["b"]
    if glue == "detach":
        return h + h.detach()
    return h


@dataclass(frozen=True)
class Step:
    """One unit call of a loss, and the glue after it.

    Args:
        kind: of :data:`KINDS`; ``glue``: of :data:`GLUES`.
        back: which earlier value, or layer, a skip, or a layer again, goes back to.
    """

    kind: str = "layer"
    glue: str = ""
    back: int = 0


@dataclass(frozen=True)
class Spec:
    """A drawn loss.

    Args:
        steps: its unit calls (``lookup`` makes two).
        ends: "mean", or "sum": a ``Weighted`` loss.
        aux: whether it returns something beside.
        argnums: which arguments are differentiated: 0 (params, batch), 1 (batch,
            params), or (0, 2): (params, batch, gain).
    """

    steps: tuple[Step, ...] = (Step(), Step())
    ends: str = "mean"
    aux: bool = False
    argnums: int | tuple[int, ...] = 0

    @property
    def n_calls(self):
        return len(self.steps) + sum(s.kind in ("lookup", "table") for s in self.steps)

    @property
    def draws(self):
        return any(s.kind == "drop" for s in self.steps)

    def params(self, seed, dtype=torch.float64):
        draw = torch.Generator().manual_seed(seed)

        def make(*shape):
            return torch.randint(-1, 2, shape, generator=draw).to(dtype)

        def one(step):
            p = {"w": make(WIDTH, WIDTH), "b": make(WIDTH), "none": None}
            if step.kind == "nested":
                return {"inner": [p], "shift": make(WIDTH), "b": make(WIDTH)}
            if step.kind == "integers":
                return p | {"i": torch.arange(WIDTH)}
            return p

        return {
            "layers": [one(step) for step in self.steps],
            "tied": make(WIDTH),
            "gain": make(WIDTH),
            "unused": make(3),
            "name": "a model",
        }

    def call(self, params, batch):
        """The loss of (params, batch)."""
        h, saved, ids, mask = batch["x"], [batch["x"]], batch["ids"], batch["x"] > 0
        for k, step in enumerate(self.steps):
            p, kind = params["layers"][k], step.kind
            if kind == "tied":
                h = tied_layer({"layer": p, "tied": params["tied"]}, h)
            elif kind == "again":
                earlier = params["layers"][step.back % (k + 1)]
                h = layer(p if "inner" in earlier else earlier, h)
            elif kind == "skip":
                h = join(p, h, saved[step.back % len(saved)])
            elif kind == "parts":
                out = parts(p, h)
                h, (mask, (ids, text, three)) = out["h"], out["rest"]
                h = h * (three + (text != "text"))
            elif kind == "lookup":
                h = lookup(p, layer(p, h), ids, mask)
            elif kind == "ignored":
                layer(p, h)
            elif kind == "pair":
                first, second = pair(p, h)
                h = first + second
            elif kind == "table":
                h = bare(None, h) + table(p)
            else:
                h = PLAIN[kind](p, h)
            saved.append(h)
            h = glued(h, step.glue, params, batch, p)
        return self.ended(h, saved, batch)

    def ended(self, h, saved, batch):
        rows = (h * batch["y"]).sum(-1)
        loss = rows.mean()
        if self.ends == "sum":
            loss = ff.Weighted(rows.sum(), rows.shape[0])
        if not self.aux:
            return loss
        aux = {
            "mean": saved[1].mean(),  # of the first unit's
            "rows": rows,
            "count": ff.Summed((rows > 0).sum()),
            "number": torch.tensor(7),
            "text": "text",
        }
        return loss, aux

    @property
    def loss(self):
        """A function, with the arguments where ``argnums`` says."""
        if self.argnums == 1:
            return lambda batch, params: self.call(params, batch)
        if self.argnums == 0:
            return lambda params, batch: self.call(params, batch)
        return lambda params, batch, gain: self.call(params | {"gain": gain}, batch)

    def arguments(self, params, batch):
        if self.argnums == 1:
            return batch, params
        if self.argnums == 0:
            return params, batch
        return params, batch, params["gain"] + 1

    def gradient(self):
        batch = 0 if self.argnums == 1 else 1
        return ff.value_and_grad(self.loss, self.argnums, self.aux, batch_argnums=batch)


def batch_of(rows, seed, dtype=torch.float64):
    draw = torch.Generator().manual_seed(seed + 1)

    def some(low, high, *shape):
        return torch.randint(low, high, shape, generator=draw)

    return {
        "x": some(-1, 2, rows, WIDTH).to(dtype),
        "y": some(-1, 2, rows, WIDTH).to(dtype),
        "ids": some(0, WIDTH, rows),
        "scale": torch.tensor(2.0, dtype=dtype),  # of no dim: not cut
    }


STEPS = st.builds(
    Step,
    kind=st.sampled_from(KINDS),
    glue=st.sampled_from(GLUES),
    back=st.integers(0, 7),
).map(lambda s: replace(s, glue="") if s.kind in ("same", "bare", "ignored") else s)


def specs(n_calls):
    """Losses of ``n_calls`` unit calls at least."""
    return st.builds(
        Spec,
        steps=st.lists(STEPS, min_size=n_calls, max_size=n_calls + 2).map(tuple),
        ends=st.sampled_from(["mean", "sum"]),
        aux=st.booleans(),
        argnums=st.sampled_from([0, 0, 1, (0, 2)]),
    )


def parameters(n=4, keys=("layers", "tied"), seed=1, dtype=torch.float64):
    """Some of those of ``n`` layers."""
    params = Spec((Step(),) * n).params(seed, dtype)
    return {key: params[key] for key in keys}


def through(params, h, unit=layer):
    for p in params["layers"]:
        h = unit(p, h)
    return h


def chain(params, batch, unit=layer):
    """A loss of all layers, one after another."""
    return (through(params, batch["x"], unit) * batch["y"]).mean()


S = ff.schedules
NAMED = {
    "gpipe": (S.gpipe, 1),
    "1f1b": (S.one_f_one_b, 1),
    "interleaved": (S.interleaved_1f1b, 2),
    "interleaved 3": (functools.partial(S.interleaved_1f1b, chunks=3), 3),
    "looped": (S.looped_bfs, 2),
    "zb_h1": (S.zb_h1, 1),
    "zb_v": (S.zb_v, 2),
    "greedy": (S.greedy, 1),
    "greedy 2": (functools.partial(S.greedy, chunks=2), 2),
}


@st.composite
def any_edges(draw, schedule):
    """Edges from stages to later ones, over any distance."""
    stages = range(len(S.owners(schedule)))
    every = [(p, c) for p in stages for c in stages if p < c]
    return draw(st.sets(st.sampled_from(every))) if every else set()
