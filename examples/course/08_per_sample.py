"""Lesson 8. Per-sample gradients: what must be done before the sum.

The plain program is the gradient of DP-SGD, by which nobody's row x_i may move the
weights by more than C, and noise hides what it did. With g_i = dl(w, x_i)/dw,

    g = 1/N ( sum_i g_i min(1, C / |g_i|)  +  sigma C noise )

A clip is not linear, so it does not commute with sums: it is taken of each row's whole
gradient, before the ranks' sum; and noise is one draw for all, not one for each rank.

    python examples/course/08_per_sample.py
"""

import torch
from torch.func import grad, vmap
from torch.testing import assert_close

import fsfunc as ff

N, DIM, RANKS, CLIP, SIGMA = 32, 16, 4, 4.0, 0.5
torch.manual_seed(0)
params, x = list(torch.randn(2, DIM, DIM) / 4), torch.randn(N, DIM)
x[7] *= 20  # somebody unlike all others
mesh = ff.make_mesh({"data": RANKS})
layer = ff.unit(lambda w, x: x + torch.tanh(x) @ w)


def loss(params, x):
    return layer(params[1], layer(params[0], x)).square().mean()


def of_rows(params, x):
    rows = vmap(grad(loss), (None, 0))(params, x)  # [rows, ...] for each parameter
    return rows, torch.stack([g.square().sum((1, 2)) for g in rows]).sum(0).sqrt()


def clipped(params, x, limit=CLIP):
    rows, sizes = of_rows(params, x)
    shares = (limit / sizes).clamp(max=1)
    return [torch.einsum("n,nij->ij", shares, g) for g in rows]


def private(params, x, clipped, total):
    noise = ff.randn_like(params, generator=torch.Generator().manual_seed(1))
    sums = total(clipped(params, x))
    return ff.tree.map(lambda g, e: (g + SIGMA * CLIP * e) / N, sums, noise)


# 1. The plain program, and what its clip is for.
plain = private(params, x, clipped, lambda sums: sums)
print("norms |g_i|, sorted:", *of_rows(params, x)[1].sort()[0].int().tolist())
for limit in torch.inf, CLIP:
    a, b = (clipped(params, rows, limit) for rows in (x, x[torch.arange(N) != 7]))
    moved = sum((a - b).square().sum() for a, b in zip(a, b, strict=True)) ** 0.5
    print(f"clipped at {limit}: row 7 moves the sum of all by {moved:.2f}")


# 2. By hand: a rank's rows, then the sum.
def by_hand(rows):
    return private(params, rows, clipped, lambda sums: ff.psum(sums, "data"))


# 3. By the library: a unit gathers the weights once, for all rows; reduce_like is the
#    ranks' mean, in parts; of the noise each rank draws the parts that it has; and at
#    the end unshard gathers what came of them.
def by_parts(rows):
    whole, sharded = ff.unit(clipped, whole=True), lambda f: ff.shard(f, mesh, "data")
    parts = ff.place(sharded(whole), params, rows)
    total = lambda sums: ff.tree_scale(ff.reduce_like(sums, parts), RANKS)  # noqa: E731
    return ff.unshard(sharded(private)(parts, rows, whole, total))


share = (RANKS - 1) / RANKS * 4 * 2 * DIM**2  # of the parameters, in bytes
rows = ff.spmd(lambda: ff.local_batch(x, mesh, "data"), mesh)()
for way, op, sent in (by_hand, "psum", 2 * share), (by_parts, "psum_scatter", share):
    with ff.ledger() as log:
        assert_close(list(ff.spmd(way, mesh)(rows)), [plain] * RANKS)
    for name, _, calls, size in log.table():
        print(f"{way.__name__:9}{calls:2} x {name:13} {size} bytes sent by a rank")
    assert log.bytes("data", op) == sent
