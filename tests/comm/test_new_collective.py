"""Collectives that are added by rows of the table alone, and nothing else anywhere.

A shift along a ring, up and down, which are each other's transposes; and a product over
ranks, a reduction that has none. They are as reference, on every backend.
"""

import itertools
from fractions import Fraction

import pytest
import torch

import fsfunc as ff
from fsfunc.comm.backends.abstract import EchoLink
from fsfunc.comm.collective_ops import apply_map, apply_over
from fsfunc.comm.groups import RankGroup, get_group
from fsfunc.comm.launch import PerRank
from fsfunc.comm.ledgers import Record
from fsfunc.comm.linear_maps import LinearMap
from fsfunc.comm.mesh import Here
from fsfunc.comm.operations import OPERATIONS, Fold, MessageRounds, Operation, Route
from fsfunc.comm.typed_maps import typed_map
from fsfunc.planning.cost_model import collective_seconds
from fsfunc.testing import check_collective


def shifted(by, back):
    """The row of a shift: each rank sends to the one ``by`` places on."""

    def route(x, y, n, i, **how):
        if n == 1:
            y.copy_(x)
        return Route({(i + by) % n: x}, {(i - by) % n: y})

    return Operation(
        lambda n, i, **how: int(n > 1),
        {("V", "V"): (back, "V", "V")},
        reference=lambda xs, i, **how: xs[(i - by) % len(xs)].clone(),
        route=route,
        one_way=True,
        rounds=MessageRounds.ONE,
    )


PRODUCT = Fold("PRODUCT", torch.mul, lambda x, n: x**n)
ROWS = {
    "shift_up": shifted(1, "shift_down"),
    "shift_down": shifted(-1, "shift_up"),
    "pprod": Operation(
        lambda n, i, **how: 2 * Fraction(n - 1, n), fold=PRODUCT, same_on_all=True
    ),
}


def shift(x, axis):
    """``x`` of the rank before, around a ring."""
    return apply_over(
        x, axis, lambda leaf, where: typed_map(where, "shift_up", "V", "V")
    )


def pprod(x, axis):
    """The product over the ranks."""
    return apply_over(x, axis, lambda leaf, where: LinearMap("pprod", to="I"))


pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


@pytest.fixture(autouse=True)
def _added(monkeypatch):
    for name, row in ROWS.items():
        monkeypatch.setitem(OPERATIONS, name, row)


def everything():
    """What a rank gets of both, of derivatives, and what the ledger says."""
    x = torch.arange(6.0).view(2, 3) + ff.axis_index("data")
    with ff.ledger() as log:
        out = shift(x, "data"), pprod(x, "data"), pprod(x[0, 0], "data")
        late = ff.start(shift, x.bool(), "data").wait()
        square = lambda x: (shift(x, "data") * ff.axis_index("data")).square().sum()  # noqa: E731
        grad = torch.func.grad(square)(x)
        jvp = torch.func.jvp(lambda x: shift(x, "data"), (x,), (2 * x,))[1]
    return [*out, late, grad, jvp], [(r.op, r.axis, r.bytes) for r in log.of()]


def by_hand(n, rank):
    xs = [torch.arange(6.0).view(2, 3) + r for r in range(n)]
    before, after = (rank - 1) % n, (rank + 1) % n
    product = torch.stack(xs).prod(0)
    moved = [xs[before], product, product[0, 0], xs[before].bool()]
    grad = 2 * xs[rank] * after**2
    return [*moved, grad, 2 * xs[before]]


SENT = [
    *[("shift_up", 24), ("pprod", 32), ("pprod", Fraction(16, 3))],
    *[("shift_up", 6), ("shift_up", 24), ("shift_down", 24)],
    *[("shift_up", 24), ("shift_up", 24)],
]  # of three ranks
SENT = [(op, ("data",), Fraction(b)) for op, b in SENT]


def wrong(values, rank, n=3):
    due = by_hand(n, rank)
    pairs = zip(values, due, strict=True)
    return [i for i, (x, y) in enumerate(pairs) if not torch.equal(x, y)]


def test_on_simulated_ranks():
    for n in (1, 2, 3):
        mesh = ff.make_mesh({"data": n}, "simulated")
        for rank, (values, sent) in enumerate(ff.spmd(everything, mesh)()):
            assert not wrong(values, rank, n)
            assert n == 1 or [op for op, *_ in sent] == [op for op, *_ in SENT]
            assert n != 3 or sent == SENT


def test_its_transpose_by_dot_products():
    check_collective(lambda x: shift(x, "data"), shape=(3, 2))
    mesh = ff.make_mesh({"data": 2}, "simulated")
    product = torch.func.grad(lambda x: pprod(x, "data").sum())
    with pytest.raises(RuntimeError, match="pprod has no derivative here"):
        ff.spmd(lambda: product(torch.ones(2)), mesh)()
    with pytest.raises(ValueError, match="shift_up V->I .* has no meaning"):
        typed_map(get_group("data", Here(mesh, 0, None)), "shift_up", "V", "I")


def test_on_a_mapped_and_on_an_abstract_mesh():
    x = torch.arange(6.0).view(3, 2)
    mapped = ff.make_mesh({"data": 3}, "vmap")
    with ff.ledger() as log:
        found = ff.spmd(lambda x: shift(x, "data"), mapped)(PerRank(x))
    assert torch.equal(torch.stack(list(found)), x.roll(1, 0))
    assert [log.bytes(rank=r) for r in range(3)] == [8, 8, 8]
    paper = ff.make_mesh({"data": 1024}, "abstract")
    with ff.ledger() as log:
        (y,) = ff.spmd(lambda: shift(torch.ones(5, 7), "data"), paper)()
    assert y.shape == (5, 7) and log.table() == [("shift_up", "data", 1, 140)]


def test_in_a_sharded_step_that_is_checked():
    """Its type check knows what a rank gets if all have the same."""
    mesh = ff.make_mesh({"data": 2}, "simulated")
    w, x = torch.tensor([1.0, 2.0]), torch.arange(8.0).view(4, 2)
    unit = ff.unit(lambda w, x: x * w)

    def main():
        def loss(w, x):
            return shift(unit(w, x), "data").square().mean()

        step = ff.shard(ff.value_and_grad(loss), mesh, "data")
        rows = ff.local_batch(x, mesh, "data")
        value, grads = step(ff.place(step, w, rows), rows)
        return value, ff.unshard(grads)

    due = torch.func.grad_and_value(lambda w: (x * w).square().mean())(w)
    for value, grads in ff.spmd(main, mesh)():
        assert torch.equal(value, due[1]) and torch.equal(grads, due[0])
    where = RankGroup(("data",), (0, 1), 1, 1, EchoLink(1))
    assert torch.equal(where.start("shift_up", x).wait(), x)
    assert torch.equal(where.start("pprod", x).wait(), x**2)


def test_its_rounds_in_an_estimate():
    """A shift is one message of each; a product goes up a tree and down."""
    sent = Fraction(10**3)
    seconds = {
        op: collective_seconds(
            Record(op, ("data",), sent, torch.float32),
            range(8),
            ff.hardware.A100_40,
        )
        for op in (*ROWS, "ppermute", "psum")
    }
    assert seconds["shift_up"] == seconds["ppermute"] < seconds["psum"]
    assert seconds["pprod"] == seconds["psum"]


def natively_unequal(mesh):
    """Unequal parts of complex numbers and truth values, as they travel on NCCL.

    A product of complex numbers is not that of their parts, as which they would travel.
    """
    z = torch.full((2,), 1j)
    try:
        assert torch.equal(pprod(z, "data"), z**3) and mesh.link.paired
    except TypeError as error:
        assert 'pprod over "data" of torch.complex64' in str(error)
    sizes, rank = ((1, 2, 0), (0, 1, 3), (2, 0, 1)), mesh.rank
    how, found = LinearMap("all_to_all", sizes=sizes), []
    for dtype, width in itertools.product((torch.complex64, torch.bool), (2, 0)):
        xs = [
            (torch.arange(4 * len(c) + 4) % 3).to(dtype).view(-1, 2)[: sum(c), :width]
            for c in sizes
        ]
        there = OPERATIONS["all_to_all"].combine(xs, sizes=sizes)[rank]
        found.append(torch.equal(apply_map(xs[rank], how, get_group("data")), there))
    return found


@pytest.mark.processes
@pytest.mark.parametrize("way", ["one host", "gloo", "natively"])
def test_between_processes(processes, way):
    out = processes(
        """
        import sys
        import fsfunc as ff
        from fsfunc.comm.operations import OPERATIONS
        from tests.comm import test_new_collective as cases
        OPERATIONS.update(cases.ROWS)
        mesh = ff.make_mesh({"data": 3}, shared_memory=sys.argv[1] == "one host")
        mesh.link.paired = sys.argv[1] != "natively"
        (found,) = ff.spmd(cases.everything, mesh)()
        assert not cases.wrong(found[0], mesh.rank), found[0]
        assert found[1] == cases.SENT, found[1]
        assert ff.spmd(lambda: cases.natively_unequal(mesh), mesh)() == [[True] * 4]
        print("right", flush=True)
        """,
        3,
        way,
    )
    assert out.split() == ["right"] * 3
