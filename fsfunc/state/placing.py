"""Laying a tree out as a step expects it: ``place``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
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
from fsfunc.core.frames import frame
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
from fsfunc.state.leaf_groups import block_of, lay_groups
from fsfunc.state.leaf_sources import GivenLeaves, Shapes
from fsfunc.state.train_state import Applied, noting_applied
from fsfunc.tracing.recorder import Recorder
from fsfunc.tracing.recorder import record as _record
from fsfunc.tracing.replicas import SPLIT, compare_batches
from fsfunc.tracing.steadiness import Steadiness, Unsteady
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
        own, source = own_leaves(fn, t, layouts), GivenLeaves()
        return lay_out(fn, t, rest, record, source, agreement, layouts, like, own)


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


def lay_out(
    fn: Callable[..., Any],
    t: Any,
    rest: Any,
    record: str,
    source: GivenLeaves,
    agreement: Agreement,
    layouts: LayoutRules | None = None,
    like: Mapping[str, str] | None = None,
    own: Mapping[str, Own] | None = None,
    given: Callable[[], Lines] = list,
    of: tuple[Any, ...] = (),
    begins: bool = False,
) -> Any:
    """:func:`place`, of leaves whose values come from ``source``.

    Args:
        own: by path, leaves that are each rank's own; ``given``: what ranks compare
            too, where there are others; ``of``: what ``fn`` calls, if not its own;
            ``begins``: whether it makes the first state of a step.

    Cost: leaf by leaf, what ``source`` takes for this rank's part of one.
    """
    laying = [h for h in getattr(fn, "interpretations", ()) if h.lays_out]
    _check_given(t, rest, laying, source)
    paths, leaves, treedef = tree.flatten_with_paths(t, is_leaf=is_sharded)
    if laying or layouts:  # else only a recording tells whether it is laid out
        check_apart(paths, "what is laid out")
    found = dict(zip(paths, leaves, strict=True))
    kept = {p: how for p, x in found.items() if isinstance(how := laid_as(x), Own)}
    own = {**kept, **(own or {})}  # what is laid out stays so
    splits: dict[str, tuple[Split, ...]] = {}
    if layouts:
        mesh = laying[0].mesh if laying else here().mesh
        taken = {a for h in laying if not isinstance(h, Sharding) for a in h.axes}
        splits = splits_of(layouts, found, mesh, taken)
    over = {split.axis for parts in splits.values() for split in parts}

    def said() -> Lines:
        return [*given(), ("record", record), *told("layouts", layouts or {})]

    def values() -> Section:
        same = [None if p in own else x for p, x in zip(paths, leaves, strict=True)]
        return source.section(paths, same, at.link.notes)

    if splits and not laying:  # they say it all
        at = here()
        if where := compared(at, over):
            agree(where, unlike_steps(said()), values())
            compare_batches(rest, where, SPLIT)
        for path, parts in splits.items():
            layout = Layout(tuple(found[path].shape), found[path].dtype, parts, path)
            found[path] = block_of(found[path], layout, source)
        return tree.unflatten(treedef, map(source.own, found.values()))
    recorder, applied = _recorded(fn, t, rest, record, splits, own, of or (fn,))
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
    at = here(handlers[0].mesh)
    program = RecordedProgram(fn, recorder, handlers, at, over)
    agreement.compare_programs(program, rest, said, values)
    lay_groups(found, recorder, applied, like or {}, sharding, source, stores, at)
    _check_taken(splits, found)
    steps = (begins or recorder.steps) and recorder.calls_at  # by gradients
    if sharding is not None and steps:
        _warn_of_whole(sharding, found.values(), at)
    placed = tree.unflatten(treedef, map(source.own, found.values()))
    lay_leaves(placed, own)
    if sharding is not None and not isinstance(source, Shapes):
        split = bool(over.difference(sharding.axes))
        _check_types(sharding, fn, recorder, (placed, *rest), at, agreement, split)
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
    _check_offloaded(stores, shardings)
    if len(shardings) > 1:
        axes = [h.axes for h in shardings]
        raise ValueError(
            f"several shard transforms, over {axes}: give one of them a tuple of axes, "
            "or replicate="
        )
    return shardings[0] if shardings else None


def _check_offloaded(stores: Stores, shardings: list[Sharding]) -> None:
    """Raises if parameters are to be offloaded, and would not be."""
    if stores.params is None:
        return
    if not shardings:
        raise ValueError(
            f"offload(params={str(stores.params)!r}) without shard, which fetches "
            "parameters unit by unit: on one device, ff.shard(step, "
            'ff.make_mesh({"data": 1}), "data"), within the offload or around it'
        )


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


@heard()
def _check_types(
    sharding: Sharding,
    fn: Callable[..., Any],
    recorder: Recorder,
    args: Any,
    at: Here,
    agreement: Agreement,
    split: bool,
) -> None:
    """Runs the type check, if the step needs it.

    It does where leaves are ``split`` over other axes too, whose ranks draw alike, and
    where units send along others.
    Errors of the step itself are left to its first call, as the state may still change.
    """
    own = holds_own(args) is not None
    plain = recorder.plain and not (own or split)
    plain = plain and recorder.axes <= {*sharding.axes}
    if plain and recorder.handlers:  # on batches of any shape
        sharding.first_calls.learn(at.rank, [key[0] for key in recorder.calls])
        sharding.first_calls.note(recorder.own_paths, False, recorder.drawing)
    elif at.link.moves and frame().tracer is None and at.mesh.backend != "vmap":
        if not _torch.fake_active():
            try:
                seen = check(
                    fn, args, {}, at, sharding.axes, exchange=agreement.exchange
                )
            except (LawError, NotATensor, Unsteady):
                recorder.steadiness.check()  # which may be why
                raise
            except Exception:
                return
            recorder.steadiness.checked(seen.said)
            sharding.first_calls.learn(at.rank, seen.calls)
            noted = seen.own_paths, seen.draws, seen.drawing, seen.numbers
            sharding.first_calls.note(*noted)


def _recorded(
    fn: Callable[..., Any],
    t: Any,
    rest: Any,
    how: str,
    splits: dict[str, tuple[Split, ...]],
    own: Mapping[str, Own],
    of: tuple[Any, ...],
) -> tuple[Recorder, list[Applied]]:
    """The record of ``fn``: simulated ranks, which run one program, share one.

    A rank takes another's record where it is at the same call, with the same shapes,
    and its own function names the transforms that the record is of.

    Args:
        of: what ``fn`` calls: of ranks that call one object, the last one's record is
            the second run that shows whether the step repeats itself.
    """

    def record() -> tuple[Recorder, list[Applied]]:
        with noting_applied() as applied:
            return _record(fn, t, rest, how, splits, own), applied

    mine = [h for h in getattr(fn, "interpretations", ()) if h.lays_out]
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
            one = one and same_functions(of, its)
            found.steadiness.as_on_rank(first.steadiness, one)
        if set(found.handlers) != set(mine) or last:
            return found, applied
        found = replace(found, handlers=mine)
        notes[key] = found, applied, of
        return found, applied
    found, applied, _ = notes[key]
    for ours, theirs in zip(mine, found.handlers, strict=True):
        ours.learn(theirs)
    return replace(found, handlers=mine, steadiness=Steadiness()), applied
