"""A rank that stopped: the others raise in time, whoever said how long that is."""

from datetime import timedelta

import pytest

import fsfunc as ff

STOPPED = """
    import os, signal, sys, time, torch, torch.distributed as dist, fsfunc as ff
    from datetime import timedelta
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    theirs = ff.make_mesh({"a": 2, "b": 2})
    ours = ff.make_mesh({"c": 2, "d": 2}, timeout=1.5)
    line = ff.make_mesh({"e": 4}, timeout=timedelta(seconds=1))

    def total(mesh, axis):
        return ff.spmd(lambda: ff.psum(torch.ones(5), axis), mesh)()[0].tolist()

    pid = torch.tensor([os.getpid()])
    pids = ff.spmd(lambda: ff.all_gather(pid, ("a", "b")), theirs)()[0].tolist()
    meshes = [(line, "e"), (ours, "d"), (theirs, "b")]
    assert [total(*m) for m in meshes] == [[4.0] * 5, [2.0] * 5, [2.0] * 5]
    rank = dist.get_rank()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGSTOP)  # until rank 2 has seen enough
        os._exit(0)
    for mesh, axis in meshes if rank == 2 else meshes[:1]:
        began = time.perf_counter()
        limit = mesh.link.groups.timeout.total_seconds()
        try:
            total(mesh, axis)
        except RuntimeError as error:
            waited = time.perf_counter() - began
            soon = limit <= waited < limit + 27
            print(rank, soon, str(error).replace(chr(10), " | "), flush=True)
    if rank == 2:
        os.kill(pids[3], signal.SIGCONT)
"""


@pytest.mark.processes
def test_a_stopped_rank_is_waited_for_no_longer_than_was_said(processes):
    lines = processes(STOPPED, 4).splitlines()
    assert [line.split()[:2] for line in lines] == [
        [str(rank), "True"] for rank in (0, 1, 2, 2, 2)
    ]
    for line, axis in zip(lines, "eeedb", strict=True):
        ranks = "[0, 1, 2, 3]" if axis == "e" else "[2, 3]"
        assert f'psum over "{axis}", float32[5]' in line
        assert f"waits in vain for others of ranks {ranks}" in line
        assert "Rank 3 does not answer: its process is stopped" in line
        assert line.count(" | ") == 5  # a title, and where each of four is


@pytest.mark.parametrize("backend", ["simulated", "processes"])
def test_a_timeout_is_a_time(backend):
    for timeout in (0, -1.0, 1e-9, timedelta(0)):
        with pytest.raises(ValueError, match="timeout="):
            ff.make_mesh({"data": 1}, backend, timeout=timeout)
    assert ff.make_mesh({"data": 2}, "simulated", timeout=timedelta(seconds=1))
