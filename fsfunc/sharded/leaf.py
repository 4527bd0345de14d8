"""``Sharded``, a leaf that is one rank's part of a tensor; ``FlatShard``, its buffer.

The leaves of one unit lie in one packed buffer, of which each rank has one contiguous
range; its parts of the leaves are views of that. So gathers and reductions copy nothing
in or out, and an optimizer updates one long tensor instead of many short ones.
``packing.repacked`` packs again what a user's ``tree_map`` has made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partialmethod
from html import escape
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.runtime.memory_spaces import MemorySpace, space_of
from fsfunc.sharded.layout import Flat, Layout

PENDING = (
    "this gradient is not available inside of the shard that reduces it in backward: "
    "read or modify gradients outside, as in mine(shard(step))"
)

# Of one gradient call, by buffer and layout: the parts used outside units.
Parts = dict[tuple[int, int], Tensor]


class NotATensor(TypeError):
    """A sharded leaf was used as a tensor, outside the unit that gathers it."""


class Sharded:
    """This rank's part of a tensor, and the layout of the whole on the mesh.

    Args:
        local: the rank's part, of the shape that the layout gives for its coordinates
            (1-D, and often empty, in a packed buffer).
        layout: global shape, dtype and placements.

    ``shape``, ``ndim``, ``dtype`` and ``numel()`` are global, so masks such as
    ``leaf.ndim > 1`` are right. Used as a tensor outside a unit it raises. It is a
    pytree node (optree and torch) with one child, ``local``.

    >>> import torch, fsfunc as ff
    >>> rows = ff.Layout((4, 2), torch.float32, (ff.Split(0, "data", 2),), "w")
    >>> mine = ff.Sharded(torch.ones(rows.local_shape({"data": 0})), rows)
    >>> mine.local.shape, mine.shape
    (torch.Size([2, 2]), torch.Size([4, 2]))

    ``packed`` is the buffer that ``local`` is a view of, or None. In a gradient call
    that sums the buffer's gradient outside autograd, ``local`` is instead an autograd
    leaf of its own, kept in ``parts``, for code outside units. ``spent`` is the error
    of a leaf that may not be used any more.
    """

    __slots__ = (
        "_part", "_range", "layout", "packed", "parts", "spent", "__weakref__",
    )  # fmt: skip

    def __init__(
        self,
        local: Any,
        layout: Layout,
        packed: FlatShard | None = None,
        spent: str = "",
    ):
        self._part = local
        self._range: tuple[Tensor, int, int] | None = None
        self.layout, self.packed, self.spent = layout, packed, spent
        self.parts: Parts | None = None

    @property
    def _local(self) -> Any:
        if self._part is None and self._range is not None:
            self._make()
        return self._part

    def _make(self) -> None:
        """Makes the part, as if at once: beneath the modes and levels of its reader."""
        flat, start, stop = self._range  # type: ignore[misc]
        if self.parts is None and _torch.only_autograd_sees(flat):
            self._part = flat[start:stop]
            return
        with torch.enable_grad(), _torch.beneath_functorch():
            with _torch.beneath_modes(flat):
                part = flat[start:stop]
                if self.parts is not None:
                    with torch.inference_mode(False):
                        part = part.detach()
                        # By the field: torch.func refuses the method, beneath it too.
                        part.requires_grad = True
                    key = id(self.packed), id(self.layout)
                    part = self.parts.setdefault(key, part)
        self._part = part

    @property
    def local(self) -> Tensor:
        if self.spent:
            self.check()  # which raises
        return self._local if self._part is None else self._part

    def check(self) -> None:
        """Raises if the leaf is ``spent``."""
        if self.spent:
            raise RuntimeError(f"{self.layout.name!r}: {self.spent}")

    name = property(attrgetter("layout.name"))
    ndim = property(attrgetter("layout.ndim"))
    dtype = property(attrgetter("layout.dtype"))

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.layout.shape)

    @property
    def device(self) -> torch.device:
        source = self.local if self._range is None else self._range[0]
        return _torch.device_of(source)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of ``local``, which is not made."""
        self.check()
        if self._range is not None:
            return (self._range[2] - self._range[1],)
        return tuple(self._part.shape)

    def numel(self) -> int:
        return self.layout.numel

    def with_local(self, local: Any) -> Sharded:
        """A leaf of the same layout with another part, in no buffer."""
        return type(self)(local, self.layout)

    def tracked(self, parts: Parts) -> Sharded:
        """A copy whose ``local``, when it is read, is an autograd leaf in ``parts``."""
        packed: Any = self.packed
        leaf = type(self)(None, self.layout, packed)
        leaf._range = (packed.flat, *(packed._spans or packed.spans)[id(self.layout)])
        leaf.parts = parts
        return leaf

    def twin(self) -> Sharded:
        """A detached copy in the same storage."""
        if self.spent:
            self.check()  # which raises
        part = self._part if self._range is None else None  # made when asked for
        part = part.detach() if isinstance(part, Tensor) else part
        leaf = type(self)(part, self.layout, self.packed)
        leaf._range = self._range
        return leaf

    def __repr__(self) -> str:
        local = self._local
        held = tuple(local.shape) if isinstance(local, Tensor) else "?"
        return f"Sharded({self.layout}, local {held})"

    def _repr_html_(self) -> str:  # what a notebook shows
        return f"<code>{escape(repr(self))}</code>"

    def __reduce__(self) -> Any:
        # A part is a view of a buffer: without the clone the whole buffer is written.
        return Sharded, (self.local.clone(), self.layout)

    def tree_text(self) -> str:
        return f"a leaf in parts ({self.layout})"

    def tree_beside(self, other: Any) -> list[Any] | None:
        """What a map gives beside the part: a number, which is one for all of it."""
        number = isinstance(other, Tensor) and not other.ndim
        return [other] if number or isinstance(other, (int, float)) else None

    tree_advice = (
        "One leaf is sharded and the other whole, or otherwise. A copy of parameters "
        "has their layouts if it is made of the sharded ones (tree.map(torch.clone, "
        "params); ff.init_state does so for optimizers), or by ff.place(step, state, "
        '..., like={"w0": "w"}) with the paths of both; in a step ff.lay_like(whole, '
        "params) shards it. Beside a leaf, its tree given first, may stand a number"
    )

    __hash__ = object.__hash__  # leaves are known by identity: == refuses

    def _refuse(self, what: str, *_: Any) -> NoReturn:
        if self.layout.splits and self.layout.flat is None:
            raise NotATensor(
                f"{what}: {self.layout.name or 'a leaf'!r} ({self.layout}) is this "
                "rank's block of a split tensor. ff.nn.column_linear takes weights "
                "that are split along dim 0, ff.nn.row_linear along dim 1, "
                "ff.nn.vocab_embedding and ff.nn.linear_cross_entropy tables and heads "
                "split along dim 0; .local is the block"
            )
        raise NotATensor(
            f"{what}: {self.layout.name or 'a leaf'!r} ({self.layout}) is sharded, and "
            "a tensor only where a unit has it in its first argument. Read it in an "
            "@ff.unit function under ff.shard; map over its part with tree_map; use "
            "ff.global_norm or ff.tree_sum for sums over elements, ff.unshard for the "
            "whole"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # protocols that libraries look for on any object
            raise AttributeError(name)
        self._refuse(f"cannot read .{name}")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        for x in tree.leaves((args, kwargs), is_leaf=is_sharded):
            if isinstance(x, Sharded):
                x._refuse(f"cannot call {getattr(func, '__name__', func)}")
        raise TypeError(f"cannot call {func}")


OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow "
    "matmul rmatmul and rand or ror xor rxor lshift rshift neg pos abs invert eq ne lt "
    "le gt ge bool len iter contains getitem setitem float int index complex iadd isub "
    "imul itruediv"
).split()
for _name in OPERATORS:
    _refused = partialmethod(Sharded._refuse, f"cannot use __{_name}__")
    setattr(Sharded, f"__{_name}__", _refused)


# True of a sharded leaf; for ``is_leaf=``. It is ``isinstance`` as a function in C, as
# it is called for every node of a tree.
is_sharded: Callable[[Any], bool] = Sharded.__instancecheck__


class PendingGradient(Sharded):
    """The gradient of a leaf that the enclosing ``shard`` has still to reduce.

    It stands in the tree of gradients that transforms within ``shard`` see, until the
    sums of the gradient call take its place. It has a layout and no part: to read it
    raises.
    """

    __slots__ = ()

    def __init__(self, layout: Layout):
        # Each in place: one is made for each leaf of each gradient call.
        self._part = self._range = self.packed = self.parts = None
        self.layout, self.spent = layout, PENDING


for _kind in (Sharded, PendingGradient):
    tree.register_node(
        _kind,
        lambda leaf: ((leaf.local,), leaf.layout),
        lambda layout, children: Sharded(children[0], layout),
    )


@dataclass(slots=True, eq=False, weakref_slot=True)
class FlatShard:
    """One rank's range of a packed buffer, which has the parts of several leaves.

    Args:
        members: the layouts of the leaves, in the order of their offsets.
        flat: the rank's range, ``[chunk]``; padding is zero.
        coordinates: the rank's coordinates on the axes of the buffer.
        whole: the gathered buffer ``[size * chunk]``, if the rank keeps it (zero 1 and
            2); ``flat`` may be a view of it.

    ``place`` is the `Flat` placement of the first leaf, ``buffer`` the buffer's name;
    ``is_shared``: whether small neighbouring units share it; ``+`` joins their names.
    ``whole`` is a cache of what ``flat`` held when ``keep`` was called; ``shows`` is
    False once ``flat`` has been written.
    """

    members: tuple[Layout, ...]
    flat: Tensor
    coordinates: Mapping[str, int]
    whole: Tensor | None = None
    _version: int | None = None
    _spans: dict[int, tuple[int, int]] | None = None
    _space: MemorySpace | None = field(default=None, init=False)
    place: Flat = field(init=False)
    buffer: str = field(init=False)
    is_shared: bool = field(init=False)
    split_axes: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        first = self.members[0]
        if first.flat is None:
            raise ValueError(f"{first} lies in no buffer")
        self.place, self.buffer = first.flat, first.flat.buffer
        self.is_shared, self.split_axes = "+" in self.buffer, first.split_axes

    @property
    def name(self) -> str:
        """The unit and the first leaf, for messages."""
        unit, first = self.buffer.partition(":")[0], self.members[0].name
        more = len(self.members) - 1
        return f"{unit}({first} and {more} more)" if more else f"{unit}({first})"

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """(start, stop) of each leaf in ``flat``."""
        return list(self.spans.values())

    @property
    def spans(self) -> dict[int, tuple[int, int]]:
        """(start, stop) in ``flat``, by the id of a member."""
        if self._spans is None:
            at = self.coordinates
            self._spans = {id(m): m.buffer_range(at) for m in self.members}
        return self._spans

    @property
    def space(self) -> MemorySpace:
        """The memory that ``flat`` lies in: the device's own, or a store's."""
        if self._space is None:
            self._space = space_of(self.flat)
        return self._space

    @property
    def version(self) -> int:
        """The version counter of ``flat``."""
        return 0 if self.flat.is_inference() else self.flat._version

    def keep(self, whole: Tensor) -> None:
        """Keeps the gathered buffer in ``whole``, if autograd may read it."""
        if not (whole.is_inference() or self.flat.is_inference()):
            self.whole, self._version = whole, self.flat._version

    def shows(self, dtype: torch.dtype) -> bool:
        """True if ``whole`` has the values of ``flat``, in ``dtype``."""
        whole = self.whole
        if whole is None or whole.dtype != dtype or self.flat.is_inference():
            return False
        return self._version == self.flat._version

    def leaves(self) -> list[Sharded]:
        """The leaves, whose parts, views of ``flat``, are made when first read."""
        flat, spans, leaves = self.flat, (self._spans or self.spans).values(), []
        at_once = flat.requires_grad or _torch.is_wrapped(flat)  # views have a history
        for layout, (start, stop) in zip(self.members, spans, strict=True):
            leaf = Sharded(flat[start:stop] if at_once else None, layout, self)
            if not at_once:
                leaf._range = (flat, start, stop)
            leaves.append(leaf)
        return leaves

    def like(self, flat: Tensor) -> FlatShard:
        """The same leaves over another flat tensor of the same length."""
        return FlatShard(self.members, flat, self.coordinates, _spans=self._spans)

    def renewed(self) -> FlatShard:
        """A new FlatShard over the same storage, for an in-place update.

        A new object, so that all ranks gather again, also those that could not update
        in place.
        """
        cached = self.whole, self._version, self._spans
        new = FlatShard(self.members, self.flat, self.coordinates, *cached)
        new._space = self._space
        return new

    def shadow(
        self,
        convert: Callable[[Tensor], Tensor],
        coordinates: Mapping[str, int] | None = None,
    ) -> FlatShard:
        """A copy with converted tensors, which share memory as these do.

        ``coordinates``: those of another rank that the copy is for.
        """
        whole = None if self.whole is None else convert(self.whole)
        at = {a: (coordinates or self.coordinates)[a] for a in self.coordinates}
        spans = self._spans if at == self.coordinates else None
        new = FlatShard(self.members, convert(self.flat), at, whole, _spans=spans)
        if self.whole is not None and self.shows(self.whole.dtype):
            new._version = new.version
        return new
