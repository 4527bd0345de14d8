"""Real processes: FSDP2's checkpoints and ours, either way; errors reach every rank."""

import json
from pathlib import Path

import pytest

import fsfunc as ff
from tests.checkpoint.process_checkpoints import sent

PROGRAM = Path(__file__).with_name("process_checkpoints.py")


@pytest.mark.processes
def test_every_claim_holds_on_two_processes(processes, tmp_path):
    (tmp_path / "one").mkdir()
    lines = processes(PROGRAM, 2, str(tmp_path / "one")).splitlines()
    found = {(name, rank): value for name, rank, value in map(json.loads, lines)}
    assert len(found) == 18
    mesh = ff.make_mesh({"data": 2}, "simulated")
    simulated = ff.spmd(lambda: sent(mesh, tmp_path), mesh)()
    for rank in (0, 1):
        assert found.pop(("sent", rank)) == simulated[rank]
    assert all(value is True for value in found.values()), found
