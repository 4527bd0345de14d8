"""What is under way between processes: its tags, its header, and the wait for it.

A tag is by what gloo matches a send and a receive. It has 31 bits: 2 say what is sent,
12 number it, 16 say of what kind the collective is and 1 which hop of it. So unlike
collectives never meet: their ranks wait until the group's timeout, where gloo would
else pair the bytes of one with the memory of the other, or end the process where the
sizes differ.

A header is what ranks say to each other of a collective or a transfer, beside its data.
It has one size, whatever it speaks of, and tags of its own; so ranks that came to
unlike collectives still understand each other, and each of them raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsfunc.comm.attribution import current_label
from fsfunc.comm.backends.link import (
    CollectiveCall,
    CollectiveMismatch,
    Handle,
    Signature,
    table,
)

__all__ = ["ALL_GATHER", "ANSWER", "DATA", "TRANSFER", "Exchange", "Headers"]
__all__ += ["compare_gathered", "packed", "settle", "tag"]

# torch 2.13 renamed it; 2.11 only knows the old name.
ALL_GATHER: Any = getattr(dist, "all_gather_single", None)
ALL_GATHER = ALL_GATHER or dist.all_gather_into_tensor

DATA, HEADER, TRANSFER, ANSWER = range(4)
_NUMBERS = 2**12  # more than can be in flight at once; what is later comes later
_SIZE = 512  # bytes of a header: a digest of eight, and a text
_TITLE = "ranks call different collectives"
_LEFT: list[Any] = []  # what a mismatch left under way


def tag(kind: int, number: int, digest: bytes = b"\0\0", hop: int = 0) -> int:
    """The tag of the ``number``-th collective, or transfer, of a group."""
    said = int.from_bytes(digest[:2], "little")
    return ((kind * _NUMBERS + number % _NUMBERS) << 17) + (said << 1) + hop


def packed(call: Any, said: bytes) -> Tensor:
    """A header: eight bytes that are to be alike, and what to say if they are not."""
    text = str(call).encode(errors="replace")
    if len(text) > _SIZE - 8:
        half = (_SIZE - 8) // 2 - 2
        text = text[:half] + b" .. " + text[-half:]
    return torch.frombuffer(
        bytearray((said + text).ljust(_SIZE, b"\0")), dtype=torch.uint8
    )


def _compare(rows: Mapping[int, Tensor], title: str) -> None:
    """Raises unless the headers, by rank, are of one collective."""
    found = {rank: bytes(row.tolist()) for rank, row in sorted(rows.items())}
    if len({header[:8] for header in found.values()}) > 1:
        said = {
            r: h[8:].rstrip(b"\0").decode(errors="replace") for r, h in found.items()
        }
        raise CollectiveMismatch(table(title, said))


def compare_gathered(
    mine: Tensor, group: Any, ranks: Sequence[int], title: str = _TITLE
) -> None:
    """Compares headers that are gathered, where there are no tags: waits for them."""
    every = mine.new_empty(len(ranks) * _SIZE)
    ALL_GATHER(every, mine, group=group)
    rows = every.cpu().view(-1, _SIZE).unbind()
    _compare(dict(zip(ranks, rows, strict=True)), title)


class Headers:
    """The headers of one collective, or one transfer, on their way.

    Args:
        others: by index along ``where``, those who are in it beside this rank.
        ways: the tags' last part, of what is sent and of what is received.
    """

    def __init__(
        self,
        said: Signature,
        digest: bytes,
        where: Any,
        others: list[int],
        group: Any,
        number: int,
        ways: tuple[int, int] = (0, 0),
    ):
        mine = packed(CollectiveCall.now(said), digest)
        self.rows = {where.rank: mine}
        out, back = (tag(HEADER, number, bytes([way, 0])) for way in ways)
        self.works: list[Any] = []
        for r in others:
            row = self.rows[where.ranks[r]] = torch.empty_like(mine)
            self.works.append(dist.irecv(row, where.ranks[r], group, back))
        for r in others:
            self.works.append(dist.isend(mine, where.ranks[r], group, out))

    def check(self, exchange: Exchange) -> None:
        """Waits for what the others say of ``exchange``.

        Raises:
            CollectiveMismatch: on every rank, what each of them called.
        """
        settle(self.works, exchange.said, exchange.label, exchange.where)
        self.works = []
        try:
            _compare(self.rows, _TITLE)
        except CollectiveMismatch:
            _LEFT.append(
                exchange
            )  # nobody waits for it, and gloo may write there still
            raise


class Exchange(Handle):
    """Works of torch.distributed, then a local finish.

    Args:
        held: what must live until then.
        said: what it is, for who has to be told.
        headers: those of its ranks, where they are compared.
    """

    def __init__(
        self,
        works: Sequence[Any],
        finish: Callable[[], Tensor],
        held: Any,
        said: Signature,
        where: Any,
        headers: Headers | None = None,
    ):
        self.works, self.finish, self.held = list(works), finish, held
        self.said, self.where, self.headers = said, where, headers
        self.label = current_label()
        self.result: Tensor | None = None

    def wait(self) -> Tensor:
        if self.result is None:
            if self.headers is not None:
                self.headers.check(self)
            settle(self.works, self.said, self.label, self.where)
            self.result = self.finish()
            del self.works, self.finish, self.held  # and the buffers with them
        return self.result

    def done(self) -> bool:
        return self.result is not None or all(w.is_completed() for w in self.works)


def settle(
    works: Sequence[Any], said: Signature, label: tuple[str, str], where: Any
) -> None:
    """Waits for works of torch.distributed.

    Args:
        said, label: whose works they are.

    Raises:
        RuntimeError: another rank stopped, or ended; names the collective.
    """
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        raise RuntimeError(
            f"{CollectiveCall(said, *label)}: rank {where.rank} waits in vain for "
            f"others of ranks {list(where.ranks)}. One of them stopped, ended, or came "
            f"to something else, which FSFUNC_CHECK=1 would tell ({error})"
        ) from error
