"""Replicated and rank-local plain tensors in a sharded call; ``assume``.

The leaves of the first argument, the state, have layouts. Leaves of other arguments
that have one keep it; other tensors there are the rank's own.
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
    """Which plain tensors of a sharded call are replicated, and which rank-local.

    Args:
        state: the leaves of its first argument.
        leaves: those of all arguments.
    """

    def __init__(self, state: Sequence[Any], leaves: Sequence[Any]):
        self._state, self._leaves = state, leaves
        # By storage; with the tensor, so that its memory is not used again.
        self._said: dict[int, tuple[bool, Tensor]] = {}

    @cached_property
    def _replicated(self) -> set[int]:
        plain = [x for x in self._state if isinstance(x, Tensor)]
        found = {storage_of(x) for x in plain if not isinstance(laid_as(x), Own)}
        every = [x for x in self._leaves if isinstance(x, Tensor)]
        others = [x for x in every if laid_as(x) == WHOLE]
        return found.union(map(storage_of, others))

    def is_replicated(self, x: Tensor) -> bool:
        """True if ``x`` lies in the memory of a parameter: then its gradient is a mean.

        By memory, not by object: a detached leaf is a new object.
        """
        key = storage_of(x)
        return self._said[key][0] if key in self._said else key in self._replicated

    def declare(self, x: Tensor, replicated: bool) -> None:
        """Declares whether ``x`` is replicated, for this call."""
        self._said[storage_of(x)] = replicated, _torch.unwrapped(x)


def enter_tracked(
    leaves: list[Any], ownership: Ownership, where: Callable[[], RankGroup]
) -> bool:
    """Applies ENTER, in place, to replicated leaves that are differentiated outside.

    Their gradients are then means, as those of sharded leaves. Returns whether there
    are any. A leaf that only requires grad counts if an enclosing loss uses it.

    Args:
        where: returns the ranks of the mean.
    """
    plain = [(i, x) for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    tracked = [i for i, x in plain if _is_tracked(x) and laid_as(x) == WHOLE]
    for i in tracked:
        leaves[i] = apply_map(leaves[i], ENTER, where())
        ownership.declare(leaves[i], True)
    return bool(tracked)


def _is_tracked(x: Tensor) -> bool:
    """True if ``x`` is differentiated outside the call."""
    if _torch.differentiation_level(x):
        return True
    in_graph = x.grad_fn is not None or bool(frame().in_loss)
    return x.requires_grad and in_graph and torch.is_grad_enabled()


def storage_of(x: Tensor) -> int:
    """The storage key of a tensor, which may be differentiated, mapped or donated."""
    x = _torch.unwrapped(x)
    with _torch.as_plain_tensors():  # a donated step's own leaves are known as well
        return _torch.storage_key(x)


def assume(x: Any, axis: Axis, type: str) -> Any:
    """``x``, declared to be replicated or rank-local over an axis of ``shard``.

    The way past a refusal where you know more than the type check. Nothing is checked,
    and the derivative is the identity.

    Args:
        x: tensors, but no parts of sharded leaves (for these see ``pcast``).
        type: "I": it is equal on all ranks, so it may scale parameters, be laid out, or
            be differentiated as one value, whose gradient is the ranks' mean. "V": it
            is this rank's own, and so is its gradient.

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
