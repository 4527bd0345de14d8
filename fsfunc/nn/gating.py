"""Gates: which experts a token goes to, with what weight, and how even the load is.

What a gate says is a `Routing`: indices, never masks of tokens by experts by places.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fsfunc.nn.numerics import wide
from fsfunc.nn.routing import Routing, check_used, counts_of, route


def top_1_gating(
    logits: Tensor,
    *,
    capacity_factor: float | None = 1.0,
    min_capacity: int = 0,
    used_token: Tensor | None = None,
) -> Routing:
    """Each token to its best expert, weighted by that expert's probability.

    The load-balance loss is E sum_e f_e P_e, where f is the fraction of tokens whose
    choice is e and P the mean probability of e: 1 where both are uniform.

    Args:
        logits: [..., E], floating; all but the last dim are tokens.
        capacity_factor, min_capacity, used_token: as for :func:`top_k_gating`.

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
        used_token=used_token,
    )


def top_2_gating(
    logits: Tensor,
    *,
    noise: Tensor | None = None,
    capacity_factor: float | None = 1.0,
    min_capacity: int = 0,
    used_token: Tensor | None = None,
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
        capacity_factor, min_capacity, used_token: as for :func:`top_k_gating`.

    Raises:
        ValueError, TypeError: as there; noise of another shape.

    Cost: that of :func:`top_k_gating`.

    Source: Lepikhin et al. (GShard), 2020, algorithm 1; FairScale's Top2Gate, whose
    capacity 2T/E is that of a factor of 1.

    >>> routing = top_2_gating(torch.tensor([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]]))
    >>> routing.indices.tolist(), routing.positions.tolist(), routing.capacity
    ([[2, 1], [0, 1]], [[0, 0], [0, 1]], 2)
    """
    flat, used = _checked("top_2_gating", logits, 2, used_token)
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
    routing, probs = _gated(flat, used, indices, capacity_factor, min_capacity, True)
    experts = flat.shape[-1]
    aux = _balance(probs, counts_of(indices[:, 0], experts, used), used) / experts
    return routing._replace(aux_loss=aux)


def top_k_gating(
    logits: Tensor,
    k: int,
    *,
    capacity_factor: float | None = None,
    min_capacity: int = 0,
    normalize: bool = True,
    used_token: Tensor | None = None,
) -> Routing:
    """Each token to its ``k`` best experts, weighted by softmax(logits).

    The load-balance loss is E sum_e f_e P_e, where f_e counts all choices of e, by
    tokens, and P is the mean probability: k where both are uniform.

    Args:
        logits: [..., E], floating; all but the last dim are tokens.
        k: how many experts a token goes to.
        capacity_factor, min_capacity: see :func:`route`.
        normalize: divide a token's weights by the sum of those that were kept.
        used_token: bool, of the dims of ``logits`` but the last: False for padding,
            which takes no expert's place and counts in no loss, whatever its logits.
            The capacity is that of all T, so that it is the same on every rank.

    Returns:
        A Routing, of T = the product of ``logits``' dims but the last.

    Raises:
        ValueError: more choices than experts, or none; a factor that is not positive;
            ``used_token`` of another shape.
        TypeError: logits of integers; ``used_token`` that is not bool.

    Cost: no communication; the probabilities [T, E] in fp32, and a sort of T k
    integers.

    Source: Shazeer et al., 2017; as Mixtral has it (Jiang et al., 2024, section 2.1).

    >>> routing = top_k_gating(torch.tensor([[0.0, 0.0, -9.0]]).log_softmax(-1), 2)
    >>> routing.weights.tolist(), routing.counts.tolist()
    ([[0.5, 0.5]], [1, 1, 0])
    """
    flat, used = _checked("top_k_gating", logits, k, used_token)
    indices = flat.detach().topk(k).indices
    routing, probs = _gated(
        flat, used, indices, capacity_factor, min_capacity, normalize
    )
    aux = _balance(probs, routing.counts, used) * flat.shape[-1]
    return routing._replace(aux_loss=aux)


def _checked(
    what: str, logits: Tensor, k: int, used: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The logits as [T, E], in fp32 at least, and which are of tokens [T]."""
    if not logits.ndim or not 1 <= k <= logits.shape[-1]:
        raise ValueError(
            f"{what}: {k} choices by logits of shape {tuple(logits.shape)}: the last "
            "dim is the experts, and a token goes to one at least and each once"
        )
    check_used(what, used, logits.shape[:-1])
    flat = logits.reshape(-1, logits.shape[-1]).to(wide(logits))
    if used is None:
        return flat, None
    used = used.reshape(-1)
    return flat.where(used[:, None], 0), used  # of padding they may be no numbers


def _gated(
    logits: Tensor,
    used: Tensor | None,
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
        used_token=used,
    )
    weights = routing.weights
    if normalize:
        eps = torch.finfo(weights.dtype).eps  # of a token that is dropped altogether
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=eps)
    z_loss = _mean(logits.logsumexp(-1).square(), used)
    return routing._replace(weights=weights, z_loss=z_loss), probs


def _balance(probs: Tensor, counts: Tensor, used: Tensor | None) -> Tensor:
    """sum_e f_e P_e; a group without tokens has 0."""
    return (_mean(probs, used) * counts).sum() / _number(probs, used)


def _mean(x: Tensor, used: Tensor | None) -> Tensor:
    """The mean over tokens; of none it is 0."""
    mine = x if used is None else x.where(used.view(-1, *[1] * (x.ndim - 1)), 0)
    return mine.sum(0) / _number(x, used)


def _number(x: Tensor, used: Tensor | None) -> Any:
    """The number of tokens; 1 of none."""
    return max(len(x), 1) if used is None else used.sum().clamp(min=1)
