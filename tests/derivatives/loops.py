"""Steps that take gradients in a loop over rows: what means something, and what not.

``step(w, x)`` gets matrices "a" and "b", and this rank's rows, several.
"""

import torch
import torch.nn.functional as F
from torch.func import grad

import fsfunc as ff
from fsfunc import tree
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


def by_index(x):
    return [x[i : i + 1] for i in range(len(x))]


def running(w, x):
    out = each(torch.zeros_like, w)
    for row in x.split(1):
        factor = (1 / ff.global_norm(g := slope(w, row))).clamp(max=1)
        out = each(lambda a, b, c=factor: a + c * b / len(x), out, g)
    return out


def in_place(w, x):
    out = each(torch.zeros_like, w)
    for row in x.split(1):
        out = each(lambda a, b: a.add_(b), out, clipped(slope(w, row)))
    return out


def into_a_buffer(w, x):
    norms = torch.zeros(len(x), dtype=x.dtype)
    for i, row in enumerate(x.split(1)):
        norms[i] = ff.global_norm(slope(w, row))
    return norms


def stacked(w, x):
    return torch.stack([ff.global_norm(slope(w, row)) for row in x.split(1)])


def by_closure(w, x):
    def one(row):
        return ff.value_and_grad(lambda w: by_units(w, row))(w)[1]

    return total([clipped(one(row)) for row in x.split(1)])


def by_units_first(w, x):
    h = unit(w["a"], x)
    last = lambda w, row: unit(w["b"], row).square().mean()  # noqa: E731
    return total([clipped(slope({"b": w["b"]}, row, last)) for row in h.split(1)])


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


def outer_gradients(w, x):
    """The same, with the outer gradients added up."""

    def outer(w, row):
        g = slope(w, row)
        return by_units(each(lambda a, g: a - 0.1 * g, w, g), row * 2)

    return total([slope(w, row, outer) for row in x.split(1)])


def two_own_steps(w, x):
    """Reptile: two steps on each row, and the mean of where they end."""
    ends = []
    for row in x.split(1):
        v = w
        for _ in range(2):
            v = each(lambda a, g: a - 0.1 * g, v, slope(v, row))
        ends.append(v)
    return total(ends)


def copied_parameters(w, x):
    found = []
    for row in x.split(1):
        found.append(clipped(slope(each(torch.clone, w), row)))
    return total(found)


def masked_parameters(w, x):
    """The same value, made anew for each row."""
    some = lambda: each(lambda a: a * 0.5, w)  # noqa: E731
    return total([clipped(slope(some(), row)) for row in x.split(1)])


def made_rows(w, x):
    """Rows of one value, made anew for each of them."""
    return total([clipped(slope(w, (x * 2)[i : i + 1])) for i in range(len(x))])


def by_transformation(w, x):
    clip = ff.chain(ff.clip_by_global_norm(0.1))
    found = []
    for row in x.split(1):
        found.append(clip.update(slope(w, row), clip.init(w), w)[0])
    return total(found)


def weighed_by_loss(w, x):
    found = []
    for row in x.split(1):
        value, g = ff.value_and_grad(by_units)(w, row)
        found.append(each(lambda g, v=value: g * v.exp(), g))
    return total(found)


def by_stock(w, x):
    return total([clipped(grad(by_units)(w, row)) for row in x.split(1)])


def squared(g):
    return each(torch.square, g)


def signed(g):
    return each(torch.sign, g)


def by_hinge(g):
    return each(lambda g: F.relu(g), g)


# What the ranks' means make of it is not what one device does.
REFUSED = {
    "split": over(lambda x: x.split(1)),
    "slices": over(by_index),
    "rows": over(lambda x: [x[i][None] for i in range(len(x))]),
    "unbound": over(lambda x: [row[None] for row in x.unbind()]),
    "iterated": over(lambda x: [row[None] for row in x]),
    "chunks": over(lambda x: x.chunk(2)),
    "windows": over(lambda x: [x[:3], x[2:]]),
    "strides": over(lambda x: [x[::2], x[1::2]]),
    "turned": over(lambda x: [x.T[:, i : i + 1].T for i in range(len(x))]),
    "picked": over(lambda x: [x[[i]] for i in range(len(x))]),
    "selected": over(lambda x: [x.index_select(0, torch.tensor([i])) for i in (0, 1)]),
    "cast": over(lambda x: [x.float().double()[i : i + 1] for i in (0, 1)]),
    "squared": over(by_index, squared),
    "signed": over(by_index, signed),
    "rectified": over(by_index, by_hinge),
    "running": running,
    "in place": in_place,
    "into a buffer": into_a_buffer,
    "stacked": stacked,
    "closure": by_closure,
    "units first": by_units_first,
    "losses": by_losses,
    "pairs": as_pairs,
    "own steps": own_steps,
    "outer gradients": outer_gradients,
    "two own steps": two_own_steps,
    "copied parameters": copied_parameters,
    "masked parameters": masked_parameters,
    "made rows": made_rows,
    "transformation": by_transformation,
    "weighed by loss": weighed_by_loss,
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


def critic_in_place(w, x):
    w = each(torch.clone, w)
    for row in x.split(1):
        g = clipped(slope(w, row))
        w = each(lambda a, g: a.sub_(0.1 * g), w, g)
    return w


def support_and_query(w, x):
    support, query = x.chunk(2)

    def outer(w):
        g = slope(w, support)
        return by_units(each(lambda a, g: a - 0.1 * g, w, g), query)

    return clipped(ff.value_and_grad(outer)(w)[1])


def by_hand(w, x):
    """Accumulation: a sum, and then anything."""
    gs = [slope(w, row) for row in x.split(1)]
    return clipped(each(lambda g: g / len(x), total(gs)))


def by_hand_running(w, x):
    mean = each(torch.zeros_like, w)
    for i, row in enumerate(x.split(1), 1):
        mean = each(lambda m, g, i=i: m + (g - m) / i, mean, slope(w, row))
    m = each(lambda g: 0.9 * g, mean)
    v = each(lambda g: g * g, mean)
    return each(lambda w, m, v: w - m / (v.sqrt() + 1e-8), w, m, v)


def by_hand_lists(w, x):
    leaves, treedef = tree.flatten(w)
    sums = [torch.zeros_like(a) for a in leaves]
    for row in x.split(1):
        torch._foreach_add_(sums, tree.leaves(slope(w, row)), alpha=1 / len(x))
    return clipped(tree.unflatten(treedef, sums))


def by_hand_stacked(w, x):
    gs = [slope(w, row) for row in x.split(1)]
    return clipped(each(lambda *gs: torch.stack(gs).sum(0) / len(x), *gs))


def by_hand_guarded(w, x):
    """A row whose gradient is not finite counts for nothing."""
    gs = []
    for row in x.split(1):
        g = slope(w, row)
        ok = torch.isfinite(ff.global_norm(g))
        gs.append(each(lambda g, ok=ok: torch.where(ok, g, 0.0), g))
    return clipped(total(gs))


def by_hand_and_losses(w, x):
    found = [ff.value_and_grad(by_units)(w, row) for row in x.split(1)]
    return torch.stack([v for v, _ in found]).max(), clipped(total(g for _, g in found))


def two_losses(w, x):
    """Gradients of several losses on the same rows."""
    one = slope(w, x)
    other = slope(w, x, lambda w, x: by_units(w, x).exp())
    return total([clipped(one), clipped(other)])


def two_losses_by_columns(w, x):
    """What is cut along features is no row."""
    mask = torch.ones(3, dtype=x.dtype)
    one = slope(w, x, lambda w, x: by_units(w, x[:, :1] * mask))
    other = slope(w, x, lambda w, x: by_units(w, x[:, 1:2] * mask))
    return total([clipped(one), clipped(other)])


def two_models(w, x):
    """Each by its own rows."""
    one, other = x.chunk(2)
    loss = lambda w, x: unit(w, x).square().mean()  # noqa: E731
    gs = {"a": slope(w["a"], one, loss), "b": slope(w["b"], other, loss)}
    return ff.global_norm(clipped(gs))


def two_optimizers(w, x):
    one, other = x.chunk(2)
    loss = lambda w, x: unit(w, x).square().mean()  # noqa: E731
    a, _ = ADAM.apply(slope(w["a"], one, loss), ADAM.init(w["a"]), w["a"])
    b, _ = ADAM.apply(slope(w["b"], other, loss), ADAM.init(w["b"]), w["b"])
    return {"a": a, "b": b}


def penalised(w, x):
    slopes = [ff.value_and_grad(lambda r: by_units(w, r))(r)[1] for r in x.split(1)]
    steep = lambda w: sum((g.norm() - 1) ** 2 for g in slopes) * by_units(w, x)  # noqa: E731
    return clipped(ff.value_and_grad(steep)(w)[1])


def sharpness_aware(w, x):
    up = each(lambda a, g: a + 0.1 * g, w, clipped(slope(w, x)))
    return clipped(slope(up, x))


def half_of_it_bent(w, x):
    """One part clipped, one not: what is made of both may be anything."""
    one, other = x.chunk(2)
    g = total([clipped(slope(w, one)), slope(w, other)])
    return each(lambda g: g / (g * g + 1).sqrt(), g)


def alignment(w, x):
    """How far the gradients of two halves agree."""
    one, other = (slope(w, part) for part in x.chunk(2))
    return ff.tree_sum(each(torch.mul, one, other))


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
        critic, critic_by_adam, critic_in_place, support_and_query, by_hand,
        by_hand_running, by_hand_lists, by_hand_stacked, by_hand_guarded,
        by_hand_and_losses, two_losses, two_losses_by_columns, two_models,
        two_optimizers, penalised, sharpness_aware, half_of_it_bent, alignment,
        accumulated, local_rows,
    )
}  # fmt: skip
