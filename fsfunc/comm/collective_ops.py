"""The ``autograd.Function`` of all collectives, and hooks to watch them.

A collective is a linear map (`linear_maps.LinearMap`). The backward of the Function
applies the transposed map, its ``jvp`` the same map, and its ``vmap`` only shifts dims.
So collectives work under ``torch.func.grad``, ``vjp``, ``jvp`` and ``vmap``, nested in
any way, and under autograd, twice.

    psum(x, "data")  ->  apply_over  ->  run_map  ->  apply_map  ->  _Apply.apply
    (collectives.py)     each tensor     a user's     any map        forward, backward

`apply_over` is for maps of the user's program: it checks them and shows them to a
:class:`Watcher`, as the recording and the type check of a step are. `apply_map` is for
maps of the library's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import current_label, label
from fsfunc.comm.groups import RankGroup, get_group, to_strided
from fsfunc.comm.linear_maps import LinearMap
from fsfunc.comm.mesh import Axis
from fsfunc.runtime.scopes import Scoped

if TYPE_CHECKING:
    from fsfunc.sharded.leaf import Sharded
    from fsfunc.tree.types import PyTree

# (x, map, group): what runs a map; and what makes the map of a leaf.
RunMap: TypeAlias = Callable[[Tensor, LinearMap, RankGroup], Any]
MakeMap: TypeAlias = Callable[[Tensor, RankGroup], LinearMap]
_P = ParamSpec("_P")
_R = TypeVar("_R")
_Leaf = TypeVar("_Leaf")


class _Apply(torch.autograd.Function):
    """The linear map ``linear_map`` of ``x`` over the ranks of ``group``."""

    @staticmethod
    def forward(x: Tensor, linear_map: LinearMap, group: RankGroup) -> Tensor:  # type: ignore[override]
        return show_to_watcher(x, linear_map, group, linear_map.run(x, group))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor | None) -> None:
        _, ctx.map, ctx.group = inputs
        ctx.unit = current_label()[0]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        # A backward may run outside the unit that called the collective, so the ledger
        # is told the unit here; and it runs on the group of the forward pass.
        with label(ctx.unit, "backward"):
            return apply_map(to_strided(g), ctx.map.transpose(), ctx.group), None, None

    @staticmethod
    def jvp(ctx: Any, t: Tensor, _: None, __: None) -> Tensor:  # type: ignore[override]
        ctx.map.transpose()  # raises if there is no derivative
        return apply_map(t, ctx.map, ctx.group)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: Tensor, linear_map: LinearMap, group: RankGroup
    ):  # type: ignore[override]
        d = in_dims[0]
        # On a vmap mesh the batch dim of this level is the ranks themselves. (The + 1:
        # torch calls a rule at the level beneath the one that it maps.)
        if group.link.vmap_level == _torch.current_level() + 1:
            return group.link.exchange(linear_map, x.movedim(d, 0), group), 0
        # Else it is a dim of the user's, which goes last: the map's dims stay in place.
        y = apply_map(x.movedim(d, -1), linear_map, group)
        return y, y.ndim - 1


class _ApplyPlainly(torch.autograd.Function):
    """`_Apply` for where no transform of ``torch.func`` is active.

    If a Function has a ``setup_context``, torch inspects the signature in each call. A
    psum with its derivative took half as many Python calls again for that.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, linear_map: LinearMap, group: RankGroup
    ) -> Tensor:
        _Apply.setup_context(ctx, (x, linear_map, group), None)
        return _Apply.forward(x, linear_map, group)

    backward = _Apply.backward  # type: ignore[assignment]


def apply_map(x: Tensor, linear_map: LinearMap, group: RankGroup) -> Tensor:
    """Applies a linear map to one tensor over the ranks of a group, differentiably."""
    plainly = _ApplyPlainly.apply if x.requires_grad else _Apply.forward
    function = _Apply.apply if _torch.transforms_active() else plainly
    return group.link.apply(function, x, linear_map, group)


class Watcher:
    """Hooks called for linear maps while a step is recorded or type checked.

    ``caller`` is the function that claims something of a tensor, for messages.
    """

    def collective_called(
        self, x: Tensor, linear_map: LinearMap, group: RankGroup
    ) -> None:
        """Called when the user's code calls a collective on ``x``."""

    def map_applied(
        self, x: Tensor, linear_map: LinearMap, group: RankGroup, y: Tensor
    ) -> None:
        """Called when ``linear_map`` has made ``y`` of ``x``."""

    def type_declared(self, y: Tensor, kind: str) -> None:
        """Called when ``y`` is declared to be of a type."""

    def typed_like(self, y: Tensor, x: Tensor) -> Tensor:
        """Called when ``y``, a part of a buffer, gets the type of ``x``; may copy."""
        return y

    def leaf_made(self, leaf: Sharded) -> None:
        """Called when a sharded leaf is made from a whole tensor, or like another."""

    def claimed_equal(self, x: PyTree, caller: str) -> None:
        """Called when ``caller`` requires ``x`` to be equal on all ranks."""

    def summed_locally(self, x: Tensor, caller: str) -> None:
        """Called when ``caller`` sums over the elements of a plain tensor ``x``."""

    def claimed_rank_local(self, x: Tensor, group: RankGroup, caller: str) -> None:
        """Called when ``caller`` requires ``x`` to be each rank's own along an axis."""


def watching(watcher: Watcher) -> Scoped:
    """Inside, ``watcher`` is called for every linear map."""
    return Scoped(_WATCHER, watcher)


def claim_equal(x: PyTree, caller: str) -> None:
    """Claims that ``x`` is equal on all ranks.

    The watcher checks its type; a call that compares values (``COMPARING``) its bits.
    """
    for watcher in (_WATCHER.get(), COMPARING.get()):
        if watcher is not None:
            watcher.claimed_equal(x, caller)


def claim_rank_local(x: Tensor, axis: Axis | None, caller: str) -> None:
    """Claims, to the watcher, that ``x`` is each rank's own along ``axis``."""
    if axis is not None and (watcher := _WATCHER.get()) is not None:
        watcher.claimed_rank_local(x, get_group(axis), caller)


def claiming_equal(f: Callable[_P, _R], caller: str, x: PyTree) -> Callable[_P, _R]:
    """Returns ``f``, each call of which claims that ``x`` is equal on all ranks."""

    @functools.wraps(f)
    def claim_and_call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        claim_equal(x, caller)
        return f(*args, **kwargs)

    return claim_and_call


def note_summed(tensors: Iterable[Tensor], caller: str) -> None:
    """Tells the watcher that ``caller`` sums over plain tensors.

    It refuses parts of sharded leaves: their sum is over this rank's elements alone.
    """
    if (watcher := _WATCHER.get()) is not None:
        for x in tensors:
            watcher.summed_locally(x, caller)


def declare_type(y: Tensor, kind: str) -> Tensor:
    """Tells the watcher the type of ``y``; returns ``y``."""
    if (watcher := _WATCHER.get()) is not None:
        watcher.type_declared(y, kind)
    return y


def typed_like(y: Tensor, x: Tensor) -> Tensor:
    """Returns ``y``, a part of a buffer that several share, with the type of ``x``."""
    watcher = _WATCHER.get()
    return y if watcher is None else watcher.typed_like(y, x)


def note_laid_out(leaf: _Leaf) -> _Leaf:
    """Tells the watcher that a sharded leaf was made; returns it."""
    if (watcher := _WATCHER.get()) is not None:
        watcher.leaf_made(leaf)  # type: ignore[arg-type]
    return leaf


def show_to_watcher(
    x: Tensor, linear_map: LinearMap, group: RankGroup, y: Tensor
) -> Tensor:
    """Shows ``y = linear_map(x)`` to the watcher; returns ``y``, perhaps a copy."""
    watcher = _WATCHER.get()
    if watcher is None:
        return y
    # A watcher knows a tensor by its storage: one storage cannot have two types.
    if _torch.storage_key(y) == _torch.storage_key(x):
        y = y.clone()
    watcher.map_applied(x, linear_map, group, y)
    return y


_WATCHER: ContextVar[Watcher | None] = ContextVar("fsfunc_watcher", default=None)
COMPARING: ContextVar[Watcher | None] = ContextVar("fsfunc_comparing", default=None)
_AXES: ContextVar[set[str] | None] = ContextVar("fsfunc_axes", default=None)
_RUN: ContextVar[RunMap | None] = ContextVar("fsfunc_run", default=None)


def maps_run_by(run: RunMap) -> Scoped:
    """Inside, a user's collective returns ``run(x, map, group)`` for each tensor."""
    return Scoped(_RUN, run)


@contextmanager
def collecting_axes(axes: set[str] | None) -> Iterator[None]:
    """Inside, adds to ``axes`` the axes of collectives that are called.

    An enclosing call gets them too; with None, only that one does.
    """
    if axes is None:  # as in a unit: the set of the call around it stays in force
        yield
        return
    with Scoped(_AXES, axes):
        yield
    if (outer_axes := _AXES.get()) is not None:
        outer_axes.update(axes)


def ignoring_axes() -> Scoped:
    """Inside, no axes are collected, as for what not all ranks run."""
    return Scoped(_AXES, None)


def run_map(x: Tensor, linear_map: LinearMap, group: RankGroup) -> Any:
    """Runs a linear map of the user's program, by `maps_run_by` if that is in force."""
    return (_RUN.get() or apply_map)(x, linear_map, group)


def apply_over(x: PyTree, axis: Axis, make_map: MakeMap) -> PyTree:
    """Applies to each tensor of ``x`` the map that ``make_map`` returns for it."""
    group = get_group(axis)
    if (axes := _AXES.get()) is not None:
        axes.update(group.axis)
    leaves, treedef = tree.flatten(x)
    # A number has no dtype and no device to be sent by. (JAX's psum(1, axis), the
    # number of ranks, is `axis_size`.)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"a collective over {group.name} needs tensors, got "
                f"{type(leaf).__name__}; axis_size gives the number of ranks"
            )
    # All are checked before one is issued: a rank that raised after its first message
    # would leave the others waiting for the second.
    maps = [make_map(leaf, group) for leaf in leaves]
    for leaf, m in zip(leaves, maps, strict=True):
        m.check(leaf, group)
    # Also before the first is issued, as a watcher may refuse the call.
    if (watcher := _WATCHER.get()) is not None:
        for leaf, m in zip(leaves, maps, strict=True):
            watcher.collective_called(leaf, m, group)
    results = [run_map(leaf, m, group) for leaf, m in zip(leaves, maps, strict=True)]
    return tree.unflatten(treedef, results)


class DenseGrad(torch.autograd.Function):
    """The identity, whose backward makes a sparse gradient dense."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return to_strided(g)

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Tensor:  # type: ignore[override]
        return t.view_as(t)
