"""Programs of their own: one Python process, with the library of this checkout."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests import forking

ROOT = Path(__file__).resolve().parents[1]
LAUNCHED = {"WORLD_SIZE", "RANK", "LOCAL_RANK", "TORCHELASTIC_USE_AGENT_STORE"}


def environment(**more: str) -> dict[str, str]:
    """Of a program with one thread and this checkout's library, and ``more``.

    A launcher around this process is not seen.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {k: v for k, v in os.environ.items() if k not in LAUNCHED}
    if sys.platform == "linux":  # gloo would look up the host's name otherwise
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return env | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | more


def python(
    *args: object, timeout: float = 90, **more: str
) -> subprocess.CompletedProcess[str]:
    """What ``python *args`` printed and how it ended; ``more``: its environment.

    Raises `subprocess.TimeoutExpired` where it does not end (seconds); it is killed
    then.
    """
    return subprocess.run(
        [sys.executable, *map(str, args)],
        env=environment(**more),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def forked(
    *args: object, timeout: float = 90, **more: str
) -> subprocess.CompletedProcess[str]:
    """As `python`, of a program that may find torch and fsfunc imported.

    Raises `TimeoutError` where it does not end (seconds); it is killed then.
    """
    given = list(map(str, args))
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        program = forking.Program(given, environment(**more), str(out), str(err))
        (status,) = forking.run([program], timeout, together=True)
        return subprocess.CompletedProcess(
            given, status, out.read_text(), err.read_text()
        )
