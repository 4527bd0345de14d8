"""Which plain tensors of a sharded call are replicated; ``assume``.

The gradient of a replicated tensor is the mean over the ranks, that of a rank-local one
is the rank's own. A tensor does not say itself which it is. The leaves of the first
argument, the state, have layouts, which do; leaves of other arguments may have one too,
and other tensors there are rank-local. `unit_calls`, `gradients` and optimizers ask by
the memory in which a tensor lies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.collective_ops import apply_map, declare_type
from fsfunc.comm.groups import RankGroup, get_group
from fsfunc.comm.linear_maps import AxisType
from fsfunc.comm.mesh import Axis
from fsfunc.comm.typed_maps import ENTER
from fsfunc.core.frames import frame
from fsfunc.sharded.placements import Own
from fsfunc.sharded.plain_leaves import WHOLE, placement_of
from fsfunc.tree.types import Leaf

_Tree = TypeVar("_Tree")


class Ownership:
    """Which plain tensors of a sharded call are replicated, and which rank-local.

    Args:
        state: the leaves of its first argument.
        leaves: those of all arguments.
    """

    def __init__(self, state: Sequence[Leaf], leaves: Sequence[Leaf]):
        self._state, self._leaves = state, leaves
        # By storage: whether it is replicated; and the tensor, so that the memory is no
        # other's while the entry lives.
        self._declared: dict[int, tuple[bool, Tensor]] = {}

    @cached_property
    def _replicated(self) -> set[int]:
        """The storages of replicated leaves; found when first asked for."""
        plain = [x for x in self._state if isinstance(x, Tensor)]
        of_state = {
            storage_of(x) for x in plain if not isinstance(placement_of(x), Own)
        }
        tensors = [x for x in self._leaves if isinstance(x, Tensor)]
        laid_whole = [x for x in tensors if placement_of(x) == WHOLE]
        return of_state.union(map(storage_of, laid_whole))

    def is_replicated(self, x: Tensor) -> bool:
        """Returns whether ``x`` lies in the memory of a replicated leaf."""
        # By memory, not by object: a detached leaf is a new object.
        key, declared = storage_of(x), self._declared
        return declared[key][0] if key in declared else key in self._replicated

    def declare(self, x: Tensor, replicated: bool) -> None:
        """Declares whether ``x`` is replicated, for this call."""
        self._declared[storage_of(x)] = replicated, _torch.unwrapped(x)


def enter_tracked(
    leaves: list[Leaf], ownership: Ownership, where: Callable[[], RankGroup]
) -> bool:
    """Applies ENTER, in place, to replicated leaves that are differentiated outside.

    Their gradients are then means, as those of sharded leaves. Returns whether there
    are any.

    Args:
        where: returns the ranks of the mean.
    """
    # The derivative is taken outside, where no gradient call of `shard` could average
    # it. That by a sharded leaf is reduced by the unit that gathers it.
    plain = [(i, x) for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    tracked = [i for i, x in plain if _is_tracked(x) and placement_of(x) == WHOLE]
    for i in tracked:
        leaves[i] = apply_map(leaves[i], ENTER, where())
        ownership.declare(leaves[i], True)
    return bool(tracked)


def _is_tracked(x: Tensor) -> bool:
    """Returns whether ``x`` is differentiated outside the call."""
    if _torch.differentiation_level(x):
        return True
    # A leaf that merely requires grad, as parameters of a module do, is differentiated
    # only if an enclosing loss uses it.
    in_graph = x.grad_fn is not None or bool(frame().in_loss)
    return x.requires_grad and in_graph and torch.is_grad_enabled()


def storage_of(x: Tensor) -> int:
    """Returns the storage key of a tensor, which may be differentiated or mapped."""
    x = _torch.unwrapped(x)
    # A leaf that a donated step has overwritten refuses most uses; not this one.
    with _torch.as_plain_tensors():
        return _torch.storage_key(x)


def assume(x: _Tree, axis: Axis, type: AxisType) -> _Tree:
    """Declares that ``x`` is replicated or rank-local over an axis of ``shard``.

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
    where = get_group(axis)

    def declare(leaf: Leaf) -> Leaf:
        if not isinstance(leaf, Tensor) or not where.loss_is_mean:
            return leaf
        # Known by its memory, which only a copy has for itself.
        leaf = leaf.clone()
        # Each `shard` over these axes asks its own runtime.
        for handler, runtime in frame().runtimes:
            if set(where.axis) <= set(getattr(handler, "axes", ())):
                runtime.ownership.declare(leaf, type == "I")
        declare_type(leaf, type)
        return leaf

    return tree.map(declare, x)
