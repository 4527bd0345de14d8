"""Real processes: FSDP2's checkpoints and ours; errors reach every rank; kills."""

import json
import os
from pathlib import Path

import pytest

import fsfunc as ff
from tests.checkpoint.process_checkpoints import sent
from tests.programs import forked

PROGRAM = Path(__file__).with_name("process_checkpoints.py")


@pytest.mark.processes
def test_every_claim_holds_on_two_processes(processes, tmp_path):
    (tmp_path / "one").mkdir()
    lines = processes(PROGRAM, 2, str(tmp_path / "one")).splitlines()
    found = {(name, rank): value for name, rank, value in map(json.loads, lines)}
    assert len(found) == 20
    mesh = ff.make_mesh({"data": 2}, "simulated")
    simulated = ff.spmd(lambda: sent(mesh, tmp_path), mesh)()
    for rank in (0, 1):
        assert found.pop(("sent", rank)) == simulated[rank]
    assert all(value is True for value in found.values()), found


KILLED = Path(__file__).with_name("killed.py")
KILLS = 30


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_killed_at_any_moment_nothing_is_lost_or_half_read(tmp_path):
    done = forked(KILLED, tmp_path, KILLS, 0, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert not done.stderr
    found = json.loads(done.stdout)
    assert found["steps"] > KILLS / 2
    # The moments were those that matter: in the middle of a save.
    assert found["remains"]["saving"] > KILLS / 10
    # The remains are gone with the next save, and only so many checkpoints stay.
    assert len(found["names"]) == 2 and not any(n[0] == "." for n in found["names"])
