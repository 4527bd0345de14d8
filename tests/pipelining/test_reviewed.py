"""What a review of the pipeline runtime found, case by case."""

import pytest
import torch

import fsfunc as ff
from tests.checks import same

# Glue of a real tensor and a stand-in: FakeTensor reads .grad of the real one.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@ff.unit
def layer(p, x):
    return x @ p["w"]


@ff.unit
def affinity(p, x):
    return x @ x.transpose(-1, -2) @ x @ p["w"]


def parameters(count: int = 4) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)

    def whole() -> torch.Tensor:
        return torch.randint(-2, 3, (4, 4), generator=draw).double()

    return [{"w": whole()} for _ in range(count)]


def mesh_of(size: int = 2) -> ff.Mesh:
    return ff.make_mesh({"pipe": size}, "simulated")


X = torch.arange(16.0, dtype=torch.float64).view(4, 4) - 7


def written(params, x):
    for p in params:
        x = layer(p, x)
        x.mul_(p["w"][0])
    return x.mean()


def reshaped(params, x):
    for p in params:
        x = layer(p, x)
        x.unsqueeze_(0)
        x = x[0] * 2
    return x.mean()


@pytest.mark.parametrize("loss", [written, reshaped])
def test_what_a_loss_writes_into_a_stand_in_is_gone_with_the_microbatch(loss):
    """Its history would keep the parameters of every step that ever was."""
    mesh = mesh_of()
    grad = ff.pipeline(ff.value_and_grad(loss), mesh, "pipe", n_microbatches=2)
    ff.spmd(lambda: [grad(parameters(), X) for _ in range(2)], mesh)()
    (handler,) = grad.interpretations  # pyright: ignore[reportFunctionMemberAccess]
    stand_ins = [x for c in handler.cuts.known.values() for (x,) in c.stand_ins]
    assert [tuple(x.shape) for x in stand_ins] == [(2, 4)] * 4
    assert not any(x.requires_grad for x in stand_ins)


def test_autocast_around_a_step_that_was_recorded_without():
    def loss(params, x):
        for p in params:
            x = layer(p, x)
        return x.double().mean()

    mesh, x = mesh_of(), torch.sign(X)
    params = [{"w": torch.eye(4) * 2} for _ in range(4)]
    grad = ff.pipeline(ff.value_and_grad(loss), mesh, "pipe", n_microbatches=2)

    def main():
        plain = grad(params, x.float())
        with torch.autocast("cpu", torch.bfloat16):
            return plain, grad(params, x.float())

    expected = ff.value_and_grad(loss)(params, x.float())
    for plain, cast in ff.spmd(main, mesh)():  # powers of two: exact in bfloat16 too
        same([plain, cast], [expected, expected])


def test_a_captured_flag_that_changes_what_the_last_stage_needs():
    def loss_of(skips):
        def loss(params, x):
            first = layer(params[0], x)
            h = layer(params[2], layer(params[1], first))
            return layer(params[3], h + first if skips else h).mean()

        return loss

    def step(params, x, skips):
        return ff.value_and_grad(loss_of(skips))(params, x)

    mesh = mesh_of()
    grad = ff.pipeline(step, mesh, "pipe", n_microbatches=2)

    def main():
        grad(parameters(), X, False)
        return grad(parameters(), X, True)

    with pytest.raises(RuntimeError, match=r"call 3, of unit 'layer', depends on"):
        ff.spmd(main, mesh)()


def test_a_captured_flag_that_changes_what_the_loss_needs():
    def loss_of(skips):
        def loss(params, x):
            first = layer(params[0], x)
            h = layer(params[2], layer(params[1], first))
            return (h + first if skips else h).mean()

        return loss

    def step(params, x, skips):
        return ff.value_and_grad(loss_of(skips))(params, x)

    mesh = mesh_of()
    grad = ff.pipeline(step, mesh, "pipe", n_microbatches=2)

    def main():
        grad(parameters(), X, False)
        return grad(parameters(), X, True)

    with pytest.raises(RuntimeError, match="the loss depends on an output of a stage"):
        ff.spmd(main, mesh)()


def test_ranks_with_pipelines_of_their_own_cut_as_the_state_was_laid_out():
    """Longer rows than those of ``init_state`` would balance otherwise."""

    def loss(params, x):
        h = affinity(params[0], x)
        for p in params[1:]:
            h = layer(p, h)
        return h.mean()

    mesh, optimizer = mesh_of(), ff.sgd(0.125)
    short, long = torch.ones(2, 1, 4).double(), torch.ones(2, 64, 4).double()

    def main():
        step = ff.pipeline(
            optimizer(ff.value_and_grad(loss)), mesh, "pipe", n_microbatches=2
        )
        state = ff.init_state(step, parameters(6), optimizer, short)
        return step(state, long)[1]["loss"]

    value = loss(parameters(6), long)
    same(list(ff.spmd(main, mesh)()), [value, value])


def test_a_table_with_sparse_gradients_that_two_stages_share():
    @ff.unit
    def rows(p, ids):
        return torch.nn.functional.embedding(ids, p, sparse=True)

    @ff.unit
    def scores(p, x):
        return x @ p.t()

    def loss(params, ids):
        h = layer(params[1], layer(params[0], rows(params[2]["w"], ids)))
        return scores(params[2]["w"], h).mean()

    mesh, ids = mesh_of(), torch.tensor([0, 3, 3, 1])
    grad = ff.pipeline(ff.value_and_grad(loss), mesh, "pipe", n_microbatches=2)
    expected = ff.value_and_grad(loss)(parameters(), ids)
    outs = ff.spmd(lambda: grad(parameters(), ids), mesh)()
    same(list(outs), [expected, expected])


def plain_loss(params, x):
    for p in params:
        x = layer(p, x)
    return x.mean()


def test_numbers_beside_the_loss_are_those_of_now_on_every_rank():
    now = {"rate": 0.0, "warm": False, "count": 0}

    def loss(params, x):
        return plain_loss(params, x), (dict(now), "text", None)

    mesh = mesh_of()
    grad = ff.pipeline(
        ff.value_and_grad(loss, has_aux=True), mesh, "pipe", n_microbatches=2
    )
    for k in range(3):
        now.update(rate=k / 2, warm=k > 0, count=k)
        outs = ff.spmd(lambda: grad(parameters(), X)[0][1], mesh)()
        for found, text, none in outs:
            assert found == now and (text, none) == ("text", None)
            assert list(map(type, found.values())) == [float, bool, int]


def test_a_batch_of_another_structure_is_another_program():
    def loss(params, x, **named):
        ((name, y),) = named.items()
        return plain_loss(params, x), {name: y.sum()}

    mesh, y = mesh_of(), torch.ones(4)
    grad = ff.pipeline(
        ff.value_and_grad(loss, has_aux=True), mesh, "pipe", n_microbatches=2
    )

    def main():
        return [grad(parameters(), X, **{k: y})[0][1] for k in ("mask", "weight")]

    for first, second in ff.spmd(main, mesh)():
        assert set(first) == {"mask"} and set(second) == {"weight"}


def test_a_captured_flag_that_changes_what_the_loss_returns():
    now = {"more": False}

    def loss(params, x):
        value = plain_loss(params, x)
        aux = {"a": value.detach()}
        return value, {**aux, "b": value.detach()} if now["more"] else aux

    mesh = mesh_of()
    grad = ff.pipeline(
        ff.value_and_grad(loss, has_aux=True), mesh, "pipe", n_microbatches=2
    )
    ff.spmd(lambda: grad(parameters(), X), mesh)()
    now["more"] = True
    with pytest.raises(RuntimeError, match="the loss returned .* may change with its"):
        ff.spmd(lambda: grad(parameters(), X), mesh)()


@pytest.mark.parametrize("schedule", [ff.schedules.gpipe, ff.schedules.zb_h1])
def test_a_hook_on_a_parameter_sees_its_gradient(schedule):
    mask = torch.tensor([[1.0], [0.0], [1.0], [0.0]], dtype=torch.float64)

    @ff.unit
    def masked(p, x):
        p["w"].register_hook(lambda g: g * mask)
        return x @ p["w"]

    def loss(params, x):
        for p in params:
            x = masked(p, x)
        return x.mean()

    mesh = mesh_of()
    grad = ff.pipeline(
        ff.value_and_grad(loss), mesh, "pipe", n_microbatches=2, schedule=schedule
    )
    expected = ff.value_and_grad(loss)(parameters(), X)
    same(list(ff.spmd(lambda: grad(parameters(), X), mesh)()), [expected, expected])


def test_parameters_of_another_structure_are_laid_out_anew():
    """A model that grows by a layer goes on with the pipeline that it has."""
    optimizer, mesh = ff.sgd(0.125), mesh_of()
    one = optimizer(ff.value_and_grad(plain_loss))
    step = ff.pipeline(one, mesh, "pipe", n_microbatches=2)

    def steps(by, start):
        state, _ = by(start(parameters(3)), X)
        grown = [*ff.unshard(state.params), *parameters(1)]
        state, metrics = by(start(grown), X)
        return metrics["loss"], ff.unshard(state.params)

    def main():
        return steps(step, lambda p: ff.init_state(step, p, optimizer, X))

    expected = steps(one, lambda p: ff.TrainState(p, optimizer.init(p)))
    same(list(ff.spmd(main, mesh)()), [expected, expected])


def test_a_state_of_other_stages_is_refused_on_every_rank():
    """Before anything is sent: a rank that goes on would wait for the others."""
    mesh = ff.make_mesh({"pipe": 2}, "simulated")
    layer = ff.unit(lambda p, x: x * p)

    def loss(params, x):
        for p in params:
            x = layer(p, x)
        return x.mean()

    def main():
        grad = ff.value_and_grad(loss)
        one, other = (
            ff.pipeline(grad, mesh, "pipe", n_microbatches=2, schedule=schedule)
            for schedule in (ff.schedules.one_f_one_b, ff.schedules.zb_v)
        )
        x, params = torch.ones(4), [torch.ones(4)[i].clone() for i in range(4)]
        placed = ff.place(one, params, x)
        with ff.ledger() as log, pytest.raises(ValueError, match="place it anew"):
            other(placed, x)
        return log.count(), one(placed, x)[0].item()

    assert ff.spmd(main, mesh)() == [(0, 1.0), (0, 1.0)]
