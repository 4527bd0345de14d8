"""The arguments of a step that runs as a graph, and what it returned without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.core.tracers import signature
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.placements import describe_tensor
from fsfunc.sharded.plain_leaves import placement_of
from fsfunc.sharded.spent import any_unusable, refuse_unusable
from fsfunc.tracing.runs import shadows

CONSTANT = (str, bool, int, float, complex, type(None), torch.dtype, torch.device)


class Shadows(NamedTuple):
    """Arguments as tensors without data; ``inputs``: each of these tensors once."""

    args: Any
    keywords: Any
    inputs: list[Tensor]


class Arguments:
    """The arguments of a call: their leaves, and the tensors that these lie in.

    Attributes:
        key: by which calls share a graph; ``layouts``: those of its sharded leaves.
        numbers: the positions of the first argument's numbers: they change from step to
            step, and are inputs of the graph.
    """

    def __init__(self, args: Any, keywords: Any):
        self.leaves, self.treedef = tree.flatten((args, keywords), is_leaf=is_sharded)
        if any_unusable(self.leaves):
            refuse_unusable((args, keywords))
        state = self.treedef.child(0).child(0).num_leaves if args else 0
        self.numbers = [
            i for i, x in enumerate(self.leaves[:state]) if type(x) in (int, float)
        ]
        for i in self.numbers:
            if type(x := self.leaves[i]) is int and float(x) != x:
                raise ValueError(_LARGE.format(x))
        self.given = distinct(self.leaves)
        self.layouts = [x.layout for x in self.leaves if isinstance(x, Sharded)]
        self.rest = (args[1:], keywords)
        self.state = self.treedef.child(0).child(0) if args else None
        self.key = self._key()

    def kind(self, args: Any, keywords: Any) -> Any:
        """By which calls share a call without a graph, as they share a type check."""
        of_state, *_ = signature(self.leaves, self.treedef)
        state = distinct(self.leaves[: self.state.num_leaves]) if self.state else []
        layouts = [id(x) for x in self.layouts]
        return of_state, *map(_described, state), *layouts

    def beside(self) -> str:
        """The leaves beside the state, for messages."""
        others = self.leaves[self.state.num_leaves if self.state else 0 :]
        return ", ".join(
            describe_tensor(x.shape, x.dtype) if hasattr(x, "dtype") else repr(x)
            for x in others
        )

    def _key(self) -> tuple[Any, ...]:
        tensors: dict[int, int] = {}
        shards: dict[int, int] = {}
        found: list[Any] = [self.treedef, *map(_described, self.given)]
        for i, x in enumerate(self.leaves):
            if isinstance(x, Sharded):
                at = tensors.setdefault(id(held(x)), len(tensors))
                found.append((at, id(x.layout)))
                if x.packed is not None:
                    which = shards.setdefault(id(x.packed), len(shards))
                    # Whole, it is read at its place. A part is gathered first: ranks
                    # have it at different places, and must have graphs together.
                    whole = x.packed.place.size == 1
                    place = x.packed.flat.storage_offset() if whole else 0
                    found.append((which, place, *x.packed.coordinates.items()))
            elif isinstance(x, Tensor):
                at = tensors.setdefault(id(x), len(tensors))
                found.append((at, placement_of(x)))
            elif i in self.numbers:
                found.append(type(x))
            elif isinstance(x, CONSTANT):
                found.append((type(x), x))
            else:
                raise TypeError(_ODD.format(f"a {type(x).__name__}"))
        return tuple(found)

    def without_data(self, mode: Any) -> Shadows:
        """The same arguments as tensors without data, in a mode of these."""
        leaves = list(shadows(mode, self.leaves))
        inputs = distinct(leaves)
        for i in self.numbers:
            with mode:
                leaves[i] = torch.empty((), dtype=torch.float64, device="cpu")
            inputs.append(leaves[i])
        for x in leaves:
            if isinstance(x, Sharded) and x.packed is not None:
                x.packed.whole = None  # it is gathered in the graph
        args, keywords = tree.unflatten(self.treedef, leaves)
        return Shadows(args, keywords, inputs)

    def tensors(self) -> list[Tensor]:
        """The inputs of a graph: each buffer and other tensor once, then numbers."""
        values = [float(self.leaves[i]) for i in self.numbers]
        like = {"dtype": torch.float64, "device": "cpu"}
        return [*self.given, *(torch.tensor(x, **like) for x in values)]


def held(x: Any) -> Any:
    """The tensor that a leaf lies in: its packed buffer, or itself."""
    if not isinstance(x, Sharded):
        return x
    return x.local if x.packed is None else x.packed.flat


def distinct(leaves: Sequence[Any]) -> list[Tensor]:
    """The tensors that leaves lie in, each once."""
    found = {id(x): x for x in map(held, leaves) if isinstance(x, Tensor)}
    return list(found.values())


def _described(x: Tensor) -> tuple[Any, ...]:
    """The properties of a tensor that a graph depends on."""
    plain = x.layout == torch.strided and type(x) in (Tensor, torch.nn.Parameter)
    if not plain or x.is_conj() or x.is_neg():
        raise TypeError(
            _ODD.format(f"a {type(x).__name__} that is sparse, or conjugated lazily")
        )
    return x.shape, x.stride(), x.dtype, x.device


@dataclass(frozen=True)
class Returned:
    """The result of a call that ran without a graph: its structure, and each leaf.

    Args:
        kinds: (type, layout of a plain tensor, `said` of it).
        given: the arguments' layouts, kept so that no other layouts get their ids.
    """

    treedef: Any
    kinds: list[tuple[type, Any, Any]]
    given: list[Any]

    @classmethod
    def of(cls, out: Any, given: Arguments) -> Returned:
        leaves, treedef = tree.flatten(out, is_leaf=is_sharded)
        kinds = [(type(x), placement_of(x), said(x)) for x in leaves]
        return cls(treedef, kinds, given.layouts)

    def shaped_as(self, other: Returned) -> Returned:
        """This, with the shapes and the constants of a result without data."""
        kinds = []
        for (kind, laid, old), (_, _, new) in zip(self.kinds, other.kinds, strict=True):
            tensors = isinstance(old, tuple) and isinstance(new, tuple)
            kinds.append((kind, laid, (*new[:-1], old[-1]) if tensors else new))
        return replace(self, kinds=kinds)


def said(x: Any) -> Any:
    """The properties of a result's leaf that two runs of a step have in common."""
    if isinstance(x, Sharded):
        return x.layout.shape, x.part_shape, held(x).dtype
    return (x.shape, x.dtype) if isinstance(x, Tensor) else x


def settings() -> tuple[Any, ...]:
    """The settings of torch's on which operators depend."""
    kinds = [k for k in ("cpu", "cuda") if torch.is_autocast_enabled(k)]
    casts = [(k, torch.get_autocast_dtype(k)) for k in kinds]
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
