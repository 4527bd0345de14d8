"""``gossip``: each rank sends its parameters to a few others (stochastic push-sum).

A graph (`graphs`) says who sends to whom, meeting by meeting. Where a rank may receive
more than it sends, its parameters are kept as a numerator and a weight, and divided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from fsfunc.comm.groups import RankGroup
from fsfunc.comm.mesh import Axis, Mesh, note_axes_read
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.core.frames import transformed
from fsfunc.optim.leaves import map_flat
from fsfunc.transforms.local.averaging import (
    LocalState,
    apply_kernel,
    assign,
    buckets,
    concatenate_flat,
)
from fsfunc.transforms.local.graphs import Graph
from fsfunc.transforms.local.local_updates import LocalUpdates
from fsfunc.tree.types import PyTree

_P = ParamSpec("_P")
_R = TypeVar("_R")
_State = TypeVar("_State", bound=Any)

Moves = Sequence[Sequence[tuple[int, int]]]


@api_boundary
def gossip(
    step: Callable[Concatenate[_State, _P], tuple[_State, _R]],
    mesh: Mesh,
    axis: Axis,
    graph: Graph,
    *,
    every: int = 1,
) -> Callable[Concatenate[LocalState[_State], _P], tuple[LocalState[_State], _R]]:
    """Runs ``step`` on ranks along ``axis`` that train copies, and mix them with a few.

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
    # The state that goes in and out is another than the inner step's.
    return cast(Any, transformed(step, Gossip(mesh, axis, graph, every)))


class Gossip(LocalUpdates):
    """The interpretation of ``gossip``."""

    called = "gossip"

    def __init__(self, mesh: Mesh, axis: Axis, graph: Graph, every: int):
        super().__init__(mesh, axis, every)
        self.graph: tuple[Moves, ...] = _check_graph(graph, mesh.axis_size(axis))
        n = mesh.axis_size(axis)
        is_regular = all(_is_regular(moves, n) for moves in self.graph)
        self.first_weights: tuple[float, ...] = () if is_regular else (1.0,) * n

    @property
    def configuration(self) -> tuple[tuple[str, Any], ...]:
        return (*super().configuration, ("graph", self.graph))

    def first_fields(self, params: PyTree, where: RankGroup) -> dict[str, Any]:
        return {"weights": self.first_weights}

    def before_step(
        self, state: LocalState, params: PyTree, where: RankGroup
    ) -> PyTree | None:
        """Returns what the numerator has beside z': (w - 1) z, of before the step."""
        if not state.weights:
            return None
        note_axes_read(where.axis)
        weight = state.weights[where.index] - 1
        return map_flat(
            lambda xs: torch._foreach_mul(xs, weight), params, untrainable=None
        )

    def synchronize(
        self,
        state: LocalState,
        from_before: PyTree | None,
        params: PyTree,
        step: int,
        where: RankGroup,
    ) -> tuple[PyTree, dict[str, Any]]:
        meeting, steps_since = divmod(step, self.every)
        moves = () if steps_since else self.graph[(meeting - 1) % len(self.graph)]
        # With weights a step without a meeting has work, too: the optimizer's change
        # counts in the numerator, of which the step sees the quotient.
        if not moves and not state.weights:
            return params, {}
        shares = _shares(moves, where.size)
        # Ranks multiply by different numbers: a plan must run each of them.
        if len(set(shares)) > 1:
            note_axes_read(where.axis)
        share = float(shares[where.index])
        mix = partial(_mix, moves=moves, share=share, where=where)
        if not state.weights:
            mixed = map_flat(mix, params, untrainable=None)
            return apply_kernel(assign, params, mixed)[0], {}
        # The numerator is z' + (w - 1) z, in place where z' may be written; what is
        # received with it is divided by the new weight.
        weights = _push_weights(state.weights, moves, shares)
        inverse = 1 / weights[where.index]
        numerator = apply_kernel(torch._foreach_add_, params, from_before)[0]
        mixed = map_flat(
            lambda xs: torch._foreach_mul(mix(xs), inverse), numerator, untrainable=None
        )
        return apply_kernel(assign, numerator, mixed)[0], {"weights": weights}


def _mix(
    tensors: Sequence[Tensor], moves: Moves, share: float, where: RankGroup
) -> list[Tensor]:
    """Returns sums of this rank's share and of those that it receives."""
    out = list(tensors)
    for positions in buckets(out):
        sent = concatenate_flat([tensors[i] for i in positions]) * share
        # All are sent before the first is waited for, so that they travel side by side.
        # Until then `sent` must not be written: the total is another tensor.
        handles = [where.start("ppermute", sent, pairs=m, name="gossip") for m in moves]
        arrived = [handle.wait() for handle in handles]
        total = sent
        for part in arrived:
            total = total + part
        parts = total.split([tensors[i].numel() for i in positions])
        for i, part in zip(positions, parts, strict=True):
            out[i] = part.view(tensors[i].shape)
    return out


def _shares(moves: Moves, n: int) -> list[Fraction]:
    """Returns the share that each rank sends to each of its targets, and keeps."""
    sent = Counter(source for pairs in moves for source, _ in pairs)
    return [Fraction(1, 1 + sent[rank]) for rank in range(n)]


W = TypeVar("W", float, Fraction)


def _push_weights(
    weights: Sequence[W], moves: Moves, shares: Sequence[Fraction]
) -> tuple[W, ...]:
    """Returns the push-sum weights after a meeting."""
    # In the order in which parameters are added, so that both round alike.
    sent = [w * share for w, share in zip(weights, shares, strict=True)]
    received = list(sent)
    for pairs in moves:
        for source, target in pairs:
            received[target] += sent[source]
    return tuple(received)


def _is_regular(moves: Moves, n: int) -> bool:
    """Returns whether a meeting leaves weights of 1 as they are."""
    weights = _push_weights([Fraction(1)] * n, moves, _shares(moves, n))
    return set(weights) == {1}


def _check_graph(graph: Graph, n: int) -> tuple[Moves, ...]:
    """Returns the graph, of ranks that there are, each named once in a move."""
    meetings = []
    for t, moves in enumerate(graph):
        for pairs in moves:
            for ends in zip(*pairs, strict=True):  # all sources, then all targets
                if len(set(ends)) != len(ends) or not set(ends) <= set(range(n)):
                    raise ValueError(
                        f"gossip over {n} ranks: at time {t} the graph has the move "
                        f"{list(pairs)}: (source, target) indices of 0 to {n - 1}, "
                        "each source and each target once; make two moves of it"
                    )
        meetings.append(tuple(tuple((int(s), int(d)) for s, d in m) for m in moves))
    if not meetings:
        raise ValueError(
            "gossip over a graph of no time: it is a list over time of lists of moves, "
            f"such as ff.graphs.ring({max(n, 2)})"
        )
    return tuple(meetings)
