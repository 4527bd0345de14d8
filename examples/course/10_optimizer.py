"""Lesson 10. An optimizer of your own, and what it may know of a shard.

The plain program is LARS (as in You et al., 2020): momentum, at each matrix's scale.

    m <- beta m + g,        w <- w - rate |w| / |m| m

An optimizer is two functions, init and update. What it does to each element alone, as
the momentum, it may do to a part. A norm is of all elements, |w|^2 = sum_r |w_r|^2, and
without a psum each rank goes its own way, at a speed that looks plausible.

    python examples/course/10_optimizer.py
"""

import torch

import fsfunc as ff

DIM, RANKS, STEPS, RATE, BETA = 16, 4, 20, 0.03, 0.9
torch.manual_seed(0)
params = [torch.randn(DIM, DIM) * size for size in (0.3, 1.0, 0.1)]
batch = tuple(torch.randn(2, 16, DIM))
layer = ff.unit(lambda w, x: x + torch.tanh(x @ w))


def loss(params, batch):
    x, y = batch
    for w in params:
        x = layer(w, x)
    return (x - y).square().mean()


def lars(norms):
    def update(grads, m, params):
        m = ff.tree.map(lambda m, g: BETA * m + g, m, grads)
        rates = [-RATE * w / m for w, m in zip(*norms((params, m)), strict=True)]
        return list(map(ff.tree_scale, m, rates)), m  # what to add, and the next state

    return ff.Optimizer(lambda params: ff.tree.map(torch.zeros_like, params), update)


def train(norms, mesh=None):  # 1. the plain program; 3. on a mesh, by the library
    optimizer, rows = lars(norms), batch
    step = optimizer(ff.value_and_grad(loss))
    if mesh is not None:
        step, rows = ff.shard(step, mesh, "data"), ff.local_batch(batch, mesh, "data")
    state = ff.init_state(step, params, optimizer, rows)
    for _ in range(STEPS):
        state, _ = step(state, rows)
    return ff.unshard(state.params)


def by_hand(norms, mesh):  # 2. on rows of each matrix, as in lesson 3
    parts, rows = ff.local_batch((params, batch), mesh, "data")
    grad_fn = ff.value_and_grad(lambda w: loss(ff.all_gather(w, "data"), rows) / RANKS)
    state = (optimizer := lars(norms)).init(parts)
    for _ in range(STEPS):
        parts, state = optimizer.apply(grad_fn(parts)[1], state, parts)
    return ff.all_gather(parts, "data")


def own_norms(trees):
    return torch.stack([x.norm() for leaves in trees for x in leaves]).view(2, -1)


def psum_norms(trees):  # all of them in one psum; as ff.leaf_norms does, in any layout
    return ff.psum(own_norms(trees).square(), "data").sqrt()


plain, mesh = train(own_norms), ff.make_mesh({"data": RANKS})
print(
    f"weights after {STEPS} steps, against those of one device, and what a rank sends"
)
for way, norms in (by_hand, own_norms), (by_hand, psum_norms), (train, ff.leaf_norms):
    with ff.ledger() as log:
        found = ff.spmd(way, mesh)(norms, mesh)[0]
    off, sent = (found[0] - plain[0]).abs().max(), log.bytes("data", "psum")
    print(f"{way.__name__:7} {norms.__name__:10} {off:.0e} off, {sent:3} bytes by psum")
assert sent == 2 * (RANKS - 1) / RANKS * STEPS * (2 * len(params) * 4 + 8)  # 8: a loss
# own_norms under shard is refused, with the leaf: no number is better than a wrong one.
