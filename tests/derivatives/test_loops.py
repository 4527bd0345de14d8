"""Gradients in a loop over rows: the type check refuses what would be a mean too early.

Each gradient is the ranks' mean, of a row of every rank: what is not linear in it is
not what one device makes of one row. ``step(w, x)`` gets matrices "a" and "b", and this
rank's rows, several.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad

import fsfunc as ff
from fsfunc import tree
from fsfunc.tracing.rules import RowsApart
from tests import checks
from tests.derivatives.judging import MESHES, W, X, by_turns, on
from tests.derivatives.worlds import by_units, unit

each = tree.map
ADAM = ff.sharded_adam(0.1)


def slope(w, x, loss=by_units):
    return ff.value_and_grad(loss)(w, x)[1]


def clipped(g):
    factor = (1 / ff.global_norm(g)).clamp(max=1)
    return each(lambda g: g * factor, g)


def total(trees):
    return each(lambda *gs: sum(gs), *trees)


def over(rows, change=clipped, of=slope):
    """Per-sample clipping, as DP-SGD has it, in a loop over what ``rows`` gives."""
    return lambda w, x: total([change(of(w, row)) for row in rows(x)])


def running(w, x):
    out = each(torch.zeros_like, w)
    for row in x.split(1):
        factor = (1 / ff.global_norm(g := slope(w, row))).clamp(max=1)
        out = each(lambda a, b, c=factor: a + c * b / len(x), out, g)
    return out


def by_closure(w, x):
    def one(row):
        return ff.value_and_grad(lambda w: by_units(w, row))(w)[1]

    return total([clipped(one(row)) for row in x.split(1)])


def by_losses(w, x):
    """One forward pass, and the gradient of each row's loss of its own."""
    w = each(lambda a: a.detach().requires_grad_(), w)
    losses = unit(w["b"], unit(w["a"], x)).square().mean(1)
    leaves, treedef = tree.flatten(w)
    found = []
    for i in range(len(x)):
        gs = torch.autograd.grad(losses[i], leaves, retain_graph=True)
        found.append([torch.tanh(g) for g in gs])
    return tree.unflatten(treedef, [sum(gs) for gs in zip(*found, strict=True)])


def as_pairs(w, x):
    loss = lambda w, xy: (by_units(w, xy["x"]) - xy["y"].mean()).square()  # noqa: E731
    pairs = zip(x.split(1), x[:, :1].split(1), strict=True)
    return total([clipped(slope(w, {"x": a, "y": b}, loss)) for a, b in pairs])


def own_steps(w, x):
    """Each row's own step (MAML by a loop over tasks)."""

    def outer(w):
        losses = []
        for row in x.split(1):
            g = slope(w, row)
            losses.append(by_units(each(lambda a, g: a - 0.1 * g, w, g), row * 2))
        return sum(losses) / len(losses)

    return ff.value_and_grad(outer)(w)[1]


def by_values(w, x):
    """Of each row's loss, which is a mean as its gradient is."""
    return sum(ff.value_and_grad(by_units)(w, row)[0].exp() for row in x.split(1))


def by_transformation(w, x):
    clip = ff.chain(ff.clip_by_global_norm(0.1))
    found = []
    for row in x.split(1):
        found.append(clip.update(slope(w, row), clip.init(w), w)[0])
    return total(found)


def by_stock(w, x):
    return total([clipped(grad(by_units)(w, row)) for row in x.split(1)])


def noise_of(rows):
    """The product of two gradients, each of some rows."""

    def noise(w, x):
        one, other = (slope(w, some) for some in rows(x))
        return ff.tree_sum(each(torch.mul, one, other))

    return noise


# What the ranks' means make of it is not what one device does.
# (`drawn_loops` has other ways to reach rows, to change gradients and to join them.)
REFUSED = {
    "iterated": over(lambda x: [row[None] for row in x]),
    "windows": over(lambda x: [x[:3], x[2:]]),
    "strides": over(lambda x: [x[::2], x[1::2]]),
    "cast": over(lambda x: [x.float().double()[i : i + 1] for i in (0, 1)]),
    "rectified": over(lambda x: x.split(1), lambda g: each(F.relu, g)),
    "running": running,
    "closure": by_closure,
    "losses": by_losses,
    "pairs": as_pairs,
    "own steps": own_steps,
    "values": by_values,
    "reordered": over(lambda x: [x[:1], x.flip(0)[:1], x.roll(2, 0)[:1]]),
    "reordered multiples": over(
        lambda x: [x.roll(1, 0)[:1], x.roll(2, 0)[:1]],
        lambda g: clipped(each(lambda g: g * torch.tensor(2.0), g)),
    ),
    "indexed": noise_of(lambda x: [x[torch.tensor([i])] for i in (0, 1)]),
    "selected": noise_of(
        lambda x: [x.index_select(0, torch.tensor([i])) for i in (0, 1)]
    ),
    "paired indices": noise_of(
        lambda x: [x[torch.tensor([[i]]), torch.arange(x.shape[1])] for i in (0, 1)]
    ),
    "weighed": noise_of(
        lambda x: [
            (torch.eye(len(x), dtype=x.dtype)[i][:, None] * x).sum(0, keepdim=True)
            for i in (0, 1)
        ]
    ),
    "weighed in a product": noise_of(
        lambda x: [torch.eye(len(x), dtype=x.dtype)[i : i + 1] @ x for i in (0, 1)]
    ),
    "weighed behind": noise_of(
        lambda x: [(x.T @ torch.eye(len(x), dtype=x.dtype)[i])[None] for i in (0, 1)]
    ),
    "weighed by einsum": noise_of(
        lambda x: [
            torch.einsum("r,rc->c", torch.eye(len(x), dtype=x.dtype)[i], x)[None]
            for i in (0, 1)
        ]
    ),
    "transformation": by_transformation,
    "stock": by_stock,
}


def critic(w, x):
    """Parameters change between."""
    for row in x.split(1):
        w = each(lambda a, g: a - 0.1 * g, w, clipped(slope(w, row)))
    return w


def critic_by_adam(w, x):
    state = ADAM.init(w)
    for row in x.split(1):
        w, state = ADAM.apply(slope(w, row), state, w)
    return w


def support_and_query(w, x):
    support, query = x.chunk(2)

    def outer(w):
        g = slope(w, support)
        return by_units(each(lambda a, g: a - 0.1 * g, w, g), query)

    return clipped(ff.value_and_grad(outer)(w)[1])


def noise_of_halves(w, x):
    """Halves of a batch are halves on every rank."""
    one, other = (slope(w, rows) for rows in x.chunk(2))
    return ff.tree_sum(each(torch.mul, one, other))


def by_hand(w, x):
    """Accumulation: a sum, and then anything."""
    gs = [slope(w, row) for row in x.split(1)]
    return clipped(each(lambda g: g / len(x), total(gs)))


def by_hand_stacked(w, x):
    gs = [slope(w, row) for row in x.split(1)]
    return clipped(each(lambda *gs: torch.stack(gs).sum(0) / len(x), *gs))


def two_models(w, x):
    """Each by its own rows."""
    one, other = x.chunk(2)
    loss = lambda w, x: unit(w, x).square().mean()  # noqa: E731
    gs = {"a": slope(w["a"], one, loss), "b": slope(w["b"], other, loss)}
    return ff.global_norm(clipped(gs))


def accumulated(w, x):
    f = ff.accumulate(ff.value_and_grad(by_units), 2)
    return clipped(f(w, x)[1])


def local_rows(w, x):
    """Per-sample gradients where they are this rank's own."""

    def body(w, x):
        each_row = [ff.value_and_grad(by_units)(w, row)[1] for row in x.split(1)]
        return {k: sum(torch.tanh(g[k]) for g in each_row) / len(x) for k in w}

    return ff.reduce_like(ff.unit(body, whole=True)(w, x), w)


ALLOWED = {
    f.__name__: f
    for f in (
        critic, critic_by_adam, support_and_query, noise_of_halves, by_hand,
        by_hand_stacked, two_models, accumulated, local_rows,
    )
}  # fmt: skip


pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


# What means something for whole tensors alone.
OF_WHOLE = {"by_hand_stacked"}
ONE_ROW = ["by_hand", "critic", "critic_by_adam"]


def run(step, n, zero, rows=4):
    return on(n, zero, step, x=X[: rows * n])


@by_turns(REFUSED, (None, 0, 3))
def test_what_is_a_mean_too_early_is_refused(name, zero):
    with pytest.raises(RowsApart, match="other rows of .*ff.reduce_like.*whole=True"):
        run(REFUSED[name], 2, zero)


@pytest.mark.parametrize("name", ["iterated", "own steps", "closure", "stock"])
def test_a_loop_over_one_row_is_a_loop(name):
    """With one row a rank nothing meets; over all ranks' rows it would."""
    with pytest.raises(RowsApart, match="whole=True"):
        run(REFUSED[name], 2, 3, rows=1)


@by_turns(ALLOWED, (None, 0, 3))
def test_what_is_none_runs(name, zero):
    run(ALLOWED[name], 2, None if name in OF_WHOLE else zero)
    if name in ONE_ROW:
        run(ALLOWED[name], 2, 3, rows=1)


@pytest.mark.parametrize("name", list(REFUSED)[::3])
def test_on_one_rank_each_gradient_is_of_its_row(name):
    (found,) = run(REFUSED[name], 1, 3)
    checks.close(tree.leaves(found), tree.leaves(REFUSED[name](W, X[:4])), 1e-9)


def test_the_way_out_is_right():
    """Per-sample clipping in a loop, in a unit that has the parameters to itself."""

    def private(w, x):
        body = ff.unit(lambda w, x: running(w, x), whole=True)
        return ff.reduce_like(body(w, x), w)

    right = running(W, X[:8])
    for zero in (0, 3):
        for found in run(private, 2, zero):
            checks.close(found, right, 1e-9)


def test_placing_a_step_that_loops_by_library_functions_checks_it():
    """Where nobody but the library reads gradients, types are else not looked at."""
    clip = ff.chain(ff.clip_by_global_norm(0.1))

    def step(w, x):
        state, found = clip.init(w), []
        for row in x.split(1):
            found.append(clip.update(slope(w, row), state, w)[0])
        return ff.tree_sum(found)

    with pytest.raises(RowsApart):
        mesh = MESHES[2]
        ff.spmd(lambda: ff.place(ff.shard(step, mesh, "data"), W, X[:3]), mesh)()
