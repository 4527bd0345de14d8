"""Over real processes: the bits and the ledger of the simulated ranks."""

import json
from pathlib import Path

import pytest
import torch

import fsfunc as ff
from tests.transforms.process_steps import (
    HYBRID,
    SCHEMES,
    batches,
    product,
    run,
    units_params,
)

pytestmark = [
    pytest.mark.processes,
    # torch scripts its own forward-mode decompositions, and warns of it.
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
]
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
        if "use" in options:
            continue
        simulated = ff.spmd(lambda options=options: run(mesh, **options), mesh)()
        for rank, expected in enumerate(json.loads(json.dumps(simulated))):
            losses, params, sent = found[name, rank]
            assert losses == expected[0], name
            assert params == expected[1], name
            assert sent == expected[2], name
    if "jvp" in schemes:
        expected = derivative_on_one_device()
        for rank in range(mesh.size):
            close(found["jvp", rank][1], expected)


def derivative_on_one_device():
    params = units_params()
    ones = torch.utils._pytree.tree_map(torch.ones_like, params)
    return product(params, ones, batches(1)[0])


def close(found, expected):
    for key, value in expected.items():
        if isinstance(value, dict):
            close(found[key], value)
        elif isinstance(value, list):
            for a, b in zip(found[key], value, strict=True):
                close(a, b)
        else:
            torch.testing.assert_close(torch.tensor(found[key]), value)


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
