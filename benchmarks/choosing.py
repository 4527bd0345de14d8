"""Is the stack that `search` puts first the fastest? Predicted and measured, in turns.

    torchrun --nproc-per-node 2 benchmarks/choosing.py [--quick] [--mesh N|JSON]
                                                       [--first N] [--all-ranked]

Every rank measures the hardware, searches on it, and then runs the first stacks of the
front (where it is short, the fastest others too), A B A B, on the byte-level GPT. A
step's time is that of the slowest rank, its figure the median; so is the ratio of each
two, of steps that ran one after the other. Nothing is fitted: the search has seen
`measure_hardware` and no step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from compared.measuring import alternate
from compared.models import FULL, QUICK, Size, functional_loss, init_params, whole_batch
from compared.ours import train_step

import fsfunc as ff
from fsfunc.planning.calibration import measure_hardware
from fsfunc.planning.search_results import Search
from fsfunc.planning.stack_search import search
from fsfunc.planning.stacks import Choice

SAME = 1.03  # steps within this ratio cannot be told apart on a shared machine


def measured(
    choices: Sequence[Choice], size: Size, batch: Any, warmup: int, rounds: int
) -> list[list[float]]:
    """Seconds of every step of each choice, of the slowest rank."""
    loss_fn = functional_loss(size, ff.unit, lambda block: block)
    steps = {
        str(i): _running(choice, train_step(loss_fn), size, batch)
        for i, choice in enumerate(choices)
    }
    alternate(steps, rounds=warmup, barrier=dist.barrier)
    mine = alternate(steps, rounds=rounds, barrier=dist.barrier)
    times = torch.tensor(list(mine.values()), dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.tolist()


def _running(choice: Choice, train: Any, size: Size, batch: Any) -> Callable[[], Any]:
    """The choice's step, which goes on from its own state."""
    mesh = ff.make_mesh(choice.axes, "processes")
    step = choice.build(train, mesh)
    cuts = choice.stack.row_axes
    mine = ff.local_batch(batch, mesh, cuts) if cuts else batch
    state = ff.init_state(step, init_params(size), train.optimizer, mine)
    held = [state]

    def run() -> None:
        held[0], _ = step(held[0], mine)

    return run


def told(choices: Sequence[Choice], times: Sequence[Sequence[float]]) -> str:
    """The table, and whether the first was the fastest."""
    medians = [statistics.median(row) for row in times]
    lines = ["predicted   measured   ratio   first/this   stack"]
    for choice, median, row in zip(choices, medians, times, strict=True):
        paired = statistics.median(a / b for a, b in zip(times[0], row, strict=True))
        lines.append(
            f"{choice.seconds * 1e3:6.1f} ms  {median * 1e3:6.1f} ms  "
            f"{choice.seconds / median:6.2f}  {paired:11.3f}   {choice.stack}"
        )
    worst = medians[0] / min(medians)
    verdict = "yes" if worst == 1 else "a tie" if worst <= SAME else "no"
    lines.append(
        f"the first is the fastest measured: {verdict} ({worst:.3f} of the fastest)"
    )
    return "\n".join(lines)


def chosen(args: argparse.Namespace, size: Size, batch: Any) -> Search:
    """The search, on the hardware that the ranks have just measured."""
    seconds = 3 if args.quick else 15
    world = {"data": dist.get_world_size()}
    hardware = measure_hardware(ff.make_mesh(world, "processes"), seconds=seconds)
    start = time.perf_counter()
    sizes = args.mesh if args.mesh is not None else dist.get_world_size()
    loss_fn = functional_loss(size, ff.unit, lambda block: block)
    optimizer = train_step(loss_fn).optimizer
    found = search(
        loss_fn, optimizer, lambda: init_params(size), batch, sizes, hardware
    )
    if dist.get_rank() == 0:
        print(f"searched in {time.perf_counter() - start:.1f} s\n{found}\n", flush=True)
    return found


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a rehearsal, tiny")
    parser.add_argument("--mesh", type=json.loads, help='such as 2 or {"data": 2}')
    parser.add_argument("--first", type=int, default=5, help="how many to measure")
    parser.add_argument("--rounds", type=int, help="steps of each")
    parser.add_argument(
        "--all-ranked", action="store_true", help="the fastest, not those of the front"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    torch.set_num_threads(1)
    size = QUICK if args.quick else FULL
    rounds = args.rounds or (4 if args.quick else 15)
    dist.init_process_group("gloo")
    batch = whole_batch(size, dist.get_world_size())
    found = chosen(args, size, batch)
    others = [choice for choice in found.ranked if choice not in found.front]
    choices = found.ranked if args.all_ranked else [*found.front, *others]
    choices = choices[: args.first]
    times = measured(choices, size, batch, 2, rounds)
    if dist.get_rank() == 0:
        print(told(choices, times), flush=True)
    dist.barrier()
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
