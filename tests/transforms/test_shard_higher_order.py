"""Forward mode and per-sample gradients through sharded units, as on one device.

Products with the Hessian, and derivatives of derivatives, `tests/derivatives` has.
"""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.func import grad, hessian, jvp, vjp, vmap

import fsfunc as ff
from fsfunc import tree
from fsfunc.comm.mesh import here
from fsfunc.sharded.leaf import is_sharded
from tests.checks import close, on_ranks, simulated
from tests.models import affine, floats

# torch scripts its own forward-mode decompositions, and warns of it.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

WIDTH, RANKS = 3, 2
MESH, GRID = simulated(RANKS), simulated(node=2, data=2)
layer = ff.unit(lambda p, x: torch.tanh(affine(p, x)) * p["s"])
square = ff.unit(lambda p, x: (x * p["v"]) ** 2)


def loss_fn(params, x):
    return square(params["d"], layer(params["c"], layer(params["a"], x))).mean()


def wide(*shape, seed):
    return floats(*shape, seed=seed, dtype=torch.float64)


def one(k):
    return {"w": wide(3, 3, seed=k), "b": wide(3, seed=k + 1), "s": wide(seed=k + 2)}


PARAMS = {"a": one(0), "c": one(3), "d": {"v": wide(WIDTH, seed=6)}}
DATA = wide(4, WIDTH, seed=7)


def run(use, zero, *, remat=False, mesh=MESH, replicate=None):
    """``use(loss, params, x)`` under shard, on each rank, unsharded."""
    shard = lambda f: ff.shard(f, mesh, "data", zero=zero, replicate=replicate)  # noqa: E731
    step = lambda p, x: use(loss_fn, p, x)  # noqa: E731
    step = shard(ff.remat(step) if remat else step)
    return on_ranks(step, PARAMS, DATA, mesh=mesh, laid=shard(loss_fn))


def like(params, seed=3):
    """A direction of the same layout, made of each leaf's whole."""

    def one(path, leaf):
        whole = wide(*leaf.shape, seed=seed + len(path))
        if not is_sharded(leaf):
            return whole
        start, stop = leaf.layout.span(here().mesh.coordinates())
        return leaf.with_local(whole.reshape(-1)[start:stop])

    return tree.map_with_path(one, params, is_leaf=is_sharded)


def forward_over_reverse(loss, p, x):
    return jvp(lambda p: grad(loss)(p, x), (p,), (like(p),))[1]


def reverse_over_reverse(loss, p, x):
    _, pull = vjp(lambda p: ff.value_and_grad(loss)(p, x)[1], p)
    return pull(like(p))[0]


@pytest.mark.parametrize(
    ("use", "zero"), [(forward_over_reverse, 3), (reverse_over_reverse, 1)]
)
def test_a_hessian_product_over_replicas_is_that_of_one_device(use, zero):
    expected = forward_over_reverse(loss_fn, PARAMS, DATA)
    for found in run(use, zero, mesh=GRID, replicate="node"):
        close(found, expected, 1e-9)


def dual_numbers(loss, p, x):
    """jvp of the loss itself; the mean over ranks by hand."""
    return ff.pmean(jvp(lambda p: loss(p, x), (p,), (like(p),))[1], "data")


def forward_mode(loss, p, x):
    """The same by torch.autograd's dual numbers."""
    with forward_ad.dual_level():
        dual = tree.map(forward_ad.make_dual, p, like(p))
        return ff.pmean(forward_ad.unpack_dual(loss(dual, x)).tangent, "data")


@pytest.mark.parametrize(
    ("use", "zero"),
    [(dual_numbers, 0), (dual_numbers, 3), (forward_mode, 1), (forward_mode, 3)],
)
def test_a_jvp_is_that_of_one_device(use, zero):
    expected = jvp(lambda p: loss_fn(p, DATA), (PARAMS,), (like(PARAMS),))[1]
    for found in run(use, zero):
        close(found, expected, 1e-9)


def per_sample(loss):
    return vmap(grad(lambda p, sample: loss(p, sample[None])), in_dims=(None, 0))


@pytest.mark.parametrize(("zero", "remat"), [(0, True), (2, False), (3, True)])
def test_per_sample_gradients_in_a_whole_unit_are_those_of_one_device(zero, remat):
    """Each rank has those of its own samples, of all parameters."""
    each = ff.unit(per_sample(loss_fn), whole=True)
    expected = per_sample(loss_fn)(PARAMS, DATA)
    for rank, found in enumerate(run(lambda f, p, x: each(p, x), zero, remat=remat)):
        close(found, tree.map(lambda g, r=rank: g.chunk(RANKS)[r], expected), 1e-9)


def each_sample(loss, p, x):
    return vmap(lambda sample: loss(p, sample[None]))(x)


def curvature(loss, p, x):
    return hessian(lambda x: loss(p, x))(x)


@pytest.mark.parametrize(("use", "zero"), [(each_sample, 1), (curvature, 3)])
def test_what_is_of_inputs_alone_is_that_of_one_device(use, zero):
    for rank, found in enumerate(run(use, zero)):
        close(found, use(loss_fn, PARAMS, DATA.chunk(RANKS)[rank]), 1e-9)


def weighted(p, x):
    return ff.Weighted((square(p, x).sum(1) * x[:, 0]).sum(), x[:, 0].sum())


def adapted(p, x):
    """The loss after a step by its own gradient: MAML."""

    def loss(p):
        inner = ff.value_and_grad(weighted)(p, x)[1]
        return weighted(tree.map(lambda v, g: v - 0.1 * g, p, inner), x)

    return ff.value_and_grad(loss)(p)


def test_an_inner_gradient_of_a_weighted_loss_is_that_of_one_device():
    p, x = {"v": torch.ones(2)}, torch.tensor([[1.0, 2.0], [3.0, 1.0]])
    for found in on_ranks(ff.shard(adapted, MESH, "data"), p, x, mesh=MESH):
        close(found, adapted(p, x))
