"""How each rank fares that saves, as files in the folder that ranks write together.

So a save in the background needs no collective, which could meet those of training.
"""

from __future__ import annotations

import fnmatch
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

from fsfunc.checkpoint.folders import names
from fsfunc.checkpoint.stored import CheckpointError, Chunk, StoredFile

__all__ = [
    "ENDING",
    "RankStatus",
    "failure",
    "report",
    "report_failure",
    "reported",
    "take_status",
    "wait_until",
]

ENDING = Event()  # this process ends: others may have been killed
_PATIENCE = 15.0  # seconds without a word; a disk may take that long to answer


class RankStatus(NamedTuple):
    """What a rank has written, and what it takes the whole to be.

    Args:
        files: its files.
        chunks: the boxes of each leaf that it wrote.
        random: its default generators' states, by device type.
        values: the numbers, strings and bools of its tree.
        tree: a digest of the paths, shapes and dtypes of its tree.
    """

    files: Mapping[str, StoredFile]
    chunks: Mapping[str, list[Chunk]]
    random: Mapping[str, str]
    values: Mapping[str, Any]
    tree: str


def report(folder: Path, rank: int, status: RankStatus) -> None:
    """Tells the others that a rank's files are on disk."""
    _put(_path(folder, rank), json.dumps(status._asdict()))


def reported(folder: Path, size: int) -> bool:
    """Whether all ranks' files are on disk."""
    return all(_path(folder, rank).exists() for rank in range(size))


def take_status(folder: Path, rank: int) -> RankStatus:
    """Takes what a rank reported out of the folder.

    Raises:
        FileNotFoundError: it is not there.
    """
    said = json.loads(_path(folder, rank).read_text())
    _path(folder, rank).unlink()
    files = {
        name: StoredFile(n, tuple(s)) for name, (n, s, *_) in said["files"].items()
    }
    chunks = {
        path: [Chunk(name, at, tuple(o), tuple(n)) for name, at, o, n in boxes]
        for path, boxes in said["chunks"].items()
    }
    return RankStatus(files, chunks, said["random"], said["values"], said["tree"])


def report_failure(folder: Path, rank: int, error: BaseException) -> None:
    """Tells the others that a rank cannot go on.

    On a full disk there may be no room for a word; a short link needs none.
    """
    path = folder / f"failed-{rank:05}"
    try:
        _put(path, f"{type(error).__name__}: {error}")
    except OSError:
        with suppress(FileExistsError, FileNotFoundError):
            os.symlink(type(error).__name__[:40], path)


def failure(folder: Path) -> str | None:
    """What a rank said that could not go on, if any."""
    for name in fnmatch.filter(names(folder), "failed-?????"):
        path, rank = folder / name, int(name.removeprefix("failed-"))
        with suppress(FileNotFoundError):  # the folder may go at any time
            why = os.readlink(path) if path.is_symlink() else path.read_text()
            return f"rank {rank} could not go on: {why}"
    return None


def wait_until(ready: Callable[[], bool], folder: Path, path: Path) -> None:
    """Returns when ``ready()``.

    Args:
        folder: where the ranks write.
        path: the place that it will have, for messages.

    Raises:
        CheckpointError: a rank failed; or this process ends, and no rank has written
            anything for a while.
    """
    pause, seen, since = 0.001, None, time.monotonic()
    while not ready():
        if (why := failure(folder)) is not None:
            raise CheckpointError(f"{path} was not saved: {why}")
        if ENDING.is_set():
            now = _sizes(folder)
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > _PATIENCE:
                raise CheckpointError(
                    f"{path} was not saved: this process ends, and for {_PATIENCE:.0f} "
                    "s no rank has written anything"
                )
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05}.json"


def _put(path: Path, text: str) -> None:
    """A file that is there whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    os.rename(part, path)


def _sizes(folder: Path) -> dict[str, int]:
    found = {}
    for name in names(folder):
        with suppress(FileNotFoundError):
            found[name] = (folder / name).stat().st_size
    return found
