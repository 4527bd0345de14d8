"""Bytes that a step sends and holds: assert_cost, live_bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from fractions import Fraction
from typing import Any

from torch import Tensor

from fsfunc import tree
from fsfunc.comm.backends.abstract import AbstractLink
from fsfunc.comm.backends.link import Handle
from fsfunc.comm.ledgers import Record
from fsfunc.comm.mesh import maybe_here, set_here
from fsfunc.comm.traffic import Ledger, ledger
from fsfunc.planning.events import Allocated, Freed
from fsfunc.planning.observer import Observer
from fsfunc.runtime.memory import OFFLOADED, counting, fresh_buffers
from fsfunc.runtime.scopes import in_one_thread
from fsfunc.sharded.leaf import Sharded, is_sharded

_SHOWN = 12  # collectives of a message

Bytes = int | Fraction | Mapping[str, int | Fraction]


def assert_cost(
    fn: Callable[..., Any],
    *args: Any,
    bytes: Bytes | None = None,
    collectives: int | Mapping[str, int] | None = None,
    rank: int | None = None,
) -> Any:
    """Runs ``fn(*args)``; raises unless every rank sends just this.

    Inside ``spmd`` it checks this rank; outside, every rank of this process.

    Args:
        bytes: the bytes that a rank sends, by axis or in all, counted as ``ff.ledger``
            does. Several axes at once are one name, ``"data, node"``.
        collectives: by op, or by op and axis (``"psum data"``), or in all.
        rank: checks this rank alone, where ranks do different things.

    Raises:
        ValueError: neither is given.
        AssertionError: with each collective, its line and its bytes.

    >>> import torch, fsfunc as ff
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> main = ff.spmd(lambda: ff.psum(torch.ones(3), "data"), mesh)
    >>> total = assert_cost(main, bytes={"data": 12}, collectives={"psum": 1})
    >>> assert_cost(main, bytes=6)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    AssertionError: rank 0 sends 12 bytes in all, not 6:
      psum over data at ...  12 bytes
    """
    if bytes is None and collectives is None:
        raise ValueError("assert_cost needs bytes= or collectives=: what is to be sent")
    with ledger() as log:
        out = fn(*args)
    found = sorted(log.ranks | {r.rank for r in log.records}) or [0]
    for at in found if rank is None else [rank]:
        for what, sent, due in _claims(log, at, bytes, collectives):
            if sent != due:
                raise AssertionError(_message(log, at, what, sent, due))
    return out


def _claims(
    log: Ledger, rank: int, size: Any, counts: Any
) -> list[tuple[str, Any, Any]]:
    """(what, what is sent, what is to be)."""
    records = log.of(rank)
    by_axis: dict[str, Fraction] = {}
    ops: Counter[str] = Counter()
    kinds = set[tuple[str, str]]()  # op, and op and axis
    for r in records:
        axis = ", ".join(r.axis)
        by_axis[axis] = by_axis.get(axis, Fraction(0)) + r.bytes
        ops[r.op] += 1
        ops[f"{r.op} {axis}"] += 1
        kinds.add((r.op, f"{r.op} {axis}"))
    claims: list[tuple[str, Any, Any]] = []
    if isinstance(size, Mapping):
        every = dict.fromkeys([*size, *(a for a, n in by_axis.items() if n)])
        for axis in every:
            sent = by_axis.get(axis, 0)
            claims.append((f"bytes over {axis!r}", sent, size.get(axis, 0)))
    elif size is not None:
        claims.append(("bytes in all", sum(by_axis.values()), size))
    if isinstance(counts, Mapping):
        claims += [(f"collectives {op!r}", ops[op], n) for op, n in counts.items()]
        by_axis_too = {key.partition(" ")[0] for key in counts}
        rest = [kind for kind in kinds if kind[0] not in counts]
        others = {kind[kind[0] in by_axis_too] for kind in rest} - set(counts)
        claims += [(f"collectives {op!r}", ops[op], 0) for op in sorted(others)]
    elif counts is not None:
        claims.append(("collectives in all", len(records), counts))
    return claims


def _message(log: Ledger, rank: int, what: str, sent: Any, due: Any) -> str:
    kind, _, rest = what.partition(" ")
    number = lambda n: f"{float(n):g}" if Fraction(n).denominator > 1 else f"{int(n)}"  # noqa: E731
    lines = [f"rank {rank} sends {number(sent)} {kind} {rest}, not {number(due)}:"]
    records = log.of(rank)
    lines += [f"  {said(r)}  {number(r.bytes)} bytes" for r in records[:_SHOWN]]
    if len(records) > _SHOWN:
        lines.append(f"  and {len(records) - _SHOWN} more")
    return "\n".join(lines if records else [*lines, "  nothing"])


def said(r: Record) -> str:
    """A collective with the line that called it, and its unit, phase and leaf."""
    who = " ".join(part for part in (r.unit, r.phase, r.what) if part)
    at = "" if r.where == "?" else f" at {r.where}"  # the library's own, of no line
    return f"{r.op} over {', '.join(r.axis)}{at}  {who}".rstrip()


class Living:
    """The memory that a run held: ``peak_bytes``, and ``bytes`` after each change."""

    def __init__(self, observer: Observer):
        self._observer = observer

    @property
    def bytes(self) -> list[int]:
        """The bytes held after each change, in order."""
        held, rows, book = 0, [], self._observer.book
        for event in book.events:
            if not isinstance(event, Allocated | Freed):
                continue
            if book.kinds.get(event.storage) == OFFLOADED:
                continue
            size = book.sizes[event.storage]
            held += size if isinstance(event, Allocated) else -size
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

    def for_mesh(self, mesh: Any) -> Any:
        link = self._link.for_mesh(mesh)
        return self if link is self._link else _Counted(link, self._observer)

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

    def receive(self, like: Tensor, where: Any, source: int, name: str = "") -> Handle:
        with self._paused():
            work = self._link.receive(like, where, source, name)
        return _Awaited(work, self, like, like)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        self._observer.is_paused = True
        try:
            yield
        finally:
            self._observer.is_paused = False


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
            self.link._observer.book.record_storage(result, "", "", "", size)
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
    observer = Observer(counts_unseen=True)
    observer.record_given("buffers", _held(given))
    try:
        with ExitStack() as stack:
            stack.enter_context(in_one_thread())
            stack.enter_context(fresh_buffers())
            if (at := maybe_here()) is not None:  # on one device nothing is sent
                link = _Counted(at.link, observer)
                stack.enter_context(set_here(replace(at, link=link)))
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
