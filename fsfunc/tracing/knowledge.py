"""Facts of a type check about tensors, autograd nodes and operands."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import source_line
from fsfunc.comm.comparison import checksums, has_values
from fsfunc.runtime.memory import StorageTable
from fsfunc.sharded.leaf import is_sharded
from fsfunc.tracing.own_rows import OwnTensors
from fsfunc.tracing.provenance import NOTHING, Provenance, Rows
from fsfunc.tracing.types import PARTS, Kind, Operand, joint


@dataclass(frozen=True)
class Seen:
    """Facts about a tensor.

    Args:
        what: what to call it; ``where``: the line it came from, if that tells anything.
        digest: of a constant, what tells it from others; None where nobody knows.
        uniform: whether all of its elements are one number.
        flat: whether it shows a placed leaf of other dims as a row of elements.
        parameter: whether it is made of one value on all ranks, with means.
        value: the same for what is computed in the same way of the same values.
        root: of what has its rows in another order, the value that they are of.
        made_of: of which rows, and which gradients.
    """

    kind: Kind
    what: str
    where: str = ""
    digest: Any = None
    uniform: bool = False
    flat: bool = False
    parameter: bool = False
    value: int = 0
    root: int = 0
    made_of: Provenance = NOTHING

    def __str__(self) -> str:
        known = self.where not in ("", "?")  # the library's own has no line
        return f"{self.what} ({self.where})" if known else self.what


class Known:
    """Tensors by their storages: a type belongs to a storage, and only rises."""

    def __init__(self) -> None:
        self.own = OwnTensors()
        self._seen = StorageTable[Seen]()
        self._numbers = itertools.count(1)

    def of(self, x: Tensor) -> Seen:
        """The facts about a tensor; those of a constant, if there are none."""
        if (found := self.seen(x)) is not None:
            return found
        digest = digest_of(x)
        key = _torch.storage_key(_torch.unwrapped(x))
        value = hash(key if digest is None else digest)
        return Seen(Kind.K, "a constant", "", digest, value=value)

    def seen(self, x: Tensor) -> Seen | None:
        """The facts about a tensor, if there are any."""
        return self._seen.get(x)

    def kind(self, x: Tensor) -> Kind:
        return self.of(x).kind

    def value(self, x: Tensor) -> int:
        """A hash that is equal for equal values."""
        return hash((self.of(x).value, shown(_torch.unwrapped(x))))

    def made_of(self, x: Tensor) -> Provenance:
        """Of what a tensor is made; of a view of an own one, which rows it shows."""
        base, seen = _torch.unwrapped(x), self.of(x)
        rows, found = None, seen.made_of
        if seen.kind is Kind.V:
            rows = self.own.rows(base)
        return found if rows is None else found._replace(rows=found.rows | {rows})

    def root(self, x: Tensor) -> int:
        """A key of the tensor that rows are of, whatever their order."""
        return self.of(x).root or self.value(x)

    def weighed(self, x: Tensor, by: Tensor) -> Provenance:
        """Of what rows are made that a constant chooses, or weighs."""
        which = Rows(self.root(x), self.of(x).what, ("weighed", self.value(by)))
        return Provenance(frozenset((which,)))

    def tensors(self, values: Any) -> list[Tensor]:
        """The tensors of a tree, of sharded leaves this rank's parts."""
        leaves = tree.leaves(values, is_leaf=is_sharded)
        leaves = [x._local if is_sharded(x) else x for x in leaves]
        return [x for x in leaves if isinstance(x, Tensor)]

    def each_made_of(self, values: Any) -> list[Provenance]:
        """Of what the tensors of a tree are made."""
        return [self.made_of(x) for x in self.tensors(values)]

    def give(self, x: Tensor, kind: Kind, what: str, where: str | None = None) -> None:
        """Says of what type a tensor is, what to call it, and where it came from."""
        self.put(x, Seen(kind, what, source_line() if where is None else where))

    def put(self, x: Tensor, seen: Seen) -> None:
        self._seen[x] = seen = self._told_apart(seen)
        if seen.kind in (Kind.K, Kind.A, Kind.V):
            self.own.add(_torch.unwrapped(x), seen.value, seen.root, seen.what)

    def _told_apart(self, seen: Seen) -> Seen:
        return seen if seen.value else replace(seen, value=next(self._numbers))

    def change(self, x: Tensor, **changes: Any) -> None:
        """Says something else of a tensor that is known."""
        self.put(x, replace(self.of(x), **changes))

    def write(self, x: Tensor, seen: Seen) -> None:
        """The same of a tensor that is written into: its type does not fall."""
        before = self.of(x)
        if before.kind in PARTS or seen.kind in PARTS:
            rises = before.kind not in PARTS
        else:
            rises = joint({before.kind, seen.kind}) is not before.kind
        again = before.kind is seen.kind is Kind.K  # another constant
        if not rises and not again:
            seen = replace(before, value=seen.value, made_of=seen.made_of)
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
            self.put(x, replace(before, flat=True))


def digest_of(x: Tensor) -> Any:
    """A digest of a constant's values; None where it has none."""
    if not has_values(x) or _torch.is_wrapped(x):
        return None
    with _torch.beneath_all_modes():
        return tuple(x.shape), checksums([x])[0]


@dataclass(frozen=True)
class Origin:
    """The operator that an autograd node is of; ``trusted``: the library called it."""

    name: str
    where: str
    trusted: bool


class Nodes:
    """The operator of each autograd node, and the nodes of the bodies of units."""

    def __init__(self) -> None:
        self._counted = _torch.next_sequence_number()
        self._origins: dict[int, Origin] = {}
        self._bodies: list[tuple[int, int]] = []
        self._within: set[int] = set()  # of derivatives of bodies

    def new(self) -> range:
        """Those made since the last time: of each ``torch.func`` level one."""
        start, self._counted = self._counted, _torch.next_sequence_number()
        return range(start, self._counted)

    def body(self, start: int) -> None:
        """All since ``start`` are of a unit's body."""
        self._bodies.append((start, _torch.next_sequence_number()))

    def begin(self) -> int:
        return _torch.next_sequence_number()

    def came_from(self, numbers: range, origin: Origin) -> None:
        self._origins.update(dict.fromkeys(numbers, origin))

    def in_a_body(self, node: Any, numbers: range) -> bool:
        """True if a node is of a unit's body; so are ``numbers``, which it makes."""
        number = _torch.sequence_number(node)
        inside = any(start <= number < end for start, end in self._bodies)
        if inside or number in self._within:
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


def operand(x: Tensor, seen: Seen) -> Operand:
    """A tensor of which something is known."""
    steps = zip(x.shape, x.stride(), strict=True) if x.layout == torch.strided else ()
    number = x.numel() == 1 or all(n == 1 or step == 0 for n, step in steps)
    return Operand(seen.kind, number or seen.uniform, tuple(x.shape))


OF_LISTS = ("aten::_foreach_", "aten::_fused_")


def rows(args: Any, kwargs: Any, made: list[Tensor]) -> list[tuple[list[Any], Any]]:
    """Arguments and results of an operator over lists, at each position."""
    every = [*args, *kwargs.values()]
    n = len(args[0])
    lists = [x for x in every if isinstance(x, (list, tuple)) and len(x) == n]
    others = [x for x in every if not isinstance(x, (list, tuple))]
    results = [made[i::n] for i in range(n)] if len(made) % n == 0 else [made] * n
    return [([*(x[i] for x in lists), *others], results[i]) for i in range(n)]


def names_dims(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """True if an operator is given dims to work along."""
    said = {a.name: x for a, x in zip(func._schema.arguments, args, strict=False)}
    said |= kwargs
    return any(said.get(name) not in (None, [], ()) for name in ("dim", "dims"))


def number(x: Any) -> Any:
    """A comparable value for an argument that is no tensor."""
    if isinstance(x, torch.Generator):
        return "generator", x.initial_seed()
    simple = isinstance(x, (bool, int, float, complex, str, type(None)))
    return x if simple else type(x).__name__


def shown(x: Tensor) -> Any:
    """Offset, shape and strides of a tensor that shows only a part of its memory."""
    if x.layout != torch.strided or x.nbytes == x.untyped_storage().nbytes():
        return None
    return x.storage_offset(), tuple(x.shape), x.stride()


def flat(values: Any) -> list[Any]:
    """The elements of nested lists, as one list."""
    if isinstance(values, (tuple, list)):
        return [y for x in values for y in flat(x)]
    if isinstance(values, dict):
        return [y for x in values.values() for y in flat(x)]
    return [values]
