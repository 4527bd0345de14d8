"""The harness of every trace: running a function on tensors without data.

Nothing is computed or sent, no ledger records it, the generators are restored, and
compiled functions run as plain ones. A trace adds its own observers: a
:class:`~fsfunc.core.tracers.Tracer` in the frame, a watcher of collectives, modes.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc._torch import fake_modes
from fsfunc.comm.backends.abstract import AbstractLink, naming_value_reads
from fsfunc.comm.ledgers import only, silence
from fsfunc.comm.mesh import Here, maybe_here, noting_axes_read, set_here
from fsfunc.comm.traffic import Ledger
from fsfunc.core.frames import Interpretation, inside
from fsfunc.core.units import Call
from fsfunc.runtime.generators import generators_restored, other_generators_restored
from fsfunc.runtime.memory import fresh_buffers
from fsfunc.runtime.memory_spaces import space_of
from fsfunc.runtime.scopes import in_one_thread, running_eagerly
from fsfunc.sharded.layout import Owned
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.plain_leaves import state_in
from fsfunc.tracing.steadiness import Outside
from fsfunc.tree.structure import hides


def place_without_data() -> Here | None:
    """The rank that runs, with a link that sends nothing; None without a mesh."""
    at = maybe_here()
    return at and replace(at, link=AbstractLink(at.rank))


@contextmanager
def without_data(
    values: Any,
    at: Here | None = None,
    *,
    fake: bool = True,
    remembers: bool = True,
    restores: bool = True,
    log: Ledger | None = None,
    asked: set[str] | None = None,
    told: tuple[str, str] | None = None,
    seed: int | None = None,
) -> Iterator[Any]:
    """Inside, nothing is computed or sent; returns the mode of fake tensors.

    Args:
        values: the arguments; the mode of fake tensors among them is used. A mode that
            is on already stays, as tensors of two modes cannot be combined.
        at: the rank that runs, with a link that sends nothing; None if the step names
            its own mesh, or none.
        fake: False for tensors with data, which are computed with but not sent.
        remembers: see ``remembering_nothing``.
        restores: False if the caller has a mode that derives from `Outside`.
        log: the ledger of the collectives; by default none.
        asked: is given the axes whose ``axis_index`` is read.
        told: (who, what to do instead), for the error if a value is read.
        seed: for the generators of Python and numpy, if not their present states.
    """
    with ExitStack() as stack:
        stack.enter_context(generators_restored())
        stack.enter_context(other_generators_restored(seed))
        stack.enter_context(silence() if log is None else only(log))
        stack.enter_context(running_eagerly())
        stack.enter_context(in_one_thread())
        if not fake:
            stack.enter_context(fresh_buffers())
        mode = _torch.fake_mode()
        if fake:
            stack.enter_context(fake_modes.quiet_fakes())
        if fake and mode is None:
            mode = stack.enter_context(fake_modes.fake_mode_of(tree.leaves(values)))
            if not remembers:
                stack.enter_context(fake_modes.remembering_nothing(mode))
        if restores:
            stack.enter_context(Outside())
        if asked is not None:
            stack.enter_context(noting_axes_read(asked))
        if at is not None:
            stack.enter_context(set_here(at))
        if told is not None:
            stack.enter_context(naming_value_reads(*told))
        yield mode


def shadows(
    mode: Any,
    args: Any,
    coordinates: Mapping[str, int] | None = None,
    *,
    apart: bool = False,
) -> Any:
    """The arguments as fake tensors, which share memory as these do.

    Objects that tensors may be put into are copies: what a run puts there is its own.

    ``mode``: that of the fake tensors; None makes copies, with data.
    ``coordinates``: those of another rank whose parts they are to be.
    ``apart``: whether views of larger tensors may get memory of their own.
    """
    leaves, treedef = tree.flatten(args, is_leaf=is_sharded)
    shards: dict[int, list[Sharded]] = {}
    storages: dict[int, Tensor] = {}
    plain = {id(x): x for x in leaves if isinstance(x, Tensor)}
    held = Counter(map(_torch.storage_key, plain.values()))
    held.update(_torch.storage_key(x.packed.flat) for x in leaves if _packed(x))
    lone: dict[int, Tensor] = {}

    made: dict[int, Tensor] = {}  # one tensor at two places stays one

    def fake(x: Tensor) -> Tensor:
        if id(x) not in made:
            made[id(x)] = _shadow(mode, x, storages)
        return made[id(x)]

    for i, x in enumerate(leaves):
        if isinstance(x, Tensor) and apart and held[_torch.storage_key(x)] == 1:
            if id(x) not in lone:
                lone[id(x)] = _like(mode, x)
            leaves[i] = lone[id(x)]
        elif isinstance(x, Tensor):
            leaves[i] = fake(x)
        elif isinstance(x, Sharded) and x.packed is None:
            leaves[i] = x.with_local(fake(x.local))
        elif isinstance(x, Sharded) and x.packed is not None:
            shard = x.packed
            if mode is not None and isinstance(shard.flat, _torch.FakeTensor):
                continue
            if id(shard) not in shards:
                shards[id(shard)] = shard.shadow(fake, coordinates).leaves()
            at = [id(m) for m in shard.members].index(id(x.layout))
            leaves[i] = shards[id(shard)][at]
        elif not tree.are_shown([x]) and (mode is None or not hides(x)):
            # A run may fill it, as an empty cache. One that holds tensors is refused
            # without data.
            leaves[i] = copy.deepcopy(x)
    return tree.unflatten(treedef, leaves)


def _is_odd(x: Tensor) -> bool:
    """True if there is more to a tensor than elements of a storage."""
    if x.layout != torch.strided or type(x) not in (Tensor, torch.nn.Parameter):
        return True
    return x.untyped_storage().nbytes() % x.element_size() != 0


def _packed(x: Any) -> bool:
    return isinstance(x, Sharded) and x.packed is not None


def _like(mode: Any, x: Tensor) -> Tensor:
    """``x`` without its data, or a copy, that begins where its storage does.

    Of a part of a storage, on fake tensors, torch's forward mode makes no tangents.
    """
    if mode is None or isinstance(x, _torch.FakeTensor) or _is_odd(x):
        return _shadow(mode, x, {})
    fake = space_of(x).mark(fake_modes.fake_like(mode, x))
    return fake.requires_grad_(x.requires_grad)


def _shadow(mode: Any, x: Tensor, storages: dict[int, Tensor]) -> Tensor:
    """``x`` without its data, or a copy, in a storage as large as its own."""
    if isinstance(x, _torch.FakeTensor):
        return x if mode is not None else with_data(x)
    if _is_odd(x):
        return x.clone() if mode is None else fake_modes.fake_of(mode, x.detach())
    size = x.untyped_storage().nbytes()
    key = _torch.storage_key(x)
    with nullcontext() if mode is None else mode:
        if key not in storages:
            where = x.device if mode is None else fake_modes.device_of_fake(x)
            storages[key] = torch.empty(size, dtype=torch.uint8, device=where)
            if mode is None:
                storages[key].untyped_storage().copy_(x.untyped_storage())
            space_of(x).mark(storages[key])
        part = _torch.view_at(storages[key], _torch.place_of(x))
    return part.requires_grad_(x.requires_grad)


def with_data(x: Tensor) -> Tensor:
    """A tensor with data in place of one without.

    Ones, or zeros of integers: what an index, a divisor and a mask can be.
    """
    fill = 1 if x.dtype.is_floating_point or x.dtype == torch.bool else 0
    real = torch.full(tuple(x.shape), fill, dtype=x.dtype, device=x.device)
    return real.requires_grad_(x.requires_grad)


def returned_state(args: Sequence[Any], out: Any) -> Any:
    """The state in what a step returned: see `state_in`."""
    leaves, spec = tree.flatten(out, is_leaf=is_sharded)
    before = tree.flatten(args[0] if args else (), is_leaf=is_sharded)[1]
    start, state = state_in(spec, before)
    return tree.unflatten(state, leaves[start : start + state.num_leaves])


class Noted(Interpretation):
    """Replacement for a sharding transform while a step is recorded.

    Args:
        handler: the transform's own interpretation.
    """

    lays_out = True

    def __init__(self, handler: Any, recorder: Any):
        self.handler, self.recorder = handler, recorder
        self.axes: tuple[str, ...] = handler.axes

    def unit(self, run: Callable[..., Any], call: Call) -> Callable[..., Any]:
        return self.recorder.unit(self, run, call)

    def owner(self, number: int) -> tuple[Owned, ...]:
        """The coordinates that run the loss's unit call of this number, if known."""
        return ()


class NotedShard(Noted):
    """``shard`` while a step is recorded: unit calls are noted, nothing is gathered."""

    def call(self, f: Callable[..., Any], args: Any, keywords: Any) -> Any:
        flat = tree.flatten((args, keywords), is_leaf=is_sharded)
        with inside(self.handler.entered(self, f, args, keywords, flat)):
            args, keywords = self.recorder.heard((args, keywords))
            return f(*args, **keywords)
