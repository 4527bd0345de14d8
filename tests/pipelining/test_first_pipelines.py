"""What a first day with pipelines runs into: an answer, and never a wrong number."""

from typing import Any

import pytest
import torch

import fsfunc as ff
from fsfunc.pipelining.timing import simulate
from fsfunc.pipelining.transfers import with_transfers

MESH = ff.make_mesh({"pipe": 2}, "simulated")
S = ff.schedules


@ff.unit
def layer(w, x):
    return torch.relu(x @ w)


def loss(params, x):
    for w in params:
        x = layer(w, x)
    return x.mean()


def params():
    return [torch.eye(2) * k for k in (1.0, 2.0, 3.0, 4.0)]


X = torch.arange(1.0, 9.0).reshape(4, 2)


def grad(f=loss, given=None, m=2, **options: Any):
    step = ff.pipeline(ff.value_and_grad(f), MESH, "pipe", n_microbatches=m, **options)
    return step(params() if given is None else given, X)


def refused(call, error: type[Exception] = ValueError):
    """What every rank says, before anything is sent."""

    def main():
        with pytest.raises(error) as caught:
            call()
        return str(caught.value)

    with ff.ledger() as log:
        first, second = ff.spmd(main, MESH)()
    assert first == second and log.records == []
    return first


def test_a_schedule_of_forwards_alone_gives_no_gradients():
    """It gave zeros."""
    rows = ["F0 F1", "F0 F1"]
    told = refused(lambda: grad(schedule=rows), S.ScheduleError)
    assert "forward actions alone" in told and "give pipeline the loss" in told

    def evaluated():
        step = ff.pipeline(loss, MESH, "pipe", n_microbatches=2, schedule=rows)
        return step(params(), X)

    assert ff.spmd(evaluated, MESH)() == [loss(params(), X)] * 2


class Switched:
    """A loss whose first half learns from a certain call on."""

    def __init__(self, on):
        self.on = on

    def __call__(self, given, x):
        with torch.set_grad_enabled(self.on and torch.is_grad_enabled()):
            x = layer(given[1], layer(given[0], x))
        return layer(given[3], layer(given[2], x)).mean()


def test_a_loss_that_thaws_layers_by_what_it_captured_is_told_so():
    """Their gradients were zeros: no stage knew that it had to send any back."""

    def main(before):
        f = Switched(before)
        step = ff.pipeline(ff.value_and_grad(f), MESH, "pipe", n_microbatches=2)
        step(params(), X)
        f.on = not before
        return step(params(), X)

    with pytest.raises(RuntimeError, match="'layer', is differentiated, and was not"):
        ff.spmd(lambda: main(before=False), MESH)()
    want = ff.value_and_grad(Switched(False))(params(), X)
    for value, grads in ff.spmd(lambda: main(before=True), MESH)():
        assert value == want[0] and all(map(torch.equal, grads, want[1]))


def test_a_loss_that_begins_to_draw_by_what_it_captured_is_told_so():
    """Two stages used the noise, and each drew its own."""
    noisy = [False]

    def drawn(given, x):
        noise = torch.nn.functional.dropout(layer(given[0], x), 0.5, noisy[0])
        return (layer(given[2], layer(given[1], noise)) + noise).mean()

    def main():
        step = ff.pipeline(
            ff.value_and_grad(drawn), MESH, "pipe", n_microbatches=2, stages=[2, 1]
        )
        step(params(), X)
        step(params(), X)  # draws nothing, and goes through
        noisy[0] = True
        return step(params(), X)

    with pytest.raises(RuntimeError, match="drew none when it was recorded"):
        ff.spmd(main, MESH)()


def test_what_travels_has_the_recorded_shape():
    """A receive of another size would wait, or take what is not there."""

    @ff.unit
    def packed(w, x):
        return x[x[:, 0] > 4] @ w

    def f(given, x):
        return layer(given[1], packed(given[0], x)).sum()

    for call in (f, ff.value_and_grad(f)):
        step = ff.pipeline(call, MESH, "pipe", n_microbatches=2)
        with pytest.raises(
            RuntimeError, match="'packed', gave .* was recorded: .* pad"
        ):
            ff.spmd(step, MESH)(params(), X)


def test_parameters_that_require_grad_are_named():
    given = [torch.nn.Parameter(w) for w in params()]
    told = refused(lambda: grad(given=given), RuntimeError)
    assert "nn.Parameter" in told and ".detach()ed" in told
    detached = [w.detach() for w in given]
    assert ff.spmd(lambda: grad(given=detached)[0], MESH)() == [loss(given, X)] * 2


@pytest.mark.parametrize("schedule", ["F0 B0 F1 B1", "one_f_one_b", None, 2])
def test_what_is_no_list_of_rows_is_told_so(schedule):
    told = refused(lambda: grad(schedule=schedule), S.ScheduleError)
    assert told.startswith(f"{schedule!r} is no schedule") and "ff.schedules" in told


@pytest.mark.parametrize("stages", [2, "layer", 2.0])
def test_stages_that_are_no_list_are_told_so(stages):
    told = refused(lambda: grad(stages=stages))
    assert told.startswith(f"stages={stages!r}: give a list")


def test_rows_of_text_are_verified_and_timed_as_they_are():
    rows = ["F0 F1 B0 B1", "F0 B0 F1 B1"]
    ff.verify(rows)
    with pytest.raises(S.ScheduleError, match="rank 0: microbatch 1 of stage 0"):
        ff.verify(["F0 F1 B0", "F0 B0 F1 B1"])
    assert ff.bubble(rows) == ff.bubble(S.parse(rows)) == 3
    assert simulate(rows) == simulate(S.parse(rows))


@pytest.mark.parametrize("schedule", [S.gpipe, S.one_f_one_b, S.zb_h1, S.zb_v])
def test_a_clock_sees_every_action_of_the_schedule(schedule):
    """The gradients that leave before their backward's end, too."""

    def main():
        with ff.clock() as events:
            grad(schedule=schedule, m=4)
        return events

    n = 4 if schedule is S.zb_v else 2
    between = {(s, s + 1) for s in range(n - 1)}
    rows = with_transfers(schedule(n, 4), between)
    for row, events in zip(rows, ff.spmd(main, MESH)(), strict=True):
        assert sorted(e.action for e in events) == sorted(action for action in row)


def test_a_clock_around_another_sees_what_it_sees():
    def main():
        with ff.clock() as inner:
            grad()
        return inner

    with ff.clock() as outer:
        inner = ff.spmd(main, MESH)()
    assert len(outer) > 0 and sorted(outer) == sorted(e for es in inner for e in es)
