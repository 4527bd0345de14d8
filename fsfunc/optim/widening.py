"""Parameters of 16 bits that an optimizer sees in float32, and copies of them.

An update is often smaller than half the distance of two numbers of 16 bits, and is lost
where it is rounded to the nearest. So the optimizer within is given wide parameters:
`master_weights` keeps them, `stochastic_rounding` rounds them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.core.frames import frame, inside
from fsfunc.optim.in_place import fused
from fsfunc.optim.leaves import Tree, along, chosen, map_flat, trainable
from fsfunc.optim.matching import Decay, Matched
from fsfunc.optim.optimizer import Optimizer, Run, State, apply_updates, described
from fsfunc.sharded.donated import Donation
from fsfunc.sharded.leaf import is_sharded

__all__ = ["MasterState", "Narrow", "Widened", "master_weights"]

_NARROW = (torch.float16, torch.bfloat16)


class Narrow:
    """Which leaves of a tree are of 16 bits: asked before they are written over."""

    def __init__(self, params: Tree):
        self.params = params
        leaves, self.treedef = tree.flatten(params, is_sharded)
        self.mask = [trainable(x) and x.dtype in _NARROW for x in leaves]

    def only(self, values: Tree) -> Tree:
        """``values`` where the parameters have 16 bits; None at the place of others."""
        return chosen(self.treedef, self.mask, values)

    def merged(self, values: Tree, narrow: Tree) -> Tree:
        """``narrow`` where the parameters have 16 bits, ``values`` elsewhere."""
        return chosen(self.treedef, self.mask, narrow, values)

    def where(self, given: Tree, values: Tree) -> Tree:
        """``values``, but None where nothing is ``given``."""
        there = [x is not None for x in along(self.treedef, given, "optimizer state")]
        return chosen(self.treedef, there, values)

    def floats(self) -> Tree:
        """Copies in float32 where the parameters have 16 bits; None elsewhere."""
        with torch.no_grad():
            low = self.only(self.params)
            return map_flat(lambda ts: [t.float() for t in ts], low)


@dataclass(frozen=True, eq=False)
class Widened:
    """The functions of an optimizer around one that sees its parameters in float32."""

    optimizer: Optimizer

    def functions(self) -> Optimizer:
        made = Optimizer.of(self, elementwise=self.optimizer.elementwise)
        return made._replace(take=None) if self.optimizer.take is None else made

    def init(self, params: Tree) -> Any:
        raise NotImplementedError

    def wide(self, state: Any, low: Narrow) -> Tree:
        """The parameters as the optimizer within sees them."""
        raise NotImplementedError

    def rounded(self, state: Any, wide: Tree) -> Tree:
        """Parameters of 16 bits as they shall be, or as copying rounds them."""
        return wide

    def after(self, state: Any, wide: Tree, inner: State) -> Any:
        raise NotImplementedError

    def update(self, grads: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        if params is None:
            raise ValueError(
                "an update of parameters of 16 bits rounds them, so it needs them: "
                "call update(grads, state, params)"
            )
        low = Narrow(params)
        wide = self.wide(state, low)
        updates, inner = self.optimizer.update(grads, state.inner, wide)
        with inside(replace(frame(), donated=None)):
            new = low.only(apply_updates(wide, updates))
        change = _changes(low.only(params), self.rounded(state, new))
        moved = low.merged(updates, low.where(updates, change))
        return moved, self.after(state, new, inner)

    def prepare(
        self, grads: Tree, state: Any, params: Tree
    ) -> Callable[[], tuple[Tree, Any]]:
        low = Narrow(params)
        wide = self.wide(state, low)
        mine = low.only(params)
        kept = Matched.of(mine, low.only(wide))  # which checks that they fit
        if Matched.of(params, grads).differentiated or kept.differentiated:
            updates, after = self.update(grads, state, params)
            return lambda: (apply_updates(params, updates), after)
        with inside(replace(frame(), donated=self.donation(low.only(wide)))):
            commit = self.optimizer.prepare(grads, state.inner, wide)

        def finish() -> tuple[Tree, Any]:
            new, inner = commit()
            copies = low.only(new)
            matched = Matched.of(mine, self.rounded(state, copies))
            decays = [0.0] * len(matched.active)
            (written,) = fused(matched, _copy, decays, cast=False)()
            return low.merged(new, written), self.after(state, copies, inner)

        return finish

    def donation(self, wide: Tree) -> Donation | None:
        return frame().donated

    def take(self, run: Run, state: Any) -> tuple[Any, Tree, Optimizer]:
        value, grads, inner = self.optimizer.gradients(run, state.inner)
        return value, grads, replace(self, optimizer=inner).functions()


def _copy(params: Any, sources: Any, *, weight_decay: float) -> None:
    torch._foreach_copy_(params, sources)  # which rounds; there is no decay in it


def _changes(params: Tree, narrow: Tree) -> Tree:
    """The difference of ``narrow`` and the parameters, in float32."""
    matched = Matched.of(params, narrow)
    decays = [0.0] * len(matched.active)
    return matched.composed(_change, decays)[0]


def _change(p: Tensor, n: Tensor, decay: Decay) -> list[Tensor]:
    return [n.to(p.dtype).float() - p.float()]


class MasterState(NamedTuple):
    """The parameters in float32, and what the optimizer within keeps.

    ``master`` is a tree like the parameters, in the same layout, with None for leaves
    that are not of 16 bits: these are their own masters.
    """

    master: Any
    inner: State


@described
def master_weights(optimizer: Optimizer) -> Optimizer:
    """``optimizer`` on float32 copies of float16 and bfloat16 parameters.

    The copies lie in its state, as the parameters lie, and it alone updates them; the
    parameters are these, rounded to the nearest. Leaves of other dtypes it updates as
    they are.

    Returns:
        the optimizer; its state is a `MasterState`. Gradients are of the parameters'
        dtype, or of any other.

    Raises:
        TreeMismatch: the copies do not fit the parameters; names the path.

    Cost: nothing is sent. 4 bytes a parameter of 16 bits on the rank: with
    `sharded_adam` 14 for parameter, copy and moments, and one pass that reads 4 and
    writes 2.

    Source: Micikevicius et al., Mixed Precision Training, 2018, section 3.1.

    >>> import torch
    >>> from fsfunc.optim.descent import sgd
    >>> optimizer = master_weights(sgd(2.0**-10))
    >>> w, g = torch.ones(2, dtype=torch.bfloat16), torch.tensor([1.0, -1.0])
    >>> state = optimizer.init(w)
    >>> for _ in range(8):
    ...     w, state = optimizer.apply(g, state, w)
    >>> w, state.master
    (tensor([0.9922, 1.0078], dtype=torch.bfloat16), tensor([0.9922, 1.0078]))
    """
    return _Masters(optimizer).functions()


class _Masters(Widened):
    def init(self, params: Tree) -> MasterState:
        low = Narrow(params)
        master = low.floats()
        return MasterState(master, self.optimizer.init(low.merged(params, master)))

    def wide(self, state: MasterState, low: Narrow) -> Tree:
        return low.merged(low.params, state.master)

    def after(self, state: MasterState, wide: Tree, inner: State) -> MasterState:
        return MasterState(wide, inner)
