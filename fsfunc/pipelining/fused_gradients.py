"""Weight gradients of products and lookups, added into ``.grad`` in one operation.

For each microbatch autograd computes a weight's gradient into fresh memory, and then
adds it to ``.grad``. One kernel can do both: ``w.grad.addmm_(x.T, g)``. So `pull_back`,
which runs a stage's backward (`stages.StageVjp`, `backward_split`), leaves such
parameters out of what the autograd engine computes. A prehook on the product's node,
which the engine runs all the same, adds to ``.grad`` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from fsfunc._torch import products
from fsfunc.runtime.memory import BufferPool


@dataclass(frozen=True)
class Addition:
    """The operation by which one node adds to the gradient of a parameter.

    The node is of a product ``y = x @ w`` or ``x @ w.T``, or of a lookup of rows of w.

    Args:
        node: the product's or lookup's node in the graph.
        leaf: the parameter whose view ``w`` is.
        edge: the edge of ``node`` to its weight.
        nodes_between: the nodes of views and transposes between ``node`` and the leaf.
        leaf_node: the parameter's own node.
        is_transposed: whether ``w`` is the transpose of the parameter.
        pool: memory for the first gradient.
    """

    node: Node
    leaf: Tensor
    edge: tuple[Node, int]
    nodes_between: tuple[Node, ...]
    leaf_node: Node
    is_transposed: bool
    pool: BufferPool

    def __call__(self, grads: Sequence[Tensor | None]) -> None:
        """Adds the gradient from the cotangent of ``y``; serves as a node's prehook."""
        self.defer(grads)()

    def defer(self, grads: Sequence[Tensor | None]) -> Callable[[], None]:
        """Returns the addition as a function to call later.

        It takes the saved factor out of the node, which the engine frees after its run.
        """
        (g,) = grads
        if g is None:
            return _nothing
        if products.node_kind(self.node) == "lookup":
            return partial(self._add_rows, products.lookup_indices(self.node), g)
        return partial(self._add_product, products.first_factor(self.node), g)

    @torch.no_grad()
    def _add_product(self, x: Tensor, g: Tensor) -> None:
        leaf = self.leaf
        left, right = (g.t(), x) if self.is_transposed else (x.t(), g)
        if leaf.grad is None:
            leaf.grad = self._new_grad()
            torch.mm(left, right, out=leaf.grad.view(left.shape[0], right.shape[1]))
        else:
            leaf.grad.view(left.shape[0], right.shape[1]).addmm_(left, right)

    @torch.no_grad()
    def _add_rows(self, rows: Tensor, g: Tensor) -> None:
        leaf = self.leaf
        if leaf.grad is None:
            leaf.grad = self._new_grad().zero_()
        size = leaf.shape[-1]
        leaf.grad.view(-1, size).index_add_(0, rows.reshape(-1), g.reshape(-1, size))

    def _new_grad(self) -> Tensor:
        leaf = self.leaf
        return self.pool.get(leaf.numel(), leaf.dtype, leaf).view(leaf.shape)


def _nothing() -> None:
    """Adds nothing: stands for a node to which no cotangent came."""


def find_addition(node: Node, pool: BufferPool) -> Addition | None:
    """Returns the addition of a product or lookup to a parameter; None if it has none.

    A parameter that is not contiguous, or has hooks, takes its gradient from autograd:
    the one has no flat memory to add into, the others would see nothing.
    """
    edge = products.weight_edge(node)
    if edge is None:
        return None
    nodes_between: list[Node] = []
    is_transposed, (below, _) = False, edge
    while below is not None and products.node_kind(below) in ("turn", "view"):
        if products.node_kind(below) == "turn":
            # A transpose next to the product swaps its factors; one of a view, or of a
            # lookup's rows, is something else.
            if nodes_between or products.node_kind(node) == "lookup":
                return None
            is_transposed = True
        nodes_between.append(below)
        below = below.next_functions[0][0]
    leaf = None if below is None else getattr(below, "variable", None)
    if leaf is None or not leaf.is_contiguous() or products.is_hooked(leaf):
        return None
    if leaf.grad is not None and not leaf.grad.is_contiguous():
        return None
    path = tuple(nodes_between)
    return Addition(node, leaf, edge, path, below, is_transposed, pool)  # type: ignore


def pull_back(
    roots: Sequence[GradientEdge],
    grads: Sequence[Tensor],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    pool: BufferPool,
    deferred: list[Callable[[], None]] | None = None,
) -> None:
    """Adds to the ``.grad`` of inputs and parameters, as ``autograd.backward`` does.

    Parameters that only products and lookups read take their gradients in place.

    Args:
        roots: the edges at which ``grads`` enter.
        pool: memory for the parameters' first gradients.
        deferred: a list that collects these products and lookups instead, for the
            caller to run. Their saved factors stay in memory until then.
    """
    additions = _alone([edge.node for edge in roots], parameters, pool)
    added_leaves = {id(addition.leaf) for addition in additions}
    targets: list[Any] = [
        *inputs,
        *(p for p in parameters if id(p) not in added_leaves),
    ]
    # So that the engine runs each product's node, and with it the prehook.
    targets += [GradientEdge(addition.node, 0) for addition in additions]

    def put_off(addition: Addition, grads: Sequence[Tensor | None]) -> None:
        if deferred is not None:
            deferred.append(addition.defer(grads))

    hooks = [
        addition.node.register_prehook(
            addition if deferred is None else partial(put_off, addition)
        )
        for addition in additions
    ]
    del additions  # the hooks of nodes that have yet to run keep what they need
    try:
        if targets and roots:
            torch.autograd.backward(list(roots), list(grads), inputs=targets)
    finally:
        for hook in hooks:
            hook.remove()


def _alone(
    roots: Iterable[Node], parameters: Iterable[Tensor], pool: BufferPool
) -> list[Addition]:
    """Returns the additions to parameters that nothing else in the graph reads.

    If anything else reads one, the engine computes and adds its gradient.
    """
    parameter_ids = {id(p) for p in parameters}
    users: dict[Node, int] = dict.fromkeys(roots, 1)  # by node, how many read it
    stack, candidates, kinds = list(users), [], products.NODE_KINDS
    while stack:
        node = stack.pop()
        if kinds[type(node)] in ("product", "lookup"):
            candidates.append(node)
        for below, _ in node.next_functions:
            if below in users:
                users[below] += 1
            elif below is not None:
                users[below] = 1
                stack.append(below)
    by_leaf: dict[Node, list[Addition]] = {}
    for node in candidates:
        addition = find_addition(node, pool)
        if addition is not None and id(addition.leaf) in parameter_ids:
            by_leaf.setdefault(addition.leaf_node, []).append(addition)
    return [
        addition
        for leaf_node, additions in by_leaf.items()
        for addition in additions
        if users[leaf_node] == len(additions)
        and all(users[node] == 1 for a in additions for node in a.nodes_between)
    ]
