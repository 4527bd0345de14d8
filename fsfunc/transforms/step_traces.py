"""The trace of a step that is compiled whole: its operators, and what it returns.

The step runs on tensors without data, with a link whose collectives become nodes. What
a graph would freeze or change is refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from fsfunc import tree
from fsfunc._torch import operator_graphs
from fsfunc.comm.mesh import maybe_here
from fsfunc.core.frames import frame, inside
from fsfunc.runtime.generators import drawn_elsewhere
from fsfunc.runtime.scopes import BeforeRuns, in_graph
from fsfunc.sharded.donated import Everything
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.placements import describe
from fsfunc.tracing.operators import is_random
from fsfunc.tracing.replicas import Claims
from fsfunc.tracing.runs import without_data
from fsfunc.transforms.graph_arguments import (
    CONSTANT,
    Arguments,
    Returned,
    distinct,
    held,
    said,
)
from fsfunc.transforms.graph_collectives import GraphLink

TAKES = ("shard", "accumulate", "remat", "remat_calls", "precision")


def check_takes(handler: Any) -> None:
    """Raises unless a graph can be that of a step with this interpretation."""
    if handler.called not in TAKES:
        name = handler.called or type(handler).__name__
        raise ValueError(_OTHERS.format(name, ", ".join(TAKES)))


class StepTrace:
    """The trace of a step, for arguments of one key; the compiler of its frame.

    Args:
        seen: what the step returned when it ran as it is.
        donates: whether it may write into its first argument.
        alike: whether it had arguments of this key then. Else it runs once more, so
            that what changes from call to call is told from what a shape changes.

    Attributes:
        whole: as the frame's compiler: the step is compiled with all that it calls.
        traced: its graph; ``out``: the leaves of its result, without data.
        places: of each, whether it lies in an input, and in which tensor; None: it is
            a constant.
        compared: the calls whose batches and states ``shard`` compares.
        claims: what the step claims to be equal on all ranks.
        asked: (function, the leaf that it is given, tensor for what it returns).
    """

    whole = True
    before: BeforeRuns
    claims: Claims

    def __init__(
        self,
        f: Callable[..., Any],
        given: Arguments,
        seen: Returned,
        *,
        donates: bool,
        alike: bool,
    ):
        self.seen = seen
        if not alike:
            self._see_shapes(f, given, donates)
        with self._without_data(f, given, donates) as (run, inputs):
            drawn = drawn_elsewhere()
            self.traced = operator_graphs.trace_operators(run, inputs)
            if drawn():
                raise RuntimeError(_DRAWS.format("Python's or numpy's"))
        if self.traced.written_inputs and not donates:
            raise RuntimeError(_WRITES)
        packed = {id(x.packed.flat) for x in given.leaves if is_sharded(x) and x.packed}
        plain = [id(x) not in packed for x in given.given]
        operator_graphs.refuse_as_strided(self.traced.graph, plain)
        for node in self.traced.graph.graph.nodes:
            call = node.target, node.args, node.kwargs
            if operator_graphs.is_operator(node.target) and is_random(*call):
                raise RuntimeError(_DRAWS.format(node.target))
        self.asked = self._asked_of_leaves()
        self.out, treedef = tree.flatten(self.out, is_leaf=is_sharded)
        self._check_alike(treedef)
        places = {id(x): (True, i) for i, x in enumerate(inputs)}
        places |= {id(x): (False, i) for i, x in enumerate(self.traced.results)}
        self.places = [places.get(id(held(x))) for x in self.out]

    def _see_shapes(
        self, f: Callable[..., Any], given: Arguments, donates: bool
    ) -> None:
        with self._without_data(f, given, donates) as (run, _):
            run()
        out = Returned.of(self.out, given)
        if out.treedef != self.seen.treedef:
            raise RuntimeError(_CHANGED.format("results of two structures"))
        self.seen = self.seen.shaped_as(out)

    @contextmanager
    def _without_data(
        self, f: Callable[..., Any], given: Arguments, donates: bool
    ) -> Iterator[Any]:
        """Inside, a run of the step on tensors without data; returns it, and these."""
        self.compared: list[Any] = []
        at = maybe_here()
        self.link = None if at is None else GraphLink(at)
        at = at and replace(at, link=self.link)
        around = frame().replace(
            compiler=self, donated=Everything() if donates else None
        )
        with without_data(given.leaves, at, read_error=_TOLD) as mode:
            args, keywords, inputs = given.without_data(mode)
            self.given = tree.leaves((args, keywords), is_leaf=is_sharded)
            known = {id(x) for x in inputs}

            def run() -> list[Tensor]:
                self.claims = Claims()
                with inside(around), in_graph() as self.before, self.claims:
                    self.out = f(*args, **keywords)
                made = distinct(tree.leaves(self.out, is_leaf=is_sharded))
                return [x for x in made if id(x) not in known]

            yield run, inputs

    def _asked_of_leaves(self) -> list[tuple[Any, Any, Tensor]]:
        """As `BeforeRuns` says, with the positions of the last arguments' leaves."""
        at = {id(x): i for i, x in enumerate(self.given) if isinstance(x, Tensor)}
        del self.given
        found = []
        for fn, (*first, of), into in self.before.asked.values():
            if id(of) not in at:
                raise RuntimeError(_COMPUTED)
            found.append((partial(fn, *first), at[id(of)], into))
        return found

    def _check_alike(self, treedef: Any) -> None:
        """Raises if the trace returns other than the call before, but for numbers."""
        if treedef != self.seen.treedef:
            raise RuntimeError(_CHANGED.format("results of two structures"))
        for x, (kind, _, seen) in zip(self.out, self.seen.kinds, strict=True):
            if isinstance(x, Tensor) and kind in (int, float) and not x.ndim:
                continue  # a number that is made of the state's
            if not isinstance(x, (Tensor, Sharded, *CONSTANT)):
                raise TypeError(_ODD.format(type(x).__name__))
            if isinstance(x, Tensor) and x.requires_grad:
                raise RuntimeError(_GRAPH)
            if said(x) == seen or said(x) != said(x):  # NaN
                continue
            if isinstance(x, Tensor) and issubclass(kind, Tensor):
                raise RuntimeError(_UNLIKE.format(describe(*seen), describe(*said(x))))
            raise RuntimeError(_CHANGED.format(f"{seen!r}, then {x!r}"))

    # As the compiler of the frame

    def of(self, call: Any) -> Callable[..., Any]:
        return call.unit.fn

    def parts(self, call: Any) -> bool:
        return False

    def means(self, call: Any) -> bool:
        return False

    def update(self, rule: Any, make: Callable[[], Any], name: str) -> Any:
        return make()

    check_takes = staticmethod(check_takes)

    def compares(self, first_calls: Any, f: Any, found: Any, treedef: Any) -> None:
        """Notes that ``shard`` compares the batches and states of some calls.

        Not of a sharded function that the step calls, and that returns something else.
        """
        if treedef == self.seen.treedef:
            self.compared.append((first_calls, f, found))


_TOLD = (
    "a step that is compiled whole",
    ", of which Python sees only the trace: make it a torch.where, or compile the "
    "step's units, jit(step)",
)
_DRAWS = (
    "a step that is compiled whole draws random numbers ({}): the compiler's would be "
    "others. Compile its units, jit(step), which repeats them as ever"
)
_WRITES = (
    "a step that is compiled whole writes into its arguments: put donate around, "
    "donate(jit(step, whole_step=True)), which sees who else holds them"
)
_COMPUTED = (
    "a step that is compiled whole asks a schedule for a rate at a count that it "
    "computes: schedules are asked before each run, at what the state holds. Keep that "
    "count in the state, or compile the step's units, jit(step)"
)
_ODD = (
    "a step that is compiled whole returns a {}: its graph makes tensors, numbers and "
    "strings. Return what it is made of"
)
_GRAPH = (
    "a step that is compiled whole returns a tensor that has a graph: return "
    "x.detach(), as nobody can differentiate what is compiled"
)
_UNLIKE = (
    "a step that is compiled whole returned {}, and its trace {}: there the numbers of "
    "a state are tensors in float64. Give what is made of them a dtype, .to(x.dtype), "
    "or compile the step's units, jit(step)"
)
_CHANGED = (
    "a step that is compiled whole returned {}, in two calls with arguments of the "
    "same shapes: in a graph Python does not run again. Return it as a tensor, or "
    "compile the step's units, jit(step)"
)
_OTHERS = (
    "jit(whole_step=True) of a step with {}: one graph takes {}, and donate around it. "
    "Compile the step's units, jit(step)"
)
