"""torch's own layers as they run where their weights come split."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fsfunc import _torch
from fsfunc.comm.collectives import all_gather
from fsfunc.comm.groups import group
from fsfunc.interop.split_flow import SplitFlow
from fsfunc.interop.split_values import SplitTensor
from fsfunc.nn.tensor_parallel import part_of, row_linear, vocab_embedding
from fsfunc.sharded.leaf import is_sharded

__all__ = ["KINDS", "ColumnLinear", "gather_sequence"]


class ColumnLinear(nn.Linear):
    """Its output is this rank's features."""

    def forward(self, input: Tensor) -> Tensor:
        y, axis = _column(self, input)
        if axis is not None:
            _flow(self).begin(y)
        return y


class VocabLinear(nn.Linear):
    """Its output is this rank's logits, for `vocab_cross_entropy`."""

    def forward(self, input: Tensor) -> Tensor:
        y, axis = _column(self, input)
        return y if axis is None else SplitTensor(y, axis, -1)  # type: ignore


class GatheredLinear(nn.Linear):
    """Its output is whole: the ranks' features beside each other."""

    def forward(self, input: Tensor) -> Tensor:
        y, axis = _column(self, input)
        return y if axis is None else all_gather(y, axis, dim=-1, to="I")


class RowLinear(nn.Linear):
    """Its input is this rank's features."""

    def forward(self, input: Tensor) -> Tensor:
        weight: Any = _weight(self)
        if not (is_sharded(weight) and weight.layout.splits):
            return row_linear(input, weight, self.bias)
        _check_input(weight, input)
        flow = _flow(self)
        flow.end(input, weight.name)
        dim = 1 if flow.sequence else None
        y = row_linear(input, weight, self.bias, sequence_dim=dim)
        flow.joined(y)
        return y


class VocabEmbedding(nn.Embedding):
    """Its rows lie on the ranks."""

    def forward(self, input: Tensor) -> Tensor:
        return vocab_embedding(_weight(self), input, padding_idx=self.padding_idx)


# The word of a plan, and the class of the layer: the class that runs in its place.
KINDS: dict[tuple[str, type], type[nn.Module]] = {
    ("column", nn.Linear): ColumnLinear,
    ("column_gathered", nn.Linear): GatheredLinear,
    ("row", nn.Linear): RowLinear,
    ("vocab", nn.Embedding): VocabEmbedding,
    ("vocab", nn.Linear): VocabLinear,
}


def gather_sequence(m: nn.Module, args: Any, keywords: Any) -> tuple[Any, Any]:
    """A hook before a module around split layers: they take all positions."""
    return _flow(m).gathered(args, keywords)


def _flow(m: nn.Module) -> SplitFlow:
    """What the call that has a layer knows of split features."""
    table: Any = _torch.tables(m)[0]
    return table.tensors.given.flow


def _weight(m: Any) -> Any:
    """A layer's weight.

    Raises:
        ValueError: it is split over an axis along which each rank has its own rows.
    """
    weight = m.weight
    for split in weight.layout.splits if is_sharded(weight) else ():
        if group(split.axis).mean:
            raise ValueError(
                f'{weight.layout} is split over "{split.axis}", over which shard '
                "averages: the ranks' rows would meet; split layers over an axis that "
                "shard has not"
            )
    return weight


def _column(m: Any, x: Tensor) -> tuple[Tensor, str | None]:
    """This rank's features, and the axis over which they are split."""
    weight, bias = _weight(m), m.bias
    part, axis = part_of("column_linear", weight, (0,))
    if bias is not None:
        bias, _ = part_of("column_linear", bias, (0,), like=weight)
    if axis is not None:
        x = _flow(m).entered(x, axis)
    return nn.functional.linear(x, part, bias), axis


def _check_input(weight: Any, x: Tensor) -> None:
    wanted = weight.layout.shape[1] // weight.layout.splits[0].size
    if x.shape[-1] != wanted:
        raise ValueError(
            f'plan: the "row" layer of {weight.name!r} is given {x.shape[-1]} features,'
            f' and a rank has {wanted}: the layer before it must be "column"'
        )
