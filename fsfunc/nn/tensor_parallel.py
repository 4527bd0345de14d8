"""Layers whose weights are split over an axis of the mesh, as Megatron splits them.

    y = row_linear(gelu(column_linear(x, w1)), w2)    w1 split by rows, w2 by columns

A weight comes as a `Sharded` leaf that is split along one dim (see ``layouts=`` of
``ff.place``), and the leaf tells the layer what to do. A plain tensor is all of the
weight, and the layer the ordinary one: one program runs on one device and on many.

Between layers an activation is one value on all ranks of the axis, or, with
``sequence_dim``, split along that dim (sequence parallelism): then gathers and
reduce-scatters take the place of all-reduces, with the same bytes, and what lies
between layers is computed and saved once, not on every rank. A whole parameter that
meets split activations, such as a norm's, enters by ``ff.pcast(w, axis, to="V")``,
which sums its gradient over the axis.

The split of a pair of products (column, then row) needs one sum forward and one
backward: Shoeybi et al., 2019, section 3; split sequences: Korthikanti et al., 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from fsfunc.comm.collective_ops import claim_rank_local
from fsfunc.comm.collectives import all_gather, psum, psum_scatter
from fsfunc.comm.folding import as_axis, axis_text, expand_here
from fsfunc.comm.groups import get_group
from fsfunc.comm.mesh import Axis
from fsfunc.comm.typed_maps import pcast
from fsfunc.nn.token_losses import locate_rows, refuse_averaged_axis
from fsfunc.sharded.leaf import Sharded

ParamLeaf = Tensor | Sharded  # a weight or bias, as these layers take them


@overload
def column_linear(
    x: Tensor,
    weight: ParamLeaf,
    bias: ParamLeaf | None = None,
    *,
    sequence_dim: int | None = None,
) -> Tensor: ...
@overload
def column_linear(
    x: Tensor,
    weight: Sequence[ParamLeaf],
    bias: Sequence[ParamLeaf | None] | None = None,
    *,
    sequence_dim: int | None = None,
) -> tuple[Tensor, ...]: ...
def column_linear(
    x: Tensor,
    weight: ParamLeaf | Sequence[ParamLeaf],
    bias: ParamLeaf | None | Sequence[ParamLeaf | None] = None,
    *,
    sequence_dim: int | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Computes ``x @ weight.T + bias``: each rank computes its own features.

    Several weights share their input: it enters once for all of them.

    Args:
        x: [..., in], one value over the axis; with ``sequence_dim`` split along it.
        weight: [out, in], split along dim 0; or a sequence of such. ``out`` may be
            several dims, such as (3, heads, head_dim), of which one is split.
        bias: [out], split likewise; or a sequence, one for each weight.
        sequence_dim: the dim of ``x`` that is split over the axis.

    Returns:
        [..., out / n], this rank's features (a tuple of them for several weights).

    Raises:
        ValueError: a weight split along its last dim, or over another axis than the
            others; a bias that is not split as its weight is; an axis over which
            ``shard`` averages, where ``x`` is not split along ``sequence_dim`` over it.

    Transpose: the sum over the axis of what comes back to ``x`` (a reduce-scatter).

    Cost: backward one all-reduce of ``x``; with ``sequence_dim`` one all-gather, and
    backward one reduce-scatter.

    >>> column_linear(torch.ones(2, 3), torch.ones(4, 3)).shape
    torch.Size([2, 4])
    """
    are_several = not isinstance(weight, (Tensor, Sharded))
    weights: Sequence[Any] = tuple(weight) if are_several else (weight,)
    biases: Any = (bias,) if not are_several else bias
    biases = (None,) * len(weights) if biases is None else tuple(biases)
    local_weights, axis, local_biases = [], None, []
    for w, b in zip(weights, biases, strict=True):
        local_weight, axis = local_part(
            "column_linear", w, range(w.ndim - 1), like=weights[0]
        )
        local_weights.append(local_weight)
        if b is not None:
            dim = w.layout.splits[0].dim if axis is not None else 0  # type: ignore
            b = local_part("column_linear", b, (dim,), like=w)[0].flatten()
        local_biases.append(b)
    sequence_dim = _check_sequence_dim("column_linear", x, axis, sequence_dim)
    if sequence_dim is not None:
        claim_rank_local(x, axis, "column_linear")
    # Once for all weights: the transpose sums the gradients by x of all of them in one
    # collective.
    if axis is not None and sequence_dim is None:
        x = pcast(x, axis, to="V")
    elif axis is not None:
        x = all_gather(x, axis, dim=sequence_dim)  # type: ignore[arg-type]
    outputs = []
    for w, b in zip(local_weights, local_biases, strict=True):
        y = _linear_as_it_lies(x, w.flatten(0, -2), b, sequence_dim)
        outputs.append(y if w.ndim == 2 else y.unflatten(-1, w.shape[:-1]))
    return tuple(outputs) if are_several else outputs[0]


def row_linear(
    x: Tensor,
    weight: ParamLeaf,
    bias: Tensor | None = None,
    *,
    sequence_dim: int | None = None,
) -> Tensor:
    """Computes ``x @ weight.T + bias``: each rank has some of the input's features.

    Args:
        x: [..., in / n], this rank's features, as ``column_linear`` gives them.
        weight: [out, in], split along dim 1.
        bias: [out], whole: it is added once.
        sequence_dim: the dim along which the result is split over the axis.

    Returns:
        [..., out], one value over the axis; with ``sequence_dim`` this rank's part.

    Raises:
        ValueError: a weight split along another dim; a bias that is split; a length
            along ``sequence_dim`` that the axis does not divide; without it, an axis
            over which ``shard`` averages.

    Cost: one all-reduce of the result; with ``sequence_dim`` one reduce-scatter, and
    backward one all-gather.

    >>> row_linear(torch.ones(2, 4), torch.ones(3, 4), torch.ones(3)).shape
    torch.Size([2, 3])
    """
    local_weight, axis = local_part("row_linear", weight, (1,))
    _check_not_split(bias)
    sequence_dim = _check_sequence_dim("row_linear", x, axis, sequence_dim)
    if axis is None:
        return F.linear(x, local_weight, bias)
    claim_rank_local(x, axis, "row_linear")
    y = _sum_over_ranks(
        _linear_as_it_lies(x, local_weight, None, sequence_dim), axis, sequence_dim
    )
    # The whole bias meets split tokens: its gradients are summed over the ranks.
    if bias is not None and sequence_dim is not None:
        bias = pcast(bias, axis, to="V")
    return y if bias is None else y + bias


def vocab_embedding(
    weight: ParamLeaf,
    tokens: Tensor,
    *,
    padding_idx: int | None = None,
    sequence_dim: int | None = None,
) -> Tensor:
    """Looks up the rows of ``weight`` at ``tokens``, of a vocabulary that is split.

    Args:
        weight: [vocabulary, features], split along dim 0.
        tokens: [...] integers, the same on all ranks of the axis.
        padding_idx: the row that gets no gradient; below 0 counted from the end.
        sequence_dim: the dim along which the result is split over the axis.

    Returns:
        [..., features], one value over the axis; with ``sequence_dim`` this rank's
        part.

    Raises:
        IndexError: a token outside the vocabulary (of tensors on other devices than
            the CPU, torch's own assertion).
        ValueError: a padding index outside it; an axis over which ``shard`` averages.
        TypeError: tokens that are not integers.

    Cost: one all-reduce of the result; with ``sequence_dim`` one reduce-scatter, and
    backward one all-gather.

    >>> vocab_embedding(torch.eye(3), torch.tensor([2, 0])).tolist()
    [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    """
    local_weight, axis = local_part("vocab_embedding", weight, (0,))
    vocabulary = int(weight.shape[0])
    if padding_idx is not None:
        if not -vocabulary <= padding_idx < vocabulary:
            raise ValueError(
                f"vocab_embedding: padding_idx={padding_idx} is outside the vocabulary "
                f"of {vocabulary}: give one from {-vocabulary} to {vocabulary - 1}"
            )
        padding_idx %= vocabulary
    rows = local_weight.shape[0]
    local_tokens = locate_rows("vocab_embedding: token", tokens, rows, axis)
    if axis is None:
        return F.embedding(local_tokens.index, local_weight, padding_idx)
    # Each rank looks up its own rows, and 0 for all others: the sum has every row once.
    if padding_idx is not None:
        padding_idx -= get_group(axis).position * rows
    is_local_number = isinstance(padding_idx, int) and 0 <= padding_idx < rows
    y = F.embedding(
        local_tokens.index, local_weight, padding_idx if is_local_number else None
    )
    if isinstance(padding_idx, Tensor):  # on a vmap mesh, that of every rank
        y = torch.where(
            (local_tokens.index == padding_idx).unsqueeze(-1), y.detach(), y
        )
    sequence_dim = _check_sequence_dim("vocab_embedding", y, axis, sequence_dim)
    return _sum_over_ranks(
        torch.where(local_tokens.is_local.unsqueeze(-1), y, 0), axis, sequence_dim
    )


def local_part(
    layer: str,
    leaf: ParamLeaf,
    dims: Sequence[int],
    *,
    like: ParamLeaf | None = None,
    axis: Axis | None = None,
) -> tuple[Tensor, Axis | None]:
    """Returns this rank's part of a leaf, and the axis over which it is split.

    Of a leaf that is split over a name for several axes, the axis is a tuple of them.

    Args:
        layer: the name of the function that asks, for messages.
        leaf: a leaf that is whole, or split along one dim; or a plain tensor.
        dims: the dims along which it may be split.
        like: a leaf over whose axis it must be split.
        axis: the axis over which it must be split. A plain tensor is taken for this
            rank's part over it.

    Raises:
        ValueError: it is split along another dim, or along several, or otherwise than
            ``like``, or into unequal parts, or over another axis; it lies in a buffer.
    """
    if not isinstance(leaf, Sharded):
        cuts: Any = ()
    elif leaf.layout.flat is not None:
        raise ValueError(
            f"{layer}: {leaf.layout} lies in a buffer: read it in an @ff.unit, which "
            "gathers the rest"
        )
    else:
        cuts = leaf.layout.cuts
    leaf_axes = cuts[0][1] if cuts else ()
    like_cuts = like.layout.cuts if isinstance(like, Sharded) else ()
    # Three ways to be laid out wrongly.
    wrong_dims = len(cuts) > 1 or any(dim not in dims for dim, *_ in cuts)
    wrong_axis = like is not None and leaf_axes != (
        like_cuts[0][1] if like_cuts else ()
    )
    not_over_axis, over = False, "one axis"
    if isinstance(leaf, Sharded) and axis is not None:
        if not_over_axis := leaf_axes != expand_here(axis):
            over = f"axis {axis_text(axis)}, or leave axis= out"
    if wrong_dims or wrong_axis or not_over_axis:
        advice = f"split it along dim {' or '.join(map(str, dims))}, over {over}"
        if wrong_axis:
            advice = f"lay it out over the axis of {_describe_layout(like)}"
        raise ValueError(
            f"{layer}: {_describe_layout(leaf)} is no leaf for it: {advice}"
        )
    for dim, _, size in cuts:
        n = leaf.shape[dim]
        if n % size:
            multiple = n // size * size
            raise ValueError(
                f"{layer}: {_describe_layout(leaf)}: the axis does not divide {n}: pad "
                f"it to {multiple + size}"
                + (f", or cut it to {multiple}" if multiple else "")
            )
    if not isinstance(leaf, Sharded):
        return leaf, axis
    return leaf.local, as_axis(leaf_axes) if leaf_axes else None


def token_dim(layer: str, x: Tensor, dim: int) -> int:
    """Returns ``dim`` counted from the start; raises unless it is a dim of tokens."""
    if not -x.ndim <= dim < x.ndim or dim % x.ndim == x.ndim - 1:
        raise ValueError(
            f"{layer}: sequence_dim={dim} of shape {tuple(x.shape)}: it is one of the "
            "dims before the last, of tokens"
        )
    return dim % x.ndim


def _check_sequence_dim(
    layer: str, x: Tensor, axis: Axis | None, dim: int | None
) -> int | None:
    """Returns ``sequence_dim`` counted from the start, or None.

    Raises ValueError if it is None over an axis whose ranks have different tokens.
    """
    if dim is not None:
        return token_dim(layer, x, dim)
    refuse_averaged_axis(layer, axis)
    return None


def _check_not_split(bias: ParamLeaf | None) -> None:
    """Raises ValueError if a bias is split."""
    if isinstance(bias, Sharded) and bias.layout.splits:
        raise ValueError(
            f"row_linear: the bias {bias.name!r} has the layout {bias.layout}; the "
            "ranks' products are summed, and it is added once: leave it whole"
        )


def _describe_layout(leaf: ParamLeaf | None) -> str:
    return str(leaf.layout) if isinstance(leaf, Sharded) else "a whole tensor"


def _sum_over_ranks(y: Tensor, axis: Axis, sequence_dim: int | None) -> Tensor:
    """Sums the ranks' terms of an activation, and splits it if tokens are split."""
    if sequence_dim is None:
        return psum(y, axis)
    return psum_scatter(y, axis, dim=sequence_dim)


def _linear_as_it_lies(
    x: Tensor, weight: Tensor, bias: Tensor | None, sequence_dim: int | None
) -> Tensor:
    """Computes ``F.linear`` of rows in the order in which they lie in memory."""
    # A gathered sequence lies position by position, rank after rank, and one that will
    # be scattered must lie so. ``F.linear`` of another order would copy its input, and
    # autograd would save the copy.
    if sequence_dim is None or x.is_contiguous():
        return F.linear(x, weight, bias)
    by_position = x.movedim(sequence_dim, 0)
    return F.linear(by_position, weight, bias).movedim(0, sequence_dim)
