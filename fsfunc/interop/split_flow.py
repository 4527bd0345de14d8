"""How split features go through one call of a unit, from column to row layers.

Each rank has features of its own there. What they meet must have entered as theirs, or
its gradient would be one rank's; and no random numbers are drawn for them, as every
rank would draw the same. The graph of the call tells the one, the generators the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.collectives import pcast
from fsfunc.runtime.generators import States, generator_states
from fsfunc.sharded.leaf import is_sharded

__all__ = ["SplitFlow"]


class SplitFlow:
    """The split features of one call of a unit.

    Args:
        params: the call's, by name.
        meeting: the whole ones that meet split features, and a weight whose layout
            tells whether these are split.
    """

    def __init__(self, params: Mapping[str, Any], meeting: Mapping[str, str]):
        self._params, self._meeting = params, meeting
        self._last: tuple[Tensor, Any, Tensor] | None = None
        self._columns: list[Any] = []  # nodes of the graph that made split features
        self._rows: set[Any] = set()  # that made one value of them again
        self._casts: dict[Any, str] = {}  # and those of whole parameters that met them
        self._met: set[Any] = set()
        self._states: States = []

    def entered(self, x: Tensor, axis: str) -> Tensor:
        """An input that meets split weights; once, for layers that are called in a row.

        So what comes back to it is summed over the axis once.
        """
        if x.is_inference():  # no version tells whether it is what it was
            return pcast(x, axis, to="V")
        key = x._version, torch.is_grad_enabled(), axis
        if self._last is None or self._last[0] is not x or self._last[1] != key:
            self._last = x, key, pcast(x, axis, to="V")
        return self._last[2]

    def read(self, name: str, x: Any) -> Any:
        """A parameter that the unit reads: cast, where it meets split features."""
        if name not in self._meeting:
            return x
        weight = self._params[self._meeting[name]]
        if not (is_sharded(weight) and weight.layout.splits):
            return x
        x = pcast(x, weight.layout.splits[0].axis, to="V")
        if x.grad_fn is not None:
            self._casts[x.grad_fn] = name
        return x

    def begin(self, y: Tensor) -> None:
        """A column layer made split features."""
        if y.grad_fn is not None:
            self._columns.append(y.grad_fn)
        if not self._states and _draws():
            self._states = generator_states()

    def end(self, x: Tensor, row: str) -> None:
        """A row layer takes split features.

        Args:
            row: the name of its weight.

        Raises:
            RuntimeError: they have met what is one value on all ranks, or random
                numbers.
        """
        states, self._states = self._states, []
        if states and any(not torch.equal(g.get_state(), s) for g, s in states):
            raise RuntimeError(
                f"plan: random numbers are drawn for the split features that {row!r} "
                "takes, by a dropout say, and all ranks would draw the same: set its "
                "p to 0 (of a Hugging Face model: attention_dropout=0), or have it "
                "after the row layer"
            )
        if x.grad_fn is None or torch.compiler.is_compiling():
            return
        stop = {*self._columns, *self._casts}
        found = _torch.graph_nodes([x.grad_fn] if x.grad_fn not in stop else [], stop)
        self._met |= {below for node in found for below, _ in node.next_functions}
        if not any(hasattr(node, "variable") for node in found):
            return
        leaves = {id(node.variable) for node in found if hasattr(node, "variable")}
        nodes = set(found)
        whole = {n: x for n, x in self._params.items() if isinstance(x, Tensor)}
        for name, p in whole.items():
            if id(p) in leaves or p.grad_fn in nodes:
                raise RuntimeError(
                    f"plan: {name!r}, which is whole, meets the split features that "
                    f"{row!r} takes, so that its gradient would be one rank's part: "
                    f'add {name.rpartition(".")[0]!r}: "whole" to the plan'
                )
        raise RuntimeError(
            f"plan: what the unit is given meets the split features that {row!r} takes "
            "without having passed a column layer, so that its gradient would be one "
            "rank's part: leave these layers out of the plan"
        )

    def joined(self, y: Tensor) -> None:
        """A row layer made one value of split features."""
        if y.grad_fn is not None:
            self._rows.add(y.grad_fn)

    def check(self, given: Any, out: Any) -> None:
        """Looks at the graph when the call is over.

        Args:
            given, out: what the unit was given beside parameters, and returns.

        Raises:
            RuntimeError: split features leave the unit; a parameter that was to meet
                them has not, and its gradient would be a multiple.
        """
        if not self._columns or torch.compiler.is_compiling():
            return
        stop = {*self._rows, *self._columns, *_nodes(given)}
        roots = _nodes(out)
        found = _torch.graph_nodes((node for node in roots if node not in stop), stop)
        left = {*roots, *(below for node in found for below, _ in node.next_functions)}
        if not left.isdisjoint(self._columns):
            raise RuntimeError(
                "plan: a unit returns what is made of split features, such as the "
                "attention of a rank's own heads, which is another on every rank: "
                "leave it out (of a Hugging Face model: output_attentions=False), or "
                "leave these layers out of the plan"
            )
        for node, name in self._casts.items():
            if node not in self._met:
                raise RuntimeError(
                    f'plan: {name!r} is "whole", as what meets split features, and the '
                    "unit's row layers take nothing of it: leave it out of the plan"
                )


def _nodes(values: Any) -> list[Any]:
    leaves = tree.leaves(values, is_leaf=is_sharded)
    nodes = [x.grad_fn for x in leaves if isinstance(x, Tensor)]
    return [node for node in nodes if node is not None]


def _draws() -> bool:
    """Whether random numbers that are drawn now show in the generators."""
    return not (_torch.fake_active() or torch.compiler.is_compiling())
