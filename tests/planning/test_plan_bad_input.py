"""What cannot be planned is told in words: where, why, and the way out."""

import pytest
import torch

import fsfunc as ff
from fsfunc import _torch
from tests.checks import all_refused, simulated
from tests.models import chain

MESH = ff.make_mesh({"data": 2}, "abstract")
OPTIMIZER = ff.sharded_adam(1e-3)
layer = ff.unit(lambda p, x: torch.tanh(x @ p))
loss = chain(layer)
STEP = ff.shard(OPTIMIZER(ff.value_and_grad(loss)), MESH, "data")
X = torch.ones(4, 8)


def init():
    return [torch.zeros(8, 8) for _ in range(2)]


def of_item(x):
    return x * x.sum().item()


def of_if(x):
    return x if x.sum() > 0 else x


def of_mask(x):
    return x[x > 0].sum() + x


def of_tolist(x):
    return x * len(x.sum(0).tolist())


def of_float(x):
    return x * float(x.mean())


@pytest.mark.parametrize(
    "read, form",
    [
        (of_item, "given"),
        (of_if, "made"),
        (of_mask, "ranks"),
        (of_tolist, "unit"),
        (of_float, "given"),
    ],
)
def test_a_step_that_reads_a_value_is_told_where(read, form):
    line = read.__code__.co_firstlineno + 1
    reading = ff.unit(lambda p, x: read(x @ p))

    def own_loss(params, x):
        if form == "unit":
            return reading(params[1], layer(params[0], x)).sum()
        return read(loss(params, x) + x.sum(-1)).sum()

    step = ff.value_and_grad(own_loss)
    where = rf"asks for a tensor's value at .*test_plan_bad_input.py:{line} "
    with pytest.raises(RuntimeError, match=where):
        if form == "made":
            sharded = ff.shard(OPTIMIZER(step), MESH, "data")
            ff.plan(sharded, init, OPTIMIZER, X)
        elif form == "ranks":
            mesh = ff.make_mesh({"data": 2}, "simulated")
            ff.spmd(lambda: ff.plan(step, init(), X), mesh)()
        else:
            ff.plan(step, init(), X)
    assert not _torch.fake_active()
    assert ff.plan(ff.value_and_grad(loss), init(), X).flops  # and goes on


@pytest.mark.parametrize("where", ["state", "batch", "made"])
def test_devices_that_torch_cannot_run_are_refused(where):
    """Autograd would end the process: its engine asks the device for a stream."""
    if torch.cuda.is_available():
        pytest.skip("this torch can run them")
    with _torch.FakeTensorMode():
        there = torch.empty(4, 8, device="cuda")
        w = torch.empty(8, 8, device="cuda")
    step = ff.value_and_grad(loss)
    with pytest.raises((ValueError, RuntimeError), match="cuda.*cannot"):
        if where == "state":
            ff.plan(step, [w, w], X)
        elif where == "batch":
            ff.plan(step, init(), there)
        else:
            ff.plan(STEP, init, OPTIMIZER, there)


def reads_a_value():
    w = torch.ones(8, 8)
    return [w / w.norm().item()]


def stepped(made, batch=X):
    return lambda: ff.plan(STEP, made, OPTIMIZER, batch)


def of_another_mesh():
    """Parts of two ranks are not parts of four."""
    two, four = simulated(2), simulated(4)
    step, wide = ff.shard(loss, two, "data"), ff.shard(loss, four, "data")
    parts = ff.spmd(lambda: ff.place(step, init(), X), two)()
    ff.spmd(lambda: ff.plan(wide, parts[0], X), four)()


def by_rank():
    mesh = ff.make_mesh({"data": 1024}, "abstract")
    ff.plan(lambda x: x * ff.axis_index("data"), torch.ones(2), mesh=mesh)


@ff.unit
def writing(p, x):
    x.mul_(2)
    return x @ p


WHOLE = torch.ones(5, 8)
test_what_is_given_is_refused = all_refused({
    "init with an argument": (stepped(lambda seed: init()), TypeError, "argument"),
    "init of other shapes": (
        stepped(lambda: [torch.zeros(7, 7)]), RuntimeError, r"8.*7|7.*8"),
    "init that reads a value": (
        stepped(reads_a_value), RuntimeError, "asks for a tensor's value"),
    "batch of another shape": (
        stepped(init, torch.ones(4, 7)), RuntimeError, r"4x7|\[4, 7\]"),
    "batch that ranks cannot share": (
        stepped(init, lambda: ff.local_batch(WHOLE, MESH, "data")), ValueError,
        "5 is not a multiple of 2"),
    "a state of another mesh": (
        of_another_mesh, ValueError, "is the part of .* of 2 ranks"),
    "more programs than anybody means": (
        by_rank, ValueError, r"'data'.*1024 ranks.*at most 512"),
    "a unit that writes into its input": (
        lambda: ff.plan(lambda p, x: writing(p[0], x * 1), init(), X), RuntimeError,
        "changed its input 0"),
})  # fmt: skip
