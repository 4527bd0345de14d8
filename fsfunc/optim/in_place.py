"""Runs a kernel over matched trees: one pass over memory, in place under donation.

Kernels are torch's fused operators. They have no derivative, read memory as if every
tensor were dense, and do not count their writes for autograd. `run_kernel` looks after
that: it groups tensors by device, dtype and decay, copies what is not dense, and counts
the writes. `Writing` decides for each tensor whether the kernel may write over it or
must be given a copy. The second phase of an optimizer's ``apply`` calls it.
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
from fsfunc.optim.leaves import (
    Buffers,
    Tree,
    UnpackedTree,
    local_tensor,
    stored_tensors,
)
from fsfunc.optim.matching import Matched
from fsfunc.optim.places import bring_together, some_offloaded
from fsfunc.runtime.host_copies import wait_for_copies
from fsfunc.runtime.memory_spaces import space_of
from fsfunc.sharded.complex_numbers import as_real
from fsfunc.sharded.donated import Donation, Everything
from fsfunc.sharded.leaf import is_sharded
from fsfunc.tree.types import Leaf

# (params, grads, *moments) by what one call of a kernel takes: device, dtype and decay.
Groups = dict[tuple[torch.device, torch.dtype, Any], list[list[Tensor]]]

_device, _dtype = attrgetter("device"), attrgetter("dtype")


class Target(NamedTuple):
    """A tree that a kernel writes: its active leaves, and their flat tensors."""

    leaves: list[Leaf]
    tensors: list[Tensor]


def run_kernel(
    matched: Matched,
    kernel: Callable[..., None],
    decays: Sequence[Any] | None = None,
    *,
    cast: bool = True,
) -> list[Tree]:
    """Runs ``kernel`` on params and moments; returns these trees.

    Under `donate` it writes into the given tensors, if nothing else uses their memory.
    Otherwise it writes into copies.

    Args:
        kernel: ``kernel(params, grads, *moments, weight_decay=)`` takes lists of dense
            tensors of one dtype on one device. It is called once for each such group.
        decays: by active leaf, whatever it takes for ``weight_decay``. Without them it
            is called without ``weight_decay``.
        cast: whether tensors that are not dense, or of another dtype, are copied for
            it. If not, it takes tensors as they are.
    """
    run, leaf_decays = kernel, decays
    if leaf_decays is None:
        run = lambda *columns, weight_decay: kernel(*columns)  # noqa: E731
        leaf_decays = [0.0] * len(matched.active)
    writing = Writing(matched)
    old_trees = [matched.trees[0], *matched.trees[2:]]
    try:
        # No copy to the device still reads what is written on the host.
        wait_for_copies()
        with torch.no_grad():
            targets = writing.targets(old_trees)
            count_write([t for target in targets for t in target.tensors])
            is_offloaded = some_offloaded(
                matched.buffers[1].tensors, *(target.tensors for target in targets)
            )
            groups = (
                None if is_offloaded else _single_group(matched, targets, leaf_decays)
            )
            if groups is None:
                groups = _group_rows(matched, targets, leaf_decays)
            for (_, dtype, decay), columns in groups.items():
                # What a kernel can take as it is: dense, of one dtype, on the device.
                is_ready = not (is_offloaded and some_offloaded(*columns)) and (
                    matched.kind is not None
                    and matched.kind.all_contiguous
                    or all(map(partial(_are_dense, dtype), columns))
                )
                if cast and not is_ready:
                    for row in zip(*columns, strict=True):
                        _write_row(run, row, dtype, decay)
                else:
                    run(*columns, weight_decay=decay)
        writing.finish()
    except BaseException:
        # Copies may still be under way in memory that the error frees.
        wait_for_copies(failed=True)
        raise
    wait_for_copies()  # from here on anybody may read what was sent to the host
    return [
        matched.restore(target.leaves, leaves)
        for target, leaves in zip(targets, old_trees, strict=True)
    ]


class Writing:
    """Decides what one step writes over: donated tensors, and copies of others.

    If trees to write share memory, all of them are copied.
    """

    def __init__(self, matched: Matched):
        self.matched = matched
        self.donation: Donation | None = frame().donated
        self.old_leaves: list[Leaf] = []  # those that are written over
        self.new_leaves: list[Leaf] = []  # those in their places

    def targets(self, trees: list[list[Leaf]]) -> list[Target]:
        """Returns the parameters and moments to write, or copies of them.

        Args:
            trees: all leaves of these trees.
        """
        matched = self.matched
        written = [matched.buffers[0], *matched.buffers[2:]]
        writable = iter(self._writable([t for b in written for t in stored_tensors(b)]))
        return [
            self._make_target(
                [leaves[i] for i in matched.active],
                buffers,
                [next(writable) for _ in buffers.tensors],
            )
            for leaves, buffers in zip(trees, written, strict=True)
        ]

    def _writable(self, tensors: list[Tensor]) -> list[bool]:
        """Returns for each tensor of the matched trees whether it may be written."""
        if (donation := self.donation) is not None:
            donation.add_made()
            # Mostly true, and one question for all: the others go tensor by tensor.
            if donation.are_alone(tensors):
                return [True] * len(tensors)
            if not _share_memory(self.matched):
                return donation.may_write(tensors)
            self.donation = None
        return [False] * len(tensors)

    def target(self, leaves: list[Leaf], buffers: Buffers) -> Target:
        """Returns other leaves to write, or copies of them; call `targets` first."""
        donation, tensors = self.donation, stored_tensors(buffers)
        copies_all = donation is None
        writable = [False] * len(tensors) if copies_all else donation.may_write(tensors)
        return self._make_target(leaves, buffers, writable)

    def _make_target(
        self, old: list[Leaf], buffers: Buffers, writable: list[bool]
    ) -> Target:
        """Makes leaves over the memory of the old ones, or over copies of it.

        Args:
            old: the leaves in ``buffers``.
            writable: by flat tensor, whether it is written over.
        """
        tensors = buffers.tensors
        if isinstance(self.donation, Everything):  # recorded leaves stay themselves
            return Target(old, tensors)
        # A leaf whose memory is written over becomes spent: reading it raises. So its
        # new value is another object, also where the memory stays.
        if isinstance(buffers, UnpackedTree) and all(writable):
            leaves: list[Any] = list(map(Tensor.detach, old))
            self.old_leaves += old
            self.new_leaves += leaves
            return Target(leaves, tensors)
        leaves = list(old)
        if not all(writable):
            pairs = zip(tensors, writable, strict=True)
            # Copied before the kernel and not written by it to new memory: first touch
            # of fresh pages costs most, in whatever order.
            tensors = [t if ours else space_of(t).copied(t) for t, ours in pairs]
            leaves = buffers.rebuild(tensors)
        for (positions, packed), ours in zip(buffers.groups, writable, strict=True):
            if not ours:
                continue
            if packed is not None:
                renewed = packed.renewed().leaves()
            else:
                x = old[positions[0]]
                renewed = [x.twin() if is_sharded(x) else x.detach()]
            self.old_leaves += [old[i] for i in positions]
            self.new_leaves += renewed
            for i, leaf in zip(positions, renewed, strict=True):
                leaves[i] = leaf
        return Target(leaves, tensors)

    def finish(self) -> None:
        """Tells the donation which leaves were written over, and what replaces them."""
        if self.donation is not None:
            self.donation.mark_written(self.old_leaves, self.new_leaves)


def _share_memory(matched: Matched) -> bool:
    """Returns whether a tensor to write begins where another tensor does."""
    params, grads, *moments = [b.tensors for b in matched.buffers]
    tensors = [*params, *chain.from_iterable(moments)]
    for tensor_type in {*map(type, tensors), *map(type, grads)}:
        if issubclass(tensor_type, _torch.FakeTensor):
            return False  # nothing is written, and asking for an address would raise
    addresses = [a for a in map(Tensor.data_ptr, tensors) if a]  # 0: no elements
    distinct = set(addresses)
    if len(distinct) < len(addresses):
        return True
    return not distinct.isdisjoint(map(Tensor.data_ptr, grads))


def _group_rows(
    matched: Matched, targets: list[Target], decays: Sequence[Any]
) -> Groups:
    """Returns columns (params, grads, *moments) by device, dtype and decay.

    The dtype is the widest of a parameter and its moments: the kernel runs in it.
    """
    groups: Groups = {}
    grads = Target(
        [matched.trees[1][i] for i in matched.active], matched.buffers[1].tensors
    )
    columns = [targets[0], grads, *targets[1:]]
    for decay, k, j in matched.cut_by_decay(decays):
        row = [
            c.tensors[k] if j is None else as_real(local_tensor(c.leaves[j]))
            for c in columns
        ]
        p, _, *moments = row
        if p.numel():
            dtype = p.dtype
            for m in moments:
                if m.dtype != dtype:
                    dtype = torch.promote_types(dtype, m.dtype)
            key = p.device, dtype, decay
            group = groups.setdefault(key, [[] for _ in row])
            for column, t in zip(group, row, strict=True):
                column.append(t)
    return groups


@_torch.outside_function_modes()
def _single_group(
    matched: Matched, targets: list[Target], decays: Sequence[Any]
) -> Groups | None:
    """Returns `_group_rows` faster, if that is one group; otherwise None."""
    if not decays or decays.count(decays[0]) < len(decays):
        return None
    params, *moments = (target.tensors for target in targets)
    grads = matched.buffers[1].tensors
    if (kind := matched.kind) is not None:
        device, dtype = kind[:2]
    else:
        devices, dtypes = set(map(_device, params)), set(map(_dtype, params))
        dtypes.update(*(map(_dtype, column) for column in moments))
        if len(devices) > 1 or len(dtypes) > 1:
            return None
        # Moments lie beside their parameters: `Matched.of` has compared the devices.
        device, dtype = devices.pop(), dtypes.pop()
    if not all(map(Tensor.numel, params)):  # `_group_rows` leaves empty tensors out
        return None
    return {(device, dtype, decays[0]): [params, grads, *moments]}


def count_write(tensors: Sequence[Tensor]) -> None:
    """Adds 1 to the version counters of tensors, also of empty ones.

    `shard` compares versions to see whether a gathered buffer is still up to date, and
    all ranks must come to one answer, also those that hold no element.
    """
    if tensors:  # tensors made in inference mode have no counter: it skips them
        torch.autograd.graph.increment_version(tensors)


@_torch.outside_function_modes()
def _are_dense(dtype: torch.dtype, column: list[Tensor]) -> bool:
    """Returns whether all tensors are contiguous and of ``dtype``."""
    has_dtype = {dtype}.issuperset(map(_dtype, column))
    return has_dtype and all(map(Tensor.is_contiguous, column))


def _write_row(
    kernel: Callable[..., None], row: Sequence[Tensor], dtype: torch.dtype, decay: Any
) -> None:
    """Runs ``kernel`` on (param, grad, *moments), some of which it cannot take.

    Those are copied, and what it writes into a copy is written back. A fused kernel
    reads any tensor as if it were dense: an expanded gradient, as that of a sum, would
    silently give wrong numbers.
    """
    # One row at a time: gradients in fewer bits are never all there in ``dtype``.
    work = [as_dense(t, dtype) for t in bring_together(row, dtype)]
    kernel(*([x] for x in work), weight_decay=decay)
    for k, (target, source) in enumerate(zip(row, work, strict=True)):
        if k != 1 and target is not source:  # 1: the gradients are only read
            # A copy to the host goes on meanwhile: `run_kernel` waits at its end.
            space_of(target).write(target, source)


def as_dense(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns ``x`` if a kernel can read it, else a contiguous copy in ``dtype``."""
    if x.dtype == dtype and x.is_contiguous():
        return x
    return x.to(dtype).contiguous()
