"""Loading a state onto whatever mesh there is.

The target's leaves are matched with those of the checkpoint, by path, shape and dtype
(`matched`); then each rank reads the boxes that make up its parts.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.checkpoint.agreement import check_alike, everywhere
from fsfunc.checkpoint.contents import (
    Held,
    check_mesh,
    check_real,
    coordinates_here,
    mesh_here,
    random_of,
    restore_random,
)
from fsfunc.checkpoint.finding import metadata
from fsfunc.checkpoint.headers import check_files
from fsfunc.checkpoint.reading import Request, read, requests
from fsfunc.checkpoint.stored import Stored, StoredTensor
from fsfunc.comm.mesh import Here
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.optim.leaves import origins
from fsfunc.runtime.memory_spaces import Offloaded, space_of
from fsfunc.sharded.donated import are_locked, overlaps
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.packing import PackedTree, as_packed_tree
from fsfunc.sharded.placements import Own, describe_tensor
from fsfunc.sharded.plain_leaves import WHOLE, lay_leaf, placement_of
from fsfunc.sharded.spent import refuse_unusable, spend
from fsfunc.transforms.donation import Memory
from fsfunc.tree.structure import TreeMismatch, matches, nearest

Only = str | Sequence[str] | Callable[[str], bool]
Rename = Mapping[str, str] | Callable[[str], str]

KEPT = object()  # in the place of what is taken: the leaf keeps its value
_TAKEN = (
    "this state's memory was given to ff.load(..., donate=True): go on with what it "
    "returned"
)


@api_boundary
def load(
    path: str | os.PathLike,
    target: Any,
    *,
    at: str = "",
    only: Only | None = None,
    rename: Rename | None = None,
    cast: bool = False,
    strict: bool = True,
    random: bool | None = None,
    donate: bool = False,
    device: torch.device | str | None = None,
) -> Any:
    """The state saved at ``path``, laid out as ``target`` is.

    Every rank of the mesh calls it. ``target`` may have layouts of any mesh and any
    transforms: each rank reads the boxes that make up its parts.

    Args:
        path: a checkpoint of `save`; or one safetensors file (`consolidate`), or a
            folder of them, of torch.distributed.checkpoint or Hugging Face.
        target: a tree like the one saved: a placed state, or an abstract one
            (`abstract_state`), whose tensors take no memory. Without ``donate`` it is
            not changed.
        at: the path of the subtree to read: ``load(path, state.params, at="params")``.
        only: which leaves of the target are read; the others keep the target's values.
            A predicate of paths, or patterns: ``"blocks/*/w"``, a subtree
            (``"blocks"``), ``"**/b"``; or several.
        rename: the path of a leaf in the checkpoint (below ``at``): a function of its
            path in the target (``lambda path: path.replace("/", ".")``), or a mapping
            of subtrees, ``{"blocks": "model/layers"}``.
        cast: where dtypes differ, convert to the target's: between floating dtypes,
            between complex ones, and to integers that hold all of the saved ones.
        strict: False allows leaves that are on one side alone: those of the checkpoint
            are not read, and those of the target keep its values. `metadata` has the
            leaves of a checkpoint.
        random: restore the saved states of the default random generators. That is the
            default without ``at`` and ``only``.
        donate: write into the target's own memory, as a donated step does, where nobody
            else has a view of it: the target cannot be used then, also if it fails.
        device: the device of the result; by default that of the target (the CPU for an
            abstract one).

    Raises (on every rank; the target and the generators are not changed):
        FileNotFoundError: nothing is there.
        CheckpointError: it is damaged, of another format version, or holds pickles.
        TreeMismatch: the trees differ; names the smallest subtree that does.
        ValueError: a shape or dtype differs; a number does not fit into the dtype of
            ``cast``; two leaves would take the same one; a leaf of each rank's own was
            saved for other sizes of its axes.

    Cost: reads the checksum blocks (1 MiB) that the rank needs; allocates the result
    and some 20 MiB. A few numbers are sent to agree on success.

    >>> import tempfile, torch, fsfunc as ff
    >>> mine = {"w": torch.zeros(2), "head": torch.ones(1)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ff.save(f"{folder}/a", {"model": {"w": torch.arange(2).half()}, "step": 3})
    ...     ff.load(f"{folder}/a", mine, only="w", rename={"w": "model/w"}, cast=True)
    {'w': tensor([0., 1.]), 'head': tensor([1.])}
    """
    here = mesh_here("load")
    stored = everywhere(here, lambda: metadata(path))
    check_alike(here, lambda: stored.identity, "load different checkpoints")

    def filled() -> _Filled:
        refuse_unusable(target)
        found = stored.below(at)
        taken = matched(
            found, target, only=only, rename=rename, cast=cast, strict=strict
        )
        restore = not at and only is None if random is None else random
        rank = 0 if here is None else here.rank
        states = random_of(stored.random, rank) if restore else {}
        result = _fill(found, target, taken, here, device, donate)
        return _Filled(result, taken, states)

    result, taken, states = everywhere(here, filled)
    if only is not None or rename is not None or not strict:
        names = [x.name if isinstance(x, StoredTensor) else "" for x in taken]
        check_alike(here, lambda: repr(names), "read different leaves")
    restore_random(states)
    return result


class _Filled(NamedTuple):
    """A loaded tree, the source of each of its leaves, and the generators' states."""

    tree: Any
    sources: list[Any]
    random: dict[str, Tensor]


def _fill(
    stored: Stored,
    target: Any,
    taken: Sequence[Any],
    here: Here | None,
    device: Any = None,
    donate: bool = False,
) -> Any:
    """A tree like ``target`` with the values of ``stored``.

    Args:
        taken: the stored leaf for each leaf, from `matched`.
    """
    for leaf in tree.leaves(target, is_leaf=is_sharded):
        if isinstance(leaf, Sharded):
            check_mesh(leaf.layout, here, "load")
    if device is not None and torch.device(device).type == "meta":
        raise ValueError("cannot load to the meta device, which holds no values")
    buffers = as_packed_tree(target)
    if donate:
        fresh, spoil = _own_memory(target, buffers, device)
    else:
        fresh, spoil = [_room(x, device) for x in buffers.tensors], None
    result = buffers.rebuild(fresh)
    paths, leaves, treedef = tree.flatten_with_paths(result, is_leaf=is_sharded)
    old = tree.leaves(target, is_leaf=is_sharded)
    wanted: list[Request] = []
    kept: list[tuple[Tensor, Tensor]] = []
    for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        if taken[i] is KEPT:
            if isinstance(leaf, Tensor):
                lay_leaf(leaf, placement_of(old[i]))
            if isinstance(leaf, Sharded | Tensor) and not donate:
                kept.append((_local(leaf), _local(old[i])))
        elif isinstance(leaf, Sharded | Tensor):
            held = _placed(Held.of(path, leaf), taken[i], here)
            if isinstance(leaf, Tensor):
                own = Own(tuple(taken[i].own)) if taken[i].own else None
                lay_leaf(leaf, own or placement_of(old[i]) or WHOLE)
            for box, x in held.boxes(coordinates_here(here)):
                wanted += requests(taken[i], box, x)
        else:
            leaves[i] = taken[i]
    names = sorted({request.chunk.file for request in wanted})
    check_files(stored, names, (x for x in taken if isinstance(x, StoredTensor)))
    if spoil is not None:
        spoil()
    with torch.no_grad():
        for x, value in kept:
            x.copy_(value)
        read(stored, wanted)
    return tree.unflatten(treedef, leaves)


def _placed(held: Held, taken: StoredTensor, here: Here | None) -> Held:
    """A leaf of the target, laid out in the tensor that it takes.

    Raises:
        ValueError: the values of as many ranks are to be read by others.
    """
    if not taken.own:
        return held
    axes = {} if here is None else here.mesh.axes
    unlike = [axis for axis, n in taken.own.items() if axes.get(axis) != n]
    if unlike or taken.own.keys() & set(held.layout.axes):
        raise ValueError(
            f"cannot load {taken.name!r} {taken}, into {held.layout} on the mesh "
            f"{dict(axes)}: load it where those axes have these sizes and make it one "
            "value there (ff.pmean), leave it out (only=: the target keeps its first "
            f"value), or take all ranks' by a target of shape {list(taken.shape)}"
        )
    return held.stacked(taken.own, coordinates_here(here))


def _local(leaf: Sharded | Tensor) -> Tensor:
    return leaf.local if isinstance(leaf, Sharded) else leaf


def _room(x: Any, device: Any) -> Any:
    """Memory like ``x``; zero, as padding is (the system gives zero pages anyway)."""
    if not isinstance(x, Tensor):
        return x
    where = space_of(x)
    if isinstance(where, Offloaded) and device is None:
        room = where.store.empty(x.numel(), x.dtype, _real(where.device))
        return room.view(x.shape).zero_()
    abstract = x.device.type == "meta" or isinstance(x, _torch.FakeTensor)
    device = device or ("cpu" if abstract else x.device)
    return torch.zeros(x.shape, dtype=x.dtype, device=device)


def _real(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "meta" else device


def _own_memory(
    target: Any, buffers: PackedTree, device: Any
) -> tuple[list[Any], Callable[[], None]]:
    """The target's own memory, as few tensors; and what marks the target as spent."""
    leaves = tree.leaves(target, is_leaf=is_sharded)
    tensors = [x for x in buffers.tensors if isinstance(x, Tensor)]
    for x in tensors:
        check_real("the target", x, "load into")
        if x.is_inference() or device not in (None, x.device, str(x.device)):
            raise ValueError(
                "a load into the target's own memory stays on its device, and "
                "takes no inference tensors: leave donate= out"
            )
    if are_locked(tensors):
        raise ValueError("the target is being saved: wait() for that before a load")
    packed = {id(x) for _, shard in buffers.groups if shard for x in (shard.flat,)}
    mine = iter(Memory(leaves).donation(leaves).may_write(tensors))
    # Whole leaves as other objects: the marks are on the old ones. What lies where
    # another one does gets memory of its own, or it would be given that one's values;
    # and so does, as in a donated step, what somebody else has a view of.
    fresh, ends = list(buffers.tensors), defaultdict(list)
    for i, x in enumerate(fresh):
        if isinstance(x, Tensor):
            if not next(mine) or overlaps(x, ends[_torch.storage_key(x)]):
                fresh[i] = x.detach().clone()
            elif id(x) not in packed:
                fresh[i] = x.detach()

    def spoil() -> None:
        for leaf in leaves:
            spend(leaf, _TAKEN)
        written = [x for x in fresh if isinstance(x, Tensor)]
        torch.autograd.graph.increment_version(written)  # no gathered buffer shows it

    return fresh, spoil


# Which leaf is read for which


def matched(
    stored: Stored,
    target: Any,
    *,
    only: Only | None = None,
    rename: Rename | None = None,
    cast: bool = False,
    strict: bool = True,
) -> list[Any]:
    """The source of each leaf: a `StoredTensor`, a number, string or bool, or `KEPT`.

    Args: as `load` has them.

    Raises:
        TreeMismatch: leaves are there on one side alone.
        ValueError: a leaf differs in kind, shape or dtype; two take the same one; an
            option names nothing.
    """
    paths, leaves, _ = tree.flatten_with_paths(target, is_leaf=is_sharded)
    here = dict(zip(paths, leaves, strict=True))
    there = {**stored.tensors, **stored.values}
    sources = _renamed(_chosen(paths, only), rename)
    _check_once(paths, "two leaves of the target have the path {!r}")
    _check_once(sources.values(), "two leaves of the target would both take {!r}")
    missing = [path for path, name in sources.items() if name not in there]
    extra = there.keys() - set(sources.values()) if only is None else set()
    found = {p: _as(here[p], there[n]) for p, n in sources.items() if n in there}
    if missing and (strict or not found):
        path, name = missing[0], sources[missing[0]]
        as_ = "" if name == path else f", which is to be {name!r} there"
        raise TreeMismatch(
            f"{stored.path} has no {path!r}{as_} (and {len(missing) - 1} others): near "
            f"are {nearest(name, there)}"
        )
    if strict and extra:
        raise TreeMismatch(
            f"{stored.path} holds {min(extra)!r} (and {len(extra) - 1} others), which "
            "no leaf of the target takes: name what to read by only=, or give "
            "strict=False"
        )
    _check_kinds(stored, here, found, sources, cast)
    _check_origins(target, here, found)
    for path, leaf in here.items():
        if path not in found and _has_no_value(leaf):
            raise ValueError(
                f"{path!r} is not read, and the target has no value of it to keep: "
                "give one that init_state made"
            )
    return [found.get(path, KEPT) for path in paths]


def _chosen(paths: list[str], only: Only | None) -> list[str]:
    if only is None:
        return paths
    if callable(only):
        found = [path for path in paths if only(path)]
    else:
        patterns = [f"{p}/**" for p in ([only] if isinstance(only, str) else only)]
        each = {p: [path for path in paths if matches(p, path)] for p in patterns}
        idle = [p[:-3] for p, some in each.items() if not some]
        if idle:
            raise ValueError(
                f"only={idle[0]!r} fits no path of the target: near are "
                f"{nearest(idle[0], paths)}"
            )
        chosen = {path for some in each.values() for path in some}
        found = [path for path in paths if path in chosen]
    if not found:
        raise ValueError(f"only= chooses none of the target's {len(paths)} leaves")
    return found


def _renamed(paths: list[str], rename: Rename | None) -> dict[str, str]:
    """By path in the target, the path in the checkpoint."""
    if rename is None or callable(rename):
        return {path: rename(path) if rename else path for path in paths}
    found: dict[str, str] = {}
    used: set[str] = set()
    for path in paths:
        fits = [old for old in rename if path == old or path.startswith(f"{old}/")]
        old = max(fits, key=len, default=None)
        found[path] = path if old is None else rename[old] + path[len(old) :]
        used |= {old} if old is not None else set()
    if idle := rename.keys() - used:
        raise ValueError(
            f"rename= names {min(idle)!r}, where the target has nothing to read: near "
            f"are {nearest(min(idle), paths)}"
        )
    return found


def _check_once(names: Iterable[str], says: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(says.format(name))
        seen.add(name)


def _check_kinds(
    stored: Stored,
    here: Mapping[str, Any],
    found: Mapping[str, Any],
    sources: Mapping[str, str],
    cast: bool,
) -> None:
    faults = [
        path
        for path, there in found.items()
        if _kind(there) != _kind(here[path])
        and not (cast and _casts(there, here[path]))
    ]
    if faults:
        path = faults[0]
        as_ = "" if sources[path] == path else f" (there {sources[path]!r})"
        more = f" (and {len(faults) - 1} others differ)" if len(faults) > 1 else ""
        way = (
            "cast=True converts between floating dtypes, and to wider integers"
            if not cast and _casts(found[path], here[path])
            else "give a target of the shapes and dtypes that were saved, and convert "
            "what comes back"
        )
        if not {"codes", "scales"}.isdisjoint(path.split("/")):
            way = _CODED
        raise ValueError(
            f"cannot load {stored.path}: {path!r}{as_} is {_say(found[path])} in the "
            f"checkpoint and {_say(here[path])} in the target{more}; {way}"
        )


def _check_origins(
    target: Any, here: Mapping[str, Any], found: Mapping[str, Any]
) -> None:
    """Raises where parameters are read, and what a step makes them of is kept."""
    for at, name, own in origins(target):
        for path in found if own not in found else ():
            shape, due = getattr(here[path], "shape", None), here[own].shape
            alike = shape is not None and due in (shape, shape[1:])  # of a copy too
            ending = not name or f"/{path}".endswith(f"/{name}")
            if alike and ending and not path.startswith(f"{at}/"):
                raise ValueError(_ORIGINS.format(path, own))


_ORIGINS = (
    "{!r} is read, and {!r} is not, of which steps make it, so that it would be lost: "
    "read both; or load the parameters first, and make the state of them, by "
    "ff.init_state or the optimizer's init"
)
_CODED = (
    "moments in 8 bits have a scale for each block of what one rank holds, and load "
    "where the parameters lie as they did: with that mesh, zero and units. Load the "
    'rest, by only=["params", "step"] of a TrainState, and the moments begin anew'
)


def _casts(there: Any, here: Any) -> bool:
    """True if a leaf differs in dtype alone, and all values can be converted."""
    a, b = _kind(there), _kind(here)
    if type(a) is not tuple or type(b) is not tuple or a[0] != b[0]:
        return False
    kinds: set[torch.dtype] = {a[1], b[1]}
    if all(d.is_floating_point for d in kinds) or all(d.is_complex for d in kinds):
        return True
    if torch.bool in kinds or any(d.is_complex or d.is_floating_point for d in kinds):
        return False
    old, new = map(torch.iinfo, (a[1], b[1]))
    return new.min <= old.min and old.max <= new.max


def _has_no_value(leaf: Any) -> bool:
    x = leaf.local if isinstance(leaf, Sharded) else leaf
    return isinstance(x, Tensor) and (
        x.device.type == "meta" or isinstance(x, _torch.FakeTensor)
    )


def _as(here: Any, there: Any) -> Any:
    """The stored leaf; a target of a stack's own shape takes the stack whole."""
    if isinstance(there, StoredTensor) and there.own:
        if getattr(here, "shape", None) == there.shape:
            return there._replace(own={})
    return there


def _kind(x: Any) -> Any:
    if isinstance(x, StoredTensor) and x.own:
        return x.shape[1:], x.dtype
    if isinstance(x, Sharded):  # moments may be of another dtype than the layout says
        return tuple(x.shape), x.local.dtype
    if isinstance(x, StoredTensor | Tensor):
        return tuple(x.shape), x.dtype
    return type(x)


def _say(x: Any) -> str:
    if isinstance(x, StoredTensor):
        return f"a tensor {x}"
    if isinstance(x, Sharded | Tensor):
        return f"a tensor {describe_tensor(*_kind(x))}"
    return f"a {type(x).__name__} ({x!r})"
