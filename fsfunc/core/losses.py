"""The outputs of a loss, and how those of microbatches and ranks are combined.

Losses are averaged, or :class:`Weighted`. Of auxiliary outputs, floating scalars are
averaged and those in a :class:`Reduced` combined in its way; other tensors are
concatenated along dim 0 over microbatches, and are each rank's own; of the rest,
sharded leaves too, the last one is returned, and integers and Python numbers must be
the same in all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.linear_maps import LinearMap
from fsfunc.comm.typed_maps import TOTAL
from fsfunc.core.frames import frame
from fsfunc.runtime.scopes import refuse_in_graph
from fsfunc.sharded.leaf import is_sharded

Tree = TypeVar("Tree")


class Weighted(NamedTuple):
    """A loss as a sum and its weight: the value is sum of totals / sum of weights.

    Exact for batches of uneven size over ranks and microbatches: each returns the sum
    over its samples and their number (or its tokens and their number).

    Args:
        total: scalar, differentiated.
        weight: scalar tensor or number, not differentiated.
    """

    total: Tensor
    weight: Tensor | float


Loss: TypeAlias = Tensor | Weighted
"""What a loss function returns: a floating scalar, or a sum with its weight."""


class LossParts(NamedTuple):
    """What a loss returned: its total, its weight if it has one, and what is beside."""

    total: Tensor
    weight: Tensor | None
    aux: Any


def loss_parts(out: Any, has_aux: bool) -> LossParts:
    """The parts of what a loss returned.

    Raises:
        TypeError, ValueError: it returned no floating scalar tensor.
    """
    aux = None
    if has_aux:
        if not isinstance(out, tuple) or len(out) != 2 or isinstance(out, Weighted):
            raise TypeError("has_aux=True: the loss must return (loss, aux)")
        out, aux = out
    weight = None
    if isinstance(out, Weighted):
        out, weight = out
        # At least fp32: a count may be one that a half dtype cannot represent.
        wide = torch.promote_types(out.dtype, torch.float32)
        if not isinstance(weight, Tensor):
            weight = torch.as_tensor(weight, dtype=wide, device=out.device)
        weight = weight.detach().to(wide)
    if not isinstance(out, Tensor):
        raise TypeError(f"the loss must be a scalar tensor, got {type(out).__name__}")
    if out.shape != () or not out.is_floating_point():
        raise ValueError(
            f"the loss must be a floating scalar, got shape {tuple(out.shape)} of "
            f"{out.dtype}: take its mean, or return ff.Weighted(total, weight)"
        )
    return LossParts(out, weight, aux)


class Tie(torch.autograd.Function):
    """The loss as a function of a `UnitToken` too, whose gradient is an exact zero.

    ``loss + 0 * token`` would turn an infinity into NaN.
    """

    @staticmethod
    def forward(ctx, loss, token):  # type: ignore[override]
        return loss.clone()

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        return g, torch.zeros_like(g)


class Reduced(Generic[Tree]):
    """A tree of tensors that are combined over microbatches and ranks, not averaged.

    An auxiliary output of a loss; each class of them has a way of its own.

    Args:
        tree: tensors, of one shape on every rank and in every microbatch.

    Raises:
        TypeError: a leaf that is no tensor, or one of booleans.
    """

    __slots__ = ("tree",)

    tree: Tree

    # Of each class: what it makes, of two microbatches and over ranks.
    called: ClassVar[str]
    combine: ClassVar[Callable[[Tensor, Tensor], Tensor]]
    over_ranks: ClassVar[LinearMap]

    def __init__(self, tree: Tree):
        self._check(tree)
        self.tree = tree

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # which notes that it is generic
        tree.register_node(cls, lambda x: ([x.tree], None), partial(_restored, cls))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.tree!r})"

    def _check(self, values: Any) -> None:
        # One within another would be combined in the way of the outer one.
        paths, leaves, _ = tree.flatten_with_paths(values, is_leaf=is_reduced)
        for path, x in zip(paths, leaves, strict=True):
            if isinstance(x, Tensor) and self.takes(x):
                continue
            what = f"a tensor of {x.dtype}" if isinstance(x, Tensor) else repr(x)
            where, name = f" at {path!r}" if path else "", type(self).__name__
            raise TypeError(
                f"{name} holds {what}{where}: only tensors of numbers have "
                f"{self.called}; make it one (torch.tensor(3), mask.sum()), or return "
                f"it beside the {name}"
            )

    @staticmethod
    def takes(x: Tensor) -> bool:
        """Returns whether tensors of its dtype can be combined."""
        return x.dtype != torch.bool


def _restored(kind: type[Reduced], _: Any, children: Any) -> Reduced:
    reduced = object.__new__(kind)  # children of any kind: no check
    (reduced.tree,) = children
    return reduced


class Summed(Reduced[Tree]):
    """A tree of tensors that are summed over microbatches and ranks, not averaged.

    An auxiliary output of a loss, for counts, sums and moments. Each tensor keeps its
    dtype, so integer counts are exact. ``value_and_grad`` returns a ``Summed`` whose
    ``tree`` has the sums.

    Args:
        tree: tensors, of one shape on every rank and in every microbatch.

    Raises:
        TypeError: a leaf that is no tensor, or one of booleans.

    Cost: under ``shard`` one psum a gradient call for each dtype among all that is
    summed; without any, nothing.

    >>> import torch, fsfunc as ff
    >>> def loss(w, x):
    ...     y = w * x
    ...     return y.mean(), {"wrong": ff.Summed((y < 1).sum())}
    >>> grad = ff.accumulate(ff.value_and_grad(loss, has_aux=True), 2)
    >>> grad(torch.tensor(1.0), torch.tensor([0.0, 0.5, 1.0, 0.0]))[0][1]["wrong"].tree
    tensor(3)
    """

    __slots__ = ()
    called, combine, over_ranks = "sums", staticmethod(torch.add), TOTAL


class Max(Reduced[Tree]):
    """A tree of tensors of which the largest over microbatches and ranks is taken.

    Element by element, for extremes: the longest sequence, the largest activation or
    loss of a sample. Otherwise as :class:`Summed`; it has no derivative. (The minimum
    is the maximum of the negated values, negated.)

    Args:
        tree: tensors, of one shape on every rank and in every microbatch.

    Raises:
        TypeError: a leaf that is no tensor, or one of booleans or complex numbers.

    Cost: under ``shard`` one pmax a gradient call for each dtype among all that is
    compared; without any, nothing.

    >>> import torch, fsfunc as ff
    >>> loss = lambda w, x: ((w * x).mean(), ff.Max(x.max()))
    >>> evaluate = ff.accumulate(ff.value(loss, has_aux=True), 2)
    >>> evaluate(torch.tensor(1.0), torch.tensor([0.0, 5.0, 1.0, 0.0]))
    (tensor(1.5000), Max(tensor(5.)))
    """

    __slots__ = ()
    called, combine = "maxima", staticmethod(torch.maximum)
    over_ranks = LinearMap("pmax", to="I")

    @staticmethod
    def takes(x: Tensor) -> bool:
        """Returns whether tensors of its dtype have an order."""
        return x.dtype != torch.bool and not x.is_complex()


def is_reduced(x: Any) -> bool:
    """True if ``x`` is a `Reduced`, as a `Summed` is."""
    return isinstance(x, Reduced)


def counts_as_leaf(x: Any) -> bool:
    """True of an auxiliary output that counts as one leaf though it holds tensors.

    A `Reduced`, or a sharded leaf, of which the part has no rows.
    """
    return is_reduced(x) or is_sharded(x)


def averaged(x: Any) -> bool:
    """True if an auxiliary output is averaged: it is a floating scalar."""
    return isinstance(x, Tensor) and x.ndim == 0 and x.is_floating_point()


def added(a: Any, b: Any) -> Any:
    """The auxiliary outputs of two microbatches combined; ``a`` came first.

    Averages are kept as sums until :func:`divided`.

    Raises:
        TreeMismatch: the two differ in structure.
        ValueError: the shapes of a sum differ, or integers or Python numbers.

    Cost: integers on a device are read on the host.
    """
    what = "what a microbatch's loss returned beside its value"
    tree.check_same_structure(a, b, what=what, against="that of the one before")
    return tree.map(_both, a, b, is_leaf=counts_as_leaf)


def added_weights(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The sum of the weights of two microbatches' losses, or None.

    Raises:
        TypeError: one of the losses has a weight, and the other has none.
    """
    if a is None or b is None:
        if a is not b:
            raise TypeError(
                "the loss is ff.Weighted(total, weight) in some microbatches, and a "
                "mean in others: return one kind in all of them"
            )
        return None
    return a + b


def _both(x: Any, y: Any) -> Any:
    if is_reduced(x):
        return tree.map(partial(_combined, type(x)), x, y)
    if averaged(x):
        return x + y
    if isinstance(x, Tensor) and x.ndim:
        return torch.cat([x, y])
    if frame().tracer is None and _are_numbers(x, y) and x == x and x != y:
        raise ValueError(
            f"the loss returns {x} beside its value in one microbatch, and {y} in "
            "another: of integers and Python numbers neither a mean nor a sum is "
            "taken. Return ff.Summed(tensor) of a count, a floating tensor to be "
            "averaged, or x[None] for one of each microbatch"
        )
    return y


def _are_numbers(*values: Any) -> bool:
    if all(isinstance(x, int | float) for x in values):
        return True
    real = all(isinstance(x, Tensor) and not x.is_meta for x in values)
    if real:
        refuse_in_graph("a loss returns integers, which microbatches must agree on")
    return real and not (_torch.fake_active() or _torch.functorch_active())


def _combined(kind: type[Reduced], x: Any, y: Any) -> Any:
    if x.shape != y.shape:
        name = kind.__name__
        raise ValueError(
            f"{name} holds {tuple(x.shape)} in one microbatch and {tuple(y.shape)} in "
            f"another: reduce the samples first, or return it beside the {name}"
        )
    return kind.combine(x, y)


def divided(aux: Any, count: int) -> Any:
    """The auxiliary outputs of ``count`` microbatches, their sums made averages."""
    if count == 1:
        return aux
    return tree.map(
        lambda x: x / count if averaged(x) else x, aux, is_leaf=counts_as_leaf
    )
