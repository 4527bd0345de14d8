"""Leaves as a step is recorded, and which of them share a buffer.

`recorder` puts one in place of each tensor of the step's first argument, by which a
unit call shows which leaves it was given.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.core.frames import frame
from fsfunc.sharded.layout import Layout, Owned
from fsfunc.sharded.leaf import OPERATORS, Sharded, is_sharded
from fsfunc.sharded.placements import Placement


class Recorded(Sharded):
    """A leaf of a step under recording: a tensor to those who ask, with a memory."""

    __slots__ = ()

    def __init__(self, local: Any, layout: Layout, packed: Any = None):
        super().__init__(local, layout)
        tracer = frame().tracer
        if tracer is not None and isinstance(local, Tensor):
            tracer.on_leaf(local, layout.name)

    def __reduce__(self) -> Any:  # as deepcopy asks
        return Recorded, (self.local.clone(), self.layout)

    def _refuse(self, what: str) -> Any:
        raise RuntimeError(what)

    def tree_beside(self, other: Any) -> list[Any] | None:
        # What no unit takes stays a plain tensor; what one does, a later run refuses.
        other = plain(other)
        if isinstance(other, Tensor) and other.shape == self.layout.shape:
            return [other]
        return super().tree_beside(other)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.local, name)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree.map(plain, (args, kwargs or {}), is_leaf=is_sharded)
        return func(*args, **kwargs)


def plain(x: Any) -> Any:
    """The tensor that ``x`` passes for, or ``x`` itself."""
    return x.local if isinstance(x, Recorded) else x


def local(x: Any) -> Any:
    """The tensor that this rank holds of a leaf, or ``x`` itself."""
    return x.local if isinstance(x, Sharded) else x


def whole(x: Any) -> Any:
    """The placeholder in a unit for a leaf that has a layout already."""
    if not isinstance(x, Sharded):
        return x
    local, split = x.local.detach(), x.layout.in_units
    if split is None:
        return local.new_zeros(x.shape)
    first = split.local_shape(dict.fromkeys(split.axes, 0))
    return Sharded(local.new_zeros(first), split)


def block(x: Any, layout: Layout) -> Any:
    """The value that a unit is given for a recorded leaf: a tensor, or a rank's part.

    Args:
        layout: how it will be split; to all but units it passes for a whole tensor.
    """
    part, split = plain(x), layout.in_units
    if split is None:
        return part
    for cut in split.splits:  # by `split`, which the recorder takes for no reading
        part = part.split(part.shape[cut.dim] // cut.size, cut.dim)[0]
    return Sharded(part, split)


def _forward(name: str) -> Any:
    def passed_on(self: Recorded, *args: Any) -> Any:  # `attribution` knows the name
        return getattr(self.local, name)(*map(plain, args))

    return passed_on


for _name in OPERATORS:
    setattr(Recorded, f"__{_name}__", _forward(f"__{_name}__"))

tree.register_node(
    Recorded,
    lambda leaf: ((leaf.local,), leaf.layout),
    lambda layout, children: Recorded(children[0], layout),
)


@dataclass(frozen=True)
class LeafGroup:
    """Leaves that share a buffer.

    Args:
        buffer: its name: the unit that owns it, and its first leaf.
        paths: the leaves, in the tree's order.
        dtype: theirs.
        owner: where along an axis all calls that take them run, if at one coordinate.
        compute: the one dtype in which all these calls want them, if not their own.
    """

    buffer: str
    paths: tuple[str, ...]
    dtype: torch.dtype
    owner: tuple[Owned, ...] = ()
    compute: torch.dtype | None = None


@dataclass
class Taken:
    """One unit call, and the leaves that it was given."""

    path: tuple[str, ...]  # names of the units around, and the unit's own
    numbers: tuple[int, ...]
    leaves: list[str]
    owner: tuple[Owned, ...] = ()  # where it runs, if not on every rank
    casts: str = ""  # the dtypes that ``precision`` asked for
    kinds: Sequence[torch.dtype | None] = ()  # by leaf, the one to compute in

    def __str__(self) -> str:
        place = ", ".join(f"{p.axis}={p.coordinate}" for p in self.owner)
        return (
            f"{'/'.join(self.path)}({', '.join(self.leaves)})"
            + (f" on {place}" if place else "")
            + (f" in {self.casts}" if self.casts else "")
        )


_Reading = tuple[str, tuple[int, ...]]  # a leaf, and the numbers of the unit call
_Where = tuple[str, bool]  # file and line, and whether a gradient call was around


@dataclass
class Findings:
    """Findings of one run of a step.

    ``groups`` are made of ``taken`` (which unit calls took which leaves), ``inside``
    (which unit's own body read a leaf), ``outside`` (leaves read by a loss outside
    every unit, and where) and ``trained``. ``claims``: what else is to be the same on
    every rank. ``rank_local_paths``: of a returned state, those of each rank's own
    values; ``rank_local``: leaves that are, which stay plain tensors. ``planned``: what
    was made of it, once for all simulated ranks that share it.
    """

    layouts: dict[str, Layout] = field(default_factory=dict)
    taken: list[Taken] = field(default_factory=list)
    inside: dict[_Reading, _Where] = field(default_factory=dict)
    outside: dict[str, _Where] = field(default_factory=dict)
    trained: set[str] = field(default_factory=set)
    handlers: list[Any] = field(default_factory=list)
    differentiated: bool = False
    rank_local_paths: set[str] = field(default_factory=set)
    rank_local: frozenset[str] = frozenset()
    claims: list[tuple[str, str]] = field(default_factory=list)
    planned: dict[Any, Any] = field(default_factory=dict)

    def outer(self, group: LeafGroup) -> list[tuple[Placement, ...]]:
        """The placements of a group's leaves before they are cut to fit the buffer."""
        return [(*group.owner, *self.layouts[path].parts) for path in group.paths]

    def lines(self) -> list[tuple[str, str]]:
        """Lines (subject, text) that are equal on all ranks that run one program.

        Nothing of a batch's lengths is in it, which ranks may choose for themselves.
        """
        if found := self.planned.get("lines"):
            return found
        found = [(f"unit call {i}", str(taken)) for i, taken in enumerate(self.taken)]
        for path, layout in self.layouts.items():
            trained = ", differentiated" if path in self.trained else ""
            said = str(replace(layout, name="")).removesuffix(" whole")
            found.append((f"leaf {path!r}", said + trained))
        outside = ", ".join(map(repr, sorted(self.outside))) or "nothing"
        found += [("read outside units", outside), *self.claims]
        return self.planned.setdefault("lines", found)

    def whole(self, gathers: bool = True) -> set[str]:
        """Leaves that stay whole: a loss reads them outside its units, and no unit.

        Args:
            gathers: whether units gather their leaves, of which a loss then reads this
                rank's parts.
        """
        calls = self._calls()
        found = self.outside | {
            path: where
            for (path, numbers), where in self.inside.items()
            if not _takes(calls[path], numbers)  # it came in as an input
        }
        inner = any(in_loss for _, in_loss in found.values())
        read = {
            path: where
            for path, (where, in_loss) in found.items()
            if in_loss or not (inner or self.differentiated)
        }
        taken = {path for t in self.taken for path in t.leaves} if gathers else set()
        return (set(read) | self.rank_local) - taken

    def _calls(self) -> dict[str, list[Taken]]:
        """The unit calls that were given each leaf."""
        calls: dict[str, list[Taken]] = defaultdict(list)
        for t in self.taken:
            for path in t.leaves:
                calls[path].append(t)
        return calls

    def owner(self, path: str) -> tuple[Owned, ...]:
        """The one place along an axis where all calls that take a leaf run, if any."""
        return _owner(self._calls()[path])

    def groups(self, min_bytes: int = 0, gathers: bool = True) -> list[LeafGroup]:
        """The buffers, in the order in which units first want them."""
        whole = self.whole(gathers)
        calls = self._calls()
        found: dict[Any, list[str]] = {}
        for path, layout in self.layouts.items():
            if path in whole:
                continue
            mine = [t for t in calls[path] if self._owns(t, path, calls[path])]
            key = (
                tuple(t.numbers for t in mine),
                _common([t.path for t in mine]),
                layout.dtype,
                path in self.trained,
                _owner(calls[path]),
                layout.axes,
                _computed(path, layout.dtype, mine),
            )
            found.setdefault(key, []).append(path)
        ordered = sorted(found.items(), key=lambda item: item[0][0] or ((1 << 30,),))
        merged = _merged(ordered, min_bytes, self.layouts)
        return [
            LeafGroup(f"{'/'.join(unit)}:{name}", tuple(paths), dtype, owner, compute)
            for unit, dtype, name, paths, owner, compute in merged
        ]

    def _owns(self, t: Taken, path: str, calls: list[Taken]) -> bool:
        """True if ``t`` gathers the leaf: no unit around it, and no inner one, does."""
        n, reads = len(t.numbers), (path, t.numbers) in self.inside
        outer = [t.numbers[:k] for k in range(1, n)]
        if any((path, numbers) in self.inside for numbers in outer):
            return False
        inner = [o for o in calls if len(o.numbers) > n and o.numbers[:n] == t.numbers]
        return reads or not inner

    def order(
        self, groups: list[LeafGroup], coordinates: Mapping[str, int] | None = None
    ) -> list[tuple[str, ...]]:
        """The buffers that each unit call wants, call by call.

        Args:
            coordinates: those of a rank, for the calls that run there alone.
        """
        at = {} if coordinates is None else coordinates
        buffer = {path: g.buffer for g in groups for path in g.paths}
        order = []
        for t in self.taken:
            if any(at.get(p.axis, p.coordinate) != p.coordinate for p in t.owner):
                continue
            name = "/".join(t.path) + "/"
            wanted = [buffer[p] for p in t.leaves if p in buffer]
            mine = [b for b in wanted if not b.partition(":")[0].startswith(name)]
            if mine:
                order.append(tuple(dict.fromkeys(mine)))
        return order


def _takes(calls: list[Taken], numbers: tuple[int, ...]) -> bool:
    """True if a unit call, or one around it, is among those that take a leaf."""
    return any(t.numbers == numbers[: len(t.numbers)] for t in calls)


def _owner(calls: list[Taken]) -> tuple[Owned, ...]:
    owners = {t.owner for t in calls}
    return owners.pop() if len(owners) == 1 else ()


def _computed(path: str, dtype: torch.dtype, calls: list[Taken]) -> torch.dtype | None:
    """The dtype in which all of these calls want a leaf, if it has another."""
    if not dtype.is_floating_point:
        return None
    found = {dict(zip(t.leaves, t.kinds, strict=False)).get(path) for t in calls}
    only = found.pop() if len(found) == 1 else None
    return None if only == dtype else only


def _common(paths: list[tuple[str, ...]]) -> tuple[str, ...]:
    """The beginning that all ``paths`` share."""
    if not paths:
        return ()
    first = paths[0]
    same = 0
    while same < len(first) and all(p[: same + 1] == first[: same + 1] for p in paths):
        same += 1
    return first[:same]


def _merged(ordered: list[Any], min_bytes: int, layouts: dict[str, Layout]):
    """Neighbouring small groups as one, until they reach ``min_bytes``."""
    out: list[tuple[tuple[str, ...], torch.dtype, str, list[str], Any, Any]] = []
    open_: dict[Any, tuple[int, int]] = {}  # the last one of each kind, and its size
    for (numbers, unit, dtype, trained, owner, axes, compute), paths in ordered:
        nbytes = sum(layouts[p].nbytes for p in paths)
        single = len(numbers) == 1
        around = numbers[0][:-1] if single else None
        kind = (around, unit[:-1], dtype, trained, owner, compute, axes)
        key = kind if single else None
        small = single and nbytes < min_bytes
        at, size = open_.get(key, (0, min_bytes))
        if small and size < min_bytes:
            _, _, name, so_far, *_ = out[at]
            joint = f"{name} + {paths[0]}"
            out[at] = (unit[:-1], dtype, joint, [*so_far, *paths], owner, compute)
            open_[key] = at, size + nbytes
            continue
        # Others come between, but for those of the same calls that are split, or
        # computed in another dtype.
        mine = compute, axes
        open_ = {k: v for k, v in open_.items() if k[-2:] != mine}
        if small:
            open_[key] = len(out), nbytes
        out.append((unit, dtype, paths[0], list(paths), owner, compute))
    return out
