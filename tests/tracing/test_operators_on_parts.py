"""Operators on parts of leaves: right, or refused by the leaf that they were given."""

import pytest
import torch
from torch.func import vmap

import fsfunc as ff
from fsfunc.comm.typed_maps import LawError
from tests.checks import close, on_ranks, simulated

MESH = simulated()


@ff.unit
def unit(p, x):
    return (x @ p["w"]).sum() + p["b"].sum()


PARAMS = {"b": torch.randn(7), "w": torch.rand(5, 3) + 0.5}
X = torch.randn(4, 5)


def with_w(fn):
    def step(params, x):
        return {**params, "w": ff.tree.map(fn, params["w"])}, unit(params, x)

    return ff.shard(step, MESH, "data")


ELEMENTWISE = {
    "floor_divide": lambda t: t // 0.2,
    "rsub": lambda t: torch.rsub(t, t, alpha=2),
    "hardswish": torch.nn.functional.hardswish,
    "abs of complex": lambda t: torch.complex(t, t).abs(),
    "abs of polar": lambda t: torch.polar(t, t).abs(),
    "alias_copy": torch.alias_copy,
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_elementwise_operator_is_that_of_the_whole_leaf(name):
    fn = ELEMENTWISE[name]
    for found, _ in on_ranks(with_w(fn), PARAMS, X, mesh=MESH):
        close(found["w"], fn(PARAMS["w"]))


REFUSED = {
    "sort": lambda t: torch.sort(t, 0)[0],
    "triu": torch.triu,
    "cumsum": lambda t: t.cumsum(1),
    "a column": lambda t: t[:, :1] + 0 * t,
    "matrix_norm": lambda t: t * torch.linalg.matrix_norm(t),
    "flatten": torch.flatten,
    "ravel": torch.ravel,
    "view": lambda t: (2 * t).view(-1),
    "unsqueeze": lambda t: t.unsqueeze(0),
    "an attribute": lambda t: t.mT,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_reads_dims_is_refused_by_name_and_with_the_way_out(name):
    with pytest.raises(LawError, match=r"'w'.*ff\.unshard\(tree\)"):
        on_ranks(with_w(REFUSED[name]), PARAMS, X, mesh=MESH)


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize(
    "fn",
    [lambda t: t.new_zeros(1), lambda t: t.new_ones(3), lambda t: torch.cat([t, t])],
    ids=["one number", "another size", "joined"],
)
def test_a_part_of_another_size_is_none_of_the_leaf(fn, zero):
    def step(params, x):
        return {**params, "w": ff.tree.map(fn, params["w"])}, unit(params, x)

    step = ff.shard(step, MESH, "data", zero=zero)
    told = r"(?s)the part of w .*on this rank, not .*ff\.lay_like|'w'.*ff\.lay_like"
    with pytest.raises((ValueError, LawError), match=told):
        on_ranks(step, PARAMS, X, mesh=MESH)


# Real and imaginary parts, which torch takes as views of pairs of real numbers


@ff.unit
def complex_unit(p, x):
    return (x.to(p["w"].dtype) @ p["w"]).abs().mean() + p["s"].abs() + p["b"].sum()


COMPLEX = {
    "b": torch.randn(3, dtype=torch.float64),
    "s": torch.randn((), dtype=torch.complex128),  # no rank but one has any of it
    "w": torch.randn(5, 3, dtype=torch.complex128),
}


def _written(t):
    t = t * 1
    t.real.mul_(3)
    t.imag = t.real * 2
    return t.abs()


OF_COMPLEX = {  # real results, linear in the parts and not
    "real": lambda t: t.real,
    "imag of a conjugate": lambda t: t.conj().imag,
    "both": lambda t: t.real + 3 * t.imag,
    "by itself": lambda t: (t * t.imag).real * t.abs(),
    "complex": lambda t: torch.complex(t.real, t.imag.sin()).abs(),
    "isfinite": lambda t: torch.where(torch.isfinite(t), t.real.square(), 0),
    "written": _written,
    "pairs": lambda t: torch.view_as_complex(torch.view_as_real(t).exp() * 2).abs(),
    "of pairs": lambda t: torch.view_as_real(t)[..., 1] * t.imag,
}


def of_each(fn, params):
    return ff.tree.map(lambda t: fn(t) if t.is_complex() else t.square(), params)


def _all(t):
    return sum(fn(t) for name, fn in OF_COMPLEX.items() if name != "all")


OF_COMPLEX["all"] = _all


@pytest.mark.parametrize(
    ("name", "zero"),
    [*((name, 3) for name in OF_COMPLEX), *(("all", z) for z in (0, 1, 2))],
)
def test_parts_of_complex_numbers_are_parts_forward_and_backward(name, zero):
    fn, mesh = OF_COMPLEX[name], simulated(3)

    def loss(params, x):
        return complex_unit(params, x) + ff.tree_sum(of_each(fn, params))

    def norms(params, x):  # a derivative of derivatives
        grads = ff.value_and_grad(loss)(params, x)[1]
        return ff.tree_sum(of_each(lambda g: g.abs().square(), grads))

    def step(params, x):
        by_torch = torch.func.grad(loss)(params, x)
        twice = torch.func.grad(norms)(params, x)
        _, grads = ff.value_and_grad(loss)(params, x)
        return of_each(fn, params), grads, by_torch, twice

    def whole(params, x):
        terms = ff.tree.leaves(of_each(fn, params))
        return complex_unit(params, x) + sum(y.sum() for y in terms)

    def whole_norms(params, x):
        grads = torch.func.grad(whole)(params, x).values()
        return sum(g.abs().square().sum() for g in grads)

    x = torch.randn(6, 5, dtype=torch.float64)
    grads = torch.func.grad(whole)(COMPLEX, x)
    expected = (
        of_each(fn, COMPLEX),
        grads,
        grads,
        torch.func.grad(whole_norms)(COMPLEX, x),
    )
    sharded = ff.shard(step, mesh, "data", zero=zero)
    for found in on_ranks(sharded, COMPLEX, x, mesh=mesh):
        close(found, expected, 1e-9)


AS_PAIRS = {
    "sum": lambda t: t * torch.view_as_real(t).sum(-1),
    "a row": lambda t: t * torch.view_as_real(t)[0],
    "beside the part": lambda t: torch.view_as_real(t) * t.real,
    "turned": lambda t: torch.view_as_real(t).transpose(-1, -2),
}


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("name", AS_PAIRS)
def test_pairs_of_real_numbers_are_no_dim_of_a_part(name, zero):
    params = {"b": torch.ones(1), "s": torch.ones(()), "w": COMPLEX["w"][:2, :2]}

    def step(params, x):
        w = ff.tree.map(AS_PAIRS[name], params["w"])
        return {**params, "w": w}, complex_unit(params, x)

    step = ff.shard(step, MESH, "data", zero=zero)
    with pytest.raises(LawError, match=r"'w'.*ff\.unshard\(tree\)"):
        on_ranks(step, params, torch.randn(4, 2), mesh=MESH)


def test_a_map_over_leaves_of_unlike_sizes_is_refused_with_the_way_out():
    two = ff.unit(lambda p, x: torch.tanh(x @ p["a"]) @ p["b"])
    params = {"a": torch.ones(5, 2, 3), "b": torch.ones(5, 3, 1)}
    x = torch.ones(4, 2)

    def loss(p, x):
        return vmap(lambda w: two(w, x))(p).square().mean()

    step = ff.shard(ff.value_and_grad(loss), MESH, "data")
    with pytest.raises(LawError, match=r"map in a unit that has it whole"):
        on_ranks(step, params, x, mesh=MESH)
