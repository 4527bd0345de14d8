"""The biases of experts are those of one device, and even the loads."""

import pytest

import fsfunc as ff
from examples import balance


def seen(name, steps, monkeypatch):
    monkeypatch.setattr(balance, "STEPS", steps)
    axes, transform = balance.STACKS[name]
    mesh = ff.make_mesh(axes, "simulated")
    return ff.spmd(balance.train, mesh)(mesh, transform)


@pytest.mark.parametrize("name", list(balance.STACKS)[1:])
def test_the_loads_are_those_of_one_device(name, monkeypatch):
    ((*alone,),) = seen("one device", 5, monkeypatch)
    for found in seen(name, 5, monkeypatch):
        assert [loads for _, loads in found] == [loads for _, loads in alone]
        losses = [loss for loss, _ in alone]
        assert [loss for loss, _ in found] == pytest.approx(losses, rel=1e-9)


def test_the_loads_are_evened(monkeypatch):
    (found,) = seen("one device", 31, monkeypatch)
    even = balance.TOKENS * balance.K / balance.EXPERTS
    first, last = ([max(load) / even for load in found[i][1]] for i in (0, -1))
    assert min(first) > 2.5 and max(last) < 1.7
    assert found[-1][0] < found[0][0]
