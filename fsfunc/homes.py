"""Finding a home for leaves that have none: packing them into a flat buffer again.

A user's ``tree_map`` update gives every leaf a tensor of its own. On the way into and
out of a sharded call, leaves of one buffer are put side by side once more.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.layout import Layout
from fsfunc.placements import room
from fsfunc.sharded import Home, Sharded, complete_homes, is_sharded

__all__ = [
    "by_buffer",
    "chunk_here",
    "home_of",
    "in_a_row",
    "joined",
    "pack",
    "settle",
    "side_by_side",
]


def settle(t: Any, coordinates: Mapping[str, int]) -> Any:
    """``t`` with every flat leaf in a home: leaves that have none are packed.

    A leaf that somebody differentiates stays as it is.

    Cost: one copy of the leaves that had lost their home, which is what a user's own
    elementwise update costs.
    """
    leaves, treedef = tree.flatten(t, is_leaf=is_sharded)
    settled = {i for positions, _ in complete_homes(leaves).values() for i in positions}
    loose = [i for i, x in enumerate(leaves) if i not in settled and _can_settle(x)]
    if not loose:
        return t
    for positions in side_by_side(leaves, loose):
        home = pack([leaves[i] for i in positions], coordinates)
        for i, leaf in zip(positions, home.leaves(), strict=True):
            leaves[i] = leaf
    return tree.unflatten(treedef, leaves)


def _can_settle(leaf: Any) -> bool:
    """Whether a leaf may be copied: neither differentiated nor mapped by anybody."""
    if not isinstance(leaf, Sharded) or leaf.layout.flat is None:
        return False
    local = leaf.local
    plain = not (local.requires_grad or _torch.is_wrapped(local))
    return plain and local.ndim == 1  # vmap adds dims that the layout does not know


def side_by_side(leaves: Sequence[Any], positions: Sequence[int]) -> list[list[int]]:
    """``positions`` cut into leaves that lie in one buffer, in buffer order.

    A tree may hold a buffer's leaves several times (moments beside parameters), or
    those of two buffers of one name: leaves that would overlap go apart.
    """
    found: list[list[int]] = []
    open_: dict[Any, tuple[list[int], list[tuple[int, int]], set[Any]]] = {}
    for i in positions:
        layout = leaves[i].layout
        flat = layout.flat
        dtype, owned = leaves[i].local.dtype, layout.owned
        key = flat.buffer, flat.axes, flat.size, flat.chunk, dtype, owned
        span, which = _span(layout), (layout.name, flat.offset)
        run = open_.get(key)
        if run is None or which in run[2] or _overlaps(span, run[1]):
            run = open_[key] = ([], [], set())
            found.append(run[0])
        run[0].append(i)
        run[2].add(which)
        if span[1] > span[0]:
            insort(run[1], span)
    offset = lambda i: leaves[i].layout.flat.offset  # noqa: E731
    return [sorted(positions, key=offset) for positions in found]


def _span(layout: Layout) -> tuple[int, int]:
    """(start, stop) of the whole leaf in its buffer."""
    start = layout.flat.offset if layout.flat else 0
    return start, start + room(layout.shape, layout.parts[:-1])


def _overlaps(span: tuple[int, int], others: list[tuple[int, int]]) -> bool:
    if span[0] == span[1]:
        return False
    at = bisect(others, span)
    before, after = others[at - 1 : at], others[at : at + 1]
    return any(stop > span[0] for _, stop in before) or any(
        start < span[1] for start, _ in after
    )


def pack(leaves: Sequence[Sharded], coordinates: Mapping[str, int]) -> Home:
    """A home for leaves of one buffer; what is missing of the buffer is zero."""
    members = tuple(leaf.layout for leaf in leaves)
    first = members[0].flat
    if first is None:
        raise ValueError(f"{members[0]} lies in no buffer")
    own = {a: coordinates[a] for a in members[0].axes}
    flat = leaves[0].local.new_zeros(chunk_here(members[0], own))
    home = Home(members, flat, own)
    with torch.no_grad():
        for target, leaf in zip(home.leaves(), leaves, strict=True):
            target.local.copy_(leaf.local)
    return home


def by_buffer(leaves: Sequence[Any], mine: Sequence[int]) -> list[list[int]]:
    """Positions of the leaves that are gathered together, in buffer order."""
    homes: dict[int, list[int]] = {}
    loose = []
    for i in mine:
        leaves[i].check()
        home = leaves[i].home
        (loose if home is None else homes.setdefault(id(home), [])).append(i)
    found = [
        sorted(p, key=lambda i: leaves[i].layout.flat.offset) for p in homes.values()
    ]
    return [*found, *side_by_side(leaves, loose)] if loose else found


def home_of(
    chosen: Sequence[Sharded], coordinates: Mapping[str, int]
) -> tuple[Home, Tensor]:
    """The home of leaves that go together, and the flat tensor to differentiate."""
    home = chosen[0].home
    if home is not None:
        return home, home.flat
    home = pack(chosen, coordinates)
    if not (torch.is_grad_enabled() and any(x.local.requires_grad for x in chosen)):
        return home, home.flat
    return home, joined(chosen, coordinates)


def joined(chosen: Sequence[Sharded], coordinates: Mapping[str, int]) -> Tensor:
    """A rank's range of the buffer, made of its leaves, differentiable in each."""
    pieces: list[Tensor] = []
    end = 0
    for x in chosen:
        start, stop = x.layout.buffer_range(coordinates)
        if stop > start:
            pieces.append(x.local.new_zeros(start - end))
            end = stop
        pieces.append(x.local)  # an empty part too: it has a gradient, an empty one
    chunk = chunk_here(chosen[0].layout, coordinates)
    return in_a_row([*pieces, chosen[0].local.new_zeros(chunk - end)])


def in_a_row(pieces: Sequence[Tensor]) -> Tensor:
    """1-D tensors as one, of which the empty ones, too, keep their history.

    ``torch.cat`` gives a tensor of shape [0] a gradient that comes from nowhere: a
    derivative of it would end on the ranks whose parts are empty, and go on elsewhere.
    """
    return torch.cat([x.unsqueeze(1) for x in pieces]).squeeze(1)


def chunk_here(layout: Layout, coordinates: Mapping[str, int]) -> int:
    """Elements that a rank holds of a leaf's buffer: none, where others own it."""
    absent = layout.flat is None or layout.block(coordinates) is None
    return 0 if absent else layout.flat.chunk  # type: ignore[union-attr]
