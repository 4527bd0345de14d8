"""``slowmo``: local steps, and now and then one with a momentum of all ranks.

A rank remembers the parameters that all last began from; their change since, as a mean
over the ranks, is the gradient of a second, slow optimizer with momentum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from fsfunc.comm.groups import RankGroup
from fsfunc.comm.mesh import Axis, Mesh
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.core.frames import transformed
from fsfunc.optim.leaves import map_flat
from fsfunc.optim.schedules import Schedule, check_ranges, rate_at
from fsfunc.transforms.local.averaging import LocalState, apply_kernel, assign, average
from fsfunc.transforms.local.local_updates import LocalUpdates
from fsfunc.tree.types import PyTree

_P = ParamSpec("_P")
_R = TypeVar("_R")
_State = TypeVar("_State", bound=Any)


class SlowMomentum(NamedTuple):
    """The parameters that all ranks last began from, and the slow momentum.

    Trees like the parameters, the same on every rank. For ``origins`` see
    `MasterState`.
    """

    anchor: Any
    momentum: Any

    origins = "anchor"


@api_boundary
def slowmo(
    step: Callable[Concatenate[_State, _P], tuple[_State, _R]],
    mesh: Mesh,
    axis: Axis,
    *,
    every: int = 48,
    beta: float = 0.5,
    alpha: float = 1.0,
    lr: float | Schedule,
    average_every: int | None = None,
) -> Callable[Concatenate[LocalState[_State], _P], tuple[LocalState[_State], _R]]:
    """Runs ``step`` on each rank's own copy, with slow momentum each ``every`` steps.

    With x_0 the parameters after the last slow step, at first the initial ones::

        d = (x_0 - mean of the ranks' x) / lr
        m = beta m + d
        x_0 = x_0 - alpha lr m
        x = x_0

    With ``every=1`` and plain SGD of the same rate it is SGD with momentum ``beta``;
    with ``beta=0`` and ``alpha=1`` it is `local_sgd`. The rest of the state stays the
    rank's own, as there.

    Args:
        step: ``step(state, *batch) -> (state, metrics)``, as for `local_sgd`.
        axis: the mesh axis, or several.
        every: the number of steps between two slow steps.
        beta: the decay of slow momentum, not negative.
        alpha: the slow learning rate, not negative.
        lr: the learning rate of the step's own optimizer, or its schedule (with the
            count of the last step): the unit of m, above 0.
        average_every: the number of steps between two plain averages, between slow
            steps; None: there are none.

    Returns:
        A step over a `LocalState`.

    Raises:
        ValueError: a number out of range; a rate of 0 when it is divided by; what
            `local_sgd` refuses.
        RanksDiffer: the ranks' first states differ.

    Cost: in one of ``every`` steps an all-reduce of the rank's floating parameters in
    float32 at least: 2(n-1)/n of their bytes; as much for each average. Memory: x_0 and
    m, twice the rank's parameters (of which a ``shard`` inside has parts).

    Source: Wang et al., SlowMo, 2020; FairScale's ``SlowMoDistributedDataParallel``,
    whose numbers it gives where x_0 is set before the first step, and each step of slow
    momentum follows an average.

    >>> import torch, fsfunc as ff
    >>> mesh = ff.make_mesh({"node": 2}, "simulated")
    >>> optimizer = ff.sgd(0.5)
    >>> step = optimizer(ff.value_and_grad(lambda w, x: w * x))
    >>> step = ff.slowmo(step, mesh, "node", every=1, beta=0.5, lr=0.5)
    >>> def main():
    ...     x = torch.tensor(1.0 + 2.0 * mesh.rank)
    ...     state, seen = ff.init_state(step, torch.tensor(0.0), optimizer, x), []
    ...     for _ in range(2):
    ...         state, _ = step(state, x)
    ...         seen.append(state.copies.params.local.item())
    ...     return seen
    >>> ff.spmd(main, mesh)()
    [[-1.0, -2.5], [-1.0, -2.5]]
    """
    check_ranges("slowmo", beta=beta, alpha=alpha)
    if not callable(lr) and not lr > 0:
        raise ValueError(f"slowmo(lr={lr!r}): the step's learning rate, above 0")
    if average_every is not None and average_every < 1:
        raise ValueError(
            f"slowmo(average_every={average_every!r}): steps, at least 1, or None"
        )
    # The state that goes in and out is another than the inner step's.
    return cast(
        Any,
        transformed(step, SlowMo(mesh, axis, every, (beta, alpha, lr, average_every))),
    )


class SlowMo(LocalUpdates):
    """The interpretation of ``slowmo``."""

    called = "slowmo"

    def __init__(self, mesh: Mesh, axis: Axis, every: int, rates: tuple[Any, ...]):
        super().__init__(mesh, axis, every)
        self.rates = rates

    @property
    def configuration(self) -> tuple[tuple[str, Any], ...]:
        names = ("beta", "alpha", "lr", "average_every")
        return (*super().configuration, *zip(names, self.rates, strict=True))

    def first_fields(self, params: PyTree, where: RankGroup) -> dict[str, Any]:
        clone = lambda xs: [x.clone() for x in xs]  # noqa: E731
        zeros = lambda xs: [torch.zeros_like(x) for x in xs]  # noqa: E731
        trees = (map_flat(make, params, untrainable=None) for make in (clone, zeros))
        return {"slow": SlowMomentum(*trees)}

    def synchronize(
        self,
        state: LocalState,
        from_before: PyTree | None,
        params: PyTree,
        step: int,
        where: RankGroup,
    ) -> tuple[PyTree, dict[str, Any]]:
        beta, alpha, rate, average_every = self.rates
        is_slow_step = step % self.every == 0
        averages = average_every is not None and not step % average_every
        # One rank is its own mean, but has slow momentum as several have.
        if not is_slow_step and not (averages and where.size > 1):
            return params, {}
        means = average(params, where)
        if not is_slow_step:
            return apply_kernel(assign, params, means)[0], {}
        # A rate that is a tensor is not read: that would wait for its device, and in a
        # plan it has no value.
        lr = rate_at(rate, step - 1)
        if not isinstance(lr, Tensor) and not lr > 0:
            raise ValueError(
                f"slowmo: the rate at count {step - 1} is {lr}, by which the change of "
                "the parameters is divided: it must be above 0 at a slow step"
            )

        def kernel(
            params: list[Tensor],
            means: list[Tensor],
            anchors: list[Tensor],
            momenta: list[Tensor],
        ) -> None:
            """Makes one step of slow momentum, in place."""
            change = torch._foreach_sub(anchors, means)
            torch._foreach_div_(change, lr)
            torch._foreach_mul_(momenta, beta)
            torch._foreach_add_(momenta, change)
            torch._foreach_sub_(anchors, torch._foreach_mul(momenta, lr * alpha))
            torch._foreach_copy_(params, anchors)

        params, anchor, momentum = apply_kernel(kernel, params, means, *state.slow)
        return params, {"slow": SlowMomentum(anchor, momentum)}
