"""Shampoo: gradients between two roots of their covariances."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.attribution import internal
from fsfunc.optim.in_place import fused
from fsfunc.optim.leaves import Mask, Tree, along, local, trainable, zeros_like
from fsfunc.optim.matching import Matched
from fsfunc.optim.matrix.matrices import (
    check_matrices,
    decays,
    laid_as_parameters,
    move_in_place,
)
from fsfunc.optim.matrix.matrix_exchange import MatrixExchange
from fsfunc.optim.matrix.preconditioners import (
    Preconditioning,
    placements_of,
)
from fsfunc.optim.optimizer import (
    Optimizer,
    check_not_negative,
    check_numbers,
    check_params_given,
    described,
)
from fsfunc.optim.schedules import Schedule, rate_at
from fsfunc.sharded.leaf import is_sharded


class ShampooState(NamedTuple):
    """How many updates were made, `Preconditioners` by leaf, and the momentum, if any.

    The momentum is laid out as the parameters are.
    """

    count: int
    preconditioners: Any
    momentum: Any


@described
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
    """Shampoo, the preconditioners of each matrix kept and used by one rank.

    With G the gradient of a block of a matrix, l the learning rate; L and R begin as
    eps I::

        L = b2 L + (1 - b2 or 1) G G'        R = b2 R + (1 - b2 or 1) G' G
        u = L^(-1/4) G R^(-1/4)              v = momentum v + u
        p = p - l weight_decay p - l v

    The roots are of eigenvalues of eps at least, which counts where b2 is below 1.

    Gradients go to the owner of each matrix, and updates come back, in parts, in
    float32 or wider. Owners are balanced by FLOPs.

    Args:
        learning_rate: a number, or ``schedule(count)`` giving one; see `schedules`.
        momentum: not negative; with 0 there is no state for it.
        b2: decay of the covariances, in (0, 1]; with 1 they are sums, as in the paper.
        eps: above 0.
        interval: steps between one taking of the roots and the next; the first step
            takes them.
        block: the most rows and columns of a block; larger matrices are cut into such.
        weight_decay: times the learning rate, what a leaf loses of itself.
        mask: ``mask(path, leaf)`` says which leaves decay; all do without it.

    Returns:
        the optimizer; its state is a `ShampooState`. All leaves with a gradient must be
        matrices, by their global shape. A covariance that is not finite gives updates
        that are not.

    Raises:
        ValueError: a leaf that is no matrix (see `partition`); a number out of its
            range; an update without ``params`` while weights decay, or that somebody
            differentiates; a state laid out for another mesh; a vmap mesh.
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
    check_not_negative(momentum=momentum, weight_decay=weight_decay)
    check_numbers(b2=b2, eps=eps, interval=interval, block=block)
    if not callable(learning_rate):
        check_not_negative(learning_rate=learning_rate)
    if not (0 < b2 <= 1 and eps > 0 and interval >= 1 and block >= 1):
        raise ValueError(
            f"b2 is {b2}, eps {eps}, interval {interval} and block {block}: b2 must be "
            "above 0 and at most 1, eps above 0, and the others at least 1"
        )
    rule = Preconditioning(b2, eps, interval, block)
    functions = _Shampoo(learning_rate, momentum, rule, weight_decay, mask)
    return Optimizer(functions.init, functions.update, prepare=functions.prepare)


@dataclass(frozen=True, eq=False)
class _Shampoo:
    """The functions of such an optimizer."""

    learning_rate: float | Schedule
    momentum: float
    rule: Preconditioning
    weight_decay: float
    mask: Mask | None

    def init(self, params: Tree) -> ShampooState:
        check_matrices(params, "shampoo")
        leaves, treedef = tree.flatten(params, is_sharded)
        active = [i for i, leaf in enumerate(leaves) if trainable(leaf)]
        exchange = MatrixExchange(
            [leaves[i] for i in active], self.rule.cost, "shampoo"
        )
        found: list[Any] = [None] * len(leaves)
        for k, i in enumerate(active):
            found[i] = self.rule.first(leaves[i], exchange, k)
        momentum = zeros_like(params) if self.momentum else None
        return ShampooState(0, tree.unflatten(treedef, found), momentum)

    def update(self, grads: Tree, state: ShampooState, params: Tree = None):
        if self.weight_decay:
            check_params_given(params, "shampoo with weight_decay")
        matched = self._matched(grads, state, grads if params is None else params)
        by_leaf = matched.decays(self.weight_decay, self.mask)
        rate = rate_at(self.learning_rate, state.count)
        ways, preconditioners = self._ways(matched, state)

        def rule(p: Tensor, way: Tensor, *rest: Any) -> list[Tensor]:
            *moments, decay = rest
            v = [self.momentum * v + way for v in moments]
            u = -rate * (v[0] if v else way)
            return [u - rate * decay * p if decays(decay) else u, *v]

        p, _, *moments = matched.columns
        updates, *v = Matched.of(p, ways, *moments).composed(rule, by_leaf)
        nothing = [None] * len(matched.trees[0])
        after = self._after(matched, state, preconditioners, v)
        return matched.restore(updates, nothing), after

    def prepare(self, grads: Tree, state: ShampooState, params: Tree):
        matched = self._matched(grads, state, params)
        by_leaf = matched.decays(self.weight_decay, self.mask)
        rate = rate_at(self.learning_rate, state.count)
        ways, preconditioners = self._ways(matched, state)
        p, _, *moments = matched.columns
        kernel = partial(_step, rate=rate, momentum=self.momentum)
        commit = fused(Matched.of(p, ways, *moments), kernel, by_leaf)

        def finish() -> tuple[Tree, ShampooState]:
            p, *v = commit()
            after = self._after(matched, state, preconditioners, v)
            return matched.restore(p, matched.trees[0]), after

        return finish

    def _matched(self, grads: Tree, state: ShampooState, like: Tree) -> Matched:
        moments = () if state.momentum is None else (state.momentum,)
        matched = Matched.of(like, grads, *moments)
        if matched.differentiated:
            raise ValueError(
                "the update of shampoo has no derivative: its roots have none where "
                "eigenvalues are equal; take ff.sharded_adam or ff.muon"
            )
        nothing = [None] * len(matched.trees[0])
        check_matrices(matched.restore(matched.columns[0], nothing), "shampoo")
        return matched

    def _after(
        self, matched: Matched, state: ShampooState, new: Tree, v: list[Any]
    ) -> ShampooState:
        momentum = matched.restore(v[0], matched.trees[2]) if v else None
        return ShampooState(state.count + 1, new, momentum)

    def _ways(self, matched: Matched, state: ShampooState) -> tuple[list[Any], Tree]:
        """Where each parameter goes, times the rate, and all preconditioners."""
        like = tree.unflatten(matched.treedef, matched.trees[0])
        kept = along(like, matched.treedef, state.preconditioners, "optimizer state")
        leaves, grads, *_ = matched.columns
        wide = torch.float32
        for leaf in leaves:
            wide = torch.promote_types(wide, leaf.dtype)
        with internal(), torch.no_grad():
            where = [placements_of(kept[i]) for i in matched.active]
            exchange = MatrixExchange(leaves, self.rule.cost, "shampoo", given=where)
            refresh = state.count % self.rule.interval == 0

            def precondition(matrices: dict[int, Tensor]) -> dict[int, Tensor]:
                made = {}
                for k, g in matrices.items():
                    i = matched.active[k]
                    made[k], kept[i] = self.rule.step(g, kept[i], refresh)
                return made

            parts = [local(x).to(wide) for x in grads]
            made = exchange.map(parts, precondition)
            ways = laid_as_parameters(matched, made, [1.0] * len(made))
        return ways, tree.unflatten(matched.treedef, kept)


def _step(
    params: list[Tensor],
    ways: list[Tensor],
    momenta: list[Tensor] | tuple[Tensor, ...] = (),
    *,
    rate: Any,
    momentum: float,
    weight_decay: float,
) -> None:
    """Writes one step into parameters and momenta."""
    if momenta:
        torch._foreach_mul_(momenta, momentum)
        torch._foreach_add_(momenta, ways)
    move_in_place(params, list(momenta or ways), rate=rate, weight_decay=weight_decay)
