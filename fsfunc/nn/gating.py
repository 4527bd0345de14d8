"""Gates: which experts a token goes to, with what weight, and who finds no room.

What a gate says is a `Routing`: indices, never masks of tokens by experts by places.
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

__all__ = ["Routing", "route", "top_1_gating", "top_2_gating", "top_k_gating"]


class Routing(NamedTuple):
    """Where each of T tokens goes, by k choices among E experts.

    Args:
        indices: [T, k] int64, the experts that a token chose, the best first.
        weights: [T, k], fp32 (fp64 of fp64 logits): the share of each in the result; 0
            where it was dropped.
        positions: [T, k] int64, the choice's place in its expert's queue.
        kept: [T, k] bool, whether there is room for it.
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
        """[] int64, the choices without room; ``(~kept).all(1)``: tokens with none."""
        return (~self.kept).sum()


def top_1_gating(
    logits: Tensor, *, capacity_factor: float | None = 1.0, min_capacity: int = 0
) -> Routing:
    """Each token to its best expert, weighted by that expert's probability.

    The load-balance loss is E sum_e f_e P_e, where f is the fraction of tokens whose
    choice is e and P the mean probability of e: 1 where both are uniform.

    Args:
        logits: [..., E], floating; all but the last dim are tokens.
        capacity_factor, min_capacity: see :func:`route`.

    Raises, Cost: as :func:`top_k_gating`.

    Source: Fedus et al. (Switch), 2021, section 2.2 and equations 4 to 6.

    >>> routing = top_1_gating(torch.tensor([[1.0, 0.0], [2.0, 0.0]]))
    >>> routing.indices.tolist(), routing.kept.tolist(), routing.dropped.item()
    ([[0], [0]], [[True], [False]], 1)
    """
    return top_k_gating(
        logits,
        1,
        capacity_factor=capacity_factor,
        min_capacity=min_capacity,
        normalize=False,
    )


def top_2_gating(
    logits: Tensor,
    *,
    noise: Tensor | None = None,
    capacity_factor: float | None = 1.0,
    min_capacity: int = 0,
) -> Routing:
    """Each token to two experts, weighted by their probabilities' shares.

    The second is the best of the others by ``logits + noise``: with Gumbel noise it is
    drawn by its probability. The weights are p_i over the sum of those that were kept.
    The load-balance loss is (1/E) sum_e f_e P_e, as GShard and FairScale have it, where
    f is the fraction of tokens whose *first* choice is e: 1/E^2 where both are uniform.

    Args:
        logits: [..., E], floating; all but the last dim are tokens.
        noise: of the shape of ``logits``, such as Gumbel noise:
            ``-torch.empty_like(logits).exponential_().log()``.
        capacity_factor, min_capacity: see :func:`route`.

    Raises:
        ValueError: fewer than two experts; noise of another shape.

    Cost: that of :func:`top_k_gating`.

    Source: Lepikhin et al. (GShard), 2020, algorithm 1; FairScale's Top2Gate, whose
    capacity 2T/E is that of a factor of 1.

    >>> routing = top_2_gating(torch.tensor([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]]))
    >>> routing.indices.tolist(), routing.positions.tolist(), routing.capacity
    ([[2, 1], [0, 1]], [[0, 0], [0, 1]], 2)
    """
    flat = _checked("top_2_gating", logits, 2)
    scores = flat.detach()
    first = scores.argmax(-1, keepdim=True)
    if noise is not None:
        if noise.shape != logits.shape:
            raise ValueError(
                f"top_2_gating: noise of shape {tuple(noise.shape)} for logits of "
                f"shape {tuple(logits.shape)}; it is added to them"
            )
        scores = scores + noise.detach().reshape(flat.shape)
    # The first is never the second too, whatever the others' logits: not with -inf.
    indices = scores.scatter(-1, first, math.inf).topk(2).indices
    routing, probs = _gated(flat, indices, capacity_factor, min_capacity, True)
    experts = flat.shape[-1]
    aux = _balance(probs, _counts(indices[:, 0], experts)) / experts
    return routing._replace(aux_loss=aux)


def top_k_gating(
    logits: Tensor,
    k: int,
    *,
    capacity_factor: float | None = None,
    min_capacity: int = 0,
    normalize: bool = True,
) -> Routing:
    """Each token to its ``k`` best experts, weighted by softmax(logits).

    The load-balance loss is E sum_e f_e P_e, where f_e counts all choices of e, by
    tokens, and P is the mean probability: k where both are uniform.

    Args:
        logits: [..., E], floating; all but the last dim are tokens.
        k: how many experts a token goes to.
        capacity_factor, min_capacity: see :func:`route`.
        normalize: divide a token's weights by the sum of those that were kept.

    Returns:
        A Routing, of T = the product of ``logits``' dims but the last.

    Raises:
        ValueError: more choices than experts, or none; a factor that is not positive.
        TypeError: logits of integers.

    Cost: no communication; the probabilities [T, E] in fp32, and a sort of T k
    integers.

    Source: Shazeer et al., 2017; as Mixtral has it (Jiang et al., 2024, section 2.1).

    >>> routing = top_k_gating(torch.tensor([[0.0, 0.0, -9.0]]).log_softmax(-1), 2)
    >>> routing.weights.tolist(), routing.counts.tolist()
    ([[0.5, 0.5]], [1, 1, 0])
    """
    flat = _checked("top_k_gating", logits, k)
    indices = flat.detach().topk(k).indices
    routing, probs = _gated(flat, indices, capacity_factor, min_capacity, normalize)
    aux = _balance(probs, routing.counts) * flat.shape[-1]
    return routing._replace(aux_loss=aux)


def route(
    indices: Tensor,
    weights: Tensor,
    experts: int,
    *,
    capacity_factor: float | None = None,
    min_capacity: int = 0,
) -> Routing:
    """The Routing of choices that are already made: by hash, by turns, by any gate.

    Args:
        indices: [T, k] integers below ``experts``.
        weights: [T, k] floating.
        experts: E, over all ranks.
        capacity_factor: an expert has ceil(capacity_factor k T / E) places, so that 1
            is just room for all where the load is even; None: nobody is dropped.
        min_capacity: the places that it has at least.

    Returns:
        A Routing without losses.

    Raises:
        ValueError: indices and weights of unlike shapes; a factor that is not positive.
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
    capacity = _capacity(indices.numel(), experts, capacity_factor, min_capacity)
    indices = indices.to(torch.int64)
    positions, counts = _queues(indices, experts)
    if capacity is None:
        kept = torch.ones_like(positions, dtype=torch.bool)
    else:
        kept = positions < capacity
        weights = torch.where(kept, weights, 0)
    return Routing(indices, weights, positions, kept, counts, capacity)


def _checked(what: str, logits: Tensor, k: int) -> Tensor:
    """The logits as [T, E], in fp32 at least."""
    if not logits.is_floating_point():
        raise TypeError(f"{what} needs floating logits, got {logits.dtype}")
    if not logits.ndim or not 1 <= k <= logits.shape[-1]:
        raise ValueError(
            f"{what}: {k} choices by logits of shape {tuple(logits.shape)}: the last "
            "dim is the experts, and a token goes to one at least and each once"
        )
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.reshape(-1, logits.shape[-1]).to(wide)


def _gated(
    logits: Tensor,
    indices: Tensor,
    capacity_factor: float | None,
    min_capacity: int,
    normalize: bool,
) -> tuple[Routing, Tensor]:
    """The Routing of chosen experts, but for its load-balance loss; probabilities."""
    probs = logits.softmax(-1)
    routing = route(
        indices,
        probs.gather(-1, indices),
        logits.shape[-1],
        capacity_factor=capacity_factor,
        min_capacity=min_capacity,
    )
    weights = routing.weights
    if normalize:
        eps = torch.finfo(weights.dtype).eps  # of a token that is dropped altogether
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=eps)
    z_loss = logits.logsumexp(-1).square().sum() / max(len(logits), 1)
    return routing._replace(weights=weights, z_loss=z_loss), probs


def _balance(probs: Tensor, counts: Tensor) -> Tensor:
    """sum_e f_e P_e; a group without tokens has 0."""
    tokens = max(len(probs), 1)
    return (probs.sum(0) / tokens * (counts.to(probs.dtype) / tokens)).sum()


def _counts(chosen: Tensor, experts: int) -> Tensor:
    """How often each expert is in ``chosen`` [N]."""
    zeros = torch.zeros(experts, dtype=torch.int64, device=chosen.device)
    return zeros.scatter_add(0, chosen, torch.ones_like(chosen))


def _queues(indices: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Each choice's place in its expert's queue, and how long the queues are."""
    flat = indices.T.reshape(-1)  # first choices first
    counts = _counts(flat, experts)
    starts = counts.cumsum(0) - counts
    order = flat.argsort(stable=True)
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
