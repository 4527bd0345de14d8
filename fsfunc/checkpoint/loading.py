"""Loading a state onto whatever mesh there is."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

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
from fsfunc.checkpoint.headers import check_files, check_headers
from fsfunc.checkpoint.matching import KEPT, Only, Rename, matched
from fsfunc.checkpoint.reading import Request, read, requests
from fsfunc.checkpoint.stored import Stored, StoredTensor
from fsfunc.comm.mesh import Here
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.runtime.memory_spaces import Offloaded, space_of
from fsfunc.sharded.donated import is_held, overlaps
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.packing import PackedTree, split_buffers
from fsfunc.sharded.placements import Own
from fsfunc.sharded.plain_leaves import WHOLE, laid_as, lay_leaf
from fsfunc.sharded.spent import refuse_spent, spend
from fsfunc.transforms.donation import Memory

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

    def filled() -> tuple[Any, list[Any], dict[str, Tensor]]:
        refuse_spent(target)
        found = stored.below(at)
        taken = matched(
            found, target, only=only, rename=rename, cast=cast, strict=strict
        )
        restore = not at and only is None if random is None else random
        rank = 0 if here is None else here.rank
        states = random_of(stored.random, rank) if restore else {}
        return _fill(found, target, taken, here, device, donate), taken, states

    result, taken, states = everywhere(here, filled)
    if only is not None or rename is not None or not strict:
        names = [x.name if isinstance(x, StoredTensor) else "" for x in taken]
        check_alike(here, lambda: repr(names), "read different leaves")
    restore_random(states)
    return result


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
    buffers = split_buffers(target)
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
                lay_leaf(leaf, laid_as(old[i]))
            if isinstance(leaf, Sharded | Tensor) and not donate:
                kept.append((_local(leaf), _local(old[i])))
        elif isinstance(leaf, Sharded | Tensor):
            held = _placed(Held.of(path, leaf), taken[i], here)
            if isinstance(leaf, Tensor):
                own = Own(tuple(taken[i].own)) if taken[i].own else None
                lay_leaf(leaf, own or laid_as(old[i]) or WHOLE)
            for box, x in held.boxes(coordinates_here(here)):
                wanted += requests(taken[i], box, x)
        else:
            leaves[i] = taken[i]
    names = sorted({request.chunk.file for request in wanted})
    check_files(stored, names)
    check_headers(stored, (x for x in taken if isinstance(x, StoredTensor)), names)
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
    if is_held(tensors):
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
