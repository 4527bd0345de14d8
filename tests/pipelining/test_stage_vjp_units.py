"""The halves of a backward pass through units: recomputed, sharded, and both."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fsfunc as ff
from fsfunc.core.execution_context import Running, Thread, run_as, running
from fsfunc.core.frames import Stage, frame, inside
from fsfunc.pipelining.stage_vjp import StageVjp
from tests.checks import same
from tests.pipelining.test_stage_vjp import flops
from tests.probes import LiveBytes

D, N = 8, 4  # width, units
PRODUCT = 2 * 4 * D * D  # operations of one product of a unit
X = torch.randint(-3, 4, (4, D), generator=torch.Generator().manual_seed(0)).double()
CT = torch.arange(4.0 * D).view(4, D).double() - 9


def weights() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            k: torch.randint(-2, 3, (D, D), generator=generator).double()
            for k in ("v", "w")
        }
        for _ in range(N)
    ]


@ff.unit
def block(p, x):
    return x + torch.relu(x @ p["v"]) @ p["w"]


def stage(ps, x, tied=False):
    for i, p in enumerate(ps):
        x = block(ps[0] if tied and i == N - 1 else p, x)
    return x


def pulled(f, halves: bool, **how: Any) -> tuple[Any, Any]:
    """(gradients, operations forward and of each part) of a stage on plain tensors."""
    ps = [{k: w.requires_grad_() for k, w in p.items()} for p in weights()]
    leaves = [w for p in ps for w in p.values()]
    x = X.clone().requires_grad_()
    y, forward = flops(lambda: f(ps, x, **how))
    vjp = StageVjp([y], [x], leaves)
    if not halves:
        found, whole = flops(lambda: vjp.backward([CT]))
        return (found, [w.grad for w in leaves]), (forward, whole)
    found, first = flops(lambda: vjp.input_gradient([CT]))
    before = [w.grad for w in leaves]
    _, second = flops(vjp.weight_gradient)
    return (found, [w.grad for w in leaves]), (forward, first, second, before)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("around", [1, 2], ids=["remat", "remat of remat"])
def test_a_recomputed_unit_computes_again_once(tied, around):
    f = stage
    for _ in range(around):
        f = ff.remat(f)
    expected, _ = pulled(stage, False, tied=tied)
    found, (forward, first, second, before) = pulled(f, True, tied=tied)
    same(found, expected)
    again = around * forward
    assert forward == 2 * N * PRODUCT
    assert first + second == again + 2 * forward
    if not tied:
        assert (first, second) == (again + forward, forward)
        assert before == [None] * (2 * N)


def test_a_recompute_draws_the_same_numbers():
    unit = ff.unit(lambda w, x: F.dropout(x @ w, 0.5))

    def run(f, halves):
        w, x = weights()[0]["w"].requires_grad_(), X.clone().requires_grad_()
        torch.manual_seed(3)
        vjp = StageVjp([f(w, x)], [x], [w])
        torch.manual_seed(4)
        found = (vjp.input_gradient if halves else vjp.backward)([CT])
        if halves:
            vjp.weight_gradient()
        return found, w.grad

    same(run(ff.remat(unit), True), run(unit, False))


def test_what_was_recomputed_goes_with_the_second_half():
    ws = [torch.eye(64, requires_grad=True) for _ in range(4)]
    unit = ff.remat(ff.unit(lambda w, x: torch.sin(torch.sin(torch.sin(x) @ w))))
    with LiveBytes(ws) as memory:
        x = torch.ones(64, 64, requires_grad=True)
        h = x
        for w in ws:
            h = unit(w, h)
        vjp = StageVjp([h], [x], ws)
        del h
        forward = memory.live
        vjp.input_gradient([torch.ones(64, 64)])
        assert forward == 4 * x.nbytes < memory.live
        vjp.weight_gradient()
        del vjp
        assert memory.live == 5 * x.nbytes  # x and the gradients


class Told(torch.autograd.Function):
    """A derived weight whose backward tells whether it belongs to a recompute."""

    @staticmethod
    def forward(ctx, w):  # type: ignore[override]
        return w * 2

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        TOLD.append(running().recompute)
        return g * 2


TOLD: list[bool] = []


@pytest.mark.parametrize("halves", [False, True])
def test_both_halves_run_as_a_recompute_does(halves):
    unit = ff.remat(ff.unit(lambda w, x: x @ Told.apply(w)))
    w, x = weights()[0]["w"].requires_grad_(), X.clone().requires_grad_()
    vjp = StageVjp([unit(w, x)], [x], [w])
    TOLD.clear()
    if halves:
        vjp.input_gradient([CT])
        assert TOLD == []
        vjp.weight_gradient()
    else:
        vjp.backward([CT])
    assert TOLD == [True]


def test_the_node_is_left_as_it_was():
    unit = ff.remat(ff.unit(lambda w, x: x @ w))
    w, x = weights()[0]["w"].requires_grad_(), X.clone().requires_grad_()
    y = unit(w, x)
    pull = y.grad_fn.pull_recomputed
    vjp = StageVjp([y], [x], [w])
    vjp.input_gradient([CT])
    assert y.grad_fn.pull_recomputed is pull
    vjp.weight_gradient()


# Sharded


class Here(Stage):
    """A stage that has every unit."""

    def unit(self, run, call):
        return run


def on_two_ranks(around, halves: bool, **how: Any):
    """What each of two ranks finds, and the order of what it sent, by part."""
    mesh = ff.make_mesh({"data": 2}, "simulated")

    def main():
        params = ff.place(around(stage, mesh), weights(), X)
        x = (X + mesh.rank).requires_grad_()
        seen: dict[str, Any] = {}
        logs: dict[str, list[Any]] = {}

        def part(name, run):
            with ff.ledger() as log:
                out, seen[name] = flops(run)
            logs[name] = [(r.op, r.unit, r.phase, r.bytes) for r in log.of(mesh.rank)]
            return out

        def threaded(ps, x):
            """As a pipeline's stage calls its units: each with a thread of its own."""
            for i, p in enumerate(ps):
                thread = Thread(x.device)
                here = inside(frame().but(handlers=(Here(), *frame().handlers)))
                with run_as(Running(thread)), here:
                    x = block(ps[0] if how.get("tied") and i == N - 1 else p, x)
                threads.append(thread)
            return x

        def loss(ps):
            threads.clear(), found.clear()  # the step is tried before it runs
            y = part("forward", lambda: threaded(ps, x))
            ends = [t.token for t in threads]
            vjp = StageVjp([y, *ends], [x], [t.start for t in threads])
            cts = [CT, *[torch.zeros_like(end) for end in ends]]
            if halves:
                found.extend(part("first", lambda: vjp.input_gradient(cts)))
                part("second", vjp.weight_gradient)
            else:
                found.extend(part("whole", lambda: vjp.backward(cts)))
            return torch.zeros(()), frame().runtimes

        threads: list[Thread] = []
        found: list[Any] = []
        grad = ff.value_and_grad(lambda ps: loss(ps)[0])
        grads = around(grad, mesh)(params)[1]
        return (ff.unshard(grads), found), seen, logs

    return ff.spmd(main, mesh)()


def shard(f, mesh):
    return ff.shard(f, mesh, "data")


def shard_of_remat(f, mesh):
    return ff.shard(ff.remat(f), mesh, "data")


def remat_of_shard(f, mesh):
    return ff.remat(ff.shard(f, mesh, "data"))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("around", [shard, shard_of_remat, remat_of_shard])
def test_sharded_units_gather_in_the_first_half_and_reduce_in_the_second(around, tied):
    whole = on_two_ranks(around, False, tied=tied)
    halves = on_two_ranks(around, True, tied=tied)
    for (expected, spent, sent), (found, parted, logs) in zip(
        whole, halves, strict=True
    ):
        same(found, expected)
        assert parted["first"] + parted["second"] == spent["whole"]
        if not tied:
            assert parted["second"] == parted["forward"]
        ops = {k: [op for op, *_ in v] for k, v in logs.items()}
        assert set(ops["first"]) <= {"all_gather"}
        assert ops["second"] == ["psum_scatter"] * len(ops["second"])
        assert sorted(logs["first"] + logs["second"]) == sorted(sent["whole"])
        reduced = [x for x in sent["whole"] if x[0] == "psum_scatter"]
        assert logs["second"] == reduced  # and in the order of the whole
    assert halves[0][2] == halves[1][2]
