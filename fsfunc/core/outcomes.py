"""``GradientCall`` and ``Outcome``, which interpretations pass along; ``Leaves``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.core.casts import differentiable
from fsfunc.core.frames import Replaced
from fsfunc.core.losses import divided
from fsfunc.runtime.memory_spaces import space_of
from fsfunc.sharded.leaf import FlatShard, Parts, PendingGradient, is_sharded
from fsfunc.sharded.packing import split_buffers

Argnums = int | str | Sequence[int | str]
BatchArgnums = tuple[int | str, ...]


def batch_arguments(given: Argnums | None) -> BatchArgnums | None:
    """``batch_argnums`` as a tuple of positions and keywords, or None."""
    if given is None or isinstance(given, int | str):
        return None if given is None else (given,)
    return tuple(given)


@dataclass(frozen=True)
class GradientCall(Replaced):
    """A call of ``value_and_grad``, as interpretations pass it along.

    Args:
        fn, argnums, has_aux, args, keywords: what is called, and how; ``argnums`` is
            empty where the loss is only evaluated, by ``ff.value``.
        packed: by id, the buffers whose gradients ``shard`` sums itself, outside
            autograd; ``parts``: those of their parts that the loss reads outside units,
            as autograd leaves.
        runner: runs the forward and backward pass, if not this rank by itself
            (``pipeline`` sets it).
        cotangent: the ``grad_outputs`` of the loss, that is the loss scale; gradients
            are divided by it at the end.
        create_graph: whether the outcome is differentiable, with respect to the
            arguments and to what ``fn`` closes over.
        batch_argnums: the arguments to cut into microbatches, if the call names them.
        into: the gradients of earlier microbatches, to which ``shard`` may add, in
            place, those of this one.
    """

    fn: Callable[..., Any]
    argnums: tuple[int, ...]
    has_aux: bool
    args: tuple[Any, ...]
    keywords: dict[str, Any]
    packed: Mapping[int, FlatShard] = field(default_factory=dict)
    parts: Parts | None = None
    runner: Callable[[GradientCall], Outcome] | None = None
    cotangent: float = 1.0
    create_graph: bool = False
    batch_argnums: BatchArgnums | None = None
    into: tuple[Any, ...] | None = None

    @property
    def composable(self) -> bool:
        """True if the outcome must be computed by differentiable operations."""
        return self.create_graph or _torch.transforms_active()

    def seed(self, total: Tensor) -> Tensor:
        """The cotangent that the backward of the scalar ``total`` starts from."""
        return torch.full_like(total, self.cotangent)


@dataclass(frozen=True)
class Outcome(Replaced):
    """The result of a gradient call on its way out, as sums: `settled` divides them.

    Args:
        total: the loss, or the total of a :class:`Weighted` one.
        weight: the weight of a :class:`Weighted` loss.
        grads: the gradients of ``total``, a tree for each differentiated argument.
        aux: what the loss returned beside its value.
        count: the number of microbatches of which all this is the sum.
        due: functions to apply to the gradients when all microbatches are summed.
        own: ``grads``, if they may be written in place. A transform that replaces
            ``grads`` leaves this behind, and then nothing is written.
        scale: the loss scale that ``grads`` are multiplied by.
        shown: a function to apply to the final gradients, or None.
        summed: whether ``grads`` are sums with those that the call was to add to.
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
    summed: bool = False

    def mean(self) -> tuple[Tensor, tuple[Any, ...]]:
        """The mean value, and the mean gradients for each differentiated argument.

        A transform returns an ``Outcome``, of sums: :meth:`with_mean` makes it.

        Inside ``shard``, gradients that it reduces in the backward are not available:
        their leaves raise when they are read.
        """
        found = self.settled()
        grads = found.grads
        if grads is self.own:  # others will write there
            buffers = split_buffers(grads)
            copies = [
                x.clone() if isinstance(x, Tensor) else x for x in buffers.tensors
            ]
            grads = buffers.rebuild(copies)
        return found.total, grads

    def with_grads(self, grads: tuple[Any, ...]) -> Outcome:
        """The outcome with other gradients, in the memory of the old ones or in new."""
        return self.replace(grads=grads, own=grads if self.owns else None)

    @property
    def owns(self) -> bool:
        """True if ``grads`` may be written in place."""
        return self.own is self.grads

    def with_mean(self, grads: tuple[Any, ...]) -> Outcome:
        """The outcome with other gradients, whose means are ``grads``.

        They are multiplied by its count or weight, so that enclosing transforms weigh
        them as before.

        Raises:
            RuntimeError: fake gradients, which a transform kept of a recorded call.
        """
        real = not isinstance(self.total, _torch.FakeTensor)
        if real and any(isinstance(g, _torch.FakeTensor) for g in tree.leaves(grads)):
            raise RuntimeError(
                "a transform gives gradients without data: it kept something of a call "
                "that was only recorded, before the first real one. Keep what lasts "
                "between calls in a state, as that of ff.Optimizer(init, update)"
            )
        by = self.scale * (self.count if self.weight is None else self.weight)
        if isinstance(by, Tensor) or by != 1:
            # A weight is float32 at least: a scalar in half precision stays what it is.
            of = lambda g: (g * by).to(g.dtype) if isinstance(g, Tensor) else g  # noqa: E731
            grads = tree.map(of, grads)
        return self.replace(grads=grads, due=(), own=None, shown=None)

    def settled(self, again: bool = True) -> Outcome:
        """The final outcome: ``due`` functions applied, and sums divided into means.

        Args:
            again: whether this outcome is used again: then nothing is written in place.
        """
        outcome = self.replace(own=None) if again else self
        for finish in outcome.due:
            outcome = outcome.with_grads(finish(outcome.grads)).replace(due=())
        shown, count, scale = outcome.shown, outcome.count, outcome.scale
        if outcome.weight is not None or not count == 1 == scale:
            # Sums over their weight, or over the number of microbatches.
            by = count if outcome.weight is None else outcome.weight
            grads = _divided(outcome.grads, by * scale, outcome.owns, wide=scale != 1)
            aux = divided(outcome.aux, count)
            outcome = Outcome(_over(outcome.total, by, False), None, grads, aux)
        if shown is not None:
            outcome = outcome.replace(grads=shown(outcome.grads), shown=None)
        return outcome


def _divided(grads: Any, by: float | Tensor, own: bool, wide: bool) -> Any:
    """The gradients divided by ``by``; with ``wide``, float16 becomes float32."""
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
    """``g / by``, divided in float32 where a half dtype may not hold ``by``."""
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
    """The differentiated leaves of a call's arguments, to extract and to replace.

    Args:
        packed: by id, the buffers whose gradients ``shard`` sums itself. A leaf of one
            becomes an autograd leaf, in ``parts``, when it is read outside a unit.

    Attributes:
        tensors: the differentiated tensors, this rank's part of a sharded leaf;
            ``picked``: their positions.
        kept: the positions of leaves of ``packed``.
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
        self.tensors: list[Tensor] = []
        for i, x in enumerate(self.leaves):
            if is_sharded(x):
                if packed and id(x.packed) in packed:
                    self.kept.append(i)
                    continue
                x = x.local
            if isinstance(x, Tensor) and differentiable(x):
                self.picked.append(i)
                self.tensors.append(x)

    @property
    def device(self) -> torch.device | None:
        """The device that computes with the first leaf, which may be offloaded."""
        if self.kept:
            x = self.leaves[self.kept[0]].packed.flat
        elif self.tensors:
            x = self.tensors[0]
        else:
            return None
        return _torch.device_of(space_of(x).on_device(x))

    def args(self, values: Sequence[Tensor]) -> tuple[Any, ...]:
        """The arguments, with ``values`` in place of ``tensors``."""
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
        """The autograd leaves of all ``kept`` leaves in ``args``."""
        chosen = tuple(args[i] for i in self.argnums)
        leaves = tree.leaves(chosen, is_leaf=is_sharded)
        return [leaves[i].local for i in self.kept]

    def grads(self, values: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """The trees of gradients; of ``packed`` leaves they are pending."""
        found: list[Any] = [None] * len(self.leaves)
        for i in self.kept:
            found[i] = PendingGradient(self.leaves[i].layout)
        for k, (i, g) in enumerate(zip(self.picked, values, strict=True)):
            old = self.leaves[i]
            g = torch.zeros_like(self.tensors[k]) if g is None else g
            found[i] = old.with_local(g) if is_sharded(old) else g
        return tree.unflatten(self.treedef, found)


def newborn(x: Tensor) -> Tensor:
    """``x`` behind an identity node, by which it is known as an input of a loss."""
    return _Newborn.apply(x.requires_grad_())


def is_newborn(node: Any) -> bool:
    """True if an autograd node is one of :func:`newborn`."""
    return node.name() == "_NewbornBackward"


class _Newborn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        return g


def add_gradients(parts: Sequence[Tensor], found: Sequence[Tensor | None]) -> None:
    """Adds to ``.grad`` of parts that were read outside units."""
    for part, g in zip(parts, found, strict=True):
        if g is not None:
            part.grad = g if part.grad is None else part.grad + g
