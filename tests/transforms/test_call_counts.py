"""What one more sharded unit costs in Python: calls of our own functions, tree walks.

Counted are frames of fsfunc's files that a step enters, comprehensions too: those of a
step of four units less those of a step of three.
"""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import fsfunc as ff
from tests.models import chain, layers

pytestmark = pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="other versions inline other frames"
)
OURS = str(Path(ff.__file__).parent)
WIDTH, FEW = 8, 3
OPTIMIZER = ff.sharded_adam(1e-3)

loss = chain()


def counted(call):
    """The code of ours that ``call`` enters, and how often."""
    found = Counter()

    def look(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            found[frame.f_code] += 1

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def gradient(stack, mesh, n):
    step, x = ff.shard(stack(ff.value_and_grad(loss)), mesh, "data"), torch.ones(4, 8)
    placed = ff.place(step, layers(n, WIDTH), x)
    for _ in range(3):
        step(placed, x)
    return counted(lambda: step(placed, x))


def donated(stack, mesh, n):
    step = stack(OPTIMIZER(ff.value_and_grad(loss)))
    step, x = ff.donate(ff.shard(step, mesh, "data")), torch.ones(4, WIDTH)
    state = ff.init_state(step, lambda: layers(n, WIDTH), OPTIMIZER, x)
    for _ in range(3):
        state, _ = step(state, x)
    return counted(lambda: step(state, x))


def one_more_unit(run, stack, ranks):
    mesh = ff.make_mesh({"data": ranks}, "simulated")
    few, many = [
        ff.spmd(lambda n=n: run(stack, mesh, n), mesh)()[0] for n in (FEW, FEW + 1)
    ]
    many.subtract(few)
    return many


def plain(f):
    return f


@pytest.mark.parametrize(
    ("run", "stack", "ranks", "most"),
    [(gradient, plain, 2, 233), (gradient, ff.remat, 1, 182), (donated, plain, 2, 298)],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_one_more_unit_costs_no_more_calls(run, stack, ranks, most):
    found = one_more_unit(run, stack, ranks)
    assert found.total() <= most, found.most_common(40)
