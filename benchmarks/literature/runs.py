"""Published training runs as rows of a table: what was trained, how, and how fast.

`published_training.csv` and `published_parallel.csv` are such tables; `read` makes a
:class:`Run` of a row. Columns that a table lacks have the defaults of the fields.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any

RECOMPUTED = {
    "none": 0.0, "full": 1.0, "every second layer": 0.5, "selective op": 0.5,
    "attention": 0.0,
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A published training run, as a row of a table has it.

    Args:
        batch_per_gpu: the sequences of a microbatch, of one replica of the model.
        microbatches: how many of them a replica takes in a step.
        strategy: "FSDP", "HSDP-8" (within groups of 8), "DDP" or "ZeRO-1".
        remat: what is recomputed, one of ``RECOMPUTED``; "attention": the scores and
            their softmax alone (Korthikanti et al., 2022).
        internode_gbit_per_node: Gbit/s that leave a node; None: the hardware's.
        tp, pp, cp: ranks that share a layer, the layers, a sequence.
        vp: stages of the pipeline on each rank.
        sequence_parallel: whether norms and sums are shared by the tp ranks, too.
        attention_kernel: the generation of the fused kernel, "none" for plain
            products; "": the one of the library.
        compiled: whether a compiler fused the layers' kernels.
        part: "fit", or "held out" where it judges only.
    """

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
    tp: int = 1
    pp: int = 1
    vp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    attention_kernel: str = ""
    compiled: bool = False
    part: str = "fit"

    @property
    def replicas(self) -> int:
        """Copies of the model, each of which takes batches of its own."""
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def tokens(self) -> int:
        """Of one step, of all GPUs."""
        return self.replicas * self.batch_per_gpu * self.microbatches * self.seq

    @property
    def is_staged(self) -> bool:
        """Whether several GPUs share a layer, the layers, or a sequence."""
        return self.tp * self.pp * self.cp > 1

    @property
    def shards(self) -> int:
        """The number of GPUs that a parameter is cut over."""
        if self.strategy == "DDP":
            return 1
        _, _, size = self.strategy.partition("HSDP-")
        return min(self.gpus, int(size)) if size else self.gpus

    @property
    def kind(self) -> str:
        """What a step does besides: plain, hybrid, recomputed; or shared how."""
        if self.is_staged:
            return "pipeline" if self.pp > 1 else "tensor parallel"
        if self.remat != "none":
            return "recomputed"
        return "hybrid" if 1 < self.shards < self.gpus else "plain"

    @property
    def scheme(self) -> str:
        """Which state is cut over the replicas: that of FSDP, HSDP, ZeRO-1 or DDP."""
        return self.strategy.partition("-8")[0]

    @property
    def head(self) -> int:
        """The size of a head."""
        return self.hidden // self.heads

    @property
    def kv_width(self) -> int:
        """The width of all keys."""
        return self.kv_heads * self.head

    @property
    def layer_params(self) -> int:
        """Of one layer; two projections up where the MLP is gated."""
        h = self.hidden
        ups = 2 if self.mlp == "swiglu" else 1
        return 2 * h * h + 2 * h * self.kv_width + (ups + 1) * h * self.ffn + 2 * h

    @property
    def root_params(self) -> int:
        """What is in no layer: embedding, head (the same one or not), last norm."""
        return max(int(self.params) - self.layers * self.layer_params, self.hidden)


def read(row: dict[str, str]) -> Run:
    """The run of a row.

    What was published is ``published_tokens_per_s_per_gpu``, or of a step
    ``published_seconds``.

    Raises:
        ValueError: a value that the closed forms do not know, named with its column.
    """
    found: dict[str, Any] = {}
    for field in fields(Run):
        text = (row.get(field.name) or "").strip()
        if not text and field.default is not MISSING:
            found[field.name] = field.default
        elif field.type == "str":
            found[field.name] = text
        elif field.type == "bool":
            found[field.name] = text == "yes"
        elif field.type == "int":
            found[field.name] = int(float(text))
        else:
            found[field.name] = float(text) if text else None
    for column, known in (("remat", RECOMPUTED), ("compute", ("bf16", "fp8"))):
        if found[column] not in known:
            raise ValueError(f"{column} {found[column]!r}: it is one of {list(known)}")
    seconds = (row.get("published_seconds") or "").strip()
    if seconds:
        run = Run(**found | {"published_tokens_per_s_per_gpu": 0.0})
        rate = run.tokens / run.gpus / float(seconds)
        found["published_tokens_per_s_per_gpu"] = rate
    return Run(**found)
