"""Train a byte-level GPT on real text, sharded over ranks.

    python examples/train_gpt.py                             4 simulated ranks
    torchrun --nproc-per-node 2 examples/train_gpt.py        2 real processes
    python examples/train_gpt.py --pipe 2                    2 pipelines of 2 ranks
    python examples/train_gpt.py --mesh data=2,model=2       layers split over 2 ranks
    python examples/train_gpt.py --context 2                 sequences cut over 2 ranks
    python examples/train_gpt.py --experts 8                 experts, 2 of them a token
    torchrun --nproc-per-node 2 --max-restarts 3 examples/train_gpt.py \
        --checkpoints DIR               goes on by itself after a crash, or when rerun

All run the same `train` below, and the same seed gives the same losses. What a step
will do on any number of ranks, without them (options of this file follow the `--`):

    python -m fsfunc plan examples/train_gpt.py --mesh data=1024 -- --remat

That it computes what the plain step does, in exact arithmetic on simulated ranks:

    python -m fsfunc prove examples/train_gpt.py --mesh data=2,pipe=2 -- --remat \
        --layers 2 --dim 16 --heads 2 --seq 8 --batch 8
"""

import json
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import optree
import torch
from gpt import (
    EXPERTS_OVER_DATA,
    SPLIT_OVER_MODEL,
    init_params,
    loss_fn,
    next_logits,
)
from options import parse
from report import (
    Results,
    held,
    held_table,
    of_every_rank,
    plot_losses,
    progress_bar,
    sent_table,
)
from restart import Checkpoints, asked_to_leave, results_of
from rich.console import Console
from stages import as_rows, make_stages, save_trace, show_stages
from text import Corpus, Windows, draw_batch, printable, read_corpus

import fsfunc as ff

VOCAB = 256  # a token is a byte
PROMPT = b"def "
TEMPERATURE = 0.8


def build(mesh: ff.Mesh | None, args: Namespace | None = None) -> tuple:
    """(step, init, optimizer, batch, layouts): what `train` below starts from.

    `python -m fsfunc plan` calls it with an abstract mesh. The batch is a rank's own,
    of which shapes alone matter: (rows, seq) tokens of text, and the targets. For
    `python -m fsfunc prove`, build(None) has the plain step, and all ranks' rows.
    """
    if args is None:
        args = settings(mesh)
    rate = ff.warmup_cosine(
        args.lr, max(1, args.steps // 10), args.steps + 1, start=args.lr / 10
    )
    optimizer = ff.chain(ff.clip_by_global_norm(1.0), ff.sharded_adam(rate))

    loss_of = loss_on(args) if mesh else loss_fn

    def train_step(state, batch):
        loss, grads = ff.value_and_grad(loss_of)(state.params, batch)
        return state.apply_gradients(grads, optimizer), {"loss": loss}

    if mesh is None:
        return train_step, partial(params_of, args), optimizer, drawn_batch(args), {}
    step = transformed(train_step, mesh, args)
    if not args.no_donate:
        step = ff.donate(step)
    device = device_of(mesh)

    def init():
        return optree.tree_map(lambda leaf: leaf.to(device), params_of(args))

    batch = {name: part.to(device) for name, part in blank_batch(args).items()}
    return step, init, optimizer, batch, args.layouts


def train(args: Namespace, corpus: Corpus, mesh: ff.Mesh) -> Results:
    """The results of a run; every rank runs this, and rank 0 shows it."""
    step, init, optimizer, batch, layouts = build(mesh, args)
    evaluate = transformed(ff.value(loss_on(args)), mesh, args)
    device, stages = device_of(mesh), args.stages
    windows = Windows(corpus.train, args.seq)
    batches = ff.batches(windows, mesh, "data", args.batch, seed=args.seed)

    checkpoints = Checkpoints(args, mesh, corpus.train)
    if newest := checkpoints.newest():
        empty = ff.abstract_state(step, init, optimizer, batch, layouts=layouts)
        target = {"train": empty, "data": batches.position}
        loaded = ff.load(newest, target, device=device)
        state, results = loaded["train"], results_of(newest)
        batches.seek(loaded["data"])
    else:
        state = ff.init_state(step, init, optimizer, batch, layouts=layouts)
        results = Results([], [], [])
    begun = len(results.train)

    def own(rows):
        return {name: x.to(device) for name, x in cut_sequences(rows, args).items()}

    def part_of(batch):
        return own(ff.local_batch(batch, mesh, "data"))

    held_out, size = seeded(args.seed + 1), (args.batch, args.seq)
    drawn = (draw_batch(corpus.validation, *size, held_out) for _ in range(4))
    validation = [part_of(batch) for batch in drawn]

    console = Console(quiet=mesh.rank != 0, highlight=False)
    if stages:
        show_stages(console, stages)

    def validate():
        losses = [evaluate(state.params, batch) for batch in validation]
        loss = torch.stack(losses).mean().item()
        done = len(results.train)
        results.validation.append((done, loss))
        console.print(f"step {done:4}  val loss {loss:.4f}")

    if not begun:
        validate()
    # At zero=1 and 2 a validation gathers what the step after it would have gathered;
    # the last step, whose traffic is shown, must not come right after one.
    every = max(2, args.steps // 5)
    log = events = None
    with progress_bar(console, args.steps, args.batch * args.seq, begun) as advance:
        for done in range(begun + 1, args.steps + 1):
            batch = own(next(batches))
            with ff.ledger() as log, ff.clock() as events:
                state, metrics = step(state, batch)
            results.train.append(metrics["loss"].item())
            advance(results.train[-1])
            if done == args.steps or (done % every == 0 and done + every <= args.steps):
                validate()
            whole = {"train": state, "data": batches.position}
            if checkpoints.after(done, whole, results, device):
                console.print(f"asked to leave: saved after step {done}")
                return results

    gradients = transformed(ff.value_and_grad(loss_on(args)), mesh, args)
    _, grads = gradients(state.params, validation[0])
    kinds = {"parameters": state.params, "gradients": grads, "moments": state.opt_state}
    mine, everyone = [held(tree) for tree in kinds.values()], tuple(mesh.axes)
    ranks = of_every_rank(mine, everyone, device)
    console.print(held_table(list(kinds), ranks, args.pipe))
    if log is not None:  # a step was left to take
        sent = log.table(mesh.rank)
        ranks = of_every_rank(sent, "pipe", device) if stages else [sent]
        console.print(sent_table(ranks))

    if stages:  # it would record the model anew for each length of a window
        written = write(next_logits, ff.unshard(state.params), args, device)
    else:
        predict = transformed(next_logits, mesh, args)
        written = write(predict, state.params, args, device)
    results.samples.extend(of_every_rank(printable(written), everyone, device))
    console.rule(f"a sample at temperature {TEMPERATURE}")
    console.print(results.samples[0], markup=False, soft_wrap=True)

    if mesh.rank == 0 and args.losses:
        args.losses.write_text(json.dumps(results._asdict()))
    if mesh.rank == 0 and args.plot:
        plot_losses(args.plot, results.train, results.validation)
        console.print(f"losses drawn in {args.plot}")
    if args.trace and events:
        steps = of_every_rank(as_rows(events), "pipe", device)
        if mesh.rank == 0:
            save_trace(args.trace, steps)
        console.print(f"the last step's trace is in {args.trace}")
    checkpoints.wait()
    return results


def transformed(f: Callable, mesh: ff.Mesh, args: Namespace) -> Callable:
    """`f` transformed as the options say, the innermost first.

    What is outside is done more rarely. Innermost, each unit is recomputed in each
    microbatch; `accumulate` runs the whole pipeline for each of its parts, and `shard`,
    around both, reduces the gradients once a step, whatever their number.
    """
    if args.remat:
        f = ff.remat(f)
    if args.stages:
        f = ff.pipeline(
            f,
            mesh,
            "pipe",
            n_microbatches=args.microbatches,
            schedule=args.stages.schedule,
            stages=args.stages.counts,
        )
    if args.accumulate > 1:
        f = ff.accumulate(f, args.accumulate)
    if args.bf16:
        f = ff.precision(f, compute=torch.bfloat16, reduce=torch.float32)
    return ff.shard(f, mesh, data_axes(args), zero=args.zero)


def loss_on(args: Namespace) -> Callable:
    """The loss, of ranks that have whole sequences or parts of them."""
    return partial(loss_fn, context="context") if args.context > 1 else loss_fn


def data_axes(args: Namespace) -> tuple[str, ...]:
    """The axes along which ranks have other tokens: their losses' mean is the loss."""
    return ("data", "context") if args.context > 1 else ("data",)


def cut_sequences(rows: dict, args: Namespace) -> dict:
    """This rank's part of each sequence: two pieces, so that all have equal work."""
    if args.context == 1:
        return rows
    n, at = args.context, ff.axis_index("context")
    return {name: ff.nn.zigzag(x, n, 1).chunk(n, 1)[at] for name, x in rows.items()}


def write(predict: Callable, params: Any, args: Namespace, device) -> bytes:
    """The bytes that the model writes after the prompt.

    Every rank takes part, since each holds a part of the parameters, and draws the same
    bytes from a generator of its own.
    """
    generator, tokens = seeded(args.seed), list(PROMPT)
    for _ in range(args.sample):
        window = torch.tensor([tokens[-args.seq :]], device=device)
        chances = (predict(params, window)[0].cpu() / TEMPERATURE).softmax(-1)
        tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
    return bytes(tokens)


def settings(mesh: ff.Mesh | None = None) -> Namespace:
    """The options, on the given mesh if any, and the stages that they ask for."""
    args = parse(__doc__, axes=mesh and mesh.axes)
    args.stages, args.layouts = None, {}
    if args.model > 1:
        args.layouts |= SPLIT_OVER_MODEL
    if args.experts:
        args.layouts |= EXPERTS_OVER_DATA
    if args.pipe > 1:
        make = ff.spmd(make_stages, ff.make_mesh({}, "abstract"))  # on fake tensors
        args.stages = make(args, params_of, blank_batch)[0]
    return args


def params_of(args: Namespace) -> dict:
    sizes = {"seq": args.seq, "dim": args.dim, "layers": args.layers}
    sizes |= {"experts": args.experts}
    return init_params(seeded(args.seed), vocab=VOCAB, heads=args.heads, **sizes)


def blank_batch(args: Namespace) -> dict[str, torch.Tensor]:
    shape = args.batch // args.data, args.seq // args.context
    names = "tokens", "targets"
    return {name: torch.zeros(shape, dtype=torch.long) for name in names}


def drawn_batch(args: Namespace) -> dict[str, torch.Tensor]:
    draw = seeded(args.seed)
    rows = torch.randint(VOCAB, (2, args.batch, args.seq), generator=draw)
    return dict(zip(("tokens", "targets"), rows, strict=True))


def device_of(mesh: ff.Mesh) -> torch.device:
    on_gpu = mesh.backend == "processes" and torch.cuda.is_available()
    return torch.device("cuda" if on_gpu else "cpu")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def main() -> None:
    args = settings()
    corpus = read_corpus(args.text)
    torch.manual_seed(args.seed)  # what units draw, such as dropout, follows from it
    sizes = {"data": args.data, "pipe": args.pipe, "model": args.model}
    sizes |= {"context": args.context}
    mesh = ff.make_mesh({a: n for a, n in sizes.items() if n > 1 or a == "data"})
    with asked_to_leave() if args.checkpoints else nullcontext() as args.leaving:
        ff.spmd(train, mesh)(args, corpus, mesh)


if __name__ == "__main__":
    main()
