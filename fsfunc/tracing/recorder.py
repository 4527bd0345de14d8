"""Recording which leaves the units of a step take.

The step runs once on fake tensors, and nothing is sent. Its leaves are
:class:`Recorded`: they are used as tensors, and record which unit reads them. So the
unit calls give the leaves that share a buffer, the order in which buffers are gathered,
and the leaves that no unit takes.

Transforms are replaced meanwhile: one that lays leaves out by one that records its unit
calls (`runs.Noted`), and one that recomputes by none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from torch import Tensor

from fsfunc import _torch, tree
from fsfunc._torch.fake_results import communicates
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
from fsfunc.tracing.groups import Findings, Recorded, Taken, block, local, plain, whole
from fsfunc.tracing.operators import DrawsWithin
from fsfunc.tracing.rules import refused
from fsfunc.tracing.steadiness import NumbersGiven, Steadiness, asked_numbers
from fsfunc.tracing.torch_calls import OwnValues, Reads, check_tracked


@reraising_interrupts()
def record(
    fn: Callable[..., Any],
    params: Any,
    rest: tuple[Any, ...],
    how: Literal["fake", "real"] = "fake",
    splits: Mapping[str, tuple[Split, ...]] | None = None,
    rank_local: Collection[str] = (),
) -> Recorder:
    """Record one run of ``fn(params, *rest)`` that sends nothing.

    Args:
        splits: by path, how leaves are split over axes that no transform gathers.
        rank_local: the paths of leaves that are each rank's own.
        how: ``"fake"`` runs on fake tensors; ``"real"`` runs one real call, for steps
            that read a tensor's value.

    Raises:
        RuntimeError: the step reads a fake tensor's value; names the line.

    Cost: a run without backward passes, whose gradients have shapes alone. If it
    raises, one with them, as the step may read what a hook or a Function's backward
    leaves; its error is raised. ``steadiness`` may need another run, except for a plan,
    after which no real step runs.
    """
    if how not in ("fake", "real"):
        raise ValueError(f'record={how!r}: it is "fake" or "real"')
    recording = _Recording(fn, params, rest, how == "fake", splits or {}, rank_local)
    run = recording.run
    if how == "real":
        return run()
    # A forward pass shows which units take which leaves, and in which order. If it
    # raises, its error may come of the backward pass that is missing. It left nothing
    # behind, so that the whole run below meets what is wrong all the same.
    at = maybe_here()
    planned = at is not None and not at.link.moves_data
    for remembers in (True, False):  # of forward mode fakes may raise for that
        with suppress(Exception):
            found = run(True, remembers)
            again = None if planned else partial(_numbers_again, run, remembers)
            found.steadiness = Steadiness(found.said, again, found.calls_at)
            return found
    try:
        return run()
    except (ValueError, RuntimeError) as error:  # of what has words of its own for it
        line, text = traceback_line(error), str(error)
        if "instead found type 'Recorded'" in text:
            raise refused("scripts", line=line) from error
        if "Default process group has not been initialized" in text:
            raise communicates(f"at {line}") from error
        raise


@reraising_interrupts()
def _numbers_again(run: Callable[..., Recorder], remembers: bool) -> list[NumbersGiven]:
    """The numbers of another run, and its error where it raises without a backward."""
    with suppress(Exception):
        return run(True, remembers).said
    return run().said


@dataclass(frozen=True)
class _Recording:
    """What is recorded: ``fn(params, *rest)``, on tensors without data if ``fake``.

    ``splits`` and ``rank_local`` as for `record`.
    """

    fn: Callable[..., Any]
    params: Any
    rest: tuple[Any, ...]
    fake: bool
    splits: Mapping[str, tuple[Split, ...]]
    rank_local: Collection[str]

    def run(self, forward_only: bool = False, remembers: bool = False) -> Recorder:
        """One run, without backward passes if ``forward_only``."""
        f, fake, params, rest = frame(), self.fake, self.params, self.rest
        recorder = Recorder(forward_only=forward_only, draws=not fake)
        recorder.rank_local = frozenset(self.rank_local)
        mine = fake and not _torch.fake_active()  # else they are fake already
        asked: set[str] = set()
        with runs.without_data(
            (params, rest),
            runs.place_without_data(),
            fake=fake,
            remembers=remembers,
            restores=False,
            asked=asked,
            told=_TOLD if fake else None,
        ) as mode:
            if mine:
                params, rest = runs.shadows(mode, (params, rest), apart=True)
            # What is fake may be written: an optimizer then copies nothing.
            donated = Everything() if fake else None
            handlers = tuple(map(recorder.replacement_for, f.handlers))
            f = f.replace(handlers=handlers, tracer=recorder, donated=donated)
            with inside(f), watching(recorder):
                given = recorder.leaves(params, self.splits), *rest
                recorder.own.add(tree.leaves(rest))
                with Reads(recorder):
                    try:
                        out = self.fn(*recorder.mark_numbers(given))
                    except Exception as error:
                        recorder.explain(error, rest)
                        raise
                recorder.carries(given[:1], out)
        note_axes_read(asked)
        recorder.end(asked)
        return recorder


_TOLD = (
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
        plain: whether no type check is needed: the only derivatives are those of
            ``value_and_grad``, by leaves of the tree, once by each, and only units and
            the library read what is sharded, and not together with what is not.
        glue: leaves that the user's functions read outside units; whether in a loss.
        calls: the signatures of the calls of sharded functions.
        said: the numbers that torch's functions were given, for ``steadiness``;
            ``calls_at``: the lines of gradient calls.
        axes: those of its collectives (except of numbers outside losses), and those
            whose ``axis_index`` it read.
        updates: whether it returns sharded leaves that are no gradients; ``steps``:
            whether it returns a tree like its first argument, of new values.
        own: what may be a rank's own; ``hidden``: leaves written by ``.data``.
        drawing: the units that draw random numbers outside gradient calls.
        cuts: whether it cuts a batch into microbatches.
    """

    forward_only: bool = False
    draws: bool = False
    plain: bool = True
    glue: dict[str, bool] = field(default_factory=dict)
    calls: list[Any] = field(default_factory=list)
    said: list[NumbersGiven] = field(default_factory=list)
    steadiness: Steadiness = field(default_factory=Steadiness)
    calls_at: set[str] = field(default_factory=set)
    axes: set[str] = field(default_factory=set)
    updates: bool = False
    steps: bool = False
    own: OwnValues = field(default_factory=OwnValues)
    hidden: set[str] = field(default_factory=set)
    drawing: set[str] = field(default_factory=set)
    cuts: bool = False
    _known: dict[int, str] = field(default_factory=dict)
    _gradients: set[int] = field(default_factory=set)
    _by: set[Any] = field(default_factory=set)  # by which leaves, of which microbatch
    _alive: list[Tensor] = field(default_factory=list)

    def leaves(self, params: Any, splits: Mapping[str, tuple[Split, ...]]) -> Any:
        """The leaves of what the step is given first, each :class:`Recorded`."""
        paths, leaves, treedef = tree.flatten_with_paths(params, is_leaf=is_sharded)
        for i, (path, x) in enumerate(zip(paths, leaves, strict=True)):
            if isinstance(x, Tensor):
                shape, parts = tuple(x.shape), splits.get(path, ())
                leaves[i] = Recorded(x.detach(), Layout(shape, x.dtype, (), path))
                self.layouts[path] = Layout(shape, x.dtype, parts, path)
        return tree.unflatten(treedef, leaves)

    def end(self, asked: set[str]) -> None:
        """Sets ``plain``, which is False after a run with backward passes.

        Args:
            asked: the axes whose ``axis_index`` it read.
        """
        self.axes |= asked
        taken = {path for t in self.taken for path in t.leaves}
        apart = all(in_loss and p not in taken for p, in_loss in self.glue.items())
        means = {axis for h in self.handlers for axis in getattr(h, "axes", ())}
        self.plain &= self.forward_only and apart and not asked & means
        said = "done with gradients or leaves outside units"
        self.claims.append((said, "nothing" if self.plain else "something"))

    def on_leaf(self, x: Tensor, path: str) -> None:
        self._known[id(x)] = path
        self._alive.append(x)

    def in_batch(self, leaves: list[Any]) -> list[Any]:
        # A rank's own leaf stays a plain tensor; what becomes of others, is not known.
        self.cuts = True
        own = [is_sharded(x) and x.layout.name in self.rank_local for x in leaves]
        return [plain(x) if mine else x for x, mine in zip(leaves, own, strict=True)]

    def explain(self, error: Exception, rest: Any) -> None:
        """Adds to an error of the step what may be why it was raised here alone.

        Args:
            rest: the arguments beside the state.
        """
        taken = {path for t in self.taken for path in t.leaves} | self.rank_local
        tensors = [x for x in tree.leaves(rest, is_sharded) if isinstance(x, Tensor)]
        rows = {tuple(x.shape[:1]) for x in tensors if x.ndim}
        for path, layout in self.layouts.items() if self.cuts else ():
            if layout.shape[:1] in rows and path not in taken:
                error.add_note(_UNCUT.format(path=path))

    def on_call(self, key: Any, args: Any, keywords: Any, mean: Sequence[str]) -> None:
        """Records the signature of a call of a sharded function."""
        self.calls.append(key)

    def on_placeholders(
        self, leaves: Sequence[Any], found: Sequence[Any], aux: Any
    ) -> None:
        """Records the gradients of a gradient call, with the layouts of its leaves."""
        self.own.add(tree.leaves(aux))
        f = frame()
        self.calls_at.add(source_line())
        by = [(self.path_of(x), f.micro) for x in leaves]
        known = all(path is not None for path, _ in by)
        apart = known and self._by.isdisjoint(by)
        self.plain = self.plain and apart and not (f.in_loss or f.path)
        self._by.update(by)
        self._gradients.update(map(id, found))
        self._alive.extend(found)

    def collective_called(self, x: Tensor, how: LinearMap, where: RankGroup) -> None:
        if x.ndim or x.requires_grad or frame().in_loss or _torch.is_wrapped(x):
            self.axes.update(where.axis)  # a metric's mean makes no ranks agree
        if frame().path and not where.loss_is_mean:
            return  # what a unit does to its own values
        typed = how.to == "I" or how.op in ("cast", "enter", "slice")
        if typed or self.is_leaf(x):
            self.plain = False

    def claimed_equal(self, x: Any, what: str) -> None:
        if not (isinstance(x, Tensor) or frame().path):
            again = [name for name, _ in self.claims].count(what)
            self.claims += describe_lines(
                what + "'" * again, x, ask_schedules_and_masks(())
            )

    def carries(self, args: Sequence[Any], out: Any) -> None:
        """Records the returned state, of which leaves may be each rank's own."""
        state = runs.returned_state(args, out)
        leaves = tree.leaves(state, is_leaf=is_sharded)
        refuse_hidden(self, args, leaves)
        # Of a leaf that came in parts, its own part is a row.
        refuse_reshaped([x for x in leaves if isinstance(x, Recorded)])
        laid = [x.local for x in leaves if is_sharded(x)]
        self.updates = any(id(x) not in self._gradients for x in laid)
        given, returned = (tree.flatten(x, is_sharded)[1] for x in (args[:1], (state,)))
        new = [x.local if is_sharded(x) else x for x in leaves]
        new = [x for x in new if isinstance(x, Tensor) and id(x) not in self._gradients]
        self.steps = bool(new) and returned == given
        bare = [x for x in tree.leaves(out, is_sharded) if isinstance(x, Tensor)]
        self.plain &= not any(map(self.is_leaf, bare))  # parts that lost their layout
        if isinstance(state, Tensor):  # such as a loss
            self.rank_local_paths.add("")
        else:
            self.plain = self.plain and not any(isinstance(x, Tensor) for x in leaves)

    def claimed_rank_local(self, x: Tensor, where: RankGroup, what: str) -> None:
        self.plain = self.plain and where.loss_is_mean

    def mark_numbers(self, values: Any) -> Any:
        return asked_numbers(values, self.answered)

    def answered(self, found: bool) -> bool:
        self.plain = False  # the other answer may lead elsewhere
        return found

    def is_leaf(self, x: Any) -> bool:
        """True if ``x`` is in place of a leaf, or of the gradient by one."""
        return id(x) in self._gradients or self.path_of(x) is not None

    def path_of(self, x: Any) -> str | None:
        if isinstance(x, Recorded):
            return x.layout.name
        x = x._local if isinstance(x, Sharded) else x
        if not isinstance(x, Tensor):
            return None
        found = self._known.get(id(x))
        if found is None and _torch.is_wrapped(x):
            found = self._known.get(id(_torch.unwrapped(x)))
        return found

    def replacement_for(self, handler: Interpretation) -> Interpretation:
        return handler.recorded(self)

    def noted(self, handler: Any) -> runs.Noted:
        """The interpretation that only notes the unit calls of ``handler``."""
        return runs.NotedShard(handler, self)

    def run_body(self, call: Call, params: Any, inputs: Any, keywords: Any) -> Any:
        # Without a transform that lays out, the leaves are not tensors yet.
        params = tree.map(plain, params, is_leaf=is_sharded)
        apart = call.frame.seed is None and not call.frame.path
        noting = DrawsWithin(self.drawing, call.name) if apart else nullcontext()
        with noting:
            return super().run_body(call, params, inputs, keywords)

    def unit(self, noted: runs.Noted, run: Callable[..., Any], call: Call):
        """A unit call under recording: its leaves become plain tensors again."""
        if noted.handler not in self.handlers:
            self.handlers.append(noted.handler)
        laid: list[Any] = [h for h in call.frame.handlers if h.lays_out]  # all Noted
        if noted is not laid[0]:
            return run  # noted by the outermost one

        def recorded(params: Any, /, *inputs: Any, **keywords: Any) -> Any:
            leaves, treedef = tree.flatten(params, is_leaf=is_sharded)
            placed = filter(is_sharded, leaves)
            self.on_take(f"unit {call.name!r}", placed)
            names, kinds, casts = [], [], call.frame.casts
            each = None if casts is None else casts.each(call.name, treedef)
            self.plain = self.plain and not _torch.functorch_active()
            for i, leaf in enumerate(leaves):
                path = self.path_of(leaf)
                if path is None:
                    derived = isinstance(leaf, Tensor) and leaf.requires_grad
                    self.plain = self.plain and not derived
                    leaves[i] = whole(leaf)
                    continue
                names.append(path)
                kinds.append(None if each is None else each[i])
                if not isinstance(leaf, Sharded) or isinstance(leaf, Recorded):
                    leaves[i] = block(leaf, self.layouts[path])
                x = local(leaves[i])
                self.on_leaf(x, path)
                if _torch.is_wrapped(x) or x.requires_grad:
                    self.trained.add(path)
                    self.differentiated = True
            numbers = call.numbers
            owner = tuple(p for h in laid for p in h.owner(numbers[0]))
            said = "" if casts is None else str(casts)
            taken = Taken(call.path, numbers, names, owner, said, kinds)
            self.taken.append(taken)
            out = run(tree.unflatten(treedef, leaves), *inputs, **keywords)
            with inside(call.frame.replace(path=call.path, numbers=numbers)):
                return tree.map(self._output, out, is_leaf=is_sharded)

        return recorded

    def on_take(self, name: str, leaves: Iterable[Any]) -> None:
        check_tracked(name, ((self.path_of(x), local(x)) for x in leaves))

    def _output(self, x: Any) -> Any:
        """An output; a leaf that a unit returns as it is, is no leaf any more."""
        if self.path_of(x) is None:
            return x
        if isinstance(x, Sharded) and not isinstance(x, Recorded):
            return x.with_local(x.local.view_as(x.local))
        return plain(x).view_as(plain(x))

    def read(self, values: Sequence[Any], library: bool) -> None:
        """Hears that a torch function read these; ``library``: that it called."""
        f = frame()
        if not (f.path or library):  # the library's own Functions answer for themselves
            self.on_take("an operator", values)
        for x in values:
            path = self.path_of(x)
            if path is None and not library and id(x) in self._gradients:
                self.plain = False
            if path is None or (path, f.numbers) in self.inside:
                continue
            if not f.path and not library:
                self.glue.setdefault(path, f.in_loss > 0)
            in_loss = bool(f.in_loss or _torch.is_wrapped(local(x)))
            # That a loss reads it counts, whoever has read it before.
            if f.path:
                self.inside[path, f.numbers] = source_line(), in_loss
            elif in_loss > self.outside.get(path, ("", -1))[1]:
                self.outside[path] = source_line(), in_loss


def refuse_hidden(recorder: Any, given: Any, returned: Sequence[Any]) -> None:
    """Raises where a unit's leaves were written by ``.data`` and returned as they came.

    Args:
        recorder: of the step; ``given``: its arguments; ``returned``: its leaves.

    Raises:
        NotATensor: at zero=1 and 2 units would read what was gathered before.
    """
    if not recorder.hidden:
        return
    written = {p for t in recorder.taken for p in t.leaves} & recorder.hidden
    came = set(map(id, tree.leaves(given, is_leaf=is_sharded)))
    for x in returned:
        if is_sharded(x) and x.name in written and id(x) in came:
            raise refused("hidden", NotATensor, leaf=x.name)


def refuse_reshaped(returned: Sequence[Any]) -> None:
    """Raises where a leaf of the state is returned in another shape than it came.

    Of this rank's part, a row of elements, that does not show: it would be taken for
    the part of a leaf of the old shape.
    """
    for x in returned:
        if not (is_sharded(x) and isinstance(x.local, Tensor)):
            continue
        shape, came = tuple(x.local.shape), tuple(x.layout.shape)
        if shape != came and x.local.numel() == math.prod(came):
            came, shape = list(came), list(shape)
            raise refused("reshaped", leaf=x.name, came=came, shape=shape)
