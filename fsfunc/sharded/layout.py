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
    check_placements,
    describe_placement,
    describe_tensor,
)

Coordinates = Mapping[str, int]  # of a rank, by axis
View = tuple[tuple[int, ...], tuple[int, ...], int]  # shape, strides, offset
Ranges = tuple[tuple[int, int], ...]  # (start, length) along each dim
Region = tuple[Ranges | None, int, int]  # a block, and a range of its flattening
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
        check_placements(self.shape, parts, lambda: self.subject)

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
        """Its `Owned` placements: which coordinates alone have the leaf."""
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
    def cuts(self) -> tuple[tuple[int, tuple[str, ...], int], ...]:
        """Its `Split`s by dim: (dim, axes, the number of blocks along it).

        Splits of one dim, one after the other, are one over all of their axes.

        >>> splits = Split(0, "data", 2), Split(0, "model", 2)
        >>> Layout((8, 3), torch.float32, splits).cuts
        ((0, ('data', 'model'), 4),)
        """
        axes: dict[int, tuple[str, ...]] = {}
        sizes: dict[int, int] = {}
        for split in self.splits:
            axes[split.dim] = (*axes.get(split.dim, ()), split.axis)
            sizes[split.dim] = sizes.get(split.dim, 1) * split.size
        return tuple([(dim, axes[dim], sizes[dim]) for dim in axes])

    @cached_property
    def in_units(self) -> Layout | None:
        """The layout inside the unit that gathers it; None where it is whole there."""
        if not self.splits:
            return None
        return Layout(self.shape, self.dtype, self.splits, self.name)

    @cached_property
    def unit_shape(self) -> tuple[int, ...]:
        """The shape inside the unit that gathers it: without the `Flat` placement."""
        first = dict.fromkeys(self.axes, 0)  # the first block of a split is the largest
        owner = first | {p.axis: p.coordinate for p in self.owners}
        return tuple(n for _, n in self.block(owner) or ())

    @cached_property
    def view(self) -> View:
        """Shape, strides and offset of the leaf in the gathered buffer."""
        shape, strides, stride = self.unit_shape, [], 1
        for n in reversed(shape):
            strides.append(stride)
            stride *= max(n, 1)  # as torch's strides of an empty tensor
        return shape, tuple(reversed(strides)), self.flat.offset if self.flat else 0

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
        name = repr(self.name) if self.name else ""
        return describe_tensor(self.shape, self.dtype, name)

    def key(self, coordinates: Coordinates) -> Key:
        """Returns the coordinates along `axes`, checked; other axes are ignored."""
        for axis, size in self.sizes.items():
            index = coordinates.get(axis)
            if index is None or not 0 <= index < size:
                fault = "is missing" if index is None else f"has coordinate {index}"
                raise ValueError(
                    f"cannot find the part of {self.subject} at {dict(coordinates)}: "
                    f'axis "{axis}" of size {size} {fault}; give each of '
                    f"{list(self.axes)} a coordinate from 0 to its size - 1"
                )
        return tuple([coordinates[axis] for axis in self.sizes])

    def block(self, coordinates: Coordinates) -> Ranges | None:
        """Returns (start, length) along each dim of a rank's block, before `Flat`.

        `Owned` and `Split` give the block; a `Flat` cuts its row-major flattening
        (`span`). None where the rank has none.
        """
        self.key(coordinates)
        block = [(0, n) for n in self.shape]
        for part in self.parts:
            if isinstance(part, Owned) and coordinates[part.axis] != part.coordinate:
                return None
            if isinstance(part, Split):
                start, n = block[part.dim]
                # As torch.chunk: blocks of ceil(n / size), the last short or empty.
                length = -(-n // part.size)
                skip = min(coordinates[part.axis] * length, n)
                block[part.dim] = (start + skip, min(length, n - skip))
        return tuple(block)

    def region(self, coordinates: Coordinates) -> Region:
        """Returns `block`, and (start, stop) of the rank's part in its flattening."""
        block = self.block(coordinates)
        n = 0 if block is None else math.prod([n for _, n in block])
        if self.flat is None:
            return block, 0, n
        # Where the rank's chunk of the buffer begins, counted from the leaf's offset.
        low = self.flat.index(coordinates) * self.flat.chunk - self.flat.offset
        return block, min(max(low, 0), n), min(max(low + self.flat.chunk, 0), n)

    def span(self, coordinates: Coordinates) -> tuple[int, int]:
        """Returns (start, stop) of the rank's part in the flattening of `block`."""
        return self.region(coordinates)[1:]

    def local_shape(self, coordinates: Coordinates) -> tuple[int, ...]:
        """Returns the shape of the part of the rank at these coordinates."""
        block, start, stop = self.region(coordinates)
        if self.flat is None and block is not None:
            return tuple(n for _, n in block)
        return (stop - start,)

    def check_part(self, shape: Sequence[int], coordinates: Coordinates) -> None:
        """Raises unless a part has `local_shape`, or that flattened."""
        expected = self.local_shape(coordinates)
        if tuple(shape) not in (expected, (math.prod(expected),)):
            raise ValueError(
                f"the part of {self} is {expected} on this rank, not {tuple(shape)}: "
                "ff.lay_like(whole, leaf) cuts it from a whole tensor"
            )

    def buffer_range(self, coordinates: Coordinates) -> tuple[int, int]:
        """Returns (start, stop) of the rank's part in its `chunk` of the buffer.

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
            describe_placement(part, self.shape, self.parts[:i])
            for i, part in enumerate(self.parts)
        )
        leaf = describe_tensor(self.shape, self.dtype, self.name)
        return f"{leaf} {parts or 'whole'}"

    def _repr_html_(self) -> str:  # what a notebook shows
        return f"<code>{escape(str(self))}</code>"


def every_coordinate(over: Layout | Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yields each point of a layout's axes, or of axes of given sizes, row-major.

    >>> list(every_coordinate({"node": 1, "data": 2}))
    [{'node': 0, 'data': 0}, {'node': 0, 'data': 1}]
    >>> list(every_coordinate(Layout((3,), torch.float32)))
    [{}]
    """
    sizes = over.sizes if isinstance(over, Layout) else over
    for key in product(*(range(size) for size in sizes.values())):
        yield dict(zip(sizes, key, strict=True))
