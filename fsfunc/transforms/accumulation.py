"""``accumulate``: one gradient call as several, on microbatches."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.core.frames import Frame, Interpretation, frame, inside, transformed
from fsfunc.core.losses import added, added_weights, divided
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
from fsfunc.sharded.packing import split_alike, split_buffers
from fsfunc.transforms.microbatches import Microbatches, warn_narrow
from fsfunc.transforms.sharded_calls import Sharding


@api_boundary
def accumulate(
    f: Callable[..., Any], n: int, *, batch_argnums: Argnums | None = None
) -> Callable[..., Any]:
    """``f`` with each gradient call run on ``n`` microbatches, one after another.

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
    called = "accumulate"
    ends_alike = True

    def __init__(
        self, n: int, chosen: BatchArgnums | None, depth: int = 0, once: bool = False
    ):
        self.n, self.chosen, self.once = n, chosen, once
        self.depth = depth  # how many gradient calls are around the step

    @property
    def configuration(self) -> tuple[tuple[str, Any], ...]:
        said = () if self.chosen is None else (("batch_argnums", self.chosen),)
        return (("n", self.n), *said)

    def call(self, f: Callable[..., Any], args: Any, keywords: Any) -> Any:
        """Calls ``f`` with a copy of this that knows the enclosing gradient calls."""
        outer = frame()
        one = _Accumulate(self.n, self.chosen, outer.in_loss, self.once)
        with inside(outer.replace(handlers=(*outer.handlers, one))):
            return f(*args, **keywords)

    def recorded(self, recorder: Any) -> Interpretation:
        return _Accumulate(self.n, self.chosen, once=True)  # one records them all

    def gradient(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def accumulated(call: GradientCall) -> Outcome:
            if frame().in_loss > self.depth:  # a derivative that the loss itself takes
                return run(call)
            cut = Microbatches(call, self.n, self.chosen, "accumulate", even=True)
            own: list[Any] = []
            if self.once:
                outcome = cut.apart(run(cut.part(0)), own)
                aux = divided(reduce(added, [outcome.aux] * self.n), self.n)
                return cut.joined(outcome.replace(aux=aux), own * self.n)
            f, sums, i = frame(), _Sums(), 0
            adds, tracer = self._adds(f), f.tracer or Tracer()
            rounds = tracer.rounds()
            while i < self.n:
                if rounds is not None:
                    rounds.begin("m", i)
                tracer.turn("m", i)
                with inside(f.replace(micro=(*f.micro, (i, self.n)))):
                    part = cut.part(i)
                    if adds and sums.ours:
                        part = part.replace(into=sums.grads)
                    sums.add(cut.apart(run(part), own))
                    del part
                i += 1
                if rounds is not None:
                    handed = [sums, *(runtime.sums for _, runtime in f.runtimes)]
                    left = self.n - i - (not _ends_alike(f))
                    n = rounds.after(Round(handed, sums.ours, left, i - 1))
                    own += own[-1:] * n
                    i += n
                    if n and i == self.n:
                        for _, runtime in f.runtimes:
                            runtime.advance(f.micro)
            if rounds is not None:
                rounds.end()
            tracer.turn("", 0)
            for x in sums.carried().tensors if self.n > 99 else ():
                warn_narrow(x, self.n)
            return cut.joined(sums.outcome(), own)

        return accumulated

    def _adds(self, f: Frame) -> bool:
        """True if `shard` is the next transform within that has to do with gradients.

        It adds those of a microbatch to the sums as they come.
        """
        within = iter(f.handlers)
        if not any(handler is self for handler in within):
            return False
        # The iterator goes on behind this handler: with those within.
        own = (h for h in within if type(h).gradient is not Interpretation.gradient)
        return isinstance(next(own, None), Sharding)


def _ends_alike(f: Frame) -> bool:
    """True if the last microbatch is one like the others: nothing waits for it."""
    reduces = any(runtime.differentiated for _, runtime in f.runtimes)
    return not reduces and all(handler.ends_alike for handler in f.handlers)


class _Sums:
    """Outcomes, added up one by one."""

    def __init__(self) -> None:
        self.first: Any = None
        self.grads: Any = None
        self.count = 0  # of microbatches
        self.ours = False  # whether ``grads`` may be written in place

    def add(self, outcome: Outcome) -> None:
        """Adds an outcome, without writing into its memory."""
        self.count += outcome.count
        if self.first is None:
            self.first, self.grads = outcome, outcome.grads
            self.ours = outcome.owns
            return
        a, b = self.first, outcome
        if (a.scale, len(a.due)) != (b.scale, len(b.due)):
            raise ValueError(
                "accumulate: a transform within changes the gradients, or what the "
                "backward starts from, of some microbatches alone: let it give all of "
                "them outcome.with_mean(...), of the same gradients where none change"
            )
        weight = added_weights(a.weight, b.weight)
        self.grads = outcome.grads if outcome.summed else self._added(outcome.grads)
        aux = added(a.aux, b.aux)
        # Without its gradients: they would be held until the last microbatch.
        sums = a.replace(grads=None, own=None)
        self.first = sums.replace(total=a.total + b.total, weight=weight, aux=aux)

    def _added(self, grads: Any) -> Any:
        ours, theirs = split_alike(self.grads, grads)
        out = list(ours.tensors)
        at = [i for i, x in enumerate(out) if isinstance(x, Tensor)]
        if not at:
            return self.grads
        xs, ys = [out[i] for i in at], [theirs.tensors[i] for i in at]
        if self.ours:
            torch._foreach_add_(xs, ys)  # pyright: ignore
            return self.grads
        # Autograd may hand out one tensor twice, an expanded one, or the caller's own:
        # only sums that we made ourselves are written into.
        if _torch.functorch_active() or any(x.requires_grad for x in (*xs, *ys)):
            sums = [x + y for x, y in zip(xs, ys, strict=True)]  # foreach has no vmap
        else:
            offloaded = any_offloaded()
            sums = [*map(_sum, xs, ys)] if offloaded else torch._foreach_add(xs, ys)
            count_as("gradients", sums)
            self.ours = True
        for i, x in zip(at, sums, strict=True):
            out[i] = x
        return ours.rebuild(out)

    def carried(self) -> Carried:
        """The sums; they count their microbatches."""
        values = self.first.total, self.first.weight, self.first.aux
        every = [*tree.leaves(values), *split_buffers(self.grads).tensors]
        return Carried([x for x in every if isinstance(x, Tensor)], {"sums": self})

    def outcome(self) -> Outcome:
        """The outcome that is the sum."""
        grads = self.grads
        own = grads if self.ours else None
        return self.first.replace(grads=grads, own=own, count=self.count)


def _sum(x: Tensor, y: Tensor) -> Tensor:
    """``x + y``, in the memory space of ``x``."""
    home = space_of(x)
    out = home.empty_like(x, scratch=True) if home.offloaded else None
    return torch.add(x, y.to(x.device), out=out)
