"""The type check: a step is run without data, and refused if it has no meaning."""

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
from fsfunc.comm.backends.interrupts import heard
from fsfunc.comm.collective_ops import watching
from fsfunc.comm.comparison import Lines, unlike
from fsfunc.comm.groups import RankGroup, group
from fsfunc.comm.mesh import Here
from fsfunc.comm.typed_maps import LawError
from fsfunc.core.frames import Frame, frame, inside
from fsfunc.core.tracers import FirstCalls
from fsfunc.sharded.leaf import NotATensor, is_sharded
from fsfunc.sharded.plain_leaves import laid_as, lay_leaf
from fsfunc.tracing.checker import Checker
from fsfunc.tracing.replicas import DueCall, Replicas, compare_whole
from fsfunc.tracing.rules import RowsApart, Unsteady, refused
from fsfunc.tracing.runs import shadows, without_data
from fsfunc.tracing.steadiness import StandIns, check_data, check_steady
from fsfunc.tracing.torch_calls import Asked
from fsfunc.tracing.typed_operators import SharedOp

_LOG = logging.getLogger(__name__)


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
    notes, last = at.link.notes, at.mesh.size - 1
    key, known = None, None
    if notes is not None:
        count = notes["checks", at.rank] = notes.get(("checks", at.rank), 0) + 1
        key = "checked", count, tree.flatten((args, keywords), is_leaf=is_sharded)[1]
        known, asks = notes.get(key, (None, False))
        if known is not None and not asks:
            if at.rank != (0 if known.stand_ins.rank == last else last):
                return known
    asked: set[str] = set()
    trial = _Trial(call, args, keywords, axes, asked)
    found = there = trial.first(at)
    other = at
    if again and known is None and not trial.real:
        check_steady(found.said, lambda: trial.run(at).said)
    if known is not None and not trial.real:
        there, other = known, replace(at, rank=known.stand_ins.rank)
    elif (notes is None or trial.real) and asked & set(axes):
        other = replace(at, rank=_neighbour(at, axes))
        there = trial.elsewhere(other) or found
    varying = differing(found.events, there.events, at.rank, other.rank)
    if not trial.real:
        varying |= _across(found.events, exchange, at.rank)
    if varying:
        trial.run(at, varying=varying)
    trial.other_ways(at, found)
    found.own_paths |= trial.own_paths
    found.drawing |= trial.drawing
    if known is not None:  # all ranks of one process take one for granted
        found.draws = known.draws
        found.drawing |= known.drawing
    if notes is not None:
        notes.setdefault(key, (found, bool(asked & set(axes))))
    return found


Exchange = Callable[[Lines], Mapping[int, Lines]]


def _across(events: Iterable[SharedOp], exchange: Exchange, rank: int) -> set[int]:
    """The events that have other constants in another process.

    Raises:
        LawError: they are not the same operators.
    """
    mine = [replace(e, constants=(repr(e.constants),)) for e in events]
    found: set[int] = set()
    said = [("looked", "at"), *((e.name, *e.constants) for e in mine)]
    for other, lines in exchange(said).items():
        if lines:  # of those who have raised, or have nothing to look at, none
            theirs = [SharedOp(name, (text,), "the same place") for name, text in lines]
            found |= differing(mine, theirs[1:], rank, other)
    return found


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
        self.ran = True  # as a state was laid out

    @heard()
    def check(self, call: Any, args: Any, keywords: Any, at: Here, axes: Any) -> None:
        later, first = at.rank in self._later, (False, not self.knows(at.rank))
        together, again = self._later.pop(at.rank, first)
        exchange = _Exchange(group(axes, at) if together else None)
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
            self.ran = True
        self.note(seen.own_paths, seen.draws, seen.drawing, seen.numbers)

    def check_returned(self, out: Any) -> None:
        if not _torch.fake_active():
            self.ran = False
            check_data(out)

    def compare_whole(self, chosen: Any, is_whole: Any, where: Any) -> None:
        compare_whole(chosen, is_whole, where)

    def note(
        self, own_paths: Any, draws: bool, drawing: Any, numbers: bool = False
    ) -> None:
        super().note(own_paths, draws, drawing, numbers)
        self.replicas.draws |= draws
        self.numbers = numbers if self.numbers is None else self.numbers

    def laid_out(self, rank: int, updates: bool, together: Any) -> None:
        self.replicas.laid_out(rank, updates, together)
        self.numbers = None

    def begins(self, batch: Any, found: Frame) -> Any:
        if found.tracer is not None or found.at is None:
            return _NOT_DUE
        n = self.replicas.begin(batch, found.at)
        if _is_checked_later(n):
            self._forget(found.at.rank, False, True)
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
        if call is _NOT_DUE or given is None or found.at is None:
            return
        steps = self.replicas.end(f, found, given, out, call, self.equal)
        late = _is_checked_later(n := call.number)
        graph = found.compiler is not None and found.compiler.whole  # of no Python
        if steps and not graph and (late or self.numbers and 1 < n < 16):
            self._forget(found.at.rank, True, late)


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
        found = unlike(lines, where)
        self.failed = False
        return found


class _Trial:
    """Runs of one call in which nothing is sent.

    Attributes:
        asked: the axes whose ``axis_index`` is read.
        real: whether it runs on copies with data.
        forgets: whether fake tensors use no cache, see ``remembering_nothing``.
        turn: selects the numbers in place of values.
        checker: that of the last run.
    """

    def __init__(self, call: Any, args: Any, keywords: Any, axes: Any, asked: set[str]):
        self.call, self.args, self.keywords = call, args, keywords
        self.axes, self.asked = axes, asked
        self.real, self.forgets, self.turn = False, False, 0
        self.checker: Any = None
        self.own_paths: set[str] = set()  # of all runs
        self.drawing: set[str] = set()

    def first(self, at: Here) -> Checker:
        """The first run that ends without an error, which the last attempt must."""
        found = self.attempt(at)
        if found is None:  # of forward mode it may raise for what fakes remember
            before, self.forgets = self.checker, True
            found = self.attempt(at)
            check_steady(before.said, lambda: self.checker.said)
        turns = self.checker.stand_ins.turns
        while found is None and self.turn + 1 < turns:
            self.turn += 1
            found = self.attempt(at)
        if found is None:
            _LOG.info("a step does not run without data: it is checked on copies")
            self.real, self.turn = True, 0
            found = self.attempt(at) or self.run(at, counts=True)
        return found

    def elsewhere(self, at: Here) -> Checker | None:
        """A run at another rank, of which ours may not have all that it has."""
        found = self.attempt(at)
        if found is None:
            self.forgets = True
            found = self.attempt(at)
        return self.attempt(at, counts=True) if found is None else found

    def other_ways(self, at: Here, found: Checker) -> None:
        """Runs with other values in place of those that the step asks for.

        And with twice the rows if the step took parts of an own tensor, as a loop over
        a single row looks like none.
        """
        for turn in range(found.stand_ins.turns):
            if turn != self.turn:
                self.attempt(at, turn=turn)
        if found.known.own.were_picked:
            self.attempt(at, (RowsApart,), times=2)  # else all is right as it is

    def attempt(
        self,
        at: Here,
        refused: tuple[type[Exception], ...] = (LawError, NotATensor),
        **how: Any,
    ) -> Checker | None:
        """A run, or None where it raises what is no refusal."""
        try:
            return self.run(at, **how)
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
        """One run, at a rank, and what the checker saw of it."""
        alone = at.mesh.axis_size(self.axes) == 1
        odd = None if counts else _is_odd(at, self.axes)
        stand_ins = StandIns(at.rank, odd, self.turn if turn is None else turn)
        self.checker = checker = Checker(self.axes, alone, stand_ins, varying)
        checker.fills = self.real
        link = EchoLink(at.rank) if self.real else AbstractLink(at.rank)
        now, given = replace(at, link=link), (self.args, self.keywords)
        with without_data(
            given,
            now,
            fake=not self.real,
            remembers=not self.forgets,
            restores=False,
            asked=self.asked,
            # Ranks of one process share these, and none draws what another does.
            seed=None if at.link.notes is None else at.rank,
        ) as mode:
            f, coordinates = frame(), at.mesh.coordinates(at.rank)
            copying = None if self.real else mode
            args, named = shadows(copying, given, coordinates, apart=True)
            for mine, its in zip(*map(_leaves, (self.args, args)), strict=False):
                if how := laid_as(mine):
                    lay_leaf(its, how)
            if times > 1:
                given = tree.map(lambda x: _repeated(x, times), (args[1:], named))
                args, named = (*args[:1], *given[0]), given[1]
            args, named = checker.heard((args, named))
            with (
                inside(f.replace(tracer=checker, at=now)),
                watching(checker),
                checker,
                Asked(checker),
            ):
                self.call(*args, **named)
        self.own_paths |= checker.own_paths
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


UNCHECKED = (
    "a step, run without data to check it once more (as before calls 17, 65, 257, ...; "
    "see help(ff.shard)), raised {}. Its calls may not raise that, and this one runs "
    "unchecked: what the step does now that it did not do before is not known to be "
    "right. Let it run where ff.recording() is True, as it did before its first call"
)
