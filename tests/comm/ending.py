"""Processes that are to end by a Python error, whoever of them goes wrong, and how."""

import os
import sys

import torch

import fsfunc as ff

wrong = []


@ff.unit
def layer(w, x):
    if wrong:
        raise ArithmeticError("no such value")
    return x @ w


def loss(ws, x):
    for w in ws:
        x = layer(w, x)
    return x.square().mean()


def main(case, mesh):
    rank = mesh.rank
    f = ff.shard(ff.value_and_grad(loss), mesh, "data")
    ws, x = [torch.eye(64) for _ in range(4)], torch.ones(1, 64)
    placed = ff.place(f, ws, x)
    f(placed, x)
    flying = []
    if case == "raises":
        flying = [ff.start(ff.all_gather, torch.ones(99_999), "data") for _ in range(4)]
        if rank == 1:
            wrong.append(flying)
    if case == "unlike in a step":
        placed = placed[::-1] if rank else placed
    f(placed, 2 * x)
    ff.psum(torch.ones(7), "data")
    print("went on", flush=True)


if __name__ == "__main__":
    together = ff.make_mesh({"data": int(os.environ["WORLD_SIZE"])}, timeout=3)
    ff.spmd(main, together)(sys.argv[1], together)
