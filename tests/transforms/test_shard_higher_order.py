"""Through a sharded unit, any order of derivative is that of one device."""

import functools

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.func import grad, hessian, jvp, vjp, vmap

import fsfunc as ff
from fsfunc import tree
from fsfunc.comm.mesh import here
from fsfunc.sharded.leaf import is_sharded
from tests.checks import close, on_ranks

# torch scripts its own forward-mode decompositions, and warns of it.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

WIDTH, RANKS = 3, 2
MESH = ff.make_mesh({"data": RANKS}, "simulated")
GRID = ff.make_mesh({"node": 2, "data": 2}, "simulated")
ZEROS = pytest.mark.parametrize("zero", [0, 1, 2, 3])


@ff.unit
def layer(p, x):
    return torch.tanh(x @ p["w"] + p["b"]) * p["s"]


@ff.unit
def square(p, x):
    return (x * p["v"]) ** 2


def loss_fn(params, x):
    h = layer(params["a"], x)
    h = layer(params["c"], h) if "c" in params else h
    return square(params["d"], h).mean()


def params_of(seed=0):
    draw = torch.Generator().manual_seed(seed)
    rand = lambda *s: torch.randn(s, generator=draw, dtype=torch.float64)  # noqa: E731
    one = lambda: {"w": rand(WIDTH, WIDTH), "b": rand(WIDTH), "s": rand()}  # noqa: E731
    return {"a": one(), "c": one(), "d": {"v": rand(WIDTH)}}


def data(ranks=RANKS):
    draw = torch.Generator().manual_seed(5)
    return torch.randn(2 * ranks, WIDTH, generator=draw, dtype=torch.float64)


def run(use, zero, *, remat=False, mesh=MESH, replicate=None):
    """``use(loss, params, x)`` under shard, on each rank, unsharded."""
    shard = functools.partial(
        ff.shard, mesh=mesh, axis="data", zero=zero, replicate=replicate
    )
    step = lambda p, x: use(loss_fn, p, x)  # noqa: E731
    step = shard(ff.remat(step) if remat else step)
    return on_ranks(step, params_of(), data(mesh.size), mesh=mesh, laid=shard(loss_fn))


def like(params, seed=3):
    """A direction of the same layout, made of each leaf's whole."""

    def one(path, leaf):
        draw = torch.Generator().manual_seed(seed + len(path))
        whole = torch.randn(leaf.shape, generator=draw, dtype=torch.float64)
        if not is_sharded(leaf):
            return whole
        start, stop = leaf.layout.span(here().mesh.coordinates())
        return leaf.with_local(whole.reshape(-1)[start:stop])

    return tree.map_with_path(one, params, is_leaf=is_sharded)


def forward_over_reverse(loss, p, x):
    return jvp(lambda p: grad(loss)(p, x), (p,), (like(p),))[1]


def reverse_over_reverse(loss, p, x):
    _, pull = vjp(lambda p: grad(loss)(p, x), p)
    return pull(like(p))[0]


def value_and_grad_inside(loss, p, x):
    _, pull = vjp(lambda p: ff.value_and_grad(loss)(p, x)[1], p)
    return pull(like(p))[0]


def dual_numbers(loss, p, x):
    """jvp of the loss itself; the mean over ranks by hand."""
    return ff.pmean(jvp(lambda p: loss(p, x), (p,), (like(p),))[1], "data")


def forward_mode(loss, p, x):
    """The same by torch.autograd's dual numbers."""
    with forward_ad.dual_level():
        dual = tree.map(forward_ad.make_dual, p, like(p))
        return ff.pmean(forward_ad.unpack_dual(loss(dual, x)).tangent, "data")


@ZEROS
@pytest.mark.parametrize(
    "use", [forward_over_reverse, reverse_over_reverse, value_and_grad_inside]
)
@pytest.mark.parametrize("mesh", [MESH, GRID], ids=["line", "grid"])
def test_a_hessian_product_is_that_of_one_device(use, zero, mesh):
    expected = forward_over_reverse(loss_fn, params_of(), data(mesh.size))
    for found in run(use, zero, mesh=mesh, replicate="node" if mesh is GRID else None):
        close(found, expected, 1e-9)


@ZEROS
@pytest.mark.parametrize("use", [dual_numbers, forward_mode])
def test_a_jvp_is_that_of_one_device(use, zero):
    p = params_of()
    expected = jvp(lambda p: loss_fn(p, data()), (p,), (like(p),))[1]
    for found in run(use, zero):
        close(found, expected, 1e-9)


def per_sample(loss):
    one = lambda p, sample: loss(p, sample[None])  # noqa: E731
    return vmap(grad(one), in_dims=(None, 0))


@ZEROS
@pytest.mark.parametrize("remat", [False, True])
def test_per_sample_gradients_in_a_whole_unit_are_those_of_one_device(zero, remat):
    """Each rank has those of its own samples, of all parameters."""
    each = ff.unit(per_sample(loss_fn), whole=True)
    expected = per_sample(loss_fn)(params_of(), data())
    for rank, found in enumerate(run(lambda f, p, x: each(p, x), zero, remat=remat)):
        close(found, tree.map(lambda g, r=rank: g.chunk(RANKS)[r], expected), 1e-9)


@ZEROS
def test_per_sample_gradients_outside_a_unit_would_mix_the_ranks_and_are_refused(zero):
    with pytest.raises(ValueError, match="per-sample .* by 'a/b', .*whole=True"):
        run(lambda f, p, x: per_sample(f)(p, x), zero)


def each_sample(loss, p, x):
    return vmap(lambda sample: loss(p, sample[None]))(x)


def curvature(loss, p, x):
    return hessian(lambda x: loss(p, x))(x)


@ZEROS
@pytest.mark.parametrize("use", [each_sample, curvature])
def test_what_is_of_inputs_alone_is_that_of_one_device(use, zero):
    for rank, found in enumerate(run(use, zero)):
        close(found, use(loss_fn, params_of(), data().chunk(RANKS)[rank]), 1e-9)
