"""A step whose first calls a time limit's handler ends, at places drawn by a seed.

    python tests/comm/limited_step.py SEED MANY

It prints how many of the exceptions came to the caller. A program: only in the main
thread of a process does a handler run in the midst of a rank's check.
"""

import random
import signal
import sys

import torch

import fsfunc as ff
from tests.comm.test_interrupts import bytecodes


class TimeIsUp(Exception):
    """Such as a limit's handler raises: no BaseException of Python's own."""


def _handler(*_):
    raise TimeIsUp


@ff.unit
def unit(params, x):
    return (x @ params["w"]).square().mean()


def loss(params, x):
    return unit(params, x) + ff.tree_sum(ff.tree.map(torch.square, params))


def main(seed, many):
    signal.signal(signal.SIGINT, _handler)
    mesh, optimizer = ff.make_mesh({"data": 1}, "processes"), ff.sgd(0.1)
    params, x = {"w": torch.randn(4, 3)}, torch.randn(2, 4)

    def first_call():
        step = ff.shard(optimizer(ff.value_and_grad(loss)), mesh, "data")
        step(ff.init_state(step, params, optimizer, x), x)

    run, heard = ff.spmd(first_call, mesh), 0
    run()
    count = bytecodes(run)
    for at in random.Random(seed).sample(range(1, count - 10), many):
        try:
            bytecodes(run, at)
        except TimeIsUp:
            heard += 1
    print(f"{heard} of {many} heard")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
