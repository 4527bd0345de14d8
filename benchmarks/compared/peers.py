"""The peers' train steps, each set up as its documentation recommends.

A competitor is built by a function of `Setting` and is then called once a step; its
`sent` is what one rank sends in a step. A peer does not count its own traffic, so for
these `sent` is the closed form of the scheme, with ring collectives (a gather or a
reduce-scatter of S bytes sends αS, an all-reduce 2αS; α = (W-1)/W). What gloo sends for
FSDP2 is more: its reduce-scatter is an all-reduce there (`hosts.py` counts it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from compared.models import Gpt, Size, init_params, load, make_batch, whole_batch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

ADAMW: dict[str, Any] = {"lr": 1e-3, "weight_decay": 1e-2}
FLOAT = 4  # bytes; every master parameter and every reduction is fp32


@dataclass(frozen=True)
class Setting:
    """What a competitor is told about the run it takes part in."""

    size: Size
    rank: int
    ranks: int
    device: str = "cpu"
    compute: torch.dtype | None = None
    min_bytes: int | None = None
    gloo: bool = False  # also for fsfunc, of which it is only the way between hosts
    kernels: bool = True  # compiled graphs become kernels; else they are traced alone

    def model(self) -> Gpt:
        params = init_params(self.size, device=self.device)
        return load(self.size, params, device=self.device)

    def batch(self) -> dict[str, Tensor]:
        return make_batch(self.size, self.rank, device=self.device)

    def whole_batch(self) -> dict[str, Tensor]:
        """That of all ranks, which a pipeline's ranks work on together."""
        return whole_batch(self.size, self.ranks, device=self.device)

    @property
    def compiling(self) -> dict[str, Any]:
        """The arguments of `torch.compile`."""
        backend = "inductor" if self.kernels else "aot_eager"
        return {"fullgraph": True, "dynamic": False, "backend": backend}

    @property
    def microbatches(self) -> int:
        """Of the whole batch, in pipelines: one sequence each."""
        return self.ranks * self.size.sequences

    @property
    def alpha(self) -> float:
        return (self.ranks - 1) / self.ranks


@dataclass
class Competitor:
    """One step of training by `step()`, which returns the loss before it.

    A rank that does not come to know the loss returns None.
    """

    step: Callable[[], Tensor | None]
    sent: float | None = 0.0
    state: object = field(default=None, repr=False)
    plan: Callable[[], Any] | None = None  # what fsfunc says that a step will do


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, fused=True, **ADAMW)


def loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: dict[str, Tensor],
    *,
    sent: float = 0.0,
) -> Competitor:
    """The loop that everybody writes on torch.autograd."""

    def step() -> Tensor:
        loss = model(batch["tokens"], batch["targets"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Competitor(step, sent=sent, state=(model, optimizer))


def plain(setting: Setting) -> Competitor:
    """One device, no communication: the floor under every step time."""
    model = setting.model()
    if setting.compute is None:
        return loop(model, adamw(model.parameters()), setting.batch())
    cast = Cast(model, setting.compute)
    return loop(cast, adamw(model.parameters()), setting.batch())


def checkpointed(setting: Setting) -> Competitor:
    """The same with each block under torch.utils.checkpoint, non-reentrant."""
    model = setting.model()
    for block in model.blocks:
        inner = block.forward
        block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
    return loop(model, adamw(model.parameters()), setting.batch())


def compiled(setting: Setting) -> Competitor:
    """One device, each block compiled: the floor under compiled steps."""
    model = _compiled_blocks(setting)
    return loop(model, adamw(model.parameters()), setting.batch())


def compiled_whole(setting: Setting) -> Competitor:
    """One device, the model compiled as one graph, with its casts and its loss."""
    model: nn.Module = setting.model()
    if setting.compute is not None:
        model = Cast(model, setting.compute)
    model.compile(**setting.compiling)
    return loop(model, adamw(model.parameters()), setting.batch())


def _compiled_blocks(setting: Setting) -> Gpt:
    model = setting.model()
    for block in model.blocks:
        block.compile(**setting.compiling)
    return model


def ddp(setting: Setting, *, compile: bool = False) -> Competitor:
    model = _compiled_blocks(setting) if compile else setting.model()
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    sent = 2 * setting.alpha * setting.size.parameters * FLOAT
    return loop(model, adamw(model.parameters()), setting.batch(), sent=sent)


def zero_redundancy(setting: Setting) -> Competitor:
    """DDP's all-reduce, then each rank's updated parameters to the others."""
    model = DistributedDataParallel(setting.model(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, fused=True, **ADAMW
    )
    sent = 3 * setting.alpha * setting.size.parameters * FLOAT
    return loop(model, optimizer, setting.batch(), sent=sent)


def fsdp2(
    setting: Setting,
    *,
    recompute: bool = False,
    compile: bool = False,
    offload: bool = False,
) -> Competitor:
    """`fully_shard` on each block and on the root, with its defaults.

    Its default keeps the root gathered (embedding and head) after the forward, and
    reshards each block, which is gathered twice.
    """
    how: dict[str, Any] = {}
    if offload:  # parameters, gradients and moments; the host updates them
        pinned = setting.device.startswith("cuda")
        how["offload_policy"] = CPUOffloadPolicy(pin_memory=pinned)
    size, model = setting.size, setting.model()
    mesh = init_device_mesh(setting.device.split(":")[0], (setting.ranks,))
    policy = MixedPrecisionPolicy(
        param_dtype=setting.compute,
        reduce_dtype=torch.float32,
        cast_forward_inputs=setting.compute is not None,
    )
    for i, block in enumerate(model.blocks):
        if recompute:
            model.blocks[i] = block = checkpoint_wrapper(block)
        if compile:  # around the recompute, as torchtitan does
            block.compile(**setting.compiling)
        fully_shard(block, mesh=mesh, mp_policy=policy, **how)
    fully_shard(model, mesh=mesh, mp_policy=policy, **how)
    gathered = torch.empty(0, dtype=setting.compute or torch.float32).element_size()
    blocks = size.layers * size.block_parameters
    sent = setting.alpha * (
        gathered * (size.parameters + blocks) + FLOAT * size.parameters
    )
    return loop(model, adamw(model.parameters()), setting.batch(), sent=sent)


def fsdp2_checkpointed(setting: Setting) -> Competitor:
    return fsdp2(setting, recompute=True)


class Cast(nn.Module):
    """The model run on copies of its fp32 parameters in a lower dtype.

    It is what FSDP2's MixedPrecisionPolicy and ff.precision compute, without sharding;
    torch.autocast keeps other operations in fp32 and would be other work.
    """

    def __init__(self, model: Gpt, dtype: torch.dtype):
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, *inputs: Tensor) -> Tensor:
        cast = {k: p.to(self.dtype) for k, p in self.model.named_parameters()}
        return torch.func.functional_call(self.model, cast, inputs)


def mean_over_ranks(loss: Tensor | None) -> float:
    """The mean over the ranks that know a loss.

    A peer's loss is its rank's own, and a pipeline's is known where its last stage is;
    fsfunc's is the mean already.
    """
    known = 0.0 if loss is None else 1.0
    value = 0.0 if loss is None else loss.item()
    total = torch.tensor([value, known], dtype=torch.float64)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(total)
    return (total[0] / total[1]).item()


BUILDERS: dict[str, Callable[[Setting], Competitor]] = {
    "plain": plain,
    "checkpoint": checkpointed,
    "ddp": ddp,
    "zero_redundancy": zero_redundancy,
    "fsdp2": fsdp2,
    "fsdp2_checkpoint": fsdp2_checkpointed,
    "fsdp2_offload": partial(fsdp2, offload=True),
    "compiled": compiled,
    "compiled_whole": compiled_whole,
    "ddp_compiled": partial(ddp, compile=True),
    "fsdp2_compiled": partial(fsdp2, compile=True),
    "fsdp2_checkpoint_compiled": partial(fsdp2, recompute=True, compile=True),
}
