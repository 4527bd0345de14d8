"""A unit call that is run twice: what it was given, and what it gives."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import internal
from fsfunc.core.execution_context import Running, run_as
from fsfunc.core.units import Call
from fsfunc.runtime.generators import (
    States,
    generator_states,
    generators_kept,
    set_generators,
)
from fsfunc.sharded.leaf import Sharded
from fsfunc.transforms.policies import Policy, Tape
from fsfunc.transforms.unread_tail import NO_TAIL, TailNotes, TailSkipping


class RepeatedCall:
    """A unit call that can be run a second time."""

    def __init__(
        self,
        run: Callable[..., Any],
        leaves: list[Any],
        places: list[int],
        treedef: Any,
        policy: Policy | None,
        call: Call,
        tensors: Sequence[Tensor],
    ):
        self.run, self.places, self.treedef = run, places, treedef
        held = set(places)
        # What is differentiated is saved by autograd, not here.
        self.leaves = [
            (x.with_local(None) if isinstance(x, Sharded) else None) if i in held else x
            for i, x in enumerate(leaves)
        ]
        self.tape = None if policy is None else Tape(policy)
        self.casts = {
            kind: torch.get_autocast_dtype(kind)
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        }
        self.staged, around = call.frame.staged, call.frame
        # In a gradient call the unit's body sets the generators by itself.
        seeded = around.seed is not None
        self.states: States = [] if seeded else generator_states()
        self.tails = call.unit.tails if around.compiler is None else None
        self.traced = around.tracer is not None
        for handler in around.handlers:
            if handler.reads_outputs:
                self.tails = None
        # Calls of one key do the same, as far as anybody can tell.
        key = [-1 if around.at is None else around.at.rank, treedef]
        for x in tensors:
            key += type(x), x.shape, x.dtype, x.requires_grad
        self.key = tuple(key)

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[list[Any], Any]:
        """The call's output, flat, and its structure."""
        leaves = list(self.leaves)
        for i, x in zip(self.places, tensors, strict=True):
            old = leaves[i]
            leaves[i] = old.with_local(x) if isinstance(old, Sharded) else x
        params, inputs, keywords = tree.unflatten(self.treedef, leaves)
        return tree.flatten(self.run(params, *inputs, **keywords))

    def parts(self) -> list[Tensor]:
        """Its leaves that are used outside units, maybe in this call."""
        found = {}
        for x in self.leaves:
            if isinstance(x, Sharded) and x.parts:
                part = x.parts.get((id(x.packed), id(x.layout)))
                found |= {} if part is None else {id(part): part}
        return list(found.values())

    def first(self, tensors: Sequence[Tensor], thread: Any) -> tuple[list[Any], Any]:
        """The first run: as without ``remat``, so that torch takes the same kernels."""
        tail = None if self.tails is None else self.tails.get(self.key)
        if tail is not None and not tail.inner and self.tape is None:
            # A plan is that of a first call too, when no tail is known yet.
            if _torch.saves_plainly() and not self.traced:
                found = self._unsaved(tensors, thread)
                if found is not None:
                    return found
                self.tails[self.key] = tail._replace(inner=True)  # type: ignore[index]
        notes = None
        if self.tails is not None and self.key not in self.tails:
            notes = TailNotes()
        with run_as(Running(thread, forgotten=True, around=notes)):
            if self.tape is None:
                found, spec = self(tensors)
            else:
                with self.tape.keep():
                    found, spec = self(tensors)
        if notes is not None and notes.count and self.tails is not None:
            self.tails[self.key] = notes.tail(found)
        return found, spec

    def _unsaved(self, tensors: Sequence[Tensor], thread: Any) -> Any:
        """The first run, with nothing saved; None where something was asked for.

        What is saved would be freed with the run's graph, when the call is over. Freed
        as soon as nobody reads it, its memory is in the processor's caches still when
        the next operator takes it.

        Raises:
            RuntimeError: something was asked for after units within had run.
        """
        missed = []

        def miss(nothing: None) -> Tensor:
            missed.append(True)
            raise RuntimeError("this value was not saved")

        hooks = torch.autograd.graph.saved_tensors_hooks(_FORGET, miss)
        try:
            with hooks, run_as(Running(thread, forgotten=True)):
                found = self(tensors)
        except Exception:
            if not missed:
                raise
            found = None
        if missed:
            if thread is not None and thread.token is not thread.start:
                raise RuntimeError(_MISSED)
            if self.states:
                set_generators(self.states)
            return None
        return found

    def again(
        self, tensors: Sequence[Tensor], kept: Sequence[Tensor], thread: Any
    ) -> list[Any]:
        """The second run: its values are right where the backward reads them."""
        tail = NO_TAIL if self.tails is None else self.tails.get(self.key, NO_TAIL)
        if tail.ops and self.tails is not None and not torch.is_grad_enabled():
            skipping = TailSkipping(tail)
            try:
                flat = self._again(
                    tensors, kept, Running(thread, True, False, skipping)
                )
                if skipping.is_unheld(flat):
                    return flat
            except Exception:
                if not skipping.has_skipped:
                    raise
            self.tails[self.key] = tail._replace(ops=())
        return self._again(tensors, kept, Running(thread, recompute=True))

    def _again(
        self, tensors: Sequence[Tensor], kept: Sequence[Tensor], how: Running
    ) -> list[Any]:
        """The second run: with the casts and random numbers of the first."""
        with torch.enable_grad(), run_as(how), ExitStack() as stack:
            if self.states:
                stack.enter_context(generators_kept())
                set_generators(self.states)
            for kind in ("cpu", "cuda"):
                dtype = self.casts.get(kind)
                if dtype is not None or torch.is_autocast_enabled(kind):
                    cast = torch.autocast(kind, dtype, enabled=dtype is not None)
                    stack.enter_context(cast)
            if self.casts:  # an autocast around us would keep our leaves' casts
                stack.callback(torch.clear_autocast_cache)
            if self.tape is not None:
                stack.enter_context(self.tape.replay(kept))
            stack.enter_context(internal())
            return self(tensors)[0]


_FORGET: Any = deque(maxlen=0).append  # gives None and keeps nothing, in C

_MISSED = (
    "a unit under remat computes gradients itself, of units that it calls, and did not "
    "when it was first called with arguments of these shapes: make what differs a part "
    "of its arguments' structure, or two units of it"
)


class Output:
    """A call's output: the tensors travel through the Function, the rest stays here."""

    def take(self, flat: list[Any], spec: Any) -> list[Tensor]:
        """The tensors, each once, of a call's flat output."""
        numbers: dict[int, int] = {}
        self.rest, self.at, self.spec = list(flat), list[int](), spec
        for i, x in enumerate(flat):
            if isinstance(x, Tensor):
                if id(x) not in numbers:
                    numbers[id(x)] = len(self.at)
                    self.at.append(i)
                self.rest[i] = _Place(numbers[id(x)])
        return list(map(flat.__getitem__, self.at))

    def give(self, tensors: Sequence[Tensor]) -> Any:
        """The output, with ``tensors`` in their places."""
        flat = [tensors[x] if isinstance(x, _Place) else x for x in self.rest]
        return tree.unflatten(self.spec, flat)


class _Place(int):
    """The position of a tensor of the output."""
