"""The arguments of a step as tensors without data, which share memory as these do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.sharded import Sharded, is_sharded

__all__ = ["shadows"]


def shadows(mode: Any, args: Any, coordinates: Mapping[str, int] | None = None) -> Any:
    """The arguments as fake tensors, which share memory as these do.

    ``coordinates``: of the rank whose parts they are to be, if that is another one.
    """
    leaves, treedef = tree.flatten(args, is_leaf=is_sharded)
    homes: dict[int, list[Sharded]] = {}
    storages: dict[int, Tensor] = {}

    def fake(x: Tensor) -> Tensor:
        return _shadow(mode, x, storages)

    for i, x in enumerate(leaves):
        if isinstance(x, Tensor):
            leaves[i] = fake(x)
        elif isinstance(x, Sharded) and x.packed is None:
            leaves[i] = x.with_local(fake(x.local))
        elif isinstance(x, Sharded) and x.packed is not None:
            home = x.packed
            if isinstance(home.flat, _torch.FakeTensor):
                continue
            if id(home) not in homes:
                homes[id(home)] = home.shadow(fake, coordinates).leaves()
            at = [id(m) for m in home.members].index(id(x.layout))
            leaves[i] = homes[id(home)][at]
    return tree.unflatten(treedef, leaves)


def _shadow(mode: Any, x: Tensor, storages: dict[int, Tensor]) -> Tensor:
    """``x`` without its data, in a storage as large as its own."""
    if isinstance(x, _torch.FakeTensor):
        return x
    size, width = x.untyped_storage().nbytes(), x.element_size()
    if size % width:
        return _torch.fake_of(mode, x.detach())
    key = _torch.storage_key(x)
    with mode:
        if key not in storages:
            storages[key] = torch.empty(size, dtype=torch.uint8, device=x.device)
        whole = storages[key].view(x.dtype)
        part = whole.as_strided(x.shape, x.stride(), x.storage_offset())
    return part.requires_grad_(x.requires_grad)
