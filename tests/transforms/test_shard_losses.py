"""What a loss may be under ``shard``, and the calls that are refused."""

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from tests.checks import close

MESH = ff.make_mesh({"data": 4}, "simulated")
GRID = ff.make_mesh({"node": 2, "data": 2}, "simulated")
ZEROS = pytest.mark.parametrize("zero", [0, 1, 2, 3])
layer = ff.unit(lambda p, x: x @ p["w"] + p["b"])
X = torch.arange(-12.0, 12.0).view(8, 3)


def params_of():
    return {"w": torch.eye(3) * 2, "b": torch.ones(3), "gain": torch.ones(3)}


def own(p, x):
    q = {"w": p["w"], "b": p["b"]}
    return (layer(q, x).square() * p["gain"]).mean()


def reduced(p, x):
    return ff.pmean(own(p, x), ("data",))


def ranks(loss, zero=3, mesh=MESH, axis="data", accumulate=False, **options):
    def main():
        mine = ff.local_batch(X, mesh, tuple(mesh.axes))
        grad = ff.value_and_grad(loss)
        grad = ff.accumulate(grad, 2) if accumulate else grad
        step = ff.shard(grad, mesh, axis, zero=zero, **options)
        value, grads = step(ff.place(step, params_of(), mine), mine)
        return value, ff.unshard(grads)

    return ff.spmd(main, mesh)()


EXPECTED = ff.value_and_grad(own)(params_of(), X)


@ZEROS
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("scale", [1, 3])
def test_a_loss_that_the_user_reduced_is_taken_once(zero, accumulate, scale):
    loss = lambda p, x: scale * reduced(p, x)  # noqa: E731
    expected = tree.map(lambda x: scale * x, EXPECTED)
    for found in ranks(loss, zero, accumulate=accumulate):
        close(found, expected, 1e-6)


@ZEROS
@pytest.mark.parametrize("axis", [("node", "data"), "data", "node"], ids=str)
def test_over_each_axis_of_hsdp_too(zero, axis):
    loss = lambda p, x: ff.pmean(own(p, x), axis)  # noqa: E731
    for found in ranks(loss, zero, GRID, replicate="node"):
        close(found, EXPECTED, 1e-6)


@ZEROS
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_reduced_value_may_be_added_to_a_ranks_own(zero, accumulate):
    """The mean over the ranks of either is the same."""
    for sign in (1, -3):
        loss = lambda p, x, k=sign: own(p, x) + k * reduced(p, x)  # noqa: E731
        expected = tree.map(lambda x, k=sign: (1 + k) * x, EXPECTED)
        for found in ranks(loss, zero, accumulate=accumulate):
            close(found, expected, 1e-6)


def test_a_reduced_value_that_is_not_differentiated_may_be_added():
    loss = lambda p, x: own(p, x) + reduced(p, x).detach()  # noqa: E731
    value, grads = EXPECTED
    for found in ranks(loss):
        close(found, (2 * value, grads), 1e-6)


def main_of(call):
    """``call(step, placed, mine)`` on each rank of the line."""

    def main():
        mine = ff.local_batch(X, MESH, "data")
        step = ff.shard(ff.value_and_grad(own), MESH, "data")
        return call(step, ff.place(step, params_of(), mine), mine)

    return ff.spmd(main, MESH)()


REFUSED = {
    "zero=4": (
        lambda: ff.shard(own, MESH, "data", zero=4),
        (ValueError, "zero=4: it is 0, 1, 2 or 3"),
    ),
    "an unknown axis": (
        lambda: ff.shard(own, MESH, "dta"),
        (ValueError, 'unknown axis "dta": this is Mesh'),
    ),
    "an unknown axis to replicate over": (
        lambda: ff.shard(own, MESH, "data", replicate="nod"),
        (ValueError, 'unknown axis "nod"'),
    ),
    "an axis twice": (
        lambda: ff.shard(own, GRID, ("data", "data")),
        (ValueError, "named once"),
    ),
    "an axis both cut and repeated": (
        lambda: ff.shard(own, GRID, "data", replicate="data"),
        (ValueError, "repeats an axis"),
    ),
    "two transforms over one axis": (
        lambda: main_of(lambda step, p, x: ff.shard(step, MESH, "data")(p, x)),
        (ValueError, r"two transforms over one axis: \['data'\]"),
    ),
    "a call outside spmd": (
        lambda: ff.shard(own, MESH, "data")(params_of(), X),
        (RuntimeError, "run it inside spmd"),
    ),
    "a mesh of another size": (
        lambda: main_of(lambda step, p, x: ff.shard(own, GRID, "data").__class__)
        and ff.spmd(lambda: ff.shard(own, MESH, "data")(params_of(), X),
                    ff.make_mesh({"data": 2}))(),
        (ValueError, "has 4 ranks, but 2 are running"),
    ),
    "a shard in a unit without shard around": (
        lambda: main_of(lambda step, p, x: own(p, x)),
        (TypeError, "'w'.* is sharded.*ff.shard"),
    ),
    "a shard read by the loss outside a unit": (
        lambda: main_of(
            lambda step, p, x: ff.shard(lambda p, x: p["w"].sum(), MESH, "data")(p, x)
        ),
        (TypeError, r"cannot read .sum: 'w'"),
    ),
    "a shard laid out over another axis": (
        lambda: ff.spmd(laid_out_over_another_axis, GRID)(),
        (TypeError, "'w'.* is sharded"),
    ),
}  # fmt: skip


def laid_out_over_another_axis():
    of = lambda axis: ff.shard(ff.value_and_grad(own), GRID, axis)  # noqa: E731
    return of("node")(ff.place(of("data"), params_of(), X), X)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_right_is_refused(case):
    call, (kind, text) = REFUSED[case]
    with pytest.raises(kind, match=text):
        call()


def test_a_refused_call_leaves_the_ranks_fit_to_go_on():
    def call(step, placed, mine):
        with pytest.raises(ValueError, match="two transforms over one axis"):
            ff.shard(step, MESH, "data")(placed, mine)
        return ff.unshard(step(placed, mine)[1])

    for found in main_of(call):
        close(found, EXPECTED[1], 1e-6)
