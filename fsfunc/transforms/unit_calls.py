"""A unit call under ``shard``: the leaves that it gathers, and how."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.attribution import label
from fsfunc.comm.collective_ops import Dense, apply_map
from fsfunc.comm.groups import group
from fsfunc.comm.mesh import here
from fsfunc.comm.typed_maps import ENTER, LawError
from fsfunc.core.casts import differentiable
from fsfunc.core.execution_context import running
from fsfunc.core.units import Call
from fsfunc.runtime.memory_spaces import space_of
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.packing import by_buffer, joined, packed_of
from fsfunc.transforms.boundary import enter, leave, spread
from fsfunc.transforms.gathers import GatheredCall
from fsfunc.transforms.gradients import check_derivatives, check_mapped
from fsfunc.transforms.shard_options import ShardOptions
from fsfunc.transforms.shard_runtime import ShardRuntime


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
    """Runs a unit call: gathers its parameters, calls it, frees them.

    Two code paths. Under ``torch.func`` and with ``create_graph`` parameters are
    gathered by differentiable collectives (``_compose``). Otherwise two
    ``autograd.Function`` gather, free and re-gather them (``_gather_and_forget``).
    """
    given, spec = tree.flatten((params, inputs, named), is_leaf=is_sharded)
    treedef = spec.child(0)
    leaves = given[: treedef.num_leaves]
    f, functional = call.frame, call.frame.composable
    mine = _gathered_here(cut, leaves, call)
    whole = [] if f.path else _unaveraged(leaves, runtime, functional)
    if whole:
        _enter_whole(cut, leaves, whole, call, (inputs, named))
    if mine and f.tracer is not None:
        f.tracer.takes(f"unit {call.name!r}", [leaves[i] for i in mine])
    if mine and runtime is None:
        raise RuntimeError(f"{call.name} runs outside the sharded function")
    if mine and functional:
        check_mapped(call, [leaves[i] for i in mine])
        check_derivatives(call, [leaves[i] for i in mine], (inputs, named))
        _compose(leaves, treedef, mine, call, runtime)
    elif mine:
        rest = inputs, named, given[len(leaves) :]
        return _gather_and_forget(runtime, run, call, leaves, treedef, mine, rest)
    if whole or mine:
        params = tree.unflatten(treedef, leaves)
    return run(params, *inputs, **named)


def _gather_and_forget(
    runtime: Any,
    run: Callable[..., Any],
    call: Call,
    leaves: list[Any],
    treedef: tree.TreeDef,
    mine: list[int],
    rest: tuple[Any, Any, list[Any]],
) -> Any:
    """Runs the unit between the two Functions of `boundary`.

    Args:
        leaves: those of the parameters; ``mine``: the positions of those to gather.
        rest: the inputs, the keywords, and the leaves of both.
    """
    now, (inputs, named, given) = running(), rest
    thread = now.thread
    with label(call.name, "forward"):
        calls, shards, flats, order = _gathered_calls(
            leaves, treedef, mine, call, runtime
        )
        found = now.recompute and not now.forgotten  # else it is gathered once more
        calls = runtime.take(calls, shards, call.frame.casts, found)
        token = None if thread is None else thread.token
        apart = call.frame.staged
        token, views = enter(runtime, calls, shards, flats, token, apart)
    if thread is not None and token is not None:
        thread.token = token
    for i, view in zip(order, views, strict=True):
        split = leaves[i].layout.in_units
        leaves[i] = view if split is None else Sharded(view, split)
    out = run(tree.unflatten(treedef, leaves), *inputs, **named)
    outs, spec = tree.flatten(out)
    if call.frame.compiler is not None:
        if any(h.reads_again(call) for h in call.frame.handlers):
            calls[0].forgets = True
    token, again = token if thread is None else thread.token, now.recompute
    token = leave(runtime, calls, shards, token, views, given, outs, again, call.savers)
    if thread is not None and token is not None:
        thread.token = token
    return tree.unflatten(spec, outs)


def _gathered_here(cut: ShardOptions, leaves: Sequence[Any], call: Call) -> list[int]:
    """The positions of this shard's leaves that no nested unit gathers."""
    inner = "" if call.unit.whole else call.name + "/"
    mine, last, ours = [], None, False
    for i, x in compress(enumerate(leaves), map(is_sharded, leaves)):
        if x.packed is None or x.packed is not last:  # else as the leaf beside it
            last, layout = x.packed, x.layout
            ours = cut.gathers(layout) and not (
                inner and layout.flat.buffer.startswith(inner)
            )
        if ours:
            mine.append(i)
    return mine


def _unaveraged(
    leaves: Sequence[Any], runtime: ShardRuntime | None, functional: bool
) -> list[int]:
    """The positions of replicated parameters whose gradient must be averaged here.

    Others are averaged when the enclosing ``value_and_grad`` ends.
    """
    found = []
    for i, x in enumerate(leaves):
        if isinstance(x, Tensor) and (functional or x.requires_grad):
            averaged = runtime is not None and runtime.averages(x)
            if differentiable(x) and (functional or not averaged):
                found.append(i)
    return found


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


def _gathered_calls(
    leaves: list[Any],
    treedef: tree.TreeDef,
    mine: list[int],
    call: Call,
    runtime: ShardRuntime,
) -> tuple[Any, ...]:
    """(GatheredCall, FlatShard, flat tensor) for each buffer that the call reads.

    As three lists; the fourth has the positions of the leaves, in order of the views.
    """
    f, calls, shards, flats, order = call.frame, [], [], [], []
    reduce, each, given = None, None, None
    if f.casts is not None:
        reduce, given = f.casts.reduce, f.casts.gradients
        each = f.casts.each(call.name, treedef)
    for positions in by_buffer(leaves, mine):
        first = leaves[positions[0]]
        if (shard := first.packed) is not None:
            flat = shard.flat
        else:
            chosen = [leaves[i] for i in positions]
            shard, flat = packed_of(chosen, runtime.coordinates)
            runtime.groups[shard.split_axes]  # here: a backward has no context
        keeps = first.parts is runtime.parts and id(shard) in runtime.keeps
        views = []
        for i in positions:
            views.append(leaves[i].layout.view)
        kind = shard.flat.dtype
        if each is not None:
            kind = _one_dtype(kind, [each[i] for i in positions])
        # Of complex numbers `precision` changes nothing.
        how = (None, keeps, None) if kind.is_complex else (reduce, keeps, given)
        one = GatheredCall(call.name, call.numbers, f.micro, shard, views, kind, *how)
        calls.append(one)
        shards.append(shard)
        flats.append(flat)
        order += positions
    return calls, shards, flats, order


def _compose(
    leaves: list[Any],
    treedef: tree.TreeDef,
    mine: list[int],
    call: Call,
    runtime: Any,
) -> None:
    """Gathers, in place, by collectives with higher-order derivatives and ``vmap``."""
    casts = call.frame.casts
    for positions in by_buffer(leaves, mine):
        chosen = [leaves[i] for i in positions]
        layout = chosen[0].layout
        flat = joined(chosen, runtime.coordinates)
        shard = chosen[0].packed
        if shard is not None:
            flat = flat.to(space_of(shard.flat).on_device(shard.flat).device)
        if casts is not None:
            each = casts.each(call.name, treedef)
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
