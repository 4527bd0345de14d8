"""The leaves that a gradient call differentiates: taken out, and put back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.sharded import Sharded, is_sharded

__all__ = ["Leaves"]


class Leaves:
    """The differentiated leaves of a call: taken out, and put back.

    A leaf in a ported home is read through its port, so it is differentiable only for
    those who use its part directly; a whole home then gives one differentiable tensor.
    """

    def __init__(self, args: Sequence[Any], argnums: Sequence[int]):
        self.given, self.argnums = tuple(args), tuple(argnums)
        chosen = tuple(args[i] for i in argnums)
        self.leaves, self.treedef = tree.flatten(chosen, is_leaf=is_sharded)
        if not tree.are_shown(self.leaves):
            names = [f"argument {i}" for i in argnums]
            tree.shown(chosen, "value_and_grad", "is given", names, is_sharded)
        self.locals = [x.local if isinstance(x, Sharded) else x for x in self.leaves]
        self.picked = [
            i
            for i, x in enumerate(self.locals)
            if isinstance(x, Tensor) and x.is_floating_point()
        ]

    @property
    def tensors(self) -> list[Tensor]:
        """The picked leaves, of sharded ones this rank's part."""
        return [self.locals[i] for i in self.picked]

    def args(self, values: Sequence[Tensor]) -> tuple[Any, ...]:
        """The arguments, with ``values`` for the picked leaves."""
        leaves = list(self.leaves)
        for i, value in zip(self.picked, values, strict=True):
            old = leaves[i]
            if isinstance(old, Sharded):
                leaves[i] = old.with_local(value)
                leaves[i].home = old.home if _ported(old) else None
            else:
                leaves[i] = value
        args = list(self.given)
        chosen = tree.unflatten(self.treedef, leaves)
        for i, value in zip(self.argnums, chosen, strict=True):
            args[i] = value
        return tuple(args)

    def grads(self, values: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """Trees of gradients; None from a leaf that its port answers for."""
        found: list[Any] = [None] * len(self.leaves)
        for i, g in zip(self.picked, values, strict=True):
            old = self.leaves[i]
            if g is None and not _ported(old):
                g = torch.zeros_like(self.locals[i])
            found[i] = old.with_local(g) if isinstance(old, Sharded) else g
        return tree.unflatten(self.treedef, found)


def _ported(leaf: Any) -> bool:
    home = leaf.home if isinstance(leaf, Sharded) else None
    return home is not None and home.port is not None
