"""Of equal layers in a row a plan leaves most out, and says what it says with them."""

import pytest
import torch
from torch.nn.functional import dropout, scaled_dot_product_attention

import fsfunc as ff
from fsfunc.planning.left_out_calls import KEPT
from fsfunc.state.shared_records import sharing_records
from tests.models import layer, split, splits
from tests.planning.left_out import (
    ADAM,
    WIDTH,
    N,
    assert_all_run,
    assert_equal,
    assert_left_out,
    check,
    embed,
    four,
    half,
    head,
    init,
    linear,
    matrix,
    outside,
    plain,
    planned,
    sharded,
    stack,
    through,
)

pytestmark = pytest.mark.usefixtures("uncollected")

STACKS = {
    **{f"zero {z}": sharded(z) for z in range(4)},
    **{f"donated, zero {z}": outside(ff.donate, z) for z in (1, 3)},
    **{f"accumulated within, zero {z}": sharded(z, four) for z in (0, 1, 3)},
    **{f"accumulated around, zero {z}": outside(four, z) for z in (0, 1, 3)},
    "each reduced": sharded(3, four, reduce_each=True),
    "each reduced, zero 2": sharded(2, four, reduce_each=True),
    "remat within": sharded(3, ff.remat),
    "remat around": outside(ff.remat),
    "remat, one spared": sharded(
        3, lambda f: four(ff.remat(f, policy="except_last"))
    ),
    "kept gathered": sharded(3, reshard_after_forward=False),
    "bfloat16": sharded(3, half),
    "bfloat16, recomputed, accumulated": sharded(3, lambda f: four(ff.remat(half(f)))),
    "compiled units": outside(ff.jit),
    "compiled, recomputed": sharded(3, lambda f: ff.jit(ff.remat(f))),
    "quantized": sharded(
        3, gather=ff.QuantizedGather(), reduction=ff.QuantizedReduction()
    ),
}  # fmt: skip
REPLICATED = {
    f"replicas, zero {z}": sharded(z, replicate="node") for z in (1, 3)
} | {
    "replicas, accumulated": sharded(3, four, replicate="node"),
    "local steps": lambda f, mesh: ff.local_sgd(
        sharded()(f, mesh), mesh, "node", every=2
    ),
    "slow momentum": lambda f, mesh: ff.slowmo(
        sharded()(f, mesh), mesh, "node", every=2, lr=0.5
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STACKS)
def test_layers_are_left_out_under_each_stack(name):
    assert_left_out(around=STACKS[name])


@pytest.mark.parametrize("name", REPLICATED)
def test_layers_are_left_out_beside_copies(name):
    assert_left_out(around=REPLICATED[name], axes={"node": 2, "data": 4})


def test_all_but_twelve_layers_are_left_out():
    counts, every = check(init=lambda: init(40))
    assert counts == [2 + 2 * KEPT] and every == 42


def test_so_few_layers_that_nothing_is_saved_all_run():
    assert check(init=lambda: init(2 * KEPT + 1)) == ([2 * KEPT + 3], 2 * KEPT + 3)


@pytest.mark.parametrize("what", ["params", "moments", "activations"])
def test_with_tensors_in_a_store_all_layers_run(what):
    assert_all_run(around=outside(lambda f: ff.offload(f, **{what: "host"})))


@pytest.mark.parametrize("zero", range(4))
def test_layers_that_an_axis_splits_are_left_out(zero):
    def halves():
        return {"up": torch.zeros(WIDTH, WIDTH), "down": torch.zeros(WIDTH, WIDTH)}

    layouts = {k: v for i in range(N) for k, v in splits(f"layers/{i}/").items()}
    how = {
        "loss": through(lambda ps, x: stack(ps, x, split)),
        "init": lambda: init(make=halves),
        "axes": {"data": 2, "model": 2},
        "around": sharded(zero, ff.remat),
    }
    assert_left_out(layouts=layouts, **how)
    # One layer in the middle has no part.
    layouts = {k: v for k, v in layouts.items() if "/9/" not in k}
    assert_all_run(layouts=layouts, **how)


OPTIMIZERS = {
    "scale": ff.loss_scale(ADAM),
    "average": ff.ema(ADAM),
    "norm": ff.chain(ff.clip_by_global_norm(1.0), ADAM),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_layers_are_left_out_before_each_update(name):
    assert_left_out(optimizer=OPTIMIZERS[name])


SEEING = {
    "each update": (ff.step_in_backward(ADAM), {}, None),
    "each error": (
        ff.error_feedback(ADAM), {"reduction": ff.QuantizedReduction()}, None
    ),
    "each scale": (ff.layerwise_loss_scale(ADAM, {"layer": 8.0}), {}, None),
    "each gradient": (
        ADAM, {}, ADAM(ff.observe_gradients(ff.value_and_grad(plain), lambda g: {}))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SEEING)
def test_all_layers_run_for_what_sees(name):
    optimizer, options, step = SEEING[name]
    assert_all_run(optimizer=optimizer, step=step, around=sharded(**options))


# Losses


@ff.unit
def masked(p, x, mask, flag=True):
    return torch.tanh(x @ p["w"] + p["b"]) * mask if flag else x @ p["w"] + p["b"]


@ff.unit
def with_residual(p, x, residual):
    y = x @ p["w"]
    return {"x": torch.tanh(y + p["b"]), "residual": y + residual, "n": 3, "none": None}


@ff.unit
def with_place(p, x, place):
    return torch.tanh(x @ p["w"] + p["b"]) + place, place * 2


@ff.unit
def passing_on(p, x, place):
    return torch.tanh(x @ p["w"] + p["b"]) + place, place


@ff.unit
def wide_and_narrow(p, x):
    return torch.tanh(x @ p["w"]) + p["b"].float()


@ff.unit
def attends(p, x):
    q = x @ p["w"] + p["b"]
    return scaled_dot_product_attention(q, q, q)


@ff.unit
def added(p, x, total):
    y = x @ p["w"] + p["b"]
    return torch.tanh(y), total + y.mean()


@ff.unit
def random(p, x):
    return dropout(x @ p["w"] + p["b"], 0.5)


def residuals(layers, x):
    residual = x
    for p in layers:
        out = with_residual(p, x, residual)
        x, residual = out["x"], out["residual"]
    return x + residual


def threaded(unit, start):
    def run(layers, x):
        other = start(x)
        for p in layers:
            x, other = unit(p, x, other)
        return x + other

    return run


def skipping(layers, x):
    return stack(layers, x) + x


def mask_with_gradient(layers, x):
    mask = x.sum(0)
    for p in layers:
        x = masked(p, x, mask)
    return x


def mask_by_keyword(layers, x):
    mask = torch.ones(WIDTH)
    for p in layers:
        x = masked(p, x, mask=mask, flag=True)
    return x


def in_place_at_the_ends(layers, x):
    for i, p in enumerate(layers):
        x = linear(p, x)
        if i in (0, N - 1):
            x += 1
    return x


def hidden_states_that_nobody_reads(layers, x):
    seen = []
    for p in layers:
        x = layer(p, x)
        seen.append(x.detach())
    return x


def two_dtypes():
    return {"w": torch.zeros(WIDTH, WIDTH), "b": torch.zeros(WIDTH).bfloat16()}


SHORTENED = {
    "residuals": residuals,
    "a skip over all": skipping,
    "a mask": mask_by_keyword,
    "a mask with a gradient": mask_with_gradient,
    "a place": threaded(with_place, lambda x: torch.ones(WIDTH)),
    "a place of integers": threaded(
        with_place, lambda x: torch.ones(WIDTH, dtype=torch.long)
    ),
    "a place that is passed on": threaded(
        passing_on, lambda x: torch.ones(WIDTH)
    ),
    "a sum that is passed on": threaded(added, lambda x: x.sum()),
    "a gradient that is passed on": threaded(passing_on, lambda x: x.sum(0)),
    "dropout": lambda ps, x: stack(ps, x, random),
    "in place at the ends": in_place_at_the_ends,
    "states that nobody reads": hidden_states_that_nobody_reads,
    "autocast": lambda ps, x: _under(
        torch.autocast("cpu", torch.bfloat16), stack, ps, x
    ),
    "no gradients": lambda ps, x: _under(torch.no_grad(), stack, ps, x),
}  # fmt: skip


def _under(context, fn, *args):
    with context:
        return fn(*args)


@pytest.mark.parametrize("name", SHORTENED)
def test_layers_are_left_out_of_a_loss_with(name):
    loss = through(SHORTENED[name])
    assert_left_out(loss)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORTENED)
@pytest.mark.parametrize("zero", [1, 3])
def test_layers_are_left_out_under_more_transforms_of_a_loss_with(name, zero):
    loss = through(SHORTENED[name])
    # `remat` saves the very tensor that a layer passes on: it is in use, and all run.
    compare = check if name == "a place that is passed on" else assert_left_out
    compare(loss, around=sharded(zero, lambda f: ff.accumulate(ff.remat(f), 2)))
    assert_left_out(loss, around=outside(four, zero))


@pytest.mark.parametrize("zero", range(4))
def test_layers_of_two_buffers_are_left_out(zero):
    loss = through(lambda ps, x: stack(ps, x, wide_and_narrow))
    assert_left_out(
        loss, lambda: init(make=two_dtypes), around=sharded(zero), optimizer=ff.sgd(0.1)
    )


def encoder_and_decoder(params, x):
    memory = stack(params["encoder"], embed(params["embed"], x))
    for p in params["decoder"]:
        x = masked(p, x, memory)
    return head(params["head"], x)


def two_stacks():
    layers = {"encoder": init(N)["layers"], "decoder": init(N + 2)["layers"]}
    return {"embed": matrix(), "head": matrix(), **layers}


@pytest.mark.parametrize("name", ["zero 3", "zero 1", "remat within", "each reduced",
                                  "accumulated around, zero 3"])  # fmt: skip
def test_layers_of_each_of_two_stacks_are_left_out(name):
    counts, every = check(encoder_and_decoder, two_stacks, STACKS[name])
    assert len(counts) == 1 and counts[0] / every <= 27 / 36


def test_layers_are_left_out_of_each_gradient_call_and_of_evaluations():
    optimizer = ff.ema(ADAM)

    def step(state, x):
        value, grads = ff.value_and_grad(plain)(state.params, x)
        state = state.apply_gradients(grads, optimizer)
        averages = ff.eval_params(state.opt_state, state.params)
        again, grads = ff.value_and_grad(plain)(state.params, x)
        evaluated = ff.value(plain)(averages, x)
        return state.apply_gradients(grads, optimizer), (value, again, evaluated)

    for zero in (1, 3):
        counts, every = check(step=step, optimizer=optimizer, around=sharded(zero))
        assert counts == [3 * (2 + 2 * KEPT)] and every == 3 * (2 + N)


def test_layers_are_left_out_with_what_another_plan_recorded():
    records = {}
    with sharing_records(records):
        for zero in (3, 1, 0):
            # The first of the two plans of each is left the record of the one before.
            assert_left_out(around=sharded(zero, ff.remat))
    assert records


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_layers_with_attention_are_left_out_on(device):
    def run(layers, x):
        return stack(layers, x[:, None, None], attends)[:, 0, 0]

    assert_left_out(through(run), device=device)


@pytest.mark.parametrize("unlike", [False, True])
def test_each_rank_of_a_simulated_mesh_plans_by_itself(unlike):
    """One of them has unlike calls: it plans anew, and the other does not wait."""
    mesh = ff.make_mesh({"data": 2}, "simulated")

    def loss(params, x):
        x = embed(params["embed"], x)
        seen = []
        for p in params["layers"]:
            x = layer(p, x)
            if unlike and mesh.rank == 1:
                seen.append(x)
        return head(params["head"], x)

    step = sharded()(ADAM(ff.value_and_grad(loss)), mesh)

    def main(every):
        batch = torch.zeros(4, WIDTH)
        return planned(step, init, ADAM, batch, every_microbatch=every)

    both = [ff.spmd(main, mesh)(every) for every in (False, True)]
    for (quick, counts), (judge, every) in zip(*both, strict=True):
        assert_equal(quick, judge)
        assert unlike or counts[0] < every[0]
