"""Gradient descent with momentum, one fused pass over what the rank holds."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc.optim.element_rules import elementwise
from fsfunc.optim.leaves import Mask, Tree, zeros_like
from fsfunc.optim.matching import decayed
from fsfunc.optim.optimizer import (
    Optimizer,
    check_not_negative,
    described,
)
from fsfunc.optim.schedules import Schedule, rate_at


class SgdState(NamedTuple):
    """How many updates were made, and the momentum: None where there is none."""

    count: int | Tensor
    momentum: Any


@described
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

    def first(count: int | Tensor) -> bool:
        # Zero momentum gives the same first step; only dampening needs to know of it.
        return bool(dampening) and bool(count == 0)

    def rule(state: SgdState):
        rate, starts = rate_at(learning_rate, state.count), first(state.count)

        def step(p: Tensor, g: Tensor, *rest: Any):
            *moments, decay = rest
            d = decayed(g.to(p.dtype), p, decay)
            if not moments:
                return (-rate * d,)
            v = d.clone() if starts else momentum * moments[0] + (1 - dampening) * d
            return -rate * (d + momentum * v if nesterov else v), v

        return step

    def kernel(state: SgdState):
        return partial(
            _fused,
            lr=rate_at(learning_rate, state.count),
            momentum=momentum,
            dampening=dampening,
            nesterov=nesterov,
            is_first_step=first(state.count),
        )

    return elementwise(
        "sgd with weight_decay",
        init,
        moments=lambda state: () if state.momentum is None else (state.momentum,),
        after=lambda state, velocity=None: SgdState(state.count + 1, velocity),
        rule=rule,
        kernel=kernel,
        weight_decay=weight_decay,
        mask=mask,
    )


def _fused(
    params: list[Tensor],
    grads: list[Tensor],
    momenta: tuple[Tensor, ...] | list[Tensor] = (),
    **how: Any,
) -> None:
    """Writes one step into params and momenta, dense and on one device, in one pass."""
    torch._fused_sgd_(params, grads, momenta, maximize=False, **how)
