"""A layout in words; the leaves of a state as tables, for notebooks.

``show.sharding``, the forms of states in notebooks and many messages are made of these.
Shapes, dtypes and layouts say it all: nothing is sent, and no value is read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from reprlib import repr as short
from typing import NamedTuple

from torch import Tensor

from fsfunc import tree
from fsfunc.printing.folding import group_alike, name_group
from fsfunc.printing.tables import Report, Table, of_bytes
from fsfunc.sharded.layout import Layout
from fsfunc.sharded.leaf import PendingGradient, Sharded, is_sharded
from fsfunc.sharded.placements import Flat, Owned, Split, describe_tensor
from fsfunc.sharded.spent import why_unusable
from fsfunc.tree.types import Leaf, PyTree

_MOST_ROWS, _MOST_RANKS = 200, 8  # of a table


def in_words(layout: Layout, owner: bool = True) -> str:
    """Returns a layout in words, without the numbers that only its buffer needs.

    Args:
        owner: whether to name the coordinate that has an owned leaf.

    >>> import torch
    >>> flat = Flat(("data",), 4, "blocks/3", offset=0, chunk=20)
    >>> print(in_words(Layout((10, 7), torch.float32, (Owned("pipe", 2, 1), flat))))
    owned over pipe=2 by 1, flat over data=4
    >>> print(in_words(Layout((10, 7), torch.float32)))
    whole
    """
    phrases = []
    for part in layout.parts:
        over = ",".join(f"{axis}={size}" for axis, size in part.axis_sizes)
        match part:
            case Flat():  # a buffer that is cut over no axes, at zero=0, is whole
                phrases.append(f"flat over {over}" if over else "whole")
            case Split(dim=dim):
                phrases.append(f"split over {over} along dim {dim}")
            case Owned(coordinate=coordinate):
                by = f" by {coordinate}" if owner else ""
                phrases.append(f"owned over {over}{by}")
    return ", ".join(phrases) or "whole"


class LeafRow(NamedTuple):
    """What a rank has of a leaf, as the row of a table.

    Args:
        whole: dtype and shape of the whole leaf.
        layout: its layout.
        part: the shape of the rank's part, or ``all``; or why there is none.
        bytes: those of the part; None of what is no tensor.
    """

    whole: str
    layout: str
    part: str
    bytes: int | None


def part_of(leaf: Leaf) -> LeafRow:
    """Returns what this rank has of a leaf.

    >>> import torch
    >>> part_of(torch.ones(3))
    LeafRow(whole='f32[3]', layout='whole', part='all', bytes=12)
    """
    if isinstance(leaf, Sharded):
        whole, layout = leaf.layout, in_words(leaf.layout)
        columns = describe_tensor(whole.shape, whole.dtype), layout
        # Not `leaf.local`, which would make the part.
        source = leaf._part if leaf._range is None else leaf._range[0]
        if leaf.why_unusable or not isinstance(source, Tensor):
            given_away = leaf.why_unusable and not isinstance(leaf, PendingGradient)
            return LeafRow(*columns, "given away" if given_away else "not yet", None)
        n = math.prod(shape := leaf.part_shape)
        part = "all" if n == whole.numel else f"[{', '.join(map(str, shape))}]"
        return LeafRow(*columns, part, n * source.dtype.itemsize)
    if isinstance(leaf, Tensor):
        if why_unusable(leaf):
            return LeafRow("", "", "given away", None)
        size = leaf.numel() * leaf.element_size()
        return LeafRow(describe_tensor(leaf.shape, leaf.dtype), "whole", "all", size)
    is_number = isinstance(leaf, bool | int | float | str)
    return LeafRow(type(leaf).__name__, "", short(leaf) if is_number else "", None)


def state_table(value: PyTree, subject: str) -> Report:
    """Returns a table with a row for each leaf; equal layers share one.

    >>> import torch
    >>> print(state_table([torch.ones(2), torch.ones(2)], "two weights"))
    two weights
    path    whole   layout  part  bytes each
    0-1 ×2  f32[2]  whole   all          8 B
    <BLANKLINE>
    16 B in 2 leaves
    """
    paths, parts = _parts(value)
    rows = [
        (name_group(names), *row[:3], "" if row.bytes is None else of_bytes(row.bytes))
        for names, (row, *_) in group_alike(zip(paths, parts, parts, strict=True))
    ]
    head = ("<path", "<whole", "<layout", "<part", ">bytes each")
    total = of_bytes(sum(part.bytes or 0 for part in parts))
    table = Table("", head, rows, most=_MOST_ROWS)
    return Report((subject, table, "", f"{total} in {len(parts)} leaves"))


def ranks_table(values: Sequence[PyTree], ranks: Sequence[str]) -> Report | None:
    """Returns the bytes that each rank has of each leaf, as a table.

    None where no leaf is sharded, or the ranks' leaves are not the same.

    Args:
        values: a tree of each rank.
        ranks: their names.
    """
    if not values or not any(map(is_sharded, _leaves(values[0])[1])):
        return None
    shown = ranks[:_MOST_RANKS]
    (paths, first), *others = [_parts(value) for value in values[: len(shown)]]
    if any(other_paths != paths for other_paths, _ in others):
        return None
    by_rank = [first, *(parts for _, parts in others)]
    leaves = list(zip(*by_rank, strict=True))
    cells = [(p[0].whole, p[0].layout, *map(_size, p)) for p in leaves]
    groups = group_alike(zip(paths, cells, cells, strict=True))
    rows = [(name_group(names), *row) for names, (row, *_) in groups]
    sums = (of_bytes(sum(p.bytes or 0 for p in parts)) for parts in by_rank)
    total = ("all leaves", "", "", *sums)
    hidden_rows, hidden_ranks = max(len(rows) - _MOST_ROWS, 0), len(ranks) - len(shown)
    rows = [*rows[:_MOST_ROWS], total]
    head = ("<path", "<whole", "<layout", *(f">{rank}" for rank in shown))
    table = Table("", head, rows, most=len(rows), hidden=hidden_rows)
    footer = (f"and {hidden_ranks} ranks more",) if hidden_ranks else ()
    return Report(("each rank's part of a leaf", table, *footer))


def _leaves(value: PyTree) -> tuple[list[str], list[Leaf]]:
    """Returns paths and leaves."""
    # A tensor that was given away would refuse to be flattened: it is a leaf.
    return tree.flatten_with_paths(
        value, is_leaf=lambda x: is_sharded(x) or isinstance(x, Tensor)
    )[:2]


def _parts(value: PyTree) -> tuple[list[str], list[LeafRow]]:
    paths, leaves = _leaves(value)
    return paths, [part_of(leaf) for leaf in leaves]


def _size(row: LeafRow) -> str:
    return row.part if row.bytes is None else of_bytes(row.bytes)
