"""Derivatives of sharded steps: a dozen that papers take, by one law.

Under ``shard`` every rank runs these on its rows. Gradients by the parameters are those
of the mean of all ranks' losses, wherever they are taken; gradients by anything else
are this rank's own: README.md, "What a gradient is". Each is right at any ``zero``, on
placed and on whole parameters: ``pytest tests/examples/test_derivatives.py``.
"""

import torch
from torch.func import grad, jvp, vmap

import fsfunc as ff

layer = ff.unit(lambda w, x: torch.tanh(x @ w))
each = ff.tree.map


def loss(w, x):
    return layer(w[1], layer(w[0], x)).square().mean()


def penalty(w, x):  # of all of w, counted once
    return loss(w, x) + 0.1 * ff.global_norm(w) ** 2 + 0.1 * ff.tree_sum(each(abs, w))


def maml(w, x, rate=0.5):  # the whole batch's inner step
    return loss(each(lambda a, g: a - rate * g, w, grad(loss)(w, x)), x.flip(1))


one_task = ff.unit(maml, whole=True)  # each rank's own inner step, on its rows


def learned_rate(p, x):  # grad by p: of the weights and of the rate
    w, rate = p
    return loss(each(torch.sub, w, ff.tree_scale(grad(loss)(w, x), rate)), x.flip(1))


def wgan_gp(w, x):  # how steep the critic is at this rank's rows
    slope = grad(lambda x: layer(w[1], layer(w[0], x)).sum())(x)
    return loss(w, x) + ((slope.norm(dim=1) - 1) ** 2).mean()


def fgsm(w, x):
    return loss(w, x + 0.1 * grad(lambda x: loss(w, x))(x).sign())


def contrastive(w, x):  # against every rank's rows
    h = layer(w[1], layer(w[0], x))
    mine = len(h) * ff.axis_index("data") + torch.arange(len(h))
    scores = h @ ff.all_gather(h, "data").T
    return torch.nn.functional.cross_entropy(scores, mine)


def dp_sgd(w, x):  # each row's gradient, clipped; noise of one draw
    def clipped(w, x):
        rows = vmap(grad(loss), (None, 0))(w, x[:, None])
        norms = sum(g.flatten(1).square().sum(1) for g in rows).sqrt()
        return [
            torch.einsum("n,nij->ij", (1 / norms).clamp(max=1), g) / len(g)
            for g in rows
        ]

    g = ff.reduce_like(ff.unit(clipped, whole=True)(w, x), w)
    return each(lambda g, e: g + 0.1 * e, g, ff.randn_like(w))


def sgld(w, x, rate=0.1):
    g, e = ff.value_and_grad(loss)(w, x)[1], ff.randn_like(w)
    return each(lambda a, g, e: a - rate * g + (2 * rate) ** 0.5 * e, w, g, e)


def curvature(w, x, v):  # a Hessian-vector product
    return jvp(grad(lambda w: loss(w, x)), (w,), (v,))[1]


def muon(w, x):  # whole matrices, the same on every rank
    whole = [torch.linalg.svd(g) for g in ff.unshard(grad(loss)(w, x))]
    return each(
        lambda a, g: a - 0.1 * g, w, ff.lay_like([u @ v for u, _, v in whole], w)
    )


def shampoo(w, x):  # one statistic of it; keep an average of them in your state
    g = ff.unshard(grad(loss)(w, x))
    whole = [torch.linalg.solve(a @ a.T + torch.eye(len(a)), a) for a in g]
    return each(lambda a, g: a - 0.1 * g, w, ff.lay_like(whole, w))
