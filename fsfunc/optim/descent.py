"""Gradient descent with momentum, one fused pass over what the rank holds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from fsfunc.optim import kernels
from fsfunc.optim.base import (
    Optimizer,
    apply_updates,
    check_not_negative,
    check_params_given,
    decayed,
)
from fsfunc.optim.leafwise import Mask, Tree, zeros_like
from fsfunc.optim.matching import Matched
from fsfunc.optim.schedules import Schedule, rate_at


class SgdState(NamedTuple):
    """How many updates were made, and the momentum: None where there is none."""

    count: int | Tensor
    momentum: Any


def sgd(
    learning_rate: float | Schedule,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    dampening: float = 0.0,
    mask: Mask | None = None,
) -> Optimizer:
    """SGD as ``torch.optim.SGD`` does it, over whole or sharded leaves.

    With l the learning rate; at the first step, v = d::

        d = g + weight_decay p
        v = momentum v + (1 - dampening) d
        p = p - l (d + momentum v  if nesterov else  v)

    Args:
        learning_rate: a number, or ``schedule(count)`` giving one; see `schedules`.
        momentum: not negative; with 0 there is no state but the count, and p = p - l d.
        nesterov: look ahead along the momentum.
        weight_decay: added to the gradient, times the parameter: an L2 penalty.
        dampening: what the momentum leaves out of a gradient after the first.
        mask: ``mask(path, leaf)`` says which leaves decay; all do without it.

    Returns:
        the optimizer; its state is an `SgdState`. ``apply`` gives the bits of
        ``torch.optim.SGD(fused=True)``; ``update`` is made of single operations that
        differentiate, and agrees to rounding.

    Raises:
        ValueError: a negative number; nesterov without momentum or with dampening; an
            update without ``params`` while weights decay.
        TreeMismatch: gradients or state do not fit the parameters; names the path.

    Cost: no communication. One fused call for each device, dtype and decay; in place
    under `donate`, else one or, with momentum, two fresh tensors of the size of the
    rank's parameters.

    Source: Sutskever et al., On the importance of initialization and momentum, 2013.

    >>> import torch
    >>> optimizer = sgd(0.1, momentum=0.9)
    >>> w, state = torch.ones(2), optimizer.init(torch.ones(2))
    >>> for _ in range(2):
    ...     w, state = optimizer.apply(torch.ones(2), state, w)
    >>> w, state.momentum
    (tensor([0.7100, 0.7100]), tensor([1.9000, 1.9000]))
    """
    check_not_negative(
        momentum=momentum, weight_decay=weight_decay, dampening=dampening
    )
    if not callable(learning_rate):
        check_not_negative(learning_rate=learning_rate)
    if nesterov and (not momentum or dampening):
        raise ValueError(
            f"nesterov needs momentum and no dampening; momentum is {momentum} and "
            f"dampening is {dampening}"
        )

    def init(params: Tree) -> SgdState:
        return SgdState(0, zeros_like(params) if momentum else None)

    def update(
        grads: Tree, state: SgdState, params: Tree = None
    ) -> tuple[Tree, SgdState]:
        if weight_decay:
            check_params_given(params, "sgd with weight_decay")
        like = grads if params is None else params
        matched = Matched.of(like, grads, *_moments(state))
        rate, first = rate_at(learning_rate, state.count), _first(state.count)

        def rule(p: Tensor, g: Tensor, *rest: Any):
            *moments, decay = rest
            d = decayed(g.to(p.dtype), p, decay)
            if not moments:
                return (-rate * d,)
            v = d.clone() if first else momentum * moments[0] + (1 - dampening) * d
            return -rate * (d + momentum * v if nesterov else v), v

        updates, *moments = matched.composed(rule, matched.decays(weight_decay, mask))
        return updates, SgdState(state.count + 1, *(moments or [None]))

    def prepare(
        grads: Tree, state: SgdState, params: Tree
    ) -> Callable[[], tuple[Tree, SgdState]]:
        matched = Matched.of(params, grads, *_moments(state))
        if matched.differentiated:
            updates, state = update(grads, state, params)
            return lambda: (apply_updates(params, updates), state)
        kernel = partial(
            _fused,
            learning_rate=rate_at(learning_rate, state.count),
            momentum=momentum,
            dampening=dampening,
            nesterov=nesterov,
            first=_first(state.count),
        )
        commit = matched.fused(kernel, matched.decays(weight_decay, mask))

        def finish() -> tuple[Tree, SgdState]:
            params, *moments = commit()
            return params, SgdState(state.count + 1, *(moments or [None]))

        return finish

    def _first(count: int | Tensor) -> bool:
        # Zero momentum gives the same first step; only dampening needs to know of it.
        return bool(dampening) and bool(count == 0)

    return Optimizer(init, update, prepare=prepare)


def _moments(state: SgdState) -> list[Tree]:
    return [] if state.momentum is None else [state.momentum]


def _fused(params: Any, grads: Any, momenta: Any = (), **how: Any) -> None:
    kernels.fused_sgd(params, grads, momenta, **how)
