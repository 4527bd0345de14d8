"""Weight gradients of products and lookups, added right where they are kept.

Over a step's microbatches autograd makes each weight's gradient anew, in fresh memory,
and adds it to the last. One operation can do both: ``addmm_`` into the gradient so far.
It takes the parameter away from the engine, and a hook on the product's node, which
runs all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from fsfunc._torch import products
from fsfunc.runtime.memory import BufferPool


@dataclass(frozen=True)
class Addition:
    """The operation by which one node adds to the gradient of a parameter.

    Of a product ``y = x @ w``, or ``x @ w.T``, or of a lookup of rows of ``w``.

    Args:
        node: the product's, in the graph.
        leaf: the parameter that is ``w``, perhaps seen in another shape.
        edge: the edge of ``node`` that leads there.
        between: nodes between the two; ``end``: the parameter's own.
        turned: whether ``w`` is the transpose of what the parameter holds.
        pool: where the first gradient finds memory.
    """

    node: Any
    leaf: Tensor
    edge: tuple[Any, int]
    between: tuple[Any, ...]
    end: Any
    turned: bool
    pool: BufferPool

    def __call__(self, grads: Sequence[Tensor | None]) -> None:
        """Adds what the cotangent of ``y`` gives; it may be a node's prehook."""
        self.bound(grads)()

    def bound(self, grads: Sequence[Tensor | None]) -> Callable[[], None]:
        """The same for later: what it needs of the node is kept, the node may go."""
        (g,) = grads
        if g is None:
            return _nothing
        if products.node_kind(self.node) == "lookup":
            return partial(self._rows, products.lookup_indices(self.node), g)
        return partial(self._product, products.first_factor(self.node), g)

    @torch.no_grad()
    def _product(self, x: Tensor, g: Tensor) -> None:
        leaf = self.leaf
        a, b = (g.t(), x) if self.turned else (x.t(), g)
        if leaf.grad is None:
            leaf.grad = self._room()
            torch.mm(a, b, out=leaf.grad.view(a.shape[0], b.shape[1]))
        else:
            leaf.grad.view(a.shape[0], b.shape[1]).addmm_(a, b)

    @torch.no_grad()
    def _rows(self, rows: Tensor, g: Tensor) -> None:
        leaf = self.leaf
        if leaf.grad is None:
            leaf.grad = self._room().zero_()
        size = leaf.shape[-1]
        leaf.grad.view(-1, size).index_add_(0, rows.reshape(-1), g.reshape(-1, size))

    def _room(self) -> Tensor:
        leaf = self.leaf
        return self.pool.get(leaf.numel(), leaf.dtype, leaf).view(leaf.shape)


def _nothing() -> None:
    """A node to which no cotangent came."""


def addition(node: Any, pool: BufferPool) -> Addition | None:
    """The addition of ``node`` to a parameter: of a product with it, or a lookup."""
    edge = products.weight_edge(node)
    if edge is None:
        return None
    between: list[Any] = []
    turned, (below, _) = False, edge
    while below is not None and products.node_kind(below) in ("turn", "view"):
        if products.node_kind(below) == "turn":
            if between or products.node_kind(node) == "lookup":
                return None
            turned = True
        between.append(below)
        below = below.next_functions[0][0]
    leaf = None if below is None else getattr(below, "variable", None)
    if leaf is None or not leaf.is_contiguous() or products.is_hooked(leaf):
        return None
    if leaf.grad is not None and not leaf.grad.is_contiguous():
        return None
    return Addition(node, leaf, edge, tuple(between), below, turned, pool)


def pull_back(
    roots: Sequence[GradientEdge],
    grads: Sequence[Tensor],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    pool: BufferPool,
    later: list[Callable[[], None]] | None = None,
) -> None:
    """Adds to the ``.grad`` of inputs and parameters; as ``autograd.backward`` does.

    Parameters that products and lookups alone read take their gradients in place.

    Args:
        later: where given, it collects those products and lookups, to be run after
            this; what they need is kept till then.
    """
    adds = _alone([edge.node for edge in roots], parameters, pool)
    added = {id(add.leaf) for add in adds}
    wanted: list[Any] = [*inputs, *(p for p in parameters if id(p) not in added)]
    # What the engine has to come to, though there is nothing left for it to compute.
    wanted += [GradientEdge(add.node, 0) for add in adds]

    def put_off(add: Addition, grads: Sequence[Tensor | None]) -> None:
        if later is not None:
            later.append(add.bound(grads))

    hooks = [
        add.node.register_prehook(add if later is None else partial(put_off, add))
        for add in adds
    ]
    del adds
    try:
        if wanted and roots:
            torch.autograd.backward(list(roots), list(grads), inputs=wanted)
    finally:
        for hook in hooks:
            hook.remove()


def _alone(
    roots: Iterable[Any], parameters: Iterable[Tensor], pool: BufferPool
) -> list[Addition]:
    """The additions to parameters that nothing else in the graph reads."""
    wanted = {id(p) for p in parameters}
    users: dict[Any, int] = dict.fromkeys(roots, 1)
    stack, nodes, kinds = list(users), [], products.NODE_KINDS
    while stack:
        node = stack.pop()
        if kinds[type(node)] in ("product", "lookup"):
            nodes.append(node)
        for below, _ in node.next_functions:
            if below in users:
                users[below] += 1
            elif below is not None:
                users[below] = 1
                stack.append(below)
    found: dict[Any, list[Addition]] = {}
    for node in nodes:
        add = addition(node, pool)
        if add is not None and id(add.leaf) in wanted:
            found.setdefault(add.end, []).append(add)
    return [
        add
        for end, adds in found.items()
        for add in adds
        if users[end] == len(adds)
        and all(users[node] == 1 for a in adds for node in a.between)
    ]
