"""The train steps of hosts.py, ours and the peers', and the text that they train on.

Ranks 0 and 1 are on one host, 2 and 3 on the other: a mesh of ("node", "data"). The
peers' `sent` is what crosses the link in a step, both ways and for all ranks, in closed
form: in a ring of all ranks two of four edges cross, each with what one rank sends.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from compared import ours, peers, peers_pipelined
from compared.models import cut, functional_loss, init_params
from compared.peers import ADAMW, FLOAT, Competitor, Setting, adamw, loop
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import Schedule1F1B, ScheduleZBVZeroBubble
from torch.nn.parallel import DistributedDataParallel

import fsfunc as ff

HOSTS, NEAR = 2, 2  # hosts, and ranks of each
AXES = {"node": HOSTS, "data": NEAR}
FLAT = ("data", "node")  # all ranks; in this order levels need no copy
EVERY = 8  # local steps from one meeting to the next
DIRECTIONS = 4  # of PowerSGD


@dataclass(frozen=True)
class Stream(Setting):
    """A new batch every step, in the same tensors: text that can be learnt.

    A byte is followed by a certain one with probability 3/4, else by any: no model
    comes below a loss of 1.94.
    """

    draw: torch.Generator = field(default_factory=torch.Generator)
    rows: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = self.ranks, self.size.sequences, self.size.length
        self.draw.manual_seed(7)  # each rank draws the batches of all
        for name in ("tokens", "targets"):
            self.rows[name] = torch.zeros(shape, dtype=torch.int64)
        self.advance()

    def advance(self) -> None:
        shape = self.size.length + 1, self.ranks, self.size.sequences
        text = torch.randint(self.size.vocabulary, shape, generator=self.draw)
        follows = torch.rand(shape, generator=self.draw) < 0.75
        for before, byte, follow in zip(text, text[1:], follows[1:], strict=False):
            byte[follow] = (5 * before[follow] + 1) % self.size.vocabulary
        text = text.movedim(0, 2)
        self.rows["tokens"].copy_(text[..., :-1])
        self.rows["targets"].copy_(text[..., 1:])

    def of(self, ranks: slice) -> dict[str, Tensor]:
        return {name: x[ranks].flatten(0, 1) for name, x in self.rows.items()}

    def batch(self) -> dict[str, Tensor]:
        return self.of(slice(self.rank, self.rank + 1))

    def whole_batch(self) -> dict[str, Tensor]:
        return self.of(slice(None))


# ------------------------------------------------------------------ fsfunc's steps


def sharded(setting: Stream, **how: Any) -> Competitor:
    """Over all ranks, as if there were no hosts."""
    return _trained(setting, lambda step, mesh: ff.shard(step, mesh, FLAT, **how))


def hybrid(setting: Stream) -> Competitor:
    def around(step: Any, mesh: Any) -> Any:
        return ff.shard(step, mesh, "data", zero=3, replicate="node")

    return _trained(setting, around)


def coded(setting: Stream) -> Competitor:
    """Eight bits in gathers and in reductions, whose errors are owed."""
    how = {"gather": ff.QuantizedGather(), "reduction": ff.QuantizedReduction()}

    def around(step: Any, mesh: Any) -> Any:
        return ff.shard(step, mesh, FLAT, zero=3, **how)

    return _trained(setting, around, ff.error_feedback)


def levels(setting: Stream, *, coded: bool = False) -> Competitor:
    """First across, then within hosts; a backward gathers within its host alone."""
    how = {
        "gather": ff.HierarchicalGather(
            "node", ff.QuantizedGather() if coded else None, keep=True
        ),
        "reduction": ff.HierarchicalReduction(
            "node", ff.QuantizedReduction() if coded else None
        ),
    }

    def around(step: Any, mesh: Any) -> Any:
        return ff.shard(step, mesh, FLAT, zero=3, **how)

    return _trained(setting, around, ff.error_feedback if coded else _same)


def powersgd(setting: Stream) -> Competitor:
    def around(step: Any, mesh: Any) -> Any:
        return ff.shard(step, mesh, FLAT, zero=0)

    return _trained(setting, around, lambda adam: ff.powersgd(adam, DIRECTIONS))


def local(setting: Stream, *, slow: bool) -> Competitor:
    """zero=3 within hosts, which train apart and meet now and then."""

    def around(step: Any, mesh: Any, every: int = EVERY) -> Any:
        step = ff.shard(step, mesh, "data", zero=3)
        if slow:
            return ff.slowmo(step, mesh, "node", every=every, lr=ADAMW["lr"])
        return ff.local_sgd(step, mesh, "node", every=every)

    made = _trained(setting, around)
    meets = _trained(setting, functools.partial(around, every=1)).plan
    assert made.plan and meets
    plan = lambda: (EVERY - 1) * made.plan() + meets()  # noqa: E731
    return dataclasses.replace(made, plan=plan)


def pipelined(
    setting: Stream,
    *,
    pipe: str = "node",
    zero: int = 2,
    schedule: str = "one_f_one_b",
    chunks: int = 1,
) -> Competitor:
    """Pipelines along one axis, and copies of them along the other.

    The ranks of a pipeline work on the rows that two ranks have elsewhere.
    """
    n, stages = 2 * setting.size.sequences, cut(setting.size, 2 * chunks)
    data = _other(pipe)

    def around(step: Any, mesh: Any) -> Any:
        step = ff.pipeline(
            step, mesh, pipe, n_microbatches=n, stages=stages,
            schedule=getattr(ff.schedules, schedule),
        )  # fmt: skip
        return ff.shard(step, mesh, data, zero=zero)

    return _trained(setting, around, batch=_rows_of_pipeline(setting, pipe))


def _other(axis: str) -> str:
    return next(other for other in AXES if other != axis)


def _index(setting: Stream, axis: str) -> int:
    """This rank's index along an axis."""
    return setting.rank // NEAR if axis == "node" else setting.rank % NEAR


def _rows_of_pipeline(setting: Stream, pipe: str) -> dict[str, Tensor]:
    first = 2 * _index(setting, _other(pipe))
    return setting.of(slice(first, first + 2))


def four_stages(setting: Stream) -> Competitor:
    """As torch_1f1b; which rank a message goes to is in no ledger."""
    n, stages = setting.microbatches, cut(setting.size, setting.ranks)

    def around(step: Any, mesh: Any) -> Any:
        return ff.pipeline(step, mesh, "pipe", n_microbatches=n, stages=stages)

    made = _trained(
        setting, around, batch=setting.whole_batch(), axes={"pipe": setting.ranks}
    )
    return dataclasses.replace(made, sent=_between_stages(setting))


def _same(x: Any) -> Any:
    return x


def _trained(
    setting: Stream,
    around: Callable[[Any, Any], Any],
    optimizing: Callable[[Any], Any] = _same,
    batch: dict[str, Tensor] | None = None,
    axes: dict[str, int] = AXES,
) -> Competitor:
    """The competitor of a step with transforms `around` it.

    Its plans are of steps whose times have the mean of a step's.
    """
    optimizer = optimizing(ours.adamw())
    loss_fn = functional_loss(setting.size, ff.unit, _same)
    batch = setting.batch() if batch is None else batch
    init = functools.partial(init_params, setting.size)

    mesh = ff.make_mesh(axes, "processes")
    step = around(optimizer(ff.value_and_grad(loss_fn)), mesh)
    plan = lambda: [ff.plan(step, init, optimizer, batch, mesh=mesh)]  # noqa: E731
    held = [ff.init_state(step, init(), optimizer, batch)]
    made = ours.advancing(ff.donate(step), held, batch)
    return dataclasses.replace(made, step=lambda: made.step()["loss"], plan=plan)


# ----------------------------------------------------------------------- the peers


def ddp(setting: Stream) -> Competitor:
    made = peers.ddp(setting)
    return dataclasses.replace(made, sent=2 * made.sent)


def fsdp2(setting: Stream) -> Competitor:
    """Its closed form and more: torch's reduce-scatter on gloo is an all-reduce."""
    made = peers.fsdp2(setting)
    more = setting.alpha * setting.size.parameters * FLOAT
    return dataclasses.replace(made, sent=2 * (made.sent + more))


def hsdp(setting: Stream) -> Competitor:
    """`fully_shard` over a mesh of two axes: sharded within hosts, copied across."""
    model = setting.model()
    mesh = init_device_mesh("cpu", (HOSTS, NEAR), mesh_dim_names=tuple(AXES))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # Of a rank's half, all-reduced by two: as many bytes as the half, from four ranks.
    sent = 2 * setting.size.parameters * FLOAT
    return loop(model, adamw(model.parameters()), setting.batch(), sent=sent)


def ddp_powersgd(setting: Stream) -> Competitor:
    """DDP with torch's hook, from the third step on: no sooner with what is owed.

    In one bucket: of several, gloo's threads mix up the hook's collectives.
    """
    model = DistributedDataParallel(
        setting.model(), gradient_as_bucket_view=True, bucket_cap_mb=1000
    )
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=DIRECTIONS, start_powerSGD_iter=2
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    shapes = [p.shape for p in model.parameters()]
    numbers = sum(DIRECTIONS * sum(s) if len(s) == 2 else s[0] for s in shapes)
    sent = 2 * 2 * setting.alpha * numbers * FLOAT
    return loop(model, adamw(model.parameters()), setting.batch(), sent=sent)


def torch_1f1b(setting: Stream) -> Competitor:
    """Four stages: of three borders one is between the hosts."""
    made = peers_pipelined.BUILDERS["torch_1f1b"](setting)
    return dataclasses.replace(made, sent=_between_stages(setting))


def torch_pipelined(
    setting: Stream, *, pipe: str, sharded: bool, zero_bubble: bool
) -> Competitor:
    """Pipelines along one axis, DDP or `fully_shard` along the other.

    FSDP2 keeps what it has gathered until the schedule lets go of it, as torch's own
    pipelines ask for; DDP cannot be told of a backward in two halves.
    """
    mesh = init_device_mesh("cpu", (HOSTS, NEAR), mesh_dim_names=tuple(AXES))
    data = mesh[_other(pipe)]

    def parallel(module: nn.Module) -> nn.Module:
        if not sharded:
            group = data.get_group()
            return DistributedDataParallel(
                module, process_group=group, gradient_as_bucket_view=True
            )
        for layer in module.children():
            fully_shard(layer, mesh=data, reshard_after_forward=False)
        return fully_shard(module, mesh=data, reshard_after_forward=False)

    made = peers_pipelined.pipelined(
        Setting(setting.size, _index(setting, pipe), 2),
        schedule=ScheduleZBVZeroBubble if zero_bubble else Schedule1F1B,
        chunks=2 if zero_bubble else 1,
        rank_of=peers_pipelined.folded if zero_bubble else peers_pipelined.looped,
        group=mesh[pipe].get_group(),
        parallel=parallel,
        batch=_rows_of_pipeline(setting, pipe),
    )
    # Between hosts: two pipelines' borders, one or (there and back) two of each; or
    # what four ranks send of their stages, each of half of the parameters.
    if pipe == "node":
        sent = 2.0 * _between_stages(setting, 2 * setting.size.sequences)
        sent *= 2 if zero_bubble else 1
    else:
        sent = 2.0 * setting.size.parameters * FLOAT * (1.5 if sharded else 1.0)
    return dataclasses.replace(made, sent=sent)


def _between_stages(setting: Stream, microbatches: int | None = None) -> float:
    """What crosses one border: activations on, gradients back."""
    microbatches = setting.microbatches if microbatches is None else microbatches
    return 2 * microbatches * peers_pipelined.message_bytes(setting)


COMPETITORS: dict[str, Callable[[Stream], Competitor]] = {
    "ddp": ddp,
    "ddp_powersgd": ddp_powersgd,
    "fsdp2": fsdp2,
    "hsdp": hsdp,
    "torch_1f1b": torch_1f1b,
    "zero0": functools.partial(sharded, zero=0),
    "zero0_levels": functools.partial(
        sharded, zero=0, reduction=ff.HierarchicalReduction("node")
    ),
    "powersgd": powersgd,
    "zero3": functools.partial(sharded, zero=3),
    "hybrid": hybrid,
    "levels": levels,
    "coded": coded,
    "coded_levels": functools.partial(levels, coded=True),
    "local_sgd": functools.partial(local, slow=False),
    "slowmo": functools.partial(local, slow=True),
    "four_stages": four_stages,
    "pipeline": pipelined,
    "f1b_data": functools.partial(pipelined, pipe="data", zero=0),
    "f1b_pipe": functools.partial(pipelined, pipe="node", zero=0),
    "zbv_data": functools.partial(pipelined, pipe="data", schedule="zb_v", chunks=2),
    "zbv_pipe": functools.partial(pipelined, pipe="node", schedule="zb_v", chunks=2),
    "torch_f1b_data": functools.partial(
        torch_pipelined, pipe="data", sharded=False, zero_bubble=False
    ),
    "torch_f1b_pipe": functools.partial(
        torch_pipelined, pipe="node", sharded=False, zero_bubble=False
    ),
    "torch_zbv_data": functools.partial(
        torch_pipelined, pipe="data", sharded=True, zero_bubble=True
    ),
    "torch_zbv_pipe": functools.partial(
        torch_pipelined, pipe="node", sharded=True, zero_bubble=True
    ),
}
