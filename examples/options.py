"""The options of train_gpt.py."""

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

STAGES_OF_A_RANK = {
    "one_f_one_b": 1,
    "gpipe": 1,
    "zb_h1": 1,
    "greedy": 1,
    "interleaved_1f1b": 2,
    "looped_bfs": 2,
    "zb_v": 2,
}


def parse(
    description: str | None,
    argv: Sequence[str] | None = None,
    axes: Mapping[str, int] | None = None,
) -> argparse.Namespace:
    """The options of a run; ends the program where they make no sense.

    Where a mesh is given, by its axes, the ranks are its own.
    """
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Every rank draws the same global batch and takes its part of it, so "
        "the losses\nare the same, but for rounding, whatever the options of sharding.",
    )

    def option(group, name: str, default: Any, text: str, **more: Any) -> None:
        more.setdefault("type", type(default))
        shown = f"{text} (default: {default})"
        group.add_argument(name, default=default, help=shown, **more)

    group = parser.add_argument_group("sharding")
    option(group, "--ranks", 4, "simulated ranks; torchrun brings its own number")
    group.add_argument(
        "--mesh",
        type=axes_of,
        metavar="AXIS=N,...",
        help="the ranks along data, pipe, model (over which layers are split) and "
        "context (sequences), in place of --ranks, --pipe and --context",
    )
    option(
        group,
        "--context",
        1,
        "ranks over which sequences are cut; it divides the ranks",
        metavar="N",
    )
    option(
        group,
        "--zero",
        3,
        "ZeRO stage: 1 shards the moments, 2 the gradients too, 3 the parameters too",
        choices=range(4),
    )
    group.add_argument(
        "--remat", action="store_true", help="recompute activations in the backward"
    )
    option(group, "--accumulate", 1, "microbatches for one update", metavar="N")
    group.add_argument(
        "--bf16",
        action="store_true",
        help="compute in bfloat16 over float32 shards, reduce in float32",
    )
    group.add_argument(
        "--no-donate",
        action="store_true",
        help="leave the state that a step is given as it was, and make a new one",
    )

    group = parser.add_argument_group("pipeline")
    option(
        group,
        "--pipe",
        1,
        "ranks over which the stages of the model lie; it divides the ranks",
        metavar="N",
    )
    group.add_argument(
        "--schedule",
        choices=list(STAGES_OF_A_RANK),
        help="the order in which stages take microbatches (default: one_f_one_b)",
    )
    group.add_argument(
        "--microbatches",
        type=int,
        metavar="M",
        help="of each pipelined batch (default: 2N, or its rows where they are fewer)",
    )
    group.add_argument(
        "--trace",
        type=Path,
        metavar="PATH",
        help="write the last step for a viewer such as https://ui.perfetto.dev",
    )

    group = parser.add_argument_group("training")
    option(group, "--steps", 200, "updates")
    group.add_argument(
        "--batch",
        type=int,
        help="windows in a global batch, over all ranks (default: 32, or the next "
        "number that they can share)",
    )
    option(group, "--seq", 128, "bytes in a window")
    option(group, "--dim", 128, "width of the model")
    option(group, "--layers", 4, "blocks of the model")
    option(group, "--heads", 4, "attention heads of a block")
    option(
        group,
        "--experts",
        0,
        "experts of a block, in place of its MLP, shared out over the axis data",
        metavar="N",
    )
    option(group, "--lr", 3e-3, "peak learning rate")
    option(group, "--seed", 0, "of the parameters, the batches and the sample")

    group = parser.add_argument_group("restart")
    group.add_argument(
        "--checkpoints",
        type=Path,
        metavar="DIR",
        help="save the run there, and go on from the newest that is there; SIGTERM "
        "saves and ends it",
    )
    option(group, "--every", 50, "steps from one checkpoint to the next", metavar="N")
    option(group, "--keep", 2, "checkpoints to keep: the newest", metavar="N")

    group = parser.add_argument_group("text and results")
    group.add_argument(
        "--text",
        type=Path,
        metavar="PATH",
        help="a file or folder (default: the source of Python's standard library)",
    )
    option(group, "--sample", 240, "bytes to write with the trained model", metavar="N")
    group.add_argument(
        "--plot", type=Path, metavar="PATH", help="write a PNG of the losses"
    )
    group.add_argument(
        "--losses", type=Path, metavar="PATH", help="write a JSON of the losses"
    )

    args = parser.parse_args(argv)
    args.model, world = 1, os.environ.get("WORLD_SIZE")
    axes = args.mesh if axes is None else axes
    if axes is not None:
        take_ranks(parser, args, axes)
        if args.mesh and world and int(world) != args.ranks:
            parser.error(f"--mesh has {args.ranks} ranks, and {world} are running")
    elif world:
        args.ranks = int(world)
    counts = "ranks accumulate pipe context steps batch seq dim heads microbatches"
    counts += " every keep"
    for name in counts.split():
        if (value := getattr(args, name)) is not None and value < 1:
            parser.error(f"--{name} must be at least 1: {value}")
    for name in ("pipe", "context"):
        if args.ranks % getattr(args, name):
            n = getattr(args, name)
            parser.error(f"--{name} {n} must divide the {args.ranks} ranks")
    shared = args.pipe * args.context * args.model
    if args.ranks % shared:
        parser.error(f"--pipe x --context, {shared}, must divide {args.ranks} ranks")
    args.data = args.ranks // shared
    share = args.data * args.accumulate
    args.batch = args.batch or math.ceil(32 / share) * share
    if args.batch % share:
        parser.error(
            f"--batch {args.batch} must be a multiple of {args.data} ranks that share "
            f"it x --accumulate {args.accumulate}"
        )
    if args.dim % args.heads:
        parser.error(f"--dim {args.dim} must be a multiple of --heads {args.heads}")
    if args.seq % (2 * args.context) and args.context > 1:
        parser.error(
            f"--seq {args.seq} must be a multiple of {2 * args.context}: each of "
            f"--context {args.context} ranks has two pieces of a sequence"
        )
    if args.experts % args.data:
        parser.error(f"--experts {args.experts} must be a multiple of data={args.data}")
    if args.experts and args.model > 1:
        parser.error("--experts with model: their products are not split")
    if args.heads % args.model:
        parser.error(f"--heads {args.heads} must be a multiple of model={args.model}")
    if args.text and not args.text.exists():
        parser.error(f"--text {args.text}: no such file or folder")
    if args.checkpoints and args.checkpoints.is_file():
        parser.error(f"--checkpoints {args.checkpoints}: a file, and not a folder")
    complete_pipeline(parser, args, args.batch // share)
    return args


def take_ranks(
    parser: argparse.ArgumentParser, args: argparse.Namespace, axes: Mapping[str, int]
) -> None:
    """Sets the ranks, their pipelines and split layers to those of a mesh."""
    shown = ", ".join(f"{name}={size}" for name, size in axes.items())
    if unknown := set(axes) - {"data", "pipe", "model", "context"}:
        parser.error(
            f"the mesh {shown} has the axis {min(unknown)}, of which this script knows "
            "nothing: its axes are data, pipe for pipelines, model for split layers, "
            "context for cut sequences"
        )
    if "data" not in axes:
        parser.error(f"the mesh {shown} lacks the axis data (data=1 is one pipeline)")
    pipe = axes.get("pipe", 1)
    if args.pipe not in (1, pipe):
        parser.error(f"--pipe {args.pipe}, but the mesh {shown} has pipe={pipe}")
    context = axes.get("context", 1)
    if args.context not in (1, context):
        parser.error(
            f"--context {args.context}, but the mesh {shown} has context={context}"
        )
    args.pipe, args.model, args.context = pipe, axes.get("model", 1), context
    args.ranks = axes["data"] * pipe * context * args.model


def axes_of(text: str) -> dict[str, int]:
    """The axes of a mesh that is written as data=2,model=2."""
    axes = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not size.isdigit() or not int(size) or name.strip() in axes:
            raise argparse.ArgumentTypeError(
                f"{text!r}: write axes as data=2,model=2, each once, of 1 rank or more"
            )
        axes[name.strip()] = int(size)
    return axes


def complete_pipeline(
    parser: argparse.ArgumentParser, args: argparse.Namespace, rows: int
) -> None:
    """Fills in what the pipeline's options leave out; `rows` is one batch of it."""
    if args.pipe == 1:
        for name in ("schedule", "microbatches", "trace"):
            if getattr(args, name) is not None:
                parser.error(f"--{name} is for a pipeline: add --pipe N, N > 1")
        return
    args.schedule = args.schedule or next(iter(STAGES_OF_A_RANK))
    stages, units = args.pipe * STAGES_OF_A_RANK[args.schedule], args.layers + 2
    if stages > units:
        parser.error(
            f"--pipe {args.pipe} --schedule {args.schedule} makes {stages} stages, but "
            f"the model has {units} units: embed, {args.layers} blocks and head; take "
            f"more --layers or fewer ranks"
        )
    args.microbatches = args.microbatches or min(2 * args.pipe, rows)
    if args.microbatches > rows:
        parser.error(
            f"--microbatches {args.microbatches} of {rows} rows: --batch {args.batch} "
            f"/ {args.data} ranks that share it / --accumulate {args.accumulate}"
        )
