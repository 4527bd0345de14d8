"""Lesson 12. A thousand ranks, before there is one.

A step is a program, so what it will do can be read off: on tensors without data, of one
rank, for any number n of them. The plain program has L layers and Psi bytes of weights.
At zero=3, recomputed, in bfloat16, with Adam, a rank will

    hold between steps    3 Psi / n                 its part of weights and moments
    send in a step        (n-1)/n Psi/2 (3 - 1/L)   two gathers, but one of the last
                                                    layer, and a sum of gradients

and how long that takes is arithmetic on a data sheet. No such step is ever computed.

    python examples/course/12_planning.py
"""

import torch

import fsfunc as ff

L, DIM, TOKENS = 32, 4096, 2048
PSI = 4 * L * 8 * DIM**2  # 17 GB
block = ff.unit(lambda p, x: x + torch.tanh(x @ p["up"]) @ p["down"])


def loss(params, batch):
    x, y = batch
    for p in params:
        x = block(p, x)
    return (x - y).square().mean()


def init(dim=DIM):  # seen, but never made
    shapes = {"up": (dim, 4 * dim), "down": (4 * dim, dim)}
    return [{k: torch.zeros(*shapes[k]) for k in shapes} for _ in range(L)]


# 1. The plain program, and what is to be done to it.
plain = (optimizer := ff.sharded_adam(1e-4))(ff.value_and_grad(loss))


def on(mesh, zero=3, **options):
    step = ff.remat(ff.precision(plain, torch.bfloat16))
    return ff.donate(ff.shard(step, mesh, "data", zero=zero, **options))


# 2. A plan is not a model of the step: it is the step, run without data. On four ranks
#    it is run with data too, and the collectives are the same.
def both(mesh):
    step, batch = on(mesh), tuple(torch.randn(2, 32, 16))
    rows = ff.local_batch(batch, mesh, "data")
    state = ff.init_state(step, lambda: init(16), optimizer, rows)
    plan = ff.plan(step, state, rows)
    with ff.ledger() as log:
        step(state, rows)
    return plan.records(mesh.rank), log.of(mesh.rank)


four = ff.make_mesh({"data": 4})
for planned, ran in ff.spmd(both, four)(four):
    for a, b in zip(planned, ran, strict=True):
        assert (a.op, a.bytes, a.unit, a.phase) == (b.op, b.bytes, b.unit, b.phase)

# 3. On 1,024. The last line is a hybrid: parts within nodes of 8, and 128 such nodes.
print(
    "of a step on n H100, parameters cut over c of them: a rank's GB, and its seconds"
)
print("    n zero     c      held      sent    in all   waiting")
rows = torch.empty(TOKENS, DIM), torch.empty(TOKENS, DIM)
for n, zero, nodes in (8, 3, 1), (1024, 1, 1), (1024, 3, 1), (1024, 3, 128):
    mesh = ff.make_mesh({"node": nodes, "data": n // nodes}, "abstract")
    plan = ff.plan(on(mesh, zero, replicate="node"), init, optimizer, rows)
    took = ff.estimate(plan, ff.hardware.H100)
    known = plan.peak_bytes / 1e9, plan.bytes() / 1e9, took.seconds, took.exposed
    over = n // nodes if zero == 3 else 1
    print(f"{n:5} {zero:4} {over:5}", *(f"{value:9.3f}" for value in known))
    if zero == 3 and nodes == 1:
        kept = sum(leaf.bytes for leaf in plan[0].leaves if leaf.kind != "buffers")
        assert kept == 3 * PSI / n
        assert plan.bytes() == (n - 1) / n * (PSI / 2 * (3 - 1 / L) + 16)  # 16: a loss
