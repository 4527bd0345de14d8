"""One rank of a measurement: reads a task, writes an answer. See measuring.py."""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1  # Linux prctl: die with the parent, however it ends


def steps(task: dict[str, Any]) -> dict[str, Any]:
    """Times of alternating steps, losses of the first step and after the warm-up."""
    import torch.distributed as dist
    from compared import peers
    from compared.measuring import alternate

    names = task["competitors"]
    made = {name: _build(name, task) for name in names}
    losses = {name: [] for name in names}
    for _ in range(task["warmup"]):
        for name, competitor in made.items():
            losses[name].append(peers.mean_over_ranks(competitor.step()))
    sent = {name: _sent(name, made[name]) for name in names}
    barrier = dist.barrier if task["ranks"] > 1 else lambda: None
    calls = {name: competitor.step for name, competitor in made.items()}
    times = alternate(calls, rounds=task["rounds"], barrier=barrier)
    return {"times": times, "losses": losses, "sent": sent}


def memory(task: dict[str, Any]) -> dict[str, Any]:
    """Peak resident bytes of one competitor's steady steps, and those after imports."""
    from compared.measuring import peak_resident, resident

    _import_everything(task)
    after_imports, modules = resident(), set(sys.modules)
    competitor = _build(task["competitor"], task)
    for _ in range(task["warmup"]):
        competitor.step()
    with peak_resident() as peak:
        for _ in range(task["rounds"]):
            competitor.step()
        highest = peak()
    late = sorted({m.split(".")[0] for m in set(sys.modules) - modules})
    return {
        "peak": highest,
        "after_imports": after_imports,
        "between_steps": resident(),
        "late_imports": late,
    }


def compiling(task: dict[str, Any]) -> dict[str, Any]:
    """Seconds of one competitor's first steps, and the processor's, compilers' too."""
    _import_everything(task)
    competitor = _build(task["competitor"], task)
    start, before = time.perf_counter(), os.times()
    for _ in range(3):
        competitor.step()
    seconds, after = time.perf_counter() - start, os.times()
    # user, system, children's user, children's system
    return {"seconds": seconds, "processor seconds": sum(after[:4]) - sum(before[:4])}


def adam(task: dict[str, Any]) -> dict[str, Any]:
    """Seconds of one AdamW update of the model's tensors."""
    import torch
    from compared.measuring import alternate
    from compared.models import Size, init_params
    from compared.peers import adamw
    from torch.utils import _pytree as pytree

    size = Size(**task["size"])
    params = pytree.tree_leaves(init_params(size))
    draw = torch.Generator().manual_seed(1)
    grads = [torch.randn(p.shape, generator=draw) for p in params]
    mine = [torch.nn.Parameter(p.clone()) for p in params]
    for p, g in zip(mine, grads, strict=True):
        p.grad = g.clone()
    optimizer = adamw(mine)
    calls: dict[str, Callable[[], Any]] = {"AdamW": optimizer.step}
    if task["ours"]:
        from compared import ours

        calls["sharded_adam"] = ours.optimizer_step(params, grads)
    alternate(calls, rounds=task["warmup"])
    return {"times": alternate(calls, rounds=task["rounds"])}


def hooks(task: dict[str, Any]) -> dict[str, Any]:
    """Forward and backward of chains of one-parameter units, with and without sharding.

    torch's fake process group answers every collective at once, so what is left is
    each side's own work for a unit call in a group of two ranks: hooks or transforms,
    views, buffers, and issuing its collectives. (In a group of one, either side may
    skip what it would do in a real one.) Chains of two lengths are timed, so that what
    a step costs besides its units (the root's hooks, the loss) cancels.
    """
    import torch
    import torch.distributed as dist
    from compared.measuring import alternate
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    width = 16

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(width))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.w

    def modules(units: int, *, sharded: bool) -> Callable[[], None]:
        model = nn.Sequential(*[Scale() for _ in range(units)])
        if sharded:
            mesh = init_device_mesh("cpu", (2,))
            for layer in model:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        x = torch.ones(width)

        def run() -> None:
            model(x).sum().backward()
            model.zero_grad()

        return run

    calls: dict[str, Callable[[], None]] = {}
    for units in task["units"]:
        calls[f"modules {units}"] = modules(units, sharded=False)
        calls[f"fully_shard {units}"] = modules(units, sharded=True)
        if task["ours"]:
            from compared import ours

            calls[f"units {units}"] = ours.chain(units, width, ranks=None)
            calls[f"shard {units}"] = ours.chain(units, width, ranks=2)
    alternate(calls, rounds=task["warmup"])
    return {"times": alternate(calls, rounds=task["rounds"])}


def example(task: dict[str, Any]) -> dict[str, Any]:
    """Seconds of one property test's example on simulated ranks."""
    from compared import ours
    from compared.measuring import alternate

    calls = {"example": ours.simulated_example()}
    alternate(calls, rounds=task["warmup"])
    return {"times": alternate(calls, rounds=task["rounds"])}


def foresee(task: dict[str, Any]) -> dict[str, Any]:
    """Estimated and measured seconds of steps, on the hardware as measured here."""
    from compared.foreseen import foresee

    return foresee(task)


def occupy(task: dict[str, Any]) -> dict[str, Any]:
    """Planned bytes of a step, and the resident bytes of this process."""
    from compared.foreseen import occupy

    return occupy(task)


def checkpoints(task: dict[str, Any]) -> dict[str, Any]:
    """Times of saving and loading one state, beside the disk and torch's own."""
    from compared.stored import measure

    return measure(task)


def train(task: dict[str, Any]) -> dict[str, Any]:
    """Steps, losses and bytes of training over a slow link."""
    from slow_link import rank

    return rank.train(task)


def _build(name: str, task: dict[str, Any]) -> Any:
    import torch
    from compared import peers, peers_pipelined, peers_split
    from compared.models import Size

    setting = peers.Setting(
        Size(**task["size"]),
        task["rank"],
        task["ranks"],
        compute=torch.bfloat16 if task.get("bf16") else None,
        min_bytes=task.get("min_bytes"),
        gloo=task.get("gloo", False),
        kernels=task.get("kernels", True),
    )
    builders = peers.BUILDERS | peers_pipelined.BUILDERS | peers_split.BUILDERS
    if name not in builders:
        from compared import ours, ours_pipelined, ours_split

        builders = ours.BUILDERS | ours_pipelined.BUILDERS | ours_split.BUILDERS
    return builders[name](setting)


def _sent(name: str, competitor: Any) -> float:
    if competitor.sent is not None:
        return competitor.sent
    from compared import ours

    return ours.sent_bytes(competitor)


def _import_everything(task: dict[str, Any]) -> None:
    """Also what torch.optim imports at its first step: no side's peak holds modules."""
    import torch._dynamo  # noqa: F401
    from compared import (
        peers_pipelined,  # noqa: F401
        peers_split,  # noqa: F401
    )

    if task["ours"]:
        from compared import (
            ours_pipelined,  # noqa: F401
            ours_split,  # noqa: F401
        )


def _start_group(task: dict[str, Any]) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{task['folder']}/rendezvous",
        rank=task["rank"],
        world_size=task["ranks"],
        timeout=datetime.timedelta(seconds=task["patience"]),
    )


def main() -> None:
    task = json.loads(sys.argv[1])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if "hosts" in task:
        from slow_link.links import join

        join(task["hosts"][task["rank"]])
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # torch's own, about names that it has renamed
    grouped = task["ranks"] > 1 or task["kind"] in ("steps", "memory", "compiling")
    if grouped:
        _start_group(task)
    every = (
        steps,
        memory,
        compiling,
        adam,
        hooks,
        example,
        foresee,
        occupy,
        checkpoints,
        train,
    )
    kinds = {f.__name__: f for f in every}
    answer = kinds[task["kind"]](task)
    path = Path(task["folder"]) / f"answer{task['rank']}"
    path.write_text(json.dumps(answer))
    if grouped:
        torch.distributed.barrier()  # nobody leaves while another still sends
    sys.stdout.flush()
    # The answer is written. An orderly exit would tear down gloo's threads in an order
    # that now and then ends in std::terminate.
    os._exit(0)


if __name__ == "__main__":
    main()
