"""Prediction of parameters some updates ahead, by their momentum."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fsfunc.optim import AdamState, SgdState
from fsfunc.optim.leaves import Tree
from fsfunc.optim.matching import Matched
from fsfunc.optim.optimizer import check_not_negative
from fsfunc.optim.schedules import Schedule, rate_at
from fsfunc.pipelining.stage_updates import Predict

__all__ = ["momentum_prediction"]


def momentum_prediction(
    learning_rate: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> Predict:
    """A ``predict`` for `pipeline`: as if every update to come were like the last.

    With s the updates ahead, of ``sgd`` with momentum ``p - s l v``; of
    ``sharded_adam`` ``p - s l m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)``, of t
    updates made. Weight decay is left out. Before the first update nothing changes.

    Args:
        learning_rate: the optimizer's: a number, or ``schedule(count)``.
        b1, b2, eps: those of ``sharded_adam``; ``sgd`` has no use for them.

    Returns:
        ``predict(params, opt_state, updates) -> params``. The state of ``sgd`` or of
        ``sharded_adam`` is found in it, also in that of a ``chain``.

    Raises:
        ValueError: a negative number; later, a state without momentum, or with several.

    Cost: one pass over the rank's parameters, and a copy of them, for each microbatch.

    Source: Chen et al., SpecTrain, 2018.

    >>> import torch, fsfunc as ff
    >>> optimizer = ff.sgd(0.1, momentum=0.5)
    >>> w = torch.ones(2)
    >>> w, state = optimizer.apply(torch.ones(2), optimizer.init(w), w)
    >>> w, ff.momentum_prediction(0.1)(w, state, 2)
    (tensor([0.9000, 0.9000]), tensor([0.7000, 0.7000]))
    """
    check_not_negative(b1=b1, b2=b2, eps=eps)
    if not callable(learning_rate):
        check_not_negative(learning_rate=learning_rate)

    def predict(params: Tree, opt_state: Any, updates: int) -> Tree:
        state = _moments(opt_state)
        count, rate = state.count, rate_at(learning_rate, state.count)
        # Before the first update moments are 0, and so is what they would divide by.
        count = count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
        # A leaf without moments takes no part: they stand where gradients do.
        if isinstance(state, SgdState):
            matched = Matched.of(params, state.momentum)
        else:
            matched = Matched.of(params, state.mu, state.nu)

        def rule(p: Tensor, m: Tensor, *rest: Any):
            *squares, _ = rest
            if not squares:
                return (p - (updates * rate) * m,)
            (v,) = squares
            scale = v.sqrt() / (1 - b2**count) ** 0.5 + eps
            far = updates * rate / (1 - b1**count)
            return p - far * (m / scale).to(p.dtype), v

        return matched.composed(rule, [0.0] * len(matched.active), as_params=True)[0]

    return predict


def _moments(opt_state: Any) -> SgdState | AdamState:
    """The one state with momentum among the states of a chain."""
    found, todo = [], [opt_state]
    while todo:
        state = todo.pop()
        if isinstance(state, AdamState) or (
            isinstance(state, SgdState) and state.momentum is not None
        ):
            found.append(state)
        elif isinstance(state, tuple):
            todo += state
    if len(found) != 1:
        raise ValueError(
            f"the optimizer's state has {len(found)} states with momentum: a "
            "prediction needs one, of sgd(momentum=) or sharded_adam; write another "
            "predict=(params, opt_state, updates) -> params"
        )
    return found[0]
