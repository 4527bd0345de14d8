"""Replicated or rank-local: the kind of a plain tensor in a sharded call.

The first argument of a sharded function is its state, of which each leaf is laid out;
in others laid out leaves keep their layout, and all else is the rank's own. What a
first step returns is one value along the axes that no transform and no layout names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.collective_ops import apply_map, assumed
from fsfunc.comm.groups import RankGroup, group
from fsfunc.comm.mesh import Axis
from fsfunc.comm.typed_maps import ENTER
from fsfunc.core.frames import frame
from fsfunc.sharded.placements import Own
from fsfunc.sharded.plain_leaves import WHOLE, laid_as


class Ownership:
    """The replicated and the rank-local plain tensors of one sharded call.

    Args:
        state: the leaves of its first argument.
        leaves: those of all arguments, of which laid out ones keep their layout.
    """

    def __init__(self, state: Sequence[Any], leaves: Sequence[Any]):
        self._state, self._leaves = state, leaves
        self._said: dict[int, tuple[bool, Tensor]] = {}  # kept, or memory comes again

    @cached_property
    def _replicated(self) -> set[int]:
        plain = [x for x in self._state if isinstance(x, Tensor)]
        found = {storage_of(x) for x in plain if not isinstance(laid_as(x), Own)}
        every = [x for x in self._leaves if isinstance(x, Tensor)]
        others = [x for x in every if laid_as(x) == WHOLE]
        return found.union(map(storage_of, others))

    def is_replicated(self, x: Tensor) -> bool:
        """True if ``x`` lies in the memory of a parameter: then its gradient is a mean.

        By memory, not by object: to detach a leaf, or to track it, makes a new object.
        """
        key = storage_of(x)
        if key in self._said:
            return self._said[key][0]
        return key in self._replicated

    def declare(self, x: Tensor, replicated: bool) -> None:
        """Sets the kind of ``x`` for this call."""
        self._said[storage_of(x)] = replicated, _torch.unwrapped(x)


def enter_tracked(
    leaves: list[Any], ownership: Ownership, where: Callable[[], RankGroup]
) -> bool:
    """Enters leaves that are one value, and differentiated around a sharded call.

    In place; whether there are any. Their gradients are means, as those of parts. One
    that merely asks for a gradient does not count, but in a loss around.

    Args:
        where: gives the ranks of the mean.
    """
    plain = [(i, x) for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    tracked = [i for i, x in plain if _is_tracked(x) and laid_as(x) == WHOLE]
    for i in tracked:
        leaves[i] = apply_map(leaves[i], ENTER, where())
        ownership.declare(leaves[i], True)
    return bool(tracked)


def _is_tracked(x: Tensor) -> bool:
    """True if something around differentiates ``x``."""
    if _torch.differentiated_at(x):
        return True
    in_graph = x.grad_fn is not None or bool(frame().in_loss)
    return x.requires_grad and in_graph and torch.is_grad_enabled()


def storage_of(x: Tensor) -> int:
    """A key that is equal for two tensors in one memory, tracked, mapped or donated."""
    x = _torch.unwrapped(x)
    with _torch.plain_tensors():  # a donated step's own leaves are known as well
        return _torch.storage_key(x)


def assume(x: Any, axis: Axis, type: str) -> Any:
    """``x``, of which the caller answers for whose it is over an axis of ``shard``.

    The way past a refusal where the library cannot know: for one value, never for a
    whole step. Nothing is checked, and the derivative goes through as it is.

    Args:
        x: tensors, no parts of sharded leaves (for these see ``pcast``).
        type: "I": it is the same on every rank, so that it may scale parameters, be
            laid out, or be differentiated as one value, whose gradient is the ranks'
            mean. "V": it is this rank's own, and so is its gradient.

    Raises:
        ValueError: another type.

    Cost: a copy.

    >>> import torch, fsfunc as ff
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> def step(w, x):
    ...     delta = ff.assume(torch.zeros(2), "data", "V")
    ...     return ff.value_and_grad(lambda d: ((x + d) * w).sum())(delta)[1]
    >>> def main():
    ...     f, x = ff.shard(step, mesh, "data"), torch.ones(3, 2)
    ...     return f(ff.place(f, torch.ones(2), x), x)
    >>> ff.spmd(main, mesh)()
    [tensor([3., 3.]), tensor([3., 3.])]
    """
    if type not in ("I", "V"):
        raise ValueError(f"assume(x, {axis!r}, {type!r}): the type is 'I' or 'V'")
    where = group(axis)

    def said(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not where.mean:
            return leaf
        leaf = leaf.clone()
        for handler, runtime in frame().runtimes:
            if set(where.axis) <= set(getattr(handler, "axes", ())):
                runtime.ownership.declare(leaf, type == "I")
        assumed(leaf, type)
        return leaf

    return tree.map(said, x)
