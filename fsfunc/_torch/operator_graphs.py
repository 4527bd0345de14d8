"""The graph of a step's operators: traced, with collectives as nodes, and compiled.

For ``jit(step, whole_step=True)``: torch offers no public function that traces a step
with its backward and update, or that compiles what was traced.

A collective is two nodes, ``fsfunc::start`` and ``fsfunc::wait``. Each takes the token
that the one before returned, so that no pass of the compiler reorders them. ``wait``
takes what is sent too, whose memory is in use until then.
"""

from __future__ import annotations

import ctypes
import gc
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Node

from fsfunc._torch.dispatch import OpOverload
from fsfunc._torch.scalar_graphs import extract_scalar_arithmetic

_LIBRARY = torch.library.Library("fsfunc", "DEF")
_SCHEMA = "(Tensor x, Tensor(a!) y, Tensor after, int number, Tensor? behind=None) "
_RUNS = threading.local()  # what runs collectives: ranks may be threads


class TracedStep(NamedTuple):
    """A graph of operators.

    Args:
        graph: takes the inputs and the constants.
        results: its results, as tensors without data.
        constants: the tensors with data that the function read and was not given.
        written_inputs: the positions of the inputs that it writes.
    """

    graph: torch.fx.GraphModule
    results: list[Tensor]
    constants: list[Tensor]
    written_inputs: list[int]


def _define(name: str) -> OpOverload:
    """Defines the operator ``fsfunc::name``, which calls the method of that name."""
    _LIBRARY.define(f"{name}{_SCHEMA}-> Tensor")

    def run(
        x: Tensor, y: Tensor, after: Tensor, number: int, behind: Tensor | None = None
    ) -> Tensor:
        getattr(_RUNS.collectives, name)(x, y, number)
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
_AGAIN: OpOverload = torch.ops.fsfunc.again.default


class Collectives(Protocol):
    """What runs the collectives of a graph, by their numbers."""

    def start(self, x: Tensor, y: Tensor, number: int) -> object: ...

    def wait(self, x: Tensor, y: Tensor, number: int) -> object: ...


@contextmanager
def running(collectives: Collectives) -> Iterator[None]:
    """Inside, the methods of ``collectives`` run the collectives of a graph."""
    outer = getattr(_RUNS, "collectives", None)
    _RUNS.collectives = collectives
    try:
        yield
    finally:
        _RUNS.collectives = outer


def trace_operators(
    run: Callable[[], list[Tensor]], inputs: Sequence[Tensor]
) -> TracedStep:
    """Returns the graph of ``run()``, which reads ``inputs``, tensors without data."""
    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import

    results: list[Tensor] = []

    # ``run`` reads the inputs by closure: they must be those that are traced.
    def of_inputs(*traced_inputs: Tensor) -> list[Tensor]:
        if not all(map(operator.is_, traced_inputs, inputs)):
            raise RuntimeError(_OTHER_INPUTS)
        results.extend(run())
        return results

    versions = [x._version for x in inputs]
    graph = make_fx(of_inputs, tracing_mode="real")(*inputs)
    written = [i for i, x in enumerate(inputs) if x._version != versions[i]]
    return TracedStep(graph, results, _lift_constants(graph), written)


def is_operator(target: object) -> TypeGuard[OpOverload]:
    """Returns whether a node's target is an operator of torch's."""
    return isinstance(target, torch._ops.OpOverload)


def refuse_as_strided(graph: torch.fx.GraphModule, matters: Sequence[bool]) -> None:
    """Raises if as_strided is called of an input.

    It counts from the start of a storage, in which the input may lie elsewhere in the
    next call.

    Args:
        graph: the graph.
        matters: for each of the first inputs, whether it matters.
    """
    inputs = [n for n in graph.graph.nodes if n.op == "placeholder"]
    checked = {n for n, is_checked in zip(inputs, matters, strict=False) if is_checked}
    for node in graph.graph.nodes:
        operand = node.args[0] if node.args else None
        if operand in checked and node.target == torch.ops.aten.as_strided.default:
            raise RuntimeError(_AS_STRIDED)
        if operand in checked and node.target == torch.ops.aten.detach.default:
            checked.add(node)


def _lift_constants(graph: torch.fx.GraphModule) -> list[Tensor]:
    """Makes inputs of the constants of a graph, which their holders may write.

    Returns them.
    """
    placeholder_of: dict[str, torch.fx.Node] = {}
    constants: list[Tensor] = []
    nodes = list(graph.graph.nodes)
    first = next(n for n in nodes if n.op != "placeholder")  # inputs come before it
    for node in nodes:
        if node.op != "get_attr":
            continue
        if node.target not in placeholder_of:
            value = operator.attrgetter(node.target)(graph)
            if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
                raise RuntimeError(_NOT_A_TENSOR.format(node.target, value))
            with graph.graph.inserting_before(first):
                placeholder_of[node.target] = graph.graph.placeholder(node.target)
            constants.append(value)
        node.replace_all_uses_with(placeholder_of[node.target])
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return constants


def recompile_limit() -> int:
    """Returns for how many sets of shapes torch compiles one function."""
    return torch._dynamo.config.recompile_limit


def compile_graph(
    graph: torch.fx.GraphModule, inputs: Sequence[Tensor], options: dict[str, Any]
) -> Callable[..., Sequence[Any]]:
    """Compiles a graph for inputs of these shapes and strides; returns a function.

    The compiler reorders kernels, but not across collectives (`_order_collectives`).
    What it has compiled before, in another process too, it takes from its cache.

    Args:
        graph: the graph.
        inputs: examples of its inputs.
        options: those of the compiler.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx  # slow to import
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    _order_collectives(graph)
    with torch.no_grad():
        scalars = extract_scalar_arithmetic(graph, inputs)
        inputs = inputs if scalars is None else [*inputs, *scalars(*inputs)]
    mode = FakeTensorMode(shape_env=ShapeEnv())  # without one there is no cache
    with torch.no_grad(), tracing(TracingContext(mode)):
        kernels: Any = compile_fx(graph, list(inputs), config_patches=options)
    release_memory()
    if scalars is None:
        return kernels
    return lambda *arguments: kernels(*arguments, *scalars(*arguments))


def release_memory() -> None:
    """Returns memory that compiling used to the system: 3 MB for a layer of a GPT."""
    gc.collect()
    if (trim := getattr(ctypes.pythonapi, "malloc_trim", None)) is not None:
        trim(0)  # glibc's


def _order_collectives(graph: torch.fx.GraphModule) -> None:
    """Makes each node of a collective depend on the last product before it.

    The compiler knows no collective: without that it would put every gather before the
    first layer, and each wait right behind its start.
    """
    last_product = None
    for node in graph.graph.nodes:
        if node.target in (START, WAIT):
            node.args = (*node.args[:4], last_product)
        elif _is_product(node):
            last_product = node
    graph.recompile()


def recompute_activations(graph: torch.fx.GraphModule) -> None:
    """Makes the backward recompute activations of products, such as gelu of one.

        forward    product -> gelu(product) -> next product
        backward   product -> again(product, cotangent) -> gelu(product) -> its gradient

    It does so for products of parameters that are gathered again in between, as memory
    is short there. Only the product is saved, which gelu's derivative reads as well.
    The node ``again`` does nothing, but seems to write the product when the cotangent
    is there: else the compiler would compute both activations at once, in the forward.
    """
    order = {node: i for i, node in enumerate(graph.graph.nodes)}
    starts = [node for node in order if node.target == START]
    sources = {x.args[1]: _through_views(x.args[0])[0] for x in starts}
    for node in filter(_is_activation, order):
        product, views = _through_views(node.args[0])
        if not _is_product(product):
            continue
        activation_views, readers = _views_and_readers(node)
        product_readers = _views_and_readers(product)[1]
        if any(map(_may_write, (*readers, *product_readers))):
            continue
        # The readers behind the first gather of the same parameters again: those of the
        # backward.
        parameters = {sources.get(_copied_node(x)) for x in product.all_input_nodes}
        gathers = [
            order[x] for x in starts if sources[x.args[1]] in parameters - {None}
        ]
        regathered = min((i for i in gathers if i > order[node]), default=len(order))
        late = sorted(
            (x for x in readers if order[x] > regathered), key=order.__getitem__
        )
        if not late or not all(map(_is_product, late)):
            continue
        # Only where the product itself is read later still (by the derivative), so that
        # it is saved in any case.
        cotangents = [x for x in late[0].all_input_nodes if x not in activation_views]
        if cotangents and max(order[x] for x in product_readers) > order[late[0]]:
            with graph.graph.inserting_before(late[0]):
                graph.graph.call_function(_AGAIN, (product, cotangents[0]))
                _copy([*reversed(views), *activation_views], late)


def _copy(nodes: Sequence[torch.fx.Node], readers: Sequence[torch.fx.Node]) -> None:
    """Copies nodes, and has ``readers`` read the copies."""
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in nodes:
        copies[node] = node.graph.node_copy(node, lambda x: copies.get(x, x))
        for reader in readers:
            reader.replace_input_with(node, copies[node])


def _is_activation(node: Node) -> bool:
    """Returns whether a node is an elementwise function of one tensor."""
    pointwise = is_operator(node.target) and torch.Tag.pointwise in node.target.tags
    return pointwise and node.all_input_nodes == [*node.args[:1]]


def _is_view(node: Node) -> bool:
    unsafe = node.target == torch.ops.aten._unsafe_view.default
    return is_operator(node.target) and (node.target.is_view or unsafe)


def _through_views(node: Any) -> tuple[Any, list[Node]]:
    """Returns (the node that ``node`` is a view of, the views between)."""
    views = []
    while _is_view(node):
        views.append(node)
        node = node.args[0]
    return node, views


def _copied_node(node: Any) -> Any:
    """Returns the node that ``node`` shows; of a buffer, what was copied into it."""
    shown, _ = _through_views(node)
    return shown.args[1] if shown.target == torch.ops.aten.copy_.default else shown


def _views_and_readers(node: Node) -> tuple[list[Node], list[Node]]:
    """Returns (``node`` and all views of it, the other nodes that read these)."""
    shown, readers = [node], []
    for x in shown:
        for user in x.users:
            (shown if _is_view(user) else readers).append(user)
    return shown, readers


def _may_write(node: Node) -> bool:
    """Returns False for an operator that writes nothing, and for the graph's end."""
    if is_operator(node.target):
        return node.target._schema.is_mutable
    return node.op != "output"


def _is_product(node: torch.fx.Node) -> bool:
    """Returns whether an operator is not fused, so that its result is in memory."""
    op: Any = node.target
    if not is_operator(op):
        return node.op != "output"
    returns_one = [type(x.type) for x in op._schema.returns] == [torch.TensorType]
    return returns_one and (
        op.namespace != "aten" or op.overloadpacket.__name__ in _PRODUCTS
    )


_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "convolution"}


_OTHER_INPUTS = (
    "torch's make_fx traced other tensors than it was given: this torch cannot compile "
    "a step whole. Compile its units, jit(step)"
)
_AS_STRIDED = (
    "a step that is compiled whole calls as_strided of an argument, which may lie "
    "elsewhere in the next call: call it of x.clone()"
)
_NOT_A_TENSOR = (
    "a step that is compiled whole reads {} = {}: a graph takes tensors, and draws no "
    "random numbers. Compile its units, jit(step)"
)
