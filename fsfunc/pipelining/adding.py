"""Weight gradients of matrix products, added right where they are kept.

Over a step's microbatches autograd makes each weight's gradient anew, in fresh memory,
and adds it to the last. One product can do both: ``addmm_`` into the gradient so far.
It takes a parameter away from the engine and a hook on the product's node, which runs
all the same, for its input gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch

__all__ = ["Addition", "addition", "additions"]


@dataclass(frozen=True)
class Addition:
    """How one product adds to the gradient of a parameter: ``y = x @ w``, or ``w.T``.

    Args:
        node: the product's, in the graph.
        leaf: the parameter that is its second factor, perhaps seen in another shape.
        edge: the edge of ``node`` that leads there.
        between: nodes between the two; ``end``: the parameter's own.
        turned: whether the factor is the transpose of what the parameter holds.
    """

    node: Any
    leaf: Tensor
    edge: tuple[Any, int]
    between: tuple[Any, ...]
    end: Any
    turned: bool

    def __call__(self, grads: Sequence[Tensor | None]) -> None:
        """Adds what the cotangent of ``y`` gives; it may be a node's prehook."""
        (g,) = grads
        if g is None:
            return
        x, leaf = _torch.first_factor(self.node), self.leaf
        a, b = (g.t(), x) if self.turned else (x.t(), g)
        with torch.no_grad():
            if leaf.grad is None:
                leaf.grad = torch.mm(a, b).view(leaf.shape)
            else:
                leaf.grad.view(a.shape[0], b.shape[1]).addmm_(a, b)


def addition(node: Any) -> Addition | None:
    """What ``node`` adds to a parameter, if it is a product with one."""
    edge = _torch.second_factor(node)
    if edge is None:
        return None
    between: list[Any] = []
    turned, (below, _) = False, edge
    while below is not None and _torch.kind_of(below) in ("turn", "view"):
        if _torch.kind_of(below) == "turn":
            if between:
                return None
            turned = True
        between.append(below)
        below = below.next_functions[0][0]
    leaf = None if below is None else getattr(below, "variable", None)
    if leaf is None or not leaf.is_contiguous():
        return None
    if leaf.grad is not None and not leaf.grad.is_contiguous():
        return None
    return Addition(node, leaf, edge, tuple(between), below, turned)


def additions(
    roots: Iterable[Any], inputs: Iterable[Tensor], parameters: Iterable[Tensor]
) -> list[Addition]:
    """The products of a graph whose parameters nothing else reads.

    Each has a first factor that needs a gradient too, so the engine comes to its node
    on the way to what is left: some input, or another parameter. None is given where
    the graph has leaves that are neither.
    """
    wanted = {id(p) for p in parameters}
    goals = wanted.union(map(id, inputs))
    users: dict[Any, int] = dict.fromkeys(roots, 1)
    stack, products = list(users), []
    while stack:
        node = stack.pop()
        kind = _torch.kind_of(node)
        if kind == "leaf" and id(node.variable) not in goals:
            return []
        if kind == "product":
            products.append(node)
        for below, _ in node.next_functions:
            if below in users:
                users[below] += 1
            elif below is not None:
                users[below] = 1
                stack.append(below)
    found: dict[Any, list[Addition]] = {}
    for node in products:
        add = addition(node)
        if add is not None and id(add.leaf) in wanted and _torch.is_inner(node):
            found.setdefault(add.end, []).append(add)
    return [
        add
        for end, adds in found.items()
        for add in adds
        if users[end] == len(adds)
        and all(users[node] == 1 for a in adds for node in a.between)
    ]
