"""Transformations of gradients in the form of optimizers, and `chain`.

As in optax: a transformation's ``update`` maps gradients to updates, and `chain` passes
the updates of one to the next. The last one is mostly an optimizer such as `sgd`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fsfunc.optim.leaves import (
    Mask,
    Tree,
    check_follows_no_params,
    check_real,
    map_flat,
    scale_tensors,
)
from fsfunc.optim.matching import Matched, add_decay, wrong_state_error
from fsfunc.optim.optimizer import (
    GradientScope,
    Optimizer,
    Phases,
    State,
    from_phases,
    optimizer_factory,
)
from fsfunc.optim.places import return_beside
from fsfunc.optim.reductions import global_norm, tree_scale
from fsfunc.optim.schedules import check_params_given


@optimizer_factory
def chain(*transforms: Optimizer) -> Optimizer:
    """Passes gradients through each of ``transforms`` in order, as one optimizer.

    Its state is the tuple of theirs. Its ``apply`` is the ``update`` of all but the
    last, which write nothing, and the ``apply`` of the last.

    If some of them change how gradients are computed, all do so, the first one
    outermost.

    Raises:
        ValueError: nothing to chain; by ``init``, one before the last that keeps
            parameters or averages of them, as `master_weights` and `ema` do.
        TypeError: something that is no `Optimizer`.

    Cost: the sum of theirs; all collectives come before the first write.

    >>> import torch
    >>> optimizer = chain(scale(0.5), add_decayed_weights(0.1), scale(-1.0))
    >>> params = torch.tensor([10.0])
    >>> optimizer.update(torch.tensor([4.0]), optimizer.init(params), params)[0]
    tensor([-3.])
    """
    if not transforms:
        raise ValueError("chain() needs at least one transformation, such as sgd(0.1)")
    for i, transform in enumerate(transforms):
        if not isinstance(transform, Optimizer):
            raise TypeError(
                f"chain takes optimizers, and got {transform!r} of type "
                f"{type(transform).__name__} at place {i}"
            )
    return _chain(transforms)


def _chain(transforms: Sequence[Optimizer]) -> Optimizer:
    *before, last = transforms

    def init(params: Tree) -> tuple[State, ...]:
        states = tuple(t.init(params) for t in transforms)
        check_follows_no_params("chain", states[:-1])
        return states

    def check(states: Sequence[State]) -> None:
        if type(states) not in (tuple, list):
            raise wrong_state_error("chain", states, tuple)
        if len(states) != len(transforms):
            raise ValueError(
                f"a chain of {len(transforms)} was given a state of {len(states)}: "
                "make one with its own init(params)"
            )

    def phases(
        grads: Tree, states: Sequence[State], params: Tree, returns_params: bool
    ) -> Phases:
        check(states)
        new_states = []
        # Updates write nothing, so they may all run before the last one's ``yield``.
        for transform, state in zip(before, states, strict=False):
            grads, state = transform.update(grads, state, params)
            new_states.append(state)
        new_tree, state = yield from last.phases(
            grads, states[-1], params, returns_params
        )
        return new_tree, (*new_states, state)

    def interprets(states: Sequence[State]) -> GradientScope:
        check(states)
        scopes = [t.gradient_scope(x) for t, x in zip(transforms, states, strict=True)]
        handlers = tuple(h for scope in scopes for h in scope.handlers)
        return GradientScope(handlers, _chain([scope.optimizer for scope in scopes]))

    return from_phases(
        init,
        phases,
        interprets=interprets if any(t.interprets for t in transforms) else None,
        elementwise=all(t.elementwise for t in transforms),
    )


@optimizer_factory
def scale(factor: float) -> Optimizer:
    """Multiplies gradients by ``factor``.

    >>> import torch
    >>> scale(-0.5).update({"w": torch.ones(2)}, ())[0]
    {'w': tensor([-0.5000, -0.5000])}
    """

    def update(grads: Tree, state: State, params: Tree = None) -> tuple[Tree, State]:
        return map_flat(lambda ts: scale_tensors(ts, factor), grads), state

    return Optimizer(lambda params: (), update, elementwise=True)


@optimizer_factory
def add_decayed_weights(weight_decay: float, mask: Mask | None = None) -> Optimizer:
    """Adds ``weight_decay`` times the parameters to gradients: ``g + weight_decay p``.

    Args:
        weight_decay: not negative.
        mask: ``mask(path, leaf)`` returns whether a leaf decays; the shape of a sharded
            leaf is its global one. By default all decay.

    Raises:
        ValueError: a negative ``weight_decay``, or an update without ``params``.

    >>> import torch
    >>> decay = add_decayed_weights(0.1, mask=lambda path, leaf: leaf.ndim > 1)
    >>> params = {"b": torch.ones(1), "w": torch.ones(1, 1)}
    >>> decay.update({"b": torch.zeros(1), "w": torch.zeros(1, 1)}, (), params)[0]
    {'b': tensor([0.]), 'w': tensor([[0.1000]])}
    """

    def update(grads: Tree, state: State, params: Tree = None) -> tuple[Tree, State]:
        check_params_given(params, "add_decayed_weights")
        matched = Matched.of(params, grads)
        decays = matched.decays(weight_decay, mask)
        (updates,) = matched.map_rule(lambda p, g, d: [add_decay(g, p, d)], decays)
        return updates, state

    return Optimizer(lambda params: (), update, elementwise=True)


@optimizer_factory
def clip_by_global_norm(
    max_norm: float, eps: float = 1e-6, *, p: float = 2.0
) -> Optimizer:
    """Scales gradients down to a global norm of at most ``max_norm``.

    ``g min(max_norm / (global_norm(grads) + eps), 1)``, as
    ``torch.nn.utils.clip_grad_norm_`` does it, exact on sharded gradients.

    Args:
        max_norm: above 0.
        eps: added to the norm.
        p: which norm; see `global_norm`.

    Raises:
        ValueError: ``max_norm`` or ``p`` is not above 0, or ``eps`` is negative.

    Cost: that of `global_norm`, one pass and one fresh copy of the gradients, which
    are left as they were. No branch: nothing waits for the device.

    Source: Pascanu et al., On the difficulty of training recurrent networks, 2013.

    >>> import torch
    >>> clip = clip_by_global_norm(1.0)
    >>> clip.update({"w": torch.tensor([3.0]), "b": torch.tensor(4.0)}, ())[0]
    {'w': tensor([0.6000]), 'b': tensor(0.8000)}
    """

    def update(grads: Tree, state: State, params: Tree = None) -> tuple[Tree, State]:
        factor = (max_norm / (global_norm(grads, p) + eps)).clamp(max=1.0)
        return tree_scale(grads, factor), state

    return Optimizer(lambda params: (), update)


@optimizer_factory
def clip_by_value(max_value: float) -> Optimizer:
    """Clips each element of gradients by itself.

    ``min(max(g, -max_value), max_value)``, as ``torch.nn.utils.clip_grad_value_`` does
    it: so NaN stays NaN.

    Args:
        max_value: above 0.

    Raises:
        ValueError: ``max_value`` is not above 0.
        TypeError: complex gradients, as there.

    Cost: no communication; a fresh copy of the gradients, which are left as they were.

    >>> import torch
    >>> clip_by_value(1.0).update({"w": torch.tensor([3.0, -4.0, 0.5])}, ())[0]
    {'w': tensor([ 1.0000, -1.0000,  0.5000])}
    """

    def update(grads: Tree, state: State, params: Tree = None) -> tuple[Tree, State]:
        def clip(tensors: list[Tensor]) -> list[Tensor]:
            if any(t.is_complex() for t in tensors):
                check_real(grads, "clip_by_value takes", "which have no order")
            pairs = [(t.clamp(-max_value, max_value), t) for t in tensors]
            return [return_beside(x, t) for x, t in pairs]

        return map_flat(clip, grads), state

    return Optimizer(lambda params: (), update, elementwise=True)
