"""Asynchronous schedules, their staleness, and prediction by momentum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fsfunc.optim import AdamState, SgdState
from fsfunc.optim.leaves import Tree
from fsfunc.optim.matching import Matched
from fsfunc.optim.schedules import Schedule as Rates
from fsfunc.optim.schedules import check_not_negative, rate_at
from fsfunc.pipelining.actions import Action, Schedule, ScheduleError
from fsfunc.pipelining.synchronous import one_f_one_b

Predict = Callable[[Any, Any, int], Any]  # (params, opt_state, updates) -> params


def asynchronous(n_stages: int, n_microbatches: int, *, interval: int = 1) -> Schedule:
    """Return 1F1B in which a stage updates as soon as it has gradients.

    Each stage updates its parameters after every `interval`-th backward, and at the
    end by what is left. A forward uses the parameters as they then are; a backward
    those of its own forward. `staleness` says what comes of it.

    Args:
        n_stages: stages, as many as ranks.
        n_microbatches: microbatches of a batch, from 1 on.
        interval: how many microbatches an update takes up; from M on there is one
            update, and the step is that of `one_f_one_b`.

    Raises:
        ScheduleError: a count below 1.

    Cost: bubble (P-1)(f+b) of a call: the more microbatches, the less; rank r holds
    min(M, P-r) microbatches, and as many versions of its parameters at most.
    Source: Narayanan et al., PipeDream, 2019; Gaunt et al., AMPNet, 2017.

    >>> from fsfunc.pipelining.actions import listing
    >>> print(listing(asynchronous(2, 3)))
    0: F0 F1 B0 U0 F2 B1 U1 B2 U2
    1: F0 B0 U0 F1 B1 U1 F2 B2 U2
    """
    if type(interval) is not int or interval < 1:
        raise ScheduleError(f"interval must be an integer from 1 on, got {interval!r}")
    rows = []
    for row in one_f_one_b(n_stages, n_microbatches):
        made: list[Action] = []
        for action in row:
            made.append(action)
            count = action.microbatch + 1
            if action.kind == "B" and not (count % interval and count < n_microbatches):
                made.append(Action("U", action.stage, action.microbatch))
        rows.append(tuple(made))
    return tuple(rows)


def staleness(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Return how many updates come between a forward and its backward.

    By rank, and there by microbatch: how many updates old the parameters are of which
    the gradient is taken, when it is there (after B or W). In `asynchronous(P, M,
    interval=k)`, with w = P-1-r, it is m // k - max(0, m - w) // k on rank r for
    microbatch m; so min(m, P-1-r) at interval 1, and 0 on the last rank. Without
    updates it is 0.

    Raises:
        ScheduleError: a rank with several stages, or a microbatch without a backward.

    >>> staleness(asynchronous(3, 5))
    ((0, 1, 2, 2, 2), (0, 1, 1, 1, 1), (0, 0, 0, 0, 0))
    """
    rows = []
    for rank, row in enumerate(schedule):
        if len({action.stage for action in row}) > 1:
            raise ScheduleError(f"rank {rank} has several stages: staleness is of one")
        updates, before, found = 0, dict[int, int](), dict[int, int]()
        for action in row:
            if action.kind == "U":
                updates += 1
            elif action.kind == "F":
                before[action.microbatch] = updates
            elif action.kind in ("B", "W"):
                found[action.microbatch] = updates - before[action.microbatch]
        if found.keys() != before.keys():
            raise ScheduleError(f"rank {rank} has forwards without a backward")
        rows.append(tuple(found[m] for m in sorted(found)))
    return tuple(rows)


def momentum_prediction(
    learning_rate: float | Rates,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> Predict:
    """A ``predict`` for `pipeline`: as if every update to come were like the last.

    With s the updates ahead, of ``sgd`` with momentum ``p - s l v``; of
    ``sharded_adam`` ``p - s l m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)``, of t
    updates made. Weight decay is left out. Before the first update nothing changes.

    Args:
        learning_rate: the optimizer's: a number, or ``schedule(count)``.
        b1, b2, eps: those of ``sharded_adam``; ``sgd`` has no use for them.

    Returns:
        ``predict(params, opt_state, updates) -> params``. The state of ``sgd`` or of
        ``sharded_adam`` is found in it, also in that of a ``chain``.

    Raises:
        ValueError: a negative number; later, a state without momentum, or with several.

    Cost: one pass over the rank's parameters, and a copy of them, for each microbatch.

    Source: Chen et al., SpecTrain, 2018.

    >>> import torch, fsfunc as ff
    >>> optimizer = ff.sgd(0.1, momentum=0.5)
    >>> w = torch.ones(2)
    >>> w, state = optimizer.apply(torch.ones(2), optimizer.init(w), w)
    >>> w, ff.momentum_prediction(0.1)(w, state, 2)
    (tensor([0.9000, 0.9000]), tensor([0.7000, 0.7000]))
    """
    check_not_negative(b1=b1, b2=b2, eps=eps)
    if not callable(learning_rate):
        check_not_negative(learning_rate=learning_rate)

    def predict(params: Tree, opt_state: Any, updates: int) -> Tree:
        state = _moments(opt_state)
        count, rate = state.count, rate_at(learning_rate, state.count)
        # Before the first update moments are 0, and so is what they would divide by.
        count = count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
        # A leaf without moments takes no part: they stand where gradients do.
        if isinstance(state, SgdState):
            matched = Matched.of(params, state.momentum)
        else:
            matched = Matched.of(params, state.mu, state.nu)

        def rule(p: Tensor, m: Tensor, *rest: Any):
            *squares, _ = rest
            if not squares:
                return (p - (updates * rate) * m,)
            (v,) = squares
            scale = v.sqrt() / (1 - b2**count) ** 0.5 + eps
            far = updates * rate / (1 - b1**count)
            return p - far * (m / scale).to(p.dtype), v

        return matched.composed(rule, [0.0] * len(matched.active), as_params=True)[0]

    return predict


def _moments(opt_state: Any) -> SgdState | AdamState:
    """The one state with momentum among the states of a chain."""
    found, todo = [], [opt_state]
    while todo:
        state = todo.pop()
        if isinstance(state, AdamState) or (
            isinstance(state, SgdState) and state.momentum is not None
        ):
            found.append(state)
        elif isinstance(state, tuple):
            todo += state
    if len(found) != 1:
        raise ValueError(
            f"the optimizer's state has {len(found)} states with momentum: a "
            "prediction needs one, of sgd(momentum=) or sharded_adam; write another "
            "predict=(params, opt_state, updates) -> params"
        )
    return found[0]
