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
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_reads_dims_is_refused_by_name_and_with_the_way_out(name):
    with pytest.raises(LawError, match=r"'w'.*ff\.unshard\(tree\)"):
        on_ranks(with_w(REFUSED[name]), PARAMS, X, mesh=MESH)


def test_a_map_over_leaves_of_unlike_sizes_is_refused_with_the_way_out():
    two = ff.unit(lambda p, x: torch.tanh(x @ p["a"]) @ p["b"])
    params = {"a": torch.ones(5, 2, 3), "b": torch.ones(5, 3, 1)}
    x = torch.ones(4, 2)

    def loss(p, x):
        return vmap(lambda w: two(w, x))(p).square().mean()

    step = ff.shard(ff.value_and_grad(loss), MESH, "data")
    with pytest.raises(LawError, match=r"map in a unit that has it whole"):
        on_ranks(step, params, x, mesh=MESH)
