"""The type of what each operator of a step makes, between its units.

:class:`Operators` is a dispatch mode, so that it sees backward passes too, and through
every transform of ``torch.func``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc._torch.fake_modes import result_below
from fsfunc.comm.attribution import is_internal, is_own_call, source_line
from fsfunc.comm.comparison import Lines
from fsfunc.comm.mesh import asks
from fsfunc.comm.typed_maps import LawError
from fsfunc.core.casts import differentiable
from fsfunc.core.frames import frame
from fsfunc.tracing.knowledge import (
    Known,
    Nodes,
    Origin,
    Seen,
    keeps_pairs,
    memory,
    operand,
)
from fsfunc.tracing.operators import (
    COPIES,
    OF_LISTS,
    TRANSPOSES,
    OperatorClass,
    OperatorMode,
    by_position,
    class_of_call,
    comparable,
    draws,
    flatten_lists,
    names_dims,
    partial_view,
)
from fsfunc.tracing.provenance import Provenance
from fsfunc.tracing.results import OperatorCall, seen_of
from fsfunc.tracing.rules import operand_error, rule_error
from fsfunc.tracing.split_work import SplitWork
from fsfunc.tracing.steadiness import StandIns
from fsfunc.tracing.types import PARTS, Kind, Operand, Untyped, agrees, joint, result


@dataclass(frozen=True)
class SharedOp:
    """An operator that computes what should be one value on all ranks.

    Args:
        constants: the numbers that it was given, and what its constant tensors are.
    """

    name: str
    constants: tuple[Any, ...]
    where: str


_ONES: Any = torch.ops.aten.ones_like.default


class Operators(OperatorMode):
    """Types what operators make of values, and raises where that has no type.

    Args:
        rank: whose program it is; ``axes``: over which its loss is a mean;
            ``alone``: whether there is no other rank on them.
        stand_ins: what they get who ask for values.
        varying: which events had constants that differ from rank to rank.

    ``events`` are what the ranks must agree on; ``draws`` whether torch's default
    generators are drawn of, in units too; ``drawing`` the names of units in which they
    are outside gradient calls; ``combines_numbers`` whether numbers are combined with
    what is
    one value; ``known`` what is known of tensors; ``given`` the memory that the bodies
    of units which run were given; ``captured`` of what the tensors are made that the
    outermost of them reads beside; ``split`` along which axes beside ``axes`` values
    are each rank's own.
    """

    def __init__(
        self,
        axes: tuple[str, ...],
        alone: bool,
        stand_ins: StandIns,
        varying: Iterable[int] = (),
    ):
        super().__init__()
        self.axes, self.stand_ins, self.varying = axes, stand_ins, set(varying)
        self.own = Kind.A if alone else Kind.V
        self.events: list[SharedOp] = []
        self.known, self.nodes = Known(), Nodes()
        self.split = SplitWork(axes)
        self.given: set[int] = set()
        self.draws = self.combines_numbers = False
        self.drawing: set[str] = set()
        self.captured: list[Provenance] = []
        self.is_indexing = False  # while a tensor is indexed
        self._along = False  # whether an operator was given dims
        self.seed_count = 0  # how many cotangents of ones torch makes next
        self._paused = False

    def operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not self._paused and (told := _torch.tells(func)):
            if told == "value":
                return self._told(func, args, kwargs)
            self.leaves_the_step(class_of_call(func, args, kwargs).name, args)
        numbers = self.nodes.new()
        out = result_below(func, args, kwargs)
        if (
            self.seed_count and func is _ONES
        ):  # each rank's loss counts once: it has no type
            self.seed_count -= 1
            return out
        if self._paused or type(out) is bool:  # one that compares shapes
            return out
        self.draws = (drawn := draws(func, args, kwargs)) or self.draws
        self.split.operator(func, args, kwargs, out)
        if path := frame().path:  # there all is the rank's own, whatever it does
            if drawn and frame().seed is None:
                self.drawing.add(path[0])
            self._captured(path[0], args, kwargs)
            return out
        written = _torch.written(func, args, kwargs)
        found = flatten_lists([out, written]) if written else flatten_lists(out)
        if made := [x for x in found if isinstance(x, Tensor)]:
            op = class_of_call(func, args, kwargs)
            self._paused = True
            try:
                if func._schema.name.startswith(OF_LISTS):
                    for row, results in by_position(args, kwargs, made):
                        self._note(op, row, results, bool(written), numbers)
                else:
                    self._along = names_dims(func, args, kwargs)
                    given = (
                        flatten_lists(args) + flatten_lists(kwargs)
                        if kwargs
                        else flatten_lists(args)
                    )
                    self._note(op, given, made, bool(written), numbers)
            finally:
                self._paused = False
        return out

    def leaves_the_step(self, name: str, values: Any) -> Kind:
        """The joint type of tensors whose values are read.

        Raises:
            LawError: one is this rank's part of a leaf.
        """
        given = [x for x in flatten_lists([values]) if isinstance(x, Tensor)]
        seen = [self.known.of(x) for x in given]
        if any(x.kind in PARTS - {Kind.R} for x in seen):
            if not frame().path and not _trusted():
                raise operand_error("mixes", name, seen)
        kinds = {x.kind for x in seen}
        kind = Kind.R if kinds & PARTS else joint(kinds)
        if kind is Kind.V:
            asks(self.axes)
        return kind

    def error_for_part(
        self, func: Any, values: Iterable[Any], error: Exception
    ) -> Exception | None:
        """The refusal of a function that raised ``error``, given parts by a user."""
        if isinstance(error, LawError) or _torch.is_data_dependent(error):
            return None
        if frame().path or _trusted():
            return None
        seen = [self.known.of(x) for x in values if isinstance(x, Tensor)]
        if not any(x.kind is Kind.S or x.flat for x in seen):
            return None
        name = getattr(func, "__name__", type(func).__name__)
        if name == "__get__":
            name = func.__self__.__name__  # of an attribute
        return operand_error("dims", name, seen, None, error)

    def placeholder_value(self, name: str, x: Tensor) -> Tensor:
        """Numbers in place of a fake tensor's values."""
        kind, value = self.leaves_the_step(name, x), _torch.value_of(x)
        if kind is Kind.K and value is not None:
            return value  # of a constant there are no others
        own = kind is Kind.V
        if frame().path and differentiable(x):
            asks(self.axes)
            own = True
        return self.stand_ins.placeholder_for(x, own)

    def _told(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operator that returns a Python value, or a placeholder."""
        name = func._schema.name.removeprefix("aten::")
        given = [x for x in args if isinstance(x, Tensor)]
        if len(given) == 1:
            name = "item" if name == "_local_scalar_dense" else name
            value = self.placeholder_value(name, given[0])
            with _torch.beneath_all_modes():
                return value.item()
        kind = self.leaves_the_step(name, given)
        known = all(_torch.value_of(x) is not None for x in given)
        found = func(*args, **kwargs) if known else name == "equal"
        if kind is Kind.K and known:
            return found
        return self.stand_ins.answer_for(found, kind is Kind.V)

    def _note(
        self,
        op: OperatorClass,
        given: Sequence[Any],
        made: Sequence[Tensor],
        writes: bool,
        numbers: range,
    ) -> None:
        tensors = [x for x in given if isinstance(x, Tensor)]
        inputs = set(map(_torch.storage_key, tensors))
        lies_in = [_torch.storage_key(y) in inputs for y in made]
        node, trusted = _torch.current_node(), _trusted()
        by_user = node is None and not trusted
        if node is not None and self.nodes.in_a_body(node, numbers):
            for y, within in zip(made, lies_in, strict=True):
                if not within:
                    self.known.give(y, self.own, "a unit's derivative")
            return
        origin = self._origin(op, node, numbers, trusted)
        for x in tensors:
            self.used(x)
        view = not writes and all(lies_in)
        if view and not (by_user or op.picks or op.name == "view_as_real"):
            return
        sources = [self.known.of(x) for x in tensors]
        if view and self._takes_pairs(op, tensors[0], sources[0], made[0]):
            if op.picks and origin:
                origin = origin._replace(trusted=True, of_pairs=True)
                self.nodes.came_from(numbers, origin)
            return
        over = op.name == "copy" and sources[0].kind not in PARTS  # the first is lost
        read = tensors[1:] if over else tensors
        operands = list(map(operand, read, sources[len(tensors) - len(read) :]))
        call = OperatorCall(
            op, given, made, tensors, sources, operands, node, origin, trusted
        )
        if by_user:
            self._check_placed(call, view)
            # Of a slice that is all there is, torch makes an alias.
            taken = op.picks or op.name == "as_strided" or self.is_indexing
            if view and taken:
                self.known.own.picked(tensors[0])
        if view and not op.picks:
            return
        kind = self._typed(call)
        if view:
            return
        if op.random and not any(isinstance(x, torch.Generator) for x in given):
            kind = self.own  # the ranks' default generators are their own
        digest = None
        if by_user and kind is not Kind.V:
            kind, digest = self._event(call, kind)
        seen = seen_of(self.known, call, kind, digest)
        for i, (y, within) in enumerate(zip(made, lies_in, strict=True)):
            if i and seen.value:
                seen = seen._replace(value=hash((seen.value, i)))
            if within:
                self.known.write(y, seen)
            else:
                self.known.put(y, seen)

    def _origin(
        self, op: OperatorClass, node: Any, numbers: range, trusted: bool
    ) -> Origin | None:
        """The operator of the forward pass that runs, or that ``node`` is of."""
        if node is not None:
            return self.nodes.origin(node, numbers)
        origin = Origin(op.name, source_line(), trusted)
        self.nodes.came_from(numbers, origin)
        return origin

    def used(self, x: Tensor) -> None:
        """Called with a tensor that an operator reads."""

    def _captured(self, name: str, args: Any, kwargs: Any) -> None:
        """Raises where a unit's body reads parts that it was not given."""
        for x in flatten_lists([args, kwargs]):
            if not isinstance(x, Tensor) or (seen := self.known.seen(x)) is None:
                continue
            if memory(x) in self.given:
                continue
            if _torch.current_node() is not None or _trusted():
                continue
            if seen.kind in PARTS:
                raise operand_error("input", name, [seen])
            self.captured.append(self.known.made_of(x))

    def _takes_pairs(self, op: OperatorClass, x: Tensor, seen: Seen, y: Tensor) -> bool:
        """True of what real and imaginary parts of a part of complex numbers are.

        As torch computes these: its view as pairs of real numbers, views of those, and
        one number of each pair.
        """
        if not (seen.flat or seen.kind in PARTS):
            return False
        if op.name == "view_as_real":
            self.known.pair(x)
            return True
        return self.known.are_pairs(x, seen) and keeps_pairs(x, y)

    def _check_placed(self, call: OperatorCall, view: bool) -> None:
        """Raises where the dims of a placed leaf's elements count: it shows a row."""
        op, made = call.op, call.made
        placed = [
            (x, seen, self.known.are_pairs(x, seen))
            for x, seen in call.facts
            if seen.flat or seen.kind is Kind.S
        ]
        paired = [x.shape for x, _, are_pairs in placed if are_pairs]
        for x, seen, are_pairs in placed:
            if paired and x.ndim:  # else one number for all elements
                kept = all(y.shape == paired[0] for y in made)
                if view or not (are_pairs and op.elementwise and kept):
                    raise operand_error("pairs", op.name, [seen])
                for y in made:
                    self.known.pair(y)
            elif view:
                turned = op.name in TRANSPOSES or any(
                    y.shape[-1:] != x.shape[-1:] for y in made
                )
                some = seen.flat and any(y.shape != x.shape for y in made)
                if some if op.picks else turned:
                    raise operand_error("mixes", op.name, [seen])
            elif seen.flat and not (op.elementwise or op.factory):
                if self._along or any(y.ndim for y in made):
                    raise operand_error("mixes", op.name, [seen])

    def _typed(self, call: OperatorCall) -> Kind:
        op, made, origin = call.op, call.made, call.origin
        backward = call.node is not None
        try:
            return result(op, call.operands, made, backward)
        except Untyped as why:
            sure = call.trusted if origin is None else origin.trusted
            if str(why) == "positions" and not backward and _are_rows(call.operands):
                raise operand_error("rows", op.name, call.sources) from None
            if is_internal() and not backward or sure and str(why) != "own":
                # The library knows what it does with parts.
                return Kind.S if any(y.ndim for y in made) else Kind.P
            forward = (origin.name, origin.where) if backward and origin else None
            raise operand_error(str(why), op.name, call.sources, forward) from None

    def _event(self, call: OperatorCall, kind: Kind) -> tuple[Kind, Any]:
        """Notes what the ranks must agree on; what they do not is each rank's own."""
        op, seen = call.op, call.sources
        if op.name in COPIES:  # a rank may make more of them
            return kind, seen[-1].digest if seen else None
        numbers = tuple(comparable(x) for x in call.given if not isinstance(x, Tensor))
        constants = (
            *numbers,
            *(
                (x.digest, None if x.uniform else partial_view(t))
                for t, x in call.facts
                if x.kind is Kind.K
            ),
        )
        if kind is Kind.K:
            return kind, (op.name, constants)  # nobody's, till it meets something
        self.combines_numbers = self.combines_numbers or bool(constants)
        if self._alike(op.name, constants, call.line):
            return kind, None
        if kind in PARTS:
            part = next(x for x in seen if x.kind in PARTS)
            said = ", ".join(str(x) for x in numbers) or "a constant"
            own = Seen(Kind.V, f"a number ({said} here)")
            raise operand_error("own", op.name, [part, own])
        return Kind.V, None

    def _alike(self, name: str, constants: tuple[Any, ...], line: str) -> bool:
        """Records an event; returns if it is equal on all ranks, as far as is known."""
        self.events.append(SharedOp(name, constants, line))
        return len(self.events) - 1 not in self.varying

    def agreed(self, what: str, said: str, lines: Lines) -> None:
        """Notes what is no tensor, and is to be the same on every rank.

        Raises:
            LawError: it is not.
        """
        if not self._alike(what, tuple(lines), where := source_line()):
            raise rule_error("numbers", op=what, line=where, text=said)


def _are_rows(given: Sequence[Operand]) -> bool:
    """True where a part meets constants of its length, one for each of its elements.

    Those of jacfwd: they are another tangent of each rank's part.
    """
    parts = [x.shape for x in given if x.kind is Kind.S]
    others = [x.shape for x in given if agrees(x.kind) and not x.number]
    return any(
        len(shape) > len(part) and shape[-1:] == part[-1:] != (1,)
        for part in parts
        for shape in others
    )


def _trusted() -> bool:
    """True while the library is at work, which knows what it does with parts."""
    return is_internal() or is_own_call()
