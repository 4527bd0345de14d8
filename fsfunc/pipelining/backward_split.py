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
from collections.abc import Iterable, Sequence
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
    """Nodes beyond the frontier that share something, with their parameters.

    They run at once. Where one frontier node leads to another the group is ``crossed``:
    to find what comes to the lower one is to run the upper one, so all of it is early.

    Args:
        nodes: all of them; ``leaves``: those that are parameters.
        users: nodes apart that late edges come from.
        found: what has arrived: edges into the group, and cotangents.
        number: the highest in autograd's own order; 0 where there are leaves alone.
    """

    nodes: list[Any] = field(default_factory=list)
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
    inner, leaves = set(inputs), set(parameters)
    below, owning = _below(roots, inner | leaves), set(leaves)
    for node, edges in below.items():
        nexts = [c for c, _ in edges]
        if not inner.isdisjoint(nexts):
            inner.add(node)
        if not owning.isdisjoint(nexts):
            owning.add(node)
    group_of = _grouped(below, owning - inner, leaves)
    # By frontier node: its users, and the edges from each.
    users: dict[Any, dict[Any, list[Edge]]] = defaultdict(lambda: defaultdict(list))
    under = set()  # what frontier nodes lead to
    for node in reversed(below):
        for edge in below[node]:
            if edge[0] not in group_of:
                continue
            if node in inner:
                users[edge[0]][node].append(edge)
            elif node in users or node in under:
                under.add(edge[0])
    for c in under & users.keys():
        group_of[c].crossed = True
    groups = list(dict.fromkeys(group_of.values()))
    early: list[Edge] = []
    late: dict[Any, list[Edge]] = defaultdict(list)
    for c, by_user in users.items():
        user, group = next(iter(by_user)), group_of[c]
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


def _below(roots: Iterable[Any], ends: set[Any]) -> dict[Any, list[Edge]]:
    """The edges of what roots lead to, down to ``ends``; of users after the used."""
    edges: dict[Any, list[Edge]] = {node: [] for node in ends}
    found: dict[Any, list[Edge]] = {}
    stack = list(roots)
    while stack:
        node = stack[-1]
        if node not in edges:
            edges[node] = [e for e in node.next_functions if e[0] is not None]
            stack += [c for c, _ in edges[node] if c not in found]
        else:
            found.setdefault(stack.pop(), edges[node])
    return found


def _grouped(
    below: dict[Any, list[Edge]], nodes: set[Any], leaves: set[Any]
) -> dict[Any, WeightGroup]:
    """The group of each of these nodes, which lie beyond the frontier."""
    found: dict[Any, WeightGroup] = {}
    for node in below:
        if node not in nodes:
            continue
        if node in leaves:
            found[node] = WeightGroup([node], [node])
            continue
        groups = {id(found[c]): found[c] for c, _ in below[node] if c in found}
        whole, *others = sorted(groups.values(), key=lambda g: -len(g.nodes))
        for other in others:
            found |= dict.fromkeys(other.nodes, whole)
            whole.nodes += other.nodes
            whole.leaves += other.leaves
            whole.number = max(whole.number, other.number)
        whole.number = max(whole.number, _torch.sequence_number(node))
        whole.nodes.append(node)
        found[node] = whole
    return found
