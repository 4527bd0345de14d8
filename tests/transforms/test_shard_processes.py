"""Over real processes: the bits, the ledger and the plans of the simulated ranks."""

import json
from pathlib import Path

import pytest

import fsfunc as ff
from tests.transforms.process_programs import SCHEMES, SIZES, fail, mesh_of, run

pytestmark = pytest.mark.processes
PROGRAM = Path(__file__).with_name("process_programs.py")


@pytest.mark.parametrize("size", SIZES)
def test_processes_equal_simulated_ranks(processes, size):
    lines = processes(PROGRAM, size, "all").splitlines()
    found = {tuple(key): result for *key, result in map(json.loads, lines)}
    assert len(found) == sum(len(SCHEMES[kind]) for kind in SIZES[size]) * size
    for kind in SIZES[size]:
        mesh = mesh_of(kind, "simulated")
        for name, options in SCHEMES[kind].items():
            simulated = ff.spmd(lambda m=mesh, how=options: run(m, **how), mesh)()
            for rank, expected in enumerate(json.loads(json.dumps(simulated))):
                for part, wanted in zip(found[kind, name, rank], expected, strict=True):
                    assert part == wanted, (name, rank)
                for equal, near, *_ in found[kind, name, rank][-1]:
                    assert equal and near, (name, "a plan is not what was done")


def test_a_stage_that_raises_ends_every_process(processes):
    """And no rank waits for ever: the launcher's time limit is far away."""
    with pytest.raises(AssertionError, match="this stage is broken"):
        processes(PROGRAM, 2, "fail", timeout=60)
    mesh = ff.make_mesh({"pipe": 2}, "simulated")
    with pytest.raises(ArithmeticError, match="this stage is broken"):
        ff.spmd(lambda: fail(mesh), mesh)()


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
