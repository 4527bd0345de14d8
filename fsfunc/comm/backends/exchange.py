"""Exchanges in flight between processes: their tags, headers, and waits.

Gloo matches a send and a receive by a tag. It has 31 bits: 2 for what is sent, 12 for a
number, 16 for the kind of the collective and 1 for its hop. So different collectives
are never matched: their ranks wait until the group's timeout. Without that gloo would
copy the bytes of one into the memory of the other, or end the process if sizes differ.

A header is a description of a collective or a transfer, sent with its data. All headers
have one size and tags of their own: so ranks that call different collectives exchange
them all the same, and all raise.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fsfunc._torch.versions import all_gather_single
from fsfunc.comm.attribution import source_line
from fsfunc.comm.backends.channels import Channel, Work
from fsfunc.comm.backends.link import (
    CollectiveCall,
    CollectiveMismatch,
    Handle,
    Signature,
    table,
)
from fsfunc.comm.backends.neighbours import Disconnected
from fsfunc.comm.watch.watchdog import FlightRecord, the_watchdog

DATA, HEADER, TRANSFER, ANSWER = range(4)
_NUMBERS = 2**12  # more than can be in flight at once; what is later comes later
_SIZE = 512  # bytes of a header: a digest of eight, and a text
_TITLE = "ranks call different collectives"


def tag(kind: int, number: int, digest: bytes = b"\0\0", hop: int = 0) -> int:
    """The tag of the ``number``-th collective, or transfer, of a group."""
    said = int.from_bytes(digest[:2], "little")
    return ((kind * _NUMBERS + number % _NUMBERS) << 17) + (said << 1) + hop


def packed(call: Any, said: bytes) -> Tensor:
    """A header: a digest of eight bytes, and the text for the error if they differ."""
    text = str(call).encode(errors="replace")
    if len(text) > _SIZE - 8:
        half = (_SIZE - 8) // 2 - 2
        text = text[:half] + b" .. " + text[-half:]
    return torch.frombuffer(
        bytearray((said + text).ljust(_SIZE, b"\0")), dtype=torch.uint8
    )


@functools.lru_cache(maxsize=1 << 12)
def _header(
    said: Signature, label: tuple[str, str], line: str, digest: bytes
) -> Tensor:
    """That of a collective: a step sends the same ones each time."""
    return packed(CollectiveCall(said, *label, line), digest)


def unpacked(row: Tensor) -> str:
    """The text of a header, after its eight bytes; "" before it has come."""
    return bytes(row.tolist())[8:].rstrip(b"\0").decode(errors="replace")


def _compare(rows: Mapping[int, Tensor], title: str) -> None:
    """Raises unless the headers, by rank, are of one collective."""
    if len({bytes(row[:8].tolist()) for row in rows.values()}) > 1:
        said = {rank: unpacked(row).partition("\n")[0] for rank, row in rows.items()}
        raise CollectiveMismatch(table(title, dict(sorted(said.items()))))


def compare_gathered(
    mine: Tensor, process_group: Any, ranks: Sequence[int], title: str = _TITLE
) -> dict[int, str]:
    """Compares headers by a gather, where there are no tags; returns the texts."""
    every = mine.new_empty(len(ranks) * _SIZE)
    all_gather_single(every, mine, group=process_group)
    rows = every.cpu().view(-1, _SIZE).unbind()
    by_rank = dict(zip(ranks, rows, strict=True))
    _compare(by_rank, title)
    return {rank: unpacked(row) for rank, row in by_rank.items()}


class Headers:
    """The headers of one collective, or one transfer, on their way.

    Args:
        others: by index along ``group``, those who are in it beside this rank.
        ways: the tags' last part, of what is sent and of what is received.
    """

    def __init__(
        self,
        record: FlightRecord,
        group: Any,
        digest: bytes,
        others: list[int],
        channel: Channel,
        ways: tuple[int, int] = (0, 0),
    ):
        self.record = record
        record.line = source_line()
        mine = _header(record.said, record.label, record.line, digest)
        self.rows = {group.rank: mine}
        out, back = (tag(HEADER, record.number, bytes([way, 0])) for way in ways)
        self.works: list[Work] = []
        for r in others:
            row = self.rows[group.ranks[r]] = torch.zeros_like(mine)
            self.works.append(channel.receive(row, group.ranks[r], back))
        for r in others:
            self.works.append(channel.send(mine, group.ranks[r], out))

    def seen(self) -> dict[int, str]:
        """The texts of the headers that have come, even where others' do not."""
        found = {rank: unpacked(row) for rank, row in self.rows.items()}
        return {rank: text for rank, text in found.items() if text}

    def check(self) -> None:
        """Waits for what the others say of it.

        Raises:
            CollectiveMismatch: on every rank, what each of them called.
        """
        settle(self.works, self.record, self.seen)
        self.works = []
        _compare(self.rows, f"{_TITLE}, #{self.record.number} of theirs")


class Exchange(Handle):
    """Works of torch.distributed, and a function to call when they are over.

    One that is dropped before that is kept by its link, which waits for it, as gloo
    still reads and writes its memory, and would block everything that follows.

    Args:
        held: what must live until then.
        record: its record for error reports.
        where: the group of its ranks.
        headers: the headers of its ranks, if they are compared.
    """

    result: Tensor | None = None
    works: Sequence[Work] = ()

    def __init__(
        self,
        works: Sequence[Work],
        finish: Callable[[], Tensor],
        held: Any,
        record: FlightRecord,
        group: Any,
        headers: Headers | None = None,
    ):
        self.link = group.link
        self.works, self.finish, self.held = works, finish, held
        self.record, self.headers = record, headers

    def wait(self) -> Tensor:
        if self.result is None:
            try:
                if self.headers is not None:
                    self.headers.check()
                settle(self.works, self.record)
                self.result = self.finish()
            except BaseException as error:
                self.link.close(self.record.call, error)
                raise
            self.record.ended = time.monotonic()
            del self.works, self.finish, self.held  # and the buffers with them
        return self.result

    def done(self) -> bool:
        return self.result is not None or all(w.is_completed() for _, w in self.works)

    def __del__(self) -> None:
        if self.result is None and self.works:
            self.link.dropped.append(self)


def settle(
    works: Sequence[Work],
    record: FlightRecord,
    seen: Callable[[], Mapping[int, str]] = dict,
) -> None:
    """Waits for works of torch.distributed.

    Args:
        record: whose works they are.
        seen: what ranks have said of it, if they have.

    Raises:
        PeerFailed: another rank stopped, or ended; names the collective.
        RuntimeError: an error closed the mesh since it was issued.
    """
    record.waits()
    other = None
    try:
        for other, work in works:  # noqa: B007  the error names it
            work.wait()
    except RuntimeError as error:
        trace = error.__traceback__
        told = isinstance(error, Disconnected)
        if not told and trace is not None and trace.tb_next is not None:
            raise  # a signal's handler did, as that of a data loader does
        raise the_watchdog().failed(record, other, error, seen()) from error
