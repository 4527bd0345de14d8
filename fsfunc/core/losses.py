"""The outputs of a loss, and how those of microbatches and ranks are combined.

``autodiff`` reads what a loss returned by `loss_parts`. ``accumulate`` and ``pipeline``
add up the parts of microbatches by `add_aux` and `add_weights`, and ``shard`` those of
ranks:

=========================  ====================================  =======================
an output                  over microbatches                     over ranks
=========================  ====================================  =======================
the loss                   averaged; `Weighted`: total / weight  the same
a floating scalar          averaged                              averaged
in a `Reduced`             combined in its way                   combined in its way
another tensor             concatenated along dim 0              each rank's own
an integer, a number       must be the same in all               each rank's own
what else, sharded leaves  the last one's                        each rank's own
=========================  ====================================  =======================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeGuard, TypeVar

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.linear_maps import LinearMap
from fsfunc.comm.typed_maps import TOTAL
from fsfunc.core.frames import frame
from fsfunc.runtime.scopes import refuse_in_graph
from fsfunc.sharded.leaf import is_sharded
from fsfunc.tree.types import Leaf, PyTree

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


Loss: TypeAlias = Tensor | Weighted | float
"""What a loss function returns: a floating scalar, or a sum with its weight.

It may be annotated as a number too, as the sum of tensors by ``sum()`` is to a checker.
"""


class LossParts(NamedTuple):
    """What a loss returned: its total, its weight or None, its auxiliary outputs."""

    total: Tensor
    weight: Tensor | None
    aux: Any


def loss_parts(out: PyTree, has_aux: bool) -> LossParts:
    """Returns the parts of what a loss returned.

    Raises:
        TypeError, ValueError: it returned no floating scalar tensor.
    """
    aux = None
    if has_aux:
        # A `Weighted` is a tuple of two as well: a loss that has no aux.
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
    """The loss as a function of the last `UnitToken` too, by which its gradient is 0.

    It makes autograd run the backward of every unit, in order. ``loss + 0 * token``
    would do so too, but turn an infinity into NaN.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, token: Tensor) -> Tensor:  # type: ignore[override]
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
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

    # Each class sets: what it makes, in words; how two microbatches are combined; and
    # the collective that combines ranks.
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

    def _check(self, values: PyTree) -> None:
        # A `Reduced` counts as a leaf here, and so is refused: one within another would
        # be combined in the way of the outer one.
        paths, leaves, _ = tree.flatten_with_paths(values, is_leaf=is_reduced)
        for path, x in zip(paths, leaves, strict=True):
            if isinstance(x, Tensor) and self.takes(x):
                continue
            leaf = f"a tensor of {x.dtype}" if isinstance(x, Tensor) else repr(x)
            where, name = f" at {path!r}" if path else "", type(self).__name__
            raise TypeError(
                f"{name} holds {leaf}{where}: only tensors of numbers have "
                f"{self.called}; make it one (torch.tensor(3), mask.sum()), or return "
                f"it beside the {name}"
            )

    @staticmethod
    def takes(x: Tensor) -> bool:
        """Returns whether tensors of its dtype can be combined."""
        return x.dtype != torch.bool


def _restored(kind: type[Reduced], _: None, children: Iterable[PyTree]) -> Reduced:
    # By no `__init__`, which checks: a tree map may put anything in place of tensors.
    reduced = object.__new__(kind)
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
    called: ClassVar[str] = "sums"
    combine: ClassVar[Callable[[Tensor, Tensor], Tensor]] = staticmethod(torch.add)
    over_ranks: ClassVar[LinearMap] = TOTAL


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
    called: ClassVar[str] = "maxima"
    combine: ClassVar[Callable[[Tensor, Tensor], Tensor]] = staticmethod(torch.maximum)
    over_ranks: ClassVar[LinearMap] = LinearMap("pmax", to="I")

    @staticmethod
    def takes(x: Tensor) -> bool:
        """Returns whether tensors of its dtype have an order."""
        return x.dtype != torch.bool and not x.is_complex()


def is_reduced(x: PyTree) -> TypeGuard[Reduced[Any]]:
    """Returns whether ``x`` is a `Reduced`, as a `Summed` is."""
    return isinstance(x, Reduced)


def counts_as_leaf(x: PyTree) -> bool:
    """Returns whether an auxiliary output is one leaf, though it holds tensors.

    A `Reduced` is, which its own rule combines; and a sharded leaf, whose part is not
    concatenated, as it has no rows.
    """
    return is_reduced(x) or is_sharded(x)


def is_averaged(x: Leaf) -> bool:
    """Returns whether an auxiliary output is averaged: it is a floating scalar."""
    return isinstance(x, Tensor) and x.ndim == 0 and x.is_floating_point()


def add_aux(a: PyTree, b: PyTree) -> PyTree:
    """Combines the auxiliary outputs of two microbatches, of which ``a`` came first.

    Averages stay sums until :func:`divide_aux`.

    Raises:
        TreeMismatch: the two differ in structure.
        ValueError: the shapes of a sum differ, or integers or Python numbers.

    Cost: integers on a device are read on the host.
    """
    title = "what a microbatch's loss returned beside its value"
    tree.check_same_structure(a, b, what=title, against="that of the one before")
    return tree.map(_combine_leaves, a, b, is_leaf=counts_as_leaf)


def add_weights(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Returns the sum of the weights of two microbatches' losses, or None.

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


def _combine_leaves(x: Leaf, y: Leaf) -> Leaf:
    if is_reduced(x):
        return tree.map(partial(_combine_reduced, type(x)), x, y)
    if is_averaged(x):
        return x + y
    if isinstance(x, Tensor) and x.ndim:
        return torch.cat([x, y])
    # A NaN differs from itself, and is no disagreement. In a recorded run numbers may
    # report what the step compares (`Tracer.mark_numbers`), and this is no part of it.
    if frame().tracer is None and _are_numbers(x, y) and x == x and x != y:
        raise ValueError(
            f"the loss returns {x} beside its value in one microbatch, and {y} in "
            "another: of integers and Python numbers neither a mean nor a sum is "
            "taken. Return ff.Summed(tensor) of a count, a floating tensor to be "
            "averaged, or x[None] for one of each microbatch"
        )
    return y


def _are_numbers(*values: Leaf) -> bool:
    """Returns whether values are numbers that can be read and compared here."""
    if all(isinstance(x, int | float) for x in values):
        return True
    are_real = all(isinstance(x, Tensor) and not x.is_meta for x in values)
    if are_real:
        refuse_in_graph("a loss returns integers, which microbatches must agree on")
    # A fake tensor has no value, and one under vmap has many.
    return are_real and not (_torch.fake_active() or _torch.functorch_active())


def _combine_reduced(kind: type[Reduced], x: Tensor, y: Tensor) -> Tensor:
    if x.shape != y.shape:
        name = kind.__name__
        raise ValueError(
            f"{name} holds {tuple(x.shape)} in one microbatch and {tuple(y.shape)} in "
            f"another: reduce the samples first, or return it beside the {name}"
        )
    return kind.combine(x, y)


def divide_aux(aux: PyTree, count: int) -> PyTree:
    """Returns the auxiliary outputs of ``count`` microbatches, sums made averages."""
    if count == 1:
        return aux
    return tree.map(
        lambda x: x / count if is_averaged(x) else x, aux, is_leaf=counts_as_leaf
    )
