"""``donate``: let a step write into the state that it was given."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import filterfalse
from typing import Any

from torch import Tensor, UntypedStorage, strided
from torch.nn import Parameter

from fsfunc import _torch, tree
from fsfunc.comm.mesh import HERE
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.core.frames import Transformed, composable, frame, inside
from fsfunc.sharded.donated import OVERWRITTEN, Donation, is_held, overlaps
from fsfunc.sharded.inputs import check_function
from fsfunc.sharded.leaf import FlatShard, Sharded, is_sharded
from fsfunc.sharded.plain_leaves import laid_as, lay_leaf
from fsfunc.sharded.spent import any_spent, refuse_spent, spend, spend_all, unspend

_DENSE, _HELD = {Tensor, Parameter}, (Tensor, Sharded)

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
def donate(step: Callable[..., Any]) -> Callable[..., Any]:
    """``step``, which may overwrite the state, its first argument.

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
    structure = None  # of the last state: a walk through 150 leaves is 80 us

    @functools.partial(Transformed, step, "donate", tuple)
    def run(state: Any, *args: Any, **keywords: Any) -> Any:
        outer = frame()
        if outer.tracer is not None and not outer.tracer.complete:
            return step(state, *args, **keywords)
        if outer.compiler is not None and outer.compiler.whole:
            raise ValueError(_WITHIN)
        nonlocal structure
        leaves = None if structure is None else tree.fitted(structure, state)
        treedef = None
        if leaves is None:
            leaves, treedef = tree.flatten(state, is_leaf=is_sharded)
            structure = treedef
            if any_spent(leaves):
                refuse_spent(state)
        memory = Memory(leaves)
        before = memory.versions()
        held = is_held(memory.written)
        # The step sees other objects over the same memory: these ones can be marked
        # from now on. To mark them afterwards costs less, where all are plain.
        late = memory.late() and not held and not _ranks_meet()
        if late:
            mine, given = leaves, state
        else:
            mine = memory.twins() if memory.once else _apart(leaves)
            treedef = treedef or tree.flatten(state, is_leaf=is_sharded)[1]
            given = tree.unflatten(treedef, mine)
        donated = None if held else memory.donation(mine)
        if not late:
            spend_all(leaves, _GONE)
        try:
            with inside(outer.replace(donated=donated)):
                out = step(given, *args, **keywords)
            if late:
                out = _renewed(out, leaves)
        except BaseException as error:
            spoiled = before != memory.versions()
            for leaf in leaves:
                spend(leaf, _SPOILED) if spoiled else unspend(leaf)
            if spoiled:
                error.add_note(_SPOILED)
            raise
        return out

    return run


def restore(t: Any) -> None:
    """``t`` is as good as before: the step that it was donated to only was planned."""
    for leaf in tree.leaves(t, is_leaf=is_sharded):
        unspend(leaf)


class Memory:
    """The memory of leaves, and the tensors in it.

    ``written`` are packed buffers, and parts of other leaves; ``tensors`` are all
    tensors that are made, ``keys`` their storages; ``once``: whether each leaf occurs
    once.
    """

    def __init__(self, leaves: list[Any]):
        dense = [x for x in leaves if type(x) in _DENSE]
        self.leaves, self.whole = leaves, _are_whole(leaves, dense)
        self.storages: list[UntypedStorage] = []
        if self.whole:
            self.tensors = self.written = dense
            self.storages = list(map(Tensor.untyped_storage, self.written))
            self.keys = [storage._cdata for storage in self.storages]
            self.once = len(set(self.keys)) == len(self.keys)
            return
        sharded = list(filter(is_sharded, leaves))
        packed = [x for x in sharded if x.packed is not None]
        shards = dict.fromkeys([x.packed for x in packed])
        seats = {(id(x.packed), id(x.layout)) for x in packed}
        others = [*filterfalse(is_sharded, leaves)]
        others += [x._part for x in sharded if x.packed is None]
        self.written = [x for x in others if isinstance(x, Tensor)]
        self.written += [shard.flat for shard in shards]
        if {strided}.issuperset([x.layout for x in self.written]):
            self.storages = list(map(Tensor.untyped_storage, self.written))
        parts = [x._part for x in packed if x._part is not None]
        every = [*self.written, *parts, *_wholes(shards)]
        self.tensors = list(dict(zip(map(id, every), every, strict=True)).values())
        self.keys = list(map(_torch.storage_key, self.tensors))
        apart = len(set(self.keys[: len(self.written)])) == len(self.written)
        self.once = apart and len(seats) == len(packed)

    def twins(self) -> list[Any]:
        """Other objects over the same memory."""
        if self.whole:
            return [x.detach() if type(x) in _DENSE else x for x in self.leaves]
        return list(map(_twin, self.leaves))

    def donation(self, given: list[Any]) -> Donation:
        """The donation to a step that is given these leaves, or twins of them."""
        why = _GONE_ALREADY if given is self.leaves else OVERWRITTEN
        later = () if self.whole and given is self.leaves else given
        alone = self.storages if self.once else ()
        return Donation(self.tensors, later, self.keys, alone, why=why)

    def late(self) -> bool:
        """True if leaves may be marked late: each is alone in its memory, of no graph.

        Parts that are not made yet are views of such memory.
        """
        if not self.once or composable():
            return False
        tensors = self.tensors
        return {Tensor}.issuperset(map(type, tensors)) and not any(
            [x.requires_grad for x in tensors]
        )

    def versions(self) -> list[int]:
        with _torch.as_plain_tensors():
            try:
                return [x._version for x in self.written]
            except RuntimeError:  # of an inference tensor, which has none
                return [0 if x.is_inference() else x._version for x in self.written]


def _ranks_meet() -> bool:
    """True if ranks of this process may share a plain tensor, each to donate it."""
    found = HERE.get()
    return found is not None and found.mesh.backend != "processes"


def _renewed(out: Any, given: list[Any]) -> Any:
    """``out`` with other objects for what it hands on of ``given`` as it was.

    Which is marked, as what was written over has been.
    """
    rest = [x for x in given if type(x) in _DENSE or type(x) is Sharded and not x.spent]
    if not rest:
        return out
    left = set(map(id, rest))
    leaves, treedef = tree.flatten(out, is_leaf=is_sharded)
    if not left.isdisjoint(map(id, leaves)):
        again = [_twin(x) if id(x) in left else x for x in leaves]
        out = tree.unflatten(treedef, again)
    spend_all(rest, _GONE)
    return out


def _are_whole(leaves: list[Any], dense: list[Tensor]) -> bool:
    """True if there are plain dense tensors alone, and what is no tensor."""
    kinds = set(map(type, leaves))
    if not all(kind in _DENSE or not issubclass(kind, _HELD) for kind in kinds):
        return False
    return {strided}.issuperset([x.layout for x in dense])


def _wholes(shards: Iterable[FlatShard]) -> Iterator[Tensor]:
    """The buffers that shards lie in, where the state keeps them whole."""
    for shard in shards:
        for x in (shard.whole, shard.flat._base):
            if x is not None and _torch.storage_key(x) == _torch.storage_key(
                shard.flat
            ):
                yield x


def _twin(leaf: Any) -> Any:
    if isinstance(leaf, Sharded):
        return leaf.twin()
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _apart(leaves: list[Any]) -> list[Any]:
    """Twins of leaves, but copies of what lies at a place a second time.

    An average that starts as the parameters themselves must not change when they do.
    """
    out, ends = [], defaultdict(list)
    for leaf in map(_twin, leaves):
        x = leaf._local if isinstance(leaf, Sharded) else leaf
        if isinstance(x, Tensor) and overlaps(x, ends[_torch.storage_key(x)]):
            how, x = laid_as(x), x.clone()
            lay_leaf(x, how)
            leaf = Sharded(x, leaf.layout) if isinstance(leaf, Sharded) else x
        out.append(leaf)
    return out


def version(part: Any) -> int:
    """The version counter of a leaf's part: a gather does not count."""
    counted = isinstance(part, Tensor) and not part.is_inference()
    return part._version if counted else 0
