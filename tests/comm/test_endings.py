"""However processes go wrong, each one ends by a Python error that says where."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import environment

PROGRAM = Path(__file__).with_name("ending.py")
SAYS = {
    "raises": ("waits in vain", "ArithmeticError: no such value"),
    "unlike in a step": ("of layer(0)", "of layer(3)"),
}


@pytest.mark.processes
@pytest.mark.parametrize("case", SAYS)
def test_every_process_ends_by_a_python_error(case):
    """Without torchrun, which ends the others before they can speak."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, PROGRAM, case],
            env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        texts = [rank.communicate(timeout=90)[0] for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
    for rank, text, says in zip(ranks, texts, SAYS[case], strict=True):
        assert rank.returncode == 1, text  # below 0: ended by a signal
        assert "Traceback" in text and says in text and "went on" not in text, text
