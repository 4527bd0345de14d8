"""What a reduction loses of a gradient is added to the next one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.collective_ops import assumed
from fsfunc.comm.mesh import here
from fsfunc.core.autodiff import GradientCall, Outcome
from fsfunc.core.frames import Interpretation, frame, inside
from fsfunc.optim.leaves import Tree
from fsfunc.optim.optimizer import Optimizer, Run, State
from fsfunc.sharded.layout import Layout, Split
from fsfunc.sharded.leaf import FlatShard, Sharded, is_sharded
from fsfunc.transforms.wire import Reduction

__all__ = ["NOTHING_LOST", "ErrorFeedbackState", "Feedback", "error_feedback"]


class ErrorFeedbackState(NamedTuple):
    """What each rank still owes of each buffer, and what the optimizer within keeps.

    ``residuals``: by buffer, float32 [ranks, elements], each rank holding its row.
    """

    residuals: dict[str, Sharded]
    inner: State


def error_feedback(optimizer: Optimizer) -> Optimizer:
    """``optimizer``, whose steps send later what their reductions lose.

    With C what a lossy ``reduction=`` of ``shard`` makes of a rank's gradient g::

        sent = C(g + residual)      residual = g + residual - sent

    So over many steps all of each gradient arrives. Without it rounding that goes one
    way stays.

    Returns:
        the optimizer; its state is an `ErrorFeedbackState`. It makes its train step
        itself, ``error_feedback(...)(grad_fn)``.

    Raises:
        ValueError: a reduction that loses nothing.
        RuntimeError: a state that was not made of placed parameters.

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
    ...     x = torch.tensor([127.0, 0.4])
    ...     state = ff.init_state(step, torch.zeros(2), optimizer, x)
    ...     for _ in range(5):
    ...         state, _ = step(state, x)
    ...     return ff.unshard(state.params)
    >>> ff.spmd(main, mesh)()[0]  # 5 times x; without it, the 0.4 would be 0
    tensor([-635.,   -2.])
    """
    return _WithFeedback(optimizer).functions()


@dataclass(frozen=True, eq=False)
class _WithFeedback:
    """The functions of such an optimizer; ``residuals``: those after one step."""

    optimizer: Optimizer
    residuals: dict[str, Sharded] | None = None

    def functions(self) -> Optimizer:
        return Optimizer(self.init, self.update, prepare=self.prepare, take=self.take)

    def init(self, params: Tree) -> ErrorFeedbackState:
        found = {}
        for x in tree.leaves(params, is_leaf=is_sharded):
            shard = x.packed if is_sharded(x) else None
            if shard is not None and shard.buffer not in found:
                found[shard.buffer] = _nothing(shard)
        return ErrorFeedbackState(found, self.optimizer.init(params))

    def update(self, grads: Tree, state: ErrorFeedbackState, params: Tree = None):
        updates, inner = self.optimizer.update(grads, state.inner, params)
        return updates, self._after(state, inner)

    def prepare(self, grads: Tree, state: ErrorFeedbackState, params: Tree):
        commit = self.optimizer.prepare(grads, state.inner, params)

        def finish() -> tuple[Tree, ErrorFeedbackState]:
            params, inner = commit()
            return params, self._after(state, inner)

        return finish

    def _after(self, state: ErrorFeedbackState, inner: State) -> ErrorFeedbackState:
        owed = state.residuals if self.residuals is None else self.residuals
        return ErrorFeedbackState(owed, inner)

    def take(self, run: Run, state: ErrorFeedbackState) -> tuple[Any, Tree, Optimizer]:
        feedback = Feedback(state.residuals)

        def fed() -> tuple[Any, Tree]:
            f = frame()
            with inside(replace(f, handlers=(*f.handlers, feedback))):
                return run()

        if self.optimizer.take is None:
            (value, grads), inner = fed(), self.optimizer
        else:
            value, grads, inner = self.optimizer.take(fed, state.inner)
        after = replace(self, optimizer=inner, residuals=feedback.after())
        return value, grads, after.functions()


@dataclass(eq=False)
class Feedback(Interpretation):
    """What reductions of one step add, and what they still owe after it."""

    residuals: dict[str, Sharded]
    new: dict[str, Tensor] = field(default_factory=dict)
    scale: float = 1.0
    tried: bool = False  # a step that is only recorded, or planned

    called = "error_feedback"

    def gradient(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def fed(call: GradientCall) -> Outcome:
            self.scale, self.tried = call.cotangent, frame().tracer is not None
            return run(call)

        return fed

    def encode(
        self, how: Reduction, buffer: Tensor, shard: FlatShard, ranks: int
    ) -> Tensor:
        """What is sent of a gradient and what is owed; takes in what is lost."""
        owed = self.new.get(shard.buffer)
        if owed is None and shard.buffer in self.residuals:
            owed = assumed(self.residuals[shard.buffer].local[0], "V")
        if owed is None:
            if not self.tried:
                raise RuntimeError(
                    f"error_feedback owes nothing of {shard.name}: its state was made "
                    "of other parameters; make it by ff.init_state(step, params, "
                    "optimizer, batch), or optimizer.init of placed parameters"
                )
            return how.encode(buffer, ranks)
        whole = buffer.float().add(owed, alpha=self.scale)
        sent = how.encode(whole.to(buffer.dtype), ranks)
        lost = whole.sub_(how.sent(sent, whole.numel() // ranks))
        # Of what overflowed nothing is owed: such a step is skipped, or lost anyway.
        self.new[shard.buffer] = lost.nan_to_num_(0.0, 0.0, 0.0).div_(self.scale)
        return sent

    def after(self) -> dict[str, Sharded]:
        """All that is owed after the step."""
        found = dict(self.residuals)
        for name, row in self.new.items():  # this rank's part of a tensor of them all
            found[name] = found[name].with_local(assumed(row[None], "S"))
        return found


def _nothing(shard: FlatShard) -> Sharded:
    """Zeros for a buffer, a row for each rank of the mesh."""
    at, size = here(), shard.place.size * shard.place.chunk
    parts = tuple(Split(0, axis, n) for axis, n in at.mesh.axes.items())
    layout = Layout((at.mesh.size, size), torch.float32, parts, shard.buffer)
    device = shard.flat.device
    return Sharded(torch.zeros(1, size, dtype=torch.float32, device=device), layout)


NOTHING_LOST = (
    "error_feedback sends later what a reduction loses, and this shard sums gradients "
    "as they are: give it one that does, such as reduction=ff.QuantizedReduction()"
)
