"""Pipeline schedules as data: what an action is, and how it is written as text.

A schedule is a tuple of actions for each rank, in the order in which the rank runs
them. Stage s is a run of consecutive unit calls of the loss, on one rank; microbatch m
is a part of the batch's rows. With two stages on two ranks and two microbatches::

    rank 0: F0 F1 B0 B1        F0: the forward of microbatch 0, B0: its backward
    rank 1: F0 B0 F1 B1

The functions in `schedules` write compute actions alone; `transfers.with_transfers`
adds the sends and receives between ranks. `pipelines` parses what a user gives, and
`runtime.Worker` runs a rank's row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from fsfunc.comm.groups import RankGroup

# The directions of messages: activations go forward, gradients backward.
FORWARD, BACKWARD = "F", "B"


class ActionWorker(Protocol):
    """The `runtime.Worker` that runs an action, as far as a kind's ``run`` needs it."""

    @property
    def rank_group(self) -> RankGroup: ...
    @property
    def microbatches(self) -> Sequence[object]: ...


@dataclass(frozen=True)
class ActionKind:
    """A kind of action: all that schedules, their player, plans and charts ask of it.

    The work on a microbatch in a stage has three parts: "F" is the forward, "I" the
    gradient of the inputs, "W" the gradient of the parameters. Each part is done once,
    by one action. Actions that need a part name it by its letter.

    Args:
        letter: the action's letters in the text of a schedule.
        title: the kind in words, for legends.
        color: its color in charts, "#rrggbb".
        reserved: the nearest color name that trace viewers know.
        parts: the parts that it does, first the one whose results others wait for.
        costs: the fields of ``timing.Costs`` whose sum is its duration.
        needs: parts of the same microbatch and stage that come before it.
        incoming: the direction of the messages of other stages that it needs, "" for
            none.
        outgoing: the direction of the messages that it makes for other stages, "" for
            none.
        activation_change: 1 if it saves a microbatch's activations, -1 if it frees
            them, else 0.
        updates: whether it changes parameters.
        transfer: ">" for a send, "<" for a receive, "" for what computes.
        carries: the direction of a transfer's message.
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
    incoming: str = ""
    outgoing: str = ""
    activation_change: int = 0
    updates: bool = False
    transfer: str = ""
    carries: str = ""
    run: Callable[[ActionWorker, Action], None] | None = None

    @property
    def is_forward(self) -> bool:
        return "F" in self.parts

    @property
    def ends_gradients(self) -> bool:
        """Whether a stage's gradients of a microbatch are complete after it."""
        return "W" in self.parts


# Parsing, verification, timing, memory and charts read this table alone, so a kind that
# is made of the parts F, I and W is added here and nowhere else
# (`tests/pipelining/test_kinds.py` adds one).
_ALL = (
    ActionKind(
        "F", "forward", "#4c7cb8", "rail_response",
        parts=("F",), costs=("f",), incoming=FORWARD, outgoing=FORWARD,
        activation_change=1,
    ),
    ActionKind(
        "B", "backward", "#e07b39", "thread_state_iowait",
        parts=("I", "W"), costs=("i", "w"), needs=("F",),
        incoming=BACKWARD, outgoing=BACKWARD, activation_change=-1,
    ),
    ActionKind(
        "I", "input gradient", "#edb83d", "yellow",
        parts=("I",), costs=("i",), needs=("F",), incoming=BACKWARD, outgoing=BACKWARD,
    ),
    ActionKind(
        "W", "weight gradient", "#4fa37b", "thread_state_running",
        # Products of weights read the saved activations, so only W frees them, not I.
        parts=("W",), costs=("w",), needs=("I",), activation_change=-1,
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
KINDS: dict[str, ActionKind] = {kind.letter: kind for kind in _ALL}
# The part of a stage's work whose results are sent in a direction.
PART_SENT: dict[str, str] = {FORWARD: "F", BACKWARD: "I"}

# kind, microbatch, "@" stage, ">" or "<" peer: SF3@5>6
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
        needed_peer = (
            "no peer" if self.is_compute else "a peer, the stage at the other end"
        )
        is_valid = (
            self.peer is None if self.is_compute else _counts_from_zero(self.peer)
        )
        if not is_valid:
            raise ScheduleError(
                f"{self.kind} has {needed_peer}; got peer={self.peer!r}"
            )
        if not (_counts_from_zero(self.stage) and _counts_from_zero(self.microbatch)):
            raise ScheduleError(
                f"{self.kind} needs integers from 0 on, got stage={self.stage!r} and "
                f"microbatch={self.microbatch!r}"
            )

    @property
    def is_compute(self) -> bool:
        return not KINDS[self.kind].transfer

    @property
    def traits(self) -> ActionKind:
        """The row of its kind in the table of kinds."""
        return KINDS[self.kind]

    def text(self, *, stage: bool = True) -> str:
        """Returns the action as text, with or without its own stage."""
        own_stage = f"@{self.stage}" if stage else ""
        peer = "" if self.peer is None else f"{self.traits.transfer}{self.peer}"
        return f"{self.kind}{self.microbatch}{own_stage}{peer}"

    def __str__(self) -> str:
        return self.text()


Schedule = tuple[tuple[Action, ...], ...]  # one tuple for each rank


def parse(rows: Iterable[str | Iterable[Action | str]]) -> Schedule:
    """Returns the schedule that rows of text or of actions spell, one row for a rank.

    A row is a string of actions between blanks, or a sequence of actions and strings.
    `F3@5` is the forward of microbatch 3 in stage 5; `F3` is that of the stage that
    has the rank's own number. `SF3@5>6` sends to stage 6, `RF3@6<5` receives from
    stage 5. Only the text is checked here; `verify` proves that a schedule runs.

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
            tuple(
                _parse_action(entry, rank, index) for index, entry in enumerate(entries)
            )
        )
    return tuple(schedule)


def owners(schedule: Schedule) -> tuple[int, ...]:
    """Returns the rank of each stage.

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
    """Returns the stages of a rank, in ascending order."""
    return tuple(sorted({action.stage for action in row}))


def forward_only(schedule: Schedule) -> Schedule:
    """Returns the schedule's forward actions alone, in the same order.

    >>> print(listing(forward_only(parse(["F0 F1 B0 B1", "F0 B0 F1 B1"]))))
    0: F0 F1
    1: F0 F1
    """
    return tuple(tuple(a for a in row if a.traits.is_forward) for row in schedule)


def is_asynchronous(schedule: Schedule) -> bool:
    """Returns whether stages update in between: whether there is an action U.

    >>> is_asynchronous(parse(["F0 B0 U0"])), is_asynchronous(parse(["F0 B0"]))
    (True, False)
    """
    return any(action.traits.updates for row in schedule for action in row)


def splits_backward(schedule: Schedule) -> bool:
    """Returns whether gradients of parameters are actions of their own: W beside I.

    >>> splits_backward(parse(["F0 I0 W0"])), splits_backward(parse(["F0 B0"]))
    (True, False)
    """
    parts = (action.traits.parts for row in schedule for action in row)
    return any("W" in done and "I" not in done for done in parts)


def texts(schedule: Schedule) -> tuple[tuple[str, ...], ...]:
    """Returns the text of every action: `F3` where a rank has just its own stage.

    >>> texts(parse(["F0@0", "F0@1 F0@2"]))
    (('F0',), ('F0@1', 'F0@2'))
    """
    return tuple(
        tuple(action.text(stage=stages_of(row) != (rank,)) for action in row)
        for rank, row in enumerate(schedule)
    )


def listing(schedule: Schedule) -> str:
    """Returns the schedule for reading: one line for each rank.

    >>> print(listing(parse(["F0 SF0>1 RB0<1 B0", "RF0<0 F0 B0 SB0>0"])))
    0: F0 SF0>1 RB0<1 B0
    1: RF0<0 F0 B0 SB0>0
    """
    width = len(str(max(len(schedule) - 1, 0)))
    lines = (f"{r:>{width}}: {' '.join(row)}" for r, row in enumerate(texts(schedule)))
    return "\n".join(line.rstrip() for line in lines)


def _parse_action(entry: Action | str, rank: int, index: int) -> Action:
    if isinstance(entry, Action):
        return entry
    match = _TEXT.fullmatch(entry) if isinstance(entry, str) else None
    known = None if match is None else KINDS.get(match[1])
    if match is None or known is None or (match[4] or "") != known.transfer:
        raise ScheduleError(
            f"rank {rank}, entry {index}: {entry!r} is no action; write F3, B3, I3, W3 "
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
    return type(value) is int and value >= 0  # isinstance would take a bool


def count_ranks(n_stages: int, n_microbatches: int, chunks: int = 1) -> int:
    """Returns the number of ranks that `n_stages` stages are on, `chunks` on each.

    Raises:
        ScheduleError: a count below 1, or stages that the chunks do not divide.

    >>> count_ranks(8, 4, chunks=2)
    4
    """
    counts = {"n_stages": n_stages, "n_microbatches": n_microbatches, "chunks": chunks}
    for name, value in counts.items():
        if not _counts_from_zero(value) or value < 1:
            raise ScheduleError(f"{name} must be an integer from 1 on, got {value!r}")
    if n_stages % chunks:
        raise ScheduleError(
            f"{n_stages} stages do not come to {chunks} on each rank: take a multiple "
            f"of chunks={chunks}"
        )
    return n_stages // chunks


def split_into_rounds(n_microbatches: int, ranks: int) -> list[range]:
    """Returns the microbatches in rounds of P each, of more if P does not divide M.

    >>> split = split_into_rounds
    >>> split(3, 4), split(8, 4), split(11, 4)
    ([range(0, 3)], [range(0, 4), range(4, 8)], [range(0, 6), range(6, 11)])
    """
    count = max(1, n_microbatches // ranks)
    size, longer = divmod(n_microbatches, count)
    starts = [n * size + min(n, longer) for n in range(count + 1)]
    return [range(a, b) for a, b in zip(starts, starts[1:], strict=False)]


def number_microbatches(
    pattern: Sequence[tuple[str, int]], n_microbatches: int
) -> tuple[Action, ...]:
    """Returns the actions of a row that is given as pairs (kind, stage).

    The n-th time that a pair appears it is microbatch n; what would be past the last
    microbatch is left out.
    """
    next_microbatch: dict[tuple[str, int], int] = {}
    row = []
    for kind, stage in pattern:
        microbatch = next_microbatch.setdefault((kind, stage), 0)
        next_microbatch[kind, stage] += 1
        if microbatch < n_microbatches:
            row.append(Action(kind, stage, microbatch))
    return tuple(row)
