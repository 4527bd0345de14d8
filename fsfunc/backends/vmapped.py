"""A mesh axis as a ``torch.func.vmap`` level: pure sharding math, in one batched call.

All ranks run one program at once, so Python cannot branch on a rank, and random
numbers are refused (vmap's own rule). 64 ranks cost about as much as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.backends.base import Link, Work
from fsfunc.mesh import Here, Mesh, place_here

__all__ = ["run_vmapped"]


class VmapLink(Link):
    """Collectives are batched by their ``vmap`` rule at the level of their axis."""

    def __init__(self) -> None:
        self.levels: dict[str, int] = {}
        self.indices: dict[str, Tensor] = {}

    def level(self, axis: tuple[str, ...]) -> int | None:
        return self.levels[axis[0]] if len(axis) == 1 else None

    def start(
        self, op: str, x: Tensor, where: Any, *, out: Tensor | None = None, **how: Any
    ) -> Work:
        raise RuntimeError(
            f"{op} on a vmap mesh reached the wire: its axis {where.axis} is not a "
            "running vmap level"
        )

    def apply(self, function: Callable[..., Any], x: Tensor, *rest: Any) -> Any:
        *front, where = rest
        for name in self._order(front[0].op if front else "pmax", where.axis):
            one = replace(where, axis=(name,), ranks=where.ranks[: self._size(name)])
            spread = x + (self.indices[name] * 0).to(x.dtype)
            x = function(spread, *front, one)
        return x

    def _size(self, name: str) -> int:
        return self.sizes[name]

    sizes: dict[str, int] = {}

    def _order(self, op: str, axis: tuple[str, ...]) -> Sequence[str]:
        if len(axis) == 1 or op in ("psum", "pmax", "psum_scatter", "cast", "slice"):
            return axis
        if op in ("all_gather", "embed"):
            return axis[::-1]
        raise ValueError(
            f"{op} over several axes {axis} at once is not there on a vmap mesh"
        )

    def axis_index(self, where: Any) -> Any:
        index: Any = 0
        for name in where.axis:
            index = index * self.sizes[name] + self.indices[name]
        return index


def run_vmapped(mesh: Mesh, fn: Callable[..., Any], args: Sequence[Sequence[Any]]):
    """``[fn(*args[r]) for each rank r]``, all ranks at once."""
    link = VmapLink()
    link.sizes = dict(mesh.axes)
    names = list(mesh.axes)
    stacked, treedef = [], None
    for rank_args in args:
        leaves, treedef = tree.flatten(tuple(rank_args))
        stacked.append(leaves)
    columns = list(zip(*stacked, strict=True))
    batched = [
        i for i, c in enumerate(columns) if all(isinstance(x, Tensor) for x in c)
    ]
    shape = tuple(mesh.axes.values())
    stacks = [
        torch.stack(columns[i]).reshape(shape + columns[i][0].shape) for i in batched
    ]
    out_spec = []

    def call(indices: Sequence[Tensor], *tensors: Tensor) -> list[Tensor]:
        for name, index in zip(names, indices, strict=True):
            link.indices[name] = index
        leaves = [c[0] for c in columns]
        for i, x in zip(batched, tensors, strict=True):
            leaves[i] = x
        rest = tree.unflatten(treedef, leaves)
        with place_here(Here(mesh, 0, link)):
            out, spec = tree.flatten(fn(*rest))
        out_spec.append(spec)
        for name in names:
            out = [o + (link.indices[name] * 0).to(o.dtype) for o in out]
        return out

    def nest(depth: int) -> Callable[..., Any]:
        """``call`` under a vmap for each axis from ``depth`` on, the first outside."""
        if depth == len(names):
            return call
        inner, name = nest(depth + 1), names[depth]

        def level(indices: Sequence[Tensor], *tensors: Tensor) -> Any:
            def body(index: Tensor, *xs: Tensor) -> Any:
                link.levels[name] = _torch.current_level()
                return inner([*indices, index], *xs)

            return torch.func.vmap(body)(torch.arange(mesh.axes[name]), *tensors)

        return level

    outs = [o.flatten(0, len(names) - 1) for o in nest(0)([], *stacks)]
    return [tree.unflatten(out_spec[0], [o[r] for o in outs]) for r in range(mesh.size)]
