"""Layouts of tensors on a mesh: pure arithmetic, no communication.

A `Layout` is a tensor's global shape and dtype and the parts by which it is spread
over mesh axes, outermost first. What a rank holds follows from it and from the rank's
coordinates alone: shapes and ranges here, elements in `slices`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

import torch

from fsfunc.sharded.placements import (
    Flat,
    Owned,
    Placement,
    Split,
    Whole,
    check,
    describe,
    room,
    say,
)

Coordinates = Mapping[str, int]
View = tuple[tuple[int, ...], tuple[int, ...], int]
Region = tuple[tuple[tuple[int, int], ...] | None, int, int]
Key = tuple[int, ...]  # the coordinates over `layout.axes`, in that order, unnamed


@dataclass(frozen=True)
class Layout:
    """A tensor's global shape and dtype and how it lies on a mesh.

    Args:
        shape: the global shape.
        dtype: the dtype of the elements.
        parts: how it is spread, outermost first; a `Flat` comes last, and an axis
            appears once. `()` is replicated.
        name: the leaf's path, for messages; it takes no part in `==` and `hash`.
        order: the buffers that each unit call of the program wants for which it was
            laid out, call by call: what to gather ahead by. No part of these either.
        compute: the dtype in which that program wants it, if not its own; nor this.

    Raises:
        ValueError: a part that does not suit the shape; names leaf, axis and way out.

    >>> flat = Flat(("data",), 4, "blocks/3", offset=0, chunk=20)
    >>> layout = Layout((10, 7), torch.float32, (flat,), "blocks/3/w")
    >>> print(layout)
    blocks/3/w f32[10, 7] flat over data=4 at 0:70 of 4x20
    >>> [layout.local_shape({"data": i}) for i in range(4)]
    [(20,), (20,), (20,), (10,)]
    >>> grid = Layout((10, 7), torch.float32, (Owned("pipe", 2, 1), Split(0, "m", 4)))
    >>> grid.local_shape({"pipe": 1, "m": 3}), grid.local_shape({"pipe": 0, "m": 3})
    ((1, 7), (0,))
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Placement, ...] = ()
    name: str = field(default="", compare=False)
    order: Sequence[tuple[str, ...]] = field(default=(), compare=False, repr=False)
    compute: torch.dtype | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        parts = tuple(part for part in self.parts if not isinstance(part, Whole))
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        object.__setattr__(self, "parts", parts)
        check(self.shape, parts, self.subject)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.numel * self.dtype.itemsize

    @cached_property
    def flat(self) -> Flat | None:
        """The last part, where that is a `Flat`."""
        last = self.parts[-1] if self.parts else None
        return last if isinstance(last, Flat) else None

    @cached_property
    def owned(self) -> tuple[Owned, ...]:
        """Its parts that leave it whole on one coordinate of an axis."""
        return tuple(p for p in self.parts if isinstance(p, Owned))

    @cached_property
    def splits(self) -> tuple[Split, ...]:
        """Its parts that cut it along a dim."""
        return tuple(p for p in self.parts if isinstance(p, Split))

    @cached_property
    def split_axes(self) -> tuple[str, ...]:
        """The axes along which ranks have other blocks of it."""
        return tuple(split.axis for split in self.splits)

    @cached_property
    def in_units(self) -> Layout | None:
        """The layout in a unit that has gathered it; None where it is whole there."""
        if not self.splits:
            return None
        return Layout(self.shape, self.dtype, self.splits, self.name)

    @cached_property
    def unit_shape(self) -> tuple[int, ...]:
        """The shape that a unit sees: what the parts before a flat one leave."""
        at = dict.fromkeys(self.axes, 0) | {p.axis: p.coordinate for p in self.owned}
        return tuple(n for _, n in self.block(at) or ())

    @cached_property
    def view(self) -> View:
        """Shape, strides and offset in the whole buffer, as a unit sees it."""
        shape, steps, step = self.unit_shape, [], 1
        for n in reversed(shape):
            steps.append(step)
            step *= max(n, 1)
        return shape, tuple(reversed(steps)), self.flat.offset if self.flat else 0

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The size of each axis it is spread over, outermost first."""
        return {axis: n for part in self.parts for axis, n in part.spread}

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes it is spread over, outermost first."""
        return tuple(self.sizes)

    @property
    def subject(self) -> str:
        """The leaf as error messages name it: `'blocks/3/w' f32[10, 7]`."""
        return describe(self.shape, self.dtype, repr(self.name) if self.name else "")

    def key(self, coordinates: Coordinates) -> Key:
        """The coordinates over `axes`, checked; those of other axes are ignored."""
        for axis, size in self.sizes.items():
            at = coordinates.get(axis)
            if at is None or not 0 <= at < size:
                found = "is missing" if at is None else f"has coordinate {at}"
                raise ValueError(
                    f"cannot find the part of {self.subject} at {dict(coordinates)}: "
                    f'axis "{axis}" of size {size} {found}; give each of '
                    f"{list(self.axes)} a coordinate from 0 to its size - 1"
                )
        return tuple(coordinates[axis] for axis in self.axes)

    def block(self, coordinates: Coordinates) -> tuple[tuple[int, int], ...] | None:
        """(start, length) along each dim of what `Owned` and `Split` leave here.

        A `Flat` cuts the row-major flattening of this block (`span`). None where the
        tensor is absent.
        """
        self.key(coordinates)
        box = [(0, n) for n in self.shape]
        for part in self.parts:
            if isinstance(part, Owned) and coordinates[part.axis] != part.coordinate:
                return None
            if isinstance(part, Split):
                start, n = box[part.dim]
                step = -(-n // part.size)
                skip = min(coordinates[part.axis] * step, n)
                box[part.dim] = (start + skip, min(step, n - skip))
        return tuple(box)

    def region(self, coordinates: Coordinates) -> Region:
        """`block`, and the (start, stop) of the local part in its flattening."""
        box = self.block(coordinates)
        n = 0 if box is None else math.prod(n for _, n in box)
        if self.flat is None:
            return box, 0, n
        low = self.flat.index(coordinates) * self.flat.chunk - self.flat.offset
        return box, min(max(low, 0), n), min(max(low + self.flat.chunk, 0), n)

    def span(self, coordinates: Coordinates) -> tuple[int, int]:
        """(start, stop) of the local part in the row-major flattening of `block`."""
        return self.region(coordinates)[1:]

    def local_shape(self, coordinates: Coordinates) -> tuple[int, ...]:
        """The shape of the part that the rank at these coordinates holds."""
        box, start, stop = self.region(coordinates)
        if self.flat is None and box is not None:
            return tuple(n for _, n in box)
        return (stop - start,)

    def check_part(self, shape: Sequence[int], coordinates: Coordinates) -> None:
        """Raises where a part is neither of `local_shape` nor a row of its elements."""
        due = self.local_shape(coordinates)
        if tuple(shape) not in (due, (math.prod(due),)):
            raise ValueError(
                f"the part of {self} is {due} on this rank, not {tuple(shape)}: "
                "ff.lay_like(whole, leaf) cuts it from a whole tensor"
            )

    def buffer_range(self, coordinates: Coordinates) -> tuple[int, int]:
        """(start, stop) of the local part in this rank's `chunk` of the buffer.

        >>> flat = Flat(("data",), 2, "u", offset=6, chunk=8)
        >>> layout = Layout((5,), torch.float32, (flat,))
        >>> [layout.buffer_range({"data": i}) for i in range(2)]
        [(6, 8), (0, 3)]
        """
        if self.flat is None:
            raise ValueError(f"{self} lies in no buffer: its last part is not Flat")
        start, stop = self.span(coordinates)
        low = self.flat.index(coordinates) * self.flat.chunk
        first = min(max(self.flat.offset + start - low, 0), self.flat.chunk)
        return first, first + stop - start

    def __str__(self) -> str:
        parts = ", ".join(
            say(part, self.shape, self.parts[:i]) for i, part in enumerate(self.parts)
        )
        return f"{describe(self.shape, self.dtype, self.name)} {parts or 'whole'}"


def pack_flat(
    shapes: Sequence[Sequence[int]],
    dtype: torch.dtype,
    names: Sequence[str],
    axes: Sequence[str],
    size: int | Sequence[int],
    buffer: str,
    *,
    outer: Sequence[Sequence[Placement]] | None = None,
) -> tuple[Layout, ...]:
    """The layouts of leaves that lie one after another in one flat buffer.

    chunk = ceil(total / size); all padding is at the buffer's end.

    Args:
        shapes: the leaves' global shapes.
        dtype: that of all of them.
        names: their paths.
        axes: the axes over which the buffer is cut, the major one first.
        size: the number of ranks; with several axes, the size of each.
        buffer: the name that tells this buffer from others.
        outer: for each leaf the parts that come before its `Flat`, if any. A leaf then
            takes the room of its largest block, the same on every rank.

    >>> shapes = [(3,), (), (5,)]
    >>> for layout in pack_flat(shapes, torch.float32, "abc", ["data"], 4, "u"):
    ...     print(layout)
    a f32[3] flat over data=4 at 0:3 of 4x3
    b f32[] flat over data=4 at 3:4 of 4x3
    c f32[5] flat over data=4 at 4:9 of 4x3
    """
    sizes = (size,) if isinstance(size, int) else tuple(size)
    before = [()] * len(shapes) if outer is None else [tuple(parts) for parts in outer]
    blocks = [
        Layout(tuple(shape), dtype, parts, name)
        for shape, parts, name in zip(shapes, before, names, strict=True)
    ]
    offsets = [0]
    for block in blocks:
        offsets.append(offsets[-1] + room(block.shape, block.parts))
    chunk = -(-offsets[-1] // math.prod(sizes)) if math.prod(sizes) else 0
    flats = [
        Flat(tuple(axes), math.prod(sizes), buffer, offset, chunk, sizes)
        for offset in offsets[:-1]
    ]
    return tuple(
        Layout(block.shape, block.dtype, (*block.parts, flat), block.name)
        for block, flat in zip(blocks, flats, strict=True)
    )


def every_coordinate(over: Layout | Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Each point of a layout's axes, or of the axes of the sizes given, row-major.

    >>> list(every_coordinate({"node": 1, "data": 2}))
    [{'node': 0, 'data': 0}, {'node': 0, 'data': 1}]
    >>> list(every_coordinate(Layout((3,), torch.float32)))
    [{}]
    """
    sizes = over.sizes if isinstance(over, Layout) else over
    for key in product(*(range(size) for size in sizes.values())):
        yield dict(zip(sizes, key, strict=True))


# Rank-local values are no tensor that is one value along their axes, but their stack is
# one, `[n, *shape]`, split along dim 0: it is saved and loaded as any other.


def rows_over(sizes: Mapping[str, int]) -> tuple[Split, ...]:
    """The parts by which ranks along these axes hold a row each of a stack."""
    return tuple(Split(0, axis, size) for axis, size in sizes.items())


def stacked(layout: Layout, sizes: Mapping[str, int]) -> Layout:
    """The layout of the stack of what ranks along axes hold, each as ``layout`` says.

    Args:
        sizes: of the axes, the first varying slowest; the leaf lies over others.

    >>> print(stacked(Layout((3,), torch.float32, name="h"), {"data": 2}))
    h f32[2, 3] split over data=2 along dim 0
    """
    parts = (*rows_over(sizes), *_moved(layout.parts, 1))
    return replace(
        layout, shape=(math.prod(sizes.values()), *layout.shape), parts=parts
    )


def unstacked(layout: Layout, sizes: Mapping[str, int]) -> Layout:
    """The layout of one row: `stacked` is the inverse."""
    parts = _moved(layout.parts[len(sizes) :], -1)
    return replace(layout, shape=layout.shape[1:], parts=parts)


def _moved(parts: Sequence[Placement], by: int) -> tuple[Placement, ...]:
    """Parts of a tensor that has one dim more, or less, in front."""
    return tuple(
        replace(p, dim=p.dim + by) if isinstance(p, Split) else p for p in parts
    )
