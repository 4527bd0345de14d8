"""Values that are each rank's own along an axis that no ``shard`` averages over.

Along such an axis (of a model, of a context) the ranks share the work of one loss. What
a step is given is one value on all of them, but for leaves that are split there. A
value becomes each rank's own by ``ff.pcast(x, axis, to="V")``, or by a collective whose
result is V, and one value again by one whose result is I. In between, an operator's
result is each rank's own along the axes of all that it reads.

A layer that takes each rank's own rows would count one value as often as there are
ranks, and so would a loss that is each rank's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.attribution import is_internal, source_line
from fsfunc.comm.groups import RankGroup
from fsfunc.comm.linear_maps import LinearMap
from fsfunc.runtime.memory import StorageTable
from fsfunc.sharded.leaf import Sharded
from fsfunc.tracing.operators import OF_LISTS, by_position, flatten_lists
from fsfunc.tracing.rules import rule_error

Axes = frozenset[str]
_NONE: Axes = frozenset()


class SplitWork:
    """By memory, the axes along which a value is each rank's own.

    Args:
        means: the axes that a ``shard`` averages over, which are not followed.
    """

    def __init__(self, means: Iterable[str]):
        self._means = frozenset(means)
        self._axes = StorageTable[Axes]()
        self._some = False  # until there is such a value, operators cost nothing

    def of(self, x: Tensor) -> Axes:
        """The axes along which a tensor is each rank's own."""
        return self._axes.get(_torch.unwrapped(x)) or _NONE if self._some else _NONE

    def over(self, axes: Iterable[str]) -> Axes:
        """Those of some axes that are followed."""
        return frozenset(axes) - self._means

    def add_part(self, leaf: Sharded) -> None:
        """Says that a leaf's part is each rank's own, along the axes that split it."""
        splits = leaf.layout.splits
        if splits and (axes := self.over(s.axis for s in splits if s.size > 1)):
            held = leaf._local if leaf._range is None else leaf._range[0]
            self._put(held, self.of(held) | axes)

    def _put(self, x: Tensor, axes: Axes) -> None:
        if axes or self._some:
            self._some = True
            self._axes[_torch.unwrapped(x)] = axes

    def operator(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Notes what an operator has made, or written into."""
        if not self._some:
            return
        made = flatten_lists([out, _torch.written(func, args, kwargs) or []])
        made = [y for y in made if isinstance(y, Tensor)]
        each: Any = [(flatten_lists([args, kwargs]), made)]
        if func._schema.name.startswith(OF_LISTS):
            each = by_position(args, kwargs, made)
        for given, results in each:
            axes = _NONE.union(*(self.of(x) for x in given if isinstance(x, Tensor)))
            for y in results:
                if not axes <= self.of(y):
                    self._put(y, self.of(y) | axes)

    def check_enters(self, x: Tensor, how: LinearMap, where: RankGroup) -> None:
        """Raises where a forward pass would differentiate a map of one value.

        Its transpose gives each rank the gradient of its own share, and nothing adds up
        the shares: ``pcast`` does, whose transpose is a sum. A map that is not
        differentiated multiplies by n, as it says, and is right (ranks are counted so).
        """
        if is_internal() or not x.requires_grad:
            return
        if where.size > 1 and _sends(how):
            lacking = self.over(where.axis) - self.of(x)
            if lacking and _torch.current_node() is None:  # else of a cotangent
                name = "pmean" if how.power else how.op
                line, axis = source_line(), min(lacking)
                raise rule_error("enters", op=name, line=line, axis=axis)

    def moved(self, x: Tensor, how: LinearMap, where: RankGroup, y: Tensor) -> None:
        """Notes what a linear map has made of ``x``."""
        over = self.over(where.axis) if where.size > 1 else _NONE
        if over or self._some:
            before = self.of(x)
            self._put(y, before | over if how.to in ("V", "P") else before - over)


def _sends(how: LinearMap) -> bool:
    """True of a map of each rank's own values, whose transpose gives such gradients."""
    return how.of in ("V", "M") and not how.ordered and how.sends is not None
