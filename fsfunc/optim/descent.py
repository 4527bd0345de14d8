"""SGD, with a momentum or without one, and Lion, which takes the signs of its own.

Both are an equation as an `ElementRule`; SGD has a fused kernel of torch's too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc.optim.coded_moments import MEAN, Codes, codec_of
from fsfunc.optim.element_rules import (
    Codec,
    Count,
    ElementRule,
    Kernel,
    Numbers,
    cache_sized_chunks,
    elementwise_optimizer,
)
from fsfunc.optim.leaves import Mask
from fsfunc.optim.matching import Decay, add_decay, has_decay
from fsfunc.optim.optimizer import Optimizer, optimizer_factory
from fsfunc.optim.schedules import Schedule, rate_at
from fsfunc.tree.types import PyTree


class SgdState(NamedTuple):
    """The count of updates, and the momentum: None where there is none."""

    count: int | Tensor
    momentum: PyTree


@optimizer_factory
def sgd(
    learning_rate: float | Schedule,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    dampening: float = 0.0,
    mask: Mask | None = None,
) -> Optimizer:
    """Makes SGD as ``torch.optim.SGD`` does it, for whole or sharded leaves.

    With l the learning rate; at the first step, v = d::

        d = g + weight_decay p
        v = momentum v + (1 - dampening) d
        p = p - l (d + momentum v  if nesterov else  v)

    Args:
        learning_rate: a number, or a function of the count; see `schedules`.
        momentum: not negative; with 0 there is no state but the count, and p = p - l d.
        nesterov: look ahead along the momentum.
        weight_decay: added to the gradient, times the parameter: an L2 penalty.
        dampening: what the momentum leaves out of a gradient after the first.
        mask: ``mask(path, leaf)`` returns whether a leaf decays; by default all do.

    Returns:
        the optimizer; its state is an `SgdState`. ``apply`` gives the bits of
        ``torch.optim.SGD(fused=True)`` (on a CPU, where that is wrong in 16 bits, of a
        step in float32, rounded); ``update`` is made of single operations that
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
    if nesterov and (not momentum or dampening):
        raise ValueError(
            f"nesterov needs momentum and no dampening; momentum is {momentum} and "
            f"dampening is {dampening}"
        )

    def is_first(count: Count) -> bool:
        # Without dampening a momentum of 0 gives the same first step, so nobody asks:
        # a count that is a tensor would have to be read.
        return bool(dampening) and bool(count == 0)

    def numbers(count: Count) -> Numbers:
        return rate_at(learning_rate, count), is_first(count)

    def equation(
        numbers: Numbers, p: Tensor, g: Tensor, *moments_and_decay: Any
    ) -> Sequence[Any]:
        (rate, starts), (*moments, decay) = numbers, moments_and_decay
        d = add_decay(g, p, decay)
        if not moments:
            return (lambda: -rate * d,)
        v = d.clone() if starts else momentum * moments[0] + (1 - dampening) * d
        return lambda: -rate * (d + momentum * v if nesterov else v), v

    def kernel(count: Count) -> Kernel:
        return partial(
            _fused,
            lr=rate_at(learning_rate, count),
            momentum=momentum,
            dampening=dampening,
            nesterov=nesterov,
            is_first_step=is_first(count),
        )

    rule = ElementRule(
        name="sgd with weight_decay",
        state=SgdState,
        moments=1 if momentum else 0,
        numbers=numbers,
        equation=equation,
        kernel=kernel,
        weight_decay=weight_decay,
        mask=mask,
    )
    return elementwise_optimizer(rule, Codec())


def _fused(
    params: list[Tensor],
    grads: list[Tensor],
    momenta: tuple[Tensor, ...] | list[Tensor] = (),
    **options: Any,
) -> None:
    """Writes one step into params and momenta, dense and on one device, in one pass."""
    step = partial(torch._fused_sgd_, maximize=False, **options)
    if not is_misread(params[0]):
        return step(params, grads, momenta)
    columns = (params, grads, momenta) if momenta else (params, grads)
    for row in zip(*columns, strict=True):
        for piece in cache_sized_chunks(row):
            p, g, *m = (x.float() for x in piece)
            step([p], [g], m)
            for x, new in zip((piece[0], *piece[2:]), (p, *m), strict=True):
                x.copy_(new)


def is_misread(x: Tensor) -> bool:
    """Returns whether torch's fused SGD (2.13) would give wrong numbers of ``x``.

    Its kernel for the CPU takes the halves of a vector of 16 bits from wrong places,
    and reads momenta past their end.
    """
    return x.device.type == "cpu" and x.dtype.itemsize < 4


class LionState(NamedTuple):
    """The count of updates, and the momentum, a tree like the parameters."""

    count: int | Tensor
    mu: PyTree


class CodedLionState(NamedTuple):
    """A `LionState` with the momentum in 8 bits, as in `CodedAdamState`."""

    count: int
    mu: Codes
    places: int

    coders = (MEAN,)


@optimizer_factory
def lion(
    learning_rate: float | Schedule = 1e-4,
    *,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 1e-3,
    mask: Mask | None = None,
    moment_dtype: torch.dtype | None = None,
) -> Optimizer:
    """Makes Lion, with the defaults of optax, for whole or sharded leaves.

    With g the gradient and l the learning rate::

        p = p - l (sign(b1 m + (1 - b1) g) + weight_decay p)
        m = b2 m + (1 - b2) g

    Args:
        learning_rate: a number, or a function of the count; see `schedules`.
        b1: weight of the momentum in an update, in [0, 1).
        b2: decay of the momentum, in [0, 1).
        weight_decay: the share of itself that a leaf loses, times the learning rate.
        mask: ``mask(path, leaf)`` returns whether a leaf decays; by default all do.
        moment_dtype: of mu; that of each parameter without it; ``torch.uint8`` stands
            for codes of 8 bits, as in `sharded_adam`. Here float16 has no scale: with
            it, and where a parameter's dtype has too few bits, ``init`` warns.

    Returns:
        the optimizer; its state is a `LionState`, half of Adam's.

    Raises:
        ValueError: a negative learning rate or weight decay; a beta outside [0, 1); an
            update without ``params`` while weights decay.
        TreeMismatch: gradients or state do not fit the parameters; names the path.

    Cost: no communication. A few passes over the flat buffers of the leaves' units, in
    place under `donate`, beside one fresh tensor of the size of the rank's parameters;
    under `jit` one pass.

    Source: Chen et al., Symbolic Discovery of Optimization Algorithms, algorithm 2.

    >>> optimizer = lion(0.1, weight_decay=0.0)
    >>> w = torch.ones(3)
    >>> w, state = optimizer.apply(torch.tensor([5.0, 0.0, -0.1]), optimizer.init(w), w)
    >>> w, state.mu
    (tensor([0.9000, 1.0000, 1.1000]), tensor([ 0.0500,  0.0000, -0.0010]))
    """

    def numbers(count: Count) -> Numbers:
        return (rate_at(learning_rate, count),)

    def equation(
        numbers: Numbers, p: Tensor, g: Tensor, m: Tensor, decay: Decay
    ) -> tuple[Callable[[], Tensor], Tensor]:
        (rate,) = numbers

        def update() -> Tensor:
            u = m.lerp(g, 1 - b1).sign()
            return -rate * (u + decay * p if has_decay(decay) else u)

        return update, m.lerp(g, 1 - b2)

    rule = ElementRule(
        name="lion",
        state=LionState,
        moments=1,
        numbers=numbers,
        equation=equation,
        weight_decay=weight_decay,
        mask=mask,
        moment_decay=b2,
    )
    return elementwise_optimizer(rule, codec_of(moment_dtype, CodedLionState))
