"""Profiles: what the body of a unit does for one set of shapes, seen apart.

The body runs on tensors of its own, forward and then, for each pattern of cotangents,
backward. What it did is a :class:`UnitProfile`: the operators and the memory, as
segments, and what it keeps, saves and returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import internal
from fsfunc.comm.mesh import maybe_here
from fsfunc.core.frames import Counter, Interpretation, Tracer, inside
from fsfunc.core.units import Call
from fsfunc.planning.events import Gave, Ran, Segment, Took
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
        x = self.make()
        if not self.tracked:
            return x
        x.requires_grad_()
        with torch.enable_grad():  # leaves are special to autocast and to in-place ops
            return x if self.leaf else x.view_as(x)


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
        storages: the memory that its gradients lie in.
        grads: one for each given tensor that asks for it; None where nothing comes.
    """

    segment: Segment
    storages: list[Shape]
    grads: list[Grad | None]


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
            _segment(book, start),
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
    *,
    held: bool,
) -> Backward:
    """What the backward of ``call`` does with tensors of the shapes in ``leaves``.

    Args:
        held: whether who runs it holds its outputs meanwhile, as a recompute does.
    """
    with observer.apart() as book, torch.enable_grad():
        twins = [x.twin() if isinstance(x, Shape) else x for x in leaves]
        _begin(observer, tensors(twins))
        given = [None if g is None else g.make() for g in cotangents]
        outs = tensors(tree.leaves(_run(observer, call, treedef, twins)))
        # Edges, and not the outputs, which else nobody need hold any more.
        edges = [
            torch.autograd.graph.get_gradient_edge(x)
            for x, g in zip(outs, given, strict=True)
            if g is not None
        ]
        outs = outs if held else []
        start = _begin(observer, tensors(given))
        wanted = [x for x in tensors(twins) if x.requires_grad]
        found = torch.autograd.grad(edges, wanted, tensors(given), allow_unused=True)
        segment = _segment(book, start)
        keys = [None if g is None else _torch.storage_key(g) for g in given]
        seen: dict[int, int] = {}
        storages: list[Shape] = []
        grads = [_grad(x, keys, seen, storages) for x in found]
        return Backward(segment, storages, grads)


def _grad(
    x: Tensor | None,
    cotangents: list[int | None],
    seen: dict[int, int],
    storages: list[Shape],
) -> Grad | None:
    """Where a gradient lies; a storage that is new is added to ``storages``."""
    if x is None:
        return None
    key, shape, offset = _torch.storage_key(x), Shape.of(x), int(x.storage_offset())
    if key in cotangents:
        return Grad(shape, None, cotangents.index(key), offset)
    if key not in seen:
        seen[key] = len(storages)
        size = x.untyped_storage().nbytes()
        whole = size == x.numel() * x.element_size() and not offset
        flat = shape._replace(size=(size // x.element_size(),), stride=(1,))
        storages.append(shape if whole else flat)
    return Grad(shape, seen[key], None, offset)


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


def _segment(book: Book, start: int) -> Segment:
    """What the book tells of a profile that began at event ``start``."""
    ops, memory = [], []
    for event in book.events[start:]:
        if isinstance(event, Ran):
            ops += event.op.ops
        elif isinstance(event, Took):
            memory.append((len(ops), event.bytes))
        elif isinstance(event, Gave):
            memory.append((len(ops), -book.sizes[event.key]))
    return Segment(tuple(ops), tuple(memory))
