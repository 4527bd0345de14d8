"""The trace of a step that is compiled whole: its operators, and what it returns.

The step runs on tensors without data, with a link whose collectives become nodes. What
a graph would freeze or change is refused here: Python runs while a step is traced, and
not when its graph runs. `step_graphs` compiles the trace and runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from fsfunc import tree
from fsfunc._torch import operator_graphs
from fsfunc.comm.mesh import maybe_here
from fsfunc.core.frames import Frame, Interpretation, frame, inside
from fsfunc.core.tracers import FirstCalls, UnitCall
from fsfunc.runtime.generators import watch_other_draws
from fsfunc.runtime.scopes import RunPrologue, in_graph
from fsfunc.sharded.donated import Everything
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.placements import describe_tensor
from fsfunc.tracing.operators import is_random
from fsfunc.tracing.replicas import Claims
from fsfunc.tracing.runs import without_data
from fsfunc.transforms.graph_arguments import (
    CONSTANT,
    Arguments,
    Returned,
    buffer_of,
    distinct_buffers,
    leaf_properties,
)
from fsfunc.transforms.graph_collectives import GraphLink
from fsfunc.tree.types import Leaf, PyTree

TAKES = ("shard", "accumulate", "remat", "remat_calls", "precision")


def check_takes(handler: Interpretation) -> None:
    """Raises unless a graph can be that of a step with this interpretation."""
    if handler.called not in TAKES:
        name = handler.called or type(handler).__name__
        raise ValueError(_OTHERS.format(name, ", ".join(TAKES)))


class StepTrace:
    """The trace of a step, for arguments of one key; the compiler of its frame.

    Args:
        f: the step; ``arguments``: those of the call.
        returned: what the step returned when it ran as it is.
        donates: whether it may write into its first argument.
        alike: whether it had arguments of this key then. Else it runs once more, so
            that what changes from call to call is told from what a shape changes.

    Attributes:
        whole: as the frame's compiler: the step is compiled with all that it calls.
        traced: its graph; ``out``: the leaves of its result, without data.
        sources: of each, whether it lies in an input, and in which tensor; None: it is
            a constant.
        link: that of the trace; None where there is no rank.
        compared: the calls whose batches and states ``shard`` compares: the check,
            function and frame of each.
        before: the Python that each run of the graph does before.
        claims: what the step claims to be equal on all ranks.
        asked: schedules: function, position of the leaf that it is given, and the
            tensor for the rate that it returns.
    """

    out: list[Leaf]
    shadow_leaves: list[Leaf]
    traced: operator_graphs.TracedStep
    returned: Returned

    whole = True
    before: RunPrologue
    claims: Claims

    def __init__(
        self,
        f: Callable[..., PyTree],
        arguments: Arguments,
        returned: Returned,
        *,
        donates: bool,
        alike: bool,
    ):
        self.returned = returned
        if not alike:
            self._run_for_shapes(f, arguments, donates)
        with self._without_data(f, arguments, donates) as (run, inputs):
            has_drawn = watch_other_draws()
            self.traced = operator_graphs.trace_operators(run, inputs)
            if has_drawn():
                raise RuntimeError(_DRAWS.format("Python's or numpy's"))
        if self.traced.written_inputs and not donates:
            raise RuntimeError(_WRITES)
        # Of packed buffers the key has the offset, or they are gathered first; a plain
        # tensor may lie elsewhere in its storage in the next call.
        sharded = filter(is_sharded, arguments.leaves)
        packed = {id(x.packed.flat) for x in sharded if x.packed}
        is_plain = [id(x) not in packed for x in arguments.buffers]
        operator_graphs.refuse_as_strided(self.traced.graph, is_plain)
        # Torch's draws are operators; Python's and numpy's (above) are none, and their
        # numbers would be constants of the graph.
        for node in self.traced.graph.graph.nodes:
            call = node.target, node.args, node.kwargs
            if operator_graphs.is_operator(node.target) and is_random(*call):
                raise RuntimeError(_DRAWS.format(node.target))
        self.asked: list[tuple[Callable[[Leaf], Any], int, Tensor]] = self._find_asked()
        self.out, treedef = tree.flatten(self.out, is_leaf=is_sharded)
        self._check_alike(treedef)
        sources = {id(x): (True, i) for i, x in enumerate(inputs)}
        sources |= {id(x): (False, i) for i, x in enumerate(self.traced.results)}
        self.sources: list[tuple[bool, int] | None] = [
            sources.get(id(buffer_of(x))) for x in self.out
        ]

    def _run_for_shapes(
        self, f: Callable[..., PyTree], arguments: Arguments, donates: bool
    ) -> None:
        """Runs the step without data; puts the new shapes into ``returned``."""
        # In two runs with these shapes, this one and the trace, what differs is
        # Python's doing. The call before had other shapes, and cannot tell.
        with self._without_data(f, arguments, donates) as (run, _):
            run()
        out = Returned.of(self.out, arguments)
        if out.treedef != self.returned.treedef:
            raise RuntimeError(_CHANGED.format("results of two structures"))
        self.returned = self.returned.shaped_as(out)

    @contextmanager
    def _without_data(
        self, f: Callable[..., PyTree], arguments: Arguments, donates: bool
    ) -> Iterator[tuple[Callable[[], list[Tensor]], list[Tensor]]]:
        """Inside, a run of the step on tensors without data; yields it, and these.

        The run returns the tensors that it has made for its result.
        """
        self.compared: list[tuple[FirstCalls, Callable[..., PyTree], Frame]] = []
        at = maybe_here()
        self.link: GraphLink | None = None if at is None else GraphLink(at)
        at = at and replace(at, link=self.link)
        around = frame().replace(
            compiler=self, donated=Everything() if donates else None
        )
        with without_data(arguments.leaves, at, read_error=_TOLD) as mode:
            args, keywords, inputs = arguments.without_data(mode)
            self.shadow_leaves = tree.leaves((args, keywords), is_leaf=is_sharded)
            input_ids = {id(x) for x in inputs}

            def run() -> list[Tensor]:
                self.claims = Claims()
                with inside(around), in_graph() as self.before, self.claims:
                    self.out = f(*args, **keywords)
                made = distinct_buffers(tree.leaves(self.out, is_leaf=is_sharded))
                # What lies in an input is taken from there when the graph has run.
                return [x for x in made if id(x) not in input_ids]

            yield run, inputs

    def _find_asked(self) -> list[tuple[Callable[[Leaf], Any], int, Tensor]]:
        """Returns what `RunPrologue` asked, with the positions of the leaves."""
        tensors = enumerate(self.shadow_leaves)
        positions = {id(x): i for i, x in tensors if isinstance(x, Tensor)}
        del self.shadow_leaves
        asked = []
        for fn, (*first, leaf), rate in self.before.values.values():
            # A count that the graph computes is known only while it runs, when no
            # Python can be asked.
            if id(leaf) not in positions:
                raise RuntimeError(_COMPUTED)
            asked.append((partial(fn, *first), positions[id(leaf)], rate))
        return asked

    def _check_alike(self, treedef: tree.TreeDef) -> None:
        """Raises if the trace returns other than the call before, but for numbers."""
        if treedef != self.returned.treedef:
            raise RuntimeError(_CHANGED.format("results of two structures"))
        for x, (kind, _, before) in zip(self.out, self.returned.leaves, strict=True):
            # A number that is made of the state's, which are tensors here: it is made
            # a number again when the graph has run.
            if isinstance(x, Tensor) and kind in (int, float) and not x.ndim:
                continue
            if not isinstance(x, (Tensor, Sharded, *CONSTANT)):
                raise TypeError(_ODD.format(type(x).__name__))
            if isinstance(x, Tensor) and x.requires_grad:
                raise RuntimeError(_GRAPH)
            now = leaf_properties(x)
            if now == before or now != now:  # NaN
                continue
            if isinstance(x, Tensor) and issubclass(kind, Tensor):
                raise RuntimeError(
                    _UNLIKE.format(describe_tensor(*before), describe_tensor(*now))
                )
            raise RuntimeError(_CHANGED.format(f"{before!r}, then {x!r}"))

    # As the compiler of the frame

    # (units and updates run as they are: the whole step is compiled around them)

    def of(self, call: UnitCall) -> Callable[..., PyTree]:
        return call.unit.fn

    def partitions_call(self, call: UnitCall) -> bool:
        return False

    def compiles(self, call: UnitCall) -> bool:
        return False

    def update(
        self, rule: Hashable, make: Callable[[], Callable[..., Any]], name: str
    ) -> Callable[..., Any]:
        return make()

    check_takes = staticmethod(check_takes)

    def compares(
        self,
        first_calls: FirstCalls,
        f: Callable[..., PyTree],
        entered: Frame,
        treedef: tree.TreeDef,
    ) -> None:
        """Notes that ``shard`` compares the batches and states of some calls.

        Not of a sharded function that the step calls, and that returns something else.
        """
        if treedef == self.returned.treedef:
            self.compared.append((first_calls, f, entered))


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
