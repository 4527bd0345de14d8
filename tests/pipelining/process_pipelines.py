"""Pipelines that simulated ranks and real processes run alike; a program for torchrun.

Prints, for every scheme, one line of JSON: the losses' and the parameters' bits, what
each rank sent, and the actions that it did.
"""

import hashlib
import json
import os
import sys

import torch

import fsfunc as ff
from fsfunc import tree

S = ff.schedules
LINE = {
    "1f1b": {},
    "gpipe, uneven": {"schedule": S.gpipe, "m": 3},
    "interleaved": {"schedule": S.interleaved_1f1b},
    "zb_v, remat": {"schedule": S.zb_v, "order": ("remat", "pipeline")},
    "by hand": {"schedule": ["F0 F1 B1 B0", "F0 F1 I1 W1 B0"], "m": 2},
    "cut, fewer microbatches": {"stages": [1, 5], "m": 1},
    "donated": {"order": ("pipeline", "donate")},
    "asynchronous": {"schedule": S.asynchronous, "update": ff.sgd(0.01)},
}
GRID = {
    "shard(pipeline)": {"order": ("pipeline", "shard")},
    "pipeline(shard)": {"order": ("shard", "pipeline"), "schedule": S.gpipe},
    "zb_v, zero=2": {
        "order": ("remat", "pipeline", "shard"), "schedule": S.zb_v, "zero": 2,
    },
    "accumulated": {"order": ("pipeline", "accumulate", "shard"), "m": 2},
}  # fmt: skip


@ff.unit
def embed(p, tokens):
    return p["table"][tokens], tokens > 2


@ff.unit
def layer(p, x, mask):
    y = torch.nn.functional.dropout(torch.tanh(x @ p["w"] + p["b"]), 0.25)
    return torch.where(mask[:, None], y, x)


@ff.unit
def head(p, x):
    return torch.log_softmax(x @ p["table"].t(), -1)


def loss_fn(params, batch):
    """An embedding that the first and the last unit share, and a mask for all."""
    x, mask = embed(params["embed"], batch["tokens"])
    for p in params["layers"]:
        x = layer(p, x, mask) * params["gain"]
    scores = head(params["embed"], x)
    return -scores.gather(-1, batch["next"][:, None]).mean()


def of_layers(params, batch):
    """A loss whose stages share no leaf: each may update at times of its own."""
    x = batch["next"][:, None] * torch.ones(5)
    for p in params["layers"]:
        x = layer(p, x, batch["tokens"] > 2)
    return x.square().mean()


def params_of():
    draw = torch.Generator().manual_seed(3)
    rand = lambda *s: torch.randn(s, generator=draw)  # noqa: E731
    layers = [{"w": rand(5, 5), "b": rand(5)} for _ in range(4)]
    return {"embed": {"table": rand(7, 5)}, "layers": layers, "gain": torch.ones(5)}


def batches(count):
    draw = torch.Generator().manual_seed(4)
    some = lambda: torch.randint(7, (16,), generator=draw)  # noqa: E731
    return [{"tokens": some(), "next": some()} for _ in range(count)]


def transformed(step, mesh, order=("pipeline",), m=4, schedule=None, zero=3, **how):
    schedule = S.one_f_one_b if schedule is None else schedule
    transforms = {
        "remat": ff.remat,
        "accumulate": lambda f: ff.accumulate(f, 2),
        "shard": lambda f: ff.shard(f, mesh, "data", zero=zero),
        "pipeline": lambda f: ff.pipeline(
            f, mesh, "pipe", n_microbatches=m, schedule=schedule, **how
        ),
        "donate": ff.donate,
    }
    for name in order:
        step = transforms[name](step)
    return step


def run(mesh, **options):
    """Three steps on this rank, as plain data."""
    optimizer = ff.chain(ff.clip_by_global_norm(1.0), ff.sharded_adam(0.01))
    optimizer = options.get("update", optimizer)
    plain = of_layers if "update" in options else optimizer(ff.value_and_grad(loss_fn))
    torch.manual_seed(11)
    step = transformed(plain, mesh, **options)
    mine = batches(3)
    if "data" in mesh.axes:
        mine = [ff.local_batch(b, mesh, "data") for b in mine]
    state = ff.init_state(step, params_of, optimizer, mine[0])
    losses = []
    with ff.ledger() as log, ff.clock() as events:
        for batch in mine:
            state, metrics = step(state, batch)
            losses.append(metrics["loss"].item())
    sent = [
        (r.op, list(r.axis), str(r.bytes), str(r.dtype), r.unit, r.phase)
        for r in log.of(mesh.rank)
    ]
    at = mesh.coordinate("pipe")
    did = [str(action) for rank, action, *_ in events if rank == at]
    return losses, digest(ff.unshard(state.params)), sent, did


def digest(params):
    sha = hashlib.sha256()
    for x in tree.leaves(params):
        sha.update(x.contiguous().numpy().tobytes())
    return sha.hexdigest()


def fail(mesh):
    """A stage that raises in its second forward; the other waits for what it makes."""
    calls = []

    @ff.unit
    def broken(p, x, mask):
        if type(x) is torch.Tensor and mesh.coordinate("pipe") == 0:
            calls.append(1)
            if len(calls) == 4:
                raise ArithmeticError("this stage is broken")
        return layer.fn(p, x, mask)

    def loss(params, batch):
        x, mask = embed(params["embed"], batch["tokens"])
        for p in params["layers"]:
            x = broken(p, x, mask)
        return x.mean()

    grad = transformed(ff.value_and_grad(loss), mesh, stages=[3, 2])
    grad(params_of(), batches(1)[0])


def main():
    torch.set_num_threads(1)
    kind = sys.argv[1]
    mesh = ff.make_mesh({"data": 2, "pipe": 2} if kind == "grid" else {"pipe": 2})
    if kind == "fail":
        ff.spmd(lambda: fail(mesh), mesh)()
        return
    for name, options in (GRID if kind == "grid" else LINE).items():
        (found,) = ff.spmd(lambda options=options: run(mesh, **options), mesh)()
        line = json.dumps([name, mesh.rank, found])
        os.write(1, f"{line}\n".encode())  # in one piece, of two processes
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
