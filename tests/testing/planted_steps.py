"""Bugs of data-parallel steps written by hand: reductions, norms, updates, draws."""

import torch
from torch.func import grad, grad_and_value

import fsfunc as ff
from fsfunc import tree
from fsfunc.testing import check_types, finite, integers
from fsfunc.testing import poison as poisoned
from tests.testing.planted import TWO, Bug, law

W, X = {"w": integers(4, 4), "b": integers(4, seed=1)}, integers(4, 4, seed=2)


def loss(p, x):
    return (x @ p["w"] + p["b"]).square().sum() / len(x)


def step(p, x):
    grads, value = grad_and_value(loss)(p, x)
    return value, grads


def reduced(how):
    """The step by hand, whose loss and gradients ``how`` reduces."""

    def by_hand(p, x):
        value, grads = step(p, x)
        return ff.pmean(value, "data"), how(grads)

    return by_hand


mean = reduced(lambda g: ff.pmean(g, "data"))
by_mean = law(step, TWO, W, X)


def total(p, x):
    return grad(lambda p: (x @ p["w"] + p["b"]).square().sum())(p)


def uneven(weigh):
    def by_hand(p, x):
        grads = grad(loss)(p, x)
        if not weigh:
            return ff.pmean(grads, "data")
        many = torch.tensor(float(len(x)))
        grads = ff.psum(tree.map(lambda g: g * many, grads), "data")
        return tree.map(lambda g: g / ff.psum(many, "data"), grads)

    return by_hand


def clipped(norm_of, p, x, first=lambda g: g):
    """Gradients, clipped to a norm of 1, and what comes before."""
    g = first(grad(loss)(p, x))
    norm = norm_of(g)
    return tree.map(lambda g: g / norm, g)


def norm(g):
    return sum(x.square().sum() for x in tree.leaves(g)).sqrt()


def over_ranks(g):
    return ff.pmean(g, "data")


def microbatched(divide):
    def by_hand(p, x):
        parts = [grad(loss)(p, part) for part in x.chunk(4)]
        g = tree.map(lambda *gs: sum(gs) / divide, *parts)
        return ff.pmean(g, "data")

    return by_hand


def update(p, x):
    g = grad(loss)(p, x)
    return tree.map(lambda a, g: a - 0.5 * g, p, g)


def updated(sign=-0.5, keep=False):
    def by_hand(p, x):
        g = ff.pmean(grad(loss)(p, x), "data")
        new = tree.map(lambda a, g: a + sign * g, p, g)
        return {"w": new["w"], "b": p["b"]} if keep else new

    return by_hand


def stale(fill):
    """Uneven rows, summed in a buffer of three; its last row may be an old one."""

    def by_hand(p, x):
        buffer = (torch.zeros if fill else torch.empty)(3, 4)
        buffer[: len(x)] = x
        return ff.psum(buffer.sum(0), "data")

    return by_hand


def stale_check(ranks):
    with poisoned():
        law(lambda p, x: x.sum(0), TWO, W, integers(5, 4), uneven=True)(ranks)


def written(p, x):
    p["b"] += 1
    return mean({"w": p["w"], "b": p["b"] - 1}, x)


unit = ff.unit(lambda p, x: x @ p["w"] + p["b"])
root = ff.unit(lambda p, x: x.sqrt() @ p["w"])


def in_units(p, x):
    return ff.value_and_grad(lambda p, x: unit(p, x).square().sum() / len(x))(p, x)


def noise(like):
    def jitter(p, x):
        g = in_units(p, x)[1]
        return tree.map(lambda g, e: g + e, g, like(g))

    return ff.shard(jitter, TWO, "data")


def on_ranks(main):
    return ff.spmd(main, TWO)()


def looked(x):
    """A sharded step of which rank 1 has a negative row."""

    def run():
        f = ff.shard(lambda p, x: root(p, x).sum(), TWO, "data")
        mine = ff.local_batch(x, TWO, "data")
        return finite(f)(ff.place(f, W, mine), mine)

    return run


BUGS = {
    "sum for mean": Bug(
        by_mean, mean, reduced(lambda g: ff.psum(g, "data")),
        "2 times too large.* a sum in the place of a mean",
    ),
    "mean for sum": Bug(
        law(total, TWO, W, X),
        lambda p, x: ff.psum(total(p, x), "data"),
        lambda p, x: ff.pmean(total(p, x), "data"),
        "2 times too small.* a mean in the place of a sum",
    ),
    "not reduced": Bug(by_mean, mean, reduced(lambda g: g), "nothing was reduced"),
    "one leaf forgotten": Bug(
        by_mean, mean,
        reduced(lambda g: {"b": g["b"], "w": ff.pmean(g["w"], "data")}),
        "'1/b'(.*\n)*.*nothing was reduced",
    ),
    "one rank's gradient": Bug(
        by_mean, mean, reduced(lambda g: ff.pbroadcast(g, "data", source=0)),
        "what the rows of rank 0 alone give: the others' are left out",
    ),
    "detached": Bug(
        by_mean, mean, reduced(lambda g: tree.map(torch.zeros_like, g)),
        "it is zero: lost",
    ),
    "unequal batches": Bug(
        law(grad(loss), TWO, W, integers(5, 4), uneven=True, tolerance=1e-5),
        uneven(True), uneven(False),
        "ranks with 3, 2 rows: unequal parts have equal weights",
    ),
    "clip before reduce": Bug(
        law(lambda p, x: clipped(norm, p, x), TWO, W, X, tolerance=1e-5),
        lambda p, x: clipped(norm, p, x, over_ranks),
        lambda p, x: over_ranks(clipped(norm, p, x)),
        r"not linear \(a clip, a norm.* ran before the reduction",
    ),
    "accumulate without division": Bug(
        law(grad(loss), TWO, W, integers(8, 4)), microbatched(4), microbatched(1),
        "4 times that of one device: .*accumulated without division",
    ),
    "an update of the wrong sign": Bug(
        law(update, TWO, W, X), updated(), updated(0.5),
        "its change is -1 times .*the wrong sign",
    ),
    "a leaf never updated": Bug(
        law(update, TWO, W, X), updated(), updated(keep=True),
        "'b'(.*\n)*it is what the call was given: never updated",
    ),
    "a stale buffer": Bug(
        stale_check, stale(True), stale(False), "unwritten memory is read",
    ),
    "a state written in place": Bug(
        by_mean, mean, written, "wrote into the state's 'b', which was not donated",
    ),
    "noise on parts": Bug(
        lambda step: check_types(step, TWO, W, X),
        noise(ff.randn_like), noise(lambda g: tree.map(torch.randn_like, g)),
        "randn_like",
    ),
    "what is not finite": Bug(
        on_ranks, looked(X.abs()), looked(torch.cat([X[:2].abs(), -X[2:].abs() - 1])),
        r"unit '<lambda>' returns nan at .* on rank 1 \{'data': 1\}",
    ),
}  # fmt: skip
