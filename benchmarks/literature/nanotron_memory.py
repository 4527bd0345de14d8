"""Memory that nanotron reported of a Llama of 1.1B, beside plans of the same stacks.

``python benchmarks/literature/nanotron_memory.py`` prints it. Published: the Hugging
Face repositories nanotron/old_bench (llama-1B; log_metrics.csv and status.txt of each
run; July 2024), on nodes of 8 H100 of 80 GB: 1,024 sequences of 4,096 tokens a step,
tensor parallel with split sequences, 1F1B, ZeRO 1, bfloat16 with gradients accumulated
in float32, nothing recomputed, AdamW with float32 master weights. "OOM" is their
status of a run.

Their gradients in float32 are told by ``precision(reduce=torch.float32)``: a rank sums
its microbatches in it. Without it sums are bfloat16, and the plan is smaller by 2 bytes
a parameter. Peaks are those of the first stage, which nanotron logs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from literature.llama_memory import turned  # noqa: E402
from torch import Tensor  # noqa: E402

import fsfunc as ff  # noqa: E402
from fsfunc.nn import (  # noqa: E402
    column_linear,
    row_linear,
    vocab_cross_entropy,
    vocab_embedding,
)
from fsfunc.planning.allocation import Fit, fits  # noqa: E402
from fsfunc.planning.hardware import H100, replace  # noqa: E402
from fsfunc.planning.planner import plan  # noqa: E402
from fsfunc.planning.plans import Plan  # noqa: E402

Tree = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """Sizes of the model and of a step."""

    width: int = 2048
    heads: int = 32
    hidden: int = 4096  # 1.11B parameters, as their FLOPs a token say
    layers: int = 24
    vocabulary: int = 50272
    length: int = 4096
    sequences: int = 1024


QUICK = Size(256, 32, 512, 24, 256, 32)


@dataclass(frozen=True)
class Run:
    """A run: sizes of its axes, sequences of a microbatch, and MiB of the first rank.

    ``reserved`` is None where it ran out of memory.
    """

    data: int
    model: int
    pipe: int
    rows: int
    allocated: float | None = None
    reserved: float | None = None


RUNS = (
    Run(1, 8, 1, 8, 16891.31, 17044),
    Run(1, 8, 1, 32, 60095.72, 60780),
    Run(2, 4, 1, 8, 25808.34, 27166),
    Run(4, 2, 1, 8, 43650.72, 44378),
    Run(4, 4, 1, 16, 47549.27, 48782),
    Run(1, 4, 2, 8, 25707.36, 26100),
    Run(1, 8, 2, 8, 16549.94, 16842),
    Run(2, 2, 2, 1, 8570.26, 9170),
    Run(2, 1, 4, 2, 21842.82, 22742),
    Run(2, 1, 4, 4, 39056.83, 39710),
    Run(1, 2, 4, 4, 22492.98, 23018),
    Run(1, 4, 4, 4, 13109.32, 13264),
    Run(1, 1, 8, 4, 44034.23, 44472),
    Run(1, 2, 8, 8, 45800.36, 46498),
    Run(4, 2, 1, 16),
    Run(2, 1, 4, 8),
    Run(2, 2, 2, 16),
    Run(1, 4, 2, 32),
    Run(2, 1, 8, 16),
    Run(1, 2, 8, 32),
)
BESIDE = RUNS[0], RUNS[7], RUNS[8]  # of which plans are made without the word too
# Of unit calls on the first stage, the embedding among them: nanotron deals layers and
# head by their FLOPs, the first stages rounded up.
FIRST_LAYERS = {1: 24, 2: 14, 4: 7, 8: 4}
COLUMN, ROW = ff.Split(0, "model"), ff.Split(1, "model")
LAYOUTS = {
    "embed/w": COLUMN, "head/w": COLUMN, "blocks/*/[qkv]": COLUMN,
    "blocks/*/out": ROW, "blocks/*/gate": COLUMN, "blocks/*/up": COLUMN,
    "blocks/*/down": ROW,
}  # fmt: skip


def init_params(size: Size, tied: bool) -> Tree:
    """The parameters in float32; on one stage the head has the embedding's weight."""
    d, hidden = size.width, size.hidden
    shapes = {
        "q": (d, d), "k": (d, d), "v": (d, d), "out": (d, d), "gate": (hidden, d),
        "up": (hidden, d), "down": (d, hidden), "norm1": (d,), "norm2": (d,),
    }  # fmt: skip

    def block() -> Tree:
        return {name: torch.zeros(shape) for name, shape in shapes.items()}

    words = torch.zeros(size.vocabulary, d)
    head = {} if tied else {"w": torch.zeros(size.vocabulary, d)}
    return {
        "embed": {"w": words},
        "blocks": [block() for _ in range(size.layers)],
        "head": {"norm": torch.zeros(d), **head},
    }


def loss_of(size: Size, tied: bool) -> Callable[[Tree, Any], Tensor]:
    """``loss_fn(params, batch)``, of one unit a layer."""
    features = size.width // size.heads

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, ff.pcast(weight, "model", to="V"))

    @ff.unit
    def embed(p: Tree, tokens: Tensor) -> Tensor:
        return vocab_embedding(p["w"], tokens, sequence_dim=1)

    @ff.unit
    def block(p: Tree, x: Tensor) -> Tensor:
        y = norm(x, p["norm1"])
        q, k, v = column_linear(y, (p["q"], p["k"], p["v"]), sequence_dim=1)
        q, k, v = (z.unflatten(-1, (-1, features)) for z in (q, k, v))
        q, k, v = (z.transpose(1, 2) for z in (turned(q), turned(k), v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = mixed.transpose(1, 2).flatten(2)
        x = x + row_linear(mixed, p["out"], sequence_dim=1)
        y = norm(x, p["norm2"])
        gate, up = column_linear(y, (p["gate"], p["up"]), sequence_dim=1)
        return x + row_linear(F.silu(gate) * up, p["down"], sequence_dim=1)

    @ff.unit
    def head(p: Tree, x: Tensor, targets: Tensor) -> Tensor:
        logits = column_linear(norm(x, p["norm"]), p["w"], sequence_dim=1)
        return vocab_cross_entropy(logits.float(), targets, "model")

    def loss_fn(params: Tree, batch: Any) -> Tensor:
        x = embed(params["embed"], batch["tokens"])
        for p in params["blocks"]:
            x = block(p, x)
        last = params["head"]
        last = last | {"w": params["embed"]["w"]} if tied else last
        return head(last, x, batch["targets"])

    return loss_fn


def planned(run: Run, size: Size, reduce: torch.dtype) -> Plan:
    """The donated step of a run, with sums of gradients in ``reduce``."""
    # More microbatches than these hold no more.
    tied = run.pipe == 1
    parts = min(2 * run.pipe + 1, size.sequences // run.data // run.rows)
    each = parts * run.rows
    mesh = ff.make_mesh(
        {"data": run.data, "pipe": run.pipe, "model": run.model}, "abstract"
    )
    optimizer = ff.sharded_adam(1e-4)
    step = optimizer(ff.value_and_grad(loss_of(size, tied)))
    if run.pipe > 1:
        step = ff.pipeline(
            step, mesh, "pipe", n_microbatches=parts, stages=_stages(run, size)
        )
    else:
        step = ff.accumulate(step, parts)
    step = ff.precision(step, compute=torch.bfloat16, reduce=reduce)
    step = ff.donate(ff.shard(step, mesh, "data", zero=1))
    tokens = torch.zeros(each, size.length, dtype=torch.int64)
    batch = {"tokens": tokens, "targets": tokens.clone()}
    layouts = {k: v for k, v in LAYOUTS.items() if not (tied and k == "head/w")}
    return plan(
        step, lambda: init_params(size, tied), optimizer, batch, mesh=mesh,
        device="cuda", layouts=layouts,
    )  # fmt: skip


def _stages(run: Run, size: Size) -> list[int]:
    """How many unit calls each stage has: their first stage, and the rest even."""
    first = FIRST_LAYERS[run.pipe]
    each, more = divmod(size.layers - first, run.pipe - 1)
    others = [each + (i < more) for i in range(run.pipe - 1)]
    others[-1] += 1  # the head
    return [1 + first, *others]


def judged(run: Run, size: Size, reduce: torch.dtype) -> Fit:
    """What the plan of a run's first stage needs, with no bound to it."""
    made = planned(run, size, reduce)
    first = Plan(made.mesh, made.ranks[:1], made.differing_axes, made.step)
    return fits(first, replace(H100, memory=2**40))


def show(runs: tuple[Run, ...] = RUNS, quick: bool = False) -> list[dict[str, Any]]:
    """Prints what plans need beside what was published, and returns it.

    Args:
        quick: a model of no width, whose numbers have no meaning.
    """
    rows, size = [], QUICK if quick else Size()
    card = H100.usable / 2**20
    print("\nLlama 1.1B under nanotron on H100, MiB of the first rank:")
    print("data model pipe rows   reserved  planned ratio  sums in bfloat16")
    for run in runs:
        planned_by = {
            dtype: judged(run, size, dtype).needed / 2**20
            for dtype in (torch.float32, torch.bfloat16)[: 1 + (run in BESIDE)]
        }
        # Of one that ran out of memory: over what a plan may need of the card.
        ratios = [x / (run.reserved or card) for x in planned_by.values()]
        rows.append(vars(run) | {"planned": planned_by[torch.float32], "card": card})
        rows[-1]["ratios"] = ratios
        axes = f"{run.data:4}{run.model:6}{run.pipe:5}{run.rows:5}"
        reported = f"{run.reserved:11.0f}" if run.reserved else f"{'OOM':>11}"
        shown = "".join(f"{x:6.2f}" for x in ratios)
        print(f"{axes}{reported}{rows[-1]['planned']:9.0f}{shown}", flush=True)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true")
    show(quick=parser.parse_args().quick)
