"""Over real processes: a plan is the ledger, and the plan of simulated ranks."""

import json
from pathlib import Path

import pytest

import fsfunc as ff
from tests.planning.process_plans import run, schemes

pytestmark = pytest.mark.processes
PROGRAM = Path(__file__).with_name("process_plans.py")


def test_plans_on_processes_are_those_of_simulated_ranks(processes):
    mesh = ff.make_mesh({"data": 2}, "simulated")
    lines = processes(PROGRAM, mesh.size).splitlines()
    found = {(name, rank): steps for name, rank, steps in map(json.loads, lines)}
    assert len(found) == len(schemes()) * mesh.size
    for name, options in schemes().items():
        simulated = ff.spmd(lambda options=options: run(mesh, **options), mesh)()
        for rank, expected in enumerate(json.loads(json.dumps(simulated))):
            for step, one in zip(found[name, rank], expected, strict=True):
                assert step[0] and one[0], (name, "a plan is not what was sent")
                assert step[1:3] == one[1:3], (name, "of processes and simulated ranks")
                assert step[4] == one[4], (name, "planning changed what was computed")
                planned, peak = step[3]
                assert planned == one[3][0], name
                assert abs(planned - peak) <= 0.02 * peak, (name, step[3])
