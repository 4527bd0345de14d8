"""``jit(step, whole_step=True)``: a step as one compiled graph, with its collectives.

A call with arguments of new shapes runs as it is, and is checked. The next one is
traced on tensors without data: forward, backward, collectives and update become one
graph, between whose operators no Python runs. Around it there are two things to do: to
find the tensors of the arguments, and to make the leaves of the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc._torch import operator_graphs
from fsfunc.comm.mesh import maybe_here
from fsfunc.core.frames import frame, inside
from fsfunc.runtime.generators import drawn_elsewhere, one_number
from fsfunc.runtime.scopes import in_graph
from fsfunc.sharded.donated import Donation, Everything
from fsfunc.sharded.leaf import FlatShard, Sharded, is_sharded
from fsfunc.sharded.placements import describe
from fsfunc.sharded.plain_leaves import lay_leaf
from fsfunc.tracing.operators import is_random
from fsfunc.tracing.runs import without_data
from fsfunc.transforms.graph_arguments import (
    CONSTANT,
    Arguments,
    Returned,
    distinct,
    held,
    said,
    settings,
)
from fsfunc.transforms.graph_collectives import GraphLink, Run, at_now

TAKES = ("shard", "accumulate", "remat", "remat_calls", "precision")


def whole_step(
    f: Callable[..., Any], backend: str, options: dict[str, Any]
) -> Callable[..., Any]:
    """``f`` as one compiled graph for each set of shapes; see ``jit``."""
    for handler in getattr(f, "interpretations", ()):
        check_takes(handler)
    graphs = _Graphs(f, backend, options)

    @functools.wraps(f)
    def run(*args: Any, **keywords: Any) -> Any:
        outer = frame()
        if outer.tracer is not None or outer.composable or _torch.fake_active():
            return f(*args, **keywords)
        if outer.handlers or outer.in_loss or outer.path:
            raise ValueError(_WITHIN)
        return graphs(args, keywords)

    return run


def check_takes(handler: Any) -> None:
    """Raises unless a graph can be that of a step with this interpretation."""
    if handler.called not in TAKES:
        name = handler.called or type(handler).__name__
        raise ValueError(_OTHERS.format(name, ", ".join(TAKES)))


class _Graphs:
    """The graphs of one step, by the key of its arguments."""

    def __init__(self, f: Callable[..., Any], backend: str, options: dict[str, Any]):
        self.f, self.backend, self.options = f, backend, options
        self.made: dict[Any, Returned | StepGraph] = {}
        self.lock = Lock()  # simulated ranks are threads

    def __call__(self, args: Any, keywords: Any) -> Any:
        given = Arguments(args, keywords)
        if torch.is_inference_mode_enabled() or any(
            x.requires_grad for x in given.given
        ):
            return self.f(*args, **keywords)
        at, donated = maybe_here(), frame().donated
        key = (at and (at.mesh, at.rank), donated is not None, *settings(), given.key)
        found = self.made.get(key)
        if found is None:
            out = self.f(*args, **keywords)
            self.made[key] = Returned.of(out, given)
            return out
        if isinstance(found, Returned):
            found = StepGraph(self.f, given, found, donated is not None)
            self.made[key] = found
        if found.kernels is None:
            with self.lock:
                found.compile(given, self.backend, self.options)
        return found(given, donated)


class StepGraph:
    """The graph of a step, for arguments of one key.

    Args:
        seen: what the step returned when it ran as it is.
        donates: whether it may write into its first argument.

    Attributes:
        whole: as the frame's compiler: the step is compiled with all that it calls.
    """

    whole = True
    kernels: Callable[..., Sequence[Any]] | None = None
    drawn: list[int]  # see `in_graph`

    def __init__(
        self, f: Callable[..., Any], given: Arguments, seen: Returned, donates: bool
    ):
        self.seen = seen
        self.compared: list[Any] = []
        at = maybe_here()
        self.link = None if at is None else GraphLink(at)
        at = at and replace(at, link=self.link)
        around = frame().replace(
            compiler=self, donated=Everything() if donates else None
        )
        with without_data(given.leaves, at, told=_TOLD) as mode:
            args, keywords, inputs = given.without_data(mode)
            known = {id(x) for x in inputs}

            def run() -> list[Tensor]:
                with inside(around), in_graph() as self.drawn:
                    self.out = f(*args, **keywords)
                made = distinct(tree.leaves(self.out, is_leaf=is_sharded))
                return [x for x in made if id(x) not in known]

            before = drawn_elsewhere()
            self.traced = operator_graphs.traced(run, inputs)
            if before != drawn_elsewhere():
                raise RuntimeError(_DRAWS.format("Python's or numpy's"))
        if self.traced.written and not donates:
            raise RuntimeError(_WRITES)
        packed = {id(x.packed.flat) for x in given.leaves if is_sharded(x) and x.packed}
        plain = [id(x) not in packed for x in given.given]
        operator_graphs.check_places(self.traced.graph, plain)
        for node in self.traced.graph.graph.nodes:
            call = node.target, node.args, node.kwargs
            if operator_graphs.is_operator(node.target) and is_random(*call):
                raise RuntimeError(_DRAWS.format(node.target))
        self.out, treedef = tree.flatten(self.out, is_leaf=is_sharded)
        self._check_alike(treedef)
        places = {id(x): (True, i) for i, x in enumerate(inputs)}
        places |= {id(x): (False, i) for i, x in enumerate(self.traced.made)}
        # Of each leaf of the result: whether it lies in an input, and in which tensor.
        self.places = [places.get(id(held(x))) for x in self.out]

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

    # A call

    def compile(self, given: Arguments, backend: str, options: dict[str, Any]) -> None:
        """Compiles the graph; with "eager" its operators run one by one.

        Raises:
            RuntimeError: the compiler cannot take it.
        """
        if self.kernels is not None:  # another rank's thread was first
            return
        graph, tensors = self.traced.graph, given.tensors()
        for i in self.traced.written:  # alone in its memory, as in a call
            tensors[i] = torch.empty_like(tensors[i])
        inputs = self._inputs(tensors)
        if backend == "eager":
            self.kernels = graph
            return
        try:
            self.kernels = operator_graphs.compiled(graph, inputs, options)
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            raise RuntimeError(_REFUSED.format(first)) from error

    def _inputs(self, tensors: list[Tensor]) -> list[Tensor]:
        return [*tensors, *self.traced.constants]

    def __call__(self, given: Arguments, donated: Donation | None) -> Any:
        due = []
        for first_calls, f, found in self.compared:
            found = found.replace(at=at_now(found.at))
            due.append((first_calls, f, found, first_calls.begins(given.rest, found)))
        tensors, calls = given.tensors(), [] if self.link is None else self.link.calls
        if donated is not None:
            self._keep_others(tensors, donated)
        for _ in self.drawn:
            one_number()
        try:
            with torch.no_grad(), operator_graphs.running(Run(calls)):
                made = self.kernels(*self._inputs(tensors))  # type: ignore[misc]
        finally:  # a step that raises has spoiled what it may have written
            written = [tensors[i] for i in self.traced.written]
            torch.autograd.graph.increment_version(written)
        leaves = self._leaves(given, tensors, made)
        out = tree.unflatten(self.seen.treedef, leaves)
        for first_calls, f, found, call in due:
            first_calls.compare_state(f, found, given.state, out, call)
        return out

    def _keep_others(self, tensors: list[Tensor], donated: Donation) -> None:
        """Copies the inputs that are written, and whose memory others use too.

        So too a part of larger memory: in the graph that is gathered anew.
        """
        donated.look()
        written = self.traced.written
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
        written, buffers, found = set(self.traced.written), {}, []
        for x, (kind, laid, _), place in zip(
            self.out, self.seen.kinds, self.places, strict=True
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


_TOLD = (
    "a step that is compiled whole",
    ", of which Python sees only the trace: make it a torch.where, or compile the "
    "step's units, jit(step)",
)
_OTHERS = (
    "jit(whole_step=True) of a step with {}: one graph takes {}, and donate around it. "
    "Compile the step's units, jit(step)"
)
_WITHIN = (
    "jit(whole_step=True) is called within a transform, a loss or a unit: its graph is "
    "that of a whole step, so it goes around all of them but donate, as in "
    "donate(jit(shard(step, ...), whole_step=True))"
)
_DRAWS = (
    "a step that is compiled whole draws random numbers ({}): the compiler's would be "
    "others. Compile its units, jit(step), which repeats them as ever"
)
_REFUSED = (
    "the compiler cannot take a step whole: {}. Compile its units, jit(step), or see "
    'that the graph is right, jit(step, whole_step=True, backend="eager")'
)
_WRITES = (
    "a step that is compiled whole writes into its arguments: put donate around, "
    "donate(jit(step, whole_step=True)), which sees who else holds them"
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
