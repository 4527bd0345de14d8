"""Saving a state: each rank its own boxes, at once or in the background.

The layouts say what every rank holds, so nothing is planned together: each rank writes
its files and reports them, and the first rank, when all reports are there, writes the
manifest and gives the folder its name. Reports are files too, so that a save in the
background needs no collective and cannot disturb those of the training.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsfunc.checkpoint import folders
from fsfunc.checkpoint.agreement import everywhere, raise_everywhere
from fsfunc.checkpoint.contents import Contents, check_mesh, contents_of, mesh_here
from fsfunc.checkpoint.manifest import SAFE_DTYPES, dtype_name
from fsfunc.checkpoint.parsing import LEAVES, check_depth
from fsfunc.checkpoint.replicas import Copies, compared, copies_of
from fsfunc.checkpoint.tasks import SaveTask, in_flight
from fsfunc.comm.mesh import Here
from fsfunc.sharded.donated import refuse_spent


def save(
    path: str | os.PathLike,
    state: Any,
    *,
    metadata: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> None:
    """Saves ``state`` as the folder ``path``, which appears whole or not at all.

    Every rank of the mesh in sight calls it, on one file system. The folder holds
    safetensors files, keyed by tree path, and ``fsfunc.json``; no pickle. It can be
    loaded on any mesh, with any `zero` and any transforms (`load`), and read by
    torch.distributed.checkpoint's ``HuggingFaceStorageReader`` and by safetensors. The
    states of the default random generators are saved too.

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


def save_async(
    path: str | os.PathLike,
    state: Any,
    *,
    metadata: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> SaveTask:
    """Begins what `save` does, and goes on in the background.

    Nothing is copied: a state is never changed, and while it is being saved a donated
    step that is given it works as the pure step does, in memory of its own. Changing a
    tensor of the state by hand meanwhile makes the save fail.

    Returns:
        a `SaveTask`: ``wait()`` returns when the checkpoint is complete, or raises what
        went wrong, ``done()`` tells. An error that nobody waited for is raised by the
        next save of this rank, or told when Python ends. A second save waits for the
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


def _begin(path: Any, state: Any, metadata: Any, keep: int | None) -> SaveTask:
    """Checks everything that can be checked, makes the folder, and agrees."""
    at = mesh_here("save")

    def checked() -> tuple[Path, Contents, Copies, dict[str, Any]]:
        if (earlier := in_flight(at)) is not None:
            earlier.wait()
        where = Path(os.path.abspath(os.fspath(path)))
        said = _checked(metadata or {})
        if keep is not None and (not isinstance(keep, int) or keep < 1):
            raise ValueError(
                f"keep={keep!r}: it is how many checkpoints stay, at least 1"
            )
        folders.check_absent(where)
        found = _saveable(state, at)
        return where, found, copies_of(found, at), said

    # Until all have come here, somebody may still be waiting for an earlier one.
    where, found, copies, said = everywhere(at, checked)
    found = compared(found, copies, at, where)
    task = SaveTask(where, at, found, said, keep)
    try:
        everywhere(at, task.make_folder)
        everywhere(at, task.find_folder)
    except BaseException:
        task.abandon()
        raise
    return task


def _saveable(state: Any, at: Here | None) -> Contents:
    refuse_spent(state)
    found = contents_of(state)
    many = len(found.tensors) + len(found.values)
    if many > LEAVES:
        raise ValueError(
            f"a state of {many} leaves cannot be saved, {LEAVES} at the most: stack "
            "those that are alike, or save it in parts"
        )
    for path, held in found.tensors.items():
        if held.part.dtype not in SAFE_DTYPES:
            raise TypeError(
                f"cannot save {path!r}, of dtype {dtype_name(held.part.dtype)}: "
                "safetensors has none such; save a view of it in another"
            )
        check_mesh(held.layout, at, "save")
    return found


def _checked(metadata: Mapping[str, Any]) -> dict[str, Any]:
    try:
        copy = json.loads(json.dumps(dict(metadata)))  # it may change meanwhile
        check_depth(copy)
        return copy
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"metadata must be what JSON can hold: {error}; turn it into numbers, "
            "strings, lists and dicts"
        ) from error
