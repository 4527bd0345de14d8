"""The save of one checkpoint on one rank, at once or in the background.

`saving` makes a `SaveTask` once ranks agree on what they save. Its steps are the same
in both cases; between them ranks wait for each other, by collectives (``finish``) or,
in a thread, by messages (``start``):

    make_folder     the first rank
    find_folder     all: a file system that is not shared is found here
    write           all: files, and a report of them
    complete        the first rank: the manifest from the files' headers, and the name
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, TextIO

import torch

from fsfunc.checkpoint import agreement, finding, folders
from fsfunc.checkpoint.agreement import RankStatus, SavePeers, attempt, everywhere
from fsfunc.checkpoint.contents import Contents, assign_parts, merge_generators
from fsfunc.checkpoint.headers import (
    VERSION,
    check_files,
    extra_facts,
    read_header,
    tensors_from,
    write_manifest,
)
from fsfunc.checkpoint.parsing import InvalidTable, JsonTable
from fsfunc.checkpoint.safetensors import write_parts
from fsfunc.checkpoint.stored import CheckpointError, Stored, StoredTensor
from fsfunc.comm.mesh import Here
from fsfunc.runtime import host_copies
from fsfunc.sharded.donated import lock
from fsfunc.transforms.donation import version


@dataclass
class SaveTask:
    """A checkpoint that this rank saves, with all others of its mesh.

    Until it is over, donated steps do not write into the memory of what is saved.
    """

    path: Path
    unique_name: str  # by which all ranks know the folder that the first one makes
    here: Here | None
    contents: Contents
    metadata: dict[str, Any]
    keep: int | None  # how many checkpoints of the series stay; None: all
    thread: Thread | None = None
    error: BaseException | None = None
    peers: SavePeers | None = None  # the ranks to exchange messages with, in background
    _is_finished: bool = False
    _versions: list[int] = field(default_factory=list)  # of the tensors, at the call
    _stream_ends: list[torch.cuda.Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        leaves = self.contents.tensors.values()
        self.rank: int = 0 if self.here is None else self.here.rank
        self.size: int = 1 if self.here is None else self.here.mesh.size
        self.is_first: bool = self.rank == 0
        self.folder: Path = folders.saving_path(self.path, self.unique_name)
        # The state is not copied: a donated step that is given it makes a new one while
        # it is locked. What the user writes by hand is found by versions, in `write`.
        self.release: Callable[[], None] = lock(leaf.part for leaf in leaves)
        self._versions = [version(leaf.part) for leaf in leaves]

    # The steps of a save; ranks wait for each other between them

    def make_folder(self) -> None:
        """Makes the folder that all ranks write into, on the first rank."""
        if self.is_first:
            folders.begin_saving(self.path, self.unique_name).mkdir()

    def find_folder(self) -> None:
        """Raises if this rank does not see the folder."""
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
        contents = self.contents
        files = write_parts(self.folder, self.rank, assign_parts(contents, self.here))
        for leaf, version_before in zip(
            contents.tensors.values(), self._versions, strict=True
        ):
            if version(leaf.part) != version_before:
                raise CheckpointError(
                    f"{leaf.path!r} was changed in place while it was being saved: the "
                    "checkpoint would hold neither the old values nor the new ones; "
                    "wait() first, or change a copy"
                )
        agreement.write_status(
            self.folder, self.rank, RankStatus(files, contents.random)
        )

    def complete(self) -> None:
        """Writes the manifest and gives the folder its name, on the first rank."""
        if not self.is_first:
            return
        statuses = [agreement.take_status(self.folder, r) for r in range(self.size)]
        write_manifest(self._derive_table(statuses), self.folder)
        folders.publish(self.folder, self.path)
        if self.keep is not None:
            finding.delete_older(self.path, self.keep)

    def finish(self) -> None:
        """Writes the checkpoint, all ranks together."""
        try:
            everywhere(self.here, self.write)
            everywhere(self.here, self.complete)
        except BaseException:
            self.abandon()
            raise
        self.release()
        self._is_finished = True

    def abandon(self) -> None:
        """Removes what was written, and unlocks the memory."""
        self.release()
        if self.is_first:
            folders.discard(self.folder)

    # In the background

    def start(self) -> None:
        """Continues in the background; at once if ranks cannot send messages."""
        if self.here is not None and self.size > 1:
            if self.here.link.board is None:
                self.finish()
                return
            self.peers = SavePeers(self.here, self.path)
        self._stream_ends = host_copies.record_ends(
            h.part for h in self.contents.tensors.values()
        )
        # A daemon: Python would wait for another one before it calls `_wait_at_exit`.
        self.thread = Thread(target=self.run, name=f"save {self.path}", daemon=True)
        _IN_FLIGHT[self.rank] = self
        # The last to be registered runs first: while ranks still receive messages.
        atexit.unregister(_wait_at_exit)
        atexit.register(_wait_at_exit)
        self.thread.start()

    def done(self) -> bool:
        """Returns whether it is over, well or not; it never waits."""
        if self.thread is not None and self.thread.is_alive():
            return False
        is_over = self._is_finished or self.error is not None or self.is_first
        # Another rank's is over when the first one has told it so.
        return is_over or self.peers is not None and bool(self.peers.read_messages())

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
        # On other ranks than the first: their parts are of use if all are complete.
        peers = None if self.is_first or self._is_finished else self.peers
        if self.error is None and peers is not None:
            self.error = attempt(peers.wait)
        self._is_finished = True
        if self.error is not None:
            raise self.error

    def run(self) -> None:
        """Saves in the thread, and tells the other ranks how it went."""
        failure, peers = "", self.peers
        try:
            # The caller's streams may still compute what is saved.
            for end in self._stream_ends:
                end.synchronize()
            self.write()
            if self.is_first and peers is not None:
                peers.wait()
            self.complete()
        except BaseException as error:
            self.error = error
            cause = f"{type(error).__name__}: {error}"
            failure = f"rank {self.rank} could not go on: {cause}"
        if peers is not None:
            peers.tell(failure)
        if self.is_first and failure:
            # Not before all ranks are done: one that writes late would raise that the
            # folder is missing, and not what went wrong.
            if peers is not None:
                attempt(partial(peers.wait, all_of_them=True))
            folders.discard(self.folder)
        self.release()
        # The caller may keep the task for long, and the state must not live with it.
        self.contents, self._versions, self._stream_ends = Contents(), [], []

    # What the first rank makes of all reports

    def _derive_table(self, statuses: Sequence[RankStatus]) -> Stored:
        """Derives the table from the headers of the files that ranks have written.

        What the layouts say must be there is compared with it: so a file that is
        damaged while it is written is never part of a checkpoint.
        """
        contents = self.contents
        expected = Stored(
            self.folder,
            {
                path: StoredTensor(
                    leaf.layout.shape, leaf.part.dtype, (), path, leaf.stacked_axes
                )
                for path, leaf in contents.tensors.items()
            },
            contents.values,
            self.metadata,
            {} if self.here is None else dict(self.here.mesh.axes),
            {name: f for status in statuses for name, f in status.files.items()},
            merge_generators([status.random for status in statuses]),
            VERSION,
        )
        # Of files by their lengths only; what their headers say is compared below.
        check_files(expected, expected.files)
        headers = [read_header(self.folder / name) for name in expected.files]
        try:
            tensors = tensors_from(headers, JsonTable(extra_facts(expected)))
        except InvalidTable as error:
            raise CheckpointError(
                f"{self.path} was not written as it was to be: {error}"
            ) from error
        for path, leaf in expected.tensors.items():
            written = tensors.get(path, leaf)
            if written._replace(chunks=()) != leaf or not written.is_whole:
                raise CheckpointError(
                    f"the ranks' parts of {path!r} {leaf} do not make it up: every "
                    "rank must save the same tree, with the same layouts"
                )
        return replace(
            expected, tensors={path: tensors[path] for path in expected.tensors}
        )


_IN_FLIGHT: dict[int, SaveTask] = {}  # by rank; simulated ranks share the process


def in_flight(here: Here | None) -> SaveTask | None:
    """Returns the save that this rank has in flight, if there is one."""
    return _IN_FLIGHT.get(0 if here is None else here.rank)


def _wait_at_exit() -> None:
    """Waits for saves in flight; prints errors that were not raised, and exits by 120.

    Python uses that status for output that cannot be written at exit.
    """
    for task in list(_IN_FLIGHT.values()):
        error = attempt(task.wait)
        if error is not None:
            print(f"fsfunc: {task.path} was not saved:", file=sys.stderr)
            traceback.print_exception(error)
            sys.stdout = _FailingOutput(sys.stdout)


class _FailingOutput:
    """An output that cannot be flushed as Python ends.

    An exception in an atexit function leaves the exit status 0, which would tell the
    launcher that all went well. A failed flush of stdout makes it 120.
    """

    def __init__(self, stream: TextIO | _FailingOutput):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        self._stream.flush()
        if sys.is_finalizing():
            raise CheckpointError("a save in the background failed: exit status 120")


# The saves are the parent's: a child, such as a data loader's worker, has no thread of
# theirs, and would wait for ever.
os.register_at_fork(after_in_child=_IN_FLIGHT.clear)
