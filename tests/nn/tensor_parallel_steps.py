"""One model under torch's tensor parallelism and under ours; a program for torchrun.

    tensor_parallel_steps.py FOLDER

Writes for every case what this rank found of either, whole, into FOLDER, and saves our
state there.
"""

import sys
from pathlib import Path

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
from fsfunc.nn import column_linear, row_linear, vocab_embedding

VOCAB, DIM, HEAD, LENGTH, BATCH, STEPS = 12, 8, 2, 6, 4, 2
# Not below the rounding of gradients, which an update would otherwise blow up.
ADAM = {"lr": 0.01, "eps": 1e-2, "weight_decay": 0.1}


# (ranks over data, ranks over the model, split sequences). With an axis of data torch's
# side is also under fully_shard, and ours under ff.shard; 0: there is no such axis.
CASES = {
    "split": (0, 2, False),
    "split sequences": (0, 2, True),
    "1 x 2": (1, 2, True),
    "2 x 1": (2, 1, False),
}  # fmt: skip


def batches():
    draw = torch.Generator().manual_seed(1)
    shape = (STEPS, BATCH, LENGTH + 1)
    return torch.randint(VOCAB, shape, generator=draw).unbind()


# As a module


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.q, self.k, self.v = (nn.Linear(DIM, 8 * HEAD) for _ in "qkv")
        self.out = nn.Linear(8 * HEAD, DIM)
        self.up, self.down = nn.Linear(DIM, 16), nn.Linear(16, DIM, bias=False)

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.out(attend(self.q(h), self.k(h), self.v(h)))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM, padding_idx=7)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def attend(q, k, v):
    q, k, v = (y.unflatten(-1, (-1, HEAD)).transpose(1, 2) for y in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(1, 2).flatten(2)


def model():
    torch.manual_seed(0)
    return Model()


def trained(module, mine, mean=lambda loss: loss):
    """Losses, gradients of the first step, parameters after the last, by path."""
    parameters = dict(module.named_parameters())
    # One tensor at a time: some are DTensors, and some are not.
    optimizer = torch.optim.AdamW(parameters.values(), foreach=False, **ADAM)
    losses, grads = [], {}
    for tokens in mine:
        loss = module(tokens)
        loss.backward()
        losses.append(mean(loss.detach()))
        grads = grads or {k: whole(p.grad) for k, p in parameters.items()}
        optimizer.step()
        optimizer.zero_grad()
    return losses, grads, {k: whole(p.detach()) for k, p in parameters.items()}


def whole(x):
    return (x.full_tensor() if isinstance(x, DTensor) else x).clone()


def by_torch(data, n, sequence):
    names = ("data", "model") if data else ("model",)
    mesh = init_device_mesh("cpu", (data, n) if data else (n,), mesh_dim_names=names)
    module, between = model(), Shard(1) if sequence else Replicate()
    norm = {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
    plan = {
        "q": ColwiseParallel(input_layouts=between),
        "k": ColwiseParallel(input_layouts=between),
        "v": ColwiseParallel(input_layouts=between),
        "out": RowwiseParallel(output_layouts=between),
        "up": ColwiseParallel(input_layouts=between),
        "down": RowwiseParallel(output_layouts=between),
    }
    ends = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    for block in module.blocks:
        parallelize_module(block, mesh["model"], plan | (norm if sequence else {}))
    parallelize_module(module, mesh["model"], ends)
    if not data:
        return trained(module, batches())
    for part in (*module.blocks, module):
        fully_shard(part, mesh=mesh["data"])
    place = mesh.get_local_rank("data")

    def mean(loss):
        dist.all_reduce(loss, group=mesh.get_group("data"))
        return loss / data

    return trained(module, [x.chunk(data)[place] for x in batches()], mean)


# As functions


COLUMN, ROW = ff.Split(0, "model"), ff.Split(1, "model")
LAYOUTS = {
    "embed/weight": COLUMN,
    "head/*": COLUMN,
    "blocks/*/[qkv]/*": COLUMN,
    "blocks/*/up/*": COLUMN,
    "blocks/*/out/weight": ROW,
    "blocks/*/down/weight": ROW,
}


def tree_of(flat):
    """``{"a.b": x}`` as ``{"a": {"b": x}}``."""
    made = {}
    for path, x in flat.items():
        *outer, last = path.split(".")
        place = made
        for name in outer:
            place = place.setdefault(name, {})
        place[last] = x
    return made


def loss_of(dim):
    """``loss(params, tokens)``; sequences are split along ``dim`` between layers."""

    def entering(w):
        return w if dim is None else ff.pcast(w, "model", to="V")

    def norm(p, x):
        return F.layer_norm(x, (DIM,), entering(p["weight"]), entering(p["bias"]))

    def column(ps, x):
        weights, biases = [p["weight"] for p in ps], [p["bias"] for p in ps]
        return column_linear(x, weights, biases, sequence_dim=dim)

    def row(p, x):
        return row_linear(x, p["weight"], p.get("bias"), sequence_dim=dim)

    @ff.unit
    def embed(p, tokens):
        return vocab_embedding(p["weight"], tokens, padding_idx=7, sequence_dim=dim)

    @ff.unit
    def block(p, x):
        parts = column([p["q"], p["k"], p["v"]], norm(p["norm1"], x))
        x = x + row(p["out"], attend(*parts))
        (h,) = column([p["up"]], norm(p["norm2"], x))
        return x + row(p["down"], F.gelu(h))

    @ff.unit
    def head(p, x, targets):
        (logits,) = column([p], x)
        logits = ff.all_gather(logits, "model", dim=-1, to="I")
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def loss(params, tokens):
        x = embed(params["embed"], tokens[:, :-1])
        for p in params["blocks"].values():
            x = block(p, x)
        return head(params["head"], x, tokens[:, 1:])

    return loss


OPTIMIZER = ff.sharded_adam(ADAM["lr"], eps=ADAM["eps"], weight_decay=0.1)


def parameters():
    flat = dict(model().named_parameters())
    return tree_of({path: x.detach() for path, x in flat.items()})


def by_functions(data, n, sequence, folder):
    mesh = ff.make_mesh({"data": data, "model": n} if data else {"model": n})

    def step(state, tokens):
        value, grads = ff.value_and_grad(loss)(state.params, tokens)
        return state.apply_gradients(grads, OPTIMIZER), (value, grads)

    loss, mine = loss_of(1 if sequence else None), batches()
    if data:
        step = ff.shard(step, mesh, "data")
        mine = [ff.local_batch(x, mesh, "data") for x in mine]
    state = ff.init_state(step, parameters(), OPTIMIZER, mine[0], layouts=LAYOUTS)
    losses, grads = [], None
    for tokens in mine:
        state, (value, found) = step(state, tokens)
        losses.append(value)
        grads = ff.unshard(found) if grads is None else grads
    ff.save(folder, state)
    return losses, grads, ff.unshard(state.params)


def main():
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    for name, case in CASES.items():
        losses, *trees = by_torch(*case)
        theirs = (losses, *map(tree_of, trees))
        ours = by_functions(*case, folder / name)
        found = {"theirs": theirs, "ours": ours}
        torch.save(found, folder / f"{name} {dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
