"""A checkpoint under way on a rank: what is to be written, and how it ends."""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

from fsfunc.checkpointing import folders, notes
from fsfunc.checkpointing.agreeing import attempt
from fsfunc.checkpointing.leaves import Holdings, parts_of
from fsfunc.checkpointing.manifest import (
    MANIFEST,
    CheckpointError,
    Chunk,
    Leaf,
    Stored,
    StoredFile,
    write_manifest,
)
from fsfunc.checkpointing.randomness import together
from fsfunc.checkpointing.writing import write_parts
from fsfunc.comm.mesh import Here
from fsfunc.save_guard import hold
from fsfunc.transforms.donation import version

__all__ = ["Saving", "in_flight"]


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
    lock: int | None = None
    _finished: bool = False
    _versions: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        held = self.found.tensors.values()
        self.folder = folders.saving_folder(self.path)
        self.rank, self.size = (
            (0, 1) if self.at is None else (self.at.rank, self.at.mesh.size)
        )
        self.first = self.rank == 0
        self.release = hold(h.part for h in held)
        self._versions = [version(h.part) for h in held]

    def make_folder(self) -> None:
        """The first rank's: what others will write into."""
        if self.first:
            self.lock = folders.begin_folder(self.path)

    def find_folder(self) -> None:
        """Raises where this rank does not see the folder."""
        for pause in (0, 0.1, 1, 3):  # seconds; a network's file system may be slow
            time.sleep(pause)
            if self.folder.is_dir():
                return
        raise CheckpointError(
            f"rank {self.rank} is to save {self.path}, and does not see the folder "
            "that rank 0 made there: all ranks need one shared file system"
        )

    def abandon(self) -> None:
        """Nothing comes of it: what was written is removed, what was held let go."""
        self.release()
        if self.lock is not None:
            folders.discard(self.folder)
        self.unlock()

    def unlock(self) -> None:
        lock, self.lock = self.lock, None
        if lock is not None:
            os.close(lock)

    def start(self) -> None:
        """Goes on in the background."""
        # A daemon: at the end Python waits for it no longer than _tell_at_exit does.
        self.thread = Thread(target=self.run, name=f"save {self.path}", daemon=True)
        _IN_FLIGHT[self.rank] = self
        self.thread.start()

    def done(self) -> bool:
        """Whether it is over, well or not; it never waits."""
        if self.thread is not None and self.thread.is_alive():
            return False
        if self._finished or self.error is not None or self.first:
            return True
        return self._over() or notes.told(self.folder) is not None

    def wait(self) -> None:
        """Returns when the checkpoint is complete.

        Raises:
            what went wrong, on this rank or on another.
        """
        if self.thread is not None:
            self.thread.join()
        if _IN_FLIGHT.get(self.rank) is self:
            del _IN_FLIGHT[self.rank]
        if self.error is None and not self.first and not self._finished:
            self.error = attempt(self._wait_for_first)
        self._finished = True
        if self.error is not None:
            raise self.error

    def run(self) -> None:
        """What the thread does."""
        try:
            self.write()
            if self.first:
                self._wait_for_notes()
            self.complete()
        except BaseException as error:
            self.error = error
            self._clear("*" if self.first else None)  # first: the disk may be full
            attempt(lambda error=error: notes.failed(self.folder, self.rank, error))
        finally:
            self.release()
            self.unlock()
            self.found, self._versions = Holdings(), []  # it may be kept for long

    def _clear(self, files: str | None = None) -> None:
        """Removes this rank's files, or all."""
        mine = files or f"shard-{self.rank + 1:05}-*"
        folders.empty(self.folder, f"{mine}.safetensors")

    def write(self) -> None:
        """Writes this rank's files, and the note of them."""
        found, parts = self.found, parts_of(self.found, self.at)
        files, chunks = write_parts(
            self.folder, self.rank, [(h.path, box, x) for h, box, x in parts]
        )
        for held, before in zip(found.tensors.values(), self._versions, strict=True):
            if version(held.part) != before:
                raise CheckpointError(
                    f"{held.path!r} was changed in place while it was being saved: the "
                    "checkpoint would hold neither the old values nor the new ones; "
                    "wait() first, or change a copy"
                )
        if notes.told(self.folder) is not None:
            self._clear()
        notes.leave(
            self.folder,
            self.rank,
            notes.Note(files, chunks, self.random, found.values, found.digest),
        )

    def complete(self) -> None:
        """The first rank's: writes the manifest and gives the folder its name."""
        if not self.first:
            return
        files: dict[str, StoredFile] = {}
        chunks: dict[str, list[Chunk]] = {path: [] for path in self.found.tensors}
        random: list[Mapping[str, str]] = []
        for rank in range(self.size):
            try:
                note = notes.read_note(self.folder, rank)
            except FileNotFoundError as error:
                raise CheckpointError(
                    f"rank {rank} wrote its part of {self.path} where rank 0 does not "
                    "see it: all ranks need one shared file system"
                ) from error
            self._compare(note, rank)
            random.append(note.random)
            files |= note.files
            for path, boxes in note.chunks.items():
                chunks[path] += boxes
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
            together(random),
        )
        write_manifest(stored, self.folder)
        folders.appear(self.folder, self.path)
        if self.keep is not None:
            folders.keep_newest(self.path, self.keep)

    def _compare(self, note: notes.Note, rank: int) -> None:
        """Raises where a rank saves another tree than this one."""
        extra = sorted(note.chunks.keys() - self.found.tensors.keys())
        mine = {path: json.dumps(value) for path, value in self.found.values.items()}
        theirs = {path: json.dumps(value) for path, value in note.values.items()}
        other = sorted(p for p, _ in mine.items() ^ theirs.items())
        if not (extra or other or note.tree != self.found.digest):
            return
        where = f", at {(extra or other)[0]!r}" if extra or other else ""
        raise CheckpointError(
            f"rank {rank} saves another tree than rank 0{where}: every rank must save "
            "the same paths, shapes and values; what is a rank's own belongs into a "
            "tensor that is Sharded over its axis"
        )

    def _wait_for_notes(self) -> None:
        self._until(lambda: notes.left(self.folder, self.size))

    def _wait_for_first(self) -> None:
        self._until(self._over)
        if not (self.path / MANIFEST).exists():
            raise CheckpointError(
                f"{self.path} was not saved: the folder in which it was written is gone"
            )

    def _until(self, ready: Callable[[], bool]) -> None:
        try:
            notes.until(ready, self.folder)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path} was not saved: {error}") from None

    def _over(self) -> bool:
        return not self.folder.exists()


_IN_FLIGHT: dict[int, Saving] = {}  # by rank


def in_flight(at: Here | None) -> Saving | None:
    """What this rank saves in the background."""
    return _IN_FLIGHT.get(0 if at is None else at.rank)


def _tell_at_exit() -> None:
    """Waits for what is under way; says what nobody asked for."""
    notes.ENDING.set()
    for saving in list(_IN_FLIGHT.values()):
        error = attempt(saving.wait)
        if error is not None:
            print(f"fsfunc: {saving.path} was not saved:", file=sys.stderr)
            traceback.print_exception(error)


atexit.register(_tell_at_exit)
