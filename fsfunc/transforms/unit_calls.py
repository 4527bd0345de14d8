"""A unit call under ``shard``: gather, run, free; in the backward gather and reduce.

Parameters that are differentiated by ``torch.func``, or with ``create_graph``, are
gathered by differentiable collectives (`_compose`). All others go through two
``autograd.Function`` around the unit (`UnitBoundary`), whose own graph, in between, is
ordinary:

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

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import label
from fsfunc.comm.collective_ops import Dense, apply_map
from fsfunc.comm.groups import group
from fsfunc.comm.mesh import here
from fsfunc.comm.typed_maps import ENTER, GATHER, MEAN, OWN, REDUCE, LawError
from fsfunc.core.casts import differentiable
from fsfunc.core.execution_context import Running, running
from fsfunc.core.units import Call
from fsfunc.sharded.layout import Layout
from fsfunc.sharded.leaf import FlatShard, Sharded, is_sharded
from fsfunc.sharded.packing import by_buffer, joined, packed_of
from fsfunc.transforms.gathers import BufferDtypes, Calls, GatheredCall, Lifetime
from fsfunc.transforms.gradients import check_derivatives, check_mapped
from fsfunc.transforms.messages.wire import as_buffer, by_offset
from fsfunc.transforms.shard_options import ShardOptions
from fsfunc.transforms.shard_runtime import ShardRuntime


class UnitArguments(NamedTuple):
    """The arguments of a unit call.

    Args:
        leaves: those of the parameters; what is gathered takes their places.
        treedef: the structure of the parameters.
        gathered: the positions of the leaves that this shard gathers.
        inputs, named: the other arguments; ``others``: the leaves of both.
    """

    leaves: list[Any]
    treedef: tree.TreeDef
    gathered: list[int]
    inputs: tuple[Any, ...]
    named: dict[str, Any]
    others: list[Any]


def call_unit(
    cut: ShardOptions,
    runtime: ShardRuntime | None,
    run: Callable[..., Any],
    call: Call,
    params: Any,
    /,
    *inputs: Any,
    **named: Any,
) -> Any:
    """Runs a unit call: gathers its parameters, calls it, frees them."""
    every_leaf, spec = tree.flatten((params, inputs, named), is_leaf=is_sharded)
    treedef = spec.child(0)
    leaves = every_leaf[: treedef.num_leaves]
    f, functional = call.frame, call.frame.composable
    gathered = _gathered_here(cut, leaves, call)
    whole = [] if f.path else _unaveraged(leaves, runtime, functional)
    if whole:
        _enter_whole(cut, leaves, whole, call, (inputs, named))
    if gathered:
        if f.tracer is not None:
            f.tracer.takes(f"unit {call.name!r}", [leaves[i] for i in gathered])
        if runtime is None:
            raise RuntimeError(f"{call.name} runs outside the sharded function")
        others = every_leaf[len(leaves) :]
        arguments = UnitArguments(leaves, treedef, gathered, inputs, named, others)
        if not functional:
            return _gather_and_forget(runtime, run, call, arguments)
        check_mapped(call, [leaves[i] for i in gathered])
        check_derivatives(call, [leaves[i] for i in gathered], (inputs, named))
        _compose(arguments, call, runtime)
    if whole or gathered:
        params = tree.unflatten(treedef, leaves)
    return run(params, *inputs, **named)


def _gather_and_forget(
    runtime: ShardRuntime, run: Callable[..., Any], call: Call, given: UnitArguments
) -> Any:
    """Runs the unit between the two Functions, which free and re-gather buffers."""
    leaves, now = given.leaves, running()
    order = now.thread
    token = None if order is None else order.token
    with label(call.name, "forward"):
        calls, shards, flats, positions = _buffers_read(given, call, runtime)
        # A recompute reads what the backward has gathered; one of a call whose graph
        # was forgotten as a whole is a forward of its own.
        again = now.recompute and not now.forgotten
        calls = runtime.take(calls, shards, call.frame.casts, again)
        boundary = UnitBoundary(runtime, calls, shards)
        token, views = boundary.enter(flats, token, apart=call.frame.staged)
    if order is not None and token is not None:
        order.token = token
    for i, view in zip(positions, views, strict=True):
        split = leaves[i].layout.in_units
        leaves[i] = view if split is None else Sharded(view, split)
    out = run(tree.unflatten(given.treedef, leaves), *given.inputs, **given.named)
    outs, spec = tree.flatten(out)
    if call.frame.compiler is not None:
        if any(h.reads_again(call) for h in call.frame.handlers):
            boundary.calls[0].gathers_again = True
    # The unit's own calls of units have moved the token on.
    token = token if order is None else order.token
    token = boundary.leave(outs, token, (views, given.others), call.savers, now)
    if order is not None and token is not None:
        order.token = token
    return tree.unflatten(spec, outs)


def _gathered_here(cut: ShardOptions, leaves: Sequence[Any], call: Call) -> list[int]:
    """The positions of this shard's leaves that no nested unit gathers."""
    inner = "" if call.unit.whole else call.name + "/"
    positions, last, ours = [], None, False
    for i, x in compress(enumerate(leaves), map(is_sharded, leaves)):
        if x.packed is None or x.packed is not last:  # else as the leaf beside it
            last, layout = x.packed, x.layout
            ours = cut.gathers(layout) and not (
                inner and layout.flat.buffer.startswith(inner)
            )
        if ours:
            positions.append(i)
    return positions


def _unaveraged(
    leaves: Sequence[Any], runtime: ShardRuntime | None, functional: bool
) -> list[int]:
    """The positions of replicated parameters whose gradient must be averaged here.

    Others are averaged when the enclosing ``value_and_grad`` ends.
    """
    positions = []
    for i, x in enumerate(leaves):
        if isinstance(x, Tensor) and (functional or x.requires_grad):
            averaged = runtime is not None and runtime.averages(x)
            if differentiable(x) and (functional or not averaged):
                positions.append(i)
    return positions


def _enter_whole(
    cut: ShardOptions, leaves: list[Any], positions: list[int], call: Call, inputs: Any
) -> None:
    """Applies ENTER to replicated parameters, so that their gradients are averaged."""
    if call.frame.staged:
        raise LawError(_MADE.format(call.name))
    where = group(cut.axes, here(cut.mesh))
    for i in positions:
        check_derivatives(call, [leaves[i]], inputs)
        with label(call.name, "forward"):
            leaves[i] = apply_map(leaves[i], ENTER, where)


class BufferReads(NamedTuple):
    """The packed buffers that a unit call reads, in the order of their first leaves.

    Args:
        calls: what the runtime gathers for each.
        shards: this rank's range of each; ``flats``: its tensor, with its history.
        positions: those of the leaves, in the order of the buffers' views.
    """

    calls: Calls
    shards: list[FlatShard]
    flats: list[Tensor]
    positions: list[int]


def _buffers_read(
    given: UnitArguments, call: Call, runtime: ShardRuntime
) -> BufferReads:
    """The buffers that a unit call reads, each with a `GatheredCall`."""
    f, leaves = call.frame, given.leaves
    calls, shards, flats, order = [], [], [], []
    each = None if f.casts is None else f.casts.each(call.name, given.treedef)
    for positions in by_buffer(leaves, given.gathered):
        first = leaves[positions[0]]
        if (shard := first.packed) is not None:
            flat = shard.flat
        else:
            chosen = [leaves[i] for i in positions]
            shard, flat = packed_of(chosen, runtime.coordinates)
            runtime.groups[shard.split_axes]  # here: a backward has no context
        dtype = shard.flat.dtype
        dtypes = BufferDtypes(dtype, dtype)
        if f.casts is not None and each is not None:
            dtype = _one_dtype(dtype, [each[i] for i in positions])
            dtypes = BufferDtypes(dtype, dtype)
            if not dtype.is_complex:  # of complex numbers `precision` changes nothing
                reduced = f.casts.reduce or dtype
                dtypes = BufferDtypes(dtype, reduced, f.casts.gradients)
        views = []
        for i in positions:
            views.append(leaves[i].layout.view)
        summed = first.parts is runtime.parts and id(shard) in runtime.summed
        numbers = call.numbers, f.micro
        calls.append(GatheredCall(call.name, *numbers, shard, views, dtypes, summed))
        shards.append(shard)
        flats.append(flat)
        order += positions
    return BufferReads(calls, shards, flats, order)


def _compose(given: UnitArguments, call: Call, runtime: ShardRuntime) -> None:
    """Gathers, in place, by collectives with higher-order derivatives and ``vmap``."""
    casts, leaves = call.frame.casts, given.leaves
    for positions in by_buffer(leaves, given.gathered):
        chosen = [leaves[i] for i in positions]
        layout = chosen[0].layout
        flat = joined(chosen, runtime.coordinates)
        shard = chosen[0].packed
        if shard is not None:
            flat = flat.to(shard.space.on_device(shard.flat).device)
        if casts is not None:
            each = casts.each(call.name, given.treedef)
            flat = flat.to(_one_dtype(flat.dtype, [each[i] for i in positions]))
        name = f"{call.name}({layout.name})"
        flat = spread(runtime, flat, layout, name)
        for i, x in zip(positions, chosen, strict=True):
            start, shape = x.layout.flat.offset, x.layout.unit_shape
            whole = Dense.apply(flat[start : start + math.prod(shape)].view(shape))
            split = x.layout.in_units
            leaves[i] = whole if split is None else Sharded(whole, split)


def _one_dtype(own: torch.dtype, wanted: Sequence[torch.dtype | None]) -> torch.dtype:
    """The dtype in which to gather a buffer whose leaves are wanted in these dtypes.

    If they differ, it is the buffer's own, and the unit casts each leaf.
    """
    first = wanted[0]
    if first is None or not own.is_floating_point or wanted.count(first) < len(wanted):
        return own
    return first


_MADE = (
    "unit {!r} of a pipelined loss has a parameter that was made in the loss: there it "
    "is unknown if it is one value on all ranks, with a mean as its gradient, or this "
    "rank's own. Make it inside the unit, from the parameter itself"
)


class UnitBoundary(NamedTuple):
    """The two Functions of a unit call, and what these tell the runtime.

    Args:
        runtime: that of the enclosing call.
        calls: the gathered buffers that the unit reads.
        shards: this rank's range of each.
    """

    runtime: ShardRuntime
    calls: Calls
    shards: list[FlatShard]

    def enter(
        self, flats: Sequence[Tensor], token: Tensor | None, *, apart: bool
    ) -> tuple[Tensor | None, list[Tensor]]:
        """The unit token and the parameters, through ``_Enter`` if grad is on.

        Args:
            flats: the buffers' ranges, with their history.
            apart: whether each parameter gets a node of its own, as pipelines ask for
                their gradients one by one.
        """
        tracked = token is not None
        for flat in flats:
            tracked = tracked or flat.requires_grad
        if not (tracked and torch.is_grad_enabled()):
            views: list[Tensor] = []
            for call in self.calls:
                views += call.parameters()
            return token, views
        tied = token is not None and not apart
        entered: Any = _Enter.apply((self, tied), token, *flats)
        if apart:
            # Through a node of its own: for the gradient of one output of a node the
            # engine runs what leads to any of them.
            entered = [None if x is None else x.view_as(x) for x in entered]
        token, *views = entered
        return token, views

    def leave(
        self,
        outs: list[Any],
        token: Tensor | None,
        arguments: tuple[Sequence[Tensor], Sequence[Any]],
        savers: Sequence[Any],
        now: Running,
    ) -> Tensor | None:
        """Passes ``outs`` through ``_Exit``, frees saved views; returns the token.

        Args:
            arguments: the parameters of the call, and the leaves of its others.
            savers: tensors beside the graph whose nodes save the unit's arguments.
            now: what the call runs in, such as a recompute.
        """
        runtime, calls, (views, others) = self.runtime, self.calls, arguments
        # What a recompute saves is read by the backward that it runs in: nothing is
        # freed between. Nor is what stays to the backward, or belongs to the state.
        keys, forgotten, first = [], [], 0
        for call, shard in zip(calls, self.shards, strict=True):
            keys.append(_torch.storage_key(views[first]))
            if not now.recompute and call.lifetime is Lifetime.CALL:
                # By the view: an inner unit's call may have dropped the buffer since.
                start = int(views[first].storage_offset()) - call.views[0][2]
                forgotten.append((call, shard, keys[-1], start))
            first += len(call.views)
        tracked, roots = [], []
        for i, y in enumerate(outs):
            if isinstance(y, Tensor):
                # An output in the buffer's memory would be overwritten with that.
                if _torch.storage_key(y) in keys:
                    outs[i] = y = y.clone()
                if y.requires_grad:
                    tracked.append(i)
                    roots.append(y.grad_fn)
        if not tracked and token is None or not torch.is_grad_enabled():
            return token  # one made without grad would break the order of units
        if forgotten and now.forgotten:
            calls[0].gathers_again = True  # with the whole of its graph
        elif forgotten:
            stop = set()
            for x in (*views, *others):
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
                calls[0].gathers_again = True
        if not now.recompute:
            runtime.after_forward(calls)
        going = map(outs.__getitem__, tracked)
        token, *exits = _Exit.apply(self, token, *going)
        for i, y in zip(tracked, exits, strict=True):
            outs[i] = y
        return token


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, given, token, *flats):  # type: ignore[override]
        ctx.boundary, ctx.tied = given
        ctx.set_materialize_grads(False)
        entered = [None if token is None else token.clone()]
        frozen: list[Tensor] = []  # no derivative by these is computed, as without us
        needed = ctx.needs_input_grad[2:]
        for call, tracked in zip(ctx.boundary.calls, needed, strict=True):
            entered += (views := call.parameters())
            frozen += () if tracked or call.summed_here else views
        ctx.mark_non_differentiable(*frozen)
        return tuple(entered)

    @staticmethod
    def backward(ctx, token, *grads):  # type: ignore[override]
        boundary: UnitBoundary = ctx.boundary
        runtime, calls = boundary.runtime, boundary.calls
        with label(calls[0].name, "backward"):
            before, gradients, i = runtime.after_backward(calls), [], 0
            # The backward of the gradient call has a gradient of the token (a pipeline
            # asks for each parameter). Without one, the loss differentiates a value
            # between units.
            own = token is not None or not ctx.tied
            pairs = zip(calls, boundary.shards, strict=True)
            for k, (call, shard) in enumerate(pairs):
                of_views = grads[i : i + len(call.views)]
                i += len(call.views)
                tracked, g = ctx.needs_input_grad[2 + k], None
                if torch.is_grad_enabled():
                    kind = shard.flat.dtype
                    parts = by_offset(call.views, of_views, kind)
                    g = as_buffer(parts, shard, kind) if tracked else None
                elif own and call.summed_here or tracked:
                    shared_by = before if own else []
                    g = runtime.gradient_of(call, shard, of_views, shared_by)
                if g is not None:
                    g = _reduced(runtime, g, shard).to(shard.flat.dtype)
                gradients.append(g)
        return (None, token, *gradients)


class _Exit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, boundary, token, *outs):  # type: ignore[override]
        ctx.boundary, ctx.freed = boundary, False
        ctx.set_materialize_grads(False)
        # Detached, not returned as they are: a later in-place change of an output is
        # allowed, and is seen by the version check where the unit saved it.
        left = [None if token is None else token.clone()]
        for y in outs:
            left.append(y.detach())
        return tuple(left)

    @staticmethod
    def backward(ctx, token, *grads):  # type: ignore[override]
        boundary: UnitBoundary = ctx.boundary
        name = boundary.calls[0].name
        if ctx.freed:
            raise RuntimeError(_FREED.format(name))
        ctx.freed = not _torch.keeps_graph()
        with label(name, "backward"):
            boundary.runtime.before_backward(boundary.calls, boundary.shards)
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
        if _torch.INSPECTING.on:
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
