"""Lesson 4. Recompute: memory bought with time.

The plain program is a chain of L layers and its gradient:

    x_{l+1} = f(W_l, x_l)             dL/dx_l = (df/dx_l)^T dL/dx_{l+1}

The second reads, in reverse, what the first passed through, so all of it waits: r L
tensors, if f leaves r. Keep the x_l at the ends of k segments alone, and run a segment
again when its turn comes: then r L/k of one segment, and k ends. Best is k = sqrt(r L).

    python examples/course/04_remat.py
"""

import torch
from torch.utils.flop_counter import FlopCounterMode

import fsfunc as ff

N, DIM, L, R = 256, 16, 16, 3
PRODUCT = 2 * N * DIM * DIM * L  # FLOPs: x times all matrices
torch.manual_seed(0)
params, x = list(torch.randn(L, DIM, DIM) / DIM**0.5), torch.randn(N, DIM)


@ff.unit
def layer(w, x):  # leaves R tensors: x and both tanh
    return x + torch.tanh(torch.tanh(x @ w) @ w.T)


def chain(params, x):
    for w in params:
        x = layer(w, x)
    return x


def loss(params, x, g=None):
    y = chain(params, x)  # pulling g back through it is the gradient of <g, y>
    return y.square().mean() if g is None else (y * g).sum()


def by_hand(params, x, k):
    segments, ends = [params[i : i + L // k] for i in range(0, L, L // k)], [x]
    for segment in segments[:-1]:
        ends.append(chain(segment, ends[-1]))  # nobody differentiates: nothing waits
    grads, g = [], None
    while segments:
        _, (more, g) = ff.value_and_grad(loss, (0, 1))(segments.pop(), ends.pop(), g)
        grads = more + grads
    return None, grads


def show(name, run, formula):
    with (
        ff.testing.live_bytes((params, x)) as seen,
        FlopCounterMode(display=False) as f,
    ):
        _, grads = run(params, x)
    held, products = [b // x.nbytes for b in seen.bytes], f.get_total_flops() / PRODUCT
    curve = "".join("▁▂▃▄▅▆▇█"[held[len(held) * i // 56] // 7] for i in range(56))
    print(f"{name:7}{curve} {max(held):4} {formula:7} {products:8.2f}")
    assert formula in (max(held), "") and all(map(torch.equal, grads, exact))


# 1. The plain program; 2. by hand; 3. by a transform, whose segments are the units, all
#    to the same bits. Of what is held, an operator has 5 tensors like x in hand.
exact = (plain := ff.value_and_grad(loss))(params, x)[1]
print("in tensors like x, 16 KiB each: held over time (▁ to 6, ▂ to 13, … █ to 55),")
print(f"{'at its peak; and products of x with W a layer':63} peak formula products")
show("plain", plain, R * L + 1 + 5)
for k in (2, 4, 8, 16):
    show(f"k = {k}", lambda p, x, k=k: by_hand(p, x, k), R * L // k + k + 5)
show("remat", ff.remat(plain), "")

# 4. With lesson 3: a recompute gathers W, and keeps it for its own backward pass. So
#    every layer is gathered twice, the last one once, recomputed or not.
mesh = ff.make_mesh({"data": 4})
for fn in (ff.shard(f, mesh, "data") for f in (plain, ff.remat(plain))):
    with ff.ledger() as log:
        ff.spmd(lambda fn: fn(ff.place(fn, params, x), x), mesh)(fn)
    assert log.count("all_gather") == 2 * L - 1
