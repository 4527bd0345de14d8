"""A loss is recorded once: what changes later is right, or told on every rank."""

import pytest
import torch
from torch.nn.functional import dropout, embedding

import fsfunc as ff
from tests.checks import same, simulated
from tests.models import layers, linear

# Glue of a real tensor and a stand-in: FakeTensor reads .grad of the real one.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

MESH = simulated(pipe=2)
X = torch.arange(16.0, dtype=torch.float64).view(4, 4) - 7


def parameters(n=4):
    return layers(n, bias=False, dtype=torch.float64)


def piped(f, **options):
    return ff.pipeline(f, MESH, "pipe", n_microbatches=2, **options)


def mean(params, x, unit=linear):
    for p in params:
        x = unit(p, x)
    return x.mean()


def on_ranks(main):
    return ff.spmd(main, MESH)()


def equal(call, *args, **options):
    """A pipelined call gives each rank what one device gives."""
    grad = piped(call, **options)
    same(list(on_ranks(lambda: grad(*args))), [call(*args)] * 2)


# By what it captured


def skips_into_the_last_stage(now, p, x):
    first = linear(p[0], x)
    h = linear(p[2], linear(p[1], first))
    return linear(p[3], h + first if now else h).mean()


def skips_into_the_loss(now, p, x):
    first = linear(p[0], x)
    h = linear(p[2], linear(p[1], first))
    return (h + first if now else h).mean()


def thaws_its_first_half(now, p, x):
    """Gradients were zeros: no stage knew that it had to send any back."""
    with torch.set_grad_enabled(now and torch.is_grad_enabled()):
        x = linear(p[1], linear(p[0], x))
    return linear(p[3], linear(p[2], x)).mean()


def draws_for_two_stages(now, p, x):
    """Each stage would draw its own noise."""
    noise = dropout(linear(p[0], x), 0.5, now)
    return (linear(p[2], linear(p[1], noise)) + noise).mean()


def calls_another_unit(now, p, x):
    other = drops if now else linear
    return linear(p[2], other(p[1], linear(p[0], x))).mean()


drops = ff.unit(lambda p, x: dropout(x) @ p["w"])


def returns_more(now, p, x):
    value = mean(p, x)
    return value, {"a": value.detach()} | ({"b": value.detach()} if now else {})


CHANGES = {
    skips_into_the_last_stage: r"call 3, of unit 'linear', depends on",
    skips_into_the_loss: "the loss depends on an output of a stage",
    thaws_its_first_half: "'linear', is differentiated, and was not",
    draws_for_two_stages: "drew none when it was recorded",
    calls_another_unit: r"call 1 of the loss is of unit '<lambda>', but",
    returns_more: "the loss returned .* may change with its",
}


@pytest.mark.parametrize("loss", CHANGES, ids=lambda f: f.__name__)
def test_a_loss_that_changed_by_what_it_captured_is_told_so(loss):
    now = {"changed": False}
    call = ff.value_and_grad(
        lambda p, x: loss(now["changed"], p, x), has_aux=loss is returns_more
    )
    grad = piped(call, stages=[2, 1] if loss is draws_for_two_stages else None)
    on_ranks(lambda: [grad(parameters(), X) for _ in range(2)])  # goes through
    now["changed"] = True
    with pytest.raises(RuntimeError, match=CHANGES[loss]):
        on_ranks(lambda: grad(parameters(), X))


def test_what_travels_has_the_recorded_shape():
    """A receive of another size would wait, or take what is not there."""
    packed = ff.unit(lambda p, x: x[x[:, 0] > 4] @ p["w"])

    def loss(p, x):
        return linear(p[1], packed(p[0], x)).sum()

    for call in (loss, ff.value_and_grad(loss)):
        with pytest.raises(RuntimeError, match="gave .* was recorded: .* pad"):
            on_ranks(lambda call=call: piped(call)(parameters(2), X))


# By its arguments


def test_numbers_beside_the_loss_are_those_of_now_on_every_rank():
    now = {"rate": 0.0, "warm": False, "count": 0, "seen": 0}
    loss = lambda p, x: (mean(p, x), (dict(now), "text", None))  # noqa: E731
    grad = piped(ff.value_and_grad(loss, has_aux=True))
    for k in range(3):
        now.update(rate=k / 2, warm=k > 0, count=k, seen=2**60 + k)
        for found, text, none in on_ranks(lambda: grad(parameters(), X)[0][1]):
            assert found == now and (text, none) == ("text", None)
            assert list(map(type, found.values())) == [float, bool, int, int]
    paper = ff.make_mesh({"pipe": 2}, "abstract")
    call = ff.value_and_grad(loss, has_aux=True)
    planned = ff.pipeline(call, paper, "pipe", n_microbatches=2)
    found = ff.spmd(lambda: planned(parameters(), X)[0][1], paper)()
    assert [numbers for numbers, *_ in found] == [now] * 2  # as recorded


def test_an_integer_that_would_be_rounded_is_refused():
    def found(n):
        grad = piped(ff.value_and_grad(lambda p, x: (mean(p, x), n), has_aux=True))
        return on_ranks(lambda: grad(parameters(), X)[0][1])

    assert set(found(2**105 + 1)) == {2**105 + 1} and set(found(2**200)) == {2**200}
    with pytest.raises(ValueError, match="do not hold it"):
        found(2**120 + 2**60 + 1)


def test_autocast_around_a_step_that_was_recorded_without():
    params, x = [{"w": torch.eye(4) * 2} for _ in range(4)], torch.sign(X).float()
    call = ff.value_and_grad(lambda p, x: mean(p, x).double())
    grad = piped(call)

    def main():
        plain = grad(params, x)
        with torch.autocast("cpu", torch.bfloat16):
            return plain, grad(params, x)

    expected = call(params, x)  # powers of two: exact in bfloat16 too
    for found in on_ranks(main):
        same(found, (expected, expected))


def test_ranks_with_pipelines_of_their_own_cut_as_the_state_was_laid_out():
    """Longer rows than those of ``init_state`` would balance otherwise."""
    affinity = ff.unit(lambda p, x: x @ x.transpose(-1, -2) @ x @ p["w"])
    loss = lambda p, x: mean(p[1:], affinity(p[0], x))  # noqa: E731
    optimizer = ff.sgd(0.125)
    short, long = torch.ones(2, 1, 4).double(), torch.ones(2, 64, 4).double()

    def main():
        step = piped(optimizer(ff.value_and_grad(loss)))
        state = ff.init_state(step, parameters(6), optimizer, short)
        return step(state, long)[1]["loss"]

    same(list(on_ranks(main)), [loss(parameters(6), long)] * 2)


# Kinds of units that are easily lost in a cut


def test_a_table_with_sparse_gradients_that_two_stages_share():
    rows = ff.unit(lambda p, ids: embedding(ids, p, sparse=True))
    scores = ff.unit(lambda p, x: x @ p.t())

    def loss(p, ids):
        h = linear(p[1], linear(p[0], rows(p[2]["w"], ids)))
        return scores(p[2]["w"], h).mean()

    equal(ff.value_and_grad(loss), parameters(), torch.tensor([0, 3, 3, 1]))


def test_a_hook_on_a_parameter_sees_its_gradient():
    mask = torch.tensor([[1.0], [0.0], [1.0], [0.0]], dtype=torch.float64)

    @ff.unit
    def masked(p, x):
        p["w"].register_hook(lambda g: g * mask)
        return x @ p["w"]

    call = ff.value_and_grad(lambda p, x: mean(p, x, masked))
    equal(call, parameters(), X, schedule=ff.schedules.zb_h1)
