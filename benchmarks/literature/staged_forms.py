"""Steps whose layers are shared by ranks (TP), or dealt to them (PP), as plans.

``plan_of(run)`` writes a rank of each stage of the pipeline, by one of the schedules of
``ff.schedules``: 1F1B, or interleaved 1F1B of ``vp`` stages a rank. Ranks lie as
Megatron-LM deals them: those of a layer are neighbours, the stages of a pipeline are
furthest apart (Narayanan et al., 2021, section 3). A replica's gradients are reduced
over "data" after its last microbatch; under ZeRO-1 each rank updates its part of the
parameters, and gathers the others'.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

import torch
from literature.layer_kernels import ADAM, BF16, FP8, FP32, Kernels
from literature.runs import Run

from fsfunc.comm.ledgers import Record
from fsfunc.comm.mesh import Mesh
from fsfunc.pipelining import schedules
from fsfunc.pipelining.actions import Action, Schedule
from fsfunc.planning.events import Started
from fsfunc.planning.plans import Plan, PlannedLeaf, RankPlan


def plan_of(run: Run) -> Plan:
    """The plan of one rank of each stage; those of a stage run the same program.

    Raises:
        ValueError: layers that the stages do not share equally; a run whose GPUs, tp,
            pp and cp make no whole number of replicas.
    """
    stages, shared = run.pp * run.vp, run.tp * run.pp * run.cp
    if run.layers % stages or run.gpus % shared:
        raise ValueError(
            f"{run.model}: {run.layers} layers are dealt to {stages} stages, and "
            f"{run.gpus} GPUs to {shared} a replica: both are to be whole numbers"
        )
    axes = {"pipe": run.pp, "data": run.replicas, "context": run.cp, "tensor": run.tp}
    mesh = Mesh(axes, "abstract")
    if run.vp > 1:
        schedule = schedules.interleaved_1f1b(stages, run.microbatches, chunks=run.vp)
    else:
        schedule = schedules.one_f_one_b(stages, run.microbatches)
    alike, ranks = run.gpus // run.pp, []
    for number, row in enumerate(schedule):
        rank = number * alike
        step = _Stages(run, mesh, rank, schedule, number)
        step.write(row)
        leaf = PlannedLeaf(
            f"params/{number}", "parameters", (step.params * run.tp,), FP32,
            4 * step.params, None, "",
        )  # fmt: skip
        where = mesh.coordinates(rank)
        ranks.append(RankPlan(rank, alike, where, step.events, {}, (leaf,), ()))
    return Plan(mesh, tuple(ranks), ("pipe",) if run.pp > 1 else ())


class _Stages(Kernels):
    """The events of a rank's stages.

    Attributes:
        params: of this rank, in all of its stages.
        sent: by action, the number of the message in which it hands on its result.
        asked: by action, that of the one which brings what it needs.
    """

    def __init__(
        self, run: Run, mesh: Mesh, rank: int, schedule: Schedule, number: int
    ) -> None:
        super().__init__(run, mesh, rank)
        self.number, self.last_stage = number, run.pp * run.vp - 1
        self.layers = run.layers // (run.pp * run.vp)
        self.kind = FP8 if run.compute == "fp8" else BF16
        self.mine = {action.stage for action in schedule[number]}
        self.params = sum(map(self._params_of, self.mine))
        self.asked: dict[Action, int] = {}

    def _params_of(self, stage: int) -> int:
        """A rank's parameters in a stage: its part of layers, and of the two ends."""
        run, table = self.run, self.run.vocab * self.run.hidden
        # The last stage has the head: a copy of the embedding, or a table of its own.
        is_apart = self.last_stage > 0 or run.root_params > 1.5 * table
        ends = (stage == 0) + (stage == self.last_stage and is_apart)
        return (self.layers * run.layer_params + ends * table) // run.tp

    def write(self, row: Iterable[Action]) -> None:
        """The actions of the schedule's row, and the update."""
        run, actions, due = self.run, list(row), []
        gathers: dict[int, int | None] = {}
        if self.library.overlaps and run.strategy == "ZeRO-1":
            # What the last step updated is gathered beside the first microbatches.
            gathers = {stage: self._gather(stage) for stage in sorted(self.mine)}
        last_backward = {
            action.stage: action for action in actions if action.kind == "B"
        }
        for action, following in zip(actions, [*actions[1:], None], strict=True):
            self._ask(action)
            if self.library.overlaps and following is not None:
                self._ask(following)
            self.wait(gathers.pop(action.stage, None))
            self.wait(self.asked.get(action))
            self._compute(action)
            message = self._send(action)
            if not self.library.overlaps:
                # Megatron-LM issues a send and the next receive as one, and waits: of
                # interleaved stages, whose messages run in a circle, not for the send.
                if following is not None:
                    self._ask(following)
                if run.vp == 1:
                    self.wait(message)
            if self.library.overlaps and action is last_backward[action.stage]:
                due.append(self._reduce(action.stage))
        if not self.library.overlaps:
            due = [self._reduce(stage) for stage in sorted(self.mine)]
        for number in due:
            self.wait(number)
        shards = run.replicas if run.strategy == "ZeRO-1" else 1
        self.move("update", self.params / shards, (ADAM,))
        if not self.library.overlaps and run.strategy == "ZeRO-1":
            for stage in sorted(self.mine):
                self.wait(self._gather(stage))

    # Transfers

    def _message(self, part: str, source: int, target: int, size: int) -> int:
        """Sends to, or asks of, the rank of a stage; its number."""
        step = self.run.gpus // self.run.pp
        ends = (source % self.run.pp * step, target % self.run.pp * step)
        record = None
        if part == "sent":
            record = Record("send", ("pipe",), Fraction(size), BF16)
        self.events.append(Started(self.started, part, ends, record))
        self.started += 1
        return self.started - 1

    def _neighbour(self, action: Action, ahead: int) -> int | None:
        """The stage that has what an action needs (-1), or needs what it makes (1)."""
        there = action.stage + (ahead if action.kind == "F" else -ahead)
        return there if 0 <= there <= self.last_stage and self.run.pp > 1 else None

    def _ask(self, action: Action) -> None:
        source = self._neighbour(action, -1)
        if source is not None and action not in self.asked:
            number = self._message("asked for", source, action.stage, 0)
            self.asked[action] = number

    def _send(self, action: Action) -> int | None:
        target = self._neighbour(action, 1)
        if target is None:
            return None
        # Each rank of a layer sends its part of the activations, which the others of
        # the receiver's layer gather (Narayanan et al., 2021, section 4.1).
        size = 2 * self.tokens * self.run.hidden // self.run.tp
        return self._message("sent", action.stage, target, size)

    def _layer_collective(self, op: str, share: float = 1.0) -> int | None:
        """Starts a collective of (a share of) a layer's activations among its ranks."""
        t = self.run.tp
        if t == 1:
            return None
        size = share * 2 * self.tokens * self.run.hidden * (t - 1) / t
        return self.start(op, ("tensor",), size * (2 if op == "psum" else 1), BF16)

    @property
    def _sum(self) -> str:
        """The collective that adds up what a layer's ranks have made."""
        return "psum_scatter" if self.run.sequence_parallel else "psum"

    def _reduce(self, stage: int) -> int | None:
        """Starts the reduction of a stage's gradients among the replicas."""
        run, wide = self.run, 4 if self.run.reduce_dtype == "fp32" else 2
        op = "psum_scatter" if run.strategy == "ZeRO-1" else "psum"
        times = wide * (2 if op == "psum" else 1)
        return self._of_replicas(op, stage, times, FP32 if wide == 4 else BF16)

    def _gather(self, stage: int) -> int | None:
        """Starts the gathering of a stage's parameters, which were updated in parts."""
        return self._of_replicas("all_gather", stage, 2, BF16)

    def _of_replicas(
        self, op: str, stage: int, times: int, dtype: torch.dtype
    ) -> int | None:
        n = self.run.replicas * self.run.cp  # parts of a sequence are a batch, too
        if n == 1:
            return None
        size = times * self._params_of(stage) * (n - 1) / n
        return self.start(op, ("data", "context"), size, dtype)

    # Computing

    def _compute(self, action: Action) -> None:
        """A stage's layers, and what is at its ends, for one microbatch."""
        first, last = action.stage == 0, action.stage == self.last_stage
        if self._neighbour(action, -1) is not None and not self.run.sequence_parallel:
            self.wait(self._layer_collective("all_gather"))
        if action.kind == "F":
            if first:  # a rank has a part of the rows
                self.ends("forward")
                self.wait(self._layer_collective(self._sum))
            for _ in range(self.layers):
                self._layer("forward")
            if last:
                self.head("forward")
            return
        if last:
            self.head("backward")
            self.wait(self._layer_collective(self._sum))
        for _ in range(self.layers):
            if self.run.remat == "full":
                self._layer("recompute")
            elif self.run.remat == "attention":  # the scores were not kept
                self._attention("recompute")
            self._layer("backward")
        if first:
            self.ends("backward")

    def _layer(self, phase: str) -> None:
        """A layer in one phase: attention and MLP, each between a pair of products."""
        enter, leave, widen, narrow = self.shapes()
        self.pointwise(phase)
        if phase == "backward":
            self._gradients_of_last(narrow)
            self._gradients_of_first(widen)
            self._gradients_of_last(leave)
            self._attention(phase)
            self._gradients_of_first(enter)
        else:
            self._gathered(phase, *enter)
            self._attention(phase)
            self._last(phase, leave)
            self._gathered(phase, *widen)
            self._last(phase, narrow)

    def _attention(self, phase: str) -> None:
        """The attention; a sequence's parts bring their keys and values meanwhile."""
        run, number = self.run, None
        if run.cp > 1:  # two tensors of 2 bytes; back with their derivatives
            size = 4 * self.tokens * run.kv_width / run.tp * (run.cp - 1)
            size *= 2 if phase == "backward" else 1
            number = self.start("all_gather", ("context",), size, BF16)
        self.attention(phase)
        self.wait(number)

    def _gathered(self, phase: str, k: int, n: int) -> None:
        """A product of activations that are gathered before it, or part by part."""
        number = None
        if self.run.sequence_parallel:
            number = self._layer_collective("all_gather")
        if not self.library.overlaps:
            self.wait(number)
        self.product(phase, self.tokens, k, n, self.kind)
        if self.library.overlaps:
            self.wait(number)

    def _last(self, phase: str, weight: tuple[int, int]) -> None:
        """The one that ends a pair: its results are summed over the layer's ranks.

        Where both overlap, parts are summed as they are made: but the last.
        """
        hidden = None
        share = 1 - 1 / self.run.tp if self.library.overlaps else 0.0
        if share:
            hidden = self._layer_collective(self._sum, share)
        self.product(phase, self.tokens, *weight, self.kind)
        self.wait(hidden)
        self.wait(self._layer_collective(self._sum, 1 - share))

    def _gradients_of_last(self, weight: tuple[int, int]) -> None:
        """Both gradients of the product that ends a pair."""
        k, n = weight
        self._gathered("backward", n, k)
        self.weight_gradient(k, n, self.kind)

    def _gradients_of_first(self, weight: tuple[int, int]) -> None:
        """Both of the one that begins it: its input's is summed beside the weight's."""
        k, n = weight
        again = None
        if self.run.sequence_parallel:  # the input was kept in parts
            again = self._layer_collective("all_gather")
        self.product("backward", self.tokens, n, k, self.kind)
        self.wait(again)
        number = self._layer_collective(self._sum)
        self.weight_gradient(k, n, self.kind)
        self.wait(number)
