"""A step of Muon: ours over several processes, and torch's on one of them, in turn.

    torchrun --nproc-per-node 2 benchmarks/muon.py [--blocks 4] [--width 512]
                                                   [--zero 3] [--rounds N]

The matrices of a GPT's blocks (qkv, out, up, down), their gradients given; one thread a
process. Ours is `state.apply_gradients`, donated, under `shard`, with the exchange both
ways; its time is that of the slowest rank. Torch's is `torch.optim.Muon` over all
matrices in one process, while the others wait. Beside a round's time stands the time
that it ran on a processor, which a busy machine changes less. At the end the parameters
of both sides must agree.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from compared.measuring import alternate

import fsfunc as ff

Params = list[dict[str, torch.Tensor]]


def drawn(blocks: int, width: int, seed: int, scale: float) -> Params:
    """The matrices of each block; multiples of 2^-10, whose means are exact."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "qkv": (3 * width, width),
        "out": (width, width),
        "up": (4 * width, width),
        "down": (width, 4 * width),
    }

    def draw(shape: tuple[int, int]) -> torch.Tensor:
        return torch.randint(-1024, 1025, shape, generator=generator) * (scale / 1024)

    return [{name: draw(s) for name, s in shapes.items()} for _ in range(blocks)]


@ff.unit
def block(p: dict[str, torch.Tensor], g: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.stack([(p[name] * g[name]).sum() for name in p]).sum()


def loss(params: Params, grads: Params) -> torch.Tensor:
    """Of which ``grads`` is the gradient."""
    losses = [block(p, g) for p, g in zip(params, grads, strict=True)]
    return torch.stack(losses).sum()


class Ours:
    """A state over the mesh, and what makes one step of it."""

    def __init__(self, args: argparse.Namespace, mesh: ff.Mesh):
        params, grads = (drawn(args.blocks, args.width, s, 0.02) for s in (0, 1))
        optimizer = ff.muon(1e-3)
        grad = ff.value_and_grad(loss)
        step = ff.shard(optimizer(grad), mesh, "data", zero=args.zero)
        self.state = ff.init_state(step, params, optimizer, grads)
        given = ff.shard(grad, mesh, "data", zero=args.zero)
        _, self.grads = given(self.state.params, grads)
        both = lambda held: (  # noqa: E731
            held[0].apply_gradients(held[1], optimizer),
            held[1],
        )
        self.apply = ff.donate(ff.shard(both, mesh, "data", zero=args.zero))

    def __call__(self) -> None:
        self.state, self.grads = self.apply((self.state, self.grads))


class Theirs:
    """torch's, on the first rank alone."""

    def __init__(self, args: argparse.Namespace):
        params, grads = (drawn(args.blocks, args.width, s, 0.02) for s in (0, 1))
        self.params = [
            torch.nn.Parameter(x) for p in params for _, x in sorted(p.items())
        ]
        given = [x for g in grads for _, x in sorted(g.items())]
        for p, x in zip(self.params, given, strict=True):
            p.grad = x
        self.optimizer = torch.optim.Muon(self.params, lr=1e-3)

    def __call__(self) -> None:
        if dist.get_rank() == 0:
            self.optimizer.step()


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of either side, and the median of the rounds' ratios."""
    torch.set_num_threads(1)
    mesh = ff.make_mesh({"data": int(os.environ["WORLD_SIZE"])}, "processes")
    sides = {"ours": Ours(args, mesh), "torch on one": Theirs(args)}
    ran: dict[str, list[float]] = {name: [] for name in sides}

    def timed(name: str) -> None:
        start = time.process_time()
        sides[name]()
        ran[name].append(time.process_time() - start)

    calls: dict[str, Callable[[], Any]] = {
        name: (lambda name=name: timed(name)) for name in sides
    }
    alternate(calls, rounds=2, barrier=dist.barrier)
    with ff.ledger() as log:
        alternate({"ours": calls["ours"]}, rounds=1, barrier=dist.barrier)
    timed("torch on one")
    for times in ran.values():
        times.clear()
    mine = alternate(calls, rounds=args.rounds, barrier=dist.barrier)
    found: dict[str, Any] = {}
    for what, rows in (("seconds", mine), ("processor seconds", ran)):
        times = torch.tensor(list(rows.values()), dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        middle = times.median(dim=1).values.tolist()
        found[what] = dict(zip(calls, middle, strict=True))
        found[what]["ratio"] = statistics.median((times[0] / times[1]).tolist())
    whole = [
        x for p in ff.unshard(sides["ours"].state.params) for _, x in sorted(p.items())
    ]
    if dist.get_rank() == 0:
        for x, p in zip(whole, sides["torch on one"].params, strict=True):
            torch.testing.assert_close(x, p.detach(), rtol=0, atol=1e-6)
    elements = sum(x.numel() for x in whole)
    sent = log.bytes("data", "all_to_all", rank=dist.get_rank())
    return {
        "matrices": len(whole),
        "elements": elements,
        "zero": args.zero,
        "ranks": mesh.size,
        **found,
        "bytes sent by a rank, an element": sent / elements,
        "load": os.getloadavg()[0],
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--zero", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds")
    found = measured(parser.parse_args(argv))
    if dist.get_rank() == 0:
        print(json.dumps(found, indent=1), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
