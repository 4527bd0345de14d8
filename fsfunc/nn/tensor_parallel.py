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

from fsfunc import _torch
from fsfunc.comm.collectives import all_gather, pcast, psum, psum_scatter
from fsfunc.comm.groups import group
from fsfunc.sharded.leaf import Sharded

__all__ = ["column_linear", "own_rows", "part_of", "row_linear", "vocab_embedding"]

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
            others; a bias that is not split as its weight is.

    Transpose: the sum over the axis of what comes back to ``x`` (a reduce-scatter).

    Cost: backward one all-reduce of ``x``; with ``sequence_dim`` one all-gather, and
    backward one reduce-scatter.

    >>> column_linear(torch.ones(2, 3), torch.ones(4, 3)).shape
    torch.Size([2, 4])
    """
    several = not isinstance(weight, (Tensor, Sharded))
    weights: Sequence[Any] = tuple(weight) if several else (weight,)
    biases: Any = (bias,) if not several else bias or (None,) * len(weights)
    parts, axis = _split_alike("column_linear", weights)
    added = []
    for w, b in zip(weights, biases, strict=True):
        if b is not None:
            dim = w.layout.splits[0].dim if axis is not None else 0  # type: ignore
            b = part_of("column_linear", b, (dim,), like=w)[0].flatten()
        added.append(b)
    if axis is not None:
        x = _whole(x, axis, sequence_dim)
    found = []
    for w, b in zip(parts, added, strict=True):
        y = F.linear(x, w.flatten(0, -2), b)
        found.append(y if w.ndim == 2 else y.unflatten(-1, w.shape[:-1]))
    return tuple(found) if several else found[0]


def row_linear(
    x: Tensor,
    weight: Leaf,
    bias: Any = None,
    *,
    sequence_dim: int | None = None,
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
            along ``sequence_dim`` that the axis does not divide.

    Cost: one all-reduce of the result; with ``sequence_dim`` one reduce-scatter, and
    backward one all-gather.

    >>> row_linear(torch.ones(2, 4), torch.ones(3, 4), torch.ones(3)).shape
    torch.Size([2, 3])
    """
    part, axis = part_of("row_linear", weight, (1,))
    _refuse_split(bias)
    if axis is None:
        return F.linear(x, part, bias)
    y = _summed(F.linear(x, part), axis, sequence_dim)
    return y if bias is None else y + _met(bias, axis, sequence_dim)


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
        ValueError: a padding index outside it.

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
    rows, mine, start = own_rows(tokens, part, count, axis, "token")
    if padding_idx is not None:
        padding_idx -= start
        padding_idx = padding_idx if 0 <= padding_idx < part.shape[0] else None
    y = F.embedding(rows, part, padding_idx)
    if axis is None or mine is None:
        return y
    return _summed(torch.where(mine.unsqueeze(-1), y, 0), axis, sequence_dim)


def own_rows(
    index: Tensor, part: Tensor, count: int, axis: str | None, what: str
) -> tuple[Tensor, Tensor | None, int]:
    """Indices into ``count`` rows as indices into this rank's rows.

    Args:
        index: [...] integers; ``part``: [rows, ...], this rank's of ``count`` rows.
        what: names one of them, for the message.

    Returns:
        Indices, 0 where another rank has the row, and out of range where none has it;
        whether this rank has it (None without an axis); this rank's first row.

    Raises:
        IndexError: an index that is no row, where it costs nothing to ask.
    """
    if index.is_floating_point() or index.is_complex():
        raise TypeError(f"{what}s are integers, got {index.dtype}")
    outside = (index < 0) | (index >= count)
    if _can_ask(index) and bool(outside.any()):
        bad = index[outside][0].item()
        raise IndexError(
            f"{what} {bad} is outside the vocabulary of {count}: give 0 to {count - 1}"
        )
    if axis is None:
        return index, None, 0
    start = group(axis).position * part.shape[0]
    mine = (index >= start) & (index < start + part.shape[0])
    rows = torch.where(mine, index - start, 0)
    return torch.where(outside, part.shape[0], rows), mine, start


def part_of(
    what: str, leaf: Leaf, dims: Sequence[int], *, like: Leaf | None = None
) -> tuple[Tensor, str | None]:
    """This rank's part of a leaf, and the axis over which one of ``dims`` is split.

    Args:
        what: who asks, for the message.
        like: a leaf whose axis it must be split over.

    Raises:
        ValueError: it is split along another dim, or more than once, or otherwise than
            ``like``.
    """
    splits = leaf.layout.splits if isinstance(leaf, Sharded) else ()
    axis = splits[0].axis if splits else None
    wanted = like.layout.splits if isinstance(like, Sharded) else ()
    others = len(splits) > 1 or any(split.dim not in dims for split in splits)
    unlike = like is not None and axis != (wanted[0].axis if wanted else None)
    if others or unlike:
        way = f"split it along dim {' or '.join(map(str, dims))}, over one axis"
        if unlike:
            way = f"lay it out over the axis of {_said(like)}"
        raise ValueError(f"{what}: {_said(leaf)} is no leaf for it: {way}")
    if not isinstance(leaf, Sharded):
        return leaf, None
    return leaf.local, axis


def _refuse_split(bias: Any) -> None:
    if isinstance(bias, Sharded) and bias.layout.splits:
        raise ValueError(
            f"row_linear: the bias {bias.name!r} lies as {bias.layout}; the ranks' "
            "products are summed, and it is added once: leave it whole"
        )


def _split_alike(what: str, leaves: Sequence[Leaf]) -> tuple[list[Tensor], str | None]:
    found = [
        part_of(what, leaf, range(leaf.ndim - 1), like=leaves[0]) for leaf in leaves
    ]
    return [part for part, _ in found], found[0][1]


def _said(leaf: Any) -> str:
    return str(leaf.layout) if isinstance(leaf, Sharded) else "a whole tensor"


def _whole(x: Tensor, axis: str, sequence_dim: int | None) -> Tensor:
    """An activation that meets split weights, as each rank's own."""
    if sequence_dim is None:
        return pcast(x, axis, to="V")
    return all_gather(x, axis, dim=sequence_dim)


def _summed(y: Tensor, axis: str, sequence_dim: int | None) -> Tensor:
    """The ranks' terms of an activation, summed."""
    if sequence_dim is None:
        return psum(y, axis)
    return psum_scatter(y, axis, dim=sequence_dim)


def _met(x: Tensor, axis: str, sequence_dim: int | None) -> Tensor:
    """A whole parameter as it meets an activation between layers."""
    return x if sequence_dim is None else pcast(x, axis, to="V")


def _can_ask(x: Tensor) -> bool:
    """Whether to ask for a value costs no more than to read it."""
    fake = isinstance(x, _torch.FakeTensor) or _torch.fake_active()
    return x.device.type == "cpu" and not fake and not _torch.is_wrapped(x)
