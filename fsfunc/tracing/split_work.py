"""Values that are each rank's own along an axis that no ``shard`` averages over.

This is for the rule "split work" of the type check, of which it is a part.

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
from typing import TypeAlias

from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.attribution import is_internal, source_line
from fsfunc.comm.groups import RankGroup
from fsfunc.comm.linear_maps import LinearMap
from fsfunc.runtime.memory import StorageTable
from fsfunc.sharded.leaf import Sharded
from fsfunc.tracing.operators import OF_LISTS, by_position, flatten_lists
from fsfunc.tracing.rules import rule_error
from fsfunc.tree import PyTree

Axes: TypeAlias = frozenset[str]
_NONE: Axes = frozenset()


class SplitWork:
    """By memory, the axes along which a value is each rank's own.

    Args:
        means: the axes that a ``shard`` averages over, which are not followed.
    """

    def __init__(self, means: Iterable[str]):
        self._means = frozenset(means)
        self._axes = StorageTable[Axes]()
        self._has_any = False  # until there is such a value, operators cost nothing

    def of(self, x: Tensor) -> Axes:
        """Returns the axes along which a tensor is each rank's own."""
        return self._axes.get(_torch.unwrapped(x)) or _NONE if self._has_any else _NONE

    def followed(self, axes: Iterable[str]) -> Axes:
        """Returns those of ``axes`` that no ``shard`` averages over."""
        return frozenset(axes) - self._means

    def add_part(self, leaf: Sharded) -> None:
        """Notes that a leaf's part is each rank's own, along the axes that split it."""
        splits = leaf.layout.splits
        if splits and (
            axes := self.followed(split.axis for split in splits if split.size > 1)
        ):
            memory_tensor = leaf._local if leaf._range is None else leaf._range[0]
            self._set(memory_tensor, self.of(memory_tensor) | axes)

    def _set(self, x: Tensor, axes: Axes) -> None:
        if axes or self._has_any:
            self._has_any = True
            self._axes[_torch.unwrapped(x)] = axes

    def operator(
        self,
        func: _torch.OpOverload,
        args: _torch.Args,
        kwargs: _torch.Kwargs,
        out: PyTree,
    ) -> None:
        """Notes what an operator has made, or written into."""
        if not self._has_any:
            return
        results = flatten_lists([out, _torch.tensors_written(func, args, kwargs) or []])
        results = [y for y in results if isinstance(y, Tensor)]
        rows = [(flatten_lists([args, kwargs]), results)]
        if func._schema.name.startswith(OF_LISTS):
            rows = by_position(args, kwargs, results)
        for arguments, row_results in rows:
            axes = _NONE.union(
                *(self.of(x) for x in arguments if isinstance(x, Tensor))
            )
            for y in row_results:
                if not axes <= self.of(y):
                    self._set(y, self.of(y) | axes)

    def check_enters(self, x: Tensor, linear_map: LinearMap, ranks: RankGroup) -> None:
        """Raises where a forward pass would differentiate a map of one value.

        Its transpose gives each rank the gradient of its own share, and nothing adds up
        the shares: ``pcast`` does, whose transpose is a sum. A map that is not
        differentiated multiplies by n, as it says, and is right: so ranks are counted.
        """
        if is_internal() or not x.requires_grad:
            return
        if ranks.size > 1 and _sends(linear_map):
            lacking = self.followed(ranks.axis) - self.of(x)
            if lacking and _torch.current_node() is None:  # else of a cotangent
                name = "pmean" if linear_map.power else linear_map.op
                line, axis = source_line(), min(lacking)
                raise rule_error("enters", op=name, line=line, axis=axis)

    def moved(
        self, x: Tensor, linear_map: LinearMap, ranks: RankGroup, y: Tensor
    ) -> None:
        """Notes what a linear map has made of ``x``."""
        followed = self.followed(ranks.axis) if ranks.size > 1 else _NONE
        if followed or self._has_any:
            before = self.of(x)
            self._set(
                y,
                before | followed if linear_map.to in ("V", "P") else before - followed,
            )


def _sends(linear_map: LinearMap) -> bool:
    """Returns whether a map takes each rank's own values, and sends to have them meet.

    The transpose of such a map gives each rank the gradient of its own share.
    """
    return (
        linear_map.of in ("V", "M")
        and not linear_map.is_comparison
        and linear_map.collective is not None
    )
