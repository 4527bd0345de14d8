"""A kernel run over matched trees in one pass over memory, in place where that may be.

The kernels are torch's fused operators, which have neither a derivative nor a guard:
they read memory as if every tensor were dense, and leave version counters as they were.
All of that is seen to here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.core.frames import frame
from fsfunc.optim.leaves import Loose, Tree, held, local
from fsfunc.optim.matching import Matched
from fsfunc.optim.places import brought, some_offloaded
from fsfunc.runtime.host_copies import wait_for_copies
from fsfunc.runtime.memory_spaces import space_of
from fsfunc.sharded.complex_numbers import as_real
from fsfunc.sharded.donated import Everything
from fsfunc.sharded.leaf import is_sharded

_device, _dtype = attrgetter("device"), attrgetter("dtype")


class Target(NamedTuple):
    """A tree to write: its active leaves, and their memory as few tensors."""

    leaves: list[Any]
    tensors: list[Tensor]


def fused(
    matched: Matched,
    kernel: Callable[..., None],
    decays: Sequence[Any] | None = None,
    *,
    cast: bool = True,
) -> list[Tree]:
    """Runs ``kernel`` on params and moments, and returns them.

    Under `donate` it writes into the tensors given, where nothing else holds their
    memory, else into copies (on fresh memory the page faults cost most, whatever the
    order of copy and update).
    ``kernel(params, grads, *moments, weight_decay=)`` takes lists of dense tensors of
    one dtype on one device, and is called once for each such group. ``decays`` are
    whatever it takes for ``weight_decay``, by leaf; without them it takes none. Without
    ``cast`` it takes tensors as they are, and only the parameters' dtype separates
    groups.
    """
    run, by_leaf = kernel, decays
    if by_leaf is None:
        run = lambda *columns, weight_decay: kernel(*columns)  # noqa: E731
        by_leaf = [0.0] * len(matched.active)
    writing = Writing(matched)
    old = [matched.trees[0], *matched.trees[2:]]
    try:
        wait_for_copies()  # no copy reads what is written on the host
        with torch.no_grad():
            new = writing.targets(old)
            count_write([t for target in new for t in target.tensors])
            away = some_offloaded(
                matched.buffers[1].tensors, *(target.tensors for target in new)
            )
            groups = None if away else _alike(matched, new, by_leaf)
            groups = _groups(matched, new, by_leaf) if groups is None else groups
            for (_, dtype, decay), columns in groups.items():
                # A kernel reads and writes columns that are dense, of its dtype, here.
                ready = not (away and some_offloaded(*columns)) and (
                    matched.kind is not None
                    and matched.kind.dense
                    or all(map(partial(_are, dtype), columns))
                )
                if cast and not ready:
                    for row in zip(*columns, strict=True):
                        _write_row(run, row, dtype, decay)
                else:
                    run(*columns, weight_decay=decay)
        writing.end()
    except BaseException:
        wait_for_copies(failed=True)
        raise
    wait_for_copies()  # what was sent to the host is read by anybody from here on
    return [
        matched.restore(target.leaves, leaves)
        for target, leaves in zip(new, old, strict=True)
    ]


class Writing:
    """The writes of one step: over tensors that are donated, else over copies.

    Nothing is written over where trees to write share memory.
    """

    def __init__(self, matched: Matched):
        self.matched, self.donation = matched, frame().donated
        self.old: list[Any] = []  # leaves that are written over, and in their places
        self.new: list[Any] = []

    def targets(self, kept: list[list[Any]]) -> list[Target]:
        """The trees to write, or copies of them."""
        matched = self.matched
        written = [matched.buffers[0], *matched.buffers[2:]]
        mine = iter(self._mine([t for b in written for t in held(b)]))
        return [
            self._over(
                [x[i] for i in matched.active], b, [next(mine) for _ in b.tensors]
            )
            for x, b in zip(kept, written, strict=True)
        ]

    def _mine(self, tensors: list[Tensor]) -> list[bool]:
        """For each tensor of the matched trees, whether it may be written."""
        if (donation := self.donation) is not None:
            donation.look()
            if donation.are_alone(tensors):
                return [True] * len(tensors)
            if not _overlap(self.matched):
                return donation.may_write(tensors)
            self.donation = None
        return [False] * len(tensors)

    def target(self, leaves: list[Any], buffers: Any) -> Target:
        """Leaves to write, or copies of them; a donation has looked at what is held."""
        donation, tensors = self.donation, held(buffers)
        none = donation is None
        mine = [False] * len(tensors) if none else donation.may_write(tensors)
        return self._over(leaves, buffers, mine)

    def _over(self, old: list[Any], buffers: Any, mine: list[bool]) -> Target:
        """New leaves over the memory of the old, where that is ours, or over copies.

        Of a leaf that is written over the old one is spent: the new one is another
        object.
        """
        tensors = buffers.tensors
        if isinstance(self.donation, Everything):  # recorded leaves stay themselves
            return Target(old, tensors)
        if isinstance(buffers, Loose) and all(mine):
            leaves = list(map(Tensor.detach, old))
            self.old += old
            self.new += leaves
            return Target(leaves, tensors)
        leaves = list(old)
        if not all(mine):
            pairs = zip(tensors, mine, strict=True)
            tensors = [t if own else space_of(t).copied(t) for t, own in pairs]
            leaves = buffers.rebuild(tensors)
        for (positions, packed), own in zip(buffers.groups, mine, strict=True):
            if not own:
                continue
            if packed is not None:
                made = packed.renewed().leaves()
            else:
                x = old[positions[0]]
                made = [x.twin() if is_sharded(x) else x.detach()]
            self.old += [old[i] for i in positions]
            self.new += made
            for i, leaf in zip(positions, made, strict=True):
                leaves[i] = leaf
        return Target(leaves, tensors)

    def end(self) -> None:
        """The step is written: what was donated is taken."""
        if self.donation is not None:
            self.donation.take(self.old, self.new)


def _overlap(matched: Matched) -> bool:
    """True if two tensors to write share memory: each then gets its own."""
    params, grads, *moments = [b.tensors for b in matched.buffers]
    tensors = [*params, *chain.from_iterable(moments)]
    for kind in {*map(type, tensors), *map(type, grads)}:
        if issubclass(kind, _torch.FakeTensor):
            return False  # nothing is written, and asking where would raise
    written = [at for at in map(Tensor.data_ptr, tensors) if at]  # 0: no elements
    own = set(written)
    if len(own) < len(written):
        return True
    return not own.isdisjoint(map(Tensor.data_ptr, grads))


def _groups(
    matched: Matched, new: list[Target], decays: Sequence[Any]
) -> dict[Any, list[list[Tensor]]]:
    """Columns (params, grads, *moments) by device, dtype and decay."""
    groups: dict[Any, list[list[Tensor]]] = {}
    grads = Target(
        [matched.trees[1][i] for i in matched.active], matched.buffers[1].tensors
    )
    columns = [new[0], grads, *new[1:]]
    for decay, k, j in matched.cuts(decays):
        row = [
            c.tensors[k] if j is None else as_real(local(c.leaves[j])) for c in columns
        ]
        p, _, *moments = row
        if p.numel():
            dtype = p.dtype
            for m in moments:
                if m.dtype != dtype:
                    dtype = torch.promote_types(dtype, m.dtype)
            key = p.device, dtype, decay
            found = groups.setdefault(key, [[] for _ in row])
            for column, t in zip(found, row, strict=True):
                column.append(t)
    return groups


def _alike(
    matched: Matched, new: list[Target], decays: Sequence[Any]
) -> dict[Any, list[list[Tensor]]] | None:
    """The one group, where all parameters and moments are of one kind."""
    if not decays or decays.count(decays[0]) < len(decays):
        return None
    params, *moments = (target.tensors for target in new)
    grads = matched.buffers[1].tensors
    if (kind := matched.kind) is not None:
        kind = kind[:2]
    else:
        devices, dtypes = set(map(_device, params)), set(map(_dtype, params))
        dtypes.update(*(map(_dtype, column) for column in moments))
        if len(devices) > 1 or len(dtypes) > 1:
            return None
        kind = devices.pop(), dtypes.pop()  # moments lie beside their parameters
    if not all(map(Tensor.numel, params)):
        return None
    return {(*kind, decays[0]): [params, grads, *moments]}


def count_write(tensors: Sequence[Tensor]) -> None:
    """Counts one write more, where a rank holds no element too.

    By the versions `shard` sees whether a gathered buffer is still right, and all ranks
    must come to one answer.
    """
    if tensors:  # of those made in inference mode none is counted, nor needs it
        torch.autograd.graph.increment_version(tensors)


def _are(dtype: torch.dtype, column: list[Tensor]) -> bool:
    of_it = {dtype}.issuperset(map(_dtype, column))
    return of_it and all(map(Tensor.is_contiguous, column))


def _write_row(
    kernel: Callable[..., None], row: Sequence[Tensor], dtype: torch.dtype, decay: float
) -> None:
    """Run ``kernel`` on one row; what is not dense or not of ``dtype`` is copied.

    Fused kernels read any tensor as if it were dense: an expanded gradient (that of a
    sum) would give garbage, silently. Row by row, for of gradients in fewer bits there
    is to be no whole in ``dtype``.
    """
    work = [dense(t, dtype) for t in brought(row, dtype)]
    kernel(*([x] for x in work), weight_decay=decay)
    for k, (target, source) in enumerate(zip(row, work, strict=True)):
        if k != 1 and target is not source:  # the gradients are only read
            space_of(target).write(target, source)  # `fused` waits for all in the end


def dense(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` itself where a kernel can read it, else a contiguous copy in ``dtype``."""
    if x.dtype == dtype and x.is_contiguous():
        return x
    return x.to(dtype).contiguous()
