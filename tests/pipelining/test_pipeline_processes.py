"""Pipelines over real processes: the bits and the ledger of the simulated ranks."""

import json
from pathlib import Path

import pytest

import fsfunc as ff
from tests.pipelining.process_pipelines import GRID, LINE, fail, run

pytestmark = pytest.mark.processes
PROGRAM = Path(__file__).with_name("process_pipelines.py")


@pytest.mark.parametrize(
    "kind, schemes, axes",
    [("line", LINE, {"pipe": 2}), ("grid", GRID, {"data": 2, "pipe": 2})],
    ids=["2 processes", "4 processes"],
)
def test_processes_equal_simulated_ranks(processes, kind, schemes, axes):
    mesh = ff.make_mesh(axes, "simulated")
    lines = processes(PROGRAM, mesh.size, kind).splitlines()
    found = {(name, rank): result for name, rank, result in map(json.loads, lines)}
    assert len(found) == len(schemes) * mesh.size
    for name, options in schemes.items():
        simulated = ff.spmd(lambda options=options: run(mesh, **options), mesh)()
        for rank, expected in enumerate(json.loads(json.dumps(simulated))):
            for part, wanted in zip(found[name, rank], expected, strict=True):
                assert part == wanted, (name, rank)


def test_a_stage_that_raises_ends_every_process(processes):
    """And no rank waits for ever: the launcher's time limit is far away."""
    with pytest.raises(AssertionError, match="this stage is broken"):
        processes(PROGRAM, 2, "fail", timeout=60)
    mesh = ff.make_mesh({"pipe": 2}, "simulated")
    with pytest.raises(ArithmeticError, match="this stage is broken"):
        ff.spmd(lambda: fail(mesh), mesh)()
