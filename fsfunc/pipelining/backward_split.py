"""The backward of a graph in two halves: input gradients, and then weight gradients.

``StageVjp.input_gradient`` and ``weight_gradient``, the actions I and W of a schedule,
are the two halves of one `SplitBackward`. For ``h = addmm(b, x, w); y = tanh(h)``::

    y ── tanh ── addmm ──────── x      inner nodes: tanh, addmm
                   ├── view ─── w      frontier edges: addmm-view, addmm-b
                   └─────────── b

A node is *inner* if it leads to an input. An edge from an inner node to one that is not
inner, but leads to a parameter, is a *frontier* edge. Nodes beyond the frontier give
weight gradients alone, so all of them can wait for the second half. An inner node such
as ``addmm`` computes its weight gradient by a product of its own, which can wait too:
such nodes are *deferred*, and run twice, each time for one of their products. Their
frontier edges are *late*. All other frontier edges are *early*: the same kernels give
their cotangents and the input gradients, in the first half.

The autograd engine runs every node on a path to one that it has to reach. So an edge
can be late only if its node has one user: a weight used twice in a row is early.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from fsfunc import _torch
from fsfunc._torch import products
from fsfunc._torch.versions import NODES_KEEP_FUNCTIONS_ALIVE
from fsfunc.pipelining.fused_gradients import find_addition, pull_back
from fsfunc.runtime.memory import BufferPool

Edge = tuple[Node, int]  # a node, and which of its outputs
Cotangents = Sequence[Tensor | None]  # of a node's outputs


@dataclass(eq=False)
class WeightGroup:
    """Connected nodes beyond the frontier, with their parameters: run in one backward.

    Args:
        nodes: all of them.
        leaves: the nodes that are parameters.
        pending_users: deferred nodes that have late edges into the group.
        arrived: edges into the group, each with the cotangent that came through it.
        crossed: whether one frontier node of the group leads to another. To compute the
            cotangent of the lower one is to run the upper one, so the whole group is
            early: its leaves' gradients are computed with the input gradients.
        sequence_number: the highest of its nodes in autograd's own order; 0 if there
            are leaves alone.
    """

    nodes: list[Node] = field(default_factory=list)
    leaves: list[Node] = field(default_factory=list)
    pending_users: set[Node] = field(default_factory=set)
    arrived: list[tuple[GradientEdge, Tensor]] = field(default_factory=list)
    crossed: bool = False
    sequence_number: int = 0


class SplitBackward:
    """A graph whose backward comes in two halves, each of them once.

    Args:
        roots: the edges at which cotangents enter.
        inputs: leaves whose gradients the first half returns.
        parameters: leaves to whose ``.grad`` the second half adds.
        pool: memory for the parameters' gradients.

    Attributes:
        input_edges: the inputs' nodes, as edges.
        parameter_of: by leaf node, the parameter.
        inner: the nodes that lead to an input.
        early: the frontier edges whose cotangents the first half computes.
        late: by deferred node, its frontier edges, which wait.
        deferred_grads: by deferred node, the cotangents that reached it in the first
            half, in backward order.
        group_of: the group of each node beyond the frontier.
        groups: all groups, in backward order.
    """

    roots: list[GradientEdge]
    pool: BufferPool
    input_edges: list[GradientEdge]
    parameter_of: dict[Node, Tensor]
    groups: list[WeightGroup]

    def __init__(
        self,
        roots: Sequence[GradientEdge],
        inputs: Sequence[Tensor],
        parameters: Sequence[Tensor],
        pool: BufferPool,
    ):
        self.roots, self.pool = list(roots), pool
        self.input_edges = [get_gradient_edge(x) for x in inputs]
        self.parameter_of = {get_gradient_edge(x).node: x for x in parameters}
        self.deferred_grads: dict[Node, Cotangents] = {}
        self.inner: set[Node] = set()
        self.early: list[GradientEdge] = []
        self.late: dict[Node, list[Edge]] = {}
        # Without inputs (the first stage) no rank waits for the first half: all of the
        # graph is one group for the second.
        one_group = WeightGroup(leaves=list(self.parameter_of))
        self.group_of: dict[Node, WeightGroup] = {
            edge.node: one_group for edge in roots
        }
        self.groups = [one_group]
        if self.input_edges:
            self._classify()

    def _classify(self) -> None:
        """Finds the inner nodes, the groups beyond the frontier, and early edges."""
        inner: set[Node] = {edge.node for edge in self.input_edges}
        leaves = set(self.parameter_of)
        edges_of = _below((e.node for e in self.roots), inner | leaves)
        to_parameter = {*leaves}
        for node, edges in edges_of.items():
            children = [child for child, _ in edges]
            if not inner.isdisjoint(children):
                inner.add(node)
            if not to_parameter.isdisjoint(children):
                to_parameter.add(node)
        group_of = _group_nodes(edges_of, to_parameter - inner, leaves)
        users = _users(edges_of, inner, group_of)
        owners = {} if NODES_KEEP_FUNCTIONS_ALIVE else _owners(edges_of, self.roots)
        groups = list(dict.fromkeys(group_of.values()))
        early: list[GradientEdge] = []
        late: dict[Node, list[Edge]] = defaultdict(list)
        for child, by_user in users.items():
            user, group = next(iter(by_user)), group_of[child]
            if group.crossed:
                continue
            if len(by_user) == 1 and products.has_two_products(user):
                late[user] += dict.fromkeys(by_user[user])
                group.pending_users.add(user)
            else:
                unique = dict.fromkeys(e for edges in by_user.values() for e in edges)
                early += [GradientEdge(*edge, owners.get(child)) for edge in unique]
        for group in groups:
            if group.crossed:
                early += [GradientEdge(leaf, 0) for leaf in group.leaves]
        # As one backward would run them: gradients are freed and made in its order.
        groups.sort(key=lambda g: g.sequence_number, reverse=True)
        self.inner, self.early, self.late = inner, early, dict(late)
        self.group_of, self.groups = group_of, groups

    def input_gradient(self, cotangents: Sequence[Tensor]) -> list[Tensor | None]:
        """Returns the inputs' gradients, None where there is none."""
        roots, n_inputs = [], len(self.input_edges)
        for edge, g in zip(self.roots, cotangents, strict=True):
            group = self.group_of.get(edge.node)
            if edge.node in self.inner or (group is not None and group.crossed):
                roots.append((edge, g))
            elif group is not None:
                self._arrive(edge, g)
        gradients: Sequence[Tensor | None] = [None] * n_inputs
        if roots:
            gradients = self._run_inner(roots)
        # They would keep nodes alive that the second half does not need.
        self.roots, self.input_edges, self.inner, self.early = [], [], set(), []
        return list(gradients[:n_inputs])

    def _run_inner(
        self, roots: Sequence[tuple[GradientEdge, Tensor]]
    ) -> Sequence[Tensor | None]:
        """Returns the gradients of inputs and of early edges, and groups the latter."""
        # A deferred node runs in the first half, for its input gradient alone. The
        # prehook sees its cotangent, from which the second half runs it again; for that
        # the graph has to stay.
        hooks = [
            n.register_prehook(partial(self._save_cotangents, n)) for n in self.late
        ]
        try:
            gradients = torch.autograd.grad(
                [edge for edge, _ in roots],
                [*self.input_edges, *self.early],
                [g for _, g in roots],
                retain_graph=bool(hooks),
                allow_unused=True,
            )
        finally:
            for hook in hooks:
                hook.remove()
        for edge, g in zip(self.early, gradients[len(self.input_edges) :], strict=True):
            self._arrive(edge, g)
        return gradients

    def _arrive(self, edge: GradientEdge, g: Tensor | None) -> None:
        """Saves the cotangent that came through a frontier edge, for its group."""
        if g is not None:
            self.group_of[edge.node].arrived.append((edge, g))

    def _save_cotangents(self, node: Node, grads: Cotangents) -> None:
        self.deferred_grads[node] = grads

    def weight_gradient(self) -> None:
        """Runs the deferred nodes, and each group once its cotangents are there."""
        groups = deque(self.groups)
        # A deferred node to which no cotangent came will bring nothing.
        for group in groups:
            group.pending_users &= self.deferred_grads.keys()
        while groups or self.deferred_grads:
            while groups and not groups[0].pending_users:
                self._finish(groups.popleft())
            if self.deferred_grads:
                node = next(iter(self.deferred_grads))
                self._run_deferred(node, self.deferred_grads.pop(node))

    def _run_deferred(self, node: Node, cotangents: Cotangents) -> None:
        """Runs a deferred node's weight product, and what waits for it alone."""
        edges = self.late.pop(node, [])
        groups = list(dict.fromkeys(self.group_of[c] for c, _ in edges))
        index_grads = [(k, g) for k, g in enumerate(cotangents) if g is not None]
        roots = [GradientEdge(node, k) for k, _ in index_grads]
        grads = [g for _, g in index_grads]
        # If nothing else comes to these groups, one backward takes the node and them.
        # Else the cotangents of its late edges wait for those of other users.
        if all(g.pending_users == {node} and not g.arrived for g in groups):
            other_groups = self._add_in_place(node, cotangents, edges, groups)
            inputs = [
                self.parameter_of[leaf] for g in other_groups for leaf in g.leaves
            ]
            if roots and inputs:
                torch.autograd.backward(roots, grads, inputs=inputs)
        else:
            targets = [GradientEdge(*edge, _owner(edge[0], node)) for edge in edges]
            arriving = torch.autograd.grad(roots, targets, grads, allow_unused=True)
            for edge, g in zip(targets, arriving, strict=True):
                self._arrive(edge, g)
        for group in groups:
            group.pending_users.discard(node)

    def _add_in_place(
        self,
        node: Node,
        grads: Cotangents,
        edges: list[Edge],
        groups: list[WeightGroup],
    ) -> list[WeightGroup]:
        """Adds a weight's product in place, if it may; returns the other groups."""
        addition = find_addition(node, self.pool)
        if addition is None or addition.edge not in edges:
            return groups
        group = self.group_of[addition.edge[0]]
        group_edges = [edge for edge in edges if self.group_of[edge[0]] is group]
        if group_edges != [addition.edge] or len(group.leaves) != 1:
            return groups
        addition(grads)
        return [g for g in groups if g is not group]

    def _finish(self, group: WeightGroup) -> None:
        """Runs a group's backward from all that arrived."""
        arrived, group.arrived = group.arrived, []
        if arrived:
            roots = [edge for edge, _ in arrived]
            leaves = [self.parameter_of[leaf] for leaf in group.leaves]
            pull_back(roots, [g for _, g in arrived], [], leaves, self.pool)


def _below(roots: Iterable[Node], ends: set[Node]) -> dict[Node, list[Edge]]:
    """Returns the edges of each node below the roots, down to ``ends``.

    In topological order: a node comes after all that it leads to.
    """
    edges: dict[Node, list[Edge]] = {node: [] for node in ends}
    edges_of: dict[Node, list[Edge]] = {}
    stack = list(roots)  # depth first, without recursion: graphs are deep
    while stack:
        node = stack[-1]
        if node not in edges:
            edges[node] = [e for e in node.next_functions if e[0] is not None]  # type: ignore
            stack += [child for child, _ in edges[node] if child not in edges_of]
        else:
            edges_of.setdefault(stack.pop(), edges[node])
    return edges_of


def _users(
    edges_of: dict[Node, list[Edge]],
    inner: set[Node],
    group_of: dict[Node, WeightGroup],
) -> dict[Node, dict[Node, list[Edge]]]:
    """Returns, by frontier node, its inner users and the edges from each.

    It also marks the groups that are ``crossed``.
    """
    users: dict[Node, dict[Node, list[Edge]]] = defaultdict(lambda: defaultdict(list))
    below_frontier = set()  # what frontier nodes lead to
    for node in reversed(edges_of):
        for edge in edges_of[node]:
            if edge[0] not in group_of:
                continue
            if node in inner:
                users[edge[0]][node].append(edge)
            elif node in users or node in below_frontier:
                below_frontier.add(edge[0])
    for c in below_frontier & users.keys():
        group_of[c].crossed = True
    return users


def _owners(
    edges_of: dict[Node, list[Edge]], roots: Iterable[GradientEdge]
) -> dict[Node, Node]:
    """Returns, by node of an autograd.Function, the lowest thing that keeps it alive.

    Torch 2.11 and 2.12 do not count Python's references to such a node: it is freed
    with its last user in the graph, before the second half comes to it. A
    `GradientEdge` keeps a third value alive, its ``ownership_token``: this one.
    """
    tokens = {e.node: e.ownership_token for e in roots if e.ownership_token is not None}
    owners = dict(tokens)
    for node in reversed(edges_of):  # users before the used
        owner = owners[node] if _torch.is_function_node(node) else node
        for used, _ in edges_of[node]:
            if used not in tokens and _torch.is_function_node(used):
                owners[used] = owner
    return owners


def _owner(node: Node, user: Node) -> Node | None:
    """Returns ``user`` if it alone keeps ``node`` alive (see `_owners`), else None.

    A deferred user is a product's node, and no Function's, so it lives by itself.
    """
    lives_by_itself = not _torch.is_function_node(node) or NODES_KEEP_FUNCTIONS_ALIVE
    return None if lives_by_itself else user


def _group_nodes(
    edges_of: dict[Node, list[Edge]], nodes: set[Node], leaves: set[Node]
) -> dict[Node, WeightGroup]:
    """Returns the group of each of these nodes: what is connected is one group."""
    group_of: dict[Node, WeightGroup] = {}
    for node in edges_of:
        if node not in nodes:
            continue
        if node in leaves:
            group_of[node] = WeightGroup([node], [node])
            continue
        groups = {
            id(group_of[child]): group_of[child]
            for child, _ in edges_of[node]
            if child in group_of
        }
        # The smaller groups are merged into the largest: few nodes change theirs.
        largest, *others = sorted(groups.values(), key=lambda g: -len(g.nodes))
        for other in others:
            group_of |= dict.fromkeys(other.nodes, largest)
            largest.nodes += other.nodes
            largest.leaves += other.leaves
            largest.sequence_number = max(
                largest.sequence_number, other.sequence_number
            )
        largest.sequence_number = max(
            largest.sequence_number, _torch.sequence_number(node)
        )
        largest.nodes.append(node)
        group_of[node] = largest
    return group_of
