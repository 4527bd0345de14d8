"""Sums of a leaf's squares by row and by column, from the ranks' parts.

A part is a few boxes of the leaf (a flat range: the end of a row, whole rows, the
beginning of another); each adds to the rows and columns that it lies in, and the sums
over all ranks are those of the leaf.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm

from fsfunc.comm.mesh import here
from fsfunc.optim.leaves import local
from fsfunc.optim.reductions import over_axes
from fsfunc.runtime.memory_spaces import space_of
from fsfunc.sharded.layout import Layout
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.slices import Box, boxes


class FactoredLeaf:
    """A leaf's part in a step: the rank's boxes of it, and its second moments."""

    def __init__(self, at: int, param: Any, grad: Any, moments: Sequence[Any]):
        self.at, self.shape = at, tuple(param.shape)
        self.p, self.g = local(param), local(grad)
        self.wide = wide(self.p.dtype)
        self.device = space_of(self.p).on_device(self.p).device
        self.axes: tuple[str, ...] = ()
        self.boxes = [Box((0,) * len(self.shape), self.shape, 0)]
        if is_sharded(param):
            self.axes = tuple(sorted(param.layout.axes))
            self.boxes = _boxes(param.layout) if self.axes else self.boxes
        self.row, self.col, self.variance = moments
        self.denominator: Any = None
        self.power: Any = None

    @property
    def factored(self) -> bool:
        return len(self.shape) > 1

    @property
    def sizes(self) -> list[int]:
        """Counts of the sums: of the parameter, by row and by column."""
        if not self.factored:
            return [1, 0, 0]
        return [1, self.row.numel(), self.col.numel()]

    def fits(self, ndim: int) -> bool:
        """True if the second moments fit such a leaf."""
        if ndim < 2:
            found = self.variance
            return found is not None and found.shape == self.p.shape
        *outer, r, c = self.shape
        shapes = [None if x is None else list(x.shape) for x in (self.row, self.col)]
        return shapes == [[*outer, r, 1], [*outer, 1, c]]

    def add_to(self, power: Tensor, rows: Tensor, cols: Tensor) -> None:
        """Adds this rank's sums of squares."""
        power.add_(_power(self.p, self.wide))
        if not self.factored:
            return
        rows, cols = rows.view(self.row.shape), cols.view(self.col.shape)
        for box, g in self._cut(self.g.reshape(-1)):
            of_rows = vector_norm(g, dim=-1, keepdim=True, dtype=self.wide)
            of_cols = vector_norm(g, dim=-2, keepdim=True, dtype=self.wide)
            _within(rows, box).add_(of_rows.square().to(rows.device))
            _within(cols, box).add_(of_cols.square().to(cols.device))

    def learn(self, rows: Tensor, cols: Tensor, weight: Any) -> None:
        """Takes in the whole sums: the second moments are other tensors then."""
        if not self.factored:
            square = self.g.to(self.wide).square().view(self.variance.shape)
            self.variance = self.variance.lerp(square, weight)
            return
        r, c = self.shape[-2:]
        rows = rows.view(self.row.shape).to(self.row) / max(c, 1)
        cols = cols.view(self.col.shape).to(self.col) / max(r, 1)
        self.row, self.col = self.row.lerp(rows, weight), self.col.lerp(cols, weight)
        self.denominator = self.row.mean(dim=-2, keepdim=True)

    def direct(self, out: Tensor, eps1: float | None) -> None:
        """Writes the update before it is scaled; ``out`` is dense."""
        least = torch.finfo(self.p.dtype).eps if eps1 is None else eps1
        if not self.factored:
            estimate = self.variance.clamp(min=least * least).rsqrt_()
            out.copy_(estimate.view(out.shape).mul_(self.g))
            return
        below = self.denominator.clamp(min=least)
        boxes = self._cut(self.g.reshape(-1)), self._cut(out.view(-1))
        for (box, g), (_, u) in zip(*boxes, strict=True):
            torch.mul(_within(self.row, box), _within(self.col, box), out=u)
            u.div_(_within(below, box)).clamp_(min=least * least).rsqrt_().mul_(g)

    def rms(self, power: Tensor) -> Tensor:
        return (power / max(math.prod(self.shape), 1)).sqrt()

    def _cut(self, flat: Tensor) -> Iterator[tuple[Box, Tensor]]:
        for box in self.boxes:
            if box.numel:
                yield box, flat[box.start : box.start + box.numel].view(box.sizes)


def _within(x: Tensor, box: Box) -> Tensor:
    """The elements of ``x`` that go with a box; a dim of length 1 goes with all."""
    for dim, (start, length) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        if x.shape[dim] > 1:
            x = x.narrow(dim, start, length)
    return x


def whole_sums(leaves: Sequence[FactoredLeaf]) -> list[tuple[Tensor, ...]]:
    """Of each leaf the sums of squares over all ranks: of it, by row and by column."""
    made = [torch.zeros(sum(x.sizes), dtype=x.wide, device=x.device) for x in leaves]
    for leaf, out in zip(leaves, made, strict=True):
        leaf.add_to(*out.split(leaf.sizes))
    sums = _over_axes(leaves, made)
    return [x.split(leaf.sizes) for leaf, x in zip(leaves, sums, strict=True)]


def powers(leaves: Sequence[FactoredLeaf], updates: Sequence[Tensor]) -> list[Tensor]:
    """Of each leaf the sum of squares of its update over all ranks."""
    made = [_power(updates[x.at], x.wide).to(x.device)[None] for x in leaves]
    return [x[0] for x in _over_axes(leaves, made)]


def _power(x: Tensor, dtype: torch.dtype) -> Tensor:
    return vector_norm(x, dtype=dtype).square()


def _over_axes(
    leaves: Sequence[FactoredLeaf], numbers: Sequence[Tensor]
) -> list[Tensor]:
    pairs = zip(leaves, numbers, strict=True)
    return over_axes([(leaf.axes, x, leaf.device) for leaf, x in pairs])


def _boxes(layout: Layout) -> list[Box]:
    """The places of the rank's elements in the whole leaf."""
    at = here().mesh.coordinates()
    return _cached(layout, tuple(at[axis] for axis in layout.axes))


@lru_cache(maxsize=4096)  # a step asks for the same ones every time
def _cached(layout: Layout, key: tuple[int, ...]) -> list[Box]:
    return boxes(layout, dict(zip(layout.axes, key, strict=True)))


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which sums of such numbers are made: float32 at least."""
    return torch.promote_types(dtype, torch.float32)
