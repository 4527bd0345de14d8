"""Bugs of layers that ranks share, of collectives with a transpose, of schedules."""

import torch
from torch.func import grad

import fsfunc as ff
from fsfunc.testing import check_collective, integers
from tests.testing.planted import MODEL, TWO, Bug, law

W, X = integers(4, 4, seed=3), integers(4, 4, seed=4)
BOTH = {"w": W, "b": integers(4, seed=5)}


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


def row_parallel(bias_on):
    """x @ w + b, of which a rank has rows of w."""

    def layer(p, x):
        y = part(x, 1) @ part(p["w"], 0)
        y = y + p["b"] if bias_on == "every rank" else y
        y = ff.psum(y, "model")
        return y if bias_on == "every rank" else y + p["b"]

    return layer


def column_parallel(enters):
    """The gradient by the input of x @ w, of which a rank has columns of w."""

    def by_input(w, x):
        def loss(x):
            x = ff.pcast(x, "model", to="V") if enters else x
            return (x @ part(w, 1)).square().sum()

        return grad(loss)(x)

    return by_input


def softmax_split(agrees):
    """A softmax over columns of which a rank has a part."""

    def layer(w, x):
        e = (x @ part(w, 1) / 4).exp()
        total = e.sum(1, keepdim=True)
        total = ff.psum(total, "model") if agrees else total
        return ff.all_gather(e / total, "model", dim=1)

    return layer


def tied(times):
    """A leaf that both stages read; each has its own half of the gradient."""

    def by_tied(w, x):
        own = grad(lambda w: (x[ff.axis_index("model") :: 2] @ w).square().sum())(w)
        for _ in range(times):
            own = ff.psum(own, "model")
        return own

    return by_tied


# Sequences and experts


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


def causal(x, keys, first):
    mask = first + torch.arange(len(x))[:, None] >= torch.arange(len(keys))
    return torch.where(mask, x @ keys.T, 0) @ keys


def ring_attention(offset):
    def attend(w, x):
        first = len(x) * ff.axis_index("data") if offset else 0
        return causal(x, ff.all_gather(x, "data"), first)

    return attend


def experts(capacity):
    """Rows go to the rank of their expert, as many as it has room for."""

    def route(w, x):
        y = torch.zeros_like(x)
        y[:capacity] = x[:capacity] @ w
        return y

    return route


def exchanged(split, joined):
    """From rows to columns, and back as rows."""

    def there_and_back(w, x):
        y = ff.all_to_all(x, "data", split_dim=1, concat_dim=0)
        return ff.all_to_all(y * 2, "data", split_dim=split, concat_dim=joined)

    return there_and_back


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


# Schedules

RIGHT = ["F0 F1 B0 B1", "F0 B0 F1 B1"]
BACK = "RB0<1 B0 RB1<1 B1"
THERE = "RF0<0 F0 RF1<0 F1 B0 SB0>0 B1 SB1>0"


BUGS = {
    "gather on the wrong dim": Bug(
        on_model(lambda w, x: w, W, X), gathered(1), gathered(0),
        "right elements in another order: parts joined along another dim",
    ),
    "gather on the wrong dim, seen by shape": Bug(
        on_model(lambda w, x: w, W, X), gathered_long(1), gathered_long(0),
        "dim 0 is 2 times too long.* along another dim",
    ),
    "a bias on every rank of a row-parallel layer": Bug(
        on_model(lambda p, x: x @ p["w"] + p["b"], BOTH, X),
        row_parallel("one"), row_parallel("every rank"),
        "'b' is in it once too often: as if added on every rank",
    ),
    "a column-parallel layer's input does not enter": Bug(
        on_model(lambda w, x: grad(lambda x: (x @ w).square().sum())(x), W, X),
        column_parallel(True), column_parallel(False), "a psum is missing",
    ),
    "softmax over a split dim": Bug(
        on_model(lambda w, x: (x @ w / 4).softmax(1), W, X, tolerance=1e-5),
        softmax_split(True), softmax_split(False),
        'a softmax, norm or mean ran over a dim that is split over "model"',
    ),
    "tied weights' gradient summed twice": Bug(
        on_model(lambda w, x: grad(lambda w: (x @ w).square().sum())(w), W, X),
        tied(1), tied(2), "2 times too large.*reduced twice",
    ),
    "ring pieces in order of arrival": Bug(
        law(lambda w, x: x, TWO, W, X), ring(True), ring(False),
        "on rank 1: it has the right elements in another order",
    ),
    "a causal mask that starts anew on each rank": Bug(
        law(lambda w, x: causal(x, x, 0), TWO, W, X,
            whole=lambda y: ff.all_gather(y, "data")),
        ring_attention(True), ring_attention(False), "positions or mask.* an offset",
    ),
    "expert capacity overflows silently": Bug(
        law(lambda w, x: x @ w, TWO, W, integers(6, 4, seed=5),
            whole=lambda y: ff.all_gather(y, "data")),
        experts(3), experts(2), "2, 5 of dim 0 are zero.*dropped .a capacity",
    ),
    "all_to_all turned about": Bug(
        law(lambda w, x: 2 * x, TWO, W, X, whole=lambda y: ff.all_gather(y, "data")),
        exchanged(0, 1), exchanged(1, 0),
        "in another shape: one dim was cut where another is to be",
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
    "a schedule whose backwards come before what they need": Bug(
        ff.verify, RIGHT, ["F0 F1 B0 B1", "F0 B1 F1 B0"],
        "rank 1: B1@1 comes before F1@1, which it needs",
    ),
    "a schedule that waits for itself": Bug(
        ff.verify, RIGHT, ["F0 B0 F1 B1", "F0 F1 B0 B1"],
        "deadlock: no rank can go on(.*\n)*.*waits for",
    ),
    "a schedule that swaps two sends": Bug(
        ff.verify, [f"F0 SF0>1 F1 SF1>1 {BACK}", THERE],
        [f"F0 F1 SF1>1 SF0>1 {BACK}", THERE],
        "rank 1 posts RF0@1<0 where rank 0 sends SF1@0>1: .* in the order in which",
    ),
    "a schedule that leaves a microbatch out": Bug(
        ff.verify, RIGHT, ["F0 F1 B0 B1", "F0 F1 B0"],
        "microbatch 1 of stage 1 needs",
    ),
}  # fmt: skip
