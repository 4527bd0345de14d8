"""Memory that torchtitan reported of Llama 3.1 8B under FSDP, beside plans of the step.

``python benchmarks/published.py`` prints it. Published: torchtitan's
benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3: sequences of 8,192, two a
GPU, bfloat16 with reductions in float32, selective activation checkpointing (every
second product and the attention are kept), the most that torch's allocator reserved.
Theirs keeps logits in bfloat16 and casts them; attention's keys are repeated, as here.
In two things FSDP2 and torch's policy are not as the library, and are counted as they
are: gradients on their way, and reduced, are taken by a stream of their own, so that
this memory is of no other use (``ff.fits(streams="fsdp2")``; what the library's own
step needs, on its one stream, is printed too); and in eager mode a block's last product
is kept, though no backward reads it (a compiler drops it).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from compared.models import concatenate_flat
from torch import Tensor

import fsfunc as ff
from fsfunc.planning.allocation import fits
from fsfunc.planning.hardware import H100_500W
from fsfunc.planning.planner import plan
from fsfunc.planning.plans import Plan

Tree = dict[str, Any]
KEPT = ("q", "v", "attention", "gate")
PUBLISHED = ((8, False, 82.4), (8, True, 77.0), (128, False, 67.0), (128, True, 62.0))


@dataclass(frozen=True)
class Llama:
    """Sizes of a model of the family and of a rank's batch."""

    width: int = 4096
    layers: int = 32
    heads: int = 32
    groups: int = 8  # of keys and values
    hidden: int = 14336
    vocabulary: int = 128256
    length: int = 8192
    sequences: int = 2


QUICK = Llama(64, 2, 4, 2, 128, 512, 32, 2)


def init_params(size: Llama) -> Tree:
    """The parameters in float32: embed, a list of blocks, head."""
    d, part = size.width, size.width * size.groups // size.heads
    shapes = {
        "q": (d, d), "k": (part, d), "v": (part, d), "out": (d, d),
        "gate": (size.hidden, d), "up": (size.hidden, d), "down": (d, size.hidden),
        "norm1": (d,), "norm2": (d,),
    }  # fmt: skip

    def block() -> Tree:
        return {name: torch.zeros(shape) for name, shape in shapes.items()}

    return {
        "embed": {"token": torch.zeros(size.vocabulary, d)},
        "blocks": [block() for _ in range(size.layers)],
        "head": {"norm": torch.zeros(d), "w": torch.zeros(size.vocabulary, d)},
    }


def loss_of(
    size: Llama, made: Callable[..., Any] | None = None, kept: Sequence[str] = KEPT
) -> Callable[[Tree, Any], Tensor]:
    """``loss_fn(params, batch)``, whose blocks keep what torchtitan's policy does.

    Args:
        made: of the units embed, block and head, another one.
        kept: the names of the values that blocks keep.
    """
    head_size = size.width // size.heads

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight)

    def split(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, head_size))

    @ff.unit
    def embed(p: Tree, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, p["token"])

    def block(p: Tree, x: Tensor) -> Tensor:
        y = norm(x, p["norm1"])
        q = turned(split(ff.checkpoint_name(F.linear(y, p["q"]), "q")))
        k = turned(split(F.linear(y, p["k"])))
        v = split(ff.checkpoint_name(F.linear(y, p["v"]), "v"))
        k, v = (z.repeat_interleave(size.heads // size.groups, 2) for z in (k, v))
        q, k, v = (z.transpose(1, 2) for z in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = ff.checkpoint_name(mixed, "attention")
        x = x + F.linear(mixed.transpose(1, 2).flatten(2), p["out"])
        y = norm(x, p["norm2"])
        gate = ff.checkpoint_name(F.linear(y, p["gate"]), "gate")
        down = F.linear(F.silu(gate) * F.linear(y, p["up"]), p["down"])
        return x + ff.checkpoint_name(down, "down")

    @ff.unit
    def head(p: Tree, x: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(norm(x, p["norm"]), p["w"]).flatten(0, 1)
        return F.cross_entropy(logits.float(), targets.flatten())

    if made is not None:
        return made(embed, ff.unit(block), head)
    return concatenate_flat(embed, ff.remat(ff.unit(block), ff.SaveOnly(*kept)), head)


def turned(x: Tensor) -> Tensor:
    """Rotary positions of [b, t, heads, d], computed in float32."""
    t, d = x.shape[1], x.shape[-1] // 2
    angle = torch.arange(t)[:, None, None] * torch.ones(d)
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x)


def planned(size: Llama, ranks: int, compiled: bool) -> Plan:
    """The donated step on a GPU's kernels; compiled, its blocks are."""
    kept = KEPT if compiled else (*KEPT, "down")
    loss_fn, optimizer = loss_of(size, kept=kept), ff.sharded_adam(1e-4)
    mesh = ff.make_mesh({"data": ranks}, "abstract")
    step = optimizer(ff.value_and_grad(loss_fn))
    step = ff.jit(step, only=["block"]) if compiled else step
    step = ff.precision(step, compute=torch.bfloat16, reduce=torch.float32)
    step = ff.donate(ff.shard(step, mesh, "data", zero=3))
    tokens = torch.zeros(size.sequences, size.length, dtype=torch.int64)
    batch = {"tokens": tokens, "targets": tokens.clone()}
    given = step, lambda: init_params(size), optimizer, batch
    return plan(*given, mesh=mesh, device="cuda")


def show(quick: bool = False) -> list[dict[str, Any]]:
    """Prints what plans reserve beside what was published, and returns it."""
    found = []
    print("\nLlama 3.1 8B under FSDP, reserved of an H100's memory (torchtitan, 2024):")
    for ranks, compiled, published in PUBLISHED:
        begun = time.process_time()
        made = planned(QUICK if quick else Llama(), ranks, compiled)
        own = made.ranks[0]
        one = fits(made, H100_500W).needed / 2**30
        reserved = fits(made, H100_500W, streams="fsdp2").needed / 2**30
        row = {
            "gpus": ranks, "compiled": compiled, "published_gib": published,
            "reserved_gib": reserved, "held_gib": own.peak_bytes / 2**30,
            "one_stream_gib": one,
            "seconds": time.process_time() - begun,
        }  # fmt: skip
        found.append(row)
        how = "compiled blocks" if compiled else "eager"
        print(
            f"{ranks:4} GPUs, {how:16} {reserved:6.1f} GiB of {published} published: "
            f"{reserved / published:.2f}; on fsfunc's one stream {one:.1f}, "
            f"held {row['held_gib']:.1f}"
        )
    return found


if __name__ == "__main__":
    show()
