"""What ranks say to each other of a collective or a transfer, beside its data.

A header has one size, whatever it speaks of, and tags of its own; so ranks that came
to unlike collectives still understand each other, and each of them raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsfunc.backends.calls import Call, CollectiveMismatch, table
from fsfunc.backends.native import ALL_GATHER
from fsfunc.backends.tags import HEADER, tag

__all__ = ["Headers", "compare", "gathered", "packed", "settle"]

_LEFT: list[Any] = []  # what a mismatch left under way
_SIZE = 512  # bytes: a digest of eight, and a text


def packed(call: Any, said: bytes) -> Tensor:
    """A header: eight bytes that are to be alike, and what to say if they are not."""
    text = str(call).encode(errors="replace")
    if len(text) > _SIZE - 8:
        half = (_SIZE - 8) // 2 - 2
        text = text[:half] + b" .. " + text[-half:]
    return torch.frombuffer(
        bytearray((said + text).ljust(_SIZE, b"\0")), dtype=torch.uint8
    )


def compare(rows: Mapping[int, Tensor], title: str) -> None:
    """Raises unless the headers, by rank, are of one collective."""
    found = {rank: bytes(row.tolist()) for rank, row in sorted(rows.items())}
    if len({header[:8] for header in found.values()}) > 1:
        said = {
            r: h[8:].rstrip(b"\0").decode(errors="replace") for r, h in found.items()
        }
        raise CollectiveMismatch(table(title, said))


class Headers:
    """The headers of one collective, or one transfer, on their way.

    Args:
        others: by index along ``where``, those who are in it beside this rank.
        ways: the tags' last part, of what is sent and of what is received.
    """

    def __init__(
        self,
        call: Call,
        said: bytes,
        where: Any,
        others: list[int],
        group: Any,
        number: int,
        ways: tuple[int, int] = (0, 0),
    ):
        self.where, self.call = where, call
        self.mine = packed(call, said)
        self.rows = {where.rank: self.mine}
        out, back = (tag(HEADER, number, bytes([way, 0])) for way in ways)
        self.works: list[Any] = []
        for r in others:
            row = self.rows[where.ranks[r]] = torch.empty_like(self.mine)
            self.works.append(dist.irecv(row, where.ranks[r], group, back))
        for r in others:
            self.works.append(dist.isend(self.mine, where.ranks[r], group, out))

    def check(self, held: Any) -> None:
        """Waits for what the others say.

        Args:
            held: the works and tensors that this is about: they are kept for good
                where nobody waits for them any more, as gloo may write there still.

        Raises:
            CollectiveMismatch: on every rank, what each of them called.
        """
        settle(self.works, lambda: self.call, self.where)
        self.works = []
        try:
            compare(self.rows, _TITLE)
        except CollectiveMismatch:
            _LEFT.append(held)
            raise


_TITLE = "ranks call different collectives"


def gathered(mine: Tensor, group: Any, ranks: Sequence[int], title: str = "") -> None:
    """Compares headers that are gathered, where there are no tags: waits for them."""
    every = mine.new_empty(len(ranks) * _SIZE)
    ALL_GATHER(every, mine, group=group)
    rows = every.cpu().view(-1, _SIZE).unbind()
    compare(dict(zip(ranks, rows, strict=True)), title or _TITLE)


def settle(works: list[Any], call: Callable[[], Any], where: Any) -> None:
    """Waits for works of torch.distributed.

    Raises:
        RuntimeError: another rank stopped, or ended; names the collective.
    """
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        raise RuntimeError(
            f"{call()}: rank {where.rank} waits in vain for others of ranks "
            f"{list(where.ranks)}. One of them stopped, ended, or came to something "
            f"else, which FSFUNC_CHECK=1 would tell ({error})"
        ) from error
