"""Where a leaf lies, in words, and what of it a rank holds."""

from __future__ import annotations

import math

from fsfunc.layout import Coordinates, Layout
from fsfunc.placements import Flat, Owned, Split

__all__ = ["in_words", "part_in_words"]


def in_words(layout: Layout, owner: bool = True) -> str:
    """How a leaf is spread, without the numbers that only its buffer cares for.

    Args:
        owner: whether to say which coordinate owns it, of those that one owns.

    >>> import torch
    >>> flat = Flat(("data",), 4, "blocks/3", offset=0, chunk=20)
    >>> print(in_words(Layout((10, 7), torch.float32, (Owned("pipe", 2, 1), flat))))
    owned over pipe=2 by 1, flat over data=4
    >>> print(in_words(Layout((10, 7), torch.float32)))
    whole
    """
    said = []
    for part in layout.parts:
        over = ",".join(f"{axis}={size}" for axis, size in part.spread)
        match part:
            case Flat():
                said.append(f"flat over {over}" if over else "whole")
            case Split(dim=dim):
                said.append(f"split over {over} along dim {dim}")
            case Owned(coordinate=coordinate):
                by = f" by {coordinate}" if owner else ""
                said.append(f"owned over {over}{by}")
    return ", ".join(said) or "whole"


def part_in_words(layout: Layout, coordinates: Coordinates) -> str:
    """What a rank holds, as one would index it.

    ``[2:4, :]`` is a block; ``.flat[5:9]`` a range of the whole, flattened row-major;
    ``[2:4, :].flat[5:9]`` such a range of a block.

    >>> import torch
    >>> flat = Flat(("data",), 4, "blocks/3", offset=0, chunk=20)
    >>> grid = Layout((10, 7), torch.float32, (Split("model", 2, 1), flat))
    >>> part_in_words(grid, {"model": 1, "data": 1})
    '[:, 4:7].flat[20:30]'
    >>> part_in_words(grid, {"model": 1, "data": 2})
    'nothing'
    >>> part_in_words(Layout((10, 7), torch.float32), {})
    'all'
    """
    box = layout.block(coordinates)
    if box is None:
        return "nothing"
    sizes = [n for _, n in box]
    start, stop = layout.span(coordinates)
    whole = math.prod(sizes)
    if start == stop:
        return "nothing"
    cut = sizes != list(layout.shape)
    dims = ", ".join(
        ":" if n == full else f"{low}:{low + n}"
        for (low, n), full in zip(box, layout.shape, strict=True)
    )
    block = f"[{dims}]" if cut else ""
    ranges = f".flat[{start}:{stop}]" if (start, stop) != (0, whole) else ""
    return f"{block}{ranges}" or "all"
