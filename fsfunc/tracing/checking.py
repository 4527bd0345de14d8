"""Watching a step that runs on fake tensors: the type of each value between its units.

A :class:`Checker` is a dispatch mode, so that it sees backward passes too, and through
every transform of ``torch.func``. It also stands where a plan has its rehearsal: it
runs the bodies of units, inside which every value is the rank's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.accounting import aside, is_aside, is_own_call, source_line
from fsfunc.crossings import GATHER, OWN
from fsfunc.frames import Rehearsed, frame
from fsfunc.mesh import asks, here
from fsfunc.moves import Group, Move
from fsfunc.moving import Watcher
from fsfunc.sharded import Sharded, is_sharded
from fsfunc.tracing.classes import COPIES, TURNS, OperatorClass, class_of
from fsfunc.tracing.knowledge import Known, Nodes, Origin, Seen
from fsfunc.tracing.operands import (
    OF_LISTS,
    flat,
    names_dims,
    number,
    operand,
    rows,
    shown,
)
from fsfunc.tracing.refusals import refusal
from fsfunc.tracing.types import (
    PARTS,
    Kind,
    Operand,
    Untyped,
    agrees,
    misused,
    moved_to,
    result,
)

__all__ = ["Checker", "Event"]

_DEVICE: Any = torch.ops.prim.device.default
_EQUAL: Any = torch.ops.aten.equal.default
_VALUES = {_EQUAL, torch.ops.aten._local_scalar_dense.default}


@dataclass(frozen=True)
class Event:
    """What one operator did on the way of what should be one value on all ranks.

    Args:
        constants: the numbers that it was given, and what its constant tensors are.
    """

    name: str
    constants: tuple[Any, ...]
    where: str


class Checker(Rehearsed, Watcher, _torch.TorchDispatchMode):
    """Types the values of a step, and raises where one has none.

    Args:
        rank: whose program it is; ``axes``: over which its loss is a mean;
            ``alone``: whether there is no other rank on them.
        varying: which events had constants that differ from rank to rank.

    ``events`` are what the ranks must agree on; ``calls`` the signatures of the calls
    of sharded functions. Of a pipelined loss it sees what that returns: in it sharded
    leaves go into units alone.
    """

    only_types = True

    def __init__(
        self, rank: int, axes: tuple[str, ...], alone: bool, varying: Iterable[int] = ()
    ):
        _torch.TorchDispatchMode.__init__(self)
        self.rank, self.axes, self.varying = rank, axes, set(varying)
        self.own = Kind.A if alone else Kind.V
        self.events: list[Event] = []
        self.orders: dict[int, Any] = {}
        self.calls: list[Any] = []
        self.known, self.nodes = Known(), Nodes()
        self.fake: Any = None
        self._parameters: set[int] = set()  # plain leaves that were differentiated
        self._given: set[int] = set()  # to the bodies of units that run
        self._along = False  # whether an operator was given dims
        self._paused = False

    def __enter__(self) -> Any:
        self.fake = _torch.fake_mode()
        return super().__enter__()

    # Operators

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is _DEVICE and isinstance(args[0], _torch.FakeTensor):
            return _torch.device_of(args[0])  # asked all the time
        if func in _VALUES and isinstance(args[0], _torch.FakeTensor):
            return self._value(args[0], func)
        numbers = self.nodes.new()
        out = _torch.quick_fake(self.fake, func, args, kwargs)
        if out is NotImplemented:
            out = func(*args, **kwargs)
        if self._paused:
            return out
        if path := frame().path:  # there all is the rank's own, whatever it does
            self._captured(path[0], args, kwargs)
            return out
        written = _torch.written(func, args, kwargs)
        made = [x for x in flat([out, written]) if isinstance(x, Tensor)]
        if made:
            self._paused = True
            try:
                if func._schema.name.startswith(OF_LISTS):
                    for row, results in rows(args, kwargs, made):
                        self._note(func, row, results, bool(written), numbers)
                else:
                    self._along = names_dims(func, args, kwargs)
                    given = [*flat(args), *flat(kwargs)]
                    self._note(func, given, made, bool(written), numbers)
            finally:
                self._paused = False
        return out

    def _value(self, x: Tensor, func: Any) -> Any:
        """A number in place of one that nobody has; an own one tells ranks apart."""
        if func is _EQUAL or x.dtype == torch.bool:
            return func is _EQUAL
        own = self.known.kind(x) is Kind.V or frame().path
        if not x.is_floating_point() or not own:
            return 1.0 if x.is_floating_point() else 1
        asks(self.axes)
        return 1 + self.rank / 64

    def _note(
        self,
        func: Any,
        given: Sequence[Any],
        made: Sequence[Tensor],
        writes: bool,
        numbers: range,
    ) -> None:
        tensors = [x for x in given if isinstance(x, Tensor)]
        inputs = {_torch.storage_key(x) for x in tensors}
        op, node = class_of(func), _torch.current_node()
        if node is None:
            origin = Origin(op.name, source_line(), _trusted())
            self.nodes.came_from(numbers, origin)
        elif self.nodes.in_a_body(node, numbers):
            for y in made:
                if _torch.storage_key(y) not in inputs:
                    self.known.give(y, self.own, "a unit's derivative")
            return
        else:
            origin = self.nodes.origin(node, numbers)
        if op.name == "ones_like" and _torch.seeds_a_backward():
            return  # each rank's loss counts once
        read = tensors[1:] if op.name == "copy" else tensors  # the first is overwritten
        sources = [self.known.of(x) for x in tensors]
        operands = [operand(x, self.known.of(x)) for x in read]
        view = not writes and all(_torch.storage_key(y) in inputs for y in made)
        if node is None and not _trusted():
            self._placed(op, tensors, sources, made, view)
        if view and not op.picks:
            return
        kind = self._typed(op, operands, tensors, made, origin)
        if view:
            return
        if op.random and not any(isinstance(x, torch.Generator) for x in given):
            kind = self.own  # the ranks' default generators are their own
        digest = None
        if node is None and kind is not Kind.V and not _trusted():
            kind, digest = self._event(op, given, tensors, kind)
        seen = self._seen(op, kind, sources, digest)
        made_of = op.elementwise and all(x.number for x in operands)
        rows = node is None and (op.elementwise or _trusted())
        seen = replace(
            seen,
            uniform=(made_of or op.factory or op.alike) and not op.random,
            flat=rows and any(x.flat for x in sources) and made[0].ndim == 1,
        )
        for y in made:
            if _torch.storage_key(y) in inputs:
                self.known.write(y, seen)
            else:
                self.known.put(y, seen)

    def _captured(self, name: str, args: Any, kwargs: Any) -> None:
        """Raises where a unit's body reads parts that it was not given."""
        for x in flat([args, kwargs]):
            if isinstance(x, Tensor) and self.known.kind(x) in PARTS:
                given = _torch.storage_key(_torch.unwrapped(x)) in self._given
                if _torch.current_node() is None and not given and not _trusted():
                    raise refusal("input", name, [self.known.of(x)], None)

    def _placed(
        self,
        op: OperatorClass,
        given: Sequence[Tensor],
        sources: Sequence[Seen],
        made: Sequence[Tensor],
        view: bool,
    ) -> None:
        """Raises where the dims of a placed leaf's elements count: it shows a row."""
        for x, seen in zip(given, sources, strict=True):
            if not (seen.flat or seen.kind is Kind.S):
                continue
            if view:
                turned = op.name in TURNS or any(
                    y.shape[-1:] != x.shape[-1:] for y in made
                )
                if turned and not op.picks:
                    raise refusal("mixes", op.name, [seen], None)
            elif seen.flat and not op.elementwise:
                if self._along or any(y.ndim for y in made):
                    raise refusal("mixes", op.name, [seen], None)

    def _seen(
        self, op: OperatorClass, kind: Kind, sources: Sequence[Seen], digest: Any
    ) -> Seen:
        """What is known of a result: where it came from, if it is of that kind."""
        made = Seen(kind, f"what {op.name} made", source_line(), digest)
        source = next((x for x in sources if x.kind is kind), None)
        of_one = any(x.parameter or x.kind is Kind.I for x in sources)
        if kind is Kind.A and of_one:
            return replace(source or made, parameter=True)
        if source is not None and kind is not Kind.K:
            return source
        if kind in PARTS:  # a sum over parts, which is of the same leaf
            part = next((x for x in sources if x.kind in PARTS), made)
            return replace(part, kind=kind)
        return made

    def _typed(
        self,
        op: OperatorClass,
        operands: Sequence[Operand],
        tensors: Sequence[Tensor],
        made: Sequence[Tensor],
        origin: Origin | None,
    ) -> Kind:
        backward = _torch.current_node() is not None
        try:
            return result(op, operands, made, backward)
        except Untyped as why:
            sure = _trusted() if origin is None else origin.trusted
            if is_aside() and not backward or sure and str(why) != "own":
                # The library knows what it does with parts.
                return Kind.S if any(y.ndim for y in made) else Kind.P
            forward = (origin.name, origin.where) if backward and origin else None
            sources = [self.known.of(x) for x in tensors]
            raise refusal(str(why), op.name, sources, forward) from None

    def _event(
        self,
        op: OperatorClass,
        given: Sequence[Any],
        tensors: Sequence[Tensor],
        kind: Kind,
    ) -> tuple[Kind, Any]:
        """Notes what the ranks must agree on; what they do not is each rank's own."""
        seen = [self.known.of(x) for x in tensors]
        if op.name in COPIES:  # a rank may make more of them
            return kind, seen[-1].digest if seen else None
        numbers = tuple(number(x) for x in given if not isinstance(x, Tensor))
        constants = (
            *numbers,
            *(
                (x.digest, None if x.uniform else shown(t))
                for x, t in zip(seen, tensors, strict=True)
                if x.kind is Kind.K
            ),
        )
        if kind is Kind.K:
            return kind, (op.name, constants)  # nobody's, till it meets something
        self.events.append(Event(op.name, constants, source_line()))
        if len(self.events) - 1 not in self.varying:
            return kind, None
        if kind in PARTS:
            part = next(x for x in seen if x.kind in PARTS)
            said = ", ".join(str(x) for x in numbers) or "a constant"
            own = Seen(Kind.V, f"a number ({said} here)")
            raise refusal("own", op.name, [part, own], None)
        return Kind.V, None

    # Collectives

    def moved(self, x: Tensor, how: Move, where: Group, y: Tensor) -> None:
        if frame().path:
            return
        if where.size == 1:
            self.known.give(y, Kind.A, f"what {how.op} gives")
            return
        if not where.mean:  # of other axes: it stays whose it was
            seen = self.known.of(x)
            summed = how.of == "P" and seen.kind is Kind.P
            if summed and set(where.axis) & set(here().mean):
                seen = Seen(Kind.A, f"what {how.op} gives", source_line())
            self.known.put(y, seen)
            return
        seen, node = self.known.of(x), _torch.current_node()
        if node is not None and self.nodes.in_a_body(node, self.nodes.new()):
            self.known.give(y, self.own, "a unit's derivative")
            return
        why = misused(how, seen.kind)
        if how == GATHER and seen.kind is Kind.K and x.ndim > 1:
            why = "rows"  # of parts there is one dim: vmap brought the others
        if why:
            raise refusal(why, how.op, [seen], None)
        if how.op == "enter":
            self._parameters.add(_torch.storage_key(_torch.unwrapped(x)))
        self.known.give(y, moved_to(how, seen.kind), f"what {how.op} gives")

    def collective(self, x: Tensor, how: Move, where: Group) -> None:
        seen = self.known.of(x)
        parts = seen.kind in PARTS and how != OWN
        if where.mean and not frame().path and parts:
            raise refusal("parts", how.op, [seen], None)

    def claimed(self, x: Tensor, what: str) -> None:
        if not frame().path and self.known.kind(x) is Kind.V:
            raise refusal("disagrees", what, [self.known.of(x)], None)

    def measured(self, x: Tensor, what: str) -> None:
        """Raises where the shape is asked of what shows a placed leaf's elements."""
        seen = self.known.of(x)
        if (seen.kind is Kind.S or seen.flat) and not frame().path:
            raise refusal("shape", what, [seen], None)

    def laid(self, leaf: Sharded) -> None:
        seen = self.known.of(leaf._local)
        if seen.kind not in PARTS and leaf.ndim > 1:
            self.known.put(leaf._local, replace(seen, flat=True))

    def assumed(self, y: Tensor, kind: str) -> None:
        alone = self.own is Kind.A
        self.known.give(y, Kind.A if alone else Kind[kind], "what assume gave")

    # Calls of sharded functions, and units

    def called(self, key: Any, args: Any, keywords: Any, mean: Sequence[str]) -> None:
        self.calls.append(key)
        for i, value in enumerate((*args, keywords)):
            paths, leaves, _ = tree.flatten_with_paths(value, is_leaf=is_sharded)
            for path, x in zip(paths, leaves, strict=True):
                name = f"argument {i}" + (f" at {path!r}" if path else "")
                name = repr(path) if i == 0 and path else name
                if isinstance(x, Sharded):
                    cut = self.own is Kind.V and set(x.layout.axes) & set(mean)
                    kind = Kind.S if cut else Kind.I
                    self.known.meet(x._local, placed(x, kind, name))
                elif isinstance(x, Tensor):
                    self.known.meet(x, Seen(self.own if i else Kind.I, name))

    def taken(self, name: str, leaves: Iterable[Sharded]) -> None:
        for leaf in leaves:
            self.claimed(leaf._local, f"unit {name!r}")

    def body(self, call: Any, params: Any, inputs: Any, keywords: Any) -> Any:
        """Runs a unit's function, whose results are the rank's own."""
        outermost = not call.frame.path
        if outermost:
            for x in tree.leaves((inputs, keywords), is_leaf=is_sharded):
                if isinstance(x, Tensor) and self.known.kind(x) in PARTS:
                    raise refusal("input", call.name, [self.known.of(x)], None)
        taken = {
            _torch.storage_key(_torch.unwrapped(x))
            for x in tree.leaves((params, inputs, keywords), is_leaf=is_sharded)
            if isinstance(x, Tensor)
        }
        start, before = self.nodes.begin(), self._given
        self._given = before | taken  # whole parameters may lie where their parts do
        with aside(False):
            out = call.unit.checked(params, inputs, keywords)
        self._given = before
        self.nodes.body(start)
        if not outermost:
            return out

        def own(y: Any) -> Any:
            if not isinstance(y, Tensor):
                return y
            if _torch.storage_key(_torch.unwrapped(y)) in taken:
                y = y.clone()
            self.known.give(y, self.own, f"what unit {call.name!r} returned")
            return y

        return tree.map(own, out, is_leaf=is_sharded)

    # Derivatives

    def gradient(self, by: Any, found: Any, averaged: Callable[[Tensor], bool]) -> None:
        for x, g in _pairs(by, found):
            if isinstance(x, Sharded) and isinstance(g, Sharded):
                self._pair(x._local, g._local)
            elif isinstance(x, Tensor):
                self._pair(x, g, averaged(x))

    def reduced(self, by: Any, grads: Any) -> None:
        for x, g in _pairs(by, grads):
            if isinstance(x, Sharded) and isinstance(g, Sharded):
                kind, name = self.known.kind(x._local), f"the gradient by {x.name!r}"
                seen = placed(g, kind, name)
                self.known.put(g._local, replace(seen, where=source_line()))
                if kind is Kind.I:
                    local = _torch.unwrapped(x._local)
                    self._parameters.add(_torch.storage_key(local))

    def pulled(self, inputs: Iterable[Any], grads: Iterable[Any]) -> None:
        """A gradient was taken that nobody averages afterwards."""
        if not frame().path and not is_aside():
            for x, g in zip(inputs, grads, strict=True):
                self._pair(x, g)

    def _pair(self, x: Any, g: Any, averaged: bool = False) -> None:
        """Holds the type of a gradient against that of what it is a gradient by."""
        if not isinstance(x, Tensor) or not isinstance(g, Tensor):
            return
        of, found = self.known.of(x), self.known.of(g)
        if of.kind is Kind.I:
            self._parameters.add(_torch.storage_key(_torch.unwrapped(x)))
        if of.kind is Kind.S:
            if found.kind is Kind.V:
                raise refusal("own gradient", "", [of, found], None)
            self.known.give(g, Kind.S, of.what)
        elif found.kind in PARTS:
            raise refusal("term", "", [of, found], None)
        elif of.kind in (Kind.K, Kind.I) and not agrees(found.kind) and not averaged:
            why = "whose" if of.kind is Kind.K else "unaveraged"
            raise refusal(why, "", [of, found], None)
        elif of.parameter and found.kind is Kind.V and not averaged:
            raise refusal("made of one", "", [of, found], None)

    def returned(self, state: Any, out: Any) -> None:
        """Holds what a step returns against the state that it was given."""
        for y in tree.leaves(out, is_leaf=is_sharded):
            if isinstance(y, Sharded) and self.known.kind(y._local) is Kind.V:
                leaf = Seen(Kind.I, repr(y.name) if y.name else "a placed leaf")
                raise refusal("returned", "", [leaf, self.known.of(y._local)], None)
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
            same = x.shape == y.shape and _torch.storage_key(x) in self._parameters
            if same and self.known.kind(y) is Kind.V:
                seen = [self.known.of(x), self.known.of(y)]
                raise refusal("returned", "", seen, None)


def placed(x: Sharded, kind: Kind, name: str) -> Seen:
    """What is known of a placed leaf's own tensor."""
    return Seen(kind, name, flat=kind is Kind.I and x.ndim > 1)


def _trusted() -> bool:
    """Whether the library is at work, which knows what it does with parts."""
    return is_aside() or is_own_call()


def _pairs(by: Any, found: Any) -> list[tuple[Any, Any]]:
    leaves, treedef = tree.flatten(by, is_leaf=is_sharded)
    grads: list[Any] = treedef.flatten_up_to(found)  # type: ignore[arg-type]
    return list(zip(leaves, grads, strict=True))
