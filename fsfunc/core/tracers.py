"""The tracer interface: hooks while a step is recorded, tried or planned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from fsfunc.comm.attribution import internal

__all__ = ["Tracer"]


class Tracer:
    """Hooks while a step runs to be recorded, tried or planned; here they do nothing.

    A frame has one at most: a ``Recorder`` while a state is laid out, a ``Checker``
    while a step is tried, an ``Observer`` while one is planned.

    complete: whether all that a step does is done, as a plan needs it; else a donated
        state is not used up, and a pipeline need not run its stages.
    draws: whether units draw their own random numbers: fake tensors have none.
    forward_only: whether gradients have their shapes alone, and no backward pass runs.
    fills: whether objects that are given may be filled, as a cache is: they are copies.
    """

    complete = False
    draws = False
    forward_only = False
    fills = False

    def standing_for(self, handler: Any) -> Any:
        """The interpretation that a transform comes to meanwhile."""
        return handler

    def body(self, call: Any, params: Any, inputs: Any, keywords: Any) -> Any:
        """Runs a unit's function."""
        with internal(False):
            return call.unit.checked(params, inputs, keywords)

    def know(self, x: Tensor, path: str) -> None:
        """Hears that ``x`` is in place of a leaf of the step's first argument."""

    def gradients(self, leaves: Sequence[Tensor], found: Sequence[Tensor]) -> None:
        """Hears that ``found`` stand in place of the gradients by ``leaves``."""

    def called(self, key: Any, args: Any, keywords: Any, mean: Sequence[str]) -> None:
        """Hears that a sharded function is called.

        Args:
            key: on what kinds of things; ``mean``: the axes over which it averages.
        """

    def returned(self, args: Any, out: Any) -> None:
        """Hears what a sharded function was given and returns, as it ends."""

    def takes(self, name: str, leaves: Iterable[Any]) -> None:
        """Hears that ``name``, such as a unit call, takes sharded leaves."""

    def gradient(self, by: Any, found: Any, averaged: Callable[[Tensor], bool]) -> None:
        """Hears that ``found`` is the gradient by the tree ``by``.

        Args:
            averaged: whether the gradient by a plain leaf becomes the ranks' mean.
        """

    def reduced(self, by: Any, grads: Any, of: Any, value: Any) -> None:
        """Hears that ``grads``, by the tree ``by``, and ``value`` are means by now.

        Args:
            of: what the gradient is of, and what its function was given.
        """
