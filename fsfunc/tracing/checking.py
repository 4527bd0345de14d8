"""Watching a step that runs on fake tensors: the type of each value between its units.

A :class:`Checker` is a dispatch mode, so that it sees backward passes too, and through
every transform of ``torch.func``. A type belongs to a storage and only rises. It also
stands where a plan has its rehearsal: it runs the bodies of units, inside which every
value is the rank's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.accounting import aside, is_aside, is_own_call, source_line
from fsfunc.crossings import GATHER, OWN
from fsfunc.frames import Rehearsed, frame
from fsfunc.moves import Group, Move
from fsfunc.moving import Watcher
from fsfunc.sharded import Sharded, is_sharded
from fsfunc.tracing.classes import OperatorClass, class_of
from fsfunc.tracing.refusals import Seen, refusal
from fsfunc.tracing.types import PARTS, Kind, Operand, Untyped, agrees, joint, result

__all__ = ["Checker", "Event"]


_DEVICE: Any = torch.ops.prim.device.default


@dataclass(frozen=True)
class Event:
    """What one operator did on the way of what should be one value on all ranks.

    Args:
        constants: the numbers that it was given, and what is in its constant tensors.
    """

    name: str
    constants: tuple[Any, ...]
    where: str


class Checker(Rehearsed, Watcher, _torch.TorchDispatchMode):
    """Types the values of a step, and raises where one has none.

    Args:
        rank: whose program it is.
        varying: which events had constants that differ from rank to rank.

    ``events`` are what the ranks must agree on. ``orders`` is as for a rehearsal.
    """

    def __init__(self, rank: int, varying: Iterable[int] = ()):
        _torch.TorchDispatchMode.__init__(self)
        self.rank = rank
        self.varying = set(varying)
        self.events: list[Event] = []
        self.orders: dict[int, Any] = {}
        self.calls: list[Any] = []
        self.fake: Any = None
        self._seen: dict[int, Seen] = {}  # by storage
        self._alive: list[Any] = []  # or an address would be another storage's
        self._lines: dict[int, tuple[str, str, bool]] = {}  # by autograd node
        self.parameters: set[int] = set()  # plain leaves that were differentiated
        self._counted = _torch.next_sequence_number()
        self._bodies: list[tuple[int, int]] = []  # autograd nodes of units' bodies
        self._within: set[int] = set()  # and those of their derivatives
        self._paused = False

    def __enter__(self) -> Any:
        self.fake = _torch.fake_mode()
        return super().__enter__()

    def called(self, key: Any, args: tuple[Any, ...], keywords: Any) -> None:
        self.calls.append(key)
        for i, value in enumerate((*args, keywords)):
            paths, leaves, _ = tree.flatten_with_paths(value, is_leaf=is_sharded)
            for path, x in zip(paths, leaves, strict=True):
                name = f"argument {i}" + (f" at {path!r}" if path else "")
                if i == 0 and path:
                    name = repr(path)
                if isinstance(x, Sharded):
                    self._meet(x._local, Kind.S if x.layout.axes else Kind.I, name)
                elif isinstance(x, Tensor):
                    self._meet(x, Kind.V if i else Kind.I, name)

    def _meet(self, x: Tensor, kind: Kind, what: str) -> None:
        if self.kind(x) is Kind.K:
            self.give(x, kind, what, "")

    # What is known of a tensor

    def give(self, x: Tensor, kind: Kind, what: str, where: str | None = None) -> None:
        """Says of what type a tensor is, what to call it, and where it came from."""
        base = _torch.unwrapped(x)
        key = _torch.storage_key(base)
        known = self._seen.get(key)
        if known is None:
            self._alive.append(base.untyped_storage())
        self._seen[key] = Seen(kind, what, source_line() if where is None else where)

    def of(self, x: Tensor) -> Seen:
        """What is known of a tensor: a constant, if nothing is."""
        found = self._seen.get(_torch.storage_key(_torch.unwrapped(x)))
        return Seen(Kind.K, "a constant", "") if found is None else found

    def kind(self, x: Tensor) -> Kind:
        return self.of(x).kind

    # Operators

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is _DEVICE and isinstance(args[0], _torch.FakeTensor):
            return _torch.device_of(args[0])  # asked all the time
        numbers = self._new_nodes()
        out = _torch.quick_fake(self.fake, func, args, kwargs)
        if out is NotImplemented:
            out = func(*args, **kwargs)
        if self._paused or frame().path:
            return out  # in a unit all is the rank's own, whatever it does
        if func._schema.is_mutable and not func._schema.returns:
            made = _flat(_torch.written(func, args, kwargs))
        else:
            made = [x for x in _flat(out) if isinstance(x, Tensor)]
        if made:
            self._paused = True
            try:
                self._note(func, [*_flat(args), *_flat(kwargs)], made, numbers)
            finally:
                self._paused = False
        return out

    def _note(
        self, func: Any, given: list[Any], made: list[Tensor], numbers: range
    ) -> None:
        tensors = [x for x in given if isinstance(x, Tensor)]
        inputs = {_torch.storage_key(x) for x in tensors}
        operands = [_operand(x, self.kind(x)) for x in tensors]
        op, node = class_of(func), _torch.current_node()
        if node is None:
            line = op.name, source_line(), _trusted()
            self._lines.update(dict.fromkeys(numbers, line))
        elif self._in_a_body(_torch.sequence_number(node)):
            self._within.update(numbers)
            for y in made:
                if _torch.storage_key(y) not in inputs:
                    self.give(y, Kind.V, "a unit's derivative")
            return
        view = not func._schema.is_mutable
        view = view and all(_torch.storage_key(y) in inputs for y in made)
        if view and not (op.picks and operands[0].kind in PARTS):
            return
        kind = self._typed(op, operands, tensors, made, node)
        if view:
            return
        if kind is not Kind.V and node is None and not _trusted():
            kind = self._event(op, given, tensors, kind)
        source = next((x for x in tensors if self.kind(x) is kind), None)
        for y in made:
            key = _torch.storage_key(y)
            before = self._seen.get(key)
            if key in inputs and before is not None and not _rises(before.kind, kind):
                continue  # written in place
            what = f"what {op.name} made" if source is None else self.of(source).what
            line = source_line() if source is None else self.of(source).where
            if key not in self._seen:
                self._alive.append(y.untyped_storage())
            self._seen[key] = Seen(kind, what, line)

    def _new_nodes(self) -> range:
        """The autograd nodes made since the last time: of each level one."""
        start, self._counted = self._counted, _torch.next_sequence_number()
        return range(start, self._counted)

    def _in_a_body(self, number: int) -> bool:
        inside = any(start <= number < end for start, end in self._bodies)
        return inside or number in self._within

    def _typed(
        self,
        op: OperatorClass,
        operands: list[Operand],
        tensors: list[Tensor],
        made: list[Tensor],
        node: Any,
    ) -> Kind:
        try:
            return result(op, operands, made, node is not None)
        except Untyped as why:
            line = self._lines.get(_torch.sequence_number(node)) if node else None
            sure = _trusted() if line is None else line[2]
            if is_aside() or sure and str(why) != "own":
                # The library knows what it does with parts.
                return Kind.S if any(y.ndim for y in made) else Kind.P
            sources = [self.of(x) for x in tensors]
            raise refusal(str(why), op.name, sources, line and line[:2]) from None

    def _event(
        self, op: OperatorClass, given: list[Any], tensors: list[Tensor], kind: Kind
    ) -> Kind:
        """Notes what the ranks must agree on; what they do not is each rank's own."""
        constants = tuple(_constant(x) for x in given if not _is_fake(x))
        self.events.append(Event(op.name, constants, source_line()))
        if len(self.events) - 1 not in self.varying:
            return kind
        if kind in PARTS:
            part = next(x for x in map(self.of, tensors) if x.kind in PARTS)
            numbers = ", ".join(str(x) for x in constants) or "a constant"
            own = Seen(Kind.V, f"a number ({numbers} here)", "")
            raise refusal("own", op.name, [part, own], None)
        return Kind.V

    # Collectives

    def moved(self, x: Tensor, how: Move, where: Group, y: Tensor) -> None:
        """A collective, or a crossing, has made ``y`` of ``x``."""
        if not where.mean or frame().path:
            return
        seen, node = self.of(x), _torch.current_node()
        if node is not None and self._in_a_body(_torch.sequence_number(node)):
            self._within.update(self._new_nodes())
            self.give(y, Kind.V, "a unit's derivative")
            return
        why = _misused(how, seen.kind)
        if how == GATHER and seen.kind is Kind.K and x.ndim > 1:
            why = "rows"  # of parts there is one dim: vmap brought the others
        if why:
            raise refusal(why, how.op, [seen], None)
        if how.op == "enter":
            self.parameters.add(_torch.storage_key(_torch.unwrapped(x)))
        kind = _moved(how, seen.kind)
        self.give(y, kind, f"what {how.op} gives")

    def collective(self, x: Tensor, how: Move, where: Group) -> None:
        """The step asks for a collective itself."""
        seen = self.of(x)
        parts = seen.kind in PARTS and how != OWN
        if where.mean and not frame().path and parts:
            raise refusal("parts", how.op, [seen], None)

    # Units

    def body(self, call: Any, params: Any, inputs: Any, keywords: Any) -> Any:
        """Runs a unit's function, whose results are the rank's own."""
        outermost = not call.frame.path
        if outermost:
            for x in tree.leaves((inputs, keywords), is_leaf=is_sharded):
                if isinstance(x, Tensor) and self.kind(x) in PARTS:
                    raise refusal("input", call.name, [self.of(x)], None)
        start = _torch.next_sequence_number()
        with aside(False):
            out = call.unit.checked(params, inputs, keywords)
        self._bodies.append((start, _torch.next_sequence_number()))
        if not outermost:
            return out
        taken = {
            _torch.storage_key(_torch.unwrapped(x))
            for x in tree.leaves((params, inputs, keywords), is_leaf=is_sharded)
            if isinstance(x, Tensor)
        }

        def own(y: Any) -> Any:
            if not isinstance(y, Tensor):
                return y
            if _torch.storage_key(_torch.unwrapped(y)) in taken:
                y = y.clone()
            self.give(y, Kind.V, f"what unit {call.name!r} returned")
            return y

        return tree.map(own, out, is_leaf=is_sharded)

    def taken(self, name: str, leaves: Iterable[Sharded]) -> None:
        """A unit call gathers ``leaves``: parts, or one value."""
        for leaf in leaves:
            if not frame().path and self.kind(leaf._local) is Kind.V:
                raise refusal("disagrees", name, [self.of(leaf._local)], None)

    def claimed(self, x: Tensor, what: str) -> None:
        """Somebody says that ``x`` is the same on every rank."""
        if not frame().path and self.kind(x) is Kind.V:
            raise refusal("disagrees", what, [self.of(x)], None)

    def assumed(self, y: Tensor, kind: str) -> None:
        self.give(y, Kind[kind], "what assume gave")

    # Derivatives

    def gradient(self, by: Any, found: Any, averaged: Callable[[Tensor], bool]) -> None:
        leaves, treedef = tree.flatten(by, is_leaf=is_sharded)
        grads: list[Any] = treedef.flatten_up_to(found)  # type: ignore[arg-type]
        for x, g in zip(leaves, grads, strict=True):
            if isinstance(x, Sharded) and isinstance(g, Sharded):
                x, g = x._local, g._local
            if isinstance(x, Tensor) and isinstance(g, Tensor):
                self.pair(x, g, not isinstance(x, Sharded) and averaged(x))

    def reduced(self, by: Any, grads: Any) -> None:
        leaves, treedef = tree.flatten(by, is_leaf=is_sharded)
        found: list[Any] = treedef.flatten_up_to(grads)  # type: ignore[arg-type]
        for x, g in zip(leaves, found, strict=True):
            if isinstance(x, Sharded) and isinstance(g, Sharded):
                self.give(g._local, self.kind(x._local), f"the gradient by {x.name!r}")

    def pulled(self, inputs: Iterable[Any], grads: Iterable[Any]) -> None:
        """A gradient was taken that nobody averages afterwards."""
        if frame().path or is_aside():
            return
        for x, g in zip(inputs, grads, strict=True):
            if isinstance(x, Tensor) and isinstance(g, Tensor):
                self.pair(x, g)

    def pair(self, x: Tensor, g: Tensor, averaged: bool = False) -> None:
        """Holds the type of a gradient against that of what it is a gradient by."""
        of, found = self.of(x), self.of(g)
        if of.kind is Kind.I:
            self.parameters.add(_torch.storage_key(_torch.unwrapped(x)))
        if of.kind is Kind.S:
            if found.kind is Kind.V:
                raise refusal("own gradient", "", [of, found], None)
            self.give(g, Kind.S, of.what)
        elif found.kind in PARTS:
            raise refusal("term", "", [of, found], None)
        elif of.kind in (Kind.K, Kind.I) and not agrees(found.kind) and not averaged:
            why = "whose" if of.kind is Kind.K else "unaveraged"
            raise refusal(why, "", [of, found], None)

    def returned(self, state: Any, out: Any) -> None:
        """Holds what a step returns against the state that it was given."""
        new = out[:1] if isinstance(out, tuple) else (out,)
        leaves, treedef = tree.flatten(state, is_leaf=is_sharded)
        found, other = tree.flatten(new, is_leaf=is_sharded)
        if treedef != other:
            return  # it returns something else
        for x, y in zip(leaves, found, strict=True):
            if isinstance(x, Sharded) and isinstance(y, Sharded):
                x, y = x._local, y._local
            if not isinstance(x, Tensor) or not isinstance(y, Tensor):
                continue
            same = x.shape == y.shape and _torch.storage_key(x) in self.parameters
            if same and self.kind(y) is Kind.V:
                raise refusal("returned", "", [self.of(x), self.of(y)], None)


def _misused(how: Move, kind: Kind) -> str:
    """Why a value of this type may not go that way; "" if it may."""
    if how.of == "I":
        return "" if agrees(kind) else "one value"
    if how.op in ("enter", "slice") or (how.op, how.of, how.to) == ("cast", "M", "R"):
        # Of parts that are repeated over further axes, each is one value there.
        return "disagrees" if kind is Kind.V else ""
    if how.of == "P" and kind not in (Kind.P, Kind.K):
        return "no term"
    crosses = how.of in ("V", "R") and how.to == "M"
    if crosses and kind not in (Kind.S, Kind.R, Kind.K):
        return "no part"
    return ""


_AGREE = {"psum", "pmax", "all_gather", "pbroadcast", "enter"}


def _moved(how: Move, kind: Kind) -> Kind:
    if agrees(kind) and how.power == -1 and how.op in ("psum", "enter"):
        return kind if kind is Kind.K else Kind.A  # the mean of what is the same
    if kind in PARTS and how.of == how.to == "M":
        return kind
    if how.op == "pmax":
        return Kind.A
    if how.to == "M":
        return (
            Kind.A if how.op in _AGREE or agrees(kind) and how.op == "keep" else Kind.V
        )
    return {"I": Kind.I, "R": Kind.R, "P": Kind.P}.get(how.to, Kind.S)


def _rises(before: Kind, kind: Kind) -> bool:
    """Whether what is written into a tensor raises its type."""
    if before in PARTS or kind in PARTS:
        return before not in PARTS
    return joint({before, kind}) is not before


def _trusted() -> bool:
    """Whether the library is at work, which knows what it does with parts."""
    return is_aside() or is_own_call()


def _operand(x: Tensor, kind: Kind) -> Operand:
    steps = zip(x.shape, x.stride(), strict=True) if x.layout == torch.strided else ()
    number = x.numel() == 1 or all(n == 1 or step == 0 for n, step in steps)
    return Operand(kind, number, tuple(x.shape))


def _is_fake(x: Any) -> bool:
    return isinstance(x, _torch.FakeTensor)


def _constant(x: Any) -> Any:
    """A number as it is; of a tensor that has values, these."""
    if isinstance(x, Tensor):
        with _torch.beneath_all_modes():
            return tuple(x.shape), hash(x.detach().cpu().contiguous().numpy().tobytes())
    if isinstance(x, (bool, int, float, complex, str, type(None))):
        return x
    return type(x).__name__


def _flat(values: Any) -> list[Any]:
    if isinstance(values, (tuple, list)):
        return [y for x in values for y in _flat(x)]
    if isinstance(values, dict):
        return [y for x in values.values() for y in _flat(x)]
    return [values]
