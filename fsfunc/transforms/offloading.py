"""``offload``: parameters, moments and activations in host memory, or on disk.

Parameters and moments: where a leaf lies is a property of its tensor (`memory_spaces`),
so `gathers` fetch it and optimizers update it there. This file only puts a state into a
store when it is made (`moved_to`), and moves what a step returns to where its input was
(`_StatePlaces`).

Activations: when a unit has run, the part of the graph that it made is walked once, and
what its operators saved gets hooks that keep a copy in the store (`_Residuals`).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

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
from fsfunc.sharded.plain_leaves import lay_leaf, placement_of
from fsfunc.tree.types import Leaf, PyTree

if TYPE_CHECKING:
    from fsfunc.transforms.sharded_calls import Args, Function, Keywords

_P = ParamSpec("_P")
_R = TypeVar("_R")

Where = str | os.PathLike[str] | Store | None
T = TypeVar("T")


class Stores(NamedTuple):
    """The store of each kind of memory; None: on the device."""

    params: Store | None = None
    moments: Store | None = None
    activations: Store | None = None


@api_boundary
def offload(
    f: Callable[_P, _R],
    *,
    params: Where = None,
    moments: Where = None,
    activations: Where = None,
) -> Callable[_P, _R]:
    """Keeps parameters, moments or activations of ``f`` outside the device's memory.

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
    places = {"params": params, "moments": moments, "activations": activations}
    by_place: dict[str | Store, Store] = {}  # one store for each place
    stores = Stores(*(_find_store(k, v, by_place) for k, v in places.items()))
    if not by_place:
        raise ValueError(
            "nothing to offload: give params=, moments= or activations= a place, "
            '"host" or a folder\'s path'
        )
    earlier = stores_of(f)
    twice = [k for k, v in places.items() if v is not None and getattr(earlier, k)]
    if twice:
        raise ValueError(
            f"{twice[0]}={places[twice[0]]!r}, but they are offloaded to "
            f"{getattr(earlier, twice[0])} already: say it once"
        )
    for store in by_place.values():
        store.check()
    return transformed(f, _Offload(stores))


def _find_store(
    name: str, place: Where, by_place: dict[str | Store, Store]
) -> Store | None:
    """Returns the store at a place, made if ``by_place`` does not have it yet.

    Args:
        name: the argument of ``offload`` that is the place, for messages.

    Raises:
        TypeError: it is no place.
    """
    if place is None:
        return None
    if isinstance(place, Store):
        return by_place.setdefault(place, place)
    path = isinstance(place, str | os.PathLike) and os.fspath(place)
    if not (isinstance(path, str) and path):
        raise TypeError(
            f'{name}={place!r}: it is "host", a folder\'s path, a Store, or None'
        )
    if path not in by_place:
        by_place[path] = HostMemory() if path == "host" else Folder(path)
    return by_place[path]


def stores_of(f: Callable[..., Any]) -> Stores:
    """Returns the stores of the ``offload`` in a transformed function."""
    # Each kind of memory may have an `offload` of its own.
    stores = Stores()
    for h in getattr(f, "interpretations", ()):
        if isinstance(h, _Offload):
            added = {k: v for k, v in h.stores._asdict().items() if v is not None}
            stores = stores._replace(**added)
    return stores


class _Offload(Interpretation):
    """The interpretation of ``offload``."""

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

    def call(self, f: Function, args: Args, keywords: Keywords) -> PyTree:
        outer = frame()
        # Around all but a stage, whatever the order of the transforms: the inputs that
        # `remat` saves are residuals too.
        index = sum(h.decides for h in outer.handlers[:1])
        handlers = (*outer.handlers[:index], self, *outer.handlers[index:])
        is_tried = outer.tracer is not None and not outer.tracer.complete
        places = None if is_tried or not args else _StatePlaces(args[0])
        if places is not None and self.stores.params and not places.any_offloaded:
            self._check_offloaded(args[0])
        with inside(outer.replace(handlers=handlers)):
            out = f(*args, **keywords)
        # An update in place leaves its leaves where they are; others that the step
        # makes may lie on the device.
        if places is None or not places.any_offloaded:
            return out
        return places.move_output(out)

    def unit(self, run: Function, call: Call) -> Function:
        compiler = call.frame.compiler
        # A step that is compiled whole takes no offload, and raises for that itself.
        if compiler is not None and not compiler.whole:
            if compiler.replays and compiler.compiles(call):  # type: ignore[attr-defined]
                raise ValueError(_REPLAYED.format(call.name))
        store = self.stores.activations
        return run if store is None else _with_residuals_in(store, run, call)

    def _check_offloaded(self, state: PyTree) -> None:
        """Raises if a state on the device was given to a step with offloaded ones."""
        has_buffers = any(
            isinstance(x, Sharded) and x.packed is not None and x.packed.flat.numel()
            for x in tree.leaves(state, is_leaf=is_sharded)
        )
        if has_buffers and not _torch.fake_active():
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


def _buffer_of(x: Leaf) -> Tensor | None:
    """Returns the tensor whose memory a leaf lies in: its packed buffer, or itself."""
    if isinstance(x, Sharded):
        return x._part if x.packed is None else x.packed.flat
    return x if isinstance(x, Tensor) else None


class _StatePlaces:
    """The memory spaces of a state's leaves, to which those of the next are moved."""

    def __init__(self, state: PyTree):
        leaves, self.treedef = tree.flatten(state, is_leaf=is_sharded)
        buffers = map(_buffer_of, leaves)
        self.spaces = [None if x is None else space_of(x) for x in buffers]

    @property
    def any_offloaded(self) -> bool:
        """Whether some leaf is offloaded."""
        return any(space and space.offloaded for space in self.spaces)

    def move_output(self, out: PyTree) -> PyTree:
        """Moves the state that a step returned to where the one before it lies."""
        is_pair = type(out) is tuple and bool(out)
        state = out[0] if is_pair else out
        leaves, treedef = tree.flatten(state, is_leaf=is_sharded)
        spaces = self.spaces
        # A step may return more than its state: a leaf is known by its path.
        if treedef != self.treedef:
            by_path = dict(zip(_paths(self.treedef), self.spaces, strict=True))
            spaces = map(by_path.get, _paths(treedef))
        if not _move(leaves, spaces):
            return out
        state = tree.unflatten(treedef, leaves)
        return (state, *out[1:]) if is_pair else state


def _paths(treedef: tree.TreeDef) -> list[str]:
    return tree.paths(tree.unflatten(treedef, range(treedef.num_leaves)))


def moved_to(store: Store, state: T) -> T:
    """Returns a tree whose floating tensors with dims lie in ``store``."""

    def space_for(leaf: Leaf) -> MemorySpace | None:
        x = _buffer_of(leaf)
        if x is None or not (x.ndim and differentiable(x)):
            return None
        return Offloaded(store, _torch.device_of(x))

    leaves, treedef = tree.flatten(state, is_leaf=is_sharded)
    _move(leaves, list(map(space_for, leaves)))
    return tree.unflatten(treedef, leaves)


def _move(leaves: list[Leaf], spaces: Iterable[MemorySpace | None]) -> bool:
    """Moves leaves on the device to their store; returns whether there were any.

    Leaves of a buffer are moved together, one buffer after the other.
    """
    moved: dict[int, dict[int, Sharded]] = {}  # by buffer, and by layout
    changed = False
    for i, (leaf, space) in enumerate(zip(leaves, spaces, strict=True)):
        x = _buffer_of(leaf) if space is not None and space.offloaded else None
        if space is None or x is None or x.requires_grad or space_of(x).offloaded:
            continue
        changed = True
        if isinstance(leaf, Sharded) and (shard := leaf.packed) is not None:
            # Once for all leaves of the buffer, which stay views of one copy.
            if id(shard) not in moved:
                made = shard.like(space.copied(x)).leaves()
                moved[id(shard)] = dict(zip(map(id, shard.members), made, strict=True))
            leaves[i] = moved[id(shard)][id(leaf.layout)]
        else:
            part = space.copied(x)
            if leaf is x:  # a plain tensor's layout is known by its memory
                lay_leaf(part, placement_of(x))
            leaves[i] = leaf.with_local(part) if isinstance(leaf, Sharded) else part
    return changed


# Activations

_SMALL = 256  # bytes that are not worth a copy
_ALIGNMENT = 16  # bytes: every dtype's size divides it


def _with_residuals_in(store: Store, run: Function, call: Call) -> Function:
    """Returns ``run``, whose residuals go to ``store`` when it is over."""

    def run_and_store(params: PyTree, /, *inputs: PyTree, **keywords: PyTree) -> PyTree:
        tracer, state = call.frame.tracer, running()
        is_tried = tracer is not None and (tracer.forward_only or not tracer.complete)
        # Residuals of a recompute are read at once; `torch.func` allows no hooks.
        is_plain = is_tried or call.frame.composable or state.recompute
        if is_plain or not torch.is_grad_enabled():
            return run(params, *inputs, **keywords)
        leaves = tree.leaves(params, is_leaf=is_sharded)
        others = [x for x in tree.leaves((inputs, keywords)) if isinstance(x, Tensor)]
        # The state's memory, and that of a batch, live on anyway: a copy frees nothing.
        resident = {key for x in leaves for key in _storages_of(x)}
        resident |= {_torch.storage_key(x) for x in others if not x.requires_grad}
        # The walk below ends at what the unit was given, as what is behind it was saved
        # by other units. Looked up now: the unit moves the token on.
        unit_token = state.token
        stop = {x.grad_fn for x in others}
        stop |= {x.grad_fn for x in leaves if isinstance(x, Tensor)}
        if unit_token is not None:  # units before this one hang on it
            stop.add(unit_token.latest.grad_fn)
        del leaves, others  # the unit may free them
        out = run(params, *inputs, **keywords)
        outs = [x for x in tree.leaves(out) if isinstance(x, Tensor)]
        roots = [x.grad_fn for x in outs if x.requires_grad]
        residuals = _Residuals(store, _LAST.get(unit_token) if unit_token else None)
        # Under `remat` the unit's own nodes save nothing; `savers` have its inputs.
        nodes = [*_torch.graph_nodes(roots, stop), *(x.grad_fn for x in call.savers)]
        _torch.hook_residuals(
            nodes, lambda x: _is_worth(x, resident), residuals.pack, residuals.unpack
        )
        residuals.packing.clear()
        if unit_token is not None:
            _LAST[unit_token] = residuals
        return out

    return run_and_store


# By the token of a gradient call, the residuals of its last unit call.
_LAST: weakref.WeakKeyDictionary[UnitToken, _Residuals] = weakref.WeakKeyDictionary()


def _storages_of(x: Leaf) -> list[int]:
    """Returns the storages of a parameter, which stay where they are."""
    if isinstance(x, Sharded) and x.packed is not None:
        buffers = (x.packed.flat, x.packed.whole)
        return [_torch.storage_key(t) for t in buffers if t is not None]
    x = x.local if isinstance(x, Sharded) else x
    return [_torch.storage_key(x)] if isinstance(x, Tensor) else []


def _is_worth(x: Tensor, resident: set[int]) -> bool:
    """Returns whether a saved tensor is worth a copy, and can be made again of one."""
    is_plain = type(x) in (Tensor, torch.nn.Parameter, _torch.FakeTensor)
    # It is made again as a strided view of the storage's bytes: that is not all of a
    # subclass or a sparse tensor, nor of one that is conjugated or negated lazily.
    if not is_plain or x.layout != torch.strided or x.is_conj() or x.is_neg():
        return False
    if x.untyped_storage().nbytes() < _SMALL or _torch.is_wrapped(x):
        return False
    return _torch.storage_key(x) not in resident


class _StoredStorage:
    """The bytes of one storage in a store; on the device while they are used.

    Args:
        x: a tensor that lies in the storage.

    Attributes:
        stored: the copy.
    """

    def __init__(self, x: Tensor, store: Store):
        memory = x.untyped_storage()
        self.size = memory.nbytes()
        # Rounded up, so that the copy can be viewed in any dtype.
        size = -(-self.size // _ALIGNMENT) * _ALIGNMENT
        self.device, self.store = x.device, store
        self.stored = store.scratch(size, torch.uint8, x.device)
        # In a plan what is copied counts, not a view of it: so the whole storage is
        # copied in the dtype of ``x``, as fake tensors have no bytes.
        if isinstance(x, _torch.FakeTensor):
            count = self.size // x.element_size()
            stored = self.stored[: count * x.element_size()].view(x.dtype)
            stored.copy_(x.detach().as_strided((count,), (1,), 0))
        else:
            bare = torch.empty(0, dtype=torch.uint8, device=x.device)
            bytes_ = bare.set_(memory, 0, (self.size,))  # type: ignore[call-overload]
            store.copy(self.stored[: self.size], bytes_, private=True)
        self._fetched: weakref.ref[Tensor] | None = None

    def fetch(self) -> Tensor:
        """Returns the bytes on the device: one copy for all that read them."""
        # By weakref: the copy on the device lives while nodes of the backward read it.
        fetched = None if self._fetched is None else self._fetched()
        if fetched is None:
            fetched = self.stored.new_empty(self.stored.shape, device=self.device)
            # It waits for the copy into the store, also in another stream.
            self.store.copy(fetched, self.stored, private=True)
            self._fetched = weakref.ref(fetched)
        elif crosses(fetched, self.stored):
            # Autograd runs a node in the stream of its forward: one of another stream
            # may have fetched it.
            wait_for_last_copy(fetched, self.stored)
        return fetched


class _StoredTensor(NamedTuple):
    """A saved tensor as a view of a stored storage."""

    storage: _StoredStorage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Residuals:
    """The saved tensors of one unit call.

    Args:
        before: those of the call before it, which the backward reads next.

    Attributes:
        packing: by storage, what was stored, while tensors are packed. With the
            storage, so that its address is no other's meanwhile.
        storages: all that were stored.
    """

    def __init__(self, store: Store, before: _Residuals | None):
        self.store = store
        self.before = None if before is None else weakref.ref(before)
        self.packing: dict[int, tuple[torch.UntypedStorage, _StoredStorage]] = {}
        # By weakref: autograd frees each when its last tensor has been read.
        self.storages: list[weakref.ref[_StoredStorage]] = []

    def pack(self, x: Tensor) -> _StoredTensor:
        key = _torch.storage_key(x)
        # By storage: of ten views that operators saved one copy is stored.
        if key not in self.packing:
            storage = _StoredStorage(x, self.store)
            self.packing[key] = x.untyped_storage(), storage
            self.storages.append(weakref.ref(storage))
        storage, offset = self.packing[key][1], int(x.storage_offset())
        return _StoredTensor(storage, x.dtype, x.shape, x.stride(), offset)

    def unpack(self, packed: _StoredTensor) -> Tensor:
        # At the first read of this call the one before, which the backward reads next,
        # is read ahead, so that a disk works beside the computation.
        before, self.before = self.before, None
        if before is not None and (residuals := before()) is not None:
            for reference in residuals.storages:
                if (storage := reference()) is not None:
                    space_of(storage.stored).read_ahead(storage.stored)
        storage, dtype, size, stride, offset = packed
        return storage.fetch().view(dtype).as_strided(size, stride, offset)
