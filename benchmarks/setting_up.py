"""How long the first state takes: `init_state` of a function, and torch's FSDP2.

    torchrun --nproc-per-node 2 benchmarks/setting_up.py [--params 1e9] [--rounds N]
    python benchmarks/setting_up.py --simulated 8 [--params 1e9]

The first: parameters alone, drawn by `normal_`, made in parts by either side in turns,
A B A B. Beside a round's time, that of the slowest rank, stands the time that it ran
on a processor, which a busy machine changes less. Ours is the init function and
`init_state`, the recording of the step and all; theirs a module on "meta",
`fully_shard` of each block and of the root, `to_empty`, and `normal_` of every
parameter.

The second: a state with Adam's moments over simulated ranks of this one process, whose
peak is compared to what the state itself takes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from compared.measuring import alternate, peak_resident, resident
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fsfunc as ff

STD = 0.02
BLOCK_PARAMS = 1 << 25  # of a block, at most


def shape_of(params: int) -> tuple[int, int]:
    """(blocks, width): a block is two matrices, of width x 4 width and back."""
    width = 64
    while 8 * (2 * width) ** 2 <= min(BLOCK_PARAMS, params / 4):
        width *= 2
    return max(1, round(params / (8 * width**2))), width


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def theirs(blocks: int, width: int) -> Callable[[], Any]:
    """FSDP2, as its documentation says."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def run() -> nn.Module:
        with torch.device("meta"):
            model = nn.Sequential(*[Block(width) for _ in range(blocks)])
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.to_empty(device="cpu")
        for p in model.parameters():
            nn.init.normal_(p, std=STD)
        return model

    return run


@ff.unit
def block(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.relu(x @ p["up"].t()) @ p["down"].t()


def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
    for p in params:
        x = block(p, x)
    return x.square().mean()


def ours(blocks: int, width: int, mesh: ff.Mesh, optimizer: Any) -> Callable[[], Any]:
    def init() -> Any:
        draw = lambda *shape: torch.empty(shape).normal_(0, STD)  # noqa: E731
        return [
            {"up": draw(4 * width, width), "down": draw(width, 4 * width)}
            for _ in range(blocks)
        ]

    def run() -> ff.TrainState:
        train = optimizer(ff.value_and_grad(loss_fn))
        step = ff.shard(train, mesh, "data")
        torch.manual_seed(0)  # FSDP2's ranks drew each for itself
        return ff.init_state(step, init, optimizer, torch.zeros(1, width))

    return run


def paired(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of either side, and the median of the rounds' ratios."""
    blocks, width = shape_of(args.params)
    torch.set_num_threads(1)
    mesh = ff.make_mesh({"data": int(os.environ["WORLD_SIZE"])}, "processes")
    sides = {"ours": ours(blocks, width, mesh, ff.sgd(0.1))}
    if not args.alone:
        sides["fsdp2"] = theirs(blocks, width)
    ran: dict[str, list[float]] = {name: [] for name in sides}
    made: list[Any] = []

    def timed(name: str) -> None:
        start = time.process_time()
        made.append(sides[name]())
        ran[name].append(time.process_time() - start)

    calls = {name: (lambda name=name: timed(name)) for name in sides}
    tiny = {"ours": ours(1, 64, mesh, ff.sgd(0.1)), "fsdp2": theirs(1, 64)}
    alternate(tiny, rounds=2, barrier=dist.barrier)  # imports, and first calls
    sides["ours"]()  # a virtual machine's memory is slow when it is first touched

    def barrier() -> None:
        made.clear()
        gc.collect()  # neither side pays for its own end, nor for the other's
        dist.barrier()

    mine = alternate(calls, rounds=args.rounds, barrier=barrier)
    found: dict[str, Any] = {}
    for what, rows in (("seconds", mine), ("processor seconds", ran)):
        times = torch.tensor(list(rows.values()), dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        found[what] = dict(zip(calls, times.tolist(), strict=True))
        if not args.alone:
            pairs = zip(found[what]["ours"], found[what]["fsdp2"], strict=True)
            found[what]["ratio"] = statistics.median(a / b for a, b in pairs)
    return {"params": 8 * blocks * width**2, **found, "load": os.getloadavg()[0]}


def simulated(args: argparse.Namespace) -> dict[str, Any]:
    """Bytes of a state with moments over ranks of this process, and the peak."""
    blocks, width = shape_of(args.params)
    torch.set_num_threads(1)
    mesh = ff.make_mesh({"data": args.simulated}, "simulated")
    run = ours(blocks, width, mesh, ff.sharded_adam(1e-3))
    ff.spmd(ours(1, 64, mesh, ff.sharded_adam(1e-3)), mesh)()
    before = resident()
    with peak_resident() as peak:
        states = ff.spmd(run, mesh)()
        highest = peak()
    params = 8 * blocks * width**2
    return {
        "params": params,
        "whole parameters": 4 * params,
        "states": 12 * params,
        "peak": highest - before,
        "beside the states": highest - before - 12 * params,
        "largest leaf": 16 * width**2,
        "ranks": len(states),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--params", type=float, default=1e9, help="how many there are")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds")
    parser.add_argument("--alone", action="store_true", help="ours alone")
    parser.add_argument("--simulated", type=int, metavar="N", help="N simulated ranks")
    args = parser.parse_args(argv)
    found = simulated(args) if args.simulated else paired(args)
    if args.simulated or dist.get_rank() == 0:
        print(json.dumps(found, indent=1), flush=True)
    if not args.simulated:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
