"""Files of a checkpoint, opened: regular ones alone, and without waiting."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from fsfunc.checkpoint.stored import CheckpointError

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
    """True if an entry of ``folder`` lies in it, links followed.

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
        f"{path} is a link, a pipe or a device, and no regular file: what belongs to a "
        "checkpoint lies in its folder; put the file itself there"
    )
