"""The two ``autograd.Function`` around a sharded unit: gather, free, gather, reduce.

The unit's own graph, in between, is ordinary:

``_Enter``  outputs the parameters, as views of the gathered buffer. Its backward has
            all their gradients, which the runtime packs into one buffer and reduces.
``_Exit``   outputs the unit's outputs. Its backward runs first, and gathers again.

After the forward pass the unit's part of the graph is walked once, and saved tensors
that lie in the gathered buffer get hooks, which keep their place there instead of the
data. Nothing is hooked while the function runs, so autograd's version checks and
other hooks keep working; and as a hooked tensor is unpacked with its history, the
backward can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.attribution import label
from fsfunc.comm.collective_ops import apply_map
from fsfunc.comm.typed_maps import ENTER, GATHER, MEAN, OWN, REDUCE, LawError
from fsfunc.core.execution_context import running
from fsfunc.sharded.layout import Layout
from fsfunc.sharded.leaf import FlatShard, Sharded
from fsfunc.transforms.gathers import Calls, GatheredCall
from fsfunc.transforms.messages.wire import as_buffer, by_offset
from fsfunc.transforms.shard_runtime import ShardRuntime


def enter(
    runtime: ShardRuntime,
    calls: Calls,
    shards: Sequence[FlatShard],
    flats: Sequence[Tensor],
    token: Tensor | None,
    apart: bool,
) -> tuple[Tensor | None, list[Tensor]]:
    """The unit token and the parameters of a call, through ``_Enter`` if grad is on.

    Args:
        flats: the buffers' ranges, with their history.
        apart: whether each parameter gets a node of its own, as pipelines ask for their
            gradients one by one.
    """
    tracked = token is not None
    for flat in flats:
        tracked = tracked or flat.requires_grad
    if not (tracked and torch.is_grad_enabled()):
        views: list[Tensor] = []
        for call in calls:
            views += call.parameters()
        return token, views
    tied = token is not None and not apart
    found: Any = _Enter.apply((runtime, calls, shards, tied), token, *flats)
    if apart:
        # Through a node of its own: for the gradient of one output of a node the engine
        # runs what leads to any of them.
        found = [None if x is None else x.view_as(x) for x in found]
    token, *views = found
    return token, views


def leave(
    runtime: ShardRuntime,
    calls: Calls,
    shards: Sequence[FlatShard],
    token: Tensor | None,
    views: Sequence[Tensor],
    inputs: Sequence[Any],
    outs: list[Any],
    recompute: bool,
    savers: Sequence[Any],
) -> Tensor | None:
    """Passes ``outs`` through ``_Exit``, frees saved parameters; returns the token.

    Args:
        inputs: the leaves of the unit's other arguments.
        recompute: whether this is the recompute of a call in a backward pass.
        savers: tensors beside the graph whose nodes save the unit's arguments.
    """
    keys, forgotten, at = [], [], 0
    for call, shard in zip(calls, shards, strict=True):
        keys.append(_torch.storage_key(views[at]))
        if not (recompute or call.lasts or call.held):
            # By the view: an inner unit's call may have dropped the buffer meanwhile.
            start = int(views[at].storage_offset()) - call.views[0][2]
            forgotten.append((call, shard, keys[-1], start))
        at += len(call.views)
    tracked, roots = [], []
    for i, y in enumerate(outs):
        if isinstance(y, Tensor):
            if _torch.storage_key(y) in keys:
                outs[i] = y = y.clone()
            if y.requires_grad:
                tracked.append(i)
                roots.append(y.grad_fn)
    if not tracked and token is None or not torch.is_grad_enabled():
        return token  # one made without grad would break the order of units
    if forgotten and running().forgotten:
        calls[0].forgets = True  # with the whole of its graph
    elif forgotten:
        stop = set()
        for x in (*views, *inputs):
            x = x._part if isinstance(x, Sharded) else x
            if isinstance(x, Tensor):
                stop.add(x.grad_fn)
        nodes, count = _torch.graph_nodes(roots, stop), 0
        if savers:
            nodes += [x.grad_fn for x in savers]
        for call, shard, key, start in forgotten:
            pack, unpack = _forgetting(runtime, call, shard, start)
            count += _torch.hook_saved(nodes, key, pack, unpack)
        if count:
            calls[0].forgets = True
    if not recompute:
        runtime.after_forward(calls)
    going = map(outs.__getitem__, tracked)
    token, *exits = _Exit.apply((runtime, calls, shards), token, *going)
    for i, y in zip(tracked, exits, strict=True):
        outs[i] = y
    return token


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, given, token, *flats):  # type: ignore[override]
        ctx.runtime, ctx.calls, ctx.shards, ctx.tied = given
        ctx.set_materialize_grads(False)
        found = [None if token is None else token.clone()]
        frozen: list[Tensor] = []  # no derivative by these is computed, as without us
        for call, tracked in zip(ctx.calls, ctx.needs_input_grad[2:], strict=True):
            found += (views := call.parameters())
            frozen += () if tracked or call.keeps else views
        ctx.mark_non_differentiable(*frozen)
        return tuple(found)

    @staticmethod
    def backward(ctx, token, *grads):  # type: ignore[override]
        runtime: ShardRuntime = ctx.runtime
        calls: Calls = ctx.calls
        with label(calls[0].name, "backward"):
            before, found, i = runtime.after_backward(calls), [], 0
            # The backward of the gradient call has a gradient of the token (a pipeline
            # asks for each parameter). Without one, the loss differentiates a value
            # between units.
            own = token is not None or not ctx.tied
            for k, (call, shard) in enumerate(zip(calls, ctx.shards, strict=True)):
                mine = grads[i : i + len(call.views)]
                i += len(call.views)
                tracked, g = ctx.needs_input_grad[2 + k], None
                if torch.is_grad_enabled():
                    kind = shard.flat.dtype
                    parts = by_offset(call.views, mine, kind)
                    g = as_buffer(parts, shard, kind) if tracked else None
                elif own and call.keeps or tracked:
                    g = runtime.gradient_of(call, shard, mine, before if own else [])
                if g is not None:
                    g = _reduced(runtime, g, shard).to(shard.flat.dtype)
                found.append(g)
        return (None, token, *found)


class _Exit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, given, token, *outs):  # type: ignore[override]
        ctx.runtime, ctx.calls, ctx.shards = given
        ctx.freed = False
        ctx.set_materialize_grads(False)
        # Detached, not returned as they are: a later in-place change of an output is
        # allowed, and is seen by the version check where the unit saved it.
        found = [None if token is None else token.clone()]
        for y in outs:
            found.append(y.detach())
        return tuple(found)

    @staticmethod
    def backward(ctx, token, *grads):  # type: ignore[override]
        if ctx.freed:
            raise RuntimeError(_FREED.format(ctx.calls[0].name))
        ctx.freed = not _torch.keeps_graph()
        with label(ctx.calls[0].name, "backward"):
            ctx.runtime.before_backward(ctx.calls, ctx.shards)
        return (None, token, *grads)


_FREED = (
    "unit {!r} is differentiated a second time, after a backward pass that freed what "
    "it saved. The backward of a sharded loss passes through every unit that the loss "
    "called, so that all ranks do the same reductions, also where the loss does not "
    "use what the unit returned: make one unit of the hook and of the calls that it "
    "differentiates"
)


_NOTHING = torch.empty(0)


def _forgetting(
    runtime: ShardRuntime, call: GatheredCall, shard: FlatShard, start: int
) -> tuple[Any, Any]:
    """Hooks that replace a saved tensor by its place in the buffer.

    Args:
        start: the element of its storage at which the buffer began.
    """
    kind = call.dtype

    def pack(x: Tensor) -> tuple[Any, ...]:
        if x.dtype is kind and not (x.is_conj() or x.is_neg()):
            return x.shape, x.stride(), x.storage_offset() - start
        return (_torch.place_of(x, start * kind.itemsize),)

    def unpack(packed: tuple[Any, ...]) -> Tensor:
        if _torch.LOOKING.on:
            return _NOTHING
        full = call.full
        if full is None:  # read outside the unit's backward: gathered for this alone
            with label(call.name, "backward"):
                full = runtime.gathers.gather_again(shard, call)
        if len(packed) == 1:
            return _torch.view_at(full, *packed)
        shape, stride, offset = packed
        return full.as_strided(shape, stride, full.storage_offset() + offset)

    return pack, unpack


# As differentiable collectives


def spread(runtime: ShardRuntime, flat: Tensor, layout: Layout, name: str) -> Tensor:
    """The whole buffer, gathered differentiably from this rank's range.

    Args:
        layout: that of one of its leaves.
    """
    _check_exact(runtime)
    enter, gather = replace(ENTER, what=name), replace(GATHER, what=name)
    where, replicas, blocks = runtime.groups[layout.split_axes]
    if replicas is not None:
        flat = apply_map(flat, enter, replicas)
    if where is not None:
        cut = layout.flat is not None and layout.flat.size > 1
        flat = apply_map(flat, gather if cut else enter, where)
    return apply_map(flat, OWN, blocks) if blocks is not None else flat


def _reduced(runtime: ShardRuntime, buffer: Tensor, shard: FlatShard) -> Tensor:
    """The transpose of :func:`spread`."""
    _check_exact(runtime)
    how, mean = replace(REDUCE, what=shard.name), replace(MEAN, what=shard.name)
    where, replicas, blocks = runtime.groups[shard.split_axes]
    if blocks is not None:
        buffer = apply_map(buffer, OWN.transpose(), blocks)
    if where is not None:
        buffer = apply_map(buffer, how if shard.place.size > 1 else mean, where)
    if replicas is not None:
        buffer = apply_map(buffer, mean, replicas)
    return buffer


def _check_exact(runtime: ShardRuntime) -> None:
    """Raises if a message of ``shard`` is inexact, as its derivative would be wrong.

    Raises:
        LawError: a gather or a reduction changes values on the way.
    """
    for how in (runtime.options.gather, runtime.options.reduction):
        if not how.exact:
            raise LawError(
                f"{type(how).__name__} changes what it sends, and a derivative taken "
                "by torch.func, by create_graph=True or by leaves that require grad "
                "would be that of the encoding: take it by ff.value_and_grad, of "
                "leaves that require none, or shard this step without it"
            )
