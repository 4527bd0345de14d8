"""Layouts of tensors on a mesh: pure arithmetic, no communication.

A `Layout` is a tensor's global shape and dtype and its placements over mesh axes,
outermost first. With a rank's coordinates it gives the shape and range of the rank's
part; `slices` has the elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
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
    say,
)

Coordinates = Mapping[str, int]
View = tuple[tuple[int, ...], tuple[int, ...], int]
Region = tuple[tuple[tuple[int, int], ...] | None, int, int]
Key = tuple[int, ...]  # the coordinates over `layout.axes`, in that order, unnamed


@dataclass(frozen=True)
class Layout:
    """A tensor's global shape and dtype, and its placements on a mesh.

    Args:
        shape: the global shape.
        dtype: the dtype of the elements.
        parts: the placements, outermost first; a `Flat` comes last, and an axis
            appears once. `()` is replicated.
        name: the leaf's path, for messages.
        order: for each unit call of the program, the buffers that it gathers: the
            order of prefetching.
        compute: the dtype in which the program gathers it, if not its own.

    ``name``, ``order`` and ``compute`` take no part in ``==`` and ``hash``.

    Raises:
        ValueError: a part that does not fit the shape; names leaf, axis and way out.

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
        parts = tuple([part for part in self.parts if not isinstance(part, Whole)])
        object.__setattr__(self, "shape", tuple(map(int, self.shape)))
        object.__setattr__(self, "parts", parts)
        check(self.shape, parts, lambda: self.subject)

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
        """Its `Flat` placement, if it lies in a packed buffer."""
        last = self.parts[-1] if self.parts else None
        return last if isinstance(last, Flat) else None

    @cached_property
    def owners(self) -> tuple[Owned, ...]:
        """Its `Owned` placements."""
        return tuple(p for p in self.parts if isinstance(p, Owned))

    @cached_property
    def splits(self) -> tuple[Split, ...]:
        """Its `Split` placements."""
        return tuple(p for p in self.parts if isinstance(p, Split))

    @cached_property
    def split_axes(self) -> tuple[str, ...]:
        """The axes of its `Split` placements."""
        return tuple(split.axis for split in self.splits)

    @cached_property
    def in_units(self) -> Layout | None:
        """The layout inside the unit that gathers it; None where it is whole there."""
        if not self.splits:
            return None
        return Layout(self.shape, self.dtype, self.splits, self.name)

    @cached_property
    def unit_shape(self) -> tuple[int, ...]:
        """The shape inside the unit that gathers it: without the `Flat` placement."""
        at = dict.fromkeys(self.axes, 0) | {p.axis: p.coordinate for p in self.owners}
        return tuple(n for _, n in self.block(at) or ())

    @cached_property
    def view(self) -> View:
        """Shape, strides and offset of the leaf in the gathered buffer."""
        shape, steps, step = self.unit_shape, [], 1
        for n in reversed(shape):
            steps.append(step)
            step *= max(n, 1)
        return shape, tuple(reversed(steps)), self.flat.offset if self.flat else 0

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The size of each axis of its placements, outermost first."""
        return {axis: n for part in self.parts for axis, n in part.axis_sizes}

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes of its placements, outermost first."""
        return tuple(self.sizes)

    @property
    def subject(self) -> str:
        """The leaf as error messages name it: `'blocks/3/w' f32[10, 7]`."""
        return describe(self.shape, self.dtype, repr(self.name) if self.name else "")

    def key(self, coordinates: Coordinates) -> Key:
        """The coordinates along `axes`, checked; other axes are ignored."""
        for axis, size in self.sizes.items():
            at = coordinates.get(axis)
            if at is None or not 0 <= at < size:
                found = "is missing" if at is None else f"has coordinate {at}"
                raise ValueError(
                    f"cannot find the part of {self.subject} at {dict(coordinates)}: "
                    f'axis "{axis}" of size {size} {found}; give each of '
                    f"{list(self.axes)} a coordinate from 0 to its size - 1"
                )
        return tuple([coordinates[axis] for axis in self.sizes])

    def block(self, coordinates: Coordinates) -> tuple[tuple[int, int], ...] | None:
        """(start, length) along each dim of the block that a rank has, before `Flat`.

        `Owned` and `Split` give the block; a `Flat` cuts its row-major flattening
        (`span`). None where the rank has none.
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
        """`block`, and (start, stop) of the rank's part in its flattening."""
        box = self.block(coordinates)
        n = 0 if box is None else math.prod([n for _, n in box])
        if self.flat is None:
            return box, 0, n
        low = self.flat.index(coordinates) * self.flat.chunk - self.flat.offset
        return box, min(max(low, 0), n), min(max(low + self.flat.chunk, 0), n)

    def span(self, coordinates: Coordinates) -> tuple[int, int]:
        """(start, stop) of the rank's part in the row-major flattening of `block`."""
        return self.region(coordinates)[1:]

    def local_shape(self, coordinates: Coordinates) -> tuple[int, ...]:
        """The shape of the part of the rank at these coordinates."""
        box, start, stop = self.region(coordinates)
        if self.flat is None and box is not None:
            return tuple(n for _, n in box)
        return (stop - start,)

    def check_part(self, shape: Sequence[int], coordinates: Coordinates) -> None:
        """Raises unless a part has `local_shape`, or that flattened."""
        due = self.local_shape(coordinates)
        if tuple(shape) not in (due, (math.prod(due),)):
            raise ValueError(
                f"the part of {self} is {due} on this rank, not {tuple(shape)}: "
                "ff.lay_like(whole, leaf) cuts it from a whole tensor"
            )

    def buffer_range(self, coordinates: Coordinates) -> tuple[int, int]:
        """(start, stop) of the rank's part in its `chunk` of the buffer.

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

    def _repr_html_(self) -> str:  # what a notebook shows
        return f"<code>{escape(str(self))}</code>"


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
