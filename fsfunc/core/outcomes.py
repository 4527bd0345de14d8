"""A gradient call and its outcome, and the leaves that it differentiates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.core.losses import divided
from fsfunc.runtime.memory_spaces import space_of
from fsfunc.sharded.leaf import KEPT, FlatShard, Parts, Sharded, is_sharded
from fsfunc.sharded.packing import split_buffers

Argnums = int | str | Sequence[int | str]
BatchArgnums = tuple[int | str, ...]


def batch_arguments(given: Argnums | None) -> BatchArgnums | None:
    """``batch_argnums`` as a tuple of positions and keywords, or None."""
    if given is None or isinstance(given, int | str):
        return None if given is None else (given,)
    return tuple(given)


@dataclass(frozen=True)
class GradientCall:
    """A gradient call: interpretations pass it along, and change it.

    ``packed``: by id, the buffers whose gradients ``shard`` accumulates itself, outside
    autograd; ``parts``: their shards that the loss reads outside units, as autograd
    leaves. ``by``: replaces the forward and backward pass (``pipeline`` sets it).
    ``cotangent``: the ``grad_outputs`` of the loss, i.e. the loss scale; gradients are
    divided by it at the end. ``create_graph``: the outcome is
    differentiable, by the arguments and by what ``fn`` closes over. ``batch_argnums``:
    which arguments are cut into microbatches, if the call says so itself.
    """

    fn: Callable[..., Any]
    argnums: tuple[int, ...]
    has_aux: bool
    args: tuple[Any, ...]
    keywords: dict[str, Any]
    packed: Mapping[int, FlatShard] = field(default_factory=dict)
    parts: Parts | None = None
    by: Callable[[GradientCall], Outcome] | None = None
    cotangent: float = 1.0
    create_graph: bool = False
    batch_argnums: BatchArgnums | None = None

    @property
    def composable(self) -> bool:
        """True where the outcome must be made of operations with derivatives."""
        return self.create_graph or _torch.transforms_active()

    def seed(self, total: Tensor) -> Tensor:
        """The cotangent that the backward of the scalar ``total`` starts from."""
        return torch.full_like(total, self.cotangent)


@dataclass(frozen=True)
class Outcome:
    """The result of a gradient call while it is under way.

    Args:
        total: the loss, or the total of a :class:`Weighted` one.
        weight: its weight, if it has one. ``grads`` are those of ``total``; whoever
            made the outermost call divides by the weight once all has been summed.
        grads: one tree for each differentiated argument.
        aux: what the loss returned beside its value.
        count: of how many microbatches all this is the sum; whoever made the outermost
            call divides by it, so that a transform on the way need not.
        due: what is still to be done to the gradients, once all has been summed.
        own: the gradients that may be modified in place: ``grads`` itself, or None. If
            a transform replaced ``grads``, the two differ, and neither may be.
        scale: what ``grads`` are multiplied by, and are divided by in the end.
        shown: a function applied to the final gradients, or None.
    """

    total: Tensor
    weight: Tensor | None
    grads: tuple[Any, ...]
    aux: Any
    count: int = 1
    due: tuple[Callable[[Any], Any], ...] = ()
    own: tuple[Any, ...] | None = None
    scale: float = 1.0
    shown: Callable[[Any], Any] | None = None

    def mean(self) -> tuple[Tensor, tuple[Any, ...]]:
        """The value, and for each differentiated argument its gradients: the means.

        For a transform to read; what it returns is an ``Outcome``, of sums, which
        :meth:`with_mean` makes of other gradients.

        Of the gradients that a ``shard`` around keeps, to reduce them as they appear,
        there are none within it: leaves that raise for whoever reads them.
        """
        found = self.settled()
        return found.total, found.grads

    def but(self, grads: tuple[Any, ...]) -> Outcome:
        """This one with ``grads``, which lie in the memory of its own, or in new."""
        return replace(self, grads=grads, own=grads if self.owns else None)

    @property
    def owns(self) -> bool:
        """True if the memory of ``grads`` is not shared."""
        return self.own is self.grads

    def with_mean(self, grads: tuple[Any, ...]) -> Outcome:
        """This one with other gradients, of which ``grads`` are the means.

        So it weighs as much as before among microbatches and ranks around.

        Raises:
            RuntimeError: gradients that a transform kept of a call without data.
        """
        real = not isinstance(self.total, _torch.FakeTensor)
        if real and any(isinstance(g, _torch.FakeTensor) for g in tree.leaves(grads)):
            raise RuntimeError(
                "a transform gives gradients without data: it kept something of a call "
                "that was only recorded, before the first real one. What goes on from "
                "call to call belongs into a state, as of ff.Optimizer(init, update)"
            )
        by = self.scale * (self.count if self.weight is None else self.weight)
        if isinstance(by, Tensor) or by != 1:
            grads = tree.map(lambda g: g * by if isinstance(g, Tensor) else g, grads)
        return replace(self, grads=grads, due=(), own=None, shown=None)

    def settled(self, again: bool = True) -> Outcome:
        """The outcome, with what was due done to its gradients, divided and shown.

        Args:
            again: whether somebody goes on with this one: then its memory stays as it
                is.
        """
        outcome = replace(self, own=None) if again else self
        for finish in outcome.due:
            outcome = replace(outcome.but(finish(outcome.grads)), due=())
        shown, count, scale = outcome.shown, outcome.count, outcome.scale
        if outcome.weight is not None or not count == 1 == scale:
            # Sums over their weight, or over the number of microbatches.
            by = count if outcome.weight is None else outcome.weight
            grads = _divided(outcome.grads, by * scale, outcome.owns, wide=scale != 1)
            aux = divided(outcome.aux, count)
            outcome = Outcome(outcome.total / by, None, grads, aux)
        if shown is not None:
            outcome = replace(outcome, grads=shown(outcome.grads), shown=None)
        return outcome


def _divided(grads: Any, by: float | Tensor, own: bool, wide: bool) -> Any:
    """The gradients over ``by``; with ``wide`` those in float16 become float32."""
    buffers = split_buffers(grads)
    tensors = [g for g in buffers.tensors if isinstance(g, Tensor)]
    wide = wide and any(g.dtype == torch.float16 for g in tensors)
    if own and not wide and not isinstance(by, Tensor):
        if tensors:
            torch._foreach_div_(tensors, by)
        return grads
    return buffers.rebuild(
        [_over(g, by, wide) if isinstance(g, Tensor) else g for g in buffers.tensors]
    )


def _over(g: Tensor, by: float | Tensor, wide: bool) -> Tensor:
    """``g / by``, where what divides may be more than a half dtype holds or tells."""
    if g.dtype not in (torch.float16, torch.bfloat16) or not (
        wide or isinstance(by, Tensor)
    ):
        return _quotient(g, by.to(g.device, g.dtype) if isinstance(by, Tensor) else by)
    found = g.float() / (by.to(g.device).float() if isinstance(by, Tensor) else by)
    kept = found.dtype if wide and g.dtype == torch.float16 else g.dtype
    return space_of(g).put(found, kept)


def _quotient(g: Tensor, by: float | Tensor) -> Tensor:
    home = space_of(g)
    if not home.offloaded:
        return g / by
    return torch.div(g, by, out=home.empty_like(g, scratch=True))


class Leaves:
    """The differentiated leaves of a call: taken out, and put back.

    Args:
        packed: by id, the buffers whose gradients ``shard`` accumulates itself. A leaf
            of one becomes an autograd leaf, in ``parts``, if read outside a unit.
    """

    def __init__(
        self,
        args: Sequence[Any],
        argnums: Sequence[int],
        packed: Mapping[int, FlatShard] | None = None,
        parts: Parts | None = None,
    ):
        self.given, self.argnums = tuple(args), tuple(argnums)
        chosen = tuple(args[i] for i in argnums)
        self.leaves, self.treedef = tree.flatten(chosen, is_leaf=is_sharded)
        if not tree.are_shown(self.leaves):
            names = [f"argument {i}" for i in argnums]
            tree.shown(chosen, "value_and_grad", "is given", names, is_sharded)
        self.parts: Parts = {} if parts is None else parts
        self.kept: list[int] = []
        self.picked: list[int] = []
        # The picked leaves, of sharded ones this rank's part.
        self.tensors: list[Tensor] = []
        for i, x in enumerate(self.leaves):
            if is_sharded(x):
                if packed and id(x.packed) in packed:
                    self.kept.append(i)
                    continue
                x = x.local
            if isinstance(x, Tensor) and x.is_floating_point():
                self.picked.append(i)
                self.tensors.append(x)

    @property
    def device(self) -> torch.device | None:
        """That of the first of them."""
        if self.kept:
            return _torch.device_of(self.leaves[self.kept[0]].packed.flat)
        return self.tensors[0].device if self.tensors else None

    def args(self, values: Sequence[Tensor]) -> tuple[Any, ...]:
        """The arguments, with ``values`` for the picked leaves."""
        leaves = list(self.leaves)
        for i in self.kept:
            leaves[i] = leaves[i].tracked(self.parts)
        for i, value in zip(self.picked, values, strict=True):
            old = leaves[i]
            leaves[i] = old.with_local(value) if is_sharded(old) else value
        args = list(self.given)
        chosen = tree.unflatten(self.treedef, leaves)
        for i, value in zip(self.argnums, chosen, strict=True):
            args[i] = value
        return tuple(args)

    def every_part(self, args: Sequence[Any]) -> list[Tensor]:
        """The parts of all kept leaves, which may be used outside units."""
        chosen = tuple(args[i] for i in self.argnums)
        leaves = tree.leaves(chosen, is_leaf=is_sharded)
        return [leaves[i].local for i in self.kept]

    def grads(self, values: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """Trees of gradients; leaves of ``packed`` get placeholders that raise."""
        found: list[Any] = [None] * len(self.leaves)
        for i in self.kept:
            found[i] = Sharded(None, self.leaves[i].layout, spent=KEPT)
        for k, (i, g) in enumerate(zip(self.picked, values, strict=True)):
            old = self.leaves[i]
            g = torch.zeros_like(self.tensors[k]) if g is None else g
            found[i] = old.with_local(g) if is_sharded(old) else g
        return tree.unflatten(self.treedef, found)


def newborn(x: Tensor) -> Tensor:
    """``x`` behind an identity node that marks it as an input, not as captured."""
    return _Newborn.apply(x.requires_grad_())


def is_newborn(node: Any) -> bool:
    """True if an autograd node is that of a :func:`newborn` tensor."""
    return node.name() == "_NewbornBackward"


class _Newborn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        return g


def add_gradients(parts: Sequence[Tensor], found: Sequence[Tensor | None]) -> None:
    """Adds to the gradients of parts that were used outside units."""
    for part, g in zip(parts, found, strict=True):
        if g is not None:
            part.grad = g if part.grad is None else part.grad + g
