"""Advice for errors of the operating system."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["advised", "way_out"]

_FULL = (
    "make room, or name a folder on another disk; of this nothing is left, and earlier "
    "checkpoints are whole"
)
_RIGHTS = "name another folder, or ask for the rights to this one"
_BROKEN = "the disk or the network to it failed: look at it, and try again"
_ADVICE = {
    errno.ENOSPC: _FULL, errno.EDQUOT: _FULL, errno.EFBIG: _FULL,
    errno.EACCES: _RIGHTS, errno.EPERM: _RIGHTS, errno.EROFS: _RIGHTS,
    errno.EIO: _BROKEN, errno.ESTALE: _BROKEN, errno.ETIMEDOUT: _BROKEN,
    errno.EMFILE: "too many files are open: close some, or raise `ulimit -n`",
    errno.ENFILE: "too many files are open on this machine: close some",
    errno.ENAMETOOLONG: "name a shorter path",
    errno.ENOTDIR: "a file lies where a folder should: name another path",
    errno.ELOOP: "links lead in a circle: name the folder itself",
}  # fmt: skip


def advised(error: BaseException) -> BaseException:
    """``error``; one of the system's with what to do about it.

    >>> str(advised(OSError(errno.ENAMETOOLONG, "File name too long", "xxx")))
    "[Errno 36] File name too long (name a shorter path): 'xxx'"
    """
    advice = _ADVICE.get(getattr(error, "errno", None) or 0)
    if not isinstance(error, OSError) or advice is None or advice in str(error):
        return error
    said = f"{error.strerror} ({advice})"
    better = OSError(error.errno, said, error.filename, None, error.filename2)
    return better.with_traceback(error.__traceback__)


@contextmanager
def way_out() -> Iterator[None]:
    """Errors of the system that come from here say what to do."""
    try:
        yield
    except OSError as error:
        if (better := advised(error)) is error:
            raise
        raise better from error
