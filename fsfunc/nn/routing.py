"""Routing of tokens: experts, places in their queues, and dropped choices.

In an expert's queue all tokens' first choices stand before all second ones, and tokens
in their order; whoever stands behind its capacity is dropped, with a weight of 0.

A group is the tokens of one call: capacity, queues and losses are of a group. Under
expert parallelism each rank's tokens are one (GShard, section 3.2), so one device gives
the same numbers where it gates the same groups, one by one.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Routing", "check_used", "counts_of", "route"]


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
