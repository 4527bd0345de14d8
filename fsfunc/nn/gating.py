"""Gates: which experts each token goes to, by what weight, and how even the load is.

A gate turns logits [tokens, experts] into a `Routing` (``routing.py``), which
``expert_layer`` takes. A Routing has indices, never masks of size tokens x experts x
places, as GShard's equations have.

Two ways keep the load even. A load-balance loss, of the tokens of one call (GShard,
Switch) or, by ``balance_axis`` and ``balance_counts``, of the global batch (Qiu et al.,
2025): of few tokens of one kind it forces an even load too, where experts might divide
the kinds among them. Or a bias by which experts are chosen (DeepSeek's): it is no
parameter, and ``balance_bias`` moves it after each step by the loads that it had.
"""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.collectives import psum
from fsfunc.comm.groups import axis_size
from fsfunc.comm.mesh import Axis
from fsfunc.core.losses import Summed
from fsfunc.nn.numerics import sum_dtype
from fsfunc.nn.routing import Routing, check_used_token, count_choices, route
from fsfunc.sharded.leaf import is_sharded
from fsfunc.tree.types import PyTree

_Tree = TypeVar("_Tree")


def top_1_gating(
    logits: Tensor,
    *,
    capacity_factor: float | None = 1.0,
    min_capacity: int = 0,
    used_token: Tensor | None = None,
    bias: Tensor | None = None,
    balance_axis: Axis | None = None,
    balance_counts: Tensor | None = None,
) -> Routing:
    """Routes each token to its best expert, weighted by that expert's probability.

    The load-balance loss is E sum_e f_e P_e, where f is the fraction of tokens whose
    choice is e and P the mean probability of e: 1 where both are uniform.

    Args:
        logits: [..., E], floating; all but the last dim are tokens.
        capacity_factor, min_capacity, used_token, bias, balance_axis, balance_counts:
            as for :func:`top_k_gating`.

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
        bias=bias,
        balance_axis=balance_axis,
        balance_counts=balance_counts,
    )


def top_2_gating(
    logits: Tensor,
    *,
    noise: Tensor | None = None,
    capacity_factor: float | None = 1.0,
    min_capacity: int = 0,
    used_token: Tensor | None = None,
    balance_axis: Axis | None = None,
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
        capacity_factor, min_capacity, used_token, balance_axis: as for
            :func:`top_k_gating`.

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
    first_counts = count_choices(indices[:, 0], experts, used_tokens)
    aux = _load_balance(probs, first_counts, 1, used_tokens, balance_axis)
    return routing._replace(aux_loss=aux / experts)


def top_k_gating(
    logits: Tensor,
    k: int,
    *,
    capacity_factor: float | None = None,
    min_capacity: int = 0,
    normalize: bool = True,
    used_token: Tensor | None = None,
    bias: Tensor | None = None,
    balance_axis: Axis | None = None,
    balance_counts: Tensor | None = None,
) -> Routing:
    """Routes each token to its ``k`` best experts, weighted by softmax(logits).

    The load-balance loss is E sum_e f_e P_e, where f_e counts all choices of e, by
    tokens, and P is the mean probability: k where both are uniform. Of the microbatches
    of ``ff.accumulate`` each has a loss of its own, unless ``balance_counts`` are those
    of all: of a pass before, ``ff.accumulate(ff.value(loss, has_aux=True), n)``, which
    returns ``ff.Summed(routing.counts)``.

    Args:
        logits: [..., E], floating; all but the last dim are tokens.
        k: how many experts a token goes to.
        capacity_factor, min_capacity: see :func:`route`.
        normalize: whether to divide a token's weights by the sum of those that were not
            dropped.
        used_token: bool, of the dims of ``logits`` but the last: False for padding,
            which takes no expert's place and counts in no loss, whatever its logits.
            The capacity is that of all T, so that it is the same on every rank.
        bias: [E], added to the probabilities by which experts are chosen, and to
            nothing else: it has no gradient. :func:`balance_bias` moves it.
        balance_axis: the axes of the data whose ranks' tokens the load-balance loss is
            of. Its mean over these ranks, and the gradient of that, are those of one
            device with all tokens, however many of them each rank has. (To the total of
            an ``ff.Weighted`` add it times the mean of the ranks' weights.)
        balance_counts: [E], how often each expert is chosen in the batch that the
            load-balance loss is of, in place of ``counts``. The loss is then that of
            the batch where calls have equally many tokens.

    Returns:
        A Routing, of T = the product of ``logits``' dims but the last.

    Raises:
        ValueError: more choices than experts, or none; a factor that is not positive;
            ``used_token``, ``bias`` or ``balance_counts`` of another shape; both
            ``balance_axis`` and ``balance_counts``.
        TypeError: logits of integers; ``used_token`` that is not bool.

    Cost: the probabilities [T, E] in fp32, and a sort of T k integers. No
    communication; with ``balance_axis`` a psum of E int64 (a recompute sends it again),
    and nothing backward.

    Source: Shazeer et al., 2017; as Mixtral has it (Jiang et al., 2024, section 2.1).
    The bias: Wang et al., 2024, "Auxiliary-loss-free load balancing", equation 3. The
    loss of the global batch: Qiu et al., 2025, "Demons in the detail", section 3.

    >>> routing = top_k_gating(torch.tensor([[0.0, 0.0, -9.0]]).log_softmax(-1), 2)
    >>> routing.weights.tolist(), routing.counts.tolist()
    ([[0.5, 0.5]], [1, 1, 0])
    """
    flat_logits, used_tokens = _flatten_logits("top_k_gating", logits, k, used_token)
    experts = flat_logits.shape[-1]
    _check_per_expert("bias", bias, experts)
    _check_per_expert("balance_counts", balance_counts, experts)
    if balance_axis is not None and balance_counts is not None:
        raise ValueError(
            "top_k_gating: balance_axis and balance_counts: the counts that are given "
            "are those of the batch already; leave out the axis"
        )
    scores = flat_logits.detach()
    if bias is not None:
        scores = scores.softmax(-1) + bias.detach()
    indices = scores.topk(k).indices
    routing, probs = _route_by_logits(
        flat_logits, used_tokens, indices, capacity_factor, min_capacity, normalize
    )
    aux = _load_balance(
        probs, routing.counts, k, used_tokens, balance_axis, balance_counts
    )
    return routing._replace(aux_loss=aux * experts)


def balance_bias(bias: _Tree, counts: PyTree, rate: float = 1e-3) -> _Tree:
    """Returns the bias by which experts are chosen in the next step.

    b_e + rate sign(mean load - load_e): who had too few tokens gets more. Call it once
    a step, outside the loss, on the counts that ``value_and_grad`` returned: they are
    sums over all microbatches and ranks.

    Args:
        bias: [E] floating, or a tree of such, one for each layer; zeros to begin with.
        counts: ``ff.Summed(routing.counts)`` of each layer, or what is in it, in a tree
            of that form.
        rate: how far a bias moves in a step, in units of a probability.

    Returns:
        ``bias``'s form and dtypes; on every rank the same bits.

    Raises:
        ValueError: another number of experts.
        TreeMismatch: the trees differ in form.

    Cost: a few operations on [E].

    Source: Wang et al., 2024, "Auxiliary-loss-free load balancing", algorithm 1.

    >>> loads = torch.tensor([4, 1, 1])
    >>> balance_bias(torch.zeros(3), loads, rate=0.5)
    tensor([-0.5000,  0.5000,  0.5000])
    """

    def move(b: Tensor, load: Tensor) -> Tensor:
        if load.shape != b.shape:
            raise ValueError(
                f"balance_bias: counts of shape {tuple(load.shape)} for a bias of "
                f"shape {tuple(b.shape)}; both are one number an expert"
            )
        # In integers, where the loads are: E load_e against the sum of all loads.
        direction = (load.sum() - load.shape[-1] * load).sign()
        return b + rate * direction.to(b.dtype)

    is_summed = lambda x: isinstance(x, Summed)  # noqa: E731
    loads = tree.map(lambda x: x.tree if is_summed(x) else x, counts, is_leaf=is_summed)
    return tree.map(move, bias, loads, is_leaf=is_sharded)


def _check_per_expert(name: str, x: Tensor | None, experts: int) -> None:
    """Raises ValueError unless it is one number for each expert."""
    if x is not None and x.shape != (experts,):
        raise ValueError(
            f"top_k_gating: {name} of shape {tuple(x.shape)} for {experts} experts; it "
            "is one number for each"
        )


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


def _load_balance(
    probs: Tensor,
    counts: Tensor,
    choices: int,
    used_tokens: Tensor | None,
    axis: Axis | None,
    batch_counts: Tensor | None = None,
) -> Tensor:
    """Returns sum_e f_e P_e; 0 for a group without tokens.

    f comes from counts, which have no gradient: only P is learnt from.

    Args:
        probs: [T, E].
        counts: [E], how often the tokens chose each expert.
        choices: how many of a token's choices these counts are of.
        used_tokens: [T] bool, or None.
        axis: the axes whose ranks' tokens count; None: this rank's.
        batch_counts: the counts of the whole batch, if they are known.
    """
    if axis is not None:
        batch_counts = psum(counts, axis)
    if batch_counts is None:
        tokens = _token_count(probs, used_tokens)
        return (_token_mean(probs, used_tokens) * counts).sum() / tokens
    # A token makes so many choices, so the counts tell the number of tokens too.
    batch_tokens = batch_counts.sum().clamp(min=1).to(probs.dtype) / choices
    f = batch_counts / batch_tokens
    if axis is None:
        return (f * _token_mean(probs, used_tokens)).sum()
    # Over n ranks, each of which may have another number of tokens: the mean over ranks
    # of n times their share of the sum is the mean over all tokens.
    share = axis_size(axis) / batch_tokens
    return (f * _mask_padding(probs, used_tokens).sum(0)).sum() * share


def _token_mean(x: Tensor, used_tokens: Tensor | None) -> Tensor:
    """Returns the mean over tokens; 0 where there are none."""
    return _mask_padding(x, used_tokens).sum(0) / _token_count(x, used_tokens)


def _mask_padding(x: Tensor, used_tokens: Tensor | None) -> Tensor:
    """Returns ``x`` with zeros at padding."""
    if used_tokens is None:
        return x
    return x.where(used_tokens.view(-1, *[1] * (x.ndim - 1)), 0)


def _token_count(x: Tensor, used_tokens: Tensor | None) -> int | Tensor:
    """Returns the number of tokens, or 1 if there are none, to divide by."""
    return max(len(x), 1) if used_tokens is None else used_tokens.sum().clamp(min=1)
