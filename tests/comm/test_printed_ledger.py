"""A ledger prints as a table, short however much was sent."""

import pytest
import torch

import fsfunc as ff
from fsfunc.comm.ledgers import Record
from fsfunc.comm.traffic import Ledger

MESH = ff.make_mesh({"data": 2, "model": 2}, "simulated")


def test_it_says_calls_and_bytes_by_collective_axis_and_phase():
    unit = ff.unit(lambda w, x: x * w)
    step = ff.shard(ff.value_and_grad(lambda w, x: unit(w, x).sum()), MESH, "data")

    def main():
        w, x = torch.ones(8), torch.ones(8)
        step(ff.place(step, w, x), x)
        ff.psum(x, "model")

    with ff.ledger() as log:
        ff.spmd(main, MESH)()
    assert repr(log) == str(log)
    lines = repr(log).splitlines()
    assert lines[0] == f"rank 0 sent {log.bytes()} B in {log.count()} collectives"
    assert lines[1].split() == ["collective", "axis", "phase", "calls", "sent"]
    rows = [line.split() for line in lines[2:]]
    assert ["all_gather", "data", "forward", "1", "16", "B"] in rows
    assert ["psum_scatter", "data", "backward", "1", "16", "B"] in rows
    assert any(row[:2] == ["psum", "model"] for row in rows)
    assert any(line.startswith("over data: ") for line in lines)
    assert lines[-1].startswith("ranks 1 to 3 sent ")


@pytest.mark.parametrize("n", [1, 100])
def test_it_is_short_however_long(n):
    records = [
        Record(f"op{i % 50}", (f"axis{i % 7}",), i, torch.float32, rank=r)
        for i in range(200)
        for r in range(n)
    ]
    lines = repr(Ledger(records, {*range(n), 500, 900})).splitlines()
    assert len(lines) <= 20
    assert "... and " in "\n".join(lines)


def test_one_that_is_empty_says_so():
    with ff.ledger() as log:
        pass
    assert repr(log) == "nothing was sent"
    with ff.ledger() as log:
        ff.spmd(lambda: None, MESH)()
    assert repr(log) == "nothing was sent by ranks 0 to 3"
