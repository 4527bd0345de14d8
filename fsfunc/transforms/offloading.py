"""``offload``: parameters, moments and activations in host memory, or on disk."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.core.casts import differentiable
from fsfunc.core.execution_context import UnitToken, running
from fsfunc.core.frames import Interpretation, frame, inside, transformed
from fsfunc.core.units import Call
from fsfunc.runtime.host_copies import crosses, wait_for_last_copy
from fsfunc.runtime.memory_spaces import MemorySpace, Offloaded, Store, space_of
from fsfunc.runtime.stores import Folder, HostMemory
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.plain_leaves import laid_as, lay_leaf

Where = str | os.PathLike | Store | None


class Stores(NamedTuple):
    """The store of each kind of memory; None: on the device."""

    params: Store | None = None
    moments: Store | None = None
    activations: Store | None = None


@api_boundary
def offload(
    f: Callable[..., Any],
    *,
    params: Where = None,
    moments: Where = None,
    activations: Where = None,
) -> Callable[..., Any]:
    """``f`` with parameters, moments or saved activations outside the device's memory.

    Each of them is given a place: ``"host"`` is the host's memory (pinned if the device
    is a GPU), a path is a folder, on whose disk files are mapped, and a ``Store`` is a
    place of your own. Give the transformed step to ``init_state`` (or ``place``): the
    place of a leaf is a property of the value, and a step returns leaves in the places
    of those that it was given. Its order with ``shard``, ``remat``, ``accumulate``,
    ``precision`` and ``donate`` is free. The numbers are those of ``f``, to the bit if
    device and host compute the same bits.

    A unit's parameters are fetched just before it runs, and again before its backward.
    In the forward pass the next unit is prefetched while this one runs (over several
    ranks), or read ahead from disk (on one). In the backward pass a unit and its
    gradients take the memory: the next unit is only read ahead, and the gradients of
    offloaded parameters are reduced and stored before it is fetched. An optimizer
    updates offloaded parameters in place if all that it reads is offloaded, and fetches
    the rest, unit by unit. At zero 1 and 2 the part that a rank updates is offloaded;
    the gathered parameters, in the compute dtype, are fetched once after an update and
    stay (with ``precision`` and ``moments`` this is ZeRO-Offload).

    ``offload(remat(accumulate(step, n)), params="host", activations="host")`` is what
    FairScale calls OffloadModel.

    Args:
        f: a train step, a loss, or a unit.
        params: the place of parameters that units take under ``shard`` (on one device:
            over a mesh of one rank).
        moments: the place of the optimizer's state, and of averages of weights.
        activations: the place of residuals that units save for their backward.

    Raises:
        TypeError: a place that is neither "host" nor a path nor a store.
        ValueError: nothing to offload, or the same twice; parameters without ``shard``
            (when the state is laid out); a state that is in another place; a unit that
            ``jit`` compiles to a CUDA graph.
        OSError: a folder that cannot be made or written, or whose disk is full: at
            once, or in a step, which then leaves the state as it was.

    Cost: of what is offloaded, the device has at most the parameters of two units, or
    those of one and its gradients, on any number of ranks, and the gathered ones of
    zero 1 and 2 (a plan for one GPU counts one unit less, as it prefetches none on one
    rank); so in the backward pass transfers do not overlap with computation. A
    step reads parameters twice (at zero 1 and 2 once) and writes gradients once (at
    zero=1 whole, to be fetched again and reduced); an update reads and writes each
    moment once. To and from a GPU, copies of pinned memory run while Python goes on,
    casts are computed there, and a rank that gathers from nobody fetches the next unit
    beside the forward of this one; gradient calls, sharded calls and updates end when
    what they copied has arrived (but for activations). On disk, blocks are allocated
    when memory is made: under ``donate`` in the first step alone. Files have no names:
    two runs may share a folder, and a run that is killed leaves nothing there.

    Source: FairScale's OffloadModel and FSDP's cpu_offload and ssd_offload; ZeRO-
    Offload (Ren et al., 2021).

    >>> import tempfile, torch, fsfunc as ff
    >>> unit, optimizer = ff.unit(lambda p, x: torch.tanh(x @ p)), ff.sharded_adam(0.1)
    >>> grad = ff.value_and_grad(lambda p, x: unit(p, x).sum())
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> def main(folder=None):
    ...     step = ff.shard(optimizer(grad), mesh, "data")
    ...     if folder:
    ...         step = ff.offload(step, params=folder, moments=folder)
    ...     state = ff.init_state(step, torch.ones(8, 8), optimizer, torch.ones(1, 8))
    ...     return ff.unshard(step(state, torch.ones(1, 8))[0].params)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.equal(ff.spmd(main, mesh)(folder)[0], ff.spmd(main, mesh)()[0])
    True
    """
    given = {"params": params, "moments": moments, "activations": activations}
    places: dict[Any, Store] = {}  # one store for each
    stores = Stores(*(_store_at(k, v, places) for k, v in given.items()))
    if not places:
        raise ValueError(
            "nothing to offload: give params=, moments= or activations= a place, "
            '"host" or a folder\'s path'
        )
    before = stores_of(f)
    twice = [k for k, v in given.items() if v is not None and getattr(before, k)]
    if twice:
        raise ValueError(
            f"{twice[0]}={given[twice[0]]!r}, but they are offloaded to "
            f"{getattr(before, twice[0])} already: say it once"
        )
    for store in places.values():
        store.check()
    return transformed(f, _Offload(stores))


def _store_at(name: str, where: Any, places: dict[Any, Store]) -> Store | None:
    """The store at a place that is the argument ``name``; ``places`` has those so far.

    Raises:
        TypeError: it is no place.
    """
    if where is None:
        return None
    if isinstance(where, Store):
        return places.setdefault(where, where)
    path = isinstance(where, str | os.PathLike) and os.fspath(where)
    if not (isinstance(path, str) and path):
        raise TypeError(
            f'{name}={where!r}: it is "host", a folder\'s path, a Store, or None'
        )
    if path not in places:
        places[path] = HostMemory() if path == "host" else Folder(path)
    return places[path]


def stores_of(f: Callable[..., Any]) -> Stores:
    """The stores of the ``offload`` in a transformed function."""
    found = Stores()
    for h in getattr(f, "interpretations", ()):
        if isinstance(h, _Offload):
            new = {k: v for k, v in h.stores._asdict().items() if v is not None}
            found = found._replace(**new)
    return found


class _Offload(Interpretation):
    called = "offload"
    ends_alike = True

    def __init__(self, stores: Stores):
        self.stores = stores

    @property
    def configuration(self) -> tuple[tuple[str, Any], ...]:
        # Not the folder: each rank may have a disk of its own.
        return tuple(
            (k, v.kind) for k, v in self.stores._asdict().items() if v is not None
        )

    def call(self, f: Callable[..., Any], args: Any, keywords: Any) -> Any:
        outer = frame()
        # Around all but a stage: what `remat` keeps is saved too, whatever the order.
        at = sum(h.decides for h in outer.handlers[:1])
        handlers = (*outer.handlers[:at], self, *outer.handlers[at:])
        tried = outer.tracer is not None and not outer.tracer.complete
        before = None if tried or not args else _PlacesBefore(args[0])
        if before is not None and self.stores.params and not before.any:
            self._check(args[0])
        with inside(outer.replace(handlers=handlers)):
            out = f(*args, **keywords)
        return out if before is None or not before.any else before.keep(out)

    def unit(self, run: Callable[..., Any], call: Call) -> Callable[..., Any]:
        compiler = call.frame.compiler
        if compiler is not None and not compiler.whole:
            if compiler.replays and compiler.means(call):
                raise ValueError(_REPLAYED.format(call.name))
        store = self.stores.activations
        return run if store is None else _with_residuals_in(store, run, call)

    def _check(self, given: Any) -> None:
        real = any(
            isinstance(x, Sharded) and x.packed is not None and x.packed.flat.numel()
            for x in tree.leaves(given, is_leaf=is_sharded)
        )
        if real and not _torch.fake_active():
            raise ValueError(
                f"offload(params={str(self.stores.params)!r}) of a step whose "
                "parameters are on the device: make its state by ff.init_state(step, "
                "...), or ff.place(step, params, ...), of the offloaded step, or load "
                "a saved one into that"
            )


_REPLAYED = (
    "unit {!r} is compiled by jit so that its kernels are replayed, under an offload: "
    "these read and write the same memory each time, and what is offloaded comes to "
    'other memory, while they run. Give jit no mode, or "max-autotune-no-cudagraphs"'
)


def _buffer(x: Any) -> Tensor | None:
    """The memory space of a leaf."""
    if isinstance(x, Sharded):
        return x._part if x.packed is None else x.packed.flat
    return x if isinstance(x, Tensor) else None


class _PlacesBefore:
    """The memory spaces of a tree's leaves, to which those of the next are moved."""

    def __init__(self, t: Any):
        leaves, self.treedef = tree.flatten(t, is_leaf=is_sharded)
        buffers = map(_buffer, leaves)
        self.each = [None if x is None else space_of(x) for x in buffers]

    @property
    def any(self) -> bool:
        """True if one is offloaded."""
        return any(where and where.offloaded for where in self.each)

    def keep(self, out: Any) -> Any:
        """The output of a step, its state in the spaces of the one it was given."""
        is_pair = type(out) is tuple and bool(out)
        state = out[0] if is_pair else out
        leaves, treedef = tree.flatten(state, is_leaf=is_sharded)
        wanted = self.each
        if treedef != self.treedef:
            named = dict(zip(_paths(self.treedef), self.each, strict=True))
            wanted = map(named.get, _paths(treedef))
        if not _move(leaves, wanted):
            return out
        state = tree.unflatten(treedef, leaves)
        return (state, *out[1:]) if is_pair else state


def _paths(treedef: Any) -> list[str]:
    return tree.paths(tree.unflatten(treedef, range(treedef.num_leaves)))


def settled_in(store: Store, t: Any) -> Any:
    """``t``, its floating tensors of a dim or more lying in ``store``."""

    def where(leaf: Any) -> MemorySpace | None:
        x = _buffer(leaf)
        if x is None or not (x.ndim and differentiable(x)):
            return None
        return Offloaded(store, _torch.device_of(x))

    leaves, treedef = tree.flatten(t, is_leaf=is_sharded)
    _move(leaves, list(map(where, leaves)))
    return tree.unflatten(treedef, leaves)


def _move(leaves: list[Any], wanted: Iterable[MemorySpace | None]) -> bool:
    """Moves leaves on the device to their store; returns whether there were any.

    Leaves of a buffer are moved together, one buffer after the other.
    """
    moved: dict[int, dict[int, Sharded]] = {}  # by buffer, and by layout
    changed = False
    for i, (leaf, to) in enumerate(zip(leaves, wanted, strict=True)):
        x = _buffer(leaf) if to is not None and to.offloaded else None
        if to is None or x is None or x.requires_grad or space_of(x).offloaded:
            continue
        changed = True
        if isinstance(leaf, Sharded) and (shard := leaf.packed) is not None:
            if id(shard) not in moved:
                new = shard.like(to.copied(x)).leaves()
                moved[id(shard)] = dict(zip(map(id, shard.members), new, strict=True))
            leaves[i] = moved[id(shard)][id(leaf.layout)]
        else:
            part = to.copied(x)
            if leaf is x:  # plain: whose it is stands by its memory
                lay_leaf(part, laid_as(x))
            leaves[i] = leaf.with_local(part) if isinstance(leaf, Sharded) else part
    return changed


# Activations: after a unit has run, the part of the graph that it made is walked once,
# as `unit_calls` does for parameters: what its operators saved gets hooks that keep a
# copy elsewhere.

_SMALL = 256  # bytes that are not worth a copy
_UNIT = 16  # bytes: every dtype's size divides it


def _with_residuals_in(
    store: Store, run: Callable[..., Any], call: Call
) -> Callable[..., Any]:
    """``run``, whose residuals go to ``store`` when it is over."""

    def run_and_store(params: Any, /, *inputs: Any, **keywords: Any) -> Any:
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

    return run_and_store


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
        self.device, self.store = x.device, store
        self.there = store.scratch(room, torch.uint8, x.device)
        if isinstance(x, _torch.FakeTensor):  # to copy into memory counts, to view not
            count = self.size // x.element_size()
            there = self.there[: count * x.element_size()].view(x.dtype)
            there.copy_(x.detach().as_strided((count,), (1,), 0))
        else:
            bare = torch.empty(0, dtype=torch.uint8, device=x.device)
            bytes_ = bare.set_(memory, 0, (self.size,))  # type: ignore[call-overload]
            store.copy(self.there[: self.size], bytes_, private=True)
        self._here: weakref.ref | None = None

    def here(self) -> Tensor:
        found = None if self._here is None else self._here()
        if found is None:
            found = self.there.new_empty(self.there.shape, device=self.device)
            # It waits for the copy there, also in another stream.
            self.store.copy(found, self.there, private=True)
            self._here = weakref.ref(found)
        elif crosses(found, self.there):  # a node of another stream may have fetched it
            wait_for_last_copy(found, self.there)
        return found


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
