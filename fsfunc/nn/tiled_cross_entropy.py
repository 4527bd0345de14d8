"""The last layer and its cross-entropy as one, which never holds all logits.

These are made of some tokens at a time, summed up, forgotten.
Two ways lead to the gradients:

- Where the loss is a mean or a sum and autograd alone looks, they are made in the
  forward pass, tile by tile: three products, as many as without tiles. Those of x and
  of the weight are kept, [N, D] and [V, D], and the backward pass multiplies them by
  the one number that comes back. With a number for each token that would not do, who
  differentiates twice would find constants, and in fp16 the scale of the loss would
  come too late.
- Else only what came in is kept, and the backward pass makes each tile's logits anew:
  four products, and derivatives of any order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fsfunc.comm.collective_ops import claim_rank_local
from fsfunc.comm.collectives import all_gather
from fsfunc.comm.groups import axis_size
from fsfunc.comm.typed_maps import pcast
from fsfunc.core.frames import composable
from fsfunc.nn.cross_entropy import Tiles, exponentiated, gradient_of, is_transformed
from fsfunc.nn.numerics import autocast, wide, without_autocast
from fsfunc.nn.tensor_parallel import part_of, token_dim
from fsfunc.nn.token_losses import Targets, TokenLoss
from fsfunc.sharded.leaf import Sharded

_CLASSES = 2**13  # of the weight's gradient that are summed at a time in another dtype


class _Gradients:
    """Gradients of x and the weight, to which each tile adds its share."""

    def __init__(self, x: Tensor, w: Tensor, needs: Sequence[bool]):
        self.x, self.w, self.dx, self.dw = x, w, None, None
        if needs[0]:
            self.dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if needs[1]:
            self.dw = torch.zeros(w.shape, dtype=wide(w), device=w.device)

    def add(self, i: slice, p: Tensor) -> None:
        """``p``: the derivative by the logits of the tokens ``i``."""
        x, p = self.x[i], p.to(self.x.dtype)
        if self.dx is not None:
            torch.mm(p, self.w, out=self.dx[i])
        if self.dw is None:
            return
        if p.dtype == self.dw.dtype:
            self.dw.addmm_(p.T, x)
            return
        for part, to in zip(p.split(_CLASSES, 1), self.dw.split(_CLASSES), strict=True):
            to.add_(part.T @ x)

    def found(self) -> tuple[Tensor | None, Tensor | None]:
        return self.dx, None if self.dw is None else self.dw.to(self.w.dtype)


class MadeForward(torch.autograd.Function):
    """The loss, and the gradients of x and the weight, which the backward scales."""

    @staticmethod
    def forward(x, w, at, mine, kept, anchor, tiles):  # type: ignore[override]
        own, loss, each = Targets(at, mine, kept), tiles.loss, []
        gradients = _Gradients(x, w, (x.requires_grad, w.requires_grad))
        weights = loss.weights(kept, wide(x))
        with without_autocast(x):
            for i in tiles.cuts(x):
                z = tiles.logits(x[i], w, own[i])
                sums, top = exponentiated(z, own[i], loss.smooth)
                sums = loss.joined(sums)
                each.append(loss.of(sums))
                by_lse, *slopes = loss.slopes(sums[0], weights[i])
                by_lse = by_lse * (top - sums[0]).exp()
                gradients.add(i, gradient_of(z, own[i], (by_lse, *slopes)))
                del z  # or it lives beside the next
        return loss.reduced(torch.cat(each), kept), *gradients.found()

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, dx, dw = output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(y for y in (dx, dw) if y is not None))
        ctx.save_for_backward(dx, dw, inputs[5])

    @staticmethod
    def backward(ctx, g, *_):  # type: ignore[override]
        dx, dw, anchor = ctx.saved_tensors
        if g is None:
            return (None,) * 7
        dx, dw = (None if y is None else y * g.to(y.dtype) for y in (dx, dw))
        if torch.is_grad_enabled():  # what is constant here would be lost in silence
            dx, dw = (None if y is None else _Once.apply(y, anchor) for y in (dx, dw))
        return dx, dw, None, None, None, None, None


class _Once(torch.autograd.Function):
    """A gradient that was made in a forward pass: who differentiates it is refused."""

    @staticmethod
    def forward(y, anchor):  # type: ignore[override]
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        raise RuntimeError(
            "linear_cross_entropy: the gradient of a mean or a sum is made in the "
            "forward pass, and autograd cannot differentiate it again: take both "
            'derivatives by torch.func (grad, vjp, jvp), or pass reduction="none" and '
            "reduce the losses yourself"
        )


class TiledSums(torch.autograd.Function):
    """``Tiles.sums``, keeping what comes in alone."""

    @staticmethod
    def forward(x, w, at, mine, tiles):  # type: ignore[override]
        own, found = Targets(at, mine, mine), []
        with without_autocast(x):
            for i in tiles.cuts(x):
                z = tiles.logits(x[i], w, own[i])
                found.append(exponentiated(z, own[i], tiles.loss.smooth)[0])
                del z
        return tuple(torch.cat(parts) for parts in zip(*found, strict=True))

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, w, at, mine, ctx.tiles = inputs
        ctx.save_for_backward(x, w, at, mine, output[0])

    @staticmethod
    def backward(ctx, *slopes):  # type: ignore[override]
        x, w, at, mine, lse = ctx.saved_tensors
        if is_transformed():
            found = ctx.tiles.pullback(x, w, Targets(at, mine, mine), slopes)
        elif torch.is_grad_enabled():
            found = _TiledPullback.apply(x, w, at, mine, lse, ctx.tiles, *slopes)
        else:
            needs, own = ctx.needs_input_grad[:2], Targets(at, mine, mine)
            found = _pulled_back(x, w, own, lse, slopes, ctx.tiles, needs)
        return *found, None, None, None


class _TiledPullback(torch.autograd.Function):
    """The gradients of x and the weight by the sums: to be differentiated again."""

    @staticmethod
    def forward(x, w, at, mine, lse, tiles, *slopes):  # type: ignore[override]
        own = Targets(at, mine, mine)
        return _pulled_back(x, w, own, lse, slopes, tiles, (True, True))

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, w, at, mine, _, ctx.tiles, *slopes = inputs
        ctx.save_for_backward(x, w, at, mine, *slopes)

    @staticmethod
    def backward(ctx, *g):  # type: ignore[override]
        x, w, at, mine, *slopes = ctx.saved_tensors
        own = Targets(at, mine, mine)

        def again(x: Tensor, w: Tensor, *slopes: Tensor) -> tuple[Tensor, ...]:
            return ctx.tiles.pullback(x, w, own, slopes)

        dx, dw, *by_slopes = torch.func.vjp(again, x, w, *slopes)[1](g)
        return dx, dw, None, None, None, None, *by_slopes


def _pulled_back(
    x: Tensor,
    w: Tensor,
    own: Targets,
    lse: Tensor,
    slopes: Sequence[Tensor],
    tiles: Tiles,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """``Tiles.pullback``, in the memory of a tile."""
    gradients = _Gradients(x, w, needs)
    lse = lse.clamp(min=torch.finfo(lse.dtype).min)  # -inf - -inf would be NaN
    with without_autocast(x):
        for i in tiles.cuts(x):
            z = tiles.logits(x[i], w, own[i]).sub_(lse[i].unsqueeze(-1)).exp_()
            gradients.add(i, gradient_of(z, own[i], [y[i] for y in slopes]))
            del z
    return gradients.found()


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
        ValueError: targets of another shape; a vocabulary that the axis does not
            divide; a leaf that is laid out otherwise; a margin without a scale; a tile
            of no tokens.
        TypeError: targets that are not integers.
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
    if scale is None and margin:
        raise ValueError(
            f"{_NAME}: margin={margin!r} is one between cosines: give scale= too"
        )
    if tile is not None and tile < 1:
        raise ValueError(f"{_NAME}: tile={tile!r}: tokens, at least one; or None")
    loss = TokenLoss.checked(_NAME, len(part), axis, label_smoothing, z_loss, reduction)
    shape = list(x.shape[:-1])
    if axis is not None and sequence_dim is not None:
        shape[token_dim(_NAME, x, sequence_dim)] *= axis_size(axis)
    own = Targets.checked(_NAME, targets, shape, loss, ignore_index)
    own = Targets(own.at.flatten(), own.mine.flatten(), own.kept.flatten())
    if axis is not None:
        if sequence_dim is None:
            x = pcast(x, axis, to="V")
        else:
            claim_rank_local(x, axis, _NAME)
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


def _is_made_forward(x: Tensor, part: Tensor) -> bool:
    """True if autograd alone will differentiate a mean or a sum, and once."""
    if not torch.is_grad_enabled() or not (x.requires_grad or part.requires_grad):
        return False
    if composable():
        return False
    # A loss's scale reaches what is made backward; the rest would be lost in fp16.
    return x.dtype != torch.float16
