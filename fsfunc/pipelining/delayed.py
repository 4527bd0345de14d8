"""Asynchronous schedules: stages update in between, and gradients come late."""

from __future__ import annotations

from fsfunc.pipelining.actions import Action, Schedule, ScheduleError
from fsfunc.pipelining.synchronous import one_f_one_b


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
