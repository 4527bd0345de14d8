"""Cross-entropy of logits over a vocabulary that may be split over ranks.

Each rank computes the sums of the loss (see ``token_losses``) over its part of the
vocabulary: no rank has all logits. ``linear_cross_entropy`` has not even a rank's own
all at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.collective_ops import claim_own
from fsfunc.nn.numerics import wide, without_autocast
from fsfunc.nn.token_losses import Targets, TokenLoss


def vocab_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    axis: str | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """The cross-entropy of ``targets`` under logits that are split over ``axis``.

    It is what ``F.cross_entropy`` gives for the whole logits, and with a z-loss
    ``z_loss * logsumexp(logits)^2`` more for every token. It holds under autograd and
    ``torch.func``, to any order.

    Args:
        logits: [..., V / n], each rank its contiguous part of the vocabulary, along
            the axis; floating. Not changed.
        targets: [...] integers from 0 to V - 1, the same on all ranks of the axis.
        axis: the mesh axis over which the vocabulary is split; None: it is whole.
        ignore_index: tokens with this target do not count.
        label_smoothing: within [0, 1], the share of the target that all classes share.
        z_loss: the weight of the squared logsumexp.
        reduction: "mean" over tokens that count (NaN where none does), "sum", "none".

    Returns:
        A scalar, or like ``targets``: in fp32, or wider as the logits are; one value
        over the axis.

    Raises:
        IndexError: a target outside the vocabulary, on every rank (of tensors that are
            not on the CPU: torch's own assertion on the device).
        ValueError: shapes that do not match; an axis over which ``shard`` averages.
        TypeError: targets that are not integers, logits that are.

    Cost: b bytes a number of N tokens (4, or 8 in fp64): all-reduces of b N (the
    maximum) and 2 b N (3 b N with smoothing), backward nothing. Kept: the logits
    themselves; beside them forward 2^20 at a time (2^25 off the CPU) in the dtype of
    the result, and backward their gradient too.

    Source: Shoeybi et al., 2019, section 3 (the split); Szegedy et al., 2016, section 7
    (smoothing); de Brebisson and Vincent, 2016, and Chowdhery et al., 2022, section 5
    (z-loss).

    >>> import fsfunc as ff
    >>> mesh = ff.make_mesh({"model": 2}, "simulated")
    >>> def main():
    ...     mine = torch.zeros(1, 2)  # of a vocabulary of 4
    ...     return vocab_cross_entropy(mine, torch.tensor([3]), "model").exp().item()
    >>> [round(x, 4) for x in ff.spmd(main, mesh)()]
    [4.0, 4.0]
    """
    what = "vocab_cross_entropy"
    loss = TokenLoss.checked(
        what, logits.shape[-1], axis, label_smoothing, z_loss, reduction
    )
    own = Targets.checked(what, targets, logits.shape[:-1], loss, ignore_index)
    claim_own(logits, axis, what)
    if is_transformed():
        z = logits.to(wide(logits))
        sums = row_sums(z, own, loss.smooth)
    else:
        sums = _sums(logits, own, loss.smooth)
    return loss.reduced(loss.of(loss.joined(sums)), own.kept)


def is_transformed() -> bool:
    """True under ``vmap`` or forward mode, which see plain operators alone."""
    return _torch.forward_ad_active() or bool(_torch.vmap_levels())


def row_sums(z: Tensor, own: Targets, smooth: bool) -> tuple[Tensor, ...]:
    """The sums over each row of logits, by plain operators, which modes can see."""
    # A rank whose classes are all masked has a logsumexp of -inf, without a derivative.
    dead = z.detach().amax(-1) == -torch.inf
    lse = torch.logsumexp(torch.where(dead.unsqueeze(-1), 0, z), -1)
    lse = torch.where(dead, -torch.inf, lse)
    target = z.gather(-1, own.at.unsqueeze(-1)).squeeze(-1)
    target = torch.where(own.mine, target, 0)
    return (lse, target, z.sum(-1)) if smooth else (lse, target)


def cuts(n: int, step: int) -> list[slice]:
    """``n`` rows, ``step`` at a time: one slice at least."""
    return [slice(i, min(i + step, n)) for i in range(0, max(n, 1), step)]


def _blocks(z: Tensor) -> list[slice]:
    """Rows that are gone over several times: as many at a time as a cache holds."""
    block = 2**20 if z.device.type == "cpu" else 2**25
    return cuts(z.shape[0], max(1, block // z.shape[1]))


def exponentiated(
    z: Tensor, own: Targets, smooth: bool
) -> tuple[tuple[Tensor, ...], Tensor]:
    """The row's sums and largest logit; ``z`` becomes exp(z - largest), in place."""
    target = z.gather(-1, own.at.unsqueeze(-1)).squeeze(-1)
    sums = (torch.where(own.mine, target, 0),)
    if smooth:
        sums = (*sums, z.sum(-1))
    top = z.amax(-1).clamp(min=torch.finfo(z.dtype).min)  # -inf - -inf would be NaN
    z.sub_(top.unsqueeze(-1)).exp_()
    return (top + z.sum(-1).log(), *sums), top


def gradient_of(p: Tensor, own: Targets, slopes: Sequence[Tensor]) -> Tensor:
    """The derivative by the logits, of ``p``, exponentials up to a factor a row.

    In place.

    Args:
        slopes: the derivatives by the sums, the first times that factor.
    """
    by_lse, by_target, *by_total = slopes
    p.mul_(by_lse.unsqueeze(-1))
    for slope in by_total:
        p.add_(slope.unsqueeze(-1))
    by_target = torch.where(own.mine, by_target, 0)
    return p.scatter_add_(-1, own.at.unsqueeze(-1), by_target.unsqueeze(-1))


def _copies(
    logits: Tensor, dtype: torch.dtype, into: Tensor | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """Rows and their copy, all in the memory of one block, or in ``into``."""
    blocks = _blocks(logits)
    if into is None:
        block = torch.empty_like(logits[blocks[0]], dtype=dtype)
    for i in blocks:
        part = block[: i.stop - i.start] if into is None else into[i]
        yield i, part.copy_(logits[i])


def _sums(logits: Tensor, own: Targets, smooth: bool) -> list[Tensor]:
    """``row_sums``, of rows in the order in which they lie in memory."""
    order = sorted(range(logits.ndim - 1), key=logits.stride, reverse=True)
    rows = logits.permute(*order, -1).reshape(-1, logits.shape[-1])
    at, mine = (x.permute(order).flatten() for x in (own.at, own.mine))
    shape = [logits.shape[d] for d in order]
    back = [order.index(d) for d in range(len(order))]
    found = _RowSums.apply(rows, at, mine, smooth)
    return [y.view(shape).permute(back) for y in found]


class _RowSums(torch.autograd.Function):
    """``row_sums`` of logits [N, V] of any dtype, keeping them alone."""

    @staticmethod
    def forward(logits, at, mine, smooth):  # type: ignore[override]
        own, found = Targets(at, mine, mine), []
        for i, z in _copies(logits, wide(logits)):
            found.append(exponentiated(z, own[i], smooth)[0])
        return tuple(torch.cat(parts) for parts in zip(*found, strict=True))

    @staticmethod
    def setup_context(ctx, inputs, output):
        logits, at, mine, _ = inputs
        ctx.save_for_backward(logits, at, mine, output[0])

    @staticmethod
    def backward(ctx, *slopes):  # type: ignore[override]
        logits, at, mine, lse = ctx.saved_tensors
        own, smooth = Targets(at, mine, mine), len(slopes) > 2
        if torch.is_grad_enabled() or is_transformed():

            def sums(logits: Tensor) -> tuple[Tensor, ...]:
                return row_sums(logits.to(lse.dtype), own, smooth)

            (g,) = torch.func.vjp(sums, logits)[1](slopes)
        else:
            lse = lse.clamp(min=torch.finfo(lse.dtype).min).unsqueeze(-1)
            g = torch.empty_like(logits)
            into = g if g.dtype == lse.dtype else None
            for i, p in _copies(logits, lse.dtype, into):
                p.sub_(lse[i]).exp_()
                gradient_of(p, own[i], [y[i] for y in slopes])
                if into is None:
                    g[i] = p
        return g, None, None, None


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
