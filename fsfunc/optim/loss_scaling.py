"""Steps that are skipped where gradients are not finite; loss_scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from fsfunc.core.frames import Interpretation, frame
from fsfunc.core.outcomes import GradientCall, Outcome
from fsfunc.optim.leaves import Tree, map_flat
from fsfunc.optim.norms import all_finite, holds
from fsfunc.optim.optimizer import (
    Optimizer,
    Phases,
    Reading,
    State,
    by_phases,
    check_takes_plainly,
    described,
)


@dataclass(frozen=True, eq=False)
class Skipping:
    """An optimizer around another, whose step may be skipped."""

    optimizer: Optimizer

    inner = "inner"  # the field of the state that has that of the optimizer within

    def counted(self, grads: Tree, state: Any) -> tuple[bool, Any]:
        """True if all ranks make the step, and the state that has counted it."""
        raise NotImplementedError

    def phases(self, grads: Tree, state: Any, params: Tree, adds: bool) -> Phases:
        makes, after = self.counted(grads, state)
        if not makes:
            zeros = lambda ts: list(map(torch.zeros_like, ts))  # noqa: E731
            still = params if adds else map_flat(zeros, grads, rest=None)
            yield
            return still, after
        inner = getattr(state, self.inner)
        result, inner = yield from self.optimizer.phases(grads, inner, params, adds)
        return result, after._replace(**{self.inner: inner})


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
        ValueError: a negative number of errors; a `loss_scale` within, which skips by
            itself.

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
    f = _IfFinite(optimizer, max_consecutive_errors)
    return by_phases(f.init, f.phases)


@dataclass(frozen=True, eq=False)
class _IfFinite(Skipping):
    most: int

    inner = "inner_state"

    def init(self, params: Tree) -> ApplyIfFiniteState:
        return ApplyIfFiniteState(0, True, 0, self.optimizer.init(params))

    def counted(
        self, grads: Tree, state: ApplyIfFiniteState
    ) -> tuple[bool, ApplyIfFiniteState]:
        finite = holds(all_finite(grads))
        row = 0 if finite else state.notfinite_count + 1
        total = state.total_notfinite + (not finite)
        after = ApplyIfFiniteState(row, finite, total, state.inner_state)
        return finite or row > self.most, after


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
    rule = ScaleRule(growth, backoff, interval, minimum)
    return _Scaled(optimizer, float(initial), rule).functions()


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
    initial: float
    rule: ScaleRule

    def functions(self) -> Optimizer:
        return by_phases(self.init, self.phases, interprets=self.interprets)

    def init(self, params: Tree) -> LossScaleState:
        return LossScaleState(self.initial, 0, 0, self.optimizer.init(params))

    def counted(
        self, grads: Tree, state: LossScaleState
    ) -> tuple[bool, LossScaleState]:
        finite = holds(all_finite(grads))
        scale, good = self.rule.next(state.scale, state.good_steps, not finite)
        skipped = state.skipped + (not finite)
        return finite, LossScaleState(scale, good, skipped, state.inner)

    def interprets(self, state: LossScaleState) -> Reading:
        handlers, inner = self.optimizer.reading(state.inner)
        after = replace(self, optimizer=inner).functions()
        return Reading((_Scaling(state.scale), *handlers), after)


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
            return run(call.replace(cotangent=call.cotangent * self.scale))

        return scaled
