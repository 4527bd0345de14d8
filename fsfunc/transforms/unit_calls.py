"""A unit call under ``shard``: gather, run, free; in the backward gather and reduce.

Parameters that are differentiated by ``torch.func``, or with ``create_graph``, are
gathered by differentiable collectives (`_gather_composably`). All others go through two
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
from fsfunc.comm.collective_ops import DenseGrad, apply_map
from fsfunc.comm.groups import get_group
from fsfunc.comm.mesh import here
from fsfunc.comm.typed_maps import ENTER, GATHER, MEAN, PART_AS_LOCAL, REDUCE, LawError
from fsfunc.core.casts import differentiable
from fsfunc.core.execution_context import Running, running
from fsfunc.core.units import Call
from fsfunc.sharded.layout import Layout
from fsfunc.sharded.leaf import FlatShard, Sharded, is_sharded
from fsfunc.sharded.packing import (
    group_by_buffer,
    join_differentiably,
    packed_buffer_of,
)
from fsfunc.transforms.gathers import BufferDtypes, Calls, GatheredCall, Lifetime
from fsfunc.transforms.gradients import check_derivatives, check_mapped
from fsfunc.transforms.messages.wire import gradients_by_offset, pack_parts
from fsfunc.transforms.shard_options import ShardOptions
from fsfunc.transforms.shard_runtime import ShardRuntime
from fsfunc.tree.types import Leaf, PyTree


class UnitArguments(NamedTuple):
    """The arguments of a unit call.

    Args:
        leaves: those of the parameters; what is gathered takes their places.
        treedef: the structure of the parameters.
        gathered: the positions of the leaves that this shard gathers.
        inputs, named: the other arguments; ``others``: the leaves of both.
    """

    leaves: list[Leaf]
    treedef: tree.TreeDef
    gathered: list[int]
    inputs: tuple[PyTree, ...]
    named: dict[str, PyTree]
    others: list[Leaf]


def call_unit(
    options: ShardOptions,
    runtime: ShardRuntime | None,
    run: Callable[..., PyTree],
    call: Call,
    params: PyTree,
    /,
    *inputs: PyTree,
    **named: PyTree,
) -> PyTree:
    """Runs a unit call: gathers its parameters, calls it, frees them.

    Args:
        options: those of this ``shard``; ``runtime``: its state, None outside its call.
        run: runs the unit under the transforms further in, on whole parameters.
        params, inputs, named: the arguments of the call.
    """
    all_leaves, arguments_def = tree.flatten(
        (params, inputs, named), is_leaf=is_sharded
    )
    treedef = arguments_def.child(0)
    leaves = all_leaves[: treedef.num_leaves]
    f, composable = call.frame, call.frame.composable
    gathered = _gathered_positions(options, leaves, call)
    # Within a unit derivatives are this rank's own: leaves enter the outermost one.
    unaveraged = [] if f.path else _unaveraged_positions(leaves, runtime, composable)
    if unaveraged:
        _enter_whole(options, leaves, unaveraged, call, (inputs, named))
    if gathered:
        if f.tracer is not None:
            f.tracer.on_take(f"unit {call.name!r}", [leaves[i] for i in gathered])
        if runtime is None:
            raise RuntimeError(f"{call.name} runs outside the sharded function")
        others = all_leaves[len(leaves) :]
        arguments = UnitArguments(leaves, treedef, gathered, inputs, named, others)
        # Nearly always. Under `torch.func` and `create_graph` every step must have a
        # derivative, so nothing is freed there and gathered again.
        if not composable:
            return _gather_and_forget(runtime, run, call, arguments)
        check_mapped(call, [leaves[i] for i in gathered])
        check_derivatives(call, [leaves[i] for i in gathered], (inputs, named))
        _gather_composably(arguments, call, runtime)
    if unaveraged or gathered:
        params = tree.unflatten(treedef, leaves)
    return run(params, *inputs, **named)


def _gather_and_forget(
    runtime: ShardRuntime,
    run: Callable[..., PyTree],
    call: Call,
    arguments: UnitArguments,
) -> PyTree:
    """Runs the unit between the two Functions, which free and re-gather buffers."""
    leaves, state = arguments.leaves, running()
    # The token passes through each unit, so that autograd runs the backward of all
    # units, in one order on every rank: else ranks would send unlike reductions.
    unit_token = state.token
    token = None if unit_token is None else unit_token.latest
    with label(call.name, "forward"):
        calls, shards, flats, positions = _find_buffers(arguments, call, runtime)
        # A recompute takes the calls of the first run, whose buffers the backward may
        # have gathered. Where one `remat` lies in another, the first run of the inner
        # one is in the outer one's recompute, and saves nothing: it gathers anew.
        recompute = state.recompute and not state.saves_nothing
        calls = runtime.before_forward(calls, shards, call.frame.casts, recompute)
        boundary = UnitBoundary(runtime, calls, shards)
        token, views = boundary.enter(flats, token, apart=call.frame.staged)
    # The token moves on before the unit runs: units that this one calls come after it.
    if unit_token is not None and token is not None:
        unit_token.latest = token
    for i, view in zip(positions, views, strict=True):
        # An expert's leaf is whole along the axes of `shard`, and still split along
        # others: units see it as a `Sharded` of those.
        split = leaves[i].layout.in_units
        leaves[i] = view if split is None else Sharded(view, split)
    out = run(
        tree.unflatten(arguments.treedef, leaves), *arguments.inputs, **arguments.named
    )
    outs, out_def = tree.flatten(out)
    # The backward of a compiled unit that recomputes reads the parameters: they are
    # gathered for it also where no saved tensor lies in the buffer.
    if call.frame.compiler is not None:
        if any(h.reads_again(call) for h in call.frame.handlers):
            boundary.calls[0].gathers_again = True
    # The unit's own calls of units have moved the token on.
    token = token if unit_token is None else unit_token.latest
    token = boundary.leave(outs, token, (views, arguments.others), call.savers, state)
    if unit_token is not None and token is not None:
        unit_token.latest = token
    return tree.unflatten(out_def, outs)


def _gathered_positions(
    options: ShardOptions, leaves: Sequence[Leaf], call: Call
) -> list[int]:
    """Returns the positions of this shard's leaves that no nested unit gathers."""
    # A buffer is named by the unit that gathers it: "block/norm" in "block". With
    # `whole` the outer unit gathers that too, as it runs nested units as functions.
    nested = "" if call.unit.whole else call.name + "/"
    positions, previous, is_gathered = [], None, False
    for i, x in compress(enumerate(leaves), map(is_sharded, leaves)):
        # One answer for a buffer: it is asked about once, as this runs in every call.
        if x.packed is None or x.packed is not previous:
            previous, layout = x.packed, x.layout
            is_gathered = options.gathers(layout) and not (
                nested and layout.flat.buffer.startswith(nested)
            )
        if is_gathered:
            positions.append(i)
    return positions


def _unaveraged_positions(
    leaves: Sequence[Leaf], runtime: ShardRuntime | None, composable: bool
) -> list[int]:
    """Returns the positions of replicated parameters to average gradients of here.

    Others are averaged when the enclosing ``value_and_grad`` ends.
    """
    # Under `torch.func` the derivative may be taken and used before a gradient call
    # ends, and in forward mode nothing requires grad: there all leaves are averaged.
    positions = []
    for i, x in enumerate(leaves):
        if isinstance(x, Tensor) and (composable or x.requires_grad):
            averaged = runtime is not None and runtime.averages(x)
            if differentiable(x) and (composable or not averaged):
                positions.append(i)
    return positions


def _enter_whole(
    options: ShardOptions,
    leaves: list[Leaf],
    positions: list[int],
    call: Call,
    inputs: PyTree,
) -> None:
    """Applies ENTER to replicated parameters, so that their gradients are averaged."""
    # Leaves of the state are averaged when the gradient call ends. What is left in a
    # pipelined loss was made by the loss: nothing tells there if it is one value on all
    # ranks, to be averaged, or this rank's own.
    if call.frame.staged:
        raise LawError(_MADE_IN_LOSS.format(call.name))
    where = get_group(options.axes, here(options.mesh))
    # Averaged over the ranks, a derivative by one sample would mix different samples.
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


def _find_buffers(
    arguments: UnitArguments, call: Call, runtime: ShardRuntime
) -> BufferReads:
    """Returns the buffers that a unit call reads, each with a `GatheredCall`."""
    f, leaves = call.frame, arguments.leaves
    calls, shards, flats, order = [], [], [], []
    wanted = None if f.casts is None else f.casts.each(call.name, arguments.treedef)
    for positions in group_by_buffer(leaves, arguments.gathered):
        first = leaves[positions[0]]
        if (shard := first.packed) is not None:
            flat = shard.flat
        else:
            # Leaves that the step computed lie in no buffer: they are packed here.
            members = [leaves[i] for i in positions]
            shard, flat = packed_buffer_of(members, runtime.coordinates)
            # A lookup makes the groups, now: a backward pass does not know the mesh.
            runtime.groups[shard.split_axes]
        # Gathered in the dtype of the unit: a cast after the gather would send more
        # bytes, and autograd would save the cast copy until the backward.
        dtype = shard.flat.dtype
        dtypes = BufferDtypes(dtype, dtype)
        if f.casts is not None and wanted is not None:
            dtype = _gathered_dtype(dtype, [wanted[i] for i in positions])
            dtypes = BufferDtypes(dtype, dtype)
            if not dtype.is_complex:  # `precision` leaves complex numbers as they are
                reduced = f.casts.reduce or dtype
                dtypes = BufferDtypes(dtype, reduced, f.casts.gradients)
        views = []
        for i in positions:
            views.append(leaves[i].layout.view)
        # Only leaves that this gradient call differentiates have its `parts`: one that
        # the loss closes over is summed by autograd.
        summed = first.parts is runtime.parts and id(shard) in runtime.summed
        numbers = call.numbers, f.micro
        calls.append(GatheredCall(call.name, *numbers, shard, views, dtypes, summed))
        shards.append(shard)
        flats.append(flat)
        order += positions
    return BufferReads(calls, shards, flats, order)


def _gather_composably(
    arguments: UnitArguments, call: Call, runtime: ShardRuntime
) -> None:
    """Gathers, in place, by collectives with higher-order derivatives and ``vmap``."""
    casts, leaves = call.frame.casts, arguments.leaves
    for positions in group_by_buffer(leaves, arguments.gathered):
        members = [leaves[i] for i in positions]
        layout = members[0].layout
        flat = join_differentiably(members, runtime.coordinates)
        shard = members[0].packed
        # An offloaded range is copied to the device by an operation with a derivative.
        if shard is not None:
            flat = flat.to(shard.space.on_device(shard.flat).device)
        # `casts.reduce` and `casts.gradients` do not count here: autograd reduces in
        # the dtype of the gather, and returns a gradient in that of the parameter.
        if casts is not None:
            wanted = casts.each(call.name, arguments.treedef)
            flat = flat.to(_gathered_dtype(flat.dtype, [wanted[i] for i in positions]))
        name = f"{call.name}({layout.name})"
        flat = gather_buffer(runtime, flat, layout, name)
        # The backward of a view refuses the sparse gradient that an embedding may have:
        # `DenseGrad` makes it dense.
        for i, x in zip(positions, members, strict=True):
            offset, shape = x.layout.flat.offset, x.layout.unit_shape
            whole = DenseGrad.apply(
                flat[offset : offset + math.prod(shape)].view(shape)
            )
            split = x.layout.in_units
            leaves[i] = whole if split is None else Sharded(whole, split)


def _gathered_dtype(
    stored: torch.dtype, wanted: Sequence[torch.dtype | None]
) -> torch.dtype:
    """Returns the dtype in which to gather a buffer.

    Args:
        stored: the buffer's own; it is gathered in that if ``wanted`` differ, and the
            unit casts each leaf.
        wanted: the dtype in which the unit takes each leaf.
    """
    first = wanted[0]
    if first is None or not stored.is_floating_point:
        return stored
    return stored if wanted.count(first) < len(wanted) else first


_MADE_IN_LOSS = (
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
        """Returns the unit token and the parameters, through ``_Enter`` if grad is on.

        Args:
            flats: the buffers' ranges, with their history.
            token: orders the unit calls of a gradient call; None outside one.
            apart: whether each parameter gets a node of its own, as pipelines ask for
                their gradients one by one.
        """
        tracked = token is not None
        for flat in flats:
            tracked = tracked or flat.requires_grad
        # Nobody differentiates by the parameters: a node would only cost time.
        if not (tracked and torch.is_grad_enabled()):
            views: list[Tensor] = []
            for call in self.calls:
                views += call.parameter_views()
            return token, views
        # A pipeline differentiates by some parameters alone, and by no token.
        expects_token = token is not None and not apart
        entered: Any = _Enter.apply((self, expects_token), token, *flats)
        if apart:
            # Each output gets a node of its own. For the gradient by one output of a
            # node, autograd's engine runs everything that leads to any of its outputs.
            entered = [None if x is None else x.view_as(x) for x in entered]
        token, *views = entered
        return token, views

    def leave(
        self,
        outs: list[Leaf],
        token: Tensor | None,
        arguments: tuple[Sequence[Tensor], Sequence[Leaf]],
        savers: Sequence[Tensor],
        state: Running,
    ) -> Tensor | None:
        """Passes ``outs`` through ``_Exit``, frees saved views; returns the token.

        Args:
            outs: the leaves of what the unit returned, replaced in place.
            arguments: the parameters of the call, and the leaves of its others.
            savers: tensors beside the graph whose nodes save the unit's arguments.
            state: the pass that runs, such as a recompute.
        """
        runtime, calls, (views, others) = self.runtime, self.calls, arguments
        # Saved views are replaced where the buffer is dropped before the backward: not
        # if it is kept for that, or belongs to the state. Nor in a recompute: the
        # backward that runs it reads at once what it has saved.
        storage_keys, to_forget, first_view = [], [], 0
        for call, shard in zip(calls, self.shards, strict=True):
            storage_keys.append(_torch.storage_key(views[first_view]))
            if not state.recompute and call.lifetime is Lifetime.CALL:
                # Found by a view, as `call.full` is None by now if the call of an inner
                # unit has dropped the buffer.
                offset = int(views[first_view].storage_offset()) - call.views[0][2]
                to_forget.append((call, shard, storage_keys[-1], offset))
            first_view += len(call.views)
        # Outputs without grad do not pass through `_Exit`, where they would get one.
        tracked_positions, roots = [], []
        for i, y in enumerate(outs):
            if isinstance(y, Tensor):
                # The next unit's gather overwrites the buffer's memory: an output that
                # lies in it, such as a parameter that is returned, moves out.
                if _torch.storage_key(y) in storage_keys:
                    outs[i] = y = y.clone()
                if y.requires_grad:
                    tracked_positions.append(i)
                    roots.append(y.grad_fn)
        # Without grad the old token goes on: a new one would have no history, and the
        # backward would not reach the units before this one.
        if not tracked_positions and token is None or not torch.is_grad_enabled():
            return token
        if to_forget and state.saves_nothing:
            # No hooks: this run saves nothing, and a recompute, which reads the
            # parameters, makes the graph anew.
            calls[0].gathers_again = True
        elif to_forget:
            # The walk ends at the arguments, behind which other units' graphs begin.
            stop = set()
            for x in (*views, *others):
                # By the field: to read `local` would make a part that is in no graph.
                x = x._part if isinstance(x, Sharded) else x
                if isinstance(x, Tensor):
                    stop.add(x.grad_fn)
            graph_nodes: list[Any] = _torch.graph_nodes(roots, stop)
            hook_count = 0
            # `remat` saves the arguments, parameters too, in nodes that no output leads
            # to; unhooked these would hold the buffer until the backward.
            if savers:
                graph_nodes += [x.grad_fn for x in savers]
            for call, shard, storage_key, offset in to_forget:
                pack, unpack = _forgetting_hooks(runtime, call, shard, offset)
                hook_count += _torch.hook_saved(graph_nodes, storage_key, pack, unpack)
            # A backward that reads no parameter (of a sum, say) needs no gather.
            if hook_count:
                calls[0].gathers_again = True
        # Those of a recompute were noted by the first run.
        if not state.recompute:
            runtime.after_forward(calls)
        token, *exits = _Exit.apply(
            self, token, *map(outs.__getitem__, tracked_positions)
        )
        for i, y in zip(tracked_positions, exits, strict=True):
            outs[i] = y
        return token


class _Enter(torch.autograd.Function):
    """Ranges of buffers to views of the gathered ones; gradients to their sums.

    A unit call's forward begins with it, and its backward ends. What it outputs lies in
    buffers that were gathered before: nothing is sent in its forward.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        boundary_and_expects: tuple[UnitBoundary, bool],
        token: Tensor | None,
        *flats: Tensor,
    ) -> tuple[Tensor | None, ...]:
        ctx.boundary, ctx.expects_token = boundary_and_expects
        # A missing gradient stays None: zeros would be made, packed and added.
        ctx.set_materialize_grads(False)
        entered = [None if token is None else token.clone()]
        # Nobody differentiates by these. Unmarked they would require grad, as all
        # outputs of a Function do if one input does, and cost derivatives.
        frozen: list[Tensor] = []
        needed = ctx.needs_input_grad[2:]
        for call, tracked in zip(ctx.boundary.calls, needed, strict=True):
            entered += (views := call.parameter_views())
            frozen += () if tracked or call.summed_by_runtime else views
        ctx.mark_non_differentiable(*frozen)
        return tuple(entered)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, token: Tensor | None, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        boundary: UnitBoundary = ctx.boundary
        runtime, calls = boundary.runtime, boundary.calls
        with label(calls[0].name, "backward"):
            before, gradients, i = runtime.after_backward(calls), [], 0
            # A backward of the whole loss brings a gradient of the token, but for a
            # pipeline's, by single parameters. If one is missing, the loss itself
            # differentiates a value between units, and that is no part of the sums.
            of_gradient_call = token is not None or not ctx.expects_token
            pairs = zip(calls, boundary.shards, strict=True)
            for k, (call, shard) in enumerate(pairs):
                view_grads = grads[i : i + len(call.views)]
                i += len(call.views)
                tracked, g = ctx.needs_input_grad[2 + k], None
                if torch.is_grad_enabled():
                    # With create_graph: by operations that have derivatives.
                    dtype = shard.flat.dtype
                    parts = gradients_by_offset(call.views, view_grads, dtype)
                    g = pack_parts(parts, shard, dtype) if tracked else None
                elif of_gradient_call and call.summed_by_runtime or tracked:
                    # What is no part of the sums is not handed to the call before,
                    # whose backward may not come.
                    shared_by = before if of_gradient_call else []
                    g = runtime.add_gradient(call, shard, view_grads, shared_by)
                if g is not None:  # autograd sums it
                    g = _reduce_buffer(runtime, g, shard).to(shard.flat.dtype)
                gradients.append(g)
        return (None, token, *gradients)


class _Exit(torch.autograd.Function):
    """The outputs of a unit call; its backward is the first of the unit to run."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, boundary: UnitBoundary, token: Tensor | None, *outs: Tensor
    ) -> tuple[Tensor | None, ...]:
        ctx.boundary, ctx.is_freed = boundary, False
        ctx.set_materialize_grads(False)
        # Detached, not returned as they are: a later in-place change of an output is
        # allowed, and is seen by the version check where the unit saved it.
        exits = [None if token is None else token.clone()]
        for y in outs:
            exits.append(y.detach())
        return tuple(exits)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, token: Tensor | None, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        boundary: UnitBoundary = ctx.boundary
        name = boundary.calls[0].name
        # Autograd refuses a second pass only at nodes that saved tensors, and this one
        # saves none: gradients would be summed twice.
        if ctx.is_freed:
            raise RuntimeError(_FREED.format(name))
        ctx.is_freed = not _torch.keeps_graph()
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
# Shape, stride and offset of a saved tensor in the buffer; or, of a view as another
# dtype, the one value of `_torch.place_of`.
SavedPlace = tuple[Any, ...]


def _forgetting_hooks(
    runtime: ShardRuntime, call: GatheredCall, shard: FlatShard, buffer_offset: int
) -> tuple[Callable[[Tensor], SavedPlace], Callable[[SavedPlace], Tensor]]:
    """Returns hooks that replace a saved tensor by its place in the buffer.

    Args:
        buffer_offset: the element of its storage at which the buffer began.
    """
    dtype = call.dtype

    def pack(x: Tensor) -> SavedPlace:
        if x.dtype is dtype and not (x.is_conj() or x.is_neg()):
            return x.shape, x.stride(), x.storage_offset() - buffer_offset
        # A view as other numbers, such as `view_as_real`: its place is in bytes.
        return (_torch.place_of(x, buffer_offset * dtype.itemsize),)

    def unpack(packed: SavedPlace) -> Tensor:
        # Read only to see if autograd accepts the saved tensor: it causes no gather.
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


def gather_buffer(
    runtime: ShardRuntime, flat: Tensor, layout: Layout, name: str
) -> Tensor:
    """Returns the whole buffer, gathered differentiably from this rank's range.

    Args:
        flat: the range; ``layout``: that of one of its leaves.
        name: the buffer's, for the ledger.
    """
    _check_exact(runtime)
    # The derivative takes these maps in reverse: it reduces over `where` first, so that
    # replicas average ranges, not whole buffers.
    enter, gather = replace(ENTER, name=name), replace(GATHER, name=name)
    where, replicas, blocks = runtime.groups[layout.split_axes]
    if replicas is not None:
        flat = apply_map(flat, enter, replicas)
    # A buffer that is whole is not sent. It enters, so that its gradient is averaged.
    if where is not None:
        is_split = layout.flat is not None and layout.flat.size > 1
        flat = apply_map(flat, gather if is_split else enter, where)
    return apply_map(flat, PART_AS_LOCAL, blocks) if blocks is not None else flat


def _reduce_buffer(runtime: ShardRuntime, buffer: Tensor, shard: FlatShard) -> Tensor:
    """Applies the transpose of :func:`gather_buffer` to a gradient of the buffer."""
    _check_exact(runtime)
    # In the reverse order of the gather's maps.
    reduce, mean = replace(REDUCE, name=shard.name), replace(MEAN, name=shard.name)
    where, replicas, blocks = runtime.groups[shard.split_axes]
    if blocks is not None:
        buffer = apply_map(buffer, PART_AS_LOCAL.transpose(), blocks)
    if where is not None:
        buffer = apply_map(buffer, reduce if shard.place.size > 1 else mean, where)
    if replicas is not None:
        buffer = apply_map(buffer, mean, replicas)
    return buffer


def _check_exact(runtime: ShardRuntime) -> None:
    """Raises if a message of ``shard`` is inexact, as its derivative would be wrong.

    Raises:
        LawError: a gather or a reduction changes values on the way.
    """
    for message in (runtime.options.gather, runtime.options.reduction):
        if not message.exact:
            raise LawError(
                f"{type(message).__name__} changes what it sends, and a derivative "
                "taken by torch.func, by create_graph=True or by leaves that require "
                "grad would be that of the encoding: take it by ff.value_and_grad, of "
                "leaves that require none, or shard this step without it"
            )
