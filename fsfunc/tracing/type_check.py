"""The type check of a sharded step: before its first call it is run without data.

Under ``shard`` each value of a step is one value on all ranks, each rank's own, or this
rank's part of a leaf (`types`). Programs that mix these up would give a wrong number
without an error, so they are refused, by the rules that ``help(ff.shard)`` lists.

The code of a first call, in the order in which it runs: `Sharding.call`;
`Sharding.enter`, which asks whether calls of these shapes have been checked;
`TypeCheck.check`, which decides whether ranks compare their lines, and whether the step
must be seen to repeat itself; `check`, whose blocks are the phases below; and
`_DryRuns.run`, one run. Before its first real call a step is run

=====  ============================  ==============================================
runs   where                         why
=====  ============================  ==============================================
1      place, init_state:            to record which units take which leaves, and in
       `recorder.record`             which order (forward passes alone; if that raises,
                                     without the cache of fake tensors, and with
                                     backward passes)
0, 1   the same, if types are at     `check`, its phase 1; later calls of the same
       stake; else a call of new     shapes are not checked
       shapes
0, 1   place, init_state, at their   to see that it repeats itself: run again, unless
       end: `steadiness`             phase 1 has given torch the same numbers
0, 1   a call, if nothing recorded   phase 2: to see that it repeats itself
       the step
0, 1   with the next two, beside     phase 3: as another rank, if the step reads its
       the check                     rank (simulated: the last rank of the mesh)
0, 1                                 phase 4: with numbers that differ between ranks
                                     typed as each rank's own
0-2                                  phase 5: once for each other answer to a value, or
                                     a comparison, that the step asks for
0, 1                                 phase 6: with each row twice, if the step took
                                     parts of its rows
=====  ============================  ==============================================

So ``init_state`` has two runs more than a first call: to record the step, and to see
that it repeats itself. Nothing is computed in any of them, unless a step does not run
without data: then phase 1 and those after it run on copies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from fsfunc.tracing.replicas import DueCall, Replicas, SharedBatchAxes, compare_whole
from fsfunc.tracing.rules import RowsApart, Unsteady, rule_error
from fsfunc.tracing.runs import shadows, without_data
from fsfunc.tracing.steadiness import StandIns, check_steady, refuse_fakes
from fsfunc.tracing.torch_calls import CallChecker
from fsfunc.tracing.typed_operators import SharedOp
from fsfunc.tree import Leaf, PyTree, TreeDef

_LOG = logging.getLogger(__name__)


Exchange = Callable[[Lines], Mapping[int, Lines]]
"""Sends this rank's lines to the others; returns, by rank, those that differ."""


def check(
    call: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    keywords: dict[str, PyTree],
    at: Here,
    axes: tuple[str, ...],
    *,
    again: bool = False,
    exchange: Exchange = lambda lines: {},
) -> Checker:
    """Raises if ``call(*args, **keywords)`` has no meaning under ``shard``.

    The first argument is replicated, the others are the rank's own. The step is run on
    fake tensors, or, if it cannot, on copies of its arguments, as if all ranks had the
    same. If it reads a value, it is run with several numbers in place of the value; a
    rank's own value differs between ranks. Simulated ranks run one program: the check
    is run by the first of them that comes, and by the last rank of the mesh (or the
    first, if the last came first); by all of them if the step reads its rank.

    Args:
        at: the rank that runs, on its mesh.
        axes: those over which the loss is a mean.
        again: whether to run the step once more, to check that it repeats itself.
        exchange: exchanges lines with the other processes.

    Returns:
        the checker of the run, which has seen every operator.

    Raises:
        LawError, NotATensor: names the line, the leaf, and the way out.
        Unsteady: it does not repeat itself.
        Exception: what the step itself raises on copies.
    """
    # Simulated ranks run one program: what one of them has seen holds for the others.
    # One more is checked, which stands for all that may do something else. The count
    # tells the n-th check of each rank apart, as one step may be checked twice.
    notes, last = at.link.notes, at.mesh.size - 1
    key, earlier = None, None
    if notes is not None:
        count = notes["checks", at.rank] = notes.get(("checks", at.rank), 0) + 1
        key = "checked", count, tree.flatten((args, keywords), is_leaf=is_sharded)[1]
        earlier, reads_rank = notes.get(key, (None, False))
        if earlier is not None and not reads_rank:
            if at.rank != (0 if earlier.stand_ins.rank == last else last):
                return earlier

    # Phase 1: a run that ends without an error of the step's own. A step that is right
    # may raise without data: as torch's cache of fake results cannot be used in forward
    # mode; as a number in place of a value leads it astray; or as it needs the data.
    runs = _DryRuns(call, args, keywords, axes)
    checker = runs.attempt(at)
    if checker is None:
        failed, runs.without_cache = runs.last_checker, True
        checker = runs.attempt(at)
        # It may have raised, and differently now, because it changes Python state.
        check_steady(failed.numbers_given, lambda: runs.last_checker.numbers_given)
        variants = runs.last_checker.stand_ins.variants
        while checker is None and runs.variant + 1 < variants:
            runs.variant += 1
            checker = runs.attempt(at)
    if checker is None:
        _LOG.info("a step does not run without data: it is checked on copies")
        runs.on_copies, runs.variant = True, 0
        checker = runs.attempt(at) or runs.run(at, real_counts=True)

    # Phase 2: the same again. A count that the step keeps would be ahead of its calls.
    if again and earlier is None and not runs.on_copies:
        check_steady(checker.numbers_given, lambda: runs.run(at).numbers_given)

    # Phase 3: another rank, which must do the same to what is one value. A simulated
    # one has been seen already. Else this process runs the step as its neighbour: that
    # may raise, as the parts that the neighbour holds are not all here.
    other_checker, other = checker, at
    if earlier is not None and not runs.on_copies:
        other_checker, other = earlier, replace(at, rank=earlier.stand_ins.rank)
    elif (notes is None or runs.on_copies) and runs.asked_axes & set(axes):
        other = replace(at, rank=_neighbour(at, axes))
        other_checker = runs.attempt(other)
        if other_checker is None:
            runs.without_cache = True
            other_checker = (
                runs.attempt(other) or runs.attempt(other, real_counts=True) or checker
            )
    varying = differing_events(
        checker.events, other_checker.events, at.rank, other.rank
    )
    # Other processes send the operators that they have seen. One whose check raised
    # sends no lines, and is not compared: its own error says what is wrong.
    if not runs.on_copies:
        local_events = [
            replace(e, constants=(repr(e.constants),)) for e in checker.events
        ]
        # The first line tells a check that has seen nothing from one that has raised.
        lines = [("looked", "at"), *((e.name, *e.constants) for e in local_events)]
        for rank, their_lines in exchange(lines).items():
            their_events = [
                SharedOp(name, (text,), "the same place") for name, text in their_lines
            ]
            if their_lines:
                varying |= differing_events(
                    local_events, their_events[1:], at.rank, rank
                )

    # Phase 4: numbers that differ between ranks are each rank's own. Typed so, they may
    # go where such values may, and are refused elsewhere.
    if varying:
        runs.run(at, varying_events=varying)

    # Phase 5: the other branches of the step, where it asks for a value.
    for variant in range(checker.stand_ins.variants):
        if variant != runs.variant:
            runs.attempt(at, variant=variant)

    # Phase 6: a loop over a single row looks like no loop. With each row twice, what is
    # wrong with it shows. Only that rule is held there: the step passed all the others
    # with its own batch, and may have every right to raise for another.
    if checker.facts.rank_local.were_sliced:
        runs.attempt(at, (RowsApart,), row_repeats=2)

    checker.rank_local_paths |= runs.rank_local_paths
    checker.drawing |= runs.drawing
    if earlier is not None:  # ranks of one process must agree on whether they draw
        checker.draws = earlier.draws
        checker.drawing |= earlier.drawing
    if notes is not None:
        notes.setdefault(key, (checker, bool(runs.asked_axes & set(axes))))
    return checker


class _DryRuns:
    """The dry runs of one call: nothing is sent, and each has a checker of its own.

    Attributes:
        asked_axes: the axes whose `axis_index` any run has read.
        on_copies: whether the runs are on copies, with data.
        without_cache: whether fake tensors use no cache, see ``without_fake_cache``.
        variant: selects the numbers in place of values.
        last_checker: the checker of the last run.
        rank_local_paths, drawing: what the checkers of all runs have seen.
    """

    last_checker: Checker

    def __init__(
        self,
        call: Callable[..., PyTree],
        args: tuple[PyTree, ...],
        keywords: dict[str, PyTree],
        axes: tuple[str, ...],
    ):
        self.call, self.args, self.keywords, self.axes = call, args, keywords, axes
        self.asked_axes: set[str] = set()
        self.on_copies, self.without_cache, self.variant = False, False, 0
        self.rank_local_paths: set[str] = set()
        self.drawing: set[str] = set()

    def attempt(
        self,
        at: Here,
        raises: tuple[type[Exception], ...] = (LawError, NotATensor),
        **options: Any,
    ) -> Checker | None:
        """Runs once; returns None where the step raises an error of its own.

        Args:
            raises: the errors that are passed on: those of the check.
            options: as for `run`.
        """
        try:
            return self.run(at, **options)
        except raises:
            raise
        except Exception:  # the caller tries it otherwise, at last with real values
            _LOG.debug("a run that checks a step's types raised", exc_info=True)
            return None

    def run(
        self,
        at: Here,
        *,
        variant: int | None = None,
        real_counts: bool = False,
        varying_events: Iterable[int] = (),
        row_repeats: int = 1,
    ) -> Checker:
        """Runs the step once as a rank; returns the checker, which has seen all of it.

        Args:
            at: the rank.
            variant: selects the numbers in place of values, in this run alone.
            real_counts: whether a rank's own counts, which may be lengths, stay as they
                are.
            varying_events: the events whose constants are each rank's own.
            row_repeats: how often each row of the rank's own arguments is repeated.
        """
        is_alone, on_copies = at.mesh.axis_size(self.axes) == 1, self.on_copies
        odd = None if real_counts else _is_odd(at, self.axes)
        stand_ins = StandIns(at.rank, odd, self.variant if variant is None else variant)
        self.last_checker = checker = Checker(
            self.axes, is_alone, stand_ins, varying_events
        )
        checker.fills = on_copies
        link = EchoLink(at.rank) if on_copies else AbstractLink(at.rank)
        dry_here, arguments = replace(at, link=link), (self.args, self.keywords)
        with without_data(
            arguments,
            dry_here,
            fake=not on_copies,
            fake_cache=not self.without_cache,
            restore_outside=False,
            asked_axes=self.asked_axes,
            # Ranks of one process share these, and none draws what another does.
            seed=None if at.link.notes is None else at.rank,
        ) as mode:
            coordinates = at.mesh.coordinates(at.rank)
            arg_shadows, keyword_shadows = shadows(
                None if on_copies else mode, arguments, coordinates, apart=True
            )
            # The layout of a plain leaf (each rank's own, or whole) is noted beside the
            # tensor, by its identity: a shadow is a new tensor, and has none yet.
            leaf_pairs = zip(*map(_leaves, (self.args, arg_shadows)), strict=False)
            for leaf, shadow in leaf_pairs:
                if layout := placement_of(leaf):
                    lay_leaf(shadow, layout)
            if row_repeats > 1:
                repeated = tree.map(
                    lambda x: _repeat_rows(x, row_repeats),
                    (arg_shadows[1:], keyword_shadows),
                )
                arg_shadows, keyword_shadows = (
                    (*arg_shadows[:1], *repeated[0]),
                    repeated[1],
                )
            arg_shadows, keyword_shadows = checker.mark_numbers(
                (arg_shadows, keyword_shadows)
            )
            with (
                inside(frame().replace(tracer=checker, here=dry_here)),
                watching(checker),
                checker,
                CallChecker(checker),
            ):
                self.call(*arg_shadows, **keyword_shadows)
        self.rank_local_paths |= checker.rank_local_paths
        self.drawing |= checker.drawing
        return checker


def _leaves(args: PyTree) -> list[Leaf]:
    return tree.leaves(args, is_leaf=is_sharded)


def _repeat_rows(x: Leaf, times: int) -> Leaf:
    """Returns a rank's own tensor with each of its rows so many times."""
    return torch.cat([x] * times) if isinstance(x, Tensor) and x.ndim else x


def _is_odd(at: Here, axes: tuple[str, ...]) -> bool:
    """Returns whether a rank is odd along the first axis that has several ranks.

    Neighbours then get other numbers in place of a value of each rank's own.
    """
    coordinates = at.mesh.coordinates(at.rank)
    return next((coordinates[a] for a in axes if at.mesh.axes[a] > 1), 0) % 2 == 1


def _neighbour(at: Here, axes: tuple[str, ...]) -> int:
    """Returns a rank next to this one along each of ``axes`` that has several ranks."""
    other = at.mesh.coordinates(at.rank)
    for axis in axes:
        size = at.mesh.axes[axis]
        other[axis] += 1 if other[axis] + 1 < size else -1 if size > 1 else 0
    return at.mesh.rank_at(other)


def differing_events(
    events: Sequence[SharedOp],
    other_events: Sequence[SharedOp],
    rank: int,
    other_rank: int,
) -> set[int]:
    """Returns the indices of the events in which two ranks had unlike constants.

    Args:
        events: the operators of ``rank`` that compute what should be one value.
        other_events: those of rank ``other_rank``.

    Raises:
        LawError: they are not the same operators.
    """
    names, other_names = [a.name for a in events], [b.name for b in other_events]
    if names != other_names:
        name_pairs = zip(names, other_names, strict=False)
        first_unlike = next((i for i, (a, b) in enumerate(name_pairs) if a != b), None)
        first_unlike = (
            min(len(names), len(other_names)) if first_unlike is None else first_unlike
        )
        longer, shorter, longer_rank = events, other_events, rank
        if len(events) < len(other_events):
            longer, shorter, longer_rank = other_events, events, other_rank
        # The message for one further operator is given only where the ranks agree again
        # after it: else it would blame an operator that both ranks have, elsewhere.
        following = [x.name for x in shorter[first_unlike:]]
        if [x.name for x in longer[len(longer) - len(following) :]] == following:
            extra = longer[first_unlike]
            raise rule_error(
                "one more", rank=longer_rank, op=extra.name, line=extra.line
            )
        a, b = events[first_unlike], other_events[first_unlike]
        second = f"{b.name} at {b.line}"
        raise rule_error(
            "unlike", rank=rank, other=other_rank, op=a.name, line=a.line, second=second
        )
    event_pairs = enumerate(zip(events, other_events, strict=True))
    return {i for i, (a, b) in event_pairs if a.constants != b.constants}


class TypeCheck(FirstCalls):
    """The checks of a sharded function's calls: of types, and of what ranks must share.

    Types are checked once for each set of shapes. Batches and states are compared in
    calls 1, 2, 4, 8 and so on (`replicas`), and after some of these the types are
    checked anew.

    Args:
        equal_batch_axes: the axes along which ranks may be given equal batches.

    Attributes:
        combines_numbers: whether the step combines numbers with what is one value, as
            the first check after a state was laid out has seen it. All ranks make that
            check; a later one, of new shapes, is one rank's alone, and ranks must agree
            on this.
    """

    replicas: Replicas
    equal_batch_axes: frozenset[str]

    def __init__(self, equal_batch_axes: Iterable[str] = ()) -> None:
        super().__init__()
        self.replicas, self.equal_batch_axes = Replicas(), frozenset(equal_batch_axes)
        # By rank, of which the next call is checked anew: whether all ranks' calls are,
        # and whether it must be seen to repeat itself.
        self._rechecks: dict[int, tuple[bool, bool]] = {}
        self.combines_numbers: bool | None = None
        # When a state was laid out the step was run without data.
        self.ran_without_data = True

    @reraising_interrupts()
    def check(
        self,
        call: Callable[..., PyTree],
        args: tuple[PyTree, ...],
        keywords: dict[str, PyTree],
        at: Here,
        axes: tuple[str, ...],
    ) -> None:
        is_recheck, default = (
            at.rank in self._rechecks,
            (False, not self.was_checked(at.rank)),
        )
        together, again = self._rechecks.pop(at.rank, default)
        exchange = _Exchange(get_group(axes, at) if together else None)
        try:
            checker = check(
                call, args, keywords, at, axes, again=again, exchange=exchange
            )
        except Exception as error:
            if "in the mapped dimension" in str(error):  # torch's own, of its vmap
                raise rule_error("mapped", raised=error) from error
            is_refusal = isinstance(error, LawError | NotATensor | Unsteady)
            if not is_recheck or is_refusal or exchange.failed:
                raise
            # The other ranks wait for this one's lines, and must not wait for ever.
            exchange(())
            warn(UNCHECKED.format(repr(error)))
            return
        finally:
            self.ran_without_data = True
        self.note(
            checker.rank_local_paths,
            checker.draws,
            checker.drawing,
            checker.combines_numbers,
        )

    def check_returned(self, out: PyTree) -> None:
        if not _torch.fake_active():
            self.ran_without_data = False
            refuse_fakes(out)

    def compare_whole(
        self,
        chosen: Sequence[PyTree],
        is_whole: Callable[[Tensor], bool],
        where: RankGroup,
    ) -> None:
        compare_whole(chosen, is_whole, where)

    def note(
        self,
        rank_local_paths: Iterable[str],
        draws: bool,
        drawing: Iterable[str],
        numbers: bool = False,
    ) -> None:
        super().note(rank_local_paths, draws, drawing, numbers)
        self.replicas.draws |= draws
        self.combines_numbers = (
            numbers if self.combines_numbers is None else self.combines_numbers
        )

    def on_layout(self, rank: int, updates: bool, together: SharedBatchAxes) -> None:
        self.replicas.laid_out(rank, updates, together)
        self.combines_numbers = None

    def begin_call(
        self, batch: PyTree, call_frame: Frame
    ) -> DueCall | nullcontext[None]:
        if call_frame.tracer is not None or call_frame.here is None:
            return _NOT_DUE
        n = self.replicas.start_call(batch, call_frame.here)
        if _is_checked_later(n):
            self._recheck(call_frame.here.rank, False, True)
        return DueCall(n, batch) if n else _NOT_DUE

    def _recheck(self, rank: int, together: bool, twice: bool) -> None:
        """Makes the rank's next call be checked as its first one was.

        What chooses a branch of the step, as an attribute or a clock does, may have
        changed since.

        Args:
            together: whether all ranks do so, and then compare their numbers.
            twice: whether the step must also be seen to repeat itself.
        """
        self._known = {known for known in self._known if known[0] != rank}
        self._rechecks[rank] = together, twice

    def compare_state(
        self,
        f: Callable[..., PyTree],
        call_frame: Frame,
        state_def: TreeDef | None,
        out: PyTree,
        call: DueCall | nullcontext[None],
    ) -> None:
        if (
            isinstance(call, nullcontext)
            or state_def is None
            or call_frame.here is None
        ):
            return
        returns_state = self.replicas.finish_call(
            f, call_frame, state_def, out, call, self.equal_batch_axes
        )
        late = _is_checked_later(n := call.number)
        in_one_graph = (
            call_frame.compiler is not None and call_frame.compiler.whole
        )  # of no Python
        # A number may be the rank's own (a learning rate) from any call on: where there
        # are numbers, the first calls are checked anew after each comparison. Later all
        # steps are, after every second one.
        if (
            returns_state
            and not in_one_graph
            and (late or self.combines_numbers and 1 < n < 16)
        ):
            self._recheck(call_frame.here.rank, True, late)


_NOT_DUE: nullcontext[None] = nullcontext()


def _is_checked_later(n: int) -> bool:
    """Returns whether the call after call ``n`` is checked anew: for 16, 64, 256, ...

    Args:
        n: a power of two.
    """
    return n > 8 and n.bit_length() % 2 == 1


class _Exchange:
    """A function that exchanges lines with other processes, in its first call alone.

    Args:
        where: the ranks; None: nothing is exchanged.

    Attributes:
        failed: whether the exchange has raised. That is no error of the step: another
            rank has failed, or a signal came in the wait, and the mesh is closed.
    """

    def __init__(self, where: RankGroup | None):
        self.where, self.failed = where, False

    def __call__(self, lines: Lines) -> Mapping[int, Lines]:
        where, self.where = self.where, None
        if where is None or where.link.notes is not None:
            return {}
        self.failed = True
        lines_by_rank = differing_lines(lines, where)
        self.failed = False
        return lines_by_rank


UNCHECKED = (
    "a step, run without data to check it once more (as before calls 17, 65, 257, ...; "
    "see help(ff.shard)), raised {}. Its calls may not raise that, and this one runs "
    "unchecked: what the step does now that it did not do before is not known to be "
    "right. Let it run where ff.recording() is True, as it did before its first call"
)
