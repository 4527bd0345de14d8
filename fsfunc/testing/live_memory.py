"""``live_bytes``: the memory that a real run holds, to hold a plan against."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from fsfunc import tree
from fsfunc.comm.backends.abstract import AbstractLink
from fsfunc.comm.backends.link import Handle
from fsfunc.comm.mesh import maybe_here, place_here
from fsfunc.planning.events import Gave, Took
from fsfunc.planning.observer import Observer
from fsfunc.runtime.buffer_pool import fresh_buffers
from fsfunc.runtime.memory_kinds import OFFLOADED, counting
from fsfunc.sharded.leaf import Sharded, is_sharded

__all__ = ["Living", "live_bytes"]


class Living:
    """The memory that a run held: ``peak_bytes``, and ``bytes`` after each change."""

    def __init__(self, observer: Observer):
        self._observer = observer

    @property
    def bytes(self) -> list[int]:
        """The bytes held after each change, in order."""
        held, rows, book = 0, [], self._observer.book
        for event in book.events:
            if not isinstance(event, Took | Gave):
                continue
            if book.kinds.get(event.key) == OFFLOADED:
                continue
            size = book.sizes[event.key]
            held += size if isinstance(event, Took) else -size
            rows.append(held)
        return rows

    @property
    def peak_bytes(self) -> int:
        """The most that was held at once."""
        return max(self.bytes, default=0)


class _Counted:
    """A link whose own memory does not count, but for the tensor that it returns.

    Simulated ranks do each other's sums, and share what comes of them when all have
    come; the last of them does not wait. A rank alone takes the memory of a result
    before it sends, and holds what it sends until that is over.
    """

    def __init__(self, link: Any, observer: Observer):
        self._link, self._observer = link, observer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def start(self, op: str, x: Tensor, where: Any, **how: Any) -> Handle:
        room = None
        if how.get("out") is None:
            with self._paused():
                like = x.detach().to("meta")
                shape = AbstractLink().start(op, like, where, **how).wait()
            room = x.new_empty(shape.shape)
        with self._paused():
            work = self._link.start(op, x, where, **how)
        return _Awaited(work, self, room, x)

    def receive(self, like: Tensor, where: Any, source: int, what: str = "") -> Handle:
        with self._paused():
            work = self._link.receive(like, where, source, what)
        return _Awaited(work, self, like, like)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        self._observer.paused = True
        try:
            yield
        finally:
            self._observer.paused = False


class _Awaited(Handle):
    """A transfer that holds what it sends, and has room for what comes, to its end."""

    def __init__(self, work: Handle, link: _Counted, room: Tensor | None, x: Tensor):
        self.work, self.link, self.room = work, link, room
        self.x: Tensor | None = x

    def wait(self) -> Tensor:
        with self.link._paused():
            result = self.work.wait()
        self.x = None
        if self.room is not None:
            self.room = None
            size = result.numel() * result.element_size()
            self.link._observer.book.take(result, "", "", "", size)
        return result

    def done(self) -> bool:
        return self.work.done()


@contextmanager
def live_bytes(*given: Any) -> Iterator[Living]:
    """Counts the bytes of tensors that the rank's thread holds inside.

    Each storage counts from the operator that makes it, or first reads it, until the
    last tensor over it is gone. Memory that is kept for reuse alone is not counted, as
    CUDA's ``max_memory_allocated`` does not: inside, each buffer is made anew.

    Args:
        given: trees that are there already: the state and the batch.

    >>> import torch, fsfunc as ff
    >>> x = torch.ones(100)
    >>> with ff.testing.live_bytes(x) as seen:
    ...     y = (x + 1) * 2
    >>> seen.peak_bytes, seen.bytes[-1]
    (1200, 800)
    """
    observer = Observer(strangers=True)
    observer.given("buffers", _held(given))
    try:
        with ExitStack() as stack:
            stack.enter_context(fresh_buffers())
            if (at := maybe_here()) is not None:  # on one device nothing is sent
                link = _Counted(at.link, observer)
                stack.enter_context(place_here(replace(at, link=link)))
            stack.enter_context(observer)
            stack.enter_context(counting(observer))
            yield Living(observer)
    finally:
        observer.book.close()


def _held(trees: Any) -> Iterator[Tensor]:
    for x in tree.leaves(trees, is_leaf=is_sharded):
        shard = x.packed if isinstance(x, Sharded) else None
        if shard is not None:
            yield shard.flat
            if shard.whole is not None:
                yield shard.whole
        elif isinstance(x, Sharded):
            yield x.local
        elif isinstance(x, Tensor):
            yield x
