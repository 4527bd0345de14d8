"""Saving a state: each rank its own boxes, at once or in the background.

The layouts say what every rank holds, so nothing is planned together: each rank writes
its files and reports them, and the first rank, when all reports are there, writes the
manifest and gives the folder its name. Reports are files too, so that a save in the
background needs no collective and cannot disturb those of the training.

Ranks that differ on no axis of a leaf's layout hold the same part of it, and one of
them writes it. Where their bits differ the leaf is not one value but each rank's own
(statistics of its data, a hidden state that is carried on): it is saved as the stack of
all of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fsfunc.checkpoint import folders
from fsfunc.checkpoint.agreement import everyone, everywhere, raise_everywhere
from fsfunc.checkpoint.contents import (
    Contents,
    check_mesh,
    contents_of,
    coordinates_here,
    mesh_here,
)
from fsfunc.checkpoint.headers import PAIRS, SAFE_DTYPES, dtype_name
from fsfunc.checkpoint.stored import check_depth
from fsfunc.checkpoint.tasks import SaveTask, in_flight
from fsfunc.comm.attribution import label
from fsfunc.comm.collectives import pmax
from fsfunc.comm.comparison import Section, agree, digest_of
from fsfunc.comm.descriptions import checksums
from fsfunc.comm.mesh import Here
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.sharded.spent import refuse_unusable
from fsfunc.tree.types import PyTree

_TITLE = "the ranks save to different paths, or trees that differ"
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

    def along(self, axis: str) -> list[tuple[str, int]]:
        """The checksums of leaves of which ranks along an axis hold copies."""
        return [(path, n) for path, n in self.sums.items() if axis in self.axes[path]]


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


def compared(
    found: Contents, mine: Copies, at: Here | None, path: Path
) -> tuple[Contents, str]:
    """``found``, where leaves whose copies differ are the stacks of all ranks' own.

    And a name of the first rank's, by which all know the folder that it makes.

    Raises (on every rank):
        RanksDiffer: ranks save to different paths; other paths in the tree, shapes,
            dtypes, axes, or other numbers, strings and bools; names the leaves and what
            each rank has.

    Cost: one gather of 32 bytes, and 16 for each axis, in no ledger. Where copies
    differ, two pmax of 16 and 8 bytes for each leaf of which there are copies along
    that axis.
    """
    own = folders.own_name()
    if at is None or (where := everyone(at)) is None or where.size == 1:
        return found, own
    axes = {axis: size for axis, size in at.mesh.axes.items() if size > 1}
    names, _, *sums = agree(
        where,
        bytes.fromhex(own),
        Section(_TITLE, [("the path", str(path)), *found.lines], _ADVICE),
        # Copies may differ: then they are each rank's own.
        *(digest_of(mine.along(axis)) for axis in axes),
        waits=True,
    )
    stacks: dict[str, dict[str, int]] = {}
    for (axis, size), rows in zip(axes.items(), sums, strict=True):
        firsts = [rows[at.mesh.members(axis, rank)[0]] for rank in range(at.mesh.size)]
        if rows != firsts:
            for name in _differing(mine.along(axis), axis, at):
                stacks.setdefault(name, {})[axis] = size
    coordinates, tensors = coordinates_here(at), dict(found.tensors)
    for name, sizes in stacks.items():
        tensors[name] = tensors[name].stacked(sizes, coordinates)
    return replace(found, tensors=tensors), names[0].hex()


def _differing(sums: Sequence[tuple[str, int]], axis: str, at: Here) -> list[str]:
    """The leaves whose copies differ along an axis, on whatever ranks."""
    with label("", "checkpoint"), torch.no_grad():
        mine = torch.tensor([n for _, n in sums], device=at.link.device)
        high, low = pmax(torch.stack([mine, -mine]), axis)
        differs = pmax((high != -low).long(), tuple(at.mesh.axes)).tolist()
    return [path for (path, _), odd in zip(sums, differs, strict=True) if odd]


@api_boundary
def save(
    path: str | os.PathLike[str],
    state: PyTree,
    *,
    metadata: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> None:
    """Saves ``state`` as the folder ``path``, which appears whole or not at all.

    Every rank of the mesh in sight calls it, on one file system. The folder holds
    safetensors files, keyed by tree path, and ``fsfunc.json``; no pickle. It can be
    loaded on any mesh, with any `zero` and any transforms (`load`), and read by
    torch.distributed.checkpoint's ``HuggingFaceStorageReader`` and by safetensors. The
    states of torch's default random generators are saved too, and not those of Python's
    and NumPy's.

    Args:
        path: where; nothing may be there.
        state: any tree of sharded leaves, tensors, numbers, strings and bools, such as
            ``{"train": state, "data": loader.position}``. Of a tensor whose bits are
            the same on every rank one of them writes it; where they differ along an
            axis each rank's is kept, and loaded where that axis has the same size.
        metadata: anything that JSON can hold, for the reader; that of the first rank.
        keep: once this one is complete, delete all but so many of the checkpoints
            beside it whose names differ in their last number alone: it stays, and the
            highest numbers.

    Raises (on every rank, with nothing left behind):
        FileExistsError: ``path`` exists.
        TypeError: a leaf that cannot be saved; ValueError: a fake one, or two of one
            path; RuntimeError: one that was donated.
        RanksDiffer: numbers, strings or bools that differ between ranks, or paths,
            shapes and dtypes.
        CheckpointError: another rank failed.
        OSError: the disk is full, or the like.

    Cost: each rank writes the boxes it holds once, straight from its memory, and waits
    for the disk; replicas share the work. What the ranks do not share among them is
    read once more, to compare it. A few numbers are sent to agree on success.

    >>> import tempfile, torch, fsfunc as ff
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ff.save(f"{folder}/step-1", {"w": torch.ones(2), "step": 1})
    ...     ff.load(f"{folder}/step-1", {"w": torch.zeros(2), "step": 0})
    {'w': tensor([1., 1.]), 'step': 1}
    """
    _begin(path, state, metadata, keep).finish()


@api_boundary
def save_async(
    path: str | os.PathLike[str],
    state: PyTree,
    *,
    metadata: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> SaveTask:
    """Starts a `save` in the background.

    Nothing is copied: a state is never changed, and a donated step does not overwrite
    it while it is being saved, but makes a new one. Changing a tensor of the state by
    hand meanwhile makes the save fail.

    Returns:
        a `SaveTask`: ``wait()`` returns when the checkpoint is complete, or raises the
        error; ``done()`` does not wait. An error without a ``wait()`` is raised by the
        next save of this rank, or printed when Python ends. A second save waits for the
        first.

    Cost: the call checks and agrees on a few numbers; a rank's files are written by a
    thread. Memory: a donated step given the state makes a second state, once.
    """
    task = _begin(path, state, metadata, keep)
    task.start()
    at = task.at
    if at is not None and at.mesh.backend == "simulated":
        # Whoever waits holds the baton: by then every rank's thread must be running.
        raise_everywhere(at, None)
    return task


class _Checked(NamedTuple):
    """What is to be saved, and where, as far as a rank can check it alone."""

    path: Path
    contents: Contents
    copies: Copies
    metadata: dict[str, Any]


def _begin(path: Any, state: Any, metadata: Any, keep: int | None) -> SaveTask:
    """Checks everything that can be checked, makes the folder, and agrees."""
    at = mesh_here("save")

    def checked() -> _Checked:
        if (earlier := in_flight(at)) is not None:
            earlier.wait()
        where = Path(os.path.abspath(os.fspath(path)))
        said = json.loads(json.dumps(dict(metadata or {})))  # it may change meanwhile
        check_depth(said)
        if keep is not None and keep < 1:
            raise ValueError(f"keep={keep!r}: how many checkpoints stay, at least 1")
        folders.check_absent(where)
        found = _saveable(state, at)
        return _Checked(where, found, copies_of(found, at), said)

    # Until all ranks are here, one may still wait for an earlier save.
    where, found, copies, said = everywhere(at, checked)
    found, own = compared(found, copies, at, where)
    task = SaveTask(where, own, at, found, said, keep)
    try:
        everywhere(at, task.make_folder)
        everywhere(at, task.find_folder)
    except BaseException:
        task.abandon()
        raise
    return task


def _saveable(state: Any, at: Here | None) -> Contents:
    refuse_unusable(state)
    found = contents_of(state)
    for path, held in found.tensors.items():
        if held.part.dtype not in (*SAFE_DTYPES, *PAIRS):
            raise TypeError(
                f"cannot save {path!r}, of dtype {dtype_name(held.part.dtype)}: "
                "safetensors has none such; save a view of it in another"
            )
        check_mesh(held.layout, at, "save")
    return found
