"""The backward of a graph in two halves: input gradients, and then weight gradients.

A node is *inner* if it leads to an input. An edge from an inner node to one that is
not, but leads to a parameter, is a *frontier* edge. Nodes beyond the frontier need no
input, so all of them can wait. And of an inner node whose weight gradient is a product
of its own, such as ``addmm``, that product can wait too: such nodes are *deferred*,
and the edges that wait with them are *late*. All other frontier edges are *early*:
their cotangents are computed with the input gradients, by the same kernels.

The autograd engine runs every node on a path to one that it has to reach. So an edge
can be late only if its node has one user: a weight used twice in a row is early.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fsfunc import _torch
from fsfunc._torch import products
from fsfunc._torch.versions import NODES_KEEP_FUNCTIONS_ALIVE
from fsfunc.pipelining.fused_gradients import addition, pull_back
from fsfunc.runtime.memory import BufferPool

Edge = tuple[Any, int]  # a node, and which of its outputs


@dataclass(eq=False)
class WeightGroup:
    """Nodes beyond the frontier that share something, with their parameters.

    They run at once. Where one frontier node leads to another the group is ``crossed``:
    to find what comes to the lower one is to run the upper one, so all of it is early.

    Args:
        nodes: all of them; ``leaves``: those that are parameters.
        users: deferred nodes that late edges come from.
        found: what has arrived: edges into the group, each with what keeps its node
            alive, and cotangents.
        number: the highest in autograd's own order; 0 where there are leaves alone.
    """

    nodes: list[Any] = field(default_factory=list)
    leaves: list[Any] = field(default_factory=list)
    users: set[Any] = field(default_factory=set)
    found: list[tuple[GradientEdge, Any]] = field(default_factory=list)
    crossed: bool = False
    number: int = 0


class SplitBackward:
    """A graph whose backward comes in halves, each of them once.

    Args:
        roots: where cotangents come in.
        inputs: leaves whose gradients are returned, first.
        parameters: leaves to whose ``.grad`` the second half adds.
        pool: memory for these.

    ``inner`` are the nodes that lead to an input, ``early`` the edges to find along
    with the input gradients, ``late`` those that wait, by deferred node; ``group_of``
    is the group of each node beyond the frontier, and ``groups`` has them in backward
    order.
    """

    def __init__(
        self,
        roots: Sequence[GradientEdge],
        inputs: Sequence[Tensor],
        parameters: Sequence[Tensor],
        pool: BufferPool,
    ):
        self.roots, self.pool = list(roots), pool
        self.wanted = [get_gradient_edge(x) for x in inputs]
        self.names = {get_gradient_edge(x).node: x for x in parameters}
        self.kept: dict[Any, Any] = {}  # by deferred node, in backward order
        self.inner: set[Any] = set()
        self.early: list[GradientEdge] = []
        self.late: dict[Any, list[Edge]] = {}
        whole = WeightGroup(leaves=list(self.names))
        self.group_of: dict[Any, WeightGroup] = {edge.node: whole for edge in roots}
        self.groups = [whole]
        if self.wanted:  # else nothing is waited for
            self._part()

    def _part(self) -> None:
        inner: set[Any] = {edge.node for edge in self.wanted}
        leaves = set(self.names)
        below, owning = _below((e.node for e in self.roots), inner | leaves), {*leaves}
        for node, edges in below.items():
            nexts = [c for c, _ in edges]
            if not inner.isdisjoint(nexts):
                inner.add(node)
            if not owning.isdisjoint(nexts):
                owning.add(node)
        group_of = _grouped(below, owning - inner, leaves)
        users = _users(below, inner, group_of)
        owners = {} if NODES_KEEP_FUNCTIONS_ALIVE else _owners(below, self.roots)
        groups = list(dict.fromkeys(group_of.values()))
        early: list[GradientEdge] = []
        late: dict[Any, list[Edge]] = defaultdict(list)
        for c, by_user in users.items():
            user, group = next(iter(by_user)), group_of[c]
            if group.crossed:
                continue
            if len(by_user) == 1 and products.has_two_products(user):
                late[user] += dict.fromkeys(by_user[user])
                group.users.add(user)
            else:
                into = dict.fromkeys(e for edges in by_user.values() for e in edges)
                early += [GradientEdge(*edge, owners.get(c)) for edge in into]
        for group in groups:
            if group.crossed:
                early += [GradientEdge(leaf, 0) for leaf in group.leaves]
        groups.sort(key=lambda g: g.number, reverse=True)
        self.inner, self.early, self.late = inner, early, dict(late)
        self.group_of, self.groups = group_of, groups

    def input_gradient(self, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """The inputs' gradients, None where there is none."""
        roots, count = [], len(self.wanted)
        for edge, g in zip(self.roots, grads, strict=True):
            group = self.group_of.get(edge.node)
            if edge.node in self.inner or (group is not None and group.crossed):
                roots.append((edge, g))
            elif group is not None:
                self._arrive(edge, g)
        found: Sequence[Tensor | None] = [None] * count
        if roots:
            found = self._run_inner(roots)
        self.roots, self.wanted, self.inner, self.early = [], [], set(), []
        return list(found[:count])

    def _run_inner(
        self, roots: Sequence[tuple[GradientEdge, Tensor]]
    ) -> Sequence[Tensor | None]:
        """The gradients of inputs, and then of early edges, which take them."""
        hooks = [n.register_prehook(partial(self._keep, n)) for n in self.late]
        try:
            found = torch.autograd.grad(
                [edge for edge, _ in roots],
                [*self.wanted, *self.early],
                [g for _, g in roots],
                retain_graph=bool(hooks),
                allow_unused=True,
            )
        finally:
            for hook in hooks:
                hook.remove()
        for edge, g in zip(self.early, found[len(self.wanted) :], strict=True):
            self._arrive(edge, g)
        return found

    def _arrive(self, edge: GradientEdge, g: Tensor | None) -> None:
        """Takes what crosses an edge of the frontier."""
        if g is not None:
            self.group_of[edge.node].found.append((edge, g))

    def _keep(self, node: Any, grads: Sequence[Tensor | None]) -> None:
        self.kept[node] = grads

    def weight_gradient(self) -> None:
        """Runs the deferred nodes, and each group once its cotangents are there."""
        groups = deque(self.groups)
        for group in groups:
            group.users &= self.kept.keys()
        while groups or self.kept:
            while groups and not groups[0].users:
                self._finish(groups.popleft())
            if self.kept:
                node = next(iter(self.kept))
                self._run_deferred(node, self.kept.pop(node))

    def _run_deferred(self, node: Any, kept: Any) -> None:
        edges = self.late.pop(node, [])
        groups = list(dict.fromkeys(self.group_of[c] for c, _ in edges))
        pairs = [(k, g) for k, g in enumerate(kept) if g is not None]
        roots = [GradientEdge(node, k) for k, _ in pairs]
        grads = [g for _, g in pairs]
        if all(g.users == {node} and not g.found for g in groups):
            left = self._added(node, kept, edges, groups)
            inputs = [self.names[leaf] for g in left for leaf in g.leaves]
            if roots and inputs:
                torch.autograd.backward(roots, grads, inputs=inputs)
        else:
            targets = [GradientEdge(*edge, _owner(edge[0], node)) for edge in edges]
            found = torch.autograd.grad(roots, targets, grads, allow_unused=True)
            for edge, g in zip(targets, found, strict=True):
                self._arrive(edge, g)
        for group in groups:
            group.users.discard(node)

    def _added(
        self, node: Any, grads: Any, edges: list[Any], groups: list[WeightGroup]
    ) -> list[WeightGroup]:
        """Adds the product of a weight in place; returns the groups that are left."""
        add = addition(node, self.pool)
        if add is None or add.edge not in edges:
            return groups
        group = self.group_of[add.edge[0]]
        into = [edge for edge in edges if self.group_of[edge[0]] is group]
        if into != [add.edge] or len(group.leaves) != 1:
            return groups
        add(grads)
        return [g for g in groups if g is not group]

    def _finish(self, group: WeightGroup) -> None:
        found, group.found = group.found, []
        if found:
            roots = [edge for edge, _ in found]
            leaves = [self.names[leaf] for leaf in group.leaves]
            pull_back(roots, [g for _, g in found], [], leaves, self.pool)


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


def _users(
    below: dict[Any, list[Edge]], inner: set[Any], group_of: dict[Any, WeightGroup]
) -> dict[Any, dict[Any, list[Edge]]]:
    """By frontier node: its users, and the edges from each; says who is ``crossed``."""
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
    return users


def _owners(
    below: dict[Any, list[Edge]], roots: Iterable[GradientEdge]
) -> dict[Any, Any]:
    """By node of an autograd.Function: the lowest thing that keeps it alive.

    For torch's versions that do not count who holds such a node in Python: it goes with
    its last user there, which is freed before the node's turn comes.
    """
    tokens = {e.node: e.ownership_token for e in roots if e.ownership_token is not None}
    owners = dict(tokens)
    for node in reversed(below):  # users before the used
        owner = owners[node] if _torch.is_function_node(node) else node
        for used, _ in below[node]:
            if used not in tokens and _torch.is_function_node(used):
                owners[used] = owner
    return owners


def _owner(node: Any, user: Any) -> Any:
    """``user``, itself no Function's, if ``node`` lives by it alone, else None."""
    owned = not _torch.is_function_node(node) or NODES_KEEP_FUNCTIONS_ALIVE
    return None if owned else user


def _grouped(
    below: dict[Any, list[Edge]], nodes: set[Any], leaves: set[Any]
) -> dict[Any, WeightGroup]:
    """The group of each of these nodes, which are beyond the frontier."""
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
