"""Laying a tree out as a step expects it: ``place``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.homes import chunk_here
from fsfunc.initializing.sources import Given
from fsfunc.layout import Layout, pack_flat
from fsfunc.mesh import here
from fsfunc.recording import Group, Recorder, common
from fsfunc.recording import record as _record
from fsfunc.sharded import Home, Sharded, is_sharded
from fsfunc.transforms.sharding import Sharding

__all__ = ["lay_out", "place"]


def place(fn: Callable[..., Any], t: Any, *rest: Any, record: str = "fake") -> Any:
    """``t``, whole on every rank, as the call ``fn(t, *rest)`` expects it.

    The inverse of ``unshard``. Leaves that units take lie in flat buffers over the
    axis of the ``shard`` around them; a leaf that only mirrors another (a moment: the
    same path but for its head, the same shape) lies as that one; what no unit takes
    stays whole, and what is laid out already stays as it is. No memory is shared with
    ``t``.

    Cost: nothing is sent; one copy of the rank's part.
    """
    return lay_out(fn, t, rest, record, Given())


def lay_out(
    fn: Callable[..., Any], t: Any, rest: Any, record: str, source: Given
) -> Any:
    """:func:`place`, of leaves whose values come from ``source``.

    Cost: leaf by leaf, what ``source`` takes for this rank's part of one.
    """
    recorder = _recorded(fn, t, rest, record)
    if not recorder.handlers:
        return tree.map(source.own, t, is_leaf=is_sharded)
    shards = [h for h in recorder.handlers if isinstance(h, Sharding)]
    if len(shards) > 1:
        axes = [h.axes for h in shards]
        raise ValueError(
            f"several shard transforms, over {axes}: give one of them a tuple of axes, "
            "or replicate="
        )
    paths, leaves, treedef = tree.flatten_with_paths(t, is_leaf=is_sharded)
    if not tree.are_shown(leaves):
        tree.shown(t, "place", "is given", is_leaf=is_sharded)
    where = {path: i for i, path in enumerate(paths)}
    at = here(recorder.handlers[0].mesh)
    coordinates = at.mesh.coordinates(at.rank)
    groups = recorder.groups(shards[0].min_bytes if shards else 0, bool(shards))
    whole = recorder.whole(bool(shards))
    for g in _mirrored(groups, recorder, whole, leaves, where):
        chosen = [where[p] for p in g.paths]
        full = [leaves[i] for i in chosen]
        laid = (
            _home(shards[0], g, full, coordinates, source).leaves()
            if shards
            else _owned(g, full, coordinates, source)
        )
        for i, leaf in zip(chosen, laid, strict=True):
            leaves[i] = leaf
    if shards:
        shards[0].expect(at.rank, recorder.order(groups, coordinates))
    return tree.unflatten(treedef, [source.own(x) for x in leaves])


def _recorded(fn: Callable[..., Any], t: Any, rest: Any, how: str) -> Recorder:
    """What ``fn`` shows: simulated ranks, which run one program, record it once.

    A rank takes another's record where it is at the same call, with the same shapes,
    and its own function names the transforms that the record is of.
    """
    mine = [h for h in getattr(fn, "interpretations", ()) if h.lays_out]
    if not mine or (notes := here(mine[0].mesh).link.notes) is None:
        return _record(fn, t, rest, how)
    rank = here(mine[0].mesh).rank
    leaves, treedef = tree.flatten((t, rest), is_leaf=is_sharded)
    count = notes["records", rank] = notes.get(("records", rank), 0) + 1
    shapes = tuple(_kind(x) for x in leaves)
    kinds = tuple(h.configuration for h in mine)
    key = ("record", count, how, treedef, shapes, kinds)
    if key not in notes:
        found = _record(fn, t, rest, how)
        if set(found.handlers) != set(mine):
            return found
        notes[key] = replace(found, handlers=mine)
    for ours, theirs in zip(mine, notes[key].handlers, strict=True):
        ours.learn(theirs)
    return replace(notes[key], handlers=mine)


def _kind(x: Any) -> Any:
    return (x.shape, x.dtype) if isinstance(x, Tensor | Sharded) else type(x)


def _mirrored(
    groups: list[Group],
    recorder: Recorder,
    whole: set[str],
    leaves: list[Any],
    where: dict[str, int],
) -> list[Group]:
    """The groups that units take, and those of leaves that mirror theirs (moments).

    A leaf mirrors another of its shape whose path is the same but for its head: what
    the paths of all parameters have in common, and at least the first word.
    """
    taken = {p for t in recorder.taken for p in t.leaves}
    if not taken:
        return groups
    out = [g for g in groups if set(g.paths) & taken]
    split = {p: tuple(p.split("/")) for p in where}
    head = max(1, len(common([split[p] for p in sorted(taken)])))
    alone = len(taken) == 1  # then any leaf of its shape mirrors it
    tail = {p: split[p][head:] or (() if alone else split[p]) for p in taken}
    found: dict[Any, Group] = {}
    for g in out:
        for p in g.paths:
            found.setdefault((tail[p], leaves[where[p]].shape), g)
    mirrors: dict[Any, dict[int, str]] = {}
    for path, i in where.items():
        if path in taken or path in whole or not _real(leaves[i]):
            continue
        parts, shape = split[path], leaves[i].shape
        for n in range(len(parts) + 1):
            g = found.get((parts[n:], shape))
            if g is not None:
                at = [tail[p] for p in g.paths].index(parts[n:])
                key = parts[:n], g.buffer, leaves[i].dtype, g.owner
                mirrors.setdefault(key, {})[at] = path
                break
    return out + [
        Group(buffer, tuple(p for _, p in sorted(paths.items())), dtype, owner)
        for (_, buffer, dtype, owner), paths in mirrors.items()
    ]


def _real(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _home(
    handler: Any,
    g: Group,
    full: list[Tensor],
    coordinates: dict[str, int],
    source: Given,
) -> Home:
    """This rank's part of whole tensors, as views of one flat buffer."""
    axes = handler.axis if handler.zero else ()
    sizes = [handler.mesh.axes[a] for a in axes]
    shapes, outer = [x.shape for x in full], [g.owner] * len(full)
    layouts = pack_flat(shapes, g.dtype, g.paths, axes, sizes, g.buffer, outer=outer)
    own = {a: coordinates[a] for a in layouts[0].axes}
    chunk = chunk_here(layouts[0], own)
    if handler.zero in (1, 2):
        whole = source.zeros(math.prod(sizes) * chunk, g.dtype, full[0])
        index = handler.mesh.coordinate(axes, here(handler.mesh).rank) if axes else 0
        flat = whole[index * chunk : (index + 1) * chunk]
    else:
        whole, flat = None, source.empty(chunk, g.dtype, full[0])
    home = Home(layouts, flat, own, whole)
    if isinstance(flat, _torch.FakeTensor):
        return home  # there is nothing to write
    end = 0
    with torch.no_grad():
        for (start, stop), layout, x in zip(home.ranges, layouts, full, strict=True):
            if stop > start:
                flat[end:start] = 0  # room that leaves of other shapes take elsewhere
                source.write(x, layout, own, flat[start:stop])
                end = stop
        flat[end:] = 0  # padding
    return home  # its whole buffer does not show it yet: the first use gathers


def _owned(
    g: Group, full: list[Tensor], coordinates: dict[str, int], source: Given
) -> list[Sharded | Tensor]:
    """Whole tensors, each on the coordinate that owns it and absent elsewhere."""
    if not g.owner:
        return list(full)
    laid: list[Sharded | Tensor] = []
    for x, path in zip(full, g.paths, strict=True):
        layout = Layout(tuple(x.shape), g.dtype, g.owner, path)
        own = {a: coordinates[a] for a in layout.axes}
        absent = layout.block(own) is None
        part = source.empty(0, g.dtype, x) if absent else source.whole(x)
        laid.append(Sharded(part, layout))
    return laid
