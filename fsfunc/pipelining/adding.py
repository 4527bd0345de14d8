"""Weight gradients of matrix products, added right where they are kept.

Over a step's microbatches autograd makes each weight's gradient anew, in fresh memory,
and adds it to the last. One product can do both: ``addmm_`` into the gradient so far.
It takes a parameter away from the engine and a hook on the product's node, which runs
all the same, for its input gradient.
"""

from __future__ import annotations

from collections import Counter
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
        between: nodes between the two.
        turned: whether the factor is the transpose of what the parameter holds.
    """

    node: Any
    leaf: Tensor
    edge: tuple[Any, int]
    between: tuple[Any, ...]
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
    at = _torch.second_factor(node)
    if at is None:
        return None
    edge = node.next_functions[at]
    between: list[Any] = []
    turned, (below, _) = False, edge
    while below is not None and (kind := _torch.reshaping(below)):
        if kind == "turn" and between:
            return None
        turned = turned or kind == "turn"
        between.append(below)
        below = below.next_functions[0][0]
    leaf = getattr(below, "variable", None)
    if leaf is None or not leaf.is_contiguous():
        return None
    if leaf.grad is not None and not leaf.grad.is_contiguous():
        return None
    return Addition(node, leaf, edge, tuple(between), turned)


def additions(
    roots: Iterable[Any], inputs: Iterable[Tensor], parameters: Iterable[Tensor]
) -> list[Addition]:
    """The products of a graph whose parameters nothing else reads.

    The engine comes to each of their nodes also when it has no such parameter to find:
    each leads to an input, or to another parameter.
    """
    wanted = {id(p) for p in parameters}
    goals = {id(x) for x in inputs} | wanted
    users: Counter[Any] = Counter()
    found: list[Addition] = []
    leads: dict[Any, bool] = {}
    stack = list(roots)
    while stack:
        node = stack[-1]
        if node in leads:
            stack.pop()
            continue
        nexts = [c for c, _ in node.next_functions if c is not None]
        todo = [c for c in nexts if c not in leads]
        if todo:
            stack += todo
            continue
        stack.pop()
        users.update(nexts)
        leads[node] = any(leads[c] for c in nexts)
        variable = getattr(node, "variable", None)
        if variable is not None:
            leads[node] = id(variable) in goals
        elif (add := addition(node)) is not None and id(add.leaf) in wanted:
            others = [c for c in nexts if c is not add.edge[0]]
            if any(leads[c] for c in others):
                found.append(add)
    return _alone(found, users)


def _alone(found: list[Addition], users: Counter[Any]) -> list[Addition]:
    """Those whose parameter, and all on the way to it, has no other user."""
    by_leaf: dict[int, list[Addition]] = {}
    for add in found:
        by_leaf.setdefault(id(add.leaf), []).append(add)
    alone = []
    for adds in by_leaf.values():
        last = [(add.between[-1] if add.between else add.node) for add in adds]
        end = last[0].next_functions[_end(adds[0])][0]
        single = all(users[node] == 1 for add in adds for node in add.between)
        if single and users[end] == len(adds):
            alone += adds
    return alone


def _end(add: Addition) -> int:
    """Which edge of the last node on the way leads to the parameter."""
    return 0 if add.between else list(add.node.next_functions).index(add.edge)
