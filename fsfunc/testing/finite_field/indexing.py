"""Operators that move numbers, make them, and add them at indices.

The sets of names tell ``mode.py`` which operators need no arithmetic of the field.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fsfunc.testing.finite_field.field import Field, modulo
from fsfunc.testing.finite_field.rules import (
    Operand,
    lift_operand,
    multiply,
    residue_of,
    rule,
)

# Operators that move numbers, and compute nothing. Views are told by their schemas.
MOVES = {
    "alias_copy", "as_strided_copy", "as_strided_scatter", "block_diag", "cat", "clone",
    "contiguous", "copy", "copy_", "detach_copy", "diag_embed", "diagonal_backward",
    "diagonal_scatter", "embedding", "expand_copy", "flip", "gather", "index",
    "index_copy", "index_select", "is_pinned", "is_same_size", "is_set_to",
    "lift", "masked_scatter", "masked_select", "permute_copy", "pixel_shuffle",
    "pixel_unshuffle", "record_stream", "reflection_pad1d", "repeat", "resize_",
    "repeat_interleave", "replication_pad1d", "roll", "rot90", "scatter.src",
    "select_backward", "select_scatter", "set_", "slice_backward", "slice_scatter",
    "split_copy", "split_with_sizes_copy", "stack", "stride", "sym_numel", "sym_size",
    "sym_storage_offset", "sym_stride", "take", "transpose_copy", "tril", "triu",
    "unbind_copy", "unfold_copy", "unsafe_chunk", "unsafe_split",
    "unsafe_split_with_sizes", "_unsafe_index", "_unsafe_view", "view_copy",
    "_reshape_copy", "_reshape_alias_copy", "im2col", "zero", "zero_", "t_",
    "squeeze_", "unsqueeze_", "transpose_", "as_strided_", "swapaxes_", "swapdims_",
    "detach_", "pin_memory", "_pin_memory", "_has_same_storage_numel", "tril_", "triu_",
    "channel_shuffle", "masked_scatter_",
    "requires_grad_", "squeeze_copy", "unsqueeze_copy", "select_copy", "slice_copy",
}  # fmt: skip

# Operators that also write scalars, which become numbers.
FILLS = {
    "fill", "fill_", "masked_fill", "masked_fill_", "constant_pad_nd", "index_fill",
    "index_fill_", "scatter", "scatter_", "fill_diagonal_", "where",
}  # fmt: skip

# Operators that add up what they move: their sums are taken modulo PRIME after.
SUMS = {
    "adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward", "col2im",
    "masked_scatter_backward", "max_pool3d_with_indices_backward", "put",
    "reflection_pad1d_backward", "reflection_pad2d_backward",
    "reflection_pad3d_backward", "replication_pad1d_backward",
    "replication_pad2d_backward", "replication_pad3d_backward", "unfold_backward",
}  # fmt: skip

# Operators that make tensors without taking any.
FACTORIES = {
    "arange", "eye", "full", "full_like", "linspace", "new_full", "new_ones",
    "new_zeros", "ones", "ones_like", "scalar_tensor", "zeros", "zeros_like", "empty",
    "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted",
    "tril_indices", "triu_indices", "lift_fresh", "lift_fresh_copy", "logspace",
    "_efficientzerotensor", "one_hot", "_new_zeros_with_same_feature_meta",
}  # fmt: skip


@rule("scatter_add")
def scatter_add(
    f: Field, x: Operand, dim: int, index: Tensor, source: Operand
) -> Tensor:
    """Returns x with the elements of ``source`` added at indices along a dim."""
    return modulo(residue_of(x).scatter_add(dim, index, residue_of(source)))


@rule("index_add")
def index_add(
    f: Field,
    x: Operand,
    dim: int,
    index: Tensor,
    source: Operand,
    *,
    alpha: Operand = 1,
) -> Tensor:
    """Returns x with whole slices of ``source`` added at indices along a dim."""
    source = residue_of(multiply(f, source, alpha))
    return modulo(residue_of(x).index_add(dim, index, source))


@rule("index_put", "_unsafe_index_put", "_index_put_impl")
def index_put(
    f: Field,
    x: Operand,
    indices: Sequence[Tensor | None],
    values: Operand,
    accumulate: bool = False,
    unsafe: bool = False,
) -> Tensor:
    """Returns x with values written, or added, at indices of several dims."""
    # ``Tensor.index_put`` does not take None among the indices; the operator does.
    put = torch.ops.aten.index_put
    if not accumulate:
        return put(lift_operand(x), indices, lift_operand(values))
    return modulo(put(residue_of(x), indices, residue_of(values), True))


@rule("scatter_reduce.two")
def scatter_reduce(
    f: Field, x: Operand, dim: int, index: Tensor, source: Operand, reduce: str, *,
    include_self: bool = True,
) -> Tensor:  # fmt: skip
    """Returns x with ``source`` added at indices; products and maxima have no rule."""
    if reduce != "sum":
        raise NotImplementedError(f"scatter_reduce by {reduce!r} has no exact rule")
    reduced = residue_of(x).scatter_reduce(
        dim, index, residue_of(source), "sum", include_self=include_self
    )
    return modulo(reduced)


@rule("scatter.reduce", "scatter.value_reduce")
def scatter_by(
    f: Field, x: Operand, dim: int, index: Tensor, source: Operand, *, reduce: str
) -> Tensor:
    """Returns x with ``source``, or one number, added at indices."""
    if reduce != "add":
        raise NotImplementedError(f"scatter by {reduce!r} has no exact rule")
    x, source = residue_of(x), residue_of(source)
    return modulo(x.scatter_add(dim, index, source.expand(index.shape)))


@rule("nonzero")
def nonzero(f: Field, x: Tensor) -> Tensor:
    """Returns where numbers are not 0."""
    return torch.nonzero(residue_of(x))
