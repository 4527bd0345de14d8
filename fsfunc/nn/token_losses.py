"""Loss of a token, of sums over its logits, and of all tokens.

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
from fsfunc.comm.groups import axis_size, get_group


@dataclass(frozen=True)
class TokenLoss:
    """Loss of a token, of the sums over its logits, and of all tokens.

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
        own: int,
        axis: str | None,
        label_smoothing: float,
        z_loss: float,
        reduction: str,
    ) -> TokenLoss:
        """``own``: the size of this rank's part of the vocabulary."""
        refuse_mean(what, axis)
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(
                f"{what}: reduction={reduction!r}: it is 'mean', 'sum' or 'none'"
            )
        if not 0 <= label_smoothing <= 1:
            raise ValueError(
                f"{what}: label_smoothing={label_smoothing} is no share: give one "
                "within [0, 1]"
            )
        size = 1 if axis is None else axis_size(axis)
        return TokenLoss(axis, own, own * size, label_smoothing, z_loss, reduction)

    @property
    def smooth(self) -> bool:
        """True if the sum of all logits is needed."""
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
        """The weight of each token in ``reduced``, a mean or a sum."""
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
    """Places of the targets in this rank's part of the vocabulary.

    Args:
        at: [...] int64, the class within the part: 0 where another rank has it; past
            the end where nobody has, so that torch's own check meets it.
        mine: [...], whether this rank has it.
        kept: [...], whether it counts.
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
        what = f"{what}: target"
        targets = _integers(what, targets)
        if targets.shape != torch.Size(shape):
            raise ValueError(
                f"{what}s of shape {tuple(targets.shape)} for tokens of shape "
                f"{tuple(shape)}: give each token one"
            )
        return own_rows(what, targets, loss.own, loss.axis, ignore_index)

    def __getitem__(self, rows: slice) -> Targets:
        return Targets(self.at[rows], self.mine[rows], self.kept[rows])


def own_rows(
    what: str,
    index: Tensor,
    own: int,
    axis: str | None,
    ignore_index: int | None = None,
) -> Targets:
    """Places of indices into a vocabulary in this rank's ``own`` rows of it.

    Args:
        what: names one of them, for the message.
        index: [...] integers, the same on all ranks of the axis.
        ignore_index: one that does not count.

    Raises:
        TypeError: no integers.
        IndexError: an index that is no row, where it costs nothing to ask.
        ValueError: an axis over which each rank has its own.
    """
    refuse_mean(f"{what}s", axis)
    index = _integers(what, index)
    count = own if axis is None else own * axis_size(axis)
    kept = torch.ones_like(index, dtype=torch.bool)
    advice = f"give 0 to {count - 1}"
    if ignore_index is not None:
        kept = index != ignore_index
        advice += f", or ignore_index={ignore_index} for a token that does not count"
    outside = kept & ((index < 0) | (index >= count))
    if (found := _first(torch.where(outside, index, 0))) is not None:
        raise IndexError(
            f"{what} {found} is outside the vocabulary of {count}: {advice}"
        )
    start = 0 if axis is None else get_group(axis).position * own
    mine = kept & (index >= start) & (index < start + own)
    at = torch.where(mine, index - start, 0)
    return Targets(torch.where(outside, own, at), mine, kept)


def refuse_mean(what: str, axis: str | None) -> None:
    """Raises where what the ranks of the axis must have in common is each one's own."""
    if axis is not None and get_group(axis).loss_is_mean:
        raise ValueError(
            f'{what}: over axis "{axis}" shard averages the ranks\' losses, each of '
            "its own tokens: split over another axis of the mesh"
        )


def _integers(what: str, index: Tensor) -> Tensor:
    kind = index.dtype
    if kind.is_floating_point or kind.is_complex or kind == torch.bool:
        raise TypeError(f"{what}s are integers, got {kind}")
    return index.long()


def _first(values: Tensor) -> int | None:
    """The first value but 0, if there is one and asking costs nothing."""
    values = _torch.unwrapped(values)
    fake = isinstance(values, _torch.FakeTensor) or values.is_meta
    if fake or _torch.device_of(values).type != "cpu" or _torch.fake_active():
        return None
    with _torch.beneath_functorch(), _torch.beneath_all_modes():
        found = values[values != 0]
        return int(found[0]) if found.numel() else None
