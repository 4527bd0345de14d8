"""Pipeline schedules as data: actions, and their text.

A schedule is a tuple of actions for each rank. The functions that make schedules write
compute actions alone; `transfers.with_transfers` adds what travels between ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

# The directions of messages: activations go forward, gradients backward.
FORWARD, BACKWARD = "F", "B"


@dataclass(frozen=True)
class ActionKind:
    """A kind of action: all that schedules, their player, plans and charts ask of it.

    Work on a microbatch in a stage has the parts "F", the forward, "I", the gradient of
    the inputs, and "W", that of the parameters. Each part is done once, and what others
    need is named by it.

    Args:
        letter: of the action's text; ``title``: in words, as legends have it.
        color: "#rrggbb"; ``reserved``: the nearest of the names that trace viewers have
            colours for.
        parts: those that it does, the one whose results others wait for first.
        costs: the fields of ``timing.Costs`` whose sum it takes.
        needs: parts of its own microbatch and stage that come before it.
        takes, gives: the direction of the messages from other stages that it needs, or
            that it makes for them; "" where it has none.
        holds: by how many it changes the microbatches whose activations are held.
        updates: whether it changes parameters.
        transfer: ">" of a send, "<" of a receive, "" of what computes; ``carries``: the
            direction of a transfer's message.
        run: ``(worker, action) -> None``; None: the method of `runtime.Worker` that has
            its letter.
    """

    letter: str
    title: str
    color: str
    reserved: str = ""
    parts: tuple[str, ...] = ()
    costs: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    takes: str = ""
    gives: str = ""
    holds: int = 0
    updates: bool = False
    transfer: str = ""
    carries: str = ""
    run: Callable[[Any, Action], None] | None = None

    @property
    def is_forward(self) -> bool:
        return "F" in self.parts

    @property
    def ends_gradients(self) -> bool:
        """Whether a microbatch's gradients are all there after it."""
        return "W" in self.parts


# The one list of kinds: one more is added here alone.
_ALL = (
    ActionKind(
        "F", "forward", "#4c7cb8", "rail_response",
        parts=("F",), costs=("f",), takes=FORWARD, gives=FORWARD, holds=1,
    ),
    ActionKind(
        "B", "backward", "#e07b39", "thread_state_iowait",
        parts=("I", "W"), costs=("i", "w"), needs=("F",),
        takes=BACKWARD, gives=BACKWARD, holds=-1,
    ),
    ActionKind(
        "I", "input gradient", "#edb83d", "yellow",
        parts=("I",), costs=("i",), needs=("F",), takes=BACKWARD, gives=BACKWARD,
    ),
    ActionKind(
        "W", "weight gradient", "#4fa37b", "thread_state_running",
        parts=("W",), costs=("w",), needs=("I",), holds=-1,
    ),
    ActionKind("U", "update", "#8b5fa8", "black", costs=("u",), updates=True),
    ActionKind(
        "SF", "send activations", "#8aa9d1", "rail_idle",
        needs=("F",), transfer=">", carries=FORWARD,
    ),
    ActionKind(
        "SB", "send gradients", "#ecae85", "rail_animation",
        needs=("I",), transfer=">", carries=BACKWARD,
    ),
    ActionKind(
        "RF", "receive activations", "#8aa9d1", "rail_idle",
        transfer="<", carries=FORWARD,
    ),
    ActionKind(
        "RB", "receive gradients", "#ecae85", "rail_animation",
        transfer="<", carries=BACKWARD,
    ),
)  # fmt: skip
KINDS = {kind.letter: kind for kind in _ALL}
# The part whose results go in a direction.
MADE_BY = {FORWARD: "F", BACKWARD: "I"}

_TEXT = re.compile(r"([A-Z]+)(\d+)(?:@(\d+))?(?:([<>])(\d+))?")


class ScheduleError(ValueError):
    """A schedule that cannot be made, or that cannot run; says where and why."""


@dataclass(frozen=True, order=True)
class Action:
    """One thing that a rank does for one stage and one microbatch.

    Args:
        kind: "F" forward, "B" the whole backward, "I" the gradient of the inputs, "W"
            the gradient of the parameters; "U" updates the parameters by the
            gradients since the last update, of which the microbatch's is the last;
            "SF" and "RF" send and receive activations, "SB" and "RB" gradients.
        stage: the stage whose action it is, in 0..n_stages - 1.
        microbatch: in 0..n_microbatches - 1.
        peer: of a transfer, the stage at the other end; else None.

    Raises:
        ScheduleError: an unknown kind, a number below 0, a peer that is missing or
            has no place here.

    >>> print(Action("F", 5, 3), Action("SF", 5, 3, 6), Action("RB", 5, 3, 6))
    F3@5 SF3@5>6 RB3@5<6
    """

    kind: str
    stage: int
    microbatch: int
    peer: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ScheduleError(
                f"no action has the kind {self.kind!r}: take one of {', '.join(KINDS)}"
            )
        wanted = "no peer" if self.is_compute else "a peer, the stage at the other end"
        right = self.peer is None if self.is_compute else _counts_from_zero(self.peer)
        if not right:
            raise ScheduleError(f"{self.kind} has {wanted}; got peer={self.peer!r}")
        if not (_counts_from_zero(self.stage) and _counts_from_zero(self.microbatch)):
            raise ScheduleError(
                f"{self.kind} needs integers from 0 on, got stage={self.stage!r} and "
                f"microbatch={self.microbatch!r}"
            )

    @property
    def is_compute(self) -> bool:
        return not KINDS[self.kind].transfer

    @property
    def of_kind(self) -> ActionKind:
        """All that is to be known of its kind."""
        return KINDS[self.kind]

    def text(self, *, stage: bool = True) -> str:
        """Return the action as text, with or without its own stage."""
        at = f"@{self.stage}" if stage else ""
        to = "" if self.peer is None else f"{self.of_kind.transfer}{self.peer}"
        return f"{self.kind}{self.microbatch}{at}{to}"

    def __str__(self) -> str:
        return self.text()


Schedule = tuple[tuple[Action, ...], ...]  # one tuple for each rank


def parse(rows: Iterable[str | Iterable[Action | str]]) -> Schedule:
    """Return the schedule that the rows say, one row for each rank.

    A row is a string of actions between blanks, or a sequence of actions and strings.
    `F3@5` is the forward of microbatch 3 in stage 5; `F3` is that of the stage that
    has the rank's own number. `SF3@5>6` sends to stage 6, `RF3@6<5` receives from
    stage 5. Nothing is checked beyond the text: that is `verify`'s part.

    Raises:
        ScheduleError: an entry that is no action; names rank and place. No rows.

    >>> schedule = parse(["F0 F1 B0 B1", "F0 B0 F1 B1"])
    >>> schedule[1][0]
    Action(kind='F', stage=1, microbatch=0, peer=None)
    >>> parse([["F0@1", "SF0@1>2"], [Action("RF", 2, 0, 1)]])[0][1].peer
    2
    """
    schedule = []
    if isinstance(rows, str) or not isinstance(rows, Iterable):
        raise ScheduleError(
            f"{rows!r} is no schedule, which is a list of rows, one for each rank, "
            'such as ["F0 B0", "F0 B0"], or what a function of ff.schedules returns'
        )
    for rank, row in enumerate(rows):
        entries = row.split() if isinstance(row, str) else row
        schedule.append(
            tuple(_action(entry, rank, at) for at, entry in enumerate(entries))
        )
    return tuple(schedule)


def owners(schedule: Schedule) -> tuple[int, ...]:
    """Return the rank of each stage.

    Raises:
        ScheduleError: no stage at all, a stage on two ranks, or a gap in the numbers.

    >>> owners(parse(["F0@0 F0@3", "F0@1 F0@2"]))
    (0, 1, 1, 0)
    """
    rank_of: dict[int, int] = {}
    for rank, row in enumerate(schedule):
        for action in row:
            if rank_of.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"rank {rank} has {action}, but stage {action.stage} is on rank "
                    f"{rank_of[action.stage]}: a stage belongs to one rank"
                )
    missing = sorted(set(range(max(rank_of, default=0) + 1)) - set(rank_of))
    if missing:
        raise ScheduleError(
            f"stage {missing[0]} is on no rank; the schedule has "
            f"{sorted(rank_of) or 'no action'}: stages are numbered from 0 on"
        )
    return tuple(rank_of[stage] for stage in sorted(rank_of))


def stages_of(row: Iterable[Action]) -> tuple[int, ...]:
    """Return the stages of a rank, in ascending order."""
    return tuple(sorted({action.stage for action in row}))


def forward_only(schedule: Schedule) -> Schedule:
    """Return the forward actions alone, in the same places and order.

    >>> print(listing(forward_only(parse(["F0 F1 B0 B1", "F0 B0 F1 B1"]))))
    0: F0 F1
    1: F0 F1
    """
    return tuple(tuple(a for a in row if a.of_kind.is_forward) for row in schedule)


def is_asynchronous(schedule: Schedule) -> bool:
    """Return whether stages update in between: whether there is an action U.

    >>> is_asynchronous(parse(["F0 B0 U0"])), is_asynchronous(parse(["F0 B0"]))
    (True, False)
    """
    return any(action.of_kind.updates for row in schedule for action in row)


def texts(schedule: Schedule) -> tuple[tuple[str, ...], ...]:
    """Return the text of every action: `F3` where a rank has just its own stage.

    >>> texts(parse(["F0@0", "F0@1 F0@2"]))
    (('F0',), ('F0@1', 'F0@2'))
    """
    return tuple(
        tuple(action.text(stage=stages_of(row) != (rank,)) for action in row)
        for rank, row in enumerate(schedule)
    )


def listing(schedule: Schedule) -> str:
    """Return the schedule for reading: one line for each rank.

    >>> print(listing(parse(["F0 SF0>1 RB0<1 B0", "RF0<0 F0 B0 SB0>0"])))
    0: F0 SF0>1 RB0<1 B0
    1: RF0<0 F0 B0 SB0>0
    """
    width = len(str(max(len(schedule) - 1, 0)))
    lines = (f"{r:>{width}}: {' '.join(row)}" for r, row in enumerate(texts(schedule)))
    return "\n".join(line.rstrip() for line in lines)


def _action(entry: Action | str, rank: int, at: int) -> Action:
    if isinstance(entry, Action):
        return entry
    match = _TEXT.fullmatch(entry) if isinstance(entry, str) else None
    known = None if match is None else KINDS.get(match[1])
    if match is None or known is None or (match[4] or "") != known.transfer:
        raise ScheduleError(
            f"rank {rank}, entry {at}: {entry!r} is no action; write F3, B3, I3, W3 "
            "or U3 for microbatch 3, F3@5 for that of stage 5, SF3>6 to send to stage "
            "6, RF3<4 to receive from stage 4 (SB, RB for gradients)"
        )
    kind, microbatch, stage, _, peer = match.groups()
    return Action(
        kind,
        rank if stage is None else int(stage),
        int(microbatch),
        None if peer is None else int(peer),
    )


def _counts_from_zero(value: object) -> bool:
    return type(value) is int and value >= 0  # not bool


def ranks_for(n_stages: int, n_microbatches: int, chunks: int = 1) -> int:
    """Return the number of ranks that hold `n_stages` stages, `chunks` on each.

    Raises:
        ScheduleError: a count below 1, or stages that the chunks do not divide.

    >>> ranks_for(8, 4, chunks=2)
    4
    """
    given = {"n_stages": n_stages, "n_microbatches": n_microbatches, "chunks": chunks}
    for name, value in given.items():
        if not _counts_from_zero(value) or value < 1:
            raise ScheduleError(f"{name} must be an integer from 1 on, got {value!r}")
    if n_stages % chunks:
        raise ScheduleError(
            f"{n_stages} stages do not come to {chunks} on each rank: take a multiple "
            f"of chunks={chunks}"
        )
    return n_stages // chunks


def rounds_of(n_microbatches: int, ranks: int) -> list[range]:
    """Return the microbatches in rounds of P each, or of more where P divides them not.

    >>> rounds_of(3, 4), rounds_of(8, 4), rounds_of(11, 4)
    ([range(0, 3)], [range(0, 4), range(4, 8)], [range(0, 6), range(6, 11)])
    """
    count = max(1, n_microbatches // ranks)
    size, longer = divmod(n_microbatches, count)
    starts = [n * size + min(n, longer) for n in range(count + 1)]
    return [range(a, b) for a, b in zip(starts, starts[1:], strict=False)]


def numbered(pattern: Sequence[tuple[str, int]], n_microbatches: int) -> tuple:
    """Return the actions of a pattern of (kind, stage).

    The n-th time that a pair appears it is microbatch n; what would be past the last
    microbatch is left out.
    """
    seen: dict[tuple[str, int], int] = {}
    row = []
    for kind, stage in pattern:
        microbatch = seen.setdefault((kind, stage), 0)
        seen[kind, stage] += 1
        if microbatch < n_microbatches:
            row.append(Action(kind, stage, microbatch))
    return tuple(row)
