"""Models and stacks of transforms, as hypothesis draws them.

They compute on integers, so that a sharded step must give the very bits of one device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fsfunc.comm.mesh import Axis, Mesh
from fsfunc.core.autodiff import value_and_grad
from fsfunc.core.units import unit
from fsfunc.optim.descent import sgd
from fsfunc.pipelining.pipelines import pipeline
from fsfunc.state.train_state import TrainState
from fsfunc.transforms.accumulation import accumulate
from fsfunc.transforms.donation import donate
from fsfunc.transforms.rematerialization import remat
from fsfunc.transforms.sharding import shard

WIDTH = 3
EXTRAS = {  # leaves that a layer may have besides w: shape and dtype
    "b": ((WIDTH,), torch.float32),  # smaller than many an axis
    "e": ((0, 2), torch.float32),  # empty
    "i": ((2,), torch.int64),  # never differentiated
    "s": ((), torch.float32),  # scalar
    "u": ((5,), torch.float32),  # the layer reads none of it
    "wide": ((WIDTH,), torch.float64),  # of another dtype
}


def layer(p: Any, x: Tensor, *, scale: int = 1) -> Tensor:
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


unit_layer = unit(layer)


@unit
def embed(p: Any, tokens: Tensor) -> Tensor:
    """A layer whose backward reads none of its parameters."""
    return p["table"][tokens]


@unit
def outer(p: Any, x: Tensor) -> Tensor:
    """A unit around units: one leaf is its own, the others are the inner ones'."""
    for inner in p["inner"]:
        x = unit_layer(inner, x)
    return x + p["shift"]


@unit
def add_base(p: Any, x: Tensor) -> Tensor:
    """A layer beside a frozen one."""
    return layer(p["p"], x) + x @ p["base"]


@unit
def whole_loss(params: Any, frozen: Any, batch: Any, model: DrawnModel) -> Tensor:
    """The loss of a drawn model, as one unit that has all of it."""
    return model.mean(params, frozen, batch)


@dataclass(frozen=True)
class DrawnModel:
    """A model: what its layers hold, and how its loss uses them.

    Args:
        layers: the leaves of each layer beside ``w``: names of ``EXTRAS``.
        nested: whether a unit is around units.
        tied: whether layers share a leaf; ``twice``: whether one is called again.
        outside: whether the loss reads a leaf outside units.
        frozen: whether there are parameters that are not differentiated.
        whole: whether the loss is a unit too.
    """

    layers: tuple[tuple[str, ...], ...] = ((),)
    nested: bool = False
    tied: bool = False
    twice: bool = False
    outside: bool = False
    frozen: bool = False
    whole: bool = False

    def params(self, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        """The parameters of a seed."""
        draw = torch.Generator().manual_seed(seed)

        def make(shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
            x = torch.randint(-2, 3, shape, generator=draw, device="cpu")
            return x.to(dtype if kind == torch.float32 else kind)

        def one(names: tuple[str, ...]) -> dict[str, Any]:
            made = {"w": make((WIDTH, WIDTH), torch.float32), "none": None}
            return made | {n: make(*EXTRAS[n]) for n in names}

        p: dict[str, Any] = {
            "embed": {"table": make((4, WIDTH), torch.float32)},
            "layers": [one(names) for names in self.layers],
        }
        if self.nested:
            shift = make((WIDTH,), torch.float32)
            p["outer"] = {"inner": [one(("b",))], "shift": shift}
        if self.tied:
            p["tied"] = make((WIDTH,), torch.float32)
        if self.outside:
            p["gain"] = make((WIDTH,), torch.float32)
        return p

    def frozen_params(
        self, seed: int, dtype: torch.dtype = torch.float32
    ) -> dict[str, Tensor]:
        """Those that are not differentiated."""
        draw = torch.Generator().manual_seed(seed + 1)
        w = torch.randint(-1, 2, (WIDTH, WIDTH), generator=draw, device="cpu").to(dtype)
        return {"base": w} if self.frozen else {}

    def loss(self, params: Any, frozen: Any, batch: Any) -> Tensor:
        """The mean over the batch of something integer-valued."""
        if self.whole:
            return whole_loss(params, frozen, batch, self)
        return self.mean(params, frozen, batch)

    def mean(self, params: Any, frozen: Any, batch: Any) -> Tensor:
        h = embed(params["embed"], batch["tokens"])
        tie = {"tied": params["tied"]} if self.tied else {}
        for k, p in enumerate(params["layers"]):
            p = p | tie
            if self.frozen:
                h = add_base({"base": frozen["base"], "p": p}, h)
            else:
                h = unit_layer(p, h, scale=1 + k % 2)
        if self.twice:
            h = unit_layer(params["layers"][0] | tie, h)
        if self.nested:
            h = outer(params["outer"], h)
        if self.outside:
            h = h * params["gain"]
        return (h * batch["targets"]).sum(-1).mean()


def rows(
    count: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """A batch of that many rows for a drawn model."""
    draw = torch.Generator().manual_seed(seed + 2)
    return {
        "tokens": torch.randint(0, 4, (count,), generator=draw, device="cpu"),
        "targets": torch.randint(
            -2, 3, (count, WIDTH), generator=draw, device="cpu"
        ).to(dtype),
    }


@dataclass(frozen=True)
class DrawnStep:
    """A train step of a drawn model, its state and its data.

    As ``step(state, batch) -> (state, loss)``, one step of descent; or its gradient
    call alone, ``gradient(params, batch) -> (loss, grads)``, where nothing is frozen.

    >>> import torch
    >>> drawn = DrawnStep(DrawnModel())
    >>> state, loss = drawn.step(drawn.state, drawn.batch(4))
    >>> loss, grads = drawn.gradient(drawn.params, drawn.batch(4))
    >>> torch.equal(drawn.params["layers"][0]["w"] - 0.5 * grads["layers"][0]["w"],
    ...             state.params["layers"][0]["w"])
    True
    """

    model: DrawnModel
    seed: int = 0

    @property
    def params(self) -> dict[str, Any]:
        return self.model.params(self.seed)

    @property
    def state(self) -> TrainState:
        frozen = self.model.frozen_params(self.seed)
        return TrainState(self.params, _DESCENT.init(self.params), extra=frozen)

    @property
    def gradient(self) -> Callable[..., Any]:
        loss = self.model.loss
        return value_and_grad(lambda params, batch: loss(params, {}, batch))

    @property
    def step(self) -> Callable[..., Any]:
        return partial(_step, self.model)

    def batch(self, count: int) -> dict[str, Tensor]:
        return rows(count, self.seed)


_DESCENT = sgd(0.5)


def _step(model: DrawnModel, state: TrainState, batch: Any) -> tuple[Any, Tensor]:
    loss, grads = value_and_grad(model.loss)(state.params, state.extra, batch)
    return state.apply_gradients(grads, _DESCENT), loss


@dataclass(frozen=True)
class DrawnStack:
    """Transforms in an order: ``stack(step)`` is the step under them.

    Args:
        order: of "shard", "remat", "accumulate", "pipeline" and "donate", the innermost
            first.
        axis, options: what ``shard`` is given.
        microbatches: what ``accumulate`` and ``pipeline`` are given.
        pipe: the axis of ``pipeline``, along which the batch is whole.

    >>> import fsfunc as ff
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> DrawnStack(mesh, ("remat", "shard"), "data", {"zero": 2})
    shard(remat(step), mesh, 'data', zero=2)  # of Mesh({'data': 2}, 'simulated')
    """

    mesh: Mesh
    order: tuple[str, ...] = ("shard",)
    axis: Axis = "data"
    options: Any = None
    microbatches: int = 2
    pipe: str = ""

    def __call__(self, step: Callable[..., Any]) -> Callable[..., Any]:
        for name in self.order:
            args, options = self._given(name)
            step = _TRANSFORMS[name](step, *args, **options)
        return step

    def _given(self, name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a transform beside the step."""
        if name == "shard":
            return (self.mesh, self.axis), dict(self.options or {})
        if name == "pipeline":
            return (self.mesh, self.pipe), {"n_microbatches": self.microbatches}
        return (self.microbatches,) * (name == "accumulate"), {}

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes over which the batch is cut."""
        copies = (self.options or {}).get("replicate")
        names = (self.axis,) if isinstance(self.axis, str) else self.axis
        return names if copies is None else (copies, *names)

    @property
    def rows(self) -> int:
        """The smallest batch that every rank, and microbatch, has a row of."""
        times = sum(name in ("accumulate", "pipeline") for name in self.order)
        return self.mesh.axis_size(self.axes) * self.microbatches**times

    def __repr__(self) -> str:
        said = "step"
        for name in self.order:
            args, options = self._given(name)
            each = ["mesh" if x is self.mesh else repr(x) for x in args]
            each += [f"{k}={v!r}" for k, v in options.items()]
            said = f"{name}({', '.join([said, *each])})"
        return f"{said}  # of {self.mesh}"


_TRANSFORMS: dict[str, Callable[..., Any]] = {
    "shard": shard,
    "remat": remat,
    "accumulate": accumulate,
    "pipeline": pipeline,
    "donate": donate,
}
