"""The lock of a folder that is being saved: a marked file, locked by its process.

A lock works on one machine and, if the network file system has locks (NFS 4, Lustre
with ``flock``), on all. Without them, a process of this machine is looked up, and a job
of another machine is taken to be alive if it wrote within the last two minutes.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import stat
import zlib
from contextlib import suppress
from pathlib import Path

from fsfunc.checkpoint.parsing import Wrong, table_of
from fsfunc.checkpoint.stored import CheckpointError, read_regular

MARK = "fsfunc.saving"

_PATIENCE = 120.0  # seconds in which a save elsewhere writes something
_JOB_IDS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "TORCHELASTIC_RUN_ID")


def this_job() -> dict[str, str]:
    """The host, the process, and the scheduler's name for the job."""
    ids = (os.environ.get(name, "") for name in _JOB_IDS)
    job = next((one for one in ids if one not in ("", "none")), "")
    return {"host": socket.gethostname(), "process": str(os.getpid()), "job": job}


def describe_job(job: dict[str, str]) -> str:
    """A job in words.

    >>> describe_job({"host": "n1", "process": "7", "job": "42"})
    'process 7 on n1, job 42'
    """
    if not job:
        return "a job that is not known"
    name = f", job {job['job']}" if job.get("job") else ""
    return f"process {job.get('process', '?')} on {job.get('host', '?')}{name}"


def own_name() -> str:
    """32 hexadecimal digits, unique: from host, process and a random number."""
    return f"{_host():08x}{os.getpid():08x}{secrets.token_hex(8)}"


def has_gone(name: str) -> bool:
    """True if such digits name a process of this host that has ended."""
    return int(name[:8], 16) == _host() and not _runs(str(int(name[8:16], 16)))


def _host() -> int:
    return zlib.crc32(socket.gethostname().encode())


def mark(folder: Path) -> int:
    """Writes the owner's name into a new folder; returns its lock's file descriptor."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    file = os.open(folder / MARK, flags, 0o644)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(file, json.dumps(this_job()).encode())
    except BaseException:
        os.close(file)
        raise
    return file


def unlock(file: int) -> None:
    """Marks the folder as not being written any more."""
    with suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_UN)  # a fork may have the file open, too
    os.close(file)


def is_marked(folder: Path) -> bool:
    """True if a save made the folder; any other is the user's."""
    try:
        kind = os.lstat(folder / MARK).st_mode
    except OSError:
        return False
    return stat.S_ISREG(kind) and not folder.is_symlink()


def job_of(folder: Path) -> dict[str, str]:
    """The owner that the mark names; empty where there is none."""
    try:
        said = table_of(read_regular(folder / MARK, 1 << 16))
        return {name: said.text(name) for name in said}
    except (OSError, CheckpointError, Wrong):  # it goes, or was never finished
        return {}


def is_alive(folder: Path, now: float) -> bool:
    """True if a process may be writing into a marked folder.

    Args:
        now: the time by the file system's clock.
    """
    try:
        file = os.open(folder / MARK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True  # it has become a checkpoint by now
    except OSError:
        return is_fresh(folder, now)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks here
        return _may_live(folder, now, locks=False)
    finally:
        os.close(file)
    return _may_live(folder, now, locks=True)


def _may_live(folder: Path, now: float, locks: bool) -> bool:
    """Of a folder on which no lock is seen."""
    job, me = job_of(folder), this_job()
    if job.get("host") == me["host"]:
        return not locks and _runs(job.get("process", ""))
    if job.get("job") and job.get("job") == me["job"]:
        return False  # this job, begun again on another machine
    return is_fresh(folder, now)


def _runs(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, ValueError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def is_fresh(folder: Path, now: float) -> bool:
    """True if something in the folder has changed recently."""
    newest = 0.0
    with suppress(OSError):
        for name in (".", *os.listdir(folder)):
            newest = max(newest, os.lstat(folder / name).st_mtime)
    return now - newest < _PATIENCE
