"""Exchanges in flight between processes: their tags, headers, and waits.

A collective or a transfer between processes is an :class:`Exchange`: messages that are
under way, and a function that makes the result when they are over.

Gloo matches a send and a receive by a tag. It has 31 bits:

    30-29: data, header, ...   28-17: number   16-1: digest of the call   0: hop

So different collectives are never matched: their ranks wait until the group's timeout.
Without that gloo would copy the bytes of one into the memory of the other, or end the
process if sizes differ.

A header is a description of a collective or a transfer, sent with its data. All headers
have one size and tags of their own: so ranks that call different collectives exchange
them all the same, and all raise.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsfunc._torch.versions import all_gather_single
from fsfunc.comm.attribution import source_line
from fsfunc.comm.backends.channels import Channel, Work
from fsfunc.comm.backends.link import (
    CollectiveCall,
    CollectiveMismatch,
    GroupOfRanks,
    Handle,
    Signature,
    table,
)
from fsfunc.comm.backends.neighbours import Disconnected
from fsfunc.comm.watch.watchdog import FlightRecord, the_watchdog

if TYPE_CHECKING:
    import torch.distributed as dist


DATA, HEADER, TRANSFER, ANSWER = range(4)  # what a message is
_NUMBERS = 2**12  # more than can be in flight at once: messages of one tag keep order
_HEADER_SIZE = 512  # bytes: a digest of eight, and a text
_TITLE = "ranks call different collectives"


def tag(kind: int, number: int, digest: bytes = b"\0\0", hop: int = 0) -> int:
    """Returns the tag of the ``number``-th collective, or transfer, of a group."""
    call_bits = int.from_bytes(digest[:2], "little")
    return ((kind * _NUMBERS + number % _NUMBERS) << 17) + (call_bits << 1) + hop


def pack_header(call: FlightRecord | CollectiveCall | str, digest: bytes) -> Tensor:
    """Packs a digest of eight bytes, and the text for the error if they differ."""
    text = str(call).encode(errors="replace")
    # Its beginning says what is called, and its end the source line or a door's
    # address.
    if len(text) > _HEADER_SIZE - 8:
        half = (_HEADER_SIZE - 8) // 2 - 2
        text = text[:half] + b" .. " + text[-half:]
    return torch.frombuffer(
        bytearray((digest + text).ljust(_HEADER_SIZE, b"\0")), dtype=torch.uint8
    )


# A step sends the same headers each time: they are packed once.
@functools.lru_cache(maxsize=1 << 12)
def _header(
    signature: Signature, label: tuple[str, str], line: str, digest: bytes
) -> Tensor:
    return pack_header(CollectiveCall(signature, *label, line), digest)


def header_text(header: Tensor) -> str:
    """Returns the text of a header; "" before it has come."""
    return bytes(header.tolist())[8:].rstrip(b"\0").decode(errors="replace")


def _compare(headers: Mapping[int, Tensor], title: str) -> None:
    """Raises unless the headers, by rank, are of one collective."""
    # Of a text its first line: an address may follow, as `_compare_meshes` adds one.
    if len({bytes(header[:8].tolist()) for header in headers.values()}) > 1:
        lines = {r: header_text(x).partition("\n")[0] for r, x in headers.items()}
        raise CollectiveMismatch(table(title, dict(sorted(lines.items()))))


def compare_gathered(
    header: Tensor,
    process_group: dist.ProcessGroup | None,
    ranks: Sequence[int],
    title: str = _TITLE,
) -> dict[int, str]:
    """Compares headers by a gather, where there are no tags; returns their texts."""
    gathered = header.new_empty(len(ranks) * _HEADER_SIZE)
    all_gather_single(gathered, header, group=process_group)
    headers = gathered.cpu().view(-1, _HEADER_SIZE).unbind()
    by_rank = dict(zip(ranks, headers, strict=True))
    _compare(by_rank, title)
    return {rank: header_text(x) for rank, x in by_rank.items()}


class Headers:
    """The headers of one collective, or one transfer, on their way.

    Args:
        others: the indices along ``group`` of the ranks in it, without this one.
        directions: of a transfer, what stands in the tags of the header that is sent
            and of the one that is received, so that crossing ones are not matched.
    """

    def __init__(
        self,
        record: FlightRecord,
        group: GroupOfRanks,
        digest: bytes,
        others: list[int],
        channel: Channel,
        directions: tuple[int, int] = (0, 0),
    ):
        self.record = record
        record.line = source_line()
        local_header = _header(record.signature, record.label, record.line, digest)
        self.by_rank: dict[int, Tensor] = {group.rank: local_header}
        # Without the digest: headers of different collectives are to be matched.
        tag_sent, tag_received = (
            tag(HEADER, record.number, bytes([direction, 0]))
            for direction in directions
        )
        self.works: list[Work] = []
        for r in others:
            header = self.by_rank[group.ranks[r]] = torch.zeros_like(local_header)
            self.works.append(channel.receive(header, group.ranks[r], tag_received))
        for r in others:
            self.works.append(channel.send(local_header, group.ranks[r], tag_sent))

    def texts_so_far(self) -> dict[int, str]:
        """Returns the texts of the headers that have come, by rank."""
        texts = {rank: header_text(x) for rank, x in self.by_rank.items()}
        return {rank: text for rank, text in texts.items() if text}

    def check(self) -> None:
        """Waits for the headers of the others, and compares them.

        Raises:
            CollectiveMismatch: on every rank, what each of them called.
        """
        settle(self.works, self.record, self.texts_so_far)
        self.works = []
        _compare(self.by_rank, f"{_TITLE}, #{self.record.number} of theirs")


class Exchange(Handle):
    """Messages under way, and a function to call when they are over.

    Args:
        finish: makes the result, after the wait.
        alive: a tensor whose memory must not be freed until then.
        record: its record for error reports.
        group: the group of its ranks.
        headers: the headers of its ranks, if they are compared.
    """

    result: Tensor | None = None
    works: Sequence[Work] = ()

    def __init__(
        self,
        works: Sequence[Work],
        finish: Callable[[], Tensor],
        alive: Tensor,
        record: FlightRecord,
        group: GroupOfRanks,
        headers: Headers | None = None,
    ):
        self.link: Any = group.link  # a `ProcessLink`
        self.works, self.finish, self.alive = works, finish, alive
        self.record, self.headers = record, headers

    def wait(self) -> Tensor:
        if self.result is None:
            try:
                if self.headers is not None:
                    self.headers.check()
                settle(self.works, self.record)
                self.result = self.finish()
            # Also an interrupt: messages are still under way, and another rank may have
            # its result.
            except BaseException as error:
                self.link.close(self.record.call, error)
                raise
            self.record.ended = time.monotonic()
            # A caller may store this handle for long: the buffers go now.
            del self.works, self.finish, self.alive
        return self.result

    def done(self) -> bool:
        return self.result is not None or all(w.is_completed() for _, w in self.works)

    def __del__(self) -> None:
        # Dropped before its wait, by an error or a caller. Gloo still reads and writes
        # its memory, and would block all that follows: its link waits for it.
        if self.result is None and self.works:
            self.link.dropped.append(self)


def settle(
    works: Sequence[Work],
    record: FlightRecord,
    headers_so_far: Callable[[], Mapping[int, str]] = dict,
) -> None:
    """Waits for messages.

    Args:
        record: of the collective that they are of.
        headers_so_far: returns the texts of the headers that have come, by rank.

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
        of_message = isinstance(error, Disconnected)
        # gloo raises from C++, so no frame of Python is below this one. If one is, the
        # error is of a signal's handler: torch's data loader has one that raises.
        if not of_message and trace is not None and trace.tb_next is not None:
            raise
        texts = headers_so_far()
        raise the_watchdog().failed(record, other, error, texts) from error
