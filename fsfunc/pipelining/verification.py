"""The proof that a schedule runs: complete, in order, without deadlock.

`pipelines` verifies a schedule when ``pipeline`` is called, `handler` again with the
edges of the traced loss, before any message is sent. The checks go from what is cheap
to say to what needs the schedule played: each part once; updates that leave no
gradient over; sends and receives that match; the order on each rank; and at last a run
under the strictest model of messages (`player.ScheduleRun`), which ends or deadlocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from fsfunc.comm.tracebacks import api_boundary
from fsfunc.pipelining.actions import (
    KINDS,
    Action,
    Schedule,
    ScheduleError,
    is_asynchronous,
    parse,
    stages_of,
)
from fsfunc.pipelining.player import (
    Dependencies,
    Edge,
    ScheduleRun,
    name_results,
    other_end,
)


@api_boundary
def verify(
    schedule: Schedule | Sequence[str | Sequence[Action | str]],
    *,
    edges: Iterable[Edge] | None = None,
    n_stages: int | None = None,
    n_microbatches: int | None = None,
) -> None:
    """Raises unless the schedule is right and runs to its end.

    Each stage is on one rank and takes each microbatch forward once, and backward
    once: by B, or by I and then W (nowhere, in a schedule of forwards alone). Every
    action comes after what it needs. Where a stage updates (U), every update has
    gradients to take up, and every gradient of every stage an update. Where the
    schedule has transfers of its own, each edge between two ranks carries one
    message each way for each microbatch, the messages from one rank to another are
    received in the order in which they are sent, and no rank waits for ever, even if
    each send blocks until its receive is posted.

    Args:
        schedule: compute actions alone, or with their transfers; rows of text too.
        edges: pairs (producer stage, later consumer stage); None: a chain.
        n_stages: how many stages there have to be; None: as many as there are.
        n_microbatches: how many microbatches; None: as many as there are.

    Raises:
        ScheduleError: names the rank, the action and what it waits for.

    Cost: time in proportion to the actions; nothing is run or sent.

    >>> from fsfunc.pipelining.schedules import one_f_one_b, parse
    >>> verify(one_f_one_b(4, 8))
    >>> verify(parse(["F0 B0", "B0 F0"]))
    Traceback (most recent call last):
    fsfunc.pipelining.actions.ScheduleError: rank 1: B0@1 comes before F0@1, which...
    """
    schedule = parse(schedule)
    verified_run(schedule, Dependencies(schedule, edges), n_stages, n_microbatches)


def verified_run(
    schedule: Schedule,
    dependencies: Dependencies,
    n_stages: int | None = None,
    n_microbatches: int | None = None,
    *,
    cost: Callable[[Action], float] = lambda action: 0,
    send: float = 0,
) -> ScheduleRun:
    """Returns a schedule's run, after every check of `verify`."""
    _check_complete(schedule, dependencies, n_stages, n_microbatches)
    _check_updates(schedule)
    if dependencies.has_transfers:
        _check_matched(schedule, dependencies)
    _check_order(schedule, dependencies)
    run = ScheduleRun(schedule, dependencies, cost, send)
    _check_ended(schedule, run)
    return run


def peak_microbatches(schedule: Schedule) -> tuple[float, ...]:
    """Returns the most microbatches whose activations each rank saves at one time.

    The unit is one microbatch in all layers of the rank: in one of a rank's v stages
    it counts 1/v. F saves the activations, B or W frees them, I leaves them. A schedule
    of forwards alone saves nothing.

    >>> from fsfunc.pipelining.schedules import interleaved_1f1b, one_f_one_b
    >>> peak_microbatches(one_f_one_b(4, 8)), peak_microbatches(interleaved_1f1b(8, 8))
    ((4.0, 3.0, 2.0, 1.0), (5.5, 4.5, 3.5, 2.5))
    """
    changes = [[a.traits.activation_change for a in row] for row in schedule]
    # Without a backward nothing is saved for one, whatever F's change says.
    frees = any(change < 0 for row_changes in changes for change in row_changes)
    peaks = []
    for row, row_changes in zip(schedule, changes, strict=True):
        counts = accumulate(row_changes if frees else (), initial=0)
        peaks.append(max(counts) / max(len(stages_of(row)), 1))
    return tuple(peaks)


def _check_complete(
    schedule: Schedule,
    dependencies: Dependencies,
    n_stages: int | None,
    n_microbatches: int | None,
) -> None:
    rank_of = dependencies.rank_of
    counts = Counter(action for row in schedule for action in row)
    # `n_stages` and `n_microbatches` say what the caller has; without them the
    # schedule's own largest numbers count, and only gaps are found.
    stages = len(rank_of) if n_stages is None else n_stages
    found_batches = max(action.microbatch for action in counts) + 1
    n_batches = found_batches if n_microbatches is None else n_microbatches
    for action, times in counts.items():
        place = f"rank {rank_of[action.stage]}: {action}"
        if action.stage >= stages or action.microbatch >= n_batches:
            raise ScheduleError(
                f"{place} is impossible: there are {stages} stages and {n_batches} "
                "microbatches, numbered from 0 on"
            )
        if times > 1:
            raise ScheduleError(f"{place} comes {times} times: once is right")
    if len(rank_of) < stages:
        raise ScheduleError(
            f"stage {len(rank_of)} of {stages} is on no rank of the schedule"
        )
    backwards = any(set(action.traits.parts) - {"F"} for action in counts)
    parts_of = {letter: kind.parts for letter, kind in KINDS.items() if kind.parts}
    all_parts = sorted({part for parts in parts_of.values() for part in parts})
    for stage, rank in enumerate(rank_of):
        for m in range(n_batches):
            kinds = [k for k in parts_of if Action(k, stage, m) in counts]
            parts_done = sorted(part for kind in kinds for part in parts_of[kind])
            if parts_done == (all_parts if backwards else ["F"]):
                continue
            needed_kinds = "F, and B or I and W" if backwards else "F"
            raise ScheduleError(
                f"rank {rank}: microbatch {m} of stage {stage} needs {needed_kinds}, "
                f"each once; it has {', '.join(sorted(kinds)) or 'nothing'}"
            )


def _check_updates(schedule: Schedule) -> None:
    if not is_asynchronous(schedule):
        return
    for rank, row in enumerate(schedule):
        due: dict[int, list[int]] = {stage: [] for stage in stages_of(row)}
        for action in row:
            pending = due[action.stage]
            if action.traits.ends_gradients:
                pending.append(action.microbatch)
            elif action.traits.updates:
                if pending[-1:] != [action.microbatch]:
                    last = pending[-1] if pending else None
                    described = (
                        "none" if last is None else f"microbatch {last}'s as last"
                    )
                    raise ScheduleError(
                        f"rank {rank}: {action} is to take up gradients, microbatch "
                        f"{action.microbatch}'s as last, but since the update before "
                        f"there is {described}"
                    )
                pending.clear()
        for stage, pending in due.items():
            if pending:
                raise ScheduleError(
                    f"rank {rank}: no update takes up the gradients of microbatches "
                    f"{pending} of stage {stage}: an update is missing at the end, "
                    f"U{pending[-1]}@{stage}"
                )


def _check_matched(schedule: Schedule, dependencies: Dependencies) -> None:
    rank_of = dependencies.rank_of
    sends = {send for row in schedule for a in row for send in dependencies.sends(a)}
    needed = sends | {other_end(send) for send in sends}
    present = {action for row in schedule for action in row if not action.is_compute}
    for action in sorted(needed - present):
        raise ScheduleError(
            f"rank {rank_of[action.stage]} has no {action}; the stages "
            f"{action.stage} and {action.peer} are joined by an edge"
        )
    for action in sorted(present - needed):
        raise ScheduleError(
            f"rank {rank_of[action.stage]}: {action} has no place: no edge between "
            "two ranks carries it"
        )
    sent: dict[tuple[int, int], list[Action]] = {}
    received: dict[tuple[int, int], list[Action]] = {}
    for action in (a for row in schedule for a in row):
        rank, peer_rank = rank_of[action.stage], rank_of[action.peer or 0]
        if action.traits.transfer == ">":
            sent.setdefault((rank, peer_rank), []).append(action)
        elif action.traits.transfer == "<":
            received.setdefault((peer_rank, rank), []).append(action)
    # Messages between two ranks are matched by order: the n-th receive, the n-th send.
    for (source, target), messages in sent.items():
        for send, receive in zip(messages, received[source, target], strict=True):
            if other_end(send) != receive:
                raise ScheduleError(
                    f"rank {target} posts {receive} where rank {source} sends {send}: "
                    "the messages from one rank to another are received in the order "
                    "in which they are sent"
                )


def _check_order(schedule: Schedule, dependencies: Dependencies) -> None:
    for rank, row in enumerate(schedule):
        # Only what is on this rank: waiting for others is the played run's to judge.
        local_actions = {
            name: action for action in row for name in name_results(action)
        }
        done_actions: set[Action] = set()
        for action in row:
            for need in dependencies.needs(action):
                if need in local_actions and need not in done_actions:
                    raise ScheduleError(
                        f"rank {rank}: {action} comes before {local_actions[need]}, "
                        "which it needs"
                    )
            done_actions.update(name_results(action))


def _check_ended(schedule: Schedule, run: ScheduleRun) -> None:
    if all(need is None for need in run.waits):
        return
    lines = []
    for rank, (row, starts) in enumerate(zip(schedule, run.starts, strict=True)):
        n = len(starts)
        if n == len(row):
            lines.append(f"  rank {rank}: has ended")
            continue
        # What is missing is on another rank: of a receive that was posted its sender,
        # else the rank of the needed action itself.
        missing = run.unmet_needs(row[n])
        stage = missing[0].stage
        if missing[0].traits.transfer == "<" and row[n].is_compute:
            stage = missing[0].peer or 0
        waits = ", ".join(map(str, missing))
        lines.append(
            f"  rank {rank}: {row[n]} (entry {n}) waits for {waits} of rank "
            f"{run.dependencies.rank_of[stage]}"
        )
    raise ScheduleError("deadlock: no rank can go on\n" + "\n".join(lines))
