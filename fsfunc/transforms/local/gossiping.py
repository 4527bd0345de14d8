"""``gossip``: each rank sends its parameters to a few others (stochastic push-sum)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fsfunc.comm.groups import RankGroup
from fsfunc.comm.mesh import Axis, Mesh, asks
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.core.frames import transformed
from fsfunc.optim.leaves import map_flat
from fsfunc.transforms.local.averaging import (
    LocalState,
    assign,
    buckets,
    in_one,
    written,
)
from fsfunc.transforms.local.graphs import Graph
from fsfunc.transforms.local.local_updates import LocalUpdates

Moves = Sequence[Sequence[tuple[int, int]]]


@api_boundary
def gossip(
    step: Callable[..., Any], mesh: Mesh, axis: Axis, graph: Graph, *, every: int = 1
) -> Callable[..., Any]:
    """``step`` for ranks along ``axis`` that train copies, and mix them with a few.

    Stochastic gradient push. Rank i has a numerator x_i and a weight w_i, at first 1;
    the step gets z_i = x_i / w_i and returns z'_i. With out_i the number of ranks that
    i sends to, and sums over i and the ranks that send to it::

        x_i = sum_j (w_j z_j + z'_j - z_j) / (1 + out_j)
        w_i = sum_j w_j / (1 + out_j)

    Where each rank receives from as many as it sends to, as in ``ff.graphs``, weights
    stay 1, and it is a mean with neighbours. Else they are computed from the graph, and
    not sent. As in ``local_sgd``, the rest of the state is the rank's own.

    Args:
        step: ``step(state, *batch) -> (state, metrics)``, as for `local_sgd`.
        axis: the mesh axis, or several.
        graph: which rank sends to which, as data: see ``ff.graphs``.
        every: the number of steps between two exchanges.

    Returns:
        A step over a `LocalState`. ``ff.consensus(state)`` is the mean by weight,
        which no exchange changes.

    Raises:
        ValueError: a graph that names no rank of the axis, or one twice in a move, and
            what `local_sgd` refuses.
        RanksDiffer: the ranks' first states differ.

    Cost: in one of ``every`` steps a ppermute of the rank's floating parameters for
    each move. Memory: two copies more of what travels together, and of the parameters
    from before the step where weights are not 1.

    Source: Assran et al., Stochastic gradient push for distributed deep learning, 2019;
    FairScale's ``SlowMoBaseAlgorithm.SGP``.

    >>> import torch, fsfunc as ff
    >>> mesh = ff.make_mesh({"node": 4}, "simulated")
    >>> optimizer = ff.sgd(1.0)
    >>> step = optimizer(ff.value_and_grad(lambda w, x: w * x))
    >>> step = ff.gossip(step, mesh, "node", ff.graphs.ring(4))
    >>> def main():
    ...     x = torch.tensor(-4.0 if mesh.rank == 0 else 0.0)
    ...     state = ff.init_state(step, torch.tensor(0.0), optimizer, x)
    ...     state, _ = step(state, x)
    ...     return state.copies.params.local.item(), ff.consensus(state).params.item()
    >>> ff.spmd(main, mesh)()
    [(2.0, 1.0), (2.0, 1.0), (0.0, 1.0), (0.0, 1.0)]
    """
    return transformed(step, Gossip(mesh, axis, graph, every))


class Gossip(LocalUpdates):
    """The interpretation of ``gossip``."""

    called = "gossip"

    def __init__(self, mesh: Mesh, axis: Axis, graph: Graph, every: int):
        super().__init__(mesh, axis, every)
        self.graph = _checked(graph, mesh.axis_size(axis))
        n = mesh.axis_size(axis)
        regular = all(_is_regular(moves, n) for moves in self.graph)
        self.first = () if regular else (1.0,) * n

    @property
    def configuration(self) -> tuple[tuple[str, Any], ...]:
        return (*super().configuration, ("graph", self.graph))

    def remembers(self, params: Any, where: RankGroup) -> dict[str, Any]:
        return {"weights": self.first}

    def before(self, state: LocalState, params: Any, where: RankGroup) -> Any:
        """The part that a step whose weight is not 1 leaves out of the numerator."""
        if not state.weights:
            return None
        asks(where.axis)
        weight = state.weights[where.index] - 1
        return map_flat(
            lambda xs: torch._foreach_mul(xs, weight), params, untrainable=None
        )

    def meet(
        self, state: LocalState, held: Any, params: Any, step: int, where: RankGroup
    ) -> tuple[Any, dict[str, Any]]:
        turn, rest = divmod(step, self.every)
        moves = () if rest else self.graph[(turn - 1) % len(self.graph)]
        if not moves and not state.weights:
            return params, {}
        shares = _shares(moves, where.size)
        if len(set(shares)) > 1:
            asks(where.axis)
        share = float(shares[where.index])
        mix = partial(_mixed, moves=moves, share=share, where=where)
        if not state.weights:
            found = map_flat(mix, params, untrainable=None)
            return written(assign, params, found)[0], {}
        weights = _pushed(state.weights, moves, shares)
        inverse = 1 / weights[where.index]
        numerator = written(torch._foreach_add_, params, held)[0]
        mixed = map_flat(
            lambda xs: torch._foreach_mul(mix(xs), inverse), numerator, untrainable=None
        )
        return written(assign, numerator, mixed)[0], {"weights": weights}


def _mixed(
    tensors: Sequence[Tensor], moves: Moves, share: float, where: RankGroup
) -> list[Tensor]:
    """A share of the rank's own, and what comes of others'."""
    out = list(tensors)
    for positions in buckets(out):
        mine = in_one([tensors[i] for i in positions]) * share
        works = [where.start("ppermute", mine, pairs=m, what="gossip") for m in moves]
        arrived = [work.wait() for work in works]
        total = mine
        for part in arrived:
            total = total + part
        parts = total.split([tensors[i].numel() for i in positions])
        for i, part in zip(positions, parts, strict=True):
            out[i] = part.view(tensors[i].shape)
    return out


def _shares(moves: Moves, n: int) -> list[Fraction]:
    """The share that each rank sends to each of its targets, and keeps."""
    sent = Counter(source for pairs in moves for source, _ in pairs)
    return [Fraction(1, 1 + sent[rank]) for rank in range(n)]


def _pushed(
    weights: Sequence[Any], moves: Moves, shares: Sequence[Fraction]
) -> tuple[Any, ...]:
    """The push-sum weights after a meeting, in the order in which parameters add."""
    given = [w * share for w, share in zip(weights, shares, strict=True)]
    out = list(given)
    for pairs in moves:
        for source, target in pairs:
            out[target] += given[source]
    return tuple(out)


def _is_regular(moves: Moves, n: int) -> bool:
    """True if a meeting leaves weights of 1 as they are."""
    return set(_pushed([1] * n, moves, _shares(moves, n))) == {1}


def _checked(graph: Graph, n: int) -> tuple[Moves, ...]:
    """The graph, of ranks that there are, each named once in a move."""
    found = []
    for t, moves in enumerate(graph):
        for pairs in moves:
            for ends in zip(*pairs, strict=True):
                if len(set(ends)) != len(ends) or not set(ends) <= set(range(n)):
                    raise ValueError(
                        f"gossip over {n} ranks: at time {t} the graph has the move "
                        f"{list(pairs)}: (source, target) indices of 0 to {n - 1}, "
                        "each source and each target once; make two moves of it"
                    )
        found.append(tuple(tuple((int(s), int(d)) for s, d in m) for m in moves))
    if not found:
        raise ValueError(
            "gossip over a graph of no time: it is a list over time of lists of moves, "
            f"such as ff.graphs.ring({max(n, 2)})"
        )
    return tuple(found)
