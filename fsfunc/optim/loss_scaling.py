"""Dynamic loss scaling: gradients in float16 do not vanish, overflows are skipped."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fsfunc.core.frames import Interpretation, frame, inside
from fsfunc.core.outcomes import GradientCall, Outcome
from fsfunc.optim.arguments import check_not_negative
from fsfunc.optim.finite import Skipping
from fsfunc.optim.leaves import Tree
from fsfunc.optim.norms import all_finite, holds
from fsfunc.optim.optimizer import Optimizer, Run, State, described


class LossScaleState(NamedTuple):
    """By what the next loss is multiplied, and what the optimizer within keeps.

    ``scale`` is a plain number, the same on every rank; ``good_steps`` counts the steps
    since it last changed; ``skipped`` counts those that were not made.
    """

    scale: float
    good_steps: int
    skipped: int
    inner: State


@described
def loss_scale(
    optimizer: Optimizer,
    initial: float = 2.0**16,
    *,
    growth: float = 2.0,
    backoff: float = 0.5,
    interval: int = 2000,
    minimum: float = 1e-4,
) -> Optimizer:
    """``optimizer`` whose train step scales its loss, and skips what overflows.

    The backward starts from the scale, and the gradients are divided by it in float32:
    they are those of the loss, but what float16 would lose is there (by parameters in
    float16 too, whose gradients then come in float32: see `master_weights`). Where one
    element on one rank is not finite, no rank makes the step, and all take a smaller
    scale; after ``interval`` good steps in a row all take a larger one.

    Gradients that a step takes by itself, without ``optimizer(grad_fn)``, are not
    scaled, and are right as they are; a step with infinite ones is skipped too.

    Args:
        optimizer: what makes the steps. Clipping sees the gradients of the loss, in
            here as in a chain around.
        initial: the first scale.
        growth: of the scale, above 1. Powers of 2 change no bit of a gradient.
        backoff: of the scale after an overflow, between 0 and 1.
        interval: steps without overflow before the scale grows.
        minimum: a scale that overflows and would fall below it raises.

    Returns:
        the optimizer; its state is a `LossScaleState`.

    Raises:
        ValueError: a number out of its range.
        FloatingPointError: gradients overflow at the smallest scale; on every rank, the
            state as it was.

    Cost: one pass over the rank's gradients, one pmax of one number over the mesh, and
    one wait for it: whether a step is made is known on the host.

    Source: Micikevicius et al., Mixed Precision Training, 2018, section 3.2; the rule
    and its defaults are those of ``torch.amp.GradScaler``, the minimum FairScale's.

    >>> import torch, fsfunc as ff
    >>> optimizer = loss_scale(ff.sgd(1.0), initial=8.0)
    >>> step = optimizer(ff.value_and_grad(lambda w, x: (w * x).sum()))
    >>> w = torch.ones(2)
    >>> state = ff.TrainState(w, optimizer.init(w))
    >>> state, metrics = step(state, torch.tensor([1.0, torch.inf]))
    >>> state.params, state.opt_state.scale, state.opt_state.skipped
    (tensor([1., 1.]), 4.0, 1)
    """
    check_not_negative(initial=initial, minimum=minimum)
    if not (growth > 1 and 0 < backoff < 1 and interval >= 1 and initial > 0):
        raise ValueError(
            f"initial is {initial}, growth {growth}, backoff {backoff} and interval "
            f"{interval}: growth must be above 1, backoff between 0 and 1, and the "
            "others above 0"
        )

    rule = ScaleRule(growth, backoff, interval, minimum)
    return Optimizer.of(_Scaled(optimizer, float(initial), rule))


class ScaleRule(NamedTuple):
    """Growth of a scale after good steps, and backoff after an overflow."""

    growth: float
    backoff: float
    interval: int
    minimum: float
    maximum: float = math.inf

    def next(
        self, scale: float, good_steps: int, overflows: bool, of: str = ""
    ) -> tuple[float, int]:
        """The scale, and the steps since it last changed, after one step more.

        Raises:
            FloatingPointError: it would fall below the minimum; says ``of`` what.
        """
        if overflows:
            smaller = scale * self.backoff
            if smaller < self.minimum:
                raise FloatingPointError(
                    f"gradients{of} are not finite at a loss scale of {scale:g}, and "
                    f"{smaller:g} is below the minimum of {self.minimum:g}: the loss "
                    "itself is not finite, or the model diverges. The state is as it "
                    "was"
                )
            return smaller, 0
        if good_steps + 1 < self.interval:
            return scale, good_steps + 1
        return min(scale * self.growth, self.maximum), 0


@dataclass(frozen=True, eq=False)
class _Scaled(Skipping):
    """The functions of such an optimizer."""

    initial: float
    rule: ScaleRule

    def init(self, params: Tree) -> LossScaleState:
        return LossScaleState(self.initial, 0, 0, self.optimizer.init(params))

    def counted(
        self, grads: Tree, state: LossScaleState
    ) -> tuple[bool, LossScaleState]:
        finite = holds(all_finite(grads))
        scale, good = self.rule.next(state.scale, state.good_steps, not finite)
        skipped = state.skipped + (not finite)
        return finite, LossScaleState(scale, good, skipped, state.inner)

    def take(self, run: Run, state: LossScaleState) -> tuple[Any, Tree, Optimizer]:
        f = frame()
        with inside(replace(f, handlers=(*f.handlers, _Scaling(state.scale)))):
            value, grads, inner = self.optimizer.gradients(run, state.inner)
        return value, grads, Optimizer.of(replace(self, optimizer=inner))


class _Scaling(Interpretation):
    """Has the backward of a step's loss start from ``scale``."""

    called = "loss_scale"
    scales = True

    def __init__(self, scale: float):
        self.scale = scale

    def gradient(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def scaled(call: GradientCall) -> Outcome:
            if frame().in_loss:  # a derivative that the loss itself takes
                return run(call)
            return run(replace(call, cotangent=call.cotangent * self.scale))

        return scaled
