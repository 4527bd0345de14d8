"""Adam with decoupled weight decay (AdamW).

`adam_rule` is its equation and kernel as an `ElementRule`, which runs over the flat
buffers of whatever this rank holds: one fused pass. `layerwise.lamb` uses it too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc.optim.coded_moments import MEAN, SQUARE, Codes, codec_of
from fsfunc.optim.element_rules import (
    Count,
    ElementRule,
    Kernel,
    Numbers,
    elementwise_optimizer,
)
from fsfunc.optim.leaves import Mask
from fsfunc.optim.matching import Decay, has_decay
from fsfunc.optim.optimizer import Optimizer, optimizer_factory
from fsfunc.optim.schedules import Schedule, rate_at
from fsfunc.tree.types import PyTree


class AdamState(NamedTuple):
    """The count of updates, and the moments: mean and mean square of gradients.

    ``count`` is a plain number, so schedules and checkpoints read it without waiting
    for a device. A 0-dim tensor is taken too, as where a skipped step must not branch.
    ``mu`` and ``nu`` are trees like the parameters, in the same layout, with None for
    leaves that have no derivative.
    """

    count: int | Tensor
    mu: PyTree
    nu: PyTree


class ScaledAdamState(NamedTuple):
    """An `AdamState` whose float16 moments are ``scale`` times what they stand for.

    ``scale`` is a plain number, the same on every rank; ``good_steps`` counts the steps
    since it last changed.
    """

    count: int | Tensor
    mu: PyTree
    nu: PyTree
    scale: float
    good_steps: int


class CodedAdamState(NamedTuple):
    """An `AdamState` with moments in 8 bits.

    ``places`` is a checksum of the layouts of the parameters that they were made for. A
    block's scale is of what one rank holds side by side, so they fit no other mesh.
    """

    count: int
    mu: Codes
    nu: Codes
    places: int

    coders = MEAN, SQUARE  # one for each moment: a mean square has no sign


@optimizer_factory
def sharded_adam(
    learning_rate: float | Schedule = 1e-3,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    mask: Mask | None = None,
    moment_dtype: torch.dtype | None = None,
) -> Optimizer:
    """Makes AdamW, with the defaults of ``torch.optim.AdamW``, for any leaves.

    With g the gradient, t = count + 1 and l the learning rate::

        m = b1 m + (1 - b1) g                v = b2 v + (1 - b2) g^2
        p = p - l (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay p)

    Args:
        learning_rate: a number, or a function of the count; see `schedules`.
        b1: decay of the mean of gradients, in [0, 1).
        b2: decay of their mean square, in [0, 1).
        eps: added to the denominator.
        weight_decay: the share of itself that a leaf loses in a step, times the
            learning rate.
        mask: ``mask(path, leaf)`` returns whether a leaf decays; the shape of a sharded
            leaf is its global one. By default all decay.
        moment_dtype: of mu and nu. By default each parameter's, with a warning where
            that has too few bits for a mean square. If it differs from the parameter's,
            the pass runs on copies in the wider of the two. ``torch.float16`` moments
            have a scale (`ScaledAdamState`). ``torch.uint8`` stands for 8 bits with a
            scale for each 256 (`CodedAdamState`). Those lie side by side on one rank,
            so they load on the same mesh and zero alone.

    Returns:
        the optimizer; its state is an `AdamState`. ``apply`` computes the bits of
        ``torch.optim.AdamW(fused=True)``. ``update`` is made of single operations that
        differentiate, and agrees with that to rounding. Gradients of another dtype are
        cast.

    Raises:
        ValueError: a negative learning rate, eps or weight decay; a beta outside
            [0, 1); an update without ``params`` while weights decay; codes of 8 bits
            made for parameters that lay in another way.
        RuntimeError: float16 moments overflow at a scale of 1; an update with codes
            that is differentiated.
        TreeMismatch: gradients or state do not fit the parameters; names the path.

    Cost: no communication. One fused call for each device, dtype and decay, over the
    flat buffers of the leaves' units; in place under `donate`, else 3 fresh tensors of
    the size of the rank's parameters. A buffer whose leaves decay differently is
    visited leaf by leaf, in the same call. Moments are 8 bytes a float32 parameter, 4
    in 16 bits, 2 1/32 in 8 (each buffer rounded up to 256 elements). In float16: a pass
    more, one pmax of one number, and one wait for it. In 8 bits: some twenty short
    operations on 131072 elements at a time, which stay in a CPU's cache.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 2.

    >>> params = {"w": torch.ones(2, 2), "b": torch.ones(2)}
    >>> optimizer = sharded_adam(0.1, mask=lambda path, leaf: leaf.ndim > 1)
    >>> state = optimizer.init(params)
    >>> grads = {"w": torch.zeros(2, 2), "b": torch.ones(2)}
    >>> params, state = optimizer.apply(grads, state, params)
    >>> params["b"], params["w"][0], state.count
    (tensor([0.9000, 0.9000]), tensor([0.9990, 0.9990]), 1)
    """
    rule = adam_rule(learning_rate, b1, b2, eps, weight_decay, mask)
    return with_moments(rule, moment_dtype)


def with_moments(rule: ElementRule, moment_dtype: torch.dtype | None) -> Optimizer:
    """Makes the optimizer of Adam's equation, which stores moments in that dtype."""
    return elementwise_optimizer(
        rule, codec_of(moment_dtype, CodedAdamState, ScaledAdamState)
    )


def adam_rule(
    learning_rate: float | Schedule,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    mask: Mask | None,
) -> ElementRule:
    """Returns the equation and the kernel of `sharded_adam`."""

    def numbers(count: Count) -> Numbers:
        t = count + 1
        # The bias corrections of both moments: Adam, section 3.
        return -rate_at(learning_rate, count), 1 - b1**t, (1 - b2**t) ** 0.5

    def equation(
        numbers: Numbers, p: Tensor, g: Tensor, m: Tensor, v: Tensor, decay: Decay
    ) -> tuple[Callable[[], Tensor], Tensor, Tensor]:
        minus_rate, m_correction, v_correction_root = numbers
        m = m.lerp(g, 1 - b1)
        v = v * b2 + (1 - b2) * g * g

        def update() -> Tensor:
            denominator = v.sqrt() / v_correction_root + eps
            u = m / denominator * (minus_rate / m_correction)
            return u + minus_rate * decay * p if has_decay(decay) else u

        return update, m, v

    def kernel(count: Count) -> Kernel:
        rate = rate_at(learning_rate, count)
        return partial(fused_adam, count=count, lr=rate, beta1=b1, beta2=b2, eps=eps)

    return ElementRule(
        name="sharded_adam",
        state=AdamState,
        moments=2,
        numbers=numbers,
        equation=equation,
        kernel=kernel,
        weight_decay=weight_decay,
        mask=mask,
        moment_decay=b2,
    )


def fused_adam(
    params: list[Tensor],
    grads: list[Tensor],
    mu: list[Tensor],
    nu: list[Tensor],
    *,
    count: Count,
    **options: Any,
) -> None:
    """Writes one step into params, mu and nu, dense and on one device, in one pass.

    Args:
        count: of the updates before this one.
        options: of ``torch._fused_adamw_``, which counts steps in a tensor for each
            parameter.
    """
    device, step = params[0].device, count + 1
    if isinstance(step, Tensor):
        step = step.to(device, torch.float32)
    else:  # filled on the device: a copy from the host would wait for it
        step = torch.full((), step, dtype=torch.float32, device=device)
    steps = [step] * len(params)
    torch._fused_adamw_(
        params, grads, mu, nu, [], steps, amsgrad=False, maximize=False, **options
    )
