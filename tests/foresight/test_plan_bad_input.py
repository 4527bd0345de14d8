"""What cannot be planned is told in words: where, why, and the way out."""

from pathlib import Path

import pytest
import torch

import fsfunc as ff
from fsfunc import _torch

MESH = ff.make_mesh({"data": 2}, "abstract")
layer = ff.unit(lambda p, x: torch.tanh(x @ p))
OPTIMIZER = ff.sharded_adam(1e-3)


def loss(params, x):
    for p in params:
        x = layer(p, x)
    return x.square().mean()


def init():
    return [torch.zeros(8, 8) for _ in range(2)]


def reads(how):
    def read(x):
        if how == "item":
            x.sum().item()  # the line
        elif how == "if":
            if x.sum() > 0:  # the line
                return x
        elif how == "mask":
            return x[x > 0].sum() + x  # the line
        elif how == "tolist":
            x.sum(0).tolist()  # the line
        elif how == "float":
            float(x.mean())  # the line
        return x

    return read


def line_of(how):
    text = Path(__file__).read_text().splitlines()
    key = {"item": "x.sum().item()", "if": "if x.sum() > 0", "mask": "x[x > 0]"}
    key |= {"tolist": "x.sum(0).tolist()", "float": "float(x.mean())"}
    return 1 + next(
        i for i, row in enumerate(text) if key[how] in row and "# the line" in row
    )


@pytest.mark.parametrize("form", ["given", "made", "ranks", "unit"])
@pytest.mark.parametrize("how", ["item", "if", "mask", "tolist", "float"])
def test_a_step_that_reads_a_value_is_told_where(how, form):
    read = reads(how)
    reading = ff.unit(lambda p, x: read(x @ p))

    def own_loss(params, x):
        if form == "unit":
            return reading(params[1], layer(params[0], x)).sum()
        return read(loss(params, x) + x.sum(-1)).sum()

    step = ff.value_and_grad(own_loss)
    where = rf"asks for a tensor's value at .*test_plan_bad_input.py:{line_of(how)} "
    x = torch.ones(4, 8)
    with pytest.raises(RuntimeError, match=where):
        if form == "made":
            sharded = ff.shard(OPTIMIZER(step), MESH, "data")
            ff.plan(sharded, init, OPTIMIZER, x)
        elif form == "ranks":
            mesh = ff.make_mesh({"data": 2}, "simulated")
            ff.spmd(lambda: ff.plan(step, init(), x), mesh)()
        else:
            ff.plan(step, init(), x)
    assert not _torch.fake_active()
    assert ff.plan(ff.value_and_grad(loss), init(), x).flops  # and goes on


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
            ff.plan(step, [w, w], torch.ones(4, 8))
        elif where == "batch":
            ff.plan(step, init(), there)
        else:
            sharded = ff.shard(OPTIMIZER(step), MESH, "data")
            ff.plan(sharded, init, OPTIMIZER, there)


def test_a_device_asked_for_inside_is_refused_too():
    if torch.cuda.is_available():
        pytest.skip("this torch can run them")

    def on_device(params, x):
        return loss([p.to("cuda") for p in params], x.to("cuda"))

    with pytest.raises((ValueError, RuntimeError), match="cuda"):
        ff.plan(ff.value_and_grad(on_device), init(), torch.ones(4, 8))


def test_tensors_of_the_meta_device_are_planned():
    step = ff.value_and_grad(loss)
    w, x = torch.empty(8, 8, device="meta"), torch.empty(4, 8, device="meta")
    found = ff.plan(step, [w, w.clone()], x)
    assert found.flops == ff.plan(step, init(), torch.ones(4, 8)).flops


def test_an_init_function_that_is_wrong():
    step = ff.shard(OPTIMIZER(ff.value_and_grad(loss)), MESH, "data")
    with pytest.raises(TypeError, match="argument"):
        ff.plan(step, lambda seed: init(), OPTIMIZER, torch.ones(4, 8))
    with pytest.raises(RuntimeError, match=r"8.*7|7.*8"):
        ff.plan(step, lambda: [torch.zeros(7, 7)], OPTIMIZER, torch.ones(4, 8))

    def reads_a_value():
        w = torch.ones(8, 8)
        return [w / w.norm().item()]  # the init's line

    with pytest.raises(RuntimeError, match="asks for a tensor's value"):
        ff.plan(step, reads_a_value, OPTIMIZER, torch.ones(4, 8))


def test_a_batch_of_the_wrong_shape_says_so():
    step = ff.shard(OPTIMIZER(ff.value_and_grad(loss)), MESH, "data")
    with pytest.raises(RuntimeError, match=r"4x7|\[4, 7\]"):
        ff.plan(step, init, OPTIMIZER, torch.ones(4, 7))


def test_a_mesh_that_the_batch_cannot_lie_on():
    step = ff.shard(OPTIMIZER(ff.value_and_grad(loss)), MESH, "data")
    whole = torch.ones(5, 8)
    match = "5 is not a multiple of 2"
    with pytest.raises(ValueError, match=match):
        ff.plan(step, init, OPTIMIZER, lambda: ff.local_batch(whole, MESH, "data"))


def test_a_mesh_unlike_that_of_the_transforms():
    step = ff.shard(OPTIMIZER(ff.value_and_grad(loss)), MESH, "data")
    other = ff.make_mesh({"data": 8}, "abstract")
    with pytest.raises(ValueError, match="has 2 ranks, but 8 are running"):
        ff.plan(step, init, OPTIMIZER, torch.ones(4, 8), mesh=other)


def test_a_state_of_another_mesh():
    """Parts of two ranks are not parts of four."""
    two, four = (ff.make_mesh({"data": n}, "simulated") for n in (2, 4))
    x = torch.ones(4, 8)
    step = ff.shard(loss, two, "data")
    parts = ff.spmd(lambda: ff.place(step, init(), x), two)()
    wide = ff.shard(loss, four, "data")
    with pytest.raises(ValueError, match="is the part of .* of 2 ranks"):
        ff.spmd(lambda: ff.plan(wide, parts[0], x), four)()


def test_more_programs_than_anybody_means():
    mesh = ff.make_mesh({"data": 1024}, "abstract")

    def by_rank(x):
        return x * ff.axis_index("data")

    with pytest.raises(ValueError, match=r"'data'.*1024 ranks.*at most 512"):
        ff.plan(by_rank, torch.ones(2), mesh=mesh)


def test_a_spent_state():
    step = ff.donate(OPTIMIZER(ff.value_and_grad(loss)))
    params = init()
    state = ff.TrainState(params, OPTIMIZER.init(params))
    step(state, torch.ones(4, 8))
    with pytest.raises(RuntimeError, match="was donated to a step"):
        ff.plan(step, state, torch.ones(4, 8))


def test_an_error_of_the_step_is_the_step_s():
    class Mine(Exception):
        pass

    def raising(params, x):
        raise Mine("in the step")

    with pytest.raises(Mine, match="in the step"):
        ff.plan(raising, init(), torch.ones(4, 8))
    broken = ff.unit(lambda p, x: raising(p, x))
    with pytest.raises(Mine, match="in the step"):
        ff.plan(lambda p, x: broken(p, x), init(), torch.ones(4, 8))


def test_a_unit_that_writes_into_its_input_is_told():
    @ff.unit
    def writing(p, x):
        x.mul_(2)
        return x @ p

    for repeat in True, False:
        with pytest.raises(RuntimeError, match="changed its input 0"):
            ff.plan(
                lambda p, x: writing(p[0], x * 1), init(), torch.ones(4, 8),
                repeat=repeat,
            )  # fmt: skip
