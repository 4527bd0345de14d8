"""A unit call under ``shard``: which leaves it gathers, and how."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import label
from fsfunc.comm.collective_ops import Dense, apply_map
from fsfunc.comm.groups import group
from fsfunc.comm.mesh import Mesh, here
from fsfunc.comm.shard_linear_maps import ENTER, LawError
from fsfunc.core.passes import running
from fsfunc.core.units import Call
from fsfunc.runtime.stores import lies
from fsfunc.sharded.layout import Layout
from fsfunc.sharded.leaf import Sharded, is_sharded, whole_shape
from fsfunc.sharded.packing import by_buffer, joined, packed_of
from fsfunc.transforms.boundary import enter, leave, spread
from fsfunc.transforms.gathered_calls import GatheredCall
from fsfunc.transforms.gradients import check_derivatives, check_mapped
from fsfunc.transforms.shard_runtime import ShardRuntime

__all__ = ["CutAxes", "call_unit"]


@dataclass(frozen=True)
class CutAxes:
    """The axes over which a shard cuts buffers, and so which leaves are its own.

    Args:
        axis: over which parameters are cut; ``copies``: over which the parts repeat.
    """

    mesh: Mesh
    axis: tuple[str, ...]
    copies: tuple[str, ...] = ()

    @property
    def every(self) -> tuple[str, ...]:
        return (*self.copies, *self.axis)

    def own(self, layout: Layout) -> bool:
        """Whether a leaf lies in a buffer over these axes less those that split it.

        Most buffers are over all of them, or none: that is asked first, of the buffer.
        """
        flat = layout.flat
        return flat is not None and flat.axes == self.beside(layout.split_axes)

    def beside(self, split_axes: Sequence[str]) -> tuple[str, ...]:
        """The axes but for those, over which leaves are split already."""
        return tuple(axis for axis in self.axis if axis not in split_axes)


def call_unit(
    cut: CutAxes,
    holds: bool,
    runtime: ShardRuntime | None,
    run: Callable[..., Any],
    call: Call,
    params: Any,
    *inputs: Any,
    **named: Any,
) -> Any:
    """A unit call: takes in its parameters, runs, lets its outputs out.

    Four ways: no leaf of ours, and it just runs; whole parameters that somebody
    else differentiates enter as this rank's own; under ``torch.func`` gathers are
    differentiable collectives; else the boundary, which gathers and forgets.
    """
    given, spec = tree.flatten((params, inputs, named), is_leaf=is_sharded)
    treedef = spec.child(0)
    leaves = given[: treedef.num_leaves]
    f, mine, plain = (
        call.frame,
        _gathered_here(cut, leaves, call),
        not call.frame.path,
    )
    functional = f.create_graph or _torch.transforms_active()
    if plain and (plain := _unaveraged(leaves, runtime, functional)):
        _enter_plain(cut, leaves, plain, call, (inputs, named))
    if not mine:
        params = tree.unflatten(treedef, leaves) if plain else params
        return run(params, *inputs, **named)
    if f.tracer is not None:
        f.tracer.takes(f"unit {call.name!r}", [leaves[i] for i in mine])
    if runtime is None:
        raise RuntimeError(f"{call.name} runs outside the sharded function")
    if functional:
        check_mapped(call, [leaves[i] for i in mine])
        check_derivatives(call, [leaves[i] for i in mine], (inputs, named))
        _compose(leaves, treedef, mine, call, runtime)
        return run(tree.unflatten(treedef, leaves), *inputs, **named)
    now = running()
    thread = now.thread
    with label(call.name, "forward"):
        calls, shards, flats, order = _gathered_calls(
            leaves, treedef, mine, call, runtime
        )
        calls = runtime.take(calls, shards, f.casts)
        token = None if thread is None else thread.token
        apart = f.staged
        token, views = enter(runtime, calls, shards, flats, token, apart)
    if thread is not None and token is not None:
        thread.token = token
    for i, view in zip(order, views, strict=True):
        split = leaves[i].layout.in_units
        leaves[i] = view if split is None else Sharded(view, split)
    out = run(tree.unflatten(treedef, leaves), *inputs, **named)
    outs, spec = tree.flatten(out)
    given = given[len(leaves) :]
    token = token if thread is None else thread.token
    forget = not (now.recompute or holds)
    token = leave(runtime, calls, shards, token, views, given, outs, forget)
    if thread is not None and token is not None:
        thread.token = token
    return tree.unflatten(spec, outs)


def _gathered_here(cut: CutAxes, leaves: Sequence[Any], call: Call) -> list[int]:
    """Which leaves this call gathers: those that are ours, and no inner unit's."""
    mine, inner = [], "" if call.unit.whole else call.name + "/"
    for i, x in enumerate(leaves):
        if is_sharded(x) and (flat := x.layout.flat) is not None:
            if flat.axes == cut.axis or not flat.axes or cut.own(x.layout):
                if not (inner and flat.buffer.startswith(inner)):
                    mine.append(i)
    return mine


def _unaveraged(
    leaves: Sequence[Any], runtime: ShardRuntime | None, functional: bool
) -> list[int]:
    """Which whole parameters somebody differentiates who takes no mean of it.

    Not those whose gradient the gradient call around will average itself.
    """
    found = []
    for i, x in enumerate(leaves):
        if isinstance(x, Tensor) and (functional or x.requires_grad):
            averaged = runtime is not None and runtime.averages(x)
            if x.is_floating_point() and (functional or not averaged):
                found.append(i)
    return found


def _enter_plain(
    cut: CutAxes, leaves: list[Any], positions: list[int], call: Call, inputs: Any
) -> None:
    """Whole parameters as each rank's own: their gradients are means then."""
    if call.frame.staged:
        raise LawError(_MADE.format(call.name))
    where = group(cut.every, here(cut.mesh))
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
    """The call's hold on each buffer it reads; the buffers; their ranges.

    And the leaves' positions, in the order of the views.
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
            runtime.routes[shard.split_axes]  # here: a backward has no context
        keeps = first.parts is runtime.parts and id(shard) in runtime.keeps
        views, at = [], shard.views
        for i in positions:
            views.append(at[id(leaves[i].layout)])
        kind = shard.flat.dtype
        if each is not None:
            kind = _one_dtype(kind, [each[i] for i in positions])
        one = GatheredCall(
            call.name, call.numbers, f.micro, shard, views, kind, reduce, keeps, given
        )
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
    runtime: ShardRuntime,
) -> None:
    """The same by differentiable collectives, of any order and under any map."""
    casts = call.frame.casts
    for positions in by_buffer(leaves, mine):
        chosen = [leaves[i] for i in positions]
        layout = chosen[0].layout
        flat = joined(chosen, runtime.coordinates)
        shard = chosen[0].packed
        if runtime.offloads and shard is not None and (where := lies(shard.flat)):
            flat = flat.to(where.device)
        if casts is not None:
            each = casts.each(call.name, treedef)
            flat = flat.to(_one_dtype(flat.dtype, [each[i] for i in positions]))
        name = f"{call.name}({layout.name})"
        flat = spread(runtime, flat, layout, name)
        for i, x in zip(positions, chosen, strict=True):
            start, shape = x.layout.flat.offset, whole_shape(x.layout)
            whole = Dense.apply(flat[start : start + math.prod(shape)].view(shape))
            split = x.layout.in_units
            leaves[i] = whole if split is None else Sharded(whole, split)


def _one_dtype(own: torch.dtype, wanted: Sequence[torch.dtype | None]) -> torch.dtype:
    """In what a buffer is gathered of which leaves are wanted in these dtypes.

    Where they differ, in its own: the unit casts each.
    """
    first = wanted[0]
    if first is None or not own.is_floating_point or wanted.count(first) < len(wanted):
        return own
    return first


_MADE = (
    "unit {!r} of a pipelined loss has a parameter that was made in the loss: whether "
    "it is one value on all ranks, whose gradient is a mean, or this rank's own, "
    "nobody can tell there. Make it inside the unit, of the parameter itself"
)
