"""Processes that come to unlike collectives are told; they never get numbers."""

from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("unlike_calls.py")


@pytest.mark.processes
def test_every_rank_is_told_what_each_one_called(processes):
    lines = processes(PROGRAM, 3).splitlines()
    names = {line.partition(":")[0] for line in lines}
    assert len(lines) == 3 * len(names) and len(names) >= 18
    assert [line for line in lines if not line.endswith(": told")] == []
