"""What others have published of sharded training, predicted: nothing runs.

    python benchmarks/published.py [--quick] [--json PATH] [--runs PATH] [--fit]

First the ten runs of `published_training.csv` under FSDP and the 44 of
`published_parallel.csv`, with tensor parallelism, pipelines, small models and compiled
blocks, of which plans are written by closed forms, beside the rule of thumb (6ND); the
errors by GPU, kind, scheme and source; and each source judged by a fit of the others.
One number for each family of GPUs is fitted, which `--fit` prints. `--runs PATH` judges
the rows of another file instead.

Then the memory that torchtitan reported of Llama 3.1 8B on 8 and 128 H100; which of 62
runs that were published of 80 GB cards are judged to fit; and three claims, to all of
which nothing was fitted: the throughput of PyTorch's announcement
of FSDP (2022), the memory table of the ZeRO paper (2020), and that FairScale's FSDP
trains 13B parameters on 8 GPUs and 175B on 128 (2021). Each is planned as our own step
of the same model, on a mesh of as many abstract ranks; speeds are estimated for the
A100-40 of `ff.hardware`.

`--quick` plans models of two layers: every row (of the 62 runs, every seventh), no
meaning in the numbers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compared.models import Size
from literature import fitting, llama_memory, published_runs
from literature.mingpt import init_params, loss_of, make_batch, parameters

import fsfunc as ff
from fsfunc.planning.estimation import estimate
from fsfunc.planning.events import Ran
from fsfunc.planning.hardware import A100_40, replace
from fsfunc.planning.planner import plan
from fsfunc.planning.plans import Plan
from fsfunc.runtime.memory import KINDS

VOCABULARY = 50257  # GPT-2's, not padded; the announcement says "50K"
GPT_175B = Size(VOCABULARY, 12288, layers=96, heads=96, length=512, sequences=20)
GPT_1T = Size(VOCABULARY, 25600, layers=128, heads=160, length=2048, sequences=4)
GPT_13B = Size(VOCABULARY, 5120, layers=40, heads=40, length=2048, sequences=1)
GPT_7B = Size(VOCABULARY, 4096, layers=36, heads=32, length=1024, sequences=1)
QUICK = Size(512, 64, layers=2, heads=4, length=32, sequences=2)

ZERO_PSI, ZERO_RANKS = 7.5e9, 64
ZERO_TABLE = (120.0, 31.4, 16.6, 1.9)  # GB, of zero 0 to 3
CARDS = {"V100-32": 32e9, "A100-40": float(A100_40.memory)}


@dataclass(frozen=True)
class Row:
    """One figure that was published, and ours."""

    part: str
    key: str
    what: str
    unit: str
    predicted: float
    published: float
    says: str = ""

    @property
    def ratio(self) -> float:
        return self.predicted / self.published


@dataclass(frozen=True)
class Planned:
    """A plan, and the seconds of processor time that it took."""

    plan: Plan
    seconds: float


def planned(size: Size, ranks: int, *, zero: int = 3, adam: bool = True) -> Planned:
    """The donated step of ``size`` over ``ranks``, computing and reducing in bfloat16.

    Args:
        adam: whether parameters and moments are float32 and updated by AdamW; else
            parameters are bfloat16 and updated by plain SGD, which keeps nothing.
    """
    loss_fn = loss_of(size)
    optimizer = ff.sharded_adam(1e-4) if adam else ff.scale(-1e-3)
    dtype = torch.float32 if adam else torch.bfloat16

    def step(state: Any, batch: Any) -> Any:
        loss, grads = ff.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads, optimizer), loss

    mesh = ff.make_mesh({"data": ranks}, "abstract")
    step = ff.precision(step, compute=torch.bfloat16, reduce=torch.bfloat16)
    step = ff.donate(ff.shard(step, mesh, "data", zero=zero))
    begun = time.process_time()  # one thread plans: the load beside it does not count
    made = plan(
        step, lambda: init_params(size, dtype), optimizer, lambda: make_batch(size)
    )
    return Planned(made, time.process_time() - begun)


def narayanan_flops(size: Size) -> float:
    """FLOPs of one rank's step as the announcement counts, the recompute among them.

    96 B s l h^2 (1 + s/6h + V/16lh): Narayanan et al. (2021), equation 3. Attention
    is counted whole, whatever its mask spares.
    """
    h, s, layers = size.width, size.length, size.layers
    shares = 1 + s / (6 * h) + size.vocabulary / (16 * layers * h)
    return 96 * size.sequences * s * layers * h**2 * shares


def computed_flops(size: Size) -> float:
    """The same without each layer's last product, of which no backward reads a value:
    no recompute makes it here."""
    again = 8 * size.sequences * size.length * size.layers * size.width**2
    return narayanan_flops(size) - again


# ------------------------------------------------------------------ three claims


def throughput(quick: bool) -> tuple[list[Row], dict[str, Planned]]:
    """FSDP's announcement: TFLOP/s a GPU, all that can be hidden hidden, and none."""
    rows, plans = [], {}
    for name, size, published in (("175B", GPT_175B, 159.0), ("1T", GPT_1T, 84.0)):
        size = _small(size, quick)
        found = plans[f"GPT-{name}"] = planned(size, 128, adam=False)
        at_all = estimate(found.plan, A100_40)
        alone = estimate(found.plan, replace(A100_40, overlap=0.0))
        peak = found.plan.peak_bytes / 1e9
        for key, how, e in (
            ("hidden", "transfers beside computing", at_all),
            ("exposed", "transfers and computing in turn", alone),
        ):
            rate = narayanan_flops(size) / e.seconds / 1e12
            says = (
                f"{e.seconds:.1f} s: compute {e.compute:.1f}, exposed {e.exposed:.1f}"
            )
            if key == "hidden":
                says += f"; peak {peak:.1f} GB a GPU"
            what = f"GPT-{name}, {how}"
            row = Row("FSDP", f"{name}_{key}", what, "TFLOP/s", rate, published, says)
            rows.append(row)
    return rows, plans


def zero_formula(psi: float, ranks: int, zero: int) -> float:
    """Bytes a rank by the ZeRO paper: 2 + 2 + 12 a parameter, ever more of it sharded.

    >>> [round(zero_formula(7.5e9, 64, zero) / 1e9, 1) for zero in range(4)]
    [120.0, 31.4, 16.6, 1.9]
    """
    params, grads, optimizer = 2 * psi, 2 * psi, 12 * psi
    return (
        params / (ranks if zero >= 3 else 1)
        + grads / (ranks if zero >= 2 else 1)
        + optimizer / (ranks if zero >= 1 else 1)
    )


def zero_memory(quick: bool) -> tuple[list[Row], dict[str, Planned]]:
    """The ZeRO paper's table: by its formula, and what our plans hold."""
    rows, plans = [], {}
    size = _small(GPT_7B, quick)
    scale = ZERO_PSI / parameters(size) / 1e9
    for zero, published in enumerate(ZERO_TABLE):
        paper = zero_formula(ZERO_PSI, ZERO_RANKS, zero) / 1e9
        what = f"zero={zero}, its formula"
        rows.append(Row("ZeRO", f"zero{zero}_formula", what, "GB", paper, published))
        found = plans[f"7.5B zero={zero}"] = planned(size, ZERO_RANKS, zero=zero)
        held, most = model_states(found.plan)
        psi = parameters(size) / (ZERO_RANKS if zero == 3 else 1)
        of = ", ".join(f"{k} {v / psi:.2g}" for k, v in held.items() if v / psi > 0.005)
        share = "Psi/64" if zero == 3 else "Psi"
        says = f"bytes a {share}: {of}; with units in flight {most * scale:.1f} GB"
        mine = sum(held.values()) * scale
        what = f"zero={zero}, our plan at its update"
        rows.append(Row("ZeRO", f"zero{zero}_plan", what, "GB", mine, published, says))
    return rows, plans


def model_states(made: Plan) -> tuple[dict[str, int], int]:
    """Bytes of parameters, gathered copies, gradients and moments, activations aside.

    Returns:
        by kind when the optimizer's operator runs, and the most at any time.
    """
    r = made.ranks[0]
    ran = ((i, e.op) for i, e in enumerate(r.events) if isinstance(e, Ran))
    update = max(i for i, op in ran if "_fused_adam" in op.name)
    chosen = [i for i, k in enumerate(KINDS) if k not in ("activations", "buffers")]
    held = [row for at, row in r.memory if at < update][-1]
    most = max(sum(row[i] for i in chosen) for _, row in r.memory)
    return {KINDS[i]: held[i] for i in chosen}, most


def fits(quick: bool) -> tuple[list[Row], dict[str, Planned]]:
    """FairScale's claims: the planned peak, beside the memory of a card."""
    rows, plans = [], {}
    large = dataclasses.replace(GPT_175B, length=2048, sequences=1)
    for name, size, ranks in (("13B", GPT_13B, 8), ("175B", large, 128)):
        found = plans[f"FairScale {name}"] = planned(_small(size, quick), ranks)
        peak = found.plan.peak_bytes / 1e9
        kinds = found.plan.ranks[0].peak.items()
        of = ", ".join(f"{k} {v / 1e9:.1f}" for k, v in kinds if v > 5e7)
        for card, memory in CARDS.items():
            answer = "fits" if peak < memory / 1e9 else "does not fit"
            what = f"{name} on {ranks} x {card}, 1 sequence of 2,048"
            key, says = f"{name}_{card}", f"{answer}: {of}"
            rows.append(Row("FairScale", key, what, "GB", peak, memory / 1e9, says))
    return rows, plans


def _small(size: Size, quick: bool) -> Size:
    return QUICK if quick else size


# ------------------------------------------------------------------------- report

WORDS = {
    "FSDP": """\
Claim: Zhao et al., Introducing PyTorch FSDP (pytorch.org, March 2022), with Belevich et
al. of the same month: minGPT, fp16 with SGD, 128 A100-40GB in nodes of 8, 400 Gb/s a
node, blocks recomputed, FLOPs by Narayanan et al. (2021), eq. 3. Ours: the same model
and optimizer in bfloat16, attention in plain operators as minGPT has it, no dropout, a
block gathered at a time; nothing is offloaded.
Where it stops being right: at 175B the estimate is a fifth above what was measured,
which lies where nothing is hidden; its allocator's retries are not in it. At 1T it is
no model of that run: planned with a block at a time and nothing offloaded the step does
not fit the card. Theirs gathered single linear layers, kept parameters and the blocks'
inputs on the CPU, and ran at the edge of the memory, where, by their own traces, one
cudaMalloc and one collective each took up to hundreds of ms.""",
    "ZeRO": """\
Claim: Rajbhandari et al. (2020), figure 1: 7.5B parameters, 64 ranks, 2 bytes of
parameters, 2 of gradients and 12 of optimizer state each. Plans: a GPT of 36 layers of
4,096, scaled to 7.5B; all that is neither activations nor buffers.
What differs: ours keeps parameters in float32 and no 16-bit copy beside them at zero=0
and 3, but gives gradients in float32: 4 + 4 + 8 bytes, the paper's sum. At zero=1 and 2
all parameters are kept in 16 bits alone, and a rank's part in float32, as there; at
zero=1 its own gradients are whole (2 bytes) until they are reduced, before the update.
Units in flight come on top, which the paper leaves out.""",
    "FairScale": """\
Claim: FairScale's pull request 413 (2021): "13B parameter models on 8 GPUs and 175B
parameter models on 128 GPUs". It names no card: V100-32 was fairseq's for 13B, with 1
sequence a GPU without offloading. V100's 32 GB are taken as 10^9 bytes each; of the
A100's, CUDA's context and NCCL's buffers are taken off. Ours: AdamW, 16 bytes
a parameter over the ranks, blocks recomputed and gathered whole. "published" is the
card's memory.
Where it stops being right: fragments of the allocator are not counted. Of the 38 GB of
175B, 7 are two gathered blocks, and gradients of blocks on their way come on top of the
ranks' own: units smaller than a block, as FairScale could nest them, need less.""",
}


def render(rows: list[Row], plans: dict[str, Planned]) -> None:
    """Prints a table a claim, with its words, and what the plans cost."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160)
    for part, words in WORDS.items():
        table = Table(title=part, title_justify="left")
        for name in ("what", "predicted", "published", "ratio", "of this"):
            numbers = name in ("predicted", "published", "ratio")
            table.add_column(name, justify="right" if numbers else "left")
        for row in rows:
            if row.part == part:
                pair = (row.predicted, row.published)
                cells = [f"{value:.4g} {row.unit}" for value in pair]
                table.add_row(row.what, *cells, f"{row.ratio:.2f}", row.says)
        console.print(table)
        console.print(words + "\n", highlight=False, markup=False, soft_wrap=True)
    for name, found in plans.items():
        events = sum(len(r.events) for r in found.plan.ranks)
        print(f"plan of {name}: {found.seconds:.1f} s, {events:,} events")
    print(f"most memory used: {_most_memory() / 2**20:.0f} MiB")


def _most_memory() -> int:
    """The most bytes that this process held."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="models of two layers")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--runs", type=Path, help="a CSV of runs to judge instead")
    parser.add_argument("--fit", action="store_true", help="fit, and end")
    given = parser.parse_args(arguments)
    if given.fit:
        return published_runs.show_fit()
    runs = published_runs.show(given.runs, given.quick)
    if given.runs is not None:
        if given.json is not None:
            given.json.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
        return None
    reserved = llama_memory.show(given.quick)
    fitting_runs = fitting.show(given.quick)
    rows: list[Row] = []
    plans: dict[str, Planned] = {}
    for part in (throughput, zero_memory, fits):
        more, made = part(given.quick)
        rows += more
        plans |= made
    render(rows, plans)
    if given.json is not None:
        sizes = {"GPT-175B": GPT_175B, "GPT-1T": GPT_1T}
        flops = {
            name: [plans[name].plan.flops, computed_flops(_small(size, given.quick))]
            for name, size in sizes.items()
        }
        record = {
            "quick": given.quick,
            "torch": torch.__version__,
            "rows": [dataclasses.asdict(row) | {"ratio": row.ratio} for row in rows],
            "runs": runs,
            "reserved": reserved,
            "fitting": fitting_runs,
            "words": WORDS,
            "flops": flops,
            "plan_seconds": {name: found.seconds for name, found in plans.items()},
            "peak_bytes": {
                name: found.plan.peak_bytes for name, found in plans.items()
            },
            "process_bytes": _most_memory(),
        }
        given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
