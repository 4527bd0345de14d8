"""Adafactor: the second moments of a matrix as one row and one column.

A rank holds some boxes of a matrix. It sums the squares of its gradients' elements in
them by row and by column; one psum adds these sums over ranks. So every rank has the
whole row and column, and computes the update of its own boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from fsfunc import tree
from fsfunc.comm.mesh import here
from fsfunc.optim.leaves import (
    Mask,
    Tree,
    check_real,
    describe_leaf,
    flatten_like,
    local_tensor,
    paths_of,
    trainable,
)
from fsfunc.optim.matching import Matched
from fsfunc.optim.optimizer import Optimizer, optimizer_factory
from fsfunc.optim.places import (
    bring_together,
    computing_device,
    copy_to,
    device_with,
    return_beside,
    step_memory_like,
)
from fsfunc.optim.reductions import reduce_over_axes
from fsfunc.optim.schedules import Schedule, check_params_given, check_ranges, rate_at
from fsfunc.sharded.layout import Layout
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.slices import Box, boxes
from fsfunc.tree.types import Leaf, PyTree


class FactoredLeaf:
    """A leaf's part in a step: the rank's boxes of it, and its second moments.

    Args:
        position: among the leaves that are updated.
        param, grad: the leaf and its gradient.
        moments: its row, column and variance, some of them None; see `AdafactorState`.
    """

    def __init__(self, position: int, param: Leaf, grad: Leaf, moments: Sequence[Leaf]):
        self.position: int = position
        self.shape: tuple[int, ...] = tuple(param.shape)
        self.p: Tensor = local_tensor(param)
        self.g: Any = local_tensor(grad)  # None once it has been used
        self.sum_dtype: torch.dtype = sum_dtype(self.p.dtype)
        self.device: torch.device = computing_device(self.p)
        self.axes: tuple[str, ...] = ()
        self.boxes: list[Box] = [Box((0,) * len(self.shape), self.shape, 0)]
        if is_sharded(param):
            self.axes = tuple(sorted(param.layout.axes))
            self.boxes = _local_boxes(param.layout) if self.axes else self.boxes
        self.old_moments = moments
        self.row: Any
        self.col: Any
        self.variance: Any
        self.row, self.col, self.variance = moments
        self.row_mean: Any = None  # of the new row: what divides row times column
        self.sum_of_squares: Any = None  # of the whole parameter

    @property
    def factored(self) -> bool:
        """Whether it has a row and a column; a vector has a variance instead."""
        return len(self.shape) > 1

    @property
    def sizes(self) -> list[int]:
        """The numbers of sums: of the parameter, by row and by column."""
        if not self.factored:
            return [1, 0, 0]
        return [1, self.row.numel(), self.col.numel()]

    def fits(self, ndim: int) -> bool:
        """Returns whether the second moments fit a leaf of ``ndim`` dims."""
        if ndim < 2:
            variance = self.variance
            return variance is not None and variance.shape == self.p.shape
        *outer, r, c = self.shape
        shapes = [None if x is None else list(x.shape) for x in (self.row, self.col)]
        return shapes == [[*outer, r, 1], [*outer, 1, c]]

    def add_squares(self, param_sum: Tensor, rows: Tensor, cols: Tensor) -> None:
        """Adds this rank's sums of squares.

        Args:
            param_sum: of the parameter's elements, [1].
            rows, cols: of the gradient's, by row and by column.
        """
        param_sum.add_(_sum_of_squares(self.p, self.sum_dtype))
        if not self.factored:
            return
        rows, cols = rows.view(self.row.shape), cols.view(self.col.shape)
        for box, g in self._cut(self.g.reshape(-1)):
            # By norms, as these take the dtype to sum in.
            row_norms = vector_norm(g, dim=-1, keepdim=True, dtype=self.sum_dtype)
            col_norms = vector_norm(g, dim=-2, keepdim=True, dtype=self.sum_dtype)
            _narrow_to(rows, box).add_(row_norms.square().to(rows.device))
            _narrow_to(cols, box).add_(col_norms.square().to(cols.device))

    def update_moments(
        self, rows: Tensor, cols: Tensor, weight: float | Tensor
    ) -> None:
        """Averages the sums over all ranks into the second moments, out of place."""
        if not self.factored:
            self.g, self.variance = bring_together([self.g, self.variance])
            square = self.g.to(self.sum_dtype).square().view(self.variance.shape)
            self.variance = self.variance.lerp(square, weight)
            return
        self.g, self.row, self.col = bring_together([self.g, self.row, self.col])
        r, c = self.shape[-2:]
        rows = rows.view(self.row.shape).to(self.row) / max(c, 1)
        cols = cols.view(self.col.shape).to(self.col) / max(r, 1)
        self.row, self.col = self.row.lerp(rows, weight), self.col.lerp(cols, weight)
        self.row_mean = self.row.mean(dim=-2, keepdim=True)

    def write_update(self, out: Tensor, eps1: float | None) -> None:
        """Writes the update before it is scaled into ``out``, which is dense."""
        if out.device != self.g.device:  # ``out`` is offloaded, ``g`` was fetched
            update = torch.empty_like(out, device=self.g.device)
            self._compute_update(update, eps1)
            copy_to(out, update)
        else:
            self._compute_update(out, eps1)
        self.g = None  # else the fetched gradients of all leaves would be held

    def _compute_update(self, out: Tensor, eps1: float | None) -> None:
        floor = torch.finfo(self.p.dtype).eps if eps1 is None else eps1
        if not self.factored:
            inverse_root = self.variance.clamp(min=floor * floor).rsqrt_()
            out.copy_(inverse_root.view(out.shape).mul_(self.g))
            return
        row_mean = self.row_mean.clamp(min=floor)
        boxes = self._cut(self.g.reshape(-1)), self._cut(out.view(-1))
        # u = g / sqrt(max(row col / max(mean_r(row), eps1), eps1^2)), box by box
        for (box, g), (_, u) in zip(*boxes, strict=True):
            torch.mul(_narrow_to(self.row, box), _narrow_to(self.col, box), out=u)
            u.div_(_narrow_to(row_mean, box)).clamp_(min=floor * floor).rsqrt_().mul_(g)

    def new_moments(self) -> list[Tensor | None]:
        """Returns the second moments of the next step, where the old ones lie."""
        pairs = zip((self.row, self.col, self.variance), self.old_moments, strict=True)
        return [
            x if x is old else return_beside(x, old, outlives_step=True)
            for x, old in pairs
        ]

    def rms(self, sum_of_squares: Tensor) -> Tensor:
        """Returns the root mean square of elements of the whole leaf, by their sum."""
        return (sum_of_squares / max(math.prod(self.shape), 1)).sqrt()

    def _cut(self, flat: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """Cuts what this rank holds, flat, into its boxes: views of it."""
        for box in self.boxes:
            if box.numel:
                yield box, flat[box.start : box.start + box.numel].view(box.sizes)


def _narrow_to(x: Tensor, box: Box) -> Tensor:
    """Returns the part of ``x`` that goes with a box; a dim of size 1 goes with all."""
    for dim, (start, length) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        if x.shape[dim] > 1:
            x = x.narrow(dim, start, length)
    return x


def sums_of_squares(leaves: Sequence[FactoredLeaf]) -> list[tuple[Tensor, ...]]:
    """Returns each leaf's sums over all ranks: (of the parameter, by row, by column).

    In one tensor for each leaf, so that one collective reduces all of them.
    """
    local_sums = [
        torch.zeros(sum(x.sizes), dtype=x.sum_dtype, device=x.device) for x in leaves
    ]
    for leaf, out in zip(leaves, local_sums, strict=True):
        leaf.add_squares(*out.split(leaf.sizes))
    sums = _reduce_all(leaves, local_sums)
    return [x.split(leaf.sizes) for leaf, x in zip(leaves, sums, strict=True)]


def update_squares(
    leaves: Sequence[FactoredLeaf], updates: Sequence[Tensor]
) -> list[Tensor]:
    """Returns the sum of squares of each leaf's update over all ranks."""
    local_sums = [
        _sum_of_squares(updates[x.position], x.sum_dtype).to(x.device)[None]
        for x in leaves
    ]
    return [x[0] for x in _reduce_all(leaves, local_sums)]


def _sum_of_squares(x: Tensor, dtype: torch.dtype) -> Tensor:
    return vector_norm(x, dtype=dtype).square()


def _reduce_all(
    leaves: Sequence[FactoredLeaf], numbers: Sequence[Tensor]
) -> list[Tensor]:
    pairs = zip(leaves, numbers, strict=True)
    return reduce_over_axes([(leaf.axes, x, leaf.device) for leaf, x in pairs])


def _local_boxes(layout: Layout) -> list[Box]:
    """Returns where this rank's elements lie in the whole leaf."""
    coordinates = here().mesh.coordinates()
    return _cached_boxes(layout, tuple(coordinates[axis] for axis in layout.axes))


@lru_cache(maxsize=4096)  # a step asks for the same ones every time
def _cached_boxes(layout: Layout, coordinates: tuple[int, ...]) -> list[Box]:
    return boxes(layout, dict(zip(layout.axes, coordinates, strict=True)))


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype for sums of such numbers: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


class AdafactorState(NamedTuple):
    """The count of updates, and the second moments.

    Of a leaf of shape ``[..., r, c]`` ``row`` is ``[..., r, 1]`` and ``col`` is
    ``[..., 1, c]``, whole on every rank, float32 (float64 for such a leaf). Of a leaf
    of less than two dims ``variance`` is like it, in its layout. None elsewhere.
    """

    count: int | Tensor
    row: PyTree
    col: PyTree
    variance: PyTree


@optimizer_factory
def adafactor(
    learning_rate: float | Schedule = 1e-2,
    *,
    beta2_decay: float = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    d: float = 1.0,
    weight_decay: float = 0.0,
    mask: Mask | None = None,
) -> Optimizer:
    """Makes Adafactor as ``torch.optim.Adafactor`` does it, for any leaves.

    With t = count + 1, b = t^beta2_decay, and means over each whole leaf::

        row = (1 - b) row + b mean_c(g^2)           col = (1 - b) col + b mean_r(g^2)
        u = g / sqrt(max(row col / max(mean_r(row), eps1), eps1^2))
        step = min(learning_rate, 1 / sqrt(t)) max(eps2, rms(p))
        p = p - learning_rate weight_decay p - step u / max(1, rms(u) / d)

    Args:
        learning_rate: a number, or a function of the count; see `schedules`.
        beta2_decay: how fast older squares are forgotten less, at most 0.
        eps: eps1, by default the machine epsilon of the leaf's dtype, and eps2.
        d: above which root mean square an update is scaled down, at least 1.
        weight_decay: the share of itself that a leaf loses, times the learning rate.
        mask: ``mask(path, leaf)`` returns whether a leaf decays; by default all do.

    Returns:
        the optimizer; its state is an `AdafactorState`: of a matrix r + c numbers in
        place of r c, the same on every rank.

    Raises:
        ValueError: a number out of its range; an update without ``params``, or one
            that is differentiated or batched.
        TreeMismatch: gradients do not fit the parameters; names the path.

    Cost: two psums over each distinct set of axes in the layouts: of 1 + r + c numbers
    for each matrix there (times the dims before these two), 1 for another leaf, and of
    one for each leaf. One fresh tensor of the size of the rank's parameters; these in
    place under `donate`.

    Source: Shazeer and Stern, Adafactor, algorithms 4 and 5, as torch changes it.

    >>> optimizer = adafactor(0.1)
    >>> w = torch.ones(2, 2)
    >>> w, state = optimizer.apply(torch.ones(2, 2), optimizer.init(w), w)
    >>> w[0], state.row.shape, state.col.shape
    (tensor([0.9000, 0.9000]), torch.Size([2, 1]), torch.Size([1, 2]))
    """
    eps1, eps2 = eps
    check_ranges("adafactor", eps1=eps1 or 0.0, eps2=eps2)

    def update(
        grads: Tree, state: AdafactorState, params: Tree = None
    ) -> tuple[Tree, AdafactorState]:
        check_params_given(params, "adafactor")
        matched = Matched.of(params, grads)
        if matched.differentiated:
            raise ValueError(
                "adafactor cannot be differentiated or batched; take ff.sharded_adam "
                "there, whose update differentiates"
            )
        t, rate = state.count + 1, rate_at(learning_rate, state.count)
        with torch.no_grad():
            leaves = _factored_leaves(matched, state)
            sums = sums_of_squares(leaves)
            flats = matched.buffers[0].tensors
            updates = matched.buffers[1].rebuild(
                [step_memory_like(x, sum_dtype(x.dtype)).zero_() for x in flats]
            )
            for leaf, (param_sum, rows, cols) in zip(leaves, sums, strict=True):
                leaf.update_moments(rows, cols, t**beta2_decay)
                leaf.write_update(local_tensor(updates[leaf.position]), eps1)
                leaf.sum_of_squares = param_sum[0]
            squares = update_squares(leaves, [local_tensor(x) for x in updates])
            step = min(rate, 1 / t**0.5)
            decays = matched.decays(rate * weight_decay, mask)
            for leaf, square in zip(leaves, squares, strict=True):
                rms_p, rms_u = leaf.rms(leaf.sum_of_squares), leaf.rms(square)
                factor = step * rms_p.clamp(min=eps2) / (rms_u / d).clamp(min=1)
                u = local_tensor(updates[leaf.position])
                u.mul_(-factor.to(u.device, u.dtype))
                if decays[leaf.position]:
                    u.sub_(leaf.p, alpha=decays[leaf.position])
        update_tree = matched.restore(updates, [None] * len(matched.trees[0]))
        return update_tree, _next_state(matched, state, leaves)

    return Optimizer(_init, update)


def _init(params: Tree) -> AdafactorState:
    check_real(params, "adafactor takes", "as torch.optim.Adafactor takes none")

    def factors(short_dim: int) -> Tree:
        """Returns zeros like matrices, with 1 for the size of a dim."""

        def zeros(leaf: Leaf) -> Tensor | None:
            if not trainable(leaf) or leaf.ndim < 2:
                return None
            shape = [*leaf.shape]
            shape[short_dim] = 1
            return torch.zeros(
                shape, dtype=sum_dtype(leaf.dtype), device=device_with(leaf)
            )

        return tree.map(zeros, params, is_leaf=is_sharded)

    def variance(leaf: Leaf) -> Leaf:
        if not trainable(leaf) or leaf.ndim > 1:
            return None
        options: Any = {"dtype": sum_dtype(leaf.dtype), "device": device_with(leaf)}
        zeros = torch.zeros_like(local_tensor(leaf), **options)
        return leaf.with_local(zeros) if is_sharded(leaf) else zeros

    variances = tree.map(variance, params, is_leaf=is_sharded)
    return AdafactorState(0, factors(-1), factors(-2), variances)


def _factored_leaves(matched: Matched, state: AdafactorState) -> list[FactoredLeaf]:
    """Returns the leaves to update, with their moments.

    Raises:
        TreeMismatch: the moments are not those of the parameters.
    """
    columns = _moment_columns(matched, state)
    leaves = []
    for position, i in enumerate(matched.active):
        param, grad = matched.trees[0][i], matched.trees[1][i]
        moments = [column[i] for column in columns]
        leaf = FactoredLeaf(
            position,
            param,
            grad,
            [None if x is None else local_tensor(x) for x in moments],
        )
        if not leaf.fits(param.ndim):
            raise tree.TreeMismatch(
                "optimizer state does not fit the parameters at "
                f"{paths_of(matched.treedef)[i]!r}: {describe_leaf(param)} has other "
                "second moments; make them with this optimizer's own init(params)"
            )
        leaves.append(leaf)
    return leaves


def _moment_columns(matched: Matched, state: AdafactorState) -> list[list[Leaf]]:
    """Returns the rows, columns and variances: all leaves of each."""
    trees = state.row, state.col, state.variance
    return [flatten_like(matched.treedef, t, "optimizer state") for t in trees]


def _next_state(
    matched: Matched, state: AdafactorState, leaves: Sequence[FactoredLeaf]
) -> AdafactorState:
    """Returns the state with the new moments of the leaves that were updated."""
    columns = [list(column) for column in _moment_columns(matched, state)]
    for leaf in leaves:
        i = matched.active[leaf.position]
        for column, x in zip(columns, leaf.new_moments(), strict=True):
            old = column[i]
            column[i] = old.with_local(x) if is_sharded(old) else x
    trees = [tree.unflatten(matched.treedef, column) for column in columns]
    return AdafactorState(state.count + 1, *trees)
