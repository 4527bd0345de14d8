"""Folders that appear and are deleted atomically, and the regular files in them.

A save writes into a folder with a name that no other process has, and renames it when
it is complete. A checkpoint is renamed before it is deleted:

    .step-7.saving-<unique> --publish--> step-7 --delete--> .step-7.deleting-<unique>

So a folder with a checkpoint's name and a manifest is complete, whenever a process was
killed; and of two jobs that save one path the second raises. The next save removes what
killed processes left. Only files that saves write are ever removed, by name, and no
link is followed.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import socket
import stat
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fsfunc.checkpoint.stored import CheckpointError

MANIFEST = "fsfunc.json"  # in a folder with a checkpoint's name: it is complete
_UNFINISHED = re.compile(r"\.(.+)\.(saving|deleting)(?:-[0-9a-f]+)?", re.S)
_UNIQUE_NAME = re.compile(
    r"\.(.+)\.(saving|deleting)-([0-9a-f]{8})([0-9a-f]{8})[0-9a-f]{16}"
)
_WRITTEN_BY_SAVES = re.compile(
    r"shard-\d{5}.*\.safetensors|rank-\d{5,}\.json(?:\.part)?|" + re.escape(MANIFEST)
)
# By exports, in a folder that is not complete: in another one they may be a user's.
_WRITTEN_BY_EXPORTS = re.compile(
    r"model(?:-\d{5}-of-\d{5})?\.safetensors(?:\.index\.json)?"
)
# Of a process on another host nobody can ask whether it runs: it has ended if nothing
# has changed for so many seconds.
_ABANDONED_AFTER = 86_400.0
_NAMES_IN_USE: set[str] = set()  # names that this process writes under


def unique_name() -> str:
    """Returns 32 hexadecimal digits: the host, the process and a random number."""
    return f"{_host():08x}{os.getpid():08x}{secrets.token_hex(8)}"


def _host() -> int:
    return zlib.crc32(socket.gethostname().encode())


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


def saving_path(path: Path, unique: str) -> Path:
    """Returns the path that is written to until ``path`` is complete."""
    return path.with_name(f".{path.name}.saving-{unique}")


def begin_saving(path: Path, unique: str) -> Path:
    """Reserves the `saving_path` of ``path``, and removes what killed processes left.

    That is of the same series (`is_same_series`), beside ``path``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = saving_path(path, unique)
    _NAMES_IN_USE.add(part.name)
    for remains in list_folder(path.parent):
        match = _UNIQUE_NAME.fullmatch(remains.name)
        if match and is_same_series(match[1], path.name):
            if _is_dead(remains, host=match[3], process=match[4]):
                discard(remains)
    return part


def _is_dead(remains: Path, host: str, process: str) -> bool:
    """Returns whether no process can be writing any more under a `unique_name`."""
    if remains.name in _NAMES_IN_USE:
        return False
    if int(host, 16) == _host():
        pid = int(process, 16)
        # A name with this process's id that is not in use here is of an earlier one
        # with the same id.
        if pid == os.getpid() or not _is_running(pid):
            return True
    # A process that runs may be another one that was given the id meanwhile.
    with suppress(OSError):
        times = [os.lstat(path).st_mtime for path in (remains, *list_folder(remains))]
        return time.time() - max(times) > _ABANDONED_AFTER
    return False


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)  # signal 0 only asks whether it could be sent
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        pass
    return True


def publish(part: Path, path: Path) -> None:
    """Gives what was written its name, once all of it is on the disk.

    Raises:
        FileExistsError: ``path`` exists by now.
    """
    # Before the rename, or a power failure could leave the name without the entries.
    sync(part)
    try:
        check_absent(path)  # rename would replace an empty folder
        os.rename(part, path)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise FileExistsError(f"{path} exists by now") from error
        raise
    _NAMES_IN_USE.discard(part.name)
    sync(path.parent)


def discard(part: Path) -> None:
    """Removes the files that saves wrote, and the folder if it is empty then.

    Other files are the user's and stay. A folder that was a checkpoint, and still has
    such files, gets its name back. The name is in use no more.
    """
    _NAMES_IN_USE.discard(part.name)
    if not part.is_dir() or part.is_symlink():
        with suppress(OSError):
            part.unlink()
        return
    match = _UNIQUE_NAME.fullmatch(part.name)
    verb = "" if match is None else match[2]
    for path in list_folder(part):
        is_exported = _WRITTEN_BY_EXPORTS.fullmatch(path.name) and verb == "saving"
        if is_exported or _WRITTEN_BY_SAVES.fullmatch(path.name):
            with suppress(OSError):
                path.unlink()
    try:
        part.rmdir()
    except OSError:
        if match is not None and verb == "deleting":
            with suppress(OSError):
                part.rename(part.with_name(match[1]))


def delete(path: Path) -> None:
    """Removes a checkpoint; of a link, only the link itself."""
    if path.is_symlink():
        path.unlink()
        return
    # Renamed first: a checkpoint with half of its files never has its name.
    doomed = path.with_name(f".{path.name}.deleting-{unique_name()}")
    os.rename(path, doomed)
    discard(doomed)


def sync(path: Path) -> None:
    """Waits until the entries of a folder, or a file's bytes, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def list_folder(folder: Path) -> list[Path]:
    """Lists the paths in a folder; none if it is no folder, or removed meanwhile."""
    try:
        return sorted(folder / name for name in os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def is_unfinished(path: Path) -> bool:
    """Returns whether a folder has the name of one that is being written or deleted."""
    return _UNFINISHED.fullmatch(path.name) is not None


def is_same_series(a: str, b: str) -> bool:
    """Returns whether two names differ in their last number alone, as a run's steps do.

    >>> is_same_series("step-9", "step-10"), is_same_series("step-9", "best-9")
    (True, False)
    """
    first, second = _SeriesName.of(a), _SeriesName.of(b)
    same_around = first.before == second.before and first.after == second.after
    return same_around and bool(first.number) == bool(second.number)


def series_order(path: Path) -> tuple[int, str]:
    """Returns a key that sorts checkpoints by the last number in their names."""
    return int(_SeriesName.of(path.name).number or -1), path.name


class _SeriesName(NamedTuple):
    """A name, split at its last number; that is "" where the name has none."""

    before: str
    number: str
    after: str

    @classmethod
    def of(cls, name: str) -> _SeriesName:
        match = re.fullmatch(r"(.*?)(\d+)(\D*)", name, re.S)
        return cls(*match.groups()) if match else cls(name, "", "")


_PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".distcp", ".metadata")


def open_regular(path: Path, *, follow: bool = False) -> int:
    """Opens a regular file for reading, and returns its file descriptor.

    Args:
        follow: whether it may be a link. It may if the user named it, or if `is_within`
            was asked where it leads.

    Raises:
        CheckpointError: there is no file; or it is a link, a pipe or a device, which
            may lead out of the folder or never answer.
    """
    # Without O_NONBLOCK the open of a pipe would wait for a writer. The type is checked
    # of the open file, not of the path: between two calls another file could be there.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        file = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise CheckpointError(
                f"{path} is missing: go back to an earlier checkpoint"
            ) from error
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EOPNOTSUPP):
            raise _not_regular_error(path) from error
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise _not_regular_error(path)
    return file


def read_regular(path: Path, limit: int, *, follow: bool = False) -> bytes:
    """Reads the first ``limit`` bytes of a file, as `open_regular` opens it."""
    with open(open_regular(path, follow=follow), "rb") as file:
        return file.read(limit)


def is_within(path: Path, folder: Path) -> bool:
    """Returns whether an entry of ``folder`` is in it when links are followed.

    So is one in Hugging Face's cache, whose snapshots are folders of links into
    ``blobs``:

        models--x/snapshots/<commit>/model.safetensors -> ../../blobs/<hash>
    """
    real, home = (Path(os.path.realpath(p)) for p in (path, folder))
    cache = home.parent.parent / "blobs"
    return real.is_relative_to(home) or (
        home.parent.name == "snapshots" and real.is_relative_to(cache)
    )


def is_pickle(path: Path) -> bool:
    """Returns whether a file is named as pickles are, or begins as they do."""
    if path.name.endswith(_PICKLES):
        return True
    if not path.is_file():
        return False
    # torch.save writes a zip file; before torch 1.6 it wrote a bare pickle.
    head = read_regular(path, 8, follow=True)
    return head.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04"))


def pickle_error(path: Path) -> CheckpointError:
    """Returns the error that is raised in place of loading a pickle."""
    return CheckpointError(
        f"{path} holds pickles, which can run any code and are never loaded: turn it "
        "into safetensors with the library that wrote it (torch.load with "
        "weights_only=True, then safetensors.torch.save_file)"
    )


def _not_regular_error(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is a link, a pipe or a device, and no regular file: put the file "
        "itself into the checkpoint's folder"
    )
