"""``jit(step, whole_step=True)``: a step as one compiled graph, with its collectives.

The first call with a state runs as it is, and is checked. Later ones are traced on
tensors without data, once for each set of shapes: forward, backward, collectives and
update become one graph, between whose operators no Python runs. Around it there are two
things to do: to find the tensors of the arguments, and to make the leaves of the
result. All ranks run graphs from the second call on, whatever shapes each is given: a
graph rounds otherwise than the step does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc._torch import operator_graphs
from fsfunc.comm.mesh import maybe_here
from fsfunc.core.frames import Transformed, frame
from fsfunc.runtime.generators import draw_number
from fsfunc.sharded.donated import Donation
from fsfunc.sharded.leaf import FlatShard, Sharded, is_sharded
from fsfunc.sharded.plain_leaves import lay_leaf
from fsfunc.transforms.graph_arguments import (
    Arguments,
    Returned,
    buffer_of,
    torch_settings,
)
from fsfunc.transforms.graph_collectives import Run, with_current_link
from fsfunc.transforms.step_traces import StepTrace, check_takes
from fsfunc.tree.types import Leaf, PyTree

# The rank with its mesh, settings, and a key of the arguments.
GraphKey = tuple[Any, tuple[Hashable, ...], tuple[Hashable, ...]]


def whole_step(
    f: Callable[..., Any], backend: str, options: dict[str, Any]
) -> Callable[..., Any]:
    """``f`` as one compiled graph for each set of shapes; see ``jit``."""
    for handler in getattr(f, "interpretations", ()):
        check_takes(handler)
    graphs = _Graphs(f, backend, options)

    @functools.partial(Transformed, f, "jit", lambda: [("whole_step", True)])
    def run(*args: Any, **keywords: Any) -> Any:
        if (around := frame().run_outermost) is not None:
            # Not `run`: what holds itself lives until the garbage is collected.
            again = functools.wraps(f)(functools.partial(_call_step, f, graphs))
            return around(again, args, keywords)
        return _call_step(f, graphs, *args, **keywords)

    return run


def _call_step(
    f: Callable[..., PyTree], graphs: _Graphs, /, *args: PyTree, **keywords: PyTree
) -> PyTree:
    """Calls a step by its graph; where it is recorded or differentiated, as it is."""
    outer = frame()
    if outer.tracer is not None or outer.composable or _torch.fake_active():
        return f(*args, **keywords)
    # A mode that all ranks enter, as one that computes without rounding, has to see the
    # step's operators, which compiled kernels are not.
    if _torch.modes_of_ranks():
        return f(*args, **keywords)
    if outer.handlers or outer.in_loss or outer.path:
        raise ValueError(_WITHIN)
    return graphs(args, keywords)


class _EagerCall(NamedTuple):
    """A call that ran without a graph, which later calls of its kind rest on.

    Args:
        returned: what it returned; ``key``: that of its arguments.
        graph_keys: the keys of the graphs that rest on it.
    """

    returned: Returned
    key: GraphKey
    graph_keys: list[GraphKey]


class _Graphs:
    """The graphs of one step, by the key of its arguments."""

    def __init__(self, f: Callable[..., PyTree], backend: str, options: dict[str, Any]):
        self.f, self.backend, self.options = f, backend, options
        self.graphs: dict[GraphKey, StepGraph] = {}
        self.eager_calls: dict[GraphKey, _EagerCall] = {}
        self.lock = Lock()  # simulated ranks are threads

    def __call__(self, args: tuple[PyTree, ...], keywords: dict[str, PyTree]) -> PyTree:
        arguments = Arguments(args, keywords)
        # Autograd cannot differentiate what the graph returns. And inference tensors
        # have no versions, by which a write of the graph would show.
        if torch.is_inference_mode_enabled() or any(
            x.requires_grad for x in arguments.buffers
        ):
            return self.f(*args, **keywords)
        at, donated = maybe_here(), frame().donated
        # By rank too: ranks of one process have graphs with links of their own.
        this_rank = at and (at.mesh, at.rank)
        options = donated is not None, *torch_settings()
        key = this_rank, options, arguments.key
        graph = self.graphs.get(key)
        if graph is None:
            # Without the shapes of the batch, which ranks may be given at different
            # times: one that ran without a graph beside others' graphs would round
            # otherwise than they do.
            eager_key = this_rank, options, arguments.eager_key()
            if eager_key not in self.eager_calls:
                out = self.f(*args, **keywords)
                call = _EagerCall(Returned.of(out, arguments), key, [])
                self._remember(eager_key, call)
                return out
            eager_call = self.eager_calls[eager_key]
            graph = self._trace(key, eager_call, arguments, donated is not None)
        # Ranks have graphs of their own, which their threads compile one after another.
        if graph.kernels is None:
            with self.lock:
                graph.compile(arguments, self.backend, self.options)
        return graph(arguments, donated)

    def _remember(self, eager_key: GraphKey, call: _EagerCall) -> None:
        """Remembers a call of a new kind, as of another state; forgets the oldest."""
        self.eager_calls[eager_key] = call
        of_rank = [k for k in self.eager_calls if k[0] == eager_key[0]]
        if len(of_rank) > operator_graphs.recompile_limit():
            for key in self.eager_calls.pop(of_rank[0]).graph_keys:
                del self.graphs[key]

    def _trace(
        self, key: GraphKey, call: _EagerCall, arguments: Arguments, donates: bool
    ) -> StepGraph:
        """Traces the step for new shapes; returns its graph."""
        if (n := len(call.graph_keys)) >= operator_graphs.recompile_limit():
            raise RuntimeError(_MANY.format(n, arguments.describe_batch()))
        alike = key == call.key
        trace = StepTrace(
            self.f, arguments, call.returned, donates=donates, alike=alike
        )
        call.graph_keys.append(key)
        self.graphs[key] = StepGraph(trace)
        return self.graphs[key]


class StepGraph:
    """The graph of a step, for arguments of one key, as it runs.

    Args:
        trace: that of the step.

    Attributes:
        kernels: what the compiler has made; None before.
    """

    trace: StepTrace
    traced: operator_graphs.TracedStep

    kernels: Callable[..., Sequence[Any]] | None = None

    def __init__(self, trace: StepTrace):
        self.trace, self.traced = trace, trace.traced

    def compile(
        self, arguments: Arguments, backend: str, options: dict[str, Any]
    ) -> None:
        """Compiles the graph; with "eager" its operators run one by one.

        Raises:
            RuntimeError: the compiler cannot take it.
        """
        if self.kernels is not None:  # another thread, of no rank, was first
            return
        graph, tensors = self.traced.graph, arguments.graph_inputs()
        # The compiler is shown examples. One that is written is alone in its memory, as
        # `_copy_shared` makes it in each call.
        for i in self.traced.written_inputs:
            tensors[i] = torch.empty_like(tensors[i])
        inputs = self._inputs(tensors)
        operator_graphs.recompute_activations(graph)
        if backend == "eager":
            self.kernels = graph
            return
        try:
            self.kernels = operator_graphs.compile_graph(graph, inputs, options)
        except Exception as error:
            # The compiler's errors are of many classes, and go on with its own frames.
            first_line = str(error).strip().partition("\n")[0]
            raise RuntimeError(_REFUSED.format(first_line)) from error

    def _inputs(self, tensors: list[Tensor]) -> list[Tensor]:
        return [*tensors, *self.traced.constants]

    def __call__(self, arguments: Arguments, donated: Donation | None) -> PyTree:
        # The comparisons of ranks that `shard` makes around a call of the step, by the
        # rank's own link: that of the trace sends nothing.
        comparisons = []
        for first_calls, f, traced_frame in self.trace.compared:
            now = traced_frame.replace(here=with_current_link(traced_frame.here))
            context = first_calls.begin_call(arguments.batch, now)
            comparisons.append((first_calls, f, now, context))
        tensors, link = arguments.graph_inputs(), self.trace.link
        if donated is not None:
            self._copy_shared(tensors, donated)
        # Numbers that the step draws and does not use: generators go on as without.
        for _ in range(self.trace.before.unused_draws):
            draw_number()
        # Rates are constants of the graph: tensors that are written before each run.
        # What optimizers claimed in the trace to be equal on all ranks is compared by
        # these calls too.
        with self.trace.claims.repeat_for([context for *_, context in comparisons]):
            for fn, i, rate in self.trace.asked:
                rate.copy_(torch.as_tensor(fn(arguments.leaves[i])))
        run = Run([] if link is None else link.calls)
        run.trim()
        try:
            with torch.no_grad(), operator_graphs.running(run):
                made = self.kernels(*self._inputs(tensors))  # type: ignore[misc]
        finally:
            # Compiled kernels do not count versions. Also if the step raises: it has
            # spoiled what it may have written.
            written = [tensors[i] for i in self.traced.written_inputs]
            torch.autograd.graph.increment_version(written)
        leaves = self._make_leaves(arguments, tensors, made)
        out = tree.unflatten(self.trace.returned.treedef, leaves)
        for first_calls, f, now, context in comparisons:
            first_calls.compare_state(f, now, arguments.state_def, out, context)
        return out

    def _copy_shared(self, tensors: list[Tensor], donated: Donation) -> None:
        """Replaces inputs that are written and whose memory others use by copies.

        So too a part of larger memory, such as a range of its gathered buffer: the
        graph gathers into other memory, and the new state would hold the old buffer.
        """
        donated.add_made()
        written = self.traced.written_inputs
        writable = donated.may_write([tensors[i] for i in written])
        for i, may_write in zip(written, writable, strict=True):
            x = tensors[i]
            if not may_write or x.untyped_storage().nbytes() > x.nbytes:
                tensors[i] = x.clone()

    def _make_leaves(
        self, arguments: Arguments, tensors: list[Tensor], made: Sequence[Tensor]
    ) -> list[Leaf]:
        """Returns the leaves of the result, over the tensors that the graph has made.

        Args:
            tensors: the inputs of the graph; ``made``: its outputs.
        """
        # A leaf that the step hands on unchanged is the one that it was given.
        argument_leaves = {
            (id(buffer_of(x)), id(x.layout)): x
            for x in arguments.leaves
            if is_sharded(x)
        }
        written, by_buffer, leaves = set(self.traced.written_inputs), {}, []
        for x, (kind, layout, _), source in zip(
            self.trace.out, self.trace.returned.leaves, self.trace.sources, strict=True
        ):
            if source is None:  # a constant
                leaves.append(x)
                continue
            # A graph returns tensors: the kind of a leaf and its layout are those of
            # the call without it.
            is_input, i = source
            value = tensors[i] if is_input else made[i]
            was_written = is_input and i in written
            if isinstance(x, Sharded):
                same = (
                    None
                    if was_written
                    else argument_leaves.get((id(value), id(x.layout)))
                )
                leaf = _leaf_over(value, x, by_buffer) if same is None else same
                leaves.append(leaf)
            elif kind in (int, float):
                leaves.append(kind(value))
            else:
                # Another object than the input, which is marked as donated.
                leaves.append(value.detach() if was_written else value)
                if layout is not None:
                    lay_leaf(leaves[-1], layout)
        return leaves


def _leaf_over(
    value: Tensor, like: Sharded, by_buffer: dict[int, dict[int, Sharded]]
) -> Sharded:
    """Returns a leaf over new memory.

    Args:
        value: the memory; ``like``: the leaf, without data.
        by_buffer: the leaves of buffers that were made so far, by their layouts.
    """
    shard = like.packed
    if shard is None:
        return like.with_local(value)
    # All leaves of a buffer at once: they share one `FlatShard`, by which an optimizer
    # updates them as one tensor.
    if id(value) not in by_buffer:
        leaves = FlatShard(
            shard.members, value, shard.coordinates, _spans=shard.spans
        ).leaves()
        by_buffer[id(value)] = {id(x.layout): x for x in leaves}
    return by_buffer[id(value)][id(like.layout)]


_WITHIN = (
    "jit(whole_step=True) is called within a transform, a loss or a unit: its graph is "
    "that of a whole step, so it goes around all of them but donate, as in "
    "donate(jit(shard(step, ...), whole_step=True))"
)
_MANY = (
    "a step that is compiled whole has graphs for {} sets of shapes, as many as "
    "torch._dynamo.config.recompile_limit allows, and is given others: {}. Pad batches "
    "to a few shapes; give as tensors what numbers and strings beside the state change "
    "from call to call; or raise that limit"
)
_REFUSED = (
    "the compiler cannot take a step whole: {}. Compile its units, jit(step), or see "
    'that the graph is right, jit(step, whole_step=True, backend="eager")'
)
