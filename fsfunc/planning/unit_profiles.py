"""Profiles: what the body of a unit does for one set of shapes, seen apart.

The body runs on tensors of its own, forward and then, for each pattern of cotangents,
backward. What it did is a :class:`UnitProfile`: the operators and the memory, as
segments, and what it keeps, saves and returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import internal
from fsfunc.comm.mesh import maybe_here
from fsfunc.core.frames import Counter, Interpretation, inside
from fsfunc.core.tracers import Tracer
from fsfunc.core.units import Call
from fsfunc.planning.events import Gave, Op, Ran, Segment, Took
from fsfunc.planning.observer import Book, Observer

__all__ = [
    "Backward",
    "Grad",
    "Unprofilable",
    "UnitProfile",
    "Shape",
    "numbered",
    "profiled_backward",
    "tensors",
    "profiled",
]


class Unprofilable(BaseException):
    """A body that a profile cannot stand for."""


class _Stop(Interpretation):
    """Ends the profiling of a body that calls a unit."""

    def unit(self, run: Any, call: Call) -> Any:
        raise Unprofilable


class _NoLink:
    """Ends the profiling of a body that calls a collective."""

    moves, level, notes, rank = False, None, None, 0

    def __getattr__(self, name: str) -> Any:
        raise Unprofilable


class Shape(NamedTuple):
    """A tensor but for its values; ``tracked`` if it requires grad."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    tracked: bool
    leaf: bool

    @classmethod
    def of(cls, x: Tensor) -> Shape:
        size, stride, tracked = tuple(x.shape), tuple(x.stride()), x.requires_grad
        return cls(size, stride, x.dtype, _torch.device_of(x), tracked, x.is_leaf)

    def make(self) -> Tensor:
        """A tensor of this shape whose values mean nothing."""
        return torch.empty_strided(
            self.size, self.stride, dtype=self.dtype, device=self.device
        )

    def twin(self) -> Tensor:
        """The same, and differentiable if this was."""
        if not self.tracked:
            return self.make()
        if self.leaf:  # they are special to autocast and to in-place ops
            return self.make().requires_grad_()
        with torch.enable_grad():
            return _Came.apply(self, torch.empty(0, requires_grad=True))


class _Came(torch.autograd.Function):
    """A tensor out of operators that are not there: no graph holds it for itself."""

    @staticmethod
    def forward(ctx, shape: Shape, _):  # type: ignore[override]
        return shape.make()

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[override]
        raise RuntimeError("no gradient goes further than this")


class _Comes(torch.autograd.Function):
    """What brings cotangents to a body's outputs, and holds none of them."""

    @staticmethod
    def forward(ctx, make: Callable[[], tuple[Tensor, ...]], *outs):  # type: ignore[override]
        ctx.make = make
        return torch.empty(0)

    @staticmethod
    def backward(ctx, _):  # type: ignore[override]
        return (None, *ctx.make())


@dataclass
class Grad:
    """A gradient that a body's backward returns: new memory, or a cotangent passed on.

    Args:
        storage: which of the storages made it lies in, and ``offset`` where; or
        cotangent: whose memory it shares.
    """

    shape: Shape
    storage: int | None
    cotangent: int | None
    offset: int


@dataclass
class Backward:
    """What a body's backward does for one pattern of cotangents.

    Args:
        segment: where what it was given outlives it.
        ends: where in the segment's memory a storage goes that nobody else holds: of a
            cotangent, of a given leaf, of an output, by kind and number.
        storages: the memory that its gradients lie in.
        grads: one for each given tensor that asks for it; None where nothing comes.
    """

    segment: Segment
    ends: dict[tuple[str, int], int]
    storages: list[Shape]
    grads: list[Grad | None]
    variants: dict[tuple[tuple[int, int], ...], Segment] = field(default_factory=dict)

    def letting_go(self, gone: Sequence[tuple[int, int]]) -> Segment:
        """The segment where some of what it was given is gone before its end.

        Args:
            gone: (where in its memory, bytes) of each storage.
        """
        key = tuple(sorted(gone))
        if key and key not in self.variants:
            memory = list(self.segment.memory)
            for at, size in reversed(key):
                ran = memory[at - 1][0] if at else 0
                memory.insert(at, (ran, -size))
            self.variants[key] = Segment(self.segment.ops, tuple(memory))
        return self.variants[key] if key else self.segment


@dataclass
class UnitProfile:
    """What the body of a unit does for one set of shapes.

    Args:
        outs: shapes of the outputs that are tensors, other outputs as they are.
        kept: bytes that it keeps for its backward, beside what it was given.
        saved: which of the given leaves its backward reads; ``echoed``: outputs.
        derived: bytes of ``kept`` that were computed from the parameters alone.
        read: which of the given leaves any operator read.
    """

    forward: Segment
    outs: list[Any]
    treedef: Any
    kept: int
    saved: list[int]
    echoed: list[int]
    derived: int
    read: list[int]
    backward: dict[Any, Backward] = field(default_factory=dict)


def profiled(
    observer: Observer, call: Call, leaves: Sequence[Any], treedef: Any, params: int
) -> UnitProfile:
    """What the body of ``call`` does with tensors like ``leaves``.

    Args:
        leaves, treedef: (params, inputs, keywords), of whose leaves the first
            ``params`` are parameters.

    Raises:
        Unprofilable: it does what a replay could not stand for.
    """
    with observer.apart() as book:
        twins = [Shape.of(x).twin() if isinstance(x, Tensor) else x for x in leaves]
        given = {_torch.storage_key(x): i for i, x in numbered(twins)}
        start = _begin(observer, tensors(twins))
        observer.begin_body(tensors(twins[:params]))
        flat, spec = tree.flatten(_run(observer, call, treedef, twins))
        keys = [_torch.storage_key(x) for x in tensors(flat)]
        if len(set(keys)) < len(keys) or set(keys) & set(given):
            raise Unprofilable
        stop = {x.grad_fn for x in tensors(twins) if x.grad_fn is not None}
        roots = [x.grad_fn for x in tensors(flat)]
        nodes = _torch.graph_nodes(roots, stop)
        if _torch.saved_under_hooks(nodes):
            raise Unprofilable
        saved = {_torch.storage_key(x) for x in _torch.saved_tensors(nodes)}
        others = set(given) | set(keys)
        kept = [w.number for key, w in book.held.items() if key not in others]
        return UnitProfile(
            _segment(book, start)[0],
            [Shape.of(x) if isinstance(x, Tensor) else x for x in flat],
            spec,
            sum(book.sizes[number] for number in kept),
            [i for key, i in given.items() if key in saved],
            [i for i, x in numbered(flat) if _torch.storage_key(x) in saved],
            sum(book.sizes[number] for number in observer.derived(flat)),
            [i for key, i in given.items() if key in observer.reads],
        )


def profiled_backward(
    observer: Observer,
    call: Call,
    leaves: Sequence[Any],
    treedef: Any,
    cotangents: Sequence[Shape | None],
) -> Backward:
    """What the backward of ``call`` does with tensors of the shapes in ``leaves``.

    Nothing of what it is given is held here but by autograd: when each goes is noted.
    """
    with observer.apart() as book, torch.enable_grad():
        twins = [x.twin() if isinstance(x, Shape) else x for x in leaves]
        _begin(observer, tensors(twins))
        named = {book.number(x): ("leaf", i) for i, x in numbered(twins)}
        wanted = [_edge(x) for x in tensors(twins) if x.requires_grad]
        outs = tree.leaves(_run(observer, call, treedef, twins))
        del twins
        named |= {book.number(x): ("output", i) for i, x in numbered(outs)}
        outs, start, passed = tensors(outs), 0, {}

        def make() -> tuple[Tensor, ...]:
            nonlocal start
            made = [g.make() for g in cotangents if g is not None]
            start = _begin(observer, made)
            at = [i for i, g in enumerate(cotangents) if g is not None]
            for i, g in zip(at, made, strict=True):
                passed[book.number(g)] = i
                named[book.number(g)] = "cotangent", i
            return tuple(made)

        asked = [x for x, g in zip(outs, cotangents, strict=True) if g is not None]
        if not asked:
            return Backward(Segment(()), {}, [], [None] * len(wanted))
        root = _edge(_Comes.apply(make, *asked))
        del outs, asked
        found = torch.autograd.grad(root, wanted, torch.empty(0), allow_unused=True)
        segment, ends = _segment(book, start, named)
        seen: dict[int | None, int] = {}
        storages: list[Shape] = []
        grads = [_grad(book, x, passed, seen, storages) for x in found]
        return Backward(segment, ends, storages, grads)


_edge = torch.autograd.graph.get_gradient_edge


def _grad(
    book: Book,
    x: Tensor | None,
    passed: dict[int | None, int],
    seen: dict[int | None, int],
    storages: list[Shape],
) -> Grad | None:
    """Where a gradient lies; a storage that is new is added to ``storages``.

    Args:
        passed: of a cotangent's storage by its number in the book, which cotangent.
    """
    if x is None:
        return None
    number, shape, offset = book.number(x), Shape.of(x), int(x.storage_offset())
    if number in passed:
        return Grad(shape, None, passed[number], offset)
    if number not in seen:
        seen[number] = len(storages)
        size = x.untyped_storage().nbytes()
        whole = size == x.numel() * x.element_size() and not offset
        flat = shape._replace(size=(size // x.element_size(),), stride=(1,))
        storages.append(shape if whole else flat)
    return Grad(shape, seen[number], None, offset)


def _begin(observer: Observer, given: Sequence[Tensor]) -> int:
    """Where the profile begins in the book: what it is given is not its own."""
    observer.given("buffers", given)
    observer.reads = set()
    return len(observer.book.events)


def _run(observer: Observer, call: Call, treedef: Any, leaves: Sequence[Any]) -> Any:
    """Runs the body where it reaches neither a unit nor a rank."""
    at = maybe_here()
    alone = call.frame.but(
        handlers=(_Stop(),),
        runtimes=(),
        tracer=Tracer(),
        at=at and replace(at, link=_NoLink()),
        path=call.path,
        numbers=call.numbers,
        counter=Counter(),  # a profile is no call: the true one counts for itself
    )
    params, inputs, keywords = tree.unflatten(treedef, leaves)
    with inside(alone), observer.unit(call.name), internal(False):
        return call.unit.checked(params, inputs, keywords)


def tensors(values: Sequence[Any]) -> list[Tensor]:
    """The tensors among ``values``."""
    return [x for x in values if isinstance(x, Tensor)]


def numbered(values: Sequence[Any]) -> list[tuple[int, Tensor]]:
    """The tensors among ``values``, and where they are."""
    return [(i, x) for i, x in enumerate(values) if isinstance(x, Tensor)]


def _segment(
    book: Book,
    start: int,
    named: Mapping[Any, tuple[str, int]] = {},  # noqa: B006
) -> tuple[Segment, dict[tuple[str, int], int]]:
    """What the book tells of a profile that began at event ``start``.

    And where in its memory what is ``named``, by number, goes: that does not count.
    """
    ops: list[Op] = []
    memory: list[tuple[int, int]] = []
    ends: dict[tuple[str, int], int] = {}
    for event in book.events[start:]:
        if isinstance(event, Ran):
            ops += event.op.ops
        elif isinstance(event, Took):
            memory.append((len(ops), event.bytes))
        elif isinstance(event, Gave) and event.key in named:
            ends[named[event.key]] = len(memory)
        elif isinstance(event, Gave):
            memory.append((len(ops), -book.sizes[event.key]))
    return Segment(tuple(ops), tuple(memory)), ends
