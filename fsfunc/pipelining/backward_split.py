"""Where the backward of a graph parts into input gradients and weight gradients.

A node is *inner* if it leads to an input. An edge from an inner node to one that is
not, but leads to a parameter, is a *frontier* edge. What lies beyond the frontier needs
no input, so all of it can wait. And of an inner node whose weight gradient is a product
of its own, such as ``addmm``, that product can wait too: such nodes are *apart*, and
the edges that wait with them are *late*. All other frontier edges are *early*: what
crosses them is found along with the input gradients, by the same kernels.

The autograd engine runs every node on a path to one that it has to reach. So an edge
can be late only if its node has one user: a weight used twice in a row is early.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsfunc import _torch

__all__ = ["Edge", "Frontier", "WeightGroup", "frontier"]

Edge = tuple[Any, int]  # a node, and which of its outputs

# Their input and weight gradients are two products, each made only where it is wanted.
_APART = {
    f"{name}Backward"
    for name in (
        *("Mm", "Mv", "Bmm", "Addmm", "Addmv", "Addbmm", "Baddbmm", "Linear"),
        *("Convolution", "ConvolutionOverrideable", "MkldnnConvolution"),
    )
}


@dataclass(eq=False)
class WeightGroup:
    """Nodes beyond the frontier with parameters of their own: they run at once.

    Args:
        leaves: the parameters' nodes.
        users: nodes apart that late edges come from.
        found: what has arrived: edges into the group, and cotangents.
    """

    leaves: list[Any] = field(default_factory=list)
    users: set[Any] = field(default_factory=set)
    found: list[tuple[Edge, Any]] = field(default_factory=list)
    crossed: bool = False
    number: int = 0


@dataclass
class Frontier:
    """How a graph parts.

    Args:
        inner: the nodes that lead to an input.
        early: edges to find along with the input gradients.
        late: for each node apart, its late edges.
        group_of: the group of each node beyond the frontier.
        groups: all groups, in the order in which a backward comes to them.
    """

    inner: set[Any]
    early: list[Edge]
    late: dict[Any, list[Edge]]
    group_of: dict[Any, WeightGroup]
    groups: list[WeightGroup]


def frontier(
    roots: Sequence[Any], inputs: Iterable[Any], parameters: Iterable[Any]
) -> Frontier:
    """The frontier of what ``roots`` lead to; all arguments are nodes."""
    leaves = set(parameters)
    inner, owning = _leading(roots, set(inputs), leaves)
    users: dict[Any, dict[Any, list[Edge]]] = defaultdict(lambda: defaultdict(list))
    for node in inner:
        for c, k in node.next_functions:
            if c is not None and c in owning and c not in inner:
                users[c][node].append((c, k))
    beyond = [r for r in roots if r in owning and r not in inner]
    group_of = _grouped(users, beyond, owning, leaves)
    groups = list(dict.fromkeys(group_of.values()))
    early: list[Edge] = []
    late: dict[Any, list[Edge]] = defaultdict(list)
    for c, by_user in users.items():
        user = next(iter(by_user))
        group = group_of[c]
        if group.crossed:
            continue
        if len(by_user) == 1 and parts(user):
            late[user] += dict.fromkeys(by_user[user])
            group.users.add(user)
        else:
            early += dict.fromkeys(e for edges in by_user.values() for e in edges)
    for group in groups:
        if group.crossed:
            early += [(leaf, 0) for leaf in group.leaves]
    groups.sort(key=lambda g: g.number, reverse=True)
    return Frontier(inner, early, dict(late), group_of, groups)


def parts(node: Any) -> bool:
    """Whether a node can give its input gradients first, its weight gradients later."""
    return (
        hasattr(node, "pull_recomputed") or node.name().rstrip("0123456789") in _APART
    )


def _leading(
    roots: Iterable[Any], inputs: set[Any], leaves: set[Any]
) -> tuple[set[Any], set[Any]]:
    """The nodes that lead to an input, and those that lead to a parameter."""
    inner, owning, seen = set(inputs), set(leaves), set(inputs) | set(leaves)
    stack = list(roots)
    while stack:
        node = stack[-1]
        if node in seen:
            stack.pop()
            continue
        nexts = [c for c, _ in node.next_functions if c is not None]
        todo = [c for c in nexts if c not in seen]
        if todo:
            stack += todo
            continue
        seen.add(node)
        stack.pop()
        if not inner.isdisjoint(nexts):
            inner.add(node)
        if not owning.isdisjoint(nexts):
            owning.add(node)
    return inner, owning


def _grouped(
    users: Iterable[Any], beyond: Iterable[Any], owning: set[Any], leaves: set[Any]
) -> dict[Any, WeightGroup]:
    """The group of each node beyond the frontier: one for nodes that share anything.

    A group in which one frontier node leads to another is ``crossed``: to find what
    comes to the lower one is to run the upper one, so all of it runs at that time.
    """
    heads = dict.fromkeys(users)
    label: dict[Any, int] = {}
    same: list[int] = []
    crossed: list[int] = []

    def top(i: int) -> int:
        while same[i] != i:
            i = same[i]
        return i

    # Frontier nodes first, so that a path between two is walked from its upper end.
    for start in [*heads, *(r for r in beyond if r not in heads)]:
        me = len(same)
        same.append(me)
        for node in _below(start, owning, label):
            if node is not start and node in heads and start in heads:
                crossed.append(me)
            if node in label:
                same[top(me)] = top(label[node])
            else:
                label[node] = me
    groups: dict[int, WeightGroup] = defaultdict(WeightGroup)
    found = {}
    for node, i in label.items():
        group = found[node] = groups[top(i)]
        if node in leaves:
            group.leaves.append(node)
        else:
            group.number = max(group.number, _torch.sequence_number(node))
    for i in crossed:
        groups[top(i)].crossed = True
    return found


def _below(start: Any, owning: set[Any], known: dict[Any, int]) -> Iterator[Any]:
    """The nodes from ``start`` on that lead to parameters, down to ``known`` ones."""
    stack, seen = [start], {start}
    while stack:
        node = stack.pop()
        stop = node in known
        yield node
        if not stop:
            for c, _ in node.next_functions:
                if c is not None and c in owning and c not in seen:
                    seen.add(c)
                    stack.append(c)
