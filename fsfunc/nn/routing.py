"""Places of choices in experts' buffers, and the all-to-alls that fill them.

In an expert's queue all tokens' first choices are before all second ones, and tokens
in their order; those beyond its capacity are dropped, with a weight of 0.

A group is the tokens of one call: capacity, queues and losses are of a group. Under
expert parallelism each rank's tokens are one (GShard, section 3.2), so one device gives
the same numbers where it gates the same groups, one by one.

A choice that is kept has a slot, a row of its rank's buffer. Rows are copied there and
read from there, each by an index: forward and backward alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import accumulate, chain
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.collectives import all_gather, all_to_all
from fsfunc.comm.groups import axis_index, axis_size, group
from fsfunc.runtime.scopes import refuse_in_graph


class Routing(NamedTuple):
    """The k choices of each of T tokens among E experts.

    Args:
        indices: [T, k] int64, the experts that a token chose, the best first.
        weights: [T, k], fp32 (fp64 of fp64 logits): the share of each in the result; 0
            where it was dropped, and of padding.
        positions: [T, k] int64, the choice's place in its expert's queue.
        kept: [T, k] bool, whether there is room for it; False of padding.
        counts: [E] int64, the lengths of the queues, dropped choices included.
        capacity: how many places an expert has; None: nobody is dropped.
        aux_loss: [], the load-balance loss; the functions say of which form.
        z_loss: [], the mean of logsumexp(logits)^2 (ST-MoE, equation 5).
    """

    indices: Tensor
    weights: Tensor
    positions: Tensor
    kept: Tensor
    counts: Tensor
    capacity: int | None
    aux_loss: Tensor | None = None
    z_loss: Tensor | None = None

    @property
    def dropped(self) -> Tensor:
        """[] int64, the choices without room; those of padding do not count."""
        return self.counts.sum() - self.kept.sum()


def route(
    indices: Tensor,
    weights: Tensor,
    experts: int,
    *,
    capacity_factor: float | None = None,
    min_capacity: int = 0,
    used_token: Tensor | None = None,
) -> Routing:
    """The Routing of choices that are already made: by hash, by turns, by any gate.

    Args:
        indices: [T, k] integers below ``experts``.
        weights: [T, k] floating.
        experts: E, over all ranks.
        capacity_factor: an expert has ceil(capacity_factor k T / E) places, so that 1
            is just room for all where the load is even; None: nobody is dropped.
        min_capacity: the places that it has at least.
        used_token: [T] bool, False for padding, which goes to no expert and takes no
            place; None: all are tokens. The capacity is that of T, padding or not.

    Returns:
        A Routing without losses.

    Raises:
        ValueError: indices, weights or ``used_token`` of unlike shapes; a factor that
            is not positive.
        TypeError: ``used_token`` that is not bool.
        RuntimeError: an index that is no expert's (torch's own).

    Cost: a sort of T k integers; no communication.

    >>> by_turns = torch.arange(5)[:, None] % 2
    >>> routing = route(by_turns, torch.ones(5, 1), 2, capacity_factor=0.8)
    >>> routing.positions.flatten().tolist(), routing.capacity, routing.dropped.item()
    ([0, 0, 1, 1, 2], 2, 1)
    """
    if indices.ndim != 2 or indices.shape != weights.shape:
        raise ValueError(
            f"route: indices of shape {tuple(indices.shape)} and weights of shape "
            f"{tuple(weights.shape)}; both are [tokens, choices]"
        )
    check_used("route", used_token, indices.shape[:1])
    capacity = _capacity(indices.numel(), experts, capacity_factor, min_capacity)
    indices = indices.to(torch.int64)
    used = None if used_token is None else used_token[:, None].expand_as(indices)
    positions, counts = _queues(indices, experts, used)
    kept = torch.ones_like(positions, dtype=torch.bool) if used is None else used
    if capacity is not None:
        kept = kept & (positions < capacity)
    if capacity is not None or used is not None:
        weights = torch.where(kept, weights, 0)
    return Routing(indices, weights, positions, kept, counts, capacity)


def counts_of(chosen: Tensor, experts: int, used: Tensor | None) -> Tensor:
    """The number of times each expert is in ``chosen`` [N], by used tokens [N]."""
    ones = torch.ones_like(chosen) if used is None else used.to(chosen.dtype)
    zeros = torch.zeros(experts, dtype=torch.int64, device=chosen.device)
    return zeros.scatter_add(0, chosen, ones)


def check_used(what: str, used: Tensor | None, tokens: torch.Size) -> None:
    """Raises unless it says of each token whether it is one."""
    if used is None:
        return
    if used.dtype != torch.bool:
        raise TypeError(
            f"{what}: used_token of {used.dtype}: give bools, False for padding, such "
            "as attention_mask.bool()"
        )
    if used.shape != tokens:
        raise ValueError(
            f"{what}: used_token of shape {tuple(used.shape)} for tokens of shape "
            f"{tuple(tokens)}; it says of each whether it is one"
        )


def _queues(
    indices: Tensor, experts: int, used: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Each choice's place in its expert's queue, and how long the queues are."""
    flat = indices.T.reshape(-1)  # first choices first
    mine = None if used is None else used.T.reshape(-1)
    counts = counts_of(flat, experts, mine)
    starts = counts.cumsum(0) - counts
    # Padding stands behind all queues, and its places mean nothing.
    order = (flat if mine is None else flat.where(mine, experts)).argsort(stable=True)
    places = torch.arange(len(flat), device=flat.device) - starts[flat[order]]
    positions = torch.empty_like(flat).scatter(0, order, places)
    return positions.reshape(indices.shape[1], -1).T, counts


def _capacity(
    choices: int, experts: int, factor: float | None, least: int
) -> int | None:
    if least < 0 or factor is None and least:
        raise ValueError(
            f"min_capacity={least}: it is at least 0, and of no use without a "
            "capacity_factor"
        )
    if factor is None:
        return None
    if not (factor > 0 and math.isfinite(factor)):
        raise ValueError(
            f"capacity_factor={factor}: it is positive and finite; None drops nobody"
        )
    # As it is written: 1.1 times 50 is 55, and not the next float above it.
    return max(least, math.ceil(Fraction(str(factor)) * choices / experts))


Loads = list[list[int]]  # rows, by rank and expert


def placed(x: Tensor, slots: Tensor, kept: Tensor, size: int) -> Tensor:
    """[size, d]: each token at the slots of its choices that are kept, else zeros.

    >>> slots, kept = torch.tensor([[2, 0], [1, 1]]), torch.tensor([[True, True]] * 2)
    >>> kept[1, 1] = False
    >>> placed(torch.tensor([[5.0], [7.0]]), slots, kept, 3).flatten().tolist()
    [5.0, 7.0, 5.0]
    """
    rows = x.unsqueeze(1).expand(*slots.shape, x.shape[-1]).flatten(0, 1)
    to = torch.where(kept, slots, size).flatten()  # a last row for those without room
    return x.new_zeros(size + 1, x.shape[-1]).index_copy(0, to, rows)[:size]


def weighed(y: Tensor, slots: Tensor, routing: Routing) -> Tensor:
    """[T, d']: each token's sum of the rows at its slots, by its weights."""
    if not len(y):  # nobody goes anywhere, and each reads a row all the same
        y = F.pad(y, (0, 0, 0, 1))
    # Modulo, so that those of dropped choices are anywhere, and not all in one place.
    found = y.index_select(0, slots.flatten() % len(y))
    found = found.unflatten(0, slots.shape)
    found = torch.where(routing.kept.unsqueeze(-1), found, 0)
    return (found * routing.weights.unsqueeze(-1)).sum(1).to(y.dtype)


def dropless(
    x: Tensor,
    routing: Routing,
    axis: str | None,
    here: int,
    ragged: Callable[[Tensor, list[int]], Tensor],
) -> Tensor:
    """The layer where experts take all that come.

    An all-to-all moves equal parts, so each is as long as the largest load of one rank
    on another; experts compute on the rows that are in use.

    Args:
        x: [T, d], this rank's tokens.
        here: how many experts a rank has.
        ragged: experts' results on (rows, how many each of them has, in order).

    Returns:
        [T, d'].
    """
    sent, received, room = _traffic(routing, axis, here)

    def starts(loads: Loads) -> Loads:
        """First rows, by the rank at the other end and its expert, or ours."""
        runs = enumerate(loads)
        return [list(accumulate(run[:-1], initial=i * room)) for i, run in runs]

    at = torch.tensor(list(chain(*starts(sent))), device=x.device)
    slots = at[routing.indices] + routing.positions
    rows = placed(x, slots, routing.kept, len(sent) * room)
    if axis is None:  # one rank's queues are in order already
        y = ragged(rows, sent[0])
        check_rows(y, len(rows))
        return weighed(y, slots, routing)
    rows = all_to_all(rows, axis, split_dim=0, concat_dim=0)
    by_expert = list(zip(*received, strict=True))
    runs = zip(
        chain(*zip(*starts(received), strict=True)), chain(*by_expert), strict=True
    )
    order = torch.cat([torch.arange(i, i + m, device="cpu") for i, m in runs]).to(
        x.device
    )
    y = ragged(rows.index_select(0, order), [sum(run) for run in by_expert])
    check_rows(y, len(order))
    if not len(order):  # as a function of what came: so all meet in the backward
        y = y + 0 * rows.sum()
    y = y.new_zeros(len(received) * room, y.shape[1]).index_copy(0, order, y)
    y = all_to_all(y, axis, split_dim=0, concat_dim=0)
    return weighed(y, slots, routing)


class _Traffic(NamedTuple):
    """Rows between ranks and experts: plain numbers, for which the host waits.

    Args:
        sent: by rank, those that this rank sends to each expert there.
        received: by rank, those that it sends to each expert here.
        room: the largest load of one rank on another.
    """

    sent: Loads
    received: Loads
    room: int


def _traffic(routing: Routing, axis: str | None, here: int) -> _Traffic:
    """What ranks exchange; ``here``: the number of experts of each rank."""
    n = 1 if axis is None else axis_size(axis)
    mine = counts = routing.counts[None]
    if axis is not None:
        counts = all_gather(mine, axis)
        if not group(axis).link.moves:  # a recording on data: no one else is heard of
            counts = mine.expand(n, -1)
    if _torch.vmap_levels_of(counts):
        raise RuntimeError(
            "a layer without a capacity reads how many tokens its experts have, which "
            "differs along the dim that vmap maps: gate with capacity_factor="
        )
    if isinstance(_torch.unwrapped(counts), _torch.FakeTensor) or _torch.fake_active():
        # Nobody knows before it runs: plans and recordings take the load for even.
        refuse_in_graph("a layer without a capacity sends each expert its tokens")
        even = -(-routing.indices.numel() // (n * here))
        return _Traffic([[even] * here] * n, [[even] * here] * n, even * here)
    me = 0 if axis is None else axis_index(axis)
    sizes = [
        [row[i : i + here] for i in range(0, n * here, here)] for row in counts.tolist()
    ]
    room = max(sum(run) for loads in sizes for run in loads)
    return _Traffic(sizes[me], [loads[me] for loads in sizes], room)


def check_rows(y: Tensor, count: int) -> None:
    """Raises where an expert function did not make one row of each."""
    if y.ndim != 2 or len(y) != count:
        raise ValueError(
            f"expert_layer: expert_fn made shape {tuple(y.shape)} of {count} rows; a "
            "row of [m, d] becomes a row of [m, d']"
        )
