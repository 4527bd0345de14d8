"""Experts over a second view of the ranks: a folded mesh.

Attention is split over its own axes (heads over "model", sequences over "context") and
experts over all of these ranks together, or over some of them and of the data's. The
gradient of an expert is the sum over the ranks that hold it, of a mean over the axes of
``shard``: the numbers of one device with the whole batch.
"""

from pathlib import Path

import pytest
import torch

import fsfunc as ff
from fsfunc.comm.typed_maps import LawError
from fsfunc.nn import column_linear, expert_layer, row_linear, top_k_gating
from tests import checks
from tests.checks import close
from tests.models import train_step
from tests.nn.models import wide

DIM, HEAD, EXPERTS, BATCH, LENGTH = 4, 2, 4, 8, 4


def parameters(layers=2):
    of_experts = {"up": (EXPERTS, DIM, 8), "down": (EXPERTS, 8, DIM)}
    shapes = {
        "attend": {n: (DIM, DIM) for n in ("q", "k", "v", "out")},
        "moe": {"gate": (EXPERTS, DIM), **of_experts},
    }
    return [
        {
            part: {n: wide(*s, seed=10 * k + i) for i, (n, s) in enumerate(ss.items())}
            for part, ss in shapes.items()
        }
        for k in range(layers)
    ]


def expert(p, x):
    return torch.tanh(x @ p["up"]) @ p["down"]


def model(mesh=None, capacity=None):
    """``loss(params, x)`` of a stack of blocks, for one device or the ranks of a mesh.

    Args:
        capacity: the factor of the gate's; of all experts, so that none drops a token.
    """
    axes = {*mesh.axes} if mesh else set()

    def attend(p, x):
        q, k, v = column_linear(x, [p["q"], p["k"], p["v"]])
        if "context" in axes:
            k, v = (ff.all_gather(t, "context", dim=1) for t in (k, v))
        q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(1, 2) for t in (q, k, v))
        y = torch.softmax(q @ k.mT, -1) @ v
        return x + row_linear(y.transpose(1, 2).flatten(2), p["out"])

    def moe(p, x):
        gate, tokens = p["gate"], x.flatten(0, 1)
        # What is one value along "model" each rank takes a share of.
        if "model" in axes:
            gate, tokens = ff.pcast((gate, tokens), "model", to="V")
            n, i = ff.axis_size("model"), ff.axis_index("model")
            tokens = tokens.chunk(n)[i]
        routing = top_k_gating(tokens @ gate.T, 2, capacity_factor=capacity)
        y = expert_layer(tokens, routing, expert, {n: p[n] for n in ("up", "down")})
        if "model" in axes:
            y = ff.all_gather(y, "model", to="I")
        return x + y.view_as(x)

    attend, moe = ff.unit(attend), ff.unit(moe)

    def loss(params, x):
        for p in params:
            x = moe(p["moe"], attend(p["attend"], x))
        return x.square().mean()

    return loss


ATTENTION = {f"*/attend/{n}": ff.Split(0, "model") for n in "qkv"}
ATTENTION["*/attend/out"] = ff.Split(1, "model")
SPREAD = {f"*/moe/{n}": ff.Split(0, "expert") for n in ("up", "down")}
OPTIMIZER = ff.chain(ff.clip_by_global_norm(0.1), ff.sharded_adam(0.01))
WORK = {"data": 2, "context": 2, "model": 2}
FOLDED = {"expert_data": 2, "expert": 4}
CONTEXT, TWO = ("data", "context"), {"expert_data": 2, "expert": 2}
HALF = {"data": 4, "model": 2}, FOLDED
CASES = {  # by what experts are spread over: both views, and the axes of shard
    "model and context": (WORK, FOLDED, CONTEXT),
    "half of the data, and model": (*HALF, "data"),
    "half of the data": ({"data": 8}, FOLDED, "data"),
    "by the other names": ({"data": 8}, FOLDED, ("expert_data", "expert")),
    "all ranks": ({"data": 2, "context": 2}, {"expert": 4}, CONTEXT),
    "one name or another": ({"data": 2, "context": 2}, TWO, CONTEXT),
    "within a pipeline": (
        {"pipe": 2, "data": 2, "model": 2}, {"pipe": 2, "expert": 4}, "data"
    ),
}  # fmt: skip
X = wide(BATCH, LENGTH, DIM, seed=5)


def rows(mesh, over="data"):
    """This rank's samples, and its part of each sequence."""
    x = ff.local_batch(X, mesh, over)
    if "context" in mesh.axes:
        x = x.chunk(mesh.axis_size("context"), 1)[ff.axis_index("context")]
    return x


def layouts_of(mesh):
    return SPREAD | (ATTENTION if "model" in mesh.axes else {})


def folded_mesh(name):
    view, folded, over = CASES[name]
    return ff.make_mesh(view, "simulated", folded=folded), over


def trained(step, mesh, **how):
    look = lambda state: ff.unshard(state.opt_state)  # noqa: E731
    runs = checks.trained(step, parameters(), OPTIMIZER, X, mesh=mesh, look=look, **how)
    return [(r.params, r.seen[-1], r.outs) for r in runs], runs[0].logs[-1]


ONE = trained(train_step(model(), OPTIMIZER), checks.simulated(1))[0][0]


def by_ranks(mesh, step):
    return trained(step, mesh, over=lambda _: rows(mesh), layouts=layouts_of(mesh))


TRAININGS = [
    ("model and context", 3, None),
    ("model and context", 0, EXPERTS),
    ("half of the data, and model", 3, EXPERTS),
    ("half of the data, and model", 1, None),
    ("half of the data", 2, None),
    ("by the other names", 3, None),
    ("all ranks", 3, EXPERTS),
    ("one name or another", 2, None),
    ("within a pipeline", 2, None),
]


@pytest.mark.parametrize(("name", "zero", "capacity"), TRAININGS)
def test_a_block_trains_as_on_one_device(name, zero, capacity):
    mesh, over = folded_mesh(name)
    step = ff.remat(train_step(model(mesh, capacity), OPTIMIZER))
    if "pipe" in mesh.axes:
        step = ff.pipeline(step, mesh, "pipe", n_microbatches=2)
    ranks, _ = by_ranks(mesh, ff.shard(ff.donate(step), mesh, over, zero=zero))
    for found in ranks:
        close(found, ONE, 1e-12)


@pytest.mark.parametrize("name", list(CASES)[:3])
def test_it_sends_what_it_promised(name):
    """Experts are gathered and reduced over the ranks that hold them alone."""
    mesh, over = folded_mesh(name)
    step = ff.shard(train_step(model(mesh, EXPERTS), OPTIMIZER), mesh, over)
    _, log = by_ranks(mesh, step)
    layers, experts_here, itemsize = 2, EXPERTS // 4, 8
    # Twice forward and twice backward; every expert has room for all choices.
    tokens, choices = BATCH * LENGTH // mesh.size, 2
    moved = EXPERTS * tokens * choices * DIM * itemsize * 3 / 4
    assert log.count("all_to_all", "expert") == 4 * layers
    assert log.bytes("expert", "all_to_all") == 4 * layers * moved
    # A rank has one expert, and shares it with one other rank. The last unit, which is
    # one of experts, is gathered once.
    half = experts_here * 2 * DIM * 8 * itemsize / 2
    assert log.count("all_gather", "expert_data") == 2 * layers - 1
    assert log.bytes("expert_data", "all_gather") == (2 * layers - 1) * half
    assert log.count("psum_scatter", "expert_data") == layers
    assert log.bytes("expert_data", "psum_scatter") == layers * half

    plan_mesh = mesh.on("abstract")
    planned_step = ff.shard(
        train_step(model(plan_mesh, EXPERTS), OPTIMIZER), plan_mesh, over
    )
    x = ff.spmd(lambda: rows(mesh), mesh)()[0]
    how = {"mesh": plan_mesh, "layouts": layouts_of(mesh)}
    planned = ff.plan(planned_step, parameters, OPTIMIZER, x, **how)
    assert planned.table() == log.table()
    for axis in ("expert", "expert_data"):
        assert planned.bytes(axis) == log.bytes(axis) > 0
    assert ff.estimate(planned, ff.hardware.H100).seconds > 0


SPLIT = ({"data": 2, "expert": 2}, None), ("data", "expert")  # no folded mesh


def test_a_state_goes_on_on_other_meshes(tmp_path):
    """Of an update on one mesh and one on another; as after two on one device."""

    def run(views, over, path, saves):
        cut = over if over == SPLIT[1] else "data"
        mesh = ff.make_mesh(views[0], "simulated", folded=views[1])

        def main():
            step = ff.shard(train_step(model(mesh), OPTIMIZER), mesh, over)
            x, layouts = rows(mesh, cut), layouts_of(mesh)
            state = ff.init_state(step, parameters(), OPTIMIZER, x, layouts=layouts)
            state = state if saves else ff.load(path, state)
            state, loss = step(state, x)
            if saves:
                ff.save(path, state)
            return ff.unshard((state.params, state.opt_state)), loss

        return ff.spmd(main, mesh)()

    params, opt_state, outs = ONE
    for saved, loaded in [(((WORK, FOLDED), CONTEXT), SPLIT), (SPLIT, (HALF, "data"))]:
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        run(saved[0], saved[1], path, True)
        for found in run(loaded[0], loaded[1], path, False):
            close(found, ((params, opt_state), outs[-1]), 1e-12)


# What is refused


def placing(layouts, views=(WORK, FOLDED), over=CONTEXT, loss=None, params=None):
    mesh = ff.make_mesh(views[0], "simulated", folded=views[1])

    def main():
        grad = ff.value_and_grad(loss or model(mesh))
        step = ff.shard(grad, mesh, over)
        given = parameters() if params is None else params
        placed = ff.place(step, given, rows(mesh), layouts=layouts)
        return step(placed, rows(mesh))

    return lambda: ff.spmd(main, mesh)()


def of_features():
    """A layer of features, split over ranks of which some have other tokens."""
    features = ff.unit(lambda w, x: column_linear(x, w).sum())
    w = wide(4, DIM)
    return placing({"": ff.Split(0, "expert")}, loss=features, params=w)


def of_shared_tokens():
    """Along "other" the ranks have one batch, of which none takes a share."""
    views = {"data": 4, "other": 2}, FOLDED
    return placing(SPREAD, views, "data")


TWICE = {"*/moe/up": (ff.Split(0, "expert"), ff.Split(1, "model"))}
test_bad_input_is_refused = checks.all_refused({
    "a leaf over ranks of both views": (placing(TWICE), ValueError,
        'axis "model" is already used by another part'),
    "experts that it does not divide": (placing(
        {"*/attend/q": ff.Split(0, "expert")}, ({"data": 8}, {"expert": 8}), "data"),
        ValueError, r'along dim 0 over axis "data" of size 8: 4 is not .* make it 8'),
    "experts of fewer than all": (placing(
        {"*/moe/*": ff.Split(0, "expert")}, ({"data": 4, "model": 2}, {"expert": 8}),
        "data"), ValueError, r'over axis "data", "model" of size 8: 4 .* make it 8'),
    "features over ranks of other tokens": (of_features(), ValueError,
        r'column_linear: over axis "context", "model" shard averages'),
    "tokens that are counted twice": (of_shared_tokens(), LawError, "other"),
}, sent=True)  # fmt: skip


# Over processes

FOUR = ({"data": 2, "model": 2}, {"expert": 4}, "data")


@pytest.mark.processes
def test_over_processes_it_is_the_same(processes):
    assert processes(Path(__file__), 4).split() == ["equal"] * 4


def run_process() -> None:
    view, folded, over = FOUR
    mesh = ff.make_mesh(view, folded=folded)
    step = ff.shard(ff.remat(train_step(model(mesh), OPTIMIZER)), mesh, over)
    close(by_ranks(mesh, step)[0], [ONE], 1e-12)
    print("equal")


@pytest.mark.processes
def test_processes_that_fold_otherwise_are_refused(processes):
    program = """
        import os, fsfunc as ff
        name = "expert" if os.environ["RANK"] == "0" else "experts"
        try:
            ff.make_mesh({"data": 2}, folded={name: 2}, timeout=30)
        except RuntimeError as error:
            print("unlike" in str(error) and "experts" in str(error))
    """
    assert processes(program, 2).split() == ["True"] * 2


if __name__ == "__main__":
    run_process()
