"""The law over real processes: each is judged by one device."""

from pathlib import Path

import pytest

from tests.derivatives import refused
from tests.derivatives.cases import LOSSES, STEPS

PROGRAM = Path(__file__).with_name("process_law.py")


@pytest.mark.processes
def test_processes_keep_the_law(processes):
    right = len(STEPS) + len(LOSSES)
    told = len(refused.STEPS | refused.PLAIN)
    said = f"{right} right, {told} refused"
    assert processes(PROGRAM, 2, timeout=240).splitlines() == [said] * 2
