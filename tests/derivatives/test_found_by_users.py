"""Steps that once gave another number than one device, in silence: refused by name."""

import copy
import random

import numpy
import pytest
import torch
from torch.func import vjp

import fsfunc as ff
from fsfunc.comm.comparison import RanksDiffer
from fsfunc.tracing.rules import LawError, RowsApart, Unsteady
from tests import checks
from tests.derivatives.judging import by_turns, on

MESH = checks.simulated(2)
W = torch.ones(2, 1)
X = torch.tensor([[1.0, 0.0], [0.0, 9.0], [0.0, 0.0], [0.0, 0.0]])
unit = ff.unit(lambda w, x: x @ w)
each = ff.tree.map


def of_rows(rows, loss=lambda y: y.sum()):
    """The gradients of blocks of rows, clipped and summed."""

    def step(w, x):
        found = []
        for block in rows(x):
            g = ff.value_and_grad(lambda w, r: loss(unit(w, r)))(w, block)[1]
            found.append(each(lambda g: g.clamp(-1, 1), g))
        return each(lambda *gs: sum(gs) / len(gs), *found)

    return step


def weighed(weights):
    """One gradient for each row of a constant, by which the rows are weighed."""

    def step(w, x):
        found = []
        for c in weights(len(x)):
            loss = lambda w, x, c=c: (unit(w, x)[:, 0] * c).sum()  # noqa: E731
            g = ff.value_and_grad(loss)(w, x)[1]
            found.append(each(lambda g: g.clamp(-1, 1), g))
        return each(lambda *gs: sum(gs) / len(gs), *found)

    return step


def pulled(w, x):
    _, pull = vjp(lambda w: unit(w, x), w)
    found = [pull(e[:, None])[0] for e in torch.eye(len(x))]
    return each(lambda *gs: sum(g.clamp(-1, 1) for g in gs) / len(gs), *found)


def joined(how):
    """Gradients of rows, which meet in an operator that is linear in neither."""

    def step(w, x):
        gradient = ff.value_and_grad(lambda w, r: unit(w, r).sum())
        return each(how, *[gradient(w, r)[1] for r in x.split(1)])

    return step


def spread(*gs):
    mean = sum(gs) / len(gs)
    return sum((g - mean) ** 2 for g in gs)


one_of = lambda x, i: (torch.arange(len(x)) == i)[:, None]  # noqa: E731
ROWS = {
    "rolled": of_rows(lambda x: [x.roll(-i, 0)[:1] for i in range(len(x))]),
    "flipped": of_rows(lambda x: [x[:1], x.flip(0)[:1]]),
    "one-hot": of_rows(lambda x: [e @ x for e in torch.eye(len(x)).split(1)]),
    "masked": of_rows(
        lambda x: [torch.where(one_of(x, i), x, 0.0) for i in range(len(x))]
    ),
    "weighed": weighed(torch.eye),
    "pulled back": pulled,
    "maximum": joined(lambda *gs: torch.maximum(*gs[:2])),
    "product": joined(lambda *gs: gs[0] * gs[1]),
    "distance": joined(lambda *gs: gs[0].hypot(gs[1])),
    "variance": joined(spread),
    "stacked": joined(lambda *gs: torch.stack(gs).clamp(-1, 1).mean(0)),
}


def run(step, zero, given=W):
    return on(2, zero, step, given, laid=step, x=X)


@by_turns(ROWS)
def test_rows_told_apart(name, zero):
    with pytest.raises(LawError) as raised:
        run(ROWS[name], zero)
    assert zero or isinstance(raised.value, RowsApart) or name == "stacked"


def by_jacobian(change):
    def step(w, x):
        rows = torch.func.jacrev(lambda w: unit(w, x)[:, 0])(w)
        return each(lambda j: change(j) * torch.ones(j.shape[1:]), rows)

    return step


# By what is done with the rows of a Jacobian before they are clipped.
CLIPPED = {
    "nothing": lambda j: j.clamp(-1, 1).mean(0),
    "a sum along another dim": lambda j: j.transpose(0, 1).sum(0).clamp(-1, 1).mean(0),
    "the same of a copy": lambda j: (
        j.movedim(0, -1).contiguous().sum(0).clamp(-1, 1).mean(-1)
    ),
    "a sum by pairs": lambda j: j.view(2, -1, *j.shape[1:]).sum(0).clamp(-1, 1).mean(0),
    "rows of which there are others": lambda j: (
        (j[None] + j[:, None]).sum(0).clamp(-1, 1).mean(0)
    ),
}


@by_turns(CLIPPED, (0, 1, 3))
def test_a_jacobian_by_rows_is_not_clipped_after_the_mean(name, zero):
    with pytest.raises(LawError) as raised:
        run(by_jacobian(CLIPPED[name]), zero)
    assert zero or isinstance(raised.value, RowsApart)


ROWS_MEAN = {
    "as it is": lambda j: j.mean(0),
    "transposed": lambda j: j.transpose(0, 1).mean(1),
    "copied in another order": lambda j: j.movedim(0, -1).contiguous().mean(-1),
    "flat": lambda j: j.flatten(1).mean(0).view(j.shape[1:]),
    "of another stride": lambda j: (2 * j.movedim(0, -1)).mean(-1) / 2,
}


@pytest.mark.parametrize("name", ROWS_MEAN)
def test_a_mean_of_rows_of_a_jacobian_may_be_clipped(name):
    step = by_jacobian(lambda j: ROWS_MEAN[name](j).clamp(-0.1, 0.1))
    expected = step(W, X)
    for found in run(step, 0):
        torch.testing.assert_close(found, expected)


LINEAR = {
    "a mean, then clipped": lambda *gs: (sum(gs) / len(gs)).clamp(-1, 1),
    "a running mean": lambda *gs: torch.tanh(gs[0] + (gs[1] - gs[0]) / 2),
}


@pytest.mark.parametrize("name", LINEAR)
def test_what_is_linear_in_rows_stays(name):
    """Over ranks it is one device's, of the rows that meet in one mean."""
    step = joined(LINEAR[name])
    together = torch.stack(X.chunk(2)).mean(0)
    expected = joined(LINEAR[name])(W, together)
    for found in run(step, 0):
        torch.testing.assert_close(found, expected)


def cancelled(*gs):
    """Two sums of the same rows, of which one has none of the second left."""
    return (gs[0] + gs[1]).tanh() + (gs[0] + 0 * gs[1]).tanh()


@pytest.mark.parametrize("order", [1, -1])
def test_a_row_that_cancels_is_another_sum(order):
    with pytest.raises(RowsApart):
        run(joined(lambda *gs: cancelled(*gs[::order])), 0)


def by(change):
    """A step that makes something else of the gradients."""

    def step(w, x):
        g = ff.value_and_grad(lambda w, x: unit(w, x).square().mean())(w, x)[1]
        return each(change, w, g)

    return step


def first_row_kept(w, g):
    g = g.clone()
    g[0] = 0
    return w - g


ELEMENTS = {
    "a row": first_row_kept,
    "by the first row": lambda w, g: w - g / g[0],
    "some rows": lambda w, g: w - torch.cat([g[:1] * 2, g[1:]]),
    "row by row": lambda w, g: w - torch.stack([r / 2 for r in g]),
    "split": lambda w, g: w - torch.cat([r * i for i, r in enumerate(g.split(1))]),
    "a path of vectors": lambda w, g: w - (g / g.norm() if g.ndim == 1 else g),
    "its stride": lambda w, g: w - g / w.stride(0),
    "its memory": lambda w, g: w - g / w.nbytes,
    "its storage": lambda w, g: w - g / w.untyped_storage().nbytes(),
    "where it begins": lambda w, g: w - g * w.storage_offset(),
    "its dims' order": lambda w, g: w - g / len(w.dim_order()),
}


@by_turns(ELEMENTS)
def test_rows_and_shapes_are_not_those_of_elements(name, zero):
    with pytest.raises(LawError):
        run(by(ELEMENTS[name]), zero, torch.ones(2, 2))


@pytest.mark.parametrize("zero", [0, 3])
def test_one_number_expanded_to_a_part_is_one_value(zero):
    half = torch.tensor(0.5)
    run(by(lambda w, g: w - half.expand_as(g) * g), zero, torch.ones(2, 2))
    with pytest.raises(LawError, match="expand_as at"):
        own = by(lambda w, g: w - g)
        run(lambda w, x: each(lambda g: x.mean().expand_as(g) * g, own(w, x)), zero)


COPIES = {
    "into a copy": lambda g, own: g.clone().copy_(own),
    "into new memory": lambda g, own: torch.empty_like(g).copy_(own),
    "past autograd": lambda g, own: (part := g.clone()).data.copy_(own) * 0 + part,
}


@by_turns(COPIES)
def test_a_part_is_not_overwritten_by_a_ranks_own_number(name, zero):
    def step(w, x):
        g = ff.value_and_grad(lambda w, x: unit(w, x).square().mean())(w, x)[1]
        return each(lambda w, g: w - COPIES[name](g, x.mean()), w, g)

    with pytest.raises(LawError, match="differs from rank to rank"):
        run(step, zero or 1)


@pytest.mark.parametrize("zero", [1, 3])
def test_a_detached_gradient_is_a_part_too(zero):
    with pytest.raises(LawError, match="norm at "):
        run(by(lambda w, g: w - g / g.detach().norm()), zero)


@pytest.mark.parametrize("zero", [0, 3])
def test_a_vector_beside_a_matrix_hides_no_shape(zero):
    """They share memory."""
    both = ff.unit(lambda p, x: (x @ p["w"] + p["b"]).square().mean())

    def step(p, x):
        g = ff.value_and_grad(both)(p, x)[1]
        return each(lambda w, g: w - g - (0.5 * w if w.ndim > 1 else 0), p, g)

    with pytest.raises(LawError, match="ndim at "):
        run(step, zero, {"w": torch.ones(2, 2), "b": torch.ones(2)})


# What is each rank's own, from function to function


def observe(s, x):
    return {"w": s["w"], "f": x.mean()}


def train(s, x):
    g = ff.value_and_grad(lambda w, x: unit(w, x).square().mean())(s["w"], x)[1]
    return {"w": each(lambda w, g: w - s["f"] * g, s["w"], g), "f": s["f"]}


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("saved", [False, True])
def test_another_function_knows_it_after_a_load_too(zero, saved, tmp_path):
    def main():
        mine = ff.local_batch(X, MESH, "data")
        first, second = (ff.shard(f, MESH, "data", zero=zero) for f in (observe, train))
        begun, own = {"w": W, "f": torch.zeros(())}, {"f": ff.Own("data")}
        state = ff.place(first, begun, mine, layouts=own)
        found = first(state, mine)
        if saved:
            ff.save(tmp_path / "a", found)
            found = ff.load(tmp_path / "a", state)
        return second(found, mine)

    with pytest.raises(LawError, match="differs from rank to rank"):
        ff.spmd(main, MESH)()


@pytest.mark.parametrize("zero", [0, 3])
def test_an_init_state_knows_it_too(zero):
    optimizer = ff.sgd(0.1)

    def step(s, x):
        g = ff.value_and_grad(lambda w, x: unit(w, x).square().mean())(s.params, x)[1]
        g = each(lambda g: g / (1 + s.extra), g)
        return s.apply_gradients(g, optimizer, extra=x.square().mean()), None

    def main():
        mine = ff.local_batch(X, MESH, "data")
        sharded = ff.shard(step, MESH, "data", zero=zero)
        told = {"extra": torch.zeros(()), "layouts": {"extra": ff.Own("data")}}
        ff.init_state(sharded, W, optimizer, mine, **told)

    with pytest.raises(LawError, match="differs from rank to rank"):
        ff.spmd(main, MESH)()


# Python's own state


@pytest.mark.parametrize("zero", [0, 3])
def test_a_tensor_of_a_closure_is_written_once_a_call(zero):
    def averaging(kept):
        def step(w, x):
            kept.mul_(0.5).add_(X.mean(0), alpha=0.5)
            kept[0] += 1
            loss = lambda w, x: unit(w, x - kept).square().mean()  # noqa: E731
            return ff.value_and_grad(loss)(w, x)[1]

        return step

    alone = torch.full((2,), 3.0)
    expected = averaging(alone)(W, X)

    def main():
        kept = torch.full((2,), 3.0)
        mine = ff.local_batch(X, MESH, "data")
        sharded = ff.shard(averaging(kept), MESH, "data", zero=zero)
        found = sharded(ff.place(sharded, W, mine), mine)
        return ff.unshard(found), kept

    for found, kept in ff.spmd(main, MESH)():
        assert torch.equal(kept, alone)
        torch.testing.assert_close(found, expected)


def test_a_tensor_without_data_that_was_kept_is_named():
    kept = []

    def step(w, x):
        kept.append(by(lambda w, g: g)(w, x))
        return each(lambda *gs: sum(gs), *kept[-2:])

    with pytest.raises(Unsteady, match="returns a tensor without data at ''"):
        run(step, 0)


def test_python_on_each_element_is_refused_before_torch_crashes():
    with pytest.raises(RuntimeError, match="apply_ at .* with each element"):
        run(by(lambda w, g: g.clone().apply_(lambda v: 2 * v)), 3)


def test_a_deep_copy_of_parameters_lies_as_they_do():
    def step(w, x):
        return each(lambda o, n: (o + n) / 2, copy.deepcopy(w), by(torch.sub)(w, x))

    alone = (W + by(torch.sub)(W, X)) / 2
    for found in run(step, 3):
        torch.testing.assert_close(found, alone)


def written(g, x, params):
    params["scale"].data.add_(x.mean())
    return g


def of_scale(change):
    """Of a leaf that no unit takes, whose gradient is a plain tensor."""
    return lambda g, x, p: g | {"scale": change(g["scale"], x)}


OWN = {  # what a rank draws, and data that reach an update past leaves' operators
    "torch's noise": of_scale(lambda g, x: g + torch.randn(1)),
    "scaled by torch's": of_scale(lambda g, x: torch.rand(()) * g),
    "Python's noise": of_scale(lambda g, x: g * random.random()),
    "numpy's noise": of_scale(lambda g, x: g * float(numpy.random.rand())),
    "by keywords": of_scale(lambda g, x: torch.mul(input=g, other=x.mean())),
    "in its place": of_scale(lambda g, x: x.mean()[None]),
    "a part of the batch": of_scale(lambda g, x: x[0, :1]),
    "sent on": of_scale(
        lambda g, x: ff.ppermute(x.mean()[None], "data", [(0, 1), (1, 0)])
    ),
    "a factor": lambda g, x, p: ff.tree_scale(g, x.mean()),
    "laid like it": lambda g, x, p: ff.lay_like(
        each(lambda y: y * x.mean(), ff.unshard(g)), g
    ),
    "written past autograd": written,
}


@by_turns(OWN, (0, 1, 3))
def test_what_is_a_ranks_own_is_no_part_of_an_update(name, zero):
    params, optimizer = {"w": W, "scale": torch.ones(1)}, ff.sgd(0.5)

    def step(state, x):
        loss = lambda p, x: (unit(p["w"], x) * p["scale"]).square().mean()  # noqa: E731
        g = ff.value_and_grad(loss)(state.params, x)[1]
        return state.apply_gradients(OWN[name](g, x, state.params), optimizer)

    with pytest.raises(LawError, match="differs from rank to rank|not the same on"):
        run(step, zero, ff.TrainState(params, optimizer.init(params)))


def test_what_a_loss_gives_beside_its_value_is_no_factor():
    optimizer = ff.sgd(0.5)

    def step(state, x):
        loss = lambda w, x: (unit(w, x).square().mean(), (x > 0).sum())  # noqa: E731
        (_, count), g = ff.value_and_grad(loss, has_aux=True)(state.params, x)
        return state.apply_gradients(ff.tree_scale(g, count), optimizer)

    with pytest.raises(LawError, match="differs from rank to rank"):
        run(step, 3, ff.TrainState(W, optimizer.init(W)))


# What a rank has before the step, and a step closes over


def gradient(w, x):
    return ff.value_and_grad(lambda w, x: unit(w, x).square().mean())(w, x)[1]


def by_a_scale(rank):
    share = torch.tensor(1.0 + rank)
    return lambda w, x: each(torch.sub, w, ff.tree_scale(gradient(w, x), share / 8))


def by_noise(rank):
    own = torch.Generator().manual_seed(rank)
    return lambda w, x: each(torch.sub, gradient(w, x), ff.randn_like(w, generator=own))


def by_a_layout(rank):
    mine = torch.full((2, 1), 1.0 + rank)
    return lambda w, x: each(torch.sub, gradient(w, x), ff.lay_like(mine, w))


def by_an_optimizer(rank):
    optimizer = ff.sgd(0.1 * (1 + rank))
    return lambda w, x: optimizer.apply(gradient(w, x), optimizer.init(w), w)[0]


def by_its_updates(rank):
    optimizer = ff.sgd(0.1 * (1 + rank))
    return lambda w, x: each(
        torch.add, w, optimizer.update(gradient(w, x), optimizer.init(w), w)[0]
    )


BEFORE = [by_a_scale, by_noise, by_a_layout, by_an_optimizer, by_its_updates]


@pytest.mark.parametrize("made", BEFORE)
def test_what_differs_between_ranks_before_the_step(made):
    """It stayed unseen: of each part there is one."""

    def main():
        step = ff.shard(made(ff.axis_index("data")), MESH, "data")
        mine = ff.local_batch(X, MESH, "data")
        return step(ff.place(step, W, mine), mine)

    with pytest.raises((LawError, RanksDiffer), match="rank"):
        ff.spmd(main, MESH)()


@pytest.mark.parametrize("zero", [0, 3])
def test_a_list_of_gradients_by_autograd_is_of_parts(zero):
    def step(w, x):
        leaves, structure = ff.tree.flatten(w)
        leaves = [a.detach().requires_grad_(True) for a in leaves]
        y = unit(ff.tree.unflatten(structure, leaves), x)
        return list(torch.autograd.grad(y.sum(), leaves))

    with pytest.raises(LawError, match="as a plain tensor"):
        run(step, zero)


def parts_of(values):
    out = []
    each(out.append, values)
    return out


@pytest.mark.parametrize(
    "returned",
    [
        lambda w, g: (1, parts_of(g)[0]),
        lambda w, g: (*parts_of(w), 1),
    ],
)
def test_parts_in_a_tuple_are_refused_as_in_a_list(returned):
    with pytest.raises(LawError, match="as a plain tensor"):
        run(lambda w, x: returned(w, gradient(w, x)), 1)
