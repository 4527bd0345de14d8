"""Comparisons of what ranks have; and one rank's error, raised on all.

`agree` is for all that must be equal: programs, values, options, batches. Each rank
describes it in lines, each a key and a text. Processes gather a digest of 16 bytes of
each section of lines, and the texts only if digests differ. A simulated rank compares
with the first rank that called, through the notes that their links share, and waits
for nobody.

`run_everywhere` is for what may fail on one rank: the others raise too, before they
send what that rank would never receive.
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

_MOST_LINES = 6  # of an error


class RanksDiffer(ValueError):
    """Ranks that must do the same have different programs or values."""


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


Compared = Section | bytes  # bytes: a digest of 16, which is returned and may differ


def digest_of(lines: Sequence[tuple[str, object]]) -> bytes:
    """Returns sixteen bytes for lines, the same ones in every process."""
    text = "\0".join(f"{key}\0{text}" for key, text in lines)
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=16).digest()


def agree(
    group: RankGroup, *compared: Compared, waits: bool = False
) -> Sequence[Sequence[bytes]]:
    """Raises unless all ranks of a group have the same lines in every section.

    Args:
        compared: sections; and bytes, such as digests of what may differ.
        waits: whether simulated ranks wait for one another, as processes do: then all
            of them raise, and all get the digests.

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
        arrived = _note_arrival(compared, group)
        first, theirs = next(iter(arrived.items()))
        # Compared as they are, not by digests: ranks of one process read each other's
        # lines. Bytes may differ, and are returned.
        for local, other in zip(compared, theirs, strict=True):
            if isinstance(local, Section) and isinstance(other, Section):
                if list(local.lines) != list(other.lines):
                    by_rank = {first: other.lines, group.rank: local.lines}
                    raise _difference(local, by_rank)
        everyone = len(arrived) == group.size
        by_index = [arrived[rank] for rank in group.ranks] if everyone else []
        return [[_digest(x) for x in column] for column in zip(*by_index, strict=True)]
    with unrecorded():
        rows = gather_bytes(b"".join(map(_digest, compared)), group)
        starts = range(0, len(rows[0]), 16)
        columns = [[row[i : i + 16] for row in rows] for i in starts]
        # Every rank has the same digests here: so all of them gather lines, or none.
        for section, digests in zip(compared, columns, strict=True):
            if isinstance(section, Section) and len(set(digests)) > 1:
                raise _difference(section, _gather_lines(section.lines, group))
    return columns


def _digest(x: Compared) -> bytes:
    return digest_of(x.lines) if isinstance(x, Section) else x


def differing_lines(lines: Lines, group: RankGroup) -> Mapping[int, Lines]:
    """Returns every rank's lines, by rank, if they differ; else nothing.

    Cost: that of :func:`agree`.
    """
    (digests,) = agree(group, digest_of(lines), waits=True)
    if len(set(digests)) == 1:
        return {}
    with unrecorded():
        return _gather_lines(lines, group)


def run_everywhere(
    action: Callable[[], _T],
    group: RankGroup | None,
    otherwise: type[Exception] = RuntimeError,
) -> _T:
    """Runs ``action`` on each rank; an error of any is raised on all of them.

    So it also waits for all ranks.

    Args:
        group: the ranks that do it; None: this one alone.
        otherwise: the class that the other ranks raise if the error's own is not one of
            Python's (an arbitrary class may not be made of a text).
    """
    result = error = None
    try:
        result = action()
    except Exception as failure:  # an interrupt leaves at once, and waits for nobody
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
            texts = _gather_texts(text, group)
        if error is None and any(texts):
            index = next(i for i, text in enumerate(texts) if text)
            name, _, text = texts[index].partition(": ")
            # A class of Python's can be made of a text; another one perhaps not.
            error_class = _PYTHONS.get(name, otherwise)
            raise error_class(f"rank {group.ranks[index]} could not go on: {text}")
    if error is not None:
        raise error


_LONGEST = 2048  # characters of an error that is sent
_PYTHONS: dict[str, type[Exception]] = {
    error_class.__name__: error_class
    for error_class in (
        *(FileExistsError, FileNotFoundError, PermissionError, OSError),
        *(KeyError, TypeError, ValueError, RuntimeError),
    )
}


@contextmanager
def unrecorded() -> Iterator[None]:
    """Inside, collectives are in no ledger: they are no part of a step's cost."""
    with silence(), label("", "what ranks are about to do"), torch.no_grad():
        yield


def _note_arrival(
    compared: Sequence[Compared], group: RankGroup
) -> Mapping[int, Sequence[Compared]]:
    """Notes this simulated rank's part; returns those that arrived, in their order.

    The n-th comparison of a rank with the same ranks and kinds belongs to the n-th of
    each other one.
    """
    notes = cast("dict[Any, Any]", group.link.notes)
    kind = group.ranks, tuple(map(type, compared))
    number = notes["comparisons", *kind, group.rank] = (
        notes.get(("comparisons", *kind, group.rank), 0) + 1
    )
    arrived = notes.setdefault(key := ("compared", *kind, number), {})
    arrived[group.rank] = compared
    if len(arrived) == group.size:
        del notes[key]
    return arrived


def gather_bytes(row: bytes, group: RankGroup) -> list[bytes]:
    """Gathers the bytes of each rank of the group, all of one length."""
    x = torch.frombuffer(bytearray(row), dtype=torch.uint8)
    return [bytes(row.tolist()) for row in gather_stacked(x, group)]


def _gather_texts(text: str, group: RankGroup) -> list[str]:
    """Gathers the ranks' texts: first their sizes, and no more if all are empty."""
    data = text.encode(errors="replace")
    rows = gather_bytes(len(data).to_bytes(8, "little"), group)
    sizes = [int.from_bytes(row, "little") for row in rows]
    if not any(sizes):
        return [""] * group.size
    rows = gather_bytes(data.ljust(max(sizes), b"\0"), group)
    return [row[:n].decode() for row, n in zip(rows, sizes, strict=True)]


def _gather_lines(lines: Lines, group: RankGroup) -> Mapping[int, Lines]:
    """Gathers every rank's lines, by rank."""
    texts = _gather_texts("\0".join(part for line in lines for part in line), group)
    by_rank: dict[int, Lines] = {}
    for rank, text in zip(group.ranks, texts, strict=True):
        parts = text.split("\0") if text else []  # of no lines there is no text
        by_rank[rank] = list(zip(parts[::2], parts[1::2], strict=True))
    return by_rank


def _difference(section: Section, by_rank: Mapping[int, Lines]) -> RanksDiffer:
    """Makes the error that names the lines of a section that differ, by rank."""
    texts_by_rank = {rank: dict(lines) for rank, lines in sorted(by_rank.items())}
    keys = list(dict.fromkeys(key for lines in texts_by_rank.values() for key in lines))
    rows = []
    for key in keys:
        ranks_by_text: dict[str, list[int]] = {}
        for rank, lines in texts_by_rank.items():
            ranks_by_text.setdefault(lines.get(key, "nothing"), []).append(rank)
        if len(ranks_by_text) > 1:
            named = [_name_ranks(r, text) for text, r in ranks_by_text.items()]
            rows.append(f"  {key}: " + "; ".join(named))
    left_out = len(rows) - _MOST_LINES
    more = [f"  and {left_out} more"] if left_out > 0 else []
    if not rows:
        rows = ["  the lines are the same, in another order"]
    advice = [section.advice] if section.advice else []
    shown = rows[:_MOST_LINES]
    return RanksDiffer("\n".join([f"{section.title}:", *shown, *more, *advice]))


def _name_ranks(ranks: Sequence[int], text: str) -> str:
    names = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {names}: {text[:240]}"
