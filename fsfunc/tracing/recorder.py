"""Records which leaves the units of a step take, for ``place`` and ``init_state``.

The step runs once on fake tensors, and nothing is sent. Its leaves are
:class:`Recorded`: they are used as tensors, and record which unit reads them. From this
`groups` derives which leaves share a buffer, the order in which buffers are gathered,
and which leaves no unit takes.

Meanwhile transforms are replaced: one that lays leaves out by one that records its unit
calls (`runs.Noted`), and one that recomputes by none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from torch import Tensor

from fsfunc import _torch, tree
from fsfunc._torch.fake_results import communication_error
from fsfunc.comm.attribution import source_line, traceback_line
from fsfunc.comm.backends.interrupts import reraising_interrupts
from fsfunc.comm.collective_ops import Watcher, watching
from fsfunc.comm.descriptions import describe_lines
from fsfunc.comm.groups import RankGroup
from fsfunc.comm.linear_maps import LinearMap
from fsfunc.comm.mesh import maybe_here, note_axes_read
from fsfunc.core.frames import Interpretation, frame, inside
from fsfunc.core.tracers import Tracer
from fsfunc.core.units import Call
from fsfunc.optim.schedules import ask_schedules_and_masks
from fsfunc.sharded.donated import Everything
from fsfunc.sharded.layout import Layout, Split
from fsfunc.sharded.leaf import NotATensor, Sharded, is_sharded
from fsfunc.tracing import runs
from fsfunc.tracing.groups import (
    Findings,
    Recorded,
    RecordedUnitCall,
    local_tensor,
    recorded_tensor,
    unit_placeholder,
    whole_placeholder,
)
from fsfunc.tracing.operators import DrawsWithin
from fsfunc.tracing.rules import rule_error
from fsfunc.tracing.steadiness import NumbersGiven, Steadiness, observe_numbers
from fsfunc.tracing.torch_calls import RankLocalTensors, ReadRecorder, check_tracked
from fsfunc.tree import Leaf, PyTree


@reraising_interrupts()
def record(
    fn: Callable[..., PyTree],
    params: PyTree,
    other_args: tuple[PyTree, ...],
    data: Literal["fake", "real"] = "fake",
    splits: Mapping[str, tuple[Split, ...]] | None = None,
    rank_local: Collection[str] = (),
) -> Recorder:
    """Records one run of ``fn(params, *rest)`` that sends nothing.

    Args:
        fn: the step.
        params: its first argument, of which the leaves are laid out.
        other_args: its other arguments.
        data: ``"fake"`` runs on fake tensors; ``"real"`` runs one real call, for steps
            that read a tensor's value.
        splits: by path, how leaves are split over axes that no transform gathers.
        rank_local: the paths of leaves that are each rank's own.

    Raises:
        RuntimeError: the step reads a fake tensor's value; names the line.

    Cost: a run without backward passes, whose gradients have shapes alone. If it
    raises, one with them, as the step may read what a hook or a Function's backward
    leaves; its error is raised. ``steadiness`` may need another run, except for a plan,
    after which no real step runs.
    """
    if data not in ("fake", "real"):
        raise ValueError(f'record={data!r}: it is "fake" or "real"')
    recording = _Recording(
        fn, params, other_args, data == "fake", splits or {}, rank_local
    )
    run = recording.run
    if data == "real":
        return run()
    # Forward passes show which units take which leaves, and in which order, so backward
    # passes are left out. An error may be due to that: the whole run below, which these
    # have left no trace for, raises what is wrong in any case.
    # After a plan no real step runs, which the dry runs could have changed.
    here = maybe_here()
    is_plan = here is not None and not here.link.moves_data
    # In forward mode a run may raise for the cache of fake tensors alone.
    for fake_cache in (True, False):
        with suppress(Exception):
            recorder = run(True, fake_cache)
            rerun = None if is_plan else partial(_numbers_again, run, fake_cache)
            recorder.steadiness = Steadiness(
                recorder.numbers_given, rerun, recorder.gradient_lines
            )
            return recorder
    try:
        return run()
    # Errors of torch that name neither the cause nor a way out.
    except (ValueError, RuntimeError) as error:
        line, text = traceback_line(error), str(error)
        if "instead found type 'Recorded'" in text:
            raise rule_error("scripts", line=line) from error
        if "Default process group has not been initialized" in text:
            raise communication_error(f"at {line}") from error
        raise


@reraising_interrupts()
def _numbers_again(
    run: Callable[..., Recorder], fake_cache: bool
) -> list[NumbersGiven]:
    """Returns the numbers of another run: with backward passes if it needs them."""
    with suppress(Exception):
        return run(True, fake_cache).numbers_given
    return run().numbers_given


@dataclass(frozen=True)
class _Recording:
    """What is recorded: ``fn(params, *rest)``, on tensors without data if ``fake``.

    ``splits`` and ``rank_local`` as for `record`.
    """

    fn: Callable[..., PyTree]
    params: PyTree
    other_args: tuple[PyTree, ...]
    fake: bool
    splits: Mapping[str, tuple[Split, ...]]
    rank_local: Collection[str]

    def run(self, forward_only: bool = False, fake_cache: bool = False) -> Recorder:
        """Runs the step once, and returns what its recorder has seen.

        Args:
            forward_only: whether backward passes are left out.
            fake_cache: whether the results of fake tensors are cached.
        """
        f, fake, params, other_args = frame(), self.fake, self.params, self.other_args
        recorder = Recorder(forward_only=forward_only, draws=not fake)
        recorder.rank_local = frozenset(self.rank_local)
        makes_fakes = fake and not _torch.fake_active()  # else they are fake already
        asked_axes: set[str] = set()
        with runs.without_data(
            (params, other_args),
            runs.place_without_data(),
            fake=fake,
            fake_cache=fake_cache,
            restore_outside=False,
            asked_axes=asked_axes,
            read_error=_VALUE_READ if fake else None,
        ) as mode:
            if makes_fakes:
                params, other_args = runs.shadows(
                    mode, (params, other_args), apart=True
                )
            # Fake tensors may all be written, as if the state were donated: so an
            # optimizer copies nothing.
            donated = Everything() if fake else None
            handlers = tuple(map(recorder.replacement_for, f.handlers))
            f = f.replace(handlers=handlers, tracer=recorder, donated=donated)
            with inside(f), watching(recorder):
                arguments = recorder.wrap_leaves(params, self.splits), *other_args
                recorder.rank_local_tensors.add(tree.leaves(other_args))
                with ReadRecorder(recorder):
                    try:
                        out = self.fn(*recorder.mark_numbers(arguments))
                    except Exception as error:
                        recorder.add_notes(error, other_args)
                        raise
                recorder.record_returned(arguments[:1], out)
        note_axes_read(asked_axes)
        recorder.finish(asked_axes)
        return recorder


_VALUE_READ = (
    "the step, recorded on fake tensors,",
    ". Move it out of the step or make it a torch.where; or record one real call with "
    'record="real"',
)


_UNCUT = (
    "{path!r}, of the state, has as many rows as the batch, and was not cut into "
    "microbatches with it as the step was recorded: it is one value on all ranks. If "
    "each rank has rows of its own (a hidden state that is carried on), say so: "
    'layouts={{{path!r}: ff.Own("data")}}'
)


@dataclass
class Recorder(Findings, Tracer, Watcher):
    """A tracer that records which leaves units take, and in which order.

    Args:
        forward_only: whether backward passes are skipped; gradients have shapes alone.
        needs_no_check: whether no type check is needed, as no rule can be broken: the
            only derivatives are those of ``value_and_grad``, by leaves of the tree,
            once by each; only units and the library read what is sharded, and not
            together with what is not.
        user_reads: the leaves that the user's functions read outside units, and whether
            they do so in a loss.
        call_keys: the signatures of the calls of sharded functions.
        numbers_given: the numbers that torch's functions were given.
        steadiness: the check that another run has the same numbers.
        gradient_lines: the lines of gradient calls.
        axes: those of its collectives (except of numbers outside losses), and those
            whose ``axis_index`` it read.
        returns_new_leaves: whether it returns sharded leaves that are no gradients.
        returns_state: whether it returns a tree like its first argument, of new values.
        rank_local_tensors: the tensors that may be a rank's own.
        written_by_data: the leaves that are written by ``.data``.
        drawing: the units that draw random numbers outside gradient calls.
        cuts_batch: whether it cuts a batch into microbatches.
        gradient_ids: the ids of the gradients that gradient calls have taken.
    """

    forward_only: bool = False
    draws: bool = False
    needs_no_check: bool = True
    user_reads: dict[str, bool] = field(default_factory=dict)
    call_keys: list[tuple[Any, ...]] = field(default_factory=list)
    numbers_given: list[NumbersGiven] = field(default_factory=list)
    steadiness: Steadiness = field(default_factory=Steadiness)
    gradient_lines: set[str] = field(default_factory=set)
    axes: set[str] = field(default_factory=set)
    returns_new_leaves: bool = False
    returns_state: bool = False
    rank_local_tensors: RankLocalTensors = field(default_factory=RankLocalTensors)
    written_by_data: set[str] = field(default_factory=set)
    drawing: set[str] = field(default_factory=set)
    cuts_batch: bool = False
    _path_by_id: dict[int, str] = field(default_factory=dict)  # of leaves' tensors
    gradient_ids: set[int] = field(default_factory=set)
    # (path, microbatches around) of the leaves by which gradients were taken.
    _differentiated_by: set[tuple[str | None, tuple[tuple[int, int], ...]]] = field(
        default_factory=set
    )
    # Tensors of which ids are noted above: if freed, an id would be another tensor's.
    _alive: list[Tensor] = field(default_factory=list)

    def wrap_leaves(
        self, params: PyTree, splits: Mapping[str, tuple[Split, ...]]
    ) -> PyTree:
        """Returns the step's first argument with :class:`Recorded` leaves."""
        paths, leaves, treedef = tree.flatten_with_paths(params, is_leaf=is_sharded)
        for i, (path, x) in enumerate(zip(paths, leaves, strict=True)):
            if isinstance(x, Tensor):
                shape, parts = tuple(x.shape), splits.get(path, ())
                leaves[i] = Recorded(x.detach(), Layout(shape, x.dtype, (), path))
                self.layouts[path] = Layout(shape, x.dtype, parts, path)
        return tree.unflatten(treedef, leaves)

    def finish(self, asked_axes: set[str]) -> None:
        """Decides whether the step needs a type check, once it has run.

        A run with backward passes always does: what raised without them is not known.

        Args:
            asked_axes: the axes whose ``axis_index`` it read.
        """
        self.axes |= asked_axes
        taken_leaves = {path for call in self.unit_calls for path in call.leaves}
        reads_whole_leaves = all(
            in_loss and p not in taken_leaves for p, in_loss in self.user_reads.items()
        )
        mean_axes = {axis for h in self.handlers for axis in getattr(h, "axes", ())}
        self.needs_no_check &= (
            self.forward_only and reads_whole_leaves and not asked_axes & mean_axes
        )
        subject = "done with gradients or leaves outside units"
        self.claims.append((subject, "nothing" if self.needs_no_check else "something"))

    def on_leaf(self, x: Tensor, path: str) -> None:
        self._path_by_id[id(x)] = path
        self._alive.append(x)

    def in_batch(self, leaves: list[Leaf]) -> list[Leaf]:
        # In the real call a rank's own leaf is a plain tensor, and is cut with the
        # batch. The layouts of the others are not decided yet.
        self.cuts_batch = True
        is_rank_local = [
            is_sharded(x) and x.layout.name in self.rank_local for x in leaves
        ]
        return [
            recorded_tensor(x) if is_local else x
            for x, is_local in zip(leaves, is_rank_local, strict=True)
        ]

    def add_notes(self, error: Exception, other_args: tuple[PyTree, ...]) -> None:
        """Adds notes to an error of the step that may be due to the recording.

        Args:
            error: what the step raised.
            other_args: the arguments beside the state.
        """
        taken_leaves = {
            path for call in self.unit_calls for path in call.leaves
        } | self.rank_local
        tensors = [
            x for x in tree.leaves(other_args, is_sharded) if isinstance(x, Tensor)
        ]
        row_counts = {tuple(x.shape[:1]) for x in tensors if x.ndim}
        for path, layout in self.layouts.items() if self.cuts_batch else ():
            if layout.shape[:1] in row_counts and path not in taken_leaves:
                error.add_note(_UNCUT.format(path=path))

    def on_call(
        self,
        key: tuple[Hashable, ...],
        args: tuple[PyTree, ...],
        keywords: dict[str, PyTree],
        mean: Sequence[str],
    ) -> None:
        """Records the signature of a call of a sharded function."""
        self.call_keys.append(key)

    def on_placeholders(
        self, leaves: Sequence[Leaf], gradients: Sequence[Tensor], aux: PyTree
    ) -> None:
        """Records the gradients of a gradient call, with the layouts of its leaves."""
        self.rank_local_tensors.add(tree.leaves(aux))
        f = frame()
        self.gradient_lines.add(source_line())
        differentiated = [(self.path_of(x), f.micro) for x in leaves]
        all_known = all(path is not None for path, _ in differentiated)
        first_time = all_known and self._differentiated_by.isdisjoint(differentiated)
        self.needs_no_check = (
            self.needs_no_check and first_time and not (f.in_loss or f.path)
        )
        self._differentiated_by.update(differentiated)
        self.gradient_ids.update(map(id, gradients))
        self._alive.extend(gradients)

    def collective_called(
        self, x: Tensor, linear_map: LinearMap, where: RankGroup
    ) -> None:
        # The mean of a metric, a plain number, makes no parameters agree over its axis.
        if x.ndim or x.requires_grad or frame().in_loss or _torch.is_wrapped(x):
            self.axes.update(where.axis)
        # A unit may do as it likes to values that are its own.
        if frame().path and not where.loss_is_mean:
            return
        needs_type = linear_map.to == "I" or linear_map.op in ("cast", "enter", "slice")
        if needs_type or self.is_leaf(x):
            self.needs_no_check = False

    def claimed_equal(self, x: Leaf, caller: str) -> None:
        if not (isinstance(x, Tensor) or frame().path):
            # Another claim of one name bears a prime, to be a line of its own.
            earlier = [name for name, _ in self.claims].count(caller)
            self.claims.extend(
                describe_lines(caller + "'" * earlier, x, ask_schedules_and_masks(()))
            )

    def record_returned(self, args: Sequence[PyTree], out: PyTree) -> None:
        """Records the returned state, of which leaves may be each rank's own."""
        state = runs.returned_state(args, out)
        leaves = tree.leaves(state, is_leaf=is_sharded)
        refuse_hidden(self, args, leaves)
        # Only of those that came whole: a leaf that was laid out before has a 1-D part,
        # whose shape says nothing.
        refuse_reshaped([x for x in leaves if isinstance(x, Recorded)])
        local_parts = [x.local for x in leaves if is_sharded(x)]
        self.returns_new_leaves = any(
            id(x) not in self.gradient_ids for x in local_parts
        )
        state_def, returned_def = (
            tree.flatten(x, is_sharded)[1] for x in (args[:1], (state,))
        )
        new_tensors = [x.local if is_sharded(x) else x for x in leaves]
        new_tensors = [
            x
            for x in new_tensors
            if isinstance(x, Tensor) and id(x) not in self.gradient_ids
        ]
        self.returns_state = bool(new_tensors) and returned_def == state_def
        bare_tensors = [
            x for x in tree.leaves(out, is_sharded) if isinstance(x, Tensor)
        ]
        # Parts that are returned as plain tensors have lost their layout.
        self.needs_no_check &= not any(map(self.is_leaf, bare_tensors))
        if isinstance(state, Tensor):  # such as a loss
            self.rank_local_paths.add("")
        else:
            self.needs_no_check = self.needs_no_check and not any(
                isinstance(x, Tensor) for x in leaves
            )

    def claimed_rank_local(self, x: Tensor, where: RankGroup, caller: str) -> None:
        self.needs_no_check = self.needs_no_check and where.loss_is_mean

    def mark_numbers(self, values: PyTree) -> PyTree:
        return observe_numbers(values, self.answer)

    def answer(self, compared: bool) -> bool:
        """Returns what a comparison of a number gave; notes that one was made."""
        # Another answer may lead to another branch, which only the type check runs.
        self.needs_no_check = False
        return compared

    def is_leaf(self, x: Leaf) -> bool:
        """Returns whether ``x`` stands for a leaf, or for the gradient by one."""
        return id(x) in self.gradient_ids or self.path_of(x) is not None

    def path_of(self, x: Leaf) -> str | None:
        """Returns the path of the leaf that ``x`` is, or stands for; else None."""
        if isinstance(x, Recorded):
            return x.layout.name
        x = x._local if isinstance(x, Sharded) else x
        if not isinstance(x, Tensor):
            return None
        path = self._path_by_id.get(id(x))
        if path is None and _torch.is_wrapped(x):
            path = self._path_by_id.get(id(_torch.unwrapped(x)))
        return path

    def replacement_for(self, handler: Interpretation) -> Interpretation:
        return handler.recorded(self)

    def noted(self, handler: runs.EntersCalls) -> runs.Noted:
        """Returns an interpretation that only notes the unit calls of ``handler``."""
        return runs.NotedShard(handler, self)

    def run_body(
        self,
        call: Call,
        params: PyTree,
        inputs: tuple[PyTree, ...],
        keywords: dict[str, PyTree],
    ) -> PyTree:
        # Without a transform that lays out, the leaves are not tensors yet.
        params = tree.map(recorded_tensor, params, is_leaf=is_sharded)
        # In gradient calls units draw by a seed of the call's, and not by the default
        # generators.
        by_default = call.frame.seed is None and not call.frame.path
        noting = DrawsWithin(self.drawing, call.name) if by_default else nullcontext()
        run = partial(super().run_body, call, params, inputs, keywords)
        with noting:
            if self.forward_only and (equal_calls := runs.EQUAL_CALLS.get()):
                return equal_calls.run_body(self, call, (params, inputs, keywords), run)
            return run()

    def wrap_call(
        self, call: Call, run: Callable[..., PyTree]
    ) -> Callable[..., PyTree]:
        if call.frame.path or not self.forward_only:
            return run
        if (equal_calls := runs.EQUAL_CALLS.get()) is None:
            return run
        return partial(equal_calls.record_call, self, call, run)

    def unit(
        self, noted: runs.Noted, run: Callable[..., PyTree], call: Call
    ) -> Callable[..., PyTree]:
        """Returns a function that records a unit call, and runs it on plain tensors."""
        if noted.handler not in self.handlers:
            self.handlers.append(noted.handler)
        # All of them are `runs.Noted` now.
        laying_out: list[Any] = [h for h in call.frame.handlers if h.lays_out]
        # Of several transforms that lay out leaves the outermost one records the call.
        if noted is not laying_out[0]:
            return run

        def recorded(params: PyTree, /, *inputs: PyTree, **keywords: PyTree) -> PyTree:
            leaves, treedef = tree.flatten(params, is_leaf=is_sharded)
            sharded = filter(is_sharded, leaves)
            self.on_take(f"unit {call.name!r}", sharded)
            paths, dtypes, casts = [], [], call.frame.casts
            leaf_casts = None if casts is None else casts.each(call.name, treedef)
            self.needs_no_check = self.needs_no_check and not _torch.functorch_active()
            for i, leaf in enumerate(leaves):
                path = self.path_of(leaf)
                # A parameter that the step has made. If it has a derivative, the type
                # check must see whether it is one value on all ranks.
                if path is None:
                    is_derived = isinstance(leaf, Tensor) and leaf.requires_grad
                    self.needs_no_check = self.needs_no_check and not is_derived
                    leaves[i] = whole_placeholder(leaf)
                    continue
                paths.append(path)
                dtypes.append(None if leaf_casts is None else leaf_casts[i])
                if not isinstance(leaf, Sharded) or isinstance(leaf, Recorded):
                    leaves[i] = unit_placeholder(leaf, self.layouts[path])
                x = local_tensor(leaves[i])
                self.on_leaf(x, path)
                if _torch.is_wrapped(x) or x.requires_grad:
                    self.trained.add(path)
                    self.differentiated = True
            numbers = call.numbers
            owner = tuple(p for h in laying_out for p in h.owner(numbers[0]))
            cast_text = "" if casts is None else str(casts)
            recorded_call = RecordedUnitCall(
                call.path, numbers, paths, owner, cast_text, dtypes
            )
            self.unit_calls.append(recorded_call)
            out = run(tree.unflatten(treedef, leaves), *inputs, **keywords)
            with inside(call.frame.replace(path=call.path, numbers=numbers)):
                return tree.map(self._record_output, out, is_leaf=is_sharded)

        return recorded

    def on_take(self, name: str, leaves: Iterable[Leaf]) -> None:
        check_tracked(name, ((self.path_of(x), local_tensor(x)) for x in leaves))

    def _record_output(self, x: Leaf) -> Leaf:
        """Returns an output of a unit; of a leaf returned as it is, a view.

        In the real call it is what was gathered, and no leaf of the state.
        """
        if self.path_of(x) is None:
            return x
        if isinstance(x, Sharded) and not isinstance(x, Recorded):
            return x.with_local(x.local.view_as(x.local))
        return recorded_tensor(x).view_as(recorded_tensor(x))

    def record_read(self, values: Sequence[Leaf], by_library: bool) -> None:
        """Records that a torch function reads these values.

        Args:
            values: its arguments.
            by_library: whether this library called it.
        """
        f = frame()
        # This library's autograd Functions return the gradients by leaves themselves.
        if not (f.path or by_library):
            self.on_take("an operator", values)
        for x in values:
            path = self.path_of(x)
            if path is None and not by_library and id(x) in self.gradient_ids:
                self.needs_no_check = False
            if path is None or (path, f.numbers) in self.read_in_units:
                continue
            if not f.path and not by_library:
                self.user_reads.setdefault(path, f.in_loss > 0)
            in_loss = bool(f.in_loss or _torch.is_wrapped(local_tensor(x)))
            # A read within a loss replaces one outside: a loss has it stay whole.
            if f.path:
                self.read_in_units[path, f.numbers] = source_line(), in_loss
            elif in_loss > self.read_outside.get(path, ("", -1))[1]:
                self.read_outside[path] = source_line(), in_loss


def refuse_hidden(
    recorder: Recorder, arguments: Sequence[PyTree], returned: Sequence[Leaf]
) -> None:
    """Raises where a unit's leaves were written by ``.data`` and returned as they came.

    No version counter shows such a write. At zero=1 and 2 units would go on to read
    what was gathered before it.

    Args:
        recorder: of the step.
        arguments: its arguments.
        returned: the leaves of the state that it returned.

    Raises:
        NotATensor: names the leaf.
    """
    if not recorder.written_by_data:
        return
    written = {
        p for call in recorder.unit_calls for p in call.leaves
    } & recorder.written_by_data
    passed_ids = set(map(id, tree.leaves(arguments, is_leaf=is_sharded)))
    for x in returned:
        if is_sharded(x) and x.name in written and id(x) in passed_ids:
            raise rule_error("hidden", NotATensor, leaf=x.name)


def refuse_reshaped(returned: Sequence[Leaf]) -> None:
    """Raises where a leaf of the state is returned in another shape than it came in.

    In the real call this rank's part is 1-D before and after: it would be taken for the
    part of a leaf of the old shape.
    """
    for x in returned:
        if not (is_sharded(x) and isinstance(x.local, Tensor)):
            continue
        shape, original = tuple(x.local.shape), tuple(x.layout.shape)
        if shape != original and x.local.numel() == math.prod(original):
            original, shape = list(original), list(shape)
            raise rule_error("reshaped", leaf=x.name, came=original, shape=shape)
