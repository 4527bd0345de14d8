"""Over real processes split layers train as torch's tensor parallelism does.

Both train as one device does, too; and what the processes save, one device loads. As a
program: for every case what this rank found of either, whole, and our state, are saved
in a folder. Then parts of sequences, against one device.
"""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fsfunc as ff
from fsfunc.nn import all_to_all_attention, ring_attention
from tests.checks import close
from tests.models import train_step
from tests.nn.models import BLOCK, DIM, HEAD, LAYOUTS, VOCAB, model, parameters, samples
from tests.nn.test_four_axes import OPTIMIZER, WHOLE, trained

STEPS = 2
# Not below the rounding of gradients, which an update would otherwise blow up.
ADAM = {"lr": 0.01, "eps": 1e-2, "weight_decay": 0.1}
OURS = ff.sharded_adam(ADAM["lr"], eps=ADAM["eps"], weight_decay=0.1)


# (ranks over data, ranks over the model, split sequences). With an axis of data torch's
# side is also under fully_shard, and ours under ff.shard; 0: there is no such axis.
CASES = {
    "split": (0, 2, False),
    "split sequences": (0, 2, True),
    "1 x 2": (1, 2, True),
    "2 x 1": (2, 1, False),
}  # fmt: skip


# As a module


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM, bias=False)
        for name in ("q", "k", "v", "out", "up", "down"):
            out, given = BLOCK[name]
            bias = f"{name}_bias" in BLOCK
            setattr(self, name, nn.Linear(given, out, bias=bias))

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (
            y.unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for y in (self.q(h), self.k(h), self.v(h))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        given = parameters()
        shape = given["embed"]["positions"].shape
        self.tokens, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(*shape)
        self.blocks = nn.ModuleList(Block() for _ in given["blocks"])
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.double()
        mine = as_tree(dict(self.named_parameters()))
        ff.tree.map(lambda p, x: p.data.copy_(x), mine, given)

    def forward(self, batch):
        tokens = batch["tokens"]
        at = torch.arange(tokens.shape[1]).expand_as(tokens)
        x = self.tokens(tokens) + self.positions(at)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["targets"].flatten())


def as_tree(named):
    """By name in the module, as our parameters."""
    paths = {"out_bias": "out.bias", "up_bias": "up.bias"}
    paths = {name: paths.get(name, f"{name}.weight") for name in BLOCK}
    return {
        "embed": {k: named[f"{k}.weight"] for k in ("tokens", "positions")},
        "blocks": [
            {name: named[f"blocks.{i}.{path}"] for name, path in paths.items()}
            for i in range(2)
        ],
        "head": named["head.weight"],
    }


def by_module(module, batches, mean=lambda loss: loss):
    """Losses, gradients of the first step, parameters after the last."""
    named = dict(module.named_parameters())
    # One tensor at a time: some are DTensors, and some are not.
    optimizer = torch.optim.AdamW(named.values(), foreach=False, **ADAM)
    losses, grads = [], {}
    for batch in batches:
        loss = module(batch)
        loss.backward()
        losses.append(mean(loss.detach()))
        grads = grads or {k: whole(p.grad) for k, p in named.items()}
        optimizer.step()
        optimizer.zero_grad()
    found = {k: whole(p.detach()) for k, p in named.items()}
    return losses, as_tree(grads), as_tree(found)


def whole(x):
    return (x.full_tensor() if isinstance(x, DTensor) else x).clone()


def batches():
    return [samples(seed) for seed in range(STEPS)]


def by_torch(data, n, sequence):
    names = ("data", "model") if data else ("model",)
    mesh = init_device_mesh("cpu", (data, n) if data else (n,), mesh_dim_names=names)
    module, between = Model(), Shard(1) if sequence else Replicate()
    column = ColwiseParallel(input_layouts=between)
    row = RowwiseParallel(output_layouts=between)
    plan = dict.fromkeys("qkv", column) | {"out": row, "up": column, "down": row}
    plan |= {"norm": SequenceParallel()} if sequence else {}
    table = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    head = ColwiseParallel(input_layouts=between, output_layouts=Replicate())
    for block in module.blocks:
        parallelize_module(block, mesh["model"], plan)
    ends = {"tokens": table, "positions": table, "head": head}
    parallelize_module(module, mesh["model"], ends)
    if not data:
        return by_module(module, batches())
    for unit in (*module.blocks, module):
        fully_shard(unit, mesh=mesh["data"])
    place = mesh.get_local_rank("data")

    def mean(loss):
        dist.all_reduce(loss, group=mesh.get_group("data"))
        return loss / data

    mine = [{k: x.chunk(data)[place] for k, x in b.items()} for b in batches()]
    return by_module(module, mine, mean)


# As functions


def by_functions(data, n, sequence, folder):
    axes = {"data": data, "model": n} if data else {"model": n}
    mesh, loss = ff.make_mesh(axes), model(axes, 1 if sequence else None)

    def step(state, batch):
        value, grads = ff.value_and_grad(loss)(state.params, batch)
        return state.apply_gradients(grads, OURS), (value, grads)

    mine = [ff.local_batch(b, mesh, "data") if data else b for b in batches()]
    step = ff.shard(step, mesh, "data") if data else step
    state = ff.init_state(step, parameters(), OURS, mine[0], layouts=LAYOUTS)
    losses, grads = [], None
    for batch in mine:
        state, (value, found) = step(state, batch)
        losses.append(value)
        grads = ff.unshard(found) if grads is None else grads
    ff.save(folder, state)
    return losses, grads, ff.unshard(state.params)


def parts_of_sequences():
    mesh = ff.make_mesh({"context": 2})
    for attend in (ring_attention, all_to_all_attention):
        step = train_step(model(mesh.axes, attend=attend), OPTIMIZER)
        step = ff.shard(step, mesh, "context")
        close(trained(step, mesh), [WHOLE], 1e-9)


def main():
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    for name, case in CASES.items():
        theirs, ours = by_torch(*case), by_functions(*case, folder / name)
        found = {"theirs": theirs, "ours": ours}
        torch.save(found, folder / f"{name} {dist.get_rank()}.pt")
    parts_of_sequences()
    print("equal")
    dist.destroy_process_group()


@pytest.mark.processes
def test_over_real_processes(processes, tmp_path):
    printed = processes(Path(__file__), 2, str(tmp_path))
    assert printed.split() == ["equal", "equal"]
    one_device = by_module(Model(), batches())
    params = parameters()
    target = ff.TrainState(params, OURS.init(params))
    for name in CASES:
        for rank in range(2):
            found = torch.load(tmp_path / f"{name} {rank}.pt")
            close(found["theirs"], one_device)
            close(found["ours"], one_device)
            close(found["ours"], found["theirs"])
        close(ff.load(tmp_path / name, target).params, found["ours"][2], 0.0)


if __name__ == "__main__":
    main()
