"""Values that go in and out of modules: trees whose every tensor is seen."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fsfunc import tree
from fsfunc.sharded import is_sharded

__all__ = ["opened"]


def opened(values: Any, who: str) -> bool:
    """Looks for tensors that are held out of sight.

    Returns:
        whether there are objects that hold none as yet, and may.

    Raises:
        TypeError: an object holds tensors that no tree shows: a cache of keys and
            values, for one, which a second run of the unit would fill twice.
    """
    if type(values) is Tensor:
        return False
    return not tree.are_shown(
        tree.shown(values, who, "is given, or gives,", is_leaf=is_sharded)
    )
