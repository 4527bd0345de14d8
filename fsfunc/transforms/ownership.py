"""Whose a plain tensor is in a sharded call: one value on all ranks, or a rank's own.

The first argument of a sharded function is its state, one value on all ranks; whatever
else it is given is the rank's own. Sharded leaves say by themselves what they are.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.sharded import is_sharded

__all__ = ["Ownership"]


class Ownership:
    """Whose the plain tensors are that one call of a sharded function was given."""

    def __init__(self, args: tuple[Any, ...]):
        self._args = args

    @cached_property
    def _one_value(self) -> set[int]:
        leaves = tree.leaves(self._args[:1], is_leaf=is_sharded)
        return {_storage(x) for x in leaves if isinstance(x, Tensor)}

    def is_one_value(self, x: Tensor) -> bool:
        """Whether ``x`` lies in the memory of a parameter: then its gradient is a mean.

        By memory, not by object: to detach a leaf, or to track it, makes a new object.
        """
        return _storage(x) in self._one_value


def _storage(x: Tensor) -> int:
    x = _torch.unwrapped(x)
    return _torch.storage_key(x) if x.layout == torch.strided else id(x)
