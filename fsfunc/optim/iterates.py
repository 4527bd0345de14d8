"""Schedule-free training: an average of the iterates in place of a schedule."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc.core.frames import frame, inside
from fsfunc.optim.averaging import warn_narrow
from fsfunc.optim.in_place import fused
from fsfunc.optim.leaves import Mask, Tree, chosen, copied, floating
from fsfunc.optim.masking import left_out
from fsfunc.optim.matching import Matched
from fsfunc.optim.optimizer import (
    Optimizer,
    Phases,
    added,
    check_takes_plainly,
    described,
    finished,
    summed,
)
from fsfunc.optim.schedules import (
    Schedule,
    check_params_given,
    rate_at,
)
from fsfunc.sharded.donated import Everything


class ScheduleFreeState(NamedTuple):
    """The count of updates, the base iterate z, and the weights of the average.

    The parameters that are trained are y, where gradients are taken; `eval_params`
    gives x, the average, which is ``(y - (1 - b1) z) / b1``. ``weight_sum`` is that of
    the weights of all updates, ``max_lr`` the largest learning rate so far. For
    ``origins`` see `MasterState`.
    """

    count: int
    b1: float
    weight_sum: float
    max_lr: float
    z: Any
    base: Any

    origins = "z"

    def evaluated(self, params: Tree) -> Tree:
        """x, the average."""
        b1 = self.b1
        matched = Matched.of(floating(params), self.z)
        return matched.summed(lambda y, z: (y - (1 - b1) * z) / b1)


@described
def schedule_free(
    base: Optimizer,
    learning_rate: float | Schedule,
    *,
    b1: float = 0.9,
    weight_lr_power: float = 2.0,
    weight_decay: float = 0.0,
    mask: Mask | None = None,
) -> Optimizer:
    """Defazio's schedule-free form of ``base``: its rate needs no decay.

    With gradients at y, w the largest rate so far to the power of ``weight_lr_power``,
    and c = w / (sum of all w)::

        z = base(z) - learning_rate weight_decay y
        x = (1 - c) x + c z                           y = b1 x + (1 - b1) z

    Args:
        base: steps z: an optimizer without momentum, such as ``sgd(rate)`` or
            ``sharded_adam(rate, b1=0.0, weight_decay=0.0)``. Where it decays weights or
            takes norms of them, those are of z.
        learning_rate: that of ``base``: a number, or a schedule, as for a warm-up.
        b1: how far y is on the way from z to x, in (0, 1).
        weight_lr_power: how rates weigh in the average.
        weight_decay: what z loses of y, times the learning rate.
        mask: ``mask(path, leaf)`` says which leaves decay so; all do without it.

    Returns:
        the optimizer; its state is a `ScheduleFreeState`. The parameters that it trains
        are y; evaluate, and save for use, ``eval_params(opt_state, params)``. What is
        written into y besides is lost by and by, as z has none of it. Of parameters in
        16 bits its ``init`` warns: put `master_weights` around it.

    Raises:
        ValueError: b1 outside (0, 1); a negative number; an update without ``params``,
            or with the state of another b1; a ``base`` that freezes a leaf.
        TreeMismatch: gradients or state do not fit the parameters; names the path.

    Cost: that of ``base``, and two passes over y and z, in place under `donate`; one
    fresh copy of the parameters where weights decay here.

    Source: Defazio et al., The Road Less Scheduled, algorithm 1 and section 4.

    >>> from fsfunc.optim.descent import sgd
    >>> optimizer = schedule_free(sgd(1.0), 1.0, b1=0.5)
    >>> y, state = torch.zeros(1), optimizer.init(torch.zeros(1))
    >>> for _ in range(2):
    ...     y, state = optimizer.apply(-torch.ones(1), state, y)
    >>> y, state.z, state.evaluated(y)
    (tensor([1.7500]), tensor([2.]), tensor([1.5000]))
    """
    check_takes_plainly("schedule_free", base)
    f = _ScheduleFree(base, learning_rate, b1, weight_lr_power, weight_decay, mask)
    return Optimizer(f.init, f.update, f.apply, elementwise=base.elementwise)


@dataclass(frozen=True)
class _ScheduleFree:
    """The functions of a schedule-free optimizer."""

    base: Optimizer
    learning_rate: float | Schedule
    b1: float
    weight_lr_power: float
    weight_decay: float
    mask: Mask | None

    def init(self, params: Tree) -> ScheduleFreeState:
        if (path := next(left_out(self.base, params), None)) is not None:
            raise ValueError(
                f"the base of schedule_free leaves {path!r} out, which decays and is "
                "averaged here all the same: put masked, or the partition that freezes "
                "it, around: ff.masked(ff.schedule_free(...), mask)"
            )
        z = copied(params)
        warn_narrow("schedule_free", z, (0.0, "1 / n of a change, if n is large"))
        return ScheduleFreeState(0, self.b1, 0.0, 0.0, z, self.base.init(z))

    def weighed(self, state: ScheduleFreeState) -> tuple[Any, Any, ScheduleFreeState]:
        """The rate, the weight c of the next z, and a state that has counted it."""
        if state.b1 != self.b1:
            raise ValueError(
                f"the state is of schedule_free(b1={state.b1}), between whose z and x "
                f"the parameters lie, and b1 is {self.b1}: go on with that one"
            )
        rate = rate_at(self.learning_rate, state.count)
        max_lr = max(state.max_lr, rate)
        weight = max_lr**self.weight_lr_power
        total = state.weight_sum + weight
        counted = state._replace(count=state.count + 1, weight_sum=total, max_lr=max_lr)
        return rate, weight / total if total else 0.0, counted

    def update(self, grads: Tree, state: ScheduleFreeState, params: Tree = None):
        check_params_given(params, "schedule_free")
        z = state.z
        rate, c, state = self.weighed(state)
        steps, inner = self.base.update(grads, state.base, z)
        if self.weight_decay:
            matched = Matched.of(floating(params), steps)
            decays = matched.decays(self.weight_decay, self.mask)
            (steps,) = matched.composed(lambda y, u, d: [u - rate * d * y], decays)
        new_z = summed(z, steps)
        k = self.b1 * c + 1 - self.b1

        def moved(y: Tensor, u: Tensor, old: Tensor, _: Any) -> list[Tensor]:
            return [c * (old - y) + k * u, old]

        matched = Matched.of(floating(params), steps, z)
        updates, _ = matched.composed(moved)
        return updates, state._replace(z=new_z, base=inner)

    def apply(self, grads: Tree, state: ScheduleFreeState, params: Tree) -> Phases:
        z = state.z
        matched = Matched.of(params, grads, z)
        if matched.differentiated:
            return (yield from added(self.update)(grads, state, params))
        rate, c, counted = self.weighed(state)
        decays = matched.decays(rate * self.weight_decay, self.mask)
        base = self.base.phases(grads, state.base, z, True)
        next(base)
        yield
        # y = ((1 - c) b1 x) + k z: the first part before the base writes over z.
        old = copied(_only(matched, params)) if self.weight_decay else None
        y = _mixed(params, _only(matched, z), 1 - c, -(1 - c) * (1 - self.b1))
        new_z, inner = finished(base)
        if self.weight_decay:
            (new_z,) = fused(Matched.of(new_z, old), _decay, decays)
        k = self.b1 * c + 1 - self.b1
        with inside(frame().replace(donated=Everything())):  # y is ours by now
            y = _mixed(y, _only(matched, new_z), 1.0, k)
        return y, counted._replace(z=new_z, base=inner)


def _only(matched: Matched, values: Tree) -> Tree:
    """``values``, like the parameters, with None for leaves that are not updated."""
    active = set(matched.active)
    updated = [i in active for i in range(len(matched.trees[0]))]
    return chosen(matched.treedef, updated, values, what="parameters")


def _mixed(ys: Tree, zs: Tree, by: float, add: float) -> Tree:
    """``by y + add z``, written over y where that may be."""
    matched = Matched.of(ys, zs)
    return fused(matched, partial(_mix, by=by, add=add))[0]


def _mix(ys: Any, zs: Any, *, by: float, add: float) -> None:
    if by != 1:
        torch._foreach_mul_(ys, by)
    torch._foreach_add_(ys, zs, alpha=add)


def _decay(zs: Any, ys: Any, *, weight_decay: Any) -> None:
    torch._foreach_add_(zs, ys, alpha=-weight_decay)
