"""Error feedback: a reduction's loss is added to the next gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

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
from fsfunc.sharded.layout import Layout, Split
from fsfunc.sharded.leaf import FlatShard, Sharded, is_sharded
from fsfunc.transforms.messages.wire import Reduction


class ErrorFeedbackState(NamedTuple):
    """Residuals of each buffer, and the state of the optimizer within.

    ``residuals``: by buffer, float32 [ranks, elements], each rank holding its row.
    """

    residuals: dict[str, Sharded]
    inner: State


@optimizer_factory
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
    f = WithFeedback(optimizer, ErrorFeedbackState, _nothing_owed, _Owing)
    return f.functions()


def _nothing_owed(shard: FlatShard) -> tuple[Tensor]:
    size = shard.place.size * shard.place.chunk
    return (torch.zeros(size, dtype=torch.float32, device=shard.flat.device),)


Kept = tuple[dict[str, Sharded], ...]


@dataclass(frozen=True, eq=False)
class WithFeedback:
    """The functions of an optimizer that has reductions remember something.

    Args:
        optimizer: the one within.
        state: makes its state, a NamedTuple of what is remembered, each ``{buffer:
            [ranks, elements]}``, and the state within.
        begin: what a rank remembers of a buffer before the first step, each 1-D.
        feed: the `Feedback` of one step, of what the state remembers.
        fed: that of the step whose gradients it applies.
    """

    optimizer: Optimizer
    state: Callable[..., Any]
    begin: Callable[[FlatShard], tuple[Tensor, ...]]
    feed: Callable[[Kept], Feedback]
    fed: Feedback | None = None

    def functions(self) -> Optimizer:
        return from_phases(self.init, self.phases, interprets=self.interprets)

    def init(self, params: Tree) -> Any:
        found: dict[str, list[Sharded]] = {}
        for x in tree.leaves(params, is_leaf=is_sharded):
            shard = x.packed if is_sharded(x) else None
            if shard is not None and shard.flat.is_floating_point():
                if shard.buffer not in found:
                    rows = self.begin(shard)
                    found[shard.buffer] = [_rows(row, shard.buffer) for row in rows]
        count = len(self.state._fields) - 1  # type: ignore[attr-defined]
        kept = [{name: rows[i] for name, rows in found.items()} for i in range(count)]
        return self.state(*kept, self.optimizer.init(params))

    def phases(
        self, grads: Tree, state: Any, params: Tree, returns_params: bool
    ) -> Phases:
        if self.fed is None:
            raise RuntimeError(
                f"{self.feed(state[:-1]).called} saw no gradients being reduced: have "
                "it make the train step, optimizer(grad_fn)"
            )
        step = self.optimizer.phases(grads, state.inner, params, returns_params)
        result, inner = yield from step
        return result, self.state(*self.fed.after(), inner)

    def interprets(self, state: Any) -> GradientScope:
        handlers, inner = self.optimizer.gradient_scope(state.inner)
        fed = self.feed(state[:-1])
        after = replace(self, optimizer=inner, fed=fed).functions()
        return GradientScope((*handlers, fed), after)


@dataclass(eq=False)
class Feedback(ReductionFeedback):
    """State of the reductions of one step: from those before, and for the next.

    Args:
        kept: what was remembered, each by buffer.

    ``new``: by buffer, what this rank remembers after it. ``scale``: by what the
    gradients are larger than those of the loss. ``tried``: in a step that is only
    recorded, or planned.
    """

    kept: Kept
    new: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    scale: float = 1.0
    tried: bool = False

    def gradient(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def fed(call: GradientCall) -> Outcome:
            self.scale, self.tried = call.cotangent, frame().tracer is not None
            return run(call)

        return fed

    def remembered(self, shard: FlatShard) -> tuple[Tensor, ...] | None:
        """The rows remembered of a buffer, by this step or those before.

        Raises:
            RuntimeError: nothing, in a step that is not only tried.
        """
        name = shard.buffer
        if name in self.new:
            return self.new[name]
        if all(name in kept for kept in self.kept):
            return tuple(declare_type(kept[name].local[0], "V") for kept in self.kept)
        if self.tried:
            return None
        raise RuntimeError(
            f"{self.called} remembers nothing of {shard.name}: its state was made "
            "of other parameters; make it by ff.init_state(step, params, "
            "optimizer, batch), or optimizer.init of placed parameters"
        )

    def after(self) -> Kept:
        """All that is remembered after the step."""
        found = tuple(dict(kept) for kept in self.kept)
        for name, rows in self.new.items():  # this rank's part of a tensor of them all
            for kept, row in zip(found, rows, strict=True):
                if name in kept:
                    kept[name] = kept[name].with_local(declare_type(row[None], "S"))
        return found


class _Owing(Feedback):
    called = "error_feedback"

    def check(self, how: Reduction) -> None:
        if how.exact:
            raise ValueError(_NOTHING_LOST)

    def send(
        self,
        how: Reduction,
        buffer: Tensor,
        shard: FlatShard,
        where: RankGroup,
        whole: bool,
    ) -> Handle:
        sent = self._encode(how, buffer, shard, where.size)
        return how.move(sent, where, whole, shard.name)

    def _encode(
        self, how: Reduction, buffer: Tensor, shard: FlatShard, ranks: int
    ) -> Tensor:
        """Encodes a gradient and its residual; the new residual is what is lost."""
        owed = self.remembered(shard)
        if owed is None:
            return how.encode(buffer, ranks)
        total = buffer.float().add(owed[0], alpha=self.scale)
        # Not ``total`` itself: the encoding may be a view of what it is given.
        sent = how.encode(buffer.copy_(total), ranks)
        lost = total.sub_(how.sent(sent, total.numel() // ranks))
        # Of what overflowed nothing is owed: such a step is skipped, or lost anyway.
        self.new[shard.buffer] = (lost.nan_to_num_(0.0, 0.0, 0.0).div_(self.scale),)
        return sent


def _rows(row: Tensor, name: str) -> Sharded:
    """A tensor with a row for each rank of the mesh, of which this is ours."""
    at = here()
    parts = tuple(Split(0, axis, n) for axis, n in at.mesh.axes.items())
    return Sharded(row[None], Layout((at.mesh.size, len(row)), row.dtype, parts, name))


_NOTHING_LOST = (
    "error_feedback sends later what a reduction loses, and this shard sums gradients "
    "as they are: give it one that does, such as reduction=ff.QuantizedReduction()"
)
