"""LAMB and LARS, and trust ratios: updates at the scale of each leaf, however it lies.

A leaf's trust ratio is the norm of the parameter over that of its update. The norms of
all leaves, of parameters and of updates, are reduced over ranks at once: one psum over
each set of axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain as joined
from typing import Any

import torch
from torch import Tensor

from fsfunc.optim.adam import AdamState, adam_rule, fused_adam, with_moments
from fsfunc.optim.descent import SgdState, sgd
from fsfunc.optim.element_rules import compiled_direction
from fsfunc.optim.in_place import run_kernel
from fsfunc.optim.leaves import Mask, Tree, local_tensor, map_flat, scale_tensors
from fsfunc.optim.matching import Matched, Rule, wrong_state_error
from fsfunc.optim.optimizer import (
    Optimizer,
    Phases,
    State,
    apply_from_update,
    from_phases,
    optimizer_factory,
)
from fsfunc.optim.places import bring_with_decay, computing_device, step_memory_like
from fsfunc.optim.reductions import Row, leaf_rows, row_norms, spread_into_parts
from fsfunc.optim.schedules import Schedule, check_params_given, rate_at
from fsfunc.optim.transformations import add_decayed_weights, chain
from fsfunc.sharded.leaf import is_sharded
from fsfunc.tree.types import Leaf


@optimizer_factory
def scale_by_trust_ratio(
    min_norm: float = 0.0,
    trust_coefficient: float = 1.0,
    eps: float = 0.0,
    *,
    mask: Mask | None = None,
) -> Optimizer:
    """Scales each leaf's update by its trust ratio.

    Of a leaf p with update u, as optax does it::

        u trust_coefficient |p| / (|u| + eps)       u itself where a norm is 0

    Args:
        min_norm: what norms below count as.
        trust_coefficient: not negative.
        eps: added to the norm of the update.
        mask: ``mask(path, leaf)`` returns whether a leaf is scaled; by default all are.

    Raises:
        ValueError: a negative number, or an update without ``params``.

    Cost: one psum over each distinct set of axes in the layouts, of two numbers for
    each leaf there; one fresh copy of the updates.

    Source: You et al., Large Batch Training of Convolutional Networks, section 4.

    >>> trust = scale_by_trust_ratio()
    >>> params = {"w": torch.tensor([6.0, 8.0]), "b": torch.zeros(1)}
    >>> updates = {"w": torch.tensor([0.0, 2.0]), "b": torch.ones(1)}
    >>> trust.update(updates, (), params)[0]
    {'w': tensor([ 0., 10.]), 'b': tensor([1.])}
    """
    trust = Trust(min_norm, trust_coefficient, eps, mask)

    def update(grads: Tree, state: State, params: Tree = None) -> tuple[Tree, State]:
        return trust.scale(grads, params), state

    return Optimizer(lambda params: (), update)


@dataclass(frozen=True)
class Trust:
    """The formula of trust ratios; see `scale_by_trust_ratio`."""

    min_norm: float = 0.0
    coefficient: float = 1.0
    eps: float = 0.0
    mask: Mask | None = None

    def ratios(self, matched: Matched, updates: Iterator[Row]) -> list[Tensor]:
        """Returns the ratio of each leaf: 1-D, by flat tensor of ``matched``.

        Args:
            updates: made as they are asked for, so that only their norms take memory.
        """
        count = len(matched.leaf_positions)
        rows = joined(_rows_of_column(matched, 0), updates)
        norms = [n.clamp(min=self.min_norm) for n in row_norms(rows)]
        is_scaled = matched.decays(1, self.mask)  # 1 or 0, by the mask
        ratios = []
        flats = matched.buffers[0].tensors
        columns = norms[:count], norms[count:], matched.leaf_positions, flats
        for param_norms, update_norms, positions, flat in zip(*columns, strict=True):
            if param_norms.device != update_norms.device:  # one of them is offloaded
                device = computing_device(flat)
                param_norms, update_norms = (
                    param_norms.to(device),
                    update_norms.to(device),
                )
            # No branch on the norms: nothing waits for the device. The inner `where`
            # keeps the derivative finite where a norm is 0.
            is_usable = (param_norms != 0) & (update_norms != 0)
            divisors = torch.where(is_usable, update_norms, 1) + self.eps
            ratio = torch.where(is_usable, self.coefficient * param_norms / divisors, 1)
            if not all(is_scaled[j] for j in positions):
                options = {"dtype": torch.bool, "device": ratio.device}
                mask = torch.tensor([is_scaled[j] for j in positions], **options)
                ratio = torch.where(mask, ratio, 1)
            ratios.append(ratio)
        return ratios

    def scale(
        self,
        updates: Tree,
        params: Tree,
        rate: float | Tensor = 1,
        writes_updates: bool = False,
    ) -> Tree:
        """Returns updates times their ratios and ``rate``.

        Args:
            writes_updates: whether ``updates`` may be written over.
        """
        check_params_given(params, "a trust ratio")
        matched = Matched.of(params, updates)
        ratios = [rate * r for r in self.ratios(matched, _rows_of_column(matched, 1))]
        if matched.differentiated:
            return matched.restore(_scale_leaves(matched, ratios), matched.no_updates)
        buffers = matched.buffers[1]
        flats = buffers.tensors
        if not writes_updates:
            flats = [step_memory_like(t).copy_(t.detach()) for t in flats]
        with torch.no_grad():
            for flat, (_, packed), ratio in zip(
                flats, buffers.groups, ratios, strict=True
            ):
                if packed is None:
                    flat.mul_(ratio[0].to(flat.device, flat.dtype))
                    continue
                parts = [flat[a:b] for a, b in packed.ranges]
                factors = ratio.to(flat.device, flat.dtype).unbind()
                torch._foreach_mul_(parts, list(factors))
        return matched.restore(buffers.rebuild(flats), matched.no_updates)


def _rows_of_column(matched: Matched, column: int) -> Iterator[Row]:
    return leaf_rows(matched.columns[column], matched.buffers[column])


def _scale_leaves(matched: Matched, ratios: Sequence[Tensor]) -> list[Any]:
    """Returns leaves times their ratios, by operations that differentiate."""
    leaves: list[Leaf] = [None] * len(matched.active)
    for ratio, positions in zip(ratios, matched.leaf_positions, strict=True):
        for j, factor in zip(positions, ratio.unbind(), strict=True):
            leaf = matched.trees[1][matched.active[j]]
            x = local_tensor(leaf)
            if is_sharded(leaf):
                factor = spread_into_parts(factor, leaf.layout.axes)
                leaves[j] = leaf.with_local(x * factor.to(x.device, x.dtype))
            else:
                leaves[j] = x * factor.to(x.device, x.dtype)
    return leaves


@optimizer_factory
def lamb(
    learning_rate: float | Schedule = 1e-3,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    mask: Mask | None = None,
    moment_dtype: torch.dtype | None = None,
) -> Optimizer:
    """Makes LAMB, with the defaults of optax: Adam at the scale of each leaf.

    With m and v as Adam's, t = count + 1, and norms over each whole leaf::

        u = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay p
        p = p - learning_rate |p| / |u| u            (1 for the ratio where a norm is 0)

    The same as ``chain(sharded_adam(1.0, ...), scale_by_trust_ratio(),
    scale(learning_rate))``, in less memory.

    Args:
        learning_rate: a number, or a function of the count; see `schedules`.
        b1: decay of the mean, in [0, 1).
        b2: decay of the mean square, in [0, 1).
        eps: added to the denominator.
        weight_decay: what a leaf adds of itself to its update.
        mask: ``mask(path, leaf)`` returns whether a leaf decays; by default all do.
        moment_dtype: of mu and nu, as of `sharded_adam`.

    Returns:
        the optimizer; its state is an `AdamState`.

    Raises:
        ValueError: a negative number; a beta outside [0, 1); an update without
            ``params``.
        TreeMismatch: gradients or state do not fit the parameters; names the path.

    Cost: one psum over each distinct set of axes in the layouts, of two numbers for
    each leaf there. Two passes: one for the norms, through scratch of six times the
    largest buffer, and Adam's own, one fused call for each leaf, which has its own
    rate; in place under `donate`. With moments of float16 or 8 bits the updates are
    made in memory of their own.

    Source: You et al., Large Batch Optimization for Deep Learning, algorithm 2.

    >>> optimizer = lamb(0.1)
    >>> w = torch.tensor([3.0, 4.0])
    >>> w, state = optimizer.apply(torch.ones(2), optimizer.init(w), w)
    >>> w  # by a tenth of its norm
    tensor([2.6464, 3.6464])
    """
    rule = adam_rule(1.0, b1, b2, eps, weight_decay, mask)
    adam = with_moments(rule, moment_dtype)
    trust = Trust()
    pure = chain(adam, scale_by_trust_ratio())

    def update(
        grads: Tree, state: AdamState, params: Tree = None
    ) -> tuple[Tree, AdamState]:
        rate = rate_at(learning_rate, state.count)
        updates, (state, _) = pure.update(grads, (state, ()), params)
        return map_flat(lambda ts: scale_tensors(ts, rate), updates), state

    # Such moments are no input of Adam's equation: their codec makes the update.
    if moment_dtype in (torch.float16, torch.uint8):
        return Optimizer(adam.init, update)

    def apply(grads: Tree, state: AdamState, params: Tree) -> Phases:
        if type(state) is not AdamState:
            raise wrong_state_error("lamb", state, AdamState)
        matched = rule.match_trees(grads, params, (state.mu, state.nu))
        if matched.differentiated:
            return (yield from apply_from_update(update)(grads, state, params))
        decays = rule.leaf_decays(matched)
        with torch.no_grad():
            step = compiled_direction(rule, state.count, matched)
            steps = _unscaled_steps(matched, step or rule.rule_at(state.count), decays)
            ratios = trust.ratios(matched, steps)
        rate = rate_at(learning_rate, state.count)
        rates: list[Any] = [None] * len(decays)
        for ratio, positions in zip(ratios, matched.leaf_positions, strict=True):
            for j, leaf_rate in zip(positions, (rate * ratio).unbind(), strict=True):
                rates[j] = leaf_rate
        options = {"count": state.count, "beta1": b1, "beta2": b2, "eps": eps}

        def kernel(*columns: list[Tensor], weight_decay: tuple[float, int]) -> None:
            decay, j = weight_decay
            lr = rates[j].to(columns[0][0].device)  # the host's, if it computes
            fused_adam(*columns, lr=lr, weight_decay=decay, **options)

        yield
        # A fused call has one rate, so each leaf is a group of its own.
        leaf_by_leaf = [(d, j) for j, d in enumerate(decays)]
        params, mu, nu = run_kernel(matched, kernel, leaf_by_leaf)
        return params, AdamState(state.count + 1, mu, nu)

    return Optimizer(adam.init, update, apply)


def _unscaled_steps(
    matched: Matched, step: Rule, decays: Sequence[float]
) -> Iterator[Row]:
    """Yields Adam's step of each flat tensor at a rate of 1, as leaves' parts."""
    columns = zip(*(b.tensors for b in matched.buffers), strict=True)
    groups = zip(_rows_of_column(matched, 0), matched.buffers[0].groups, strict=True)
    rows = zip(columns, matched.decays_by_buffer(decays), groups, strict=True)
    for row, decay, ((axes, _), (_, packed)) in rows:
        u = step(*bring_with_decay(row, decay))[0]
        yield axes, [u] if packed is None else [u[a:b] for a, b in packed.ranges]


@optimizer_factory
def lars(
    learning_rate: float | Schedule,
    *,
    momentum: float = 0.9,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    trust_coefficient: float = 1e-3,
    eps: float = 0.0,
    mask: Mask | None = None,
    trust_mask: Mask | None = None,
) -> Optimizer:
    """Makes LARS, with the defaults of optax: momentum at the scale of each leaf.

    With l the learning rate, and norms over each whole leaf::

        d = g + weight_decay p
        v = momentum v + l trust_coefficient |p| / (|d| + eps) d
        p = p - (l ... d + momentum v  if nesterov else  v)

    where the ratio is 1 for a norm of 0, and for leaves that ``trust_mask`` leaves out.

    Args:
        learning_rate: a number, or a function of the count; see `schedules`.
        momentum: not negative.
        nesterov: look ahead along the momentum.
        weight_decay: added to the gradient, times the parameter.
        trust_coefficient: how far a step may go, as a part of the leaf.
        eps: added to the norm of the update.
        mask: ``mask(path, leaf)`` returns whether a leaf decays; by default all do.
        trust_mask: the same of which leaves are scaled by their ratio.

    Returns:
        the optimizer; its state is an `SgdState`.

    Raises:
        ValueError: a negative number; nesterov without momentum; an update without
            ``params``.
        TreeMismatch: gradients or state do not fit the parameters; names the path.

    Cost: one psum over each distinct set of axes in the layouts, of two numbers for
    each leaf there; one fresh copy of the gradients, and the fused pass of `sgd`, in
    place under `donate`.

    Source: You et al., Large Batch Training of Convolutional Networks, algorithm 1;
    the norm is that of d, as in optax, where the paper adds those of g and of decay.

    >>> optimizer = lars(1.0, trust_coefficient=0.1)
    >>> w = torch.tensor([3.0, 4.0])
    >>> w, state = optimizer.apply(torch.tensor([0.0, 9.0]), optimizer.init(w), w)
    >>> w
    tensor([3.0000, 3.5000])
    """
    decay = add_decayed_weights(weight_decay, mask) if weight_decay else None
    trust = Trust(0.0, trust_coefficient, eps, trust_mask)
    descent = sgd(1.0, momentum=momentum, nesterov=nesterov)

    def phases(
        grads: Tree, state: SgdState, params: Tree, returns_params: bool
    ) -> Phases:
        if decay is not None:
            grads, _ = decay.update(grads, (), params)
        rate = rate_at(learning_rate, state.count)
        # With a decay the gradients are new tensors, if all leaves decay: with a mask
        # some are still the ones given.
        are_new = decay is not None and mask is None
        scaled = trust.scale(grads, params, rate, writes_updates=are_new)
        return (yield from descent.phases(scaled, state, params, returns_params))

    return from_phases(descent.init, phases)
