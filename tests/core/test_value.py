"""``ff.value``: the loss of a gradient call without its gradients, on every stack."""

import pytest
import torch

import fsfunc as ff
from tests.checks import close, on_ranks, simulated, with_ledger
from tests.models import chain, floats, layers

PS, X = layers(4, bias=False), floats(8, 4)
DATA, PIPE = simulated(2), simulated(pipe=2)
BOTH = simulated(data=2, pipe=2)
model = chain()


def loss(ps, x):
    aux = {"mean": x.mean(), "rows": ff.Summed(torch.tensor(len(x)))}
    return model(ps, x), aux | {"largest": ff.Max(x.max())}


def weighted(ps, x):
    """Of uneven weights: rows whose first element is positive count."""
    counts = x[:, 0] > 0
    y = (ps[0]["w"].sum() * x[:, 0]).square()
    return ff.Weighted((y * counts).sum(), counts.sum()), {}


def over_data(**options):
    return lambda f: ff.shard(f, DATA, "data", **options)


STACKS = {
    **{f"zero={zero}": (DATA, over_data(zero=zero)) for zero in range(4)},
    "remat": (DATA, lambda f: over_data()(ff.remat(f))),
    "shard(accumulate)": (DATA, lambda f: over_data()(ff.accumulate(f, 2))),
    "accumulate(shard)": (DATA, lambda f: ff.accumulate(over_data()(f), 2)),
    "jit": (DATA, lambda f: over_data()(ff.jit(f))),
    "offload": (DATA, lambda f: over_data()(ff.offload(f, params="host"))),
    "precision": (DATA, lambda f: over_data()(ff.precision(f, torch.float64))),
    "pipeline": (PIPE, lambda f: ff.pipeline(f, PIPE, "pipe", n_microbatches=3)),
    "pipeline(accumulate)": (
        PIPE,
        lambda f: ff.pipeline(ff.accumulate(f, 2), PIPE, "pipe", n_microbatches=2),
    ),
    "shard(pipeline)": (
        BOTH,
        lambda f: ff.shard(
            ff.pipeline(f, BOTH, "pipe", n_microbatches=2), BOTH, "data"
        ),
    ),
}


def over(mesh):
    """The axes over which the batch is cut."""
    return ("data",) if "data" in mesh.axes else ()


MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stack", STACKS)
def test_it_is_the_value_of_value_and_grad_and_that_of_one_device(stack, mode):
    mesh, transform = STACKS[stack]
    (whole, aux) = ff.value(loss, has_aux=True)(PS, X)
    evaluate, parts = transform(ff.value(loss, has_aux=True)), over(mesh)

    def in_mode(ps, x):
        with mode():
            return evaluate(ps, x)

    found = on_ranks(in_mode, PS, X, mesh=mesh, laid=evaluate, over=parts)
    differentiate = transform(ff.value_and_grad(loss, has_aux=True))
    outs = on_ranks(differentiate, PS, X, mesh=mesh, over=parts)
    for (value, rest), ((expected, _), _) in zip(found, outs, strict=True):
        assert torch.equal(value, expected) and not value.requires_grad
        close((value.float(), rest["mean"].float()), (whole, aux["mean"]))
        assert (rest["rows"].tree, rest["largest"].tree) == (8, X.max())


@pytest.mark.parametrize("stack", ["zero=3", "shard(accumulate)", "accumulate(shard)"])
def test_weights_count_over_ranks_and_microbatches(stack):
    mesh, transform = STACKS[stack]
    (expected, _) = ff.value(weighted, has_aux=True)(PS, X)
    for found, _ in on_ranks(
        transform(ff.value(weighted, has_aux=True)), PS, X, mesh=mesh
    ):
        close(found, expected)


@pytest.mark.parametrize("stack", ["alone", "zero=3", "accumulate(shard)"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_count_of_weights_may_be_one_that_the_loss_cannot_hold(dtype, stack):
    """Past 65504 in float16, where it was infinite and all was zero."""

    scaled = ff.unit(lambda w, x: w * x)

    def counted(w, x):
        return ff.Weighted(scaled(w, x).sum(), 70001 * len(x))

    w, x = torch.ones(1, dtype=dtype), torch.full((4, 1), 2.0**13, dtype=dtype)
    step, expected = ff.value_and_grad(counted), torch.tensor(2.0**13 / 70001)
    if stack == "alone":
        found = [step(w, x), (ff.value(counted)(w, x), w * expected.to(dtype))]
    else:
        found = on_ranks(STACKS[stack][1](step), w, x, mesh=DATA)
    for value, grads in found:
        assert torch.equal(value, expected.to(dtype))
        assert torch.equal(grads[0], expected.to(dtype))


def sent(step, mesh):
    log = with_ledger(lambda _: step, PS, X, mesh=mesh, planned=True)[0][1]
    return [(r.op, r.unit, r.phase) for r in log.records]


def test_only_what_a_forward_pass_sends_is_sent():
    once = [("all_gather", "layer", "forward")] * 4
    ends = [("psum", "", "loss"), ("pmax", "", "maxima"), ("psum", "", "sums")]
    evaluate = ff.value(loss, has_aux=True)
    assert sent(over_data()(evaluate), DATA) == [*once, *ends]
    assert sent(over_data()(ff.remat(evaluate)), DATA) == [*once, *ends]
    assert sent(over_data(zero=0)(evaluate), DATA) == ends
    mesh, transform = STACKS["pipeline"]
    assert set(sent(transform(evaluate), mesh)) == {
        ("ppermute", "layer", "forward"),
        ("pbroadcast", "", "loss"),
    }


@pytest.mark.parametrize("stack", ["zero=3", "shard(accumulate)", "shard(pipeline)"])
def test_it_is_proven(stack):
    mesh, transform = STACKS[stack]
    evaluate = ff.value(loss, has_aux=True)
    ff.prove(evaluate, transform(evaluate), mesh, PS, X)
    with pytest.raises(AssertionError, match="the first value that differs: forward"):
        wrong = ff.value(lambda ps, x: model(ps, x) + 1e-9)
        ff.prove(ff.value(model), transform(wrong), mesh, PS, X)


def test_nothing_is_kept_for_a_backward_pass():
    scaled, rows = ff.unit(lambda w, x: x * w), torch.ones(1 << 16)

    def chained(w, x):
        for _ in range(8):
            x = scaled(w, x)
        return x.mean()

    peaks = []
    for call in (ff.value(chained), ff.value_and_grad(chained)):
        with ff.testing.live_bytes() as live:
            call(torch.tensor(1.5), rows)
        peaks.append(live.peak_bytes)
    assert peaks[0] < 4 * rows.nbytes < peaks[1]


def test_a_search_along_a_line_takes_the_same_steps_on_ranks():
    """Gradient calls and evaluations in one step: the largest step that helps."""

    def step(ps, x):
        first, grads = ff.value_and_grad(model)(ps, x)
        best = first
        for rate in (0.1, 1.0, 10.0, 1000.0):
            tried = ff.tree.map(lambda p, g, by=rate: p - by * g, ps, grads)
            best = torch.minimum(best, ff.value(model)(tried, x))
        return first, best

    expected = step(PS, X)
    assert expected[1] < expected[0]
    for stack in ("zero=3", "zero=1", "remat", "shard(accumulate)"):
        mesh, transform = STACKS[stack]
        for found in on_ranks(transform(step), PS, X, mesh=mesh):
            close(found, expected)


def test_a_step_of_a_pipeline_evaluates_too():
    mesh, transform = STACKS["pipeline"]

    def step(ps, x):
        before, grads = ff.value_and_grad(model)(ps, x)
        ps = ff.tree.map(lambda p, g: p - 0.1 * g, ps, grads)
        return before, ff.value(model)(ps, x)

    for found in on_ranks(transform(step), PS, X, mesh=mesh, over=()):
        close(found, step(PS, X))


def piped(step):
    return on_ranks(STACKS["pipeline"][1](step), PS, X, mesh=PIPE, over=())


def test_parameters_of_a_pipeline_are_the_first_argument_that_is_not_cut():
    def turned(x, ps):
        return model(ps, x)

    def named(*, ps, x):
        return model(ps, x)

    expected = model(PS, X)
    for found in piped(lambda ps, x: ff.value(turned, batch_argnums=0)(x, ps)):
        close(found, expected)
    with pytest.raises(TypeError, match="no parameters by position"):
        piped(lambda ps, x: ff.value(named, batch_argnums="x")(ps=ps, x=x))


def test_a_pipeline_tells_losses_under_one_transform_apart():
    layer = ff.unit(lambda p, x: torch.tanh(x @ p["w"]))

    def straight(ps, x):
        for p in ps:
            x = layer(p, x)
        return x.square().mean(), {"mean": x.mean()}

    def skipping(ps, x):
        first = layer(ps[0], x)
        return straight(ps[1:], first)[0] + first.sum(1).mean(), {"of": first.mean()}

    def step(ps, x, skips):
        chosen = ff.remat(skipping if skips else straight)
        return ff.value(chosen, has_aux=True, batch_argnums=1)(ps, x)

    evaluate = STACKS["pipeline"][1](step)

    def main():
        ps = ff.place(evaluate, PS, X, False)
        return evaluate(ps, X, False), evaluate(ps, X, True)

    for found in ff.spmd(main, PIPE)():
        close(found, (straight(PS, X), skipping(PS, X)))


def test_what_differentiates_around_it_goes_through():
    gradient = torch.func.grad(ff.value(model))(PS, X)
    close(gradient, ff.value_and_grad(model)(PS, X)[1])
    nested = ff.value_and_grad(lambda ps, x: ff.value(model)(ps, x) ** 2)(PS, X)[1]
    value = ff.value(model)(PS, X)
    close(nested, ff.tree.map(lambda g: 2 * value * g, gradient))
    tracked = ff.tree.map(lambda p: p.clone().requires_grad_(), PS)
    ff.value(model)(tracked, X).backward()
    close(ff.tree.map(lambda p: p.grad, tracked), gradient)
    assert not ff.value(model)(PS, X).requires_grad


def test_a_loss_differentiates_within_it():
    def energy(w, x):  # its derivative by x is what the loss is of
        slope = ff.value_and_grad(lambda x: torch.tanh(x @ w).sum())(x)[1]
        return slope.square().mean()

    w = PS[0]["w"]
    close(ff.value(energy)(w, X), ff.value_and_grad(energy)(w, X)[0])


def test_an_evaluation_is_no_sample_of_adascale():
    """Nor a gradient call of a step in the backward, whose count of them is one."""

    def step(state, x):
        ff.value(model)(state.params, x)
        return adascale(ff.value_and_grad(model))(state, x)

    adascale = ff.adascale(ff.sgd(0.1), scale=2)
    plain = adascale(ff.value_and_grad(model))
    outs = []
    for f in (step, plain):
        stepped = ff.shard(f, DATA, "data")

        def main(stepped=stepped):
            x = ff.local_batch(X, DATA, "data")
            state = ff.init_state(stepped, PS, adascale, x)
            return ff.unshard(stepped(state, x))

        outs.append(ff.spmd(main, DATA)())
    close(list(outs[0]), list(outs[1]))


def test_masks_are_those_of_the_gradient_call():
    def dropped(w, x):
        return torch.dropout(x * w, 0.5, train=True).mean()

    unit = ff.unit(dropped)
    found = []
    for call in (ff.value(unit), lambda *a: ff.value_and_grad(unit)(*a)[0]):
        torch.manual_seed(3)
        found.append(call(torch.tensor(2.0), torch.ones(64)))
    assert torch.equal(*found)


def test_what_is_no_loss_is_refused():
    with pytest.raises(ValueError, match="the loss must be a floating scalar"):
        ff.value(lambda w, x: w * x)(torch.tensor(1.0), X)
    with pytest.raises(TypeError, match="the loss must return \\(loss, aux\\)"):
        ff.value(model, has_aux=True)(PS, X)
    with pytest.raises(TypeError, match="value"):
        ff.value(3)
