"""Lesson 1. Data parallel by hand: many ranks, one sum.

The plain program descends the mean loss of all its rows, on one device:

    L(w) = 1/N sum_i (x_i . w - y_i)^2,        w <- w - rate * dL/dw

Cut the rows evenly over n ranks, and call the mean over rank r's rows L_r. Then

    L = 1/n sum_r L_r,     and a derivative is linear:     dL/dw = 1/n sum_r dL_r/dw

so every rank can differentiate its own rows, and one sum over ranks does the rest. That
is all there is to data parallelism; the rest of this course is about where sums go.

    python examples/course/01_data_parallel.py
"""

import torch
from torch.testing import assert_close

import fsfunc as ff

N, DIM, RANKS, RATE, STEPS = 32, 8, 4, 0.05, 20
draw = torch.Generator().manual_seed(0)
x = torch.randn(N, DIM, generator=draw)
y = x @ torch.arange(1.0, DIM + 1) + 0.1 * torch.randn(N, generator=draw)


def loss(w, rows):  # the mean over whatever rows it is given
    x, y = rows
    return (x @ w - y).square().mean()


def descend(rows, average):
    w = torch.zeros(DIM)
    for _ in range(STEPS):
        _, g = average(ff.value_and_grad(loss)(w, rows))
        w = w - RATE * g
    return w


# 1. The plain program: one device, all rows, nothing to average.
plain = descend((x, y), lambda found: found)

# 2. By hand, on four ranks. `spmd` runs a function on every rank of a mesh: here four
#    simulated ones that take turns in this process, under torchrun one in each process.
mesh = ff.make_mesh({"data": RANKS})


def main(average):
    return descend(ff.local_batch((x, y), mesh, "data"), average)  # N / n rows each


with ff.ledger() as log:  # whatever ranks send each other is written down
    by_hand = ff.spmd(main, mesh)(lambda found: ff.pmean(found, "data"))  # psum / n
forgotten = ff.spmd(main, mesh)(lambda found: found)  # no sum: four fits of 8 rows each

print("distance from the plain weights at which ranks 0 to 3 end")
for name, ranks in (("with psum", by_hand), ("without", forgotten)):
    print(f"  {name:10}", *(f"{(w - plain).norm():9.1e}" for w in ranks))
for w in by_hand:
    assert_close(w, plain)

# 3. The cost. A ring all-reduce of b bytes sends 2 (n-1)/n b from each of n ranks: n-1
#    hops to add up, n-1 to hand the sums round. Here b is w and the loss, in float32.
formula = STEPS * 2 * (RANKS - 1) / RANKS * 4 * (DIM + 1)
print(f"a rank sent {log.bytes('data')} bytes, by the formula {formula:.0f}")
assert log.bytes("data") == formula


# 4. The library's name for it is shard: a plain step, and the axis its rows lie along.
def train(step):
    rows = ff.local_batch((x, y), mesh, "data")
    state = ff.init_state(step, torch.zeros(DIM), ff.sgd(RATE), rows)
    for _ in range(STEPS):
        state, _ = step(state, rows)
    assert_close(state.params, plain)


step = ff.sgd(RATE)(ff.value_and_grad(loss))  # no rank is mentioned
ff.spmd(train, mesh)(ff.shard(step, mesh, "data", zero=0))
