"""torch.distributed.pipelining's train steps, under the names of its competitors.

Each of `setting.ranks` ranks holds one stage, or two where the schedule wants chunks,
cut by hand out of `Gpt` at the places of `models.cut`. The batch is that of all ranks
together, in microbatches of one sequence; the first stage reads its tokens and the last
its targets. As its documentation has it: stages are told their shapes (nothing is
inferred at the first step), the last stage's outputs are not collected
(`return_outputs=False`), and the fused optimizer takes the parameters of this rank's
stages. The loss is divided by the number of microbatches itself, so that the gradients
need no pass of their own (`scale_grads=False`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from compared.models import cross_entropy, cut, layers
from compared.peers import FLOAT, Competitor, Setting, adamw, loop
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)


def plain(setting: Setting) -> Competitor:
    """One device's step on the batch of all ranks: what the pipeline's ranks share."""
    model = setting.model()
    return loop(model, adamw(model.parameters()), setting.whole_batch())


def looped(stage: int, ranks: int) -> int:
    """The rank of `stage` where stages go round and round the ranks."""
    return stage % ranks


def folded(stage: int, ranks: int) -> int:
    """The rank of `stage` of 2·ranks that go to the last rank and come back."""
    return min(stage, 2 * ranks - 1 - stage)


def pipelined(
    setting: Setting,
    *,
    schedule: Callable,
    chunks: int = 1,
    rank_of: Callable[[int, int], int] = looped,
    group: dist.ProcessGroup | None = None,
    parallel: Callable[[nn.Module], nn.Module] = lambda module: module,
    batch: dict[str, Tensor] | None = None,
) -> Competitor:
    """A step of `schedule`, which takes a list of stages where `chunks` is not one.

    Beside data parallelism `setting` is of the ranks of one pipeline, which are the
    `group` and have the `batch`; `parallel` wraps the module of a stage.
    """
    n_stages = chunks * setting.ranks
    owners = [rank_of(stage, setting.ranks) for stage in range(n_stages)]
    mine = [s for s, owner in enumerate(owners) if owner == setting.rank]
    made = stage_modules(setting, mine, n_stages)
    modules = {stage: parallel(module) for stage, module in made.items()}
    stages = [stage_of(setting, s, n_stages, modules[s], group) for s in mine]
    microbatches = setting.microbatches

    def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits, targets) / microbatches

    run = schedule(
        stages if chunks > 1 else stages[0],
        microbatches,
        loss_fn=loss_fn,
        scale_grads=False,
    ).step
    optimizer = adamw([p for s in mine for p in modules[s].parameters()])
    batch = setting.whole_batch() if batch is None else batch
    inputs = [batch["tokens"]] if 0 in mine else []
    last = n_stages - 1 in mine
    target = batch["targets"] if last else None

    def step() -> Tensor | None:
        losses: list[Tensor] = []
        run(*inputs, target=target, losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum().detach() if last else None

    sent = crossings(owners, setting.rank) * microbatches * message_bytes(setting)
    return Competitor(step, sent=sent, state=(stages, optimizer))


def stage_modules(
    setting: Setting, mine: list[int], n_stages: int
) -> dict[int, nn.Sequential]:
    """The modules of the stages `mine`; the rest of the model is let go."""
    remaining = iter(layers(setting.model()))
    cuts = [
        [next(remaining) for _ in range(count)] for count in cut(setting.size, n_stages)
    ]
    return {stage: nn.Sequential(*cuts[stage]) for stage in mine}


def stage_of(
    setting: Setting,
    stage: int,
    n_stages: int,
    module: nn.Module,
    group: dist.ProcessGroup | None = None,
) -> PipelineStage:
    """A stage that is told what a microbatch of one sequence looks like."""
    size = setting.size

    def hidden(width: int) -> Tensor:
        return torch.empty(1, size.length, width, device="meta", requires_grad=True)

    first, last = stage == 0, stage == n_stages - 1
    tokens = torch.empty(1, size.length, dtype=torch.int64, device="meta")
    inside = hidden(size.width)
    return PipelineStage(
        module,
        stage,
        n_stages,
        torch.device(setting.device),
        input_args=tokens if first else inside,
        output_args=hidden(size.vocabulary) if last else inside,
        input_grads=(None,) if first else inside,
        output_grads=hidden(size.vocabulary) if last else inside,
        group=group,
    )


def crossings(owners: list[int], rank: int) -> int:
    """Messages that `rank` sends a microbatch: activations on, gradients back."""
    sent = 0
    for producer, consumer in zip(owners, owners[1:], strict=False):
        if producer != consumer:
            sent += (producer == rank) + (consumer == rank)
    return sent


def message_bytes(setting: Setting) -> int:
    return setting.size.length * setting.size.width * FLOAT


BUILDERS: dict[str, Callable[[Setting], Competitor]] = {
    "plain_whole": plain,
    "torch_gpipe": functools.partial(pipelined, schedule=ScheduleGPipe),
    "torch_1f1b": functools.partial(pipelined, schedule=Schedule1F1B),
    "torch_interleaved": functools.partial(
        pipelined, schedule=ScheduleInterleaved1F1B, chunks=2
    ),
    "torch_zbv": functools.partial(
        pipelined, schedule=ScheduleZBVZeroBubble, chunks=2, rank_of=folded
    ),
}
