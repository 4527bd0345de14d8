"""An optimizer around one that sees parameters of 16 bits in float32.

An update is often smaller than half the distance of two numbers of 16 bits, and is lost
where it is rounded to the nearest. So the optimizer within is given wide parameters;
what is left of these afterwards is for `masters` and `rounding` to say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.core.frames import frame, inside
from fsfunc.optim.in_place import fused
from fsfunc.optim.leaves import Tree, along, map_flat, trainable
from fsfunc.optim.matching import Decay, Matched
from fsfunc.optim.optimizer import Optimizer, Run, State, apply_updates
from fsfunc.sharded.donated import Donation
from fsfunc.sharded.leaf import is_sharded

__all__ = ["Narrow", "Widened"]

_NARROW = (torch.float16, torch.bfloat16)


class Narrow:
    """Which leaves of a tree are of 16 bits: asked before they are written over."""

    def __init__(self, params: Tree):
        self.params = params
        leaves, self.treedef = tree.flatten(params, is_sharded)
        self.mask = [trainable(x) and x.dtype in _NARROW for x in leaves]

    def only(self, values: Tree) -> Tree:
        """``values`` where the parameters have 16 bits; None at the place of others."""
        pairs = zip(self.mask, self._along(values), strict=True)
        return tree.unflatten(self.treedef, [x if low else None for low, x in pairs])

    def merged(self, values: Tree, narrow: Tree) -> Tree:
        """``narrow`` where the parameters have 16 bits, ``values`` elsewhere."""
        rows = zip(self.mask, *map(self._along, (values, narrow)), strict=True)
        return tree.unflatten(self.treedef, [n if low else x for low, x, n in rows])

    def where(self, given: Tree, values: Tree) -> Tree:
        """``values``, but None where nothing is ``given``."""
        pairs = zip(self._along(given), self._along(values), strict=True)
        return tree.unflatten(
            self.treedef, [None if given is None else x for given, x in pairs]
        )

    def floats(self) -> Tree:
        """Copies in float32 where the parameters have 16 bits; None elsewhere."""
        with torch.no_grad():
            low = self.only(self.params)
            return map_flat(lambda ts: [t.float() for t in ts], low)

    def _along(self, values: Tree) -> list[Any]:
        return along(self.params, self.treedef, values, "optimizer state")


@dataclass(frozen=True, eq=False)
class Widened:
    """The functions of an optimizer around one that sees its parameters in float32."""

    optimizer: Optimizer

    def functions(self) -> Optimizer:
        alone = self.optimizer.take is None
        return Optimizer(
            self.init,
            self.update,
            prepare=self.prepare,
            take=None if alone else self.take,
            elementwise=self.optimizer.elementwise,
        )

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
        # Only where the optimizer within has one.
        assert self.optimizer.take is not None, "nothing to hand the gradients on to"
        value, grads, inner = self.optimizer.take(run, state.inner)
        return value, grads, replace(self, optimizer=inner).functions()


def _copy(params: Any, sources: Any, *, weight_decay: float) -> None:
    torch._foreach_copy_(params, sources)  # which rounds; there is no decay in it


def _changes(params: Tree, narrow: Tree) -> Tree:
    """What turns parameters into ``narrow``, in float32."""
    matched = Matched.of(params, narrow)
    decays = [0.0] * len(matched.active)
    return matched.composed(_change, decays)[0]


def _change(p: Tensor, n: Tensor, decay: Decay) -> list[Tensor]:
    return [n.to(p.dtype).float() - p.float()]
