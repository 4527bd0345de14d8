"""The last layer and its cross-entropy as one, which never holds all logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fsfunc.comm.collectives import all_gather, pcast
from fsfunc.comm.groups import axis_size
from fsfunc.core.frames import composable
from fsfunc.nn.cross_entropy import is_transformed
from fsfunc.nn.logit_tiles import MadeForward, TiledSums, Tiles
from fsfunc.nn.numerics import autocast, wide
from fsfunc.nn.tensor_parallel import part_of, token_dim
from fsfunc.nn.token_losses import Targets, TokenLoss
from fsfunc.sharded.leaf import Sharded

_NAME = "linear_cross_entropy"
_TILE = 2**25  # logits in a tile: 128 MiB in fp32


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor | Sharded,
    targets: Tensor,
    *,
    axis: str | None = None,
    sequence_dim: int | None = None,
    tile: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    scale: float | None = None,
    margin: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """The cross-entropy of ``targets`` under the logits ``x @ weight.T``, never held.

    What ``F.cross_entropy(F.linear(x, weight), targets)`` gives (and with a z-loss
    ``z_loss * logsumexp^2`` more for every token), in a fraction of its memory. With
    ``scale`` the logits are ``scale * (cos(x, w) - margin)`` for the target's class and
    ``scale * cos(x, w)`` for the others (large margin cosine loss).

    It holds under autograd and ``torch.func``, to any order, ``jvp`` and ``vmap``
    included. Only autograd's own ``create_graph=True``, of a mean or a sum, is refused
    where its result is differentiated: ``torch.func`` does it.

    Args:
        x: [..., D] floating, one value over the axis; with ``sequence_dim`` split
            along it.
        weight: [V / n, D] of the dtype of ``x``, each rank its contiguous part of the
            vocabulary; or a leaf that is split along dim 0, which names the axis too.
        targets: [...] integers from 0 to V - 1, the same on all ranks of the axis.
        axis: the mesh axis over which the vocabulary is split; None: it is whole.
        sequence_dim: the dim of ``x`` that is split over the axis.
        tile: how many tokens' logits are made at a time; by default as many as make
            2^25 of them.
        ignore_index: tokens with this target do not count.
        label_smoothing: within [0, 1], the share of the target that all classes share.
        z_loss: the weight of the squared logsumexp.
        scale, margin: those of the large margin cosine loss.
        reduction: "mean" over tokens that count (NaN where none does), "sum", "none".

    Returns:
        A scalar, or like ``targets``: in fp32, or wider as ``x`` is; one value over the
        axis. Products are made in the dtype of ``x``, all else in that of the result.

    Raises:
        IndexError: a target outside the vocabulary, on every rank (of tensors that are
            not on the CPU: torch's own assertion on the device).
        ValueError: shapes that do not match; a vocabulary that the axis does not
            divide; a leaf that is laid out otherwise; a margin without a scale.
        TypeError: targets that are not integers, two dtypes.
        RuntimeError: where the gradient of a mean or a sum is differentiated again by
            autograd alone.

    Cost: N tokens, b bytes a number (4, or 8 in fp64): forward, a tile at a time,
    all-reduces of b N (the maximum) and 2 b N (3 b N with smoothing) in all; backward
    one of ``x`` (with ``sequence_dim`` one all-gather of it, and one reduce-scatter).
    Kept: the two gradients, or ``x`` and the weight. Beside them a tile (two in another
    dtype), the weight's gradient in fp32 while it is summed, and with ``scale`` the
    normalised weight. Only a second derivative, or a ``vmap`` of the first, has all
    logits at once.

    Source: Shoeybi et al., 2019, section 3 (the split); Hsu et al., 2024, section 3.2
    (gradients in the forward pass); Wang et al., 2018, equation 4 (the margin).

    >>> x, w = torch.zeros(3, 5), torch.zeros(4, 5)
    >>> linear_cross_entropy(x, w, torch.tensor([0, 3, 1]), tile=2).exp().item()
    4.0
    """
    part, axis = part_of(_NAME, weight, (0,), axis=axis)
    shift = 0.0
    if scale is None:
        x, part = autocast(x, part)
    _check(x, part, tile, scale, margin)
    loss = TokenLoss.checked(
        _NAME, part.shape[:1], axis, label_smoothing, z_loss, reduction
    )
    shape = list(x.shape[:-1])
    if axis is not None and sequence_dim is not None:
        shape[token_dim(_NAME, x, sequence_dim)] *= axis_size(axis)
    own = Targets.checked(_NAME, targets, shape, loss, ignore_index)
    own = Targets(own.at.flatten(), own.mine.flatten(), own.kept.flatten())
    if axis is not None:
        if sequence_dim is None:
            x = pcast(x, axis, to="V")
        else:
            x = all_gather(x, axis, dim=sequence_dim)
    x = x.reshape(-1, x.shape[-1])
    if scale is not None:
        dtype = torch.promote_types(wide(x), wide(part))
        x, part = (F.normalize(y.to(dtype), dim=-1) for y in (x, part))
        x, shift = scale * x, -scale * margin
    tiles = Tiles(tile or max(16, _TILE // loss.own), shift, loss)
    if reduction != "none" and _is_made_forward(x, part):
        anchor = x[:0].sum() + part[:0].sum()
        return MadeForward.apply(x, part, own.at, own.mine, own.kept, anchor, tiles)[0]
    if is_transformed():
        sums = tiles.sums(x, part, own)
    else:
        sums = TiledSums.apply(x, part, own.at, own.mine, tiles)
    # By tiles too: ranks exchange the same whoever differentiates.
    each = [loss.of(loss.joined([y[i] for y in sums])) for i in tiles.cuts(x)]
    found = loss.reduced(torch.cat(each), own.kept)
    return found.reshape(targets.shape) if reduction == "none" else found


def _check(
    x: Tensor, part: Tensor, tile: int | None, scale: float | None, margin: float
) -> None:
    floating = x.is_floating_point() and part.is_floating_point()
    if not floating or scale is None and x.dtype != part.dtype:
        raise TypeError(
            f"{_NAME} needs x and a weight of one floating dtype, got {x.dtype} and "
            f"{part.dtype}: cast one, x.to(weight.dtype)"
        )
    if part.ndim != 2 or x.ndim < 1 or x.shape[-1] != part.shape[1]:
        raise ValueError(
            f"{_NAME}: x of shape {tuple(x.shape)} and a weight of shape "
            f"{tuple(part.shape)}: they are [..., D] and [V, D]"
        )
    if tile is not None and tile < 1:
        raise ValueError(f"{_NAME}: tile={tile!r} tokens at a time: give 1 or more")
    if scale is None and margin:
        raise ValueError(
            f"{_NAME}: margin={margin!r} is one between cosines: give scale= too"
        )


def _is_made_forward(x: Tensor, part: Tensor) -> bool:
    """True if autograd alone will differentiate a mean or a sum, and once."""
    if not torch.is_grad_enabled() or not (x.requires_grad or part.requires_grad):
        return False
    if composable():
        return False
    # A loss's scale reaches what is made backward; the rest would be lost in fp16.
    return x.dtype != torch.float16
