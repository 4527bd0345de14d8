"""How split features go through one call of a unit, from column to row layers.

Each rank has features of its own there. What they meet must have entered as theirs, or
its gradient would be one rank's; and no random numbers are drawn for them, as every
rank would draw the same. The graph of the call tells the one, the generators the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.collectives import all_gather, pcast
from fsfunc.comm.groups import axis_size
from fsfunc.interop.split_values import (
    Followed,
    SplitTensor,
    is_split,
    joined,
    own_positions,
)
from fsfunc.nn.draws import own_draws
from fsfunc.runtime.generators import States, generator_states
from fsfunc.sharded.leaf import is_sharded

__all__ = ["SplitFlow"]


class SplitFlow:
    """The split features of one call of a unit.

    Args:
        params: the call's, by name.
        meeting: the whole ones that meet split features, and a weight whose layout
            tells whether these are split.
        sequence: such a weight, of a unit whose sequence is split.
    """

    def __init__(
        self,
        params: Mapping[str, Any],
        meeting: Mapping[str, str],
        sequence: str | None = None,
    ):
        self._params, self._meeting = params, meeting
        #: The axis over which the unit's sequence is split, if it is.
        self.sequence = None if sequence is None else self._axis(sequence)
        self._last: tuple[Tensor, Any, Tensor, int] | None = None
        self._columns: list[Any] = []  # nodes of the graph that made split features
        self._rows: set[Any] = set()  # that made one value of them again
        self._casts: dict[Any, str] = {}  # and those of whole parameters that met them
        self._met: set[Any] = set()
        self._states: States = []
        self._followed: Followed | None = None

    @contextmanager
    def running(self, training: bool) -> Iterator[None]:
        """The forward: of what is split each rank draws its own random numbers."""
        tracked = torch.is_grad_enabled() and any(
            x.requires_grad for x in tree.leaves(self._params) if isinstance(x, Tensor)
        )
        apart = tracked or torch.compiler.is_compiling()
        self._followed = None if apart else Followed()
        with (
            self._followed or nullcontext(),
            own_draws(self.sequence if training else None),
        ):
            yield

    def _axis(self, name: str) -> str | None:
        """The axis over which a weight is split."""
        weight: Any = self._params.get(name)
        splits = weight.layout.splits if is_sharded(weight) else ()
        return splits[0].axis if splits else None

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
        """What the unit is given, as its forward takes it.

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
        """What a unit is given whole, as it meets parts of a sequence."""
        if is_split(x):
            raise TypeError(
                f'plan: a "sequence" unit is given {x} beside its first argument: '
                "give it one split sequence, or leave it out of the plan"
            )
        if not (isinstance(x, Tensor) and x.is_floating_point()):
            return x
        x = pcast(x, self.sequence, to="V")  # type: ignore[arg-type]
        if x.grad_fn is not None:
            self._casts[x.grad_fn] = ""
        return x

    def gathered(self, args: Any, keywords: Any) -> tuple[Any, Any]:
        """What a module is given within which layers are split, its sequence whole.

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

    def returned(self, out: Any, seen: Any) -> Any:
        """What the unit returns: of a split sequence, this rank's part of one.

        Args:
            seen: what is shown of modules within.

        Raises:
            TypeError: it returns something else, or more.
            RuntimeError: something is shown.
        """
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

    def read(self, name: str, x: Any) -> Any:
        """A parameter that the unit reads: cast, where it meets parts."""
        axis = self._axis(self._meeting[name]) if name in self._meeting else None
        if axis is None:
            return x
        x = pcast(x, axis, to="V")
        if x.grad_fn is not None:
            self._casts[x.grad_fn] = name
        return x

    def begin(self, y: Tensor) -> None:
        """A column layer made split features."""
        if y.grad_fn is not None:
            self._columns.append(y.grad_fn)
        if self._followed is not None:
            self._followed.add(y)
        if not self._states and _draws() and not self.sequence:
            self._states = generator_states()

    def end(self, x: Tensor, row: str) -> None:
        """A row layer takes split features.

        Args:
            row: the name of its weight.

        Raises:
            RuntimeError: they have met what is one value on all ranks, or random
                numbers; they have no sequence that is to be split.
        """
        if self.sequence is not None:
            length = self._length * axis_size(self.sequence)
            if x.ndim < 3 or x.shape[1] != length:
                raise RuntimeError(
                    f"plan: {row!r} takes {tuple(x.shape)}, of which dim 1 is to be the"
                    f' sequence of {length} positions: leave "sequence" out'
                )
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
        if self._followed is not None:
            self._followed.discard(y)

    def check(self, given: Any, out: Any) -> None:
        """Looks at what was made of split features when the call is over.

        Args:
            given, out: what the unit was given beside parameters, and returns.

        Raises:
            RuntimeError: split features leave the unit; a parameter that was to meet
                them has not, and its gradient would be a multiple.
        """
        left = self._followed is not None and self._followed.has(tree.leaves(out))
        if not left and (not self._columns or torch.compiler.is_compiling()):
            return
        stop = {*self._rows, *self._columns, *_nodes(given)}
        roots = _nodes(out)
        found = _torch.graph_nodes((node for node in roots if node not in stop), stop)
        seen = {*roots, *(below for node in found for below, _ in node.next_functions)}
        if left or not seen.isdisjoint(self._columns):
            raise RuntimeError(
                "plan: a unit returns what is made of split features, such as the "
                "attention of a rank's own heads, which is another on every rank: "
                "leave it out (of a Hugging Face model: output_attentions=False), or "
                "leave these layers out of the plan"
            )
        for node, name in self._casts.items():
            if node not in self._met and not self.sequence:
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
