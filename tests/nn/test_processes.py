"""Over real processes split layers train as torch's tensor parallelism does.

Both train as one device does, too; and what the processes save, one device loads.
"""

from pathlib import Path

import pytest
import torch

import fsfunc as ff
from tests.checks import close
from tests.nn import over_processes as program


@pytest.mark.processes
def test_over_real_processes(processes, tmp_path):
    printed = processes(Path(program.__file__), 2, str(tmp_path))
    assert printed.split() == ["equal", "equal"]
    one_device = program.by_module(program.Model(), program.batches())
    params = program.parameters()
    target = ff.TrainState(params, program.OURS.init(params))
    for name in program.CASES:
        for rank in range(2):
            found = torch.load(tmp_path / f"{name} {rank}.pt")
            close(found["theirs"], one_device)
            close(found["ours"], one_device)
            close(found["ours"], found["theirs"])
        close(ff.load(tmp_path / name, target).params, found["ours"][2], 0.0)
