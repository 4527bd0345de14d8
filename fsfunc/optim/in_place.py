"""A kernel run over matched trees in one pass over memory, in place where that may be.

The kernels are torch's fused operators, which have neither a derivative nor a guard:
they read memory as if every tensor were dense, and leave version counters as they were.
All of that is seen to here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.core.frames import frame
from fsfunc.optim.leaves import Tree, local
from fsfunc.optim.matching import Matched
from fsfunc.runtime.stores import LIES, brought, copied, lies
from fsfunc.sharded.donated import Donation, Everything
from fsfunc.sharded.leaf import is_sharded


class _Target(NamedTuple):
    """A tree to write: its active leaves, and their memory as few tensors."""

    leaves: list[Any]
    tensors: list[Tensor]


def fused(
    matched: Matched,
    kernel: Callable[..., None],
    decays: Sequence[Any],
    *,
    cast: bool = True,
    least: torch.dtype | None = None,
) -> Callable[[], list[Tree]]:
    """What writes ``kernel`` into params and moments, and returns them.

    Under `donate` it writes into the tensors given, where nobody else holds their
    memory, else into copies (on fresh memory the page faults cost most, whatever the
    order of copy and update).
    ``kernel(params, grads, *moments, weight_decay=)`` takes lists of dense tensors of
    one dtype on one device, and is called once for each such group. ``decays`` are
    whatever it takes for ``weight_decay``, by leaf. Without ``cast`` it takes tensors
    as they are, and only the parameters' dtype tells groups apart. A dtype narrower
    than ``least`` becomes that.
    """
    donation = frame().donated
    if donation is not None and overlap(matched):
        donation = None

    def commit() -> list[Tree]:
        kept = [matched.trees[0], *matched.trees[2:]]
        taken: tuple[list[Any], list[Any]] = [], []  # leaves written over, and new ones
        with torch.no_grad():
            new = targets(matched, kept, donation, taken)
            count_write([t for target in new for t in target.tensors])
            groups = _groups(matched, new, decays, least)
            for (_, dtype, decay, _), rows in groups.items():
                if cast:
                    _write(kernel, rows, dtype, decay)
                else:
                    kernel(*zip(*rows, strict=True), weight_decay=decay)
        if donation is not None:
            donation.take(*taken)
        return [
            matched.restore(target.leaves, leaves)
            for target, leaves in zip(new, kept, strict=True)
        ]

    return commit


def overlap(matched: Matched) -> bool:
    """Whether memory to write lies at two places: each then gets its own."""
    params, grads, *moments = [b.tensors for b in matched.buffers]
    tensors = [t for column in (params, *moments) for t in column]
    for kind in {*map(type, tensors), *map(type, grads)}:
        if issubclass(kind, _torch.FakeTensor):
            return False  # nothing is written, and asking where would raise
    written = [at for t in tensors if (at := t.data_ptr())]  # 0: it has no elements
    read = {t.data_ptr() for t in grads}
    return len(set(written) - read) < len(written)


def targets(
    matched: Matched,
    kept: list[list[Any]],
    donation: Donation | None,
    taken: tuple[list[Any], list[Any]],
) -> list[_Target]:
    """The trees to write, or copies of them."""
    written = [matched.buffers[0], *matched.buffers[2:]]
    if donation is None:
        copies = [[copied(t) for t in b.tensors] for b in written]
        return [_Target(b.rebuild(c), c) for b, c in zip(written, copies, strict=True)]
    active = [[column[i] for i in matched.active] for column in kept]
    flats = [b.tensors for b in written]
    if isinstance(donation, Everything):  # leaves that are recorded stay themselves
        return [_Target(*pair) for pair in zip(active, flats, strict=True)]
    donation.look()
    return [
        _over(old, b, tensors, donation.may_write(tensors), taken)
        for old, b, tensors in zip(active, written, flats, strict=True)
    ]


def _over(
    old: list[Any],
    buffers: Any,
    tensors: list[Tensor],
    mine: list[bool],
    taken: tuple[list[Any], list[Any]],
) -> _Target:
    """New leaves over the memory of the old ones, where that is ours, or over copies.

    Of a leaf that is written over the old one is spent: the new one is another object.
    """
    leaves = list(old)
    if not all(mine):
        pairs = zip(tensors, mine, strict=True)
        tensors = [t if own else copied(t) for t, own in pairs]
        leaves = buffers.rebuild(tensors)
    for (positions, packed), own in zip(buffers.groups, mine, strict=True):
        if not own:
            continue
        if packed is None:
            (i,) = positions
            leaf = old[i].twin() if is_sharded(old[i]) else old[i].detach()
            leaves[i] = leaf
            taken[0].append(old[i])
            taken[1].append(leaf)
            continue
        for i, leaf in zip(positions, packed.renewed().leaves(), strict=True):
            leaves[i] = leaf
            taken[0].append(old[i])
            taken[1].append(leaf)
    return _Target(leaves, tensors)


def _groups(
    matched: Matched,
    new: list[_Target],
    decays: Sequence[Any],
    least: torch.dtype | None,
) -> dict[Any, list[list[Tensor]]]:
    """Rows (param, grad, *moments) by device, dtype and decay.

    A flat buffer whose leaves decay differently falls apart into its leaves. What of a
    row lies beside the device may have to be brought: such a row is a group of its own.
    """
    groups: dict[Any, list[list[Tensor]]] = {}
    if (alike := _alike(matched, new, decays, least)) is not None:
        return alike
    grads = _Target(
        [matched.trees[1][i] for i in matched.active], matched.buffers[1].tensors
    )
    columns = [new[0], grads, *new[1:]]
    for k, members in enumerate(matched.members):
        each = [decays[j] for j in members]
        if each.count(each[0]) == len(each):
            cuts = [(each[0], [c.tensors[k] for c in columns])]
        else:
            cuts = [(decays[j], [local(c.leaves[j]) for c in columns]) for j in members]
        for decay, row in cuts:
            p, _, *moments = row
            if p.numel():
                dtype = p.dtype
                for m in moments:
                    if m.dtype != dtype:
                        dtype = torch.promote_types(dtype, m.dtype)
                if least is not None:
                    dtype = torch.promote_types(dtype, least)
                apart = len(groups) if LIES and any(map(lies, row)) else -1
                groups.setdefault((p.device, dtype, decay, apart), []).append(row)
    return groups


def _alike(
    matched: Matched,
    new: list[_Target],
    decays: Sequence[Any],
    least: torch.dtype | None,
) -> dict[Any, list[list[Tensor]]] | None:
    """The one group of rows, where all parameters and moments are of one kind."""
    if LIES or not decays or decays.count(decays[0]) < len(decays):
        return None
    kinds = {(t.device, t.dtype) for target in new for t in target.tensors}
    if len(kinds) > 1 or not all(t.numel() for t in new[0].tensors):
        return None
    ((device, dtype),) = kinds
    if least is not None:
        dtype = torch.promote_types(dtype, least)
    columns = [
        new[0].tensors,
        matched.buffers[1].tensors,
        *(t.tensors for t in new[1:]),
    ]
    return {
        (device, dtype, decays[0], -1): [
            list(row) for row in zip(*columns, strict=True)
        ]
    }


def count_write(tensors: Sequence[Tensor]) -> None:
    """Counts one write more, where a rank holds no element too.

    By the versions `shard` sees whether a gathered buffer is still right, and all ranks
    must come to one answer.
    """
    counted = [t for t in tensors if not t.is_inference()]
    if counted:
        torch.autograd.graph.increment_version(counted)


def _write(
    kernel: Callable[..., None],
    rows: list[list[Tensor]],
    dtype: torch.dtype,
    decay: float,
) -> None:
    """Run ``kernel`` over the rows; what is not dense or not of ``dtype`` is copied.

    Fused kernels read any tensor as if it were dense: an expanded gradient (that of a
    sum) would give garbage, silently.
    """
    columns = [*zip(*rows, strict=True)]
    beside = [lies(t) is not None for row in rows for t in row] if LIES else []
    if any(beside) and not all(beside):
        work = [[_here(t, dtype) for t in column] for column in columns]
    else:
        work = [[dense(t, dtype) for t in column] for column in columns]
    kernel(*work, weight_decay=decay)
    del columns[1], work[1]  # the gradients are only read
    for targets, sources in zip(columns, work, strict=True):
        for target, source in zip(targets, sources, strict=True):
            if target is not source:
                target.copy_(source)


def _here(x: Tensor, dtype: torch.dtype) -> Tensor:
    return dense(x, dtype) if lies(x) is None else brought(x, dtype)


def dense(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` itself where a kernel can read it, else a contiguous copy in ``dtype``."""
    if x.dtype == dtype and x.is_contiguous():
        return x
    return x.to(dtype).contiguous()
