"""Placements over mesh axes: `Flat`, `Split`, `OfRank`, `Owned`, `Own`, `Whole`.

They are data, as DTensor's placements are: a sequence of them, outermost first, makes
a `layout.Layout`. Here are the classes, their checks, and their text in messages.

=======  ==============================================  ====================
`Flat`   a range of a packed buffer, cut evenly          parameters of units
`Split`  a block along one dim                           tensor parallelism
`OfRank` a row of each rank, of what its buffer holds    codes, residuals
`Owned`  the whole on one rank, nothing on others        stages of a pipeline
`Own`    a value of each rank's own, no global tensor    statistics, caches
`Whole`  replicated                                      a step's count
=======  ==============================================  ====================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Flat:
    """A range of a packed buffer that several leaves share, cut evenly over ranks.

    The tensor (or the block that earlier placements left), flattened row-major, lies at
    `[offset, offset + numel)` of a buffer of `size * chunk` elements. The rank with
    index i over `axes` (the first axis is the major one) holds the buffer's range
    `[i * chunk, (i + 1) * chunk)`, so the local part is 1-D and may be empty.
    `sizes` has each axis's own size; with a single axis it may be left out.
    """

    axes: tuple[str, ...]
    size: int
    buffer: str = field(compare=False)  # so that copies have equal layouts
    offset: int
    chunk: int
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.axes) == 1 and not self.sizes:
            object.__setattr__(self, "sizes", (self.size,))

    @property
    def axis_sizes(self) -> tuple[tuple[str, int], ...]:
        return tuple(zip(self.axes, self.sizes, strict=False))

    def index(self, coordinates: Mapping[str, int]) -> int:
        """Returns the index of the rank at these coordinates."""
        indices = [coordinates[axis] for axis in self.axes]
        return row_major(zip(indices, self.sizes, strict=False))


@dataclass(frozen=True)
class Split:
    """`size` parts of ceil(n / size) along `dim`; the last may be short or empty.

    In a table of layouts `size` may be left out: it is the mesh axis's own.
    """

    dim: int
    axis: str
    size: int = 0

    @property
    def axis_sizes(self) -> tuple[tuple[str, int], ...]:
        return ((self.axis, self.size),)


@dataclass(frozen=True)
class OfRank(Split):
    """A `Split` whose blocks are of what their ranks' own buffers hold.

    Codes in 8 bits share a scale with their neighbours in the rank's buffer, and what a
    reduction lost is of the elements that this rank sent. Where parameters move, such a
    tensor cannot: its blocks would describe others' elements.
    """


@dataclass(frozen=True)
class Owned:
    """Whole on one coordinate of the axis; an empty 1-D tensor on the others."""

    axis: str
    size: int
    coordinate: int

    @property
    def axis_sizes(self) -> tuple[tuple[str, int], ...]:
        return ((self.axis, self.size),)


@dataclass(frozen=True)
class Own:
    """Rank-local along ``axes``: each rank has its own value; no global tensor exists.

    Of leaves that no unit takes, in ``layouts`` of `place` and `init_state`: a hidden
    state that is carried on, statistics of a rank's batches. The axes are those of the
    `shard`.
    """

    axes: str | tuple[str, ...]


@dataclass(frozen=True)
class Whole:
    """Replicated. A layout drops it, so `(Whole(),)` and `()` are equal."""

    @property
    def axis_sizes(self) -> tuple[tuple[str, int], ...]:
        return ()


Placement = Flat | Split | Owned | Whole


def row_major(places: Iterable[tuple[int, int]]) -> int:
    """Returns the row-major number of a place, given as (index, count) for each dim.

    >>> row_major([(1, 2), (2, 3)])
    5
    """
    number = 0
    for index, count in places:
        number = number * count + index
    return number


def largest_block(shape: Sequence[int], parts: Sequence[Placement]) -> int:
    """Returns the number of elements of the largest block that `Split`s make.

    >>> largest_block((10, 7), (Split(0, "model", 4),))
    21
    """
    lengths = list(shape)
    for part in parts:
        if isinstance(part, Split):
            lengths[part.dim] = -(-lengths[part.dim] // part.size)
    return math.prod(lengths)


def check_placements(
    shape: Sequence[int], parts: Sequence[Placement], subject: Callable[[], str]
) -> None:
    """Raises if a placement does not fit the shape.

    Args:
        shape: the global shape.
        parts: the placements, outermost first.
        subject: returns the leaf's name and shape, for the message.

    Raises:
        ValueError: names the leaf, the axis and the way out.
    """
    if min(shape, default=0) < 0:
        raise ValueError(f"cannot lay out {subject()}: a dim has a negative length")
    used_axes: set[str] = set()
    for i, part in enumerate(parts):
        problem = None
        for axis, size in part.axis_sizes:
            if axis in used_axes:
                problem = _TWICE.format(axis)
            elif size < 1:
                problem = f': axis "{axis}" has no ranks; a size is at least 1'
            used_axes.add(axis)
        problem = problem or _problem(part, shape, parts[:i], i == len(parts) - 1)
        if problem:
            raise ValueError(f"cannot shard {subject()} over {_over(part)}{problem}")


_TWICE = (
    ': axis "{}" is already used by another part; a layout spreads a tensor over an '
    "axis once"
)


def _problem(
    part: Placement, shape: Sequence[int], before: Sequence[Placement], last: bool
) -> str | None:
    """Returns the fault of a placement, as the end of an error message, or None."""
    if isinstance(part, Split) and not 0 <= part.dim < len(shape):
        dims = "1 dim" if len(shape) == 1 else f"{len(shape)} dims"
        advice = f"pass a dim from 0 to {len(shape) - 1}" if shape else "lay it flat"
        return f" along dim {part.dim}: it has {dims}; {advice}"
    if isinstance(part, Owned) and not 0 <= part.coordinate < part.size:
        return (
            f" by coordinate {part.coordinate}: there is no such rank; "
            f"pass one from 0 to {part.size - 1}"
        )
    if not isinstance(part, Flat):
        return None
    if not last:
        return ": it is Flat, which leaves nothing to cut further; put Flat last"
    if len(part.sizes) != len(part.axes) or math.prod(part.sizes) != part.size:
        return (
            f": the axes' sizes {part.sizes} do not give {part.size} ranks; "
            "pass sizes, one for each axis, whose product is size"
        )
    n = largest_block(shape, before)
    if part.offset < 0 or part.chunk < 0 or part.offset + n > part.size * part.chunk:
        return (
            f" at {part.offset}:{part.offset + n} of {part.size}x{part.chunk}: it "
            "does not fit the buffer; pack its leaves with pack_flat"
        )
    return None


def _over(part: Placement) -> str:
    """Returns the axes and sizes of a placement, for error messages."""
    if isinstance(part, Flat):
        axes = ", ".join(f'"{axis}"' for axis in part.axes)
        return f"{'axis' if len(part.axes) == 1 else 'axes'} {axes} of size {part.size}"
    return ", ".join(f'axis "{axis}" of size {size}' for axis, size in part.axis_sizes)


def describe_placement(
    part: Placement, shape: Sequence[int], before: Sequence[Placement]
) -> str:
    """Returns a placement in one phrase: `flat over data=4 at 0:70 of 4x20`."""
    over = ",".join(f"{axis}={size}" for axis, size in part.axis_sizes)
    match part:
        case Flat(offset=offset):
            stop = offset + largest_block(shape, before)
            return f"flat over {over} at {offset}:{stop} of {part.size}x{part.chunk}"
        case Split():
            return f"split over {over} along dim {part.dim}"
        case Owned():
            return f"owned over {over} by {part.coordinate}"
    return "whole"


def short_dtype(dtype: torch.dtype) -> str:
    """Returns a dtype's short name: `f32`, `bf16`, `i64`, `u8`, `bool`."""
    name = str(dtype).removeprefix("torch.")
    short = {"bfloat": "bf", "float": "f", "uint": "u", "int": "i", "complex": "c"}
    for long in short:
        if name.startswith(long):
            return short[long] + name.removeprefix(long)
    return name


def describe_tensor(shape: Sequence[int], dtype: torch.dtype, name: str = "") -> str:
    """Returns a tensor's name, dtype and shape in one phrase, for messages.

    >>> describe_tensor((10, 7), torch.bfloat16, "blocks/3/w")
    'blocks/3/w bf16[10, 7]'
    """
    return f"{name} {short_dtype(dtype)}[{', '.join(map(str, shape))}]".lstrip()
