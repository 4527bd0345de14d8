"""``Stack``: transforms in order, as data; ``Choice``: one with its figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fsfunc.comm.mesh import Mesh
from fsfunc.pipelining import schedules
from fsfunc.pipelining.pipelines import pipeline
from fsfunc.printing.tables import of_bytes, of_seconds
from fsfunc.state.layout_rules import LayoutRules
from fsfunc.transforms.accumulation import accumulate
from fsfunc.transforms.casting import precision
from fsfunc.transforms.donation import donate
from fsfunc.transforms.offloading import offload
from fsfunc.transforms.policies import Policy
from fsfunc.transforms.rematerialization import remat
from fsfunc.transforms.sharding import shard

DATA, PIPE, NODE = "data", "pipe", "node"  # names of mesh axes

TRANSFORMS: Mapping[str, Callable[..., Any]] = {
    "remat": remat,
    "pipeline": pipeline,
    "accumulate": accumulate,
    "precision": precision,
    "shard": shard,
    "offload": offload,
    "donate": donate,
}
ON_A_MESH = ("pipeline", "shard")


class Layer(NamedTuple):
    """One transform, ``ff.name(f, [mesh,] *args, **keywords)``."""

    name: str
    args: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Stack:
    """The transforms around a train step, and the mesh that they are for.

    Their order is fixed, the innermost first: units are recomputed; stages run
    microbatches; whole passes are accumulated; all of it in ``compute``; gradients are
    reduced around all that, once a step. Only accumulation may come last instead: then
    gradients are reduced with ``each`` part, and a rank holds its shards of them alone.

    Args:
        axes: of the mesh: "data" and "node" cut the batch, "pipe" the model.
        zero: of ``shard`` over "data", which repeats along "node"; None: no ``shard``.
        remat: a policy of ``remat``, "always" for every unit; None: no ``remat``.
        accumulate: how many parts of the batch a rank takes one after another.
        each: whether gradients are reduced with each of those, and not once a step.
        schedule: the name of one in ``ff.schedules``; None: no ``pipeline``.
        microbatches: of the pipeline.
        compute, reduce: dtypes of ``precision``; None, None: no ``precision``.
        offload: what is in host memory: "params", "moments", "activations".
        donate: whether the step may write into its state.
        dims: further axes along which ranks have other parts of the batch, each with
            the dim that it cuts: {"context": 1}.
        layouts: how leaves are split, as ``init_state`` takes it.

    >>> stack = Stack((("data", 8),), zero=3, remat="always")
    >>> print(stack)
    data=8: donate(shard(remat, zero=3))
    >>> print(stack.code)
    mesh = ff.make_mesh({"data": 8})
    step = ff.remat(train_step)
    step = ff.shard(step, mesh, "data", zero=3)
    step = ff.donate(step)
    # a rank's batch: ff.local_batch(batch, mesh, "data")
    """

    axes: tuple[tuple[str, int], ...]
    zero: int | None = None
    remat: Policy | str | None = None
    accumulate: int = 1
    each: bool = False
    schedule: str | None = None
    microbatches: int = 1
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    offload: tuple[str, ...] = ()
    donate: bool = True
    dims: Mapping[str, int] = field(default_factory=dict, hash=False)
    layouts: LayoutRules = field(default_factory=dict, hash=False)

    @property
    def ranks(self) -> int:
        """The number of ranks of the mesh."""
        return Mesh(dict(self.axes), "abstract").size

    @property
    def means(self) -> tuple[str, ...]:
        """The axes whose ranks have other parts of the batch."""
        return tuple(a for a, _ in self.axes if a in (DATA, NODE) or a in self.dims)

    @property
    def cuts(self) -> tuple[str, ...]:
        """Those along which its rows are cut, as ``local_batch`` wants them."""
        return tuple(a for a in self.means if not self.dims.get(a))

    @property
    def parts(self) -> int:
        """The number of parts that the batch's rows are cut into."""
        return self.parts_by_dim[0]

    @property
    def parts_by_dim(self) -> dict[int, int]:
        """By dim, into how many parts it is cut."""
        found = {0: 1}
        for axis in self.means:
            dim = self.dims.get(axis, 0)
            found[dim] = found.get(dim, 1) * dict(self.axes)[axis]
        return found

    @property
    def split_over(self) -> tuple[tuple[str, int], ...]:
        """Axes with several ranks beside the usual: of layouts, or of other dims."""
        usual = (DATA, PIPE, NODE)
        return tuple((a, n) for a, n in self.axes if a not in usual and n > 1)

    def parts_of(self, axes: Iterable[str]) -> int:
        """The number of ranks along these axes; along one that is not there, one."""
        return math.prod(dict(self.axes).get(a, 1) for a in set(axes))

    def layers(self) -> list[Layer]:
        """The transforms, the innermost first."""
        found: list[Layer] = []
        if self.remat is not None:
            always = self.remat == "always"  # what remat does by default
            found.append(Layer("remat", () if always else (self.remat,)))
        if self.schedule is not None:
            keywords = {
                "n_microbatches": self.microbatches,
                "schedule": getattr(schedules, self.schedule),
            }
            found.append(Layer("pipeline", (PIPE,), keywords))
        parts = [Layer("accumulate", (self.accumulate,))] * (self.accumulate > 1)
        found += [] if self.each else parts
        if self.compute is not None:
            reduce = {} if self.reduce is None else {"reduce": self.reduce}
            found.append(Layer("precision", (), {"compute": self.compute, **reduce}))
        if self.zero is not None:
            copies = {"replicate": NODE} if NODE in self.means else {}
            over = tuple(a for a in self.means if a != NODE)
            found.append(Layer("shard", (over,), {"zero": self.zero, **copies}))
        found += parts if self.each else []
        if self.offload:
            found.append(Layer("offload", (), dict.fromkeys(self.offload, "host")))
        if self.donate:
            found.append(Layer("donate"))
        return found

    def apply(self, train_step: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
        """``train_step``, transformed.

        Args:
            mesh: with the axes of this stack, of any backend.

        Raises:
            ValueError: a mesh of other axes.
        """
        if dict(mesh.axes) != dict(self.axes):
            raise ValueError(
                f"this stack is for the axes {dict(self.axes)}, not {mesh}"
            )
        step = train_step
        for layer in self.layers():
            where = (mesh,) if layer.name in ON_A_MESH else ()
            step = TRANSFORMS[layer.name](step, *where, *layer.args, **layer.keywords)
        return step

    @property
    def code(self) -> str:
        """The same as Python, which makes ``mesh`` and ``step`` of ``train_step``.

        It names ``ff`` (and ``torch``, for dtypes), and has no line over 88 columns
        but for names that are longer.
        """
        axes = ", ".join(f'"{name}": {size}' for name, size in self.axes)
        lines, step = [f"mesh = ff.make_mesh({{{axes}}})"], "train_step"
        for layer in self.layers():
            where = ["mesh"] if layer.name in ON_A_MESH else []
            given = [step, *where, *_written(layer)]
            lines += _call(f"step = ff.{layer.name}(", given)
            step = "step"
        if step == "train_step":
            lines.append("step = train_step")
        if self.layouts:
            state = "ff.init_state(step, init, optimizer, batch, layouts=layouts)"
            lines.append(f"# its state: {state}")
        cuts = f"ff.local_batch(batch, mesh, {_value(self.cuts)})"
        batch = cuts if self.cuts else "batch"
        others = {a: d for a, d in self.dims.items() if d and a in self.means}
        batch += "".join(f', its dim {d} cut over "{a}"' for a, d in others.items())
        if self.means:
            lines.append(f"# a rank's batch: {batch}")
        return "\n".join(lines)

    def __str__(self) -> str:
        """In one line: the mesh, and the transforms around one another."""
        shown = ""
        for layer in self.layers():
            given = [a for a in _written(layer) if a not in (f'"{DATA}"', f'"{PIPE}"')]
            given = [a.replace("ff.schedules.", "") for a in given]
            inner = [shown] if shown else []
            inside = ", ".join([*inner, *given])
            shown = f"{layer.name}({inside})" if inside else layer.name
        axes = ", ".join(f"{name}={size}" for name, size in self.axes)
        return f"{axes}: {shown or 'no transform'}"


def _written(layer: Layer) -> list[str]:
    """The arguments of a transform as Python."""
    keywords = [f"{name}={_value(value)}" for name, value in layer.keywords.items()]
    return [*map(_value, layer.args), *keywords]


def _value(value: Any) -> str:
    if isinstance(value, tuple):  # axes
        written = ", ".join(map(_value, value))
        return written if len(value) == 1 else f"({written})"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, Policy):
        return (
            f"ff.{type(value).__name__}({', '.join(map(_value, sorted(value.names)))})"
        )
    if callable(value):
        return f"ff.schedules.{value.__name__}"
    return repr(value)  # a number, or a dtype: torch.bfloat16


def _call(head: str, given: list[str]) -> list[str]:
    """A call in one line or, where it is too long, in three."""
    line = f"{head}{', '.join(given)})"
    if len(line) <= 88:
        return [line]
    return [head, f"    {', '.join(given)}", ")"]


# What a search finds of stacks


@dataclass(frozen=True)
class Choice:
    """A stack of transforms, and what it is estimated to take.

    Args:
        stack: the transforms, as data.
        seconds: of a step; ``compute``, ``exposed`` and ``bubble`` add up to it, as in
            an ``Estimate``.
        peak_bytes: the most that a rank holds, as the plan counts it.
        fits: whether what an allocator reserves for that, ``needed_bytes``, is within
            the memory asked for.
        width: the natural logarithm of how far ``seconds`` may be off.
        measured: the seconds of a step that ran, where it did.
    """

    stack: Stack
    seconds: float
    peak_bytes: int
    fits: bool
    compute: float = 0.0
    exposed: float = 0.0
    bubble: float = 0.0
    width: float = 0.0
    needed_bytes: int = 0
    measured: float | None = None

    @property
    def axes(self) -> dict[str, int]:
        """Of the mesh, by name."""
        return dict(self.stack.axes)

    @property
    def code(self) -> str:
        """Python that makes ``mesh`` and ``step`` of ``train_step``."""
        return self.stack.code

    def build(self, train_step: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
        """``train_step``, transformed: what ``code`` makes, on a mesh of one's own.

        Raises:
            ValueError: a mesh of other axes.
        """
        return self.stack.apply(train_step, mesh)

    def __str__(self) -> str:
        return f"{of_seconds(self.seconds)}, {of_bytes(self.peak_bytes)}: {self.stack}"


class Skipped(NamedTuple):
    """A stack that was not planned, or could not be; ``least``: bytes it needs."""

    stack: Stack
    why: str
    least: int = 0
