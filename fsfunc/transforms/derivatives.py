"""Derivatives through a sharded unit that ``torch.func`` takes: which ones are refused.

A parameter's derivative is that of the mean over the ranks, so its rows must mean the
same thing on every rank, and it must be taken where every rank takes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.crossings import LawError, check_samples
from fsfunc.core.units import Call
from fsfunc.sharded.leaf import Sharded

__all__ = ["check_derivatives"]


def check_derivatives(call: Call, taken: Sequence[Any], inputs: Any) -> None:
    """Raises where a derivative by ``taken`` would mix what the ranks hold.

    Args:
        call: the unit call that takes these leaves, sharded or plain, as parameters.
        inputs: what else it is given.

    Raises:
        LawError: the derivative is taken sample by sample, or within a unit around.
    """
    inner, name, local = 0, "", None
    for leaf in taken:
        x = leaf.local if isinstance(leaf, Sharded) else leaf
        if (level := _torch.differentiated_at(x)) > inner:
            named = isinstance(leaf, Sharded) and leaf.name
            inner, name, local = level, repr(leaf.name) if named else "a parameter", x
    if local is None:
        return
    if call.frame.path and inner > call.frame.level:
        around = "/".join(call.frame.path)
        raise LawError(
            f"a derivative is taken inside unit {around!r} by {name}, which "
            f"only unit {call.unit.__name__!r} within it gathers: it would be that of "
            "the mean over the ranks, where a unit's derivatives are the rank's own. "
            f"Make {call.frame.path[0]!r} ff.unit(fn, whole=True), which gathers all "
            "that it is given, or take the derivative outside"
        )
    seen = [_torch.mapped_at(x) for x in tree.leaves(inputs) if isinstance(x, Tensor)]
    mapped = any(0 < level < inner for each in seen for level in each)
    check_samples(local, f"{name}, which unit {call.name!r} takes", mapped)
