"""``GradientCall`` and ``Outcome``, which interpretations pass along; ``Leaves``.

A call of a function of ``value_and_grad`` becomes a `GradientCall`. It goes inward
through the interpretations, outermost first, to `autodiff.differentiate`, which runs
one forward and one backward pass. What comes back outward is an `Outcome`::

    GradientCall -> accumulate -> shard -> differentiate
    (value, grads) <- finalize <- accumulate <- shard <- Outcome

Outcomes hold sums, over microbatches and by weight, until `Outcome.finalize` divides
them, once: so microbatches of any size are averaged exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.core.casts import differentiable
from fsfunc.core.frames import Replaced
from fsfunc.core.losses import divide_aux
from fsfunc.runtime.memory_spaces import space_of
from fsfunc.sharded.leaf import FlatShard, Parts, PendingGradient, is_sharded
from fsfunc.sharded.packing import as_packed_tree
from fsfunc.tree.types import Args, Keywords, Leaf, PyTree

Argnums = int | str | Sequence[int | str]
BatchArgnums = tuple[int | str, ...]


def batch_arguments(batch_argnums: Argnums | None) -> BatchArgnums | None:
    """Returns ``batch_argnums`` as a tuple of positions and keywords, or None."""
    if batch_argnums is None or isinstance(batch_argnums, int | str):
        return None if batch_argnums is None else (batch_argnums,)
    return tuple(batch_argnums)


@dataclass(frozen=True)
class GradientCall(Replaced):
    """A call of ``value_and_grad``, as interpretations pass it along.

    Args:
        fn: the loss.
        argnums: the positions of the differentiated arguments; empty where the loss is
            only evaluated, by ``ff.value``.
        has_aux: whether the loss returns ``(loss, aux)``.
        args, keywords: the arguments of the loss.
        packed: by id, the buffers whose gradients ``shard`` sums itself, outside
            autograd.
        parts: receives, as autograd leaves, the parts of ``packed`` buffers that the
            loss reads outside units.
        runner: runs the forward and backward pass, if not this rank by itself
            (``pipeline`` sets it).
        cotangent: the ``grad_outputs`` of the loss, that is the loss scale; gradients
            are divided by it at the end.
        create_graph: whether the outcome is differentiable, with respect to the
            arguments and to what ``fn`` closes over.
        batch_argnums: the arguments to cut into microbatches, if the call names them.
        earlier_grads: the gradients of earlier microbatches, to which ``shard`` may
            add, in place, those of this one.
    """

    fn: Callable[..., Any]
    argnums: tuple[int, ...]
    has_aux: bool
    args: Args
    keywords: Keywords
    packed: Mapping[int, FlatShard] = field(default_factory=dict)
    parts: Parts | None = None
    runner: Callable[[GradientCall], Outcome] | None = None
    cotangent: float = 1.0
    create_graph: bool = False
    batch_argnums: BatchArgnums | None = None
    earlier_grads: tuple[PyTree, ...] | None = None

    @property
    def composable(self) -> bool:
        """Whether the outcome must be computed by differentiable operations."""
        return self.create_graph or _torch.transforms_active()

    def initial_cotangent(self, total: Tensor) -> Tensor:
        """Returns the cotangent from which the backward of ``total`` starts."""
        return torch.full_like(total, self.cotangent)


@dataclass(frozen=True)
class Outcome(Replaced):
    """The result of a gradient call on its way out, as sums: `finalize` divides them.

    Args:
        total: the loss, or the total of a :class:`Weighted` one.
        weight: the weight of a :class:`Weighted` loss.
        grads: the gradients of ``total``, a tree for each differentiated argument.
        aux: what the loss returned beside its value.
        count: the number of microbatches of which all this is the sum.
        after_sum: functions to apply to the gradients, in this order, when all
            microbatches are summed.
        writable: ``grads``, if they may be written in place. A transform of the user's
            that replaces ``grads`` alone leaves this behind; then the two differ, and
            nothing is written.
        scale: the loss scale that ``grads`` are multiplied by.
        after_mean: a function to apply to the mean gradients, or None.
        includes_earlier: whether ``grads`` include the ``earlier_grads`` of the call.
    """

    total: Tensor
    weight: Tensor | None
    grads: tuple[PyTree, ...]
    aux: PyTree
    count: int = 1
    after_sum: tuple[Callable[[tuple[PyTree, ...]], tuple[PyTree, ...]], ...] = ()
    writable: tuple[PyTree, ...] | None = None
    scale: float = 1.0
    after_mean: Callable[[tuple[PyTree, ...]], tuple[PyTree, ...]] | None = None
    includes_earlier: bool = False

    def mean(self) -> tuple[Tensor, tuple[PyTree, ...]]:
        """Returns the mean value, and the mean gradients of each argument.

        A transform returns an ``Outcome``, of sums: :meth:`with_mean` makes it.

        Inside ``shard``, gradients that it reduces in the backward are not available:
        their leaves raise when they are read.
        """
        final = self.finalize()
        grads = final.grads
        # Of one microbatch the sums are the means: the caller may keep these, and the
        # next microbatch, or a transform around, would be added to them in place.
        if grads is self.writable:
            buffers = as_packed_tree(grads)
            copies = [
                x.clone() if isinstance(x, Tensor) else x for x in buffers.tensors
            ]
            grads = buffers.rebuild(copies)
        return final.total, grads

    def with_grads(self, grads: tuple[PyTree, ...]) -> Outcome:
        """Returns the outcome with other gradients, in the old ones' memory or in new.

        They may be written in place where the old ones might.
        """
        return self.replace(grads=grads, writable=grads if self.is_writable else None)

    @property
    def is_writable(self) -> bool:
        """Whether ``grads`` may be written in place."""
        return self.writable is self.grads

    def with_mean(self, grads: tuple[PyTree, ...]) -> Outcome:
        """Returns the outcome with other gradients, whose means are ``grads``.

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
        # `finalize` divides by the same.
        divisor = self.scale * (self.count if self.weight is None else self.weight)
        if isinstance(divisor, Tensor) or divisor != 1:
            # A weight is float32 at least: without the cast, torch would promote a
            # gradient of no dims in half precision.
            scaled = lambda g: (g * divisor).to(g.dtype) if isinstance(g, Tensor) else g  # noqa: E731
            grads = tree.map(scaled, grads)
        return self.replace(grads=grads, after_sum=(), writable=None, after_mean=None)

    def finalize(self, is_reused: bool = True) -> Outcome:
        """Returns the final outcome: sums are finished, and divided into means.

        Args:
            is_reused: whether this outcome is used again: then nothing of it is
                written in place.
        """
        outcome = self.replace(writable=None) if is_reused else self
        # By `with_grads`: finished sums may be divided in place where these might.
        for finish in outcome.after_sum:
            outcome = outcome.with_grads(finish(outcome.grads)).replace(after_sum=())
        after_mean, count, scale = outcome.after_mean, outcome.count, outcome.scale
        if outcome.weight is not None or not count == 1 == scale:
            # Sums over their weight, or over the number of microbatches. The loss
            # itself was never scaled, the gradients were.
            divisor = count if outcome.weight is None else outcome.weight
            grads = _divide_gradients(
                outcome.grads, divisor * scale, outcome.is_writable, wide=scale != 1
            )
            aux = divide_aux(outcome.aux, count)
            total = _divide(outcome.total, divisor, False)
            outcome = Outcome(total, None, grads, aux)
        # By the local name: the outcome of a division has none.
        if after_mean is not None:
            outcome = outcome.replace(grads=after_mean(outcome.grads), after_mean=None)
        return outcome


def _divide_gradients(
    grads: tuple[PyTree, ...], divisor: float | Tensor, in_place: bool, wide: bool
) -> tuple[PyTree, ...]:
    """Divides gradients; with ``wide``, those in float16 become float32.

    A scaled gradient in float16 is unscaled in float32, as small numbers that the scale
    has saved would be lost in float16 again.
    """
    buffers = as_packed_tree(grads)
    tensors = [g for g in buffers.tensors if isinstance(g, Tensor)]
    wide = wide and any(g.dtype == torch.float16 for g in tensors)
    # One kernel for all, in their own dtypes. A half dtype holds a number of
    # microbatches, but maybe not a weight, such as a number of tokens: see `_divide`.
    if in_place and not wide and not isinstance(divisor, Tensor):
        if tensors:  # torch refuses an empty list
            torch._foreach_div_(tensors, divisor)
        return grads
    return buffers.rebuild(
        [
            _divide(g, divisor, wide) if isinstance(g, Tensor) else g
            for g in buffers.tensors
        ]
    )


def _divide(g: Tensor, divisor: float | Tensor, wide: bool) -> Tensor:
    """Returns ``g / divisor``.

    It is divided in float32 where a half dtype may not hold the divisor, such as a
    number of tokens; with ``wide``, a quotient of float16 stays in float32.
    """
    if g.dtype not in (torch.float16, torch.bfloat16) or not (
        wide or isinstance(divisor, Tensor)
    ):
        if isinstance(divisor, Tensor):
            divisor = divisor.to(g.device, g.dtype)
        return _divide_in_space(g, divisor)
    if isinstance(divisor, Tensor):
        divisor = divisor.to(g.device).float()
    quotient = g.float() / divisor
    dtype = quotient.dtype if wide and g.dtype == torch.float16 else g.dtype
    return space_of(g).put(quotient, dtype)


def _divide_in_space(g: Tensor, divisor: float | Tensor) -> Tensor:
    """Divides, on the host where ``g`` is offloaded, into memory of its space."""
    space = space_of(g)
    if not space.offloaded:
        return g / divisor
    return torch.div(g, divisor, out=space.empty_like(g, scratch=True))


class Leaves:
    """The differentiated leaves of a call's arguments, to extract and to replace.

    Args:
        args: the arguments of the loss.
        argnums: the positions of those that are differentiated.
        packed: by id, the buffers whose gradients ``shard`` sums itself.
        parts: receives the autograd leaf that a leaf of ``packed`` becomes when it is
            read outside a unit.

    Attributes:
        leaves: all leaves of the differentiated arguments.
        tensors: the tensors to differentiate, which are this rank's part of a sharded
            leaf.
        tensor_positions: the position in ``leaves`` of each of ``tensors``.
        packed_positions: the positions of leaves of ``packed``, whose gradients are not
            autograd's to return.
    """

    def __init__(
        self,
        args: Sequence[PyTree],
        argnums: Sequence[int],
        packed: Mapping[int, FlatShard] | None = None,
        parts: Parts | None = None,
    ):
        self.original_args: Args = tuple(args)
        self.argnums: tuple[int, ...] = tuple(argnums)
        chosen = tuple(args[i] for i in argnums)
        self.leaves: list[Leaf]
        self.treedef: tree.TreeDef
        self.leaves, self.treedef = tree.flatten(chosen, is_leaf=is_sharded)
        # An object that is no registered node may hide tensors, whose gradients would
        # be lost: then `shown` raises. The first question is asked by class, and cheap.
        if not tree.are_shown(self.leaves):
            names = [f"argument {i}" for i in argnums]
            tree.shown(chosen, "value_and_grad", "is given", names, is_sharded)
        self.parts: Parts = {} if parts is None else parts
        self.packed_positions: list[int] = []
        self.tensor_positions: list[int] = []
        self.tensors: list[Tensor] = []
        for i, x in enumerate(self.leaves):
            if is_sharded(x):
                # Autograd is not to differentiate by these: the backward of each unit
                # hands their gradients to `shard`.
                if packed and id(x.packed) in packed:
                    self.packed_positions.append(i)
                    continue
                x = x.local
            if isinstance(x, Tensor) and differentiable(x):
                self.tensor_positions.append(i)
                self.tensors.append(x)

    @property
    def device(self) -> torch.device | None:
        """The device that computes with the first leaf, which may be offloaded."""
        if self.packed_positions:
            x = self.leaves[self.packed_positions[0]].packed.flat
        elif self.tensors:
            x = self.tensors[0]
        else:
            return None
        return _torch.device_of(space_of(x).on_device(x))

    def args(self, values: Sequence[Tensor]) -> tuple[PyTree, ...]:
        """Returns the arguments, with ``values`` in place of ``tensors``."""
        leaves = list(self.leaves)
        for i in self.packed_positions:
            leaves[i] = leaves[i].tracked(self.parts)
        for i, value in zip(self.tensor_positions, values, strict=True):
            old = leaves[i]
            leaves[i] = old.with_local(value) if is_sharded(old) else value
        args = list(self.original_args)
        chosen = tree.unflatten(self.treedef, leaves)
        for i, value in zip(self.argnums, chosen, strict=True):
            args[i] = value
        return tuple(args)

    def every_part(self, args: Sequence[PyTree]) -> list[Tensor]:
        """Returns the autograd leaves of all leaves of ``packed`` in ``args``."""
        chosen = tuple(args[i] for i in self.argnums)
        leaves = tree.leaves(chosen, is_leaf=is_sharded)
        return [leaves[i].local for i in self.packed_positions]

    def grads(self, values: Sequence[Tensor | None]) -> tuple[PyTree, ...]:
        """Returns the trees of gradients; those of ``packed`` leaves are pending.

        Args:
            values: the gradients of ``tensors``; None is a zero.
        """
        gradients: list[Any] = [None] * len(self.leaves)
        for i in self.packed_positions:
            gradients[i] = PendingGradient(self.leaves[i].layout)
        for k, (i, g) in enumerate(zip(self.tensor_positions, values, strict=True)):
            old = self.leaves[i]
            g = torch.zeros_like(self.tensors[k]) if g is None else g
            gradients[i] = old.with_local(g) if is_sharded(old) else g
        return tree.unflatten(self.treedef, gradients)


def mark_as_input(x: Tensor) -> Tensor:
    """Returns ``x`` behind an identity node that marks it as an input of a loss.

    A unit's check for captured tensors walks the autograd graph, and stops there: what
    lies behind belongs to the gradient call around.
    """
    return _InputOfLoss.apply(x.requires_grad_())


def is_marked_input(node: torch.autograd.graph.Node) -> bool:
    """Returns whether an autograd node is one of :func:`mark_as_input`."""
    return node.name() == "_InputOfLossBackward"


class _InputOfLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g


def add_gradients(parts: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Adds gradients to ``.grad`` of parts that were read outside units."""
    for part, g in zip(parts, grads, strict=True):
        if g is not None:
            # Not in place: the gradient may be a tensor that autograd hands out twice.
            part.grad = g if part.grad is None else part.grad + g
