"""Lesson 3. ZeRO-3 is a gather and its transpose.

The plain program is a step of Adam on a loss L of layers x -> tanh(x W). In lesson 1
every rank held all of W. Let it hold rows W_r of each matrix, an n-th of the memory,
and fetch the others when they are needed: W = gather(W_r). Then

    dL/dW_r = gather^T (dL/dW) = psum_scatter(dL/dW)

adds up what every rank's data say of W and leaves each rank its part of the sum. It is
not written anywhere: it is the gather, seen from behind.

    python examples/course/03_zero.py
"""

import torch
from torch.testing import assert_close

import fsfunc as ff

N, DIM, LAYERS, RANKS = 16, 16, 16, 4
PSI = 4 * LAYERS * DIM * DIM  # bytes of parameters
torch.manual_seed(0)
params, batch = list(torch.randn(LAYERS, DIM, DIM) / 4), tuple(torch.randn(2, N, DIM))
mesh = ff.make_mesh({"data": RANKS})


@ff.unit  # what to gather at a time; with nobody to gather, the function itself
def layer(w, x):
    return torch.tanh(x @ w)


def loss(params, batch):
    x, y = batch
    for w in params:
        x = layer(w, x)
    return (x - y).square().mean()


# 1. The plain program.
step = (optimizer := ff.sharded_adam(1e-3))(ff.value_and_grad(loss))
plain, _ = step(ff.init_state(step, params, optimizer, batch), batch)


# 2. By hand. The gather stands inside what is differentiated; the rest follows.
def loss_of_parts(parts, rows):
    return loss(ff.all_gather(parts, "data"), rows) / RANKS


def by_hand():  # everything is cut along dim 0
    parts, rows = ff.local_batch((params, batch), mesh, "data")
    return torch.stack(ff.value_and_grad(loss_of_parts)(parts, rows)[1])


with ff.ledger() as log:
    ranks = ff.spmd(by_hand, mesh)()
whole = ff.value_and_grad(loss)(params, batch)[1]
assert_close(torch.cat(ranks, dim=1), torch.stack(whole))
share = (RANKS - 1) / RANKS * PSI
print(f"by hand a rank sends {share:.0f} bytes by all_gather, and by psum_scatter")
assert log.bytes("data", "all_gather") == log.bytes("data", "psum_scatter") == share


# 3. By hand all of W stays from its gather to the backward pass. shard forgets it after
#    each unit and gathers it again: three shares, where data parallelism sends two. Not
#    the last layer, which is still there; nor the first, as nobody asks for dL/dx.
def main(step):
    rows = ff.local_batch(batch, mesh, "data")
    state = ff.init_state(step, params, optimizer, rows)
    plan = ff.plan(step, state, rows)  # of which more in lesson 12
    assert_close(ff.unshard(step(state, rows)[0].params), plain.params)
    return plan


KINDS = "parameters", "gathered", "gradients", "moments"
print("in units of Psi = 16384 bytes, sent; held at most\nzero   sent ", *KINDS)
for zero, shares in enumerate((2, 2, 2, 3 - 2 / LAYERS)):
    plan = ff.spmd(main, mesh)(ff.donate(ff.shard(step, mesh, "data", zero=zero)))[0]
    held = [f"{plan[0].peak[kind] / PSI:>{len(kind)}.2f}" for kind in KINDS]
    print(f"  {zero}   {plan.bytes('data') / PSI:4.2f}  ", *held)
    assert plan.bytes("data") == shares * share + 12  # the loss
