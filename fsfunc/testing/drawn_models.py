"""Models, train steps and stacks of transforms, as ``strategies.py`` draws them.

They compute on integers, so that a sharded step must give the very bits of one device.
Each flag of a model is a case that once needed code of its own: nested units, a shared
leaf, one read outside units, dtypes that cannot be differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from fsfunc.tree.types import PyTree

Batch = Mapping[str, Tensor]

WIDTH = 3
# Leaves that a layer may have besides w: shape and dtype.
EXTRAS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "b": ((WIDTH,), torch.float32),  # fewer elements than many axes have ranks
    "e": ((0, 2), torch.float32),  # empty
    "i": ((2,), torch.int64),  # never differentiated
    "s": ((), torch.float32),  # scalar
    "u": ((5,), torch.float32),  # the layer does not read it
    "wide": ((WIDTH,), torch.float64),  # of another dtype
}


def layer(p: PyTree, x: Tensor, *, scale: int = 1) -> Tensor:
    """Computes a layer with whichever leaves its tree has, on integers."""
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
def embed(p: PyTree, tokens: Tensor) -> Tensor:
    """Looks up tokens: a unit whose backward reads none of its parameters."""
    return p["table"][tokens]


@unit
def outer(p: PyTree, x: Tensor) -> Tensor:
    """Calls units inside a unit, which has one leaf of its own."""
    for inner in p["inner"]:
        x = unit_layer(inner, x)
    return x + p["shift"]


@unit
def add_base(p: PyTree, x: Tensor) -> Tensor:
    """Adds a frozen layer to a trained one."""
    return layer(p["p"], x) + x @ p["base"]


@unit
def whole_loss(
    params: PyTree, frozen: PyTree, batch: Batch, model: DrawnModel
) -> Tensor:
    """Computes the loss of a drawn model as one unit around all others."""
    return model.mean(params, frozen, batch)


@dataclass(frozen=True)
class DrawnModel:
    """A model: the leaves of its layers, and how its loss uses them.

    Args:
        layers: the leaves of each layer beside ``w``: names of ``EXTRAS``.
        nested: whether there is a unit with units inside.
        tied: whether layers share a leaf.
        twice: whether the first layer is called again at the end.
        outside: whether the loss reads a leaf outside units.
        frozen: whether there are parameters that are not differentiated.
        whole: whether the loss itself is a unit.
    """

    layers: tuple[tuple[str, ...], ...] = ((),)
    nested: bool = False
    tied: bool = False
    twice: bool = False
    outside: bool = False
    frozen: bool = False
    whole: bool = False

    def params(self, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        """Draws the parameters from a seed."""
        generator = torch.Generator().manual_seed(seed)

        def make(shape: tuple[int, ...], leaf_dtype: torch.dtype) -> Tensor:
            x = torch.randint(-2, 3, shape, generator=generator, device="cpu")
            return x.to(dtype if leaf_dtype == torch.float32 else leaf_dtype)

        def make_layer(names: tuple[str, ...]) -> dict[str, Any]:
            leaves = {"w": make((WIDTH, WIDTH), torch.float32), "none": None}
            return leaves | {n: make(*EXTRAS[n]) for n in names}

        p: dict[str, Any] = {
            "embed": {"table": make((4, WIDTH), torch.float32)},
            "layers": [make_layer(names) for names in self.layers],
        }
        if self.nested:
            shift = make((WIDTH,), torch.float32)
            p["outer"] = {"inner": [make_layer(("b",))], "shift": shift}
        if self.tied:
            p["tied"] = make((WIDTH,), torch.float32)
        if self.outside:
            p["gain"] = make((WIDTH,), torch.float32)
        return p

    def frozen_params(
        self, seed: int, dtype: torch.dtype = torch.float32
    ) -> dict[str, Tensor]:
        """Draws the parameters that are not differentiated."""
        generator = torch.Generator().manual_seed(seed + 1)
        w = torch.randint(-1, 2, (WIDTH, WIDTH), generator=generator, device="cpu").to(
            dtype
        )
        return {"base": w} if self.frozen else {}

    def loss(self, params: PyTree, frozen: PyTree, batch: Batch) -> Tensor:
        """Returns the mean over the batch of an integer-valued function."""
        if self.whole:
            return whole_loss(params, frozen, batch, self)
        return self.mean(params, frozen, batch)

    def mean(self, params: PyTree, frozen: PyTree, batch: Batch) -> Tensor:
        """Returns the loss, computed without a unit around it."""
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
    """Draws a batch of ``count`` rows for a drawn model."""
    generator = torch.Generator().manual_seed(seed + 2)
    return {
        "tokens": torch.randint(0, 4, (count,), generator=generator, device="cpu"),
        "targets": torch.randint(
            -2, 3, (count, WIDTH), generator=generator, device="cpu"
        ).to(dtype),
    }


@dataclass(frozen=True)
class DrawnStep:
    """A train step of a drawn model, with its state and its data.

    ``step(state, batch) -> (state, loss)`` is one step of descent. If nothing is
    frozen, ``gradient(params, batch) -> (loss, grads)`` is its gradient call alone.

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
        return partial(_descend, self.model)

    def batch(self, count: int) -> dict[str, Tensor]:
        return rows(count, self.seed)


_DESCENT = sgd(0.5)


def _descend(
    model: DrawnModel, state: TrainState, batch: Batch
) -> tuple[TrainState, Tensor]:
    loss, grads = value_and_grad(model.loss)(state.params, state.extra, batch)
    return state.apply_gradients(grads, _DESCENT), loss


@dataclass(frozen=True)
class DrawnStack:
    """Transforms in an order: ``stack(step)`` is the step under them.

    Args:
        order: names among "shard", "remat", "accumulate", "pipeline" and "donate", the
            innermost first.
        axis, options: the arguments of ``shard``.
        microbatches: the argument of ``accumulate`` and ``pipeline``.
        pipe: the axis of ``pipeline``, along which the batch is whole.

    >>> import fsfunc as ff
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> DrawnStack(mesh, ("remat", "shard"), "data", {"zero": 2})
    shard(remat(step), mesh, 'data', zero=2)  # of Mesh({'data': 2}, 'simulated')
    """

    mesh: Mesh
    order: tuple[str, ...] = ("shard",)
    axis: Axis = "data"
    options: Mapping[str, Any] | None = None
    microbatches: int = 2
    pipe: str = ""

    def __call__(self, step: Callable[..., Any]) -> Callable[..., Any]:
        for name in self.order:
            args, options = self._arguments_of(name)
            step = _TRANSFORMS[name](step, *args, **options)
        return step

    def _arguments_of(self, name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of a transform beside the step."""
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
        """The smallest batch with a row for every rank and microbatch."""
        times = sum(name in ("accumulate", "pipeline") for name in self.order)
        return self.mesh.axis_size(self.axes) * self.microbatches**times

    def __repr__(self) -> str:
        text = "step"
        for name in self.order:
            args, options = self._arguments_of(name)
            arguments = ["mesh" if x is self.mesh else repr(x) for x in args]
            arguments += [f"{k}={v!r}" for k, v in options.items()]
            text = f"{name}({', '.join([text, *arguments])})"
        return f"{text}  # of {self.mesh}"


_TRANSFORMS: dict[str, Callable[..., Any]] = {
    "shard": shard,
    "remat": remat,
    "accumulate": accumulate,
    "pipeline": pipeline,
    "donate": donate,
}
