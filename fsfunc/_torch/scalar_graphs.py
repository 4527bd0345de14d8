"""The scalar arithmetic of a graph, run ahead of it instead of compiled.

The numbers of a state, and what optimizers make of them, are float64 scalars of the
CPU. The kernels of a GPU take such values as arguments. But the compiler turns
arithmetic among them into kernels of the CPU, in C++, whose build takes longer than
that of all kernels of the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg


def extract_scalar_arithmetic(
    graph: GraphModule, inputs: Sequence[Tensor]
) -> Callable[..., Sequence[Tensor]] | None:
    """Takes out of a graph what it computes from float64 scalars of the CPU alone.

    Args:
        graph: is changed: it takes the results as further inputs, behind its own.
        inputs: examples of its inputs.

    Returns:
        a function of the graph's inputs that returns those further inputs; None if
        there are none.
    """
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    scalars = {n for n, x in zip(placeholders, inputs, strict=True) if _is_source(n, x)}
    moved: dict[Node, Node] = {}  # to the one of the same value
    node_by_call: dict[Any, Node] = {}
    for node in graph.graph.nodes:
        sources = node.all_input_nodes
        if _is_arithmetic(node) and scalars.issuperset(sources):
            key = node.target, *_arguments(node, moved)
            # What the graph returns the caller may write: it is shared with nobody.
            shared = all(user.op != "output" for user in node.users)
            moved[node] = node_by_call.setdefault(key, node) if shared else node
            scalars.add(node)
    if not moved:
        return None
    scalar_graph, copies = Graph(), dict[Node, Node]()
    for node in graph.graph.nodes:
        if node.op == "placeholder" or moved.get(node) is node:
            copies[node] = scalar_graph.node_copy(
                node, lambda x: copies[moved.get(x, x)]
            )
    new_inputs = _take_as_inputs(graph, moved)
    scalar_graph.output([copies[node] for node in new_inputs])
    return GraphModule(torch.nn.Module(), scalar_graph).forward


def _take_as_inputs(graph: GraphModule, moved: dict[Node, Node]) -> list[Node]:
    """Makes inputs of the moved values that other nodes read; returns the values."""
    placeholder_of: dict[Node, Node] = {}
    last_placeholder = [n for n in graph.graph.nodes if n.op == "placeholder"][-1]
    for node, computed in moved.items():
        if all(user in moved for user in node.users):
            continue
        if computed not in placeholder_of:
            with graph.graph.inserting_after(last_placeholder):
                last_placeholder = placeholder_of[computed] = graph.graph.placeholder(
                    f"ahead_{len(placeholder_of)}"
                )
            last_placeholder.meta = dict(computed.meta)
        node.replace_all_uses_with(
            placeholder_of[computed], lambda user: user not in moved
        )
    for node in reversed(moved):
        graph.graph.erase_node(node)
    graph.recompile()
    return list(placeholder_of)


def _arguments(node: Node, moved: dict[Node, Node]) -> tuple[str, str]:
    """Returns an operator's arguments as text, which tells 1 from 1.0."""
    canonical = lambda x: moved.get(x, x)  # noqa: E731
    return repr(map_arg(node.args, canonical)), repr(
        map_arg(dict(node.kwargs), canonical)
    )


def _is_source(node: Node, x: object) -> bool:
    """Returns whether ``x`` is a float64 scalar of the CPU, not written and not viewed.

    Args:
        node: the node that stands for it.
        x: its value, without data.
    """
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
    """Returns whether ``user`` may write ``node``, or return a view of it."""
    op: Any = user.target
    if not isinstance(op, torch._ops.OpOverload):
        return user.op != "output"
    positional = dict(
        zip([x.name for x in op._schema.arguments], user.args, strict=False)
    )
    for argument in op._schema.arguments:
        value = {**positional, **user.kwargs}.get(argument.name)
        is_argument = (
            node in value if isinstance(value, list | tuple) else value is node
        )
        if is_argument and argument.alias_info is not None:
            return True
    return False
