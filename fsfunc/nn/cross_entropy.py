"""Cross-entropy of logits over a vocabulary that may be split over ranks.

Each rank computes the sums of the loss (see ``token_losses.py``) over its part of the
vocabulary, so no rank has all logits. Each of the sums has two forms here: by plain
operators, which have all derivatives and work under ``vmap``, and in place, block by
block, which autograd's first derivative uses. ``Tiles`` is for
``tiled_cross_entropy.py``, which never has all of a rank's logits at once either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.collective_ops import claim_rank_local
from fsfunc.comm.mesh import Axis
from fsfunc.nn.numerics import sum_dtype, without_autocast
from fsfunc.nn.token_losses import Targets, TokenLoss


def vocab_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    axis: Axis | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Computes the cross-entropy of ``targets`` under logits split over ``axis``.

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
    maximum) and 2 b N (3 b N with smoothing), backward nothing. Saved: the logits
    themselves. Beside them forward 2^20 at a time (2^25 off the CPU) in the dtype of
    the result, and backward their gradient too.

    Source: Shoeybi et al., 2019, section 3 (the split); Szegedy et al., 2016, section 7
    (smoothing); de Brebisson and Vincent, 2016, and Chowdhery et al., 2022, section 5
    (z-loss).

    >>> import fsfunc as ff
    >>> mesh = ff.make_mesh({"model": 2}, "simulated")
    >>> def main():
    ...     logits = torch.zeros(1, 2)  # of a vocabulary of 4
    ...     return vocab_cross_entropy(logits, torch.tensor([3]), "model").exp().item()
    >>> [round(x, 4) for x in ff.spmd(main, mesh)()]
    [4.0, 4.0]
    """
    layer = "vocab_cross_entropy"
    loss = TokenLoss.from_arguments(
        layer, logits.shape[-1], axis, label_smoothing, z_loss, reduction
    )
    local_targets = Targets.locate(
        layer, targets, logits.shape[:-1], loss, ignore_index
    )
    claim_rank_local(logits, axis, layer)
    if under_vmap_or_forward_ad():
        z = logits.to(sum_dtype(logits))
        sums = row_sums(z, local_targets, loss.needs_total)
    else:
        sums = _row_sums_of_any_shape(logits, local_targets, loss.needs_total)
    return loss.reduce(loss.loss_of(loss.join_over_ranks(sums)), local_targets.counted)


def under_vmap_or_forward_ad() -> bool:
    """Returns whether ``vmap`` or forward mode is active.

    Neither sees into an autograd Function nor through writes in place, so there the
    sums are computed by plain operators.
    """
    return _torch.forward_ad_active() or bool(_torch.vmap_levels())


def row_sums(z: Tensor, targets: Targets, needs_total: bool) -> tuple[Tensor, ...]:
    """Computes the sums over each row of logits by plain operators."""
    # A rank whose classes are all masked has a logsumexp of -inf, without a derivative.
    all_masked = z.detach().amax(-1) == -torch.inf
    lse = torch.logsumexp(torch.where(all_masked.unsqueeze(-1), 0, z), -1)
    lse = torch.where(all_masked, -torch.inf, lse)
    target_logit = z.gather(-1, targets.index.unsqueeze(-1)).squeeze(-1)
    target_logit = torch.where(targets.is_local, target_logit, 0)
    return (lse, target_logit, z.sum(-1)) if needs_total else (lse, target_logit)


def row_slices(n: int, rows: int) -> list[slice]:
    """Cuts ``n`` rows into slices of at most ``rows``; of 0 rows it makes one slice."""
    return [slice(i, min(i + rows, n)) for i in range(0, max(n, 1), rows)]


def _cached_blocks(z: Tensor) -> list[slice]:
    """Cuts rows into blocks of logits that fit a cache: each is read several times."""
    logits_per_block = 2**20 if z.device.type == "cpu" else 2**25
    return row_slices(z.shape[0], max(1, logits_per_block // z.shape[1]))


def exponentiate(
    z: Tensor, targets: Targets, needs_total: bool
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Returns each row's sums and largest logit; ``z`` becomes exp(z - largest)."""
    target_logit = z.gather(-1, targets.index.unsqueeze(-1)).squeeze(-1)
    sums = (torch.where(targets.is_local, target_logit, 0),)
    if needs_total:
        sums = (*sums, z.sum(-1))
    largest = z.amax(-1).clamp(min=torch.finfo(z.dtype).min)  # -inf - -inf would be NaN
    z.sub_(largest.unsqueeze(-1)).exp_()
    return (largest + z.sum(-1).log(), *sums), largest


def logit_gradient(p: Tensor, targets: Targets, cotangents: Sequence[Tensor]) -> Tensor:
    """Turns exponentials of logits into the derivative by the logits, in place.

    dz = by_lse * softmax(z) + by_target * onehot(y) + by_total.

    Args:
        p: softmax(z) times any factor a row.
        cotangents: the derivatives by the sums; the first is divided by that factor.
    """
    by_lse, by_target, *by_total = cotangents
    p.mul_(by_lse.unsqueeze(-1))
    for by_sum in by_total:
        p.add_(by_sum.unsqueeze(-1))
    by_target = torch.where(targets.is_local, by_target, 0)
    return p.scatter_add_(-1, targets.index.unsqueeze(-1), by_target.unsqueeze(-1))


def _copy_blocks(
    logits: Tensor, dtype: torch.dtype, into: Tensor | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """Yields slices of rows with a copy to write in, in ``dtype``.

    All copies share the memory of one block, or are the rows of ``into``.
    """
    blocks = _cached_blocks(logits)
    if into is None:
        buffer = torch.empty_like(logits[blocks[0]], dtype=dtype)
    for i in blocks:
        copy = buffer[: i.stop - i.start] if into is None else into[i]
        yield i, copy.copy_(logits[i])


def _row_sums_of_any_shape(
    logits: Tensor, targets: Targets, needs_total: bool
) -> list[Tensor]:
    """Computes ``row_sums`` of logits [..., V] by ``_RowSums``, which takes [N, V].

    Dims are ordered by stride, so that flattening logits that lie otherwise (a sequence
    that was gathered) copies nothing.
    """
    order = sorted(range(logits.ndim - 1), key=logits.stride, reverse=True)
    rows = logits.permute(*order, -1).reshape(-1, logits.shape[-1])
    index, is_local = (
        x.permute(order).flatten() for x in (targets.index, targets.is_local)
    )
    permuted_shape = [logits.shape[d] for d in order]
    inverse = [order.index(d) for d in range(len(order))]
    sums = _RowSums.apply(rows, index, is_local, needs_total)
    return [y.view(permuted_shape).permute(inverse) for y in sums]


class _RowSums(torch.autograd.Function):
    """``row_sums`` of logits [N, V] of any dtype; it saves these, no exponentials."""

    @staticmethod
    def forward(  # type: ignore[override]
        logits: Tensor, index: Tensor, is_local: Tensor, needs_total: bool
    ) -> tuple[Tensor, ...]:
        targets, block_sums = Targets(index, is_local, is_local), []
        for i, z in _copy_blocks(logits, sum_dtype(logits)):
            block_sums.append(exponentiate(z, targets[i], needs_total)[0])
        return tuple(torch.cat(parts) for parts in zip(*block_sums, strict=True))

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]
    ) -> None:
        logits, index, is_local, _ = inputs
        ctx.save_for_backward(logits, index, is_local, output[0])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        logits, index, is_local, lse = ctx.saved_tensors
        targets, needs_total = Targets(index, is_local, is_local), len(cotangents) > 2
        if torch.is_grad_enabled() or under_vmap_or_forward_ad():

            def sums(logits: Tensor) -> tuple[Tensor, ...]:
                return row_sums(logits.to(lse.dtype), targets, needs_total)

            (g,) = torch.func.vjp(sums, logits)[1](cotangents)
        else:
            # softmax = exp(z - lse), in the gradient's own memory if the dtypes agree.
            # A row that is masked as a whole has an lse of -inf: -inf - -inf is NaN.
            lse = lse.clamp(min=torch.finfo(lse.dtype).min).unsqueeze(-1)
            g = torch.empty_like(logits)
            into = g if g.dtype == lse.dtype else None
            for i, p in _copy_blocks(logits, lse.dtype, into):
                p.sub_(lse[i]).exp_()
                logit_gradient(p, targets[i], [y[i] for y in cotangents])
                if into is None:
                    g[i] = p
        return g, None, None, None


@dataclass(frozen=True)
class Tiles:
    """The last layer, for ``rows`` tokens at a time.

    Args:
        rows: the number of tokens of a tile.
        shift: a number added to the target's logit: the margin of a cosine loss.
        loss: the options of the loss.
    """

    rows: int
    shift: float
    loss: TokenLoss

    def slices(self, x: Tensor) -> list[slice]:
        """Returns the tokens of each tile: one tile at least."""
        return row_slices(x.shape[0], self.rows)

    def logits(self, x: Tensor, w: Tensor, targets: Targets) -> Tensor:
        """Computes the logits of a tile, in memory of its own."""
        z = (x @ w.T).to(sum_dtype(x))
        if not self.shift:
            return z
        shift = self.shift * targets.is_local.to(z.dtype)
        return z.scatter_add(-1, targets.index.unsqueeze(-1), shift.unsqueeze(-1))

    def sums(self, x: Tensor, w: Tensor, targets: Targets) -> tuple[Tensor, ...]:
        """Computes the sums over all tokens' logits by plain operators.

        It is what ``TiledSums`` computes, with all derivatives; autograd saves all
        logits for it.
        """
        tile_sums = []
        with without_autocast(x):
            for i in self.slices(x):
                z = self.logits(x[i], w, targets[i])
                tile_sums.append(row_sums(z, targets[i], self.loss.needs_total))
        return tuple(torch.cat(parts) for parts in zip(*tile_sums, strict=True))

    def pull_back(
        self, x: Tensor, w: Tensor, targets: Targets, cotangents: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Returns the gradients of x and w through ``sums``, by plain operators."""
        return torch.func.vjp(lambda x, w: self.sums(x, w, targets), x, w)[1](
            tuple(cotangents)
        )
