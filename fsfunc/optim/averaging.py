"""Averages of the parameters over the steps, beside any optimizer.

``ema`` and ``swa`` average the parameters that another optimizer makes.
``schedule_free`` trains at a point between the optimizer's own iterate and the average,
in place of a schedule. `eval_params` finds the averages in a state, for evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.attribution import warn
from fsfunc.core.frames import frame, inside
from fsfunc.optim.in_place import run_kernel
from fsfunc.optim.leaves import (
    Mask,
    Tree,
    flatten_like,
    select_leaves,
    stored_dtype,
    trainable_copy,
    trainable_only,
)
from fsfunc.optim.masking import frozen_paths
from fsfunc.optim.matching import Matched
from fsfunc.optim.optimizer import (
    Optimizer,
    Phases,
    State,
    apply_from_update,
    begin_step,
    check_takes_plain_gradients,
    finish_step,
    from_phases,
    optimizer_factory,
    sum_out_of_place,
)
from fsfunc.optim.schedules import Schedule, check_params_given, rate_at
from fsfunc.sharded.donated import Everything
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.plain_leaves import copy_placements
from fsfunc.tree.types import PyTree


class AverageState(NamedTuple):
    """The counts of updates and of those averaged, the average, and the inner state.

    ``average`` is a tree like the parameters, in the same layout, with None for leaves
    that have no derivative; `eval_params` returns it as parameters. ``inner`` is the
    state of the optimizer.
    """

    count: int
    averaged: int
    average: PyTree
    inner: State

    def evaluated(self, params: Tree) -> Tree:
        """Returns the average."""
        return self.average


@optimizer_factory
def ema(
    optimizer: Optimizer,
    decay: float = 0.999,
    *,
    start: int = 0,
    every: int = 1,
    dtype: torch.dtype | None = None,
) -> Optimizer:
    """Adds an exponential moving average of the parameters to ``optimizer``.

    After an update, as ``torch.optim.swa_utils.get_ema_multi_avg_fn`` does it::

        average = decay average + (1 - decay) p         p itself at the first

    Args:
        optimizer: whatever trains the parameters.
        decay: of the average, in [0, 1).
        start: how many updates are left out.
        every: that one in so many counts.
        dtype: of the average; that of each parameter without it, with a warning where
            that has too few bits for ``decay``.

    Returns:
        the optimizer; its state is an `AverageState`. Before the first update the
        average is the parameters that ``init`` was given.

    Raises:
        ValueError: a decay outside [0, 1); ``start`` below 0; ``every`` below 1; an
            update without ``params``.
        TreeMismatch: the average does not fit the parameters; names the path.

    Cost: no communication; that of ``optimizer``, and one fused pass over the average,
    in place under `donate`.

    >>> from fsfunc.optim.descent import sgd
    >>> optimizer = ema(sgd(1.0), 0.5)
    >>> w, state = torch.zeros(2), optimizer.init(torch.zeros(2))
    >>> for _ in range(2):
    ...     w, state = optimizer.apply(-torch.ones(2), state, w)
    >>> w, state.average
    (tensor([2., 2.]), tensor([1.5000, 1.5000]))
    """

    weight = lambda averaged_count: 1 - decay if averaged_count else 1.0  # noqa: E731
    least = 1 - decay, f"1 - {decay} of a change"
    functions = _Averaging("ema", optimizer, weight, start, every, dtype, least)
    return functions.make_optimizer()


# By dtype: a change of less than this share of a number is rounded away.
_SMALLEST_CHANGE = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


def warn_narrow(
    name: str, average: Tree, least: tuple[float, str], advice: str = ""
) -> None:
    """Warns of averages whose dtype has too few bits for their moves.

    Args:
        least: the least share of a change by which an average moves, and its words.
        advice: its start, where there is another than `master_weights`.
    """
    dtypes = {
        stored_dtype(x) for x in tree.leaves(average, is_sharded) if x is not None
    }
    stuck = [str(k) for k in dtypes if least[0] < _SMALLEST_CHANGE.get(k, 0.0)]
    if stuck:
        warn(
            f"{name}'s averages are as narrow as the parameters: in {min(stuck)} one "
            f"does not move by {least[1]}. Give {advice}"
            f"ff.master_weights(ff.{name}(optimizer)), which averages those",
        )


@optimizer_factory
def swa(
    optimizer: Optimizer,
    *,
    start: int = 0,
    every: int = 1,
    dtype: torch.dtype | None = None,
) -> Optimizer:
    """Adds the mean of the parameters after its updates to ``optimizer``.

    ``average = average + (p - average) / (n + 1)`` after n of them, as
    ``torch.optim.swa_utils.AveragedModel`` does it.

    Args:
        optimizer: whatever trains the parameters.
        start: how many updates are left out.
        every: that one in so many counts.
        dtype: of the average; that of each parameter without it, with a warning where
            that has 16 bits.

    Returns:
        the optimizer; its state is an `AverageState`. Before the first update that
        counts the average is the parameters that ``init`` was given.

    Raises:
        ValueError: ``start`` below 0; ``every`` below 1; an update without ``params``.
        TreeMismatch: the average does not fit the parameters; names the path.

    Cost: no communication; that of ``optimizer``, and one fused pass over the average
    where an update counts, in place under `donate`.

    Source: Izmailov et al., Averaging Weights Leads to Wider Optima, algorithm 1.

    >>> from fsfunc.optim.descent import sgd
    >>> optimizer = swa(sgd(1.0), start=1)
    >>> w, state = torch.zeros(2), optimizer.init(torch.zeros(2))
    >>> for _ in range(3):
    ...     w, state = optimizer.apply(-torch.ones(2), state, w)
    >>> w, state.average, state.averaged  # the mean of 2 and 3
    (tensor([3., 3.]), tensor([2.5000, 2.5000]), 2)
    """
    weight = lambda averaged_count: 1 / (averaged_count + 1)  # noqa: E731
    least = 0.0, "1 / n of a change, if n is large"
    functions = _Averaging("swa", optimizer, weight, start, every, dtype, least)
    return functions.make_optimizer()


@dataclass(frozen=True, eq=False)
class _Averaging:
    """The functions of `ema` and `swa`: an average that moves towards the parameters.

    Args:
        weight: from the number of updates averaged so far to the share of the way that
            the average moves.
        least: see `warn_narrow`.
    """

    name: str
    optimizer: Optimizer
    weight: Callable[[int], float]
    start: int
    every: int
    dtype: torch.dtype | None
    least: tuple[float, str]

    def make_optimizer(self) -> Optimizer:
        check_takes_plain_gradients(self.name, self.optimizer)
        is_elementwise = self.optimizer.elementwise
        return from_phases(self.init, self.phases, elementwise=is_elementwise)

    def init(self, params: Tree) -> AverageState:
        average = trainable_copy(params, self.dtype)
        if self.dtype is None:
            warn_narrow(self.name, average, self.least, "dtype=torch.float32, or ")
        return AverageState(0, 0, average, self.optimizer.init(params))

    def phases(
        self, grads: Tree, state: AverageState, params: Tree, returns_params: bool
    ) -> Phases:
        check_params_given(params, self.name)
        # Here for its errors alone: below the optimizer has written already.
        Matched.of(state.average, trainable_only(params))
        step = self.optimizer.phases(grads, state.inner, params, returns_params)
        new_tree, inner = yield from step
        count, averaged, average, _ = state
        if count >= self.start and (count - self.start) % self.every == 0:
            new_params = trainable_only(
                new_tree if returns_params else sum_out_of_place(params, new_tree)
            )
            share = self.weight(averaged)
            matched = Matched.of(average, new_params)
            if returns_params:
                kernel = partial(torch._foreach_lerp_, weight=share)
                (average,) = run_kernel(matched, kernel)
            else:
                average = matched.map_params(lambda a, p: a.lerp(p.to(a.dtype), share))
            averaged += 1
        return new_tree, AverageState(count + 1, averaged, average, inner)


def eval_params(opt_state: Any, params: Tree) -> Tree:
    """Returns the averages in an optimizer's state, as parameters to evaluate.

    Args:
        opt_state: of an optimizer in which somewhere is `ema`, `swa` or
            `schedule_free`, or a state of one's own with a method ``evaluated(params)``
            that gives a tree like them, with None for leaves that it does not have.
        params: those that are trained, of the same step.

    Returns:
        a tree like ``params``, in their layouts and dtypes; what is not averaged is as
        it is there. It may share memory with the state: read it before the next donated
        step.

    Raises:
        ValueError: nothing in the state is averaged.

    Cost: no communication; at most a copy of the rank's parameters.

    >>> import torch
    >>> from fsfunc.optim.averaging import ema
    >>> from fsfunc.optim.descent import sgd
    >>> from fsfunc.optim.transformations import chain, clip_by_value
    >>> optimizer = chain(clip_by_value(1.0), ema(sgd(0.5), 0.5))
    >>> w, state = torch.zeros(1), optimizer.init(torch.zeros(1))
    >>> for _ in range(2):
    ...     w, state = optimizer.apply(-torch.ones(1), state, w)
    >>> w, eval_params(state, w)
    (tensor([1.]), tensor([0.7500]))
    """
    found_averages = [x.evaluated(params) for x in _averaging_states(opt_state)]
    if not found_averages:
        raise ValueError(
            "nothing in this state is averaged: give the state of an optimizer made by "
            "ff.ema, ff.swa or ff.schedule_free (of a TrainState its opt_state)"
        )
    _, treedef = tree.flatten(params, is_sharded)
    averages = params
    for average in found_averages:
        averages = _fill_none(treedef, average, averages)
    matched = Matched.of(trainable_only(params), trainable_only(averages))
    dtypes = [{b.dtype for b in column.tensors} for column in matched.buffers]
    if dtypes[0] == dtypes[1] and len(dtypes[0]) < 2:  # nothing to cast: no copy
        return copy_placements(averages, params)
    cast = matched.map_params(lambda p, average: average.to(p.dtype))
    return copy_placements(_fill_none(treedef, cast, averages), params)


def _fill_none(treedef: tree.TreeDef, values: Tree, others: Tree) -> Tree:
    """Returns ``values``, with ``others`` where they are None."""
    is_given = [x is not None for x in flatten_like(treedef, values, "averages")]
    return select_leaves(treedef, is_given, values, others, "averages")


def _averaging_states(state: State) -> Iterator[Any]:
    """Finds the outermost states in ``state`` that have averages."""
    if callable(getattr(type(state), "evaluated", None)):
        yield state
    elif isinstance(state, Mapping):
        for inner in state.values():
            yield from _averaging_states(inner)
    elif isinstance(state, (tuple, list)):
        for inner in state:
            yield from _averaging_states(inner)


class ScheduleFreeState(NamedTuple):
    """The count of updates, the base iterate z, and the weights of the average.

    The parameters that are trained are y, where gradients are taken. `eval_params`
    returns x, the average, which is ``(y - (1 - b1) z) / b1``. ``weight_sum`` is that
    of the weights of all updates, ``max_lr`` the largest learning rate so far. ``base``
    is the state of the optimizer that steps z. For ``origins`` see `MasterState`.
    """

    count: int
    b1: float
    weight_sum: float
    max_lr: float
    z: PyTree
    base: State

    origins = "z"

    def evaluated(self, params: Tree) -> Tree:
        """x, the average: y = b1 x + (1 - b1) z solved for x, which is not stored."""
        b1 = self.b1
        matched = Matched.of(trainable_only(params), self.z)
        return matched.map_params(lambda y, z: (y - (1 - b1) * z) / b1)


@optimizer_factory
def schedule_free(
    base: Optimizer,
    learning_rate: float | Schedule,
    *,
    b1: float = 0.9,
    weight_lr_power: float = 2.0,
    weight_decay: float = 0.0,
    mask: Mask | None = None,
) -> Optimizer:
    """Makes Defazio's schedule-free form of ``base``: its rate needs no decay.

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
        mask: ``mask(path, leaf)`` returns whether a leaf decays so; by default all do.

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
    check_takes_plain_gradients("schedule_free", base)
    f = _ScheduleFree(base, learning_rate, b1, weight_lr_power, weight_decay, mask)
    return Optimizer(f.init, f.update, f.apply, elementwise=base.elementwise)


class _WeightedStep(NamedTuple):
    """The numbers of one step: the rate, the weight c of the next z in the average.

    ``state`` has counted the step.
    """

    rate: float
    weight: float
    state: ScheduleFreeState


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
        if (path := next(frozen_paths(self.base, params), None)) is not None:
            raise ValueError(
                f"the base of schedule_free leaves {path!r} out, which decays and is "
                "averaged here all the same: put masked, or the partition that freezes "
                "it, around: ff.masked(ff.schedule_free(...), mask)"
            )
        z = trainable_copy(params)
        warn_narrow("schedule_free", z, (0.0, "1 / n of a change, if n is large"))
        return ScheduleFreeState(0, self.b1, 0.0, 0.0, z, self.base.init(z))

    def weigh(self, state: ScheduleFreeState) -> _WeightedStep:
        """Returns the numbers of the next step."""
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
        return _WeightedStep(rate, weight / total if total else 0.0, counted)

    def update(
        self, grads: Tree, state: ScheduleFreeState, params: Tree = None
    ) -> tuple[Tree, ScheduleFreeState]:
        check_params_given(params, "schedule_free")
        z = state.z
        rate, c, state = self.weigh(state)
        steps, inner = self.base.update(grads, state.base, z)
        if self.weight_decay:
            matched = Matched.of(trainable_only(params), steps)
            decays = matched.decays(self.weight_decay, self.mask)
            (steps,) = matched.map_rule(lambda y, u, d: [u - rate * d * y], decays)
        new_z = sum_out_of_place(z, steps)
        # With x as above, new y - y = c (z - y) + (b1 c + 1 - b1) (new z - z).
        k = self.b1 * c + 1 - self.b1

        def move(y: Tensor, u: Tensor, old_z: Tensor, _: float) -> list[Tensor]:
            return [c * (old_z - y) + k * u, old_z]

        matched = Matched.of(trainable_only(params), steps, z)
        updates, _ = matched.map_rule(move)
        return updates, state._replace(z=new_z, base=inner)

    def apply(self, grads: Tree, state: ScheduleFreeState, params: Tree) -> Phases:
        z = state.z
        matched = Matched.of(params, grads, z)
        if matched.differentiated:
            return (yield from apply_from_update(self.update)(grads, state, params))
        rate, c, counted = self.weigh(state)
        decays = matched.decays(rate * self.weight_decay, self.mask)
        base = begin_step(self.base.phases(grads, state.base, z, True))

        def decay(zs: list[Tensor], ys: list[Tensor], *, weight_decay: float) -> None:
            torch._foreach_add_(zs, ys, alpha=-weight_decay)

        yield
        # y = ((1 - c) b1 x) + k z: the first part before the base writes over z.
        old_y = (
            trainable_copy(_only_active(matched, params)) if self.weight_decay else None
        )
        y = _mix(params, _only_active(matched, z), 1 - c, -(1 - c) * (1 - self.b1))
        new_z, inner = finish_step(base)
        if self.weight_decay:
            (new_z,) = run_kernel(Matched.of(new_z, old_y), decay, decays)
        k = self.b1 * c + 1 - self.b1
        # y is memory of this step by now: written over, whatever was donated.
        with inside(frame().replace(donated=Everything())):
            y = _mix(y, _only_active(matched, new_z), 1.0, k)
        return y, counted._replace(z=new_z, base=inner)


def _only_active(matched: Matched, values: Tree) -> Tree:
    """Returns ``values``, like the parameters, with None for leaves not updated."""
    active = set(matched.active)
    mask = [i in active for i in range(len(matched.trees[0]))]
    return select_leaves(matched.treedef, mask, values, title="parameters")


def _mix(ys: Tree, zs: Tree, y_factor: float, z_factor: float) -> Tree:
    """Returns ``y_factor y + z_factor z``, written over y under donation."""

    def mix(ys: list[Tensor], zs: list[Tensor]) -> None:
        if y_factor != 1:
            torch._foreach_mul_(ys, y_factor)
        torch._foreach_add_(ys, zs, alpha=z_factor)

    return run_kernel(Matched.of(ys, zs), mix)[0]
