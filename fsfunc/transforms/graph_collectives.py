"""Collectives as nodes of a step's graph: noted in its trace, started in its runs."""

from __future__ import annotations

from collections.abc import Sequence
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

    ``compared``: as of a `RankGroup`. It is that of the step without its graph: another
    rank may run that, and both must say of a collective the same.
    """

    op: str
    mesh: Mesh
    axis: tuple[str, ...]
    compared: bool
    what: str
    how: dict[str, Any]
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
        on = here().mesh, where.axis, where.compared
        self.calls.append(GraphCollective(op, *on, name, how, current_label()))
        with torch.no_grad():
            x = x.detach()
            y = x.new_empty(result_shape(op, x, where, how))
            handle = _Noted(self, x, y, out, number)
            self.note(START, handle)
        return handle

    def note(self, node: Any, of: _Noted) -> None:
        """Adds a node of a collective to the graph."""
        after = of.x.new_empty(0) if self.token is None else self.token
        self.token = node(of.x, of.y, after, of.number)

    def send(self, x: Tensor, where: Any, to: int, name: str = "") -> Handle:
        raise RuntimeError(_APART)

    def receive(self, like: Tensor, where: Any, source: int, name: str = "") -> Handle:
        raise RuntimeError(_APART)


class _Noted(Handle):
    """A collective of a graph on its way: from ``x`` into ``y``."""

    result: Tensor | None = None

    def __init__(
        self, link: GraphLink, x: Tensor, y: Tensor, out: Tensor | None, number: int
    ):
        self.link, self.x, self.y, self.out, self.number = link, x, y, out, number

    def wait(self) -> Tensor:
        if self.result is None:
            with torch.no_grad():
                self.link.note(WAIT, self)
                self.result = self.y if self.out is None else self.out.copy_(self.y)
        return self.result

    def done(self) -> bool:
        return True


class Run:
    """The collectives of one run of a graph, which its nodes start and await."""

    def __init__(self, calls: Sequence[GraphCollective]):
        self.calls = calls
        self.flights: dict[int, tuple[Handle, Tensor]] = {}
        self.groups: dict[Any, RankGroup] = {}

    def trim(self) -> None:
        """Frees buffers for later collectives: a graph has memory of its own for them.

        To save memory, at the cost of some page faults.
        """
        for mesh in {call.mesh for call in self.calls}:
            at = here(mesh)
            pool_of(mesh, at.rank).trim(0)
            at.link.trim()

    def start(self, x: Tensor, y: Tensor, number: int) -> None:
        call = self.calls[number]
        on = call.mesh, call.axis, call.compared
        where = self.groups.get(on)
        if where is None:
            at = replace(here(call.mesh), compared=call.compared)
            where = self.groups[on] = get_group(call.axis, at)
        x = x.contiguous()
        with label(*call.label):
            out = y if y.is_contiguous() else None
            work = where.start(call.op, x, out=out, name=call.what, **call.how)
        self.flights[number] = work, x

    def wait(self, x: Tensor, y: Tensor, number: int) -> None:
        found = self.flights.pop(number)[0].wait()
        if found.data_ptr() != y.data_ptr():  # the compiler has copied ``y`` meanwhile
            y.copy_(found)


def at_now(at: Here | None) -> Here | None:
    """``at`` of a trace, with the rank's link of now."""
    return at and replace(at, link=here(at.mesh).link)


_APART = (
    "a step that is compiled whole sends from rank to rank: each would have a graph of "
    "its own. Compile its units, jit(step)"
)
