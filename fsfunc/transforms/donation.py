"""``donate``: let a step write into the state that it was given.

Here the state's memory is listed (`Memory`), the step is run with a `Donation` in its
frame, and the leaves that it was given are marked as spent. The optimizers ask the
donation which tensors have no other users, and update those in place.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import filterfalse
from typing import Any, ParamSpec, TypeVar

from torch import Tensor, UntypedStorage, strided
from torch.nn import Parameter

from fsfunc import _torch, tree
from fsfunc.comm.mesh import HERE
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.core.frames import Transformed, composable, frame, inside
from fsfunc.sharded.donated import OVERWRITTEN, Donation, are_locked, overlaps
from fsfunc.sharded.inputs import check_function
from fsfunc.sharded.leaf import FlatShard, Sharded, is_sharded
from fsfunc.sharded.plain_leaves import lay_leaf, placement_of
from fsfunc.sharded.spent import (
    any_unusable,
    refuse_unusable,
    spend,
    spend_all,
    unspend,
)
from fsfunc.tree.types import Leaf, PyTree

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Leaves whose memory is one dense tensor; kinds of leaves that have memory at all.
_DENSE, _WITH_MEMORY = {Tensor, Parameter}, (Tensor, Sharded)

_GONE = (
    "this state was donated to a step, which writes into it: go on with the state that "
    "the step returned (and give each simulated rank a state of its own, as init_state "
    "and place do)"
)
_GONE_ALREADY = (
    "this state was donated to a step, and the optimizer wrote the new value over this "
    "old one: go on with the state that the step returned; inside the step, read it "
    "before the update, or keep a copy (x.clone()) made before it"
)
_WITHIN = (
    "donate within jit(whole_step=True): put it around, donate(jit(step, "
    "whole_step=True)), where it sees who else holds the state"
)
_SPOILED = (
    "a donated step raised after it had begun to write into this state: it is neither "
    "the old one nor the new one; start from a saved state"
)


@api_boundary
def donate(step: Callable[_P, _R]) -> Callable[_P, _R]:
    """Lets ``step`` overwrite the state, its first argument.

    The result is that of ``step``, in less memory: optimizers update in place, where
    the memory has no other users. A view or a graph that you keep still has the old
    values: the new ones are then written to other memory.

    Using the donated state again raises, outside the step, and inside after the update:
    read it before, or keep a copy made before (``x.clone()``).

    Raises:
        RuntimeError: a state that was donated before; a leaf that the update has
            overwritten.

    A state that is being saved (``save_async``) is not overwritten: the step then works
    as without `donate`.

    Every check, norm and reduction of a step comes before its first write; a step that
    raises before it leaves the state as it was, one that raises after it marks the
    state as spoiled.

    >>> import torch, fsfunc as ff
    >>> optimizer = ff.sharded_adam(0.1)
    >>> step = ff.donate(optimizer(ff.value_and_grad(lambda w: (w**2).sum())))
    >>> w = torch.ones(2)
    >>> at = w.data_ptr()
    >>> state, _ = step(ff.TrainState(w, optimizer.init(w)))
    >>> state.params.data_ptr() == at
    True
    >>> w + 1
    Traceback (most recent call last):
    RuntimeError: f32[2]: this state was donated to a step, ...
    """

    check_function(step, "donate")
    call: Callable[..., Any] = step  # whose first argument is the state
    # That of the last state: a walk through 150 leaves takes 80 us.
    structure: tree.TreeDef | None = None

    @functools.partial(Transformed, step, "donate", tuple)
    def run(state: PyTree, *args: PyTree, **keywords: PyTree) -> PyTree:
        outer = frame()
        # While a step is recorded or checked its input stays usable.
        if outer.tracer is not None and not outer.tracer.complete:
            return call(state, *args, **keywords)
        if outer.compiler is not None and outer.compiler.whole:
            raise ValueError(_WITHIN)
        nonlocal structure
        leaves = None if structure is None else tree.fitted(structure, state)
        treedef = None
        # Not fitted are other structures, sharded leaves, and plain leaves that are
        # marked as spent, whose class is another: only here may a leaf be unusable.
        if leaves is None:
            leaves, treedef = tree.flatten(state, is_leaf=is_sharded)
            structure = treedef
            if any_unusable(leaves):
                refuse_unusable(state)
        memory = Memory(leaves)
        versions = memory.versions()
        is_saving = are_locked(memory.written)
        # Marked first: the step is given other objects over the same memory. Marked
        # late, it is given the leaves themselves, which saves an object for each. Not
        # so where ranks are threads: one that was given the same state must see the
        # marks before this rank's step has written.
        marks_late = memory.may_mark_late() and not is_saving and not _ranks_meet()
        if marks_late:
            step_leaves, step_state = leaves, state
        else:
            # Of two leaves in one memory an update of one must not change the other.
            step_leaves = memory.twins() if memory.all_apart else _separate(leaves)
            treedef = treedef or tree.flatten(state, is_leaf=is_sharded)[1]
            step_state = tree.unflatten(treedef, step_leaves)
        donated = None if is_saving else memory.donation(step_leaves)
        if not marks_late:
            spend_all(leaves, _GONE)
        try:
            with inside(outer.replace(donated=donated)):
                out = call(step_state, *args, **keywords)
            if marks_late:
                out = _replace_unwritten(out, leaves)
        except BaseException as error:  # Ctrl-C too may come between two writes
            # Where nothing was written yet, the caller may go on with the state.
            spoiled = versions != memory.versions()
            for leaf in leaves:
                spend(leaf, _SPOILED) if spoiled else unspend(leaf)
            if spoiled:
                error.add_note(_SPOILED)
            raise
        return out

    return run


def restore(state: PyTree) -> None:
    """Makes a state usable again that was donated to a step which only was planned."""
    for leaf in tree.leaves(state, is_leaf=is_sharded):
        unspend(leaf)


class Memory:
    """The memory of leaves, and the tensors in it.

    Attributes:
        all_plain: whether all leaves with memory are plain dense tensors.
        written: what an update writes: packed buffers, and parts of other leaves.
        storages: those of ``written``.
        tensors: all tensors that lie there, also views of buffers; ``keys``: their
            storages.
        all_apart: whether each leaf occurs once, in memory of its own.
    """

    leaves: list[Leaf]
    all_plain: bool
    tensors: list[Tensor]
    written: list[Tensor]
    keys: list[int]
    all_apart: bool

    def __init__(self, leaves: list[Leaf]):
        dense = [x for x in leaves if type(x) in _DENSE]
        self.leaves, self.all_plain = leaves, _are_plain(leaves, dense)
        self.storages: list[UntypedStorage] = []
        # For speed alone: what follows would find the same. `Donation.are_alone` needs
        # the storages anyway, and `_cdata` is their address, which `storage_key` asks
        # torch for, tensor by tensor. Below it has to be asked: a sparse tensor has no
        # storage.
        if self.all_plain:
            self.tensors = self.written = dense
            self.storages = list(map(Tensor.untyped_storage, self.written))
            self.keys = [storage._cdata for storage in self.storages]
            self.all_apart = len(set(self.keys)) == len(self.keys)
            return
        sharded: list[Any] = list(filter(is_sharded, leaves))
        packed = [x for x in sharded if x.packed is not None]
        # An update writes a buffer as one tensor; its leaves are views of it.
        shards = dict.fromkeys([x.packed for x in packed])
        members = {(id(x.packed), id(x.layout)) for x in packed}
        others = [*filterfalse(is_sharded, leaves)]
        others += [x._part for x in sharded if x.packed is None]
        self.written = [x for x in others if isinstance(x, Tensor)]
        self.written += [shard.flat for shard in shards]
        if {strided}.issuperset([x.layout for x in self.written]):
            self.storages = list(map(Tensor.untyped_storage, self.written))
        # `_part`, not `local`, which would make the view. ``written`` is first, as
        # `Donation` takes the storages for those of its first tensors.
        parts = [x._part for x in packed if x._part is not None]
        tensors = [*self.written, *parts, *_whole_buffers(shards)]
        self.tensors = list(dict(zip(map(id, tensors), tensors, strict=True)).values())
        self.keys = list(map(_torch.storage_key, self.tensors))
        apart = len(set(self.keys[: len(self.written)])) == len(self.written)
        self.all_apart = apart and len(members) == len(packed)

    def twins(self) -> list[Leaf]:
        """Returns other objects over the same memory."""
        if self.all_plain:
            return [x.detach() if type(x) in _DENSE else x for x in self.leaves]
        return list(map(_twin, self.leaves))

    def donation(self, step_leaves: list[Leaf]) -> Donation:
        """Returns the donation to a step that is given these leaves, or their twins."""
        why = _GONE_ALREADY if step_leaves is self.leaves else OVERWRITTEN
        # Leaves whose parts may be made later, as views that use the memory too.
        lazy = () if self.all_plain and step_leaves is self.leaves else step_leaves
        alone = self.storages if self.all_apart else ()
        return Donation(self.tensors, lazy, self.keys, alone, why=why)

    def may_mark_late(self) -> bool:
        """Returns whether leaves may be marked after the step.

        They may if each is alone in its memory, and of no graph. Parts that are not
        made yet are views of such memory.
        """
        if not self.all_apart or composable():
            return False
        tensors = self.tensors
        return {Tensor}.issuperset(map(type, tensors)) and not any(
            [x.requires_grad for x in tensors]
        )

    def versions(self) -> list[int]:
        """Returns the version counters of ``written``, by which a write shows."""
        # As plain tensors: some are marked by now, and would raise where they are read.
        with _torch.as_plain_tensors():
            try:
                return [x._version for x in self.written]
            except RuntimeError:  # of an inference tensor, which has none
                return [0 if x.is_inference() else x._version for x in self.written]


def _ranks_meet() -> bool:
    """Returns whether ranks of this process may share a plain tensor."""
    this_rank = HERE.get()
    return this_rank is not None and this_rank.mesh.backend != "processes"


def _replace_unwritten(out: PyTree, leaves: list[Leaf]) -> PyTree:
    """Marks leaves that the step has not written; returns ``out`` with twins of them.

    ``out`` may hand some of them on as they were, which must stay usable there.
    """
    unwritten = [
        x
        for x in leaves
        if type(x) in _DENSE or type(x) is Sharded and not x.why_unusable
    ]
    if not unwritten:
        return out
    ids = set(map(id, unwritten))
    out_leaves, treedef = tree.flatten(out, is_leaf=is_sharded)
    if not ids.isdisjoint(map(id, out_leaves)):
        twins = [_twin(x) if id(x) in ids else x for x in out_leaves]
        out = tree.unflatten(treedef, twins)
    spend_all(unwritten, _GONE)
    return out


def _are_plain(leaves: list[Leaf], dense: list[Tensor]) -> bool:
    """Returns whether all leaves are plain dense tensors, or have no memory."""
    kinds = set(map(type, leaves))
    if not all(kind in _DENSE or not issubclass(kind, _WITH_MEMORY) for kind in kinds):
        return False
    return {strided}.issuperset([x.layout for x in dense])


def _whole_buffers(shards: Iterable[FlatShard]) -> Iterator[Tensor]:
    """Yields the whole buffers that ranges lie in, as at zero 1 and 2.

    They are known uses of the state's memory: unknown, they would keep an update from
    writing it. A gathered buffer in another dtype is memory of its own, and no such
    use.
    """
    for shard in shards:
        for x in (shard.whole, shard.flat._base):
            if x is not None and _torch.storage_key(x) == _torch.storage_key(
                shard.flat
            ):
                yield x


def _twin(leaf: Leaf) -> Leaf:
    """Returns another object over the same memory."""
    if isinstance(leaf, Sharded):
        return leaf.twin()
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _separate(leaves: list[Leaf]) -> list[Leaf]:
    """Returns twins of leaves, but copies of what lies at a place a second time.

    An average that starts as the parameters themselves must not change when they do.
    """
    separate, ranges = [], defaultdict(list)
    for leaf in map(_twin, leaves):
        x = leaf._local if isinstance(leaf, Sharded) else leaf
        if isinstance(x, Tensor) and overlaps(x, ranges[_torch.storage_key(x)]):
            # The layout of a plain tensor is known by the tensor: the copy needs it.
            layout, x = placement_of(x), x.clone()
            lay_leaf(x, layout)
            leaf = Sharded(x, leaf.layout) if isinstance(leaf, Sharded) else x
        separate.append(leaf)
    return separate


def version(part: Leaf) -> int:
    """Returns the version counter of a leaf's part: a gather does not count."""
    counted = isinstance(part, Tensor) and not part.is_inference()
    return part._version if counted else 0
