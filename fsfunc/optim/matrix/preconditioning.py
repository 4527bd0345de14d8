"""Shampoo: covariances of gradients, their roots, and the step.

Each matrix has two covariances for each of its blocks, of rows and of columns. They lie
whole on the matrix's owner, and nowhere else: gradients go there, and directions come
back: see `matrix_exchange`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.attribution import internal
from fsfunc.optim.element_rules import ElementRule
from fsfunc.optim.leaves import (
    Mask,
    Tree,
    flatten_like,
    local_tensor,
    trainable,
    zeros_like,
)
from fsfunc.optim.matching import Matched
from fsfunc.optim.matrix.matrix_exchange import (
    PLAIN_CODEC,
    DescentState,
    MatrixExchange,
    check_matrices,
    descent_rule,
    map_matrices,
    match_matrices,
)
from fsfunc.optim.optimizer import Optimizer, Phases, from_phases, optimizer_factory
from fsfunc.optim.places import device_with, readable_on, return_beside
from fsfunc.optim.schedules import Schedule
from fsfunc.sharded.layout import Layout
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.tree.types import Leaf, PyTree


def inverse_root(matrix: Tensor, eps: float, power: float = -0.25) -> Tensor:
    """Returns a positive definite matrix to a power, its eigenvalues at least ``eps``.

    Computed in float64. NaN everywhere if an element is not finite.

    >>> inverse_root(torch.diag(torch.tensor([16.0, 0.0])), eps=1e-4)
    tensor([[ 0.5000,  0.0000],
            [ 0.0000, 10.0000]])
    """
    # `eigh` raises for a matrix with a NaN: it is given another one, without a branch
    # that would wait for the device.
    finite = matrix.isfinite().all()
    wide = torch.where(finite, matrix.double(), 1.0)
    values, vectors = torch.linalg.eigh(wide)
    root = (vectors * values.clamp(min=eps) ** power) @ vectors.T
    return torch.where(finite, root, torch.nan).to(matrix.dtype)


class Preconditioners(NamedTuple):
    """Of one matrix, by block: both covariances, and their powers of -1/4.

    Blocks are numbered row by row. For a block of r rows and c columns ``left`` is
    [r, r] and ``right`` [c, c]. Under a ``shard`` they are whole on the matrix's owner,
    and nowhere else.
    """

    left: tuple[Leaf, ...]
    right: tuple[Leaf, ...]
    left_root: tuple[Leaf, ...]
    right_root: tuple[Leaf, ...]


@dataclass(frozen=True)
class _MatrixCost:
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
    """Yields the rows and columns of each block, row by row."""
    rows, columns = shape
    for r in range(0, rows, block):
        for c in range(0, columns, block):
            yield (
                slice(r, min(r + block, rows)),
                slice(c, min(c + block, columns)),
            )


@dataclass(frozen=True)
class PreconditionerRule:
    """How preconditioners begin and are updated; the numbers are those of `shampoo`."""

    b2: float
    eps: float
    interval: int
    block: int

    @property
    def cost(self) -> _MatrixCost:
        return _MatrixCost(self.block, self.interval)

    def first(self, leaf: Leaf, exchange: MatrixExchange, k: int) -> Preconditioners:
        """Returns those of matrix ``k`` of an exchange, before the first step."""
        dtype = torch.promote_types(leaf.dtype, torch.float32)
        owner = exchange.owner(k)
        name = leaf.name if is_sharded(leaf) else ""

        def scaled_identity(n: int, value: float, part: str) -> Sharded | Tensor:
            is_owner = exchange.owns(k)
            x = torch.eye(n if is_owner else 0, dtype=dtype, device=device_with(leaf))
            if not owner:
                return x.mul_(value)
            layout = Layout((n, n), dtype, owner, f"{name}/{part}")
            return Sharded(x.mul_(value) if is_owner else x.view(-1), layout)

        sizes = [
            (rows.stop - rows.start, columns.stop - columns.start)
            for rows, columns in _blocks(leaf.shape, self.block)
        ]
        root = self.eps**-0.25
        return Preconditioners(
            tuple(
                scaled_identity(r, self.eps, f"left/{b}")
                for b, (r, _) in enumerate(sizes)
            ),
            tuple(
                scaled_identity(c, self.eps, f"right/{b}")
                for b, (_, c) in enumerate(sizes)
            ),
            tuple(
                scaled_identity(r, root, f"left_root/{b}")
                for b, (r, _) in enumerate(sizes)
            ),
            tuple(
                scaled_identity(c, root, f"right_root/{b}")
                for b, (_, c) in enumerate(sizes)
            ),
        )

    def step(
        self, g: Tensor, old: Preconditioners, refresh: bool
    ) -> tuple[Tensor, Preconditioners]:
        """Returns the update of one matrix, on its device, and its preconditioners.

        Args:
            g: the gradient, whole.
            refresh: whether the roots are computed anew.
        """
        out, new = torch.empty_like(g), []
        weight = 1.0 if self.b2 == 1 else 1 - self.b2  # with 1 they are sums
        for (rows, columns), old_leaves in zip(
            _blocks(g.shape, self.block), zip(*old, strict=True), strict=True
        ):
            stored = list(map(local_tensor, old_leaves))
            fetched = [readable_on(x, g.device) for x in stored]
            left, right, left_root, right_root = fetched
            x = g[rows, columns].to(left.dtype)
            left = torch.addmm(left, x, x.T, beta=self.b2, alpha=weight)
            right = torch.addmm(right, x.T, x, beta=self.b2, alpha=weight)
            if refresh:
                left_root = inverse_root(left, self.eps)
                right_root = inverse_root(right, self.eps)
            out[rows, columns] = left_root @ x @ right_root
            updated = (left, right, left_root, right_root)
            # Back to where they are stored; roots that were only read stay there.
            tensors = [
                old if x is was else return_beside(x, old, outlives_step=True)
                for old, was, x in zip(stored, fetched, updated, strict=True)
            ]
            pairs = zip(old_leaves, tensors, strict=True)
            new.append([o.with_local(x) if is_sharded(o) else x for o, x in pairs])
        return out, Preconditioners(*zip(*new, strict=True))


class ShampooState(NamedTuple):
    """The count of updates, `Preconditioners` by leaf, and the momentum, if any.

    The momentum is laid out as the parameters are.
    """

    count: int
    preconditioners: PyTree
    momentum: PyTree


@optimizer_factory
def shampoo(
    learning_rate: float | Schedule = 1e-1,
    *,
    momentum: float = 0.0,
    b2: float = 1.0,
    eps: float = 1e-4,
    interval: int = 1,
    block: int = 1024,
    weight_decay: float = 0.0,
    mask: Mask | None = None,
) -> Optimizer:
    """Makes Shampoo, the preconditioners of each matrix stored and used by one rank.

    With G the gradient of a block of a matrix, l the learning rate; L and R begin as
    eps I::

        L = b2 L + (1 - b2 or 1) G G'        R = b2 R + (1 - b2 or 1) G' G
        u = L^(-1/4) G R^(-1/4)              v = momentum v + u
        p = p - l weight_decay p - l v

    The roots are of eigenvalues of eps at least, which counts where b2 is below 1.

    Gradients go to the owner of each matrix, and updates come back, in parts, in
    float32 or wider. Owners are balanced by FLOPs.

    Args:
        learning_rate: a number, or a function of the count; see `schedules`.
        momentum: not negative; with 0 there is no state for it.
        b2: decay of the covariances, in (0, 1]; with 1 they are sums, as in the paper.
        eps: above 0.
        interval: steps between one taking of the roots and the next; the first step
            takes them.
        block: the most rows and columns of a block; larger matrices are cut into such.
        weight_decay: the share of itself that a leaf loses, times the learning rate.
        mask: ``mask(path, leaf)`` returns whether a leaf decays; by default all do.

    Returns:
        the optimizer; its state is a `ShampooState`. All leaves with a gradient must be
        matrices, by their global shape. A covariance that is not finite gives updates
        that are not.

    Raises:
        ValueError: a leaf that is no matrix (see `partition`); a number out of its
            range; an update without ``params`` while weights decay, or one that is
            differentiated; a state laid out for another mesh; a vmap mesh.
        TreeMismatch: gradients or state do not fit the parameters; names the path.

    Cost: two all-to-alls, of b bytes an element. Of E elements of matrices h lie with
    their owners already: all ranks together send b (E - h) bytes to owners, and as many
    back (within each copy, along ``replicate``). Of a block of r rows and c columns the
    owner keeps 2 (r^2 + c^2) numbers, the covariances anew at each step; both
    eigendecompositions, in float64, every ``interval`` steps, and 4 r c (r + c) FLOPs a
    step. At zero=0, and along ``replicate``, each rank has all preconditioners of the
    matrices that it holds, and sends nothing for them.

    Source: Gupta, Koren and Singer, Shampoo: preconditioned stochastic tensor
    optimization, 2018, algorithm 1; blocks: Anil et al., Scalable second order
    optimization for deep learning, 2020.

    >>> optimizer = shampoo(1.0, eps=1e-12)
    >>> w = torch.zeros(2, 2)
    >>> grads = torch.diag(torch.tensor([100.0, 1.0]))
    >>> optimizer.apply(grads, optimizer.init(w), w)[0]
    tensor([[-1.,  0.],
            [ 0., -1.]])
    """
    preconditioning = PreconditionerRule(b2, eps, interval, block)
    rule = descent_rule("shampoo", learning_rate, weight_decay, mask, momentum)
    functions = _ShampooFunctions(preconditioning, rule)
    return from_phases(functions.init, functions.phases)


@dataclass(frozen=True, eq=False)
class _ShampooFunctions:
    """The ``init`` and ``phases`` of a `shampoo`."""

    preconditioning: PreconditionerRule
    rule: ElementRule

    def init(self, params: Tree) -> ShampooState:
        check_matrices(params, "shampoo")
        leaves, treedef = tree.flatten(params, is_sharded)
        active = [i for i, leaf in enumerate(leaves) if trainable(leaf)]
        exchange = MatrixExchange(
            [leaves[i] for i in active], self.preconditioning.cost, "shampoo"
        )
        preconditioners: list[Preconditioners | None] = [None] * len(leaves)
        for k, i in enumerate(active):
            preconditioners[i] = self.preconditioning.first(leaves[i], exchange, k)
        momentum = zeros_like(params) if self.rule.moments else None
        return ShampooState(0, tree.unflatten(treedef, preconditioners), momentum)

    def phases(
        self, grads: Tree, state: ShampooState, params: Tree, returns_params: bool
    ) -> Phases:
        like = grads if params is None else params
        matched = self._match(grads, state, like)
        directions, preconditioners = self._directions(matched, state)
        del matched
        old = DescentState(state.count, state.momentum)
        step = PLAIN_CODEC.phases(self.rule, directions, old, params, returns_params)
        new_tree, (count, momentum) = yield from step
        return new_tree, ShampooState(count, preconditioners, momentum)

    def _match(self, grads: Tree, state: ShampooState, like: Tree) -> Matched:
        moments = () if state.momentum is None else (state.momentum,)
        matched = match_matrices("shampoo", like, grads, *moments)
        if matched.differentiated:
            raise ValueError(
                "the update of shampoo has no derivative: its roots have none where "
                "eigenvalues are equal; take ff.sharded_adam or ff.muon"
            )
        return matched

    def _directions(self, matched: Matched, state: ShampooState) -> tuple[Tree, Tree]:
        """Returns the direction of each parameter, and the new preconditioners."""
        by_leaf = flatten_like(
            matched.treedef, state.preconditioners, "optimizer state"
        )
        leaves, grads, *_ = matched.columns
        wide = torch.float32
        for leaf in leaves:
            wide = torch.promote_types(wide, leaf.dtype)
        refresh = state.count % self.preconditioning.interval == 0

        def precondition(matrices: dict[int, Tensor]) -> dict[int, Tensor]:
            updates = {}
            for k, g in matrices.items():
                i = matched.active[k]
                updates[k], by_leaf[i] = self.preconditioning.step(
                    g, by_leaf[i], refresh
                )
            return updates

        with internal(), torch.no_grad():
            # The owner of a matrix is where its preconditioners lie: a state that was
            # loaded may have other owners than would be chosen now.
            places = []
            for i in matched.active:
                blocks = tree.leaves(by_leaf[i], is_leaf=is_sharded)
                has_layout = bool(blocks) and is_sharded(blocks[0])
                places.append(blocks[0].layout.parts if has_layout else ())
            cost = self.preconditioning.cost
            exchange = MatrixExchange(leaves, cost, "shampoo", places=places)
            parts = [local_tensor(x).to(wide) for x in grads]
            directions = map_matrices(matched, exchange, parts, precondition)
        return directions, tree.unflatten(matched.treedef, by_leaf)
