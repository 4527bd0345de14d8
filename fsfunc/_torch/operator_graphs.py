"""The graph of a step's operators: traced, with collectives as nodes, and compiled.

torch offers no public function that traces a step with its backward and update, or
compiles what was traced. ``fsfunc::start`` and ``fsfunc::wait`` stand for a collective.
Each takes the token that the one before returned, so that no pass reorders them;
``wait`` takes what is sent too, whose memory is in use until then.
"""

from __future__ import annotations

import ctypes
import gc
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fsfunc._torch.scalar_graphs import ahead

_LIBRARY = torch.library.Library("fsfunc", "DEF")
_SCHEMA = "(Tensor x, Tensor(a!) y, Tensor after, int number, Tensor? behind=None) "
_RUNS = threading.local()  # ranks may be threads


class TracedStep(NamedTuple):
    """A graph of operators.

    Args:
        graph: of the inputs and the constants; returns ``made``.
        made: the results, as tensors without data.
        constants: tensors with data that the function read and was not given.
        written: the positions of the inputs that it writes.
    """

    graph: torch.fx.GraphModule
    made: list[Tensor]
    constants: list[Tensor]
    written: list[int]


def _define(name: str) -> Any:
    _LIBRARY.define(f"{name}{_SCHEMA}-> Tensor")

    def run(
        x: Tensor, y: Tensor, after: Tensor, number: int, behind: Tensor | None = None
    ) -> Tensor:
        getattr(_RUNS.now, name)(x, y, number)
        return x.new_empty(0)

    def shape(x: Tensor, *others: Any) -> Tensor:
        return x.new_empty(0)

    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, shape, "Meta")
    return getattr(torch.ops.fsfunc, name).default


START, WAIT = _define("start"), _define("wait")
_LIBRARY.define("again(Tensor(a!) x, Tensor behind) -> ()")
_LIBRARY.impl("again", lambda x, behind: None, "CompositeExplicitAutograd")
_LIBRARY.impl("again", lambda x, behind: None, "Meta")
_AGAIN = torch.ops.fsfunc.again.default


@contextmanager
def running(now: Any) -> Iterator[None]:
    """Inside, ``now.start(x, y, number)`` and ``now.wait(...)`` run a graph's nodes."""
    before = getattr(_RUNS, "now", None)
    _RUNS.now = now
    try:
        yield
    finally:
        _RUNS.now = before


def traced(run: Callable[[], list[Tensor]], inputs: Sequence[Tensor]) -> TracedStep:
    """The graph of ``run()``, which reads ``inputs``, tensors without data."""
    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import

    made: list[Tensor] = []

    def of_inputs(*same: Tensor) -> list[Tensor]:
        if not all(map(operator.is_, same, inputs)):
            raise RuntimeError(_OTHERS)
        made.extend(run())
        return made

    versions = [x._version for x in inputs]
    graph = make_fx(of_inputs, tracing_mode="real")(*inputs)
    written = [i for i, x in enumerate(inputs) if x._version != versions[i]]
    return TracedStep(graph, made, _lifted(graph), written)


def is_operator(target: Any) -> bool:
    """True if a node's target is an operator of torch's."""
    return isinstance(target, torch._ops.OpOverload)


def check_places(graph: torch.fx.GraphModule, which: Sequence[bool]) -> None:
    """Raises if as_strided, which counts from a storage's start, is called of an input.

    Args:
        which: of the first inputs, those that matter.
    """
    inputs = [n for n in graph.graph.nodes if n.op == "placeholder"]
    reads = {n for n, matters in zip(inputs, which, strict=False) if matters}
    for node in graph.graph.nodes:
        of = node.args[0] if node.args else None
        if of in reads and node.target == torch.ops.aten.as_strided.default:
            raise RuntimeError(_PLACES)
        if of in reads and node.target == torch.ops.aten.detach.default:
            reads.add(node)


def _lifted(graph: torch.fx.GraphModule) -> list[Tensor]:
    """Makes inputs of the constants of a graph: whoever holds them may write them."""
    found: dict[str, torch.fx.Node] = {}
    constants: list[Tensor] = []
    nodes = list(graph.graph.nodes)
    first = next(n for n in nodes if n.op != "placeholder")  # inputs come before it
    for node in nodes:
        if node.op != "get_attr":
            continue
        if node.target not in found:
            value = operator.attrgetter(node.target)(graph)
            if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
                raise RuntimeError(_UNKNOWN.format(node.target, value))
            with graph.graph.inserting_before(first):
                found[node.target] = graph.graph.placeholder(node.target)
            constants.append(value)
        node.replace_all_uses_with(found[node.target])
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return constants


def most_shapes() -> int:
    """The number of sets of shapes that torch compiles one function for."""
    return torch._dynamo.config.recompile_limit


def compiled(
    graph: torch.fx.GraphModule, inputs: Sequence[Tensor], options: dict[str, Any]
) -> Callable[..., Sequence[Any]]:
    """The kernels of a graph, for inputs of these shapes and strides.

    The compiler orders them anew, but for collectives, which stay `_behind`. What it
    has compiled before, in another process too, it takes from its cache.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx  # slow to import
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    _behind(graph)
    with torch.no_grad():
        scalars = ahead(graph, inputs)
        inputs = inputs if scalars is None else [*inputs, *scalars(*inputs)]
    mode = FakeTensorMode(shape_env=ShapeEnv())  # without one there is no cache
    with torch.no_grad(), tracing(TracingContext(mode)):
        made: Any = compile_fx(graph, list(inputs), config_patches=options)
    release_memory()
    if scalars is None:
        return made
    return lambda *given: made(*given, *scalars(*given))


def release_memory() -> None:
    """Returns what compiling has held to the system: 3 MB for a layer of a GPT."""
    gc.collect()
    if (trim := getattr(ctypes.pythonapi, "malloc_trim", None)) is not None:
        trim(0)  # glibc's


def _behind(graph: torch.fx.GraphModule) -> None:
    """Gives each node of a collective the last product before it.

    The compiler knows no collective: it would put every gather before the first layer,
    and each wait right behind its start.
    """
    last = None
    for node in graph.graph.nodes:
        if node.target in (START, WAIT):
            node.args = (*node.args[:4], last)
        elif _is_product(node):
            last = node
    graph.recompile()


def compute_again(graph: torch.fx.GraphModule) -> None:
    """Has the backward compute activations of products again: gelu of a product.

    It is for products of parameters that are gathered again in between, as memory is
    short there, and keeps the product alone, which the derivative reads as well. The
    node ``again`` does nothing, but seems to write the product when the cotangent is
    there: else the compiler would compute both at once.
    """
    at = {node: i for i, node in enumerate(graph.graph.nodes)}
    starts = [node for node in at if node.target == START]
    sources = {x.args[1]: _through_views(x.args[0])[0] for x in starts}
    for node in filter(_is_activation, at):
        product, views = _through_views(node.args[0])
        if not _is_product(product):
            continue
        shown, readers = _shown(node)
        others = _shown(product)[1]
        if any(map(_may_write, (*readers, *others))):
            continue
        of = {sources.get(_copied(x)) for x in product.all_input_nodes}
        gathered = [at[x] for x in starts if sources[x.args[1]] in of - {None}]
        after = min((i for i in gathered if i > at[node]), default=len(at))
        late = sorted((x for x in readers if at[x] > after), key=at.__getitem__)
        if not late or not all(map(_is_product, late)):
            continue
        there = [x for x in late[0].all_input_nodes if x not in shown]
        if there and max(at[x] for x in others) > at[late[0]]:
            with graph.graph.inserting_before(late[0]):
                graph.graph.call_function(_AGAIN, (product, there[0]))
                _copy([*reversed(views), *shown], late)


def _copy(nodes: Sequence[torch.fx.Node], readers: Sequence[torch.fx.Node]) -> None:
    """Copies nodes, for ``readers`` to read."""
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in nodes:
        copies[node] = node.graph.node_copy(node, lambda x: copies.get(x, x))
        for reader in readers:
            reader.replace_input_with(node, copies[node])


def _is_activation(node: Any) -> bool:
    """True of an elementwise function of one tensor."""
    pointwise = is_operator(node.target) and torch.Tag.pointwise in node.target.tags
    return pointwise and node.all_input_nodes == [*node.args[:1]]


def _is_view(node: Any) -> bool:
    unsafe = node.target == torch.ops.aten._unsafe_view.default
    return is_operator(node.target) and (node.target.is_view or unsafe)


def _through_views(node: Any) -> tuple[Any, list[Any]]:
    """(what ``node`` shows, the views between)."""
    views = []
    while _is_view(node):
        views.append(node)
        node = node.args[0]
    return node, views


def _copied(node: Any) -> Any:
    """The value that ``node`` shows; of a buffer, the one that was copied into it."""
    shown, _ = _through_views(node)
    return shown.args[1] if shown.target == torch.ops.aten.copy_.default else shown


def _shown(node: Any) -> tuple[list[Any], list[Any]]:
    """(``node`` and all views of it, who else reads these)."""
    shown, readers = [node], []
    for x in shown:
        for user in x.users:
            (shown if _is_view(user) else readers).append(user)
    return shown, readers


def _may_write(node: Any) -> bool:
    """True unless a node is an operator that writes nothing, or the graph's end."""
    if is_operator(node.target):
        return node.target._schema.is_mutable
    return node.op != "output"


def _is_product(node: torch.fx.Node) -> bool:
    """True of an operator that is not fused: the tensor it returns is in memory."""
    op: Any = node.target
    if not is_operator(op):
        return node.op != "output"
    one = [type(x.type) for x in op._schema.returns] == [torch.TensorType]
    return one and (op.namespace != "aten" or op.overloadpacket.__name__ in _PRODUCTS)


_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "convolution"}


_OTHERS = (
    "torch's make_fx traced other tensors than it was given: this torch cannot compile "
    "a step whole. Compile its units, jit(step)"
)
_PLACES = (
    "a step that is compiled whole calls as_strided of an argument, which may lie "
    "elsewhere in the next call: call it of x.clone()"
)
_UNKNOWN = (
    "a step that is compiled whole reads {} = {}: a graph takes tensors, and draws no "
    "random numbers. Compile its units, jit(step)"
)
