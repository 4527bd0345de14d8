"""The law over real processes: each is judged by one device."""

from pathlib import Path

import pytest

from tests.derivatives.process_law import PROGRAMS, REFUSED

PROGRAM = Path(__file__).with_name("process_law.py")


@pytest.mark.processes
def test_processes_keep_the_law(processes):
    said = f"{len(PROGRAMS)} right, {len(REFUSED)} refused"
    assert processes(PROGRAM, 2, timeout=240).splitlines() == [said] * 2
