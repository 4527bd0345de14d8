"""Published runs on cards of 80 GB, each planned: it is to be judged to fit its card.

``python benchmarks/published.py`` prints it. The ten runs of ``published_training.csv``
and the H100 runs in bfloat16 of MosaicML's llm-foundry (scripts/train/benchmarking,
README.md: MPT of 760M to 70B, sequences of 512 to 65,536). MPT's loss there is
flash-attn's fused cross entropy, which keeps no logits in float32; microbatches are
reduced one by one, as FSDP does unless told.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from literature import published_runs
from literature.closed_forms import Run
from literature.llama_memory import Llama, Tree, init_params, loss_of
from torch import Tensor

import fsfunc as ff
from fsfunc.planning.allocation import Fit, fits
from fsfunc.planning.hardware import H100
from fsfunc.planning.machines import Hardware
from fsfunc.planning.planner import plan
from fsfunc.planning.plans import Plan

MPT = {  # width, heads, layers
    "760m": (1536, 12, 24), "1b": (2048, 16, 24), "3b": (2560, 20, 32),
    "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 56, 48),
    "70b": (8192, 64, 80),
}  # fmt: skip
# Model, tokens of a sequence, GPUs, sequences of a microbatch, microbatches; a star
# where layers are recomputed.
FOUNDRY = """
70b 2048 64 8 4 *   70b 2048 32 2 16 *  30b 8192 8 1 21 *   30b 4096 8 1 21 *
30b 2048 32 14 3 *  30b 2048 16 10 3 *  30b 2048 8 3 21 *   30b 1024 8 6 21 *
13b 32768 8 1 3 *   13b 16384 8 3 3 *   13b 4096 8 10 3 *   13b 2048 64 2 1 -
13b 2048 32 2 1 -   13b 2048 16 2 1 -   13b 2048 8 2 1 -    13b 1024 8 40 3 *
7b 65536 8 1 2 *    7b 32768 8 2 2 *    7b 8192 8 8 2 *     7b 4096 8 16 2 *
7b 2048 8 6 1 -     7b 1024 8 64 2 *    3b 65536 8 1 2 *    3b 32768 8 3 6 *
3b 16384 8 1 6 -    3b 8192 8 3 6 -     3b 4096 8 5 6 -     3b 2048 64 6 3 -
3b 2048 32 6 3 -    3b 2048 16 10 3 -   3b 1024 8 20 6 -    3b 512 8 40 6 -
1b 65536 8 1 2 *    1b 32768 8 1 4 -    1b 16384 8 2 4 -    1b 8192 8 3 4 -
1b 4096 8 7 4 -     1b 2048 64 20 1 -   1b 2048 32 20 1 -   1b 2048 16 20 1 -
1b 2048 8 14 1 -    1b 1024 8 18 4 -    1b 512 8 56 4 -     760m 32768 8 1 2 -
760m 16384 8 3 2 -  760m 8192 8 6 2 -   760m 4096 8 12 2 -  760m 2048 32 24 1 -
760m 2048 16 24 1 - 760m 2048 8 24 2 -  760m 1024 8 48 2 -  760m 512 8 96 2 -
"""


def foundry_runs() -> list[Run]:
    """The rows of ``FOUNDRY``, without what they reached."""
    words, found = FOUNDRY.split(), []
    for at in range(0, len(words), 6):
        name, *numbers, star = words[at : at + 6]
        seq, gpus, rows, parts = map(int, numbers)
        width, heads, layers = MPT[name]
        params = layers * 12 * width**2 + 50368 * width
        remat = "full" if star == "*" else "none"
        run = Run(
            "llm-foundry", f"mpt-{name}", params, layers, width, heads, heads,
            4 * width, "gelu", "layer", 50368, seq, gpus, "H100-80", None, "FSDP",
            "bf16", remat, rows, parts, 0.0,
        )  # fmt: skip
        found.append(run)
    return found


def mpt_params(size: Llama) -> Tree:
    """The parameters of a GPT with a norm's weights alone, in float32."""
    d = size.width
    shapes = {
        "qkv": (3 * d, d), "out": (d, d), "up": (size.hidden, d),
        "down": (d, size.hidden), "norm1": (d,), "norm2": (d,),
    }  # fmt: skip
    made = init_params(Llama(d, 0, 1, 1, 0, size.vocabulary))
    blocks = [
        {name: torch.zeros(shape) for name, shape in shapes.items()}
        for _ in range(size.layers)
    ]
    return made | {"blocks": blocks}


def mpt_loss(size: Llama, remat: str) -> Callable[[Tree, Any], Tensor]:
    """``loss_fn(params, batch)`` of such a model."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.layer_norm(x, weight.shape, weight)

    @ff.unit
    def embed(p: Tree, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, p["token"])

    @ff.unit
    def block(p: Tree, x: Tensor) -> Tensor:
        heads = F.linear(norm(x, p["norm1"]), p["qkv"]).chunk(3, -1)
        q, k, v = (z.unflatten(-1, (size.heads, -1)).transpose(1, 2) for z in heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.linear(mixed.transpose(1, 2).flatten(2), p["out"])
        inner = F.gelu(F.linear(norm(x, p["norm2"]), p["up"]))
        return x + F.linear(inner, p["down"])

    @ff.unit
    def head(p: Tree, x: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(norm(x, p["norm"]), p["w"]).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten())

    return in_turn(embed, block, head, remat)


def in_turn(embed: Any, block: Any, head: Any, remat: str) -> Callable[..., Tensor]:
    """The loss of these units: no block, each or every second one recomputed."""
    again = ff.remat(block)
    kinds = {"none": (block, block), "full": (again, again)}
    both = kinds.get(remat, (block, again))

    def loss_fn(params: Tree, batch: Any) -> Tensor:
        x = embed(params["embed"], batch["tokens"])
        for i, p in enumerate(params["blocks"]):
            x = both[i % 2](p, x)
        return head(params["head"], x, batch["targets"])

    return loss_fn


def planned(run: Run, layers: int | None = None) -> Plan:
    """The donated step of a run on a GPU's kernels, of as many ``layers``."""
    size = Llama(
        run.hidden, layers or run.layers, run.heads, run.kv_heads, run.ffn, run.vocab,
        run.seq, run.batch_per_gpu,
    )  # fmt: skip
    gated = run.mlp == "swiglu"
    loss, make = mpt_loss(size, run.remat), mpt_params
    if gated:
        loss, make = loss_of(size, partial(in_turn, remat=run.remat)), init_params
    optimizer = ff.sharded_adam(1e-4)
    axes, replicas = {"data": run.gpus}, None
    if 1 < run.shards < run.gpus:
        axes = {"node": run.gpus // run.shards, "data": run.shards}
        replicas = "node"
    mesh = ff.make_mesh(axes, "abstract")
    step = optimizer(ff.value_and_grad(loss))
    wide = torch.float32 if run.reduce_dtype == "fp32" else torch.bfloat16
    step = ff.precision(step, compute=torch.bfloat16, reduce=wide)
    step = ff.shard(step, mesh, "data", zero=3, replicate=replicas)
    if run.microbatches > 1:
        step = ff.accumulate(step, run.microbatches)
    rows = size.sequences * run.microbatches
    tokens = torch.zeros(rows, size.length, dtype=torch.int64)
    batch = {"tokens": tokens, "targets": tokens.clone()}
    given = ff.donate(step), lambda: make(size), optimizer, batch
    return plan(*given, mesh=mesh, device="cuda")


def machine_of(run: Run) -> Hardware:
    """The card of a run."""
    return H100 if "H100" in run.hardware else published_runs.machine_of(run)


def show(quick: bool = False) -> list[dict[str, Any]]:
    """Prints how many runs are judged to fit, and which are not; returns them all.

    Args:
        quick: of every seventh, a model of two layers.
    """
    begun, rows = time.process_time(), []
    known: dict[Any, tuple[int, Fit]] = {}
    runs = [*published_runs.runs_of(published_runs.CALIBRATION), *foundry_runs()]
    for run in runs[:: 7 if quick else 1]:
        card, several = machine_of(run), run.microbatches > 1
        # Sequences of another length, or more microbatches, hold no more.
        tokens = run.batch_per_gpu * run.seq
        alike = run.model, run.gpus, card.name, run.remat, run.strategy, tokens, several
        if alike not in known:
            made = planned(run, 2 if quick else None)
            known[alike] = made.peak_bytes, fits(made, card)
        held, fit = known[alike]
        how = f"{run.gpus} GPUs, {run.microbatches} x {run.batch_per_gpu} x {run.seq}"
        name = f"{run.source} {run.model} on {how}, remat {run.remat}"
        row = {"run": name, "held": held, "needed": fit.needed}
        rows.append(row | {"card": card.memory, "fits": bool(fit)})
    count = sum(row["fits"] for row in rows)
    seconds = time.process_time() - begun
    share = max(row["needed"] / row["card"] for row in rows)
    kept = f"{H100.margin:.0%} kept free; the fullest needs {share:.1%}"
    print(
        f"\nPublished runs on 80 GB: {count} of {len(rows)} fit, {kept} "
        f"({seconds:.0f} s)"
    )
    for row in rows:
        if not row["fits"]:
            sizes = (row[key] / 1e9 for key in ("needed", "card", "held"))
            says = "{:.1f} GB needed of {:.1f} (held {:.1f})".format(*sizes)
            print(f"  {row['run']}: {says}")
    return rows


if __name__ == "__main__":
    show()
