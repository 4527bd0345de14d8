"""Lesson 9. Derivatives of derivatives, over shards: MAML, and the sharpest direction.

Two plain programs. MAML differentiates through a step of descent, so its gradient has a
Hessian in it; the power method finds that Hessian's largest eigenvalue by products Hv:

    M(w) = L(w - a dL/dw),         dM/dw = (I - a H) dL/dw at (w - a dL/dw)
    v <- Hv / |Hv|,                Hv = d/dt dL/dw at (w + t v)

Write L as in lesson 2, with its collectives inside, and it is one function of one w on
all ranks. Then all of calculus holds, since each transpose is a collective again.

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
each = ff.tree.map


@ff.unit
def layer(w, x):
    return torch.tanh(x @ w)


def loss(params, batch):
    x, y = batch
    return (layer(params[1], layer(params[0], x)) - y).square().mean()


# 1. The plain programs, of any loss.
def programs(loss, params, batch):
    def after_a_step(params):
        g = grad(loss)(params, batch)
        return loss(each(lambda w, g: w - RATE * g, params, g), batch)

    slope, v = grad(lambda params: loss(params, batch)), each(torch.ones_like, params)
    for _ in range(TURNS):
        v = jvp(slope, (params,), (ff.tree_scale(v, 1 / ff.global_norm(v)),))[1]
    return grad(after_a_step)(params), ff.global_norm(v)


plain = programs(loss, params, batch)
H = hessian(lambda w: loss(w, batch))(torch.stack(params)).view(2 * DIM**2, 2 * DIM**2)
largest = torch.linalg.eigvalsh(H).abs().max()
print(f"largest eigenvalue of H {largest:.4f}, after {TURNS} products {plain[1]:.4f}")


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


# A gradient of MAML takes three gradients' worth of sums, and a product Hv two.
gradient = 2 * (RANKS - 1) / RANKS * 8 * 2 * DIM**2
rows = ff.spmd(lambda: ff.local_batch(batch, mesh, "data"), mesh)()
for way, sums in (by_hand, "psum"), (by_parts, "psum_scatter"):
    with ff.ledger() as log:
        for found in ff.spmd(way, mesh)(rows):
            assert_close(found, plain)
    print(f"{way.__name__}: {log.table()}")
    print(log.bytes("data", sums), (3 + 2 * TURNS) * gradient)

# 4. Each rank's step on its own rows, averaged after, is another algorithm.
own = ff.spmd(lambda rows: programs(loss, params, rows)[0], mesh)(rows)
mean = [torch.stack(g).mean(0) for g in zip(*own, strict=True)]
print(
    f"steps of each rank's own: {(mean[0] - plain[0][0]).norm() / plain[0][0].norm():.0%} off"
)
