"""Bytes that a step sends, and bytes of memory it takes: assert_cost, live_bytes.

``assert_cost`` runs a function under ``ff.ledger`` and compares what each rank sent
with what the test expects. ``live_bytes`` watches all operators inside it through the
observer of the planner (``planning/observer.py``) and notes each storage that comes and
goes.
"""

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
from fsfunc.comm.backends.link import Handle, Link
from fsfunc.comm.groups import RankGroup
from fsfunc.comm.ledgers import Record
from fsfunc.comm.mesh import Mesh, maybe_here, set_here
from fsfunc.comm.traffic import Ledger, ledger
from fsfunc.planning.events import Allocated, Freed
from fsfunc.planning.observer import Observer
from fsfunc.runtime.memory import OFFLOADED, counting, fresh_buffers
from fsfunc.runtime.scopes import in_one_thread
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.tree.types import PyTree

_SHOWN = 12  # collectives that an error message lists

Number = int | Fraction
Bytes = int | Fraction | Mapping[str, int | Fraction]


def assert_cost(
    fn: Callable[..., Any],
    *args: Any,
    bytes: Bytes | None = None,
    collectives: int | Mapping[str, int] | None = None,
    rank: int | None = None,
) -> Any:
    """Runs ``fn(*args)``; raises unless every rank sends exactly what is expected.

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
    ranks = sorted(log.ranks | {r.rank for r in log.records}) or [0]
    for rank_index in ranks if rank is None else [rank]:
        for title, sent, expected in _compare_costs(
            log, rank_index, bytes, collectives
        ):
            if sent != expected:
                raise AssertionError(
                    _describe_cost(log, rank_index, title, sent, expected)
                )
    return out


def _compare_costs(
    log: Ledger,
    rank: int,
    bytes: Bytes | None,
    collectives: int | Mapping[str, int] | None,
) -> list[tuple[str, Number, Number]]:
    """Returns (title, sent, expected) of each cost that the caller has given.

    With expectations by axis or by op, what was sent over other axes, or by other ops,
    is compared with 0.
    """
    records = log.of(rank)
    by_axis: dict[str, Fraction] = {}
    ops: Counter[str] = Counter()
    op_keys = set[tuple[str, str]]()  # ("psum", "psum data")
    for r in records:
        axis = ", ".join(r.axis)
        by_axis[axis] = by_axis.get(axis, Fraction(0)) + r.bytes
        ops[r.op] += 1
        ops[f"{r.op} {axis}"] += 1
        op_keys.add((r.op, f"{r.op} {axis}"))
    comparisons: list[tuple[str, Number, Number]] = []
    if isinstance(bytes, Mapping):
        axes = dict.fromkeys([*bytes, *(a for a, count in by_axis.items() if count)])
        for axis in axes:
            sent = by_axis.get(axis, 0)
            comparisons.append((f"bytes over {axis!r}", sent, bytes.get(axis, 0)))
    elif bytes is not None:
        comparisons.append(("bytes in all", sum(by_axis.values()), bytes))
    if isinstance(collectives, Mapping):
        comparisons += [
            (f"collectives {op!r}", ops[op], count) for op, count in collectives.items()
        ]
        # What was sent and is not named is compared with 0: an op that is named over
        # some axes, over each other axis; an op that is not named, as a whole.
        named_ops = {key.partition(" ")[0] for key in collectives}
        unnamed = [names for names in op_keys if names[0] not in collectives]
        unexpected = {names[names[0] in named_ops] for names in unnamed}
        unexpected -= set(collectives)
        comparisons += [
            (f"collectives {op!r}", ops[op], 0) for op in sorted(unexpected)
        ]
    elif collectives is not None:
        comparisons.append(("collectives in all", len(records), collectives))
    return comparisons


def _describe_cost(
    log: Ledger, rank: int, title: str, sent: Number, expected: Number
) -> str:
    unit, _, scope = title.partition(" ")
    text = lambda n: f"{float(n):g}" if Fraction(n).denominator > 1 else f"{int(n)}"  # noqa: E731
    lines = [f"rank {rank} sends {text(sent)} {unit} {scope}, not {text(expected)}:"]
    records = log.of(rank)
    lines += [
        f"  {describe_record(r)}  {text(r.bytes)} bytes" for r in records[:_SHOWN]
    ]
    if len(records) > _SHOWN:
        lines.append(f"  and {len(records) - _SHOWN} more")
    return "\n".join(lines if records else [*lines, "  nothing"])


def describe_record(r: Record) -> str:
    """Returns a collective with the line that called it, its unit, phase and leaf."""
    source = " ".join(part for part in (r.unit, r.phase, r.what) if part)
    # Collectives of the library's own have no line of the user's.
    location = "" if r.where == "?" else f" at {r.where}"
    return f"{r.op} over {', '.join(r.axis)}{location}  {source}".rstrip()


class Living:
    """The memory of tensors over a run: ``peak_bytes``, and ``bytes`` by change."""

    def __init__(self, observer: Observer):
        self._observer = observer

    @property
    def bytes(self) -> list[int]:
        """The bytes of all live tensors after each change, in order."""
        total, totals, book = 0, [], self._observer.book
        for event in book.events:
            if not isinstance(event, Allocated | Freed):
                continue
            if book.kinds.get(event.storage) == OFFLOADED:
                continue
            size = book.sizes[event.storage]
            total += size if isinstance(event, Allocated) else -size
            totals.append(total)
        return totals

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were live at once."""
        return max(self.bytes, default=0)


class _CountedLink:
    """A link that counts memory as a rank of its own process would take it.

    Simulated ranks compute each other's sums and share the result, so what the link
    itself allocates does not count. Instead a transfer counts its result from before it
    is sent, and holds what it sends until it is over.
    """

    def __init__(self, link: Link, observer: Observer):
        self._link, self._observer = link, observer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def for_mesh(self, mesh: Mesh) -> Any:
        link = self._link.for_mesh(mesh)
        return self if link is self._link else _CountedLink(link, self._observer)

    def start(self, op: str, x: Tensor, where: RankGroup, **options: Any) -> Handle:
        result_memory = None
        if options.get("out") is None:
            with self._paused():
                meta = x.detach().to("meta")
                result = AbstractLink().start(op, meta, where, **options).wait()
            result_memory = x.new_empty(result.shape)
        with self._paused():
            work = self._link.start(op, x, where, **options)
        return _CountedTransfer(work, self, result_memory, x)

    def send(self, x: Tensor, where: RankGroup, to: int, name: str = "") -> Handle:
        # Processes of one host copy it to memory that they share and reuse.
        with self._paused():
            return self._link.send(x, where, to, name)

    def receive(
        self, like: Tensor, where: RankGroup, source: int, name: str = ""
    ) -> Handle:
        with self._paused():
            work = self._link.receive(like, where, source, name)
        return _CountedTransfer(work, self, like, like)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        self._observer.is_paused = True
        try:
            yield
        finally:
            self._observer.is_paused = False


class _CountedTransfer(Handle):
    """A transfer that keeps alive, until it ends, what it sends and its result."""

    def __init__(
        self, work: Handle, link: _CountedLink, result_memory: Tensor | None, x: Tensor
    ):
        self.work, self.link, self.result_memory = work, link, result_memory
        self.sent: Tensor | None = x

    def wait(self) -> Tensor:
        with self.link._paused():
            result = self.work.wait()
        self.sent = None
        if self.result_memory is not None:
            self.result_memory = None
            size = result.numel() * result.element_size()
            self.link._observer.book.record_storage(result, "", "", "", size)
        return result

    def done(self) -> bool:
        return self.work.done()


@contextmanager
def live_bytes(*trees: Any) -> Iterator[Living]:
    """Counts the bytes of tensors that are live in the rank's thread inside.

    Each storage counts from the operator that makes it, or first reads it, until the
    last tensor over it is gone. Memory that is only cached for reuse does not count, as
    in CUDA's ``max_memory_allocated``: inside, each buffer is allocated anew.

    Args:
        trees: what is there already: the state and the batch.

    >>> import torch, fsfunc as ff
    >>> x = torch.ones(100)
    >>> with ff.testing.live_bytes(x) as seen:
    ...     y = (x + 1) * 2
    >>> seen.peak_bytes, seen.bytes[-1]
    (1200, 800)
    """
    observer = Observer(counts_unseen=True)
    observer.record_given("buffers", _tensors_in(trees))
    try:
        with ExitStack() as stack:
            stack.enter_context(in_one_thread())
            stack.enter_context(fresh_buffers())
            if (here := maybe_here()) is not None:  # None on one device
                link = _CountedLink(here.link, observer)
                stack.enter_context(set_here(replace(here, link=link)))
            stack.enter_context(observer)
            stack.enter_context(counting(observer))
            yield Living(observer)
    finally:
        observer.book.close()


def _tensors_in(trees: PyTree) -> Iterator[Tensor]:
    """Yields the tensors of the trees; of sharded leaves what they lie in."""
    for x in tree.leaves(trees, is_leaf=is_sharded):
        packed = x.packed if isinstance(x, Sharded) else None
        if packed is not None:
            yield packed.flat
            if packed.whole is not None:
                yield packed.whole
        elif isinstance(x, Sharded):
            yield x.local
        elif isinstance(x, Tensor):
            yield x
