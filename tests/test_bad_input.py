"""Each bad input gets a clear error: the path, the sizes and the way out.

Nothing is sent before what can be known, and the state stays as it was.
"""

from functools import partial

import numpy as np
import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from tests.checks import refusals, same, simulated, unchanged
from tests.models import WIDTH, chain, layer, train_step

MESH = simulated(2)
LOSS = chain(layer)
OPTIMIZER = ff.sgd(0.5)
GRADIENT = ff.value_and_grad(LOSS)
STEP = train_step(LOSS, OPTIMIZER)
BATCH = torch.ones(2, WIDTH)


def parameters():
    return [{"w": torch.eye(WIDTH), "b": torch.ones(WIDTH)} for _ in range(2)]


def placed(mesh, step=STEP):
    sharded = ff.shard(step, mesh, "data")
    return sharded, ff.init_state(sharded, parameters(), OPTIMIZER, BATCH)


def steps_with(loss):
    """A sharded step with this loss, run once."""
    return calls(train_step(loss, OPTIMIZER))


def laid(transformed, **how):
    """Lays a state out for a transformed step."""
    return ff.init_state(transformed, parameters(), OPTIMIZER, BATCH, **how)


def calls(step, times=1, wrap=lambda step: step):
    """Of a step under ``wrap(shard)``, called so often with one state."""

    def main(mesh):
        sharded, state = placed(mesh, step)
        for run in times * [wrap(sharded)]:
            run(state, BATCH)

    return main


def other_tree(mesh):
    state = placed(mesh)[1]
    state.apply_gradients(state.params[:1], OPTIMIZER)


@ff.unit
def writes_input(params, x):
    x.mul_(2)
    return x @ params["w"] + params["b"]


def captured(params, x):
    h = layer(params[0], x)
    bad = ff.unit(lambda p, y: (y @ p["w"] + p["b"]) * h)
    return bad(params[1], x).sum()


def with_param(w):
    """`parameters`, with another leaf at '1/w'."""
    first, second = parameters()
    return [first, second | {"w": w}]


def made_in_inference_mode(*shape):
    with torch.inference_mode():
        return torch.ones(*shape)


class DTensor(torch.Tensor):
    """In the place of torch's own, which needs a process group."""


ODD = {
    "dtensor": (lambda *s: torch.ones(*s).as_subclass(DTensor), r"DTensor.*full_tens"),
    "array": (lambda *s: np.ones(s, np.float32), r"numpy array float32\[.*from_numpy"),
    "sparse": (lambda *s: torch.ones(*s).to_sparse(), r"sparse_coo.*x.to_dense\(\)"),
    "meta": (lambda *s: torch.ones(*s, device="meta"), "meta tensor, which has no val"),
    "inference": (made_in_inference_mode, r"inference_mode\(\).*x.clone\(\)"),
    "float8": (lambda *s: torch.ones(*s).to(torch.float8_e4m3fn), "float8.*bfloat16"),
}


def stepped(f, x):
    return f(ff.place(f, parameters(), BATCH), x)


LAID_OUT = {
    "place": lambda mesh, p: ff.place(ff.shard(GRADIENT, mesh, "data"), p, BATCH),
    "init_state": lambda mesh, p: ff.init_state(
        ff.shard(STEP, mesh, "data"), p, OPTIMIZER, BATCH
    ),
}
GIVEN = {
    "local_batch": lambda mesh, x: ff.local_batch({"x": [x]}, mesh, "data"),
    "accumulate": lambda mesh, x: ff.accumulate(GRADIENT, 2)(parameters(), x),
    "pipeline": lambda mesh, x: ff.pipeline(GRADIENT, mesh, "data", n_microbatches=2)(
        parameters(), x
    ),
    "init_state": lambda mesh, x: ff.init_state(
        ff.shard(STEP, mesh, "data"), parameters(), OPTIMIZER, x
    ),
    "step": lambda mesh, x: stepped(ff.shard(GRADIENT, mesh, "data"), x),
}


ODD_LEAVES = {
    f"{kind} in {how}": (
        lambda mesh, how=how, kind=kind: LAID_OUT[how](
            mesh, with_param(ODD[kind][0](WIDTH, WIDTH))
        ),
        TypeError,
        r"given, .*'1/w', a.*" + ODD[kind][1],
    )
    for how in LAID_OUT
    for kind in ODD
} | {
    f"batch {kind} in {how}": (
        lambda mesh, how=how, kind=kind: GIVEN[how](mesh, ODD[kind][0](2, WIDTH)),
        TypeError,
        r"given, .*(argument 1|'x/0'), a.*" + ODD[kind][1],
    )
    for how, kinds in {
        "local_batch": ["array", "sparse", "dtensor"],
        "accumulate": ["array", "sparse", "inference"],
        "pipeline": ["array", "sparse", "inference"],
        "init_state": ["array", "meta", "inference"],
        "step": ["array", "meta", "inference"],
    }.items()
    for kind in kinds
}
ASKS = r'value at .*test_bad_input.py:\d+.*record="real"'

CASES = ODD_LEAVES | {
    "unknown axis": (
        lambda mesh: ff.shard(STEP, mesh, "dota"),
        ValueError, 'unknown axis "dota" .did you mean "data"..*data',
    ),
    "an own value over an unknown axis": (
        lambda mesh: laid(
            ff.shard(STEP, mesh, "data"), layouts={"**": ff.Own("dota")}
        ),
        ValueError, r'did you mean "data".*averages over',
    ),
    "zero=4": (
        lambda mesh: ff.shard(STEP, mesh, "data", zero=4),
        ValueError, "zero=4: it is 0, 1, 2 or 3",
    ),
    "an axis both cut and repeated": (
        lambda mesh: ff.shard(STEP, mesh, "data", replicate="data"),
        ValueError, "repeats an axis",
    ),
    "one axis twice": (
        lambda mesh: laid(ff.shard(ff.shard(STEP, mesh, "data"), mesh, "data")),
        ValueError, r"two transforms over one axis: \['data'\]",
    ),
    "a mesh of another size": (
        lambda mesh: stepped(ff.shard(GRADIENT, simulated(4), "data"), BATCH),
        ValueError, "has 4 ranks, but 2 are running",
    ),
    "other tree": (other_tree, ValueError, "do not match the parameters at the root"),
    "penalty over leaves": (
        steps_with(
            lambda p, x: LOSS(p, x) + sum(w.square().sum() for w in tree.leaves(p))
        ),
        ValueError, r"sum at .*py:\d+ .*part of 'params/0/b'.*: use ff.tree_sum",
    ),
    "read outside": (
        steps_with(lambda p, x: LOSS(p, x) + p[0]["w"].sum()),
        TypeError, "cannot read .sum: '0/w' .*is sharded",
    ),
    ".item()": (
        steps_with(lambda p, x: LOSS(p, x) * (1 if LOSS(p, x).item() > 0 else 2)),
        RuntimeError, ASKS,
    ),
    "input in place": (
        steps_with(lambda p, x: writes_input(p[0], x * 1).sum()),
        RuntimeError, r"'writes_input' changed its input 0 of shape \(2, 4\) in place",
    ),
    "captured": (steps_with(captured), RuntimeError, "captured by closure"),
    "no shard": (
        lambda mesh: LOSS(placed(mesh)[1].params, BATCH), TypeError,
        "'0/.'.*under ff.shard",
    ),
}  # fmt: skip
LATER = {  # some of it was sent before
    "donated twice": (calls(STEP, 2, ff.donate), RuntimeError, "donated to a step"),
}  # fmt: skip


@refusals(CASES | LATER)
def test_a_clear_error_on_every_rank(call, error, way_out):
    with ff.ledger() as log, pytest.raises(error, match=way_out) as caught:
        ff.spmd(lambda: call(MESH), MESH)()
    notes = [str(caught.value), *getattr(caught.value, "__notes__", ())]
    # Whichever came to it first.
    said = any(f"rank {r}" in note for note in notes for r in (0, 1))
    assert said, "it says which rank it comes from"
    if (call, error, way_out) not in [*LATER.values(), CASES["other tree"]]:
        assert log.records == []


@pytest.mark.parametrize("zero", (1, 3))
def test_another_ranks_state_is_refused(zero):
    def main(mesh):
        return ff.place(ff.shard(LOSS, mesh, "data", zero=zero), parameters(), BATCH)

    mesh, wider = (ff.make_mesh({"data": n}, "simulated") for n in (2, 4))
    first, fourth = (ff.spmd(partial(main, m), m)()[0] for m in (mesh, wider))
    for given, there, said in (
        (first, mesh, "0/. f32.*is the part of {'data': 0} of 2 ranks"),
        (first, wider, "of 2 ranks, but this is .*4"),
        (fourth, mesh, "of 4 ranks, but this is .*2"),
    ):
        call = ff.shard(ff.value_and_grad(LOSS), there, "data", zero=zero)
        with pytest.raises(ValueError, match=said):
            ff.spmd(partial(call, given, BATCH), there)()


def test_the_state_is_as_it_was_after_an_error():
    @ff.unit
    def fails(params, x):
        raise ArithmeticError("on purpose")

    broken = train_step(lambda p, x: fails(p[0], layer(p[1], x)).sum(), OPTIMIZER)

    def main():
        step, state = placed(MESH)
        good, _ = step(state, BATCH)
        with unchanged(state), pytest.raises(ArithmeticError):
            ff.shard(broken, MESH, "data")(state, BATCH)
        same(ff.unshard(step(state, BATCH)[0]), ff.unshard(good))

    ff.spmd(main, MESH)()


def test_a_sharded_leaf_that_lies_over_another_axis():
    grid = simulated(node=2, data=2)

    def main():
        of = lambda axis: ff.shard(GRADIENT, grid, axis)  # noqa: E731
        return of("node")(ff.place(of("data"), parameters(), BATCH), BATCH)

    with pytest.raises(TypeError, match="'0/.'.* is sharded"):
        ff.spmd(main, grid)()
