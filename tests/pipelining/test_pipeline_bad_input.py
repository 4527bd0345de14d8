"""Bad input of ``pipeline``: a clear error on every rank, before anything is sent."""

import functools
import re

import pytest
import torch

import fsfunc as ff
from fsfunc.comm.comparison import RanksDiffer
from tests.checks import close, held, nothing_sent, same, simulated
from tests.pipelining.models import batch_of, chain, join, layer, parameters, through

MESH = simulated(pipe=2)
S = ff.schedules
GRADIENT = ff.value_and_grad(chain)
square = ff.unit(lambda w, x: x @ w)
EYE, ONES = torch.eye(4), torch.ones(4, 4)


def batch(rows=4):
    return {key: batch_of(rows, 0)[key] for key in "xy"}


def on(f, mesh=MESH, m=2, **options):
    return ff.pipeline(f, mesh, "pipe", n_microbatches=m, **options)


def grad(loss=chain, rows=4, **options):
    """A gradient call in a pipeline, on data."""
    return on(ff.value_and_grad(loss), **options)(parameters(), batch(rows))


# Losses that cannot be cut


def squares(w, x):
    return square(w, square(w, x)).mean()


def of_the_batch_twice(params, batch):
    for p in params["layers"]:
        h = layer(p, batch["x"])
    return (h * batch["y"]).mean()


def skipping(params, batch):
    """From the first stage to the last: a message of its own."""
    first = layer(params["layers"][0], batch["x"])
    h = layer(params["layers"][1], first)
    return (join(params["layers"][2], h, first) * batch["y"]).mean()


SKIPS = [
    "F0@0 SF0@0>1 RB0@0<1 B0@0",
    "RF0@1<0 F0@1 SF0@1>2 RB0@1<2 B0@1 SB0@1>0",
    "RF0@2<1 F0@2 B0@2 SB0@2>1",
]


def by_a_value(params, batch):
    h = layer(params["layers"][0], batch["x"])
    if h.sum() > 0:  # this line
        h = h * 2
    return layer(params["layers"][1], h).mean()


def of_an_item(params, batch):
    h = layer(params["layers"][0], batch["x"])
    return layer(params["layers"][1], h * h.max().item()).mean()


def with_noise_for_two_stages(params, batch):
    h = layer(params["layers"][0], batch["x"])
    noise = torch.rand(h.shape)
    h = layer(params["layers"][1], h + noise)
    return (layer(params["layers"][2], h) + noise).mean()


def writing(params, batch):
    params["tied"].data.add_(1)
    return chain(params, batch)


def mapping(params, batch):
    h = torch.func.vmap(lambda x: layer(params["layers"][0], x))(batch["x"])
    return layer(params["layers"][1], h).mean()


def by_shape(params, batch):
    """The last microbatch is smaller, and its loss makes other calls."""
    h = layer(params["layers"][0], batch["x"])
    if len(h) == 2:
        h = layer(params["layers"][1], h)
    return layer(params["layers"][2], h).mean()


# Steps that cannot be run


def in_and_out(params, batch):
    value, _ = ff.value_and_grad(chain)(params, batch)
    return value + chain(params, batch)


def more_rows():
    call = lambda p, b, more: chain(p, b) + more.mean()  # noqa: E731
    call = ff.value_and_grad(call, batch_argnums=(1, 2))
    on(call)(parameters(), batch(), torch.ones(3))


def unnamed_batches():
    call = ff.value_and_grad(lambda p, x, y: chain(p, {"x": x, "y": y}))
    on(call)(parameters(), *batch().values())


def requiring_grad():
    layers = [
        {k: torch.nn.Parameter(p[k]) for k in "wb"} for p in parameters()["layers"]
    ]
    on(GRADIENT)({"layers": layers}, batch())


def stock_around():
    step = on(ff.value_and_grad(squares))
    torch.func.grad(lambda w: step(w, ONES)[0])(EYE)


LINE = r"test_pipeline_bad_input.py:\d+ "
STOCK = "use ff.value_and_grad inside"
CALLS = [  # what is called, and what it says
    (more_rows, r"differ in dim 0, .*\{'1/x': 4, '1/y': 4, '2': 3\}"),
    (unnamed_batches, "arguments 1, 2 hold tensors: say which .*batch_argnums=, of ff"),
    (requiring_grad, r"nn.Parameter.*\.detach\(\)ed"),
    (lambda: on(torch.func.grad(squares))(EYE, ONES), STOCK),
    (stock_around, STOCK),
    (
        lambda: on(squares)(torch.eye(4, requires_grad=True), ONES),
        r"pipeline\(ff.value_and_grad\(loss\)\)",
    ),
    (
        lambda: on(in_and_out)(parameters(), batch()),
        "both inside and outside a gradient call",
    ),
    (lambda: on(on(GRADIENT))(parameters(), batch()), "there is one pipeline"),
    (
        lambda: ff.shard(on(GRADIENT), MESH, "pipe")({}, batch()),
        "pipeline over 'pipe' inside Sharding",
    ),
    (lambda: on(ff.shard(GRADIENT, MESH, "pipe"))(parameters(), batch()), "'pipe'"),
    (lambda: ff.pipeline(chain, MESH, ("pipe",) * 2, n_microbatches=2), ""),
    (lambda: ff.pipeline(chain, MESH, "pope", n_microbatches=2), "pope"),
    (lambda: on(chain, m=5)(parameters(), batch()), "cannot cut 4 rows .* into 5 micr"),
]
LOSSES = [  # a loss, options, and what its gradient call says
    (by_a_value, {}, LINE + ".*into a unit"),
    (of_an_item, {}, LINE + ".*into a unit"),
    (
        with_noise_for_two_stages, {"stages": [2, 1]},
        "random numbers outside every unit, by rand at .*" + LINE[:-5]
        + r".* stages \[0, 1\] use",
    ),
    (writing, {}, "writes in place into 'params/tied'"),
    (mapping, {}, "maps unit 'layer'"),
    (by_shape, {"m": 3, "rows": 5}, "makes other unit calls"),
    (lambda p, b: through(p, b["x"]), {}, "must be a floating scalar, got shape"),
    (
        lambda p, b: layer(p["layers"][0], b["x"]).mean(), {},
        "2 stages, but .* has 1 unit call",
    ),
    (
        of_the_batch_twice,
        {"m": 1, "schedule": ["F0 SF0>1 RB0<1 B0", "RF0<0 F0 B0 SB0>0"]},
        "RB0@0<1 has no place: no edge",
    ),
    (
        skipping, {"m": 1, "schedule": SKIPS, "mesh": simulated(pipe=3)},
        "rank 0 has no RB0@0<2; the stages 0 and 2 are joined",
    ),
]  # fmt: skip
OPTIONS = [
    ({"stages": ["layer", "head"]}, "'head'.* but chain has 4 unit calls"),
    ({"stages": [1, 2]}, r"\[1, 2\], but chain has 4 unit calls"),
    ({"stages": [2, 1, 1]}, "for 3 ranks, but axis 'pipe' has 2"),
    ({"m": 0}, "n_microbatches=0: there is at least one"),
    ({"m": 2.0}, "n_microbatches=2.0"),
    ({"m": 5}, "cannot cut 4 rows .*1/x.* into 5 microbatches"),
    *(({"stages": bad}, f"^stages={bad!r}: give a list") for bad in (2, "layer", 2.0)),
    *(
        ({"schedule": bad}, f"^{bad!r} is no schedule.*ff.schedules")
        for bad in ("F0 B0 F1 B1", "one_f_one_b", None, 2)
    ),
    ({"schedule": ["F0 F1 B0 B1", "F0 B0 F1"]}, "1: microbatch 1 of stage 1 needs F"),
    ({"schedule": ["F0 F1", "F0 F1"]}, r"forward actions alone.*ff\.value\(loss\)"),
    ({"schedule": ["F0 F1 B0 B1"] * 3}, "for 3 ranks, but axis 'pipe' has 2"),
    (
        {"schedule": functools.partial(S.interleaved_1f1b, chunks=4)},
        "8 stages, but chain has 4 unit calls",
    ),
    (
        {"stages": [2, 1, 1], "schedule": S.interleaved_1f1b},
        "3 stages do not part evenly over 2 ranks",
    ),
]
BEFORE = [
    *((call, words, MESH) for call, words in CALLS),
    *(
        (functools.partial(grad, loss, **how), words, how.get("mesh", MESH))
        for loss, how, words in LOSSES
    ),
    *((functools.partial(grad, **how), words, MESH) for how, words in OPTIONS),
]


@pytest.mark.parametrize(("call", "words", "mesh"), BEFORE)
def test_every_rank_says_what_is_wrong_and_sends_nothing(call, words, mesh):
    def main():
        with pytest.raises((ValueError, RuntimeError, TypeError)) as caught:
            call()
        return str(caught.value)

    with ff.ledger() as log:
        messages = ff.spmd(main, mesh)()
    assert len(set(messages)) == 1
    assert re.search("(?s)" + words, messages[0]), messages[0]
    # Of units in and out of a gradient call the first half runs.
    assert "both inside" in words or log.records == []


# In the middle


class Broken(Exception):
    pass


def breaking(where, rank, when):
    """A unit that fails on a rank, at its ``when``-th forward, or in its backward."""
    calls = [0]

    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, g):
            if ff.axis_index("pipe") == rank:
                raise Broken("in the backward")
            return g

    @ff.unit
    def broken(p, x):
        if type(x) is torch.Tensor and ff.axis_index("pipe") == rank:
            calls[0] += 1
            if where == "forward" and calls[0] == when:
                raise Broken("in the forward")
        return layer.fn(p, Fail.apply(x) if where == "backward" else x)

    return broken


@pytest.mark.parametrize(
    ("schedule", "where", "rank"),
    [
        (S.one_f_one_b, "forward", 0),
        (S.zb_v, "forward", 1),
        (S.gpipe, "backward", 0),
        (S.zb_h1, "backward", 1),
    ],
)
def test_a_stage_that_raises_raises_everywhere_and_leaves_the_state(
    rank, where, schedule
):
    broken = breaking(where, rank, 2)
    optimizer = ff.sharded_adam(0.1)
    given, failed = {}, {}

    def loss(unit):
        return functools.partial(chain, unit=unit)

    def step(unit):
        return on(optimizer(ff.value_and_grad(loss(unit))), m=4, schedule=schedule)

    def bad():
        mine = ff.axis_index("pipe")
        state = ff.init_state(step(layer), parameters(), optimizer, batch(8))
        given[mine] = state, held(state)
        ff.psum(torch.zeros(()), "pipe")  # all ranks are there
        try:
            step(broken)(state, batch(8))
        except BaseException as error:
            failed[mine] = error
            raise

    with pytest.raises(Broken, match=where):
        ff.spmd(bad, MESH)()
    assert sorted(failed) == [0, 1]

    def good():
        state, before = given[ff.axis_index("pipe")]
        same(held(state), before)
        return ff.unshard(step(layer)(state, batch(8))[0].params)

    one = ff.accumulate(optimizer(ff.value_and_grad(loss(layer))), 4)
    first = ff.TrainState(parameters(), optimizer.init(parameters()))
    expected = one(first, batch(8))[0].params
    for found in ff.spmd(good, MESH)():
        close(found, expected, 1e-12)


@pytest.mark.parametrize("rank", [0, 1])
def test_after_a_step_that_raised_and_was_caught_nobody_has_numbers(rank):
    """One rank is in that step still, and would take the next one's data for its."""
    optimizer, found = ff.sgd(0.1), []

    def main():
        def step(unit):
            loss = functools.partial(chain, unit=unit)
            return on(optimizer(ff.value_and_grad(loss)))

        state = ff.init_state(step(layer), parameters(), optimizer, batch())
        try:
            step(breaking("forward", rank, 1))(state, batch())
            found.append("that step")
        except Broken:
            pass
        step(layer)(state, batch())
        found.append("the next one")

    with pytest.raises(Broken) as caught:
        ff.spmd(main, MESH)()
    said = f"on simulated rank {rank}, in a pipelined step"
    assert caught.value.__notes__ == ["in unit 'broken'", said]
    assert found == []


@pytest.mark.parametrize(
    "other", [{"stages": [3, 1]}, {"schedule": S.zb_v}], ids=lambda o: next(iter(o))
)
def test_a_state_placed_for_other_stages_is_refused(other):
    """On every rank, before anything is sent: one that goes on would wait."""

    def main():
        first = on(GRADIENT, stages=[1, 3])
        placed = ff.place(first, parameters(), batch())
        with (
            nothing_sent(),
            pytest.raises(ValueError, match="laid out for other stages; place it anew"),
        ):
            on(GRADIENT, **other)(placed, batch())
        return first(placed, batch())[0].item()

    assert ff.spmd(main, MESH)() == [chain(parameters(), batch()).item()] * 2


def test_a_rank_with_another_batch_is_seen():
    """One that lies elsewhere on the data axis by mistake, say."""

    def main():
        rows = 4 + 2 * ff.axis_index("pipe")
        on(GRADIENT)(parameters(), batch(rows))

    with pytest.raises(Exception, match="send|receive|shape|collectives"):
        ff.spmd(main, MESH)()


def test_ranks_that_lay_out_with_other_rows_are_refused():
    """Of one shape: the first stage would read some, and the last compare others."""

    def main(other):
        step, rows = on(GRADIENT), batch_of(4, other * int(ff.axis_index("pipe")))
        placed = ff.place(step, parameters(), {key: rows[key] for key in "xy"})
        return step(placed, batch())[0].item()

    with pytest.raises(RanksDiffer, match="along 'pipe' are given unlike batches"):
        ff.spmd(lambda: main(1), MESH)()
    assert ff.spmd(lambda: main(0), MESH)() == [chain(parameters(), batch()).item()] * 2
