"""Split features and sequences of one call of a unit.

Each rank has features of its own between column and row layers, and, where a unit is a
"sequence", positions of its own around them. What meets these enters as each rank's, so
that its gradient is summed over the axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.collectives import all_gather, pcast
from fsfunc.comm.groups import axis_size
from fsfunc.interop.split_values import SplitTensor, is_split, joined, own_positions
from fsfunc.sharded.leaf import is_sharded


class SplitFlow:
    """The split features of one call of a unit.

    Args:
        params: the call's, by name.
        column: the name of a weight whose layout tells whether features are split.
        meeting: the whole parameters that meet parts.
        is_sequence: whether positions are split where features are.
    """

    def __init__(
        self,
        params: Mapping[str, Any],
        column: str | None,
        meeting: frozenset[str],
        is_sequence: bool,
    ):
        weight: Any = None if column is None else params.get(column)
        splits = weight.layout.splits if is_sharded(weight) else ()
        #: The axis over which features are split; that over which the sequence is.
        self.axis = splits[0].axis if splits else None
        self.sequence = self.axis if is_sequence else None
        self._meeting = meeting
        #: Which leaves of a module's output are made of a rank's features.
        self.withheld: dict[int, list[bool]] = {}
        self._last: tuple[Tensor, Any, Tensor, int] | None = None

    def read(self, name: str, x: Any) -> Any:
        """A parameter that the unit reads: cast, where it meets parts."""
        if self.axis is None or name not in self._meeting:
            return x
        return pcast(x, self.axis, to="V")

    def entered(self, x: Tensor, axis: str) -> Tensor:
        """An input that meets split weights; once, for layers that are called in a row.

        So what comes back to it is summed over the axis once. Of a split sequence the
        module around them has been given the whole.
        """
        return x if self.sequence else self._once(x, axis, partial(pcast, to="V"))

    def _once(self, x: Tensor, axis: str, do: Callable[..., Tensor]) -> Tensor:
        if x.is_inference():  # no version tells whether it is what it was
            return do(x, axis)
        key = x._version, torch.is_grad_enabled(), axis
        if self._last is not None:
            given, known, y, version = self._last
            if given is x and known == key and y._version == version:
                return y
        y = do(x, axis)
        self._last = x, key, y, y._version
        return y

    def taken(self, args: Any, keywords: Any) -> tuple[Any, Any]:
        """Arguments of the unit as its forward takes them.

        A split sequence is this rank's part where the unit's sequence is split, and
        whole elsewhere.

        Raises:
            ValueError: a sequence that the axis does not divide.
            TypeError: none comes first, or another too.
        """
        if self.sequence is None:
            if any(map(is_split, tree.leaves((args, keywords), is_leaf=is_split))):
                return tree.map(joined, (args, keywords), is_leaf=is_split)
            return args, keywords
        x = own_positions(args[0] if args else None, self.sequence)
        rest, keywords = tree.map(self._beside, (args[1:], keywords), is_leaf=is_split)
        self._length = x.shape[1]
        self._whole = {id(y): y for y in tree.leaves((rest, keywords))}
        return (x, *rest), keywords

    def _beside(self, x: Any) -> Any:
        """An argument that comes whole, as it meets parts of a sequence."""
        if is_split(x):
            raise TypeError(
                f'plan: a "sequence" unit is given {x} beside its first argument: '
                "give it one split sequence, or leave it out of the plan"
            )
        if not (isinstance(x, Tensor) and x.is_floating_point()):
            return x
        return pcast(x, self.sequence, to="V")  # type: ignore[arg-type]

    def gathered(self, args: Any, keywords: Any) -> tuple[Any, Any]:
        """Arguments of a module around split layers, with a whole sequence.

        Raises:
            RuntimeError: it is given what is neither this rank's part of the sequence
                nor what the unit was given.
        """
        if self.sequence is None:
            return args, keywords
        return tree.map(self._gathered, (args, keywords))

    def _gathered(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or id(x) in self._whole:
            return x
        if x.ndim < 3 or x.shape[1] != self._length:
            raise RuntimeError(
                f"plan: a module around split layers is given {tuple(x.shape)}, which "
                f"is neither the sequence, of {self._length} positions a rank along "
                'dim 1, nor what its unit was given: leave "sequence" out'
            )
        return self._once(x, self.sequence, partial(all_gather, dim=1))  # type: ignore

    def check_row(self, x: Tensor, row: str) -> None:
        """Raises RuntimeError where a row layer takes no sequence to be split."""
        if self.sequence is None:
            return
        length = self._length * axis_size(self.sequence)
        if x.ndim < 3 or x.shape[1] != length:
            raise RuntimeError(
                f"plan: {row!r} takes {tuple(x.shape)}, of which dim 1 is to be the"
                f' sequence of {length} positions: leave "sequence" out'
            )

    def returned(self, out: Any, seen: Any) -> Any:
        """The result of the unit: this rank's part, where the sequence is split.

        Args:
            seen: what is shown of modules within.

        Raises:
            TypeError: it returns something else, or more.
            RuntimeError: something is shown, or made of a rank's own features.
        """
        if any(map(any, self.withheld.values())):
            raise RuntimeError(
                "plan: a unit returns what is made of split features, such as the "
                "attention of a rank's own heads, which is another on every rank: "
                "return it joined, or leave these layers out of the plan"
            )
        if self.sequence is None:
            return out
        if seen:
            raise RuntimeError(
                f'plan: a hook is hung on {seen[0][0]!r} within a "sequence" unit as '
                "the module runs, and would see this rank's positions: leave it out (of"
                " a Hugging Face model: output_attentions and output_hidden_states)"
            )
        found = tree.leaves(out)
        x = found[0] if len(found) == 1 else None
        if not isinstance(x, Tensor) or x.ndim < 3 or x.shape[1] != self._length:
            shapes = [tuple(getattr(x, "shape", ())) for x in found]
            raise TypeError(
                f'plan: a "sequence" unit returns {shapes}, and is to return one '
                f"tensor, of {self._length} positions a rank along dim 1: leave its "
                '"sequence" out of the plan'
            )
        axis = self.sequence
        return tree.map(lambda x: SplitTensor(x, axis, 1 - x.ndim), out)
