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
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc._torch import operator_graphs
from fsfunc.comm.mesh import maybe_here
from fsfunc.core.frames import Transformed, frame
from fsfunc.runtime.generators import one_number
from fsfunc.sharded.donated import Donation
from fsfunc.sharded.leaf import FlatShard, Sharded, is_sharded
from fsfunc.sharded.plain_leaves import lay_leaf
from fsfunc.transforms.graph_arguments import (
    Arguments,
    Returned,
    held,
    settings,
)
from fsfunc.transforms.graph_collectives import Run, at_now
from fsfunc.transforms.step_traces import StepTrace, check_takes


def whole_step(
    f: Callable[..., Any], backend: str, options: dict[str, Any]
) -> Callable[..., Any]:
    """``f`` as one compiled graph for each set of shapes; see ``jit``."""
    for handler in getattr(f, "interpretations", ()):
        check_takes(handler)
    graphs = _Graphs(f, backend, options)

    @functools.partial(Transformed, f, "jit", lambda: [("whole_step", True)])
    def run(*args: Any, **keywords: Any) -> Any:
        if (around := frame().around) is not None:
            # Not `run`: what holds itself lives until the garbage is collected.
            again = functools.wraps(f)(functools.partial(_called, f, graphs))
            return around(again, args, keywords)
        return _called(f, graphs, *args, **keywords)

    return run


def _called(
    f: Callable[..., Any], graphs: _Graphs, /, *args: Any, **keywords: Any
) -> Any:
    outer = frame()
    if outer.tracer is not None or outer.composable or _torch.fake_active():
        return f(*args, **keywords)
    if _torch.modes_of_ranks():
        return f(*args, **keywords)  # they compute what the graph is to compute
    if outer.handlers or outer.in_loss or outer.path:
        raise ValueError(_WITHIN)
    return graphs(args, keywords)


class _Kind(NamedTuple):
    """The calls that share one without a graph: that one, and the keys of graphs."""

    seen: Returned
    key: Any
    graphs: list[Any]


class _Graphs:
    """The graphs of one step, by the key of its arguments."""

    def __init__(self, f: Callable[..., Any], backend: str, options: dict[str, Any]):
        self.f, self.backend, self.options = f, backend, options
        self.made: dict[Any, StepGraph] = {}
        self.kinds: dict[Any, _Kind] = {}
        self.lock = Lock()  # simulated ranks are threads

    def __call__(self, args: Any, keywords: Any) -> Any:
        given = Arguments(args, keywords)
        if torch.is_inference_mode_enabled() or any(
            x.requires_grad for x in given.given
        ):
            return self.f(*args, **keywords)
        at, donated = maybe_here(), frame().donated
        who, how = at and (at.mesh, at.rank), (donated is not None, *settings())
        key = who, how, given.key
        found = self.made.get(key)
        if found is None:
            kind = who, how, given.kind(args, keywords)
            if kind not in self.kinds:
                out = self.f(*args, **keywords)
                self._keep(kind, _Kind(Returned.of(out, given), key, []))
                return out
            found = self._new(key, self.kinds[kind], given, donated is not None)
        if found.kernels is None:
            with self.lock:
                found.compile(given, self.backend, self.options)
        return found(given, donated)

    def _keep(self, name: Any, kind: _Kind) -> None:
        """Keeps a new kind, such as another state's; forgets the oldest of many."""
        self.kinds[name] = kind
        of_rank = [k for k in self.kinds if k[0] == name[0]]
        if len(of_rank) > operator_graphs.recompile_limit():
            for key in self.kinds.pop(of_rank[0]).graphs:
                del self.made[key]

    def _new(self, key: Any, kind: _Kind, given: Arguments, donates: bool) -> StepGraph:
        """The graph of new shapes."""
        if (n := len(kind.graphs)) >= operator_graphs.recompile_limit():
            raise RuntimeError(_MANY.format(n, given.beside()))
        alike = key == kind.key
        trace = StepTrace(self.f, given, kind.seen, donates=donates, alike=alike)
        kind.graphs.append(key)
        self.made[key] = StepGraph(trace)
        return self.made[key]


class StepGraph:
    """The graph of a step, for arguments of one key, as it runs.

    Args:
        trace: that of the step.
    """

    kernels: Callable[..., Sequence[Any]] | None = None

    def __init__(self, trace: StepTrace):
        self.trace, self.traced = trace, trace.traced

    def compile(self, given: Arguments, backend: str, options: dict[str, Any]) -> None:
        """Compiles the graph; with "eager" its operators run one by one.

        Raises:
            RuntimeError: the compiler cannot take it.
        """
        if self.kernels is not None:  # another rank's thread was first
            return
        graph, tensors = self.traced.graph, given.tensors()
        for i in self.traced.written_inputs:  # alone in its memory, as in a call
            tensors[i] = torch.empty_like(tensors[i])
        inputs = self._inputs(tensors)
        operator_graphs.recompute_activations(graph)
        if backend == "eager":
            self.kernels = graph
            return
        try:
            self.kernels = operator_graphs.compile_graph(graph, inputs, options)
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            raise RuntimeError(_REFUSED.format(first)) from error

    def _inputs(self, tensors: list[Tensor]) -> list[Tensor]:
        return [*tensors, *self.traced.constants]

    def __call__(self, given: Arguments, donated: Donation | None) -> Any:
        due = []
        for first_calls, f, found in self.trace.compared:
            found = found.replace(at=at_now(found.at))
            due.append((first_calls, f, found, first_calls.begins(given.rest, found)))
        tensors, link = given.tensors(), self.trace.link
        if donated is not None:
            self._keep_others(tensors, donated)
        for _ in range(self.trace.before.drawn):
            one_number()
        with self.trace.claims.repeat_for([call for *_, call in due]):
            for fn, i, into in self.trace.asked:
                into.copy_(torch.as_tensor(fn(given.leaves[i])))
        run = Run([] if link is None else link.calls)
        run.trim()
        try:
            with torch.no_grad(), operator_graphs.running(run):
                made = self.kernels(*self._inputs(tensors))  # type: ignore[misc]
        finally:  # a step that raises has spoiled what it may have written
            written = [tensors[i] for i in self.traced.written_inputs]
            torch.autograd.graph.increment_version(written)
        leaves = self._leaves(given, tensors, made)
        out = tree.unflatten(self.trace.seen.treedef, leaves)
        for first_calls, f, found, call in due:
            first_calls.compare_state(f, found, given.state, out, call)
        return out

    def _keep_others(self, tensors: list[Tensor], donated: Donation) -> None:
        """Copies the inputs that are written, and whose memory others use too.

        So too a part of larger memory: in the graph that is gathered anew.
        """
        donated.look()
        written = self.traced.written_inputs
        may = donated.may_write([tensors[i] for i in written])
        for i, own in zip(written, may, strict=True):
            x = tensors[i]
            if not own or x.untyped_storage().nbytes() > x.nbytes:
                tensors[i] = x.clone()

    def _leaves(
        self, given: Arguments, tensors: list[Tensor], made: Sequence[Tensor]
    ) -> list[Any]:
        """The leaves of the result, over the tensors that the graph has made."""
        kept = {(id(held(x)), id(x.layout)): x for x in given.leaves if is_sharded(x)}
        written, buffers, found = set(self.traced.written_inputs), {}, []
        for x, (kind, laid, _), place in zip(
            self.trace.out, self.trace.seen.kinds, self.trace.places, strict=True
        ):
            if place is None:  # a constant
                found.append(x)
                continue
            ours, i = place
            value = tensors[i] if ours else made[i]
            over = ours and i in written
            if isinstance(x, Sharded):
                same = None if over else kept.get((id(value), id(x.layout)))
                found.append(_leaf_over(value, x, buffers) if same is None else same)
            elif kind in (int, float):
                found.append(kind(value))
            else:
                found.append(value.detach() if over else value)
                if laid is not None:
                    lay_leaf(found[-1], laid)
        return found


def _leaf_over(value: Tensor, like: Sharded, buffers: dict[int, Any]) -> Sharded:
    """A leaf over new memory; ``buffers`` has those of its buffer, by their layouts."""
    shard = like.packed
    if shard is None:
        return like.with_local(value)
    if id(value) not in buffers:
        leaves = FlatShard(
            shard.members, value, shard.coordinates, _spans=shard.spans
        ).leaves()
        buffers[id(value)] = {id(x.layout): x for x in leaves}
    return buffers[id(value)][id(like.layout)]


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
