"""What ranks have, compared, and the error of one of them raised on all.

`agree` is for all that must be equal: programs, values, options, batches. Each rank
describes it in lines, each a key and a text. Processes gather a digest of 16 bytes of
each section of lines, and the texts only if digests differ. Simulated ranks compare
with the first of them that came, through the notes of their link, and wait for nobody.

`everywhere` is for what may fail on one rank: the others raise too, before they send
what that rank would never receive.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch

from fsfunc.comm.attribution import label
from fsfunc.comm.groups import RankGroup, gather_stacked
from fsfunc.comm.ledgers import silence

Lines = Sequence[tuple[str, str]]
_T = TypeVar("_T")

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


Compared = Section | bytes  # bytes: 16 of them, which are told and may differ


def digest_of(lines: Sequence[tuple[str, object]]) -> bytes:
    """Sixteen bytes for lines, the same ones in every process."""
    text = "\0".join(f"{key}\0{text}" for key, text in lines)
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=16).digest()


def agree(
    group: RankGroup, *compared: Compared, waits: bool = False
) -> Sequence[Sequence[bytes]]:
    """Raises unless all ranks of a group have the same lines in every section.

    Args:
        compared: sections; and bytes, such as digests of what may differ.
        waits: whether simulated ranks wait for one another, as processes do: then all
            of them raise, and all are told the digests.

    Returns:
        the digests of each of ``compared``, by index along the group. Of simulated
        ranks that do not wait the last one has them, and the others have nothing.

    Raises:
        RanksDiffer: on every rank: the lines that differ first, and their ranks.

    Cost: one gather of 16 bytes a section, which is in no ledger; where they differ,
    two more, of the texts. Simulated ranks that do not wait send nothing.
    """
    if group.size == 1:
        return [[_digest(x)] for x in compared]
    if group.link.notes is not None and not waits:
        came = _came(compared, group)
        first, theirs = next(iter(came.items()))
        for mine, other in zip(compared, theirs, strict=True):
            if isinstance(mine, Section) and isinstance(other, Section):
                if list(mine.lines) != list(other.lines):
                    by_rank = {first: other.lines, group.rank: mine.lines}
                    raise _difference(mine, by_rank)
        each = [came[rank] for rank in group.ranks] if len(came) == group.size else []
        return [[_digest(x) for x in column] for column in zip(*each, strict=True)]
    with _aside():
        rows = _gathered(b"".join(map(_digest, compared)), group)
        starts = range(0, len(rows[0]), 16)
        columns = [[row[i : i + 16] for row in rows] for i in starts]
        for section, digests in zip(compared, columns, strict=True):
            if isinstance(section, Section) and len(set(digests)) > 1:
                raise _difference(section, _lines(section.lines, group))
    return columns


def _digest(x: Compared) -> bytes:
    return digest_of(x.lines) if isinstance(x, Section) else x


def unlike(lines: Lines, group: RankGroup) -> Mapping[int, Lines]:
    """Every rank's lines, by rank, if they differ; else nothing.

    Cost: that of :func:`agree`.
    """
    (digests,) = agree(group, digest_of(lines), waits=True)
    if len(set(digests)) == 1:
        return {}
    with _aside():
        return _lines(lines, group)


def everywhere(
    action: Callable[[], _T],
    group: RankGroup | None,
    otherwise: type[Exception] = RuntimeError,
) -> _T:
    """``action()``, or on every rank the error of any; also waits for all ranks.

    Args:
        where: the ranks that do it; None: this one alone.
        otherwise: what the others raise where the error is none of Python's own.
    """
    result = error = None
    try:
        result = action()
    except Exception as failure:
        error = failure
    raise_everywhere(error, group, otherwise)
    return cast("_T", result)


def raise_everywhere(
    error: BaseException | None,
    group: RankGroup | None,
    otherwise: type[Exception] = RuntimeError,
) -> None:
    """Raises on every rank if any rank has an ``error``; also waits for all ranks.

    Raises:
        the rank's own error where it has one; else one like the first rank's.

    Cost: one gather of eight bytes; where there is an error, one of its text.
    """
    if group is not None and group.size > 1:
        text = "" if error is None else f"{type(error).__name__}: {error}"[:_LONGEST]
        with torch.no_grad():
            texts = _texts(text, group)
        if error is None and any(texts):
            index = next(i for i, text in enumerate(texts) if text)
            name, _, text = texts[index].partition(": ")
            kind = _PLAIN.get(name, otherwise)
            raise kind(f"rank {group.ranks[index]} could not go on: {text}")
    if error is not None:
        raise error


_LONGEST = 2048  # characters of an error that travels
_PLAIN: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        *(FileExistsError, FileNotFoundError, PermissionError, OSError),
        *(KeyError, TypeError, ValueError, RuntimeError),
    )
}


@contextmanager
def _aside() -> Iterator[None]:
    with silence(), label("", "what ranks are about to do"), torch.no_grad():
        yield


def _came(
    compared: Sequence[Compared], group: RankGroup
) -> Mapping[int, Sequence[Compared]]:
    """What simulated ranks compare that have come to it, in the order of coming."""
    notes: dict[Any, Any] = group.link.notes
    of = group.ranks, tuple(map(type, compared))
    number = notes["comparisons", *of, group.rank] = (
        notes.get(("comparisons", *of, group.rank), 0) + 1
    )
    came = notes.setdefault(key := ("compared", *of, number), {})
    came[group.rank] = compared
    if len(came) == group.size:
        del notes[key]
    return came


def _gathered(mine: bytes, group: RankGroup) -> list[bytes]:
    """The bytes of each rank of the group, all of one length."""
    x = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    return [bytes(row.tolist()) for row in gather_stacked(x, group)]


def _texts(mine: str, group: RankGroup) -> list[str]:
    """The text of each rank; where all are empty one gather of eight bytes tells."""
    data = mine.encode(errors="replace")
    rows = _gathered(len(data).to_bytes(8, "little"), group)
    sizes = [int.from_bytes(row, "little") for row in rows]
    if not any(sizes):
        return [""] * group.size
    rows = _gathered(data.ljust(max(sizes), b"\0"), group)
    return [row[:n].decode() for row, n in zip(rows, sizes, strict=True)]


def _lines(mine: Lines, group: RankGroup) -> Mapping[int, Lines]:
    """Every rank's lines, by rank."""
    texts = _texts("\0".join(part for line in mine for part in line), group)
    found: dict[int, Lines] = {}
    for rank, text in zip(group.ranks, texts, strict=True):
        parts = text.split("\0") if text else []  # of no lines there is no text
        found[rank] = list(zip(parts[::2], parts[1::2], strict=True))
    return found


def _difference(section: Section, by_rank: Mapping[int, Lines]) -> RanksDiffer:
    """The error that names the lines of a section that differ, by rank."""
    each = {rank: dict(lines) for rank, lines in sorted(by_rank.items())}
    keys = list(dict.fromkeys(key for lines in each.values() for key in lines))
    rows = []
    for key in keys:
        texts: dict[str, list[int]] = {}
        for rank, lines in each.items():
            texts.setdefault(lines.get(key, "nothing"), []).append(rank)
        if len(texts) > 1:
            rows.append(f"  {key}: " + "; ".join(_who(r, t) for t, r in texts.items()))
    more = [f"  and {len(rows) - _SHOWN} more"] if len(rows) > _SHOWN else []
    if not rows:
        rows = ["  the lines are the same, in another order"]
    advice = [section.advice] if section.advice else []
    return RanksDiffer("\n".join([f"{section.title}:", *rows[:_SHOWN], *more, *advice]))


def _who(ranks: Sequence[int], text: str) -> str:
    some = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {some}: {text[:240]}"
