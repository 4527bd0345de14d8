"""Ranks that are about to do unlike things, and ranks that may: a program of each.

The last rank does what the others do not. Run over three processes it prints a line
for some of the cases; simulated ranks run all of them.
"""

import dataclasses
import os
from functools import partial

import torch
import torch.distributed as dist

import fsfunc as ff
from fsfunc.comm.comparison import RanksDiffer

OPTIMIZER = ff.sgd(0.1)


@ff.unit
def block(p, x):
    return torch.tanh(x @ p["w"] + p["b"])


def loss(params, x, order):
    for i in order:
        x = block(params[i], x)
    return x.square().mean()


def params_of(n=3, width=4, dtype=torch.float32):
    leaf = lambda i, *shape: torch.full(shape, 0.1 * i, dtype=dtype)  # noqa: E731
    return [{"w": leaf(i, width, width), "b": leaf(-i, width)} for i in range(n)]


def drawn():
    return [{"w": torch.randn(4, 4), "b": torch.zeros(4)} for _ in range(3)]


@dataclasses.dataclass
class Case:
    """What one rank does; the defaults are what most do."""

    odd: str = ""  # what an error has to name
    order: tuple[int, ...] = (0, 1, 2)
    zero: int = 3
    min_bytes: int = 0
    wrap: object = None
    params: object = dataclasses.field(default_factory=params_of)
    x: torch.Tensor = dataclasses.field(default_factory=lambda: torch.ones(6, 4))
    seed: int | None = None
    schedule: object = None  # a pipeline in place of shard
    how: str = "place"


def run(mesh, case):
    """Lays out in parts, or whole."""
    (axis,) = mesh.axes
    f = ff.value_and_grad(lambda p, x: loss(p, x, case.order))
    f = case.wrap(f) if case.wrap else f
    if case.schedule is not None:
        f = ff.pipeline(f, mesh, axis, n_microbatches=3, schedule=case.schedule)
    else:
        f = ff.shard(f, mesh, axis, zero=case.zero, min_bytes=case.min_bytes)
    if case.seed is not None:
        torch.manual_seed(case.seed)
    if case.how == "whole":  # no unit takes them
        f = ff.shard(lambda p, x: x.mean(), mesh, axis)
    if case.how == "init_state":
        step = OPTIMIZER(f)
        return ff.init_state(step, case.params, OPTIMIZER, case.x).params
    return ff.place(f, case.params, case.x)


def seeded(seed):
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return drawn()


one_f, gpipe = ff.schedules.one_f_one_b(3, 3), ff.schedules.gpipe(3, 3)
half = torch.bfloat16


def filled(value):
    return [{"w": torch.full((4, 4), value), "b": torch.zeros(4)} for _ in range(3)]


def made_of(x):
    return [{"w": torch.ones(4, 4) * x[0], "b": torch.zeros(4)} for _ in range(3)]


scaled = [{"w": 2 * p["w"], "b": p["b"]} for p in params_of()]
double = params_of(dtype=torch.float64)
made = partial(Case, how="init_state")
# What most ranks do (by default what a case does), and what the last one does.
ODD = {
    "order": Case("block(1/b, 1/w)", order=(1, 0, 2)),
    "a call less": Case("unit call 2", order=(0, 1)),
    "zero": Case("zero=1", zero=1),
    "min_bytes": Case("min_bytes=99", min_bytes=99),
    "accumulate": Case("n=2", wrap=lambda f: ff.accumulate(f, 2)),
    "remat": Case("remat(policy=None)", wrap=ff.remat),
    "precision": Case("in bfloat16", wrap=lambda f: ff.precision(f, half)),
    "shapes": Case("[5, 5]", params=params_of(width=5), x=torch.ones(6, 5)),
    "dtypes": Case("f64", params=double, x=torch.ones(6, 4).double()),
    "leaves": Case("leaf '3/w'", params=params_of(4)),
    "values": Case("'1/w'", params=scaled),
}
UNLIKE = {name: (Case(), odd) for name, odd in ODD.items()} | {
    "values, two seeds": (made(params=seeded(0)), made("'0/w'", params=seeded(1))),
    "values, whole": (
        Case(how="whole"), Case("'1/w'", params=scaled, how="whole"),
    ),
    "drawn": (
        made(params=drawn, seed=0),
        made("numbers of their generators", params=drawn, seed=1),
    ),
    "made": (
        made(params=partial(filled, 0.0)),
        made("operator 0", params=partial(filled, 1.0)),
    ),
    "made of what was given": (
        made(params=partial(made_of, torch.ones(1))),
        made("tensor 0", params=partial(made_of, torch.zeros(1))),
    ),
    "schedule": (Case(schedule=one_f), Case("F0 F1 F2", schedule=gpipe)),
    "batch of a pipeline": (
        Case(schedule=one_f), Case("[9, 4]", schedule=one_f, x=torch.ones(9, 4)),
    ),
}  # fmt: skip


# One of each way to differ: of units, leaves, values given, drawn and made, schedules.
OVER_PROCESSES = [
    "order", "leaves", "values", "values, whole", "drawn", "made", "schedule",
]  # fmt: skip


def alike(mesh):
    """What ranks may choose for themselves."""
    rank = mesh.rank
    return {
        "lengths": Case(x=torch.ones(6 + rank, 4)),
        "other dims": Case(x=torch.ones(2, 1 + rank, 4)),
        "lengths, and init": Case(x=torch.ones(rank, 4), params=drawn, seed=0,
                                  how="init_state"),
        "own copies": Case(params=params_of()),
        "whole": Case(how="whole"),
    }  # fmt: skip


def told(mesh, name):
    """True where the process raised and was told of all, else what happened."""
    most, odd = UNLIKE[name]
    last = mesh.size - 1
    try:
        found = run(mesh, odd if mesh.rank == last else most)
    except ValueError as error:
        text = str(error)
        named = all(s in text for s in ("ranks 0, 1: ", f"rank {last}: ", odd.odd))
        return type(error) is RanksDiffer and named or text
    return f"returned {found}"


def cost(mesh):
    """Bytes of the messages that one call of place sends."""
    sizes, isend = [], dist.isend
    dist.isend = lambda x, *rest: (sizes.append(x.nbytes), isend(x, *rest))[1]
    try:
        run(mesh, Case())
    finally:
        dist.isend = isend
    return sorted(sizes)


def main():
    mesh = ff.make_mesh({"data": int(os.environ["WORLD_SIZE"])}, timeout=60)
    found = {n: ff.spmd(lambda n=n: told(mesh, n), mesh)()[0] for n in OVER_PROCESSES}
    for name, case in ff.spmd(lambda: alike(mesh), mesh)()[0].items():
        ff.spmd(lambda case=case: run(mesh, case), mesh)()
        found[f"may differ: {name}"] = True
    sent = ff.spmd(lambda: cost(mesh), mesh)()[0]
    others = mesh.size - 1
    # Digests of program and values, of what is computed, of how it ended; headers.
    due = [16] * 2 * others + [32] * others + [512] * 3 * others
    found["cost"] = sent == due or sent
    for name, right in found.items():
        print(f"{name}: {'right' if right is True else right}", flush=True)


if __name__ == "__main__":
    main()
