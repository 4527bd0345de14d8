"""``Stack``: transforms in order, as data; ``Choice``: one with its figures.

A search makes stacks (`candidates`), applies each to the train step, plans and
estimates the result (`trials`), and returns the best as choices, with their ``code``.
"""

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
    """One transform of a stack, ``ff.name(f, [mesh,] *args, **keywords)``."""

    name: str
    args: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = {}


class StackKind(NamedTuple):
    """What makes two stacks of one kind: where a step and its state lie.

    Stacks of one kind have several ranks along the same axes, in the same order, the
    same ``zero``, the same schedule, and the same kinds of values on the host. All else
    is a setting of the kind: the sizes of axes, the numbers of parts and microbatches,
    when parts are reduced, what is computed again, and in which dtype.

    >>> settings = dict(zero=3, remat="always", accumulate=4)
    >>> wide, narrow = Stack((("data", 8),), zero=3), Stack((("data", 4),), **settings)
    >>> wide.kind == narrow.kind, str(wide.kind)
    (True, 'data, zero=3')
    """

    axes: tuple[str, ...]
    zero: int | None
    schedule: str | None
    offload: tuple[str, ...] = ()

    def __str__(self) -> str:
        names = ["one device" if not self.axes else " x ".join(self.axes)]
        names += [] if self.zero is None else [f"zero={self.zero}"]
        names += [] if self.schedule is None else [self.schedule]
        names += [f"{kinds} on the host" for kinds in self.offload]
        return ", ".join(names)


@dataclass(frozen=True)
class Stack:
    """The transforms around a train step, and the mesh that they are for.

    Their order is fixed, the innermost first: ``remat`` recomputes units; ``pipeline``
    runs stages on microbatches; ``accumulate`` sums whole passes; ``precision`` casts
    all of that; ``shard`` reduces gradients around it, once a step. Only ``accumulate``
    may come after ``shard`` instead (``reduces_each``): then gradients are reduced with
    each part, and a rank holds only its shards of them.

    Args:
        axes: the axes of the mesh: "data" and "node" cut the batch, "pipe" the model.
        zero: that of ``shard`` over "data", with ``replicate="node"``; None: no
            ``shard``.
        remat: a policy of ``remat``, "always" for every unit; None: no ``remat``.
        accumulate: how many parts of the batch a rank takes one after another.
        reduces_each: whether gradients are reduced with each part, not once a step.
        schedule: the name of one in ``ff.schedules``; None: no ``pipeline``.
        microbatches: the number of the pipeline's microbatches.
        compute, reduce: the dtypes of ``precision``; None, None: no ``precision``.
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
    reduces_each: bool = False
    schedule: str | None = None
    microbatches: int = 1
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    offload: tuple[str, ...] = ()
    donate: bool = True
    dims: Mapping[str, int] = field(default_factory=dict, hash=False)
    layouts: LayoutRules = field(default_factory=dict, hash=False)

    @property
    def kind(self) -> StackKind:
        """What it has in common with the other stacks of its kind."""
        axes = tuple(name for name, size in self.axes if size > 1)
        return StackKind(axes, self.zero, self.schedule, self.offload)

    @property
    def ranks(self) -> int:
        """The number of ranks of the mesh."""
        return Mesh(dict(self.axes), "abstract").size

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes whose ranks have other parts of the batch; a loss is their mean."""
        return tuple(a for a, _ in self.axes if a in (DATA, NODE) or a in self.dims)

    @property
    def row_axes(self) -> tuple[str, ...]:
        """The axes along which the batch's rows are cut, for ``local_batch``."""
        return tuple(a for a in self.batch_axes if not self.dims.get(a))

    @property
    def parts(self) -> int:
        """The number of parts that the batch's rows are cut into."""
        return self.parts_by_dim[0]

    @property
    def parts_by_dim(self) -> dict[int, int]:
        """By dim of the batch, into how many parts it is cut."""
        parts = {0: 1}
        for axis in self.batch_axes:
            dim = self.dims.get(axis, 0)
            parts[dim] = parts.get(dim, 1) * dict(self.axes)[axis]
        return parts

    @property
    def split_over(self) -> tuple[tuple[str, int], ...]:
        """The axes of layouts and of ``dims`` with several ranks, with their sizes."""
        usual_axes = (DATA, PIPE, NODE)
        return tuple((a, n) for a, n in self.axes if a not in usual_axes and n > 1)

    def parts_of(self, axes: Iterable[str]) -> int:
        """Returns the number of ranks along these axes; a missing axis has one."""
        return math.prod(dict(self.axes).get(a, 1) for a in set(axes))

    def layers(self) -> list[Layer]:
        """Returns the transforms, the innermost first."""
        layers: list[Layer] = []
        if self.remat is not None:
            always = self.remat == "always"  # what remat does by default
            layers.append(Layer("remat", () if always else (self.remat,)))
        if self.schedule is not None:
            keywords = {
                "n_microbatches": self.microbatches,
                "schedule": getattr(schedules, self.schedule),
            }
            layers.append(Layer("pipeline", (PIPE,), keywords))
        accumulating = [Layer("accumulate", (self.accumulate,))] * (self.accumulate > 1)
        # Inside `shard` parts are summed before one reduction, outside after each.
        layers += [] if self.reduces_each else accumulating
        if self.compute is not None:
            reduce = {} if self.reduce is None else {"reduce": self.reduce}
            layers.append(Layer("precision", (), {"compute": self.compute, **reduce}))
        if self.zero is not None:
            replication = {"replicate": NODE} if NODE in self.batch_axes else {}
            shard_axes = tuple(a for a in self.batch_axes if a != NODE)
            layers.append(
                Layer("shard", (shard_axes,), {"zero": self.zero, **replication})
            )
        layers += accumulating if self.reduces_each else []
        if self.offload:
            layers.append(Layer("offload", (), dict.fromkeys(self.offload, "host")))
        if self.donate:
            layers.append(Layer("donate"))
        return layers

    def apply(self, train_step: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
        """Returns ``train_step``, transformed.

        Args:
            mesh: with the axes of this stack, of any backend.

        Raises:
            ValueError: a mesh of other axes.
        """
        # A mesh with the same axes in other sizes would be taken in silence.
        if dict(mesh.axes) != dict(self.axes):
            raise ValueError(
                f"this stack is for the axes {dict(self.axes)}, not {mesh}"
            )
        step = train_step
        for layer in self.layers():
            mesh_args = (mesh,) if layer.name in ON_A_MESH else ()
            step = TRANSFORMS[layer.name](
                step, *mesh_args, *layer.args, **layer.keywords
            )
        return step

    @property
    def code(self) -> str:
        """The stack as Python, which makes ``mesh`` and ``step`` of ``train_step``.

        It names ``ff`` (and ``torch``, for dtypes). Lines are at most 88 columns wide,
        unless a name is longer.
        """
        axes = ", ".join(f'"{name}": {size}' for name, size in self.axes)
        lines, step = [f"mesh = ff.make_mesh({{{axes}}})"], "train_step"
        for layer in self.layers():
            mesh_args = ["mesh"] if layer.name in ON_A_MESH else []
            arguments = [step, *mesh_args, *_written(layer)]
            lines += _call(f"step = ff.{layer.name}(", arguments)
            step = "step"
        if step == "train_step":
            lines.append("step = train_step")
        if self.layouts:
            state = "ff.init_state(step, init, optimizer, batch, layouts=layouts)"
            lines.append(f"# its state: {state}")
        local_batch = f"ff.local_batch(batch, mesh, {_value(self.row_axes)})"
        batch = local_batch if self.row_axes else "batch"
        other_dims = {a: d for a, d in self.dims.items() if d and a in self.batch_axes}
        batch += "".join(f', its dim {d} cut over "{a}"' for a, d in other_dims.items())
        if self.batch_axes:
            lines.append(f"# a rank's batch: {batch}")
        return "\n".join(lines)

    def __str__(self) -> str:
        """Returns one line: the mesh, and the transforms around one another."""
        text = ""
        for layer in self.layers():
            # The usual axes say nothing in one line: every stack has them.
            arguments = [
                a for a in _written(layer) if a not in (f'"{DATA}"', f'"{PIPE}"')
            ]
            arguments = [a.replace("ff.schedules.", "") for a in arguments]
            inner = [text] if text else []
            listed = ", ".join([*inner, *arguments])
            text = f"{layer.name}({listed})" if listed else layer.name
        axes = ", ".join(f"{name}={size}" for name, size in self.axes)
        return f"{axes}: {text or 'no transform'}"


def _written(layer: Layer) -> list[str]:
    """Returns the arguments of a transform as Python."""
    keywords = [f"{name}={_value(value)}" for name, value in layer.keywords.items()]
    return [*map(_value, layer.args), *keywords]


def _value(value: object) -> str:
    """Returns one argument of a transform as Python."""
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


def _call(head: str, arguments: list[str]) -> list[str]:
    """Returns the lines of a call: one or, if that is too long, three."""
    line = f"{head}{', '.join(arguments)})"
    if len(line) <= 88:
        return [line]
    return [head, f"    {', '.join(arguments)}", ")"]


# What a search finds of stacks


@dataclass(frozen=True)
class Choice:
    """A stack of transforms, and what it is estimated to take.

    Args:
        stack: the transforms, as data.
        seconds: the estimated time of a step; ``compute``, ``exposed`` and ``bubble``
            add up to it, as in an ``Estimate``.
        peak_bytes: the most that a rank holds, as the plan counts it.
        fits: whether ``needed_bytes``, what an allocator reserves for that, is within
            the memory of the search.
        width: how far ``seconds`` may be off, as a natural logarithm.
        measured: the seconds of a step that ran; None if none did.
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
        """The sizes of the mesh's axes, by name."""
        return dict(self.stack.axes)

    @property
    def code(self) -> str:
        """Python that makes ``mesh`` and ``step`` of ``train_step``."""
        return self.stack.code

    def build(self, train_step: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
        """Returns ``train_step``, transformed as ``code`` says, on a mesh of one's own.

        Raises:
            ValueError: a mesh of other axes.
        """
        return self.stack.apply(train_step, mesh)

    def __str__(self) -> str:
        return f"{of_seconds(self.seconds)}, {of_bytes(self.peak_bytes)}: {self.stack}"


class Skipped(NamedTuple):
    """A stack that was not planned, or could not be.

    Args:
        reason: why not, in words.
        least_bytes: the bytes that it needs at least, if that is the reason.
        seconds: the time of a step by an outline, which was scaled to the plans of
            others; 0 if none was asked.
        outlined_bytes: what a rank holds by the outline.
    """

    stack: Stack
    reason: str
    least_bytes: int = 0
    seconds: float = 0.0
    outlined_bytes: int = 0
