"""What a type check knows of tensors, of their rows, and of autograd nodes.

`TensorFacts`: the type of one tensor, its name for messages, of what it is made.
`FactTable`: the facts of a step, by the storages of tensors. `AutogradNodes`: which
operator of the forward pass a node belongs to. `OwnTensors`: which rows of a rank's own
tensor a view shows. `typed_operators` and `checker` fill and read them.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from fsfunc import _torch, tree
from fsfunc.comm.attribution import source_line
from fsfunc.comm.descriptions import checksums, has_values
from fsfunc.runtime.memory import StorageTable
from fsfunc.sharded.leaf import is_sharded
from fsfunc.tracing.operators import partial_view
from fsfunc.tracing.provenance import (
    NOTHING,
    Gradient,
    Provenance,
    RowBlock,
    RowChoice,
    Rows,
)
from fsfunc.tracing.types import PARTS, Kind, Operand, joint_kind
from fsfunc.tree import PyTree


class TensorFacts(NamedTuple):
    """Facts about a tensor.

    Args:
        kind: its type.
        title: its name, for messages.
        line: the line that made it, if known.
        digest: a key of the value of a constant; None if that is unknown.
        uniform: whether all of its elements are one number.
        flat: whether it is the 1-D part of a leaf of other dims.
        from_parameters: whether it is made of replicated values, so that gradients by
            it are means.
        value_key: a key, equal for what is computed in the same way from equal values.
        provenance: the rows and the gradients that it is computed from.
    """

    kind: Kind
    title: str
    line: str = ""
    digest: Hashable = None
    uniform: bool = False
    flat: bool = False
    from_parameters: bool = False
    value_key: int = 0
    provenance: Provenance = NOTHING

    def __str__(self) -> str:
        has_line = self.line not in ("", "?")  # what the library makes has no line
        return f"{self.title} ({self.line})" if has_line else self.title


def memory_key(x: Tensor) -> int:
    """Returns a key of the storage of a tensor, beneath torch.func's wrappers."""
    return _torch.storage_key(_torch.unwrapped(x))


class _LeafRange(NamedTuple):
    """The name of a leaf, and the elements of a shared storage that it has."""

    start: int
    stop: int
    title: str


class FactTable:
    """The facts about the tensors of a step, by their storages.

    A type belongs to a storage: a view has that of its base, and a write into one is a
    write into all. In a write a type only rises, as what is written into a slice does
    not change the rest.

    Attributes:
        rank_local: the rank's own tensors, and which rows of them a view shows.
    """

    def __init__(self) -> None:
        self.rank_local: OwnTensors = OwnTensors()
        self._facts = StorageTable[TensorFacts]()
        self._leaf_ranges = StorageTable[list[_LeafRange]]()  # of packed buffers
        self._paired = StorageTable[bool]()  # see `mark_paired`
        self._new_keys = itertools.count(1)  # keys for values that nothing tells apart

    def of(self, x: Tensor) -> TensorFacts:
        """Returns the facts about a tensor; those of a constant, if there are none."""
        if (facts := self.find(x)) is not None:
            return facts
        digest = constant_digest(x)
        value = hash(memory_key(x) if digest is None else digest)
        return TensorFacts(Kind.K, "a constant", "", digest, value_key=value)

    def find(self, x: Tensor) -> TensorFacts | None:
        """Returns the facts about a tensor, if there are any.

        Of a leaf in a packed buffer they bear its own name.
        """
        facts = self._facts.get(x)
        if facts is None or (leaves := self._leaf_ranges.get(x)) is None:
            return facts
        first = int(_torch.unwrapped(x).storage_offset())
        for leaf in leaves:
            if leaf.start <= first < leaf.stop:
                return facts._replace(title=leaf.title)
        return facts

    def name_leaf(self, x: Tensor, start: int, stop: int, title: str) -> None:
        """Notes the name of the leaf that has the elements [start, stop) of ``x``."""
        offset = int(_torch.unwrapped(x).storage_offset())
        leaf = _LeafRange(offset + start, offset + stop, title)
        self._leaf_ranges[x] = [*(self._leaf_ranges.get(x) or []), leaf]

    def mark_paired(self, x: Tensor) -> None:
        """Notes that a part of complex numbers is viewed as pairs of real ones."""
        self._paired[x] = True

    def is_paired(self, x: Tensor) -> bool:
        return bool(self._paired.get(x))

    def shows_pairs(self, x: Tensor, facts: TensorFacts) -> bool:
        """Returns whether the last dim of ``x`` has the two numbers of each pair.

        Args:
            x: a view of a part that was marked by `mark_paired`.
            facts: the facts about it.
        """
        if not self.is_paired(x):
            return False
        x = _torch.unwrapped(x)
        if x.is_complex() or x.ndim == 1 and (facts.flat or facts.kind is Kind.S):
            return False  # in the second case a part, of two elements
        return x.shape[-1:] == (2,) and x.stride(-1) == 1

    def kind(self, x: Tensor) -> Kind:
        return self.of(x).kind

    def value_key(self, x: Tensor, facts: TensorFacts | None = None) -> int:
        """Returns a key that is equal for equal values; a view has one of its own."""
        facts = facts or self.of(x)
        return hash((facts.value_key, partial_view(_torch.unwrapped(x))))

    def provenance(self, x: Tensor, facts: TensorFacts | None = None) -> Provenance:
        """Returns of what a tensor is made.

        Of a view of a rank's own tensor, that includes the rows which it shows.
        """
        facts = facts or self.of(x)
        rows, provenance = None, facts.provenance
        if facts.kind is Kind.V:
            rows = self.rank_local.rows(_torch.unwrapped(x))
        return (
            provenance
            if rows is None
            else provenance._replace(rows=provenance.rows | {rows})
        )

    def weighed_rows(self, x: Tensor, weights: Tensor) -> Provenance:
        """Returns the provenance of rows of ``x`` that constant ``weights`` weigh.

        A mask, or a row of the identity, chooses rows by a product.
        """
        rows = Rows(
            self.value_key(x), self.of(x).title, ("weighed", self.value_key(weights))
        )
        return Provenance(frozenset((rows,)))

    def tensors_in(self, values: PyTree) -> list[Tensor]:
        """Returns the tensors of a tree; of sharded leaves this rank's parts."""
        leaves = tree.leaves(values, is_leaf=is_sharded)
        leaves = [x._local if is_sharded(x) else x for x in leaves]
        return [x for x in leaves if isinstance(x, Tensor)]

    def provenances(self, values: PyTree) -> list[Provenance]:
        """Returns of what each tensor of a tree is made."""
        return [self.provenance(x) for x in self.tensors_in(values)]

    def set_kind(self, x: Tensor, kind: Kind, title: str) -> None:
        """Notes the type of a tensor that was made at the user's present line.

        Args:
            title: what to call it.
        """
        self.set(x, TensorFacts(kind, title, source_line()))

    def set(self, x: Tensor, facts: TensorFacts) -> None:
        """Notes the facts about a tensor, in place of those that are known."""
        self._facts[x] = facts = self._with_value_key(facts)
        if facts.kind in (Kind.K, Kind.A, Kind.V):
            self.rank_local.add(_torch.unwrapped(x), facts.value_key, facts.title)

    def _with_value_key(self, facts: TensorFacts) -> TensorFacts:
        """Returns the facts with a new key of the value, if they have none."""
        return (
            facts if facts.value_key else facts._replace(value_key=next(self._new_keys))
        )

    def change(self, x: Tensor, **changes: Any) -> None:
        """Changes some of the facts about a tensor."""
        self.set(x, self.of(x)._replace(**changes))

    def record_write(self, x: Tensor, facts: TensorFacts) -> None:
        """Notes the facts about what is written into a tensor, whose type may rise.

        Args:
            x: the tensor, or a view of a part of it.
            facts: the facts about what is written.
        """
        before = self.of(x)
        if before.kind in PARTS or facts.kind in PARTS:
            type_rises = before.kind not in PARTS
        else:
            type_rises = joint_kind({before.kind, facts.kind}) is not before.kind
        # One constant over another is another constant, though no type rises.
        replaces_constant = before.kind is facts.kind is Kind.K
        if not type_rises and not replaces_constant:
            facts = before._replace(
                value_key=facts.value_key, provenance=facts.provenance
            )
        # The rest of its memory may hold another number.
        view = _torch.unwrapped(x)
        if view.nbytes < view.untyped_storage().nbytes():
            facts = facts._replace(uniform=False)
        # ``x`` may be a view of what is known: then it is not added to the tensors in
        # which rows are found.
        if self.find(x) is not None:
            self._facts[x] = self._with_value_key(facts)
        else:
            self.set(x, facts)

    def add_argument(self, x: Tensor, facts: TensorFacts) -> None:
        """Notes the facts about an argument of the step.

        Where several leaves share memory, the facts of the first one stay. They say
        ``flat`` if they do of any of these leaves.
        """
        before = self.find(x)
        if before is None or before.kind is Kind.K:
            self.set(x, facts)
        elif facts.flat and not before.flat:
            self.set(x, before._replace(flat=True))


def constant_digest(x: Tensor) -> tuple[tuple[int, ...], Hashable] | None:
    """Returns a digest of a constant's values; None where it has no data."""
    if not has_values(x) or _torch.is_wrapped(x):
        return None
    with _torch.beneath_all_modes():
        return tuple(x.shape), checksums([x])[0]


class Origin(NamedTuple):
    """The operator of the forward pass that an autograd node belongs to.

    Args:
        name: the operator's name.
        line: the line that called it.
        trusted: whether the library called it, or the type check has allowed it.
        of_pairs: whether it takes one number of each pair.
    """

    name: str
    line: str
    trusted: bool
    of_pairs: bool = False


class AutogradNodes:
    """The operator of each autograd node, and which nodes belong to bodies of units.

    A node is known by its sequence number: torch numbers the nodes of a thread in the
    order in which they are made, and gives the numbers back in the backward pass.
    """

    def __init__(self) -> None:
        self._counted = self._outside = _torch.next_sequence_number()
        self._origins: dict[int, Origin] = {}
        self._starts: list[int] = []  # the first number of each unit's body, in order
        self._ends: list[int] = []  # and the one behind its last
        self._within: set[int] = set()  # numbers of derivatives of bodies

    def new_numbers(self) -> range:
        """Returns the numbers given out since the last call.

        An operator has one of them for each level of ``torch.func``.
        """
        start, self._counted = self._counted, _torch.next_sequence_number()
        if _torch.takes_tangents():
            self._outside = self._counted
        return range(start, self._counted)

    def function_numbers(self) -> range:
        """Returns the numbers given out since the last operator outside a Function.

        In the forward of an ``autograd.Function`` its own node is among them, as torch
        makes it just before. No tensor that has one of the others leaves the Function.
        """
        return range(self._outside, _torch.next_sequence_number())

    def mark_unit_body(self, start: int) -> None:
        """Notes that all numbers from ``start`` on belong to a unit's body."""
        # Bodies of units within it are parts of it.
        while self._starts and self._starts[-1] >= start:
            self._starts.pop()
            self._ends.pop()
        self._starts.append(start)
        self._ends.append(_torch.next_sequence_number())

    def set_origin(self, numbers: range, origin: Origin) -> None:
        """Notes the operator that nodes of these numbers belong to."""
        self._origins.update(dict.fromkeys(numbers, origin))

    def is_in_unit_body(self, node: Node, numbers: range) -> bool:
        """Returns whether a node belongs to a unit's body.

        Args:
            node: the node whose backward runs.
            numbers: those of the nodes that its backward makes, which belong there too.
        """
        number = _torch.sequence_number(node)
        i = bisect_right(self._starts, number)
        if i and number < self._ends[i - 1] or number in self._within:
            self._within.update(numbers)
            return True
        return False

    def origin(self, node: Node | None, numbers: range = range(0)) -> Origin | None:
        """Returns the operator that a node belongs to.

        Args:
            numbers: those of the nodes that its backward makes, which belong to the
                same operator.
        """
        if node is None:
            return None
        origin = self._origins.get(_torch.sequence_number(node))
        if origin is not None:
            self.set_origin(numbers, origin)
        return origin


def view_keeps_pairs(x: Tensor, y: Tensor) -> bool:
    """Returns whether view ``y`` shows all pairs of ``x``, or one number of each."""
    x, y = _torch.unwrapped(x), _torch.unwrapped(y)
    if y.shape == x.shape:
        return y.stride() == x.stride()
    if y.shape != x.shape[:-1]:
        return False
    number = int(y.storage_offset()) - int(x.storage_offset())
    return y.is_complex() or y.stride() == x.stride()[:-1] and number in (0, 1)


def operand_of(x: Tensor, facts: TensorFacts) -> Operand:
    """Returns what `types.result_kind` asks of a tensor."""
    is_one_number = facts.uniform or x.numel() == 1
    if not is_one_number:
        # One number that was expanded: all dims of several elements have stride 0.
        strides = x.stride() if x.layout == torch.strided else (0,)
        is_one_number = 0 in strides and all(
            n == 1 or stride == 0 for n, stride in zip(x.shape, strides, strict=False)
        )
    return Operand(facts.kind, is_one_number, tuple(x.shape))


# Rows of own tensors, found by their memory

# Of fewer rows a half is a single row too: there only a run with each row twice tells
# a loop over rows from halves.
_SEVERAL = 4


class _OwnTensor(NamedTuple):
    """A rank's own tensor in memory.

    Args:
        value_key: the key of its value.
        name: what to call it.
        start: the element of the storage at which it begins.
        stop: the one behind its last.
        rows: the number of its rows.
        row_stride: the stride from row to row.
    """

    value_key: int
    name: str
    start: int
    stop: int
    rows: int
    row_stride: int


class OwnTensors:
    """The rank's own tensors in a step, by their memory, in which views are found.

    Rows are along dim 0, along which a batch is cut among the ranks.

    Attributes:
        were_sliced: whether the step took a part of one.
    """

    def __init__(self) -> None:
        self._tensors = StorageTable[list[_OwnTensor]]()
        self._lengths: dict[int, int] = {}  # by the key of a value: its rows
        self.were_sliced: bool = False

    def add(self, x: Tensor, value: int, name: str) -> None:
        """Adds an own tensor that fills its memory, or a range of it.

        One that is a part of another is left out: it is a view of rows.
        """
        if x.layout != torch.strided or not x.ndim or not x.numel():
            return
        start, stop = _span(x)
        new = _OwnTensor(value, name, start, stop, x.shape[0], x.stride(0))
        tensors = self._tensors.get(x) or []
        within = [
            tensor
            for tensor in tensors
            if tensor.start <= start and stop <= tensor.stop
        ]
        if any((tensor.start, tensor.stop) != (start, stop) for tensor in within):
            return
        others = [
            tensor for tensor in tensors if tensor.stop <= start or stop <= tensor.start
        ]
        self._tensors[x] = [*others, new]

    def rows(self, x: Tensor) -> Rows | None:
        """Returns the rows of an own tensor that a view of its memory shows.

        None if it shows all of them, or is no view of one.
        """
        tensors = self._tensors.get(x)
        if not tensors or not x.numel():
            return None
        start, stop = _span(x)
        for tensor in tensors:
            if tensor.row_stride and tensor.start <= start and stop <= tensor.stop:
                which = _visible_rows(x, start - tensor.start, tensor)
                if which is None:
                    return None
                self._lengths[tensor.value_key] = tensor.rows
                return Rows(tensor.value_key, tensor.name, which)
        return None

    def is_of_all_rows(self, gradient: Gradient) -> bool:
        """Returns whether a gradient is of all rows of each tensor it was taken of.

        Which rows an index tensor or a constant chose is unknown: they count as one.
        """
        counts: dict[int, int] = defaultdict(int)
        for rows in gradient.rows:
            which = rows.which
            counts[rows.tensor] += which.count if isinstance(which, RowBlock) else 1
        return all(
            count >= self._lengths.get(tensor, count + 1)
            for tensor, count in counts.items()
        )

    def is_single(self, rows: Rows) -> bool:
        """Returns whether rows are a single one of several, or chosen one by one."""
        which = rows.which
        if not isinstance(which, RowBlock):
            return True
        has_few = self._lengths.get(rows.tensor, 0) < _SEVERAL
        self.were_sliced |= has_few
        return which.count == 1 and not has_few

    def note_slice(self, x: Tensor) -> None:
        """Notes that the step took a part of an own tensor, perhaps all of it."""
        self.were_sliced |= bool(self._tensors.get(x))


def _span(x: Tensor) -> tuple[int, int]:
    """Returns the range of its storage, in elements, that a tensor's elements span."""
    start = int(x.storage_offset())
    if x.is_contiguous():
        return start, start + x.numel()
    reach = sum(
        (int(size) - 1) * int(stride)
        for size, stride in zip(x.shape, x.stride(), strict=True)
    )
    return start, start + reach + 1


def _visible_rows(x: Tensor, start: int, tensor: _OwnTensor) -> RowChoice | None:
    """Returns the rows that a view shows, by position; None if it shows all.

    Where it skips some, that is the first one and its dims along the rows, each as
    (stride in rows, size).

    Args:
        x: the view.
        start: its first element, from the beginning of the own tensor.
        tensor: the tensor.
    """
    dims, row_count = [], 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        if (
            stride % tensor.row_stride == 0
            and 0 < stride // tensor.row_stride < tensor.rows
        ):
            dims.append((stride // tensor.row_stride, size))
        # A dim that runs over several rows, as ``flatten`` makes one of two.
        elif tensor.row_stride > stride and (size - 1) * stride >= tensor.row_stride:
            dims.append((1, -(-size * stride // tensor.row_stride)))
    for stride, size in sorted(dims):
        if stride > row_count and size > 1:
            return start // tensor.row_stride % tensor.rows, tuple(sorted(dims))
        row_count += (size - 1) * stride
    return (
        None
        if row_count >= tensor.rows
        else RowBlock(start // tensor.row_stride % tensor.rows, row_count)
    )
