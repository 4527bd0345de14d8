"""However processes go wrong, each one ends by a Python error that says where."""

import socket
from pathlib import Path

import pytest

from tests import forking
from tests.programs import environment

PROGRAM = Path(__file__).with_name("ending.py")
SAYS = {
    "raises": ("waits in vain", "ArithmeticError: no such value"),
    "unlike in a step": ("of layer(0)", "of layer(3)"),
}


@pytest.mark.processes
@pytest.mark.parametrize("case", SAYS)
def test_every_process_ends_by_a_python_error(case, tmp_path):
    """Without torchrun, which ends the others before they can speak."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    files = [tmp_path / str(rank) for rank in range(2)]
    ranks = [
        forking.Program(
            [str(PROGRAM), case],
            environment(RANK=str(rank), LOCAL_RANK=str(rank), **env),
            *2 * [str(file)],
        )
        for rank, file in enumerate(files)
    ]
    ended = forking.run(ranks, timeout=90, together=False)
    texts = [file.read_text() for file in files]
    for status, text, says in zip(ended, texts, SAYS[case], strict=True):
        assert status == 1, text  # below 0: ended by a signal
        assert "Traceback" in text and says in text and "went on" not in text, text


FORKS = """
    import os, sys, time, torch, fsfunc as ff
    from torch.utils.data import DataLoader

    class Reduces(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, i):
            return ff.psum(torch.ones(3), "data")

    mesh = ff.make_mesh({"data": 2}, timeout=30)

    def main():
        ff.psum(torch.ones(3), "data")
        if not (pid := os.fork()):
            sys.exit(3)
        for _ in range(200):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                break
            time.sleep(0.1)
        assert found and os.waitstatus_to_exitcode(status) == 3, "it never ends"
        try:
            list(DataLoader(Reduces(), num_workers=1))
        except RuntimeError as error:
            text = str(error)
            assert f"is a fork of process {os.getpid()}, which is rank" in text, text
            print(ff.psum(torch.ones(3), "data").tolist(), flush=True)

    ff.spmd(main, mesh)()
"""


@pytest.mark.processes
def test_a_fork_ends_and_has_no_collectives(processes):
    """As Python ends it, and as a worker of a data loader."""
    assert processes(FORKS, 2, timeout=90) == "[2.0, 2.0, 2.0]\n" * 2
