"""Laying a tree out as a step expects it: ``place``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import warn
from fsfunc.comm.backends.interrupts import heard
from fsfunc.comm.comparison import Lines, Section, agree
from fsfunc.comm.descriptions import told
from fsfunc.comm.mesh import Here, here
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.comm.typed_maps import LawError
from fsfunc.core.casts import differentiable
from fsfunc.core.frames import recording
from fsfunc.sharded.inputs import arguments, check_function, refuse
from fsfunc.sharded.layout import Layout, Split
from fsfunc.sharded.leaf import NotATensor, is_sharded
from fsfunc.sharded.placements import Own
from fsfunc.sharded.plain_leaves import holds_own, laid_as, lay_leaves
from fsfunc.state.agreeing import (
    Agreement,
    RecordedProgram,
    compared,
    kind_of,
    opaque,
    same_functions,
    together,
    unlike_steps,
)
from fsfunc.state.layout_rules import LayoutRules, check_apart, own_of, splits_of
from fsfunc.state.leaf_groups import GroupLayout, block_of
from fsfunc.state.leaf_sources import GivenLeaves, Shapes
from fsfunc.state.train_state import Applied, noting_applied
from fsfunc.tracing.recorder import Recorder
from fsfunc.tracing.recorder import record as _record
from fsfunc.tracing.replicas import SPLIT_REASON, compare_batches
from fsfunc.tracing.rules import Unsteady
from fsfunc.tracing.steadiness import Steadiness
from fsfunc.tracing.type_check import check
from fsfunc.transforms.offloading import Stores, stores_of
from fsfunc.transforms.sharded_calls import Sharding


@api_boundary
def place(
    fn: Callable[..., Any],
    t: Any,
    *rest: Any,
    record: str = "fake",
    layouts: LayoutRules | None = None,
    like: Mapping[str, str] | None = None,
) -> Any:
    """``t``, whole on every rank, laid out for the call ``fn(t, *rest)``.

    The inverse of ``unshard``. Leaves that units take are packed into buffers, which
    are split over the axis of the ``shard`` around them. Other leaves are replicated,
    and leaves that have layouts keep them. No memory is shared with ``t``.

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
    the other axes.

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
    processes a gather of 32 bytes and two of 16, which are in no ledger.
    """
    check_function(fn, "place")
    with together(fn, layouts) as agreement:
        own = own_leaves(fn, t, layouts)
        asked = LayoutRequest(fn, t, rest, GivenLeaves(), record, layouts, like, own)
        return lay_out(asked, agreement)


@dataclass(frozen=True)
class LayoutRequest:
    """What is to be laid out, for which function, and by which rules.

    Args:
        fn, t, rest, record, layouts, like: as of `place`.
        source: of the values of leaves.
        own: by path, leaves that are each rank's own.
        beside: what ranks compare too, where there are others.
        calls: what ``fn`` calls, if not its own code. Where all ranks call one object,
            the last one's record is the second run that shows if it repeats itself.
        begins: whether ``fn`` makes the first state of a step.
    """

    fn: Callable[..., Any]
    t: Any
    rest: tuple[Any, ...]
    source: GivenLeaves
    record: str = "fake"
    layouts: LayoutRules | None = None
    like: Mapping[str, str] | None = None
    own: Mapping[str, Own] = field(default_factory=dict)
    beside: Callable[[], Lines] = list
    calls: tuple[Any, ...] = ()
    begins: bool = False

    @property
    def laying(self) -> list[Any]:
        """The transforms of ``fn`` that lay leaves out."""
        return [h for h in getattr(self.fn, "interpretations", ()) if h.lays_out]


def own_leaves(
    fn: Callable[..., Any], t: Any, layouts: LayoutRules | None
) -> dict[str, Own]:
    """By path, the leaves of ``t`` that ``layouts`` says are each rank's own."""
    if not any(isinstance(rule, Own) for rule in (layouts or {}).values()):
        return {}
    shardings = [
        h for h in getattr(fn, "interpretations", ()) if isinstance(h, Sharding)
    ]
    axes = tuple(axis for h in shardings for axis in h.axes)
    paths, leaves, _ = tree.flatten_with_paths(t, is_leaf=is_sharded)
    return own_of(layouts or {}, dict(zip(paths, leaves, strict=True)), axes)


def lay_out(asked: LayoutRequest, agreement: Agreement) -> Any:
    """:func:`place`, of leaves whose values come from ``asked.source``.

    Cost: leaf by leaf, what the source takes for this rank's part of one.
    """
    fn, t, rest, source, laying = (
        asked.fn,
        asked.t,
        asked.rest,
        asked.source,
        asked.laying,
    )
    layouts = asked.layouts or {}
    _check_given(t, rest, laying, source)
    paths, leaves, treedef = tree.flatten_with_paths(t, is_leaf=is_sharded)
    if laying or layouts:  # else only a recording tells whether it is laid out
        check_apart(paths, "what is laid out")
    found = dict(zip(paths, leaves, strict=True))
    kept = {p: how for p, x in found.items() if isinstance(how := laid_as(x), Own)}
    own = {**kept, **asked.own}  # what is laid out stays so
    splits: dict[str, tuple[Split, ...]] = {}
    if layouts:
        mesh = laying[0].mesh if laying else here().mesh
        taken = {a for h in laying if not isinstance(h, Sharding) for a in h.axes}
        splits = splits_of(layouts, found, mesh, taken)
    over = {split.axis for parts in splits.values() for split in parts}

    def said() -> Lines:
        return [
            *asked.beside(), ("record", asked.record), *told("layouts", layouts)
        ]  # fmt: skip

    def values() -> Section:
        same = [None if p in own else x for p, x in zip(paths, leaves, strict=True)]
        return source.section(paths, same, at.link.notes)

    # Rules alone say how leaves lie where no transform lays any out.
    if splits and not laying:
        at = here()
        if where := compared(at, over):
            agree(where, unlike_steps(said()), values())
            compare_batches(rest, where, SPLIT_REASON)
        for path, parts in splits.items():
            layout = Layout(tuple(found[path].shape), found[path].dtype, parts, path)
            found[path] = block_of(found[path], layout, source)
        return tree.unflatten(treedef, map(source.own, found.values()))

    # Else a run without data shows which leaves units take, and in which order.
    recorder, applied = _recorded(asked, splits, own)
    _check_untied(found, recorder.trained)
    handlers, stores = (
        recorder.handlers or laying,
        stores_of(fn),
    )  # or no unit is called
    sharding = _sharding_of(handlers, stores)
    if not handlers:
        recorder.steadiness.check()
        _check_taken(splits, found)
        return tree.map(source.own, t, is_leaf=is_sharded)
    check_apart(paths, "what is laid out")
    if not tree.are_shown(leaves):
        tree.shown(t, "place", "is given", is_leaf=is_sharded)

    # Before memory is taken, all ranks say that they are about to do the same.
    at = here(handlers[0].mesh)
    program = RecordedProgram(fn, recorder, handlers, at, over)
    agreement.compare_programs(program, rest, said, values)
    laid = GroupLayout(found, recorder, sharding, source, stores, at)
    laid.lay(applied, asked.like or {})
    _check_taken(splits, found)
    # It trains by gradients.
    steps = (asked.begins or recorder.returns_state) and recorder.gradient_lines
    if sharding is not None and steps:
        _warn_of_whole(sharding, found.values(), at)
    placed = tree.unflatten(treedef, map(source.own, found.values()))
    lay_leaves(placed, own)

    # What was laid out is typed: a second run, on this rank's parts.
    if sharding is not None and not isinstance(source, Shapes):
        args, split = (placed, *rest), bool(over.difference(sharding.axes))
        if recorder.handlers and _is_plain(sharding, recorder, args, split):
            # Right by its record alone, on batches of any shape.
            sharding.first_calls.learn(at.rank, [key[0] for key in recorder.call_keys])
            sharding.first_calls.note(
                recorder.rank_local_paths, False, recorder.drawing
            )
        else:
            _check_types(fn, sharding, recorder, args, at, agreement)
    recorder.steadiness.check()
    return placed


def _check_given(t: Any, rest: Any, laying: list[Any], source: GivenLeaves) -> None:
    """Raises where a leaf is of a kind that cannot be laid out, or recorded."""
    runs = any(h.mesh.backend != "abstract" for h in laying)
    also = " meta" if type(source) is GivenLeaves and runs else ""
    refuse(f"array sparse inference{also}", "place", t)
    refuse(f"array inference{also}", "place", rest, *arguments(len(rest), 1))


def _sharding_of(handlers: list[Any], stores: Stores) -> Sharding | None:
    """The one ``shard`` among transforms that lay out, if there is one."""
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
    paths: dict[Any, str] = {}
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
    if at.rank or not sharding.zero or at.mesh.axis_size(sharding.cut.axis) == 1:
        return
    whole = [x for x in leaves if isinstance(x, Tensor) and differentiable(x)]
    if whole and not any(map(is_sharded, leaves)):
        size = sum(x.nbytes for x in whole)
        what = "leaf" if len(whole) == 1 else f"{len(whole)} leaves"
        warn(_WHOLE.format(sharding.zero, size, what))


_WHOLE = (
    "shard(..., zero={}) cuts nothing of this state: every rank holds all {:,} bytes "
    "of its {}, as no unit takes one as a parameter. Call the layers that read them in "
    "functions with @ff.unit (ff.from_module(module, units=...) for a module); or say "
    "that they are to stay whole, zero=0"
)


def _is_plain(sharding: Sharding, recorder: Recorder, args: Any, split: bool) -> bool:
    """True of a step that needs no type check.

    Not where leaves are ``split`` over other axes too, whose ranks draw alike, nor
    where units send along others.
    """
    plain = recorder.needs_no_check and not (holds_own(args) is not None or split)
    return plain and recorder.axes <= {*sharding.axes}


@heard()
def _check_types(
    fn: Callable[..., Any],
    sharding: Sharding,
    recorder: Recorder,
    args: Any,
    at: Here,
    agreement: Agreement,
) -> None:
    """Runs the type check where there are other ranks.

    Errors of the step itself are left to its first call, as the state may still change.
    """
    if recording() or not at.link.moves or at.mesh.backend == "vmap":
        return
    try:
        seen = check(fn, args, {}, at, sharding.axes, exchange=agreement.exchange)
    except (LawError, NotATensor, Unsteady):
        recorder.steadiness.check()  # which may be why
        raise
    except Exception:
        return
    recorder.steadiness.compare_with_check(seen.numbers_given)
    sharding.first_calls.learn(at.rank, seen.call_keys)
    noted = seen.rank_local_paths, seen.draws, seen.drawing, seen.combines_numbers
    sharding.first_calls.note(*noted)


def _recorded(
    asked: LayoutRequest,
    splits: Mapping[str, tuple[Split, ...]],
    own: Mapping[str, Own],
) -> tuple[Recorder, list[Applied]]:
    """The record of ``asked.fn``: simulated ranks, which run one program, share one.

    A rank takes another's record where it is at the same call, with the same shapes,
    and its own function names the transforms that the record is of.
    """
    fn, t, rest, how = asked.fn, asked.t, asked.rest, asked.record

    def record() -> tuple[Recorder, list[Applied]]:
        with noting_applied() as applied:
            return _record(fn, t, rest, how, splits, own), applied

    mine, calls = asked.laying, asked.calls or (fn,)
    at = here(mine[0].mesh) if mine else None
    if at is None or (notes := at.link.notes) is None:
        return record()
    rank = at.rank
    leaves, treedef = tree.flatten((t, rest), is_leaf=is_sharded)
    count = notes["records", rank] = notes.get(("records", rank), 0) + 1
    shapes = tuple(kind_of(x) for x in leaves)
    kinds = tuple(h.configuration for h in mine)
    told_of = tuple(splits.items()), frozenset(own)
    key = "record", count, how, treedef, shapes, kinds, *told_of
    last = rank == at.mesh.size - 1  # it looks for itself
    if key not in notes or last and at.link.moves:
        found, applied = record()
        if key in notes:
            first, _, its = notes[key]
            one = not (found.axes or first.axes or opaque(shapes))
            one = one and same_functions(calls, its)
            found.steadiness.compare_with_rank(first.steadiness, one)
        if set(found.handlers) != set(mine) or last:
            return found, applied
        found = replace(found, handlers=mine)
        notes[key] = found, applied, calls
        return found, applied
    found, applied, _ = notes[key]
    for ours, theirs in zip(mine, found.handlers, strict=True):
        ours.learn(theirs)
    return replace(found, handlers=mine, steadiness=Steadiness()), applied
