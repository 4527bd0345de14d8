"""Plain tensors of which each rank has its own value: marked, from call to call.

What a sharded function returns as each rank's own, in its state, is marked; so is what
a checkpoint has of each rank. Another sharded function that is given it then knows.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from torch import Tensor

__all__ = ["is_rank_local", "mark_rank_local"]

_MARKED: dict[int, weakref.ref] = {}


def mark_rank_local(x: Tensor) -> None:
    """Says of a tensor that each rank has its own, for as long as it is there."""
    key = id(x)
    if key not in _MARKED:
        _MARKED[key] = weakref.ref(x, partial(_forget, key))


def is_rank_local(x: Any) -> bool:
    """Whether a tensor was marked."""
    found = _MARKED.get(id(x))
    return found is not None and found() is x


def _forget(key: int, gone: weakref.ref) -> None:
    if _MARKED.get(key) is gone:
        del _MARKED[key]
