"""Over real processes: the bits, the ledger and the plans of the simulated ranks.

As a program it prints, for every scheme, one line of JSON: the losses' and the
parameters' bits, what each rank sent, the actions that it did, and what was planned.
"""

import hashlib
import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from fsfunc.transforms.gradient_sums import GradientSums
from tests.planning.comparing import facts, own, planned_and_run

S = ff.schedules
SHARD, PIPE = ("shard",), ("pipeline",)
# Over these axes; some are planned, before the first step and the last.
SCHEMES = {
    "data": {
        "zero=0, merged": {"zero": 0, "min_bytes": 10**6, "planned": True},
        "zero=1": {"zero": 1, "planned": True},
        "zero=3": {"planned": True},
        "zero=3, kept": {"reshard_after_forward": False},
        "shard(remat)": {"order": ("remat", "shard"), "planned": True},
        "accumulate(shard)": {"order": ("shard", "accumulate"), "planned": True},
        "donated, zero=2": {"order": ("shard", "donate"), "zero": 2},
        "bf16": {"order": ("precision", "shard"), "planned": True},
    },
    "node data": {f"HSDP zero={z}": {"zero": z, "replicate": "node"} for z in (0, 3)},
    "pipe": {
        "1f1b": {"order": PIPE},
        "gpipe, uneven": {"order": PIPE, "schedule": S.gpipe, "m": 3},
        "interleaved": {"order": PIPE, "schedule": S.interleaved_1f1b},
        "zb_v, remat": {"schedule": S.zb_v, "order": ("remat", "pipeline")},
        "by hand": {
            "order": PIPE, "m": 2, "schedule": ["F0 F1 B1 B0", "F0 F1 I1 W1 B0"],
        },
        "cut, fewer microbatches": {"order": PIPE, "stages": [1, 5], "m": 1},
        "donated": {"order": ("pipeline", "donate")},
        "asynchronous": {
            "order": PIPE, "schedule": S.asynchronous, "update": ff.sgd(0.01),
        },
    },
    "data pipe": {
        "shard(pipeline)": {"order": ("pipeline", "shard")},
        "pipeline(shard)": {"order": ("shard", "pipeline"), "schedule": S.gpipe},
        "zb_v, zero=2": {
            "order": ("remat", "pipeline", "shard"), "schedule": S.zb_v, "zero": 2,
        },
        "zb_v, zero=0": {
            "order": ("pipeline", "shard"), "schedule": S.zb_v, "zero": 0,
            "planned": True,
        },
        "interleaved, zero=2": {
            "order": ("pipeline", "shard"), "schedule": S.interleaved_1f1b, "zero": 2,
            "planned": True,
        },
        "1f1b, zero=0": {"order": ("pipeline", "shard"), "zero": 0, "planned": True},
        "accumulated": {"order": ("pipeline", "accumulate", "shard"), "m": 2},
    },
}  # fmt: skip
SIZES = {2: ("data", "pipe"), 4: ("node data", "data pipe")}  # by how many processes


def mesh_of(kind, backend):
    return ff.make_mesh(dict.fromkeys(kind.split(), 2), backend)


@ff.unit
def embed(p, tokens):
    return p["table"][tokens], tokens > 2


@ff.unit
def layer(p, x, mask):
    y = torch.nn.functional.dropout(torch.tanh(x @ p["w"] + p["b"]), 0.25)
    return torch.where(mask[:, None], y, x)


@ff.unit
def head(p, x):
    return torch.log_softmax(x @ p["table"].t(), -1)


def loss_fn(params, batch):
    """An embedding that the first and the last unit share, and a mask for all."""
    x, mask = embed(params["embed"], batch["tokens"])
    for p in params["layers"]:
        x = layer(p, x, mask) * params["gain"]
    scores = head(params["embed"], x)
    return -scores.gather(-1, batch["next"][:, None]).mean()


def of_layers(params, batch):
    """A loss whose stages share no leaf: each may update at times of its own."""
    x = batch["next"][:, None] * torch.ones(5)
    for p in params["layers"]:
        x = layer(p, x, batch["tokens"] > 2)
    return x.square().mean()


def params_of():
    draw = torch.Generator().manual_seed(3)
    rand = lambda *s: torch.randn(s, generator=draw)  # noqa: E731
    layers = [{"w": rand(5, 5), "b": rand(5)} for _ in range(4)]
    return {"embed": {"table": rand(7, 5)}, "layers": layers, "gain": torch.ones(5)}


def batches(count):
    draw = torch.Generator().manual_seed(4)
    some = lambda: torch.randint(7, (16,), generator=draw)  # noqa: E731
    return [{"tokens": some(), "next": some()} for _ in range(count)]


SHARDS = {"zero", "min_bytes", "reshard_after_forward", "replicate"}


def transformed(step, mesh, order, m=4, schedule=S.one_f_one_b, **how):
    data = {key: how.pop(key) for key in SHARDS & how.keys()}
    transforms = {
        "remat": ff.remat,
        "accumulate": lambda f: ff.accumulate(f, 2),
        "shard": lambda f: ff.shard(f, mesh, "data", **data),
        "precision": lambda f: ff.precision(f, torch.bfloat16, torch.float32),
        "pipeline": lambda f: ff.pipeline(
            f, mesh, "pipe", n_microbatches=m, schedule=schedule, **how
        ),
        "donate": ff.donate,
    }
    for name in order:
        step = transforms[name](step)
    return step


def run(mesh, order=SHARD, planned=False, **options):
    """Three steps on this rank, as plain data."""
    optimizer = ff.chain(ff.clip_by_global_norm(1.0), ff.sharded_adam(0.01))
    optimizer = options.get("update", optimizer)
    plain = of_layers if "update" in options else optimizer(ff.value_and_grad(loss_fn))
    torch.manual_seed(11)
    step = transformed(plain, mesh, order, **options)
    axes = tuple(axis for axis in mesh.axes if axis != "pipe")
    mine = [own(ff.local_batch(b, mesh, axes)) if axes else b for b in batches(3)]
    state = ff.init_state(step, params_of, optimizer, mine[0])
    losses, sent, plans = [], [], []
    with ff.clock() as events:
        for batch in mine:
            if planned and batch is not mine[1]:
                both = planned_and_run(step, state, batch)
                (state, metrics), records = both.out, both.sent
                plans.append(said(both))
            else:
                with ff.ledger() as log:
                    state, metrics = step(state, batch)
                records = log.of(mesh.rank)
            sent += [
                (r.op, list(r.axis), str(r.bytes), str(r.dtype), r.unit, r.phase)
                for r in records
            ]
            losses.append(metrics["loss"].item())
    at = mesh.coordinate("pipe") if "pipe" in mesh.axes else None
    did = [str(action) for rank, action, *_ in events if rank == at]
    return losses, digest(ff.unshard(state.params)), sent, did, plans


def said(both):
    """Whether a plan is what was sent and held; and itself."""
    plan = both.plan.ranks[0]
    equal = facts(plan.records) == facts(both.sent)
    # A process holds what it sends until its peer has taken it: by the peer's time, not
    # by the plan's, two messages of each direction may still lie there, or lie no more.
    messages = [r.bytes for r in both.sent if r.op == "ppermute"]
    by_timing = 4 * max(messages, default=0) if "RANK" in os.environ else 0
    near = abs(plan.peak_bytes - both.peak) <= max(0.02 * both.peak, by_timing)
    return equal, near, [[str(x) for x in f] for f in facts(plan.records)], plan.flops()


def digest(params):
    sha = hashlib.sha256()
    for x in tree.leaves(params):
        sha.update(x.contiguous().numpy().tobytes())
    return sha.hexdigest()


def fail(mesh):
    """A stage that raises in its second forward; the other waits for what it makes."""
    calls = []

    @ff.unit
    def broken(p, x, mask):
        if type(x) is torch.Tensor and mesh.coordinate("pipe") == 0:
            calls.append(1)
            if len(calls) == 4:
                raise ArithmeticError("this stage is broken")
        return layer.fn(p, x, mask)

    def loss(params, batch):
        x, mask = embed(params["embed"], batch["tokens"])
        for p in params["layers"]:
            x = broken(p, x, mask)
        return x.mean()

    grad = transformed(ff.value_and_grad(loss), mesh, PIPE, stages=[3, 2])
    grad(params_of(), batches(1)[0])


def fail_beside(mesh):
    """Rank 1 raises as it goes on beside a reduction in flight."""
    order = GradientSums.order_reductions

    def breaking(self, holds, others_wait):
        order(self, holds, others_wait)
        if self.reducing and others_wait and self.groups.where.rank == 1:
            raise ArithmeticError("beside a reduction")

    GradientSums.order_reductions = breaking
    run(mesh, **SCHEMES["data pipe"]["interleaved, zero=2"])


def main():
    torch.set_num_threads(1)
    if sys.argv[1] == "fail_beside":
        mesh = mesh_of("data pipe", None)
        ff.spmd(lambda: fail_beside(mesh), mesh)()
        return
    if sys.argv[1] == "fail":
        mesh = mesh_of("pipe", None)
        ff.spmd(lambda: fail(mesh), mesh)()
        return
    for kind in SIZES[int(os.environ["WORLD_SIZE"])]:
        mesh = mesh_of(kind, None)
        for name, options in SCHEMES[kind].items():
            (found,) = ff.spmd(lambda m=mesh, how=options: run(m, **how), mesh)()
            line = json.dumps([kind, name, mesh.rank, found])
            os.write(1, f"{line}\n".encode())  # in one piece, of two processes
    torch.distributed.destroy_process_group()


pytestmark = pytest.mark.processes


@pytest.mark.parametrize("size", SIZES)
def test_processes_equal_simulated_ranks(processes, size):
    lines = processes(Path(__file__), size, "all").splitlines()
    found = {tuple(key): result for *key, result in map(json.loads, lines)}
    assert len(found) == sum(len(SCHEMES[kind]) for kind in SIZES[size]) * size
    for kind in SIZES[size]:
        mesh = mesh_of(kind, "simulated")
        for name, options in SCHEMES[kind].items():
            simulated = ff.spmd(lambda m=mesh, how=options: run(m, **how), mesh)()
            for rank, expected in enumerate(json.loads(json.dumps(simulated))):
                for part, wanted in zip(found[kind, name, rank], expected, strict=True):
                    assert part == wanted, (name, rank)
                for equal, near, *_ in found[kind, name, rank][-1]:
                    assert equal and near, (name, "a plan is not what was done")


def test_a_stage_that_raises_ends_every_process(processes):
    """And no rank waits for ever: the launcher's time limit is far away."""
    with pytest.raises(AssertionError, match="this stage is broken"):
        processes(Path(__file__), 2, "fail", timeout=60)
    mesh = ff.make_mesh({"pipe": 2}, "simulated")
    with pytest.raises(ArithmeticError, match="this stage is broken"):
        ff.spmd(lambda: fail(mesh), mesh)()


@pytest.mark.processes(slow=False)  # the one that `pytest` alone runs
def test_bare_calls_under_processes(processes):
    printed = processes(
        """
        import torch, fsfunc as ff

        mesh = ff.make_mesh({"data": 2})
        layer = ff.unit(lambda w, x: x @ w)
        call = ff.shard(lambda w, x: layer(w, x).sum(), mesh, "data")
        w = ff.place(call, torch.eye(4), torch.ones(4, 4))
        print(call(w, torch.ones(4, 4)).item(), ff.unshard(w)[0, 0].item())
        """,
        2,
    )
    assert printed.count("16.0 1.0") == 2, printed


if __name__ == "__main__":
    main()


def test_a_rank_that_raises_beside_reductions_in_flight_is_named(processes):
    """By the other processes, and not after a timeout."""
    with pytest.raises(AssertionError) as raised:
        processes(Path(__file__), 4, "fail_beside", timeout=60)
    text = str(raised.value)
    assert "ArithmeticError: beside a reduction" in text
    assert re.search(r"PeerFailed.*rank 1 (closed its connection|raised)", text, re.S)
