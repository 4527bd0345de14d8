"""Interpretations that take part in the reductions of a sharded gradient call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.attribution import internal
from fsfunc.comm.backends.link import Handle
from fsfunc.comm.collectives import psum
from fsfunc.comm.groups import RankGroup
from fsfunc.comm.typed_maps import LawError
from fsfunc.core.frames import Interpretation, frame, inside
from fsfunc.core.outcomes import GradientCall, Outcome
from fsfunc.sharded.inputs import check_function
from fsfunc.sharded.leaf import FlatShard, Parts, Sharded, is_sharded


class GradientSteps(Interpretation):
    """Steps each buffer as soon as its gradient is summed; see ``step_in_backward``.

    ``done``: the buffers that were stepped, by identity. ``why_spent``: the error for a
    read of a gradient that was used up.
    """

    observes = True
    why_spent = ""
    done: dict[int, FlatShard]

    def for_call(
        self, keeps: dict[int, FlatShard], parts: Parts
    ) -> GradientSteps | None:
        """Itself, if a sharded gradient call has buffers to step as it goes.

        Args:
            keeps: the buffers whose gradients it sums; ``parts``: what of their leaves
                is used outside units.
        """
        raise NotImplementedError

    def takes(self, shard: FlatShard) -> bool:
        """True if a buffer, all of whose gradients are summed, is stepped now."""
        raise NotImplementedError

    def step(self, shard: FlatShard, grad: Tensor, mean_size: int) -> None:
        """Steps a buffer by its gradient, which is written into.

        Args:
            mean_size: of how many ranks' gradients that is the sum.
        """
        raise NotImplementedError


class ReductionFeedback(Interpretation):
    """Sends gradients in the place of ``shard``'s reduction; see ``error_feedback``."""

    def check(self, how: Any) -> None:
        """Raises where reductions of this kind leave nothing to do.

        Args:
            how: the ``Reduction`` of the ``shard`` around it.
        """

    def send(
        self,
        how: Any,
        buffer: Tensor,
        shard: FlatShard,
        where: RankGroup,
        whole: bool,
    ) -> Handle:
        """Sends a gradient to be summed, in the place of ``how.send``."""
        raise NotImplementedError


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

    @functools.wraps(grad_fn)
    def observed(*args: Any, **keywords: Any) -> tuple[Any, Tensor, int]:
        seen, f = Observation(measure), frame()
        with inside(replace(f, handlers=(*f.handlers, seen))):
            out = grad_fn(*args, **keywords)
        return out, seen.total(), seen.samples

    return observed


class Observation(Interpretation):
    """Shows the gradients of the gradient calls in its reach to ``measure``."""

    called = "observe_gradients"
    observes = True

    def __init__(self, measure: Callable[[Tensor], Tensor]):
        self.measure, self.samples, self.scale = measure, 0, 1.0
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
            return run(call)

        return seen

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


UNSEEN = (
    "observe_gradients has no rank's own gradient to show here: {}. Take the gradients "
    "by ff.value_and_grad of a mean, in units, under shard, accumulate and pipeline"
)


class Observed:
    """Gradients of one gradient call that observers have still to see."""

    def __init__(self, observers: Sequence[Observation]):
        self.observers = observers
        # By buffer and microbatch: how many calls give it, and the sum so far.
        self.unseen: dict[Any, tuple[int, Tensor | None]] = {}
        self.shown: set[Any] = set()

    def expect(self, calls: Sequence[Any]) -> None:
        """Notes a unit call whose gradients will come."""
        for call in calls:
            if call.keeps:
                key = id(call.shard), call.micro
                if key in self.shown:
                    raise RuntimeError(f"{call.name}: its gradient was observed before")
                self.unseen[key] = self.unseen.get(key, (0, None))[0] + 1, None

    def joined(self, call: Any, shard: FlatShard) -> None:
        """Notes that the call before this one gives the gradient of both."""
        key = id(shard), call.micro
        count, held = self.unseen[key]
        self.unseen[key] = count - 1, held

    def show(self, call: Any, shard: FlatShard, buffer: Tensor) -> None:
        """Shows the gradient of one microbatch, once all calls gave it."""
        key = id(shard), call.micro
        count, held = self.unseen.pop(key)
        if held is not None:
            buffer = held.add_(buffer)
        if count > 1:
            self.unseen[key] = count - 1, buffer.clone() if held is None else held
            return
        self.shown.add(key)
        for observer in self.observers:
            observer.see(buffer, shard.split_axes)
