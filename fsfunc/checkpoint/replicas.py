"""Leaves of which several ranks hold a copy: compared before they are saved.

Ranks that differ on no axis of a leaf's layout hold the same part of it, and one of
them writes it. Where their bits differ the leaf is not one value but each rank's own
(statistics of its data, a hidden state that is carried on): it is saved as the stack of
all of them (`sharded.stacks`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fsfunc.checkpoint.agreement import gathered
from fsfunc.checkpoint.contents import Contents, coordinates_here
from fsfunc.comm.attribution import label
from fsfunc.comm.collectives import pmax
from fsfunc.comm.comparison import Section, checksums, difference
from fsfunc.comm.groups import group
from fsfunc.comm.mesh import Here

_ADVICE = (
    "Every rank saves the same paths, shapes, dtypes and values. A number that is each "
    "rank's own can be saved as a tensor, torch.tensor(x): of those each rank's is kept"
)


class Copies(NamedTuple):
    """The leaves of which this rank holds a copy, as others do.

    Args:
        axes: along which axes ranks hold copies of each, by path.
        sums: a checksum of this rank's copy, by path.
    """

    axes: Mapping[str, set[str]] = {}
    sums: Mapping[str, int] = {}

    def along(self, axis: str) -> dict[str, int]:
        """The checksums of leaves of which ranks along an axis hold copies."""
        return {path: n for path, n in self.sums.items() if axis in self.axes[path]}


def copies_of(found: Contents, at: Here | None) -> Copies:
    """The leaves of which several ranks hold a copy; this rank's is read once."""
    if at is None or at.mesh.size == 1:
        return Copies()
    axes = {axis for axis, size in at.mesh.axes.items() if size > 1}
    copied = {
        path: over
        for path, held in found.tensors.items()
        if held.layout.numel and (over := axes.difference(held.layout.axes))
    }
    sums = checksums([found.tensors[path].part for path in copied])
    return Copies(copied, {p: n >> 2 for p, n in zip(copied, sums, strict=True)})


def compared(found: Contents, mine: Copies, at: Here | None, path: Path) -> Contents:
    """``found``, where leaves whose copies differ are the stacks of all ranks' own.

    Raises (on every rank):
        ValueError: ranks that save to different paths.
        RanksDiffer: other paths in the tree, shapes, dtypes, axes, or other numbers,
            strings and bools; names the leaves and what each rank has.

    Cost: one gather of 32 bytes, and 16 for each axis. Where copies differ, two pmax of
    16 and 8 bytes for each leaf of which there are copies along that axis.
    """
    if at is None or at.mesh.size == 1:
        return found
    axes = {axis: size for axis, size in at.mesh.axes.items() if size > 1}
    said = [_digest(str(path)), Section("", found.lines).digest]
    said += [_digest(mine.along(axis)) for axis in axes]
    every = gathered(at, b"".join(said))
    paths, trees, *sums = [[row[i : i + 16] for row in every] for i in _steps(every)]
    if len(set(paths)) > 1:
        raise ValueError(
            "the ranks save to different paths, and every rank must name the same one: "
            f"rank {at.rank} says {path}"
        )
    if len(set(trees)) > 1:
        title = "the ranks save trees that differ"
        where = group(tuple(at.mesh.axes), at)
        raise difference(Section(title, found.lines, _ADVICE), where)
    own: dict[str, dict[str, int]] = {}
    for (axis, size), rows in zip(axes.items(), sums, strict=True):
        firsts = [rows[at.mesh.members(axis, rank)[0]] for rank in range(at.mesh.size)]
        if rows != firsts:
            for name in _differing(mine.along(axis), axis, at):
                own.setdefault(name, {})[axis] = size
    coordinates, tensors = coordinates_here(at), dict(found.tensors)
    for name, sizes in own.items():
        tensors[name] = tensors[name].stacked(sizes, coordinates)
    return replace(found, tensors=tensors)


def _digest(said: Any) -> bytes:
    return hashlib.blake2b(repr(said).encode(errors="replace"), digest_size=16).digest()


def _steps(rows: Sequence[bytes]) -> range:
    return range(0, len(rows[0]), 16)


def _differing(sums: Mapping[str, int], axis: str, at: Here) -> list[str]:
    """The leaves whose copies differ along an axis, on whatever ranks."""
    with label("", "checkpoint"), torch.no_grad():
        mine = torch.tensor(list(sums.values()), device=at.link.device)
        high, low = pmax(torch.stack([mine, -mine]), axis)
        differs = pmax((high != -low).long(), tuple(at.mesh.axes)).tolist()
    return [path for path, unlike in zip(sums, differs, strict=True) if unlike]
