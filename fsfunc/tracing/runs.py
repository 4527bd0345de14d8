"""The harness of every trace: `without_data`, in which a function computes nothing.

`shadows` gives the arguments as fake tensors. Nothing is sent, no ledger records it,
the random generators are restored, and compiled functions run as plain ones. Each
trace adds observers of its own: a :class:`~fsfunc.core.tracers.Tracer` in the frame, a
watcher of collectives, modes. While a step is recorded, `Noted` replaces ``shard``.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc._torch import FakeTensorMode, fake_modes
from fsfunc.comm.backends.abstract import AbstractLink, naming_value_reads
from fsfunc.comm.ledgers import only, silence
from fsfunc.comm.mesh import Here, Mesh, maybe_here, noting_axes_read, set_here
from fsfunc.comm.traffic import Ledger
from fsfunc.core.frames import Frame, Interpretation, inside
from fsfunc.core.units import Call
from fsfunc.runtime.generators import generators_restored, other_generators_restored
from fsfunc.runtime.memory import fresh_buffers
from fsfunc.runtime.memory_spaces import space_of
from fsfunc.runtime.scopes import in_one_thread, running_eagerly
from fsfunc.sharded.layout import Owned
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.plain_leaves import locate_state
from fsfunc.tracing.steadiness import RestoresOutside
from fsfunc.tree import Leaf, PyTree, TreeDef
from fsfunc.tree.structure import hides


def place_without_data() -> Here | None:
    """Returns the rank that runs, with a link that sends nothing, if it has a mesh."""
    here = maybe_here()
    return here and replace(here, link=AbstractLink(here.rank))


@contextmanager
def without_data(
    values: PyTree,
    here: Here | None = None,
    *,
    fake: bool = True,
    fake_cache: bool = True,
    restore_outside: bool = True,
    log: Ledger | None = None,
    asked_axes: set[str] | None = None,
    read_error: tuple[str, str] | None = None,
    seed: int | None = None,
) -> Iterator[FakeTensorMode | None]:
    """Inside, nothing is computed or sent; gives the mode of fake tensors, if any.

    Args:
        values: the arguments; the mode of fake tensors among them is used. A mode that
            is on already stays, as tensors of two modes cannot be combined.
        here: the rank that runs, with a link that sends nothing; None if the step names
            its own mesh, or none.
        fake: False for tensors with data, which are computed with but not sent.
        fake_cache: False in forward mode, see ``without_fake_cache``.
        restore_outside: False if the caller has a `RestoresOutside` of its own.
        log: the ledger of the collectives; by default none.
        asked_axes: a set to which the axes are added whose ``axis_index`` is read.
        read_error: (who, what to do instead), for the error if a value is read.
        seed: for the generators of Python and numpy, if not their present states.
    """
    with ExitStack() as stack:
        stack.enter_context(generators_restored())
        stack.enter_context(other_generators_restored(seed))
        stack.enter_context(silence() if log is None else only(log))
        stack.enter_context(running_eagerly())
        stack.enter_context(in_one_thread())
        # Buffers with data may be in use by the real step: a run on copies has others.
        if not fake:
            stack.enter_context(fresh_buffers())
        mode = _torch.fake_mode()
        if fake:
            stack.enter_context(fake_modes.without_fake_logs())
        if fake and mode is None:
            mode = stack.enter_context(fake_modes.fake_mode_of(tree.leaves(values)))
            if not fake_cache:
                stack.enter_context(fake_modes.without_fake_cache(mode))
        if restore_outside:
            stack.enter_context(RestoresOutside())
        if asked_axes is not None:
            stack.enter_context(noting_axes_read(asked_axes))
        if here is not None:
            stack.enter_context(set_here(here))
        if read_error is not None:
            stack.enter_context(naming_value_reads(*read_error))
        yield mode


def shadows(
    mode: FakeTensorMode | None,
    args: PyTree,
    coordinates: Mapping[str, int] | None = None,
    *,
    apart: bool = False,
) -> PyTree:
    """Returns the arguments as fake tensors, which share memory as the arguments do.

    Objects that a step may put tensors into (a cache) are copied, so that a run leaves
    nothing in the user's.

    Args:
        mode: the mode of the fake tensors; None makes copies, with data.
        coordinates: of a rank whose parts of sharded leaves they are, if another's.
        apart: whether a view of a larger tensor may get memory of its own, if no other
            argument lies in that.
    """
    leaves, treedef = tree.flatten(args, is_leaf=is_sharded)
    packed_shadows: dict[int, list[Sharded]] = {}
    storages: dict[int, Tensor] = {}
    tensors = {id(x): x for x in leaves if isinstance(x, Tensor)}
    leaves_in = Counter(map(_torch.storage_key, tensors.values()))
    leaves_in.update(_torch.storage_key(x.packed.flat) for x in leaves if _packed(x))
    alone: dict[int, Tensor] = {}

    fakes: dict[int, Tensor] = {}  # one tensor at two places stays one

    def shadow_of(x: Tensor) -> Tensor:
        if id(x) not in fakes:
            fakes[id(x)] = _shadow(mode, x, storages)
        return fakes[id(x)]

    for i, x in enumerate(leaves):
        if isinstance(x, Tensor) and apart and leaves_in[_torch.storage_key(x)] == 1:
            if id(x) not in alone:
                alone[id(x)] = _like(mode, x)
            leaves[i] = alone[id(x)]
        elif isinstance(x, Tensor):
            leaves[i] = shadow_of(x)
        elif isinstance(x, Sharded) and x.packed is None:
            leaves[i] = x.with_local(shadow_of(x.local))
        elif isinstance(x, Sharded) and x.packed is not None:
            packed = x.packed
            if mode is not None and isinstance(packed.flat, _torch.FakeTensor):
                continue
            if id(packed) not in packed_shadows:
                packed_shadows[id(packed)] = packed.shadow(
                    shadow_of, coordinates
                ).leaves()
            position = [id(layout) for layout in packed.members].index(id(x.layout))
            leaves[i] = packed_shadows[id(packed)][position]
        elif not tree.are_shown([x]) and (mode is None or not hides(x)):
            # A run may fill it, as an empty cache is filled. One that hides tensors is
            # not copied without data: its tensors have some, and are refused.
            leaves[i] = copy.deepcopy(x)
    return tree.unflatten(treedef, leaves)


def _is_odd(x: Tensor) -> bool:
    """Returns whether there is more to a tensor than elements of a storage."""
    if x.layout != torch.strided or type(x) not in (Tensor, torch.nn.Parameter):
        return True
    return x.untyped_storage().nbytes() % x.element_size() != 0


def _packed(x: Leaf) -> bool:
    return isinstance(x, Sharded) and x.packed is not None


def _like(mode: FakeTensorMode | None, x: Tensor) -> Tensor:
    """Returns ``x`` without its data, or a copy, at the start of a storage of its own.

    torch's forward mode makes no tangents for fake tensors that fill only a part of
    their storage.
    """
    if mode is None or isinstance(x, _torch.FakeTensor) or _is_odd(x):
        return _shadow(mode, x, {})
    fake = space_of(x).mark(fake_modes.fake_like(mode, x))
    return fake.requires_grad_(x.requires_grad)


def _shadow(
    mode: FakeTensorMode | None, x: Tensor, storages: dict[int, Tensor]
) -> Tensor:
    """Returns ``x`` without its data, or a copy, in a storage as large as its own.

    Args:
        storages: the storages made so far, by the key of the original: views of one
            storage stay views of one.
    """
    if isinstance(x, _torch.FakeTensor):
        return x if mode is not None else with_data(x)
    if _is_odd(x):
        return x.clone() if mode is None else fake_modes.fake_of(mode, x.detach())
    nbytes = x.untyped_storage().nbytes()
    key = _torch.storage_key(x)
    with nullcontext() if mode is None else mode:
        if key not in storages:
            device = x.device if mode is None else fake_modes.device_of_fake(x)
            storages[key] = torch.empty(nbytes, dtype=torch.uint8, device=device)
            if mode is None:
                storages[key].untyped_storage().copy_(x.untyped_storage())
            space_of(x).mark(storages[key])
        view = _torch.view_at(storages[key], _torch.place_of(x))
    return view.requires_grad_(x.requires_grad)


def with_data(x: Tensor) -> Tensor:
    """Returns a tensor with data in place of one without.

    It holds ones, or zeros if of integers, so that it may serve as a divisor, a mask or
    an index.
    """
    fill = 1 if x.dtype.is_floating_point or x.dtype == torch.bool else 0
    real = torch.full(tuple(x.shape), fill, dtype=x.dtype, device=x.device)
    return real.requires_grad_(x.requires_grad)


def returned_state(args: Sequence[PyTree], out: PyTree) -> PyTree:
    """Returns the state in what a step returned: see `locate_state`."""
    leaves, out_def = tree.flatten(out, is_leaf=is_sharded)
    state_def = tree.flatten(args[0] if args else (), is_leaf=is_sharded)[1]
    start, found_def = locate_state(out_def, state_def)
    return tree.unflatten(found_def, leaves[start : start + found_def.num_leaves])


# Runs the bodies of units in a plan's recording: ``planning.equal_calls.EqualCalls``.
EQUAL_CALLS: ContextVar[Any] = ContextVar("equal_calls", default=None)


class LaysOut(Protocol):
    """The interpretation of a transform that lays out leaves: ``shard``, a pipeline."""

    @property
    def axes(self) -> tuple[str, ...]: ...

    @property
    def mesh(self) -> Mesh: ...


class EntersCalls(LaysOut, Protocol):
    """The interpretation of ``shard``."""

    def enter(
        self,
        handler: Interpretation,
        f: Callable[..., PyTree],
        args: tuple[PyTree, ...],
        keywords: dict[str, PyTree],
        flat: tuple[list[Leaf], TreeDef],
    ) -> Frame:
        """Returns the frame in which a call of a sharded function runs."""
        ...


class NotesUnits(Protocol):
    """What `Noted` asks of a `recorder.Recorder`, which is defined above this file."""

    def unit(
        self, noted: Noted, run: Callable[..., PyTree], call: Call
    ) -> Callable[..., PyTree]: ...

    def mark_numbers(self, values: PyTree) -> PyTree: ...


class Noted(Interpretation):
    """Stands in for a sharding transform while a step is recorded: only notes units.

    Args:
        handler: the transform's own interpretation.
        recorder: is called for each unit call.
    """

    handler: LaysOut
    recorder: NotesUnits

    lays_out = True

    def __init__(self, handler: LaysOut, recorder: NotesUnits):
        self.handler, self.recorder = handler, recorder
        self.axes: tuple[str, ...] = handler.axes

    def unit(self, run: Callable[..., PyTree], call: Call) -> Callable[..., PyTree]:
        return self.recorder.unit(self, run, call)

    def owner(self, number: int) -> tuple[Owned, ...]:
        """Returns the coordinates that run the loss's unit call of this number, if any.

        A pipeline overrides it: of its stages each has unit calls of its own.
        """
        return ()


class NotedShard(Noted):
    """Stands in for ``shard`` while a step is recorded: nothing is gathered."""

    handler: EntersCalls

    def call(
        self,
        f: Callable[..., PyTree],
        args: tuple[PyTree, ...],
        keywords: dict[str, PyTree],
    ) -> PyTree:
        flat = tree.flatten((args, keywords), is_leaf=is_sharded)
        with inside(self.handler.enter(self, f, args, keywords, flat)):
            args, keywords = self.recorder.mark_numbers((args, keywords))
            return f(*args, **keywords)
