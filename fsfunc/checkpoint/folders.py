"""Folders that appear and are deleted atomically.

A checkpoint is written in ``.<name>.saving`` and renamed when it is complete. Before it
is deleted it is renamed to ``.<name>.deleting-...``. So a folder with a checkpoint's
name and a manifest is complete, whenever a process was killed. Other folders have a
mark, and the next save removes them. Only files that saves write are ever removed, by
name, and no link is followed.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import re
from contextlib import suppress
from pathlib import Path

from fsfunc.checkpoint.manifest import MANIFEST
from fsfunc.checkpoint.save_lock import (
    MARK,
    describe_job,
    has_gone,
    is_alive,
    is_fresh,
    is_marked,
    job_of,
    mark,
    own_name,
)

_SAVING, _DELETING = ".saving", ".deleting"
_UNFINISHED = re.compile(r"\.(.+)\.(saving|deleting)(?:-[0-9a-f]+)?", re.S)
_WRITTEN = re.compile(
    r"shard-\d{5}.*\.safetensors|rank-\d{5,}\.json(?:\.part)?|failed-\d{5,}(?:\.part)?|"
    + re.escape(MANIFEST)
)  # by saves
_OWN = re.compile(r".*-([0-9a-f]{32})", re.S)  # the name before the mark is there


def check_absent(path: Path) -> None:
    """Raises where something is at ``path``.

    Raises:
        FileExistsError: names the way out.
    """
    if os.path.lexists(path):
        raise FileExistsError(
            f"{path} exists: nothing is ever written over; choose another name (such "
            "as the step's number), or remove it first"
        )


def begin_folder(path: Path) -> int:
    """Makes a folder to write into before it becomes ``path``; returns its lock.

    Its mark is written first; while the lock (a file descriptor) is open it is in use.
    Folders that killed processes left, of this name or a similar one, have a mark that
    is not locked, and are removed; a folder without a mark is the user's.

    Raises:
        FileExistsError: another process is saving ``path``, or a folder of the user is
            where it would be written.
        OSError: the parent folder cannot be made or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Marked and locked before it has the name by which others find it.
    folder = saving_folder(path)
    new = folder.with_name(f"{folder.name}-{own_name()}")
    new.mkdir()
    lock = None
    try:
        lock = mark(new)
        now = os.fstat(lock).st_mtime
        for remains in entries(path.parent):
            if remains != new and _remains_of(remains, path):
                _remove_dead(remains, now)
        _check_free(folder, path)
        os.rename(new, folder)
    except BaseException as error:
        if lock is not None:
            os.close(lock)
        discard(new)
        if getattr(error, "errno", None) in (errno.ENOTEMPTY, errno.EEXIST):
            raise FileExistsError(f"another process is saving {path}") from error
        raise
    return lock


def begin_file(path: Path) -> Path:
    """The name of a file to write before it becomes ``path``, which nothing has.

    What killed processes of this host left under such names is removed.
    """
    begin = f".{path.name}{_SAVING}-"
    for remains in entries(path.parent):
        own = _OWN.fullmatch(remains.name)
        if own and remains.name == begin + own[1] and has_gone(own[1]):
            with suppress(OSError):
                remains.unlink()
    return path.with_name(begin + own_name())


def _check_free(folder: Path, path: Path) -> None:
    if is_marked(folder):
        raise FileExistsError(
            f"another process is saving {path}: {describe_job(job_of(folder))}; give "
            f"each job a folder of its own, or remove {folder} where that job is dead"
        )
    if os.path.lexists(folder):
        raise FileExistsError(
            f"{folder} is where {path} would be written, and no save made it: move it "
            "away"
        )


def _remove_dead(remains: Path, now: float) -> None:
    """Removes a folder that no living process writes into."""
    own = _OWN.fullmatch(remains.name)
    gone = own is not None and has_gone(own[1])
    if is_marked(remains):  # or killed before the mark said whose it is
        if not is_alive(remains, now) or gone and not job_of(remains):
            if remains.name.endswith(_SAVING):  # a name that a save may want
                other = remains.with_name(f"{remains.name}-{own_name()}")
                with suppress(OSError):
                    remains = remains.rename(other)
            discard(remains)
    elif own and (gone or not is_fresh(remains, now)):
        with suppress(OSError):  # killed after its mark went, or before it was marked
            remains.rmdir()


def saving_folder(path: Path) -> Path:
    """The folder in which the checkpoint ``path`` is written."""
    return path.parent / f".{path.name}{_SAVING}"


def appear(folder: Path, path: Path) -> None:
    """Renames the folder to its name, when all of it is on the disk.

    Raises:
        FileExistsError: ``path`` exists by now.
    """
    sync(folder)
    if os.path.lexists(path):
        raise FileExistsError(f"{path} was made by somebody else while it was saved")
    os.rename(folder, path)
    with suppress(FileNotFoundError):  # the mark of what is being saved
        (path / MARK).unlink()
    sync(path.parent)


def empty(folder: Path, files: str) -> None:
    """Removes files that were written for nothing, and leaves what ranks say there."""
    for name in fnmatch.filter(names(folder), files):
        with suppress(OSError):
            (folder / name).unlink()


def names(folder: Path) -> list[str]:
    """The names in a folder; none if it does not exist, or is removed meanwhile.

    Another rank may rename or remove it at any time, in which case `Path.glob` raises.
    """
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


def discard(folder: Path) -> None:
    """Removes the files that saves wrote into a folder, and the folder if it is empty.

    The mark goes last, in case this is killed. Other files are the user's: they stay,
    and a folder that was a checkpoint gets its name back.
    """
    marks = [MARK] if is_marked(folder) else []
    for name in [*filter(_WRITTEN.fullmatch, names(folder)), *marks]:
        with suppress(OSError):
            (folder / name).unlink()
    with suppress(FileNotFoundError):
        try:
            folder.rmdir()
        except OSError:
            found = _UNFINISHED.fullmatch(folder.name)
            if found is not None and found[2] == _DELETING[1:]:
                with suppress(OSError):
                    folder.rename(folder.with_name(found[1]))


def delete(path: Path) -> None:
    """Removes a checkpoint, of which from the first moment on nothing has its name.

    Of a link itself alone, and nothing where it leads.
    """
    if path.is_symlink():
        path.unlink()
        return
    gone = path.with_name(f".{path.name}{_DELETING}-{own_name()}")
    with suppress(FileExistsError):
        os.close(mark(path))
    os.rename(path, gone)
    discard(gone)


def sync(folder: Path) -> None:
    """Waits until the disk has a folder's entries."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def entries(folder: Path) -> list[Path]:
    """The paths in a folder; none of what is no folder."""
    return sorted(folder.iterdir()) if folder.is_dir() else []


def is_unfinished(path: Path) -> bool:
    """True for the name of a folder that is being written or deleted."""
    return _UNFINISHED.fullmatch(path.name) is not None


def _remains_of(path: Path, other: Path) -> bool:
    """True for the remains of a killed save of a checkpoint like ``other``."""
    found = _UNFINISHED.fullmatch(path.name)
    return bool(found) and path.is_dir() and alike(found[1], other.name)


def alike(a: str, b: str) -> bool:
    """True if two names differ in their last number alone, as two steps of a run do."""
    return family_of(a) == family_of(b)


def family_of(name: str) -> tuple[str, bool, str]:
    """A name without its last number, as a key."""
    before, number, after = _parts(name)
    return before, bool(number), after


def age(path: Path) -> tuple[int, str]:
    """Sorts checkpoints by the last number in their names, the oldest first."""
    return int(_parts(path.name)[1] or -1), path.name


def _parts(name: str) -> tuple[str, str, str]:
    """A name, split into the text before its last number, that number, and the rest."""
    found = re.fullmatch(r"(.*?)(\d+)(\D*)", name, re.S)
    return found.groups() if found else (name, "", "")  # type: ignore[return-value]
