"""The type check: a step is run without data, and refused if it has no meaning.

A first call reads in this order: `Sharding.call`; `Sharding.entered`, which asks
whether calls of its kind are known; `TypeCheck.check`, which says whether ranks compare
and whether the step is to be seen to repeat itself; `check`, whose blocks are the
phases; and `_DryRuns.run`, one run. Before its first real call a step is run

=====  ============================  ==============================================
runs   where                         why
=====  ============================  ==============================================
1      place, init_state:            which units take which leaves, and in which order
       `recorder.record`             (forward passes alone; if that raises, with fakes
                                     that remember nothing, and with backward passes)
0, 1   the same, at its end:         it repeats itself: run again, unless a type check
       `steadiness`                  has given torch the same numbers
0, 1   the same, if types are at     `check`, its phase 1; later calls of the same kind
       stake; else a call of a new   are not checked
       kind
0, 1   a call, if nothing recorded   phase 2: it repeats itself
       the step
0, 1   with the next two, beside     phase 3: as another rank, if the step reads its
       the check                     rank (simulated: the last rank of the mesh)
0, 1                                 phase 4: with what ranks have unlike as their own
0-2                                  phase 5: a turn for each other answer to a value,
                                     or a comparison, that the step asks for
0, 1                                 phase 6: with each row twice, if the step took
                                     parts of its rows
=====  ============================  ==============================================

So ``init_state`` has two runs more than a first call: to record, and to see that it
repeats itself. Nothing is computed in any of them, unless a step does not run without
data: then phase 1 and those after it run on copies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import warn
from fsfunc.comm.backends.abstract import AbstractLink, EchoLink
from fsfunc.comm.backends.interrupts import reraising_interrupts
from fsfunc.comm.collective_ops import watching
from fsfunc.comm.comparison import Lines, differing_lines
from fsfunc.comm.groups import RankGroup, get_group
from fsfunc.comm.mesh import Here
from fsfunc.comm.typed_maps import LawError
from fsfunc.core.frames import Frame, frame, inside
from fsfunc.core.tracers import FirstCalls
from fsfunc.sharded.leaf import NotATensor, is_sharded
from fsfunc.sharded.plain_leaves import lay_leaf, placement_of
from fsfunc.tracing.checker import Checker
from fsfunc.tracing.replicas import DueCall, Replicas, compare_whole
from fsfunc.tracing.rules import RowsApart, Unsteady, refused
from fsfunc.tracing.runs import shadows, without_data
from fsfunc.tracing.steadiness import StandIns, check_data, check_steady
from fsfunc.tracing.torch_calls import Asked
from fsfunc.tracing.typed_operators import SharedOp

_LOG = logging.getLogger(__name__)


Exchange = Callable[[Lines], Mapping[int, Lines]]


def check(
    call: Callable[..., Any],
    args: tuple[Any, ...],
    keywords: dict[str, Any],
    at: Here,
    axes: tuple[str, ...],
    *,
    again: bool = False,
    exchange: Exchange = lambda lines: {},
) -> Checker:
    """Raises if ``call(*args, **keywords)`` has no meaning under ``shard``.

    The first argument is replicated, the others are the rank's own. The step is run on
    fake tensors, or, if it cannot, on copies of its arguments, as if all ranks had the
    same. If it reads a value, it is run with several numbers in its place; a rank's own
    value differs between ranks. Of simulated ranks, which run one program, the first to
    come and the last of the mesh (or the first of it, if the last came first) run the
    check, or all of them if the step reads its rank.

    Args:
        at: the rank; ``axes``: those over which the loss is a mean.
        again: whether to run it once more, to check that it repeats itself.
        exchange: exchanges lines with other processes; returns each one's, if they
            differ.

    Returns:
        the checker of the run.

    Raises:
        LawError, NotATensor: names the line, the leaf, and the way out.
        Unsteady: it does not repeat itself.
        Exception: what the step itself raises on copies.
    """
    # Simulated ranks run one program: what one of them has seen holds for the others,
    # but for one more, which stands for all that may do something else.
    notes, last = at.link.notes, at.mesh.size - 1
    key, known = None, None
    if notes is not None:
        count = notes["checks", at.rank] = notes.get(("checks", at.rank), 0) + 1
        key = "checked", count, tree.flatten((args, keywords), is_leaf=is_sharded)[1]
        known, reads_rank = notes.get(key, (None, False))
        if known is not None and not reads_rank:
            if at.rank != (0 if known.stand_ins.rank == last else last):
                return known

    # Phase 1: a run that ends without an error of the step's own. It may raise where
    # there are no data, though it is right: for what fakes remember of forward mode,
    # for a number in place of a value, or because it cannot do without.
    runs = _DryRuns(call, args, keywords, axes)
    seen = runs.attempt(at)
    if seen is None:
        before, runs.forgets = runs.last, True
        seen = runs.attempt(at)
        check_steady(before.said, lambda: runs.last.said)
        turns = runs.last.stand_ins.turns
        while seen is None and runs.turn + 1 < turns:
            runs.turn += 1
            seen = runs.attempt(at)
    if seen is None:
        _LOG.info("a step does not run without data: it is checked on copies")
        runs.on_copies, runs.turn = True, 0
        seen = runs.attempt(at) or runs.run(at, counts=True)

    # Phase 2: the same again. A count that the step keeps would be ahead of its calls.
    if again and known is None and not runs.on_copies:
        check_steady(seen.said, lambda: runs.run(at).said)

    # Phase 3: another rank, which must do the same to what is one value. A simulated
    # one has been seen; else we run as our neighbour, of which we may not have all.
    there, other = seen, at
    if known is not None and not runs.on_copies:
        there, other = known, replace(at, rank=known.stand_ins.rank)
    elif (notes is None or runs.on_copies) and runs.asked & set(axes):
        other = replace(at, rank=_neighbour(at, axes))
        there = runs.attempt(other)
        if there is None:
            runs.forgets = True
            there = runs.attempt(other) or runs.attempt(other, counts=True) or seen
    varying = differing(seen.events, there.events, at.rank, other.rank)
    # Other processes say what they do; those that raise, or do nothing, say no lines.
    if not runs.on_copies:
        mine = [replace(e, constants=(repr(e.constants),)) for e in seen.events]
        said = [("looked", "at"), *((e.name, *e.constants) for e in mine)]
        for rank, lines in exchange(said).items():
            theirs = [SharedOp(name, (text,), "the same place") for name, text in lines]
            if lines:
                varying |= differing(mine, theirs[1:], at.rank, rank)

    # Phase 4: numbers that differ are each rank's own, and may go where those may.
    if varying:
        runs.run(at, varying=varying)

    # Phase 5: the other ways that the step takes where it asks for a value.
    for turn in range(seen.stand_ins.turns):
        if turn != runs.turn:
            runs.attempt(at, turn=turn)

    # Phase 6: a loop over a single row looks like none; rows that stay apart show with
    # more of them. (Nothing else is refused there: all was right as it is.)
    if seen.known.own.were_picked:
        runs.attempt(at, (RowsApart,), times=2)

    seen.rank_local_paths |= runs.rank_local_paths
    seen.drawing |= runs.drawing
    if known is not None:  # all ranks of one process take one for granted
        seen.draws = known.draws
        seen.drawing |= known.drawing
    if notes is not None:
        notes.setdefault(key, (seen, bool(runs.asked & set(axes))))
    return seen


class _DryRuns:
    """Runs of one call in which nothing is sent.

    Attributes:
        asked: the axes whose `axis_index` any of them has read.
        on_copies: whether they run on copies with data.
        forgets: whether fake tensors use no cache, see ``remembering_nothing``.
        turn: selects the numbers in place of values.
        last: the checker of the last one.
        rank_local_paths, drawing: what the checkers of all have seen.
    """

    last: Checker

    def __init__(self, call: Any, args: Any, keywords: Any, axes: tuple[str, ...]):
        self.call, self.args, self.keywords, self.axes = call, args, keywords, axes
        self.asked: set[str] = set()
        self.on_copies, self.forgets, self.turn = False, False, 0
        self.rank_local_paths: set[str] = set()
        self.drawing: set[str] = set()

    def attempt(
        self,
        at: Here,
        refused: tuple[type[Exception], ...] = (LawError, NotATensor),
        **options: Any,
    ) -> Checker | None:
        """A run, or None where it raises what is no refusal."""
        try:
            return self.run(at, **options)
        except refused:
            raise
        except Exception:  # the caller tries it otherwise, at last with real values
            _LOG.debug("a run that checks a step's types raised", exc_info=True)
            return None

    def run(
        self,
        at: Here,
        *,
        turn: int | None = None,
        counts: bool = False,
        varying: Iterable[int] = (),
        times: int = 1,
    ) -> Checker:
        """One run, at a rank, and what the checker saw of it.

        Args:
            turn: the numbers in place of values, if not those of all runs.
            counts: whether a rank's own counts, which may be lengths, stay as they are.
            varying: the events whose constants are each rank's own.
            times: how often each row of what is the rank's own is there.
        """
        alone, copies = at.mesh.axis_size(self.axes) == 1, self.on_copies
        odd = None if counts else _is_odd(at, self.axes)
        stand_ins = StandIns(at.rank, odd, self.turn if turn is None else turn)
        self.last = checker = Checker(self.axes, alone, stand_ins, varying)
        checker.fills = copies
        link = EchoLink(at.rank) if copies else AbstractLink(at.rank)
        now, given = replace(at, link=link), (self.args, self.keywords)
        with without_data(
            given,
            now,
            fake=not copies,
            remembers=not self.forgets,
            restores=False,
            asked=self.asked,
            # Ranks of one process share these, and none draws what another does.
            seed=None if at.link.notes is None else at.rank,
        ) as mode:
            coordinates = at.mesh.coordinates(at.rank)
            args, named = shadows(
                None if copies else mode, given, coordinates, apart=True
            )
            # A shadow is a new tensor: whose it is stands beside it.
            pairs = zip(*map(_leaves, (self.args, args)), strict=False)
            for mine, its in pairs:
                if how := placement_of(mine):
                    lay_leaf(its, how)
            if times > 1:
                rows = tree.map(lambda x: _repeated(x, times), (args[1:], named))
                args, named = (*args[:1], *rows[0]), rows[1]
            args, named = checker.mark_numbers((args, named))
            with (
                inside(frame().replace(tracer=checker, here=now)),
                watching(checker),
                checker,
                Asked(checker),
            ):
                self.call(*args, **named)
        self.rank_local_paths |= checker.rank_local_paths
        self.drawing |= checker.drawing
        return checker


def _leaves(args: Any) -> list[Any]:
    return tree.leaves(args, is_leaf=is_sharded)


def _repeated(x: Any, times: int) -> Any:
    """An own tensor with each of its rows so many times."""
    return torch.cat([x] * times) if isinstance(x, Tensor) and x.ndim else x


def _is_odd(at: Here, axes: tuple[str, ...]) -> bool:
    """True if a rank is odd, along the first axis that has several."""
    coordinates = at.mesh.coordinates(at.rank)
    return next((coordinates[a] for a in axes if at.mesh.axes[a] > 1), 0) % 2 == 1


def _neighbour(at: Here, axes: tuple[str, ...]) -> int:
    """Another rank, next to this one on each of ``axes`` that has several."""
    other = at.mesh.coordinates(at.rank)
    for axis in axes:
        size = at.mesh.axes[axis]
        other[axis] += 1 if other[axis] + 1 < size else -1 if size > 1 else 0
    return at.mesh.rank_at(other)


def differing(events: Any, others: Any, rank: int, other: int) -> set[int]:
    """The events of two ranks that had other constants.

    Raises:
        LawError: they are not the same operators.
    """
    names, others_names = [a.name for a in events], [b.name for b in others]
    if names != others_names:
        alike = zip(names, others_names, strict=False)
        first = next((i for i, (a, b) in enumerate(alike) if a != b), None)
        first = min(len(names), len(others_names)) if first is None else first
        more, fewer, who = events, others, rank
        if len(events) < len(others):
            more, fewer, who = others, events, other
        # One rank has further operators, and what comes after them is the same.
        rest = [x.name for x in fewer[first:]]
        if [x.name for x in more[len(more) - len(rest) :]] == rest:
            extra = more[first]
            raise refused("one more", rank=who, op=extra.name, line=extra.where)
        a, b = events[first], others[first]
        second = f"{b.name} at {b.where}"
        raise refused(
            "unlike", rank=rank, other=other, op=a.name, line=a.where, second=second
        )
    pairs = enumerate(zip(events, others, strict=True))
    return {i for i, (a, b) in pairs if a.constants != b.constants}


class TypeCheck(FirstCalls):
    """Checks the types of a sharded function's calls, the first time of their kind.

    Args:
        equal: the axes along which ranks may be given equal batches.
    """

    def __init__(self, equal: Iterable[str] = ()) -> None:
        super().__init__()
        self.replicas, self.equal = Replicas(), frozenset(equal)
        # Ranks whose next call is checked: whether all ranks' are, and twice.
        self._later: dict[int, tuple[bool, bool]] = {}
        # Whether the step gives numbers to what is one value, by the first check of a
        # state, which all ranks make: a later one, of new shapes, is a rank's alone.
        self.numbers: bool | None = None
        self.ran_without_data = True  # as a state was laid out

    @reraising_interrupts()
    def check(self, call: Any, args: Any, keywords: Any, at: Here, axes: Any) -> None:
        later, first = at.rank in self._later, (False, not self.was_checked(at.rank))
        together, again = self._later.pop(at.rank, first)
        exchange = _Exchange(get_group(axes, at) if together else None)
        try:
            seen = check(call, args, keywords, at, axes, again=again, exchange=exchange)
        except Exception as error:
            if "in the mapped dimension" in str(error):  # torch's own, of its vmap
                raise refused("mapped", raised=error) from error
            broken = isinstance(error, LawError | NotATensor | Unsteady)
            if not later or broken or exchange.failed:
                raise
            exchange(())
            warn(UNCHECKED.format(repr(error)))
            return
        finally:
            self.ran_without_data = True
        self.note(seen.rank_local_paths, seen.draws, seen.drawing, seen.numbers)

    def check_returned(self, out: Any) -> None:
        if not _torch.fake_active():
            self.ran_without_data = False
            check_data(out)

    def compare_whole(self, chosen: Any, is_whole: Any, where: Any) -> None:
        compare_whole(chosen, is_whole, where)

    def note(
        self, rank_local_paths: Any, draws: bool, drawing: Any, numbers: bool = False
    ) -> None:
        super().note(rank_local_paths, draws, drawing, numbers)
        self.replicas.draws |= draws
        self.numbers = numbers if self.numbers is None else self.numbers

    def on_layout(self, rank: int, updates: bool, together: Any) -> None:
        self.replicas.laid_out(rank, updates, together)
        self.numbers = None

    def begin_call(self, batch: Any, found: Frame) -> Any:
        if found.tracer is not None or found.here is None:
            return _NOT_DUE
        n = self.replicas.begin(batch, found.here)
        if _is_checked_later(n):
            self._forget(found.here.rank, False, True)
        return DueCall(n, batch) if n else _NOT_DUE

    def _forget(self, rank: int, together: bool, twice: bool) -> None:
        """Has the rank's next call checked as a first one.

        What chooses a branch, as an attribute or a clock, may stand otherwise by now.

        Args:
            together: whether all ranks do so, which then compare their numbers.
            twice: whether it is to be seen that the step repeats itself, too.
        """
        self._known = {known for known in self._known if known[0] != rank}
        self._later[rank] = together, twice

    def compare_state(
        self, f: Any, found: Frame, given: Any, out: Any, call: Any
    ) -> None:
        if call is _NOT_DUE or given is None or found.here is None:
            return
        steps = self.replicas.end(f, found, given, out, call, self.equal)
        late = _is_checked_later(n := call.number)
        graph = found.compiler is not None and found.compiler.whole  # of no Python
        if steps and not graph and (late or self.numbers and 1 < n < 16):
            self._forget(found.here.rank, True, late)


_NOT_DUE = nullcontext()


def _is_checked_later(n: int) -> bool:
    """True of calls 16, 64, 256, of which the next one is checked anew."""
    return n > 8 and n.bit_length() % 2 == 1


class _Exchange:
    """Exchanges lines with other processes, once; with none if ``where`` is None.

    Attributes:
        failed: whether it has raised: that is no error of the step, as another rank
            has failed, or a signal came in the wait, and the mesh is closed.
    """

    def __init__(self, where: RankGroup | None):
        self.where, self.failed = where, False

    def __call__(self, lines: Lines) -> Mapping[int, Lines]:
        where, self.where = self.where, None
        if where is None or where.link.notes is not None:
            return {}
        self.failed = True
        found = differing_lines(lines, where)
        self.failed = False
        return found


UNCHECKED = (
    "a step, run without data to check it once more (as before calls 17, 65, 257, ...; "
    "see help(ff.shard)), raised {}. Its calls may not raise that, and this one runs "
    "unchecked: what the step does now that it did not do before is not known to be "
    "right. Let it run where ff.recording() is True, as it did before its first call"
)
