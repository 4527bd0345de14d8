"""Train a byte-level GPT on real text, sharded over ranks.

    python examples/train_gpt.py                             4 simulated ranks
    torchrun --nproc-per-node 2 examples/train_gpt.py        2 real processes

Both run the same `train` below, and the same seed gives the same losses.
"""

import json
from argparse import Namespace
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from gpt import init_params, loss_fn, next_logits
from options import parse
from report import held, held_table, plot_losses, progress_bar, sent_table
from rich.console import Console
from text import Corpus, draw_batch, printable, read_corpus
from torch import Tensor

import fsfunc as ff

VOCAB = 256  # a token is a byte
PROMPT = b"def "
TEMPERATURE = 0.8


class Results(NamedTuple):
    train: list[float]  # the loss of each step, before its update
    validation: list[tuple[int, float]]  # (steps taken, loss)
    samples: list[str]  # what each rank wrote


def train(args: Namespace, corpus: Corpus, mesh: ff.Mesh) -> Results:
    """The results of a run; every rank runs this, and rank 0 shows it."""
    rate = ff.warmup_cosine(
        args.lr, max(1, args.steps // 10), args.steps + 1, start=args.lr / 10
    )
    optimizer = ff.chain(ff.clip_by_global_norm(1.0), ff.sharded_adam(rate))

    def train_step(state, batch):
        loss, grads = ff.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads, optimizer), {"loss": loss}

    def mean_loss(params, batches):
        losses = [loss_fn(params, batch) for batch in batches]
        return ff.pmean(torch.stack(losses).mean(), "data")

    step = sharded(train_step, mesh, args)
    if not args.no_donate:
        step = ff.donate(step)
    evaluate = sharded(mean_loss, mesh, args)

    on_gpu = mesh.backend == "processes" and torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")

    def draw(text, generator):
        batch = draw_batch(text, args.batch, args.seq, generator)
        mine = ff.local_batch(batch, mesh, "data")
        return {name: part.to(device) for name, part in mine.items()}

    def init():
        params = init_params(
            seeded(args.seed),
            vocab=VOCAB,
            seq=args.seq,
            dim=args.dim,
            layers=args.layers,
            heads=args.heads,
        )
        return optree.tree_map(lambda leaf: leaf.to(device), params)

    batches, held_out = seeded(args.seed), seeded(args.seed + 1)
    validation = [draw(corpus.validation, held_out) for _ in range(4)]
    state = ff.init_state(step, init, optimizer, validation[0])

    console = Console(quiet=mesh.rank != 0, highlight=False)
    results = Results([], [], [])

    def validate():
        done, loss = len(results.train), evaluate(state.params, validation).item()
        results.validation.append((done, loss))
        console.print(f"step {done:4}  val loss {loss:.4f}")

    validate()
    # At zero=1 and 2 a validation gathers what the step after it would have gathered;
    # the last step, whose traffic is shown, must not come right after one.
    every = max(2, args.steps // 5)
    with progress_bar(console, args.steps, args.batch * args.seq) as advance:
        for done in range(1, args.steps + 1):
            batch = draw(corpus.train, batches)
            with ff.ledger() as log:
                state, metrics = step(state, batch)
            results.train.append(metrics["loss"].item())
            advance(results.train[-1])
            if done == args.steps or (done % every == 0 and done + every <= args.steps):
                validate()

    _, grads = sharded(ff.value_and_grad(loss_fn), mesh, args)(state.params, batch)
    kinds = {"parameters": state.params, "gradients": grads, "moments": state.opt_state}
    mine = torch.tensor([[held(tree) for tree in kinds.values()]], device=device)
    console.print(held_table(list(kinds), ff.all_gather(mine, "data")))
    console.print(sent_table(log.table()))

    written = write(sharded(next_logits, mesh, args), state.params, args, device)
    for tokens in ff.all_gather(written, "data").tolist():
        results.samples.append(printable(bytes(tokens)))
    console.rule(f"a sample at temperature {TEMPERATURE}")
    console.print(results.samples[0], markup=False, soft_wrap=True)

    if mesh.rank == 0 and args.losses:
        args.losses.write_text(json.dumps(results._asdict()))
    if mesh.rank == 0 and args.plot:
        plot_losses(args.plot, results.train, results.validation)
        console.print(f"losses drawn in {args.plot}")
    return results


def sharded(f: Callable, mesh: ff.Mesh, args: Namespace) -> Callable:
    """`f` transformed as the options say, the innermost first."""
    if args.remat:
        f = ff.remat(f)
    if args.accumulate > 1:
        f = ff.accumulate(f, args.accumulate)  # within shard: all reduced once
    if args.bf16:
        f = ff.precision(f, compute=torch.bfloat16, reduce=torch.float32)
    return ff.shard(f, mesh, "data", zero=args.zero)


def write(predict: Callable, params: Any, args: Namespace, device) -> Tensor:
    """The bytes [1, n] that the model writes after the prompt.

    Every rank takes part, since each holds a part of the parameters, and draws the same
    bytes from a generator of its own.
    """
    generator, tokens = seeded(args.seed), list(PROMPT)
    for _ in range(args.sample):
        window = torch.tensor([tokens[-args.seq :]], device=device)
        chances = (predict(params, window)[0].cpu() / TEMPERATURE).softmax(-1)
        tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
    return torch.tensor([tokens], device=device)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def main() -> None:
    args = parse(__doc__)
    corpus = read_corpus(args.text)
    torch.manual_seed(args.seed)  # what units draw, such as dropout, follows from it
    mesh = ff.make_mesh({"data": args.ranks})
    ff.spmd(train, mesh)(args, corpus, mesh)


if __name__ == "__main__":
    main()
