"""Lesson 12. A thousand ranks, before there is one.

A step is a program, so what it will do can be read off: on tensors without data, of one
rank, for any number n of them. The plain program has L layers and Psi bytes of weights.
At zero=3, recomputed, in bfloat16, with Adam, a rank will

    hold between steps    3 Psi / n                    its part of weights and moments
    send in a step        (n-1)/n Psi/2 (3 - 1/L)      two gathers, but one of the last
                                                       layer, and one sum of gradients

and how long that takes is arithmetic on a data sheet. Nothing below was ever computed.

    python examples/course/12_planning.py
"""

import torch

import fsfunc as ff

L, DIM, TOKENS = 32, 4096, 2048
PSI = 4 * L * 8 * DIM**2  # 17 GB


@ff.unit
def block(p, x):
    return x + torch.tanh(x @ p["up"]) @ p["down"]


def loss(params, batch):
    x, y = batch
    for p in params:
        x = block(p, x)
    return (x - y).square().mean()


def init(dim=DIM):  # seen, but never made
    shapes = {"up": (dim, 4 * dim), "down": (4 * dim, dim)}
    return [{k: torch.zeros(*shapes[k]) for k in shapes} for _ in range(L)]


# 1. The plain program, and what is to be done to it.
optimizer = ff.sharded_adam(1e-4)
plain = optimizer(ff.value_and_grad(loss))


def on(mesh, zero=3, **options):
    step = ff.remat(ff.precision(plain, torch.bfloat16))
    return ff.donate(ff.shard(step, mesh, "data", zero=zero, **options))


# 2. A plan is no model of the step but the step: on four ranks it is run beside its plan.
def beside(mesh):
    step, rows = on(mesh), tuple(torch.randn(2, 8, 16))
    state = ff.init_state(step, lambda: init(16), optimizer, rows)
    plan = ff.plan(step, state, rows)
    with ff.ledger() as log:
        step(state, rows)
    return plan.records(mesh.rank), log.of(mesh.rank)


four = ff.make_mesh({"data": 4})
for planned, ran in ff.spmd(beside, four)(four):
    for a, b in zip(planned, ran, strict=True):
        assert (a.op, a.bytes, a.unit, a.phase) == (b.op, b.bytes, b.unit, b.phase)
print(f"on 4 ranks all {len(ran)} collectives came as planned")

# 3. On more. Hybrid: weights are cut within a node of 8, and the nodes are replicas.
print(f"{'ranks':>14} zero   GB held  GB sent  ms a step  of that, waiting")
batch = torch.empty(TOKENS, DIM), torch.empty(TOKENS, DIM)
for n, zero, sizes, options in (
    (8, 3, {"data": 8}, {}),
    (1024, 1, {"data": 1024}, {}),
    (1024, 2, {"data": 1024}, {}),
    (1024, 3, {"data": 1024}, {}),
    (1024, 3, {"node": 128, "data": 8}, {"replicate": "node"}),
):
    step = on(ff.make_mesh(sizes, "abstract"), zero, **options)
    plan = ff.plan(step, init, optimizer, batch)
    took = ff.estimate(plan, ff.hardware.H100)
    sent = plan.bytes()
    print(
        f"{sizes!s} {zero:4} {plan.peak_bytes / 1e9:9.2f} {sent / 1e9:8.2f} {took.seconds * 1e3:10.0f} {took.exposed * 1e3:10.0f}"
    )
    if zero == 3 and not options:
        print(sent - 16 * (n - 1) / n - (n - 1) / n * PSI / 2 * (3 - 1 / L))
        kept = sum(
            leaf.bytes
            for leaf in plan[0].leaves
            if leaf.path.startswith(("params", "opt_state"))
        )
        print(kept, 3 * PSI / n)
