"""Bad input of ``pipeline``: a clear error on every rank, before anything is sent."""

import functools
import re

import pytest
import torch

import fsfunc as ff
from tests.checks import close, held, nothing_sent, same, simulated
from tests.pipelining.models import batch_of, chain, join, layer, parameters, through

MESH = ff.make_mesh({"pipe": 2}, "simulated")
S = ff.schedules


GRADIENT = ff.value_and_grad(chain)


def batch(rows=4):
    return {key: batch_of(rows, 0)[key] for key in "xy"}


def on(f, mesh=MESH, m=2, **options):
    return ff.pipeline(f, mesh, "pipe", n_microbatches=m, **options)


def grad(loss=chain, **options):
    """A gradient call in a pipeline, on data."""
    return on(ff.value_and_grad(loss), **options)(parameters(), batch())


def evaluated(loss=chain, **options):
    return on(loss, **options)(parameters(), batch())


# Before anything is sent


def leaves_of_other_rows():
    def loss(params, batch, more):
        return chain(params, batch) + more.mean()

    grad = ff.value_and_grad(loss, batch_argnums=(1, 2))
    on(grad)(parameters(), batch(), torch.ones(3))


def batches_that_nobody_named():
    loss = lambda params, x, y: chain(params, {"x": x, "y": y})  # noqa: E731
    on(ff.value_and_grad(loss))(parameters(), *batch().values())


def parameters_that_require_grad():
    given = {"layers": [{k: torch.nn.Parameter(p[k]) for k in "wb"}
                        for p in parameters()["layers"]]}  # fmt: skip
    on(GRADIENT)(given, batch())


def sends_on_an_edge_that_is_not_there():
    """Transfers for a chain, in a loss whose last stage reads the batch alone."""

    def loss(params, batch):
        for p in params["layers"]:
            h = layer(p, batch["x"])
        return (h * batch["y"]).mean()

    grad(loss, m=1, schedule=["F0 SF0>1 RB0<1 B0", "RF0<0 F0 B0 SB0>0"])


def a_transfer_that_is_missing():
    """A skip from the first stage to the last needs a message of its own."""

    def loss(params, batch):
        first = layer(params["layers"][0], batch["x"])
        h = layer(params["layers"][1], first)
        return (join(params["layers"][2], h, first) * batch["y"]).mean()

    rows = [
        "F0@0 SF0@0>1 RB0@0<1 B0@0",
        "RF0@1<0 F0@1 SF0@1>2 RB0@1<2 B0@1 SB0@1>0",
        "RF0@2<1 F0@2 B0@2 SB0@2>1",
    ]
    mesh = ff.make_mesh({"pipe": 3}, "simulated")
    on(ff.value_and_grad(loss), mesh, 1, schedule=rows)(parameters(), batch())


def stock_gradients():
    def loss(w, x):
        for _ in range(2):
            x = square(w, x)
        return x.mean()

    on(torch.func.grad(loss))(torch.eye(4), torch.ones(4, 4))


@ff.unit
def square(w, x):
    return x @ w


def stock_gradients_around():
    step = on(ff.value_and_grad(lambda w, x: square(w, square(w, x)).mean()))
    torch.func.grad(lambda w: step(w, torch.ones(4, 4))[0])(torch.eye(4))


def autograd_around():
    w = torch.eye(4, requires_grad=True)
    on(lambda w, x: square(w, square(w, x)).mean())(w, torch.ones(4, 4))


def a_course_that_depends_on_a_value():
    def loss(params, batch):
        h = layer(params["layers"][0], batch["x"])
        if h.sum() > 0:  # this line
            h = h * 2
        return layer(params["layers"][1], h).mean()

    grad(loss)


def an_item():
    def loss(params, batch):
        h = layer(params["layers"][0], batch["x"])
        return layer(params["layers"][1], h * h.max().item()).mean()

    grad(loss)


def random_numbers_for_two_stages():
    def loss(params, batch):
        h = layer(params["layers"][0], batch["x"])
        noise = torch.rand(h.shape)
        h = layer(params["layers"][1], h + noise)
        return (layer(params["layers"][2], h) + noise).mean()

    grad(loss, stages=[2, 1])


def units_in_and_out():
    def step(params, batch):
        value, grads = ff.value_and_grad(chain)(params, batch)
        return value + chain(params, batch)

    on(step)(parameters(), batch())


def a_loss_that_writes_into_its_parameters():
    def loss(params, batch):
        params["tied"].data.add_(1)
        return chain(params, batch)

    grad(loss)


def a_unit_that_the_loss_maps():
    def loss(params, batch):
        h = torch.func.vmap(lambda x: layer(params["layers"][0], x))(batch["x"])
        return layer(params["layers"][1], h).mean()

    grad(loss)


def other_calls_for_other_shapes():
    """The last microbatch is smaller, and its loss makes other calls."""

    def loss(params, batch):
        h = layer(params["layers"][0], batch["x"])
        if len(h) == 2:
            h = layer(params["layers"][1], h)
        return layer(params["layers"][2], h).mean()

    on(ff.value_and_grad(loss), m=3)(parameters(), batch(5))


SCHEDULES = {  # rows of two ranks
    "F0 F1 B0 B1, F0 B0 F1": "1: microbatch 1 of stage 1 needs F, and B or I and W",
    "F0 F1 B0 B1 B1, F0 B0 F1 B1": "rank 0: B1@0 comes 2 times",
    "F0 F1 F2 B0 B1 B2, F0 B0 F1 B1 F2 B2": (
        "F2@0 is impossible: there are 2 stages and 2 microb"
    ),
    "F0 F1 X0 B1, F0 B0 F1 B1": "rank 0, entry 2: 'X0' is no action",
    "F0 B0 F1 B1, F0 F1 B1 B0": "deadlock: no rank can go on\n  rank 0: B0@0",
    "B0 F0 F1 B1, F0 B0 F1 B1": "rank 0: B0@0 comes before F0@0",
    "F0@0 B0@0 F0@2 B0@2, F0@1 B0@1 F0@3 B0@3": (
        "deadlock: no rank can go on\n  rank 0: B0@0 .entry 1. waits"
    ),
    "F0 F1, F0 F1": "forward actions alone.*give pipeline the loss",  # no zeros
    "F0 F1 B0 B1, F0 F1 B0 B1, F0 F1 B0 B1": "for 3 ranks, but axis 'pipe' has 2",
    "F0@0 F1@0 B0@0 B1@0, F0@1 B0@1 F1@0 B1@1": "a stage belongs to one rank",
}
OPTIONS = [
    ({"stages": ["layer", "head"]}, "no unit call named 'head'"),
    ({"stages": ["layer", "layer:9"]}, "only 4 calls of 'layer'"),
    ({"stages": [1, 2]}, r"\[1, 2\] sums to 3, but chain has 4 unit calls"),
    ({"stages": [4, 0]}, "a stage has at least one unit call"),
    ({"stages": [2, 1, 1]}, "for 3 ranks, but axis 'pipe' has 2"),
    ({"m": 0}, "n_microbatches=0: there is at least one"),
    ({"m": 2.0}, "n_microbatches=2.0"),
    ({"m": 5}, "cannot cut 4 rows .*1/x.* into 5 microbatches"),
    *(({"stages": bad}, f"^stages={bad!r}: give a list") for bad in (2, "layer", 2.0)),
    *(
        ({"schedule": bad}, f"^{bad!r} is no schedule.*ff.schedules")
        for bad in ("F0 B0 F1 B1", "one_f_one_b", None, 2)
    ),
]
BEFORE = {
    **{
        rows: (
            functools.partial(
                grad, schedule=rows.split(", "), m=1 if "@3" in rows else 2
            ),
            words,
        )
        for rows, words in SCHEDULES.items()
    },
    **{str(how): (functools.partial(grad, **how), words) for how, words in OPTIONS},
    "more stages than units": (
        lambda: grad(lambda p, b: layer(p["layers"][0], b["x"]).mean()),
        "2 stages, but .* has only 1 unit call",
    ),
    "many chunks": (
        lambda: grad(schedule=functools.partial(S.interleaved_1f1b, chunks=4)),
        "8 stages, but chain has only 4 unit calls",
    ),
    "stages that chunks do not divide": (
        lambda: grad(stages=[2, 1, 1], schedule=S.interleaved_1f1b),
        "3 stages do not part evenly over 2 ranks",
    ),
    "fewer rows in a forward pass": (
        lambda: evaluated(m=5),
        "cannot cut 4 rows .* into 5 microbatches",
    ),
    "leaves of other rows": (
        leaves_of_other_rows,
        r"differ in dim 0, .*\{'1/x': 4, '1/y': 4, '2': 3\}",
    ),
    "several batches": (
        batches_that_nobody_named,
        "arguments 1, 2 hold tensors: say which .*batch_argnums=, of ff.value_and_grad",
    ),
    "parameters that require grad": (
        parameters_that_require_grad,
        r"nn.Parameter.*\.detach\(\)ed",
    ),
    "sends on an edge that is not there": (
        sends_on_an_edge_that_is_not_there,
        "RB0@0<1 has no place: no edge",
    ),
    "a transfer that is missing": (
        a_transfer_that_is_missing,
        "rank 0 has no RB0@0<2; the stages 0 and 2 are joined",
    ),
    "stock gradients": (stock_gradients, "use ff.value_and_grad inside"),
    "stock gradients around": (stock_gradients_around, "use ff.value_and_grad inside"),
    "autograd around": (autograd_around, r"pipeline\(ff.value_and_grad\(loss\)\)"),
    "a course that depends on a value": (
        a_course_that_depends_on_a_value,
        r"test_pipeline_bad_input.py:\d+ .*into a unit",
    ),
    "an item": (an_item, r"test_pipeline_bad_input.py:\d+ .*into a unit"),
    "random numbers for two stages": (
        random_numbers_for_two_stages,
        "random numbers outside every unit, by rand at .*"
        "test_pipeline_bad_input.py.* stages 0 and 1 use",
    ),
    "units in and out": (units_in_and_out, "both inside and outside a gradient call"),
    "a pipeline in a pipeline": (
        lambda: on(on(GRADIENT))(parameters(), batch()),
        "there is one pipeline",
    ),
    "an axis of shard around": (
        lambda: ff.shard(on(GRADIENT), MESH, "pipe")(parameters(), batch()),
        "pipeline over 'pipe' inside Sharding",
    ),
    "an axis of shard inside": (
        lambda: on(ff.shard(GRADIENT, MESH, "pipe"))(parameters(), batch()),
        "'pipe'",
    ),
    "two axes": (lambda: ff.pipeline(chain, MESH, ("pipe",) * 2, n_microbatches=2), ""),
    "an unknown axis": (
        lambda: ff.pipeline(chain, MESH, "pope", n_microbatches=2),
        "pope",
    ),
    "a loss that writes into its parameters": (
        a_loss_that_writes_into_its_parameters,
        "writes in place into 'params/tied'",
    ),
    "a unit that the loss maps": (a_unit_that_the_loss_maps, "maps unit 'layer'"),
    "no scalar": (
        lambda: grad(lambda p, b: through(p, b["x"])),
        "the loss must be a floating scalar, got shape",
    ),
    "other calls for other shapes": (
        other_calls_for_other_shapes,
        "makes other unit calls",
    ),
}


@pytest.mark.parametrize("bad", BEFORE)
def test_every_rank_says_what_is_wrong_and_sends_nothing(bad):
    call, words = BEFORE[bad]

    def main():
        with pytest.raises((ValueError, RuntimeError, TypeError)) as caught:
            call()
        return str(caught.value)

    mesh = simulated(pipe=3) if call is a_transfer_that_is_missing else MESH
    with ff.ledger() as log:
        messages = ff.spmd(main, mesh)()
    assert len(set(messages)) == 1
    assert re.search("(?s)" + words, messages[0]), messages[0]
    # Of units in and out of a gradient call the first half runs.
    assert call is units_in_and_out or log.records == []


def test_the_line_that_asked_for_a_value_is_named():
    line = a_course_that_depends_on_a_value.__code__.co_consts
    first = next(c for c in line if hasattr(c, "co_firstlineno")).co_firstlineno
    with pytest.raises(RuntimeError, match=rf"test_pipeline_bad_input.py:{first + 2}"):
        ff.spmd(a_course_that_depends_on_a_value, MESH)()


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


@pytest.mark.parametrize("schedule", [S.one_f_one_b, S.gpipe, S.zb_h1, S.zb_v])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("rank", [0, 1])
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
    assert caught.value.__notes__ == [f"on simulated rank {rank}, in a pipelined step"]
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


def test_outside_spmd_it_says_so():
    with pytest.raises(RuntimeError, match="spmd"):
        grad()
