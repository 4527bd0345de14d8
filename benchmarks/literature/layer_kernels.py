"""The kernels of a Transformer's layers, in bytes and FLOPs: closed forms, no tensors.

`Kernels` writes them as the events of a plan, phase by phase. What a layer computes
follows from its widths; what it reads and writes beside its products is the list of
kernels of the library that ran it (`Library`), in bytes a token and unit of width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from literature.runs import Run

from fsfunc.comm.ledgers import Record
from fsfunc.comm.mesh import Mesh
from fsfunc.planning.events import Event, Op, Ran, Started, Waited

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
Sizes = tuple[int, ...]  # of one kernel each
Pair = tuple[Sizes, Sizes]  # forward and backward

# Bytes that each kernel moves for a token and unit of width, activations being of 2.
FUSED_NORM: Pair = ((4,), (6, 4))  # x -> y; (dy, x) -> dx, (dy, x) -> dw
# pow, mean, times rsqrt, times weight; and the derivatives of each, in order.
PLAIN_NORM: Pair = ((4, 2, 4, 4), (4, 6, 4, 6, 4, 6, 4))
# F.rms_norm of torch before 2.9, which had no kernel on CUDA (aten/src/ATen/native/
# layer_norm.cpp, rms_norm_symint): to float32, pow, mean, times rsqrt, times weight,
# back; the same way back.
COMPOSED_NORM: Pair = ((6, 8, 4, 8, 8, 6), (6, 8, 12, 8, 12, 12, 8, 12, 8, 6))
RESIDUAL: Pair = ((6,), (6,))  # x + f(x); the sum of both derivatives
NO_RESIDUAL: Pair = ((), ())  # a part of the norm's kernels
ROTARY: Pair = ((6, 8, 6), (6, 8, 6))  # as float32, times the angles, back
FUSED_ROTARY: Pair = ((4,), (4,))
SWIGLU: Pair = ((4, 6), (6, 6, 6))  # silu, product; both factors, silu
FUSED_SWIGLU: Pair = ((6,), (10,))
GELU: Pair = ((4,), (6,))
MORE_INPUTS: Pair = ((), (6,))  # the derivatives of each further product of one input
# Of the logits: as float32, log_softmax; nll, log_softmax, back to 2 bytes.
LOSS: Pair = ((6, 8), (4, 12, 6))
# Of the scores, where no kernel fuses the attention: scaled, masked softmax; dropout
# and its mask of 1 byte (Megatron-LM's fused kernels).
SCORES: Pair = ((4, 5), (5, 6))
ADAM = 28 + 12  # bytes a parameter: reads 4 tensors, writes 3; the norm and clipping


@dataclass(frozen=True)
class Library:
    """The kernels that a library runs beside its products.

    Args:
        norm, rotary, swiglu, residual: those of each.
        copies: whether gathered parameters are copied out of, and gradients into, the
            buffers that travel (FSDP2), or are views.
        attention: the generation of its attention's kernels; None: nobody says.
        overlaps: whether collectives of layers, messages and reductions run beside
            computing (Megatron core's ``tp_comm_overlap``, ``overlap_p2p_comm``,
            ``overlap_grad_reduce``).
        accumulates: whether the product of a weight's gradient adds to it in float32
            (Megatron's ``gradient_accumulation_fusion``), or a kernel of its own does.
    """

    norm: Pair = PLAIN_NORM
    copies: bool = False
    attention: str | None = None
    rotary: Pair = ROTARY
    swiglu: Pair = SWIGLU
    residual: Pair = RESIDUAL
    overlaps: bool = False
    accumulates: bool = False


# Which norm a library runs (fms-fsdp: LayerNormParameterized; torchtitan: its Triton
# kernel, from autumn 2024 on torch's; llm-foundry: low_precision_layernorm; Megatron:
# apex's, later Transformer Engine's); whose attention (torch's own is
# FlashAttention-2; llm-foundry's of Triton is the first; Transformer Engine takes
# cuDNN's, which Shah et al. (2024) measure beside FlashAttention-3).
LIBRARIES = {
    "fms-fsdp": Library(PLAIN_NORM, False, "fa2"),
    "torchtitan": Library(FUSED_NORM, True, "fa2"),
    "torchtitan-2024-12": Library(COMPOSED_NORM, True, "fa2"),
    "llm-foundry": Library(FUSED_NORM, False, "fa1"),
    "dgxc-benchmarking": Library(
        FUSED_NORM, False, "fa3", FUSED_ROTARY, FUSED_SWIGLU, overlaps=True,
        accumulates=True,
    ),
    "Korthikanti": Library(FUSED_NORM, False, "none", accumulates=True),
    "Narayanan": Library(FUSED_NORM, False, "none"),
    "BigScience": Library(FUSED_NORM, False, "none"),
}  # fmt: skip
UNKNOWN = Library()


def library_of(run: Run) -> Library:
    """The kernels of a run: those of its library, or those that a compiler makes."""
    found = LIBRARIES.get(run.source, UNKNOWN)
    if run.norm == "layer":
        found = replace(found, norm=FUSED_NORM)
    if run.compiled:  # TorchInductor: what is pointwise joins its neighbours' kernels
        found = replace(
            found, norm=FUSED_NORM, rotary=FUSED_ROTARY, swiglu=FUSED_SWIGLU,
            residual=NO_RESIDUAL,
        )  # fmt: skip
    return found


def attention_of(run: Run) -> str | None:
    """The generation of a run's attention; None where nobody says, or none is fused."""
    found = run.attention_kernel or library_of(run).attention
    return None if found == "none" else found


class Kernels:
    """Writes the kernels of a run's layers, of one rank, as events in order.

    With ``tp`` ranks to a layer each takes a part of the heads and of the MLP.
    """

    def __init__(self, run: Run, mesh: Mesh, rank: int = 0):
        self.run, self.mesh, self.rank = run, mesh, rank
        self.events: list[Event] = []
        self.started = 0
        self.tokens = run.batch_per_gpu * run.seq // run.cp
        self.library = library_of(run)
        self.is_fused = (run.attention_kernel or self.library.attention) != "none"

    # Transfers

    def start(
        self, op: str, axes: tuple[str, ...], size: float, dtype: torch.dtype
    ) -> int:
        """Starts a collective in which a rank sends so many bytes; its number."""
        ranks = self.mesh.members(axes, self.rank)
        record = Record(op, axes, Fraction(int(size)), dtype)
        self.events.append(Started(self.started, "issued", tuple(ranks), record))
        self.started += 1
        return self.started - 1

    def wait(self, number: int | None) -> None:
        """Waits for a transfer, if there is one."""
        if number is not None:
            self.events.append(Waited(number))

    # Kernels

    def ran(self, op: Op, phase: str) -> None:
        self.events.append(Ran(op, "", phase))

    def move(self, phase: str, width: float, sizes: Sequence[float]) -> None:
        """Writes a kernel for each of so many bytes a unit of width."""
        for size in sizes:
            self.ran(Op("aten.mul", 0, int(size * width), BF16), phase)

    def product(
        self, phase: str, m: int, k: int, n: int, kind: torch.dtype, wide: int = 2
    ) -> None:
        """Writes [m, k] @ [k, n]; ``wide``: the bytes of each of its results."""
        size = 2 * (m * k + k * n) + wide * m * n
        self.ran(Op("aten.mm", 2 * m * k * n, size, kind, (1, m, k, n)), phase)
        if kind == FP8:  # both factors are scaled: their maxima, the casts
            self.move(phase, m * k + k * n, (2, 3))

    def products(self, phase: str, k: int, n: int, kind: torch.dtype) -> None:
        """Writes the product of activations and a weight [k, n]; or both gradients."""
        m = self.tokens
        if phase != "backward":
            self.product(phase, m, k, n, kind)
        else:
            self.product(phase, m, n, k, kind)
            self.weight_gradient(k, n, kind)

    def weight_gradient(self, k: int, n: int, kind: torch.dtype) -> None:
        """Writes the gradient of a weight [k, n], added to the others' if there are."""
        adds = self.run.microbatches > 1 and self.run.is_staged
        fused = adds and self.library.accumulates
        self.product("backward", k, self.tokens, n, kind, 8 if fused else 2)
        if adds and not fused:
            self.move("backward", k * n, (6,))

    def shapes(self) -> Iterator[tuple[int, int]]:
        """[k, n] of the products of a layer, in order: a rank's part of them."""
        run, t = self.run, self.run.tp
        h, kv = run.hidden, run.kv_width
        if run.mlp == "swiglu" and not run.is_staged:
            yield from ((h, h), (h, kv), (h, kv), (h, h))
            yield from ((h, run.ffn), (h, run.ffn), (run.ffn, h))
        else:  # what reads one input is one product
            ups = 2 if run.mlp == "swiglu" else 1
            yield from ((h, (h + 2 * kv) // t), (h // t, h))
            yield from ((h, ups * run.ffn // t), (run.ffn // t, h))

    def pointwise(self, phase: str) -> None:
        """Writes what a layer runs beside its products and its attention."""
        run, back = self.run, phase == "backward"
        library, swiglu = self.library, run.mlp == "swiglu"
        kinds = [library.norm, library.residual] * 2
        kinds += [MORE_INPUTS] * 3 if swiglu and not run.is_staged else []
        shared = run.tp if run.sequence_parallel else 1
        for pair in kinds:
            self.move(phase, self.tokens * run.hidden / shared, pair[back])
        self.inner(phase)

    def inner(self, phase: str) -> None:
        """Writes the pointwise kernels that the ranks of a layer share."""
        run, back = self.run, phase == "backward"
        inner = self.library.swiglu if run.mlp == "swiglu" else GELU
        self.move(phase, self.tokens * run.ffn / run.tp, inner[back])
        if run.norm == "rms":
            for heads in (run.heads, run.kv_heads):
                width = run.head * heads / run.tp
                self.move(phase, self.tokens * width, self.library.rotary[back])

    def attention(self, phase: str) -> None:
        """Writes the attention of a rank's heads, fused or in plain products."""
        run, back = self.run, phase == "backward"
        count = run.batch_per_gpu * run.heads // run.tp
        queries, keys, head = run.seq // run.cp, run.seq, run.head
        if not self.is_fused:
            return self._scores(phase, count, queries, keys, head)
        flops = 4 * count * queries * keys * head
        name = "aten._scaled_dot_product_flash_attention" + "_backward" * back
        size = 2 * self.tokens * run.hidden // run.tp * (8 if back else 4)
        dims = (count, queries, keys, head)
        op = Op(name, flops * 5 // 2 if back else flops, size, BF16, dims, True)
        return self.ran(op, phase)

    def _scores(self, phase: str, b: int, q: int, k: int, d: int) -> None:
        shapes = [(q, d, k), (q, k, d)]
        if phase == "backward":  # of the weights and values, of the queries and keys
            shapes = [(q, d, k), (k, q, d), (q, k, d), (k, q, d)]
        for m, inner, n in shapes:
            size = 2 * b * (m * inner + inner * n + m * n)
            dims = (b, m, inner, n)
            self.ran(Op("aten.bmm", 2 * b * m * inner * n, size, BF16, dims), phase)
        self.move(phase, b * q * k, SCORES[phase == "backward"])

    def ends(self, phase: str) -> None:
        """Writes the embedding: rows looked up; their derivatives, summed by token."""
        run = self.run
        self.move(phase, self.tokens * run.hidden, (4,))
        if phase == "backward":
            self.move(phase, run.vocab * run.hidden / run.tp, (4,))

    def head(self, phase: str) -> None:
        """Writes the last norm, the logits and the loss, in one phase."""
        run, back = self.run, phase == "backward"
        self.move(phase, self.tokens * run.hidden, self.library.norm[back])
        self.products(phase, run.hidden, run.vocab // run.tp, BF16)
        self.move(phase, self.tokens * run.vocab / run.tp, LOSS[back])
