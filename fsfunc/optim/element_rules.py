"""Optimizers that treat each element by itself, made of one equation.

A rule is the equation of a paper, by operations that differentiate. A codec says how
its moments are stored, and a fused kernel may do the same step in one pass over memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fsfunc.optim.in_place import fused
from fsfunc.optim.leaves import Mask, Tree, zeros_like
from fsfunc.optim.matching import Matched, Rule
from fsfunc.optim.optimizer import Optimizer, apply_updates
from fsfunc.optim.schedules import check_params_given
from fsfunc.runtime.block_codes import CHUNK

Kernel = Callable[..., None]
# (param, grad, *moments, decay) -> (update, *moments), where update() is a tensor
Equation = Callable[..., Sequence[Any]]
Commit = Callable[[], tuple[Tree, Any]]


@dataclass(frozen=True, eq=False)
class ElementRule:
    """The equation of an optimizer, of one element.

    Args:
        name: what errors call it.
        state: a named tuple of a count, and of a tree like the parameters for each
            moment.
        moments: the number of moments; what the state has beyond them is None.
        equation: ``equation(count)(param, grad, *moments, decay) -> (update,
            *moments)``, of tensors of one dtype; ``update()`` is what the parameter
            gains, and ``decay`` a number, or a tensor where it differs within a flat
            buffer.
        kernel: ``kernel(count)(params, grads, *moments, weight_decay=)`` writes the
            same step into lists of dense tensors of one dtype.
        weight_decay, mask: the decay of a leaf.
    """

    name: str
    state: Callable[..., Any]
    moments: int
    equation: Callable[[Any], Equation]
    kernel: Callable[[Any], Kernel] | None = None
    weight_decay: float = 0.0
    mask: Mask | None = None

    def after(self, count: Any, moments: Sequence[Tree], *more: Any) -> Any:
        """The state of these moments."""
        return self.state(count, *(moments or (None,)), *more)

    def matched(self, grads: Tree, params: Tree, moments: Sequence[Tree]) -> Matched:
        """The trees of an update, which may have no ``params``."""
        if self.weight_decay:
            check_params_given(params, self.name)
        return Matched.of(grads if params is None else params, grads, *moments)

    def decays(self, matched: Matched) -> list[float]:
        return matched.decays(self.weight_decay, self.mask)

    def step(self, count: Any) -> Rule:
        """The equation in the widest dtype of parameter and moments."""
        equation = self.equation(count)

        def step(p: Tensor, g: Tensor, *rest: Any) -> list[Tensor]:
            *moments, decay = rest
            dtype = p.dtype
            for m in moments:
                dtype = torch.promote_types(dtype, m.dtype)
            u, *new = equation(*(x.to(dtype) for x in (p, g, *moments)), decay)
            return [u(), *(x.to(m.dtype) for x, m in zip(new, moments, strict=True))]

        return step

    def writer(self, count: Any) -> Kernel:
        """The fused kernel, or one that writes what the equation gives."""
        if self.kernel is not None:
            return self.kernel(count)
        equation = self.equation(count)

        def write(*columns: Sequence[Tensor], weight_decay: float) -> None:
            for row in zip(*columns, strict=True):
                for p, g, *moments in chunks(row):
                    u, *new = equation(p, g, *moments, weight_decay)
                    p.add_(u())
                    for m, x in zip(moments, new, strict=True):
                        m.copy_(x)

        return write


def chunks(row: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Tensors of one shape in pieces that stay in a CPU's cache."""
    first = row[0]
    if first.numel() <= CHUNK or first.device.type != "cpu":
        return iter([row])
    if not all(x.is_contiguous() for x in row):
        return iter([row])
    return zip(*(x.view(-1).split(CHUNK) for x in row), strict=True)


class Codec:
    """Storage of moments: here as they are, in a dtype of their own if given."""

    elementwise = True

    def __init__(self, dtype: torch.dtype | None = None):
        self.dtype = dtype

    def init(self, rule: ElementRule, params: Tree) -> Any:
        moments = [zeros_like(params, self.dtype) for _ in range(rule.moments)]
        return rule.after(0, moments)

    def update(
        self, rule: ElementRule, grads: Tree, state: Any, params: Tree = None
    ) -> tuple[Tree, Any]:
        count, moments = state[0], state[1 : 1 + rule.moments]
        matched = rule.matched(grads, params, moments)
        updates, *new = matched.composed(rule.step(count), rule.decays(matched))
        return updates, rule.after(count + 1, new)

    def prepare(
        self, rule: ElementRule, grads: Tree, state: Any, params: Tree
    ) -> Commit:
        count, moments = state[0], state[1 : 1 + rule.moments]
        matched = rule.matched(grads, params, moments)
        if matched.differentiated:
            updates, after = self.update(rule, grads, state, params)
            return lambda: (apply_updates(params, updates), after)
        commit = fused(matched, rule.writer(count), rule.decays(matched))

        def finish() -> tuple[Tree, Any]:
            params, *new = commit()
            return params, rule.after(count + 1, new)

        return finish


def elementwise(rule: ElementRule, codec: Codec) -> Optimizer:
    """The optimizer of an equation, whose moments are stored by a codec."""
    return Optimizer(
        partial(codec.init, rule),
        partial(codec.update, rule),
        prepare=partial(codec.prepare, rule),
        elementwise=codec.elementwise,
    )
