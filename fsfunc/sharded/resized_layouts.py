"""Layouts on a mesh whose axes have other sizes, derived from the old ones.

`state.remeshing` asks for them as ranks come and go: no step says where leaves are to
lie then, and none need, as nothing changes but sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fsfunc.sharded.layout import Layout
from fsfunc.sharded.placements import Flat, Owned, Placement, Split, largest_block

_Buffer = tuple[str, tuple[str, ...], int, tuple[Owned, ...]]  # see `Relaid`


class Relaid:
    """How leaves lie that lay on a mesh, on one whose axes have other sizes.

    Leaves of one buffer stay in one buffer, in the same order; it is cut into other
    chunks. Blocks of a split become larger or smaller.

    Args:
        layouts: those of all leaves of a state.
        axes: the sizes of the new mesh's axes.
    """

    def __init__(self, layouts: Iterable[Layout], axes: Mapping[str, int]):
        self.axes = axes
        # By buffer, the layouts of its leaves by their old offset. A copy of some of
        # them (moments) lies at the same offsets: so all leaves say what is there.
        members: dict[_Buffer, dict[tuple[int, int], Layout]] = {}
        for layout in layouts:
            if layout.flat is not None:
                by_offset = members.setdefault(_buffer_of(layout), {})
                by_offset[layout.flat.offset, _room(layout, layout.parts)] = layout
        self._offsets: dict[_Buffer, dict[int, int]] = {}
        self._sizes: dict[_Buffer, int] = {}
        for buffer, by_offset in members.items():
            self._lay(buffer, [by_offset[key] for key in sorted(by_offset)])

    def _lay(self, buffer: _Buffer, layouts: Sequence[Layout]) -> None:
        """Lays the leaves of one buffer after each other, in their order."""
        offsets = self._offsets.setdefault(buffer, {})
        end, old_end, size = 0, 0, 0
        for layout in layouts:
            flat: Any = layout.flat
            room, old_room = (
                _room(layout, self._outer(layout)),
                _room(layout, layout.parts),
            )
            # Two models of one state may have buffers of one name. Where no block grows
            # all offsets stay, so that it does not matter.
            if flat.offset < old_end and room != old_room:
                raise ValueError(
                    f"remesh: {layout} is in a buffer of a name that two have, and its "
                    "blocks change: give the units of one model another name"
                )
            end += flat.offset - old_end  # room that other leaves take elsewhere
            offsets[flat.offset] = end
            end += room
            old_end = flat.offset + old_room
            size = max(size, end)
        self._sizes[buffer] = size

    def _outer(self, layout: Layout) -> tuple[Placement, ...]:
        """Returns the new placements of a leaf, but for its `Flat`."""
        outer: list[Placement] = []
        for part in layout.parts:
            if isinstance(part, Flat):
                continue
            (axis, size), *_ = part.axis_sizes
            new_size = self._size(axis, layout)
            if isinstance(part, Split):
                if layout.shape[part.dim] % new_size:
                    raise ValueError(
                        f"remesh: {layout} cannot be split over {new_size} ranks of "
                        f'"{axis}" along dim {part.dim}: {layout.shape[part.dim]} is '
                        "not a multiple of it"
                    )
                part = replace(part, size=new_size)
            elif isinstance(part, Owned) and new_size != size:
                raise ValueError(
                    f'remesh: {layout} has its owners along "{axis}", which would '
                    f"become {new_size} of {size}: the step says which stage, or which "
                    "rank, has a leaf. On as many ranks ff.place(step, state, batch) "
                    "moves it; else go by a checkpoint"
                )
            outer.append(part)
        return tuple(outer)

    def _size(self, axis: str, layout: Layout) -> int:
        if axis not in self.axes:
            raise ValueError(
                f'remesh: {layout} lies along "{axis}", an axis that the new mesh '
                f"{dict(self.axes)} has not: the axes stay, and their sizes change"
            )
        return self.axes[axis]

    def layout(self, old: Layout) -> Layout:
        """Returns the new layout of a leaf.

        Raises:
            ValueError: an axis that is not there, or that does not divide a dim.
        """
        parts, flat = self._outer(old), old.flat
        if flat is not None:
            sizes = tuple(self._size(axis, old) for axis in flat.axes)
            size = math.prod(sizes)
            buffer = _buffer_of(old)
            chunk = -(-self._sizes[buffer] // size)
            offset = self._offsets[buffer][flat.offset]
            new_flat = Flat(flat.axes, size, flat.buffer, offset, chunk, sizes)
            parts = (*parts, new_flat)
        return replace(old, parts=parts)


def _buffer_of(layout: Layout) -> _Buffer:
    """Returns what leaves of one buffer, and copies of them, have in common."""
    flat: Any = layout.flat
    return flat.buffer, flat.axes, flat.chunk, layout.owners


def _room(layout: Layout, parts: Sequence[Placement]) -> int:
    """Returns the number of elements that a leaf takes in its buffer."""
    return largest_block(layout.shape, [p for p in parts if not isinstance(p, Flat)])
