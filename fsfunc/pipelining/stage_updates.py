"""Stages that update in between: a pipelined loss that is itself a train step.

``pipeline(loss, ..., update=optimizer)`` makes an `Updating` in place of a
`handler.Pipelining`. Its schedule has actions U, at which a stage applies the optimizer
to its own parameters, without waiting for the other stages. So a forward may use
parameters that are some updates older than those its gradient is applied to::

    rank 0:  F0 F1 B0 U0 F2 B1 U1 ...     F1 read w[0], and its gradient makes w[2]
    rank 1:  F0 B0 U0 F1 B1 U1 ...        each forward reads the newest w

Each microbatch's backward uses the parameters of its own forward (`_Version`), as
PipeDream's weight stashing does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, TypeVar, cast

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.collective_ops import maps_run_by
from fsfunc.comm.groups import RankGroup
from fsfunc.comm.ledgers import silence
from fsfunc.comm.linear_maps import LinearMap
from fsfunc.core.autodiff import value_and_grad
from fsfunc.core.casts import differentiable
from fsfunc.core.frames import Frame, Interpretation, frame, inside
from fsfunc.core.losses import loss_parts
from fsfunc.core.outcomes import GradientCall, Leaves, Outcome
from fsfunc.optim.optimizer import Optimizer
from fsfunc.pipelining.actions import Action, Schedule, ScheduleError, owners
from fsfunc.pipelining.handler import Pipelining
from fsfunc.pipelining.microbatches import (
    Microbatch,
    blank,
    broadcast_results,
    combine_results,
)
from fsfunc.pipelining.runtime import Worker
from fsfunc.pipelining.schedules import staleness
from fsfunc.sharded.leaf import is_sharded
from fsfunc.tree.types import PyTree

if TYPE_CHECKING:
    from fsfunc.state.train_state import TrainState

_P = TypeVar("_P")  # a tree of parameters

# (params, opt_state, updates) -> params
Predict = Callable[[PyTree, PyTree, int], PyTree]


@dataclass(eq=False, repr=False)
class Updating(Pipelining):
    """Interprets a loss as a pipeline whose stages update in between.

    Args:
        optimizer: applied by each rank to its own leaves, at every U.
        predict: ``(params, opt_state, updates) -> params``, some updates ahead.
    """

    optimizer: Optimizer
    predict: Predict | None

    def __post_init__(self) -> None:
        _check_schedule(self.schedule)
        if self.optimizer.interprets is not None:
            raise ValueError(
                "the optimizer takes gradients in a way of its own, as loss_scale "
                "does, and an asynchronous schedule updates stage by stage: use "
                "another schedule"
            )
        super().__post_init__()
        self.staleness: tuple[tuple[int, ...], ...] = staleness(self.schedule)
        self.optimizer_is_checked: bool = False

    def step(
        self, loss: Callable[..., PyTree]
    ) -> Callable[..., tuple[TrainState, dict[str, Tensor]]]:
        """Returns the train step of a loss, to be run under this interpretation."""
        _check_around(getattr(loss, "interpretations", ()))

        def step(
            state: TrainState, *batch: PyTree, **keywords: PyTree
        ) -> tuple[TrainState, dict[str, Tensor]]:
            f = frame()
            _check_around(f.handlers[:-1])
            # While a step is recorded another interpretation stands for this one. Only
            # layouts and types are wanted then, and a synchronous step has the same.
            if f.handlers[-1] is not self:
                value, grads = value_and_grad(loss)(state.params, *batch, **keywords)
                return state.apply_gradients(grads, self.optimizer), {"loss": value}
            if state.opt_state is None:
                raise ValueError(
                    "this state has no optimizer state: make it by ff.init_state(step, "
                    "params, optimizer, batch)"
                )
            running = _Running(loss, state.params, state.opt_state)
            value = value_and_grad(running)(state.params, *batch, **keywords)[0]
            changes = {"params": running.params, "opt_state": running.opt_state}
            return state.replace(step=state.step + 1, **changes), {"loss": value}

        # So the step prints, and is checked, as one of the loss's own transforms.
        step.interpretations = getattr(loss, "interpretations", ())  # type: ignore
        return step

    def _differentiate(self, depth: int, number: int, call: GradientCall) -> Outcome:
        running = cast(_Running, call.fn)
        # Donated memory would be written by an update while forwards of older versions
        # still need it.
        f = frame().replace(donated=None)
        call = call.replace(fn=running.loss)
        batches = self._batches(call, number)
        rank_group = self._rank_group()
        blanks = [loss_parts(blank(b.cut.program.loss.outputs), False) for b in batches]
        if any(weight is not None for _, weight, _ in blanks):
            raise ValueError(
                "an asynchronous schedule updates before all weights of a Weighted "
                "loss are known: return the mean over the microbatch's rows"
            )
        self._check_leaves(batches, running.params)
        if rank_group.size > 1 and not self.optimizer_is_checked:
            self._check_optimizer(running, f)
            self.optimizer_is_checked = True
        worker = _UpdatingWorker(self, running, batches, rank_group, f, depth)
        results = self._run(worker)
        running.params, running.opt_state = worker.params, worker.opt_state
        summed = combine_results(results, [b.share for b in batches])
        total, _, _ = broadcast_results(summed, rank_group, self.owners[-1])
        return Outcome(total, None, (None,), None, self.n_microbatches)

    def _check_leaves(self, batches: Sequence[Microbatch], params: PyTree) -> None:
        """Raises if a leaf could not be updated by one rank alone."""
        stages = [stage for batch in batches for stage in batch.cut.stages]
        used_paths = frozenset[str]().union(*(s.leaves | s.reads for s in stages))
        paths, leaves, _ = tree.flatten_with_paths(params, is_leaf=is_sharded)
        for path, leaf in zip(paths, leaves, strict=True):
            if is_sharded(leaf):
                if leaf.layout.parts != leaf.layout.owners:
                    raise ValueError(
                        f"{path!r} is {leaf.layout}: an asynchronous schedule goes "
                        "without shard, as its stages update at times of their own"
                    )
                continue
            trained = isinstance(leaf, Tensor) and differentiable(leaf)
            if len(self.schedule) > 1 and path in used_paths and trained:
                raise ValueError(
                    f"{path!r} is whole on every rank, and under an asynchronous "
                    "schedule a leaf belongs to the one stage that updates it: make "
                    "the state by ff.init_state(step, params, optimizer, batch), read "
                    "the leaf in units, not in the loss, and choose stages= so that "
                    "one stage has all its uses; or use another schedule"
                )

    def _check_optimizer(self, running: _Running, f: Frame) -> None:
        """Raises if the optimizer would communicate, or ``predict`` would fail.

        It tries them on zero gradients before the first call's actions, as an error on
        one rank between two actions would leave the others waiting.
        """

        def refused(
            x: Tensor, linear_map: LinearMap, rank_group: RankGroup
        ) -> NoReturn:
            raise ValueError(
                f"the optimizer issues {linear_map.op} over {rank_group.name}, but "
                "under an asynchronous schedule every rank updates at times of its "
                "own: do "
                "without what sums over all leaves, such as clip_by_global_norm, or "
                "use another schedule"
            )

        params, opt_state = running.params, running.opt_state
        leaves = Leaves((params,), (0,))
        (grads,) = leaves.grads([torch.zeros_like(x) for x in leaves.tensors])
        with torch.no_grad(), inside(f), silence(), maps_run_by(refused):
            self.optimizer.apply(grads, opt_state, params)
            self.predict_ahead(params, opt_state, 1)

    def predict_ahead(self, params: _P, opt_state: PyTree, updates: int) -> _P:
        """Returns the parameters of a forward whose gradient is some updates late."""
        if self.predict is None or not updates:
            return params
        predicted = self.predict(params, opt_state, updates)
        tree.check_same_structure(
            params, predicted, what="predicted parameters",
            against="the parameters", is_leaf=is_sharded,
        )  # fmt: skip
        return predicted


class _Running:
    """The loss of one call, and the state as the call changes it.

    It is passed as the function of the gradient call: `Updating.step` finds the new
    state in it, as a gradient call itself returns gradients alone.
    """

    def __init__(self, loss: Callable[..., PyTree], params: PyTree, opt_state: PyTree):
        self.loss, self.params, self.opt_state = loss, params, opt_state

    def __call__(self, *args: PyTree, **keywords: PyTree) -> PyTree:
        return self.loss(*args, **keywords)


class _Version:
    """Parameters as some forwards use them: leaves of autograd's graphs."""

    def __init__(self, params: PyTree):
        self.leaves = Leaves((params,), (0,))
        self.grad_leaves = [x.detach().requires_grad_() for x in self.leaves.tensors]
        (self.params,) = self.leaves.args(self.grad_leaves)


class _UpdatingWorker(Worker):
    """One rank of one call: a :class:`Worker` whose parameters change on the way.

    Attributes:
        params, opt_state: the newest; after ``run`` those that the step returns.
        staleness: by microbatch, the number of updates between its forward and its
            backward.
        newest: ``params`` as leaves of autograd; ``version``: what the forward that
            runs uses, which differs where they are predicted.
    """

    def __init__(
        self,
        handler: Updating,
        running: _Running,
        microbatches: Sequence[Microbatch],
        rank_group: RankGroup,
        frame: Frame,
        depth: int,
    ):
        super().__init__(
            lambda returned: loss_parts(returned, False),
            microbatches, handler.owners, rank_group, frame, depth, (),
        )  # fmt: skip
        self.optimizer, self.predict_ahead = handler.optimizer, handler.predict_ahead
        self.staleness = handler.staleness[rank_group.index]
        self.params, self.opt_state = running.params, running.opt_state
        self.newest = self.version = _Version(self.params)
        self.used_versions: dict[int, _Version] = {}  # by microbatch, till its backward
        # Over the microbatches since the last update: sums of gradients, and of shares.
        self.sums: list[Tensor | None] = [None] * len(self.newest.grad_leaves)
        self.share = 0.0

    def _F(self, a: Action) -> None:
        with torch.no_grad(), inside(self.frame):
            updates = self.staleness[a.microbatch]
            params = self.predict_ahead(self.params, self.opt_state, updates)
        self.version = self.newest if params is self.params else _Version(params)
        self.used_versions[a.microbatch], self.grad_leaves = (
            self.version,
            self.version.grad_leaves,
        )
        super()._F(a)

    def _call_loss(self, call: GradientCall) -> PyTree:
        # A loss bound to this worker would be a circle, whose tensors wait for the
        # garbage collector.
        return call.fn(self.version.params, *call.args[1:], **call.keywords)

    def _B(self, a: Action) -> None:
        with self._adding_gradients(a):
            super()._B(a)

    def _W(self, a: Action) -> None:
        with self._adding_gradients(a):
            super()._W(a)

    @contextmanager
    def _adding_gradients(self, a: Action) -> Iterator[None]:
        """Makes a backward add its version's gradients to the sums of all versions."""
        grad_leaves = self.used_versions.pop(a.microbatch).grad_leaves
        for x, g in zip(grad_leaves, self.sums, strict=True):
            x.grad = g
        yield
        self.sums = [x.grad for x in grad_leaves]
        for x in grad_leaves:
            x.grad = None
        self.share += self.microbatches[a.microbatch].share

    def _U(self, a: Action) -> None:
        gradients = [g for g in self.sums if g is not None]
        if gradients:
            torch._foreach_div_(gradients, self.share)  # the mean over their rows
        # Applied to the newest parameters, whatever version each gradient is of.
        (grads,) = self.newest.leaves.grads(self.sums)
        with torch.no_grad(), inside(self.frame):
            self.params, self.opt_state = self.optimizer.apply(
                grads, self.opt_state, self.params
            )
        self.newest = _Version(self.params)
        self.sums = [None] * len(self.sums)
        self.share = 0.0


def _check_schedule(schedule: Schedule) -> None:
    """Raises unless each rank has one stage, and all ranks update equally often."""
    if len(owners(schedule)) > len(schedule):
        raise ScheduleError(
            f"{len(owners(schedule))} stages on {len(schedule)} ranks: under an "
            "asynchronous schedule a rank has one stage"
        )
    counts = [sum(action.traits.updates for action in row) for row in schedule]
    if len(set(counts)) > 1:
        raise ScheduleError(
            f"the ranks update {counts} times: the state counts updates, so every "
            "stage has equally many"
        )


def _check_around(handlers: Sequence[Interpretation]) -> None:
    """Raises if another transform would reinterpret the gradient call."""
    # A recorded interpretation has the transform's own as its ``handler``.
    for handler in (getattr(h, "handler", h) for h in handlers):
        if type(handler).gradient is not Interpretation.gradient:
            name = type(handler).__name__.strip("_").lower()
            raise ValueError(
                f"{name} around or inside an asynchronous pipeline: its stages update "
                "at times of their own, so there is no gradient of the step that "
                "another transform could sum or shard; use another schedule"
            )
