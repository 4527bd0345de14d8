"""Comparison of the programs and values of ranks, by descriptions of them.

A description is a list of lines, each a key and a text. Processes gather a digest of 16
bytes of each section of lines, and the texts only if digests differ. Simulated ranks
compare with the first of them that came, through the notes of their link.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.attribution import label
from fsfunc.comm.groups import RankGroup
from fsfunc.comm.ledgers import silence
from fsfunc.sharded.layout import describe

Lines = Sequence[tuple[str, str]]

_SHOWN = 6  # lines of a message


class RanksDiffer(ValueError):
    """Ranks that must do the same were given different values, or call other ones."""


@dataclass(frozen=True)
class Section:
    """Lines to compare, with the error if they differ.

    Args:
        title: the first line of the error.
        advice: its last line: the way out.
    """

    title: str
    lines: Lines
    advice: str = ""

    @property
    def digest(self) -> bytes:
        text = "\0".join(f"{key}\0{said}" for key, said in self.lines)
        return hashlib.blake2b(text.encode(errors="replace"), digest_size=16).digest()


def compare(sections: Sequence[Section], where: RankGroup) -> None:
    """Raises unless all ranks of a group have the same lines.

    Raises:
        RanksDiffer: on every rank: the lines that differ first, and their ranks.

    Cost: over processes one gather of 16 bytes a section; it is in no ledger.
    """
    if where.size == 1:
        return
    if where.link.notes is not None:
        _with_the_first(sections, where)
        return
    with _aside():
        mine = b"".join(section.digest for section in sections)
        every = _gathered(mine, where)
        for i, section in enumerate(sections):
            if len({row[16 * i : 16 * i + 16] for row in every}) > 1:
                raise difference(section, where)


def difference(section: Section, where: RankGroup) -> RanksDiffer:
    """The error of ranks whose lines differ; all ranks of the group must call it."""
    with silence(), torch.no_grad():
        return RanksDiffer(_difference(section, _texts(section.lines, where)))


def unlike(lines: Lines, where: RankGroup) -> dict[int, Lines]:
    """Every rank's lines, by rank, if they differ; else nothing.

    Cost: that of :func:`compare`.
    """
    if where.size == 1:
        return {}
    with _aside():
        every = _gathered(Section("", lines).digest, where)
        return _texts(lines, where) if len(set(every)) > 1 else {}


def digests(section: Section, where: RankGroup) -> list[bytes] | None:
    """The digest of each rank's section; of simulated ranks, for the last that comes.

    Cost: over processes one gather of 16 bytes; it is in no ledger.
    """
    if (notes := where.link.notes) is None:
        with _aside():
            return _gathered(section.digest, where)
    number = notes["told", where.ranks, where.rank] = (
        notes.get(("told", where.ranks, where.rank), 0) + 1
    )
    found = notes.setdefault(key := ("digests", where.ranks, number), {})
    found[where.rank] = section.digest
    if len(found) < where.size:
        return None
    del notes[key]
    return [found[rank] for rank in where.ranks]


@contextmanager
def _aside() -> Iterator[None]:
    with silence(), label("", "what ranks are about to do"), torch.no_grad():
        yield


def _with_the_first(sections: Sequence[Section], where: RankGroup) -> None:
    """Compares a rank with the first of its process that came."""
    notes, rank, n = where.link.notes, where.rank, where.size
    number = notes["compared", where.ranks, rank] = (
        notes.get(("compared", where.ranks, rank), 0) + 1
    )
    key = ("said", where.ranks, number)
    first, theirs, count = notes.setdefault(key, (rank, list(sections), 0))
    notes[key] = first, theirs, count + 1
    if count + 1 == n:
        del notes[key]
    for section, other in zip(sections, theirs, strict=True):
        if list(section.lines) != list(other.lines):
            both = {first: other.lines, rank: section.lines}
            raise RanksDiffer(_difference(section, both))


def _gathered(mine: bytes, where: RankGroup) -> list[bytes]:
    """The bytes of each rank of the group, all of one length."""
    x = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(where.link.device)
    every = where.start("all_gather", x).wait().cpu()
    return [bytes(row.tolist()) for row in every.view(where.size, len(mine))]


def _texts(lines: Lines, where: RankGroup) -> dict[int, Lines]:
    """Every rank's lines."""
    text = "\0".join(part for line in lines for part in line)
    mine = text.encode(errors="replace")
    sizes = _gathered(len(mine).to_bytes(8, "little"), where)
    longest = max(int.from_bytes(size, "little") for size in sizes)
    found = {}
    rows = _gathered(mine.ljust(longest, b"\0") or b"\0", where)
    for rank, row, size in zip(where.ranks, rows, sizes, strict=True):
        said = row[: int.from_bytes(size, "little")].decode()
        parts = said.split("\0") if said else []  # of no lines there is no text
        found[rank] = list(zip(parts[::2], parts[1::2], strict=True))
    return found


def _difference(section: Section, by_rank: Mapping[int, Lines]) -> str:
    """The error message: the lines of a section that differ, by rank."""
    each = {rank: dict(lines) for rank, lines in sorted(by_rank.items())}
    keys = list(dict.fromkeys(key for said in each.values() for key in said))
    rows = []
    for key in keys:
        texts: dict[str, list[int]] = {}
        for rank, said in each.items():
            texts.setdefault(said.get(key, "nothing"), []).append(rank)
        if len(texts) > 1:
            rows.append(f"  {key}: " + "; ".join(_who(r, t) for t, r in texts.items()))
    more = [f"  and {len(rows) - _SHOWN} more"] if len(rows) > _SHOWN else []
    if not rows:
        rows = ["  the lines are the same, in another order"]
    advice = [section.advice] if section.advice else []
    return "\n".join([f"{section.title}:", *rows[:_SHOWN], *more, *advice])


def _who(ranks: Sequence[int], text: str) -> str:
    some = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {some}: {text[:240]}"


# Values

ALIKE = (
    "Make them equal: give every rank the same seed before they are made "
    "(torch.manual_seed), load one file, or send one rank's: ff.pbroadcast(params, "
    "axis, source=0)"
)


def whole_values(
    paths: Sequence[str], leaves: Sequence[Any], notes: dict[Any, Any] | None
) -> Section:
    """The section of values that must be equal on every rank.

    Args:
        notes: the link's notes of ranks that share a process, to cache checksums in.
    """
    found = [
        (repr(path), repr(leaf))
        for path, leaf in zip(paths, leaves, strict=True)
        if isinstance(leaf, bool | int | float | complex | str | bytes)
    ]
    tensors = {p: x for p, x in zip(paths, leaves, strict=True) if has_values(x)}
    known = None if notes is None else notes.setdefault("checksums", {})
    sums = checksums(list(tensors.values()), known)
    for (path, x), n in zip(tensors.items(), sums, strict=True):
        said = f"{describe(x.shape, x.dtype)} of checksum {n % 2**64:016x}"
        found.append((repr(path), said))
    return Section("whole parameters differ between ranks", found, ALIKE)


def has_values(x: Any) -> bool:
    """True if ``x`` is a tensor with data, dense and not on meta."""
    if not isinstance(x, Tensor) or isinstance(x, _torch.FakeTensor):
        return False
    return x.layout == torch.strided and x.device.type != "meta"


_ROW, _ROWS = 2048, 64  # words in a row; rows that fit a core's cache
_FAR_ROWS = 4096  # rows for which a GPU takes longer than Python for three launches
_weights: dict[torch.device, Tensor] = {}


def checksums(
    tensors: Sequence[Tensor], known: dict[int, Any] | None = None
) -> list[int]:
    """A checksum of each tensor's bits.

    Args:
        known: a cache for tensors that ranks of one process share.

    Cost: each tensor is read once, at some 3 GB/s a thread; one number a tensor is
    copied from the device.

    >>> one, other = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
    >>> a, b, c = checksums([one, other, one.clone()])
    >>> a == c, a == b
    (True, False)
    """
    known = {} if known is None else known
    with torch.no_grad(), torch.inference_mode(False):
        folded = _Folded()
        return [_known(x, known, folded) for x in tensors]


def _known(x: Tensor, known: dict[int, Any], folded: _Folded) -> int:
    version = None if x.is_inference() else x._version
    seen, then, found = known.get(id(x), (None, None, 0))
    if seen is None or seen() is not x or version is None or version != then:
        with _torch.beneath_all_modes():  # unseen by modes that record the step
            found = int(folded(_words(x)).item())
        known[id(x)] = weakref.ref(x), version, found
    return found


def _words(x: Tensor) -> Tensor:
    """The bytes of a tensor as 32-bit integers, zeros after the last."""
    x = x.detach().resolve_conj().resolve_neg().contiguous()
    data = x.as_strided((x.numel(),), (1,)).view(torch.uint8)  # of one, any stride
    if data.storage_offset() % 4 or data.numel() % 4:
        padded = data.new_zeros(-(-data.numel() // 4) * 4)
        padded[: data.numel()] = data
        data = padded
    return data.view(torch.int32)


class _Folded:
    """A weighted sum of words modulo 2^64: of rows, and then of the rows' sums.

    Weights are odd and of 62 bits, and words have 32: so two words that change in their
    highest bit, a sign, do not cancel.
    """

    def __init__(self) -> None:
        self.rooms: dict[torch.device, Tensor] = {}  # fresh memory costs page faults

    def __call__(self, words: Tensor) -> Tensor:
        weights = _weights_on(words.device)
        while words.numel() > _ROW:
            whole = words.numel() // _ROW * _ROW
            many = _ROWS if _on_host(words) else _FAR_ROWS
            rows = words[:whole].view(-1, _ROW).split(many)
            sums = torch.cat([self._summed(some, weights) for some in rows])
            words = torch.cat([sums.view(torch.int32), words[whole:]])
        return (words * weights[: words.numel()]).sum()

    def _summed(self, rows: Tensor, weights: Tensor) -> Tensor:
        room = self.rooms.get(rows.device)
        if room is None or len(room) < len(rows):
            room = weights.new_empty(max(_ROWS, len(rows)), _ROW)
            self.rooms[rows.device] = room
        wide = room[: len(rows)].copy_(rows)
        # Widened first: in half the time of a product of unlike kinds.
        if _on_host(wide):
            return torch.mv(wide, weights)
        return wide.mul_(weights).sum(1)  # CUDA multiplies no matrices of integers


def _on_host(x: Tensor) -> bool:
    return x.is_cpu


def _weights_on(device: torch.device) -> Tensor:
    if device not in _weights:
        draw = torch.Generator().manual_seed(0)
        wide = torch.randint(2**62, (_ROW,), generator=draw, device="cpu") * 2 + 1
        _weights[device] = wide.to(device)
    return _weights[device]
