"""Pages are there before they are written, and hold what they held."""

import resource
import sys

import pytest
import torch

from fsfunc.runtime.stores import populate


def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.mark.skipif(sys.platform != "linux", reason="where faults are counted so")
def test_populated_memory_faults_no_more():
    x = torch.empty(1 << 24)  # from the system, each time
    before = faults()
    populate(x)
    taken = faults()
    x.zero_()
    assert faults() - taken < 100 or taken == before  # or the system is too old


def test_what_is_written_stays():
    x = torch.arange(1 << 14)
    for part in (x, x[1:3], x[5000:], x[:0], x[::2], x.to("meta")):
        populate(part)
    assert torch.equal(x, torch.arange(1 << 14))
