"""Shampoo's preconditioners: covariances by row and by column, and roots of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.optim.leaves import local
from fsfunc.optim.matrix.matrix_exchange import MatrixExchange
from fsfunc.optim.matrix.matrix_functions import inverse_root
from fsfunc.sharded.layout import Layout
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.placements import Placement

__all__ = ["Preconditioners", "Preconditioning", "placements_of"]


class Preconditioners(NamedTuple):
    """Of one matrix, by block: both covariances, and their roots of power -1/4.

    Blocks lie row by row; of rows r and columns c ``left`` is [r, r], ``right`` [c, c].
    Under a ``shard`` they are whole on the matrix's owner, and nowhere else.
    """

    left: tuple[Any, ...]
    right: tuple[Any, ...]
    left_root: tuple[Any, ...]
    right_root: tuple[Any, ...]


@dataclass(frozen=True)
class _Flops:
    """Cost of a matrix to its owner: two decompositions a block, and four products."""

    block: int
    interval: int

    def __call__(self, shape: tuple[int, ...]) -> float:
        cost = 0.0
        for rows, columns in _blocks(shape, self.block):
            r, c = rows.stop - rows.start, columns.stop - columns.start
            cost += 4.0 * r * c * (r + c) + 9.0 * (r**3 + c**3) / self.interval
        return cost


def _blocks(shape: tuple[int, ...], block: int) -> Iterator[tuple[slice, slice]]:
    """The rows and columns of each block, row by row."""
    rows, columns = shape
    for r in range(0, rows, block):
        for c in range(0, columns, block):
            yield (
                slice(r, min(r + block, rows)),
                slice(c, min(c + block, columns)),
            )


@dataclass(frozen=True)
class Preconditioning:
    """First value and update of preconditioners; the numbers are those of `shampoo`."""

    b2: float
    eps: float
    interval: int
    block: int

    @property
    def cost(self) -> _Flops:
        return _Flops(self.block, self.interval)

    def first(self, leaf: Any, exchange: MatrixExchange, k: int) -> Preconditioners:
        """The preconditioners of matrix ``k`` of an exchange, before the first step."""
        dtype, where = torch.promote_types(leaf.dtype, torch.float32), exchange.owner(k)
        name = leaf.name if is_sharded(leaf) else ""

        def scaled(n: int, value: float, what: str) -> Any:
            owns = exchange.owns(k)
            x = torch.eye(n if owns else 0, dtype=dtype, device=leaf.device)
            if not where:
                return x.mul_(value)
            layout = Layout((n, n), dtype, where, f"{name}/{what}")
            return Sharded(x.mul_(value) if owns else x.view(-1), layout)

        sizes = [
            (rows.stop - rows.start, columns.stop - columns.start)
            for rows, columns in _blocks(leaf.shape, self.block)
        ]
        root = self.eps**-0.25
        return Preconditioners(
            tuple(scaled(r, self.eps, f"left/{b}") for b, (r, _) in enumerate(sizes)),
            tuple(scaled(c, self.eps, f"right/{b}") for b, (_, c) in enumerate(sizes)),
            tuple(scaled(r, root, f"left_root/{b}") for b, (r, _) in enumerate(sizes)),
            tuple(scaled(c, root, f"right_root/{b}") for b, (_, c) in enumerate(sizes)),
        )

    def step(
        self, g: Tensor, old: Preconditioners, refresh: bool
    ) -> tuple[Tensor, Preconditioners]:
        """The update of one matrix, and what is kept of it."""
        out, new = torch.empty_like(g), []
        weight = 1.0 if self.b2 == 1 else 1 - self.b2
        for (rows, columns), kept in zip(
            _blocks(g.shape, self.block), zip(*old, strict=True), strict=True
        ):
            left, right, left_root, right_root = map(local, kept)
            x = g[rows, columns].to(left.dtype)
            left = torch.addmm(left, x, x.T, beta=self.b2, alpha=weight)
            right = torch.addmm(right, x.T, x, beta=self.b2, alpha=weight)
            if refresh:
                left_root = inverse_root(left, self.eps)
                right_root = inverse_root(right, self.eps)
            out[rows, columns] = left_root @ x @ right_root
            made = (left, right, left_root, right_root)
            pairs = zip(kept, made, strict=True)
            new.append([o.with_local(x) if is_sharded(o) else x for o, x in pairs])
        return out, Preconditioners(*zip(*new, strict=True))


def placements_of(kept: Preconditioners) -> tuple[Placement, ...]:
    """The layout of the preconditioners of a matrix."""
    blocks = tree.leaves(kept, is_leaf=is_sharded)
    return blocks[0].layout.parts if blocks and is_sharded(blocks[0]) else ()
