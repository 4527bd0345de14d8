"""Folders that appear whole or not at all, and go as whole.

What is being written lies in ``.<name>.saving`` beside the place it will have, and gets
there by one rename. What is being deleted is first renamed to ``.<name>.deleting``. So
whatever has a checkpoint's name and a manifest is a complete one, whenever the process
was killed; the others' remains are removed by the next save.
"""

from __future__ import annotations

import errno
import fcntl
import fnmatch
import os
import re
import shutil
import uuid
from contextlib import suppress
from pathlib import Path

from fsfunc.checkpoint.manifest import MANIFEST

__all__ = [
    "appear",
    "begin_folder",
    "check_absent",
    "discard",
    "empty",
    "keep_newest",
    "latest",
    "names",
    "saving_folder",
    "sync",
]

_SAVING, _DELETING = ".saving", ".deleting"
_UNFINISHED = re.compile(r"\.(.+)\.(?:saving(?:-[0-9a-f]+)?|deleting)", re.S)


def latest(folder: str | os.PathLike, pattern: str = "*") -> Path | None:
    """The newest complete checkpoint in ``folder``, None where there is none.

    Args:
        pattern: what its name looks like, such as ``"step-*"``, where a folder holds
            others too.

    The newest is the one with the highest last number in its name (``step-00000200``);
    of names without numbers, the last by name. Every rank that sees the folder finds
    the same one.

    >>> import tempfile, torch, fsfunc as ff
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in (9, 10):
    ...         ff.save(f"{folder}/step-{step}", {"w": torch.ones(2)})
    ...     ff.latest(folder).name
    'step-10'
    """
    found = [p for p in _entries(Path(folder)) if p.match(pattern) and _is_complete(p)]
    return max(found, key=_age, default=None)


def check_absent(path: Path) -> None:
    """Raises where something is at ``path``.

    Raises:
        FileExistsError: names the way out.
    """
    if path.exists() or path.is_symlink():
        raise FileExistsError(
            f"{path} exists: a checkpoint is never written over; save under another "
            "name (such as the step's number), or remove it first"
        )


def begin_folder(path: Path) -> int:
    """Makes a folder to write into before it becomes ``path``; returns its lock.

    While the lock (a file descriptor) is open the folder is in use. What killed
    processes left, of this name or of one like it, is locked no more and removed.

    Raises:
        FileExistsError: another process is saving ``path``.
        OSError: the folder around it cannot be made or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for remains in _entries(path.parent):
        if _remains_of(remains, path):
            _remove_unlocked(remains)
    # Locked before it has the name by which others would find it unlocked.
    folder = saving_folder(path)
    new = folder.with_name(f"{folder.name}-{uuid.uuid4().hex}")
    new.mkdir()
    lock = None
    try:
        lock = os.open(new, os.O_RDONLY | os.O_CLOEXEC)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(new, folder)
    except OSError as error:
        if lock is not None:
            os.close(lock)
        new.rmdir()
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise FileExistsError(f"another process is saving {path}") from error
        raise
    return lock


def _remove_unlocked(remains: Path) -> None:
    """Removes a folder that no living process writes into."""
    try:
        lock = os.open(remains, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # it has become a checkpoint meanwhile
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    except OSError:  # no locks here: take it for dead
        pass
    else:
        if not remains.exists():
            return
    finally:
        os.close(lock)
    shutil.rmtree(remains, ignore_errors=True)


def saving_folder(path: Path) -> Path:
    """Where the checkpoint that will be ``path`` is written."""
    return path.parent / f".{path.name}{_SAVING}"


def appear(folder: Path, path: Path) -> None:
    """Gives what was written its name, once the disk has all of it.

    Raises:
        FileExistsError: somebody else made ``path`` meanwhile.
    """
    sync(folder)
    if path.exists():
        raise FileExistsError(f"{path} was made by somebody else while it was saved")
    os.rename(folder, path)
    sync(path.parent)


def empty(folder: Path, files: str) -> None:
    """Removes files that were written for nothing, and leaves what ranks say there."""
    for name in fnmatch.filter(names(folder), files):
        with suppress(OSError):
            (folder / name).unlink()


def names(folder: Path) -> list[str]:
    """What lies in a folder, by name; nothing where it is gone, or goes meanwhile.

    Another rank may give it its name, or remove it, at any time; `Path.glob` raises
    where that comes after its first look.
    """
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


def discard(folder: Path) -> None:
    """Removes what was written for nothing."""
    shutil.rmtree(folder, ignore_errors=True)


def keep_newest(path: Path, keep: int) -> None:
    """Deletes all checkpoints named as ``path`` is but itself and the newest others.

    ``keep`` stay in all. Names are alike that differ in their last number alone.
    """
    family = [p for p in _entries(path.parent) if _alike(p.name, path.name)]
    others = [p for p in family if _is_complete(p) and p.name != path.name]
    for old in sorted(others, key=_age)[: len(others) - (keep - 1)]:
        gone = old.parent / f".{old.name}{_DELETING}"
        os.rename(old, gone)
        shutil.rmtree(gone)


def sync(folder: Path) -> None:
    """Waits until the disk has a folder's entries."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _is_complete(path: Path) -> bool:
    return _UNFINISHED.fullmatch(path.name) is None and (path / MANIFEST).is_file()


def _remains_of(path: Path, other: Path) -> bool:
    """Whether ``path`` is what a killed process left of a checkpoint like ``other``."""
    found = _UNFINISHED.fullmatch(path.name)
    return bool(found) and path.is_dir() and _alike(found[1], other.name)


def _alike(a: str, b: str) -> bool:
    """Whether two names differ in their last number alone, as two steps of a run do."""
    (before, one, after), (same, other, end) = _parts(a), _parts(b)
    return (before, bool(one), after) == (same, bool(other), end)


def _age(path: Path) -> tuple[int, str]:
    return int(_parts(path.name)[1] or -1), path.name


def _parts(name: str) -> tuple[str, str, str]:
    """What stands before a name's last number, that number, and what follows it."""
    found = re.fullmatch(r"(.*?)(\d+)(\D*)", name, re.S)
    return found.groups() if found else (name, "", "")  # type: ignore[return-value]
