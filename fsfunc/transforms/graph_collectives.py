"""Collectives as nodes of a step's graph: noted in its trace, started in its runs.

A collective becomes two nodes, START and WAIT, between which the graph computes. While
a step is traced they are noted by `GraphLink`, which sends nothing; while its graph
runs, each node calls the :class:`Run` in force, by the collective's number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fsfunc._torch.operator_graphs import START, WAIT
from fsfunc.comm.attribution import current_label, label
from fsfunc.comm.backends.abstract import AbstractLink, result_shape
from fsfunc.comm.backends.link import Handle
from fsfunc.comm.groups import RankGroup, get_group
from fsfunc.comm.mesh import Here, Mesh, here
from fsfunc.runtime.memory import pool_of


@dataclass(frozen=True)
class GraphCollective:
    """A collective of a graph: what its node starts on ``axis`` of ``mesh``.

    Args:
        compared: whether the ranks had compared their programs where the step starts it
            (see `RankGroup`). Its runs keep that: another rank may run the step without
            a graph, and a collective that is not compared yet is sent with its
            description, by both or by neither.
        name: the buffer's; ``options``: the arguments of the operation.
    """

    op: str
    mesh: Mesh
    axis: tuple[str, ...]
    compared: bool
    name: str
    options: dict[str, Any]
    label: tuple[str, str]


class GraphLink(AbstractLink):
    """The link of a rank whose step is traced: collectives become nodes.

    Args:
        at: the rank.

    Attributes:
        calls: the collectives, by the number that their nodes have.
        token: the result of the last node: the next one takes it, so that all ranks
            start and await in the order of the trace.
    """

    def __init__(self, at: Here):
        super().__init__(at.rank)
        self.calls: list[GraphCollective] = []
        self.token: Tensor | None = None

    def start(
        self,
        op: str,
        x: Tensor,
        where: RankGroup,
        *,
        out: Tensor | None = None,
        name: str = "",
        **how: Any,
    ) -> Handle:
        number = len(self.calls)
        ranks = here().mesh, where.axis, where.compared
        self.calls.append(GraphCollective(op, *ranks, name, how, current_label()))
        # The nodes have no derivative: it is the autograd.Function around this call
        # that has one, and its backward starts another collective (`LinearMap`). In
        # grad mode `y`, which the node writes, would come to require gradients.
        # Detached, as the handle holds `x` until it is awaited, and would hold its
        # graph as long.
        with torch.no_grad():
            x = x.detach()
            y = x.new_empty(result_shape(op, x, where, how))
            handle = _TracedCollective(self, x, y, out, number)
            self.add_node(START, handle)
        return handle

    def add_node(
        self,
        node: Callable[[Tensor, Tensor, Tensor, int], Tensor],
        collective: _TracedCollective,
    ) -> None:
        """Adds a node, START or WAIT, of a collective to the graph."""
        x, y, number = collective.x, collective.y, collective.number
        # Each node takes what the one before returned: the compiler may move operators
        # that do not depend on each other, and ranks must send in one order.
        before = x.new_empty(0) if self.token is None else self.token
        self.token = node(x, y, before, number)

    def send(self, x: Tensor, where: RankGroup, to: int, name: str = "") -> Handle:
        raise RuntimeError(_POINT_TO_POINT)

    def receive(
        self, like: Tensor, where: RankGroup, source: int, name: str = ""
    ) -> Handle:
        raise RuntimeError(_POINT_TO_POINT)


class _TracedCollective(Handle):
    """A collective of a graph on its way: from ``x`` into ``y``.

    Args:
        out: the tensor that a caller wants the result in, if any.
        number: its position in ``link.calls``.
    """

    link: GraphLink
    x: Tensor
    y: Tensor
    out: Tensor | None
    number: int

    result: Tensor | None = None

    def __init__(
        self, link: GraphLink, x: Tensor, y: Tensor, out: Tensor | None, number: int
    ):
        self.link, self.x, self.y, self.out, self.number = link, x, y, out, number

    def wait(self) -> Tensor:
        if self.result is None:  # a second wait adds no second node
            with torch.no_grad():
                self.link.add_node(WAIT, self)
                self.result = self.y if self.out is None else self.out.copy_(self.y)
        return self.result

    def done(self) -> bool:
        return True


class Run:
    """The collectives of one run of a graph, which its nodes start and await.

    Attributes:
        calls: the collectives, by number.
        in_flight: by number, the handle, and the tensor that is sent.
        groups: by mesh, axis and ``compared``.
    """

    def __init__(self, calls: Sequence[GraphCollective]):
        self.calls = calls
        self.in_flight: dict[int, tuple[Handle, Tensor]] = {}
        self.groups: dict[tuple[Mesh, tuple[str, ...], bool], RankGroup] = {}

    def trim(self) -> None:
        """Frees the buffers that calls without a graph keep for their next collectives.

        A graph has memory of its own for what it sends. To free these saves memory, and
        costs a later call without a graph some page faults.
        """
        for mesh in {call.mesh for call in self.calls}:
            this_rank = here(mesh)
            pool_of(mesh, this_rank.rank).trim(0)
            this_rank.link.trim()

    def start(self, x: Tensor, y: Tensor, number: int) -> None:
        """Starts a collective: the node START."""
        call = self.calls[number]
        ranks = call.mesh, call.axis, call.compared
        where = self.groups.get(ranks)
        if where is None:
            # Of the rank as it is now: the trace's link sends nothing.
            this_rank = replace(here(call.mesh), compared=call.compared)
            where = self.groups[ranks] = get_group(call.axis, this_rank)
        # The compiler chooses strides; links send and receive dense memory. The label
        # is that of the trace, for the ledger: no unit call is around the node now.
        x = x.contiguous()
        with label(*call.label):
            out = y if y.is_contiguous() else None
            handle = where.start(call.op, x, out=out, name=call.name, **call.options)
        # A reference to what is sent: `x` may be a copy that nobody else holds.
        self.in_flight[number] = handle, x

    def wait(self, x: Tensor, y: Tensor, number: int) -> None:
        """Waits for a collective, whose result is in ``y`` then: the node WAIT."""
        arrived = self.in_flight.pop(number)[0].wait()
        # The link may have received into other memory than `y` (above, where `y` is not
        # contiguous), and the compiler may have copied `y` since the node START.
        if arrived.data_ptr() != y.data_ptr():
            y.copy_(arrived)


def with_current_link(traced: Here | None) -> Here | None:
    """Returns the rank of a trace, with the link that it has now."""
    return traced and replace(traced, link=here(traced.mesh).link)


_POINT_TO_POINT = (
    "a step that is compiled whole sends from rank to rank: each would have a graph of "
    "its own. Compile its units, jit(step)"
)
