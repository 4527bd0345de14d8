"""Saving a state: each rank its own boxes, at once or in the background.

The layouts say what every rank holds, so nothing is planned together: each rank writes
its files and a note of them, and the first rank, when all notes are there, writes the
manifest and gives the folder its name. Notes are files too, so that a save in the
background needs no collective and cannot disturb those of the training.
"""

from __future__ import annotations

import atexit
import base64
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

from fsfunc.checkpointing import folders
from fsfunc.checkpointing.agreeing import agree
from fsfunc.checkpointing.leaves import Holdings, holdings, mesh_here, parts_of
from fsfunc.checkpointing.manifest import (
    MANIFEST,
    CheckpointError,
    Chunk,
    Leaf,
    Stored,
    StoredFile,
    dtype_name,
    write_manifest,
)
from fsfunc.checkpointing.writing import SAFE_DTYPES, write_parts
from fsfunc.holding import hold
from fsfunc.mesh import Here
from fsfunc.transforms.donation import standing, written
from fsfunc.units import generator_states

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
            ``{"train": state, "data": loader.position}``.
        metadata: anything that JSON can hold, for the reader.
        keep: delete all but so many of the newest checkpoints beside ``path`` whose
            names differ from its own in digits alone, once this one is complete.

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
        error = saving.attempt(saving.write)
        saving.agree(error)
        error = saving.attempt(saving.complete) if saving.first else None
        saving.agree(error)
    except BaseException:
        if saving.first:
            folders.discard(saving.folder)
        raise
    finally:
        saving.release()


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

    Cost: the call checks and agrees on one number; a rank's files are written by a
    thread. Memory: a donated step given the state makes a second state, once.
    """
    saving = _begin(path, state, metadata, keep)
    saving.thread = Thread(target=saving.run, name=f"save {path}")
    _IN_FLIGHT[saving.owner] = saving
    saving.thread.start()
    return saving


@dataclass
class Saving:
    """A checkpoint under way on this rank."""

    path: Path
    at: Here | None
    found: Holdings
    metadata: dict[str, Any]
    keep: int | None
    random: dict[str, str]
    thread: Thread | None = None
    error: BaseException | None = None
    _finished: bool = False
    _standing: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        held = self.found.tensors.values()
        self.folder = folders.saving_folder(self.path)
        self.rank, self.size = (
            (0, 1) if self.at is None else (self.at.rank, self.at.mesh.size)
        )
        self.first = self.rank == 0
        self.owner = _owner(self.at)
        self.release = hold(h.part for h in held)
        self._standing = [(h, standing(h.part, h.home)) for h in held]

    def done(self) -> bool:
        """Whether it is over, well or not; it never waits."""
        if self.thread is not None and self.thread.is_alive():
            return False
        if self._finished or self.error is not None or self.first:
            return True
        return self._over() or _failure(self.folder) is not None

    def wait(self) -> None:
        """Returns when the checkpoint is complete.

        Raises:
            what went wrong, on this rank or on another.
        """
        if self.thread is not None:
            self.thread.join()
        if _IN_FLIGHT.get(self.owner) is self:
            del _IN_FLIGHT[self.owner]
        if self.error is None and not self.first and not self._finished:
            self.error = self.attempt(self._wait_for_first)
        self._finished = True
        if self.error is not None:
            raise self.error

    def agree(self, error: BaseException | None) -> None:
        agree(self.at, error)

    @staticmethod
    def attempt(action: Any) -> BaseException | None:
        """What ``action()`` raised."""
        try:
            action()
        except Exception as error:
            return error
        return None

    def run(self) -> None:
        """What the thread does."""
        try:
            self.write()
            if self.first:
                self._wait_for_notes()
                self.complete()
        except BaseException as error:
            self.error = error
            text = f"{type(error).__name__}: {error}"
            self.attempt(lambda: _put(self.folder / f"failed-{self.rank:05}", text))
        finally:
            self.release()

    def write(self) -> None:
        """Writes this rank's files, and the note of them."""
        parts = parts_of(self.found, self.at)
        files, chunks = write_parts(
            self.folder, self.rank, [(h.path, box, x) for h, box, x in parts]
        )
        for held, before in self._standing:
            if written(before, standing(held.part, held.home)):
                raise CheckpointError(
                    f"{held.path!r} was changed in place while it was being saved: the "
                    "checkpoint would hold neither the old values nor the new ones; "
                    "wait() first, or change a copy"
                )
        _put(
            _note(self.folder, self.rank), json.dumps({"files": files, **_said(chunks)})
        )

    def complete(self) -> None:
        """Writes the manifest and gives the folder its name: the first rank's work."""
        files: dict[str, StoredFile] = {}
        chunks: dict[str, list[Chunk]] = {path: [] for path in self.found.tensors}
        for rank in range(self.size):
            try:
                note = json.loads(_note(self.folder, rank).read_text())
            except FileNotFoundError as error:
                raise CheckpointError(
                    f"rank {rank} wrote its part of {self.path} where rank 0 does not "
                    "see it: all ranks need one shared file system"
                ) from error
            files |= {k: StoredFile(n, tuple(s)) for k, (n, s) in note["files"].items()}
            for path, boxes in note["chunks"].items():
                chunks[path] += [
                    Chunk(name, begin, tuple(offsets), tuple(sizes))
                    for name, begin, offsets, sizes in boxes
                ]
        leaves = {
            path: Leaf(held.layout.shape, held.part.dtype, tuple(chunks[path]))
            for path, held in self.found.tensors.items()
        }
        for path, leaf in leaves.items():
            if not leaf.is_whole:
                raise CheckpointError(
                    f"the ranks' parts of {path!r} {leaf} do not make it up: every "
                    "rank must save the same tree, with the same layouts"
                )
        mesh = {} if self.at is None else dict(self.at.mesh.axes)
        stored = Stored(
            self.path,
            leaves,
            self.found.values,
            self.metadata,
            mesh,
            files,
            self.random,
        )
        write_manifest(stored, self.folder)
        for rank in range(self.size):
            _note(self.folder, rank).unlink()
        folders.appear(self.folder, self.path)
        if self.keep is not None:
            folders.keep_newest(self.path, self.keep)

    def _wait_for_notes(self) -> None:
        _poll(
            lambda: all(_note(self.folder, r).exists() for r in range(self.size)), self
        )

    def _wait_for_first(self) -> None:
        _poll(self._over, self)
        if not (self.path / MANIFEST).exists():
            raise CheckpointError(
                f"{self.path} was not saved: the folder in which it was written is gone"
            )

    def _over(self) -> bool:
        return not self.folder.exists()


# By rank: what is saved in the background.
_IN_FLIGHT: dict[Any, Saving] = {}


def _begin(path: Any, state: Any, metadata: Any, keep: int | None) -> Saving:
    """Checks everything that can be checked, makes the folder, and agrees."""
    at = mesh_here()
    earlier = _IN_FLIGHT.get(_owner(at))
    error = None if earlier is None else Saving.attempt(earlier.wait)
    saving: Saving | None = None
    try:
        if error is not None:
            raise error
        if at is not None and at.mesh.backend in ("abstract", "vmap"):
            raise RuntimeError(
                f"cannot save on {at.mesh}, which holds no values of its own: save on "
                "a simulated mesh or on processes"
            )
        path = Path(os.path.abspath(os.fspath(path)))
        said = _checked(metadata or {})
        if keep is not None and (keep < 1 or int(keep) != keep):
            raise ValueError(
                f"keep={keep}: it is how many checkpoints stay, at least 1"
            )
        saving = Saving(path, at, _saveable(state, at), said, keep, _random())
        if saving.first:
            folders.begin_folder(path)
    except Exception as failure:
        error = failure
    try:
        agree(at, error)
    except BaseException:
        if saving is not None:
            saving.release()
            if saving.first and error is None:
                folders.discard(saving.folder)
        raise
    assert saving is not None
    return saving


def _saveable(state: Any, at: Here | None) -> Holdings:
    found = holdings(state)
    axes = {} if at is None else at.mesh.axes
    for path, held in found.tensors.items():
        if path == "__metadata__":
            raise ValueError("a leaf called '__metadata__' cannot be saved: rename it")
        if held.part.dtype not in SAFE_DTYPES:
            raise TypeError(
                f"cannot save {path!r}, of dtype {dtype_name(held.part.dtype)}: "
                "safetensors has none such; save a view of it in another"
            )
        for axis, size in held.layout.sizes.items():
            if axes.get(axis) != size:
                raise ValueError(
                    f"cannot save {held.layout}: it lies over {axis!r} of size {size}, "
                    f"and the mesh in sight has {dict(axes)}; save it inside "
                    "spmd(fn, mesh) on its own mesh"
                )
    return found


def _checked(metadata: Mapping[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(dict(metadata))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"metadata must be what JSON can hold: {error}; turn it into numbers, "
            "strings, lists and dicts"
        ) from error
    return dict(metadata)


def _random() -> dict[str, str]:
    """The default generators' states, by device type."""
    return {
        g.device.type: base64.b64encode(bytes(state.tolist())).decode()
        for g, state in generator_states()
    }


def _owner(at: Here | None) -> Any:
    return None if at is None else (id(at.link), at.rank)


def _note(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05}.json"


def _said(chunks: Mapping[str, list[Chunk]]) -> dict[str, Any]:
    return {"chunks": dict(chunks)}


def _put(path: Path, text: str) -> None:
    """A file that is there whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    os.rename(part, path)


def _failure(folder: Path) -> str | None:
    """What a rank said that could not go on."""
    for path in sorted(folder.glob("failed-*")):
        if not path.name.endswith(".part"):
            rank = int(path.name.removeprefix("failed-"))
            return f"rank {rank} could not go on: {path.read_text()}"
    return None


def _poll(ready: Any, saving: Saving) -> None:
    pause = 0.001
    while not ready():
        if (why := _failure(saving.folder)) is not None:
            raise CheckpointError(f"{saving.path} was not saved: {why}")
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def _tell_at_exit() -> None:
    """Waits for what is under way; says what nobody asked for."""
    for saving in list(_IN_FLIGHT.values()):
        error = saving.attempt(saving.wait)
        if error is not None:
            print(f"fsfunc: {saving.path} was not saved:", file=sys.stderr)
            traceback.print_exception(error)


atexit.register(_tell_at_exit)
