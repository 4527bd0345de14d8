"""The fixture that starts ranks: what a program printed, and nobody left behind."""

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


def test_returns_what_every_rank_printed(processes):
    out = processes(
        """
        import sys, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        x = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(x)
        print(f"{sys.argv[1]} {dist.get_rank()} {x.item()}\\n", end="", flush=True)
        dist.destroy_process_group()
        """,
        2,
        "rank",
    )
    assert sorted(out.splitlines()) == ["rank 0 3.0", "rank 1 3.0"]


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
        processes(program, 2, timeout=4)
    pids = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    assert len(pids) == 2
    assert all(ended(pid) for pid in pids)
