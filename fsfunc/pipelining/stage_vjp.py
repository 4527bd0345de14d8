"""What a stage keeps of one microbatch's forward pass, and how it pulls back.

``backward`` is the whole of it. ``input_gradient`` and then ``weight_gradient`` are its
two halves, with the same operations in all: the schedule can pass the input gradients
on first, and fill a bubble with the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fsfunc.core.frames import Running, run_as, running
from fsfunc.pipelining.backward_split import Frontier, WeightGroup, frontier
from fsfunc.pipelining.fused_gradients import addition, pull_back
from fsfunc.runtime.buffer_pool import BufferPool

__all__ = ["StageVjp"]

Give = Callable[[list[Tensor | None]], None]


class StageVjp:
    """The graph from ``outputs`` back to ``inputs`` and ``parameters``, used once.

    Outputs are kept as edges of the graph alone, so the tensors may go. A node that
    computes again in its backward parts too, if it has an attribute
    ``pull_recomputed``: what it calls, as ``pull_recomputed(ys, gs, wanted, beside)``,
    in place of ``torch.autograd.grad``, where ``wanted`` are its own inputs that need a
    gradient, in order, and ``beside`` leaves whose gradients nobody asks for.

    Args:
        outputs: tensors that require grad.
        inputs: leaves that require grad and have none.
        parameters: leaves whose ``.grad`` the pull-back adds to. Those through which
            the stage's side effects hang, such as the zeros that start a thread of
            sharded units, are among them; an output with the cotangent zero is the
            thread's end.
        pool: memory for the parameters' gradients, used again once they are gone.

    >>> x, w = torch.ones(1, 2, requires_grad=True), torch.eye(2, requires_grad=True)
    >>> vjp = StageVjp([x @ w], [x], [w])
    >>> vjp.input_gradient([torch.ones(1, 2)])[0].tolist(), w.grad
    ([[1.0, 1.0]], None)
    >>> vjp.weight_gradient(); w.grad.tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """

    def __init__(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        parameters: Sequence[Tensor],
        pool: BufferPool | None = None,
    ):
        self.pool = BufferPool() if pool is None else pool
        self.outputs = [get_gradient_edge(y) for y in outputs]
        self.inputs, self.parameters = list(inputs), list(parameters)
        self.state = "new"
        self.rest: Callable[[], None] | None = None  # for weight_gradient

    def backward(
        self, cotangents: Sequence[Tensor | None], give: Give | None = None
    ) -> list[Tensor | None]:
        """The inputs' gradients, None where there is none; adds to the parameters'.

        Args:
            cotangents: one for each output, None for zero.
            give: called with what is returned as soon as it is there: before the
                products of weights, whose factors are kept till then.

        Raises:
            RuntimeError: it has been used.
            ValueError: cotangents unlike the outputs in number.

        Cost: one backward pass, which frees the graph as it goes.
        """
        edges, grads = self._start("backward", "spent", cotangents)
        inputs, parameters = self.inputs, self.parameters
        self._forget()
        found: list[Tensor | None] = []

        def take() -> None:
            found.extend(x.grad for x in inputs)
            for x in inputs:
                x.grad = None
            if give is not None:
                give(found)

        between = None if give is None else take
        pull_back(edges, grads, inputs, parameters, self.pool, between)
        if give is None:
            take()
        return found

    def input_gradient(
        self, cotangents: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The inputs' gradients, None where there is none; the rest is for later.

        The arguments and errors are those of :meth:`backward`.

        Cost: the operations that lead to the inputs, and of the rest those that one
        kernel does together with them. What the weight gradients need is kept.
        """
        edges, grads = self._start("input_gradient", "half", cotangents)
        if not self.inputs:  # then nobody waits for anything
            parameters, pool = self.parameters, self.pool
            self.rest = partial(pull_back, edges, grads, [], parameters, pool)
            self._forget()
            return []
        wanted = [get_gradient_edge(x) for x in self.inputs]
        names = {get_gradient_edge(x).node: x for x in self.parameters}
        ends = [edge.node for edge in wanted]
        plan = frontier([edge.node for edge in edges], ends, names)
        weights = _Weights(plan, names, self.pool)
        self.rest = weights.run
        inner = []
        for edge, g in zip(edges, grads, strict=True):
            group = plan.group_of.get(edge.node)
            if edge.node in plan.inner or (group is not None and group.crossed):
                inner.append((edge, g))
            elif group is not None:
                weights.arrive((edge.node, edge.output_nr), g)
        self._forget()
        if not inner:
            return [None] * len(wanted)
        return weights.around(inner, wanted)

    def weight_gradient(self) -> None:
        """Adds to the parameters' gradients what ``input_gradient`` left.

        Raises:
            RuntimeError: not right after ``input_gradient``, and once.
        """
        if self.state != "half" or self.rest is None:
            raise RuntimeError(
                "weight_gradient comes after input_gradient, and once: "
                + _SAYS[self.state]
            )
        self.state = "spent"
        rest, self.rest = self.rest, None
        rest()

    def _start(
        self, what: str, then: str, cotangents: Sequence[Tensor | None]
    ) -> tuple[list[GradientEdge], list[Tensor]]:
        if self.state != "new":
            raise RuntimeError(
                f"{what} of a forward pass that is used: {_SAYS[self.state]}"
            )
        if len(cotangents) != len(self.outputs):
            raise ValueError(
                f"{len(cotangents)} cotangents for {len(self.outputs)} outputs"
            )
        self.state = then
        both = zip(self.outputs, cotangents, strict=True)
        pairs = [(edge, g) for edge, g in both if g is not None]
        return [edge for edge, _ in pairs], [g for _, g in pairs]

    def _forget(self) -> None:
        self.outputs, self.inputs, self.parameters = [], [], []


_SAYS = {
    "new": "nothing has been pulled back yet",
    "half": "its input gradients are out, and weight_gradient is due",
    "spent": "all its gradients are out; record another forward pass",
}


class _Weights:
    """What input gradients leave for later: cotangents, at nodes and at edges."""

    def __init__(self, plan: Frontier, names: dict[Any, Tensor], pool: BufferPool):
        self.plan, self.names, self.pool = plan, names, pool
        self.kept: dict[Any, Any] = {}  # by node apart, in the order of the backward

    def arrive(self, edge: tuple[Any, int], g: Tensor | None) -> None:
        """Takes what crosses an edge of the frontier."""
        if g is not None:
            self.plan.group_of[edge[0]].found.append((edge, g))

    def around(
        self, roots: Sequence[tuple[GradientEdge, Tensor]], wanted: list[GradientEdge]
    ) -> list[Tensor | None]:
        """Runs the inner nodes; returns what comes to ``wanted``."""
        plan = self.plan
        pulling = {
            n: n.pull_recomputed for n in plan.inner if hasattr(n, "pull_recomputed")
        }
        apart = [n for n in plan.late if n not in pulling]
        hooks = [n.register_prehook(partial(self._keep, n)) for n in apart]
        try:
            for node in pulling:
                node.pull_recomputed = partial(self._pull, node)
            found = torch.autograd.grad(
                [edge for edge, _ in roots],
                [*wanted, *(GradientEdge(*edge) for edge in plan.early)],
                [g for _, g in roots],
                retain_graph=bool(apart),
                allow_unused=True,
            )
        finally:
            for node, pull in pulling.items():
                node.pull_recomputed = pull
            for hook in hooks:
                hook.remove()
        for edge, g in zip(plan.early, found[len(wanted) :], strict=True):
            self.arrive(edge, g)
        plan.early.clear()
        plan.inner.clear()
        return list(found[: len(wanted)])

    def _keep(self, node: Any, grads: Sequence[Tensor | None]) -> None:
        self.kept[node] = grads

    def _pull(
        self,
        node: Any,
        ys: Sequence[Tensor],
        gs: Sequence[Tensor],
        wanted: Sequence[Tensor],
        beside: Sequence[Tensor],
    ) -> list[Tensor | None]:
        """A recomputed graph, parted as ours is."""
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        edges = edges[len(edges) - len(wanted) :]
        late = set(self.plan.late.get(node, ()))
        waits = [edge in late for edge in edges]
        now = [x for x, wait in zip(wanted, waits, strict=True) if not wait]
        later = [x for x, wait in zip(wanted, waits, strict=True) if wait]
        inner = StageVjp(ys, now, [*later, *beside], self.pool)
        found = iter(inner.input_gradient(gs))
        targets = [edge for edge, wait in zip(edges, waits, strict=True) if wait]
        self.kept[node] = _Inner(inner, later, targets, running())
        return [None if wait else next(found) for wait in waits]

    def run(self) -> None:
        """Runs the nodes apart, and each group when all has arrived."""
        groups = deque(self.plan.groups)
        for group in groups:
            group.users &= self.kept.keys()
        while groups or self.kept:
            while groups and not groups[0].users:
                self._finish(groups.popleft())
            if self.kept:
                node = next(iter(self.kept))
                self._apart(node, self.kept.pop(node))

    def _apart(self, node: Any, kept: Any) -> None:
        edges = self.plan.late.pop(node, [])
        groups = list(dict.fromkeys(self.plan.group_of[c] for c, _ in edges))
        if isinstance(kept, _Inner):
            kept.run(self)
        else:
            pairs = [(k, g) for k, g in enumerate(kept) if g is not None]
            roots = [GradientEdge(node, k) for k, _ in pairs]
            grads = [g for _, g in pairs]
            if all(g.users == {node} and not g.found for g in groups):
                left = self._added(node, kept, edges, groups)
                inputs = [self.names[leaf] for g in left for leaf in g.leaves]
                if roots and inputs:
                    torch.autograd.backward(roots, grads, inputs=inputs)
            else:
                targets = [GradientEdge(*edge) for edge in edges]
                found = torch.autograd.grad(roots, targets, grads, allow_unused=True)
                for edge, g in zip(edges, found, strict=True):
                    self.arrive(edge, g)
        for group in groups:
            group.users.discard(node)

    def _added(
        self, node: Any, grads: Any, edges: list[Any], groups: list[WeightGroup]
    ) -> list[WeightGroup]:
        """Adds the product of a weight in place; returns the groups that are left."""
        add = addition(node, self.pool)
        if add is None or add.edge not in edges:
            return groups
        group = self.plan.group_of[add.edge[0]]
        into = [edge for edge in edges if self.plan.group_of[edge[0]] is group]
        if into != [add.edge] or len(group.leaves) != 1:
            return groups
        add(grads)
        return [g for g in groups if g is not group]

    def _finish(self, group: WeightGroup) -> None:
        found, group.found = group.found, []
        if found:
            roots = [GradientEdge(*edge) for edge, _ in found]
            leaves = [self.names[leaf] for leaf in group.leaves]
            pull_back(roots, [g for _, g in found], [], leaves, self.pool)


class _Inner:
    """The vjp of a recomputed graph, whose weight gradients are due."""

    def __init__(
        self, vjp: StageVjp, leaves: list[Tensor], edges: list[Any], scope: Running
    ):
        self.vjp, self.leaves, self.edges, self.scope = vjp, leaves, edges, scope

    def run(self, outer: _Weights) -> None:
        with run_as(self.scope):
            self.vjp.weight_gradient()
        for edge, leaf in zip(self.edges, self.leaves, strict=True):
            outer.arrive(edge, leaf.grad)
            leaf.grad = None
