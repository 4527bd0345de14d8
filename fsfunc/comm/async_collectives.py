"""Asynchronous collectives: ``start`` issues one, and ``wait`` returns its result.

Computation in between overlaps with the exchange. Start and wait are two Functions that
share a :class:`_Flight`. The backward of the wait starts the transposed collective, and
that of the start waits for it: so a forward pass that starts collectives k calls ahead
has a backward pass that waits for them k calls late.

    forward    _Start(x) ......... _Wait -> y
    backward   g <- wait ......... start(transposed) <- cotangent of y
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import current_label, internal, label
from fsfunc.comm.backends.link import Done, Handle
from fsfunc.comm.collective_ops import maps_run_by, show_to_watcher
from fsfunc.comm.groups import RankGroup
from fsfunc.comm.linear_maps import LinearMap
from fsfunc.comm.mesh import Axis
from fsfunc.tree.types import PyTree

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Tree = TypeVar("_Tree")


def start(
    collective: Callable[Concatenate[_Tree, Axis, _P], _R],
    x: _Tree,
    axis: Axis,
    *args: _P.args,
    **options: _P.kwargs,
) -> Pending[_R]:
    """Starts a collective: ``start(f, x, axis).wait()`` equals ``f(x, axis)``.

    Transpose: in the backward pass the transposed collective starts where the forward
    pass waited, and is waited for where it started.

    Args:
        collective: one of fsfunc's collectives, such as ``ff.all_gather``.
        x: its input; it must not be written in place before the wait.
        axis, *args, **options: as for ``collective``.

    Returns:
        a `Pending`; every rank waits for each of them once, in any order.

    Raises:
        TypeError: ``collective`` is no collective.
        RuntimeError: from ``wait``, where the input was written while in flight.

    Cost: that of the collective.

    >>> import fsfunc as ff, torch
    >>> def main():
    ...     pending = ff.start(ff.psum, torch.ones(2), "data")
    ...     return pending.wait().tolist()
    >>> ff.spmd(main, ff.make_mesh({"data": 2}, "simulated"))()
    [[2.0, 2.0], [2.0, 2.0]]
    """

    # Inside, a collective has `launch` run its maps, so its results are functions that
    # wait; those of another function are tensors.
    with maps_run_by(launch):
        waits, treedef = tree.flatten(collective(x, axis, *args, **options))
    if not all(callable(wait) for wait in waits):
        raise TypeError(
            f"start takes a collective, such as ff.all_gather; got {collective!r}"
        )
    return Pending(waits, treedef)


def launch(x: Tensor, linear_map: LinearMap, group: RankGroup) -> Callable[[], Tensor]:
    """Starts a linear map; returns the function that waits for its result, once.

    For callers that have a group, as backward passes do; others use ``start``.
    """
    flight = _Flight()
    token = _start(x, linear_map, group, flight)
    return lambda: _wait(token, linear_map, group, flight)


class Pending(Generic[_R]):
    """A collective in flight, as ``start`` returns it."""

    def __init__(self, waits: list[Callable[[], Tensor]], treedef: tree.TreeDef):
        self._waits, self._treedef = waits, treedef  # of the tensors in the input
        self._output: PyTree = None

    def wait(self) -> _R:
        """Waits for the collective; returns its result, the same one every time."""
        # A flight ends once, and drops its tensors: later calls return the same result.
        if self._waits:
            tensors = [wait() for wait in self._waits]
            self._output = tree.unflatten(self._treedef, tensors)
            self._waits = []
        return self._output


class _Flight:
    """A collective between its start and its wait, and those of its derivatives.

    The two Functions are connected in the graph by a token, a scalar zero; the tensors
    are stored here. The token makes autograd order the wait after the start.

    ``transposed`` is the flight of the backward, ``tangents`` those of jvps.
    """

    work: Handle
    sent: Tensor
    version: int | None
    transposed: _Flight

    def __init__(self) -> None:
        self.tangents: dict[int, _Flight] = {}  # by functorch level

    def start(self, x: Tensor, linear_map: LinearMap, group: RankGroup) -> None:
        with internal():
            self.sent, self.work = x, linear_map.start(x, group, any_order=True)
        self.version = None if x.is_inference() else x._version

    def finish(self, linear_map: LinearMap, group: RankGroup) -> Tensor:
        # A backend reads the input until the wait: some ranks might have got the values
        # from before the write, and others those from after it. Inference tensors have
        # no version, and are not checked.
        if self.version is not None and self.version != self.sent._version:
            raise RuntimeError(
                f"{linear_map.op} of shape {tuple(self.sent.shape)} over {group.name}: "
                "its input was written in place while in flight; wait first, or start "
                "it on a copy"
            )
        with internal():
            y = linear_map.finish(self.work, self.sent, group)
        y = show_to_watcher(self.sent, linear_map, group, y)
        del self.work, self.sent  # the graph keeps the flight, and not their memory
        return y


class _Start(torch.autograd.Function):
    """Starts a collective: from its input to the token."""

    @staticmethod
    def forward(  # type: ignore[override]
        x: Tensor, linear_map: LinearMap, group: RankGroup, flight: _Flight
    ) -> Tensor:
        flight.start(x, linear_map, group)
        return x.new_zeros(())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.linear_map, ctx.group, ctx.flight = inputs

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        g = _wait(token, ctx.linear_map.transpose(), ctx.group, ctx.flight.transposed)
        return g, None, None, None

    @staticmethod
    def jvp(ctx: Any, t: Tensor, *_: None) -> Tensor:  # type: ignore[override]
        flight = ctx.flight.tangents[_torch.current_level()] = _Flight()
        return _start(t, ctx.linear_map, ctx.group, flight)

    @staticmethod
    def vmap(  # type: ignore[override]
        info: Any,
        in_dims: Any,
        x: Tensor,
        linear_map: LinearMap,
        group: RankGroup,
        flight: _Flight,
    ) -> tuple[Tensor, int]:
        d = in_dims[0]
        # On a vmap mesh the batch dim of this level is the ranks themselves. (The + 1:
        # torch calls a rule at the level beneath the one that it maps.)
        if group.link.vmap_level == _torch.current_level() + 1:
            flight.work = Done(group.link.exchange(linear_map, x.movedim(d, 0), group))
            return x.new_zeros(info.batch_size), 0
        token = _start(x.movedim(d, -1), linear_map, group, flight)
        return token.expand(info.batch_size), 0


class _Wait(torch.autograd.Function):
    """Waits for a collective: from the token to its result."""

    @staticmethod
    def forward(  # type: ignore[override]
        token: Tensor, linear_map: LinearMap, group: RankGroup, flight: _Flight
    ) -> Tensor:
        return flight.finish(linear_map, group)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.linear_map, ctx.group, ctx.flight = inputs
        ctx.unit = current_label()[0]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        flight = ctx.flight.transposed = _Flight()
        with label(ctx.unit, "backward"):
            token = _start(g, ctx.linear_map.transpose(), ctx.group, flight)
        return token, None, None, None

    @staticmethod
    def jvp(ctx: Any, token: Tensor, *_: None) -> Tensor:  # type: ignore[override]
        flight = ctx.flight.tangents[_torch.current_level()]
        return _wait(token, ctx.linear_map, ctx.group, flight)

    @staticmethod
    def vmap(  # type: ignore[override]
        info: Any,
        in_dims: Any,
        token: Tensor,
        linear_map: LinearMap,
        group: RankGroup,
        flight: _Flight,
    ) -> tuple[Tensor, int]:
        if group.link.vmap_level == _torch.current_level() + 1:
            return flight.work.wait(), 0
        y = _wait(token.sum(), linear_map, group, flight)
        return y, y.ndim - 1


def _start(
    x: Tensor, linear_map: LinearMap, group: RankGroup, flight: _Flight
) -> Tensor:
    return group.link.apply(_Start.apply, x, linear_map, group, flight)


def _wait(
    token: Tensor, linear_map: LinearMap, group: RankGroup, flight: _Flight
) -> Tensor:
    return group.link.apply(_Wait.apply, token, linear_map, group, flight)
