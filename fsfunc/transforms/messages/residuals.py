"""Error feedback: what a reduction loses is added to the next gradient.

A state of rows by buffer travels with the optimizer's own: `WithFeedback` keeps it, for
`error_feedback` here and for `powersgd`. In each step it puts a `Feedback` among the
interpretations, which ``shard`` asks to send gradients, and which collects the rows for
the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.backends.link import Handle
from fsfunc.comm.collective_ops import declare_type
from fsfunc.comm.groups import RankGroup
from fsfunc.comm.mesh import here
from fsfunc.core.frames import frame
from fsfunc.core.outcomes import GradientCall, Outcome
from fsfunc.core.reduction_hooks import ReductionFeedback
from fsfunc.optim.leaves import Tree
from fsfunc.optim.optimizer import (
    GradientScope,
    Optimizer,
    Phases,
    State,
    from_phases,
    optimizer_factory,
)
from fsfunc.sharded.layout import Layout
from fsfunc.sharded.leaf import FlatShard, Sharded, is_sharded
from fsfunc.sharded.placements import OfRank
from fsfunc.transforms.messages.wire import Reduction


class ErrorFeedbackState(NamedTuple):
    """Residuals of each buffer, and the state of the optimizer within.

    ``residuals``: by buffer, float32 [ranks, elements], each rank holding its row.
    """

    residuals: dict[str, Sharded]
    inner: State


@optimizer_factory
def error_feedback(optimizer: Optimizer) -> Optimizer:
    """Makes steps of ``optimizer`` send later what their reductions lose.

    With C what a lossy ``reduction=`` of ``shard`` makes of a rank's gradient g::

        sent = C(g + residual)      residual = g + residual - sent

    So over many steps all of each gradient arrives. Without it rounding that goes one
    way stays.

    Returns:
        the optimizer; its state is an `ErrorFeedbackState`. It makes its train step
        itself, ``error_feedback(...)(grad_fn)``.

    Raises:
        ValueError: a reduction that loses nothing.
        RuntimeError: a state that was not made of placed parameters; gradients that
            were not taken by its train step.

    Put `loss_scale` around it, not within: a step that is skipped then leaves what is
    owed as it was.

    Cost: float32 memory of the whole gradient on each rank, at any ``zero``; three
    passes over it. Weights of ``Weighted`` losses and the number of microbatches are
    best the same in each step: what is owed is owed in their units.

    Source: Karimireddy et al., Error Feedback Fixes SignSGD, 2019, algorithm 2.

    >>> import torch, fsfunc as ff
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> unit = ff.unit(lambda w, x: (w * x).sum())
    >>> optimizer = error_feedback(ff.sgd(1.0))
    >>> def main():
    ...     step = optimizer(ff.value_and_grad(lambda w, x: unit(w, x)))
    ...     step = ff.shard(step, mesh, "data", reduction=ff.QuantizedReduction(4))
    ...     x = torch.tensor([[127.0, 0.4], [127.0, 0.2]])
    ...     x = ff.local_batch(x, mesh, "data")
    ...     state = ff.init_state(step, torch.zeros(2), optimizer, x)
    ...     for _ in range(5):
    ...         state, _ = step(state, x)
    ...     return ff.unshard(state.params)
    >>> ff.spmd(main, mesh)()[0]  # 5 times the mean; without it, the 1.5 is 0
    tensor([-635.0000,   -1.5000])
    """
    f = WithFeedback(optimizer, ErrorFeedbackState, _zero_residual, _ErrorFeedback)
    return f.functions()


def _zero_residual(shard: FlatShard) -> tuple[Tensor]:
    size = shard.place.size * shard.place.chunk
    return (torch.zeros(size, dtype=torch.float32, device=shard.flat.device),)


# What is remembered: for each field of the state, by the name of a buffer, [ranks,
# elements], of which a rank has its row.
Rows = tuple[dict[str, Sharded], ...]


@dataclass(frozen=True, eq=False)
class WithFeedback:
    """The functions of an optimizer that has reductions remember something.

    Args:
        optimizer: the one within.
        state_class: a NamedTuple of what is remembered, each ``{buffer: [ranks,
            elements]}``, and the state within.
        first_rows: returns what a rank remembers of a buffer before the first step,
            each 1-D.
        make_feedback: makes the `Feedback` of one step, of what the state remembers.
        feedback: that of the step whose gradients it applies.
    """

    optimizer: Optimizer
    state_class: Callable[..., State]
    first_rows: Callable[[FlatShard], tuple[Tensor, ...]]
    make_feedback: Callable[[Rows], Feedback]
    feedback: Feedback | None = None

    def functions(self) -> Optimizer:
        return from_phases(self.init, self.phases, interprets=self.interprets)

    def init(self, params: Tree) -> State:
        """Returns the first state."""
        by_buffer: dict[str, list[Sharded]] = {}
        for x in tree.leaves(params, is_leaf=is_sharded):
            # Buffers of integers or complex numbers are sent as they are: nothing is
            # lost of them (`_Message.encodes`).
            shard = x.packed if is_sharded(x) else None
            if shard is not None and shard.flat.is_floating_point():
                if (name := shard.buffer) not in by_buffer:
                    rows = self.first_rows(shard)
                    by_buffer[name] = [_stack_of_ranks(row, name) for row in rows]
        count = len(self.state_class._fields) - 1  # type: ignore[attr-defined]
        rows = [{name: r[i] for name, r in by_buffer.items()} for i in range(count)]
        return self.state_class(*rows, self.optimizer.init(params))

    def phases(
        self, grads: Tree, state: State, params: Tree, returns_params: bool
    ) -> Phases:
        """Runs the step within; the new state has what its feedback remembered."""
        if self.feedback is None:
            raise RuntimeError(
                f"{self.make_feedback(state[:-1]).called} saw no gradients being "
                "reduced: have it make the train step, optimizer(grad_fn)"
            )
        step = self.optimizer.phases(grads, state.inner, params, returns_params)
        updated, inner = yield from step
        return updated, self.state_class(*self.feedback.rows_after(), inner)

    def interprets(self, state: State) -> GradientScope:
        """Returns the interpretations in which gradients are taken, and who applies."""
        handlers, inner = self.optimizer.gradient_scope(state.inner)
        feedback = self.make_feedback(state[:-1])
        after = replace(self, optimizer=inner, feedback=feedback).functions()
        return GradientScope((*handlers, feedback), after)


@dataclass(eq=False)
class Feedback(ReductionFeedback):
    """State of the reductions of one step: from those before, and for the next.

    Args:
        rows: what was remembered before the step.
        new_rows: by buffer, what this rank remembers after it.
        scale: the loss scale, by which the gradients are larger than those of the loss.
        is_tried: whether the step is only recorded, or planned.
    """

    rows: Rows
    new_rows: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    scale: float = 1.0
    is_tried: bool = False

    def gradient(
        self, run: Callable[[GradientCall], Outcome]
    ) -> Callable[[GradientCall], Outcome]:
        def run_with_scale(call: GradientCall) -> Outcome:
            self.scale, self.is_tried = call.cotangent, frame().tracer is not None
            return run(call)

        return run_with_scale

    def find_rows(self, shard: FlatShard) -> tuple[Tensor, ...] | None:
        """Returns the rows remembered of a buffer, by this step or those before.

        None in a step that is only tried, whose state may not have them yet.

        Raises:
            RuntimeError: nothing is remembered.
        """
        name = shard.buffer
        # Reduced a second time in this step, as by several microbatches.
        if name in self.new_rows:
            return self.new_rows[name]
        if all(name in by_buffer for by_buffer in self.rows):
            parts = [by_buffer[name].local[0] for by_buffer in self.rows]
            return tuple(declare_type(part, "V") for part in parts)
        if self.is_tried:
            return None
        raise RuntimeError(
            f"{self.called} remembers nothing of {shard.name}: its state was made "
            "of other parameters; make it by ff.init_state(step, params, "
            "optimizer, batch), or optimizer.init of placed parameters"
        )

    def rows_after(self) -> Rows:
        """Returns all that is remembered after the step."""
        after = tuple(dict(by_buffer) for by_buffer in self.rows)
        for name, rows in self.new_rows.items():
            for by_buffer, row in zip(after, rows, strict=True):
                # A step that is only tried may have no rows of it yet (`find_rows`).
                if name in by_buffer:
                    # Declared to be this rank's part of the tensor of all rows.
                    part = declare_type(row[None], "S")
                    by_buffer[name] = by_buffer[name].with_local(part)
        return after


class _ErrorFeedback(Feedback):
    """The feedback of ``error_feedback``: the row of a buffer is its residual."""

    called = "error_feedback"

    def check(self, reduction: Reduction) -> None:
        if reduction.exact:
            raise ValueError(_NOTHING_LOST)

    def send(
        self,
        reduction: Reduction,
        buffer: Tensor,
        shard: FlatShard,
        where: RankGroup,
        whole: bool,
    ) -> Handle:
        sent = self._encode(reduction, buffer, shard, where.size)
        return reduction.move(sent, where, whole, shard.name)

    def _encode(
        self, reduction: Reduction, buffer: Tensor, shard: FlatShard, ranks: int
    ) -> Tensor:
        """Encodes a gradient and its residual; the new residual is what is lost."""
        rows = self.find_rows(shard)
        if rows is None:
            return reduction.encode(buffer, ranks)
        # Residuals are those of the loss itself, so that a change of scale keeps them.
        total = buffer.float().add(rows[0], alpha=self.scale)
        # Not ``total`` itself: the encoding may be a view of what it is given.
        sent = reduction.encode(buffer.copy_(total), ranks)
        lost = total.sub_(reduction.sent(sent, total.numel() // ranks))
        # What overflowed is not remembered: such a step is skipped, or lost anyway.
        residual = lost.nan_to_num_(0.0, 0.0, 0.0).div_(self.scale)
        self.new_rows[shard.buffer] = (residual,)
        return sent


def _stack_of_ranks(row: Tensor, name: str) -> Sharded:
    """Returns a tensor with a row for each rank of the mesh, of which this is ours."""
    mesh = here().mesh
    parts = tuple(OfRank(0, axis, n) for axis, n in mesh.axes.items())
    return Sharded(row[None], Layout((mesh.size, len(row)), row.dtype, parts, name))


_NOTHING_LOST = (
    "error_feedback sends later what a reduction loses, and this shard sums gradients "
    "as they are: give it one that does, such as reduction=ff.QuantizedReduction()"
)
