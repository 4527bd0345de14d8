"""Laying a tree out as a step expects it: ``place``.

`lay_out` does it in five phases: it checks what is given; records the step on fake
tensors, to see which leaves its units take; has the ranks compare what they are about
to do; makes this rank's part of each group of leaves; and has the step's types checked
on the parts. ``init_state`` calls it too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, Literal, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import warn
from fsfunc.comm.backends.interrupts import reraising_interrupts
from fsfunc.comm.comparison import Lines, Section, agree
from fsfunc.comm.descriptions import describe_lines
from fsfunc.comm.mesh import Here, Mesh, check_mesh, here
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.comm.typed_maps import LawError
from fsfunc.core.casts import differentiable
from fsfunc.core.frames import recording
from fsfunc.sharded.inputs import arguments, check_function, refuse
from fsfunc.sharded.layout import Layout, Split
from fsfunc.sharded.leaf import NotATensor, is_sharded
from fsfunc.sharded.placements import Own
from fsfunc.sharded.plain_leaves import find_rank_local, lay_leaves, placement_of
from fsfunc.state.agreeing import (
    Agreement,
    RecordedProgram,
    any_mutable,
    compared_ranks,
    kind_of,
    same_functions,
    together,
    unlike_steps,
)
from fsfunc.state.layout_rules import (
    LayoutRules,
    as_hashable,
    check_distinct,
    check_kept,
    paths_named,
    rank_local_of,
    splits_of,
)
from fsfunc.state.leaf_groups import GroupLayout, block_of
from fsfunc.state.leaf_sources import GivenLeaves, Shapes
from fsfunc.state.shared_records import records_here
from fsfunc.state.train_state import Applied, noting_applied
from fsfunc.tracing.recorder import Recorder
from fsfunc.tracing.recorder import record as _record
from fsfunc.tracing.replicas import SPLIT_REASON, compare_batches
from fsfunc.tracing.rules import Unsteady
from fsfunc.tracing.runs import EQUAL_CALLS
from fsfunc.tracing.steadiness import Steadiness
from fsfunc.tracing.type_check import check
from fsfunc.transforms.offloading import Stores, stores_of
from fsfunc.transforms.sharded_calls import Sharding
from fsfunc.tree.types import PyTree

_Tree = TypeVar("_Tree")


@api_boundary
def place(
    fn: Callable[Concatenate[_Tree, ...], Any],
    t: _Tree,
    *rest: PyTree,
    record: Literal["fake", "real"] = "fake",
    layouts: LayoutRules | None = None,
    like: Mapping[str, str] | None = None,
    on: Mesh | None = None,
    donate: bool = False,
) -> _Tree:
    """Returns ``t``, whole on every rank, laid out for the call ``fn(t, *rest)``.

    The inverse of ``unshard``. Leaves that units take are packed into buffers, which
    are split over the axis of the ``shard`` around them. Other leaves are replicated.
    No memory is shared with ``t``.

    **A tree that is laid out for another function moves**: from one zero to another, to
    other stages, splits or replicas, to another mesh of the same ranks. Each rank is
    sent the elements that it needs and has not, and nothing else; nobody holds a whole
    leaf for it. A leaf that is split over an axis stays so, unless ``layouts`` names it
    (``{"**": ()}`` splits nothing); one that no unit takes, and no optimizer of ``fn``
    has, stays as it is. For parameters that generate split over "model" and train at
    zero 3, see ``examples/policy_gradient.py``.

    The optimizer's state in a `TrainState` gets the layouts of ``optimizer.init`` of
    the laid out parameters, for the optimizer that the step applies to it. Any other
    copy of parameters that no unit takes (an average, moments in a tree of your own) is
    replicated, unless ``like`` names what it copies: by pattern of a subtree's path,
    the path of the other subtree, as in ``like={"w0": "w", "op/*": "w"}``. Its leaves
    then have the layouts of those, so that elementwise arithmetic between the two
    works; without that it raises. (What is made from laid out leaves has their layouts
    by itself: ``tree.map(torch.clone, placed)``. See `init_state`.)

    Every rank must call it, with the same ``t`` and a function that makes the same unit
    calls. The ranks compare their recorded programs, the configurations of transforms
    and of the optimizers that the function applies, numbers that are combined with
    gradients outside units, and a checksum of each whole leaf. Tensors of ``rest`` may
    differ in length (except under ``pipeline``). Of simulated ranks the first and the
    last record the program, and the others use the record of the first.

    ``layouts`` splits leaves: it maps patterns of paths (``*`` is one name, ``**`` any
    number) to a ``Split(dim, axis)``, or several. A unit gets such a leaf as a
    `Sharded` one, for the layer functions of ``ff.nn``; it is split before it is packed
    over the axes of a ``shard``. ``Own(axis)`` is for a leaf that no unit takes, and of
    which each rank has a value of its own along the axes of the ``shard``: these are
    not compared. The axis of a split may be one of the ``shard``: experts, with which
    the ranks along it exchange samples, are packed, and their gradients reduced, over
    the other axes. So it is over an axis of a folded view (see ``make_mesh``), of which
    some ranks may be along axes of the ``shard`` and others not.

    Args:
        on: the mesh that ``t`` lies on, if it is laid out on another one than that of
            ``fn``. It has the same ranks.
        donate: give up the memory of ``t``, buffer by buffer: it cannot be used then,
            also if the move fails.

    Raises:
        RanksDiffer: on every rank: what differs, and on which ranks; or another rank
            raised.
        ValueError: one tensor at two paths that are differentiated; a pattern that
            matches no path, two that match one, an axis that does not divide the dim,
            or that is one of a pipeline; ``like`` names a path that is not there, or
            leaves of other shapes.

    Warns where ``fn`` is a step that takes gradients, and no unit takes a leaf as a
    parameter: at zero 1 to 3 it would cut nothing.

    Cost: of each whole leaf, the rank's part is copied, and all of it read once; over
    processes a gather of 32 bytes and two of 16, which are in no ledger. Of a leaf that
    moves, one all-to-all of what ranks lack, and memory for what this rank sends and
    receives of it; two more gathers, of 32 bytes and of 16. ``fn`` is recorded, on
    tensors without data; but not again where the same function is given, on all ranks,
    moved leaves of the same shapes and layouts: if what it closes over has changed,
    make another one of it.

    >>> import torch, fsfunc as ff
    >>> mesh = ff.make_mesh({"data": 4}, "simulated")
    >>> unit, x = ff.unit(lambda p, x: x @ p), torch.ones(1, 8)
    >>> f = lambda p, x: unit(p, x).sum()
    >>> def main():
    ...     cut, whole = (ff.shard(f, mesh, "data", zero=zero) for zero in (3, 0))
    ...     params = ff.place(cut, torch.arange(8.0), x)
    ...     with ff.ledger() as log:
    ...         params = ff.place(whole, params, x, donate=True)
    ...     return params.local.numel(), log.table(mesh.rank)
    >>> ff.spmd(main, mesh)()[0]
    (8, [('all_to_all', 'data', 1, 24)])
    """
    check_function(fn, "place")
    with together(fn, layouts) as agreement:
        rank_local = rank_local_leaves(fn, t, layouts)
        if on is not None or _is_moved(t, paths_named(layouts or {}, t)):
            request = LayoutRequest(
                fn, t, rest, Shapes(), record, layouts, like, rank_local
            )
            return _move(request, agreement, on, donate)
        request = LayoutRequest(
            fn, t, rest, GivenLeaves(), record, layouts, like, rank_local
        )
        return lay_out(request, agreement)


def _move(
    request: LayoutRequest, agreement: Agreement, on: Mesh | None, donate: bool
) -> PyTree:
    """Moves a tree that is laid out to where ``request.fn`` expects it."""
    from fsfunc.state.moving import MovedLeaves, move

    if request.record == "real":
        raise ValueError(
            'place(record="real") of a tree that is laid out: its whole leaves are on '
            "no rank. Record on fake tensors; or ff.unshard it, and place that"
        )
    if torch.is_inference_mode_enabled():  # what is made there has no record
        raise ValueError(
            "place of a tree that is laid out, in torch.inference_mode(), where its "
            "function cannot be recorded: move it before, and enter the mode with what "
            "was returned"
        )
    rank_here = here(request.laying[0].mesh) if request.laying else here()
    mesh = rank_here.mesh if on is None else check_mesh(on, "place")
    if mesh.size != rank_here.mesh.size:
        raise ValueError(
            f"place(on={mesh}): it has {mesh.size} ranks, and {rank_here.mesh} has "
            f"{rank_here.mesh.size}. Between meshes of other ranks ff.remesh moves a "
            "state"
        )
    source = MovedLeaves(request.t, request.batch, mesh, rank_here.rank)
    source.whole_paths |= paths_named(request.layouts or {}, request.t, unsplit=True)
    # How a function's argument lies follows from shapes and rules: a loop that moves
    # parameters between its steps does not have it recorded each time.
    targets, key = {}, None
    if request.laying and source.is_all_laid_out and not _torch.fake_active():
        targets = _TARGETS.setdefault(request.fn, {})
        rules = (
            *((p, as_hashable(rule)) for p, rule in (request.layouts or {}).items()),
            *(request.like or {}).items(),
        )
        batch, batch_treedef = tree.flatten(request.batch, is_leaf=is_sharded)
        kinds = batch_treedef, *map(kind_of, batch)
        meshes = tuple(rank_here.mesh.axes.items()), rank_here.rank
        key = source.key, rules, kinds, meshes
    # A rank whose batch has another length may have to record: then all of them do.
    if agreement.all_know(key in targets):
        target, whole_paths = targets[key]
        source.whole_paths |= whole_paths
        return move(source, target, rank_here, donate)
    request = replace(
        request, t=source.stand_ins, source=source, kept_splits=source.splits
    )
    target = lay_out(request, agreement)
    if key is not None:
        if len(targets) == _MOST_TARGETS:  # batches may have any number of lengths
            targets.clear()
        targets[key] = target, set(source.whole_paths)
    return move(source, target, rank_here, donate)


_MOST_TARGETS = 16
# By function: by what it is called with, the target of a move without its data, and the
# leaves that are to be whole.
_TARGETS: WeakKeyDictionary[Callable[..., Any], dict[Any, tuple[PyTree, set[str]]]] = (
    WeakKeyDictionary()
)


def _is_moved(t: PyTree, named: Collection[str]) -> bool:
    """Returns whether ``place`` moves leaves of ``t``, and does not leave all in place.

    Transforms have laid out what is packed or owned by a rank, and those of another
    step lay it out anew. A leaf that is split alone stays as it is, unless it is named.

    Args:
        named: paths that rules of layouts name.
    """
    paths, leaves, _ = tree.flatten_with_paths(t, is_leaf=is_sharded)
    return any(
        x.layout.flat is not None or bool(x.layout.owners) or path in named
        for path, x in zip(paths, leaves, strict=True)
        if is_sharded(x)
    )


@dataclass(frozen=True)
class LayoutRequest:
    """What is to be laid out, for which function, and by which rules.

    Args:
        fn, record, layouts, like: as of `place`.
        t: the tree to lay out; ``init_state`` also gives a function that makes it.
        batch: the other arguments of ``fn``.
        source: the source of the values of leaves.
        rank_local: by path, leaves that are each rank's own.
        more_lines: returns what else ranks compare.
        called: what ``fn`` calls, if not its own code. Where all ranks call one object,
            the last one's record is the second run that shows if it repeats itself.
        makes_first_state: whether ``fn`` makes the first state of a step.
        kept_splits: by path, how leaves are split that ``layouts`` does not name.
    """

    fn: Callable[..., Any]
    t: PyTree
    batch: tuple[PyTree, ...]
    source: GivenLeaves
    record: Literal["fake", "real"] = "fake"
    layouts: LayoutRules | None = None
    like: Mapping[str, str] | None = None
    rank_local: Mapping[str, Own] = field(default_factory=dict)
    more_lines: Callable[[], Lines] = list
    called: tuple[Any, ...] = ()
    makes_first_state: bool = False
    kept_splits: Mapping[str, tuple[Split, ...]] = field(default_factory=dict)

    @property
    def laying(self) -> list[Any]:
        """The transforms of ``fn`` that lay leaves out."""
        return [h for h in getattr(self.fn, "interpretations", ()) if h.lays_out]


def rank_local_leaves(
    fn: Callable[..., Any], t: PyTree, layouts: LayoutRules | None
) -> dict[str, Own]:
    """Returns, by path, the leaves that ``layouts`` says are each rank's own."""
    if not any(isinstance(rule, Own) for rule in (layouts or {}).values()):
        return {}
    shardings = [
        h for h in getattr(fn, "interpretations", ()) if isinstance(h, Sharding)
    ]
    axes = tuple(axis for h in shardings for axis in h.axes)
    paths, leaves, _ = tree.flatten_with_paths(t, is_leaf=is_sharded)
    mesh = shardings[0].mesh if shardings else Mesh({}, "abstract")
    by_path = dict(zip(paths, leaves, strict=True))
    return rank_local_of(layouts or {}, by_path, axes, mesh)


def lay_out(request: LayoutRequest, agreement: Agreement) -> PyTree:
    """Lays a tree out as `place` does, its values from any source.

    Cost: leaf by leaf, what the source takes for this rank's part of one.
    """
    fn, t, batch = request.fn, request.t, request.batch
    source, laying = request.source, request.laying
    layouts = request.layouts or {}
    _check_kinds(t, batch, laying, source)
    paths, leaves, treedef = tree.flatten_with_paths(t, is_leaf=is_sharded)
    if laying or layouts:  # else only a recording tells whether it is laid out
        check_distinct(paths, "what is laid out")
    by_path = dict(zip(paths, leaves, strict=True))
    # Leaves that are laid out already stay as they are.
    placements = {p: placement_of(x) for p, x in by_path.items()}
    rank_local = {p: x for p, x in placements.items() if isinstance(x, Own)}
    rank_local = {**rank_local, **request.rank_local}
    splits: dict[str, tuple[Split, ...]] = {}
    if layouts or request.kept_splits:
        mesh = laying[0].mesh if laying else here().mesh
        taken = {a for h in laying if not isinstance(h, Sharding) for a in h.axes}
        splits = splits_of(layouts, by_path, mesh, taken)
        kept = {p: s for p, s in request.kept_splits.items() if p not in splits}
        check_kept(kept, mesh, taken)
        splits = {p: s for p, s in {**kept, **splits}.items() if s}
    split_axes = {split.axis for parts in splits.values() for split in parts}

    def program_lines() -> Lines:
        return [
            *request.more_lines(),
            ("record", request.record),
            *describe_lines("layouts", layouts),
        ]

    def value_section() -> Section:
        leaves_by_path = zip(paths, leaves, strict=True)
        compared = [None if p in rank_local else x for p, x in leaves_by_path]
        return source.section(paths, compared, rank_here.link.notes)

    # Rules alone say how leaves lie where no transform lays any out.
    if splits and not laying:
        rank_here = here()
        if where := compared_ranks(rank_here, split_axes):
            agree(where, unlike_steps(program_lines()), value_section())
            compare_batches(batch, where, SPLIT_REASON)
        for path, parts in splits.items():
            x = by_path[path]
            layout = Layout(tuple(x.shape), x.dtype, parts, path)
            by_path[path] = block_of(x, layout, source)
        return tree.unflatten(treedef, map(source.copied, by_path.values()))

    # Else a run without data shows which leaves units take, and in which order.
    recorder, applied = _recorded(request, splits, rank_local)
    if (equal_calls := EQUAL_CALLS.get()) is not None:
        equal_calls.runs = recorder.equal_runs
    _check_untied(by_path, recorder.trained)
    # The recorder knows the transforms of units that were called; or no unit was.
    handlers, stores = recorder.handlers or laying, stores_of(fn)
    sharding = _sharding_of(handlers, stores)
    if not handlers:
        recorder.steadiness.check()
        _check_taken(splits, by_path)
        return tree.map(source.copied, t, is_leaf=is_sharded)
    check_distinct(paths, "what is laid out")
    if not tree.are_shown(leaves):
        tree.shown(t, "place", "is given", is_leaf=is_sharded)

    # Before memory is taken, all ranks say that they are about to do the same.
    rank_here = here(handlers[0].mesh)
    program = RecordedProgram(fn, recorder, handlers, rank_here, split_axes)
    agreement.compare_programs(program, batch, program_lines, value_section)
    layout_of_groups = GroupLayout(
        by_path, recorder, sharding, source, stores, rank_here
    )
    layout_of_groups.lay(applied, request.like or {})
    _check_taken(splits, by_path)
    # Not of a function that takes no gradients: an evaluation may well stay whole.
    is_step = (
        request.makes_first_state or recorder.returns_state
    ) and recorder.gradient_lines
    if sharding is not None and is_step:
        _warn_of_whole(sharding, by_path.values(), rank_here)
    placed = tree.unflatten(treedef, map(source.copied, by_path.values()))
    lay_leaves(placed, rank_local)

    # What was laid out is typed: a second run, on this rank's parts.
    if sharding is not None and not isinstance(source, Shapes):
        args = placed, *batch
        splits_others = bool(split_axes.difference(sharding.axes))
        if recorder.handlers and _is_plain(sharding, recorder, args, splits_others):
            # Right by its record alone, on batches of any shape.
            first_calls, any_shape = (
                sharding.first_calls,
                [k[0] for k in recorder.call_keys],
            )
            first_calls.mark_checked(rank_here.rank, any_shape)
            first_calls.note(recorder.rank_local_paths, False, recorder.drawing)
        else:
            _check_types(fn, sharding, recorder, args, rank_here, agreement)
    recorder.steadiness.check()
    return placed


def _check_kinds(
    t: PyTree, batch: tuple[PyTree, ...], laying: list[Any], source: GivenLeaves
) -> None:
    """Raises where a leaf is of a kind that cannot be laid out, or recorded."""
    # A plan, and the shapes of a state, need no values.
    has_values = any(h.mesh.backend != "abstract" for h in laying)
    meta = " meta" if type(source) is GivenLeaves and has_values else ""
    refuse(f"array sparse inference{meta}", "place", t)
    refuse(f"array inference{meta}", "place", batch, *arguments(len(batch), 1))


def _sharding_of(handlers: list[Any], stores: Stores) -> Sharding | None:
    """Returns the one ``shard`` among transforms that lay out, if there is one."""
    shardings = [h for h in handlers if isinstance(h, Sharding)]
    if stores.params is not None and not shardings:  # nothing would be offloaded
        raise ValueError(
            f"offload(params={str(stores.params)!r}) without shard, which fetches "
            "parameters unit by unit: on one device, ff.shard(step, "
            'ff.make_mesh({"data": 1}), "data"), within the offload or around it'
        )
    if len(shardings) > 1:
        axes = [h.axes for h in shardings]
        raise ValueError(
            f"several shard transforms, over {axes}: give one of them a tuple of axes, "
            "or replicate="
        )
    return shardings[0] if shardings else None


def _check_untied(leaves: dict[str, Any], trained: set[str]) -> None:
    """Raises if one tensor is at two paths that are differentiated."""
    paths: dict[tuple[Any, ...], str] = {}  # by the memory of a leaf
    for path, x in leaves.items():
        if path not in trained or not isinstance(x, Tensor) or not x.numel():
            continue
        key = _torch.storage_key(x), x.storage_offset() * x.element_size(), x.nbytes
        if (other := paths.setdefault(key, path)) != path:
            raise ValueError(
                f"one tensor is at {other!r} and at {path!r}: each path has a gradient "
                "of its own, so that the first update unties them. Keep it at one path "
                f"and read {other!r} at both places (the gradients add up); if they "
                "only begin with equal values, give a clone at one of them"
            )


def _check_taken(splits: Iterable[str], leaves: dict[str, Any]) -> None:
    """Raises where a leaf that is to be split has stayed whole."""
    for path in splits:
        if isinstance(leaves[path], Tensor):
            raise ValueError(
                f"layouts: no unit takes {path!r} as a parameter, and only a unit has "
                "a leaf that is split: call the layer that reads it in an @ff.unit"
            )


def _warn_of_whole(sharding: Sharding, leaves: Collection[Any], at: Here) -> None:
    """Warns where a step that is to have its state in parts has all of it whole."""
    if at.rank or not sharding.zero or at.mesh.axis_size(sharding.options.axis) == 1:
        return
    whole_leaves = [x for x in leaves if isinstance(x, Tensor) and differentiable(x)]
    if whole_leaves and not any(map(is_sharded, leaves)):
        size = sum(x.nbytes for x in whole_leaves)
        subject = "leaf" if len(whole_leaves) == 1 else f"{len(whole_leaves)} leaves"
        warn(_WHOLE.format(sharding.zero, size, subject))


_WHOLE = (
    "shard(..., zero={}) cuts nothing of this state: every rank holds all {:,} bytes "
    "of its {}, as no unit takes one as a parameter. Call the layers that read them in "
    "functions with @ff.unit (ff.from_module(module, units=...) for a module); or say "
    "that they are to stay whole, zero=0"
)


def _is_plain(
    sharding: Sharding,
    recorder: Recorder,
    args: tuple[PyTree, ...],
    splits_others: bool,
) -> bool:
    """Returns whether a step needs no type check.

    Args:
        splits_others: whether leaves are split over other axes too. The ranks along
            these draw alike, and so a type check is needed.
    """
    is_plain = recorder.needs_no_check and not (
        find_rank_local(args) is not None or splits_others
    )
    # Units that send along other axes are checked, too.
    return is_plain and recorder.axes <= {*sharding.axes}


@reraising_interrupts()
def _check_types(
    fn: Callable[..., Any],
    sharding: Sharding,
    recorder: Recorder,
    args: tuple[PyTree, ...],
    rank_here: Here,
    agreement: Agreement,
) -> None:
    """Runs the type check where there are other ranks.

    Errors of the step itself are left to its first call, as the state may still change.
    """
    if recording() or not rank_here.link.moves_data or rank_here.mesh.backend == "vmap":
        return
    axes = sharding.axes
    try:
        seen = check(fn, args, {}, rank_here, axes, exchange=agreement.exchange)
    except (LawError, NotATensor, Unsteady):
        recorder.steadiness.check()  # a step that is not steady may be why
        raise
    except Exception:
        return
    recorder.steadiness.compare_with_check(seen.numbers_given)
    sharding.first_calls.mark_checked(rank_here.rank, seen.call_keys)
    findings = seen.rank_local_paths, seen.draws, seen.drawing, seen.combines_numbers
    sharding.first_calls.note(*findings)


def _recorded(
    request: LayoutRequest,
    splits: Mapping[str, tuple[Split, ...]],
    rank_local: Mapping[str, Own],
) -> tuple[Recorder, list[Applied]]:
    """Returns the record of a function, and the optimizers that it applies.

    Simulated ranks run one program in one process, and share one record. A rank takes
    another's where it is at the same call, with the same shapes, and its own function
    names the transforms that the record is of. Plans share one where their caller says
    that their steps are recorded alike (`sharing_records`).
    """
    fn, t, batch, mode = request.fn, request.t, request.batch, request.record

    def record() -> tuple[Recorder, list[Applied]]:
        if records is not None and shared_key in records:
            shared_recorder, applied = records[shared_key]
            return _adapted(shared_recorder, laying), applied
        with noting_applied() as applied:
            recorder = _record(fn, t, batch, mode, splits, rank_local)
        if (equal_calls := EQUAL_CALLS.get()) is not None:
            recorder.equal_runs = equal_calls.runs_of(recorder)
        # Only if its transforms are all that lay out: others' are none of this step.
        if records is not None and set(recorder.handlers) == set(laying):
            records[shared_key] = replace(recorder, handlers=laying), applied
        return recorder, applied

    records, shared_key = None, ()
    laying, called = request.laying, request.called or (fn,)
    rank_here = here(laying[0].mesh) if laying else None
    if rank_here is None or (notes := rank_here.link.notes) is None:
        return record()
    rank = rank_here.rank
    leaves, treedef = tree.flatten((t, batch), is_leaf=is_sharded)
    count = notes["records", rank] = notes.get(("records", rank), 0) + 1
    kinds = tuple(kind_of(x) for x in leaves)
    configurations = tuple(h.configuration for h in laying)
    rules = tuple(splits.items()), frozenset(rank_local)
    if not rank_here.link.moves_data:
        records, shared_key = records_here(), (count, mode, treedef, kinds, *rules)
    key = "record", count, mode, treedef, kinds, configurations, *rules
    # The last rank records too, so that what differs from rank to rank, or from run to
    # run, shows.
    is_last = rank == rank_here.mesh.size - 1
    if key not in notes or is_last and rank_here.link.moves_data:
        recorder, applied = record()
        if key in notes:
            first_recorder, _, first_called = notes[key]
            is_one = not (recorder.axes or first_recorder.axes or any_mutable(kinds))
            is_one = is_one and same_functions(called, first_called)
            recorder.steadiness.compare_with_rank(first_recorder.steadiness, is_one)
        if set(recorder.handlers) != set(laying) or is_last:
            return recorder, applied
        recorder = replace(recorder, handlers=laying)
        notes[key] = recorder, applied, called
        return recorder, applied
    recorder, applied, _ = notes[key]
    # What was derived from the record is of these ranks' transforms, and stays.
    return replace(_adapted(recorder, laying), derived=recorder.derived), applied


def _adapted(recorder: Recorder, laying: list[Any]) -> Recorder:
    """Returns a record as one of a step with these transforms, which lay leaves out."""
    for ours, theirs in zip(laying, recorder.handlers, strict=True):
        ours.learn(theirs)
    return replace(recorder, handlers=laying, steadiness=Steadiness(), derived={})
