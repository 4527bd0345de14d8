"""Lesson 6. Tensor parallel: cut the matrices, and sum once.

The plain program is a stack of blocks x -> x + W2 gelu(W1 x). gelu acts on each hidden
feature alone, so these may be cut among ranks: rows of W1, columns of W2,

    W2 gelu(W1 x) = sum_r W2[:, r] gelu(W1[r, :] x)

and a block needs one sum, at its end. (Cut the other way, gelu would need one first.)
Backwards it needs one at its start: of what n ranks owe to the x that all of them took.

    python examples/course/06_tensor_parallel.py
"""

import torch
import torch.nn.functional as F
from torch.testing import assert_close

import fsfunc as ff

DIM, HIDDEN, BLOCKS, RANKS = 16, 64, 3, 4
torch.manual_seed(0)
ups, downs = torch.randn(2, BLOCKS, HIDDEN, DIM) / 6
params = [{"up": u, "down": d.T} for u, d in zip(ups, downs, strict=True)]
mesh = ff.make_mesh({"model": RANKS})


# 1. The plain program. On whole weights these layers are torch's own.
@ff.unit
def block(p, x):
    hidden = F.gelu(ff.nn.column_linear(x, p["up"]))
    return x + ff.nn.row_linear(hidden, p["down"])


def loss(params, x, block=block):
    for p in params:
        x = block(p, x)
    return x.square().mean()


grad_fn = ff.value_and_grad(loss, (0, 1))  # by the weights, and by x


# 2. By hand, with this rank's part of both matrices.
def block_by_hand(p, x):
    mine = ff.pcast(x, "model", to="V")  # forwards nothing, backwards a psum
    y = F.gelu(mine @ p["up"].T) @ p["down"].T
    return x + ff.psum(y, "model")  # forwards a psum, backwards nothing


def cut(trees):
    at, dims = ff.axis_index("model"), {"up": 0, "down": 1}
    return [{k: w.chunk(RANKS, dims[k])[at] for k, w in p.items()} for p in trees]


def by_hand(x):
    value, (grads, of_x) = plain
    assert_close(grad_fn(cut(params), x, block_by_hand), (value, (cut(grads), of_x)))


# 3. The plain program again, on weights that place() has split.
def by_layers(x):
    splits = {"*/up": ff.Split(0, "model"), "*/down": ff.Split(1, "model")}
    found = grad_fn(ff.place(loss, params, x, layouts=splits), x)
    assert_close(ff.unshard(found), plain)


# 4. The cost: two psums a block, of x and of its gradient. Data parallelism sums the
#    gradients of both matrices, 8 DIM^2 numbers, however many rows there are: cutting
#    weights sends less below 4 DIM rows, and cutting rows above.
print("bytes a rank sends\n rows   by hand    layers   2 psums of x   data parallel")
for rows in (DIM, 2 * DIM, 4 * DIM, 8 * DIM):
    plain, sent = grad_fn(params, x := torch.randn(rows, DIM)), []
    for way in by_hand, by_layers:
        with ff.ledger() as log:
            ff.spmd(way, mesh)(x)
        sent.append(log.bytes("model", "psum"))
    ring = 2 * (RANKS - 1) / RANKS * 4 * BLOCKS  # bytes for one number a block
    sums, grads = int(ring * 2 * rows * DIM), int(ring * 2 * DIM * HIDDEN)
    print(f"{rows:5} {sent[0]:9} {sent[1]:9} {sums:14} {grads:15}")
    assert sent == [sums, sums]
