"""The fixture that starts ranks leaves nobody behind."""

import os
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes


def ended(pid: int) -> bool:
    """Return whether `pid` is gone or a zombie, waiting a moment for it."""
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="reads /proc")
def test_a_hang_leaves_no_process(processes, tmp_path):
    program = f"""
        import os, pathlib, time
        pathlib.Path({str(tmp_path)!r}, os.environ["RANK"] + ".pid").write_text(
            str(os.getpid())
        )
        time.sleep(600)
    """
    with pytest.raises(TimeoutError, match="ran past"):
        processes(program, 2, timeout=2)
    pids = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    assert len(pids) == 2
    assert all(ended(pid) for pid in pids)
