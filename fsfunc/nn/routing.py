"""Which choices of a gate find room at their expert, and where their rows lie.

``gating.py`` makes choices, ``route`` queues them, and ``experts.py`` moves rows by
the positions in these queues. In an expert's queue all tokens' first choices are before
all second ones, and tokens in their order. Choices beyond the expert's capacity are
dropped, with a weight of 0.

A group is the tokens of one call: each group has its own capacity, queues and losses.
Under expert parallelism the tokens of a rank are a group (GShard, section 3.2). So one
device gives the same numbers where it gates the same groups, one by one.

A choice that is not dropped has a slot: the number of its row in the buffer of its
rank. Rows are copied there and read from there by index, forward and backward alike.
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
from fsfunc.comm.groups import axis_index, axis_size, get_group
from fsfunc.comm.mesh import Axis
from fsfunc.runtime.scopes import refuse_in_graph


class Routing(NamedTuple):
    """The k choices of each of T tokens among E experts.

    Args:
        indices: [T, k] int64, the experts that a token chose, the best first.
        weights: [T, k], fp32 (fp64 of fp64 logits): the share of each in the result; 0
            where it was dropped, and of padding.
        positions: [T, k] int64, the choice's place in its expert's queue.
        kept: [T, k] bool, whether the expert has room for it; False for padding.
        counts: [E] int64, the lengths of the queues, dropped choices included.
        capacity: how many places an expert has; None: no choice is dropped.
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
        """[] int64, the number of dropped choices; those of padding do not count."""
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
    """Makes the Routing of choices that are already made: by hash, by any gate.

    Args:
        indices: [T, k] integers below ``experts``.
        weights: [T, k] floating.
        experts: E, over all ranks.
        capacity_factor: an expert has ceil(capacity_factor k T / E) places, so that 1
            is just room for all where the load is even; None: no choice is dropped.
        min_capacity: the number of places that it has at least.
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
    check_used_token("route", used_token, indices.shape[:1])
    capacity = _capacity(indices.numel(), experts, capacity_factor, min_capacity)
    indices = indices.to(torch.int64)
    used_choices = (
        None if used_token is None else used_token[:, None].expand_as(indices)
    )
    positions, counts = _queue_positions(indices, experts, used_choices)
    kept = (
        torch.ones_like(positions, dtype=torch.bool)
        if used_choices is None
        else used_choices
    )
    if capacity is not None:
        kept = kept & (positions < capacity)
    if capacity is not None or used_choices is not None:
        weights = torch.where(kept, weights, 0)
    return Routing(indices, weights, positions, kept, counts, capacity)


def count_choices(chosen: Tensor, experts: int, used_tokens: Tensor | None) -> Tensor:
    """Counts how often each expert is in ``chosen`` [N], padding left out."""
    ones = (
        torch.ones_like(chosen) if used_tokens is None else used_tokens.to(chosen.dtype)
    )
    zeros = torch.zeros(experts, dtype=torch.int64, device=chosen.device)
    return zeros.scatter_add(0, chosen, ones)


def check_used_token(
    caller: str, used_token: Tensor | None, tokens: torch.Size
) -> None:
    """Raises TypeError or ValueError unless it is one bool for each token."""
    if used_token is None:
        return
    if used_token.dtype != torch.bool:
        raise TypeError(
            f"{caller}: used_token of {used_token.dtype}: give bools, False for "
            "padding, such as attention_mask.bool()"
        )
    if used_token.shape != tokens:
        raise ValueError(
            f"{caller}: used_token of shape {tuple(used_token.shape)} for tokens of "
            f"shape {tuple(tokens)}; it says of each whether it is one"
        )


def _queue_positions(
    indices: Tensor, experts: int, used_choices: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns each choice's place in its expert's queue, and the queues' lengths."""
    flat = indices.T.reshape(-1)  # first choices first
    used_flat = None if used_choices is None else used_choices.T.reshape(-1)
    counts = count_choices(flat, experts, used_flat)
    starts = counts.cumsum(0) - counts
    # A stable sort by expert keeps the choices' order within each queue. Padding is
    # sorted behind all queues, and its places are never read.
    order = (flat if used_flat is None else flat.where(used_flat, experts)).argsort(
        stable=True
    )
    places = torch.arange(len(flat), device=flat.device) - starts[flat[order]]
    positions = torch.empty_like(flat).scatter(0, order, places)
    return positions.reshape(indices.shape[1], -1).T, counts


def _capacity(
    choices: int, experts: int, factor: float | None, minimum: int
) -> int | None:
    if minimum < 0 or factor is None and minimum:
        raise ValueError(
            f"min_capacity={minimum}: it is at least 0, and of no use without a "
            "capacity_factor"
        )
    if factor is None:
        return None
    if not (factor > 0 and math.isfinite(factor)):
        raise ValueError(
            f"capacity_factor={factor}: it is positive and finite; None drops nobody"
        )
    # As the factor is written: 1.1 times 50 is 55, and not the next float above it,
    # whose ceiling would be 56.
    return max(minimum, math.ceil(Fraction(str(factor)) * choices / experts))


Loads = list[list[int]]  # numbers of rows, by rank and expert


def place_rows(x: Tensor, slots: Tensor, kept: Tensor, size: int) -> Tensor:
    """Copies each token to the slots of its choices that are not dropped.

    Returns [size, d], with zeros in empty slots.

    >>> slots, kept = torch.tensor([[2, 0], [1, 1]]), torch.tensor([[True, True]] * 2)
    >>> kept[1, 1] = False
    >>> place_rows(torch.tensor([[5.0], [7.0]]), slots, kept, 3).flatten().tolist()
    [5.0, 7.0, 5.0]
    """
    copies = x.unsqueeze(1).expand(*slots.shape, x.shape[-1]).flatten(0, 1)
    # Dropped choices write to one row more, which is cut off: no shape depends on data.
    row_numbers = torch.where(kept, slots, size).flatten()
    return x.new_zeros(size + 1, x.shape[-1]).index_copy(0, row_numbers, copies)[:size]


def sum_weighted_rows(y: Tensor, slots: Tensor, routing: Routing) -> Tensor:
    """Returns [T, d'], each token's weighted sum of the rows at its slots."""
    if not len(y):  # every choice reads a row, also where none has a slot
        y = F.pad(y, (0, 0, 0, 1))
    # Slots of dropped choices may be too large: modulo brings them inside. It spreads
    # them, where a clamp would send them all to one row, and so their backward.
    rows = y.index_select(0, slots.flatten() % len(y))
    rows = rows.unflatten(0, slots.shape)
    rows = torch.where(routing.kept.unsqueeze(-1), rows, 0)
    return (rows * routing.weights.unsqueeze(-1)).sum(1).to(y.dtype)


def run_without_capacity(
    x: Tensor,
    routing: Routing,
    axis: Axis | None,
    experts_per_rank: int,
    run_experts: Callable[[Tensor, list[int]], Tensor],
) -> Tensor:
    """Computes the layer where experts take all tokens that come.

    An all-to-all moves equal parts, so each part is as long as the largest load of one
    rank on another. Experts compute only on the rows that are in use.

    Args:
        x: [T, d], this rank's tokens.
        axis: the axis the experts are spread over; None: all are on this rank.
        experts_per_rank: how many experts a rank has.
        run_experts: computes experts on rows that lie expert after expert, given how
            many rows each of them has.

    Returns:
        [T, d'].
    """
    sent, received, max_rows = _count_traffic(routing, axis, experts_per_rank)

    def run_starts(loads: Loads) -> Loads:
        """Returns the first row of each run of rows, by the other rank and expert."""
        runs = enumerate(loads)
        return [list(accumulate(run[:-1], initial=i * max_rows)) for i, run in runs]

    first_rows = torch.tensor(list(chain(*run_starts(sent))), device=x.device)
    slots = first_rows[routing.indices] + routing.positions
    rows = place_rows(x, slots, routing.kept, len(sent) * max_rows)
    if axis is None:  # one rank's queues are in order already
        y = run_experts(rows, sent[0])
        check_rows(y, len(rows))
        return sum_weighted_rows(y, slots, routing)
    rows = all_to_all(rows, axis, split_dim=0, concat_dim=0)
    # Rows came rank after rank, and within a rank expert after expert. ``order`` has
    # those of one expert together, from all ranks, without the unused rows between.
    by_expert = list(zip(*received, strict=True))
    runs = zip(
        chain(*zip(*run_starts(received), strict=True)), chain(*by_expert), strict=True
    )
    order = torch.cat([torch.arange(i, i + m, device="cpu") for i, m in runs]).to(
        x.device
    )
    y = run_experts(rows.index_select(0, order), [sum(run) for run in by_expert])
    check_rows(y, len(order))
    # A rank without tokens returns constants. Tied to what came, its backward calls the
    # all-to-all too, for which the other ranks wait.
    if not len(order):
        y = y + 0 * rows.sum()
    y = y.new_zeros(len(received) * max_rows, y.shape[1]).index_copy(0, order, y)
    y = all_to_all(y, axis, split_dim=0, concat_dim=0)
    return sum_weighted_rows(y, slots, routing)


class _Traffic(NamedTuple):
    """Numbers of rows that ranks exchange: Python ints, for which the host waits.

    Args:
        sent: for each rank, the rows that this rank sends to each expert there.
        received: for each rank, the rows that it sends to each expert of this rank.
        max_rows: the most rows that any rank sends to another.
    """

    sent: Loads
    received: Loads
    max_rows: int


def _count_traffic(
    routing: Routing, axis: Axis | None, experts_per_rank: int
) -> _Traffic:
    """Exchanges the lengths of queues, and returns how many rows go where."""
    ranks = 1 if axis is None else axis_size(axis)
    local_counts = counts = routing.counts[None]
    if axis is not None:
        counts = all_gather(local_counts, axis)
        # A recording on real data gathers nothing: all ranks are taken to be like this.
        if not get_group(axis).link.moves_data:
            counts = local_counts.expand(ranks, -1)
    if _torch.vmap_levels_of(counts):
        raise RuntimeError(
            "a layer without a capacity reads how many tokens its experts have, which "
            "differs along the dim that vmap maps: gate with capacity_factor="
        )
    if isinstance(_torch.unwrapped(counts), _torch.FakeTensor) or _torch.fake_active():
        # The load is known only when it runs: plans and recordings take it for even.
        refuse_in_graph("a layer without a capacity sends each expert its tokens")
        even_load = -(-routing.indices.numel() // (ranks * experts_per_rank))
        return _Traffic(
            [[even_load] * experts_per_rank] * ranks,
            [[even_load] * experts_per_rank] * ranks,
            even_load * experts_per_rank,
        )
    rank_index = 0 if axis is None else axis_index(axis)
    # By the rank that sends, then by the one that receives, then by its experts.
    loads_by_rank = [
        [
            row[i : i + experts_per_rank]
            for i in range(0, ranks * experts_per_rank, experts_per_rank)
        ]
        for row in counts.tolist()
    ]
    max_rows = max(sum(run) for loads in loads_by_rank for run in loads)
    return _Traffic(
        loads_by_rank[rank_index],
        [loads[rank_index] for loads in loads_by_rank],
        max_rows,
    )


def check_rows(y: Tensor, count: int) -> None:
    """Raises ValueError unless an expert function returned one row for each."""
    if y.ndim != 2 or len(y) != count:
        raise ValueError(
            f"expert_layer: expert_fn made shape {tuple(y.shape)} of {count} rows; a "
            "row of [m, d] becomes a row of [m, d']"
        )
