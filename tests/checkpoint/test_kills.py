"""A process that trains and saves is killed at random moments: nothing is lost."""

import json
import os
from pathlib import Path

import pytest

from tests.programs import forked

PROGRAM = Path(__file__).with_name("killed.py")
KILLS = 30


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_killed_at_any_moment_nothing_is_lost_or_half_read(tmp_path):
    done = forked(PROGRAM, tmp_path, KILLS, 0, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert not done.stderr
    found = json.loads(done.stdout)
    assert found["steps"] > KILLS / 2
    # The moments were those that matter: in the middle of a save.
    assert found["remains"]["saving"] > KILLS / 10
    # The remains are gone with the next save, and only so many checkpoints stay.
    assert len(found["names"]) == 2 and not any(n[0] == "." for n in found["names"])
