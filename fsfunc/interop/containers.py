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
    parts = _PARTS if isinstance(values, tuple) and len(values) == 2 else ()
    try:
        found = tree.shown(values, who, "is given, or gives,", parts, is_sharded)
    except TypeError as error:
        raise TypeError(
            f"{error}. A cache that a model fills, of keys and values, works under "
            "torch.no_grad() alone: leave use_cache at its default, or False"
        ) from error
    return not tree.are_shown(found)


_PARTS = ("args", "keywords")
