"""Steps that simulated ranks and real processes run alike; a program for torchrun.

Prints, for every scheme, one line of JSON: the losses' and the parameters' bits, and
what each rank sent.
"""

import hashlib
import json
import os
import sys

import torch

import fsfunc as ff
from fsfunc import tree
from tests.models import floats, layers

MICROBATCHES = 2
SCHEMES = {
    "zero=0, merged": {"zero": 0, "min_bytes": 10**6},
    "zero=1": {"zero": 1},
    "zero=3": {},
    "zero=3, kept": {"reshard_after_forward": False},
    "shard(remat)": {"order": ("remat", "shard")},
    "accumulate(shard)": {"order": ("shard", "accumulate")},
    "donated, zero=2": {"order": ("shard", "donate"), "zero": 2},
    "bf16": {"order": ("precision", "shard")},
}
HYBRID = {f"HSDP zero={z}": {"zero": z, "replicate": "node"} for z in (0, 3)}

embed = ff.unit(lambda p, tokens: p["table"][tokens])
layer = ff.unit(
    lambda p, x: torch.nn.functional.dropout(torch.tanh(x @ p["w"] + p["b"]), 0.25)
)


def loss_fn(params, batch):
    x = embed(params["embed"], batch["tokens"])
    for p in params["layers"]:
        x = layer(p, x)
    return (x * params["gain"]).square().mean()


def params_of():
    table, gain = floats(7, 5, seed=9), torch.ones(5)
    return {
        "embed": {"table": table},
        "layers": layers(3, 5, make=floats),
        "gain": gain,
    }


def batches(count):
    draw = torch.Generator().manual_seed(4)
    return [{"tokens": torch.randint(7, (8,), generator=draw)} for _ in range(count)]


def run(mesh, order=("shard",), **options):
    """Three steps on this rank: losses, parameters and ledger, as plain data."""
    optimizer = ff.sharded_adam(0.01)
    axes = tuple(mesh.axes)
    transforms = {
        "remat": ff.remat,
        "accumulate": lambda f: ff.accumulate(f, MICROBATCHES),
        "shard": lambda f: ff.shard(f, mesh, "data", **options),
        "precision": lambda f: ff.precision(f, torch.bfloat16, torch.float32),
        "donate": ff.donate,
    }
    torch.manual_seed(11)
    step = optimizer(ff.value_and_grad(loss_fn))
    for name in order:
        step = transforms[name](step)
    mine = [ff.local_batch(b, mesh, axes) for b in batches(3)]
    state = ff.init_state(step, params_of, optimizer, mine[0])
    losses = []
    with ff.ledger() as log:
        for batch in mine:
            state, metrics = step(state, batch)
            losses.append(metrics["loss"].item())
    sent = [
        (r.op, list(r.axis), str(r.bytes), str(r.dtype), r.unit, r.phase)
        for r in log.of(mesh.rank)
    ]
    return losses, digest(ff.unshard(state.params)), sent


def digest(params):
    sha = hashlib.sha256()
    for x in tree.leaves(params):
        sha.update(x.contiguous().numpy().tobytes())
    return sha.hexdigest()


def main():
    torch.set_num_threads(1)
    hybrid = sys.argv[1] == "hybrid"
    mesh = ff.make_mesh({"node": 2, "data": 2} if hybrid else {"data": 2})
    for name, options in (HYBRID if hybrid else SCHEMES).items():
        (found,) = ff.spmd(lambda options=options: run(mesh, **options), mesh)()
        line = json.dumps([name, mesh.rank, found])
        os.write(1, f"{line}\n".encode())  # in one piece, of two processes
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
