"""save and save_async: each rank writes its boxes, at once or in the background.

    _begin       each rank checks what it is to save, and reads copies for a checksum
    compared     all ranks compare their trees, and find copies that differ
    SaveTask     the first rank makes the folder, all write into it (see `tasks`)

The layouts say what every rank holds, so nothing is planned together: each rank writes
its files and reports them. When all reports are there, the first rank writes the
manifest and gives the folder its name. Reports are files too, so that a save in the
background needs no collective and cannot disturb those of the training.

Ranks that differ on no axis of a leaf's layout hold the same part of it, and one of
them writes it. Where their bits differ, the leaf is not one value but rank-local
(statistics of a rank's data, a hidden state that is carried on). It is saved as the
stack of all ranks' values.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fsfunc import tree
from fsfunc.checkpoint import folders
from fsfunc.checkpoint.agreement import all_ranks, everywhere, raise_everywhere
from fsfunc.checkpoint.contents import (
    Contents,
    collect_contents,
    coordinates_of,
)
from fsfunc.checkpoint.headers import SAFE_DTYPES, STORED_AS_PAIRS, dtype_name
from fsfunc.checkpoint.stored import check_depth
from fsfunc.checkpoint.tasks import SaveTask, in_flight
from fsfunc.comm.attribution import label
from fsfunc.comm.collectives import pmax
from fsfunc.comm.comparison import Section, agree, digest_of
from fsfunc.comm.descriptions import checksums
from fsfunc.comm.mesh import Here
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.spent import refuse_unusable
from fsfunc.state.values import check_mesh, mesh_for
from fsfunc.tree.types import PyTree

_TITLE = "the ranks save to different paths, or trees that differ"
_ADVICE = (
    "Every rank saves the same paths, shapes, dtypes and values. A number that is each "
    "rank's own can be saved as a tensor, torch.tensor(x): of those each rank's is kept"
)


class Copies(NamedTuple):
    """The leaves that other ranks hold a copy of too.

    Args:
        axes: by path the mesh axes along which ranks hold copies.
        sums: by path a checksum of this rank's copy.
    """

    axes: Mapping[str, set[str]] = {}
    sums: Mapping[str, int] = {}

    def along(self, axis: str) -> list[tuple[str, int]]:
        """Returns (path, checksum) of the leaves with copies along an axis."""
        return [(path, n) for path, n in self.sums.items() if axis in self.axes[path]]


def find_copies(contents: Contents, here: Here | None) -> Copies:
    """Returns the leaves that several ranks hold a copy of, with checksums."""
    if here is None or here.mesh.size == 1:
        return Copies()
    axes = {axis for axis, size in here.mesh.axes.items() if size > 1}
    copied = {
        path: copy_axes
        for path, leaf in contents.tensors.items()
        if leaf.layout.numel and (copy_axes := axes.difference(leaf.layout.axes))
    }
    sums = checksums([contents.tensors[path].part for path in copied])
    # Of 62 bits, so that `_find_differing` can negate them.
    return Copies(copied, {p: n >> 2 for p, n in zip(copied, sums, strict=True)})


def compare_ranks(
    contents: Contents, copies: Copies, here: Here | None, path: Path
) -> tuple[Contents, str]:
    """Compares what ranks save, and replaces leaves whose copies differ by stacks.

    Returns the contents, and a name of the first rank's, by which all ranks know the
    folder that it makes.

    Raises (on every rank):
        RanksDiffer: ranks save to different paths; other paths in the tree, shapes,
            dtypes, axes, or other numbers, strings and bools; names the leaves and what
            each rank has.

    Cost: one gather of 32 bytes, and 16 for each axis, in no ledger. Where copies
    differ, two pmax of 16 and 8 bytes for each leaf of which there are copies along
    that axis.
    """
    unique = folders.unique_name()
    if here is None or (ranks := all_ranks(here)) is None or ranks.size == 1:
        return contents, unique
    axes = {axis: size for axis, size in here.mesh.axes.items() if size > 1}
    # One gather for all that ranks must know of each other. The digests of copies go
    # as bytes, which may differ: then the copies are rank-local values.
    names, _, *digests_by_axis = agree(
        ranks,
        bytes.fromhex(unique),
        Section(_TITLE, [("the path", str(path)), *contents.lines], _ADVICE),
        *(digest_of(copies.along(axis)) for axis in axes),
        waits=True,
    )
    stacks: dict[str, dict[str, int]] = {}
    for (axis, size), digests in zip(axes.items(), digests_by_axis, strict=True):
        # The digest of the first rank along the axis, for each rank. Which leaves
        # differ is asked in a second step, and only if some do: that is rare.
        firsts = [
            digests[here.mesh.members(axis, rank)[0]] for rank in range(here.mesh.size)
        ]
        if digests != firsts:
            for leaf_path in _find_differing(copies.along(axis), axis, here):
                stacks.setdefault(leaf_path, {})[axis] = size
    coordinates, tensors = coordinates_of(here), dict(contents.tensors)
    for leaf_path, sizes in stacks.items():
        tensors[leaf_path] = tensors[leaf_path].stacked(sizes, coordinates)
    return replace(contents, tensors=tensors), names[0].hex()


def _find_differing(
    sums: Sequence[tuple[str, int]], axis: str, here: Here
) -> list[str]:
    """Returns the leaves whose copies differ along an axis, on whatever ranks.

    Values are equal where their maximum is their minimum, ``-pmax(-x)``.
    """
    with label("", "checkpoint"), torch.no_grad():
        local_sums = torch.tensor([n for _, n in sums], device=here.link.device)
        highest, negated_lowest = pmax(torch.stack([local_sums, -local_sums]), axis)
        # Over all axes, so that every rank stacks the same leaves.
        differs = pmax((highest != -negated_lowest).long(), tuple(here.mesh.axes))
        flags = differs.tolist()
    return [path for (path, _), flag in zip(sums, flags, strict=True) if flag]


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
    here = task.here
    if here is not None and here.mesh.backend == "simulated":
        # Whoever waits holds the baton: by then every rank's thread must be running.
        raise_everywhere(here, None)
    return task


class _Checked(NamedTuple):
    """What a rank is to save, and where, checked as far as it can be alone."""

    path: Path
    contents: Contents
    copies: Copies
    metadata: dict[str, Any]


def _begin(
    path: str | os.PathLike[str],
    state: PyTree,
    metadata: Mapping[str, Any] | None,
    keep: int | None,
) -> SaveTask:
    """Checks all that can be checked, compares ranks, and makes the folder."""
    here = mesh_for("save")

    def check_alone() -> _Checked:
        if (earlier := in_flight(here)) is not None:
            earlier.wait()
        # Absolute, as the program may change its folder before a thread writes; and
        # copied, as it may change the metadata.
        destination = Path(os.path.abspath(os.fspath(path)))
        copied_metadata = json.loads(json.dumps(dict(metadata or {})))
        check_depth(copied_metadata)
        if keep is not None and keep < 1:
            raise ValueError(f"keep={keep!r}: how many checkpoints stay, at least 1")
        folders.check_absent(destination)
        contents = _collect_saveable(state, here)
        return _Checked(
            destination, contents, find_copies(contents, here), copied_metadata
        )

    # No folder is made before: until all ranks are here, one may still wait for an
    # earlier save.
    destination, contents, copies, copied_metadata = everywhere(here, check_alone)
    contents, unique = compare_ranks(contents, copies, here, destination)
    task = SaveTask(destination, unique, here, contents, copied_metadata, keep)
    try:
        everywhere(here, task.make_folder)
        everywhere(here, task.find_folder)
    except BaseException:
        task.abandon()
        raise
    return task


def _collect_saveable(state: PyTree, here: Here | None) -> Contents:
    """Collects the contents of a state, all of which files can hold."""
    refuse_unusable(state)
    for leaf in filter(is_sharded, tree.leaves(state, is_leaf=is_sharded)):
        check_mesh(leaf, here, "save")
    contents = collect_contents(state)
    for path, leaf in contents.tensors.items():
        if leaf.part.dtype not in (*SAFE_DTYPES, *STORED_AS_PAIRS):
            raise TypeError(
                f"cannot save {path!r}, of dtype {dtype_name(leaf.part.dtype)}: "
                "safetensors has none such; save a view of it in another"
            )
    return contents
