"""Derivatives through a sharded unit that ``torch.func`` takes: which ones are refused.

A parameter's derivative is that of the mean over the ranks, so its rows must mean the
same thing on every rank, and it must be taken where every rank takes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.sharded import Sharded

__all__ = ["check_derivatives"]


def check_derivatives(call: Any, taken: Sequence[Sharded], inputs: Any) -> None:
    """Raises where a derivative by ``taken`` would mix what the ranks hold.

    Args:
        call: the unit call that gathers the leaves ``taken``.
        inputs: what else it is given.

    Raises:
        ValueError: the derivative is taken sample by sample, or within a unit around.
    """
    levels = {leaf: _torch.differentiated_at(leaf.local) for leaf in taken}
    levels = {leaf: level for leaf, level in levels.items() if level}
    if not levels:
        return
    leaf, inner = max(levels.items(), key=lambda item: item[1])
    if call.frame.path and inner > call.frame.level:
        around = "/".join(call.frame.path)
        raise ValueError(
            f"a derivative is taken inside unit {around!r} by {leaf.name!r}, which "
            f"only unit {call.unit.__name__!r} within it gathers: it would be that of "
            "the mean over the ranks, where a unit's derivatives are the rank's own. "
            f"Make {call.frame.path[0]!r} ff.unit(fn, whole=True), which gathers all "
            "that it is given, or take the derivative outside"
        )
    mapped = [_torch.mapped_at(x) for x in tree.leaves(inputs) if isinstance(x, Tensor)]
    if any(0 < level < inner for each in mapped for level in each):
        raise ValueError(
            f"per-sample (vmapped) derivatives by {leaf.name!r}, which unit "
            f"{call.name!r} gathers: sample k of this rank would be averaged with "
            "sample k of the others. Take them inside a unit that has the parameters "
            "to itself: ff.unit(lambda params, batch: vmap(grad(loss), (None, 0))("
            "params, batch), whole=True)"
        )
