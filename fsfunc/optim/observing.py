"""``observe_gradients``: measures of each sample's gradient, before it is reduced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.attribution import internal
from fsfunc.comm.collective_ops import ignoring_axes
from fsfunc.comm.collectives import psum
from fsfunc.comm.typed_maps import LawError
from fsfunc.core.frames import frame, inside
from fsfunc.core.outcomes import GradientCall, Outcome
from fsfunc.core.reduction_hooks import UNSEEN, GradientObserver
from fsfunc.sharded.inputs import check_function
from fsfunc.sharded.leaf import Sharded, is_sharded


def observe_gradients(
    grad_fn: Callable[..., Any], measure: Callable[[Tensor], Tensor]
) -> Callable[..., Any]:
    """``grad_fn``, and what its gradients measure before anybody sums them.

    A gradient call over n ranks in c microbatches, of ``accumulate`` or ``pipeline``,
    is a mean over n c gradients, each a sample of the same one. Of this rank's c
    samples, ``measure`` is given each piece (the flat buffer of a unit's parameters, or
    a whole leaf) once, when it is complete and before it is reduced; nothing more is
    held for that, but for parameters that several unit calls of one sample share. So
    gradient noise scales, AdaScale and statistics of gradients are written.

    Args:
        grad_fn: ``value_and_grad(loss)``, or what calls it.
        measure: piece to tensor, of one shape whatever the piece, such as
            ``lambda g: g.float().square().sum()``. A piece may have zeros at its end
            that belong to no parameter (a pipeline asks for the shape by one zero); it
            must not be kept or written into.

    Returns:
        a function that returns ``(what grad_fn does, total, samples)``: the sum of the
        measures over this rank's samples (over axes that split the work of one loss,
        that of stages too, it is summed; over data it is each rank's own: ``psum``
        gives that of all), and how many samples this rank had.

    Raises:
        LawError: where a rank's own gradient does not exist as such: under
            ``torch.func`` or of arguments that require grad, of ``Weighted`` losses, of
            parameters that a loss reads outside units under ``shard``, of leaves that
            ranks of the data own, or of more than one gradient call; in a pipeline, of
            leaves that stages on several ranks use, and of microbatches of unlike
            numbers of rows.

    Cost: what ``measure`` costs; a psum of its result over each set of axes that leaves
    are split over, and over a pipeline's. There, without ``shard``, the gradients of a
    stage's microbatch beside their sum.

    Source: the per-replica gradients of Johnson et al., AdaScale SGD, 2020, section 3.

    >>> import torch, fsfunc as ff
    >>> grad = ff.accumulate(ff.value_and_grad(lambda w, x: (w * x).mean()), 2)
    >>> observed = observe_gradients(grad, lambda g: g.square().sum())
    >>> (value, g), total, n = observed(torch.tensor(1.0), torch.tensor([1.0, 3.0]))
    >>> g, total, n
    (tensor(2.), tensor(10.), 2)
    """
    check_function(grad_fn, "observe_gradients")
    return observe_means(grad_fn, measure)


def observe_means(
    grad_fn: Callable[..., Any],
    measure: Callable[[Tensor], Tensor],
    mean: Callable[[Any], None] | None = None,
) -> Callable[..., Any]:
    """:func:`observe_gradients`; ``mean`` is called with the gradient call's mean.

    That is before ``grad_fn`` changes it, if it does.
    """

    @functools.wraps(grad_fn)
    def observed(*args: Any, **keywords: Any) -> tuple[Any, Tensor, int]:
        seen, f = _Measure(measure, mean), frame()
        with inside(replace(f, handlers=(*f.handlers, seen))):
            out = grad_fn(*args, **keywords)
        return out, seen.total(), seen.samples

    return observed


class _Measure(GradientObserver):
    """Shows the gradients of the gradient calls in its reach to ``measure``."""

    called = "observe_gradients"

    def __init__(self, measure: Callable[[Tensor], Tensor], mean: Any):
        self.measure, self.samples, self.scale = measure, 0, 1.0
        self.mean = mean
        self.found: dict[tuple[str, ...], Tensor] = {}
        self.begun: set[Any] = set()  # the microbatches
        # Where leaves are on ranks of a pipeline: its axes, and a zero of their sum.
        self.along: tuple[tuple[str, ...], Tensor] | None = None

    def gradient(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def seen(call: GradientCall) -> Outcome:
            f = frame()
            if f.in_loss:  # a derivative that the loss itself takes
                return run(call)
            if call.composable:
                raise LawError(UNSEEN.format("the gradients are differentiated"))
            outcome = run(call)
            return outcome if self.mean is None else replace(outcome, shown=self._ended)

        return seen

    def _ended(self, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        with internal(), ignoring_axes(), torch.no_grad():
            self.mean(grads)
        return grads

    def begins(self, call: GradientCall) -> None:
        micro = frame().micro
        if micro in self.begun:  # the sum of two calls has samples that nobody sees
            raise LawError(UNSEEN.format("gradients are taken more than once"))
        self.begun.add(micro)
        self.scale = call.cotangent

    def lies_along(self, axes: tuple[str, ...], leaves: Sequence[Tensor]) -> None:
        """Hears that each rank of these axes sees some of the leaves.

        Args:
            leaves: like all of them, of which this rank may have none.
        """
        with internal(), torch.no_grad():
            each = {x.dtype: self.measure(x.detach().new_zeros(1)) for x in leaves}
        zeros = map(torch.zeros_like, each.values())
        self.along = axes, functools.reduce(torch.add, zeros, torch.zeros(()))

    def ends(self, outcome: Outcome) -> None:
        if outcome.weight is not None:
            raise LawError(UNSEEN.format("a Weighted loss is divided in the end"))
        self.samples += 1
        for x in tree.leaves(outcome.grads, is_leaf=is_sharded):
            self._whole(x)

    def _whole(self, x: Any) -> None:
        """A leaf that no transform answers for."""
        if not isinstance(x, Sharded):
            if isinstance(x, Tensor):
                self.see(x, ())
        elif x._local is not None:
            if x.layout.flat is not None:
                raise LawError(UNSEEN.format(f"{x.name!r} is read outside units"))
            self.see(x.local, x.layout.axes)

    def see(self, gradient: Tensor, axes: tuple[str, ...]) -> None:
        """Takes in a piece, a part over ``axes`` that split the work of one loss."""
        with internal(), torch.no_grad():
            piece = gradient.detach()
            if self.scale != 1:
                wide = torch.promote_types(piece.dtype, torch.float32)
                piece = piece.to(wide) / self.scale
            found = self.measure(piece)
            before = self.found.get(axes)
            self.found[axes] = found if before is None else before + found

    def total(self) -> Tensor:
        """The measures of all pieces, those of other blocks of split leaves too."""
        parts = [psum(x, a) if a else x for a, x in sorted(self.found.items())]
        if self.along is None:
            return functools.reduce(torch.add, parts) if parts else torch.zeros(())
        axes, zero = self.along
        found = functools.reduce(torch.add, parts, zero)
        return psum(found.to(zero.dtype), axes)
