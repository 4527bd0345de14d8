"""Shampoo is the paper's formula on any mesh, its state on the owners alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from fsfunc.sharded.leaf import is_sharded
from tests.optim.matrices import UNITS, drawn, trained
from tests.optim.trees import assert_near

HOW = st.fixed_dictionaries(
    {"block": st.sampled_from([3, 1024])},
    optional={
        "momentum": st.just(0.9),
        "b2": st.just(0.5),
        "interval": st.just(2),
        "weight_decay": st.just(0.1),
    },
)


def root(matrix):
    """To the power -1/4, by singular values, of eps at least."""
    u, s, v = torch.linalg.svd(matrix)
    return u @ torch.diag(s.clamp(min=1e-4) ** -0.25) @ v


def formula(w, grads, block, momentum=0.0, b2=1.0, interval=1, weight_decay=0.0):
    """One matrix after the gradients, as the paper's algorithm says, in float64."""
    w = w.double()
    for rows in w.split(block, 0):
        for x in rows.split(block, 1):
            left, right = (1e-4 * torch.eye(n, dtype=torch.float64) for n in x.shape)
            start = [x.storage_offset() // w.shape[1], x.storage_offset() % w.shape[1]]
            v = torch.zeros_like(x)
            for i, g in enumerate(grads):
                g = g.double()
                for dim in (0, 1):
                    g = g.narrow(dim, start[dim], x.shape[dim])
                weight = 1 if b2 == 1 else 1 - b2
                left = b2 * left + weight * g @ g.T
                right = b2 * right + weight * g.T @ g
                if i % interval == 0:
                    roots = root(left), root(right)
                v = momentum * v + roots[0] @ g @ roots[1]
                x -= 0.1 * weight_decay * x + 0.1 * v
    return w


@settings(max_examples=4)
@given(
    shapes=UNITS,
    how=HOW,
    n=st.integers(1, 4),
    zero=st.integers(0, 3),
    donated=st.booleans(),
)
def test_it_is_the_formula_on_any_mesh(shapes, how, n, zero, donated):
    optimizer, mesh = ff.shampoo(0.1, **how), ff.make_mesh({"data": n}, "simulated")

    def transform(step):
        step = ff.shard(step, mesh, "data", zero=zero)
        return ff.donate(step) if donated else step

    def main():
        return trained(optimizer, shapes, steps=3, transform=transform)

    with ff.ledger() as log:
        found = ff.spmd(main, mesh)()
    grads = [drawn(shapes, i + 1) for i in range(3)]
    expected = tree.map(
        lambda w, *grads: formula(w, grads, **how).float() if w.numel() else w,
        drawn(shapes, 0),
        *grads,
    )
    held = 0
    for params, state in found:
        assert_near(expected, params, 1e-4)
        kept = tree.leaves(state.opt_state.preconditioners, is_sharded)
        held += sum((x.local if is_sharded(x) else x).numel() for x in kept)
    whole = sum(
        2 * (r**2 + c**2)
        for unit in shapes
        for rows, columns in unit
        for block in [how["block"]]
        for r in [min(block, rows - i) for i in range(0, rows, block)]
        for c in [min(block, columns - i) for i in range(0, columns, block)]
    )
    assert held == whole * (n if zero == 0 else 1)
    assert log.count("all_to_all") <= (6 if zero and n > 1 else 0)


def test_a_matrix_that_is_not_finite_spoils_itself_alone():
    w = {"a": torch.ones(2, 3), "b": torch.ones(3, 2)}
    grads = {"a": torch.full((2, 3), torch.inf), "b": torch.ones(3, 2)}
    optimizer = ff.shampoo(0.1)
    after, _ = optimizer.apply(grads, optimizer.init(w), w)
    assert after["a"].isnan().all() and after["b"].isfinite().all()


def test_a_state_of_another_mesh_is_refused():
    shapes, optimizer = [[(4, 6), (5, 3)]], ff.shampoo(0.1)
    mesh = ff.make_mesh({"data": 2}, "simulated")
    alone = optimizer.init(drawn(shapes, 0))

    def main():
        step = ff.shard(
            lambda s, g: optimizer.apply(g, s.opt_state, s.params), mesh, "data"
        )
        _, state = trained(
            optimizer, shapes, 0, lambda step: ff.shard(step, mesh, "data")
        )
        laid = ff.place(ff.shard(lambda s: 0.0, mesh, "data"), alone)
        return step(ff.TrainState(state.params, laid), state.params)

    with pytest.raises(ValueError, match="lies as .*the matrix along .*ff.load"):
        ff.spmd(main, mesh)()
