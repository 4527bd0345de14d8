"""Optimizers that treat each element by itself, made of a rule and a fused kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fsfunc.optim.in_place import fused
from fsfunc.optim.leaves import Mask, Tree
from fsfunc.optim.matching import Matched, Rule
from fsfunc.optim.optimizer import (
    Init,
    Optimizer,
    State,
    apply_updates,
    check_params_given,
)

__all__ = ["elementwise"]


def elementwise(
    name: str,
    init: Init,
    *,
    moments: Callable[[State], Sequence[Tree]],
    after: Callable[..., State],
    rule: Callable[[Any], Rule],
    kernel: Callable[[Any], Callable[..., None]],
    weight_decay: float = 0.0,
    mask: Mask | None = None,
    least: torch.dtype | None = None,
) -> Optimizer:
    """An optimizer that treats each element by itself.

    Args:
        name: what errors call it.
        moments: the trees in its state, which are like the parameters.
        after: ``after(state, *moments)``: its next state.
        rule: ``rule(state)(param, grad, *moments, decay) -> (update, *moments)``, made
            of operations that differentiate; all are tensors but ``decay``, which may
            be a number.
        kernel: ``kernel(state)(params, grads, *moments, weight_decay=)`` writes the
            same step into lists of dense tensors, in one pass over memory.
        weight_decay, mask: which decay a leaf has.
        least: the kernel's tensors are copies of this dtype, where theirs is narrower.
    """

    def update(grads: Tree, state: State, params: Tree = None) -> tuple[Tree, State]:
        if weight_decay:
            check_params_given(params, name)
        like = grads if params is None else params
        matched = Matched.of(like, grads, *moments(state))
        decays = matched.decays(weight_decay, mask)
        updates, *new = matched.composed(rule(state), decays)
        return updates, after(state, *new)

    def prepare(
        grads: Tree, state: State, params: Tree
    ) -> Callable[[], tuple[Tree, State]]:
        matched = Matched.of(params, grads, *moments(state))
        if matched.differentiated:
            updates, state = update(grads, state, params)
            return lambda: (apply_updates(params, updates), state)
        decays = matched.decays(weight_decay, mask)
        commit = fused(matched, kernel(state), decays, least=least)

        def finish() -> tuple[Tree, State]:
            params, *new = commit()
            return params, after(state, *new)

        return finish

    return Optimizer(init, update, prepare=prepare, elementwise=True)
