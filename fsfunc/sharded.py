"""The leaf that carries its sharding, and the flat buffers that such leaves share.

A :class:`Sharded` leaf is this rank's part of a tensor and its layout. The leaves of
one unit lie in one buffer, each rank owning one contiguous range of it: the
:class:`Home` of those leaves, whose parts are views. A gather or a reduction then needs
no copy in or out, and an optimizer sees one long tensor in place of many short ones.
A user's ``tree_map`` makes leaves without a home; ``homes.settle`` packs them again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.layout import Flat, Layout

__all__ = [
    "Buffers",
    "Home",
    "NotATensor",
    "Sharded",
    "is_sharded",
    "split_alike",
    "split_buffers",
]


class NotATensor(TypeError):
    """A sharded leaf was used as the tensor of which it is a part."""


class Sharded:
    """This rank's part of a tensor, and how the whole lies on the mesh.

    Args:
        local: the rank's part, of the shape that the layout gives for its coordinates
            (1-D, and often empty, in a flat buffer).
        layout: global shape, dtype and placement.

    ``shape``, ``ndim``, ``dtype`` and ``numel()`` are global, so that a mask such as
    ``leaf.ndim > 1`` means what it says. Used as a tensor outside a unit it raises.
    It is a pytree node (optree and torch) with the one child ``local``.
    """

    __slots__ = ("_part", "_range", "layout", "home", "spent", "__weakref__")

    def __init__(self, local: Any, layout: Layout, home: Home | None = None):
        self._part = local
        self._range: tuple[Tensor, int, int] | None = None
        self.layout = layout
        self.home = home
        self.spent = ""

    @property
    def _local(self) -> Any:
        if self._part is None and self._range is not None:
            # As it would have been made at once, whoever asks first.
            flat, start, stop = self._range
            if _torch.plainly():
                self._part = flat[start:stop]
                return self._part
            with torch.enable_grad(), _torch.beneath_functorch():
                with _torch.beneath_modes(flat):
                    self._part = flat[start:stop]
        return self._part

    @property
    def local(self) -> Tensor:
        self.check()
        return self._local

    def check(self) -> None:
        """Raises where the leaf was donated."""
        if self.spent:
            raise RuntimeError(f"{self.layout.name!r}: {self.spent}")

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.layout.shape)

    @property
    def ndim(self) -> int:
        return self.layout.ndim

    @property
    def dtype(self) -> torch.dtype:
        return self.layout.dtype

    @property
    def device(self) -> torch.device:
        source = self.local if self._range is None else self._range[0]
        return _torch.device_of(source)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of ``local``, without making it."""
        self.check()
        if self._range is not None:
            return (self._range[2] - self._range[1],)
        return tuple(self._part.shape)

    def numel(self) -> int:
        return self.layout.numel

    def with_local(self, local: Any) -> Sharded:
        """The same place with another part, on its own."""
        return type(self)(local, self.layout)

    def twin(self) -> Sharded:
        """Another leaf over the same memory, with a tensor of its own, of no graph."""
        self.check()
        part = self._part if self._range is None else None  # made when asked for
        part = part.detach() if isinstance(part, Tensor) else part
        leaf = type(self)(part, self.layout, self.home)
        leaf._range = self._range
        return leaf

    def __repr__(self) -> str:
        local = self._local
        held = tuple(local.shape) if isinstance(local, Tensor) else "?"
        return f"Sharded({self.layout}, local {held})"

    def __reduce__(self) -> Any:
        # A part is a view of a buffer: without the clone the whole buffer is written.
        return Sharded, (self.local.clone(), self.layout)

    def __hash__(self) -> int:
        return id(self)

    def _refuse(self, what: str) -> NoReturn:
        raise NotATensor(
            f"{what}: {self.layout.name or 'a leaf'!r} ({self.layout}) is sharded, and "
            "a tensor only where a unit has it in its first argument. Read it in an "
            "@ff.unit function under ff.shard; map over its part with tree_map; use "
            "ff.global_norm or ff.tree_sum for sums over elements, ff.unshard for the "
            "whole"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what libraries ask any object for
            raise AttributeError(name)
        self._refuse(f"cannot read .{name}")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        for x in tree.leaves((args, kwargs), is_leaf=is_sharded):
            if isinstance(x, Sharded):
                x._refuse(f"cannot call {getattr(func, '__name__', func)}")
        raise TypeError(f"cannot call {func}")


def _refusal(name: str) -> Any:
    def method(self: Sharded, *args: Any) -> NoReturn:
        self._refuse(f"cannot use {name}")

    return method


_OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow "
    "matmul rmatmul and rand or ror xor rxor lshift rshift neg pos abs invert eq ne lt "
    "le gt ge bool len iter contains getitem setitem float int index complex iadd isub "
    "imul itruediv"
)
for _name in _OPERATORS.split():
    setattr(Sharded, f"__{_name}__", _refusal(f"__{_name}__"))


# Whether an object is a sharded leaf, for ``is_leaf=``: ``isinstance`` as a function in
# C, since a walk asks it of every node.
is_sharded: Callable[[Any], bool] = Sharded.__instancecheck__


tree.register_node(
    Sharded,
    lambda leaf: ((leaf.local,), leaf.layout),
    lambda layout, children: Sharded(children[0], layout),
)


class Home:
    """One rank's range of a flat buffer, in which several leaves lie.

    Args:
        members: the layouts of the leaves, in the order of their offsets.
        flat: the rank's range, ``[chunk]``, padding zero.
        coordinates: the rank's, on the axes of the buffer.
        whole: the whole buffer ``[size * chunk]``, where the rank keeps it (zero 1 and
            2); ``flat`` may be a view of it.

    ``whole`` is a cache: it shows what ``flat`` held when ``keep`` was called, and
    ``shows`` tells whether that still holds.
    """

    __slots__ = (
        "members", "flat", "coordinates", "whole", "_version", "port", "_ranges",
        "place", "buffer", "__weakref__",
    )  # fmt: skip

    def __init__(
        self,
        members: tuple[Layout, ...],
        flat: Tensor,
        coordinates: Mapping[str, int],
        whole: Tensor | None = None,
    ):
        self.members = members
        self.flat = flat
        self.coordinates = coordinates
        self.whole = whole
        self._version: int | None = None
        self.port: Any = None
        self._ranges: list[tuple[int, int]] | None = None
        place = members[0].flat
        if place is None:
            raise ValueError(f"{members[0]} lies in no buffer")
        self.place: Flat = place
        self.buffer = place.buffer

    @property
    def name(self) -> str:
        """Whose parameters they are: the unit, and the first leaf."""
        unit, first = self.buffer.partition(":")[0], self.members[0].name
        more = len(self.members) - 1
        return f"{unit}({first} and {more} more)" if more else f"{unit}({first})"

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """(start, stop) of each leaf in ``flat``."""
        if self._ranges is None:
            self._ranges = [m.buffer_range(self.coordinates) for m in self.members]
        return self._ranges

    def keep(self, whole: Tensor) -> None:
        """Remembers the gathered buffer."""
        self.whole, self._version = whole, self.flat._version

    def shows(self, dtype: torch.dtype) -> bool:
        """Whether ``whole`` is there, in ``dtype``, and as new as ``flat``."""
        whole = self.whole
        if whole is None or whole.dtype != dtype or self.flat.is_inference():
            return False
        return self._version == self.flat._version

    def leaves(self) -> list[Sharded]:
        """The leaves, as views of ``flat``, each made when it is first asked for.

        Most never are: gathers, reductions and optimizers read ``flat``.
        """
        flat, leaves = self.flat, []
        at_once = flat.requires_grad or _torch.is_wrapped(flat)  # views have a history
        for layout, (start, stop) in zip(self.members, self.ranges, strict=True):
            leaf = Sharded(flat[start:stop] if at_once else None, layout, self)
            if not at_once:
                leaf._range = (flat, start, stop)
            leaves.append(leaf)
        return leaves

    def like(self, flat: Tensor) -> Home:
        """The same leaves over another flat tensor of the same length."""
        home = Home(self.members, flat, self.coordinates)
        home._ranges = self.ranges
        return home

    def renewed(self) -> Home:
        """Another home over the same memory, which is about to be written over.

        So unit calls gather anew, as after an update that writes elsewhere: on all
        ranks alike, whether each of them could write in place or not.
        """
        home = Home(self.members, self.flat, self.coordinates, self.whole)
        home._ranges, home._version = self._ranges, self._version
        return home

    def shadow(
        self,
        convert: Callable[[Tensor], Tensor],
        coordinates: Mapping[str, int] | None = None,
    ) -> Home:
        """The same home over converted tensors, which share memory as these do.

        ``coordinates``: of the rank that it is to be of, if that is another one.
        """
        whole = None if self.whole is None else convert(self.whole)
        flat = convert(self.flat)
        at = {a: (coordinates or self.coordinates)[a] for a in self.coordinates}
        home = Home(self.members, flat, at, whole)
        if at == self.coordinates:
            home._ranges = self._ranges
        if self.whole is not None and self.shows(self.whole.dtype):
            home._version = flat._version
        return home


class Buffers:
    """A tree as few tensors: one for each home, one for each leaf without.

    Args:
        treedef, leaves: the tree, sharded leaves counting as leaves.
        groups: positions of leaves that go together; a home where it is complete.
        paths: the leaves' paths.
    """

    def __init__(self, treedef: Any, leaves: list[Any], groups: list[Any], paths: Any):
        self.treedef, self.leaves, self.groups = treedef, leaves, groups
        self._paths = paths

    @property
    def tensors(self) -> list[Any]:
        return [
            home.flat if home is not None else _part(self.leaves[positions[0]])
            for positions, home in self.groups
        ]

    @property
    def paths(self) -> list[list[str]]:
        names = self._paths()
        return [[names[i] for i in positions] for positions, _ in self.groups]

    def rebuild(self, tensors: Sequence[Any]) -> Any:
        """The tree with these tensors for ``self.tensors``, homes kept."""
        leaves = list(self.leaves)
        for (positions, home), x in zip(self.groups, tensors, strict=True):
            if home is None:
                old = leaves[positions[0]]
                leaves[positions[0]] = (
                    old.with_local(x) if isinstance(old, Sharded) else x
                )
            else:
                home = home if x is home.flat else home.like(x)  # written in place
                for i, leaf in zip(positions, home.leaves(), strict=True):
                    leaves[i] = leaf
        return tree.unflatten(self.treedef, leaves)


def _part(leaf: Any) -> Any:
    return leaf.local if isinstance(leaf, Sharded) else leaf


def complete_homes(leaves: Sequence[Any]) -> dict[int, tuple[list[int], Home]]:
    """Positions, by home, of the leaves of every home that is here complete.

    Not where a gradient call differentiates the leaves: ``flat`` has no history then.
    """
    found: dict[int, tuple[list[int], Home]] = {}
    for i, leaf in enumerate(leaves):
        home = leaf.home if isinstance(leaf, Sharded) else None
        if home is not None and home.port is None:
            leaf.check()
            found.setdefault(id(home), ([], home))[0].append(i)
    complete = {}
    for key, (positions, home) in found.items():
        order = {id(member): k for k, member in enumerate(home.members)}
        ranked = {order.get(id(leaves[i].layout)): i for i in positions}
        if len(positions) == len(order) and set(ranked) == set(order.values()):
            complete[key] = ([ranked[k] for k in range(len(order))], home)
    return complete


def split_buffers(t: Any) -> Buffers:
    """``t`` as few tensors."""
    return split_alike(t)[0]


def split_alike(*trees: Any) -> list[Buffers]:
    """Trees of one structure as few tensors, cut at the same places in each."""
    flats = [tree.flatten(t, is_leaf=is_sharded) for t in trees]
    for t, (_, treedef) in zip(trees[1:], flats[1:], strict=True):
        if treedef != flats[0][1]:
            tree.check_same_structure(trees[0], t)
    complete = [complete_homes(leaves) for leaves, _ in flats]
    first = flats[0][0]
    homes: list[dict[int, Home]] = [
        {p[0]: home for p, home in groups.values()} for groups in complete
    ]
    positions = [{tuple(p) for p, _ in groups.values()} for groups in complete]
    shared = set.intersection(*positions)
    inside = {i: p for p in shared for i in p}
    cuts: list[tuple[int, ...]] = []
    seen: set[tuple[int, ...]] = set()
    for i in range(len(first)):
        p = inside.get(i, (i,))
        if p not in seen:
            seen.add(p)
            cuts.append(p)
    out = []
    for (leaves, treedef), by_start, t in zip(flats, homes, trees, strict=True):
        groups = [(list(p), by_start[p[0]] if p in shared else None) for p in cuts]
        paths = lambda t=t: tree.paths(t, is_leaf=is_sharded)  # noqa: E731
        out.append(Buffers(treedef, leaves, groups, paths))
    return out
