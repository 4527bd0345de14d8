"""Lesson 5. A pipeline: whoever writes the forward pass has written the backward pass.

The plain program is a composition of S stages, on m microbatches:

    L(W) = 1/m sum_i |f_S(W_S, ... f_1(W_1, x_i)) - y_i|^2

Rank s keeps W_s alone. At tick t it runs microbatch i = t - s and hands the result to
rank s + 1 by a ppermute; after m + S - 1 ticks all have passed. The transpose of a
ppermute turns the arrow round: differentiating the loop runs it backwards.

    python examples/course/05_pipeline.py
"""

import torch
from torch.testing import assert_close

import fsfunc as ff

S, M, ROWS, DIM = 4, 6, 8, 16
BYTES = 4 * ROWS * DIM  # what a stage hands to the next, for one microbatch
torch.manual_seed(0)
params = list(torch.randn(S, DIM, DIM) / DIM**0.5)
x, y = batch = tuple(torch.randn(2, M * ROWS, DIM))
mesh = ff.make_mesh({"pipe": S})


@ff.unit
def stage(w, x):
    return torch.tanh(x @ w)


def loss(params, batch):
    x, y = batch
    for w in params:
        x = stage(w, x)
    return (x - y).square().mean()


# 1. The plain program.
plain = (grad_fn := ff.value_and_grad(loss))(params, batch)


# 2. By hand: every rank runs this with its own w. The arrows back are collectives too:
#    all ranks must differentiate every tick, so idle ones count, zero times.
def ticks(w):
    s, xs, ys = ff.axis_index("pipe"), x.chunk(M), y.chunk(M)
    arrived, total = torch.zeros(ROWS, DIM), 0.0
    for i in range(-s, M + S - 1 - s):  # microbatches, and what is idle around them
        mine = xs[i] if s == 0 and i < M else 0.0  # zeros arrive where nobody sends
        out = stage(w, arrived + mine)
        counts = float(s == S - 1 and i >= 0) / M
        total = total + counts * (out - ys[i % M]).square().mean()
        arrived = ff.ppermute(out, "pipe", [(r, r + 1) for r in range(S - 1)])
    return ff.psum(total, "pipe")  # one value, which all ranks hold: lesson 2


own = ff.spmd(lambda: params[ff.axis_index("pipe")], mesh)()  # one for each rank
with ff.ledger() as log:
    values, grads = ff.spmd(ff.value_and_grad(ticks), mesh)(own).unzip()
assert_close((list(values), list(grads)), ([plain[0]] * S, plain[1]))
assert log.bytes("pipe", "ppermute", rank=0) == (M + S - 1) * BYTES


# 3. By the library. A schedule is data, that can be drawn, proven to end, and run.
def main(schedule):
    fn = ff.pipeline(grad_fn, mesh, "pipe", n_microbatches=M, schedule=schedule)
    parts = ff.place(fn, params, batch)  # each rank its own stage's
    assert_close(ff.unshard(fn(parts, batch)), plain)


print("F forward; B backward, 2 ticks, or I by the input and W by w, 1 each; ░ waits")
print("busy, bubble: ticks at work, and waiting; held: microbatches at once, at most\n")
for name, idle in ("gpipe", 3 * S - 3), ("one_f_one_b", 3 * S - 3), ("zb_h1", S - 1):
    ff.verify(schedule := getattr(ff.schedules, name)(S, M))
    drawn = str(ff.show.timeline(schedule)).splitlines()
    print(name, *drawn[: S + 1], *drawn[-S - 1 :], "", sep="\n")
    assert ff.bubble(schedule) == idle
    with ff.ledger() as log:
        ff.spmd(main, mesh)(schedule)
    assert log.bytes("pipe", "ppermute", rank=0) == M * BYTES  # no zeros are sent
