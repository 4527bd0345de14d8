"""Gates: which experts each token goes to, by what weight, and how even the load is.

A gate turns logits [tokens, experts] into a `Routing` (``routing.py``), which
``expert_layer`` takes. A Routing has indices, never masks of size tokens x experts x
places, as GShard's equations have.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fsfunc.nn.numerics import sum_dtype
from fsfunc.nn.routing import Routing, check_used_token, count_choices, route


def top_1_gating(
    logits: Tensor,
    *,
    capacity_factor: float | None = 1.0,
    min_capacity: int = 0,
    used_token: Tensor | None = None,
) -> Routing:
    """Routes each token to its best expert, weighted by that expert's probability.

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
    """Routes each token to two experts, weighted by their probabilities' shares.

    The second is the best of the others by ``logits + noise``: with Gumbel noise it is
    drawn by its probability. The weights are p_i over the sum of the p of the choices
    that were not dropped.
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
    flat_logits, used_tokens = _flatten_logits("top_2_gating", logits, 2, used_token)
    scores = flat_logits.detach()
    first_choice = scores.argmax(-1, keepdim=True)
    if noise is not None:
        if noise.shape != logits.shape:
            raise ValueError(
                f"top_2_gating: noise of shape {tuple(noise.shape)} for logits of "
                f"shape {tuple(logits.shape)}; it is added to them"
            )
        scores = scores + noise.detach().reshape(flat_logits.shape)
    # The first is never the second too, whatever the others' logits: not with -inf.
    indices = scores.scatter(-1, first_choice, math.inf).topk(2).indices
    routing, probs = _route_by_logits(
        flat_logits, used_tokens, indices, capacity_factor, min_capacity, True
    )
    experts = flat_logits.shape[-1]
    aux = (
        _load_balance(
            probs, count_choices(indices[:, 0], experts, used_tokens), used_tokens
        )
        / experts
    )
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
    """Routes each token to its ``k`` best experts, weighted by softmax(logits).

    The load-balance loss is E sum_e f_e P_e, where f_e counts all choices of e, by
    tokens, and P is the mean probability: k where both are uniform.

    Args:
        logits: [..., E], floating; all but the last dim are tokens.
        k: how many experts a token goes to.
        capacity_factor, min_capacity: see :func:`route`.
        normalize: whether to divide a token's weights by the sum of those that were not
            dropped.
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
    flat_logits, used_tokens = _flatten_logits("top_k_gating", logits, k, used_token)
    indices = flat_logits.detach().topk(k).indices
    routing, probs = _route_by_logits(
        flat_logits, used_tokens, indices, capacity_factor, min_capacity, normalize
    )
    aux = _load_balance(probs, routing.counts, used_tokens) * flat_logits.shape[-1]
    return routing._replace(aux_loss=aux)


def _flatten_logits(
    gate: str, logits: Tensor, k: int, used_tokens: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Returns the logits as [T, E], in fp32 at least, and ``used_token`` as [T]."""
    if not logits.ndim or not 1 <= k <= logits.shape[-1]:
        raise ValueError(
            f"{gate}: {k} choices by logits of shape {tuple(logits.shape)}: the last "
            "dim is the experts, and a token goes to one at least and each once"
        )
    check_used_token(gate, used_tokens, logits.shape[:-1])
    flat_logits = logits.reshape(-1, logits.shape[-1]).to(sum_dtype(logits))
    if used_tokens is None:
        return flat_logits, None
    used_tokens = used_tokens.reshape(-1)
    # Logits of padding may be NaN, which would come through a product with 0.
    return flat_logits.where(used_tokens[:, None], 0), used_tokens


def _route_by_logits(
    logits: Tensor,
    used_tokens: Tensor | None,
    indices: Tensor,
    capacity_factor: float | None,
    min_capacity: int,
    normalize: bool,
) -> tuple[Routing, Tensor]:
    """Returns the Routing of chosen experts without its load-balance loss, and the
    probabilities [T, E]."""
    probs = logits.softmax(-1)
    routing = route(
        indices,
        probs.gather(-1, indices),
        logits.shape[-1],
        capacity_factor=capacity_factor,
        min_capacity=min_capacity,
        used_token=used_tokens,
    )
    weights = routing.weights
    if normalize:
        # A token whose choices are all dropped has weights of sum 0: they stay 0.
        eps = torch.finfo(weights.dtype).eps
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=eps)
    z_loss = _token_mean(logits.logsumexp(-1).square(), used_tokens)
    return routing._replace(weights=weights, z_loss=z_loss), probs


def _load_balance(probs: Tensor, counts: Tensor, used_tokens: Tensor | None) -> Tensor:
    """Returns sum_e f_e P_e; 0 for a group without tokens.

    f comes from ``counts``, which has no gradient: only P is learnt from.
    """
    return (_token_mean(probs, used_tokens) * counts).sum() / _token_count(
        probs, used_tokens
    )


def _token_mean(x: Tensor, used_tokens: Tensor | None) -> Tensor:
    """Returns the mean over tokens; 0 where there are none."""
    masked = (
        x
        if used_tokens is None
        else x.where(used_tokens.view(-1, *[1] * (x.ndim - 1)), 0)
    )
    return masked.sum(0) / _token_count(x, used_tokens)


def _token_count(x: Tensor, used_tokens: Tensor | None) -> int | Tensor:
    """Returns the number of tokens, or 1 if there are none, to divide by."""
    return max(len(x), 1) if used_tokens is None else used_tokens.sum().clamp(min=1)
