"""Plans beside runs, on simulated ranks and real processes alike; for torchrun.

Prints, for every scheme, one line of JSON: whether each step's plan is its ledger, the
planned records, and the peaks, planned and measured.
"""

import json
import os
import sys

import torch

import fsfunc as ff
from tests.planning.comparing import facts, own, planned_and_run
from tests.transforms.process_steps import MICROBATCHES, SCHEMES, batches, params_of
from tests.transforms.process_steps import loss_fn as loss_fn


def run(mesh, order=("shard",), **options):
    optimizer = ff.sharded_adam(0.01)
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
    mine = [own(ff.local_batch(b, mesh, "data")) for b in batches(2)]
    state = ff.init_state(step, params_of, optimizer, mine[0])
    found = []
    for batch in mine:
        both = planned_and_run(step, state, batch)
        state, metrics = both.out
        planned = both.plan.ranks[0]
        plain = [[str(x) for x in fact] for fact in facts(planned.records)]
        equal = facts(planned.records) == facts(both.sent)
        peaks = planned.peak_bytes, both.peak
        loss = metrics["loss"].item()
        found.append([equal, plain, planned.flops(), peaks, loss])
    return found


def schemes():
    some = ("zero=0, merged", "zero=1", "zero=3", "shard(remat)")
    some += ("accumulate(shard)", "bf16")
    return {name: SCHEMES[name] for name in some}


def main():
    torch.set_num_threads(1)
    mesh = ff.make_mesh({"data": 2})
    for name, options in schemes().items():
        (found,) = ff.spmd(lambda options=options: run(mesh, **options), mesh)()
        line = json.dumps([name, mesh.rank, found])
        os.write(1, f"{line}\n".encode())  # in one piece, of two processes
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
