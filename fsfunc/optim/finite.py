"""Steps that all ranks skip where a gradient is not finite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc.core.frames import composable
from fsfunc.optim.leaves import Tree, map_flat
from fsfunc.optim.norms import all_finite, holds
from fsfunc.optim.optimizer import Optimizer, State, check_takes_plainly, described

__all__ = ["ApplyIfFiniteState", "Skipping", "apply_if_finite"]


@dataclass(frozen=True, eq=False)
class Skipping:
    """An optimizer around another, whose step may be skipped."""

    optimizer: Optimizer

    inner = "inner"  # the field of the state that has that of the optimizer within

    def counted(self, grads: Tree, state: Any) -> tuple[bool, Any]:
        """True if all ranks make the step, and the state that has counted it."""
        raise NotImplementedError

    def update(self, grads: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        makes, after = self.counted(grads, state)
        if not makes:
            return map_flat(_zeros, grads, rest=None), after
        given = getattr(state, self.inner)
        updates, inner = self.optimizer.update(grads, given, params)
        return updates, self._with(after, inner)

    def prepare(self, grads: Tree, state: Any, params: Tree):
        makes, after = self.counted(grads, state)
        if not makes:
            return lambda: (params, after)
        commit = self.optimizer.prepare(grads, getattr(state, self.inner), params)

        def finish() -> tuple[Tree, Any]:
            params, inner = commit()
            return params, self._with(after, inner)

        return finish

    def _with(self, state: Any, inner: State) -> Any:
        return state._replace(**{self.inner: inner})


def _zeros(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(t) for t in tensors]


class ApplyIfFiniteState(NamedTuple):
    """The counts of steps, in a row and in all, with gradients that are not finite.

    ``last_finite``: whether those of the last step were; ``inner_state``: of the
    optimizer.
    """

    notfinite_count: int
    last_finite: bool
    total_notfinite: int
    inner_state: Any


@described
def apply_if_finite(optimizer: Optimizer, max_consecutive_errors: int = 5) -> Optimizer:
    """``optimizer``, which makes no step where a gradient is infinite or NaN.

    The parameters and the state of ``optimizer`` then stay as they are, on every rank:
    of the whole mesh, whichever of them has such an element. As optax's; the first
    gradients after ``max_consecutive_errors`` bad ones in a row are applied, whatever
    they are, so that training that went wrong shows it.

    Args:
        optimizer: what makes the steps; with `chain`, also what clips.
        max_consecutive_errors: how many steps in a row may be skipped, 0 or more.

    Returns:
        the optimizer; its state is an `ApplyIfFiniteState`. The update of a skipped
        step is 0.

    Raises:
        ValueError: a negative number of errors; an update under ``vmap``, where each
            sample would skip for itself; a `loss_scale` within, which skips by itself.

    Cost: a pass over the gradients, and one pmax of one number over all axes of the
    mesh, before anything is written. Nothing is copied. The number is read on the host,
    which decides, so a device is waited for once a step, after the backward pass. A
    plan is that of a step that is made.

    >>> from fsfunc.optim.descent import sgd
    >>> optimizer = apply_if_finite(sgd(1.0), 2)
    >>> w, state = torch.ones(2), optimizer.init(torch.ones(2))
    >>> for g in (torch.tensor([float("inf"), 1.0]), torch.ones(2)):
    ...     w, state = optimizer.apply(g, state, w)
    >>> w, state.notfinite_count, state.total_notfinite, state.inner_state.count
    (tensor([0., 0.]), 0, 1, 1)
    """
    check_takes_plainly("apply_if_finite", optimizer)
    if not max_consecutive_errors >= 0:
        raise ValueError(
            f"max_consecutive_errors is {max_consecutive_errors}: it must be 0 or more"
        )

    return Optimizer.of(_IfFinite(optimizer, max_consecutive_errors))


@dataclass(frozen=True, eq=False)
class _IfFinite(Skipping):
    most: int

    inner = "inner_state"

    def init(self, params: Tree) -> ApplyIfFiniteState:
        return ApplyIfFiniteState(0, True, 0, self.optimizer.init(params))

    def counted(
        self, grads: Tree, state: ApplyIfFiniteState
    ) -> tuple[bool, ApplyIfFiniteState]:
        finite = _read(all_finite(grads))
        row = 0 if finite else state.notfinite_count + 1
        total = state.total_notfinite + (not finite)
        after = ApplyIfFiniteState(row, finite, total, state.inner_state)
        return finite or row > self.most, after


def _read(flag: Tensor) -> bool:
    try:
        return holds(flag)
    except RuntimeError as error:
        if not composable():
            raise
        raise ValueError(
            "apply_if_finite under vmap: each sample would skip for itself; skip by "
            "torch.where(ff.all_finite(grads), ...) there"
        ) from error
