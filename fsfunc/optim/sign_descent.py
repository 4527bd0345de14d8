"""Lion: the sign of a momentum, one fused pass over whatever the rank holds."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc.optim.element_rules import elementwise
from fsfunc.optim.leaves import Mask, Tree, zeros_like
from fsfunc.optim.matching import Decay
from fsfunc.optim.optimizer import (
    Optimizer,
    check_fractions,
    check_not_negative,
    described,
)
from fsfunc.optim.schedules import Schedule, rate_at


class LionState(NamedTuple):
    """How many updates were made, and the momentum, a tree like the parameters."""

    count: int | Tensor
    mu: Any


@described
def lion(
    learning_rate: float | Schedule = 1e-4,
    *,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 1e-3,
    mask: Mask | None = None,
    moment_dtype: torch.dtype | None = None,
) -> Optimizer:
    """Lion, with the defaults of optax, over whole or sharded leaves.

    With g the gradient and l the learning rate::

        p = p - l (sign(b1 m + (1 - b1) g) + weight_decay p)
        m = b2 m + (1 - b2) g

    Args:
        learning_rate: a number, or ``schedule(count)`` giving one; see `schedules`.
        b1: weight of the momentum in an update, in [0, 1).
        b2: decay of the momentum, in [0, 1).
        weight_decay: times the learning rate, what a leaf loses of itself.
        mask: ``mask(path, leaf)`` says which leaves decay; all do without it.
        moment_dtype: of mu; that of each parameter without it.

    Returns:
        the optimizer; its state is a `LionState`, half of Adam's.

    Raises:
        ValueError: a negative learning rate or weight decay; a beta outside [0, 1); an
            update without ``params`` while weights decay.
        TreeMismatch: gradients or state do not fit the parameters; names the path.

    Cost: no communication. A few passes over the flat buffers of the leaves' units, in
    place under `donate`, beside one fresh tensor of the size of the rank's parameters.

    Source: Chen et al., Symbolic Discovery of Optimization Algorithms, algorithm 2.

    >>> optimizer = lion(0.1, weight_decay=0.0)
    >>> w = torch.ones(3)
    >>> w, state = optimizer.apply(torch.tensor([5.0, 0.0, -0.1]), optimizer.init(w), w)
    >>> w, state.mu
    (tensor([0.9000, 1.0000, 1.1000]), tensor([ 0.0500,  0.0000, -0.0010]))
    """
    check_not_negative(weight_decay=weight_decay)
    if not callable(learning_rate):
        check_not_negative(learning_rate=learning_rate)
    check_fractions(b1=b1, b2=b2)

    def init(params: Tree) -> LionState:
        return LionState(0, zeros_like(params, moment_dtype))

    def rule(state: LionState):
        rate = rate_at(learning_rate, state.count)

        def step(p: Tensor, g: Tensor, m: Tensor, decay: Decay):
            dtype = torch.promote_types(p.dtype, m.dtype)
            p, g, mean = (x.to(dtype) for x in (p, g, m))
            u = mean.lerp(g, 1 - b1).sign()
            if isinstance(decay, Tensor) or decay:
                u = u + decay * p
            return -rate * u, mean.lerp(g, 1 - b2).to(m.dtype)

        return step

    def kernel(state: LionState):
        return partial(_fused, lr=rate_at(learning_rate, state.count), b1=b1, b2=b2)

    return elementwise(
        "lion",
        init,
        moments=lambda state: (state.mu,),
        after=lambda state, mu: LionState(state.count + 1, mu),
        rule=rule,
        kernel=kernel,
        weight_decay=weight_decay,
        mask=mask,
    )


def _fused(
    params: list[Tensor],
    grads: list[Tensor],
    mu: list[Tensor],
    *,
    lr: float | Tensor,
    b1: float,
    b2: float,
    weight_decay: float,
) -> None:
    """Writes one step into params and mu."""
    signs = torch._foreach_lerp(mu, grads, 1 - b1)
    torch._foreach_sign_(signs)
    torch._foreach_mul_(signs, lr)
    if weight_decay:
        torch._foreach_mul_(params, 1 - lr * weight_decay)
    torch._foreach_sub_(params, signs)
    torch._foreach_lerp_(mu, grads, 1 - b2)
