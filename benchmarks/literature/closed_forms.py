"""Transformers trained under FSDP as plans of closed forms: no tensors, no tracing.

``plan_of(run)`` writes the events that one rank's step would have, kernel by kernel, so
that `ff.estimate` is the one model of both these and of plans that were recorded. What
a layer computes follows from its widths; what it reads and writes beside its products
is the list of kernels of eager PyTorch below, in bytes a token and unit of width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

import torch

from fsfunc.comm.ledgers import Record
from fsfunc.comm.mesh import Mesh
from fsfunc.planning.events import Event, Op, Ran, Started, Waited
from fsfunc.planning.plans import Plan, PlannedLeaf, RankPlan

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
NODE = 8  # GPUs

# Kernels of eager PyTorch, forward and backward: bytes that each moves for a token and
# unit of width, activations being of 2 bytes.
FUSED_NORM = ((4,), (6, 4))  # x -> y; (dy, x) -> dx, (dy, x) -> dw
# pow, mean, times rsqrt, times weight; and the derivatives of each, in order.
PLAIN_NORM = ((4, 2, 4, 4), (4, 6, 4, 6, 4, 6, 4))
RESIDUAL = ((6,), (6,))  # x + f(x); the sum of both derivatives
ROTARY = ((6, 8, 6), (6, 8, 6))  # as float32, times the angles, back
SWIGLU = ((4, 6), (6, 6, 6))  # silu, product; both factors, silu
GELU = ((4,), (6,))
MORE_INPUTS = ((), (6,))  # the derivatives of each further product of one input
# Of the logits: as float32, log_softmax; nll, log_softmax, back to 2 bytes.
LOSS = ((6, 8), (4, 12, 6))
# Which norm a library runs (fms-fsdp: LayerNormParameterized; torchtitan: its Triton
# kernel; llm-foundry: low_precision_layernorm), whether gathered parameters are copied
# out of, and gradients into, the buffers that travel (FSDP2), or are views; and whose
# attention (torch's own is FlashAttention-2; llm-foundry's of Triton is the first).
LIBRARIES = {
    "fms-fsdp": (PLAIN_NORM, False, "fa2"),
    "torchtitan": (FUSED_NORM, True, "fa2"),
    "llm-foundry": (FUSED_NORM, False, "fa1"),
}
UNKNOWN = (PLAIN_NORM, False, None)
ADAM = 28 + 12  # bytes a parameter: reads 4 tensors, writes 3; the norm and clipping
RECOMPUTED = {
    "none": 0.0, "full": 1.0, "every second layer": 0.5, "selective op": 0.5
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A published training run, as a row of ``published_training.csv`` has it."""

    source: str
    model: str
    params: float
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    mlp: str
    norm: str
    vocab: int
    seq: int
    gpus: int
    hardware: str
    internode_gbit_per_node: float | None
    strategy: str
    reduce_dtype: str
    remat: str
    batch_per_gpu: int
    microbatches: int
    published_tokens_per_s_per_gpu: float
    compute: str = "bf16"

    @property
    def tokens(self) -> int:
        """Of one step, of all GPUs: ``batch_per_gpu`` sequences a microbatch."""
        return self.gpus * self.batch_per_gpu * self.microbatches * self.seq

    @property
    def shards(self) -> int:
        """The number of GPUs that a parameter is cut over."""
        if self.strategy == "DDP":
            return 1
        _, _, size = self.strategy.partition("HSDP-")
        return min(self.gpus, int(size)) if size else self.gpus

    @property
    def kind(self) -> str:
        """What a step does besides: plain, hybrid or recomputed."""
        if self.remat != "none":
            return "recomputed"
        return "hybrid" if 1 < self.shards < self.gpus else "plain"

    @property
    def attention(self) -> str | None:
        """The generation of the attention's kernels; None where nobody says."""
        return LIBRARIES.get(self.source, UNKNOWN)[2]

    @property
    def layer_params(self) -> int:
        """Of one layer; two projections up where the MLP is gated."""
        h, kv = self.hidden, self.kv_heads * (self.hidden // self.heads)
        ups = 2 if self.mlp == "swiglu" else 1
        return 2 * h * h + 2 * h * kv + (ups + 1) * h * self.ffn + 2 * h

    @property
    def root_params(self) -> int:
        """What is in no layer: embedding, head (the same one or not), last norm."""
        return max(int(self.params) - self.layers * self.layer_params, self.hidden)


def read(row: dict[str, str]) -> Run:
    """The run of a row.

    Raises:
        ValueError: a value that the closed forms do not know, named with its column.
    """
    found: dict[str, Any] = {}
    for field in fields(Run):
        text = (row.get(field.name) or "").strip()
        if field.name == "compute":
            found["compute"] = text or "bf16"
        elif field.type == "str":
            found[field.name] = text
        elif field.type == "int":
            found[field.name] = int(float(text))
        else:
            found[field.name] = float(text) if text else None
    for column, known in (("remat", RECOMPUTED), ("compute", ("bf16", "fp8"))):
        if found[column] not in known:
            raise ValueError(f"{column} {found[column]!r}: it is one of {list(known)}")
    return Run(**found)


def plan_of(run: Run) -> Plan:
    """The plan of one rank's step; the others run the same program."""
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


class _Step:
    """The events of one step, in order."""

    def __init__(self, run: Run, mesh: Mesh):
        self.run, self.mesh = run, mesh
        self.events: list[Event] = []
        self.started = 0
        self.tokens = run.batch_per_gpu * run.seq
        self.norm, self.copies, _ = LIBRARIES.get(run.source, UNKNOWN)
        if run.norm == "layer":
            self.norm = FUSED_NORM

    def write(self) -> None:
        """Microbatches, each reduced as it ends, and the update."""
        run, due = self.run, []
        for _ in range(run.microbatches):
            due += self._pass()
        for number in due:
            self.events.append(Waited(number))
        self._move("update", run.params / run.shards, (ADAM,))

    def _pass(self) -> list[int]:
        """One forward and backward; the numbers of its reductions."""
        run, due, layer = self.run, [], self.run.layer_params
        root = self._gather(run.root_params)
        ahead = self._gather(layer)
        self._wait(root)
        self._ends("forward")
        for i in range(run.layers):
            now, ahead = ahead, self._gather(layer) if i + 1 < run.layers else None
            self._wait(now)
            self._layer("forward")
        self._head()
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
        self._ends("backward")
        self._wait(last)
        last, more = self._reduce(run.root_params)
        return [*due, *more, *([] if last is None else [last])]

    # Transfers

    def _start(self, op: str, axis: str, size: float, dtype: torch.dtype) -> int:
        ranks = self.mesh.members((axis,), 0)
        record = Record(op, (axis,), Fraction(int(size)), dtype)
        self.events.append(Started(self.started, "issued", tuple(ranks), record))
        self.started += 1
        return self.started - 1

    def _gather(self, params: int) -> int | None:
        n = self.run.shards
        if n == 1:
            return None
        self._move("forward", params / n, (6,))  # the shard in 2 bytes
        return self._start("all_gather", "data", 2 * params * (n - 1) / n, BF16)

    def _wait(self, number: int | None) -> None:
        if number is not None:
            self.events.append(Waited(number))
            if self.copies:
                self._move("forward", self.run.layer_params, (4,))

    def _reduce(self, params: int) -> tuple[int | None, list[int]]:
        """(the reduction among shards, those among replicas)."""
        run, n = self.run, self.run.shards
        wide = 4 if run.reduce_dtype == "fp32" else 2
        dtype = FP32 if wide == 4 else BF16
        if self.copies or wide == 4:
            self._move("backward", params, (2 + wide,))
        first, more, copies = None, [], run.gpus // n
        if n > 1:
            size = wide * params * (n - 1) / n
            first = self._start("psum_scatter", "data", size, dtype)
        if copies > 1:
            axis = "node" if n > 1 else "data"
            size = 2 * wide * params / n * (copies - 1) / copies
            more.append(self._start("psum", axis, size, dtype))
        return first, more

    # Kernels

    def _ran(self, op: Op, phase: str) -> None:
        self.events.append(Ran(op, "", phase))

    def _move(self, phase: str, width: float, sizes: Sequence[float]) -> None:
        """A kernel for each of so many bytes a unit of width."""
        for size in sizes:
            self._ran(Op("aten.mul", 0, int(size * width), BF16), phase)

    def _products(self, phase: str, k: int, n: int, kind: torch.dtype) -> None:
        m = self.tokens
        shapes = [(m, k, n)] if phase != "backward" else [(m, n, k), (k, m, n)]
        for a, b, c in shapes:
            size = 2 * (a * b + b * c + a * c)
            op = Op("aten.mm", 2 * a * b * c, size, kind, (1, a, b, c))
            self._ran(op, phase)
            if kind == FP8:  # both factors are scaled: their maxima, the casts
                self._move(phase, a * b + b * c, (2, 3))

    def _shapes(self) -> Iterator[tuple[int, int]]:
        """[k, n] of the products of a layer, in order."""
        run = self.run
        h, kv = run.hidden, run.kv_heads * (run.hidden // run.heads)
        if run.mlp == "swiglu":
            yield from ((h, h), (h, kv), (h, kv), (h, h))
            yield from ((h, run.ffn), (h, run.ffn), (run.ffn, h))
        else:
            yield from ((h, h + 2 * kv), (h, h), (h, run.ffn), (run.ffn, h))

    def _layer(self, phase: str) -> None:
        """All kernels of a layer in one phase.

        A recompute stops where all that the backward reads is there: before the last
        product (torch.utils.checkpoint's ``early_stop``, on by default since 2.1).
        """
        shapes = list(self._shapes())
        self._all(phase, shapes[:-1] if phase == "recompute" else shapes)
        self._attention(phase)

    def _selective(self) -> None:
        """All but the attention and every second product, as torchtitan's policy."""
        self._all("recompute", list(self._shapes())[1::2])

    def _all(self, phase: str, shapes: Sequence[tuple[int, int]]) -> None:
        kind = FP8 if self.run.compute == "fp8" else BF16
        for k, n in shapes:
            self._products(phase, k, n, kind)
        self._pointwise(phase)

    def _pointwise(self, phase: str) -> None:
        run, back = self.run, phase == "backward"
        swiglu = run.mlp == "swiglu"
        kinds = [self.norm, RESIDUAL] * 2
        kinds += [MORE_INPUTS] * 3 if swiglu else []
        for pair in kinds:
            self._move(phase, self.tokens * run.hidden, pair[back])
        inner = SWIGLU if swiglu else GELU
        self._move(phase, self.tokens * run.ffn, inner[back])
        if run.norm == "rms":
            for heads in (run.heads, run.kv_heads):
                width = run.hidden * heads // run.heads
                self._move(phase, self.tokens * width, ROTARY[back])

    def _attention(self, phase: str) -> None:
        run, back = self.run, phase == "backward"
        head, count = run.hidden // run.heads, run.batch_per_gpu * run.heads
        flops = 4 * count * run.seq**2 * head
        name = "aten._scaled_dot_product_flash_attention" + "_backward" * back
        size = 2 * self.tokens * run.hidden * (8 if back else 4)
        dims = (count, run.seq, run.seq, head)
        op = Op(name, flops * 5 // 2 if back else flops, size, BF16, dims, True)
        self._ran(op, phase)

    def _ends(self, phase: str) -> None:
        """The embedding: rows looked up; their derivatives, summed by token."""
        run = self.run
        self._move(phase, self.tokens * run.hidden, (4,))
        if phase == "backward":
            self._move(phase, run.vocab * run.hidden, (4,))

    def _head(self) -> None:
        """The last norm, the logits and the loss, forward and backward."""
        run = self.run
        for back, phase in enumerate(("forward", "backward")):
            self._move(phase, self.tokens * run.hidden, self.norm[back])
            self._products(phase, run.hidden, run.vocab, BF16)
            self._move(phase, self.tokens * run.vocab, LOSS[back])
