"""load: a state read onto whatever mesh there is.

    metadata      the table of the checkpoint, the same on all ranks
    match_leaves  for each leaf of the target its source: by path, shape and dtype
    _fill         memory like the target's, and the boxes that make up this rank's parts
    read          their bytes, compared with checksums (in `reading`)

Saved and new layouts need not be alike: each rank intersects the boxes of its parts
with the boxes that lie in files. All that needs no data is checked before any memory is
written; the data is checked block by block, before it is copied.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.checkpoint.agreement import check_same_everywhere, everywhere
from fsfunc.checkpoint.contents import (
    LocalLeaf,
    coordinates_of,
    generators_of,
    restore_generators,
)
from fsfunc.checkpoint.finding import metadata
from fsfunc.checkpoint.headers import check_files
from fsfunc.checkpoint.reading import Request, read, requests
from fsfunc.checkpoint.stored import Stored, StoredTensor
from fsfunc.comm.mesh import Here
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.optim.leaves import origins
from fsfunc.runtime.memory_spaces import memory_like
from fsfunc.sharded.donated import are_locked, overlaps
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.packing import PackedTree, as_packed_tree
from fsfunc.sharded.placements import Own, describe_tensor
from fsfunc.sharded.plain_leaves import WHOLE, lay_leaf, placement_of
from fsfunc.sharded.spent import refuse_unusable, spend
from fsfunc.state.values import check_mesh, check_real, mesh_for
from fsfunc.transforms.donation import Memory
from fsfunc.tree.structure import TreeMismatch, matches, nearest
from fsfunc.tree.types import Leaf, PyTree

_Tree = TypeVar("_Tree")

Only = str | Sequence[str] | Callable[[str], bool]
Rename = Mapping[str, str] | Callable[[str], str]


class Unread:
    """The source of a leaf that is not read: the target's value stays."""


UNREAD = Unread()
Source: TypeAlias = StoredTensor | bool | int | float | str | Unread
"""What a leaf of the target is filled from."""

_MEMORY_GIVEN = (
    "this state's memory was given to ff.load(..., donate=True): go on with what it "
    "returned"
)


@api_boundary
def load(
    path: str | os.PathLike[str],
    target: _Tree,
    *,
    at: str = "",
    only: Only | None = None,
    rename: Rename | None = None,
    cast: bool = False,
    strict: bool = True,
    random: bool | None = None,
    donate: bool = False,
    device: torch.device | str | None = None,
) -> _Tree:
    """Loads the state saved at ``path``, laid out as ``target`` is.

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
    here = mesh_for("load")
    stored = everywhere(here, lambda: metadata(path))
    check_same_everywhere(here, lambda: stored.identity, "load different checkpoints")

    def match_and_fill() -> _Filled:
        refuse_unusable(target)
        subtree = stored.below(at)
        sources = match_leaves(
            subtree, target, only=only, rename=rename, cast=cast, strict=strict
        )
        restore = not at and only is None if random is None else random
        rank = 0 if here is None else here.rank
        states = generators_of(stored.random, rank) if restore else {}
        loaded = _fill(subtree, target, sources, here, device, donate)
        return _Filled(loaded, sources, states)

    loaded, sources, states = everywhere(here, match_and_fill)
    # Functions of the user chose the leaves: those of ranks may choose differently.
    if only is not None or rename is not None or not strict:
        names = [x.name if isinstance(x, StoredTensor) else "" for x in sources]
        check_same_everywhere(here, lambda: repr(names), "read different leaves")
    # Last, and on all ranks: a load that fails leaves the generators as they were.
    restore_generators(states)
    return loaded


class _Filled(NamedTuple):
    """A loaded tree, the source of each of its leaves, and the generators' states."""

    tree: PyTree
    sources: list[Source]
    random: dict[str, Tensor]


def _fill(
    stored: Stored,
    target: PyTree,
    sources: Sequence[Source],
    here: Here | None,
    device: torch.device | str | None = None,
    donate: bool = False,
) -> PyTree:
    """Returns a tree like ``target`` with the values of ``stored``.

    Args:
        sources: the source of each leaf, from `match_leaves`.
    """
    for leaf in tree.leaves(target, is_leaf=is_sharded):
        if isinstance(leaf, Sharded):
            check_mesh(leaf, here, "load")
    if device is not None and torch.device(device).type == "meta":
        raise ValueError("cannot load to the meta device, which holds no values")
    # Leaves that are packed together become one tensor, as they do in the target.
    buffers = as_packed_tree(target)
    if donate:
        tensors, spend_target = _reuse_memory(target, buffers, device)
    else:
        stored_in = device is None  # else all of it comes to the device
        memory = [
            memory_like(x, device, in_store=stored_in) if isinstance(x, Tensor) else x
            for x in buffers.tensors
        ]
        tensors, spend_target = memory, None
    result = buffers.rebuild(tensors)
    paths, leaves, treedef = tree.flatten_with_paths(result, is_leaf=is_sharded)
    target_leaves = tree.leaves(target, is_leaf=is_sharded)
    wanted: list[Request] = []
    copies: list[tuple[Tensor, Tensor]] = []  # (into, from) of leaves that are not read
    for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        source = sources[i]
        if source is UNREAD:
            if isinstance(leaf, Tensor):
                lay_leaf(leaf, placement_of(target_leaves[i]))
            if isinstance(leaf, Sharded | Tensor) and not donate:
                copies.append((_local(leaf), _local(target_leaves[i])))
        elif isinstance(source, StoredTensor):
            local = _lay_in_source(LocalLeaf.of(path, leaf), source, here)
            if isinstance(leaf, Tensor):
                # A rank-local leaf is marked so: the next save keeps each rank's.
                axes = source.stacked_axes
                rank_local = Own(tuple(axes)) if axes else None
                lay_leaf(leaf, rank_local or placement_of(target_leaves[i]) or WHOLE)
            for box, x in local.boxes(coordinates_of(here)):
                wanted += requests(source, box, x)
        else:
            leaves[i] = source
    names = sorted({request.chunk.file for request in wanted})
    check_files(stored, names, (x for x in sources if isinstance(x, StoredTensor)))
    # From here on memory is written, so with donate= the target is lost if it fails.
    if spend_target is not None:
        spend_target()
    with torch.no_grad():
        for x, value in copies:
            x.copy_(value)
        read(stored, wanted)
    return tree.unflatten(treedef, leaves)


def _lay_in_source(
    leaf: LocalLeaf, source: StoredTensor, here: Here | None
) -> LocalLeaf:
    """Returns a leaf of the target, laid out in the stored tensor that it reads.

    Of a stack of rank-local values each rank reads its row.

    Raises:
        ValueError: the stack is of other ranks than these.
    """
    if not source.stacked_axes:
        return leaf
    axes = {} if here is None else here.mesh.axes
    unlike = [axis for axis, n in source.stacked_axes.items() if axes.get(axis) != n]
    if unlike or source.stacked_axes.keys() & set(leaf.layout.axes):
        raise ValueError(
            f"cannot load {source.name!r} {source}, into {leaf.layout} on the mesh "
            f"{dict(axes)}: load it where those axes have these sizes and make it one "
            "value there (ff.pmean), leave it out (only=: the target keeps its first "
            f"value), or take all ranks' by a target of shape {list(source.shape)}"
        )
    return leaf.stacked(source.stacked_axes, coordinates_of(here))


def _local(leaf: Sharded | Tensor) -> Tensor:
    return leaf.local if isinstance(leaf, Sharded) else leaf


def _reuse_memory(
    target: PyTree, buffers: PackedTree, device: torch.device | str | None
) -> tuple[list[Leaf], Callable[[], None]]:
    """Returns the target's own memory, as few tensors, and what marks it as spent."""
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
    packed_ids = {id(x) for _, shard in buffers.groups if shard for x in (shard.flat,)}
    may_write = iter(Memory(leaves).donation(leaves).may_write(tensors))
    memory = list(buffers.tensors)
    # By storage the (first, last + 1) byte of each tensor that is reused so far.
    byte_ranges: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for i, x in enumerate(memory):
        if isinstance(x, Tensor):
            # As in a donated step, what somebody else has a view of is not written. A
            # leaf that overlaps another gets memory of its own too, or it would be
            # given that one's values.
            if not next(may_write) or overlaps(x, byte_ranges[_torch.storage_key(x)]):
                memory[i] = x.detach().clone()
            elif id(x) not in packed_ids:
                # Another object: the mark of being spent is on the target's.
                memory[i] = x.detach()

    def spend_target() -> None:
        for leaf in leaves:
            spend(leaf, _MEMORY_GIVEN)
        # Bytes are read into memory past torch, which would notice nothing: a gathered
        # buffer is taken for current while the versions are.
        written = [x for x in memory if isinstance(x, Tensor)]
        torch.autograd.graph.increment_version(written)

    return memory, spend_target


# The source of each leaf


def match_leaves(
    stored: Stored,
    target: PyTree,
    *,
    only: Only | None = None,
    rename: Rename | None = None,
    cast: bool = False,
    strict: bool = True,
) -> list[Source]:
    """Returns the source of each leaf, in order; `UNREAD` of one that is not read.

    Args: as `load` has them.

    Raises:
        TreeMismatch: leaves are there on one side alone.
        ValueError: a leaf differs in kind, shape or dtype; two take the same one; an
            option names nothing.
    """
    paths, leaves, _ = tree.flatten_with_paths(target, is_leaf=is_sharded)
    targets = dict(zip(paths, leaves, strict=True))
    saved = {**stored.tensors, **stored.values}
    names = _rename(_choose(paths, only), rename)
    _check_distinct(paths, "two leaves of the target have the path {!r}")
    _check_distinct(names.values(), "two leaves of the target would both take {!r}")
    missing = [path for path, name in names.items() if name not in saved]
    extra = saved.keys() - set(names.values()) if only is None else set()
    sources = {
        p: _whole_stack(targets[p], saved[n]) for p, n in names.items() if n in saved
    }
    if missing and (strict or not sources):
        path, name = missing[0], names[missing[0]]
        renamed = "" if name == path else f", which is to be {name!r} there"
        raise TreeMismatch(
            f"{stored.path} has no {path!r}{renamed} (and {len(missing) - 1} others): "
            f"near are {nearest(name, saved)}"
        )
    if strict and extra:
        raise TreeMismatch(
            f"{stored.path} holds {min(extra)!r} (and {len(extra) - 1} others), which "
            "no leaf of the target takes: name what to read by only=, or give "
            "strict=False"
        )
    _check_kinds(stored, targets, sources, names, cast)
    _check_origins(target, targets, sources)
    for path, leaf in targets.items():
        if path not in sources and _has_no_value(leaf):
            raise ValueError(
                f"{path!r} is not read, and the target has no value of it to keep: "
                "give one that init_state made"
            )
    return [sources.get(path, UNREAD) for path in paths]


def _choose(paths: list[str], only: Only | None) -> list[str]:
    """Returns the paths of the target that ``only`` chooses, in the target's order."""
    if only is None:
        return paths
    if callable(only):
        chosen = [path for path in paths if only(path)]
    else:
        # A pattern names a leaf or a subtree: "**" fits no name at all too.
        patterns = [f"{p}/**" for p in ([only] if isinstance(only, str) else only)]
        paths_by_pattern = {
            p: [path for path in paths if matches(p, path)] for p in patterns
        }
        useless = [p[:-3] for p, fitting in paths_by_pattern.items() if not fitting]
        if useless:
            raise ValueError(
                f"only={useless[0]!r} fits no path of the target: near are "
                f"{nearest(useless[0], paths)}"
            )
        fitting_paths = {
            path for fitting in paths_by_pattern.values() for path in fitting
        }
        chosen = [path for path in paths if path in fitting_paths]
    if not chosen:
        raise ValueError(f"only= chooses none of the target's {len(paths)} leaves")
    return chosen


def _rename(paths: list[str], rename: Rename | None) -> dict[str, str]:
    """Returns, by path in the target, the path in the checkpoint."""
    if rename is None or callable(rename):
        return {path: rename(path) if rename else path for path in paths}
    names: dict[str, str] = {}
    used: set[str] = set()
    for path in paths:
        # Of subtrees within each other the innermost is meant.
        subtrees = [top for top in rename if path == top or path.startswith(f"{top}/")]
        subtree = max(subtrees, key=len, default=None)
        if subtree is None:
            names[path] = path
        else:
            names[path] = rename[subtree] + path[len(subtree) :]
            used.add(subtree)
    if unused := rename.keys() - used:
        raise ValueError(
            f"rename= names {min(unused)!r}, where the target has nothing to read: "
            f"near are {nearest(min(unused), paths)}"
        )
    return names


def _check_distinct(names: Iterable[str], message: str) -> None:
    """Raises ``message``, with the name in it, if one name is there twice."""
    earlier: set[str] = set()
    for name in names:
        if name in earlier:
            raise ValueError(message.format(name))
        earlier.add(name)


def _check_kinds(
    stored: Stored,
    targets: Mapping[str, Leaf],
    sources: Mapping[str, Source],
    names: Mapping[str, str],
    cast: bool,
) -> None:
    """Raises if a leaf and its source differ in shape, dtype or type."""
    faults = [
        path
        for path, source in sources.items()
        if _kind(source) != _kind(targets[path])
        and not (cast and _can_cast(source, targets[path]))
    ]
    if faults:
        path = faults[0]
        renamed = "" if names[path] == path else f" (there {names[path]!r})"
        others = f" (and {len(faults) - 1} others differ)" if len(faults) > 1 else ""
        advice = (
            "cast=True converts between floating dtypes, and to wider integers"
            if not cast and _can_cast(sources[path], targets[path])
            else "give a target of the shapes and dtypes that were saved, and convert "
            "what comes back"
        )
        if not {"codes", "scales"}.isdisjoint(path.split("/")):
            advice = _CODED
        raise ValueError(
            f"cannot load {stored.path}: {path!r}{renamed} is "
            f"{_describe(sources[path])} in the checkpoint and "
            f"{_describe(targets[path])} in the target{others}; {advice}"
        )


def _check_origins(
    target: PyTree, targets: Mapping[str, Leaf], sources: Mapping[str, Source]
) -> None:
    """Raises if parameters are loaded without the leaves that steps make them of.

    Such as master weights in an optimizer's state: from these the next step would make
    the parameters anew, and overwrite those that were loaded.
    """
    for state_path, param_path, origin_path in origins(target):
        for path in sources if origin_path not in sources else ():
            shape = getattr(targets[path], "shape", None)
            origin_shape = targets[origin_path].shape
            # Parameters may have a first dim of copies, one for each rank.
            is_alike = shape is not None and origin_shape in (shape, shape[1:])
            is_param = not param_path or f"/{path}".endswith(f"/{param_path}")
            if is_alike and is_param and not path.startswith(f"{state_path}/"):
                raise ValueError(_ORIGINS.format(path, origin_path))


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


def _can_cast(source: Source, target: Leaf) -> bool:
    """Returns whether they differ in dtype alone, and all values can be converted."""
    a, b = _kind(source), _kind(target)
    if type(a) is not tuple or type(b) is not tuple or a[0] != b[0]:
        return False
    dtypes: set[torch.dtype] = {a[1], b[1]}
    if all(d.is_floating_point for d in dtypes) or all(d.is_complex for d in dtypes):
        return True
    if torch.bool in dtypes or any(d.is_complex or d.is_floating_point for d in dtypes):
        return False
    saved_range, target_range = map(torch.iinfo, (a[1], b[1]))
    return target_range.min <= saved_range.min and saved_range.max <= target_range.max


def _has_no_value(leaf: Leaf) -> bool:
    x = leaf.local if isinstance(leaf, Sharded) else leaf
    return isinstance(x, Tensor) and (
        x.device.type == "meta" or isinstance(x, _torch.FakeTensor)
    )


def _whole_stack(target: Leaf, source: Source) -> Source:
    """Returns the source; a target of a stack's own shape reads the stack whole."""
    if isinstance(source, StoredTensor) and source.stacked_axes:
        if getattr(target, "shape", None) == source.shape:
            return source._replace(stacked_axes={})
    return source


_ShapeAndDtype: TypeAlias = tuple[tuple[int, ...], torch.dtype]


def _kind(x: Leaf | Source) -> _ShapeAndDtype | type:
    """Returns what must be alike: shape and dtype of a tensor, the type of a value."""
    if isinstance(x, StoredTensor) and x.stacked_axes:  # a target is one row of it
        return x.shape[1:], x.dtype
    if isinstance(x, Sharded):  # moments may be of another dtype than the layout says
        return tuple(x.shape), x.local.dtype
    if isinstance(x, StoredTensor | Tensor):
        return tuple(x.shape), x.dtype
    return type(x)


def _describe(x: Leaf | Source) -> str:
    if isinstance(x, StoredTensor):
        return f"a tensor {x}"
    if isinstance(x, Sharded | Tensor):
        return f"a tensor {describe_tensor(*cast(_ShapeAndDtype, _kind(x)))}"
    return f"a {type(x).__name__} ({x!r})"
