"""Fine-tune a causal model of Hugging Face on instructions, sharded over ranks.

    python examples/finetune.py                             a tiny model, one process
    python examples/finetune.py --ranks 4                   the same, 4 simulated ranks
    torchrun --nproc-per-node 8 --max-restarts 3 examples/finetune.py \\
        --model FOLDER --data FILE --lora 16 --out DIR      a real one, a card a process

All three find the same losses (with --fp32 to the rounding of float32). FOLDER is a
model's as `save_pretrained` writes it, with its tokenizer; FILE has a line {"prompt":
"...", "completion": "..."} for each row (instructions.py). DIR gets log.jsonl,
checkpoints, from the newest of which a run goes on, and at the end the model, in a
folder that `AutoModelForCausalLM.from_pretrained` loads.
"""

import argparse
import os
import sys
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from instructions import Bytes, Instructions, prompt_tokens, read_pairs, tokenized
from lora import add_adapters, merge_adapters
from progress import Progress
from torch import nn
from torch.utils.data import default_collate
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging

import fsfunc as ff

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# With another value of one of these it is another run, whose checkpoints are refused.
# The others change the losses by rounding alone: a run may go on with other ones.
OF_THE_RUN = "model bytes lora alpha length batch epochs lr decay clip fp32 seed"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, help="a folder, or a config.json of random weights")
    add("--bytes", action="store_true", help="as tokens, not the model's own tokenizer")
    add("--data", type=Path, help="file of JSON lines (default: some sums)")
    add("--out", type=Path, default=Path("finetuned"), help="folder of the results")
    add("--lora", type=int, default=0, metavar="RANK", help="train adapters alone")
    add("--alpha", type=float, default=16, help="adapters count alpha / RANK")
    add("--length", type=int, default=1024, help="tokens of the longest row")
    add("--batch", type=int, default=8, help="rows of a step, of all ranks together")
    add("--accumulate", type=int, default=1, help="parts of a rank's rows, in turn")
    add("--epochs", type=int, default=8)
    add("--steps", type=int, help="end after so many (default: all epochs)")
    add("--lr", type=float, help="rate at its peak (2e-5; of adapters alone 2e-4)")
    add("--decay", type=float, default=0.01, help="weight decay, of matrices")
    add("--clip", type=float, default=1.0, help="largest norm of the gradients")
    add("--fp32", action="store_true", help="compute in float32, not in bfloat16")
    add("--no-remat", action="store_true", help="keep what layers compute, in memory")
    add("--zero", type=int, default=3, choices=range(4))
    add("--ranks", type=int, default=1, help="simulated ones, without torchrun")
    add("--workers", type=int, default=0, help="processes that read ahead, a rank")
    add("--eval-every", type=int, default=20, metavar="STEPS")
    add("--save-every", type=int, default=50, metavar="STEPS")
    add("--log-every", type=int, default=10, metavar="STEPS")
    add("--sample", help="a prompt to answer then (default: one that is held out)")
    add("--answer", type=int, default=16, help="tokens of the answer at most")
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.model and not args.model.exists():  # transformers would ask the internet
        parser.error(f"--model {args.model}: no such folder or file")
    usual = 2e-4 if args.lora else 2e-5
    args.lr = args.lr or (usual if args.model else 3e-3)
    return args


def load_model(args: argparse.Namespace) -> tuple[nn.Module, Any]:
    """(model, tokenizer). The model is whole, on the host of each process."""
    # What is trained is kept in float32: bfloat16 has too few bits for small updates.
    # A frozen base gets none, and is kept in what it computes in.
    kept = torch.bfloat16 if args.lora and not args.fp32 else torch.float32
    tokenizer: Any = Bytes()
    if args.model and args.model.is_dir():
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=kept)
        if not args.bytes:
            tokenizer = AutoTokenizer.from_pretrained(args.model)
    else:
        config = LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        if args.model:
            config = AutoConfig.from_pretrained(args.model)
        model = AutoModelForCausalLM.from_config(config, dtype=kept)
    known = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > known:
        raise SystemExit(f"the model knows {known} tokens, {len(tokenizer)} are made")
    if args.lora:
        add_adapters(model, args.lora, args.alpha)
    return model, tokenizer


def loss_of(apply: Callable) -> Callable:
    """The mean over all tokens that have a label, whichever rank has them.

    It is what `labels=` gives on one device. As a sum and its weight it is that also
    where ranks, or parts of a batch, have unequal numbers of such tokens; a mean of
    their means would be another number.
    """

    def loss_fn(params, frozen, batch):
        # Without use_cache=False a model would keep keys and values for nothing.
        out = apply(params, frozen, input_ids=batch["input_ids"], use_cache=False)
        logits, labels = out.logits[:, :-1].float(), batch["labels"][:, 1:]
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        count = (labels != -100).sum()
        sums = {"tokens": batch["tokens"].sum(), "labels": count}
        return ff.Weighted(total, count), ff.Summed(sums)

    return loss_fn


def answer(predict: Callable, tokens: list[int], count: int) -> list[int]:
    """The likeliest tokens to follow; every rank takes part, and finds the same.

    `predict` gathers one layer after the other, never all of them; keys and values are
    cached, so that it reads each token once. It goes on behind the end of the answer:
    a rank that stopped earlier would leave the others waiting for its parameters.
    """
    x, cache, written = torch.tensor([tokens], device=DEVICE), None, []
    with torch.no_grad():
        for _ in range(count):
            out = predict(input_ids=x, past_key_values=cache)
            cache, x = out.past_key_values, out.logits[:, -1:].argmax(-1)
            written.append(x)
    return torch.cat(written, 1)[0].tolist()


def train(args, mesh: ff.Mesh, model: nn.Module, tokenizer, data: dict) -> dict | None:
    """The summary of a run. All ranks do this, with their rows and parts of a state."""

    def on_device(batch):
        return {k: x.to(DEVICE, non_blocking=True) for k, x in batch.items()}

    size = args.batch  # of all ranks together: each reads its own part
    how = {"workers": args.workers, "pin_memory": DEVICE.type == "cuda"}
    loader = ff.batches(data["train"], mesh, "data", size, seed=args.seed, **how)
    held_out = ff.batches(data["eval"], mesh, "data", size, shuffle=False, **how)
    steps = args.steps or args.epochs * len(loader)

    # The model as a function of its tensors, once as it trains (with dropout) and once
    # as it is used. `frozen` has its buffers, and with adapters the base. A unit, which
    # is gathered and recomputed as one, is a layer that transformers would checkpoint.
    units = GradientCheckpointingLayer
    learns, params, frozen = ff.from_module(model.train(), units=units)
    reads_only, *_ = ff.from_module(model.eval(), units=units)

    rate = ff.warmup_cosine(args.lr, max(1, steps // 10), steps + 1, start=args.lr / 10)
    optimizer = ff.chain(
        ff.clip_by_global_norm(args.clip),
        ff.sharded_adam(rate, weight_decay=args.decay, mask=lambda _, x: x.ndim > 1),
    )
    gradients = ff.value_and_grad(loss_of(learns), has_aux=True, batch_argnums=2)

    def train_step(state, batch):  # of one device: nothing in it knows of ranks
        (loss, aux), grads = gradients(state.params, state.extra, batch)
        metrics = {"loss": loss, "norm": ff.global_norm(grads)}
        metrics["tokens"] = aux.tree["tokens"]
        return state.apply_gradients(grads, optimizer), metrics

    def on_ranks(f):
        if not args.fp32:  # sums of gradients stay in float32, as the weights do
            f = ff.precision(f, compute=torch.bfloat16, reduce=torch.float32)
        return ff.shard(f, mesh, "data", zero=args.zero)

    # From the inside out; what is outside is done more rarely: a layer is recomputed in
    # each part of a batch, and gradients are reduced once a step.
    step = train_step if args.no_remat else ff.remat(train_step)
    step = ff.accumulate(step, args.accumulate)
    step = ff.donate(on_ranks(step))
    evaluate = on_ranks(ff.value(loss_of(reads_only), has_aux=True))
    predict = on_ranks(reads_only)

    # `init` moves one tensor at a time, of which a rank keeps its part. The rows give
    # shapes alone: a batch of the loader would be one that is not trained on.
    def init():
        whole = {"params": params, "frozen": frozen}
        return ff.tree.map(lambda x: x.to(DEVICE), whole)

    def begin(parts):
        params = parts["params"]
        return ff.TrainState(params, optimizer.init(params), extra=parts["frozen"])

    rows = default_collate([data["train"][0]] * (args.batch // mesh.size))
    state = ff.init_state(step, init, begin, on_device(rows))

    # A checkpoint has what is trained, the place in the data, and (ff.save sees to it)
    # the random generators; what is frozen comes with the model again.
    run = {name: str(getattr(args, name)) for name in OF_THE_RUN.split()} | {
        "steps": steps
    }
    run["data"] = zlib.crc32(repr(data["train"].rows).encode())
    if newest := ff.latest(args.out, "step-*"):
        theirs = ff.metadata(newest).metadata
        if unlike := [f"--{k} {theirs[k]}" for k in run if theirs[k] != run[k]]:
            raise SystemExit(
                f"{newest} is of another run ({', '.join(unlike)}): take another --out"
            )
        target = {"train": state.replace(extra=None), "data": loader.position}
        loaded = ff.load(newest, target, donate=True)
        state = loaded["train"].replace(extra=state.extra)
        loader.seek(loaded["data"])

    file = args.out / "log.jsonl" if mesh.rank == 0 else None
    log = Progress(file, state.step, steps, rate)

    def look():
        """The loss of what is held out, and an answer."""
        log.write()
        sums = torch.zeros(2, device=DEVICE)
        for batch in held_out.epoch():
            loss, aux = evaluate(state.params, state.extra, on_device(batch))
            count = aux.tree["labels"]
            sums += torch.stack((loss * count, count))
        call = partial(predict, state.params, state.extra)
        tokens = answer(call, prompt_tokens(tokenizer, args.sample), args.answer)
        if tokenizer.eos_token_id in tokens:
            tokens = tokens[: tokens.index(tokenizer.eos_token_id)]
        log.evaluation((sums[0] / sums[1]).item(), tokenizer.decode(tokens))

    if state.step == 0:
        look()
    while state.step < steps:
        state, metrics = step(state, on_device(next(loader)))
        log.step(metrics)
        last = state.step == steps
        if last or state.step % args.log_every == 0:
            log.write()
        if last or state.step % args.eval_every == 0:
            look()
        if last or state.step % args.save_every == 0:
            log.write()  # or a run that goes on from here would lack some lines
            path = args.out / f"step-{state.step:06}"
            whole = {"train": state.replace(extra=None), "data": loader.position}
            ff.save(path, whole, metadata=run, keep=2)  # save_async: a second state

    # Leaf by leaf to the host of one rank, which alone has the whole model.
    whole = ff.unshard((state.params, state.extra), to="cpu", only=0)
    if mesh.rank == 0:
        folder = args.out / "model"
        merge_adapters(ff.to_module(model, *whole)).save_pretrained(folder)
        if not isinstance(tokenizer, Bytes):
            tokenizer.save_pretrained(folder)
    newest = ff.latest(args.out, "step-*")
    return log.close(checkpoint=str(newest), model=str(args.out / "model"))


def main(argv: list[str] | None = None) -> dict | None:
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # those of transformers
    torch.manual_seed(args.seed)  # a random model, adapters and dropout follow from it
    model, tokenizer = load_model(args)
    pairs = read_pairs(args.data)
    rows = tokenized(pairs, tokenizer, args.length)
    length = max(len(row.tokens) for row in rows)
    pad = tokenizer.pad_token_id or tokenizer.eos_token_id  # which one is never seen
    held_out = rows[::10]
    del rows[::10]
    args.sample = args.sample or pairs[0][0]
    data = {
        "train": Instructions(rows, length, pad),
        "eval": Instructions(held_out, length, pad, multiple=args.batch),
    }
    mesh = ff.make_mesh({"data": int(os.environ.get("WORLD_SIZE", args.ranks))})
    return ff.spmd(train, mesh)(args, mesh, model, tokenizer, data)[0]


if __name__ == "__main__":
    main()
