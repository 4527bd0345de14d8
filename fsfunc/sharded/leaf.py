"""``Sharded``, a leaf that is one rank's part of a tensor; ``FlatShard``, its buffer.

The leaves of one unit lie in one packed buffer, of which each rank has one contiguous
range; its parts of the leaves are views of that::

    buffer     | w w w w w w | b b | v v v v v v v |  padding
    ranges     [   rank 0   ) [   rank 1   ) [   rank 2   )

So gathers and reductions copy nothing in or out, and an optimizer updates one long
tensor instead of many short ones. ``packing.repack_leaves`` packs again what a user's
``tree_map`` has made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partialmethod
from html import escape
from operator import attrgetter
from typing import Any, NoReturn, TypeGuard, cast

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.runtime.memory_spaces import MemorySpace, space_of
from fsfunc.sharded.layout import Flat, Layout
from fsfunc.tree.types import Args, Keywords, PyTree

PENDING = (
    "this gradient is not available inside of the shard that reduces it in backward: "
    "read or modify gradients outside, as in mine(shard(step))"
)

# Of one gradient call: the parts of packed leaves that are read outside units, as
# autograd leaves, by the ids of the buffer and the layout.
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

    Attributes:
        packed: the buffer that ``local`` is a view of, or None.
        parts: None, but in a gradient call that sums the buffer's gradient outside
            autograd: there ``local`` is, for code outside units, an autograd leaf of
            its own, which is stored here.
        why_unusable: the error that a use raises, of a leaf that may not be used: its
            memory was given away, or it is a gradient still to be reduced. Else empty.
    """

    __slots__ = (
        "_part", "_range", "layout", "packed", "parts", "why_unusable", "__weakref__",
    )  # fmt: skip

    layout: Layout
    packed: FlatShard | None
    parts: Parts | None
    why_unusable: str

    def __init__(
        self,
        local: Any,
        layout: Layout,
        packed: FlatShard | None = None,
        why_unusable: str = "",
    ):
        # A leaf of a buffer has a range, (flat, start, stop), and makes its part when
        # it is first read: most steps read no part of most leaves.
        self._part = local
        self._range: tuple[Tensor, int, int] | None = None
        self.layout, self.packed, self.why_unusable = layout, packed, why_unusable
        self.parts = None

    @property
    def _local(self) -> Any:
        if self._part is None and self._range is not None:
            self._make()
        return self._part

    def _make(self) -> None:
        """Makes the part as it would have been when the leaf was made.

        The part stays with the leaf, and others read it. So the dispatch modes,
        functorch levels and grad mode of the first reader must not show in it.
        """
        flat, start, stop = self._range  # type: ignore[misc]
        # The usual case: no mode, level or grad setting in force would change the view.
        if self.parts is None and _torch.only_autograd_sees(flat):
            self._part = flat[start:stop]
            return
        # torch refuses to write with grad on into a view that was made with grad off. A
        # plan's modes do see a fake `flat`, and would make a fake view of a real one.
        with torch.enable_grad(), _torch.beneath_functorch():
            with _torch.beneath_modes(flat):
                part = flat[start:stop]
                if self.parts is not None:
                    with torch.inference_mode(False):
                        part = part.detach()
                        # By the field: torch.func refuses the method, beneath it too.
                        part.requires_grad = True
                    # A leaf that occurs twice in the arguments is one autograd leaf.
                    key = id(self.packed), id(self.layout)
                    part = self.parts.setdefault(key, part)
        self._part = part

    @property
    def local(self) -> Tensor:
        if self.why_unusable:
            self.check()  # which raises
        return self._local if self._part is None else self._part

    def check(self) -> None:
        """Raises if the leaf may not be used, ``why_unusable``."""
        if self.why_unusable:
            raise RuntimeError(f"{self.layout.name!r}: {self.why_unusable}")

    # In C, as they are read of every leaf.
    name: property = property(attrgetter("layout.name"))
    ndim: property = property(attrgetter("layout.ndim"))
    dtype: property = property(attrgetter("layout.dtype"))

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.layout.shape)

    @property
    def device(self) -> torch.device:
        source = self.local if self._range is None else self._range[0]
        return _torch.device_of(source)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of ``local``, which is not made for that."""
        self.check()
        if self._range is not None:
            return (self._range[2] - self._range[1],)
        return tuple(self._part.shape)

    def numel(self) -> int:
        return self.layout.numel

    def with_local(self, local: Any) -> Sharded:
        """Returns a leaf of the same layout with another part, in no buffer."""
        return type(self)(local, self.layout)

    def tracked(self, parts: Parts) -> Sharded:
        """Returns a copy whose ``local``, when read, is an autograd leaf in ``parts``.

        Gradients of packed leaves do not pass through autograd: a unit gives those of
        its buffer to ``shard``. Only code outside units needs an autograd leaf.
        """
        packed: Any = self.packed
        leaf = type(self)(None, self.layout, packed)
        leaf._range = (packed.flat, *(packed._spans or packed.spans)[id(self.layout)])
        leaf.parts = parts
        return leaf

    def twin(self) -> Sharded:
        """Returns a detached leaf in the same storage."""
        if self.why_unusable:
            self.check()  # which raises
        part = self._part if self._range is None else None  # made when asked for
        part = part.detach() if isinstance(part, Tensor) else part
        leaf = type(self)(part, self.layout, self.packed)
        leaf._range = self._range
        return leaf

    def __repr__(self) -> str:
        local = self._local
        shape = tuple(local.shape) if isinstance(local, Tensor) else "?"
        return f"Sharded({self.layout}, local {shape})"

    def _repr_html_(self) -> str:  # what a notebook shows
        return f"<code>{escape(repr(self))}</code>"

    def __reduce__(self) -> tuple[type[Sharded], tuple[Tensor, Layout]]:
        # A part is a view of a buffer: without the clone the whole buffer is written.
        return Sharded, (self.local.clone(), self.layout)

    # The names that begin with `tree_` are read by `tree.structure` and `tree.nodes`.

    def tree_text(self) -> str:
        """Returns what an error about structures calls the leaf."""
        return f"a leaf in parts ({self.layout})"

    def tree_beside(self, other: PyTree) -> list[PyTree] | None:
        """Returns what a map of several trees takes beside the part, if ``other`` fits.

        A number does, which is one for all of the leaf.
        """
        is_scalar = isinstance(other, Tensor) and not other.ndim
        return [other] if is_scalar or isinstance(other, (int, float)) else None

    tree_advice = (
        "One leaf is sharded and the other whole, or otherwise. A copy of parameters "
        "has their layouts if it is made of the sharded ones (tree.map(torch.clone, "
        "params); ff.init_state does so for optimizers), or by ff.place(step, state, "
        '..., like={"w0": "w"}) with the paths of both; in a step ff.lay_like(whole, '
        "params) shards it. Beside a leaf, its tree given first, may stand a number"
    )

    __hash__ = object.__hash__  # leaves are known by identity: == refuses

    def _refuse(self, attempt: str, *_: object) -> NoReturn:
        """Raises; ``attempt`` says what cannot be done."""
        if self.layout.splits and self.layout.flat is None:
            raise NotATensor(
                f"{attempt}: {self.layout.name or 'a leaf'!r} ({self.layout}) is this "
                "rank's block of a split tensor. ff.nn.column_linear takes weights "
                "that are split along dim 0, ff.nn.row_linear along dim 1, "
                "ff.nn.vocab_embedding and ff.nn.linear_cross_entropy tables and heads "
                "split along dim 0; .local is the block"
            )
        raise NotATensor(
            f"{attempt}: {self.layout.name or 'a leaf'!r} ({self.layout}) is sharded, "
            "and a tensor only where a unit has it in its first argument. Read it in "
            "an @ff.unit function under ff.shard; map over its part with tree_map; use "
            "ff.global_norm or ff.tree_sum for sums over elements, ff.unshard for the "
            "whole"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # protocols that libraries look for on any object
            raise AttributeError(name)
        self._refuse(f"cannot read .{name}")

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Collection[type],
        args: Args = (),
        kwargs: Keywords | None = None,
    ) -> NoReturn:
        for x in tree.leaves((args, kwargs), is_leaf=is_sharded):
            if isinstance(x, Sharded):
                x._refuse(f"cannot call {getattr(func, '__name__', func)}")
        raise TypeError(f"cannot call {func}")


OPERATORS: Sequence[str] = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow "
    "matmul rmatmul and rand or ror xor rxor lshift rshift neg pos abs invert eq ne lt "
    "le gt ge bool len iter contains getitem setitem float int index complex iadd isub "
    "imul itruediv"
).split()
# Python looks for operators in the class, and does not ask `__getattr__`.
for _name in OPERATORS:
    _refused = partialmethod(Sharded._refuse, f"cannot use __{_name}__")
    setattr(Sharded, f"__{_name}__", _refused)


# True of a sharded leaf; for ``is_leaf=``. It is ``isinstance`` as a function in C, as
# it is called for every node of a tree.
# For checkers, a tree of tensors that was laid out is a tree of tensors still: this
# tells them, of a leaf, what it is.
is_sharded: Callable[[Any], TypeGuard[Sharded]] = cast(Any, Sharded.__instancecheck__)


class PendingGradient(Sharded):
    """A pending gradient of a leaf, which the enclosing ``shard`` has still to reduce.

    It stands in the tree of gradients that transforms within ``shard`` see, until the
    sums of the gradient call take its place. It has a layout and no part: to read it
    raises.
    """

    __slots__ = ()

    def __init__(self, layout: Layout):
        # Not by `super().__init__`, which is slower: each leaf of each gradient call
        # has one.
        self._part = self._range = self.packed = self.parts = None
        self.layout, self.why_unusable = layout, PENDING


# Both are made again as `Sharded`: with a part, a gradient is no longer pending.
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
        whole: the gathered buffer ``[size * chunk]``, if the rank has it cached (zero 1
            and 2): of what ``flat`` held when `cache_gathered` was called. ``flat`` may
            be a view of it.

    Attributes:
        place: the `Flat` placement of the first leaf.
        buffer: the buffer's name.
        is_shared: whether small neighbouring units share it; ``+`` joins their names.
        split_axes: the axes over which layouts split its leaves, beside `Flat`.
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
        others = len(self.members) - 1
        return f"{unit}({first} and {others} more)" if others else f"{unit}({first})"

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """(start, stop) of each leaf in ``flat``."""
        return list(self.spans.values())

    @property
    def spans(self) -> dict[int, tuple[int, int]]:
        """(start, stop) in ``flat``, by the id of a member."""
        if self._spans is None:
            here = self.coordinates
            self._spans = {id(m): m.buffer_range(here) for m in self.members}
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

    def cache_gathered(self, whole: Tensor) -> None:
        """Stores the gathered buffer in ``whole``, if autograd may read it."""
        # An inference tensor has no version by which a later write would show.
        if not (whole.is_inference() or self.flat.is_inference()):
            self.whole, self._version = whole, self.flat._version

    def is_cached(self, dtype: torch.dtype) -> bool:
        """Returns whether ``whole`` has the values of ``flat`` as they are now.

        Args:
            dtype: that in which they are wanted.
        """
        whole = self.whole
        if whole is None or whole.dtype != dtype or self.flat.is_inference():
            return False
        return self._version == self.flat._version

    def leaves(self) -> list[Sharded]:
        """Returns the leaves, whose parts are views of ``flat``, made at first read."""
        flat, spans, leaves = self.flat, (self._spans or self.spans).values(), []
        # A view of a differentiated or wrapped tensor has a history: it is made here,
        # under the modes and levels in force.
        makes_views = flat.requires_grad or _torch.is_wrapped(flat)
        for layout, (start, stop) in zip(self.members, spans, strict=True):
            leaf = Sharded(flat[start:stop] if makes_views else None, layout, self)
            if not makes_views:
                leaf._range = (flat, start, stop)
            leaves.append(leaf)
        return leaves

    def like(self, flat: Tensor) -> FlatShard:
        """Returns the same leaves over another flat tensor of the same length."""
        return FlatShard(self.members, flat, self.coordinates, _spans=self._spans)

    def renewed(self) -> FlatShard:
        """Returns a new FlatShard over the same storage, for an in-place update.

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
        """Returns a copy with converted tensors, such as fake ones of a recording.

        Args:
            convert: is applied to each tensor; it must map views of one storage to
                views of one.
            coordinates: those of another rank that the copy is for.
        """
        whole = None if self.whole is None else convert(self.whole)
        place = {a: (coordinates or self.coordinates)[a] for a in self.coordinates}
        spans = self._spans if place == self.coordinates else None
        new = FlatShard(self.members, convert(self.flat), place, whole, _spans=spans)
        # A copy of a stale cache stays stale: it gathers where the original would.
        if self.whole is not None and self.is_cached(self.whole.dtype):
            new._version = new.version
        return new
