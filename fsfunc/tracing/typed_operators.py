"""The type of what each operator of a step makes, between its units.

:class:`TypedOperators` is a dispatch mode, so that it sees backward passes too, and
through every transform of ``torch.func``. For each operator, `operator` runs it on
tensors without data; `_type_results` looks up the facts about its operands, asks
`types` for the type of its result, or raises where a rule is broken, and notes the
facts about the result. `checker` derives from it, and adds what is no operator:
collectives, units, gradients.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from fsfunc import _torch
from fsfunc._torch.fake_modes import run_operator_below
from fsfunc.comm.attribution import called_by_fsfunc, is_internal, source_line
from fsfunc.comm.comparison import Lines
from fsfunc.comm.mesh import note_axes_read
from fsfunc.comm.typed_maps import LawError
from fsfunc.core.casts import differentiable
from fsfunc.core.frames import frame
from fsfunc.tracing.knowledge import (
    AutogradNodes,
    FactTable,
    Origin,
    TensorFacts,
    memory_key,
    operand_of,
    view_keeps_pairs,
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
from fsfunc.tracing.results import OperatorCall, result_facts
from fsfunc.tracing.rules import operand_error, rule_error
from fsfunc.tracing.split_work import SplitWork
from fsfunc.tracing.steadiness import StandIns
from fsfunc.tracing.types import (
    PARTS,
    Kind,
    Operand,
    Untyped,
    is_equal_on_ranks,
    joint_kind,
    result_kind,
)
from fsfunc.tree import Leaf, PyTree


@dataclass(frozen=True)
class SharedOp:
    """An operator that computes what should be one value on all ranks: an event.

    Ranks compare these, operator by operator.

    Args:
        name: the operator's.
        constants: the numbers that it was given, and the digests of its constants.
        line: the line that called it.
    """

    name: str
    constants: tuple[Any, ...]
    line: str


_ONES: _torch.OpOverload = torch.ops.aten.ones_like.default


class TypedOperators(OperatorMode):
    """Types what operators make of values, and raises where that has no type.

    Args:
        axes: those over which the loss is a mean.
        alone: whether this rank is the only one on them.
        stand_ins: the numbers in place of values that the step asks for.
        varying: the indices of the events of which the constants differ between ranks.

    Attributes:
        local_kind: the type of what is each rank's own: V, or A if it is alone.
        events: the operators that ranks must agree on.
        facts: the facts about tensors.
        nodes: the operators that autograd nodes belong to.
        split_work: the axes beside ``axes`` along which values are each rank's own.
        unit_memory: the memory that the bodies of running units were given.
        captured: of what the tensors are made that the outermost unit captured.
        draws: whether torch's default generators are drawn from, in units too.
        drawing: the units in which they are, outside gradient calls.
        combines_numbers: whether numbers are combined with what is one value.
        is_indexing: whether a tensor is being indexed.
        seed_count: how many cotangents of ones torch makes next.
    """

    axes: tuple[str, ...]
    stand_ins: StandIns
    varying: set[int]
    facts: FactTable
    nodes: AutogradNodes
    draws: bool
    combines_numbers: bool

    def __init__(
        self,
        axes: tuple[str, ...],
        alone: bool,
        stand_ins: StandIns,
        varying: Iterable[int] = (),
    ):
        super().__init__()
        self.axes, self.stand_ins, self.varying = axes, stand_ins, set(varying)
        self.local_kind = Kind.A if alone else Kind.V
        self.events: list[SharedOp] = []
        self.facts, self.nodes = FactTable(), AutogradNodes()
        self.split_work: SplitWork = SplitWork(axes)
        self.unit_memory: set[int] = set()
        self.draws = self.combines_numbers = False
        self.drawing: set[str] = set()
        self.captured: list[Provenance] = []
        self.is_indexing = False
        self._names_dims = False  # whether the operator that is typed was given dims
        self.seed_count: int = 0
        self._paused = False  # while the check runs operators of its own

    def operator(
        self, func: _torch.OpOverload, args: _torch.Args, kwargs: _torch.Kwargs
    ) -> Any:
        if not self._paused and (dependence := _torch.data_dependence(func)):
            if dependence == "value":
                return self._python_value(func, args, kwargs)
            self.check_values_read(class_of_call(func, args, kwargs).name, args)
        node_numbers = self.nodes.new_numbers()
        out = run_operator_below(func, args, kwargs)
        # The cotangent of a loss has no type: each rank's loss counts once.
        if self.seed_count and func is _ONES:
            self.seed_count -= 1
            return out
        if self._paused or type(out) is bool:  # one that compares shapes
            return out
        self.draws = (call_draws := draws(func, args, kwargs)) or self.draws
        self.split_work.operator(func, args, kwargs, out)
        # In a unit's body all is the rank's own, whatever it does: nothing is typed.
        if path := frame().path:
            if call_draws and frame().seed is None:
                self.drawing.add(path[0])
            self._check_captured(path[0], args, kwargs)
            return out
        written = _torch.tensors_written(func, args, kwargs)
        outputs = flatten_lists([out, written]) if written else flatten_lists(out)
        if results := [x for x in outputs if isinstance(x, Tensor)]:
            op = class_of_call(func, args, kwargs)
            self._paused = True
            try:
                if func._schema.name.startswith(OF_LISTS):
                    for row_args, row_results in by_position(args, kwargs, results):
                        self._type_results(
                            op, row_args, row_results, bool(written), node_numbers
                        )
                else:
                    self._names_dims = names_dims(func, args, kwargs)
                    arguments = (
                        flatten_lists(args) + flatten_lists(kwargs)
                        if kwargs
                        else flatten_lists(args)
                    )
                    self._type_results(
                        op, arguments, results, bool(written), node_numbers
                    )
            finally:
                self._paused = False
        return out

    def check_values_read(self, name: str, values: PyTree) -> Kind:
        """Returns the joint type of tensors whose values Python reads.

        Args:
            name: the function that reads them.
            values: a tensor, or nested lists that hold some.

        Raises:
            LawError: one is this rank's part of a leaf.
        """
        tensors = [x for x in flatten_lists([values]) if isinstance(x, Tensor)]
        facts = [self.facts.of(x) for x in tensors]
        if any(x.kind in PARTS - {Kind.R} for x in facts):
            if not frame().path and not _library_at_work():
                raise operand_error("mixes", name, facts)
        kinds = {x.kind for x in facts}
        kind = Kind.R if kinds & PARTS else joint_kind(kinds)
        # Python then depends on the rank, as where it reads its ``axis_index``.
        if kind is Kind.V:
            note_axes_read(self.axes)
        return kind

    def error_for_part(
        self, func: _torch.TorchFunction, values: Iterable[Leaf], error: Exception
    ) -> Exception | None:
        """Returns the error to raise in place of torch's, where a part may be why.

        A part is 1-D: where a user gives one to a function of matrices, torch's error
        does not name the leaf.

        Args:
            func: the function that raised.
            values: its arguments.
            error: what torch raised.
        """
        if isinstance(error, LawError) or _torch.is_data_dependent(error):
            return None
        if frame().path or _library_at_work():
            return None
        facts = [self.facts.of(x) for x in values if isinstance(x, Tensor)]
        if not any(x.kind is Kind.S or x.flat for x in facts):
            return None
        name = getattr(func, "__name__", type(func).__name__)
        if name == "__get__":
            name = func.__self__.__name__  # of an attribute
        return operand_error("dims", name, facts, None, error)

    def placeholder_value(self, name: str, x: Tensor) -> Tensor:
        """Returns numbers in place of a fake tensor's values, which ``name`` reads."""
        kind, value = self.check_values_read(name, x), _torch.value_of(x)
        if kind is Kind.K and value is not None:
            return value  # of a constant there are no others
        rank_local = kind is Kind.V
        # In a unit's body tensors have no types; what may carry a derivative is taken
        # for the rank's own.
        if frame().path and differentiable(x):
            note_axes_read(self.axes)
            rank_local = True
        return self.stand_ins.placeholder_for(x, rank_local)

    def _python_value(
        self, func: _torch.OpOverload, args: _torch.Args, kwargs: _torch.Kwargs
    ) -> Any:
        """Returns the Python value that an operator returns, or a placeholder of it."""
        name = func._schema.name.removeprefix("aten::")
        tensors = [x for x in args if isinstance(x, Tensor)]
        if len(tensors) == 1:
            name = "item" if name == "_local_scalar_dense" else name
            value = self.placeholder_value(name, tensors[0])
            with _torch.beneath_all_modes():
                return value.item()
        kind = self.check_values_read(name, tensors)
        all_known = all(_torch.value_of(x) is not None for x in tensors)
        answer = func(*args, **kwargs) if all_known else name == "equal"
        if kind is Kind.K and all_known:
            return answer
        return self.stand_ins.answer_for(answer, kind is Kind.V)

    def _type_results(
        self,
        op: OperatorClass,
        arguments: Sequence[Any],
        results: Sequence[Tensor],
        writes: bool,
        node_numbers: range,
    ) -> None:
        """Notes the facts about the results of an operator that has run.

        Args:
            op: its class.
            arguments: its arguments, those in lists too.
            results: the tensors that it made, or wrote into.
            writes: whether it wrote into any.
            node_numbers: the sequence numbers of the autograd nodes that it made.

        Raises:
            LawError: a rule is broken.
        """
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        inputs = set(map(_torch.storage_key, tensors))
        in_input = [_torch.storage_key(y) in inputs for y in results]
        node, trusted = _torch.current_node(), _library_at_work()
        by_user = node is None and not trusted
        if node is not None and self.nodes.is_in_unit_body(node, node_numbers):
            for y, aliases in zip(results, in_input, strict=True):
                if not aliases:
                    self.facts.set_kind(y, self.local_kind, "a unit's derivative")
            return
        origin = self._origin(op, node, node_numbers, trusted)
        for x in tensors:
            self.note_use(x)
        # A view has the facts of its base, by its storage. Only those that choose
        # elements, or that a user takes, need a look.
        is_view = not writes and all(in_input)
        if is_view and not (by_user or op.picks or op.name == "view_as_real"):
            return
        facts = [self.facts.of(x) for x in tensors]
        if is_view and self._takes_pairs(op, tensors[0], facts[0], results[0]):
            if op.picks and origin:
                origin = origin._replace(trusted=True, of_pairs=True)
                self.nodes.set_origin(node_numbers, origin)
            return
        # ``x.copy_(y)`` reads y alone. (Into a part: its places count, so x is read.)
        overwrites = op.name == "copy" and facts[0].kind not in PARTS
        read_tensors = tensors[1:] if overwrites else tensors
        operands = list(
            map(operand_of, read_tensors, facts[len(tensors) - len(read_tensors) :])
        )
        call = OperatorCall(
            op, arguments, results, tensors, facts, operands, node, origin, trusted
        )
        if by_user:
            self._check_placed(call, is_view)
            # An index that takes all there is gives an alias, which shows no slice.
            slices = op.picks or op.name == "as_strided" or self.is_indexing
            if is_view and slices:
                self.facts.rank_local.note_slice(tensors[0])
        if is_view and not op.picks:
            return
        kind = self._result_kind(call)
        if is_view:
            return
        if op.random and not any(isinstance(x, torch.Generator) for x in arguments):
            kind = self.local_kind  # the ranks' default generators are their own
        digest = None
        if by_user and kind is not Kind.V:
            kind, digest = self._shared_kind(call, kind)
        made_facts = result_facts(self.facts, call, kind, digest)
        for i, (y, aliases) in enumerate(zip(results, in_input, strict=True)):
            if i and made_facts.value_key:
                made_facts = made_facts._replace(
                    value_key=hash((made_facts.value_key, i))
                )
            if aliases:
                self.facts.record_write(y, made_facts)
            else:
                self.facts.set(y, made_facts)

    def _origin(
        self, op: OperatorClass, node: Node | None, node_numbers: range, trusted: bool
    ) -> Origin | None:
        """Returns the forward operator that runs, or that ``node`` belongs to."""
        if node is not None:
            return self.nodes.origin(node, node_numbers)
        origin = Origin(op.name, source_line(), trusted)
        self.nodes.set_origin(node_numbers, origin)
        return origin

    def note_use(self, x: Tensor) -> None:
        """Called with each tensor that an operator reads; here it does nothing."""

    def _check_captured(
        self, name: str, args: _torch.Args, kwargs: _torch.Kwargs
    ) -> None:
        """Raises where a unit's body reads parts that it was not given.

        Other tensors that it captures are noted, as its outputs are made of them too.

        Args:
            name: the outermost unit's.
        """
        for x in flatten_lists([args, kwargs]):
            if not isinstance(x, Tensor) or (facts := self.facts.find(x)) is None:
                continue
            if memory_key(x) in self.unit_memory:
                continue
            if _torch.current_node() is not None or _library_at_work():
                continue
            if facts.kind in PARTS:
                raise operand_error("input", name, [facts])
            self.captured.append(self.facts.provenance(x))

    def _takes_pairs(
        self, op: OperatorClass, x: Tensor, facts: TensorFacts, y: Tensor
    ) -> bool:
        """Returns whether a view is one that torch makes for ``x.real`` or ``x.imag``.

        It views complex numbers as pairs of real ones, and takes one number of each
        pair. If ``x`` is a part, so are these views, and other views of whole pairs.
        """
        if not (facts.flat or facts.kind in PARTS):
            return False
        if op.name == "view_as_real":
            self.facts.mark_paired(x)
            return True
        return self.facts.shows_pairs(x, facts) and view_keeps_pairs(x, y)

    def _check_placed(self, call: OperatorCall, is_view: bool) -> None:
        """Raises where a user's operator depends on the dims of a placed leaf.

        Its part shows a row of elements, whatever dims the leaf has.

        Args:
            is_view: whether the operator makes views.
        """
        op, results = call.op, call.results
        placed = [
            (x, facts, self.facts.shows_pairs(x, facts))
            for x, facts in call.pairs
            if facts.flat or facts.kind is Kind.S
        ]
        paired = [x.shape for x, _, are_pairs in placed if are_pairs]
        for x, facts, are_pairs in placed:
            if paired and x.ndim:  # else one number for all elements
                keeps_shape = all(y.shape == paired[0] for y in results)
                if is_view or not (are_pairs and op.elementwise and keeps_shape):
                    raise operand_error("pairs", op.name, [facts])
                for y in results:
                    self.facts.mark_paired(y)
            elif is_view:
                mixes_last_dim = op.name in TRANSPOSES or any(
                    y.shape[-1:] != x.shape[-1:] for y in results
                )
                slices = facts.flat and any(y.shape != x.shape for y in results)
                if slices if op.picks else mixes_last_dim:
                    raise operand_error("mixes", op.name, [facts])
            elif facts.flat and not (op.elementwise or op.factory):
                if self._names_dims or any(y.ndim for y in results):
                    raise operand_error("mixes", op.name, [facts])

    def _result_kind(self, call: OperatorCall) -> Kind:
        """Returns the type of a call's results, or raises where they have none."""
        op, results, origin = call.op, call.results, call.origin
        backward = call.node is not None
        try:
            return result_kind(op, call.operands, results, backward)
        except Untyped as why:
            is_trusted = call.trusted if origin is None else origin.trusted
            if (
                str(why) == "positions"
                and not backward
                and _are_tangent_rows(call.operands)
            ):
                raise operand_error("rows", op.name, call.facts) from None
            if is_internal() and not backward or is_trusted and str(why) != "own":
                # The library knows what it does with parts, and so does the backward of
                # what it called.
                return Kind.S if any(y.ndim for y in results) else Kind.P
            forward = (origin.name, origin.line) if backward and origin else None
            raise operand_error(str(why), op.name, call.facts, forward) from None

    def _shared_kind(self, call: OperatorCall, kind: Kind) -> tuple[Kind, Hashable]:
        """Notes an operator on which the ranks must agree.

        Returns:
            the type of its results: V if its constants differ between ranks; and a
            digest, if it makes a constant.
        """
        op, facts = call.op, call.facts
        # A rank may make more copies than another, of the same values.
        if op.name in COPIES:
            return kind, facts[-1].digest if facts else None
        # torch makes zeros in place of a tangent that is not there, of the shape of
        # what has none: of parts that is each rank's own.
        if op.name == "_efficientzerotensor":
            return kind, op.name
        numbers = tuple(
            comparable(x) for x in call.arguments if not isinstance(x, Tensor)
        )
        constants = (
            *numbers,
            *(
                (x.digest, None if x.uniform else partial_view(tensor))
                for tensor, x in call.pairs
                if x.kind is Kind.K
            ),
        )
        if kind is Kind.K:
            # No event yet: ranks may have unlike constants, until one meets a value
            # that should be equal on all ranks.
            return kind, (op.name, constants)
        self.combines_numbers = self.combines_numbers or bool(constants)
        if self._record_event(op.name, constants, call.line):
            return kind, None
        if kind in PARTS:
            part = next(x for x in facts if x.kind in PARTS)
            number_text = ", ".join(str(x) for x in numbers) or "a constant"
            own_number = TensorFacts(Kind.V, f"a number ({number_text} here)")
            raise operand_error("own", op.name, [part, own_number])
        return Kind.V, None

    def _record_event(
        self, name: str, constants: tuple[object, ...], line: str
    ) -> bool:
        """Records an event; returns whether it is equal on all ranks, if that is known.

        In the first run nothing is known, and all are taken to be equal: ranks compare
        their events then, and another run gets the indices of those that differ.
        """
        self.events.append(SharedOp(name, constants, line))
        return len(self.events) - 1 not in self.varying

    def record_agreed(self, name: str, local_text: str, lines: Lines) -> None:
        """Notes what is no tensor, and must be the same on every rank.

        Args:
            name: what it is for, as its event's name.
            local_text: what it is on this rank, for the message.
            lines: the same, to be compared.

        Raises:
            LawError: it is not the same.
        """
        if not self._record_event(name, tuple(lines), line := source_line()):
            raise rule_error("numbers", op=name, line=line, text=local_text)


def _are_tangent_rows(operands: Sequence[Operand]) -> bool:
    """Returns whether a part meets rows of constants, each of the part's length.

    So it is in ``jacfwd``, which pushes forward a row of the identity for each element:
    that has the length of this rank's part, and is another tangent on each rank.
    """
    parts = [x.shape for x in operands if x.kind is Kind.S]
    others = [x.shape for x in operands if is_equal_on_ranks(x.kind) and not x.number]
    return any(
        len(shape) > len(part) and shape[-1:] == part[-1:] != (1,)
        for part in parts
        for shape in others
    )


def _library_at_work() -> bool:
    """Returns whether the library is at work, which knows what it does with parts."""
    return is_internal() or called_by_fsfunc()
