"""The ``autograd.Function`` of all collectives, and hooks to watch them.

A collective is a linear map. The backward of the Function applies the transposed map,
its ``jvp`` the same map, and its ``vmap`` only shifts dims. So collectives work under
``torch.func.grad``, ``vjp``, ``jvp`` and ``vmap``, nested in any way, and under
autograd, twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import current_label, label
from fsfunc.comm.groups import RankGroup, get_group, to_strided
from fsfunc.comm.linear_maps import LinearMap
from fsfunc.comm.mesh import Axis
from fsfunc.runtime.scopes import Scoped


class _Apply(torch.autograd.Function):
    """The linear map ``linear_map`` of ``x`` over the ranks ``group``."""

    @staticmethod
    def forward(x: Tensor, linear_map: LinearMap, group: RankGroup) -> Tensor:  # type: ignore[override]
        return watched(x, linear_map, group, linear_map.run(x, group))

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.linear_map, ctx.group = inputs
        ctx.unit = current_label()[0]

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        with label(ctx.unit, "backward"):
            return (
                apply_map(to_strided(g), ctx.linear_map.transpose(), ctx.group),
                None,
                None,
            )

    @staticmethod
    def jvp(ctx, t, _, __):  # type: ignore[override]
        ctx.linear_map.transpose()  # raises if there is no derivative
        return apply_map(t, ctx.linear_map, ctx.group)

    @staticmethod
    def vmap(info, in_dims, x, linear_map, group):  # type: ignore[override]
        d = in_dims[0]
        if group.link.vmap_level == _torch.current_level() + 1:
            return group.link.exchange(linear_map, x.movedim(d, 0), group), 0
        y = apply_map(x.movedim(d, -1), linear_map, group)
        return y, y.ndim - 1


class _ApplyPlainly(torch.autograd.Function):
    """The same where no transform of ``torch.func`` is active.

    Of a Function with a ``setup_context`` torch inspects the signature in each call.
    """

    @staticmethod
    def forward(ctx, x, linear_map, group):  # type: ignore[override]
        _Apply.setup_context(ctx, (x, linear_map, group), None)
        return _Apply.forward(x, linear_map, group)

    backward = _Apply.backward  # type: ignore[assignment]


def apply_map(x: Tensor, linear_map: LinearMap, group: RankGroup) -> Tensor:
    """``linear_map`` applied to one tensor over ``group``, differentiably."""
    plainly = _ApplyPlainly.apply if x.requires_grad else _Apply.forward
    function = _Apply.apply if _torch.transforms_active() else plainly
    return group.link.apply(function, x, linear_map, group)


class Watcher:
    """Hooks called for linear maps while a step is recorded or type checked."""

    def collective(self, x: Tensor, linear_map: LinearMap, group: RankGroup) -> None:
        """Called when the user's code calls a collective on ``x``."""

    def moved(
        self, x: Tensor, linear_map: LinearMap, group: RankGroup, y: Tensor
    ) -> None:
        """Called when ``linear_map`` has made ``y`` of ``x``."""

    def assumed(self, y: Tensor, kind: str) -> None:
        """Called when ``y`` is declared to be of a type."""

    def typed_like(self, y: Tensor, x: Tensor) -> Tensor:
        """Called when ``y``, a part of a buffer, gets the type of ``x``; may copy."""
        return y

    def laid(self, leaf: Any) -> None:
        """Called when a sharded leaf is made from a whole tensor, or like another."""

    def claimed(self, x: Any, what: str) -> None:
        """Called when ``what`` requires ``x`` to be equal on all ranks."""

    def summed(self, x: Tensor, what: str) -> None:
        """Called when ``what`` sums over a plain tensor ``x``."""

    def owned(self, x: Tensor, group: RankGroup, what: str) -> None:
        """Called when ``what`` requires ``x`` to be each rank's own along an axis."""


def watching(watcher: Watcher) -> Scoped:
    """Inside, ``watcher`` is called for every linear map."""
    return Scoped(_WATCHER, watcher)


def claim(x: Any, what: str) -> None:
    """Tells the watcher, and a call that compares them, what must be equal on ranks."""
    for watcher in (_WATCHER.get(), COMPARING.get()):
        if watcher is not None:
            watcher.claimed(x, what)


def claim_own(x: Tensor, axis: Axis | None, what: str) -> None:
    """Tells the watcher that ``x`` must be each rank's own along ``axis``."""
    if axis is not None and (watcher := _WATCHER.get()) is not None:
        watcher.owned(x, get_group(axis), what)


def claiming(f: Callable[..., Any], what: str, x: Any) -> Any:
    """``f``, which claims ``x`` in each call."""

    @functools.wraps(f)
    def told(*args: Any, **keywords: Any) -> Any:
        claim(x, what)
        return f(*args, **keywords)

    return told


def summed(tensors: Iterable[Tensor], what: str) -> None:
    """Tells the watcher that ``what`` sums over plain tensors."""
    if (watcher := _WATCHER.get()) is not None:
        for x in tensors:
            watcher.summed(x, what)


def assumed(y: Tensor, kind: str) -> Tensor:
    """Tells the watcher the type of ``y``; returns ``y``."""
    if (watcher := _WATCHER.get()) is not None:
        watcher.assumed(y, kind)
    return y


def typed_like(y: Tensor, x: Tensor) -> Tensor:
    """``y``, a part of a buffer that several share, with the type of ``x``."""
    watcher = _WATCHER.get()
    return y if watcher is None else watcher.typed_like(y, x)


def laid(leaf: Any) -> Any:
    """Tells the watcher that a sharded leaf was made; returns it."""
    if (watcher := _WATCHER.get()) is not None:
        watcher.laid(leaf)
    return leaf


def watched(x: Tensor, linear_map: LinearMap, group: RankGroup, y: Tensor) -> Tensor:
    """Shows ``y = how(x)`` to the watcher, as a copy if it shares memory with ``x``."""
    watcher = _WATCHER.get()
    if watcher is None:
        return y
    if _torch.storage_key(y) == _torch.storage_key(x):
        y = y.clone()
    watcher.moved(x, linear_map, group, y)
    return y


_WATCHER: ContextVar[Watcher | None] = ContextVar("fsfunc_watcher", default=None)
COMPARING: ContextVar[Watcher | None] = ContextVar("fsfunc_comparing", default=None)
_AXES: ContextVar[set[str] | None] = ContextVar("fsfunc_axes", default=None)
_RUN: ContextVar[Callable[..., Any] | None] = ContextVar("fsfunc_run", default=None)


def run_by(run: Callable[[Tensor, LinearMap, RankGroup], Any]) -> Scoped:
    """Inside, a user's collective returns ``run(x, map, where)`` for each tensor."""
    return Scoped(_RUN, run)


@contextmanager
def collecting_axes(axes: set[str] | None) -> Iterator[None]:
    """Inside, adds to ``axes`` the axes of collectives that are called.

    An enclosing call gets them too; with None, only that one does.
    """
    if axes is None:
        yield
        return
    with Scoped(_AXES, axes):
        yield
    if (outer := _AXES.get()) is not None:
        outer.update(axes)


def ignoring_axes() -> Scoped:
    """Inside, no axes are collected, as for what not all ranks run."""
    return Scoped(_AXES, None)


def issue(x: Tensor, linear_map: LinearMap, group: RankGroup) -> Any:
    """Runs a linear map of the user's program, by `run_by` if that is in force."""
    return (_RUN.get() or apply_map)(x, linear_map, group)


def over(
    x: Any, axis: Axis, linear_map: Callable[[Tensor, RankGroup], LinearMap]
) -> Any:
    """Applies to each tensor of ``x`` the linear map that ``linear_map`` returns for it."""
    group = get_group(axis)
    if (found := _AXES.get()) is not None:
        found.update(group.axis)
    leaves, treedef = tree.flatten(x)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"a collective over {group.name} needs tensors, got "
                f"{type(leaf).__name__}; axis_size gives the number of ranks"
            )
    maps = [
        linear_map(leaf, group) for leaf in leaves
    ]  # all checked before one is issued
    for leaf, m in zip(leaves, maps, strict=True):
        m.check(leaf, group)
    if (watcher := _WATCHER.get()) is not None:
        for leaf, m in zip(leaves, maps, strict=True):
            watcher.collective(leaf, m, group)
    out = [issue(leaf, m, group) for leaf, m in zip(leaves, maps, strict=True)]
    return tree.unflatten(treedef, out)


class Dense(torch.autograd.Function):
    """The identity, whose backward makes a sparse gradient dense."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        return to_strided(g)

    @staticmethod
    def jvp(ctx, t):  # type: ignore[override]
        return t.view_as(t)
