"""What ``shard`` keeps during one gradient call: gathers in flight, reductions due."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.backends.link import Done
from fsfunc.comm.groups import RankGroup
from fsfunc.frames import frame, running
from fsfunc.memory_kinds import count_as
from fsfunc.sharded import Home
from fsfunc.transforms.gathering import Arena, Box, Gathered, Passage, Use
from fsfunc.transforms.ownership import Ownership
from fsfunc.transforms.reducing import Reductions

__all__ = ["Session"]


class Session:
    """One gradient call, or one plain call, of a sharded function on one rank.

    Args:
        handler: the ``shard`` interpretation it belongs to.
        where: the group over which parameters are cut; ``replicas``: the group over
            which the cut parameters are repeated, if any.
        order: the buffers of each unit call of the last such session, to prefetch by.
        ownership: whose the plain tensors of the sharded call are.

    ``differentiated`` are the arguments that the gradient call differentiates.
    """

    def __init__(
        self,
        handler: Any,
        where: RankGroup,
        replicas: RankGroup | None,
        arena: Arena,
        homes: Iterable[Home],
        order: Sequence[tuple[str, ...]],
        ownership: Ownership,
    ):
        self.handler, self.where, self.replicas = handler, where, replicas
        self.arena, self.order, self.ownership = arena, order, ownership
        self.differentiated: Sequence[Any] = ()
        self.homes: dict[str, list[Home]] = {}
        for home in homes:
            same = self.homes.setdefault(home.buffer, [])
            if not any(home is h for h in same):
                same.append(home)
        self.copy = 0  # which of several trees with the same buffers is read
        self.coordinates = handler.mesh.coordinates(where.rank)
        self.seen: list[tuple[str, ...]] = []
        self.flights: dict[str, tuple[Box, Any, Tensor]] = {}
        self.recent: list[Box] = []
        self.calls: dict[Any, list[Gathered]] = {}  # by microbatch, in call order
        depth = len(frame().micro)
        self.reductions = Reductions(handler.zero, where, replicas, arena, depth)
        replicated = () if replicas is None else replicas.axis
        self.mean_axes = (*replicated, *where.axis)
        self.mean_size = where.size * (1 if replicas is None else replicas.size)

    def averages(self, x: Tensor) -> bool:
        """Whether the gradient call will average the gradient of a whole parameter."""
        return bool(self.differentiated) and self.ownership.is_one_value(x)

    # Gathers

    def begin(self) -> None:
        """A forward pass starts: what the last one left over is forgotten."""
        self.drop(self.recent)
        self.recent, self.calls, self.seen = [], {}, []
        if self.handler.zero == 3:  # memory before the odd page fault
            self.arena.trim(2)
            self.where.link.trim()

    def _whole(self, home: Home, dtype: torch.dtype) -> Tensor | None:
        """The whole buffer where this rank has it without a gather."""
        if home.place.size == 1 and home.flat.dtype == dtype:
            return home.flat.detach()
        return home.whole if home.shows(dtype) else None

    def _start(self, home: Home, dtype: torch.dtype) -> tuple[Tensor, Any]:
        place = home.place
        source, count = home.flat.detach().to(dtype), place.size * place.chunk
        if place.size == 1:  # cut over no axis: a cast is all that is needed
            return source, Done(source)
        full = home.whole
        if full is None or full.dtype != dtype:
            full = self.arena.get(count, dtype, source)
            count_as("gathered", [full])
        out = full
        if _torch.storage_key(full) == _torch.storage_key(home.flat):
            # The state lies in it, and stays what it is: `.data` has a version of its
            # own. (Any other buffer's version tells graphs that it was written.)
            out = full.data
        if self.where.size == 1:
            return full, Done(out.copy_(source))
        return full, self.where.start("all_gather", source, out=out, what=home.name)

    def gather(self, home: Home, dtype: torch.dtype) -> Tensor:
        """The whole buffer: what is in flight, or a gather that is waited for."""
        whole = self._whole(home, dtype)
        if whole is not None:
            return whole
        flight = self.flights.pop(home.buffer, None)
        if flight is not None:
            box, work, _ = flight
            work.wait()
            if box.full is not None and box.shows(home) and box.dtype == dtype:
                return self._kept(home, box.full)
            self.drop([box])
        full, work = self._start(home, dtype)
        work.wait()
        return self._kept(home, full)

    def gather_again(self, home: Home, box: Box) -> Tensor:
        """The same for a backward, which wants what the forward had."""
        box.check(home)
        return self.gather(home, box.dtype)

    def _kept(self, home: Home, full: Tensor) -> Tensor:
        """At zero 1 and 2 the state keeps what was gathered, until it changes."""
        if self.handler.zero in (1, 2):
            home.keep(full)
        return full

    def prefetch(self, buffers: Iterable[str], dtype: torch.dtype | None) -> None:
        """Puts the gathers of these buffers in flight, where that is possible."""
        for name in buffers:
            same = self.homes.get(name, [])
            if self.copy < len(same):
                home = same[self.copy]
                self._send_for(home, _dtype(home, dtype))

    def _send_for(self, home: Home, dtype: torch.dtype) -> None:
        name = home.buffer
        if name in self.flights or self.where.size == 1:
            return
        shared = "+" in name and any(b.shows(home) for b in self.recent)
        if not shared and self._whole(home, dtype) is None:
            full, work = self._start(home, dtype)
            # What is sent is held to the end, on all ranks alike: no donated step
            # writes into it meanwhile.
            sent = home.flat.detach()
            self.flights[name] = Box(home, full, dtype), work, sent

    def take(self, passage: Passage, dtype: torch.dtype | None) -> None:
        """Brings in the whole parameters of a call, and sends for the next one's."""
        if running().recompute:
            self._take_again(passage, dtype)
            return
        old, self.recent = self.recent, []
        for use in passage.uses:
            kind, home = _dtype(use.home, dtype), use.home
            box = next((b for b in old if b.full is not None and b.shows(home)), None)
            if box is not None and "+" in home.buffer:
                old.remove(box)
            elif (whole := self._whole(home, kind)) is not None:
                box = Box(home, whole, kind, kept=True)
            else:
                if not (self.handler.keeps and torch.is_grad_enabled()):
                    self.drop(old)  # before the new one is waited for
                old = []
                full = self.gather(home, kind)
                box = Box(home, full, kind, kept=home.whole is full)
            self.recent.append(box)
        passage.boxes.extend(self.recent)
        if not (self.handler.keeps and torch.is_grad_enabled()):
            self.drop(old)
        names = tuple(use.home.buffer for use in passage.uses)
        at = len(self.seen)
        self.seen.append(names)
        for use in passage.uses:
            for i, home in enumerate(self.homes.get(use.home.buffer, [])):
                self.copy = i if home is use.home else self.copy
        if at + 1 < len(self.order) and self.order[at] == names:
            self.prefetch(self.order[at + 1], dtype)

    def _take_again(self, passage: Passage, dtype: torch.dtype | None) -> None:
        """The same for a recompute: into the boxes of the first run, which last."""
        calls, at = self._find(passage)
        first = calls[at].boxes if at >= 0 else []
        for use in passage.uses:
            kind, home = _dtype(use.home, dtype), use.home
            box = next((b for b in first if b.home is home), None)
            box = Box(home, None, kind) if box is None else box
            if box.full is None:
                box.full = self.gather_again(home, box)
                box.kept = home.whole is box.full or home.place.size == 1
            passage.boxes.append(box)
        # The last unit's box is held still, for its own backward; each call's backward
        # drops what the call took.
        held = self.recent
        self.recent = [*held, *(b for b in passage.boxes if not _among(b, held))]
        if at == len(calls) - 1:  # not one of several in an outer unit
            self._look_back(passage)

    def passed(self, passage: Passage) -> None:
        """A call's outputs are out: the backward comes by in the reverse of this.

        Microbatch by microbatch: a pipeline has several under way.
        """
        if not running().recompute:
            self.calls.setdefault(passage.micro, []).append(passage.gathered)

    def drop(self, boxes: Iterable[Box]) -> None:
        """Forgets gathered buffers."""
        for box in list(boxes):
            full, box.full = box.full, None
            if full is not None and not box.kept:
                self.arena.spoil(full)

    # Backward

    def _find(self, passage: Passage) -> tuple[list[Gathered], int]:
        """The forward pass that the call was in, and where; -1: in none any more."""
        calls = self.calls.get(passage.micro, [])
        for i in range(len(calls) - 1, -1, -1):
            if calls[i].key == passage.gathered.key:
                return calls, i
        return calls, -1

    def _look_back(self, passage: Passage) -> None:
        """The calls after this one are done; the one before it comes next."""
        calls, at = self._find(passage)
        if at < 0:
            return
        del calls[at + 1 :]
        if at > 0 and (calls[at - 1].hooked or running().recompute):
            for box in calls[at - 1].boxes:
                if box.full is None and (home := box.home) is not None:
                    self._send_for(home, box.dtype)

    def enters_backward(self, passage: Passage) -> None:
        """The cotangents of a call's outputs are here: gather again, look back."""
        if passage.gathered.hooked:
            for use, box in zip(passage.uses, passage.boxes, strict=True):
                if box.full is None:
                    box.full = self.gather_again(use.home, box)
        self._look_back(passage)

    def left_backward(self, passage: Passage) -> None:
        """A call's gradients are out: its buffers go, but for a neighbour's."""
        calls, at = self._find(passage)
        before = calls[at - 1].boxes if at > 0 else []
        self.drop(b for b in passage.boxes if not any(b is o for o in before))

    def gradient_of(
        self, passage: Passage, use: Use, box: Box, grads: Sequence[Tensor | None]
    ) -> Tensor | None:
        """Reduces one buffer's gradients; returns those that autograd carries on."""
        port = use.home.port
        if port is None and not use.flat.requires_grad:
            return None
        buffer = self.reductions.collect(passage, use, box, grads)
        if box.grad is not None:
            buffer.add_(box.grad)
            self.arena.spoil(box.grad)
            box.grad = None
        calls, at = self._find(passage)
        if at > 0 and any(box is b for b in calls[at - 1].boxes):
            box.grad = buffer  # the call before shares the buffer, and reduces it
            return None
        if port is None:
            return self.handler.reduce(buffer, self, use.home).to(use.flat.dtype)
        self.reductions.add(port, buffer, passage)
        return None

    def finish(self) -> None:
        """Waits for all that is due; the ports then hold the mean gradients."""
        self.reductions.finish()
        self.close()

    def close(self) -> None:
        """Takes in what is still in flight, and forgets every buffer."""
        self.drop(self.recent)
        self.recent = []
        for box, work, _ in self.flights.values():
            work.wait()
            self.drop([box])
        self.flights.clear()


def _among(box: Box, boxes: Sequence[Box]) -> bool:
    return any(box is b for b in boxes)


def _dtype(home: Home, dtype: torch.dtype | None) -> torch.dtype:
    real = home.flat.dtype.is_floating_point
    return dtype if dtype is not None and real else home.flat.dtype
