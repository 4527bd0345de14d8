"""Facts of a type check about tensors, their rows, autograd nodes and operands."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import source_line
from fsfunc.comm.descriptions import checksums, has_values
from fsfunc.runtime.memory import StorageTable
from fsfunc.sharded.leaf import is_sharded
from fsfunc.tracing.operators import partial_view
from fsfunc.tracing.provenance import NOTHING, Gradient, Provenance, Rows
from fsfunc.tracing.types import PARTS, Kind, Operand, joint


class Seen(NamedTuple):
    """Facts about a tensor.

    Args:
        what: its name, for messages; ``where``: the line that made it, if known.
        digest: a key of the value of a constant; None if that is unknown.
        uniform: whether all of its elements are one number.
        flat: whether it is the flattened part of a leaf of other dims.
        parameter: whether it is made of replicated values, whose gradients are means.
        value: a key, equal for what is computed in the same way from equal values.
        made_of: the rows and the gradients that it is computed from.
    """

    kind: Kind
    what: str
    where: str = ""
    digest: Any = None
    uniform: bool = False
    flat: bool = False
    parameter: bool = False
    value: int = 0
    made_of: Provenance = NOTHING

    def __str__(self) -> str:
        known = self.where not in ("", "?")  # the library's own has no line
        return f"{self.what} ({self.where})" if known else self.what


def memory(x: Tensor) -> int:
    """A key of the storage of a tensor."""
    return _torch.storage_key(_torch.unwrapped(x))


class _Leaf(NamedTuple):
    """What a leaf is called that has these elements of a storage."""

    start: int
    stop: int
    what: str


class Known:
    """Tensors by their storages: a type belongs to a storage, and only rises."""

    def __init__(self) -> None:
        self.own = OwnTensors()
        self._seen = StorageTable[Seen]()
        self._leaves = StorageTable[list[_Leaf]]()  # that share a storage
        self._paired = StorageTable[bool]()  # see `pair`
        self._numbers = itertools.count(1)

    def of(self, x: Tensor) -> Seen:
        """The facts about a tensor; those of a constant, if there are none."""
        if (found := self.seen(x)) is not None:
            return found
        digest = digest_of(x)
        value = hash(memory(x) if digest is None else digest)
        return Seen(Kind.K, "a constant", "", digest, value=value)

    def seen(self, x: Tensor) -> Seen | None:
        """The facts about a tensor, if there are any."""
        found = self._seen.get(x)
        if found is None or (leaves := self._leaves.get(x)) is None:
            return found
        start = int(_torch.unwrapped(x).storage_offset())
        for leaf in leaves:
            if leaf.start <= start < leaf.stop:
                return found._replace(what=leaf.what)
        return found

    def name_part(self, x: Tensor, start: int, stop: int, what: str) -> None:
        """Says what to call a leaf that has these elements of ``x``."""
        first = int(_torch.unwrapped(x).storage_offset())
        new = _Leaf(first + start, first + stop, what)
        self._leaves[x] = [*(self._leaves.get(x) or []), new]

    def pair(self, x: Tensor) -> None:
        """Says that of a part's memory there are views as pairs of real numbers."""
        self._paired[x] = True

    def is_paired(self, x: Tensor) -> bool:
        return bool(self._paired.get(x))

    def are_pairs(self, x: Tensor, seen: Seen) -> bool:
        """True of such a view: its last dim has the numbers of a pair, not elements."""
        if not self.is_paired(x):
            return False
        x = _torch.unwrapped(x)
        if x.is_complex() or x.ndim == 1 and (seen.flat or seen.kind is Kind.S):
            return False  # the second: a part, of two elements
        return x.shape[-1:] == (2,) and x.stride(-1) == 1

    def kind(self, x: Tensor) -> Kind:
        return self.of(x).kind

    def value(self, x: Tensor, seen: Seen | None = None) -> int:
        """A hash that is equal for equal values."""
        seen = seen or self.of(x)
        return hash((seen.value, partial_view(_torch.unwrapped(x))))

    def made_of(self, x: Tensor, seen: Seen | None = None) -> Provenance:
        """Of what a tensor is made; of a view of an own one, which rows it shows."""
        seen = seen or self.of(x)
        rows, found = None, seen.made_of
        if seen.kind is Kind.V:
            rows = self.own.rows(_torch.unwrapped(x))
        return found if rows is None else found._replace(rows=found.rows | {rows})

    def weighed(self, x: Tensor, by: Tensor) -> Provenance:
        """Of what rows are made that a constant chooses, or weighs."""
        which = Rows(self.value(x), self.of(x).what, ("weighed", self.value(by)))
        return Provenance(frozenset((which,)))

    def tensors(self, values: Any) -> list[Tensor]:
        """The tensors of a tree, of sharded leaves this rank's parts."""
        leaves = tree.leaves(values, is_leaf=is_sharded)
        leaves = [x._local if is_sharded(x) else x for x in leaves]
        return [x for x in leaves if isinstance(x, Tensor)]

    def each_made_of(self, values: Any) -> list[Provenance]:
        """Of what the tensors of a tree are made."""
        return [self.made_of(x) for x in self.tensors(values)]

    def give(self, x: Tensor, kind: Kind, what: str) -> None:
        """Says of what type a tensor is that came from here, and what to call it."""
        self.put(x, Seen(kind, what, source_line()))

    def put(self, x: Tensor, seen: Seen) -> None:
        self._seen[x] = seen = self._told_apart(seen)
        if seen.kind in (Kind.K, Kind.A, Kind.V):
            self.own.add(_torch.unwrapped(x), seen.value, seen.what)

    def _told_apart(self, seen: Seen) -> Seen:
        return seen if seen.value else seen._replace(value=next(self._numbers))

    def change(self, x: Tensor, **changes: Any) -> None:
        """Says something else of a tensor that is known."""
        self.put(x, self.of(x)._replace(**changes))

    def write(self, x: Tensor, seen: Seen) -> None:
        """The same of a tensor that is written into: its type does not fall."""
        before = self.of(x)
        if before.kind in PARTS or seen.kind in PARTS:
            rises = before.kind not in PARTS
        else:
            rises = joint({before.kind, seen.kind}) is not before.kind
        again = before.kind is seen.kind is Kind.K  # another constant
        if not rises and not again:
            seen = before._replace(value=seen.value, made_of=seen.made_of)
        # Elsewhere in its memory may be another number.
        part = _torch.unwrapped(x)
        if part.nbytes < part.untyped_storage().nbytes():
            seen = seen._replace(uniform=False)
        if self.seen(x) is not None:  # of which `x` may be a part
            self._seen[x] = self._told_apart(seen)
        else:
            self.put(x, seen)

    def meet(self, x: Tensor, seen: Seen) -> None:
        """Says what a tensor is of which nothing was known.

        Of memory that leaves share it is flat if one of them has several dims.
        """
        before = self.seen(x)
        if before is None or before.kind is Kind.K:
            self.put(x, seen)
        elif seen.flat and not before.flat:
            self.put(x, before._replace(flat=True))


def digest_of(x: Tensor) -> Any:
    """A digest of a constant's values; None where it has none."""
    if not has_values(x) or _torch.is_wrapped(x):
        return None
    with _torch.beneath_all_modes():
        return tuple(x.shape), checksums([x])[0]


class Origin(NamedTuple):
    """The operator that an autograd node is of.

    ``trusted``: the library called it, or the type check knows it as the library does;
    ``of_pairs``: it takes one number of each pair.
    """

    name: str
    where: str
    trusted: bool
    of_pairs: bool = False


class Nodes:
    """The operator of each autograd node, and the nodes of the bodies of units."""

    def __init__(self) -> None:
        self._counted = self._outside = _torch.next_sequence_number()
        self._origins: dict[int, Origin] = {}
        self._starts: list[int] = []  # of bodies, in order; and their ends
        self._ends: list[int] = []
        self._within: set[int] = set()  # of derivatives of bodies

    def new(self) -> range:
        """Those made since the last time: of each ``torch.func`` level one."""
        start, self._counted = self._counted, _torch.next_sequence_number()
        if _torch.takes_tangents():
            self._outside = self._counted
        return range(start, self._counted)

    def of_function(self) -> range:
        """Those made since an operator ran outside every ``autograd.Function``.

        In a Function's forward its own node is among them, which is made just before;
        of the others no tensor comes out.
        """
        return range(self._outside, _torch.next_sequence_number())

    def body(self, start: int) -> None:
        """All since ``start`` are of a unit's body."""
        while self._starts and self._starts[-1] >= start:  # those of units within it
            self._starts.pop()
            self._ends.pop()
        self._starts.append(start)
        self._ends.append(_torch.next_sequence_number())

    def came_from(self, numbers: range, origin: Origin) -> None:
        self._origins.update(dict.fromkeys(numbers, origin))

    def in_a_body(self, node: Any, numbers: range) -> bool:
        """True if a node is of a unit's body; so are ``numbers``, which it makes."""
        number = _torch.sequence_number(node)
        i = bisect_right(self._starts, number)
        if i and number < self._ends[i - 1] or number in self._within:
            self._within.update(numbers)
            return True
        return False

    def origin(self, node: Any, numbers: range = range(0)) -> Origin | None:
        """The operator that a node is of; ``numbers``, that it makes, are then too."""
        if node is None:
            return None
        found = self._origins.get(_torch.sequence_number(node))
        if found is not None:
            self.came_from(numbers, found)
        return found


def keeps_pairs(x: Tensor, y: Tensor) -> bool:
    """True if a view ``y`` shows all pairs of ``x``, or the same number of each."""
    x, y = _torch.unwrapped(x), _torch.unwrapped(y)
    if y.shape == x.shape:
        return y.stride() == x.stride()
    if y.shape != x.shape[:-1]:
        return False
    which = int(y.storage_offset()) - int(x.storage_offset())
    return y.is_complex() or y.stride() == x.stride()[:-1] and which in (0, 1)


def operand(x: Tensor, seen: Seen) -> Operand:
    """A tensor of which something is known."""
    number = seen.uniform or x.numel() == 1
    if not number:
        steps = x.stride() if x.layout == torch.strided else (0,)
        number = 0 in steps and all(
            n == 1 or step == 0 for n, step in zip(x.shape, steps, strict=False)
        )
    return Operand(seen.kind, number, tuple(x.shape))


# Rows of own tensors, found by their memory

_SEVERAL = 4  # of fewer rows the halves are single rows too


class _Own(NamedTuple):
    """A rank's own tensor: its offset in memory, and the stride of its rows."""

    value: int
    name: str
    start: int
    stop: int
    rows: int
    step: int


class OwnTensors:
    """The rank's own tensors in a step, by their memory, in which views are found.

    Rows are along dim 0, along which a batch is cut among the ranks. ``were_picked``:
    whether the step took a part of one.
    """

    def __init__(self) -> None:
        self._own = StorageTable[list[_Own]]()
        self._lengths: dict[int, int] = {}
        self.were_picked = False

    def add(self, x: Tensor, value: int, name: str) -> None:
        """An own tensor that fills its memory, or a range of it."""
        if x.layout != torch.strided or not x.ndim or not x.numel():
            return
        start, stop = _span(x)
        new = _Own(value, name, start, stop, x.shape[0], x.stride(0))
        found = self._own.get(x) or []
        within = [own for own in found if own.start <= start and stop <= own.stop]
        if any((own.start, own.stop) != (start, stop) for own in within):
            return  # it is a part of one
        kept = [own for own in found if own.stop <= start or stop <= own.start]
        self._own[x] = [*kept, new]

    def rows(self, x: Tensor) -> Rows | None:
        """The rows of an own tensor that a view of its memory shows; None: all."""
        found = self._own.get(x)
        if not found or not x.numel():
            return None
        start, stop = _span(x)
        for own in found:
            if own.step and own.start <= start and stop <= own.stop:
                at = _rows(x, start - own.start, own)
                if at is None:
                    return None
                self._lengths[own.value] = own.rows
                return Rows(own.value, own.name, at)
        return None

    def cover(self, gradient: Gradient) -> bool:
        """True if a gradient is of all rows of each tensor that it was taken of.

        Of rows that an index tensor chose nobody knows: of those it is not.
        """
        seen: dict[int, int] = defaultdict(int)
        for rows in gradient.rows:
            block = isinstance(rows.at, tuple) and len(rows.at) == 2
            seen[rows.of] += rows.at[1] if block and type(rows.at[1]) is int else 1
        return all(n >= self._lengths.get(of, n + 1) for of, n in seen.items())

    def lone(self, rows: Rows) -> bool:
        """True if some rows are one alone, of several, or were chosen one by one."""
        at = rows.at
        if not (isinstance(at, tuple) and len(at) == 2 and type(at[1]) is int):
            return True
        few = self._lengths.get(rows.of, 0) < _SEVERAL
        self.were_picked |= few
        return at[1] == 1 and not few

    def picked(self, x: Tensor) -> None:
        """Notes that the step took a part of a tensor, perhaps all of it."""
        self.were_picked |= bool(self._own.get(x))


def _span(x: Tensor) -> tuple[int, int]:
    """The range of memory, in elements, of a tensor's elements."""
    start = int(x.storage_offset())
    if x.is_contiguous():
        return start, start + x.numel()
    reach = sum(
        (int(n) - 1) * int(step) for n, step in zip(x.shape, x.stride(), strict=True)
    )
    return start, start + reach + 1


def _rows(x: Tensor, start: int, own: _Own) -> Any:
    """The first row and how many follow it, or how; None: they are all there."""
    steps, reach = [], 1
    for n, step in zip(x.shape, x.stride(), strict=True):
        if step % own.step == 0 and 0 < step // own.step < own.rows:
            steps.append((step // own.step, n))
        elif own.step > step and (n - 1) * step >= own.step:  # of several dims as one
            steps.append((1, -(-n * step // own.step)))
    for step, n in sorted(steps):
        if step > reach and n > 1:
            return start // own.step % own.rows, tuple(sorted(steps))
        reach += (n - 1) * step
    return None if reach >= own.rows else (start // own.step % own.rows, reach)
