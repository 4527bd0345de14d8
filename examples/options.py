"""The options of train_gpt.py."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def parse(
    description: str | None, argv: Sequence[str] | None = None
) -> argparse.Namespace:
    """The options of a run; ends the program where they make no sense."""
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

    group = parser.add_argument_group("training")
    option(group, "--steps", 200, "updates")
    option(group, "--batch", 32, "windows in a global batch, over all ranks")
    option(group, "--seq", 128, "bytes in a window")
    option(group, "--dim", 128, "width of the model")
    option(group, "--layers", 4, "blocks of the model")
    option(group, "--heads", 4, "attention heads of a block")
    option(group, "--lr", 3e-3, "peak learning rate")
    option(group, "--seed", 0, "of the parameters, the batches and the sample")

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
    args.ranks = int(os.environ.get("WORLD_SIZE", args.ranks))
    for name in ("ranks", "accumulate", "steps", "batch", "seq", "dim", "heads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1: {getattr(args, name)}")
    if args.batch % (args.ranks * args.accumulate):
        parser.error(
            f"--batch {args.batch} must be a multiple of {args.ranks} ranks x "
            f"{args.accumulate} microbatches"
        )
    if args.dim % args.heads:
        parser.error(f"--dim {args.dim} must be a multiple of --heads {args.heads}")
    if args.text and not args.text.exists():
        parser.error(f"--text {args.text}: no such file or folder")
    return args
