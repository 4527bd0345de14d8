"""The scalar arithmetic of a graph, run ahead of it instead of compiled.

The numbers of a state, and what optimizers make of them, are float64 scalars of the
CPU. The kernels of a GPU take such values as arguments. But of arithmetic among them
the compiler makes kernels of the CPU: in C++, for which a C++ compiler with its headers
and trials of instruction sets takes longer than all kernels of the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg


def ahead(
    graph: GraphModule, inputs: Sequence[Tensor]
) -> Callable[..., Sequence[Tensor]] | None:
    """Takes out of a graph what it computes of its float64 scalars of the CPU alone.

    Args:
        inputs: some that the graph may be given.

    Returns:
        a function of the graph's inputs: what the graph is given behind them from now
        on. None if there is nothing of the kind.
    """
    taken = [n for n in graph.graph.nodes if n.op == "placeholder"]
    scalars = {n for n, x in zip(taken, inputs, strict=True) if _is_source(n, x)}
    moved: dict[Node, Node] = {}  # to the one of the same value
    alike: dict[Any, Node] = {}
    for node in graph.graph.nodes:
        sources = node.all_input_nodes
        if _is_arithmetic(node) and scalars.issuperset(sources):
            key = node.target, *_arguments(node, moved)
            # What is returned is nobody else's: the caller may write it.
            shared = all(user.op != "output" for user in node.users)
            moved[node] = alike.setdefault(key, node) if shared else node
            scalars.add(node)
    if not moved:
        return None
    first, copies = Graph(), dict[Node, Node]()
    for node in graph.graph.nodes:
        if node.op == "placeholder" or moved.get(node) is node:
            copies[node] = first.node_copy(node, lambda x: copies[moved.get(x, x)])
    made = _given_instead(graph, moved)
    first.output([copies[node] for node in made])
    return GraphModule(torch.nn.Module(), first).forward


def _given_instead(graph: GraphModule, moved: dict[Node, Node]) -> list[Node]:
    """Makes inputs of the values that the rest of the graph reads; returns these."""
    given: dict[Node, Node] = {}
    last = [n for n in graph.graph.nodes if n.op == "placeholder"][-1]
    for node, same in moved.items():
        if all(user in moved for user in node.users):
            continue
        if same not in given:
            with graph.graph.inserting_after(last):
                last = given[same] = graph.graph.placeholder(f"ahead_{len(given)}")
            last.meta = dict(same.meta)
        node.replace_all_uses_with(given[same], lambda user: user not in moved)
    for node in reversed(moved):
        graph.graph.erase_node(node)
    graph.recompile()
    return list(given)


def _arguments(node: Node, moved: dict[Node, Node]) -> tuple[str, str]:
    """What tells apart two calls of an operator: 1 and 1.0 too."""
    of = lambda x: moved.get(x, x)  # noqa: E731
    return repr(map_arg(node.args, of)), repr(map_arg(dict(node.kwargs), of))


def _is_source(node: Node, x: Any) -> bool:
    """True of a float64 scalar of the CPU, ``x``, that nobody writes, or views."""
    if not isinstance(x, Tensor) or x.dtype != torch.float64 or x.ndim:
        return False
    return x.device.type == "cpu" and not any(_shares(u, node) for u in node.users)


def _is_arithmetic(node: Node) -> bool:
    op: Any = node.target
    if not isinstance(op, torch._ops.OpOverload) or not node.all_input_nodes:
        return False
    drawn = torch.Tag.nondeterministic_seeded in op.tags
    if op.namespace != "aten" or op._schema.is_mutable or op.is_view or drawn:
        return False
    return _is_source(node, node.meta.get("val"))


def _shares(user: Node, node: Node) -> bool:
    """True if ``user`` may write ``node``, or return a view of it."""
    op: Any = user.target
    if not isinstance(op, torch._ops.OpOverload):
        return user.op != "output"
    given = dict(zip([x.name for x in op._schema.arguments], user.args, strict=False))
    for argument in op._schema.arguments:
        value = {**given, **user.kwargs}.get(argument.name)
        within = node in value if isinstance(value, list | tuple) else value is node
        if within and argument.alias_info is not None:
            return True
    return False
