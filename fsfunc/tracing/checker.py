"""The type check of a step: types for units, collectives and gradients.

A :class:`Checker` knows the types of values (`Operators`), and has hooks for what is no
operator of torch. Inside a unit's body every value is the rank's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import current_label, internal, is_internal, source_line
from fsfunc.comm.collective_ops import Watcher
from fsfunc.comm.descriptions import stated, told
from fsfunc.comm.groups import RankGroup
from fsfunc.comm.linear_maps import LinearMap
from fsfunc.comm.mesh import here
from fsfunc.comm.typed_maps import ENTER, GATHER, OWN, SUM
from fsfunc.core.frames import frame, inside
from fsfunc.core.losses import averaged, counts_as_leaf, is_reduced
from fsfunc.core.tracers import Tracer
from fsfunc.core.units import Call
from fsfunc.optim.schedules import answers
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.placements import Own
from fsfunc.sharded.plain_leaves import laid_as
from fsfunc.tracing.knowledge import Seen, memory
from fsfunc.tracing.operators import partial_view
from fsfunc.tracing.provenance import Gradient, joined
from fsfunc.tracing.results import pairs, placed, pulled_with, together
from fsfunc.tracing.rules import operand_error, rule_error
from fsfunc.tracing.runs import returned_state
from fsfunc.tracing.steadiness import NumbersGiven, StandIns, observe_numbers
from fsfunc.tracing.torch_calls import check_tracked
from fsfunc.tracing.typed_operators import Operators
from fsfunc.tracing.types import PARTS, Kind, agrees, misused, moved_to


class Checker(Tracer, Watcher, Operators):
    """Types the values of a step, and raises where one has none.

    ``call_keys``: signatures of calls of sharded functions; ``numbers_given``: numbers
    that torch's functions were given; ``own_paths``: those of the returned state that
    are per rank.
    """

    def __init__(
        self,
        axes: tuple[str, ...],
        alone: bool,
        stand_ins: StandIns,
        varying: Iterable[int] = (),
    ):
        Operators.__init__(self, axes, alone, stand_ins, varying)
        self.call_keys: list[Any] = []
        self.numbers_given: list[NumbersGiven] = []
        self.own_paths: set[str] = set()
        self._gathered: tuple[str, list[Sharded]] = "", []  # for the unit that comes
        self._whole: set[int] = set()  # memory of leaves that are one value
        self._parameters: set[int] = set()  # plain leaves that were differentiated
        self._cast: set[int] = set()  # memory of what the user's pcast takes
        # Of Functions around collectives: the numbers that their nodes may have.
        self._functions: list[range] = []
        self._answered: set[int] = set()  # numbers of nodes whose backward sends

    # Collectives

    def moved(self, x: Tensor, how: LinearMap, where: RankGroup, y: Tensor) -> None:
        if frame().tracer is self:  # not in a loss that `pipeline` records within
            self.split.check_enters(x, how, where)
        self.split.moved(x, how, where, y)
        if frame().path:
            return
        self._moved(x, how, where, y)
        if _torch.current_node() is None:
            made_of, line = self.known.made_of(x), f"{how.op} at {source_line()}"
            made_of = made_of.changed(line) if how.ordered else made_of
            value = hash((how.op, how.to, self.known.value(x)))
            self.known.change(y, made_of=made_of, value=value)

    def _moved(self, x: Tensor, how: LinearMap, where: RankGroup, y: Tensor) -> None:
        if where.size == 1:
            self.known.give(y, Kind.A, f"what {how.op} gives")
            return
        if not where.mean:  # of other axes: it stays whose it was
            seen = self.known.of(x)
            # A row of terms is typed as parts are: the library made it (`_typed`).
            summed = how.of == "P" and seen.kind in (Kind.P, Kind.S)
            if summed and set(where.axis) & set(here().mean):
                seen = Seen(Kind.A, f"what {how.op} gives", source_line())
            self.known.put(y, seen)
            return
        seen, node = self.known.of(x), _torch.current_node()
        if node is not None:
            self._answered.add(_torch.sequence_number(node))
        if node is not None and self.nodes.in_a_body(node, self.nodes.new()):
            self.known.give(y, self.own, "a unit's derivative")
            return
        if how == OWN and seen.kind is Kind.A and (is_internal() or node is not None):
            self.known.put(y, seen)  # an expert's block, gathered over other axes
            return
        why, op = misused(how, seen.kind), how.op
        if why == "disagrees" and (unit := current_label()[0]):
            why, op = "parameters", unit
        # Of parts there is one dim, of their sum none: vmap brought the others.
        if seen.kind is Kind.K and x.ndim > (how == GATHER) and how in (GATHER, SUM):
            why = "rows"
        if why:
            raise operand_error(why, op, [seen])
        kind = moved_to(how, seen.kind)
        if how.op == "enter":
            self._parameters.add(memory(x))
            if seen.kind is Kind.K and memory(x) in self._cast:
                kind = Kind.A  # the user said whose it is
        self.known.give(y, kind, f"what {how.op} gives")

    def collective(self, x: Tensor, how: LinearMap, where: RankGroup) -> None:
        if not where.mean or frame().path:
            return
        seen = self.known.of(x)
        if seen.kind in PARTS and how != OWN:
            raise operand_error("parts", how.op, [seen])
        if how == ENTER:
            self._cast.add(memory(x))
        if _torch.function_runs():
            self._functions.append(self.nodes.of_function())

    def claimed(self, x: Any, what: str) -> None:
        if frame().path:
            return
        if not isinstance(x, Tensor):
            self.agreed(what, stated(x), told(what, x, answers(())))
            return
        seen, alike = self.known.of(x), True
        if seen.kind is Kind.K:
            alike = self._alike(what, (seen.digest, partial_view(x)), source_line())
        if seen.kind is Kind.V or not alike:
            raise operand_error("disagrees", what, [seen])

    def summed(self, x: Tensor, what: str) -> None:
        seen = self.known.of(x)
        if seen.kind in PARTS and not frame().path:
            raise operand_error("lost", what, [seen])

    def owned(self, x: Tensor, where: RankGroup, what: str) -> None:
        if where.size > 1:
            lacking = self.split.over(where.axis) - self.split.of(x)
            if alike := [a for a in where.axis if a in lacking]:
                raise rule_error("counted", op=what, axis=alike[0])

    def check_measured(self, what: str, *given: Tensor) -> None:
        """Raises if a shape is read of a leaf's part, where the leaf has other dims.

        Args:
            given: the part; or several, of which one gives the others its shape.
        """
        each = [self.known.of(x) for x in given]
        parts = [seen for seen in each if seen.kind is Kind.S or seen.flat]
        if parts and not frame().path and (len(each) == 1 or len(parts) < len(each)):
            raise operand_error("shape", what, parts[:1])

    def laid(self, leaf: Sharded) -> None:
        seen = self.known.of(leaf._local)
        if seen.kind not in PARTS and leaf.ndim > 1:
            self.known.put(leaf._local, seen._replace(flat=True))

    def typed_like(self, y: Tensor, x: Tensor) -> Tensor:
        self.known.put(y := y.clone(), self.known.of(x))
        return y

    def assumed(self, y: Tensor, kind: str) -> None:
        seen, alone = self.known.of(y), self.own is Kind.A
        self.known.give(y, Kind.A if alone else Kind[kind], "what assume gave")
        self.known.change(y, made_of=seen.made_of, value=seen.value)

    def used(self, x: Tensor) -> None:
        node = x.grad_fn if self._functions else None
        if node is None or not _torch.is_function_node(node):
            return
        number, name = _torch.sequence_number(node), node.name()
        for numbers in self._functions:
            if number in numbers:
                self._functions.remove(numbers)
                node.register_hook(lambda *_: self._ran(number, name))
                return

    def _ran(self, number: int, name: str) -> None:
        """A Function's backward has run; a collective's own sends."""
        if number not in self._answered:
            raise operand_error("unanswered", name.removesuffix("Backward"), [])

    # Calls of sharded functions, and units

    def called(self, key: Any, args: Any, keywords: Any, mean: Sequence[str]) -> None:
        self.call_keys.append(key)
        for i, value in enumerate((*args, keywords)):
            paths, leaves, _ = tree.flatten_with_paths(value, is_leaf=is_sharded)
            for path, x in zip(paths, leaves, strict=True):
                name = f"argument {i}" + (f" at {path!r}" if path else "")
                name = repr(path) if i == 0 and path else name
                value = hash((i, path))
                if isinstance(x, Sharded):
                    self.split.add_part(x)
                    cut = self.own is Kind.V and set(x.layout.axes) & set(mean)
                    seen = placed(x, Kind.S if cut else Kind.I, name)
                    self.known.meet(_held(x), seen._replace(value=value))
                    if x._range is not None:
                        self.known.name_part(*x._range, name)
                elif isinstance(x, Tensor):
                    how = laid_as(x)
                    own = i and how is None or isinstance(how, Own) or self._varies(x)
                    kind = self.own if own else Kind.I
                    self._whole |= set() if own else {memory(x)}
                    self.known.meet(x, Seen(kind, name, value=value))

    def heard(self, values: Any) -> Any:
        return observe_numbers(values, self.stand_ins.answer)

    def takes(self, name: str, leaves: Iterable[Sharded]) -> None:
        leaves = list(leaves)
        check_tracked(name, [(leaf.name, leaf._local) for leaf in leaves])
        for leaf in leaves:
            self.claimed(leaf._local, name)
        if not frame().path:
            self._gathered = name, leaves

    def within(self, call: Call, run: Callable[..., Any]) -> Callable[..., Any]:
        """``run``, in which transforms inside `shard` compute as the unit's body does.

        What they make of gathered parameters, and of what the unit returns, is the
        rank's own.
        """
        f = call.frame
        if f.path:
            return run

        def inner(params: Any, /, *inputs: Any, **keywords: Any) -> Any:
            given = params, inputs, keywords
            taken, before = self._memory_of(given), self.given
            start = _torch.next_sequence_number()
            also = self._tangents(self.known.tensors(given))
            self.captured = self.known.each_made_of([given, also])
            self.given = before | taken
            with inside(frame().replace(path=call.path, numbers=call.numbers)):
                out = run(params, *inputs, **keywords)
            self.given = before
            self.nodes.body(start)
            return self._owned(call, out, taken, given, anew=False)

        return inner

    def _memory_of(self, values: Any) -> set[int]:
        """The memory of tensors that a unit is given: whole ones, gathered blocks."""
        found = set()
        for x in tree.leaves(values, is_leaf=is_sharded):
            if isinstance(x, Sharded) and x.layout.flat is None:
                self.split.add_part(x)
                x = x._local
            if isinstance(x, Tensor):
                found.add(memory(x))
        return found

    def body(self, call: Call, params: Any, inputs: Any, keywords: Any) -> Any:
        """Runs a unit's function, whose results are the rank's own."""
        outermost = not call.frame.path
        if outermost:
            for x in tree.leaves((inputs, keywords), is_leaf=is_sharded):
                if isinstance(x, Tensor) and self.known.kind(x) in PARTS:
                    raise operand_error("input", call.name, [self.known.of(x)])
        taken = self._memory_of((params, inputs, keywords))
        start, before = _torch.next_sequence_number(), self.given
        given = (params, inputs, keywords)
        if outermost and self._gathered[0] == f"unit {call.name!r}":
            given, self._gathered = (*given, self._gathered[1]), ("", [])
        if outermost:
            also = self._tangents(self.known.tensors(given))
            self.captured = self.known.each_made_of([given, also])
        self.given = before | taken  # whole parameters may lie where their parts do
        with internal(False):
            out = call.unit.checked(params, inputs, keywords, call.unit.fn)
        self.given = before
        self.nodes.body(start)
        return self._owned(call, out, taken, given) if outermost else out

    def _owned(
        self, call: Call, out: Any, taken: set[int], given: Any, *, anew: bool = True
    ) -> Any:
        """A unit's outputs, typed as the rank's own; ``anew``: those that are too."""
        name, numbers = f"unit {call.name!r}", itertools.count()
        made_of = together(name, self.captured).changed(f"{name} at {source_line()}")
        of = hash((call.unit, *map(self.known.value, self.known.tensors(given))))

        def own(y: Any) -> Any:
            if not isinstance(y, Tensor) or not anew and self._varies(y):
                return y
            if memory(y) in taken:
                y = y.clone()
            what, line = f"what {name} returned", source_line()
            for x in (y, *self._tangents([y])):  # made in the body, as ``y`` was
                value = hash((of, next(numbers)))
                seen = Seen(self.own, what, line, value=value, made_of=made_of)
                self.known.put(x, seen)
            return y

        return tree.map(own, out, is_leaf=is_sharded)

    def _tangents(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """The tangents of tensors, looked up without an operator to type."""
        self._paused, before = True, self._paused
        try:
            return [t for x in tensors for t in _torch.tangents_of(x)]
        finally:
            self._paused = before

    # Derivatives

    def gradient(self, by: Any, found: Any, averaged: Callable[[Tensor], bool]) -> None:
        for x, g in pairs(by, found):
            if isinstance(x, Sharded) and isinstance(g, Sharded):
                self._pair(x._local, g._local)
            elif isinstance(x, Tensor):
                self._pair(x, g, averaged(x))

    def reduced(self, by: Any, grads: Any, of: Any, value: Any) -> None:
        for x in self.known.tensors(of[0]):  # not what is returned beside the loss
            if (apart := self.split.of(x)) and not frame().path:
                raise rule_error("loss", line=source_line(), axis=min(apart))
        names = _combined_names(value[1])
        if not self._alike("a loss", names, source_line()):
            said = ", ".join(names) or "none"
            raise rule_error("beside", line=source_line(), text=said)
        self._laid(by, grads)
        # Where a loss is only evaluated, its mean is of all parameters it is given.
        inputs, found = zip(*pairs(by, grads), strict=True) if by else (of[1:], ())
        means = [x for x in self.known.tensors(value) if self.known.kind(x) is Kind.A]
        self._taken(inputs, found, of)
        self._taken(inputs, means, of, loss=True)

    def _taken(self, by: Any, found: Any, of: Any, loss: bool = False) -> None:
        """Gradients were taken of values ``of``; those by parameters are means."""
        seen = [self.known.of(x) for x in self.known.tensors(by)]
        values = tuple(x.value for x in seen if x.kind in (Kind.S, Kind.I))
        line = f"the derivative at {source_line()}"
        own = joined([*self.known.each_made_of(of), *pulled_with(self.known, of)])
        own = own.changed(line)
        averages = bool(values) and self.own is Kind.V
        shares = frozenset(((own.rows, 1.0),))
        one = Gradient(hash(values), own.rows, shares, loss=loss)
        # Each by a vector of its own, as jacrev.
        several = any(_torch.mapped_at(c) for c in self.known.tensors(of))
        for g in self.known.tensors(found):
            made_of = own
            if averages and self.known.kind(g) is not Kind.V:
                stacked = _torch.mapped_dim(g) if several else None
                of_one = one if stacked is None else replace(one, stacked=stacked)
                made_of = own._replace(gradients=own.gradients | {of_one})
            self.known.change(g, made_of=made_of)

    def _laid(self, by: Any, grads: Any) -> None:
        """Gradients by sharded leaves have the layouts of these."""
        flat: set[int] = set()  # memory of which a part has several dims
        for x, g in pairs(by, grads):
            if isinstance(x, Sharded) and isinstance(g, Sharded):
                kind, name = self.known.kind(_held(x)), f"the gradient by {x.name!r}"
                seen, held = placed(g, kind, name), _held(g)
                key = memory(held)
                flat |= {key} if seen.flat else set()
                seen = seen._replace(where=source_line(), flat=key in flat)
                self.known.put(held, seen)
                self._parameters |= {memory(_held(x))} if kind is Kind.I else set()

    def check_pulled(
        self, inputs: Sequence[Any], grads: Sequence[Any], of: Any
    ) -> None:
        """Notes a gradient that is not averaged afterwards."""
        if not frame().path and not is_internal():
            for x, g in zip(inputs, grads, strict=True):
                self._pair(x, g)
            self._taken(inputs, grads, of)

    def _pair(self, x: Any, g: Any, averaged: bool = False) -> None:
        """Holds the type of a gradient against that of what it is a gradient by."""
        if not isinstance(x, Tensor) or not isinstance(g, Tensor):
            return
        of, found = self.known.of(x), self.known.of(g)
        if of.kind is Kind.I:
            self._parameters.add(memory(x))
        if of.flat and not (found.flat or _torch.is_wrapped(g)):
            self.known.change(g, flat=True)
        if of.kind is Kind.S:
            if found.kind is Kind.V:
                raise operand_error("own gradient", "", [of, found])
            self.known.give(g, Kind.S, of.what)
        elif found.kind in PARTS:
            raise operand_error("term", "", [of, found])
        elif of.kind in (Kind.K, Kind.I) and not agrees(found.kind) and not averaged:
            why = "whose" if of.kind is Kind.K else "unaveraged"
            raise operand_error(why, "", [of, found])
        elif of.parameter and found.kind is Kind.V and not averaged:
            raise operand_error("made of one", "", [of, found])

    def returned(self, args: Any, out: Any) -> None:
        """Holds what a sharded function returns against what it was given."""
        for y in tree.leaves(out, is_leaf=is_sharded):
            if isinstance(y, Sharded) and self._varies(held := _held(y)):
                leaf = Seen(Kind.I, repr(y.name) if y.name else "a placed leaf")
                raise operand_error("returned", "", [leaf, self.known.of(held)])
            seen = self.known.of(y) if isinstance(y, Tensor) and y.ndim < 2 else None
            if seen and (seen.flat or seen.kind in PARTS - {Kind.R}):
                raise operand_error("bare", "", [seen])
        new = returned_state(args, out)
        paths, found, other = tree.flatten_with_paths(new, is_leaf=is_sharded)
        each = zip(paths, found, strict=True)
        self.own_paths = {path for path, y in each if self._varies(y)}
        leaves, treedef = tree.flatten(args[0] if args else (), is_leaf=is_sharded)
        for x in leaves:
            if self._varies(x) and memory(x) in self._whole:
                raise operand_error("written", "", [self.known.of(x)])
        if treedef != other:
            return  # it returns something else
        for x, y in zip(leaves, found, strict=True):
            if not (isinstance(x, Tensor) and self._varies(y)):
                continue  # nor does what is sharded
            if x.shape == y.shape and _torch.storage_key(x) in self._parameters:
                raise operand_error("returned", "", [*map(self.known.of, (x, y))], None)

    def _varies(self, x: Any) -> bool:
        return isinstance(x, Tensor) and self.known.kind(x) is Kind.V


def _combined_names(aux: Any) -> tuple[str, ...]:
    """The paths of the auxiliary outputs that ranks combine, and in which way."""
    paths, leaves, _ = tree.flatten_with_paths(aux, is_leaf=counts_as_leaf)
    found = []
    for path, x in zip(paths, leaves, strict=True):
        if averaged(x):
            found.append(f"the average {path!r}")
        elif is_reduced(x):
            name = type(x).__name__
            found += [f"{name} {f'{path}/{p}'.strip('/')!r}" for p in tree.paths(x)]
    return tuple(found)


def _held(leaf: Sharded) -> Any:
    """A tensor in the memory of a leaf's part, which is not made for it."""
    return leaf._local if leaf._range is None else leaf._range[0]
