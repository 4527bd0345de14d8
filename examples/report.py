"""What a run shows: its progress, tables, and a picture of the losses."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from torch import Tensor

import fsfunc as ff


class Results(NamedTuple):
    """What a run has found out, fit for JSON."""

    train: list[float]  # the loss of each step, before its update
    validation: list[tuple[int, float]]  # (steps taken, loss)
    samples: list[str]  # what each rank wrote


@contextmanager
def progress_bar(
    console: Console, steps: int, tokens: int, begun: int = 0
) -> Iterator[Callable[[float], None]]:
    """Shows a bar; gives the function to call after each step, with its loss.

    Args:
        console: a quiet one shows nothing.
        steps: when the bar is full.
        tokens: how many a step takes, over all ranks.
        begun: how many steps an earlier process took.
    """
    bar = Progress(
        TextColumn("training"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TextColumn("{task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(),
        console=console,
        disable=console.quiet,
    )
    with bar:
        task = bar.add_task("", total=steps, completed=begun, loss=nan, speed=0.0)
        start = time.perf_counter()

        def advance(loss: float) -> None:
            done = bar.tasks[0].completed + 1
            speed = (done - begun) * tokens / (time.perf_counter() - start)
            bar.update(task, completed=done, loss=loss, speed=speed)

        yield advance


def held(tree: Any) -> list[int]:
    """[numbers, bytes] that this rank holds for a tree.

    Counted by storage: the leaves of a unit are views of one buffer. At zero=1 and 2 a
    rank also keeps the whole buffer that its part was gathered into.
    """
    tensors = []
    for leaf in optree.tree_leaves(tree, is_leaf=ff.is_sharded):
        if ff.is_sharded(leaf):
            tensors += [leaf.local, leaf.packed and leaf.packed.whole]
        else:
            tensors.append(leaf)
    sizes = {}
    for x in tensors:
        if isinstance(x, Tensor) and x.is_floating_point():
            storage = x.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes(), x.element_size()
    numbers = sum(size // element for size, element in sizes.values())
    return [numbers, sum(size for size, _ in sizes.values())]


def of_every_rank(
    value: Any, axis: str | tuple[str, ...], device: torch.device
) -> list:
    """Each rank's value, in the order of ranks: any that JSON can write.

    Collectives move tensors alone: it travels as text, padded to the longest.
    """
    text = json.dumps(value).encode()
    longest = int(ff.pmax(torch.tensor(len(text), device=device), axis))
    row = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8)
    rows = ff.all_gather(row[None].to(device), axis)
    return [json.loads(bytes(row)) for row in rows.tolist()]


def held_table(
    kinds: Sequence[str], ranks: Sequence[Sequence[Sequence[int]]], pipe: int
) -> Table:
    """The table of [ranks, kinds, (numbers, bytes)].

    Args:
        pipe: how many ranks share a pipeline; they hold what their stages need.
    """
    table = Table(title="what each rank holds")
    table.add_column("rank", justify="right")
    if pipe > 1:
        table.add_column("pipe", justify="right")
    for kind in kinds:
        table.add_column(kind, justify="right")
    for rank, row in enumerate(ranks):
        where = [str(rank), str(rank % pipe)] if pipe > 1 else [str(rank)]
        cells = (f"{numbers:,} ({as_bytes(size)})" for numbers, size in row)
        table.add_row(*where, *cells)
    return table


def sent_table(ranks: Sequence[Sequence[tuple[str, str, int, float]]]) -> Table:
    """What ranks 0, 1, ... sent, from the rows (op, axis, count, bytes) of ledgers."""
    table = Table(title="sent in one step")
    table.add_column("op")
    table.add_column("axis")
    for rank in range(len(ranks)):
        table.add_column(f"rank {rank}", justify="right")
    sent = [{(op, axis): (n, size) for op, axis, n, size in rows} for rows in ranks]
    for kind in dict.fromkeys(kind for rows in sent for kind in rows):
        cells = (counted(*rows.get(kind, (0, 0))) for rows in sent)
        table.add_row(*kind, *cells)
    table.add_section()
    sums = ([*zip(*rows.values(), strict=True)] or [(), ()] for rows in sent)
    table.add_row("all", "", *(counted(sum(n), sum(size)) for n, size in sums))
    return table


def counted(count: float, size: float) -> str:
    return f"{count} ({as_bytes(size)})" if count else "0"


def as_bytes(size: float) -> str:
    """The size with a unit, in powers of 1024."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:,.0f} B" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"


def plot_losses(
    path: Path, losses: Sequence[float], validation: Sequence[tuple[int, float]]
) -> None:
    """Writes a PNG of the training loss, step by step, and the validation points."""
    import matplotlib

    matplotlib.use("Agg")  # draws files, and needs no display
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, linewidth=1, label="train")
    axes.plot(*zip(*validation, strict=True), "o-", label="validation")
    axes.set_xlabel("step")
    axes.set_ylabel("cross entropy (nats a byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
