"""The cross-entropy of a token from three sums over its logits, and its reductions.

Both cross-entropies (``cross_entropy.py``, ``tiled_cross_entropy.py``) use it. For a
row of logits z and a target y the loss needs the logarithm of the sum of exponentials,
z_y, and, where labels are smoothed, the sum of all logits:

    loss = lse - (1 - e) z_y - (e / V) sum z + c lse^2

with e the smoothing and c the z-loss. Each rank computes these sums over its part of
the vocabulary. So ranks exchange one number for each token and sum, and no logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.collectives import pmax, psum
from fsfunc.comm.groups import axis_size, get_group
from fsfunc.comm.mesh import Axis


@dataclass(frozen=True)
class TokenLoss:
    """The options of a cross-entropy, and its equation in parts.

    Args:
        axis: the mesh axis over which the vocabulary is split; None: it is whole.
        local_classes: the size of this rank's part of the vocabulary.
        classes: the size of the whole vocabulary.
        label_smoothing, z_loss: e and c of the equation above.
        reduction: "mean", "sum" or "none".
    """

    axis: Axis | None
    local_classes: int
    classes: int
    label_smoothing: float
    z_loss: float
    reduction: str

    @staticmethod
    def from_arguments(
        layer: str,
        local_classes: int,
        axis: Axis | None,
        label_smoothing: float,
        z_loss: float,
        reduction: str,
    ) -> TokenLoss:
        """Checks the arguments of the public function ``layer``.

        Raises:
            ValueError: as the public functions say.
        """
        refuse_averaged_axis(layer, axis)
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(
                f"{layer}: reduction={reduction!r}: it is 'mean', 'sum' or 'none'"
            )
        if not 0 <= label_smoothing <= 1:
            raise ValueError(
                f"{layer}: label_smoothing={label_smoothing} is no share: give one "
                "within [0, 1]"
            )
        size = 1 if axis is None else axis_size(axis)
        return TokenLoss(
            axis,
            local_classes,
            local_classes * size,
            label_smoothing,
            z_loss,
            reduction,
        )

    @property
    def needs_total(self) -> bool:
        """Whether the loss needs the sum of all logits."""
        return self.label_smoothing > 0

    def join_over_ranks(self, sums: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns the sums over the whole vocabulary, from those over this part."""
        if self.axis is None:
            return tuple(sums)
        lse, *others = sums
        # Detached: the result does not depend on the shift, so neither does a gradient.
        largest = pmax(lse.detach(), self.axis)
        scaled = torch.stack([(lse - largest).exp(), *others])
        total, *others = psum(scaled, self.axis).unbind()
        return (largest + total.log(), *others)

    def loss_of(self, sums: Sequence[Tensor]) -> Tensor:
        """Returns the loss of each token: the module's equation."""
        lse, target, *total = sums
        loss = lse - (1 - self.label_smoothing) * target
        for z in total:
            loss = loss - self.label_smoothing / self.classes * z
        return loss + self.z_loss * lse.square() if self.z_loss else loss

    def cotangents(self, lse: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        """Returns the derivatives of ``weights * loss_of(sums)`` by each joined sum."""
        by_lse = weights * (1 + 2 * self.z_loss * lse) if self.z_loss else weights
        by_target = -(1 - self.label_smoothing) * weights
        if not self.needs_total:
            return by_lse, by_target
        return by_lse, by_target, -self.label_smoothing / self.classes * weights

    def token_weights(self, counted: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the weight of each token in a mean or a sum: 0 if it is ignored."""
        weight = torch.ones((), dtype=dtype, device=counted.device)
        weight = weight / counted.sum() if self.reduction == "mean" else weight
        return torch.where(counted, weight, 0)

    def reduce(self, losses: Tensor, counted: Tensor) -> Tensor:
        """Reduces the losses of all tokens; those that are ignored are 0."""
        losses = torch.where(counted, losses, 0)
        if self.reduction == "none":
            return losses
        return (
            losses.sum() / counted.sum() if self.reduction == "mean" else losses.sum()
        )


@dataclass(frozen=True)
class Targets:
    """Indices into a split vocabulary, as rows of this rank's part of it.

    Args:
        index: [...] int64, the row within the part. 0 where another rank has it; past
            the end where no rank has it, so that torch's own check raises.
        is_local: [...] bool, whether this rank has the row.
        counted: [...] bool, whether the token counts: it is not ``ignore_index``.
    """

    index: Tensor
    is_local: Tensor
    counted: Tensor

    @staticmethod
    def locate(
        layer: str,
        targets: Tensor,
        shape: Sequence[int],
        loss: TokenLoss,
        ignore_index: int,
    ) -> Targets:
        """Locates the targets in this rank's part; checks that each token has one.

        Args:
            layer: the public function's name, for messages.
            shape: the shape of the tokens.
        """
        title = f"{layer}: target"
        targets = _to_int64(title, targets)
        if targets.shape != torch.Size(shape):
            raise ValueError(
                f"{title}s of shape {tuple(targets.shape)} for tokens of shape "
                f"{tuple(shape)}: give each token one"
            )
        return locate_rows(title, targets, loss.local_classes, loss.axis, ignore_index)

    def __getitem__(self, rows: slice) -> Targets:
        return Targets(self.index[rows], self.is_local[rows], self.counted[rows])


def locate_rows(
    title: str,
    index: Tensor,
    rows: int,
    axis: Axis | None,
    ignore_index: int | None = None,
) -> Targets:
    """Locates indices into a vocabulary in this rank's part of it.

    Args:
        title: what one index is, for messages: "vocab_embedding: token".
        index: [...] integers, the same on all ranks of the axis.
        rows: how many rows of the vocabulary this rank has.
        axis: the axis over which it is split; None: it is whole.
        ignore_index: an index of tokens that do not count.

    Raises:
        TypeError: indices that are not integers.
        IndexError: an index outside the vocabulary, if reading it costs no wait.
        ValueError: an axis over which each rank has tokens of its own.
    """
    refuse_averaged_axis(f"{title}s", axis)
    index = _to_int64(title, index)
    vocabulary = rows if axis is None else rows * axis_size(axis)
    counted = torch.ones_like(index, dtype=torch.bool)
    advice = f"give 0 to {vocabulary - 1}"
    if ignore_index is not None:
        counted = index != ignore_index
        advice += f", or ignore_index={ignore_index} for a token that does not count"
    outside = counted & ((index < 0) | (index >= vocabulary))
    if (bad_index := _first_nonzero(torch.where(outside, index, 0))) is not None:
        raise IndexError(
            f"{title} {bad_index} is outside the vocabulary of {vocabulary}: {advice}"
        )
    start = 0 if axis is None else get_group(axis).position * rows
    is_local = counted & (index >= start) & (index < start + rows)
    local_index = torch.where(is_local, index - start, 0)
    return Targets(torch.where(outside, rows, local_index), is_local, counted)


def refuse_averaged_axis(title: str, axis: Axis | None) -> None:
    """Raises ValueError for an axis of ``shard``: there each rank has its own tokens.

    A layer whose weights are split needs the same tokens on all ranks.
    """
    if axis is None:
        return
    ranks = get_group(axis)
    if ranks.loss_is_mean or ranks.partly_mean:
        raise ValueError(
            f"{title}: over axis {ranks.name} shard averages the ranks' losses, each "
            "of its own tokens: split over another axis of the mesh"
        )


def _to_int64(title: str, index: Tensor) -> Tensor:
    """Casts indices to int64; raises TypeError unless they are integers."""
    dtype = index.dtype
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise TypeError(f"{title}s are integers, got {dtype}")
    return index.long()


def _first_nonzero(values: Tensor) -> int | None:
    """Returns the first value that is not 0, if any, and if reading it is cheap.

    Tensors without data have none; one on an accelerator would have to be waited for.
    """
    values = _torch.unwrapped(values)
    has_no_data = isinstance(values, _torch.FakeTensor) or values.is_meta
    if has_no_data or _torch.device_of(values).type != "cpu" or _torch.fake_active():
        return None
    # Beneath ``vmap`` and dispatch modes, which refuse or record reading a value.
    with _torch.beneath_functorch(), _torch.beneath_all_modes():
        nonzero = values[values != 0]
        return int(nonzero[0]) if nonzero.numel() else None
