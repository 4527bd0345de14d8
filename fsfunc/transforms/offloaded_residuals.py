"""Residuals of a unit call, offloaded until its backward.

After a unit has run, the part of the graph that it made is walked once, as ``boundary``
does for parameters: what its operators saved gets hooks that keep a copy elsewhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.core.execution_context import UnitToken, running
from fsfunc.core.units import Call
from fsfunc.runtime.host_copies import crosses, follow, send, wait_for
from fsfunc.runtime.memory_spaces import Store, space_of
from fsfunc.sharded.leaf import Sharded, is_sharded

_SMALL = 256  # bytes that are not worth a copy
_UNIT = 16  # bytes: every dtype's size divides it


def offloaded(run: Callable[..., Any], call: Call, store: Store) -> Callable[..., Any]:
    """``run``, whose residuals go to ``store`` when it is over."""

    def kept(params: Any, /, *inputs: Any, **keywords: Any) -> Any:
        tracer, now = call.frame.tracer, running()
        tried = tracer is not None and (tracer.forward_only or not tracer.complete)
        plain = tried or call.frame.composable or now.recompute
        if plain or not torch.is_grad_enabled():
            return run(params, *inputs, **keywords)
        leaves = tree.leaves(params, is_leaf=is_sharded)
        given = [x for x in tree.leaves((inputs, keywords)) if isinstance(x, Tensor)]
        stays = {key for x in leaves for key in _memory(x)}
        stays |= {_torch.storage_key(x) for x in given if not x.requires_grad}
        thread = now.thread
        stop = {x.grad_fn for x in given}
        stop |= {x.grad_fn for x in leaves if isinstance(x, Tensor)}
        if thread is not None:  # units before this one hang on it
            stop.add(thread.token.grad_fn)
        del leaves, given
        out = run(params, *inputs, **keywords)
        outs = [x for x in tree.leaves(out) if isinstance(x, Tensor)]
        roots = [x.grad_fn for x in outs if x.requires_grad]
        residuals = _Residuals(store, _LAST.get(thread) if thread else None)
        nodes = [*_torch.graph_nodes(roots, stop), *(x.grad_fn for x in call.savers)]
        _torch.hook_residuals(
            nodes, lambda x: _goes(x, stays), residuals.pack, residuals.unpack
        )
        residuals.alive.clear()
        if thread is not None:
            _LAST[thread] = residuals
        return out

    return kept


# The unit call before, of a gradient call.
_LAST: weakref.WeakKeyDictionary[UnitToken, _Residuals] = weakref.WeakKeyDictionary()


def _memory(x: Any) -> list[int]:
    """The storages of a parameter, which stay where they are."""
    if isinstance(x, Sharded) and x.packed is not None:
        both = (x.packed.flat, x.packed.whole)
        return [_torch.storage_key(t) for t in both if t is not None]
    x = x.local if isinstance(x, Sharded) else x
    return [_torch.storage_key(x)] if isinstance(x, Tensor) else []


def _goes(x: Tensor, stays: set[int]) -> bool:
    """True if a saved tensor is worth a copy, and can be made again of one."""
    plain = type(x) in (Tensor, torch.nn.Parameter, _torch.FakeTensor)
    if not plain or x.layout != torch.strided or x.is_conj() or x.is_neg():
        return False
    if x.untyped_storage().nbytes() < _SMALL or _torch.is_wrapped(x):
        return False
    return _torch.storage_key(x) not in stays


class _Held:
    """The memory of one storage, elsewhere; on the device while it is used."""

    def __init__(self, x: Tensor, store: Store):
        memory = x.untyped_storage()
        self.size = memory.nbytes()
        room = -(-self.size // _UNIT) * _UNIT
        self.device = x.device
        self.there = store.scratch(room, torch.uint8, x.device)
        if isinstance(x, _torch.FakeTensor):  # to copy into memory counts, to view not
            count = self.size // x.element_size()
            there = self.there[: count * x.element_size()].view(x.dtype)
            there.copy_(x.detach().as_strided((count,), (1,), 0))
        else:
            bare = torch.empty(0, dtype=torch.uint8, device=x.device)
            bytes_ = bare.set_(memory, 0, (self.size,))  # type: ignore[call-overload]
            _copy(self.there[: self.size], bytes_)
        self._here: weakref.ref | None = None

    def here(self) -> Tensor:
        found = None if self._here is None else self._here()
        if found is None:
            found = self.there.new_empty(self.there.shape, device=self.device)
            _copy(found, self.there)
            self._here = weakref.ref(found)
        elif crosses(found, self.there):  # a node of another stream may have fetched it
            follow(found, self.there)
        return found


def _copy(out: Tensor, x: Tensor) -> None:
    """Copies to and from a store, whose memory Python does not look at.

    On a GPU by copies that go on: the one back waits for the one there, also in another
    stream, and so does the next one into memory of the pool (`host_copies.send`).
    """
    if crosses(out, x):
        send(out, x, private=True)
    else:  # a pool's memory may have been a GPU's before
        wait_for(out).copy_(wait_for(x))


class _Packed(NamedTuple):
    held: _Held
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Residuals:
    """The saved tensors of one unit call.

    Args:
        before: those of the call before it, which the backward reads next.
    """

    def __init__(self, store: Store, before: _Residuals | None):
        self.store = store
        self.before = None if before is None else weakref.ref(before)
        # By storage, which is held until all is packed: its address stays its own.
        self.alive: dict[int, tuple[Any, _Held]] = {}
        self.held: list[weakref.ref[_Held]] = []

    def pack(self, x: Tensor) -> _Packed:
        key = _torch.storage_key(x)
        if key not in self.alive:
            one = _Held(x, self.store)
            self.alive[key] = x.untyped_storage(), one
            self.held.append(weakref.ref(one))
        held = self.alive[key][1]
        return _Packed(held, x.dtype, x.shape, x.stride(), int(x.storage_offset()))

    def unpack(self, packed: _Packed) -> Tensor:
        before, self.before = self.before, None
        if before is not None and (other := before()) is not None:
            for each in other.held:
                if (held := each()) is not None:
                    space_of(held.there).read_ahead(held.there)
        held, dtype, size, stride, offset = packed
        return held.here().view(dtype).as_strided(size, stride, offset)
