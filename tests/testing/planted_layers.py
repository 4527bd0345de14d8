"""Bugs of layers that ranks share, and of collectives with a transpose."""

import torch
from torch.func import grad

import fsfunc as ff
from fsfunc.testing import check_collective, integers
from tests.testing.planted import MODEL, TWO, Bug, law

W, X = integers(4, 4, seed=3), integers(4, 4, seed=4)


def part(w, dim, axis="model"):
    return w.chunk(ff.axis_size(axis), dim)[ff.axis_index(axis)]


def on_model(step, state, *batch, **how):
    """Law 1 over an axis whose ranks share one batch."""
    return law(step, MODEL, state, *batch, **{"axis": (), **how})


# What ranks have of a weight


def gathered(dim):
    def whole(w, x):
        return ff.all_gather(part(w, 1), "model", dim=dim).reshape(4, 4)

    return whole


def gathered_long(dim):
    return lambda w, x: ff.all_gather(part(w, 1), "model", dim=dim)


def column_parallel(enters):
    """The gradient by the input of x @ w, of which a rank has columns of w."""

    def by_input(w, x):
        def loss(x):
            x = ff.pcast(x, "model", to="V") if enters else x
            return (x @ part(w, 1)).square().sum()

        return grad(loss)(x)

    return by_input


# Sequences


def ring(follows):
    """The pieces of a sequence, as they come around a ring."""

    def collect(w, x):
        n, mine = ff.axis_size("data"), ff.axis_index("data")
        pieces, held = [x], x
        for _ in range(n - 1):
            held = ff.ppermute(held, "data", [(i, (i + 1) % n) for i in range(n)])
            pieces.append(held)
        if follows:
            pieces = [pieces[(mine - i) % n] for i in range(n)]
        return torch.cat(pieces)

    return collect


# Collectives with a transpose of one's own


def collective(forward, backward, dual=True, mapped=True):
    """An ``autograd.Function`` as a user writes it."""

    class Own(torch.autograd.Function):
        generate_vmap_rule = mapped

        @staticmethod
        def forward(x):
            return forward(x)

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, g):
            return again(g)

        if dual:

            @staticmethod
            def jvp(ctx, t):
                return forward(t)

    def again(g):
        return collective(backward, forward, dual, mapped)(g)

    return lambda x: Own.apply(x)


def psum(x):
    return ff.psum(x, "data", to="V")


def same(x):
    return x.clone()


def gather(x):
    return ff.all_gather(x, "data")


def scatter(x):
    return ff.psum_scatter(x, "data")


def own_part(x):
    return part(x, 0, "data")


def around(step):
    def shift(x):
        n = ff.axis_size("data")
        return ff.ppermute(x, "data", [(i, (i + step) % n) for i in range(n)])

    return shift


def is_collective(to="V", of="V", **how):
    how = {"sizes": (2, 3), "shape": (6, 2), **how}
    return lambda fn: check_collective(fn, to=to, of=of, **how)


BUGS = {
    "gather on the wrong dim": Bug(
        on_model(lambda w, x: w, W, X), gathered(1), gathered(0),
        "right elements in another order: parts joined along another dim",
    ),
    "gather on the wrong dim, seen by shape": Bug(
        on_model(lambda w, x: w, W, X), gathered_long(1), gathered_long(0),
        "dim 0 is 2 times too long.* along another dim",
    ),
    "a column-parallel layer's input does not enter": Bug(
        on_model(lambda w, x: grad(lambda x: (x @ w).square().sum())(x), W, X),
        column_parallel(True), column_parallel(False), "a psum is missing",
    ),
    "ring pieces in order of arrival": Bug(
        law(lambda w, x: x, TWO, W, X), ring(True), ring(False),
        "on rank 1: it has the right elements in another order",
    ),
    "psum transposed to psum": Bug(
        is_collective(to="I"), collective(psum, same), collective(psum, psum),
        "transpose of .* 2 times too large: it sums over ranks what is one value",
    ),
    "gather transposed to its own slice": Bug(
        is_collective(), collective(gather, scatter), collective(gather, own_part),
        "transpose of .*is wrong",
    ),
    "gather of one value transposed to a scatter": Bug(
        is_collective(to="I"), collective(gather, own_part),
        collective(gather, scatter), "2 times too large: it sums over ranks",
    ),
    "a ring whose way back is its way there": Bug(
        is_collective(), collective(around(1), around(-1)),
        collective(around(1), around(1)), "size 3, is wrong.*moves, or sums, something",
    ),
    "a collective that loses its cotangent": Bug(
        is_collective(to="I"), collective(psum, same),
        collective(psum, torch.zeros_like), "it loses the cotangent",
    ),
    "a collective that is not linear": Bug(
        is_collective(to="I"), collective(psum, same),
        collective(lambda x: psum(x).clamp(max=1e6), same), "is not linear",
    ),
    "a collective without a jvp": Bug(
        is_collective(), collective(gather, scatter),
        collective(gather, scatter, dual=False), "cannot be taken under jvp",
    ),
    "a collective without a vmap rule": Bug(
        is_collective(), collective(gather, scatter),
        collective(gather, scatter, mapped=False), "cannot be taken under vmap",
    ),
    "one value that is not": Bug(
        is_collective(to="I"), lambda x: ff.psum(x, "data"), lambda x: 2 * x,
        "what it returns of .* one value on all ranks, and differs between ranks 0",
    ),
}  # fmt: skip
