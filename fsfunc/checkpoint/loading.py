"""Loading a state onto whatever mesh there is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.checkpoint.agreement import check_alike, everywhere
from fsfunc.checkpoint.blocks import check_files
from fsfunc.checkpoint.contents import (
    Held,
    check_mesh,
    check_real,
    coordinates_here,
    mesh_here,
    restore_random,
)
from fsfunc.checkpoint.finding import metadata
from fsfunc.checkpoint.manifest import CheckpointError, Stored, StoredTensor
from fsfunc.checkpoint.reading import Request, read, requests
from fsfunc.comm.mesh import Here
from fsfunc.runtime.save_guard import is_held
from fsfunc.runtime.stores import lies
from fsfunc.sharded.donated import refuse_spent, spend
from fsfunc.sharded.layout import Coordinates
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.packing import PackedTree, split_buffers
from fsfunc.sharded.placements import describe

__all__ = ["fill", "load"]

_TAKEN = (
    "this state's memory was given to ff.load(..., donate=True): go on with what it "
    "returned"
)


def load(
    path: str | os.PathLike,
    target: Any,
    *,
    at: str = "",
    random: bool | None = None,
    donate: bool = False,
    device: torch.device | str | None = None,
) -> Any:
    """The state saved at ``path``, laid out as ``target`` is.

    Every rank of the mesh in sight calls it. ``target`` may lie on any mesh, by any
    transforms: each rank reads the boxes that its parts are made of.

    Args:
        path: what `save` wrote; or one safetensors file (`consolidate`), or a folder of
            them, as torch.distributed.checkpoint or Hugging Face write them.
        target: a tree like the one saved: a placed state, or an abstract one
            (`abstract_state`), whose tensors take no memory. It is left as it
            is, but under ``donate``.
        at: the path of the subtree to read: ``load(path, state.params, at="params")``.
        random: restore the states of the default random generators, as they stood when
            the state was saved. Without ``at`` it is the default.
        donate: write into the target's own memory, as a donated step does: the target
            is spent then, and spoiled where the load fails.
        device: where the result lies, if not where the target does (the CPU, where that
            is abstract).

    Raises (on every rank; the target and the generators are left as they are):
        FileNotFoundError: nothing is there.
        CheckpointError: it is damaged, of another format version, or holds pickles.
        TreeMismatch: the trees differ; names the smallest subtree that does.
        ValueError: a shape or dtype differs.

    Cost: reads what the rank needs, whole checksum blocks (1 MiB) of it; makes the
    result's memory and some 20 MiB. A few numbers are sent to agree on success.
    """
    here = mesh_here("load")
    stored = everywhere(here, lambda: metadata(path))
    check_alike(here, stored.identity, "load different checkpoints")
    result = everywhere(
        here, lambda: fill(stored.below(at), target, here, device, donate)
    )
    if not at if random is None else random:
        restore_random(stored.random, 0 if here is None else here.rank)
    return result


def fill(
    stored: Stored,
    target: Any,
    here: Here | None,
    device: Any = None,
    donate: bool = False,
) -> Any:
    """A tree like ``target`` with the values of ``stored``."""
    refuse_spent(target)
    _check_match(stored, target)
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
    wanted: list[Request] = []
    for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        if isinstance(leaf, Sharded | Tensor):
            held, coordinates = Held.of(path, leaf), coordinates_here(here)
            wanted += _requests(stored.tensors[path], held, coordinates)
        else:
            leaves[i] = stored.values[path]
    check_files(stored, sorted({request.chunk.file for request in wanted}))
    if spoil is not None:
        spoil()
    with torch.no_grad():
        read(stored, wanted)
    return tree.unflatten(treedef, leaves)


def _requests(
    leaf: StoredTensor, held: Held, coordinates: Coordinates
) -> list[Request]:
    """What to read for a rank's part of a leaf.

    Raises:
        CheckpointError: the stored boxes do not hold all of it.
    """
    boxes = held.boxes(coordinates)
    found = [r for box, x in boxes for r in requests(leaf.chunks, box, x)]
    asked = sum(box.numel for box, _ in boxes)
    if sum(request.target.numel() for request in found) != asked:
        raise CheckpointError(
            f"the checkpoint holds {held.path!r} {held.layout.subject} in part only: a "
            "file of it is missing; go back to an earlier one"
        )
    return found


def _room(x: Any, device: Any) -> Any:
    """Memory like ``x``; zero, as padding is (the system gives zero pages anyway)."""
    if not isinstance(x, Tensor):
        return x
    if (where := lies(x)) is not None and device is None:
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
    for x in buffers.tensors:
        if isinstance(x, Tensor):
            check_real("the target", x, "load into")
            if x.is_inference() or device not in (None, x.device, str(x.device)):
                raise ValueError(
                    "a load into the target's own memory stays on its device, and "
                    "takes no inference tensors: leave donate= out"
                )
    if is_held(x for x in buffers.tensors if isinstance(x, Tensor)):
        raise ValueError("the target is being saved: wait() for that before a load")
    packed = {id(x) for _, shard in buffers.groups if shard for x in (shard.flat,)}
    # Whole leaves as other objects: the marks are on the old ones.
    fresh = [
        x.detach() if isinstance(x, Tensor) and id(x) not in packed else x
        for x in buffers.tensors
    ]

    def spoil() -> None:
        for leaf in leaves:
            spend(leaf, _TAKEN)
        written = [x for x in fresh if isinstance(x, Tensor)]
        torch.autograd.graph.increment_version(written)  # no gathered buffer shows it

    return fresh, spoil


def _check_match(stored: Stored, target: Any) -> None:
    """Raises where ``target`` is not laid over the same paths, shapes and dtypes.

    Raises:
        TreeMismatch: the paths differ; names the smallest subtree that does.
        ValueError: a leaf differs in kind, shape or dtype.
    """
    paths, leaves, _ = tree.flatten_with_paths(target, is_leaf=is_sharded)
    here = dict(zip(paths, leaves, strict=True))
    there = {**stored.tensors, **stored.values}
    if len(here) < len(paths):
        twice = next(p for p in paths if paths.count(p) > 1)
        raise ValueError(f"two leaves of the target have the path {twice!r}")
    if here.keys() != there.keys():
        tree.check_same_structure(
            _nested(here),
            _nested(there),
            what=f"the state saved at {stored.path}",
            against="the target",
        )
    faults = [
        f"{path!r} is {_say(there[path])} in the checkpoint and {_say(leaf)} in the "
        "target"
        for path, leaf in here.items()
        if _kind(there[path]) != _kind(leaf)
    ]
    if faults:
        more = f" (and {len(faults) - 1} others differ)" if len(faults) > 1 else ""
        raise ValueError(
            f"cannot load {stored.path}: {faults[0]}{more}; give a target of the "
            "shapes and dtypes that were saved, and convert what comes back"
        )


def _nested(paths: Iterable[str]) -> Any:
    """Nested dicts with a leaf at each path."""
    top: dict[str, Any] = {}
    for path in paths:
        *way, last = path.split("/")
        node = top
        for step in way:
            inner = node.setdefault(step, {})
            if not isinstance(inner, dict):  # a leaf, and leaves below: odd keys
                inner = node[step] = {}
            node = inner
        node.setdefault(last, 0)
    return top


def _kind(x: Any) -> Any:
    if isinstance(x, StoredTensor | Sharded | Tensor):
        return tuple(x.shape), x.dtype
    return type(x)


def _say(x: Any) -> str:
    if isinstance(x, StoredTensor | Sharded | Tensor):
        return f"a tensor {describe(tuple(x.shape), x.dtype)}"
    return f"a {type(x).__name__} ({x!r})"
