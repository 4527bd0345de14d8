"""Transformers trained under FSDP as plans of closed forms: no tensors, no tracing.

``plan_of(run)`` writes the events that one rank's step would have, kernel by kernel
(`layer_kernels`), so that `ff.estimate` is the one model of both these and of plans
that were recorded. Steps whose layers are shared by ranks, or dealt to them, are
written by `staged_forms`.
"""

from __future__ import annotations

import torch
from literature import staged_forms
from literature.layer_kernels import ADAM, BF16, FP8, FP32, Kernels
from literature.runs import RECOMPUTED, Run, read

from fsfunc.comm.mesh import Mesh
from fsfunc.planning.events import Waited
from fsfunc.planning.plans import Plan, PlannedLeaf, RankPlan

__all__ = ("Run", "plan_of", "read")


def plan_of(run: Run) -> Plan:
    """The plan of one rank's step; the others run the same program, or are planned."""
    if run.is_staged:
        return staged_forms.plan_of(run)
    axes = {"data": run.gpus}
    if 1 < run.shards < run.gpus:
        axes = {"node": run.gpus // run.shards, "data": run.shards}
    mesh = Mesh(axes, "abstract")
    step = _Step(run, mesh)
    step.write()
    shape = (int(run.params),)
    size = int(4 * run.params / run.shards)
    leaf = PlannedLeaf("params", "parameters", shape, FP32, size, None, "")
    where = dict.fromkeys(axes, 0)
    return Plan(mesh, (RankPlan(0, run.gpus, where, step.events, {}, (leaf,), ()),))


class _Step(Kernels):
    """The events of one step, in order."""

    def write(self) -> None:
        """Microbatches, each reduced as it ends, and the update."""
        run, due = self.run, []
        for _ in range(run.microbatches):
            due += self._pass()
        for number in due:
            self.events.append(Waited(number))
        self.move("update", run.params / run.shards, (ADAM,))

    def _pass(self) -> list[int]:
        """One forward and backward; the numbers of its reductions."""
        run, due, layer = self.run, [], self.run.layer_params
        root = self._gather(run.root_params)
        ahead = self._gather(layer)
        self._wait(root)
        self.ends("forward")
        for i in range(run.layers):
            now, ahead = ahead, self._gather(layer) if i + 1 < run.layers else None
            self._wait(now)
            self._layer("forward")
        for phase in ("forward", "backward"):
            self.head(phase)
        ahead = self._gather(layer)
        last: int | None = None
        for i in reversed(range(run.layers)):
            now, ahead = ahead, self._gather(layer) if i else None
            self._wait(now)
            share = RECOMPUTED[run.remat]
            if share == 1 or (share and i % 2 and "layer" in run.remat):
                self._layer("recompute")
            elif share and "op" in run.remat:
                self._selective()
            self._layer("backward")
            self._wait(last)  # one reduction in flight, as FSDP2 keeps its buffers
            last, more = self._reduce(layer)
            due += more
        self.ends("backward")
        self._wait(last)
        last, more = self._reduce(run.root_params)
        return [*due, *more, *([] if last is None else [last])]

    # Transfers

    def _gather(self, params: int) -> int | None:
        n = self.run.shards
        if n == 1:
            return None
        self.move("forward", params / n, (6,))  # the shard in 2 bytes
        return self.start("all_gather", ("data",), 2 * params * (n - 1) / n, BF16)

    def _wait(self, number: int | None) -> None:
        self.wait(number)
        if number is not None and self.library.copies:
            self.move("forward", self.run.layer_params, (4,))

    def _reduce(self, params: int) -> tuple[int | None, list[int]]:
        """(the reduction among shards, those among replicas)."""
        run, n = self.run, self.run.shards
        wide = 4 if run.reduce_dtype == "fp32" else 2
        dtype = FP32 if wide == 4 else BF16
        if self.library.copies or wide == 4:
            self.move("backward", params, (2 + wide,))
        first, more, copies = None, [], run.gpus // n
        if n > 1:
            size = wide * params * (n - 1) / n
            first = self.start("psum_scatter", ("data",), size, dtype)
        if copies > 1:
            axis = "node" if n > 1 else "data"
            size = 2 * wide * params / n * (copies - 1) / copies
            more.append(self.start("psum", (axis,), size, dtype))
        return first, more

    # Kernels

    def _layer(self, phase: str) -> None:
        """All kernels of a layer in one phase.

        A recompute stops where all that the backward reads is there: before the last
        product (torch.utils.checkpoint's ``early_stop``, on by default since 2.1).
        """
        shapes = list(self.shapes())
        self._all(phase, shapes[:-1] if phase == "recompute" else shapes)
        self.attention(phase)

    def _selective(self) -> None:
        """All but the attention and every second product, as torchtitan's policy."""
        self._all("recompute", list(self.shapes())[1::2])

    def _all(self, phase: str, shapes: list[tuple[int, int]]) -> None:
        kind: torch.dtype = FP8 if self.run.compute == "fp8" else BF16
        for k, n in shapes:
            self.products(phase, k, n, kind)
        self.pointwise(phase)
