"""The arguments of a step that runs as a graph, and what it returned without one.

A graph takes tensors and returns tensors. `Arguments` finds them in the arguments of a
call, each packed buffer once, and tells by a key which calls may share a graph;
`Returned` remembers what a call without a graph returned, from whose structure the
result of the graph is made. `step_graphs` and `step_traces` use both.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.core.tracers import signature
from fsfunc.sharded.layout import Layout
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.placements import Own, Whole, describe_tensor
from fsfunc.sharded.plain_leaves import placement_of
from fsfunc.sharded.spent import any_unusable, refuse_unusable
from fsfunc.tracing.runs import shadows
from fsfunc.tree.types import Leaf, PyTree

CONSTANT = (str, bool, int, float, complex, type(None), torch.dtype, torch.device)


class Shadows(NamedTuple):
    """Arguments as tensors without data; ``inputs``: each of these tensors once."""

    args: tuple[PyTree, ...]
    keywords: dict[str, PyTree]
    inputs: list[Tensor]


class Arguments:
    """The arguments of a call: their leaves, and the tensors that these lie in.

    Attributes:
        key: calls of one key share a graph.
        buffers: the tensors in which leaves lie, each once: packed buffers, or a plain
            tensor itself.
        layouts: those of the sharded leaves.
        number_positions: those of the first argument's numbers: they change from step
            to step, and are inputs of the graph.
        state_def: the structure of the first argument, the state; None without one.
        batch: the other arguments.
    """

    leaves: list[Leaf]
    treedef: tree.TreeDef

    def __init__(self, args: tuple[PyTree, ...], keywords: dict[str, PyTree]):
        self.leaves, self.treedef = tree.flatten((args, keywords), is_leaf=is_sharded)
        if any_unusable(self.leaves):
            refuse_unusable((args, keywords))
        state_count = self.treedef.child(0).child(0).num_leaves if args else 0
        state = self.leaves[:state_count]
        self.number_positions: list[int] = [
            i for i, x in enumerate(state) if type(x) in (int, float)
        ]
        # In the graph they are float64 tensors, exact for integers up to 2**53 only.
        for i in self.number_positions:
            if type(x := self.leaves[i]) is int and float(x) != x:
                raise ValueError(_LARGE.format(x))
        self.buffers: list[Tensor] = distinct_buffers(self.leaves)
        self.layouts: list[Layout] = [
            x.layout for x in self.leaves if isinstance(x, Sharded)
        ]
        self.batch: tuple[tuple[PyTree, ...], dict[str, PyTree]] = (args[1:], keywords)
        self.state_def: tree.TreeDef | None = (
            self.treedef.child(0).child(0) if args else None
        )
        self.key: tuple[Hashable, ...] = self._make_key()

    def eager_key(self) -> tuple[Hashable, ...]:
        """Returns a key for a call without a graph, on which later calls rest.

        It has no shapes of the batch, nor has the key of a type check (`signature`).
        """
        of_any_batch, *_ = signature(self.leaves, self.treedef)
        state = self.leaves[: self.state_def.num_leaves] if self.state_def else []
        buffers = distinct_buffers(state)
        layouts = [id(x) for x in self.layouts]
        return of_any_batch, *map(_describe_buffer, buffers), *layouts

    def describe_batch(self) -> str:
        """Returns the leaves beside the state as text, for messages."""
        others = self.leaves[self.state_def.num_leaves if self.state_def else 0 :]
        return ", ".join(
            describe_tensor(x.shape, x.dtype) if hasattr(x, "dtype") else repr(x)
            for x in others
        )

    def _make_key(self) -> tuple[Hashable, ...]:
        # Numbered, so that two leaves in one buffer, as tied ones, show in the key.
        buffer_numbers: dict[int, int] = {}
        shard_numbers: dict[int, int] = {}
        key: list[Hashable] = [self.treedef, *map(_describe_buffer, self.buffers)]
        for i, x in enumerate(self.leaves):
            if isinstance(x, Sharded):
                n = buffer_numbers.setdefault(id(buffer_of(x)), len(buffer_numbers))
                key.append((n, id(x.layout)))
                if x.packed is not None:
                    shard = shard_numbers.setdefault(id(x.packed), len(shard_numbers))
                    # A whole buffer is read at its offset. A part is gathered first:
                    # ranks have it at different offsets, and must have graphs together.
                    is_whole = x.packed.place.size == 1
                    offset = x.packed.flat.storage_offset() if is_whole else 0
                    key.append((shard, offset, *x.packed.coordinates.items()))
            elif isinstance(x, Tensor):
                # Not by its place in memory: a slice of one batch is like the next one,
                # and ranks, whose places differ, must have graphs in the same calls.
                n = buffer_numbers.setdefault(id(x), len(buffer_numbers))
                key.append((n, placement_of(x)))
            elif i in self.number_positions:
                key.append(type(x))  # its value is an input
            elif isinstance(x, CONSTANT):  # Python may branch on its value
                key.append((type(x), x))
            else:
                raise TypeError(_ODD.format(f"a {type(x).__name__}"))
        return tuple(key)

    def without_data(self, mode: Any) -> Shadows:
        """Returns the same arguments as tensors without data, in a mode of these."""
        leaves = list(shadows(mode, self.leaves))
        inputs = distinct_buffers(leaves)
        # As tensors, or the graph would have the numbers of the traced call for ever.
        for i in self.number_positions:
            with mode:
                leaves[i] = torch.empty((), dtype=torch.float64, device="cpu")
            inputs.append(leaves[i])
        # A gathered buffer is no input of the graph: it is gathered there.
        for x in leaves:
            if isinstance(x, Sharded) and x.packed is not None:
                x.packed.whole = None
        args, keywords = tree.unflatten(self.treedef, leaves)
        return Shadows(args, keywords, inputs)

    def graph_inputs(self) -> list[Tensor]:
        """Returns the inputs of a graph: each buffer once, then numbers."""
        values = [float(self.leaves[i]) for i in self.number_positions]
        like = {"dtype": torch.float64, "device": "cpu"}
        return [*self.buffers, *(torch.tensor(x, **like) for x in values)]


def buffer_of(x: Leaf) -> Leaf:
    """Returns the tensor that a leaf lies in: its packed buffer, or itself."""
    if not isinstance(x, Sharded):
        return x
    return x.local if x.packed is None else x.packed.flat


def distinct_buffers(leaves: Sequence[Leaf]) -> list[Tensor]:
    """Returns the tensors that leaves lie in, each once."""
    by_id = {id(x): x for x in map(buffer_of, leaves) if isinstance(x, Tensor)}
    return list(by_id.values())


def _describe_buffer(x: Tensor) -> tuple[Hashable, ...]:
    """Returns the properties of a tensor that a graph depends on."""
    plain = x.layout == torch.strided and type(x) in (Tensor, torch.nn.Parameter)
    # Equal properties must mean one graph: a lazy conjugate has a bit that they miss.
    if not plain or x.is_conj() or x.is_neg():
        raise TypeError(
            _ODD.format(f"a {type(x).__name__} that is sparse, or conjugated lazily")
        )
    return x.shape, x.stride(), x.dtype, x.device


@dataclass(frozen=True)
class Returned:
    """The result of a call that ran without a graph: its structure, and each leaf.

    Args:
        leaves: of each its type, the layout of a plain tensor, and `leaf_properties`.
        layouts: those of the arguments, referenced so that no other layouts get their
            ids, which stand in keys.
    """

    treedef: tree.TreeDef
    leaves: list[tuple[type, Whole | Own | None, Any]]
    layouts: list[Layout]

    @classmethod
    def of(cls, out: PyTree, arguments: Arguments) -> Returned:
        """Returns what is remembered of a result."""
        leaves, treedef = tree.flatten(out, is_leaf=is_sharded)
        noted = [(type(x), placement_of(x), leaf_properties(x)) for x in leaves]
        return cls(treedef, noted, arguments.layouts)

    def shaped_as(self, other: Returned) -> Returned:
        """Returns this, with the shapes and the constants of a result without data."""
        leaves = []
        for (kind, layout, old), (*_, new) in zip(
            self.leaves, other.leaves, strict=True
        ):
            # Not the dtype: numbers of the state are tensors in float64 there.
            tensors = isinstance(old, tuple) and isinstance(new, tuple)
            leaves.append((kind, layout, (*new[:-1], old[-1]) if tensors else new))
        return replace(self, leaves=leaves)


def leaf_properties(x: Leaf) -> Any:
    """Returns what a leaf of a result has in common in two runs of a step.

    Of tensors shapes and dtype, of others the value.
    """
    if isinstance(x, Sharded):
        return x.layout.shape, x.part_shape, buffer_of(x).dtype
    return (x.shape, x.dtype) if isinstance(x, Tensor) else x


def torch_settings() -> tuple[Hashable, ...]:
    """Returns the settings of torch's on which operators depend."""
    devices = [k for k in ("cpu", "cuda") if torch.is_autocast_enabled(k)]
    casts = [(k, torch.get_autocast_dtype(k)) for k in devices]
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        *casts,
    )


_ODD = (
    "jit(whole_step=True) of an argument with {}: its graph takes dense tensors, "
    "numbers and strings"
)
_LARGE = (
    "jit(whole_step=True) of a state with the integer {}: the numbers of a state are "
    "float64 tensors in its graph, which do not hold it. Make it a tensor"
)
