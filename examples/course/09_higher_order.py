"""Lesson 9. Derivatives of derivatives, over shards: MAML, and the sharpest direction.

Two plain programs. MAML differentiates through a step of descent, so its gradient has a
Hessian in it; the power method finds that Hessian's largest eigenvalue by products Hv:

    M(w) = L(w - a dL/dw),         dM/dw = (I - a H) dL/dw at (w - a dL/dw)
    v <- Hv / |Hv|,                Hv = d/dt dL/dw at (w + t v)

Write L as in lesson 2, with its collectives inside, and it is one function of one w on
all ranks; then all of calculus holds, since a transpose is a collective again.

    python examples/course/09_higher_order.py
"""

import torch
from torch.func import grad, hessian, jvp
from torch.testing import assert_close

import fsfunc as ff

N, DIM, RANKS, RATE, TURNS = 16, 4, 4, 0.5, 8
torch.manual_seed(0)
params = list(torch.randn(2, DIM, DIM).double() / DIM**0.5)
batch = tuple(torch.randn(2, N, DIM).double())
mesh = ff.make_mesh({"data": RANKS})
layer = ff.unit(lambda w, x: torch.tanh(x @ w))


def loss(params, batch):
    x, y = batch
    return (layer(params[1], layer(params[0], x)) - y).square().mean()


# 1. The plain programs, of any loss.
def programs(loss, params, batch):
    def after_a_step(params):
        g = grad(loss)(params, batch)
        return loss(ff.tree.map(lambda w, g: w - RATE * g, params, g), batch)

    slope, v = grad(lambda w: loss(w, batch)), ff.tree.map(torch.ones_like, params)
    for _ in range(TURNS):
        v = jvp(slope, (params,), (ff.tree_scale(v, 1 / ff.global_norm(v)),))[1]
    return grad(after_a_step)(params), ff.global_norm(v)


plain = programs(loss, params, batch)
H = hessian(lambda w: loss(w, batch))(torch.stack(params)).view(2 * DIM**2, 2 * DIM**2)
print(f"largest eigenvalue {torch.linalg.matrix_norm(H, 2):.4f} of H as a matrix")
print(f"                   {plain[1]:.4f} by {TURNS} products Hv, of the plain program")


# 2. By hand.
def mean_loss(params, rows):
    return ff.pmean(loss(ff.pcast(params, "data", to="V"), rows), "data")


def by_hand(rows):
    return programs(mean_loss, params, rows)


# 3. By the library: parameters are one value, and L is the mean, by definition.
def by_parts(rows):
    parts = ff.place(ff.shard(loss, mesh, "data"), params, rows)
    fn = ff.shard(lambda params, rows: programs(loss, params, rows), mesh, "data")
    return ff.unshard(fn(parts, rows))


# 4. MAML takes the sums of three gradients, and a product Hv those of two.
share, count = (RANKS - 1) / RANKS * 8 * 2 * DIM**2, 3 + 2 * TURNS
losses = 2 * (RANKS - 1) / RANKS * 8 * (2 + 2 * TURNS)
sums = {by_hand: ("psum", 2 * share * count + losses)}
sums[by_parts] = "psum_scatter", share * count
rows = ff.spmd(lambda: ff.local_batch(batch, mesh, "data"), mesh)()
for way, (op, sent) in sums.items():
    with ff.ledger() as log:
        assert_close(list(ff.spmd(way, mesh)(rows)), [plain] * RANKS)
    print(f"{way.__name__}: the same; {count} sums of gradients, and a rank sends")
    for name, _, calls, size in log.table():
        print(f"  {calls:3} x {name:13} {size:5} bytes")
    assert log.bytes("data", op) == sent
