"""Over real processes, split layers train as torch's tensor parallelism does.

Both train as one device does, too; and what the processes save, one device loads.
"""

from pathlib import Path

import pytest
import torch

import fsfunc as ff
from tests.checks import close
from tests.nn import tensor_parallel_steps as program

pytestmark = pytest.mark.processes
RANKS = 2


def test_split_layers_are_those_of_parallelize_module(processes, tmp_path):
    processes(Path(program.__file__), RANKS, str(tmp_path))
    losses, *trees = program.trained(program.model(), program.batches())
    one_device = (losses, *map(program.tree_of, trees))
    params = program.parameters()
    target = ff.TrainState(params, program.OPTIMIZER.init(params))
    for name in program.CASES:
        for rank in range(RANKS):
            found = torch.load(tmp_path / f"{name} {rank}.pt")
            close(found["theirs"], one_device)
            close(found["ours"], one_device)
            close(found["ours"], found["theirs"])
        close(ff.load(tmp_path / name, target).params, found["ours"][2], 0.0)
