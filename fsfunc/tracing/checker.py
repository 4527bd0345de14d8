"""The type check of a step: types for units, collectives and gradients.

One run of the check (`type_check`) has one :class:`Checker`. It types what operators
make, as `TypedOperators`, and has hooks for what is no operator of torch: as a
`Watcher` it is called by collectives, as the frame's `Tracer` by units, sharded
functions and gradient calls. Inside a unit's body every value is the rank's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import current_label, internal, is_internal, source_line
from fsfunc.comm.collective_ops import Watcher
from fsfunc.comm.descriptions import describe_lines, describe_value
from fsfunc.comm.groups import RankGroup
from fsfunc.comm.linear_maps import LinearMap
from fsfunc.comm.typed_maps import ENTER, GATHER, PART_AS_LOCAL, SUM
from fsfunc.core.frames import frame, inside
from fsfunc.core.losses import counts_as_leaf, is_averaged, is_reduced
from fsfunc.core.tracers import Tracer
from fsfunc.core.units import Call
from fsfunc.optim.schedules import ask_schedules_and_masks
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.placements import Own
from fsfunc.sharded.plain_leaves import placement_of
from fsfunc.tracing.knowledge import TensorFacts, memory_key
from fsfunc.tracing.operators import partial_view
from fsfunc.tracing.provenance import Gradient, Provenance, join
from fsfunc.tracing.results import (
    combine,
    gradient_pairs,
    placed_facts,
    rows_of_derivative,
)
from fsfunc.tracing.rules import operand_error, rule_error
from fsfunc.tracing.runs import returned_state
from fsfunc.tracing.steadiness import NumbersGiven, StandIns, observe_numbers
from fsfunc.tracing.torch_calls import check_tracked
from fsfunc.tracing.typed_operators import TypedOperators
from fsfunc.tracing.types import PARTS, Kind, is_equal_on_ranks, misuse_case, moved_kind
from fsfunc.tree import Leaf, PyTree


class Checker(Tracer, Watcher, TypedOperators):
    """Types the values of a step, and raises where one has none.

    Attributes:
        call_keys: the signatures of the calls of sharded functions.
        numbers_given: the numbers that torch's functions were given.
        rank_local_paths: the paths of the returned state at which each rank has its own
            value.
    """

    captured: list[Provenance]
    unit_memory: set[int]

    def __init__(
        self,
        axes: tuple[str, ...],
        alone: bool,
        stand_ins: StandIns,
        varying: Iterable[int] = (),
    ):
        TypedOperators.__init__(self, axes, alone, stand_ins, varying)
        self.call_keys: list[tuple[Any, ...]] = []
        self.numbers_given: list[NumbersGiven] = []
        self.rank_local_paths: set[str] = set()
        # (unit, leaves) that were gathered for the unit whose body runs next.
        self._gathered: tuple[str, list[Sharded]] = "", []
        # Memory of plain leaves that are one value.
        self._replicated_memory: set[int] = set()
        self._parameter_memory: set[int] = set()  # memory of what was differentiated
        self._cast_memory: set[int] = set()  # memory of what the user's pcast takes
        # For each collective in the forward of a user's autograd.Function: the sequence
        # numbers that the Function's node may have.
        self._function_nodes: list[range] = []
        self._sending_nodes: set[int] = set()  # numbers of nodes whose backward sends

    # Collectives

    def map_applied(
        self, x: Tensor, linear_map: LinearMap, ranks: RankGroup, y: Tensor
    ) -> None:
        # A pipeline records its loss within the step, with the tracer of its own.
        if frame().tracer is self:
            self.split_work.check_enters(x, linear_map, ranks)
        self.split_work.moved(x, linear_map, ranks, y)
        if frame().path:
            return
        self._check_moved(x, linear_map, ranks, y)
        # What a backward pass sends is followed as a gradient: see `reduced`.
        if _torch.current_node() is None:
            made_of, line = (
                self.facts.provenance(x),
                f"{linear_map.op} at {source_line()}",
            )
            made_of = made_of.changed_at(line) if linear_map.is_comparison else made_of
            value = hash((linear_map.op, linear_map.to, self.facts.value_key(x)))
            self.facts.change(y, provenance=made_of, value_key=value)

    def _check_moved(
        self, x: Tensor, linear_map: LinearMap, ranks: RankGroup, y: Tensor
    ) -> None:
        """Notes the type of what a linear map makes; raises where it is misused."""
        if ranks.size == 1:
            self.facts.set_kind(y, Kind.A, f"what {linear_map.op} gives")
            return
        # Types are about the axes over which the loss is a mean: along others (of
        # tensor parallelism) a value keeps its type, and `split_work` follows it.
        if not ranks.loss_is_mean:
            facts = self.facts.of(x)
            # A row of terms has the type of parts, as the library made it.
            sums_terms = linear_map.of == "P" and facts.kind in (Kind.P, Kind.S)
            if sums_terms and ranks.partly_mean:
                facts = TensorFacts(
                    Kind.A, f"what {linear_map.op} gives", source_line()
                )
            elif ranks.partly_mean and facts.kind in (Kind.A, Kind.K):
                # Of one value each rank gets another part, or several of them.
                facts = TensorFacts(
                    self.local_kind, f"what {linear_map.op} gives", source_line()
                )
            self.facts.set(y, facts)
            return
        facts, node = self.facts.of(x), _torch.current_node()
        if node is not None:
            self._sending_nodes.add(_torch.sequence_number(node))
        if node is not None and self.nodes.is_in_unit_body(
            node, self.nodes.new_numbers()
        ):
            self.facts.set_kind(y, self.local_kind, "a unit's derivative")
            return
        if (
            linear_map == PART_AS_LOCAL
            and facts.kind is Kind.A
            and (is_internal() or node is not None)
        ):
            self.facts.set(y, facts)  # an expert's block, gathered over other axes
            return
        case, name = misuse_case(linear_map, facts.kind), linear_map.op
        if case == "disagrees" and (unit := current_label()[0]):
            case, name = "parameters", unit
        # A part has one dim, and a sum of parts none: constants with more came by vmap,
        # as the rows of jacfwd. Each rank's would be a tangent of another element.
        if (
            facts.kind is Kind.K
            and x.ndim > (linear_map == GATHER)
            and linear_map in (GATHER, SUM)
        ):
            case = "rows"
        if case:
            raise operand_error(case, name, [facts])
        kind = moved_kind(linear_map, facts.kind)
        if linear_map.op == "enter":
            self._parameter_memory.add(memory_key(x))
            # A constant that the user casts is declared to be one value.
            if facts.kind is Kind.K and memory_key(x) in self._cast_memory:
                kind = Kind.A
        self.facts.set_kind(y, kind, f"what {linear_map.op} gives")

    def collective_called(
        self, x: Tensor, linear_map: LinearMap, ranks: RankGroup
    ) -> None:
        if not (ranks.loss_is_mean or ranks.partly_mean) or frame().path:
            return
        facts = self.facts.of(x)
        if facts.kind in PARTS and linear_map != PART_AS_LOCAL:
            raise operand_error("parts", linear_map.op, [facts])
        if linear_map == ENTER:
            self._cast_memory.add(memory_key(x))
        if _torch.function_runs():
            self._function_nodes.append(self.nodes.function_numbers())

    def claimed_equal(self, x: Leaf, caller: str) -> None:
        if frame().path:
            return
        if not isinstance(x, Tensor):
            self.record_agreed(
                caller,
                describe_value(x),
                describe_lines(caller, x, ask_schedules_and_masks(())),
            )
            return
        facts, alike = self.facts.of(x), True
        if facts.kind is Kind.K:
            alike = self._record_event(
                caller, (facts.digest, partial_view(x)), source_line()
            )
        if facts.kind is Kind.V or not alike:
            raise operand_error("disagrees", caller, [facts])

    def summed_locally(self, x: Tensor, caller: str) -> None:
        facts = self.facts.of(x)
        if facts.kind in PARTS and not frame().path:
            raise operand_error("lost", caller, [facts])

    def claimed_rank_local(self, x: Tensor, ranks: RankGroup, caller: str) -> None:
        if ranks.size > 1:
            lacking = self.split_work.followed(ranks.axis) - self.split_work.of(x)
            if shared_axes := [a for a in ranks.axis if a in lacking]:
                raise rule_error("counted", op=caller, axis=shared_axes[0])

    def check_measured(self, caller: str, *tensors: Tensor) -> None:
        """Raises if a shape is read of a leaf's part, where the leaf has other dims.

        Args:
            caller: the function that reads it.
            tensors: the tensor; or several, of which one gives the others its shape.
        """
        facts = [self.facts.of(x) for x in tensors]
        parts = [x for x in facts if x.kind is Kind.S or x.flat]
        if parts and not frame().path and (len(facts) == 1 or len(parts) < len(facts)):
            raise operand_error("shape", caller, parts[:1])

    def leaf_made(self, leaf: Sharded) -> None:
        facts = self.facts.of(leaf._local)
        if facts.kind not in PARTS and leaf.ndim > 1:
            self.facts.set(leaf._local, facts._replace(flat=True))

    def typed_like(self, y: Tensor, x: Tensor) -> Tensor:
        self.facts.set(y := y.clone(), self.facts.of(x))
        return y

    def type_declared(self, y: Tensor, kind: str) -> None:
        facts, is_alone = self.facts.of(y), self.local_kind is Kind.A
        self.facts.set_kind(y, Kind.A if is_alone else Kind[kind], "what assume gave")
        self.facts.change(y, provenance=facts.provenance, value_key=facts.value_key)

    def note_use(self, x: Tensor) -> None:
        # The results of a Function around a collective: its backward must send too, or
        # the gradients of the other ranks' losses are lost.
        node = x.grad_fn if self._function_nodes else None
        if node is None or not _torch.is_function_node(node):
            return
        number, name = _torch.sequence_number(node), node.name()
        for numbers in self._function_nodes:
            if number in numbers:
                self._function_nodes.remove(numbers)
                node.register_hook(lambda *_: self._check_sent(number, name))
                return

    def _check_sent(self, number: int, name: str) -> None:
        """Raises if a Function's backward, which has run, has sent nothing.

        The Functions of our own collectives send in their backward.
        """
        if number not in self._sending_nodes:
            raise operand_error("unanswered", name.removesuffix("Backward"), [])

    # Calls of sharded functions, and units

    def on_call(
        self,
        key: tuple[Hashable, ...],
        args: tuple[PyTree, ...],
        keywords: dict[str, PyTree],
        mean: Sequence[str],
    ) -> None:
        """Notes the types of the arguments of a sharded function.

        A leaf that is cut over an axis of the mean is a part, another one a replicated
        value. A plain tensor is the rank's own, unless it is in the first argument or
        its layout says so.
        """
        self.call_keys.append(key)
        for i, value in enumerate((*args, keywords)):
            paths, leaves, _ = tree.flatten_with_paths(value, is_leaf=is_sharded)
            for path, x in zip(paths, leaves, strict=True):
                name = f"argument {i}" + (f" at {path!r}" if path else "")
                name = repr(path) if i == 0 and path else name
                value = hash((i, path))
                if isinstance(x, Sharded):
                    self.split_work.add_part(x)
                    is_cut = self.local_kind is Kind.V and set(x.layout.axes) & set(
                        mean
                    )
                    facts = placed_facts(x, Kind.S if is_cut else Kind.I, name)
                    self.facts.add_argument(
                        _memory_tensor(x), facts._replace(value_key=value)
                    )
                    if x._range is not None:
                        self.facts.name_leaf(*x._range, name)
                elif isinstance(x, Tensor):
                    layout = placement_of(x)
                    is_rank_local = (
                        i
                        and layout is None
                        or isinstance(layout, Own)
                        or self._is_rank_local(x)
                    )
                    kind = self.local_kind if is_rank_local else Kind.I
                    self._replicated_memory |= (
                        set() if is_rank_local else {memory_key(x)}
                    )
                    self.facts.add_argument(x, TensorFacts(kind, name, value_key=value))

    def mark_numbers(self, values: PyTree) -> PyTree:
        return observe_numbers(values, self.stand_ins.answer)

    def on_take(self, name: str, leaves: Iterable[Sharded]) -> None:
        leaves = list(leaves)
        check_tracked(name, [(leaf.name, leaf._local) for leaf in leaves])
        for leaf in leaves:
            self.claimed_equal(leaf._local, name)
        if not frame().path:
            self._gathered = name, leaves

    def wrap_gathered(
        self, call: Call, run: Callable[..., PyTree]
    ) -> Callable[..., PyTree]:
        """Returns ``run`` with all that it does typed as a unit's body is.

        Transforms inside ``shard`` compute with gathered parameters before the body,
        and with its outputs after it.
        """
        call_frame = call.frame
        if call_frame.path:
            return run

        def inner(params: PyTree, /, *inputs: PyTree, **keywords: PyTree) -> PyTree:
            arguments = params, inputs, keywords
            memory_taken, memory_before = self._memory_keys(arguments), self.unit_memory
            start = _torch.next_sequence_number()
            tangents = self._tangents(self.facts.tensors_in(arguments))
            self.captured = self.facts.provenances([arguments, tangents])
            self.unit_memory = memory_before | memory_taken
            with inside(frame().replace(path=call.path, numbers=call.numbers)):
                out = run(params, *inputs, **keywords)
            self.unit_memory = memory_before
            self.nodes.mark_unit_body(start)
            return self._type_outputs(call, out, memory_taken, arguments, retype=False)

        return inner

    def _memory_keys(self, values: PyTree) -> set[int]:
        """Returns the memory of the tensors that a unit is given.

        Of leaves split over other axes these are the gathered blocks.
        """
        keys = set()
        for x in tree.leaves(values, is_leaf=is_sharded):
            if isinstance(x, Sharded) and x.layout.flat is None:
                self.split_work.add_part(x)
                x = x._local
            if isinstance(x, Tensor):
                keys.add(memory_key(x))
        return keys

    def run_body(
        self,
        call: Call,
        params: PyTree,
        inputs: tuple[PyTree, ...],
        keywords: dict[str, PyTree],
    ) -> PyTree:
        """Runs a unit's function, whose results are the rank's own."""
        outermost = not call.frame.path
        if outermost:
            for x in tree.leaves((inputs, keywords), is_leaf=is_sharded):
                if isinstance(x, Tensor) and self.facts.kind(x) in PARTS:
                    raise operand_error("input", call.name, [self.facts.of(x)])
        memory_taken = self._memory_keys((params, inputs, keywords))
        start, memory_before = _torch.next_sequence_number(), self.unit_memory
        arguments = (params, inputs, keywords)
        if outermost and self._gathered[0] == f"unit {call.name!r}":
            arguments, self._gathered = (*arguments, self._gathered[1]), ("", [])
        if outermost:
            tangents = self._tangents(self.facts.tensors_in(arguments))
            self.captured = self.facts.provenances([arguments, tangents])
        # Whole parameters may lie in the memory of their parts: what the body was given
        # it may read.
        self.unit_memory = memory_before | memory_taken
        with internal(False):
            out = call.unit.checked(params, inputs, keywords, call.unit.fn)
        self.unit_memory = memory_before
        self.nodes.mark_unit_body(start)
        return (
            self._type_outputs(call, out, memory_taken, arguments) if outermost else out
        )

    def _type_outputs(
        self,
        call: Call,
        out: PyTree,
        memory_taken: set[int],
        arguments: PyTree,
        *,
        retype: bool = True,
    ) -> PyTree:
        """Returns a unit's outputs, typed as the rank's own.

        Args:
            call: the unit call.
            out: what it returned.
            memory_taken: the memory of what it was given.
            arguments: what it was given, and gathered for it.
            retype: whether outputs that are the rank's own already are typed too.
        """
        name, counter = f"unit {call.name!r}", itertools.count()
        provenance = combine(name, self.captured).changed_at(
            f"{name} at {source_line()}"
        )
        call_key = hash(
            (call.unit, *map(self.facts.value_key, self.facts.tensors_in(arguments)))
        )

        def type_output(y: Leaf) -> Leaf:
            if not isinstance(y, Tensor) or not retype and self._is_rank_local(y):
                return y
            # An input that the unit returns as it is: in its memory a type would be the
            # input's too.
            if memory_key(y) in memory_taken:
                y = y.clone()
            title, line = f"what {name} returned", source_line()
            for x in (y, *self._tangents([y])):  # made in the body, as ``y`` was
                value = hash((call_key, next(counter)))
                facts = TensorFacts(
                    self.local_kind, title, line, value_key=value, provenance=provenance
                )
                self.facts.set(x, facts)
            return y

        return tree.map(type_output, out, is_leaf=is_sharded)

    def _tangents(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Returns the tangents of tensors, without typing the operators that do so."""
        self._paused, was_paused = True, self._paused
        try:
            return [t for x in tensors for t in _torch.tangents_of(x)]
        finally:
            self._paused = was_paused

    # Derivatives

    def on_gradient(
        self, variables: PyTree, gradients: PyTree, averaged: Callable[[Tensor], bool]
    ) -> None:
        for x, g in gradient_pairs(variables, gradients):
            if isinstance(x, Sharded) and isinstance(g, Sharded):
                self._check_gradient(x._local, g._local)
            elif isinstance(x, Tensor):
                self._check_gradient(x, g, averaged(x))

    def on_reduced(
        self,
        variables: PyTree,
        gradients: PyTree,
        value_and_args: Sequence[PyTree],
        mean_value: Sequence[PyTree],
    ) -> None:
        # Of the loss, not of what is returned beside it.
        for x in self.facts.tensors_in(value_and_args[0]):
            if (split_axes := self.split_work.of(x)) and not frame().path:
                raise rule_error("loss", line=source_line(), axis=min(split_axes))
        names = _combined_names(mean_value[1])
        if not self._record_event("a loss", names, source_line()):
            text = ", ".join(names) or "none"
            raise rule_error("beside", line=source_line(), text=text)
        self._type_sharded_gradients(variables, gradients)
        # A loss that is only evaluated (``ff.value``) is a mean too, which may not meet
        # that of other rows: it counts as one by all that it was given.
        inputs, tensor_gradients = (
            zip(*gradient_pairs(variables, gradients), strict=True)
            if variables
            else (value_and_args[1:], ())
        )
        means = [
            x for x in self.facts.tensors_in(mean_value) if self.facts.kind(x) is Kind.A
        ]
        self._note_gradients(inputs, tensor_gradients, value_and_args)
        self._note_gradients(inputs, means, value_and_args, is_loss=True)

    def _note_gradients(
        self,
        variables: PyTree,
        gradients: PyTree,
        outputs: PyTree,
        is_loss: bool = False,
    ) -> None:
        """Notes of what gradients are made: those by parameters are means of rows.

        Args:
            variables: what is differentiated by.
            gradients: the gradients; or the means of losses, which are followed alike.
            outputs: the differentiated values, their arguments, and cotangents.
            is_loss: whether ``gradients`` are means of losses.
        """
        # A gradient is known by the values that it is by: of two gradient calls by the
        # same parameters, the gradients of other rows must not meet.
        facts = [self.facts.of(x) for x in self.facts.tensors_in(variables)]
        values = tuple(x.value_key for x in facts if x.kind in (Kind.S, Kind.I))
        line = f"the derivative at {source_line()}"
        made_of = join(
            [*self.facts.provenances(outputs), *rows_of_derivative(self.facts, outputs)]
        )
        made_of = made_of.changed_at(line)
        averages = bool(values) and self.local_kind is Kind.V
        shares = frozenset(((made_of.rows, 1.0),))
        gradient = Gradient(hash(values), made_of.rows, shares, is_loss=is_loss)
        # Under vmap there is a gradient for each of several vectors, as in jacrev.
        is_mapped = any(
            _torch.vmap_levels_of(c) for c in self.facts.tensors_in(outputs)
        )
        for g in self.facts.tensors_in(gradients):
            provenance = made_of
            if averages and self.facts.kind(g) is not Kind.V:
                stacked = _torch.vmap_dim(g) if is_mapped else None
                stacked_gradient = (
                    gradient if stacked is None else replace(gradient, stacked=stacked)
                )
                provenance = made_of._replace(
                    gradients=made_of.gradients | {stacked_gradient}
                )
            self.facts.change(g, provenance=provenance)

    def _type_sharded_gradients(self, variables: PyTree, gradients: PyTree) -> None:
        """Types gradients by sharded leaves as these, whose layouts they have."""
        flat_memory: set[int] = set()  # memory of which a part has several dims
        for x, g in gradient_pairs(variables, gradients):
            if isinstance(x, Sharded) and isinstance(g, Sharded):
                kind, name = (
                    self.facts.kind(_memory_tensor(x)),
                    f"the gradient by {x.name!r}",
                )
                facts, memory_tensor = placed_facts(g, kind, name), _memory_tensor(g)
                key = memory_key(memory_tensor)
                flat_memory |= {key} if facts.flat else set()
                facts = facts._replace(line=source_line(), flat=key in flat_memory)
                self.facts.set(memory_tensor, facts)
                self._parameter_memory |= (
                    {memory_key(_memory_tensor(x))} if kind is Kind.I else set()
                )

    def check_pulled(
        self, variables: Sequence[Leaf], gradients: Sequence[Leaf], outputs: PyTree
    ) -> None:
        """Checks gradients of ``torch.autograd.grad`` or ``backward``, and notes them.

        Nothing averages these over the ranks afterwards.

        Args:
            variables: what is differentiated by.
            gradients: the gradients.
            outputs: the differentiated values, and the cotangents.
        """
        if not frame().path and not is_internal():
            for x, g in zip(variables, gradients, strict=True):
                self._check_gradient(x, g)
            self._note_gradients(variables, gradients, outputs)

    def _check_gradient(self, x: Leaf, g: Leaf, averaged: bool = False) -> None:
        """Compares the type of a gradient with that of what it is a gradient by.

        Args:
            x: what is differentiated by.
            g: the gradient.
            averaged: whether it becomes the mean of the ranks'.

        Raises:
            LawError: it would be this rank's own, of what is one value on all ranks.
        """
        if not isinstance(x, Tensor) or not isinstance(g, Tensor):
            return
        x_facts, g_facts = self.facts.of(x), self.facts.of(g)
        if x_facts.kind is Kind.I:
            self._parameter_memory.add(memory_key(x))
        if x_facts.flat and not (g_facts.flat or _torch.is_wrapped(g)):
            self.facts.change(g, flat=True)
        if x_facts.kind is Kind.S:
            if g_facts.kind is Kind.V:
                raise operand_error("own gradient", "", [x_facts, g_facts])
            self.facts.set_kind(g, Kind.S, x_facts.title)
        elif g_facts.kind in PARTS:
            raise operand_error("term", "", [x_facts, g_facts])
        elif (
            x_facts.kind in (Kind.K, Kind.I)
            and not is_equal_on_ranks(g_facts.kind)
            and not averaged
        ):
            case = "whose" if x_facts.kind is Kind.K else "unaveraged"
            raise operand_error(case, "", [x_facts, g_facts])
        elif x_facts.from_parameters and g_facts.kind is Kind.V and not averaged:
            raise operand_error("made of one", "", [x_facts, g_facts])

    def on_return(self, args: tuple[PyTree, ...], out: PyTree) -> None:
        """Compares the types of what a sharded function returns with what it was given.

        Raises:
            LawError: what is one value on all ranks would differ from rank to rank.
        """
        for y in tree.leaves(out, is_leaf=is_sharded):
            if isinstance(y, Sharded) and self._is_rank_local(
                memory_tensor := _memory_tensor(y)
            ):
                leaf = TensorFacts(Kind.I, repr(y.name) if y.name else "a placed leaf")
                raise operand_error(
                    "returned", "", [leaf, self.facts.of(memory_tensor)]
                )
            facts = self.facts.of(y) if isinstance(y, Tensor) and y.ndim < 2 else None
            if facts and (facts.flat or facts.kind in PARTS - {Kind.R}):
                raise operand_error("bare", "", [facts])
        new_state = returned_state(args, out)
        paths, new_leaves, new_def = tree.flatten_with_paths(
            new_state, is_leaf=is_sharded
        )
        by_path = zip(paths, new_leaves, strict=True)
        self.rank_local_paths = {path for path, y in by_path if self._is_rank_local(y)}
        leaves, treedef = tree.flatten(args[0] if args else (), is_leaf=is_sharded)
        for x in leaves:
            if self._is_rank_local(x) and memory_key(x) in self._replicated_memory:
                raise operand_error("written", "", [self.facts.of(x)])
        if treedef != new_def:
            return  # it returns no state, whose leaves could be compared
        for x, y in zip(leaves, new_leaves, strict=True):
            if not (isinstance(x, Tensor) and self._is_rank_local(y)):
                continue
            if x.shape == y.shape and _torch.storage_key(x) in self._parameter_memory:
                raise operand_error("returned", "", [*map(self.facts.of, (x, y))], None)

    def _is_rank_local(self, x: Leaf) -> bool:
        """Returns whether ``x`` is a tensor that differs from rank to rank."""
        return isinstance(x, Tensor) and self.facts.kind(x) is Kind.V


def _combined_names(aux: PyTree) -> tuple[str, ...]:
    """Returns the paths of auxiliary outputs that ranks combine, and in which way.

    Each of them takes a collective, which all ranks must call.
    """
    paths, leaves, _ = tree.flatten_with_paths(aux, is_leaf=counts_as_leaf)
    names = []
    for path, x in zip(paths, leaves, strict=True):
        if is_averaged(x):
            names.append(f"the average {path!r}")
        elif is_reduced(x):
            name = type(x).__name__
            names += [f"{name} {f'{path}/{p}'.strip('/')!r}" for p in tree.paths(x)]
    return tuple(names)


def _memory_tensor(leaf: Sharded) -> Tensor:
    """Returns a tensor in the memory of a leaf's part, without making the part."""
    return leaf._local if leaf._range is None else leaf._range[0]
