"""The last layer and its cross-entropy as one, which never has all logits in memory.

The logits of a tile (some tokens) are computed, summed and freed. There are two ways to
the gradients:

- ``LossAndGradients``, where the loss is a mean or a sum and autograd alone
  differentiates: the forward pass computes the gradients too, tile by tile, in three
  products, as many as without tiles. The gradients of x and of the weight, [N, D] and
  [V, D], are saved, and the backward pass multiplies them by the one cotangent. It is
  not used for a loss for each token, which has many cotangents; nor for second
  derivatives, which would take the saved gradients for constants; nor in fp16, where
  the scale of the loss would come too late.
- ``TiledSums`` otherwise: only x and the weight are saved, and the backward pass
  computes each tile's logits again: four products, and derivatives of any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from fsfunc.comm.collective_ops import claim_rank_local
from fsfunc.comm.collectives import all_gather
from fsfunc.comm.groups import axis_size
from fsfunc.comm.mesh import Axis
from fsfunc.comm.typed_maps import pcast
from fsfunc.core.frames import composable
from fsfunc.nn.cross_entropy import (
    Tiles,
    exponentiate,
    logit_gradient,
    under_vmap_or_forward_ad,
)
from fsfunc.nn.numerics import cast_by_autocast, sum_dtype, without_autocast
from fsfunc.nn.tensor_parallel import local_part, token_dim
from fsfunc.nn.token_losses import Targets, TokenLoss
from fsfunc.sharded.leaf import Sharded

_CLASSES_PER_CAST = (
    2**13
)  # rows of the weight's gradient that are cast and added at once


class _Gradients:
    """The gradients of x and the weight, to which each tile adds its share."""

    dx: Tensor | None
    dw: Tensor | None

    def __init__(self, x: Tensor, w: Tensor, needs: Sequence[bool]):
        self.x, self.w, self.dx, self.dw = x, w, None, None
        if needs[0]:
            self.dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if needs[1]:
            self.dw = torch.zeros(w.shape, dtype=sum_dtype(w), device=w.device)

    def add(self, tokens: slice, p: Tensor) -> None:
        """Adds the gradients through ``p``, the derivative by the tokens' logits."""
        x, p = self.x[tokens], p.to(self.x.dtype)
        if self.dx is not None:
            torch.mm(p, self.w, out=self.dx[tokens])
        if self.dw is None:
            return
        if p.dtype == self.dw.dtype:
            self.dw.addmm_(p.T, x)
            return
        # The sum is in fp32, but the product is in the dtype of x: it is added some
        # classes at a time, so that it is never there as a whole beside the sum.
        for p_columns, dw_rows in zip(
            p.split(_CLASSES_PER_CAST, 1), self.dw.split(_CLASSES_PER_CAST), strict=True
        ):
            dw_rows.add_(p_columns.T @ x)

    def cast_to_inputs(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns the gradients in the dtypes of x and the weight."""
        return self.dx, None if self.dw is None else self.dw.to(self.w.dtype)


class LossAndGradients(torch.autograd.Function):
    """The loss with the gradients of x and the weight, which the backward scales.

    ``anchor`` is an empty sum that depends on x and the weight: see
    ``_RefuseDerivative``.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        x: Tensor,
        w: Tensor,
        index: Tensor,
        is_local: Tensor,
        counted: Tensor,
        anchor: Tensor,
        tiles: Tiles,
    ) -> tuple[Tensor | None, ...]:
        targets, loss, losses = Targets(index, is_local, counted), tiles.loss, []
        gradients = _Gradients(x, w, (x.requires_grad, w.requires_grad))
        weights = loss.token_weights(counted, sum_dtype(x))
        with without_autocast(x):
            for tokens in tiles.slices(x):
                z = tiles.logits(x[tokens], w, targets[tokens])
                sums, largest = exponentiate(z, targets[tokens], loss.needs_total)
                sums = loss.join_over_ranks(sums)
                losses.append(loss.loss_of(sums))
                by_lse, *by_others = loss.cotangents(sums[0], weights[tokens])
                # z is exp(logits - largest), the softmax exp(logits - lse).
                by_lse = by_lse * (largest - sums[0]).exp()
                gradients.add(
                    tokens, logit_gradient(z, targets[tokens], (by_lse, *by_others))
                )
                del z  # else it would be in memory beside the next tile's
        return loss.reduce(torch.cat(losses), counted), *gradients.cast_to_inputs()

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]
    ) -> None:
        _, dx, dw = output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(y for y in (dx, dw) if y is not None))
        ctx.save_for_backward(dx, dw, inputs[5])

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dx, dw, anchor = ctx.saved_tensors
        if g is None:
            return (None,) * 7
        dx, dw = (None if y is None else y * g.to(y.dtype) for y in (dx, dw))
        # Under ``create_graph`` the saved gradients would count as constants, and
        # second derivatives would silently lack a term.
        if torch.is_grad_enabled():
            dx, dw = (
                None if y is None else _RefuseDerivative.apply(y, anchor)
                for y in (dx, dw)
            )
        return dx, dw, None, None, None, None, None


class _RefuseDerivative(torch.autograd.Function):
    """The identity on a gradient computed forward; to differentiate it raises.

    The gradient itself has no graph. ``anchor`` ties it to x and the weight, so that
    autograd gets here when it differentiates by them.
    """

    @staticmethod
    def forward(y: Tensor, anchor: Tensor) -> Tensor:  # type: ignore[override]
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> NoReturn:  # type: ignore[override]
        raise RuntimeError(
            "linear_cross_entropy: the gradient of a mean or a sum is made in the "
            "forward pass, and autograd cannot differentiate it again: take both "
            'derivatives by torch.func (grad, vjp, jvp), or pass reduction="none" and '
            "reduce the losses yourself"
        )


class TiledSums(torch.autograd.Function):
    """``Tiles.sums`` in the memory of one tile; it saves its inputs and ``lse``."""

    @staticmethod
    def forward(  # type: ignore[override]
        x: Tensor, w: Tensor, index: Tensor, is_local: Tensor, tiles: Tiles
    ) -> tuple[Tensor, ...]:
        targets, tile_sums = Targets(index, is_local, is_local), []
        with without_autocast(x):
            for tokens in tiles.slices(x):
                z = tiles.logits(x[tokens], w, targets[tokens])
                tile_sums.append(
                    exponentiate(z, targets[tokens], tiles.loss.needs_total)[0]
                )
                del z
        return tuple(torch.cat(parts) for parts in zip(*tile_sums, strict=True))

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]
    ) -> None:
        x, w, index, is_local, ctx.tiles = inputs
        ctx.save_for_backward(x, w, index, is_local, output[0])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        x, w, index, is_local, lse = ctx.saved_tensors
        if under_vmap_or_forward_ad():
            gradients = ctx.tiles.pull_back(
                x, w, Targets(index, is_local, is_local), cotangents
            )
        elif torch.is_grad_enabled():
            gradients = _TiledPullback.apply(
                x, w, index, is_local, lse, ctx.tiles, *cotangents
            )
        else:
            needs = ctx.needs_input_grad[:2]
            targets = Targets(index, is_local, is_local)
            gradients = _pull_back_by_tiles(
                x, w, targets, lse, cotangents, ctx.tiles, needs
            )
        return *gradients, None, None, None


class _TiledPullback(torch.autograd.Function):
    """The gradients of x and the weight by the sums, which can be differentiated."""

    @staticmethod
    def forward(  # type: ignore[override]
        x: Tensor,
        w: Tensor,
        index: Tensor,
        is_local: Tensor,
        lse: Tensor,
        tiles: Tiles,
        *cotangents: Tensor,
    ) -> tuple[Tensor | None, Tensor | None]:
        targets = Targets(index, is_local, is_local)
        return _pull_back_by_tiles(x, w, targets, lse, cotangents, tiles, (True, True))

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]
    ) -> None:
        x, w, index, is_local, _, ctx.tiles, *cotangents = inputs
        ctx.save_for_backward(x, w, index, is_local, *cotangents)

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple[Tensor | None, ...]:
        x, w, index, is_local, *cotangents = ctx.saved_tensors
        targets = Targets(index, is_local, is_local)

        def pull_back(x: Tensor, w: Tensor, *cotangents: Tensor) -> tuple[Tensor, ...]:
            return ctx.tiles.pull_back(x, w, targets, cotangents)

        dx, dw, *by_cotangents = torch.func.vjp(pull_back, x, w, *cotangents)[1](g)
        return dx, dw, None, None, None, None, *by_cotangents


def _pull_back_by_tiles(
    x: Tensor,
    w: Tensor,
    targets: Targets,
    lse: Tensor,
    cotangents: Sequence[Tensor],
    tiles: Tiles,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Computes ``Tiles.pull_back`` in the memory of one tile."""
    gradients = _Gradients(x, w, needs)
    lse = lse.clamp(min=torch.finfo(lse.dtype).min)  # -inf - -inf would be NaN
    with without_autocast(x):
        for tokens in tiles.slices(x):
            z = (
                tiles.logits(x[tokens], w, targets[tokens])
                .sub_(lse[tokens].unsqueeze(-1))
                .exp_()
            )
            gradients.add(
                tokens,
                logit_gradient(z, targets[tokens], [y[tokens] for y in cotangents]),
            )
            del z
    return gradients.cast_to_inputs()


_LAYER = "linear_cross_entropy"
_LOGITS_PER_TILE = 2**25  # logits in a tile: 128 MiB in fp32


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor | Sharded,
    targets: Tensor,
    *,
    axis: Axis | None = None,
    sequence_dim: int | None = None,
    tile: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    scale: float | None = None,
    margin: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Computes the cross-entropy of ``targets`` under logits ``x @ weight.T`` by tiles.

    What ``F.cross_entropy(F.linear(x, weight), targets)`` gives (and with a z-loss
    ``z_loss * logsumexp^2`` more for every token), in a fraction of its memory. With
    ``scale`` the logits are ``scale * (cos(x, w) - margin)`` for the target's class and
    ``scale * cos(x, w)`` for the others (large margin cosine loss).

    It holds under autograd and ``torch.func``, to any order, ``jvp`` and ``vmap``
    included. Only autograd's own ``create_graph=True``, of a mean or a sum, is refused
    where its result is differentiated; use ``torch.func`` for that.

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
        ValueError: targets of another shape; a vocabulary that the axis does not
            divide; a leaf that is laid out otherwise; a margin without a scale; a tile
            of no tokens.
        TypeError: targets that are not integers.
        RuntimeError: where the gradient of a mean or a sum is differentiated again by
            autograd alone.

    Cost: N tokens, b bytes a number (4, or 8 in fp64): forward, a tile at a time,
    all-reduces of b N (the maximum) and 2 b N (3 b N with smoothing) in all; backward
    one of ``x`` (with ``sequence_dim`` one all-gather of it, and one reduce-scatter).
    Saved: the two gradients, or ``x`` and the weight. Beside them a tile (two in
    another dtype), the weight's gradient in fp32 while it is summed, and with ``scale``
    the normalised weight. Only a second derivative, or a ``vmap`` of the first, has all
    logits at once.

    Source: Shoeybi et al., 2019, section 3 (the split); Hsu et al., 2024, section 3.2
    (gradients in the forward pass); Wang et al., 2018, equation 4 (the margin).

    >>> x, w = torch.zeros(3, 5), torch.zeros(4, 5)
    >>> linear_cross_entropy(x, w, torch.tensor([0, 3, 1]), tile=2).exp().item()
    4.0
    """
    local_weight, axis = local_part(_LAYER, weight, (0,), axis=axis)
    shift = 0.0
    if scale is None:
        x, local_weight = cast_by_autocast(x, local_weight)
    if scale is None and margin:
        raise ValueError(
            f"{_LAYER}: margin={margin!r} is one between cosines: give scale= too"
        )
    if tile is not None and tile < 1:
        raise ValueError(f"{_LAYER}: tile={tile!r}: tokens, at least one; or None")
    loss = TokenLoss.from_arguments(
        _LAYER, len(local_weight), axis, label_smoothing, z_loss, reduction
    )
    token_shape = list(x.shape[:-1])
    if axis is not None and sequence_dim is not None:
        token_shape[token_dim(_LAYER, x, sequence_dim)] *= axis_size(axis)
    local_targets = Targets.locate(_LAYER, targets, token_shape, loss, ignore_index)
    local_targets = Targets(
        local_targets.index.flatten(),
        local_targets.is_local.flatten(),
        local_targets.counted.flatten(),
    )
    if axis is not None:
        if sequence_dim is None:
            x = pcast(x, axis, to="V")
        else:
            claim_rank_local(x, axis, _LAYER)
            x = all_gather(x, axis, dim=sequence_dim)
    x = x.reshape(-1, x.shape[-1])
    if scale is not None:
        dtype = torch.promote_types(sum_dtype(x), sum_dtype(local_weight))
        x, local_weight = (F.normalize(y.to(dtype), dim=-1) for y in (x, local_weight))
        x, shift = scale * x, -scale * margin
    tiles = Tiles(tile or max(16, _LOGITS_PER_TILE // loss.local_classes), shift, loss)
    if reduction != "none" and _computes_gradients_forward(x, local_weight):
        anchor = x[:0].sum() + local_weight[:0].sum()
        return LossAndGradients.apply(
            x,
            local_weight,
            local_targets.index,
            local_targets.is_local,
            local_targets.counted,
            anchor,
            tiles,
        )[0]
    if under_vmap_or_forward_ad():
        sums = tiles.sums(x, local_weight, local_targets)
    else:
        sums = TiledSums.apply(
            x, local_weight, local_targets.index, local_targets.is_local, tiles
        )
    # By tiles too, as ``LossAndGradients`` does: ranks exchange the same messages
    # whichever of them differentiates.
    losses = [
        loss.loss_of(loss.join_over_ranks([y[tokens] for y in sums]))
        for tokens in tiles.slices(x)
    ]
    reduced = loss.reduce(torch.cat(losses), local_targets.counted)
    return reduced.reshape(targets.shape) if reduction == "none" else reduced


def _computes_gradients_forward(x: Tensor, weight: Tensor) -> bool:
    """Returns whether the gradients of a mean or a sum can be computed forward.

    That is if autograd alone will differentiate, and once.
    """
    if not torch.is_grad_enabled() or not (x.requires_grad or weight.requires_grad):
        return False
    if composable():
        return False
    # Loss scaling multiplies the cotangent. In fp16 gradients that are computed before
    # would underflow already.
    return x.dtype != torch.float16
