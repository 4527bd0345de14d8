"""Folders that appear and are deleted atomically, and the regular files in them.

A save writes into a folder of its own, ``.<name>.saving-<process>``, which nobody else
has, and renames it to ``<name>`` when it is complete; before a checkpoint is deleted it
is renamed to ``.<name>.deleting-<process>``. So a folder with a checkpoint's name and a
manifest is complete, whenever a process was killed, and of two jobs that save one path
the second raises. The next save removes what killed processes left. Only files that
saves write are ever removed, by name, and no link is followed.
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
_OWN = re.compile(r"\.(.+)\.(saving|deleting)-([0-9a-f]{8})([0-9a-f]{8})[0-9a-f]{16}")
_WRITTEN = re.compile(
    r"shard-\d{5}.*\.safetensors|rank-\d{5,}\.json(?:\.part)?|" + re.escape(MANIFEST)
)  # by saves
_LONG = 86_400.0  # seconds without a change, after which whatever wrote it has ended
_IN_USE: set[str] = set()  # names that this process writes under


def own_name() -> str:
    """32 hexadecimal digits, unique: from host, process and a random number."""
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


def saving_path(path: Path, own: str) -> Path:
    """The path that the holder of an `own_name` writes until ``path`` is complete."""
    return path.with_name(f".{path.name}.saving-{own}")


def begin_saving(path: Path, own: str) -> Path:
    """The `saving_path` of ``path``, in use by now.

    What killed processes left beside it, of names that are like it but for their last
    number, is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = saving_path(path, own)
    _IN_USE.add(part.name)
    for remains in entries(path.parent):
        of = _OWN.fullmatch(remains.name)
        if of and alike(of[1], path.name) and _is_dead(remains, of[3], of[4]):
            discard(remains)
    return part


def _is_dead(remains: Path, host: str, process: str) -> bool:
    """True if no process can be writing under a name of `own_name`."""
    if remains.name in _IN_USE:
        return False
    if int(host, 16) == _host():
        number = int(process, 16)
        if number == os.getpid() or not _runs(number):
            return True
    with suppress(OSError):
        times = [os.lstat(path).st_mtime for path in (remains, *entries(remains))]
        return time.time() - max(times) > _LONG
    return False


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def appear(part: Path, path: Path) -> None:
    """Renames what was written to its name, when all of it is on the disk.

    Raises:
        FileExistsError: ``path`` exists by now.
    """
    sync(part)
    try:
        check_absent(path)  # an empty folder would be replaced
        os.rename(part, path)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise FileExistsError(f"{path} exists by now") from error
        raise
    _IN_USE.discard(part.name)
    sync(path.parent)


def discard(part: Path) -> None:
    """Removes what saves wrote, and the folder if it is empty; it is in use no more.

    Other files are the user's: they stay, and a folder that was a checkpoint gets its
    name back.
    """
    _IN_USE.discard(part.name)
    if not part.is_dir() or part.is_symlink():
        with suppress(OSError):
            part.unlink()
        return
    for path in entries(part):
        if _WRITTEN.fullmatch(path.name):
            with suppress(OSError):
                path.unlink()
    try:
        part.rmdir()
    except OSError:
        own = _OWN.fullmatch(part.name)
        if own is not None and own[2] == "deleting":
            with suppress(OSError):
                part.rename(part.with_name(own[1]))


def delete(path: Path) -> None:
    """Removes a checkpoint, of which from the first moment on nothing has its name.

    Of a link itself alone, and nothing where it leads.
    """
    if path.is_symlink():
        path.unlink()
        return
    gone = path.with_name(f".{path.name}.deleting-{own_name()}")
    os.rename(path, gone)
    discard(gone)


def sync(path: Path) -> None:
    """Waits until the disk has a folder's entries, or a file."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def entries(folder: Path) -> list[Path]:
    """The paths in a folder; none of what is no folder, or is removed meanwhile."""
    try:
        return sorted(folder / name for name in os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def is_unfinished(path: Path) -> bool:
    """True for the name of a folder that is being written or deleted."""
    return _UNFINISHED.fullmatch(path.name) is not None


def alike(a: str, b: str) -> bool:
    """True if two names differ in their last number alone, as two steps of a run do."""
    one, other = _Name.of(a), _Name.of(b)
    around = one.before == other.before and one.after == other.after
    return around and bool(one.number) == bool(other.number)


def age(path: Path) -> tuple[int, str]:
    """Sorts checkpoints by the last number in their names, the oldest first."""
    return int(_Name.of(path.name).number or -1), path.name


class _Name(NamedTuple):
    """A name, split at its last number, which is "" where it has none."""

    before: str
    number: str
    after: str

    @classmethod
    def of(cls, name: str) -> _Name:
        found = re.fullmatch(r"(.*?)(\d+)(\D*)", name, re.S)
        return cls(*found.groups()) if found else cls(name, "", "")


_PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".distcp", ".metadata")


def open_regular(path: Path, *, follow: bool = False) -> int:
    """A file descriptor, to read from.

    Args:
        follow: it may be a link: one that the user gave, or that `stays`.

    Raises:
        CheckpointError: there is none; or it is a link, a pipe or a device, which may
            lead out of the folder or never answer.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe would wait for a writer
    try:
        file = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise CheckpointError(
                f"{path} is missing: go back to an earlier checkpoint"
            ) from error
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EOPNOTSUPP):
            raise _odd(path) from error
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise _odd(path)
    return file


def read_regular(path: Path, most: int, *, follow: bool = False) -> bytes:
    """The first ``most`` bytes of a file, as `open_regular` opens it."""
    with open(open_regular(path, follow=follow), "rb") as file:
        return file.read(most)


def stays(path: Path, folder: Path) -> bool:
    """True if an entry of ``folder`` is in it when links are followed.

    Or in Hugging Face's cache, whose snapshots are folders of links into its blobs.
    """
    real, home = (Path(os.path.realpath(p)) for p in (path, folder))
    cache = home.parent.parent / "blobs"
    return real.is_relative_to(home) or (
        home.parent.name == "snapshots" and real.is_relative_to(cache)
    )


def is_pickle(path: Path) -> bool:
    """True if a file is named as pickles are, or begins as they do."""
    if path.name.endswith(_PICKLES):
        return True
    if not path.is_file():
        return False
    head = read_regular(path, 8, follow=True)  # of torch.save: a zip; before it, none
    return head.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04"))


def refuse_pickle(path: Path) -> CheckpointError:
    """The error that is raised in place of loading a pickle."""
    return CheckpointError(
        f"{path} holds pickles, which can run any code and are never loaded: turn it "
        "into safetensors with the library that wrote it (torch.load with "
        "weights_only=True, then safetensors.torch.save_file)"
    )


def _odd(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is a link, a pipe or a device, and no regular file: put the file "
        "itself into the checkpoint's folder"
    )
