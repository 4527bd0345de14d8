"""Layers whose weights are split over an axis of the mesh, as Megatron splits them.

A weight comes as a `Sharded` leaf that is split along one dim (see ``layouts=`` of
``ff.place``); what the layer does follows from the leaf. A plain tensor is all of the
weight, and the layer the ordinary one: one program runs on one device and on many.

Between layers an activation is one value on all ranks of the axis, or, with
``sequence_dim``, split along that dim (sequence parallelism): then gathers and
reduce-scatters take the place of all-reduces, with the same bytes, and what lies
between layers is computed and kept once. A whole parameter that meets split
activations, such as a norm's, enters by ``ff.pcast(w, axis, to="V")``, which sums its
gradient over the axis.

The split of a pair of products (column, then row) needs one sum forward and one
backward: Shoeybi et al., 2019, section 3; split sequences: Korthikanti et al., 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fsfunc.comm.collective_ops import claim_rank_local
from fsfunc.comm.collectives import all_gather, psum, psum_scatter
from fsfunc.comm.groups import get_group
from fsfunc.comm.typed_maps import pcast
from fsfunc.nn.token_losses import own_rows, refuse_mean
from fsfunc.sharded.leaf import Sharded

Leaf = Tensor | Sharded


def column_linear(
    x: Tensor,
    weight: Leaf | Sequence[Leaf],
    bias: Leaf | None | Sequence[Leaf | None] = None,
    *,
    sequence_dim: int | None = None,
) -> Any:
    """``x @ weight.T + bias``, of which each rank computes its own features.

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
    several = not isinstance(weight, (Tensor, Sharded))
    weights: Sequence[Any] = tuple(weight) if several else (weight,)
    biases: Any = (bias,) if not several else bias
    biases = (None,) * len(weights) if biases is None else tuple(biases)
    parts, axis, added = [], None, []
    for w, b in zip(weights, biases, strict=True):
        part, axis = part_of("column_linear", w, range(w.ndim - 1), like=weights[0])
        parts.append(part)
        if b is not None:
            dim = w.layout.splits[0].dim if axis is not None else 0  # type: ignore
            b = part_of("column_linear", b, (dim,), like=w)[0].flatten()
        added.append(b)
    sequence_dim = _checked("column_linear", x, axis, sequence_dim)
    if sequence_dim is not None:
        claim_rank_local(x, axis, "column_linear")
    if axis is not None and sequence_dim is None:
        x = pcast(x, axis, to="V")
    elif axis is not None:
        x = all_gather(x, axis, dim=sequence_dim)  # type: ignore[arg-type]
    found = []
    for w, b in zip(parts, added, strict=True):
        y = _linear(x, w.flatten(0, -2), b, sequence_dim)
        found.append(y if w.ndim == 2 else y.unflatten(-1, w.shape[:-1]))
    return tuple(found) if several else found[0]


def row_linear(
    x: Tensor, weight: Leaf, bias: Any = None, *, sequence_dim: int | None = None
) -> Tensor:
    """``x @ weight.T + bias``, of which each rank adds what its own features give.

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
    part, axis = part_of("row_linear", weight, (1,))
    _check_whole(bias)
    sequence_dim = _checked("row_linear", x, axis, sequence_dim)
    if axis is None:
        return F.linear(x, part, bias)
    claim_rank_local(x, axis, "row_linear")
    y = _summed(_linear(x, part, None, sequence_dim), axis, sequence_dim)
    if bias is not None and sequence_dim is not None:
        bias = pcast(bias, axis, to="V")
    return y if bias is None else y + bias


def vocab_embedding(
    weight: Leaf,
    tokens: Tensor,
    *,
    padding_idx: int | None = None,
    sequence_dim: int | None = None,
) -> Tensor:
    """The rows of ``weight`` at ``tokens``, of a vocabulary that is split.

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
    part, axis = part_of("vocab_embedding", weight, (0,))
    count = int(weight.shape[0])
    if padding_idx is not None:
        if not -count <= padding_idx < count:
            raise ValueError(
                f"vocab_embedding: padding_idx={padding_idx} is outside the vocabulary "
                f"of {count}: give one from {-count} to {count - 1}"
            )
        padding_idx %= count
    rows = part.shape[0]
    own = own_rows("vocab_embedding: token", tokens, rows, axis)
    if axis is None:
        return F.embedding(own.at, part, padding_idx)
    if padding_idx is not None:
        padding_idx -= get_group(axis).position * rows
    known = isinstance(padding_idx, int) and 0 <= padding_idx < rows
    y = F.embedding(own.at, part, padding_idx if known else None)
    if isinstance(padding_idx, Tensor):  # on a vmap mesh, that of every rank
        y = torch.where((own.at == padding_idx).unsqueeze(-1), y.detach(), y)
    sequence_dim = _checked("vocab_embedding", y, axis, sequence_dim)
    return _summed(torch.where(own.mine.unsqueeze(-1), y, 0), axis, sequence_dim)


def part_of(
    what: str,
    leaf: Leaf,
    dims: Sequence[int],
    *,
    like: Leaf | None = None,
    axis: str | None = None,
) -> tuple[Tensor, str | None]:
    """This rank's part of a leaf, and the axis over which one of ``dims`` is split.

    Args:
        what: who asks, for the message.
        like: a leaf whose axis it must be split over.
        axis: the axis over which it must be split, and over which a plain tensor is.

    Raises:
        ValueError: it is split along another dim, or more than once, or otherwise than
            ``like``, or into unequal parts, or over another axis; it lies in a buffer.
    """
    if not isinstance(leaf, Sharded):
        splits: Any = ()
    elif leaf.layout.flat is not None:
        raise ValueError(
            f"{what}: {leaf.layout} lies in a buffer: read it in an @ff.unit, which "
            "gathers the rest"
        )
    else:
        splits = leaf.layout.splits
    found = splits[0].axis if splits else None
    wanted = like.layout.splits if isinstance(like, Sharded) else ()
    others = len(splits) > 1 or any(split.dim not in dims for split in splits)
    unlike = like is not None and found != (wanted[0].axis if wanted else None)
    apart = isinstance(leaf, Sharded) and axis not in (None, found)
    if others or unlike or apart:
        over = f'axis "{axis}", or leave axis= out' if apart else "one axis"
        way = f"split it along dim {' or '.join(map(str, dims))}, over {over}"
        if unlike:
            way = f"lay it out over the axis of {_said(like)}"
        raise ValueError(f"{what}: {_said(leaf)} is no leaf for it: {way}")
    for split in splits:
        n = leaf.shape[split.dim]
        if n % split.size:
            below = n // split.size * split.size
            raise ValueError(
                f"{what}: {_said(leaf)}: the axis does not divide {n}: pad it to "
                f"{below + split.size}" + (f", or cut it to {below}" if below else "")
            )
    return (leaf.local, found) if isinstance(leaf, Sharded) else (leaf, axis)


def token_dim(what: str, x: Tensor, dim: int) -> int:
    """``dim``, counted from the start, as one of those of tokens."""
    if not -x.ndim <= dim < x.ndim or dim % x.ndim == x.ndim - 1:
        raise ValueError(
            f"{what}: sequence_dim={dim} of shape {tuple(x.shape)}: it is one of the "
            "dims before the last, of tokens"
        )
    return dim % x.ndim


def _checked(what: str, x: Tensor, axis: str | None, dim: int | None) -> int | None:
    """``sequence_dim``; without it all ranks of the axis must have the same tokens."""
    if dim is not None:
        return token_dim(what, x, dim)
    refuse_mean(what, axis)
    return None


def _check_whole(bias: Any) -> None:
    if isinstance(bias, Sharded) and bias.layout.splits:
        raise ValueError(
            f"row_linear: the bias {bias.name!r} has the layout {bias.layout}; the "
            "ranks' products are summed, and it is added once: leave it whole"
        )


def _said(leaf: Any) -> str:
    return str(leaf.layout) if isinstance(leaf, Sharded) else "a whole tensor"


def _summed(y: Tensor, axis: str, sequence_dim: int | None) -> Tensor:
    """The ranks' terms of an activation, summed."""
    if sequence_dim is None:
        return psum(y, axis)
    return psum_scatter(y, axis, dim=sequence_dim)


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, sequence_dim: int | None
) -> Tensor:
    """``F.linear`` of rows in the order in which they lie in memory.

    Sequences that were gathered lie position by position, as they came, and those to
    be scattered are to lie so: each product would first bring its input into another
    order, and keep that copy for its backward.
    """
    if sequence_dim is None or x.is_contiguous():
        return F.linear(x, weight, bias)
    by_position = x.movedim(sequence_dim, 0)
    return F.linear(by_position, weight, bias).movedim(0, sequence_dim)
