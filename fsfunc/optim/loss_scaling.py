"""Loss scaling, of the whole loss or unit by unit, and steps that are skipped.

An optimizer here looks at the gradients in the first phase of its step: are all of them
finite, on all ranks? If not, it makes no step, and keeps the state of the optimizer
within. Where it scales a loss, it is an `Interpretation` too: `loss_scale` multiplies
the cotangent that the backward pass starts from, `layerwise_loss_scale` multiplies and
divides at the outputs and inputs of units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fsfunc import _torch, tree
from fsfunc.comm.typed_maps import LawError
from fsfunc.core.frames import Interpretation, composable, frame
from fsfunc.core.outcomes import GradientCall, Outcome
from fsfunc.core.units import Call
from fsfunc.optim.leaves import Tree, map_flat
from fsfunc.optim.optimizer import (
    GradientScope,
    Optimizer,
    Phases,
    State,
    check_takes_plain_gradients,
    from_phases,
    optimizer_factory,
)
from fsfunc.optim.places import computing_device
from fsfunc.optim.reductions import all_finite, read_flag
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.tree.types import Leaf, PyTree


@dataclass(frozen=True, eq=False)
class SkippingOptimizer:
    """An optimizer around another, whose step may be skipped."""

    optimizer: Optimizer

    inner = "inner"  # the field of its state that holds the optimizer's

    def count_step(self, grads: Tree, state: State) -> tuple[bool, State]:
        """Returns whether all ranks make the step, and the state that has counted it.

        In that state the one of the optimizer within is still the old one.
        """
        raise NotImplementedError

    def phases(
        self, grads: Tree, state: State, params: Tree, returns_params: bool
    ) -> Phases:
        makes_step, counted = self.count_step(grads, state)
        if not makes_step:
            zeros = lambda ts: list(map(torch.zeros_like, ts))  # noqa: E731
            no_step = (
                params if returns_params else map_flat(zeros, grads, untrainable=None)
            )
            yield
            return no_step, counted
        inner = getattr(state, self.inner)
        step = self.optimizer.phases(grads, inner, params, returns_params)
        new_tree, inner = yield from step
        return new_tree, counted._replace(**{self.inner: inner})


class ApplyIfFiniteState(NamedTuple):
    """Counts of steps whose gradients were not finite, with optax's names.

    ``notfinite_count`` counts those in a row up to now, ``total_notfinite`` all.
    ``last_finite`` tells whether the gradients of the last step were finite.
    ``inner_state`` is the state of the optimizer.
    """

    notfinite_count: int
    last_finite: bool
    total_notfinite: int
    inner_state: State


@optimizer_factory
def apply_if_finite(optimizer: Optimizer, max_consecutive_errors: int = 5) -> Optimizer:
    """Skips the step of ``optimizer`` where a gradient is infinite or NaN.

    If any rank of the mesh has such an element, the parameters and the state of
    ``optimizer`` stay as they are on all ranks. As in optax, the first gradients after
    ``max_consecutive_errors`` bad ones in a row are applied whatever they are, so that
    training that went wrong shows it.

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
    check_takes_plain_gradients("apply_if_finite", optimizer)
    functions = _ApplyIfFinite(optimizer, max_consecutive_errors)
    return from_phases(functions.init, functions.phases)


@dataclass(frozen=True, eq=False)
class _ApplyIfFinite(SkippingOptimizer):
    """The ``init`` and ``phases`` of an `apply_if_finite`."""

    max_consecutive_errors: int

    inner = "inner_state"

    def init(self, params: Tree) -> ApplyIfFiniteState:
        return ApplyIfFiniteState(0, True, 0, self.optimizer.init(params))

    def count_step(
        self, grads: Tree, state: ApplyIfFiniteState
    ) -> tuple[bool, ApplyIfFiniteState]:
        finite = read_flag(all_finite(grads))
        errors_in_a_row = 0 if finite else state.notfinite_count + 1
        total = state.total_notfinite + (not finite)
        counted = ApplyIfFiniteState(errors_in_a_row, finite, total, state.inner_state)
        return finite or errors_in_a_row > self.max_consecutive_errors, counted


class LossScaleState(NamedTuple):
    """The factor of the next loss, and the state of the optimizer within.

    ``scale`` is a plain number, the same on every rank; ``good_steps`` counts the steps
    since it last changed; ``skipped`` counts those that were not made.
    """

    scale: float
    good_steps: int
    skipped: int
    inner: State


@optimizer_factory
def loss_scale(
    optimizer: Optimizer,
    initial: float = 2.0**16,
    *,
    growth: float = 2.0,
    backoff: float = 0.5,
    interval: int = 2000,
    minimum: float = 1e-4,
) -> Optimizer:
    """Scales the loss of ``optimizer``'s train step, and skips steps that overflow.

    The backward pass starts from the scale, and the gradients are divided by it in
    float32. So they are those of the loss, without what float16 would lose. (Gradients
    of float16 parameters come in float32 then: see `master_weights`.) If one element on
    one rank is not finite, no rank makes the step, and all take a smaller scale. After
    ``interval`` good steps in a row all take a larger one.

    Gradients that a step computes by itself, without ``optimizer(grad_fn)``, are not
    scaled, and are right as they are. A step with infinite ones is skipped too.

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
    return _LossScale(optimizer, float(initial), rule).make_optimizer()


class ScaleRule(NamedTuple):
    """When a scale grows and when it backs off, as ``torch.amp.GradScaler`` does it.

    Args:
        growth: its factor after ``interval`` good steps in a row.
        backoff: its factor after an overflow.
        interval: steps without overflow before it grows.
        minimum: below it an overflow raises.
        maximum: above it a scale does not grow.
    """

    growth: float
    backoff: float
    interval: int
    minimum: float
    maximum: float = math.inf

    def next(
        self, scale: float, good_steps: int, overflows: bool, of: str = ""
    ) -> tuple[float, int]:
        """Returns the scale after one step more, and the steps since it last changed.

        Args:
            of: what overflows, as part of a message: " of unit 'block'".

        Raises:
            FloatingPointError: the scale would fall below the minimum.
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
class _LossScale(SkippingOptimizer):
    """The functions of a `loss_scale`."""

    initial: float
    rule: ScaleRule

    def make_optimizer(self) -> Optimizer:
        return from_phases(self.init, self.phases, interprets=self.interprets)

    def init(self, params: Tree) -> LossScaleState:
        return LossScaleState(self.initial, 0, 0, self.optimizer.init(params))

    def count_step(
        self, grads: Tree, state: LossScaleState
    ) -> tuple[bool, LossScaleState]:
        finite = read_flag(all_finite(grads))
        scale, good_steps = self.rule.next(state.scale, state.good_steps, not finite)
        skipped = state.skipped + (not finite)
        return finite, LossScaleState(scale, good_steps, skipped, state.inner)

    def interprets(self, state: LossScaleState) -> GradientScope:
        handlers, inner = self.optimizer.gradient_scope(state.inner)
        optimizer = replace(self, optimizer=inner).make_optimizer()
        return GradientScope((LossScaling(state.scale), *handlers), optimizer)


class LossScaling(Interpretation):
    """Makes the backward pass of a step's loss start from ``scale`` in place of 1.

    The gradient call divides its gradients by that number, in float32.
    """

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


class UnitScaling(Interpretation):
    """Multiplies cotangents where a unit's backward begins, and divides at its ends.

    It is the innermost interpretation, so it sees parameters as they are gathered.

    Args:
        scales: by name of a unit.
    """

    called = "layerwise_loss_scale"
    scales = True

    def __init__(self, unit_scales: Mapping[str, float]):
        self.unit_scales = unit_scales
        self.met_units: set[str] = set()
        # By unit, a flag: it was given finite cotangents and made others of them.
        self.overflowed: dict[str, Tensor] = {}

    def gradient(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def scaled(call: GradientCall) -> Outcome:
            outer, outcome = frame(), run(call)
            # A derivative that the loss itself takes, or an evaluation of it.
            if outer.in_loss or not call.argnums:
                return outcome
            unmet = set(self.unit_scales) - self.met_units
            # A rank of a pipeline (``same_batch``) runs only some of the units.
            if unmet and not any(h.same_batch for h in outer.handlers):
                raise ValueError(
                    f"scales of layerwise_loss_scale has {min(unmet)!r}, and the units "
                    f"of the loss are {', '.join(sorted(self.met_units)) or 'none'}"
                )
            return outcome

        return scaled

    def unit(self, run: Callable[..., Any], call: Call) -> Callable[..., Any]:
        if call.frame.path or not call.frame.in_loss:  # within another, or no loss
            return run
        self.met_units.add(call.name)
        if call.name not in self.unit_scales:
            return run

        def scaled(params: PyTree, /, *inputs: PyTree, **keywords: PyTree) -> PyTree:
            if composable() or not torch.is_grad_enabled():
                return run(params, *inputs, **keywords)
            boundary = _UnitBoundary(self, call)
            arguments = params, inputs, keywords
            arguments = tree.map(boundary.enter, arguments, is_leaf=is_sharded)
            params, inputs, keywords = arguments
            outputs = run(params, *inputs, **keywords)
            return tree.map(boundary.leave, outputs, is_leaf=is_sharded)

        return scaled


class _UnitBoundary:
    """Scaling at the inputs and outputs of one unit call.

    In the backward pass the outputs come first: `leave` multiplies their cotangents,
    and `enter` divides those of parameters and inputs.
    """

    def __init__(self, scaling: UnitScaling, call: Call):
        self.overflowed, self.name = scaling.overflowed, call.name
        self.scale = scaling.unit_scales[call.name]
        # A recorder knows leaves by identity: it must see the tensors themselves.
        self.is_traced = call.frame.tracer is not None
        self.has_data = not _torch.fake_active()
        self.finite_inputs: Tensor | None = None  # whether cotangents came in finite

    def enter(self, x: Leaf) -> Leaf:
        """Returns a parameter or input whose cotangent is divided on its way out."""
        return self._attach(x, lambda g: self._watch_out(g) / self.scale)

    def leave(self, x: Leaf) -> Leaf:
        """Returns an output whose cotangent is multiplied on its way in."""
        return self._attach(x, lambda g: self._watch_in(g) * self.scale)

    def _attach(self, x: Leaf, change: Callable[[Tensor], Tensor]) -> Leaf:
        """Returns the same value, with ``change`` for its cotangent."""
        if isinstance(x, Sharded):
            if x.packed is not None:
                raise LawError(
                    f"unit {self.name!r} has a scale of its own, and units within it "
                    f"gather {x.name!r}: make it ff.unit(fn, whole=True), or give the "
                    "loss units that hold none, and scale these"
                )
            return x.with_local(self._attach(x.local, change))
        if not (isinstance(x, Tensor) and x.requires_grad):
            return x
        if x.dtype.itemsize < 4:
            raise LawError(
                f"what unit {self.name!r}, which has a scale of its own, is given or "
                f"returns is {x.dtype}: what is divided by a scale must be float32 or "
                "wider. Take ff.precision(step, torch.float32, output=torch.float32) "
                "around, and compute in half by torch.autocast in the loss"
            )
        return x if self.is_traced else _WithCotangent.apply(x, change)

    # These flags stay on the device: only a step that is skipped reads them.

    def _watch_in(self, g: Tensor) -> Tensor:
        if self.has_data:
            finite, finite_before = g.detach().isfinite().all(), self.finite_inputs
            self.finite_inputs = (
                finite if finite_before is None else finite_before & finite
            )
        return g

    def _watch_out(self, g: Tensor) -> Tensor:
        if self.has_data:
            bad, finite_inputs = ~g.detach().isfinite().all(), self.finite_inputs
            bad = bad if finite_inputs is None else bad & finite_inputs
            overflowed_before = self.overflowed.get(self.name)
            self.overflowed[self.name] = (
                bad if overflowed_before is None else overflowed_before | bad
            )
        return g


class _WithCotangent(torch.autograd.Function):
    """The same value, with ``change(g)`` for its cotangent ``g``."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: FunctionCtx, x: Tensor, change: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.change = change  # type: ignore[attr-defined]
        return x.detach()  # a tensor of its own, which the unit may change in place

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: FunctionCtx, g: Tensor
    ) -> tuple[Tensor, None]:
        return ctx.change(g), None  # type: ignore[attr-defined]


class LayerwiseLossScaleState(NamedTuple):
    """The factor of each unit's backward, and the state of the optimizer within.

    ``scales`` and ``good_steps``, the steps since a scale last changed, have a plain
    number for each unit, the same on every rank; ``skipped`` counts the steps that were
    not made.
    """

    scales: dict[str, float]
    good_steps: dict[str, int]
    skipped: int
    inner: State


@optimizer_factory
def layerwise_loss_scale(
    optimizer: Optimizer,
    scales: Mapping[str, float],
    *,
    growth: float = 2.0,
    backoff: float = 0.5,
    interval: int = 10_000,
    minimum: float = 1e-4,
    maximum: float = torch.finfo(torch.float32).max,
) -> Optimizer:
    """Scales the backward of each unit by itself in ``optimizer``'s train step.

    For models where one scale for all layers (`loss_scale`) is too large for some and
    too small for others. With s a unit's scale, its backward gets s times the cotangent
    of what it returned, and the cotangents of its inputs and parameters are divided by
    s. So between units nothing changes, and gradients are those of the loss. If one
    element on one rank is not finite, no rank makes the step. The units that got finite
    cotangents and made infinite ones then take a smaller scale; those that only got
    infinite ones do not. If the loss itself was not finite, all units do.

    What is divided must bear it: what enters a unit and what leaves it is float32 or
    wider. Compute in float16 by ``torch.autocast`` in the loss, under
    ``ff.precision(step, torch.float32, output=torch.float32)``; or, where parameters
    are not sharded, by ``ff.precision(step, torch.float16, output=torch.float32)``.

    Args:
        optimizer: what makes the steps.
        scales: the first scale of each unit, by its name, as ``ff.program`` lists them
            (of a module's, ``apply.units``). Units of one name have one scale; those
            that are not named have none.
        growth: of a scale, above 1, after ``interval`` good steps of its unit in a row.
            Powers of 2 change no bit of a gradient.
        backoff: of a scale after an overflow, between 0 and 1.
        minimum: a scale that overflows and would fall below it raises.
        maximum: of a scale.

    Returns:
        the optimizer; its state is a `LayerwiseLossScaleState`. It makes its train step
        itself, ``layerwise_loss_scale(...)(grad_fn)``.

    Raises:
        ValueError: a number out of its range; no unit has such a name (not told in a
            pipeline, of which a rank runs only some).
        LawError: a unit whose parameters, inputs or outputs are in half precision; or
            that holds units which gather parameters of their own.
        FloatingPointError: gradients overflow at the smallest scale; on every rank, the
            state as it was.

    Cost: of each unit a pass over the gradients of its parameters and inputs, and two
    over the cotangents of its outputs; as `loss_scale`, one pmax of one number over the
    mesh and one wait for it, and where a step is skipped one more for each unit.

    Source: FairScale's LayerwiseGradientScaler, which multiplies between layers by the
    ratio of their scales, and so takes layers that follow each other in one row; there
    all back off that infinities came to.

    >>> import torch, fsfunc as ff
    >>> cube = ff.unit(lambda w, x: (w * x) ** 3)
    >>> optimizer = layerwise_loss_scale(ff.sgd(1.0), {"<lambda>": 8.0})
    >>> step = optimizer(ff.value_and_grad(lambda w, x: cube(w, x).sum()))
    >>> w = torch.zeros(2)
    >>> state = ff.TrainState(w, optimizer.init(w))
    >>> state, metrics = step(state, torch.tensor([1.0, torch.inf]))
    >>> state.params, state.opt_state.scales, state.opt_state.skipped
    (tensor([0., 0.]), {'<lambda>': 4.0}, 1)
    """
    initial = {name: float(scale) for name, scale in scales.items()}
    ordered = all(minimum <= s <= maximum and s > 0 for s in initial.values())
    if not (ordered and initial):
        raise ValueError(
            f"scales are {initial}, minimum {minimum} and maximum {maximum}: there "
            "must be scales, above 0 and between minimum and maximum"
        )
    rule = ScaleRule(growth, backoff, interval, minimum, maximum)
    return _LayerwiseLossScale(optimizer, initial, rule).make_optimizer()


@dataclass(frozen=True, eq=False)
class _LayerwiseLossScale(SkippingOptimizer):
    """The functions of a `layerwise_loss_scale`.

    Args:
        initial: the first scale of each unit.
        overflowed: by unit that ran in this step, a flag whether it overflowed.
    """

    initial: dict[str, float]
    rule: ScaleRule
    overflowed: Mapping[str, Tensor] = field(default_factory=dict)

    def make_optimizer(self) -> Optimizer:
        return from_phases(self.init, self.phases, interprets=self.interprets)

    def init(self, params: Tree) -> LayerwiseLossScaleState:
        counts = dict.fromkeys(self.initial, 0)
        inner = self.optimizer.init(params)
        return LayerwiseLossScaleState(dict(self.initial), counts, 0, inner)

    def count_step(
        self, grads: Tree, state: LayerwiseLossScaleState
    ) -> tuple[bool, LayerwiseLossScaleState]:
        finite = read_flag(all_finite(grads))
        overflowed = () if finite else self._overflowed_units(grads, state.scales)
        next_scales = {
            name: self.rule.next(
                scale, state.good_steps[name], name in overflowed, f" of unit {name!r}"
            )
            for name, scale in state.scales.items()
        }
        return finite, LayerwiseLossScaleState(
            {name: scale for name, (scale, _) in next_scales.items()},
            {name: good_steps for name, (_, good_steps) in next_scales.items()},
            state.skipped + (not finite),
            state.inner,
        )

    def _overflowed_units(self, grads: Tree, scales: dict[str, float]) -> set[str]:
        """Returns the units that overflowed on any rank; all, if the loss did."""
        near = next(x for x in tree.leaves(grads) if isinstance(x, Tensor))
        device = computing_device(near)
        zero = near.new_zeros((), dtype=torch.float32, device=device)
        overflowed = set()
        # In one order on all ranks, and also for units that did not run here.
        for name in sorted(scales):
            flag = self.overflowed.get(name)
            local_flag = zero if flag is None else torch.where(flag, torch.inf, zero)
            if not read_flag(all_finite([local_flag])):
                overflowed.add(name)
        return overflowed or set(scales)

    def interprets(self, state: LayerwiseLossScaleState) -> GradientScope:
        handlers, inner = self.optimizer.gradient_scope(state.inner)
        scaling = UnitScaling(state.scales)
        flags = scaling.overflowed
        optimizer = replace(self, optimizer=inner, overflowed=flags).make_optimizer()
        return GradientScope((*handlers, scaling), optimizer)
