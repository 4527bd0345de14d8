"""How units' bodies run while a step is planned: each distinct one is run apart, once.

A unit called again on the same shapes does the same again. So its body is tried on
tensors of its own, forward and then backward, and what it did is a :class:`Segment`;
each call then replays the segment, and leaves in the graph one node that keeps as much
memory as the body's own would, saves the same parameters and inputs, and returns
gradients of the same shapes. Transforms around it see no difference.

What a trial cannot stand for runs plainly: units that call units or collectives, that
return a view of what they were given, bodies in a pipeline's stages (whose backward is
taken apart node by node), those under a policy that names values, or ``torch.func``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.accounting import aside, is_silent
from fsfunc.foresight.events import Gave, Ran, Replayed, Segment, Took
from fsfunc.foresight.observing import Book, Observer
from fsfunc.frames import Interpretation, frame, inside, running
from fsfunc.sharded import is_sharded
from fsfunc.transforms.policies import is_taped

__all__ = ["DifferentiatedTwice", "Rehearsal"]


class DifferentiatedTwice(BaseException):
    """A replayed body's backward is to be differentiated: it has none of its own."""


class _Odd(BaseException):
    """A body that a trial cannot stand for."""


class _Stop(Interpretation):
    """Ends a trial that calls a unit."""

    def unit(self, run: Any, call: Any) -> Any:
        raise _Odd


class _NoLink:
    """Ends a trial that calls a collective."""

    moves, level, notes, rank = False, None, None, 0

    def __getattr__(self, name: str) -> Any:
        raise _Odd


class _Shape(NamedTuple):
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    tracked: bool

    @classmethod
    def of(cls, x: Tensor) -> _Shape:
        size, stride = tuple(x.shape), tuple(x.stride())
        return cls(size, stride, x.dtype, _torch.device_of(x), x.requires_grad)

    def make(self) -> Tensor:
        """A tensor of this shape whose values mean nothing."""
        return torch.empty_strided(
            self.size, self.stride, dtype=self.dtype, device=self.device
        )


@dataclass
class _Grad:
    """A gradient that a body's backward returns: new memory, or a cotangent passed on.

    Args:
        storage: which of the storages made it lies in, and ``offset`` where; or
        cotangent: whose memory it shares.
    """

    shape: _Shape
    storage: int | None
    cotangent: int | None
    offset: int


@dataclass
class _Backward:
    segment: Segment
    storages: list[_Shape]
    grads: list[_Grad | None]


@dataclass
class _Script:
    """What the body of a unit does for one set of shapes.

    Args:
        outs: shapes of the outputs that are tensors, other outputs as they are.
        kept: bytes that it keeps for its backward, beside what it was given.
        saved: which of the given tensors its backward reads; ``echoed``: outputs.
        derived: bytes of ``kept`` that were computed from the parameters alone.
        read: which of the given tensors any operator read.
    """

    forward: Segment
    outs: list[Any]
    treedef: Any
    kept: int
    saved: list[int]
    echoed: list[int]
    derived: int
    read: list[int]
    backward: dict[Any, _Backward] = field(default_factory=dict)


@dataclass
class _Played:
    """One call, on its way through autograd."""

    rehearsal: Rehearsal
    call: Any
    script: _Script
    leaves: list[Any]  # of the arguments: shapes in place of tensors
    treedef: Any


class Rehearsal:
    """Runs the bodies of units for ``observer``.

    Args:
        repeat: whether to replay; else each body runs plainly.
    """

    def __init__(self, observer: Observer, repeat: bool = True):
        self.observer, self.repeat = observer, repeat
        self.scripts: dict[Any, _Script | None] = {}
        self.derived: dict[str, int] = {}
        self._kept: list[tuple[str, list[int], int]] = []

    def begin(self) -> Observer:
        """An observer for the next run, with an empty book."""
        self.observer = Observer()
        self.derived, self._kept = {}, []
        return self.observer

    def body(self, call: Any, params: Any, inputs: Any, keywords: Any) -> Any:
        """What the unit's function returns for these arguments."""
        self.look_back()
        leaves, treedef = tree.flatten((params, inputs, keywords), is_leaf=is_sharded)
        key = self._key(call, leaves, treedef) if self.repeat else None
        if key is not None and key not in self.scripts:
            count = len(tree.leaves(params, is_leaf=is_sharded))
            try:
                self.scripts[key] = self._tried(call, leaves, treedef, count)
            except _Odd:
                self.scripts[key] = None
        script = None if key is None else self.scripts[key]
        if script is not None:
            return self._replayed(call, script, leaves, treedef)
        observer = self.observer
        mine = _tensors(tree.leaves(params, is_leaf=is_sharded))
        observer.begin_body([x for x in mine if not _torch.is_wrapped(x)])
        with observer.unit(call.name), aside(False):
            out = call.unit.checked(params, inputs, keywords)
        self._keeps(call.name, observer.derived(tree.leaves(out)))
        return out

    def _key(self, call: Any, leaves: list[Any], treedef: Any) -> Any:
        f = frame()
        if f.stage is not None or is_taped() or _torch.functorch_active():
            return None
        if _torch.forward_ad_active() or torch.is_inference_mode_enabled():
            return None
        found: list[Any] = []
        for x in leaves:
            if isinstance(x, Tensor):
                found.append(_Shape.of(x))
            elif x is None or isinstance(x, (int, float, str, torch.dtype)):
                found.append((type(x), x))
            else:
                return None
        casts = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
        modes = torch.is_grad_enabled(), casts
        return call.unit, call.name, treedef, tuple(found), modes

    # Trials

    def _tried(
        self, call: Any, leaves: list[Any], treedef: Any, params: int
    ) -> _Script:
        """Runs the body on tensors of its own, and sees what it does."""
        with self.observer.apart() as book:
            twins = [_twin(x) for x in leaves]
            start = self._begin(book, twins)
            self.observer.begin_body(_tensors(twins[:params]))
            out = self._run(call, treedef, twins)
            flat, spec = tree.flatten(out)
            del out
            keys = [_torch.storage_key(x) for x in flat if isinstance(x, Tensor)]
            given = {_torch.storage_key(x): i for i, x in _numbered(twins)}
            if len(set(keys)) < len(keys) or set(keys) & set(given):
                raise _Odd
            roots = [x.grad_fn for x in flat if isinstance(x, Tensor)]
            nodes = _torch.graph_nodes([r for r in roots if r is not None], set())
            if _torch.saved_under_hooks(nodes):
                raise _Odd
            saved = {_torch.storage_key(x) for x in _torch.saved_tensors(nodes)}
            echoed = [
                i
                for i, x in enumerate(flat)
                if isinstance(x, Tensor) and _torch.storage_key(x) in saved
            ]
            held = [n for k, n in book.held.items() if k not in given]
            held = [n for n in held if n.key not in keys]
            kept = sum(book.sizes[n.number] for n in held)
            derived = self.observer.derived(flat)
            return _Script(
                _segment(book, start),
                [_Shape.of(x) if isinstance(x, Tensor) else x for x in flat],
                spec,
                kept,
                [i for key, i in given.items() if key in saved],
                echoed,
                sum(book.sizes[n] for n in derived),
                [i for key, i in given.items() if key in self.observer.reads],
            )

    def _begin(self, book: Book, given: list[Any]) -> int:
        """Where the trial begins in the book: what it is given is not its own."""
        self.observer.given("buffers", _tensors(given))
        self.observer.reads = set()
        return len(book.events)

    def _run(self, call: Any, treedef: Any, twins: list[Any]) -> Any:
        f = frame()
        at = None if f.at is None else _elsewhere(f.at)
        alone = f.but(handlers=(_Stop(),), sessions=(), recorder=None, at=at)
        params, inputs, keywords = tree.unflatten(treedef, twins)
        with inside(alone), self.observer.unit(call.name), aside(False):
            return call.unit.checked(params, inputs, keywords)

    def _pulled(self, played: _Played, cotangents: Sequence[Any]) -> _Backward:
        """Runs the body and its backward, and sees what the backward does."""
        with self.observer.apart() as book, torch.enable_grad():
            twins = [x.make() if isinstance(x, _Shape) else x for x in played.leaves]
            for x, shape in zip(twins, played.leaves, strict=True):
                if isinstance(shape, _Shape) and shape.tracked:
                    x.requires_grad_()
            self._begin(book, twins)
            given = [None if g is None else g.make() for g in cotangents]
            flat = tree.leaves(self._run(played.call, played.treedef, twins))
            edges = [
                torch.autograd.graph.get_gradient_edge(x)
                for x, g in zip(_tensors(flat), given, strict=True)
                if g is not None
            ]
            del flat
            start = self._begin(book, [g for g in given if g is not None])
            wanted = [x for x in _tensors(twins) if x.requires_grad]
            seeds = [g for g in given if g is not None]
            found = torch.autograd.grad(edges, wanted, seeds, allow_unused=True)
            segment = _segment(book, start)
            seen: dict[int, int] = {}
            storages: list[_Shape] = []
            grads: list[_Grad | None] = []
            keys = [None if g is None else _torch.storage_key(g) for g in given]
            for x in found:
                if x is None:
                    grads.append(None)
                    continue
                key, shape = _torch.storage_key(x), _Shape.of(x)
                offset = int(x.storage_offset())
                if key in keys:
                    grads.append(_Grad(shape, None, keys.index(key), offset))
                    continue
                if key not in seen:
                    seen[key] = len(storages)
                    size = x.untyped_storage().nbytes()
                    whole = size == x.numel() * x.element_size() and not offset
                    count = (size // x.element_size(),)
                    storages.append(shape if whole else _Shape(count, (1,), *shape[2:]))
                grads.append(_Grad(shape, seen[key], None, offset))
            return _Backward(segment, storages, grads)

    # Replays

    def _replayed(
        self, call: Any, script: _Script, leaves: list[Any], treedef: Any
    ) -> Any:
        f = frame()
        if f.recorder is not None:
            f.recorder.read([leaves[i] for i in script.read])
        played = _Played(self, call, script, leaves, treedef)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        tracked = [x.tracked for x in script.outs if isinstance(x, _Shape)]
        if any(tracked):
            found = iter(_Body.apply(played, *tensors))
        else:
            self.note(script.forward, call.name, backward=False)
            found = (x.make() for x in script.outs if isinstance(x, _Shape))
        outs = [next(found) if isinstance(x, _Shape) else x for x in script.outs]
        return tree.unflatten(script.treedef, outs)

    def note(self, segment: Segment, name: str, backward: bool) -> None:
        """Writes a replay into the observer's book."""
        if not is_silent():
            again = running().recompute
            phase = "backward" if backward else "recompute" if again else "forward"
            self.observer.book.events.append(Replayed(segment, name, phase))

    def keep(self, played: _Played) -> Tensor | None:
        """Memory in place of all that the body keeps for its backward."""
        script = played.script
        if not script.kept:
            return None
        memory = torch.empty(script.kept, dtype=torch.uint8)
        number = self.observer.book.number(memory)
        if script.derived and number is not None:
            self._keeps(played.call.name, [number], script.derived)
        return memory

    # Copies computed from parameters

    def _keeps(self, name: str, numbers: list[int], size: int = 0) -> None:
        if numbers and not running().recompute and not is_silent():
            self._kept.append((name, numbers, size))

    def look_back(self) -> None:
        """Of the bodies that ran, which still keep what they derived?"""
        if not self._kept or is_silent():
            return
        book = self.observer.book
        held = {watched.number for watched in book.held.values()}
        for name, numbers, size in self._kept:
            alive = [n for n in numbers if n in held]
            size = size if size and alive else sum(book.sizes[n] for n in alive)
            if size:
                self.derived[name] = max(size, self.derived.get(name, 0))
        self._kept.clear()


class _Body(torch.autograd.Function):
    """One node in place of all that a body's operators would make."""

    @staticmethod
    def forward(ctx, played: _Played, *tensors):  # type: ignore[override]
        script, rehearsal = played.script, played.rehearsal
        rehearsal.note(script.forward, played.call.name, backward=False)
        shapes = [x for x in script.outs if isinstance(x, _Shape)]
        outs = [x.make() for x in shapes]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *[y for y, x in zip(outs, shapes, strict=True) if not x.tracked]
        )
        at = {i: k for k, (i, _) in enumerate(_numbered(played.leaves))}
        where = {i: k for k, (i, _) in enumerate(_numbered_shapes(script.outs))}
        ctx.save_for_backward(
            *[tensors[at[i]] for i in script.saved],
            *[outs[where[i]] for i in script.echoed],
        )
        ctx.kept = rehearsal.keep(played)
        given = [_Shape.of(x) for x in tensors]  # here they are seen without history
        each = iter(given)
        needs = iter(ctx.needs_input_grad[1:])
        leaves = [
            next(each)._replace(tracked=next(needs)) if isinstance(x, Tensor) else x
            for x in played.leaves
        ]
        ctx.played = _Played(rehearsal, played.call, script, leaves, played.treedef)
        return tuple(outs)

    @staticmethod
    def backward(ctx, *cotangents):  # type: ignore[override]
        if torch.is_grad_enabled():
            raise DifferentiatedTwice
        played: _Played = ctx.played
        rehearsal, script = played.rehearsal, played.script
        rehearsal.look_back()
        _ = ctx.saved_tensors  # as the body's own nodes would: it may gather again
        shapes = tuple(None if g is None else _Shape.of(g) for g in cotangents)
        pattern = (
            shapes,
            tuple(x.tracked if isinstance(x, _Shape) else None for x in played.leaves),
        )
        if pattern not in script.backward:
            script.backward[pattern] = rehearsal._pulled(played, shapes)
        back = script.backward[pattern]
        rehearsal.note(back.segment, played.call.name, backward=True)
        ctx.kept = None
        new = [shape.make() for shape in back.storages]
        found = iter(_made(g, new, cotangents) for g in back.grads)
        grads = [
            next(found) if x.tracked else None
            for x in played.leaves
            if isinstance(x, _Shape)
        ]
        return (None, *grads)


def _made(g: _Grad | None, new: list[Tensor], cotangents: Sequence[Any]) -> Any:
    if g is None:
        return None
    source = cotangents[g.cotangent] if g.storage is None else new[g.storage]
    if tuple(source.shape) == g.shape.size and g.offset == 0:
        return source
    return source.as_strided(g.shape.size, g.shape.stride, g.offset)


def _elsewhere(at: Any) -> Any:
    return type(at)(at.mesh, at.rank, _NoLink())


def _twin(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    twin = _Shape.of(x).make()
    return twin.requires_grad_() if x.requires_grad else twin


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    return [x for x in values if isinstance(x, Tensor)]


def _numbered(values: Sequence[Any]) -> list[tuple[int, Tensor]]:
    return [(i, x) for i, x in enumerate(values) if isinstance(x, Tensor)]


def _numbered_shapes(values: Sequence[Any]) -> list[tuple[int, _Shape]]:
    return [(i, x) for i, x in enumerate(values) if isinstance(x, _Shape)]


def _segment(book: Book, start: int) -> Segment:
    """What the book tells of a trial that began at event ``start``."""
    ops, memory, held, peak = [], [], 0, 0
    for event in book.events[start:]:
        if isinstance(event, Ran):
            ops.append(event.op)
            continue
        if isinstance(event, Took):
            change = event.bytes
        elif isinstance(event, Gave):
            change = -book.sizes[event.key]
        else:
            continue
        memory.append((len(ops), change))
        held += change
        peak = max(peak, held)
    return Segment(tuple(ops), tuple(memory), peak, sum(op.flops for op in ops))
