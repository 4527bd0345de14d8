"""``accumulate``: one gradient call as several, on microbatches.

`Microbatches` cuts the batch, and each part runs the gradient call under the transforms
further in; `_Sums` adds the outcomes::

    for i in range(n):
        sums.add(run(part(i)))       # loss, weight, aux, gradients
    return sums.outcome()            # divided into means when it leaves the step
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.core.frames import Frame, Interpretation, frame, inside, transformed
from fsfunc.core.losses import add_aux, add_weights, divide_aux
from fsfunc.core.outcomes import (
    Argnums,
    BatchArgnums,
    GradientCall,
    Outcome,
    batch_arguments,
)
from fsfunc.core.tracers import Carried, Round, Tracer
from fsfunc.runtime.memory import count_as
from fsfunc.runtime.memory_spaces import any_offloaded, space_of
from fsfunc.sharded.packing import as_packed_tree, as_packed_trees
from fsfunc.transforms.microbatches import Microbatches, RowGradients, warn_narrow
from fsfunc.transforms.sharded_calls import (
    Args,
    Function,
    Keywords,
    RunGradient,
    Sharding,
)
from fsfunc.tree.types import PyTree

_P = ParamSpec("_P")
_R = TypeVar("_R")


@api_boundary
def accumulate(
    f: Callable[_P, _R], n: int, *, batch_argnums: Argnums | None = None
) -> Callable[_P, _R]:
    """Runs each gradient call of ``f`` on ``n`` microbatches, one after another.

    It equals the plain loop: the mean of the microbatches' values and gradients (with
    ``Weighted`` losses, the sum of totals over the sum of weights). Of the auxiliary
    outputs of a loss, floating scalars are averaged, ``Summed(tree)`` is summed, of
    ``Max(tree)`` the largest are taken, other tensors are concatenated along dim 0, and
    of the rest, sharded leaves too, the last one is returned; integers and Python
    numbers must be the same in all.

    The batch is cut along dim 0: in ``f(params, batch)`` the tensors of the second
    argument, with more arguments those that ``batch_argnums`` names, leaves of a state
    that are each rank's own (``ff.Own``) too; scalars and sharded leaves are not cut,
    nor is what a loss captures. Gradients with respect to
    what is cut are concatenated along dim 0: where the loss is a mean over rows, they
    are the rows of the gradient for the whole batch.

    The order of transforms decides when gradients are reduced: ``shard(accumulate(f,
    n))`` reduces once and holds whole gradients meanwhile, ``accumulate(shard(f), n)``
    reduces each microbatch and holds parts.

    Args:
        f: a train step.
        n: the number of microbatches.
        batch_argnums: which arguments of its gradient calls are the batch, by position
            or keyword; ``ff.value_and_grad(loss, batch_argnums=)`` takes precedence.

    Raises:
        ValueError: ``n`` does not divide dim 0 of the batch; batch leaves that differ
            in it; several arguments that may be the batch; a loss that returns other
            integers, beside its value, in each microbatch.

    Warns:
        UserWarning: 128 gradients, losses or weights are added in bfloat16, or 1024 in
            float16.

    >>> import torch, fsfunc as ff
    >>> grad = ff.accumulate(ff.value_and_grad(lambda w, x: (w * x).mean()), 2)
    >>> grad(torch.tensor(1.0), torch.arange(4.0))
    (tensor(1.5000), tensor(1.5000))
    """
    if not isinstance(n, int) or n < 1:
        raise ValueError(f"accumulate(f, {n!r}): the number of microbatches is >= 1")
    return transformed(f, _Accumulate(n, batch_arguments(batch_argnums)))


class _Accumulate(Interpretation):
    """The interpretation of ``accumulate``.

    Args:
        n: the number of microbatches.
        batch_argnums: which arguments are the batch, if the call does not say.
        depth: the number of gradient calls around the step.
        runs_once: whether one microbatch stands for all, while a step is recorded.
    """

    called = "accumulate"
    ends_alike = True

    def __init__(
        self,
        n: int,
        batch_argnums: BatchArgnums | None,
        depth: int = 0,
        runs_once: bool = False,
    ):
        self.n, self.batch_argnums, self.runs_once = n, batch_argnums, runs_once
        self.depth = depth

    @property
    def configuration(self) -> tuple[tuple[str, Any], ...]:
        argnums = self.batch_argnums
        named = () if argnums is None else (("batch_argnums", argnums),)
        return (("n", self.n), *named)

    def call(self, f: Function, args: Args, keywords: Keywords) -> PyTree:
        """Calls ``f`` with a copy of this that knows the enclosing gradient calls."""
        # A copy, as ranks that are threads share this object.
        outer = frame()
        copy = _Accumulate(self.n, self.batch_argnums, outer.in_loss, self.runs_once)
        with inside(outer.replace(handlers=(*outer.handlers, copy))):
            return f(*args, **keywords)

    def recorded(self, recorder: Tracer) -> Interpretation:
        return _Accumulate(self.n, self.batch_argnums, runs_once=True)

    def gradient(self, run: RunGradient) -> RunGradient:
        def accumulate_gradients(call: GradientCall) -> Outcome:
            # A derivative that the loss itself takes: it is within one microbatch.
            if frame().in_loss > self.depth:
                return run(call)
            batch = Microbatches(
                call, self.n, self.batch_argnums, "accumulate", even=True
            )
            # Of each microbatch the gradients by its rows, which are not summed.
            by_rows: list[RowGradients] = []
            # A recording needs each unit call once; but shapes and auxiliary outputs
            # are to be those of all microbatches.
            if self.runs_once:
                outcome = batch.take_row_gradients(run(batch.part(0)), by_rows)
                aux = divide_aux(reduce(add_aux, [outcome.aux] * self.n), self.n)
                outcome = outcome.replace(aux=aux)
                return batch.put_row_gradients(outcome, by_rows * self.n)
            f, sums, i = frame(), _Sums(), 0
            sums_in_place, tracer = self._shard_sums_in_place(f), f.tracer or Tracer()
            # While a step is planned, a round that is like the one before is not run:
            # `rounds` notes its events again, and says how many.
            rounds = tracer.observe_rounds()
            while i < self.n:
                if rounds is not None:
                    rounds.begin("m", i)
                tracer.begin_turn("m", i)
                with inside(f.replace(micro=(*f.micro, (i, self.n)))):
                    part = batch.part(i)
                    # `shard` adds each gradient as it is reduced: a rank then holds no
                    # second copy of all its gradients. Not into the first microbatch's,
                    # unless they are known to be nobody else's.
                    if sums_in_place and sums.is_writable:
                        part = part.replace(earlier_grads=sums.grads)
                    sums.add(batch.take_row_gradients(run(part), by_rows))
                    # It refers to the sums so far (`earlier_grads`), which would live
                    # on beside new ones that replace them.
                    del part
                i += 1
                if rounds is not None:
                    # Equal are rounds that begin with sums of equal kinds. The last is
                    # left to run where it does more, as to reduce what was summed.
                    handed = [sums, *(runtime.sums for _, runtime in f.runtimes)]
                    left = self.n - i - (not _ends_alike(f))
                    skipped = rounds.after(Round(handed, sums.is_writable, left, i - 1))
                    by_rows += by_rows[-1:] * skipped
                    i += skipped
                    # `shard` goes on to the next unit calls when the last microbatch is
                    # over; here that was skipped.
                    if skipped and i == self.n:
                        for _, runtime in f.runtimes:
                            runtime.advance(f.micro)
            if rounds is not None:
                rounds.end()
            tracer.begin_turn("", 0)
            # bfloat16 loses terms from 128 on: with fewer no sum is looked at.
            for x in sums.carried().tensors if self.n > 99 else ():
                warn_narrow(x, self.n)
            return batch.put_row_gradients(sums.outcome(), by_rows)

        return accumulate_gradients

    def _shard_sums_in_place(self, f: Frame) -> bool:
        """Returns whether `shard` is the next transform within that sees gradients.

        It adds those of a microbatch to the sums as they come.
        """
        within = iter(f.handlers)
        if not any(handler is self for handler in within):
            return False
        # The iterator goes on behind this handler: with those within.
        sees = (h for h in within if type(h).gradient is not Interpretation.gradient)
        return isinstance(next(sees, None), Sharding)


def _ends_alike(f: Frame) -> bool:
    """Returns whether the last microbatch does what others do: nothing waits for it."""
    reduces = any(runtime.differentiated for _, runtime in f.runtimes)
    return not reduces and all(handler.ends_alike for handler in f.handlers)


class _Sums:
    """Outcomes, added up one by one.

    Attributes:
        sum: an outcome with the sums of all but gradients; None before the first.
        grads: the sums of gradients.
        count: the number of microbatches.
        is_writable: whether ``grads`` may be written in place.
    """

    def __init__(self) -> None:
        self.sum: Any = None
        self.grads: Any = None
        self.count = 0
        self.is_writable = False

    def add(self, outcome: Outcome) -> None:
        """Adds an outcome, without writing into its memory."""
        self.count += outcome.count
        # The first is taken as it is: sums that begin at zero would be memory more.
        if self.sum is None:
            self.sum, self.grads = outcome, outcome.grads
            self.is_writable = outcome.is_writable
            return
        a, b = self.sum, outcome
        if (a.scale, len(a.after_sum)) != (b.scale, len(b.after_sum)):
            raise ValueError(
                "accumulate: a transform within changes the gradients, or what the "
                "backward starts from, of some microbatches alone: let it give all of "
                "them outcome.with_mean(...), of the same gradients where none change"
            )
        weight = add_weights(a.weight, b.weight)
        # `shard` may have added them already, to the sums that it was given
        # (`earlier_grads`).
        self.grads = (
            outcome.grads
            if outcome.includes_earlier
            else self._add_grads(outcome.grads)
        )
        aux = add_aux(a.aux, b.aux)
        # Without its gradients: they would be held until the last microbatch.
        sums = a.replace(grads=None, writable=None)
        self.sum = sums.replace(total=a.total + b.total, weight=weight, aux=aux)

    def _add_grads(self, grads: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
        """Returns the sums with ``grads``: the same trees if they are writable."""
        # Buffer by buffer, not leaf by leaf.
        sum_buffers, new_buffers = as_packed_trees(self.grads, grads)
        out = list(sum_buffers.tensors)
        positions = [i for i, x in enumerate(out) if isinstance(x, Tensor)]
        if not positions:
            return self.grads
        xs = [out[i] for i in positions]
        ys = [new_buffers.tensors[i] for i in positions]
        if self.is_writable:
            torch._foreach_add_(xs, ys)  # pyright: ignore
            return self.grads
        # Autograd may hand out one tensor twice, an expanded one, or the caller's own:
        # only sums that we made ourselves are written into.
        if _torch.functorch_active() or any(x.requires_grad for x in (*xs, *ys)):
            # foreach has no rule for vmap; and sums that are differentiated again
            # must not be written, so they are not marked as writable.
            sums = [x + y for x, y in zip(xs, ys, strict=True)]
        else:
            # Sums of offloaded gradients stay in their store: foreach would make them
            # in other memory.
            offloaded = any_offloaded()
            sums = [*map(_add, xs, ys)] if offloaded else torch._foreach_add(xs, ys)
            count_as("gradients", sums)
            self.is_writable = True
        for i, x in zip(positions, sums, strict=True):
            out[i] = x
        return sum_buffers.rebuild(out)

    def carried(self) -> Carried:
        """Returns what one microbatch hands on to the next: the sums, with a count."""
        values = self.sum.total, self.sum.weight, self.sum.aux
        leaves = [*tree.leaves(values), *as_packed_tree(self.grads).tensors]
        return Carried([x for x in leaves if isinstance(x, Tensor)], {"sums": self})

    def outcome(self) -> Outcome:
        """Returns the outcome that is the sum."""
        grads = self.grads
        writable = grads if self.is_writable else None
        return self.sum.replace(grads=grads, writable=writable, count=self.count)


def _add(x: Tensor, y: Tensor) -> Tensor:
    """Returns ``x + y``, in the memory space of ``x``."""
    space = space_of(x)
    out = space.empty_like(x, scratch=True) if space.offloaded else None
    return torch.add(x, y.to(x.device), out=out)
