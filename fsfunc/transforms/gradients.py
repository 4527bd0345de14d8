"""The gradients by packed leaves: which a sharded call keeps, and what it gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fsfunc import tree
from fsfunc.sharded.leaf import FlatShard, is_sharded
from fsfunc.transforms.shard_runtime import ShardRuntime

__all__ = ["collected", "kept_here"]


def kept_here(chosen: Any, axes: Sequence[tuple[str, ...]]) -> dict[int, FlatShard]:
    """By identity, the buffers over ``axes`` that are differentiated as a whole."""
    counts: dict[int, int] = {}
    found: dict[int, FlatShard] = {}
    for x in tree.leaves(chosen, is_leaf=is_sharded):
        if not is_sharded(x) or x.packed is None or x.parts is not None:
            continue
        if x.packed.place.axes in axes:
            found[id(x.packed)] = x.packed
            counts[id(x.packed)] = counts.get(id(x.packed), 0) + 1
    for key, shard in list(found.items()):
        real = shard.flat.is_floating_point() and not shard.flat.requires_grad
        if not real or counts[key] != len(shard.members):
            del found[key]
    return found


def collected(grads: Any, chosen: Any, runtime: ShardRuntime) -> tuple[Any, ...]:
    """The trees of gradients, with what the runtime kept in its places."""
    old, treedef = tree.flatten(tuple(chosen), is_leaf=is_sharded)
    # Up to the arguments' leaves: a gradient of None is one leaf, a None in the
    # arguments is none.
    out: list[Any] = treedef.flatten_up_to(grads)  # type: ignore[arg-type]
    shards = {}
    for key, shard in runtime.keeps.items():
        grad = runtime.grads.get(key)
        shards[key] = shard.like(torch.zeros_like(shard.flat) if grad is None else grad)
    if shards and runtime.mean_size > 1:
        flats = [shard.flat for shard in shards.values()]
        torch._foreach_div_(flats, runtime.mean_size)
    leaves = {}
    for key, shard in shards.items():
        made = shard.leaves()
        leaves[key] = dict(zip(map(id, shard.members), made, strict=True))
    for i, x in enumerate(old):
        if is_sharded(x) and id(x.packed) in leaves:
            key = id(x.packed), id(x.layout)
            new, direct = leaves[key[0]][key[1]], out[i]
            out[i] = new
            if direct is not None and direct._local is not None:  # of torch.func
                new.local.add_(direct.local)
            part = runtime.parts.get(key)
            if part is not None and part.grad is not None:
                new.local.add_(part.grad)  # used beside a unit, as by tree_map
    return tree.unflatten(treedef, out)
