"""How units' bodies run while a step is planned: each distinct one is run apart, once.

A unit called again on the same shapes does the same again. So its body is profiled on
tensors of its own, forward and then backward, and what it did is a :class:`Segment`;
each call then replays the segment, and leaves in the graph one node that keeps as much
memory as the body's own would, saves the same parameters and inputs, and returns
gradients of the same shapes. Transforms around it see no difference.

What a profile cannot stand for runs plainly: units that call units or collectives, that
return a view of what they were given, bodies in a pipeline's stages whose backward is
taken apart node by node (split ones, and products added in place), those under a policy
that names values, those whose residuals are offloaded one by one, or ``torch.func``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import internal
from fsfunc.comm.ledgers import is_silent
from fsfunc.core.execution_context import running
from fsfunc.core.frames import frame
from fsfunc.core.tracers import Tracer
from fsfunc.core.units import Call
from fsfunc.planning.events import Gave, Ran, Segment
from fsfunc.planning.observer import Observer
from fsfunc.planning.unit_profiles import (
    Backward,
    Grad,
    Shape,
    UnitProfile,
    Unprofilable,
    profiled,
    profiled_backward,
    tensors,
)
from fsfunc.sharded.leaf import is_sharded
from fsfunc.transforms.offloading import offloads_residuals
from fsfunc.transforms.policies import is_taped

__all__ = ["DifferentiatedTwice", "UnitCache"]


class DifferentiatedTwice(BaseException):
    """A replayed body's backward is to be differentiated: it has none of its own."""


@dataclass
class _Replayed:
    """One call, on its way through autograd."""

    cache: UnitCache
    call: Call
    profile: UnitProfile
    leaves: list[Any]  # of the arguments: tensors, or shapes in their place
    treedef: Any
    casts: torch.dtype | None  # of the autocast that was on


class UnitCache(Tracer):
    """Runs the bodies of units for ``observer``.

    Args:
        repeat: whether to replay; else each body runs plainly.
    """

    complete = True

    def __init__(self, observer: Observer, repeat: bool = True):
        self.observer, self.repeat = observer, repeat
        self.profiles: dict[Any, UnitProfile | None] = {}
        self.derived: dict[str, int] = {}
        self._kept: list[tuple[str, list[int], int]] = []
        self._open: set[weakref.ref] = set()  # to backwards that are not over

    def begin(self) -> Observer:
        """An observer for the next run, with an empty book."""
        self.observer = Observer()
        self.derived, self._kept = {}, []
        return self.observer

    def body(self, call: Call, params: Any, inputs: Any, keywords: Any) -> Any:
        """What the unit's function returns for these arguments."""
        self.look_back()
        leaves, treedef = tree.flatten((params, inputs, keywords), is_leaf=is_sharded)
        key = self._key(call, leaves, treedef) if self.repeat else None
        if key is not None and key not in self.profiles:
            count = len(tree.leaves(params, is_leaf=is_sharded))
            try:
                profile = profiled(self.observer, call, leaves, treedef, count)
            except Unprofilable:
                profile = None
            self.profiles[key] = profile
        profile = None if key is None else self.profiles[key]
        if profile is not None:
            replayed = _Replayed(self, call, profile, leaves, treedef, _casts())
            return self._replayed(replayed)
        observer = self.observer
        before = observer.roots, observer.pure
        mine = tensors(tree.leaves(params, is_leaf=is_sharded))
        observer.begin_body([x for x in mine if not _torch.is_wrapped(x)])
        with observer.unit(call.name), internal(False):
            out = call.unit.checked(params, inputs, keywords)
        self._keeps(call.name, observer.derived(tree.leaves(out)))
        observer.roots, observer.pure = before
        return out

    def _key(self, call: Call, leaves: list[Any], treedef: Any) -> Any:
        f = frame()
        if f.staged and torch.is_grad_enabled() and _taken_apart(leaves):
            return None
        if is_taped():
            return None
        if not running().recompute and offloads_residuals(f):
            return None
        if _torch.functorch_active():
            return None
        if _torch.forward_ad_active() or torch.is_inference_mode_enabled():
            return None
        found: list[Any] = []
        for x in leaves:
            if isinstance(x, Tensor):
                found.append(Shape.of(x))
            elif x is None or isinstance(x, (int, float, str, torch.dtype)):
                found.append((type(x), x))
            else:
                return None
        modes = torch.is_grad_enabled(), _casts()
        return call.unit, call.name, treedef, tuple(found), modes

    # Replays

    def _replayed(self, replayed: _Replayed) -> Any:
        profile, tracer = replayed.profile, frame().tracer
        if tracer is not None:
            tracer.read([replayed.leaves[i] for i in profile.read])
        if any(x.tracked for x in profile.outs if isinstance(x, Shape)):
            found = iter(_Body.apply(replayed, *tensors(replayed.leaves)))
        else:
            with self.replay(profile.forward, replayed.call.name, "output"):
                found = iter([x.make() for x in profile.outs if isinstance(x, Shape)])
        outs = [next(found) if isinstance(x, Shape) else x for x in profile.outs]
        return tree.unflatten(profile.treedef, outs)

    @contextmanager
    def replay(self, segment: Segment, name: str, what: str) -> Iterator[None]:
        """Writes a replay into the book; inside, what it leaves behind is taken."""
        phase = "recompute" if running().recompute else "forward"
        phase = "backward" if what == "gradient" else phase
        if not is_silent():
            self.observer.book.events.append(Ran(segment, name, phase))
        with self.observer.standing_for(name, phase, what):
            yield

    def last(self) -> Tensor:
        """A tensor that a node saves last, to tell when it lets go of what it has."""
        before, self.observer.paused = self.observer.paused, True
        try:
            return torch.empty(0)
        finally:
            self.observer.paused = before

    def lets_go(
        self, back: Backward, given: dict[tuple[str, int], Any], last: Tensor
    ) -> None:
        """What a replayed backward is given may be gone before it is over.

        A storage that goes with the node was held by nobody else. The segment in the
        book becomes one that lets go of it where the body's own nodes would.

        Args:
            given: what it is given, by the names in ``back.ends``.
            last: what the node saves last.
        """
        if is_silent():
            return
        book, at = self.observer.book, len(self.observer.book.events)
        numbers: dict[int | None, list[int | None]] = {}
        for name, x in given.items():
            if x is not None:
                end = back.ends.get(name)
                numbers.setdefault(book.number(x), []).append(end)

        def over(reference: Any) -> None:
            self._open.discard(reference)
            ran, after = book.events[at], book.events[at + 1 :]
            if any(isinstance(event, Ran) for event in after):
                return  # a graph that was kept
            gone, first, rest = [], [], []
            for event in after:
                ends = numbers.get(event.key) if isinstance(event, Gave) else None
                if isinstance(event, Gave) and ends and None not in ends:
                    gone.append((max(end or 0 for end in ends), book.sizes[event.key]))
                    first.append(event)
                else:
                    rest.append(event)
            if isinstance(ran, Ran):
                ran = ran._replace(op=back.letting_go(gone))
            book.events[at:] = [ran, *first, *rest]

        self._open.add(weakref.ref(last.untyped_storage(), over))

    def keep(self, replayed: _Replayed) -> Tensor | None:
        """Memory in place of all that the body keeps for its backward."""
        profile = replayed.profile
        if not profile.kept:
            return None
        self.observer.said = "kept for the backward"
        memory = torch.empty(profile.kept, dtype=torch.uint8)
        number = self.observer.book.number(memory)
        if profile.derived and number is not None:
            self._keeps(replayed.call.name, [number], profile.derived)
        return memory

    # Copies computed from parameters

    def _keeps(self, name: str, numbers: list[int], size: int = 0) -> None:
        if numbers and not running().recompute and not is_silent():
            self._kept.append((name, numbers, size))
            self.observer.before_backward = self.look_back

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
    def forward(ctx, replayed: _Replayed, *given):  # type: ignore[override]
        profile, cache = replayed.profile, replayed.cache
        with cache.replay(profile.forward, replayed.call.name, "output"):
            outs = [x.make() if isinstance(x, Shape) else x for x in profile.outs]
            ctx.kept = cache.keep(replayed)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *[outs[i] for i, x in enumerate(profile.outs) if not _tracked(x)]
        )
        ctx.save_for_backward(
            *[replayed.leaves[i] for i in profile.saved],
            *[outs[i] for i in profile.echoed],
            cache.last(),
        )
        leaves = [Shape.of(x) if isinstance(x, Tensor) else x for x in replayed.leaves]
        ctx.replayed = replace(replayed, leaves=leaves)
        return tuple(tensors(outs))

    @staticmethod
    def backward(ctx, *cotangents):  # type: ignore[override]
        if torch.is_grad_enabled():
            raise DifferentiatedTwice
        replayed: _Replayed = ctx.replayed
        cache, profile = replayed.cache, replayed.profile
        cache.look_back()
        # As the body's own nodes would: it may gather again.
        *saved, last = ctx.saved_tensors
        # What leads to nothing that was asked for, autograd does not compute.
        wanted = iter(_torch.will_run(node) for node, _ in ctx.next_functions)
        leaves = [
            x._replace(tracked=next(wanted)) if isinstance(x, Shape) else x
            for x in replayed.leaves
        ]
        shapes = tuple(None if g is None else Shape.of(g) for g in cotangents)
        pattern = shapes, tuple(_tracked(x) for x in leaves)
        if pattern not in profile.backward:
            with _autocast(replayed.casts):
                profile.backward[pattern] = profiled_backward(
                    cache.observer, replayed.call, leaves, replayed.treedef, shapes
                )
        back = profile.backward[pattern]
        names = [
            *[("cotangent", i) for i in range(len(cotangents))],
            *[("leaf", i) for i in profile.saved],
            *[("output", i) for i in profile.echoed],
        ]
        given = dict(zip(names, (*cotangents, *saved), strict=True))
        cache.lets_go(back, given, last)
        with cache.replay(back.segment, replayed.call.name, "gradient"):
            ctx.kept = None
            new = [shape.make() for shape in back.storages]
        found = iter(back.grads)
        grads = [
            _made(next(found), new, cotangents) if x.tracked else None
            for x in leaves
            if isinstance(x, Shape)
        ]
        return (None, *grads)


def _taken_apart(leaves: list[Any]) -> bool:
    """Whether a pipeline's stage pulls a body with these arguments back in parts.

    It may take the gradients of inputs first, and adds the products of weights right
    to the gradients so far, where no other operation stands between.
    """
    now = running()
    if now.forgets:
        return False
    given = map(_torch.leaf_behind, tensors(leaves))
    return now.adds_to is None or any(id(x) in now.adds_to for x in given)


def _tracked(x: Any) -> bool:
    return not isinstance(x, Shape) or x.tracked


def _casts() -> torch.dtype | None:
    """The dtype to which an autocast that is on casts."""
    on = torch.is_autocast_enabled("cpu")
    return torch.get_autocast_dtype("cpu") if on else None


def _autocast(dtype: torch.dtype | None) -> Any:
    return torch.autocast("cpu", dtype, enabled=dtype is not None)


def _made(g: Grad | None, new: list[Tensor], cotangents: Sequence[Any]) -> Any:
    """A gradient in the memory that was made for it."""
    if g is None:
        return None
    source = new[g.storage] if g.storage is not None else cotangents[g.cotangent or 0]
    if tuple(source.shape) == g.shape.size and g.offset == 0:
        return source
    return source.as_strided(g.shape.size, g.shape.stride, g.offset)
