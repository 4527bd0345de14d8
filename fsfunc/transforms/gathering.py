"""A sharded unit: gather, run, forget; gather again for the backward, and reduce.

Two small ``autograd.Function`` frame the unit's own graph, which stays ordinary:

``_Enter``  brings the parameters in as views of the gathered buffer; its backward has
            all their gradients, writes them into one buffer and reduces it.
``_Exit``   lets the outputs out; its backward comes first, and gathers again.

After the forward pass the unit's part of the graph is walked once, and the saved
tensors that lie in the gathered buffer get hooks that keep (shape, stride, offset) in
place of the data. Nothing is hooked while the function runs, so autograd's version
checks and other people's hooks keep working; and since a hooked tensor is unpacked with
its own history, the backward can be differentiated again.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.arena import Arena
from fsfunc.comm.attribution import label
from fsfunc.comm.groups import strided
from fsfunc.layout import Layout
from fsfunc.sharded import Home

__all__ = ["Arena", "Box", "Gathered", "Passage", "Use", "enter", "leave"]


class Box:
    """A buffer that a unit call gathered, while it is held.

    Args:
        home: whose; held weakly, since what the home holds may have a history, which
            leads to the session that holds this box.
        full: the whole buffer, until it is dropped.
        kept: whether it is the home's own whole buffer: never dropped.
    """

    __slots__ = ("_home", "full", "dtype", "kept", "grad", "_version")

    def __init__(
        self,
        home: Home,
        full: Tensor | None,
        dtype: torch.dtype,
        kept: bool = False,
    ):
        self._home = weakref.ref(home)
        self.full, self.dtype, self.kept = full, dtype, kept
        self._version = _version(home)
        # Of the calls so far, where neighbours share the buffer.
        self.grad: Tensor | None = None

    @property
    def home(self) -> Home | None:
        """The home, for as long as somebody else holds it."""
        return self._home()

    def shows(self, home: Home) -> bool:
        """Whether it is of ``home``, as new as that is."""
        return self._home() is home and self._version == _version(home)

    def check(self, home: Home) -> None:
        """Raises where the weights were written over since they were gathered."""
        if self._version != _version(home):
            raise RuntimeError(
                f"{home.members[0].name!r} and what lies beside it was written over "
                "since a unit used it, by a donated step or a load, and the backward "
                "of that unit would gather the new values: take the gradients before "
                "the update"
            )


def _version(home: Home) -> int:
    return 0 if home.flat.is_inference() else home.flat._version


@dataclass
class Use:
    """One buffer in one unit call, and which leaves of the call lie in it."""

    home: Home
    positions: list[int]
    layouts: list[Layout]
    flat: Tensor  # differentiable where the home has no port


@dataclass
class Gathered:
    """What a session keeps of a unit call: nothing in it leads to the graph.

    The graph holds the session, which looks from one call to its neighbours: a way back
    would be a circle, in which gradients wait for the garbage collector.
    """

    key: tuple[int, ...]
    boxes: list[Box] = field(default_factory=list)
    hooked: bool = False  # whether the graph forgot what it saved of them


@dataclass
class Passage:
    """One unit call on its way through: what the graph holds for the backward."""

    session: Any
    name: str
    gathered: Gathered
    micro: tuple[tuple[int, int], ...]
    uses: list[Use]
    reduce: torch.dtype | None
    apart: bool = False  # whether parameters' gradients are asked for one by one

    @property
    def boxes(self) -> list[Box]:
        return self.gathered.boxes

    def views(self) -> list[Tensor]:
        """The parameters, as views of the gathered buffers, use by use."""
        return [
            _view(box.full, layout)
            for use, box in zip(self.uses, self.boxes, strict=True)
            for layout in use.layouts
        ]


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Those of a contiguous tensor."""
    steps, step = [], 1
    for n in reversed(shape):
        steps.append(step)
        step *= max(n, 1)
    return tuple(reversed(steps))


def _view(full: Tensor | None, layout: Layout) -> Tensor:
    if full is None or layout.flat is None:
        raise RuntimeError(f"{layout} is not gathered")
    offset = full.storage_offset() + layout.flat.offset
    shape = whole_shape(layout)
    return full.as_strided(shape, strides(shape), offset)


def whole_shape(layout: Layout) -> tuple[int, ...]:
    """The shape that a unit sees: what the parts before the flat one leave."""
    if len(layout.parts) == 1:
        return layout.shape
    outer = Layout(layout.shape, layout.dtype, layout.parts[:-1])
    at = {axis: 0 for axis in outer.axes}
    at.update({p.axis: p.coordinate for p in outer.owned})
    return outer.local_shape(at)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, passage: Passage, token, *flats):  # type: ignore[override]
        ctx.passage = passage
        ctx.set_materialize_grads(False)
        return (None if token is None else token.clone(), *passage.views())

    @staticmethod
    def backward(ctx, token, *grads):  # type: ignore[override]
        passage: Passage = ctx.passage
        with label(passage.name, "backward"):
            passage.session.left_backward(passage)
            found, i = [], 0
            for use, box in zip(passage.uses, passage.boxes, strict=True):
                mine = grads[i : i + len(use.layouts)]
                i += len(use.layouts)
                if torch.is_grad_enabled():
                    found.append(_reduce_again(passage, use, box, mine))
                else:
                    found.append(passage.session.gradient_of(passage, use, box, mine))
        return (None, token, *found)


def _reduce_again(passage: Passage, use: Use, box: Box, grads: Sequence[Any]) -> Any:
    """The reduction as differentiable collectives, for a backward of the backward."""
    if not use.flat.requires_grad:
        return None
    place, parts, at = use.home.place, [], 0
    for layout, g in zip(use.layouts, grads, strict=True):
        offset, shape = _flat(layout).offset, whole_shape(layout)
        parts.append(use.flat.new_zeros(offset - at))
        g = use.flat.new_zeros(shape) if g is None else g
        parts.append(strided(g).reshape(-1).to(use.flat.dtype))
        at = offset + g.numel()
    parts.append(use.flat.new_zeros(place.size * place.chunk - at))
    session = passage.session
    return session.handler.reduce(torch.cat(parts), session, use.home)


def _flat(layout: Layout) -> Any:
    if layout.flat is None:
        raise RuntimeError(f"{layout} lies in no buffer")
    return layout.flat


class _Exit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, passage: Passage, token, *outs):  # type: ignore[override]
        ctx.passage = passage
        ctx.set_materialize_grads(False)
        # Detached, not returned as they are: a later in-place change of an output is
        # allowed, and is seen by the version check where the unit saved it.
        return (None if token is None else token.clone(), *[y.detach() for y in outs])

    @staticmethod
    def backward(ctx, token, *grads):  # type: ignore[override]
        passage: Passage = ctx.passage
        with label(passage.name, "backward"):
            passage.session.enters_backward(passage)
        return (None, token, *grads)


def enter(passage: Passage, token: Tensor | None) -> tuple[Tensor | None, list[Tensor]]:
    """The token and the call's parameters, differentiable where they should be."""
    flats = [use.flat for use in passage.uses]
    tracked = torch.is_grad_enabled() and (
        token is not None or any(f.requires_grad for f in flats)
    )
    if not tracked:
        return token, passage.views()
    found: Any = _Enter.apply(passage, token, *flats)
    if passage.apart:
        # Each seen through a node of its own: to find what comes to one of a node's
        # outputs the engine runs all that leads to any.
        found = [None if x is None else x.view_as(x) for x in found]
    token, *views = found
    return token, views


def leave(
    passage: Passage,
    token: Tensor | None,
    views: Sequence[Tensor],
    inputs: Sequence[Any],
    outs: list[Any],
    forget: bool,
) -> tuple[Tensor | None, list[Any]]:
    """The token and the outputs; what they saved of the parameters is forgotten."""
    storages = {_torch.storage_key(v) for v in views}
    for i, y in enumerate(outs):
        if isinstance(y, Tensor) and _torch.storage_key(y) in storages:
            outs[i] = y.clone()
    tracked = [y for y in outs if isinstance(y, Tensor) and y.requires_grad]
    if not tracked and token is None or not torch.is_grad_enabled():
        return token, outs  # a token made without grad would cut the thread of units
    if forget:
        stop = {v.grad_fn for v in (*views, *inputs) if isinstance(v, Tensor)}
        nodes = _torch.graph_nodes([y.grad_fn for y in tracked], stop)
        at = 0
        for use, box in zip(passage.uses, passage.boxes, strict=True):
            # By the view: an inner unit's call may have dropped the box meanwhile.
            first, at = views[at], at + len(use.layouts)
            if not box.kept:
                start = first.storage_offset() - _flat(use.layouts[0]).offset
                pack, unpack = _forgetting(passage, use, box, start)
                key = _torch.storage_key(first)
                count = _torch.hook_saved(nodes, key, pack, unpack)
                passage.gathered.hooked |= count > 0
    passage.session.passed(passage)
    token, *exits = _Exit.apply(passage, token, *tracked)
    found = iter(exits)
    outs = [
        next(found) if isinstance(y, Tensor) and y.requires_grad else y for y in outs
    ]
    return token, outs


def _forgetting(passage: Passage, use: Use, box: Box, start: int) -> tuple[Any, Any]:
    """Hooks that keep the place of a saved tensor in place of its data."""

    def pack(x: Tensor) -> tuple[Any, ...]:
        return x.shape, x.stride(), x.storage_offset() - start

    def unpack(packed: tuple[Any, ...]) -> Tensor:
        shape, stride, offset = packed
        full = box.full
        if full is None:  # used beside its gradient's path: gathered for this use only
            with label(passage.name, "backward"):
                full = passage.session.gather_again(use.home, box)
        return full.as_strided(shape, stride, full.storage_offset() + offset)

    return pack, unpack
