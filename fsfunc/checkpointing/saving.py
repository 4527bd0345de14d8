"""Saving a state: each rank its own boxes, at once or in the background.

The layouts say what every rank holds, so nothing is planned together: each rank writes
its files and a note of them, and the first rank, when all notes are there, writes the
manifest and gives the folder its name. Notes are files too, so that a save in the
background needs no collective and cannot disturb those of the training.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsfunc.checkpointing import folders
from fsfunc.checkpointing.agreeing import agree, agreed, attempt, check_alike
from fsfunc.checkpointing.leaves import Holdings, check_mesh, holdings, mesh_here
from fsfunc.checkpointing.manifest import dtype_name
from fsfunc.checkpointing.randomness import random_state
from fsfunc.checkpointing.under_way import Saving, in_flight
from fsfunc.checkpointing.writing import SAFE_DTYPES
from fsfunc.comm.mesh import Here
from fsfunc.donated import refuse_spent

__all__ = ["Saving", "save", "save_async"]


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
            ``{"train": state, "data": loader.position}``. A whole tensor is taken to be
            the same on every rank: one of them writes it.
        metadata: anything that JSON can hold, for the reader.
        keep: once this one is complete, delete all but so many of the checkpoints
            beside it whose names differ in their last number alone: it stays, and the
            highest numbers.

    Raises (on every rank, with nothing left behind):
        FileExistsError: ``path`` exists.
        TypeError: a leaf that cannot be saved; ValueError: a fake one, or two of one
            path; RuntimeError: one that was donated.
        CheckpointError: another rank failed.
        OSError: the disk is full, or the like.

    Cost: each rank writes the boxes it holds once, straight from its memory, and waits
    for the disk; replicas share the work. A few numbers are sent to agree on success.

    >>> import tempfile, torch, fsfunc as ff
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ff.save(f"{folder}/step-1", {"w": torch.ones(2), "step": 1})
    ...     ff.load(f"{folder}/step-1", {"w": torch.zeros(2), "step": 0})
    {'w': tensor([1., 1.]), 'step': 1}
    """
    saving = _begin(path, state, metadata, keep)
    try:
        agreed(saving.at, saving.write)
        agreed(saving.at, saving.complete)
    except BaseException:
        saving.abandon()
        raise
    saving.release()
    saving.unlock()


def save_async(
    path: str | os.PathLike,
    state: Any,
    *,
    metadata: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> Saving:
    """Begins what `save` does, and goes on in the background.

    Nothing is copied: a state is never changed, and while it is being saved a donated
    step that is given it works as the pure step does, in memory of its own. Changing a
    tensor of the state by hand meanwhile makes the save fail.

    Returns:
        a `Saving`: ``wait()`` returns when the checkpoint is complete, or raises what
        went wrong, ``done()`` tells. An error that nobody waited for is raised by the
        next save of this rank, or told when Python ends. A second save waits for the
        first.

    Cost: the call checks and agrees on a few numbers; a rank's files are written by a
    thread. Memory: a donated step given the state makes a second state, once.
    """
    saving = _begin(path, state, metadata, keep)
    saving.start()
    at = saving.at
    if at is not None and at.mesh.backend == "simulated":
        # Whoever waits holds the baton: by then every rank's thread must be running.
        agree(at, None)
    return saving


def _begin(path: Any, state: Any, metadata: Any, keep: int | None) -> Saving:
    """Checks everything that can be checked, makes the folder, and agrees."""
    at = mesh_here()
    if at is not None and at.mesh.backend in ("abstract", "vmap"):
        raise RuntimeError(
            f"cannot save on {at.mesh}, which holds no values of its own: save on a "
            "simulated mesh or on processes"
        )
    earlier = in_flight(at)
    error = None if earlier is None else attempt(earlier.wait)
    saving: Saving | None = None
    if error is None:
        try:
            saving = _prepared(at, path, state, metadata, keep)
        except Exception as failure:
            error = failure
    try:
        # Until all have come here, somebody may still be waiting for an earlier one.
        agree(at, error)
        assert saving is not None
        check_alike(at, str(saving.path), "save to different paths")
        agreed(at, saving.make_folder)
        agreed(at, saving.find_folder)
    except BaseException:
        if saving is not None:
            saving.abandon()
        raise
    return saving


def _prepared(
    at: Here | None, path: Any, state: Any, metadata: Any, keep: Any
) -> Saving:
    """What is to be saved, all of it checked that can be without the other ranks."""
    path = Path(os.path.abspath(os.fspath(path)))
    said = _checked(metadata or {})
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        raise ValueError(f"keep={keep!r}: it is how many checkpoints stay, at least 1")
    folders.check_absent(path)
    return Saving(path, at, _saveable(state, at), said, keep, random_state())


def _saveable(state: Any, at: Here | None) -> Holdings:
    refuse_spent(state)
    found = holdings(state)
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
        return json.loads(json.dumps(dict(metadata)))  # a copy: it may change meanwhile
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"metadata must be what JSON can hold: {error}; turn it into numbers, "
            "strings, lists and dicts"
        ) from error
