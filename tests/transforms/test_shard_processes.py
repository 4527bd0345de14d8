"""Over real processes: the bits and the ledger of the simulated ranks."""

import json
from pathlib import Path

import pytest

import fsfunc as ff
from tests.transforms.process_steps import HYBRID, SCHEMES, run

pytestmark = pytest.mark.processes
PROGRAM = Path(__file__).with_name("process_steps.py")


@pytest.mark.parametrize(
    "kind, schemes, axes",
    [("line", SCHEMES, {"data": 2}), ("hybrid", HYBRID, {"node": 2, "data": 2})],
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
            assert found[name, rank] == expected, name  # losses, parameters, ledger


@pytest.mark.processes(slow=False)  # the one that `pytest` alone runs
def test_bare_calls_under_processes(processes):
    printed = processes(
        """
        import torch, fsfunc as ff

        mesh = ff.make_mesh({"data": 2})
        layer = ff.unit(lambda w, x: x @ w)
        call = ff.shard(lambda w, x: layer(w, x).sum(), mesh, "data")
        w = ff.place(call, torch.eye(4), torch.ones(4, 4))
        print(call(w, torch.ones(4, 4)).item(), ff.unshard(w)[0, 0].item())
        """,
        2,
    )
    assert printed.count("16.0 1.0") == 2, printed
