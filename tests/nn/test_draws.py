"""What is drawn for a split value is each rank's own, and for a whole one the same.

Ones are dropped, so that what is left tells the mask.
"""

import pytest
import torch
import torch.nn.functional as F

import fsfunc as ff
from fsfunc.nn import column_linear, dropout, own_draws, row_linear
from tests.checks import all_refused, close, nothing_sent, same, simulated

D, B, P = 32, 4, 0.5
X = torch.ones(B, D)


def masks(step, *args, n=2, **axes):
    """What ``step(seen, *args)`` notes on each rank, from a fixed seed, and what is
    drawn next."""

    def main():
        seen = []
        torch.manual_seed(5)
        step(seen, *args)
        return seen, torch.rand(3)

    outs = ff.spmd(main, simulated(**axes or {"model": n}))()
    for _, after in outs:
        same(after, outs[0][1])
    return [seen for seen, _ in outs]


def apart(values):
    """No two of these are equal, and they agree no more often than by chance."""
    values = [(v != 0).flatten() for v in values]
    for i, v in enumerate(values):
        for w in values[:i]:
            agree = (v == w).double().mean().item()
            assert abs(agree - 0.5) < 2 / len(v) ** 0.5  # four deviations


@ff.unit
def layer(w, x):
    """(the masks of what is split, the masks of what is one value)."""
    split = [dropout(x * w, P, "model") for _ in range(2)]
    whole = [dropout(x * w), F.dropout(x, P)]
    return split, whole


def noting(seen):
    def loss(w, x):
        found = [layer(w, x) for _ in range(2)]
        return sum(v.sum() for a, b in found for v in (*a, *b)), found

    value, g = ff.value_and_grad(loss, has_aux=True)(torch.ones(D), X)
    seen += [value[1], g]


def test_split_masks_are_independent_and_whole_ones_equal() -> None:
    outs = [found for found, _ in masks(noting, n=4)]
    apart([v for found in outs for split, _ in found for v in split])
    for found in outs:
        same([whole for _, whole in found], [whole for _, whole in outs[0]])
    apart([v for _, whole in outs[0] for v in whole])
    kept = torch.stack([v for found in outs for split, _ in found for v in split])
    assert set(kept.unique().tolist()) == {0, 1 / (1 - P)}
    assert abs((kept != 0).double().mean().item() - P) < 4 * 0.5 / kept.numel() ** 0.5


def test_outside_units_and_over_several_axes_masks_differ_where_these_do() -> None:
    def step(seen):
        with pytest.raises(KeyError), own_draws("a"):  # generators are equal again
            torch.rand(3)
            raise KeyError
        seen += [dropout(X, P, ("a", "b")), dropout(X, P, "a"), dropout(X, P)]

    both, one, whole = zip(*masks(step, a=2, b=2), strict=True)
    apart(both)
    same(one[0], one[1])
    apart([one[0], one[2]])
    same(list(whole), [whole[0]] * 4)


@pytest.mark.parametrize(
    ("policy", "seeded"),
    [(None, True), (ff.SaveAllBut(), True), (ff.SaveOnly("kept"), False)],
    ids=repr,
)
def test_a_recompute_draws_the_same(policy, seeded) -> None:
    """With values kept between and within draws, and by stock derivatives too."""

    @ff.unit
    def block(w, x):
        h = ff.checkpoint_name(F.dropout(x * w, P), "kept")
        h = ff.checkpoint_name(dropout(h * w, P, "model"), "kept")
        with own_draws("model"):
            noise = ff.checkpoint_name(torch.randint_like(x, 2), "kept")
            h = h + torch.randint_like(x, 2) * w * noise
        return F.dropout(h * w, P)

    def loss(w):
        return (block(w, X) * block(w, X + 1)).sum()

    def step(seen, wrap):
        w = 2.0 ** (torch.arange(D) % 3)  # exact, in whatever order gradients add
        grad = ff.value_and_grad(loss) if seeded else torch.func.grad(loss)
        seen.append(wrap(grad)(w))

    plain = masks(step, lambda f: f)
    same(masks(step, lambda f: ff.remat(f, policy)), plain)
    by_rank = [ff.tree.leaves(seen)[-1] for seen in plain]
    assert not torch.equal(*by_rank)


ORDERS = {
    "plain": lambda f, mesh: ff.shard(f, mesh, "data"),
    "remat inside": lambda f, mesh: ff.shard(ff.remat(f), mesh, "data"),
    "remat outside": lambda f, mesh: ff.remat(ff.shard(f, mesh, "data")),
}


def trained(wrap, axes, parts):
    """Gradients of a split pair of products, and the masks between them, by rank."""
    mesh, seen = simulated(**axes), []

    @ff.unit
    def block(p, x):
        h = dropout(column_linear(x, p["up"]), P, "model")
        seen.append((ff.axis_index("data"), ff.axis_index("model"), h.detach() != 0))
        return F.dropout(row_linear(h, p["down"]), P)

    def loss(p, x):
        return block(p, x).square().mean()

    layouts = {"up": ff.Split(0, "model"), "down": ff.Split(1, "model")}
    params = {"up": torch.ones(D, 3), "down": torch.ones(2, D)}

    def main():
        torch.manual_seed(7)
        grad = ff.value_and_grad(loss)
        step = wrap(ff.accumulate(grad, parts) if parts > 1 else grad, mesh)
        x = torch.arange(8.0 * 3).view(8, 3) + 1
        rows = ff.local_batch(x, mesh, "data")
        placed = ff.place(step, params, rows, layouts=layouts)
        seen.clear()  # of what was recorded
        return ff.unshard(step(placed, rows))

    outs = ff.spmd(main, mesh)()
    for out in outs:
        same(out, outs[0])
    return outs[0], seen


def test_every_order_of_transforms_draws_the_same() -> None:
    """So do two ranks, and one rank with two microbatches: whose data they are."""
    two, one = {"data": 2, "model": 2}, {"data": 1, "model": 2}
    expected, seen = trained(ORDERS["plain"], two, 1)
    apart([mask for _, _, mask in seen])
    for order, axes, parts in (
        ("remat inside", two, 1),
        ("remat outside", two, 1),
        ("plain", one, 2),
        ("remat inside", one, 2),
    ):
        close(trained(ORDERS[order], axes, parts)[0], expected, 1e-6)


def test_under_torch_func_and_in_attention() -> None:
    """The second derivative of the cube of a dropped one: 6 / (1-p)^3, or 0."""

    def step(seen):
        def cube(x):
            return (dropout(x, P, "model") ** 3).sum()

        def slope(x):
            return torch.func.grad(cube)(x).sum()

        dropped = lambda x: dropout(x, P, "model")  # noqa: E731
        seen.append(torch.func.grad(slope)(X))
        for randomness in ("same", "different"):
            seen.append(torch.func.vmap(dropped, randomness=randomness)(X))
        with own_draws("model"):
            q = X.view(1, 1, B, D)
            seen.append(F.scaled_dot_product_attention(q, q, q, dropout_p=P))

    first, second = masks(step)
    assert set(torch.stack([first[0], second[0]]).unique().tolist()) == {0, 48}
    apart([first[0], second[0]])
    apart([first[2], second[2]])
    same(
        [seen[1][0] for seen in (first, second)],
        [seen[1][1] for seen in (first, second)],
    )
    assert not torch.equal(first[3], second[3])


@pytest.mark.parametrize("axis", [None, "model"])
def test_one_rank_and_no_axis_are_torchs_dropout(axis) -> None:
    def drawn(fn):
        torch.manual_seed(0)
        with nothing_sent():
            return fn(), torch.rand(2)

    expected = drawn(lambda: F.dropout(X, 0.25))
    main = ff.spmd(lambda: drawn(lambda: dropout(X, 0.25, axis)), simulated(model=1))
    same(main()[0], expected)


def test_evaluation_draws_nothing() -> None:
    def main():
        state = torch.get_rng_state()
        assert dropout(X, P, "model", training=False) is X
        same(torch.get_rng_state(), state)

    ff.spmd(main, simulated(model=2))()


test_bad_input_is_refused = all_refused({
    "p": (lambda: dropout(X, 1.5), ValueError, "p=1.5 is no probability"),
    "an axis": (ff.spmd(lambda: dropout(X, P, "column"), simulated(model=2)),
        ValueError, 'unknown axis "column"'),
    "vmap": (ff.spmd(lambda: dropout(X, P, "model"), ff.make_mesh({"model": 2},
        "vmap")), ValueError,
        'one call draws for all ranks; make the mesh "simulated"'),
})  # fmt: skip
