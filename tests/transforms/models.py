"""What the tests of ``shard`` share: drawn models, batches, and how to run them."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

import fsfunc as ff

WIDTH = 3
EXTRAS = {  # leaves that a layer may have besides w: shape and dtype
    "b": ((WIDTH,), torch.float32),  # smaller than many an axis
    "e": ((0, 2), torch.float32),  # empty
    "i": ((2,), torch.int64),  # never differentiated
    "s": ((), torch.float32),  # scalar
    "u": ((5,), torch.float32),  # the layer reads none of it
    "wide": ((WIDTH,), torch.float64),  # of another dtype
}


def layer(p, x, *, scale=1):
    """A layer of whichever leaves its tree has; integers in, integers out."""
    y = x @ p["w"] * scale
    if p.get("b") is not None:
        y = y + p["b"]
    if "wide" in p:
        y = y + p["wide"].to(y.dtype)
    if "s" in p:
        y = y * p["s"]
    if "e" in p:
        y = y + p["e"].sum()
    if "i" in p:
        y = y + p["i"].sum()
    if "tied" in p:
        y = y - p["tied"]
    return torch.relu(y)


unit_layer = ff.unit(layer)


@ff.unit
def embed(p, tokens):
    """A layer whose backward reads none of its parameters."""
    return p["table"][tokens]


@ff.unit
def outer(p, x):
    """A unit around units: one leaf is its own, the others are the inner ones'."""
    for inner in p["inner"]:
        x = unit_layer(inner, x)
    return x + p["shift"]


@dataclass(frozen=True)
class Spec:
    """A drawn model: what its layers hold, and how its loss uses them."""

    layers: tuple[tuple[str, ...], ...] = ((),)
    nested: bool = False
    tied: bool = False
    twice: bool = False
    outside: bool = False
    frozen: bool = False
    whole: bool = False  # the loss is a unit too

    def params(self, seed, dtype=torch.float32):
        draw = torch.Generator().manual_seed(seed)

        def make(shape, kind):
            x = torch.randint(-2, 3, shape, generator=draw)
            return x.to(dtype if kind == torch.float32 else kind)

        def one(names):
            made = {"w": make((WIDTH, WIDTH), torch.float32), "none": None}
            return made | {n: make(*EXTRAS[n]) for n in names}

        p = {
            "embed": {"table": make((4, WIDTH), torch.float32)},
            "layers": [one(names) for names in self.layers],
        }
        if self.nested:
            p["outer"] = {"inner": [one(("b",))], "shift": make((2, 3), torch.float32)}
            p["outer"]["shift"] = make((WIDTH,), torch.float32)
        if self.tied:
            p["tied"] = make((WIDTH,), torch.float32)
        if self.outside:
            p["gain"] = make((WIDTH,), torch.float32)
        return p

    def frozen_params(self, seed, dtype=torch.float32):
        draw = torch.Generator().manual_seed(seed + 1)
        w = torch.randint(-1, 2, (WIDTH, WIDTH), generator=draw).to(dtype)
        return {"base": w} if self.frozen else {}

    def loss(self, params, frozen, batch):
        """The mean over the batch of something integer-valued."""
        if self.whole:
            return _whole_loss(params, frozen, batch, self)
        return self.mean(params, frozen, batch)

    def mean(self, params, frozen, batch):
        h = embed(params["embed"], batch["tokens"])
        for k, p in enumerate(params["layers"]):
            if self.tied:
                p = p | {"tied": params["tied"]}
            if self.frozen:
                p = p | {"w": p["w"]}
                h = add_base({"base": frozen["base"], "p": p}, h)
            else:
                h = unit_layer(p, h, scale=1 + k % 2)
        if self.twice:
            h = unit_layer(params["layers"][0] | self._tie(params), h)
        if self.nested:
            h = outer(params["outer"], h)
        if self.outside:
            h = h * params["gain"]
        return (h * batch["targets"]).sum(-1).mean()

    def _tie(self, params):
        return {"tied": params["tied"]} if self.tied else {}


@ff.unit
def add_base(p, x):
    """A layer beside a frozen one."""
    return layer(p["p"], x) + x @ p["base"]


@ff.unit
def _whole_loss(params, frozen, batch, spec):
    return spec.mean(params, frozen, batch)


SPECS = st.builds(
    Spec,
    layers=st.lists(
        st.lists(st.sampled_from(sorted(EXTRAS)), max_size=3, unique=True).map(
            lambda names: tuple(sorted(names))
        ),
        min_size=1,
        max_size=2,
    ).map(tuple),
    nested=st.booleans(),
    tied=st.booleans(),
    twice=st.booleans(),
    outside=st.booleans(),
    frozen=st.booleans(),
    whole=st.booleans(),
).map(lambda s: Spec(**{**vars(s), "outside": s.outside and not s.whole}))


def batch_of(count, seed, dtype=torch.float32):
    draw = torch.Generator().manual_seed(seed + 2)
    return {
        "tokens": torch.randint(0, 4, (count,), generator=draw),
        "targets": torch.randint(-2, 3, (count, WIDTH), generator=draw).to(dtype),
    }
