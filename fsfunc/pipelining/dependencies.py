"""Dependencies between the actions of a schedule.

An edge (p, c) says that stage c takes outputs of the earlier stage p: c's forward
needs p's, and p's backward needs c's. Without edges given each stage feeds the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fsfunc.pipelining.actions import Action, Schedule, ScheduleError, owners

Edge = tuple[int, int]  # (producer stage, consumer stage)


class Dependencies:
    """The needs of each action of a schedule.

    Gradients are named by "I", also where a whole backward "B" makes them. Where the
    schedule has transfers of its own, what another rank makes is needed in the form
    of the receive that brings it; else the action itself is needed.
    """

    def __init__(self, schedule: Schedule, edges: Iterable[Edge] | None = None) -> None:
        self.rank_of = owners(schedule)
        stages = len(self.rank_of)
        chain = {(s, s + 1) for s in range(stages - 1)}
        self.edges = chain if edges is None else set(edges)
        for producer, consumer in self.edges:
            if not 0 <= producer < consumer < stages:
                raise ScheduleError(
                    f"the edge ({producer}, {consumer}) has to lead from a stage to a "
                    f"later one of the {stages}"
                )
        self.producers = [self._ends(1, 0, s) for s in range(stages)]
        self.consumers = [self._ends(0, 1, s) for s in range(stages)]
        self.explicit = any(not a.is_compute for row in schedule for a in row)

    def _ends(self, here: int, there: int, stage: int) -> list[int]:
        return sorted(edge[there] for edge in self.edges if edge[here] == stage)

    def crosses(self, stage: int, other: int) -> bool:
        return self.rank_of[stage] != self.rank_of[other]

    def needs(self, action: Action) -> Iterator[Action]:
        """Yield what must be done before the action, receives meaning their end."""
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        if kind == "F":
            yield from (
                self._from(producer, action, "F") for producer in self.producers[stage]
            )
        elif kind in ("B", "I"):
            yield Action("F", stage, microbatch)
            yield from (
                self._from(consumer, action, "B") for consumer in self.consumers[stage]
            )
        elif kind == "SF":
            yield Action("F", stage, microbatch)
        elif kind in ("SB", "W"):
            yield Action("I", stage, microbatch)

    def _from(self, stage: int, user: Action, direction: str) -> Action:
        if self.explicit and self.crosses(stage, user.stage):
            return Action(f"R{direction}", user.stage, user.microbatch, stage)
        return Action("F" if direction == "F" else "I", stage, user.microbatch)

    def sends(self, action: Action) -> Iterator[Action]:
        """Yield the sends that follow a compute action."""
        stage, microbatch = action.stage, action.microbatch
        forward = action.kind == "F"
        if forward or action.kind in ("B", "I"):
            for peer in (self.consumers if forward else self.producers)[stage]:
                if self.crosses(stage, peer):
                    yield Action("SF" if forward else "SB", stage, microbatch, peer)


def made(action: Action) -> Action:
    """Return the name under which others need the action: a "B" counts as its "I"."""
    if action.kind == "B":
        return Action("I", action.stage, action.microbatch)
    return action


def other_end(transfer: Action) -> Action:
    """Return the receive of a send, the send of a receive.

    >>> print(other_end(Action("SF", 0, 3, 1)))
    RF3@1<0
    """
    kind, peer = transfer.kind, transfer.peer
    if peer is None:
        raise ScheduleError(f"{transfer} is no transfer: it has no other end")
    letter = "R" if kind[0] == "S" else "S"
    return Action(letter + kind[1], peer, transfer.microbatch, transfer.stage)
