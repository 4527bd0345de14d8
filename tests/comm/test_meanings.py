"""Each collective between each two types: what has a meaning, what it costs backwards.

On plain axes, and on axes of ``shard``, whose loss is a mean.
"""

import pytest
import torch

import fsfunc as ff
from fsfunc.testing import assert_equal
from tests.checks import on_ranks

N = 2
mesh = ff.make_mesh({"data": N}, "simulated")


def whole():
    return torch.arange(1.0, 6.0, dtype=torch.float64)


reads = ff.unit(lambda params: params["w"].sum())


def in_parts(step):
    """What a step over one leaf in parts gives, whole, on each rank."""
    laid, run = (ff.shard(f, mesh, "data") for f in (reads, step))
    return list(on_ranks(run, {"w": whole()}, mesh=mesh, laid=laid))


def through(params, fn):
    """``fn`` of each rank's part alone."""

    def alone(x):
        own = ff.pcast(x.local, "data", of="S", to="V")
        return x.with_local(ff.pcast(fn(own), "data", of="V", to="S"))

    return ff.tree.map(alone, params, is_leaf=ff.is_sharded)


GRID = ff.make_mesh({"data": 2, "model": 2}, "simulated")


@pytest.mark.parametrize("axis", [("data", "model"), ("model", "data")])
@pytest.mark.parametrize("call", [ff.psum, ff.pmean])
def test_a_sum_over_an_axis_of_the_mean_and_another(call, axis):
    """Under shard over "data" it is own there, and one value over "model"."""
    mine = torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=torch.float64)

    def loss(w):
        i, k = ff.axis_index("data"), ff.axis_index("model")
        own = ff.pcast(ff.pcast(w, "data", to="V"), "model", to="V") * mine[i, k]
        return call(own, axis) * (1 + i)

    step = ff.shard(ff.value_and_grad(loss), GRID, "data", zero=0)
    w = torch.tensor(2.0, dtype=torch.float64)
    out = list(on_ranks(step, w, mesh=GRID))
    slope = (mine.sum() if call is ff.psum else mine.mean()) * 1.5
    assert_equal(out, [(w * slope, slope)] * 4)

    def typed(w):
        return ff.psum(ff.pcast(w, "data", to="V"), axis, to="V")

    with pytest.raises(ValueError, match="means under shard, and .* at once"):
        ff.spmd(lambda: ff.place(ff.shard(typed, GRID, "data"), w), GRID)()


CALLS = {
    "psum": lambda x, of, to: ff.psum(x, "data", of=of, to=to),
    "all_gather": lambda x, of, to: ff.all_gather(x, "data", to=to),
    "pbroadcast": lambda x, of, to: ff.pbroadcast(x, "data", source=1, to=to),
    "pcast": lambda x, of, to: ff.pcast(x, "data", of=of, to=to),
}
MEANINGS = {
    "psum": "V->I P->I P->R V->V P->V V->R",
    "all_gather": "V->V V->R V->I",
    "pbroadcast": "V->V V->I",
    "pcast": "I->V I->R R->V R->I V->P",
}
UNDER_SHARD = {
    "psum": "V->I V->V",
    "all_gather": "V->V V->I",
    "pbroadcast": "V->V V->I",
    "pcast": "I->V S->V V->S",
}


def refusal(op, of, to, sharded):
    """What a rank is told of a call between two types; empty where it has a meaning."""

    def main():
        def run(x):
            return CALLS[op](x, of, to)

        try:
            called = lambda _, x: run(x)  # noqa: E731
            (ff.shard(called, mesh, "data") if sharded else called)({}, torch.ones(N))
        except ValueError as e:
            return str(e)
        return ""

    (said,) = {*ff.spmd(main, mesh)()}
    return said


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "under shard"])
@pytest.mark.parametrize("op", CALLS)
def test_what_has_no_meaning_is_refused_with_what_has(op, sharded):
    legal = (UNDER_SHARD if sharded else MEANINGS)[op].split()
    mean = ", under shard a mean of losses," * sharded
    for of in "V" if op in ("all_gather", "pbroadcast") else "VIRPSM":
        for to in "VIRPSM":
            said = refusal(op, of, to, sharded)
            if f"{of}->{to}" in legal:
                assert "has no meaning" not in said
                continue
            head, _, rows = said.partition(" has no meaning; it has: ")
            assert head.endswith(f'{of}->{to} over "data"' + mean)
            assert {*rows.split(", ")} == {*legal}


def test_a_part_is_taken_for_an_own_value_and_back():
    """And the gradient through own values is that of the whole."""

    def step(params):
        loss = lambda p: ff.tree_sum(through(p, lambda x: x**3))  # noqa: E731
        return through(params, lambda x: x * x + 1), ff.value_and_grad(loss)(params)

    gradient = (whole() ** 3).sum(), {"w": 3 * whole() ** 2}
    assert_equal(in_parts(step), [({"w": whole() ** 2 + 1}, gradient)] * N)
