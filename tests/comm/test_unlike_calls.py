"""Processes that come to unlike collectives are told; they never get numbers."""

from pathlib import Path

import pytest
import torch

from fsfunc.comm.backends.link import digest

PROGRAM = Path(__file__).with_name("unlike_calls.py")


@pytest.mark.processes
def test_every_rank_is_told_what_each_one_called(processes):
    lines = processes(PROGRAM, 3).splitlines()
    names = {line.partition(":")[0] for line in lines}
    assert len(lines) == 3 * len(names) and len(names) >= 14
    assert [line for line in lines if not line.endswith(": told")] == []


def test_a_digest_is_of_all_that_must_be_equal():
    """What simulated ranks compare as it is, processes compare by eight bytes."""
    said = ("psum", (("source", 0),), ("data",), (4,), torch.float32, "w")
    other = ("pmax", (("source", 1),), ("node",), (2, 2), torch.int32, "b")
    unlike = [said[:i] + other[i : i + 1] + said[i + 1 :] for i in range(len(said))]
    assert len({digest(each) for each in (said, *unlike)}) == 1 + len(said)
