"""Logits a tile at a time: made of some tokens, summed up, forgotten.

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
from dataclasses import dataclass

import torch
from torch import Tensor

from fsfunc.nn.cross_entropy import (
    cuts,
    exponentiated,
    gradient_of,
    is_transformed,
    row_sums,
)
from fsfunc.nn.numerics import wide, without_autocast
from fsfunc.nn.token_losses import Targets, TokenLoss

_CLASSES = 2**13  # of the weight's gradient that are summed at a time in another dtype


@dataclass(frozen=True)
class Tiles:
    """Logits of ``rows`` tokens at a time.

    Args:
        shift: what is added to the target's.
    """

    rows: int
    shift: float
    loss: TokenLoss

    def cuts(self, x: Tensor) -> list[slice]:
        """The tokens of each tile: one tile at least."""
        return cuts(x.shape[0], self.rows)

    def logits(self, x: Tensor, w: Tensor, own: Targets) -> Tensor:
        """One tile's, in memory of its own."""
        z = (x @ w.T).to(wide(x))
        if not self.shift:
            return z
        shift = self.shift * own.mine.to(z.dtype)
        return z.scatter_add(-1, own.at.unsqueeze(-1), shift.unsqueeze(-1))

    def sums(self, x: Tensor, w: Tensor, own: Targets) -> tuple[Tensor, ...]:
        """The sums over all tokens' logits, by plain operators, each kept by autograd.

        It is what ``TiledSums`` computes, for those who must look into it.
        """
        found = []
        with without_autocast(x):
            for i in self.cuts(x):
                z = self.logits(x[i], w, own[i])
                found.append(row_sums(z, own[i], self.loss.smooth))
        return tuple(torch.cat(parts) for parts in zip(*found, strict=True))

    def pullback(
        self, x: Tensor, w: Tensor, own: Targets, slopes: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """The gradients of x and w by ``sums``, by plain operators."""
        return torch.func.vjp(lambda x, w: self.sums(x, w, own), x, w)[1](tuple(slopes))


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
