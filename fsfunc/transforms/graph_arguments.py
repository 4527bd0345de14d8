"""The arguments of a step that runs as a graph, and what it returned without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.plain_leaves import laid_as
from fsfunc.sharded.spent import any_spent, refuse_spent
from fsfunc.tracing.runs import shadows

CONSTANT = (str, bool, int, float, complex, type(None), torch.dtype, torch.device)


class Arguments:
    """The arguments of a call: their leaves, and the tensors that these lie in.

    Attributes:
        key: by which calls share a graph; ``layouts``: those of its sharded leaves.
        numbers: the positions of the first argument's numbers: they change from step to
            step, and are inputs of the graph.
    """

    def __init__(self, args: Any, keywords: Any):
        self.leaves, self.treedef = tree.flatten((args, keywords), is_leaf=is_sharded)
        if any_spent(self.leaves):
            refuse_spent((args, keywords))
        state = self.treedef.child(0).child(0).num_leaves if args else 0
        self.numbers = [
            i for i, x in enumerate(self.leaves[:state]) if type(x) in (int, float)
        ]
        self.layouts = [x.layout for x in self.leaves if isinstance(x, Sharded)]
        self.rest = (args[1:], keywords)
        self.state = self.treedef.child(0).child(0) if args else None
        self.key = self._key()

    def _key(self) -> tuple[Any, ...]:
        buffers: dict[int, int] = {}
        found: list[Any] = [self.treedef]
        for i, x in enumerate(self.leaves):
            if isinstance(x, Sharded):
                at = buffers.setdefault(id(x.packed), len(buffers)) if x.packed else -1
                found.append((id(x.layout), at, () if x.packed else x.part_shape))
            elif isinstance(x, Tensor):
                found.append((x.shape, x.stride(), x.dtype, x.device, laid_as(x)))
            elif i in self.numbers:
                found.append(type(x))
            elif isinstance(x, CONSTANT):
                found.append((type(x), x))
            else:
                raise TypeError(_ODD.format(type(x).__name__))
        return tuple(found)

    def without_data(self, mode: Any) -> tuple[Any, Any, list[Tensor]]:
        """(args, keywords, `tensors`) as tensors without data, in a mode of these."""
        leaves = list(shadows(mode, self.leaves))
        inputs = distinct(leaves)
        for i in self.numbers:
            with mode:
                leaves[i] = torch.empty((), dtype=torch.float64)
            inputs.append(leaves[i])
        for x in leaves:
            if isinstance(x, Sharded) and x.packed is not None:
                x.packed.whole = None  # it is gathered in the graph
        return *tree.unflatten(self.treedef, leaves), inputs

    def tensors(self) -> list[Tensor]:
        """The inputs of a graph: each buffer and other tensor once, then numbers."""
        values = [float(self.leaves[i]) for i in self.numbers]
        return [
            *distinct(self.leaves),
            *(torch.tensor(x, dtype=torch.float64) for x in values),
        ]


def held(x: Any) -> Any:
    """The tensor that a leaf lies in: its packed buffer, or itself."""
    if not isinstance(x, Sharded):
        return x
    return x.local if x.packed is None else x.packed.flat


def distinct(leaves: Sequence[Any]) -> list[Tensor]:
    """The tensors that leaves lie in, each once."""
    found = {id(x): x for x in map(held, leaves) if isinstance(x, Tensor)}
    return list(found.values())


@dataclass(frozen=True)
class Returned:
    """The result of a call that ran without a graph: its structure, and each leaf.

    Args:
        kinds: (type, layout of a plain tensor, value of what is no tensor).
        given: the arguments' layouts, kept so that no other layouts get their ids.
    """

    treedef: Any
    kinds: list[tuple[type, Any, Any]]
    given: list[Any]

    @classmethod
    def of(cls, out: Any, given: Arguments) -> Returned:
        leaves, treedef = tree.flatten(out, is_leaf=is_sharded)
        kinds = [
            (type(x), laid_as(x), x if isinstance(x, CONSTANT) else None)
            for x in leaves
        ]
        return cls(treedef, kinds, given.layouts)


_ODD = (
    "jit(whole_step=True) of an argument with a {}: its graph takes tensors, numbers "
    "and strings"
)
