"""Lesson 10. An optimizer of your own, and what it may know of a shard.

The plain program is LARS (You et al., 2017): momentum, at the scale of each matrix.

    m <- beta m + g,        w <- w - rate |w| / |m| m

An optimizer is two functions, init and update. What it does to each element alone, such
as the momentum, it does to a part of a matrix as well. A norm is of all elements:

    |w|^2 = sum_r |w_r|^2

and over parts it needs a psum, or each rank goes its own way, at a plausible speed.

    python examples/course/10_optimizer.py
"""

import torch

import fsfunc as ff

DIM, RANKS, STEPS, RATE, BETA = 12, 4, 20, 0.03, 0.9
torch.manual_seed(0)
params = [torch.randn(DIM, DIM) * size for size in (0.03, 1.0, 0.3)]
batch = tuple(torch.randn(2, 16, DIM))
mesh = ff.make_mesh({"data": RANKS})


@ff.unit
def layer(w, x):
    return x + torch.tanh(x @ w)


def loss(params, batch):
    x, y = batch
    for w in params:
        x = layer(w, x)
    return (x - y).square().mean()


def lars(norms):
    def init(params):
        return ff.tree.map(torch.zeros_like, params)

    def update(grads, m, params):
        m = ff.tree.map(lambda m, g: BETA * m + g, m, grads)
        rates = [-RATE * w / m for w, m in zip(*norms((params, m)), strict=True)]
        return [ff.tree_scale(m, rate) for m, rate in zip(m, rates, strict=True)], m

    return ff.Optimizer(init, update)


# 1. The plain program: the norm of a leaf is that of the tensor.
def train(optimizer, transform, rows):
    step = transform(optimizer(ff.value_and_grad(loss)))
    state = ff.init_state(step, params, optimizer, rows)
    for _ in range(STEPS):
        state, metrics = step(state, rows)
    return ff.unshard(state.params)


def own_norms(trees):
    return [[x.norm() for x in leaves] for leaves in trees]


plain = train(lars(own_norms), lambda step: step, batch)


# 2. By hand, on rows of each matrix as in lesson 3; all norms go in one psum.
def psum_norms(trees):
    squares = [[x.square().sum() for x in leaves] for leaves in trees]
    return ff.psum(torch.tensor(squares), "data").sqrt()


def by_hand(norms):
    parts, optimizer = ff.local_batch(params, mesh, "data"), lars(norms)
    rows, state = ff.local_batch(batch, mesh, "data"), optimizer.init(parts)

    def of_parts(parts):
        return loss(ff.all_gather(parts, "data"), rows) / RANKS

    for _ in range(STEPS):
        _, grads = ff.value_and_grad(of_parts)(parts)
        parts, state = optimizer.apply(grads, state, parts)
    return ff.all_gather(parts, "data")


def by_parts(norms):
    return train(
        lars(norms),
        lambda step: ff.shard(step, mesh, "data"),
        ff.local_batch(batch, mesh, "data"),
    )


for way, norms in (
    (by_hand, own_norms),
    (by_hand, psum_norms),
    (by_parts, own_norms),
    (by_parts, ff.leaf_norms),
):
    try:
        with ff.ledger() as log:
            found = ff.spmd(way, mesh)(norms)[0]
        print(
            way.__name__,
            norms.__name__,
            loss(found, batch),
            loss(plain, batch),
            log.table(),
        )
    except Exception as e:
        print(type(e), e)
