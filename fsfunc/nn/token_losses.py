"""What a token's loss is, of sums over its logits, and how tokens' become one.

Of a row of logits z and a target y the loss needs three sums: the logarithm of the sum
of exponentials, z_y, and, where labels are smoothed, the sum of all:

    loss = lse - (1 - e) z_y - (e / V) sum z + c lse^2

with e the smoothing and c the z-loss. A rank makes them of its part of the vocabulary,
and what goes between ranks is one number a token and sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.collectives import pmax, psum
from fsfunc.comm.groups import axis_size, group

__all__ = ["Targets", "TokenLoss"]


@dataclass(frozen=True)
class TokenLoss:
    """What a token's loss is, of the sums over its logits, and how tokens' become one.

    Args:
        axis: over which the vocabulary is split.
        own, classes: the sizes of this rank's part and of the whole vocabulary.
    """

    axis: str | None
    own: int
    classes: int
    label_smoothing: float
    z_loss: float
    reduction: str

    @staticmethod
    def checked(
        what: str,
        own: Sequence[int],
        axis: str | None,
        label_smoothing: float,
        z_loss: float,
        reduction: str,
    ) -> TokenLoss:
        """``own``: the shape of this rank's part of the vocabulary, of one dim."""
        if axis is not None and group(axis).mean:
            raise ValueError(
                f'{what}: over axis "{axis}" shard averages the ranks\' losses, each '
                "of its own tokens: split the vocabulary over another axis of the mesh"
            )
        if not own or not own[0]:
            raise ValueError(f"{what}: a vocabulary of no class: give one at least")
        if not 0 <= label_smoothing <= 1:
            raise ValueError(
                f"{what}: label_smoothing={label_smoothing!r}: it is within [0, 1]"
            )
        if not z_loss >= 0:
            raise ValueError(f"{what}: z_loss={z_loss!r}: it is a weight, 0 or more")
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(
                f"{what}: reduction={reduction!r}: it is 'mean', 'sum' or 'none'"
            )
        size = 1 if axis is None else axis_size(axis)
        return TokenLoss(
            axis, own[0], own[0] * size, label_smoothing, z_loss, reduction
        )

    @property
    def smooth(self) -> bool:
        """Whether the sum of all logits is asked for."""
        return self.label_smoothing > 0

    def joined(self, sums: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The sums over the whole vocabulary, of those over the ranks' parts."""
        if self.axis is None:
            return tuple(sums)
        lse, *rest = sums
        top = pmax(lse.detach(), self.axis)
        parts = torch.stack([(lse - top).exp(), *rest])
        total, *rest = psum(parts, self.axis).unbind()
        return (top + total.log(), *rest)

    def of(self, sums: Sequence[Tensor]) -> Tensor:
        """The loss of each token: the module's equation."""
        lse, target, *total = sums
        loss = lse - (1 - self.label_smoothing) * target
        for z in total:
            loss = loss - self.label_smoothing / self.classes * z
        return loss + self.z_loss * lse.square() if self.z_loss else loss

    def slopes(self, lse: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        """The derivatives of ``weights * of(sums)`` by each of the joined sums."""
        by_lse = weights * (1 + 2 * self.z_loss * lse) if self.z_loss else weights
        by_target = -(1 - self.label_smoothing) * weights
        if not self.smooth:
            return by_lse, by_target
        return by_lse, by_target, -self.label_smoothing / self.classes * weights

    def weights(self, kept: Tensor, dtype: torch.dtype) -> Tensor:
        """What each token counts in ``reduced``, a mean or a sum."""
        share = torch.ones((), dtype=dtype, device=kept.device)
        share = share / kept.sum() if self.reduction == "mean" else share
        return torch.where(kept, share, 0)

    def reduced(self, each: Tensor, kept: Tensor) -> Tensor:
        """The loss of all tokens; those that do not count are 0."""
        each = torch.where(kept, each, 0)
        if self.reduction == "none":
            return each
        return each.sum() / kept.sum() if self.reduction == "mean" else each.sum()


@dataclass(frozen=True)
class Targets:
    """Where the targets lie in this rank's part of the vocabulary.

    Args:
        at: [...] int64, the class within the part: 0 where another rank has it; past
            the end where nobody has, so that torch's own check meets it.
        mine: [...], whether this rank has it.
        kept: [...], whether the token counts.
    """

    at: Tensor
    mine: Tensor
    kept: Tensor

    @staticmethod
    def checked(
        what: str,
        targets: Tensor,
        shape: Sequence[int],
        loss: TokenLoss,
        ignore_index: int,
    ) -> Targets:
        """``shape``: that of the tokens."""
        kind = targets.dtype
        if kind.is_floating_point or kind.is_complex or kind == torch.bool:
            raise TypeError(
                f"{what} needs integer targets, one class a token, got {kind}"
            )
        if targets.shape != torch.Size(shape):
            raise ValueError(
                f"{what}: targets of shape {tuple(targets.shape)} for tokens of shape "
                f"{tuple(shape)}: give each token one"
            )
        targets = targets.long()
        kept = targets != ignore_index
        outside = kept & ((targets < 0) | (targets >= loss.classes))
        if (found := _first(targets, outside)) is not None:
            raise IndexError(
                f"{what}: target {found} is outside the vocabulary of {loss.classes} "
                f"classes: give 0 to {loss.classes - 1}, or ignore_index="
                f"{ignore_index} for a token that does not count"
            )
        start = 0 if loss.axis is None else group(loss.axis).position * loss.own
        mine = kept & (targets >= start) & (targets < start + loss.own)
        at = torch.where(mine, targets - start, 0)
        return Targets(torch.where(outside, loss.own, at), mine, kept)

    def __getitem__(self, rows: slice) -> Targets:
        return Targets(self.at[rows], self.mine[rows], self.kept[rows])


def _first(values: Tensor, where: Tensor) -> int | None:
    """The first value where it is true, if there is one and asking costs nothing."""
    values, where = _torch.unwrapped(values), _torch.unwrapped(where)
    fake = isinstance(where, _torch.FakeTensor) or where.is_meta
    if fake or _torch.device_of(where).type != "cpu" or _torch.fake_active():
        return None
    with _torch.beneath_functorch(), _torch.beneath_all_modes():
        if not bool(where.any()):
            return None
        return int(values[where][0])
