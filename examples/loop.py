"""A training loop to copy: data, evaluation, a log, samples, checkpoints that resume.

    python examples/loop.py                               4 simulated ranks
    torchrun --nproc-per-node 2 examples/loop.py          2 processes, on GPUs if any
    torchrun --nproc-per-node 2 --max-restarts 3 examples/loop.py --folder DIR
                                                          goes on after a crash

The task is a stand-in: to count on, in steps of 1, 2 or 3, through sequences of uneven
lengths. Put your own in place of `Counting`, `init`, `loss_fn` and `next_logits`.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import fsfunc as ff

VOCAB, WIDTH, LENGTH, IGNORED = 16, 32, 12, -100


class Counting(torch.utils.data.Dataset):
    """Rows of tokens, padded at their ends; a rank reads its own rows alone."""

    def __init__(self, rows, seed):
        draw = torch.Generator().manual_seed(seed)
        self.first, self.by, self.lengths = (
            torch.randint(low, high, (rows,), generator=draw)
            for low, high in [(0, VOCAB), (1, 4), (4, LENGTH + 1)]
        )

    def __len__(self):
        return len(self.first)

    def __getitem__(self, i):
        tokens = (self.first[i] + self.by[i] * torch.arange(LENGTH + 1)) % VOCAB
        padding = torch.arange(LENGTH) >= self.lengths[i]
        return {
            "tokens": tokens[:-1],
            "targets": tokens[1:].masked_fill(padding, IGNORED),
        }


# A unit's parameters are gathered, used and freed together: a layer, as a rule.


@ff.unit
def embed(p, tokens):
    return p["table"][tokens]


@ff.unit
def mix(p, x):
    before = F.pad(x, (0, 0, 1, 0))[:, :-1]  # each token sees the one before it
    return x + torch.tanh(torch.cat([x, before], -1) @ p["up"]) @ p["down"]


@ff.unit
def head(p, x):
    return x @ p["vocab"]


def next_logits(params, tokens):
    x = embed(params["embed"], tokens)
    for layer in params["layers"]:
        x = mix(layer, x)
    return head(params["head"], x)


def loss_fn(params, batch):
    """The mean over tokens, not over rows: of all ranks, whatever each of them has."""
    logits = next_logits(params, batch["tokens"]).float().flatten(0, 1)
    targets = batch["targets"].flatten()
    counted = targets != IGNORED
    total = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    seen = {  # beside the loss: a plain scalar would be averaged over ranks
        "right": ff.Summed(((logits.argmax(-1) == targets) & counted).sum()),
        "tokens": ff.Summed(counted.sum()),
        "longest": ff.Max((batch["targets"] != IGNORED).sum(1).max()),
    }
    return ff.Weighted(total, counted.sum()), seen


def init(device):
    draw = torch.Generator().manual_seed(0)  # on the CPU: the same on any device

    def normal(*shape):
        x = torch.randn(shape, generator=draw) / shape[0] ** 0.5
        return x.to(device)

    layer = lambda: {"up": normal(2 * WIDTH, 64), "down": normal(64, WIDTH)}  # noqa: E731
    return {
        "embed": {"table": normal(VOCAB, WIDTH)},
        "layers": [layer() for _ in range(2)],
        "head": {"vocab": normal(WIDTH, VOCAB)},
    }


def transformed(f, mesh, accumulate=1, bf16=False):
    """The usual transforms, innermost first: what is outside is done more rarely."""
    f = ff.remat(f)  # innermost, for each microbatch: compute for memory
    f = ff.accumulate(f, accumulate)  # its gradients are summed, then reduced once
    if bf16:  # weights and moments stay in float32
        f = ff.precision(f, compute=torch.bfloat16, reduce=torch.float32)
    # On a GPU a compiler fuses what is between matrix products: f = ff.jit(f).
    return ff.shard(f, mesh, "data", zero=3)


class Log:
    """Numbers of each step as lines of JSON, read one step later.

    To read a tensor waits for the device. Those of a step are sent to the host behind
    it, and read when the next one has been launched: nothing waits for the newest.

    After a crash it has the steps since the last checkpoint twice: the later line of
    a number is that of the run.

    Args:
        path: the file, added to; None on ranks that write nothing.
        writer: a ``torch.utils.tensorboard.SummaryWriter``, or None.
    """

    def __init__(self, path, writer=None):
        self.path, self.writer = path, writer
        self.late, self.then = None, time.perf_counter()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)

    def step(self, number, numbers, **plain):
        """Notes tensors and plain numbers of a step; writes those of the one before."""
        self.write()
        now, x = time.perf_counter(), torch.stack([x.float() for x in numbers.values()])
        plain["seconds"], done = now - self.then, None
        host = x.to("cpu", non_blocking=True)
        if x.is_cuda:
            plain["peak_bytes"] = torch.cuda.max_memory_allocated()  # a count: no wait
            done = torch.cuda.Event()
            done.record()
        self.late, self.then = (number, list(numbers), host, done, plain), now

    def write(self):
        """Writes what is noted and not written yet."""
        if self.late is None:
            return
        number, names, host, done, plain = self.late
        if done is not None:
            done.synchronize()  # of that step alone, not of what was launched since
        row = {"step": number, **dict(zip(names, host.tolist(), strict=True)), **plain}
        if self.path is not None:
            with self.path.open("a") as file:
                print(json.dumps(row), file=file)
        for name in row if self.writer else ():
            self.writer.add_scalar(name, row[name], number)
        self.late = None


def run(mesh, options):
    """The losses of a run, and its state; every rank runs this."""
    on_gpu = mesh.backend == "processes" and torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")  # make_mesh has chosen which one
    warmup = max(1, options.steps // 10)
    lowest = options.lr / 10
    rate = ff.warmup_cosine(options.lr, warmup, options.steps + 1, start=lowest)
    optimizer = ff.sharded_adam(rate)

    def train_step(state, batch):
        (loss, seen), grads = ff.value_and_grad(loss_fn, has_aux=True)(
            state.params, batch
        )
        norm = ff.global_norm(grads)  # of all ranks' parts: to clip, and to be logged
        grads = ff.tree_scale(grads, (1.0 / (norm + 1e-6)).clamp(max=1.0))
        seen = {name: x.tree for name, x in seen.items()}
        state = state.apply_gradients(grads, optimizer)
        return state, {"loss": loss, "norm": norm, **seen}

    how = {"accumulate": options.accumulate, "bf16": options.bf16}
    step = ff.donate(transformed(train_step, mesh, **how))  # writes into the old state
    # Of a state's parameters any other sharded function may be called.
    evaluate = transformed(ff.value(loss_fn, has_aux=True), mesh, **how)
    predict = transformed(next_logits, mesh)

    def on_device(batch):
        return {name: x.to(device, non_blocking=True) for name, x in batch.items()}

    # Rows of all ranks and microbatches together: the batch of one update.
    rows = {"batch_size": 16, "seed": 1}
    train = ff.batches(Counting(512, 2), mesh, "data", pin_memory=on_gpu, **rows)
    held_out = ff.batches(
        Counting(64, 3), mesh, "data", **rows, shuffle=False, epochs=1
    )
    held_out = [on_device(batch) for batch in held_out]

    start = train.position  # a batch to record the step with, and back to the start
    first = on_device(next(train))
    train.seek(start)
    newest = ff.latest(options.folder, "step-*") if options.folder else None
    if newest:  # the state, how far the data are read; torch's generators, unasked
        empty = ff.abstract_state(step, lambda: init(device), optimizer, first)
        loaded = ff.load(newest, {"state": empty, "data": start}, device=device)
        state, position = loaded["state"], loaded["data"]
        train.seek(position)
    else:
        state = ff.init_state(step, lambda: init(device), optimizer, first)

    tells = mesh.rank == 0  # one rank prints and writes; all compute
    log = Log(options.folder / "log.jsonl" if tells and options.folder else None)
    losses = []

    def validate():
        """The loss and accuracy of all held out tokens, each of the same weight."""
        outs = [evaluate(state.params, batch) for batch in held_out]
        tokens = torch.stack([seen["tokens"].tree for _, seen in outs])
        total = (torch.stack([loss for loss, _ in outs]) * tokens).sum()
        right = sum(seen["right"].tree for _, seen in outs)
        return (total / tokens.sum()).item(), (right / tokens.sum()).item()

    for i in range(state.step, options.steps):
        state, seen = step(state, on_device(next(train)))
        losses.append(seen["loss"])
        log.step(i, seen, rate=rate(i))  # tokens / seconds are tokens a second
        done = i + 1
        if done % options.every == 0:
            loss, right = validate()
            written = sample(predict, state.params, [3, 5], device)
            if tells:
                print(f"step {done:3}  loss {loss:.3f}  right {right:.0%}  {written}")
            if options.folder:
                log.write()  # what goes on from here does not write this step again
                tree = {"state": state, "data": train.position}
                ff.save(options.folder / f"step-{done}", tree, keep=2)
    log.write()
    # Leaf by leaf to the host of one rank, which alone has the whole model.
    params = ff.unshard(state.params, to="cpu", only=0)
    return torch.stack(losses).tolist() if losses else [], params


def sample(predict, params, tokens, device, length=6):
    """The likeliest tokens to follow: a unit is gathered for as long as it runs."""
    for _ in range(length):
        with torch.no_grad():
            logits = predict(params, torch.tensor([tokens], device=device))
        tokens = [*tokens, int(logits[0, -1].argmax())]
    return tokens


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="simulated ranks")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--every", type=int, default=40, help="steps to a validation")
    parser.add_argument("--accumulate", type=int, default=2, help="microbatches")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--folder", type=Path, help="for a log, and to resume from")
    return parser.parse_args(argv)


def main(options):
    ranks = int(os.environ.get("WORLD_SIZE", options.ranks))  # torchrun says how many
    mesh = ff.make_mesh({"data": ranks})
    return ff.spmd(run, mesh)(mesh, options)


if __name__ == "__main__":
    main(parse())
