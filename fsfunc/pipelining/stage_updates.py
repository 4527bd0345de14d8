"""Stages that update in between: a pipelined loss that is itself a train step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.collective_ops import run_by
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
from fsfunc.pipelining.microbatches import Microbatch, blank, combined, everywhere
from fsfunc.pipelining.runtime import Worker
from fsfunc.pipelining.schedules import staleness
from fsfunc.sharded.leaf import is_sharded

Predict = Callable[[Any, Any, int], Any]  # (params, opt_state, updates) -> params


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
        self.late = staleness(self.schedule)
        self.is_tried = False

    def step(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """The train step of a loss; it runs in reach of this interpretation."""
        _check_around(getattr(loss, "interpretations", ()))

        def step(state: Any, *batch: Any, **named: Any) -> tuple[Any, dict[str, Any]]:
            f = frame()
            _check_around(f.handlers[:-1])
            if f.handlers[-1] is not self:  # recorded, by what stands for it
                value, grads = value_and_grad(loss)(state.params, *batch, **named)
                return state.apply_gradients(grads, self.optimizer), {"loss": value}
            if state.opt_state is None:
                raise ValueError(
                    "this state has no optimizer state: make it by ff.init_state(step, "
                    "params, optimizer, batch)"
                )
            running = _Running(loss, state.params, state.opt_state)
            value = value_and_grad(running)(state.params, *batch, **named)[0]
            changes = {"params": running.params, "opt_state": running.opt_state}
            return state.replace(step=state.step + 1, **changes), {"loss": value}

        step.interpretations = getattr(loss, "interpretations", ())  # type: ignore
        return step

    def _differentiate(self, depth: int, number: int, call: GradientCall) -> Outcome:
        running = cast(_Running, call.fn)
        f = frame().replace(donated=None)  # forwards use old versions
        call = call.replace(fn=running.loss)
        batches = self._batches(call, number)
        where = self._where()
        blanks = [loss_parts(blank(b.cut.program.loss.outputs), False) for b in batches]
        if any(weight is not None for _, weight, _ in blanks):
            raise ValueError(
                "an asynchronous schedule updates before all weights of a Weighted "
                "loss are known: return the mean over the microbatch's rows"
            )
        self._check_leaves(batches, running.params)
        if where.size > 1 and not self.is_tried:
            self._try(running, f)
            self.is_tried = True
        worker = _UpdatingWorker(self, running, batches, where, f, depth)
        results = self._run(worker)
        running.params, running.opt_state = worker.params, worker.opt_state
        summed = combined(results, [b.share for b in batches])
        total, _, _ = everywhere(summed, where, self.owners[-1])
        return Outcome(total, None, (None,), None, self.n)

    def _check_leaves(self, batches: Sequence[Microbatch], params: Any) -> None:
        """Raises where a rank cannot update its leaves alone."""
        stages = [stage for batch in batches for stage in batch.cut.stages]
        used = frozenset[str]().union(*(s.leaves | s.reads for s in stages))
        paths, leaves, _ = tree.flatten_with_paths(params, is_leaf=is_sharded)
        for path, leaf in zip(paths, leaves, strict=True):
            if is_sharded(leaf):
                if leaf.layout.parts != leaf.layout.owned:
                    raise ValueError(
                        f"{path!r} is {leaf.layout}: an asynchronous schedule goes "
                        "without shard, as its stages update at times of their own"
                    )
                continue
            trained = isinstance(leaf, Tensor) and differentiable(leaf)
            if len(self.schedule) > 1 and path in used and trained:
                raise ValueError(
                    f"{path!r} is whole on every rank, and under an asynchronous "
                    "schedule a leaf belongs to the one stage that updates it: make "
                    "the state by ff.init_state(step, params, optimizer, batch), read "
                    "the leaf in units, not in the loss, and choose stages= so that "
                    "one stage has all its uses; or use another schedule"
                )

    def _try(self, running: _Running, f: Frame) -> None:
        """Raises where the optimizer would communicate, or predict would fail."""

        def refused(x: Tensor, how: LinearMap, where: RankGroup) -> Any:
            raise ValueError(
                f"the optimizer issues {how.op} over {where.name}, but under an "
                "asynchronous schedule every rank updates at times of its own: do "
                "without what sums over all leaves, such as clip_by_global_norm, or "
                "use another schedule"
            )

        params, opt_state = running.params, running.opt_state
        zeros = Leaves((params,), (0,))
        (grads,) = zeros.grads([torch.zeros_like(x) for x in zeros.tensors])
        with torch.no_grad(), inside(f), silence(), run_by(refused):
            self.optimizer.apply(grads, opt_state, params)
            self.ahead(params, opt_state, 1)

    def ahead(self, params: Any, opt_state: Any, updates: int) -> Any:
        """The parameters that a forward uses whose gradient is some updates late."""
        if self.predict is None or not updates:
            return params
        predicted = self.predict(params, opt_state, updates)
        tree.check_same_structure(
            params, predicted, what="predicted parameters",
            against="the parameters", is_leaf=is_sharded,
        )  # fmt: skip
        return predicted


class _Running:
    """The loss of one call, and the state as the call changes it."""

    def __init__(self, loss: Callable[..., Any], params: Any, opt_state: Any):
        self.loss, self.params, self.opt_state = loss, params, opt_state

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self.loss(*args, **keywords)


class _Version:
    """Parameters as some forwards use them: leaves of autograd's graphs."""

    def __init__(self, params: Any):
        self.leaves = Leaves((params,), (0,))
        self.values = [x.detach().requires_grad_() for x in self.leaves.tensors]
        (self.params,) = self.leaves.args(self.values)


class _UpdatingWorker(Worker):
    """One rank of one call: a :class:`Worker` whose parameters change on the way.

    After ``run``, ``params`` and ``opt_state`` are the new ones. ``late`` is, by
    microbatch, the number of updates between its forward and its backward.
    """

    def __init__(
        self,
        handler: Updating,
        running: _Running,
        microbatches: Sequence[Microbatch],
        where: RankGroup,
        frame: Frame,
        depth: int,
    ):
        super().__init__(
            lambda returned: loss_parts(returned, False),
            microbatches, handler.owners, where, frame, depth, (),
        )  # fmt: skip
        self.optimizer, self.ahead = handler.optimizer, handler.ahead
        self.late = handler.late[where.index]
        self.params, self.opt_state = running.params, running.opt_state
        self.actual = self.version = _Version(self.params)
        self.used: dict[int, _Version] = {}  # by microbatch, till its backward
        # Of the microbatches since the last update: sums, and their rows.
        self.sums: list[Tensor | None] = [None] * len(self.actual.values)
        self.share = 0.0

    def _F(self, a: Action) -> None:
        with torch.no_grad(), inside(self.frame):
            late = self.late[a.microbatch]
            params = self.ahead(self.params, self.opt_state, late)
        self.version = self.actual if params is self.params else _Version(params)
        self.used[a.microbatch], self.values = self.version, self.version.values
        super()._F(a)

    def _returned(self, call: GradientCall) -> Any:
        # Not a function that knows this worker: a circle, in which tensors would wait.
        return call.fn(self.version.params, *call.args[1:], **call.keywords)

    def _B(self, a: Action) -> None:
        with self._gathering(a):
            super()._B(a)

    def _W(self, a: Action) -> None:
        with self._gathering(a):
            super()._W(a)

    @contextmanager
    def _gathering(self, a: Action) -> Iterator[None]:
        """Adds the gradients of the version that a microbatch used to the sums."""
        values = self.used.pop(a.microbatch).values
        for x, g in zip(values, self.sums, strict=True):
            x.grad = g
        yield
        self.sums = [x.grad for x in values]
        for x in values:
            x.grad = None
        self.share += self.microbatches[a.microbatch].share

    def _U(self, a: Action) -> None:
        held = [g for g in self.sums if g is not None]
        if held:
            torch._foreach_div_(held, self.share)
        (grads,) = self.actual.leaves.grads(self.sums)
        with torch.no_grad(), inside(self.frame):
            self.params, self.opt_state = self.optimizer.apply(
                grads, self.opt_state, self.params
            )
        self.actual = _Version(self.params)
        self.sums = [None] * len(self.sums)
        self.share = 0.0


def _check_schedule(schedule: Schedule) -> None:
    """Raises where a schedule's updates leave no state that all ranks agree on."""
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
    """Raises where another transform would reinterpret the gradient call."""
    for handler in (getattr(h, "handler", h) for h in handlers):
        if type(handler).gradient is not Interpretation.gradient:
            name = type(handler).__name__.strip("_").lower()
            raise ValueError(
                f"{name} around or inside an asynchronous pipeline: its stages update "
                "at times of their own, so there is no gradient of the step that "
                "another transform could sum or shard; use another schedule"
            )
