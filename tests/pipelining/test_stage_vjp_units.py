"""The halves of a backward pass through units: recomputed, sharded, and both."""

from typing import Any

import pytest
import torch

import fsfunc as ff
from fsfunc.core.execution_context import Running, UnitToken, run_as
from fsfunc.core.frames import Stage, frame, inside
from fsfunc.pipelining.stages import StageVjp
from tests.checks import same
from tests.pipelining.test_stage_vjp import flops, run

D, N = 8, 2  # width, units
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


def pulled(f, halves: bool, **how: Any) -> tuple[Any, tuple[int, ...]]:
    """(gradients, operations forward and of each part) of a stage on plain tensors."""
    ps = [{k: w.requires_grad_() for k, w in p.items()} for p in weights()]
    leaves = [w for p in ps for w in p.values()]
    x = X.clone().requires_grad_()
    y, forward = flops(lambda: f(ps, x, **how))
    found, parts = run(StageVjp([y], [x], leaves), [CT], halves)
    return (found, [w.grad for w in leaves]), (forward, *parts)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("around", [1, 2], ids=["remat", "remat of remat"])
def test_a_recomputed_unit_computes_again_once(tied, around):
    f = stage
    for _ in range(around):
        f = ff.remat(f)
    expected, _ = pulled(stage, False, tied=tied)
    found, (forward, first, second) = pulled(f, True, tied=tied)
    same(found, expected)
    again = around * forward - N * PRODUCT  # nobody reads a unit's last product
    assert forward == 2 * N * PRODUCT
    assert first + second == again + 2 * forward
    if not tied:
        assert (first, second) == (again + forward, forward)


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
                thread = UnitToken(x.device)
                here = inside(frame().replace(handlers=(Here(), *frame().handlers)))
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

        threads: list[UnitToken] = []
        found: list[Any] = []
        grad = ff.value_and_grad(lambda ps: loss(ps)[0])
        grads = around(grad, mesh)(params)[1]
        return (ff.unshard(grads), found), seen, logs

    return ff.spmd(main, mesh)()


AROUND = {
    "shard": lambda f, mesh: ff.shard(f, mesh, "data"),
    "shard of remat": lambda f, mesh: ff.shard(ff.remat(f), mesh, "data"),
    "remat of shard": lambda f, mesh: ff.remat(ff.shard(f, mesh, "data")),
}


@pytest.mark.parametrize(
    "name, tied", [*((name, False) for name in AROUND), ("shard of remat", True)]
)
def test_sharded_units_gather_in_the_first_half_and_reduce_in_the_second(name, tied):
    whole = on_two_ranks(AROUND[name], False, tied=tied)
    halves = on_two_ranks(AROUND[name], True, tied=tied)
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
