"""The leaves that a gradient call differentiates: taken out, and put back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.sharded.leaf import KEPT, FlatShard, Parts, Sharded, is_sharded


class Leaves:
    """The differentiated leaves of a call: taken out, and put back.

    Args:
        packed: by id, the buffers whose gradients ``shard`` accumulates itself. A leaf
            of one becomes an autograd leaf, in ``parts``, if read outside a unit.
    """

    def __init__(
        self,
        args: Sequence[Any],
        argnums: Sequence[int],
        packed: Mapping[int, FlatShard] | None = None,
        parts: Parts | None = None,
    ):
        self.given, self.argnums = tuple(args), tuple(argnums)
        chosen = tuple(args[i] for i in argnums)
        self.leaves, self.treedef = tree.flatten(chosen, is_leaf=is_sharded)
        if not tree.are_shown(self.leaves):
            names = [f"argument {i}" for i in argnums]
            tree.shown(chosen, "value_and_grad", "is given", names, is_sharded)
        self.parts: Parts = {} if parts is None else parts
        self.kept: list[int] = []
        self.picked: list[int] = []
        # The picked leaves, of sharded ones this rank's part.
        self.tensors: list[Tensor] = []
        for i, x in enumerate(self.leaves):
            if is_sharded(x):
                if packed and id(x.packed) in packed:
                    self.kept.append(i)
                    continue
                x = x.local
            if isinstance(x, Tensor) and x.is_floating_point():
                self.picked.append(i)
                self.tensors.append(x)

    @property
    def device(self) -> torch.device | None:
        """That of the first of them."""
        if self.kept:
            return _torch.device_of(self.leaves[self.kept[0]].packed.flat)
        return self.tensors[0].device if self.tensors else None

    def args(self, values: Sequence[Tensor]) -> tuple[Any, ...]:
        """The arguments, with ``values`` for the picked leaves."""
        leaves = list(self.leaves)
        for i in self.kept:
            leaves[i] = leaves[i].tracked(self.parts)
        for i, value in zip(self.picked, values, strict=True):
            old = leaves[i]
            leaves[i] = old.with_local(value) if is_sharded(old) else value
        args = list(self.given)
        chosen = tree.unflatten(self.treedef, leaves)
        for i, value in zip(self.argnums, chosen, strict=True):
            args[i] = value
        return tuple(args)

    def every_part(self, args: Sequence[Any]) -> list[Tensor]:
        """The parts of all kept leaves, which may be used outside units."""
        chosen = tuple(args[i] for i in self.argnums)
        leaves = tree.leaves(chosen, is_leaf=is_sharded)
        return [leaves[i].local for i in self.kept]

    def grads(self, values: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """Trees of gradients; leaves of ``packed`` get placeholders that raise."""
        found: list[Any] = [None] * len(self.leaves)
        for i in self.kept:
            found[i] = kept = Sharded(None, self.leaves[i].layout)
            kept.spent = KEPT
        for k, (i, g) in enumerate(zip(self.picked, values, strict=True)):
            old = self.leaves[i]
            g = torch.zeros_like(self.tensors[k]) if g is None else g
            found[i] = old.with_local(g) if is_sharded(old) else g
        return tree.unflatten(self.treedef, found)


def newborn(x: Tensor) -> Tensor:
    """``x`` behind an identity node that marks it as an input, not as captured."""
    return _Newborn.apply(x.requires_grad_())


def is_newborn(node: Any) -> bool:
    """True if an autograd node is that of a :func:`newborn` tensor."""
    return node.name() == "_NewbornBackward"


class _Newborn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        return g


def add_gradients(parts: Sequence[Tensor], found: Sequence[Tensor | None]) -> None:
    """Adds to the gradients of parts that were used outside units."""
    for part, g in zip(parts, found, strict=True):
        if g is not None:
            part.grad = g if part.grad is None else part.grad + g
