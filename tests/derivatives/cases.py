"""Programs of research, each a few lines: ``program(o, w, x)`` in either world."""

import torch


def mlp(o, w, x):
    return o.unit(o.leaf(w, "b"), o.unit(o.leaf(w, "a"), x))


def loss(o, w, x):
    return o.own(lambda h: h.square().mean(), mlp(o, w, x))


def squares(o, w):
    return o.tree_sum(o.map(lambda a: a * a, w))


def plus(o, *values):
    return o.own(lambda *vs: sum(vs), *values)


def times(o, *values):
    return o.own(lambda *vs: torch.stack(vs).prod(), *values)


def flipped(o, x):
    return o.own(lambda x: x.flip(1), x)


def times_squares(o, w, x):
    return times(o, loss(o, w, x), squares(o, w))


def gradient_norm_penalty(o, w, x):
    g = o.grad_w(lambda w: loss(o, w, x), w)
    return plus(o, loss(o, w, x), o.own(lambda n: n**2, o.norm(g)))


def normed_step(o, w, x):
    """A step of given length: the norm is differentiated, so it is a scale."""
    g = o.grad_w(lambda w: loss(o, w, x), w)
    factor = o.own(lambda n: 0.3 / n, o.norm(g))
    return loss(o, o.map(torch.sub, w, o.scale(g, factor)), flipped(o, x))


def loss_scaled_step(o, w, x):
    """A step as long as the loss is large: its mean is one number for all."""
    g = o.grad_w(lambda w: loss(o, w, x), w)
    step = o.scale(g, o.pmean(loss(o, w, x)))
    return loss(o, o.map(torch.sub, w, step), flipped(o, x))


def laid(o, w, x):
    full = o.unshard(w)
    normed = {k: o.own(lambda a: a / a.norm(), full[k]) for k in full}
    return loss(o, o.lay(normed, w), x)


def contrastive(o, w, x):
    h = mlp(o, w, x)
    every = o.gather(h)
    return o.own(lambda h, e: (h @ e.T).logsumexp(1).mean(), h, every)


def centred(o, w, x):
    """Statistics of the whole batch in the middle of a loss."""
    h = o.unit(o.leaf(w, "a"), x)
    mean = o.pmean(o.own(lambda h: h.mean(0), h))
    h = o.own(torch.sub, h, mean)
    var = o.pmean(o.own(lambda h: h.square().mean(0), h))
    h = o.own(lambda h, v: h / (v + 1).sqrt(), h, var)
    return o.own(lambda h: (h**3).mean(), o.unit(o.leaf(w, "b"), h))


def neighbours(o, w, x):
    h = o.own(lambda h: h.mean(0), mlp(o, w, x))
    one = o.own(lambda h, f, s: ((h - f) ** 2).sum() + (h * s).sum(),
                h, o.first(h), o.shift(h))  # fmt: skip
    return plus(o, one, o.psum(one))


def energy(o, w, x):
    """Score matching: a nested gradient of our own, by the data."""

    def value(x):
        return o.own(lambda h: h.square().sum(), mlp(o, w, x))

    return o.own(lambda g: (g - 1).square().mean(), o.vag_x(value, x))


def steep_energy(o, w, x):
    """The same of a loss that is a nested gradient itself."""
    return loss(o, w, o.vag_x(lambda x: energy(o, w, x), x))


# MAML, WGAN-GP, DP-SGD and more, in words of users: `tests/examples`.
LOSSES = {
    f.__name__: f
    for f in (
        loss, times_squares, gradient_norm_penalty, normed_step, loss_scaled_step, laid,
        contrastive, centred, neighbours, energy, steep_energy,
    )
}  # fmt: skip


def adversarial_rows(o, w, x):
    """Own values' derivatives as results: nobody divides them by n."""
    return o.vag_x(lambda x: loss(o, w, x), x), o.grad_x(lambda x: loss(o, w, x), x)


def gradients_of_neighbours(o, w, x):
    """What other ranks' losses owe this rank's rows, through collectives."""
    return o.grad_x(lambda x: contrastive(o, w, x), x), o.vag_x(
        lambda x: centred(o, w, x), x
    )


STEPS = {f.__name__: f for f in (adversarial_rows, gradients_of_neighbours)}
