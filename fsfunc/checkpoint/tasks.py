"""The save of one checkpoint on one rank, at once or in the background."""

from __future__ import annotations

import atexit
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from fsfunc.checkpoint import agreement, finding, folders
from fsfunc.checkpoint.agreement import Others, RankStatus, attempt, everywhere
from fsfunc.checkpoint.contents import Contents, parts_of, together
from fsfunc.checkpoint.headers import (
    VERSION,
    check_files,
    header_at,
    said_of,
    tensors_in,
    write_manifest,
)
from fsfunc.checkpoint.parsing import Said, Wrong
from fsfunc.checkpoint.safetensors import write_parts
from fsfunc.checkpoint.stored import CheckpointError, Stored, StoredTensor
from fsfunc.comm.mesh import Here
from fsfunc.runtime import host_copies
from fsfunc.sharded.donated import hold
from fsfunc.transforms.donation import version


@dataclass
class SaveTask:
    """A checkpoint that this rank saves, with all others of its mesh.

    It holds the memory of what is saved until it is over.
    """

    path: Path
    own: str  # by which all ranks know the folder that the first one makes
    at: Here | None
    contents: Contents
    metadata: dict[str, Any]
    keep: int | None
    thread: Thread | None = None
    error: BaseException | None = None
    others: Others | None = None  # who save it too
    _finished: bool = False
    _versions: list[int] = field(default_factory=list)
    _made: list[Any] = field(default_factory=list)  # the ends of what makes the tensors

    def __post_init__(self) -> None:
        held = self.contents.tensors.values()
        self.rank, self.size = (
            (0, 1) if self.at is None else (self.at.rank, self.at.mesh.size)
        )
        self.first = self.rank == 0
        self.folder = folders.saving_path(self.path, self.own)
        self.release = hold(h.part for h in held)
        self._versions = [version(h.part) for h in held]

    # What all ranks do one after another, and wait for each other

    def make_folder(self) -> None:
        """The first rank's: what others will write into."""
        if self.first:
            folders.begin_saving(self.path, self.own).mkdir()

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

    def write(self) -> None:
        """Writes this rank's files, and reports them."""
        found = self.contents
        files = write_parts(self.folder, self.rank, parts_of(found, self.at))
        for held, before in zip(found.tensors.values(), self._versions, strict=True):
            if version(held.part) != before:
                raise CheckpointError(
                    f"{held.path!r} was changed in place while it was being saved: the "
                    "checkpoint would hold neither the old values nor the new ones; "
                    "wait() first, or change a copy"
                )
        agreement.report(self.folder, self.rank, RankStatus(files, found.random))

    def complete(self) -> None:
        """The first rank's: writes the manifest and gives the folder its name."""
        if not self.first:
            return
        ranks = [agreement.take_status(self.folder, rank) for rank in range(self.size)]
        write_manifest(self._derived(ranks), self.folder)
        folders.appear(self.folder, self.path)
        if self.keep is not None:
            finding.keep_newest(self.path, self.keep)

    def finish(self) -> None:
        """Writes the checkpoint, all ranks together."""
        try:
            everywhere(self.at, self.write)
            everywhere(self.at, self.complete)
        except BaseException:
            self.abandon()
            raise
        self.release()
        self._finished = True

    def abandon(self) -> None:
        """Nothing comes of it: what was written is removed, what was held let go."""
        self.release()
        if self.first:
            folders.discard(self.folder)

    # In the background

    def start(self) -> None:
        """Continues in the background, or at once if ranks cannot send messages."""
        if self.at is not None and self.size > 1:
            if self.at.link.board is None:
                self.finish()
                return
            self.others = Others(self.at, self.path)
        self._made = host_copies.record_ends(
            h.part for h in self.contents.tensors.values()
        )
        # A daemon: at the end Python waits for it no longer than _tell_at_exit does.
        self.thread = Thread(target=self.run, name=f"save {self.path}", daemon=True)
        _IN_FLIGHT[self.rank] = self
        atexit.unregister(_tell_at_exit)
        atexit.register(_tell_at_exit)  # runs while ranks still receive messages
        self.thread.start()

    def done(self) -> bool:
        """True once it is over, well or not; it never waits."""
        if self.thread is not None and self.thread.is_alive():
            return False
        over = self._finished or self.error is not None or self.first
        return over or self.others is not None and bool(self.others.said())

    def wait(self) -> None:
        """Returns when the checkpoint is complete.

        Raises:
            what went wrong, on this rank or on another; CheckpointError: a rank was
                killed, is stopped, or is out of reach: names it.
        """
        if self.thread is not None:
            self.thread.join()
        if _IN_FLIGHT.get(self.rank) is self:
            del _IN_FLIGHT[self.rank]
        others = None if self.first or self._finished else self.others
        if self.error is None and others is not None:
            self.error = attempt(others.wait)
        self._finished = True
        if self.error is not None:
            raise self.error

    def run(self) -> None:
        """The body of the thread."""
        said, others = "", self.others
        try:
            for end in self._made:  # the caller's streams still compute what is saved
                end.synchronize()
            self.write()
            if self.first and others is not None:
                others.wait()
            self.complete()
        except BaseException as error:
            self.error = error
            said = f"rank {self.rank} could not go on: {type(error).__name__}: {error}"
        if others is not None:
            others.tell(said)
        if self.first and said:
            if others is not None:  # what they write is removed once they are done
                attempt(partial(others.wait, all_of_them=True))
            folders.discard(self.folder)
        self.release()
        # It may be kept for long.
        self.contents, self._versions, self._made = Contents(), [], []

    # What the first rank makes of all reports

    def _derived(self, ranks: Sequence[RankStatus]) -> Stored:
        """The table of what the ranks have written, by the headers of their files."""
        contents = self.contents
        due = Stored(
            self.folder,
            {
                path: StoredTensor(h.layout.shape, h.part.dtype, (), path, h.own)
                for path, h in contents.tensors.items()
            },
            contents.values,
            self.metadata,
            {} if self.at is None else dict(self.at.mesh.axes),
            {name: file for rank in ranks for name, file in rank.files.items()},
            together([rank.random for rank in ranks]),
            VERSION,
        )
        check_files(due, due.files)
        headers = [header_at(self.folder / name) for name in due.files]
        try:
            found = tensors_in(headers, Said(said_of(due)))
        except Wrong as error:
            raise CheckpointError(
                f"{self.path} was not written as it was to be: {error}"
            ) from error
        for path, leaf in due.tensors.items():
            written = found.get(path, leaf)
            if written._replace(chunks=()) != leaf or not written.is_whole:
                raise CheckpointError(
                    f"the ranks' parts of {path!r} {leaf} do not make it up: every "
                    "rank must save the same tree, with the same layouts"
                )
        return replace(due, tensors={path: found[path] for path in due.tensors})


_IN_FLIGHT: dict[int, SaveTask] = {}  # by rank


def in_flight(at: Here | None) -> SaveTask | None:
    """The save that this rank has in flight."""
    return _IN_FLIGHT.get(0 if at is None else at.rank)


def _tell_at_exit() -> None:
    """Waits for saves in flight; prints errors that were not raised, and exits by 120.

    Python uses that status for output that cannot be written at exit.
    """
    for task in list(_IN_FLIGHT.values()):
        error = attempt(task.wait)
        if error is not None:
            print(f"fsfunc: {task.path} was not saved:", file=sys.stderr)
            traceback.print_exception(error)
            sys.stdout = _Failing(sys.stdout)


class _Failing:
    """An output that cannot be flushed as Python ends."""

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        self._stream.flush()
        if sys.is_finalizing():
            raise CheckpointError("a save in the background failed: exit status 120")


os.register_at_fork(after_in_child=_IN_FLIGHT.clear)  # the parent's
