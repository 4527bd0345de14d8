"""A mesh as one ``torch.func.vmap`` level: pure sharding math, in one batched call.

All ranks run one program at once, so Python cannot branch on a rank, and random
numbers are refused (vmap's own rule). 64 ranks cost about as much as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.backends.link import Handle, Link
from fsfunc.comm.ledgers import note
from fsfunc.comm.linear_maps import LinearMap
from fsfunc.comm.mesh import Here, Mesh, place_here

__all__ = ["run_vmapped"]


_ALL_AT_ONCE = (
    "no rank of a vmap mesh can {} alone: they all run as one program; use a simulated "
    "mesh"
)


class VmapLink(Link):
    """Collectives are done by their ``vmap`` rule, at the level that is the mesh."""

    def __init__(self, mesh: Mesh, level: int, ranks: Tensor):
        self.mesh, self.level, self.ranks = mesh, level, ranks

    def start(
        self,
        op: str,
        x: Tensor,
        where: Any,
        *,
        out: Tensor | None = None,
        what: str = "",
        **how: Any,
    ) -> Handle:
        raise RuntimeError(
            f"{op} over {where.axis} on a vmap mesh was not called on every rank at "
            "once: this transform needs ranks of their own; use a simulated mesh"
        )

    def send(self, x: Tensor, where: Any, to: int, what: str = "") -> Handle:
        raise RuntimeError(_ALL_AT_ONCE.format("send"))

    def receive(self, like: Tensor, where: Any, source: int, what: str = "") -> Handle:
        raise RuntimeError(_ALL_AT_ONCE.format("receive"))

    def apply(self, function: Callable[..., Any], x: Tensor, *rest: Any) -> Any:
        """Calls ``function`` at the mesh's level, also on what is equal everywhere."""
        return function(self.spread(x), *rest)

    def spread(self, x: Tensor) -> Tensor:
        """``x``, batched at the mesh's level."""
        with _torch.forward_ad_on():  # we may be inside a jvp
            zeros = (self.ranks * 0).to(x.dtype)
            return x | zeros if x.dtype == torch.bool else x - zeros  # -0.0 stays so

    def exchange(self, how: LinearMap, x: Tensor, where: Any) -> Tensor:
        inputs = x.unbind(0)
        results = list(inputs)
        for ranks in {self.mesh.members(where.axis, r) for r in range(self.mesh.size)}:
            made = how.across([inputs[r] for r in ranks])
            for i, (r, y) in enumerate(zip(ranks, made, strict=True)):
                results[r] = y
                if how.sends and len(ranks) > 1:
                    sent = any(s == i and s != d for s, d in how.pairs)
                    note(how.sends, where.axis, len(ranks), inputs[r], r, sent)
        return torch.stack(results)

    def axis_index(self, where: Any) -> Any:
        table = [self.mesh.coordinate(where.axis, r) for r in range(self.mesh.size)]
        return torch.tensor(table)[self.ranks]


def run_vmapped(
    mesh: Mesh, fn: Callable[..., Any], args: Sequence[Sequence[Any]]
) -> list[Any]:
    """``[fn(*args[r]) for each rank r]``, all ranks at once.

    What is no tensor must be the same on every rank, going in and coming out.
    """
    rows: list[list[Any]] = []
    treedef: Any = None
    for mine in args:
        leaves, treedef = tree.flatten(tuple(mine))
        rows.append(leaves)
    columns = list(zip(*rows, strict=True))
    batched = [
        i for i, c in enumerate(columns) if all(isinstance(x, Tensor) for x in c)
    ]
    spec: Any = None
    constants: dict[int, Any] = {}

    def call(ranks: Tensor, *tensors: Tensor) -> list[Tensor]:
        nonlocal spec
        leaves = [column[0] for column in columns]
        for i, x in zip(batched, tensors, strict=True):
            leaves[i] = x
        link = VmapLink(mesh, _torch.current_level(), ranks)
        with place_here(Here(mesh, 0, link)):
            out, spec = tree.flatten(fn(*tree.unflatten(treedef, leaves)))
        for i, x in enumerate(out):
            if not isinstance(x, Tensor):
                constants[i], out[i] = x, ranks
        return [x if x is ranks else link.spread(x) for x in out]

    stacks = [torch.stack(columns[i]) for i in batched]
    outs = torch.func.vmap(call)(torch.arange(mesh.size), *stacks)
    return [
        tree.unflatten(spec, [constants.get(i, o[r]) for i, o in enumerate(outs)])
        for r in range(mesh.size)
    ]
